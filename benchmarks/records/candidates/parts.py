"""Parts that were tried for a record: weights estimated from the batch, a baseline per image, and a
noise level that changes.
"""

from dataclasses import dataclass

import torch

from flowrl.core.experience import Needs
from flowrl.credit import CalibratedGain, Uniform, zscore
from flowrl.credit.calibrated import calibration, gain_and_last_columns, predictions
from flowrl.credit.table import centred
from flowrl.probes import Tweedie
from flowrl.samplers import FlowSDE
from flowrl.samplers.kernels import euler_maruyama, step_times


@dataclass(frozen=True)
class BatchWeights:
    """Weights sqrt(r2_{k+1} - r2_k) std_k, for the baseline over 1 - r2_k, with mean 1.

    r2_k is the squared correlation of the value with the reward in this batch, made to rise with k.
    They are the best weights if noise dominates and decisions pull in the same direction.
    """

    baseline: bool = True
    probe = Tweedie()
    needs = Needs(columns=gain_and_last_columns)

    def assign(self, values, decisions):
        """Advantages [prompt, member, decision]."""
        mask = decisions.mask
        rule = CalibratedGain(gain_weight=0.0) if self.baseline else Uniform()
        credit = rule.assign(values, decisions)
        credit = getattr(credit, "advantages", credit)
        known = mask.any(-1, keepdim=True).expand_as(values)
        r2 = calibration(centred(values.nan_to_num(), ("member",), known)).r2[0, 0]
        r2 = torch.where(values.isfinite().all(0).all(0), r2, 0.0).cummax(0).values
        gain = (r2[1:] - r2[:-1]).clamp(min=0.01).sqrt().to(decisions.std)
        weights = gain * decisions.std
        if self.baseline:
            weights = weights / (1.0 - r2[:-1]).clamp(min=0.1).to(weights)
        weights = weights / weights[decisions.trained].mean()
        return credit * weights.clamp(max=5.0).to(credit)


def first_and_last(mask):
    """The columns of the first state and of the final reward."""
    columns = torch.zeros(*mask.shape[:-1], mask.shape[-1] + 1, dtype=torch.bool)
    columns[..., 0] = columns[..., -1] = True
    return columns.to(mask.device) & mask.any(-1, keepdim=True)


@dataclass(frozen=True)
class FirstValue:
    """One advantage per image: Z(R - s V_0), with the calibrated value of its initial noise."""

    probe = Tweedie()
    needs = Needs(columns=first_and_last)

    def assign(self, values, decisions):
        """Advantages [prompt, member, decision]."""
        mask = decisions.mask
        ends = values[..., [0, -1]]
        known = mask.any(-1, keepdim=True).expand_as(ends)
        predicted, _ = predictions(ends, False, known)
        credit = (predicted[..., 1:] - predicted[..., :1]).expand(mask.shape)
        return zscore(credit, ("member",), mask=mask)


@dataclass(frozen=True)
class Levels(FlowSDE):
    """Flow-SDE with a noise level that goes linearly from `first` at t = 1 to `last` at t = 0."""

    noise_level: float = 1.0
    first: float = 1.0
    last: float = 1.0

    def transition(self, latent, velocity, schedule, step):
        """Node `step + 1`: mean [sample, *latent] and std [sample]."""
        t, s = step_times(schedule, step, latent.device)
        level = self.noise_level * (self.last + (self.first - self.last) * t)
        below_one = torch.where(t > 1.0 - 1e-6, s, t)
        return euler_maruyama(latent, velocity, t, s, level * (t / (1.0 - below_one)).sqrt())

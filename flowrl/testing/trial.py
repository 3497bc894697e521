"""A short trial of the user's own parts at the start of a run: contract checks, and a few scores
computed again.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.protocols import AnyReward, GroupReward, MultistepSolver
from flowrl.core.types import Prompt
from flowrl.methods import objective_of
from flowrl.rollout.values import score
from flowrl.run.build import run_method, trial_stds
from flowrl.run.config import RunConfig
from flowrl.run.evaluation import Inspect
from flowrl.run.parts.registry import build
from flowrl.run.parts.trust import own_parts
from flowrl.testing.contract import Contract
from flowrl.testing.credit import CreditContract
from flowrl.testing.losses import ForwardLossContract, PolicyLossContract
from flowrl.testing.probe import ProbeContract
from flowrl.testing.samplers import SamplerContract, SolverContract, WindowContract

SECONDS = 5.0
"""Time of the trial of all parts."""
SHARE = 0.05
"""Largest difference of a score that is computed again, in standard deviations of its batch."""
SEVERE = frozenset(
    {
        *("declares_what_it_needs", "returns_a_scalar", "is_pure", "starts_along_the_advantage"),
        *("trains_zero_advantages_as_declared", "differentiates_the_new_policy_only"),
        *("draws_times", "returns_a_gaussian_per_sample", "treats_samples_separately"),
        *("has_one_std_per_step", "moves_along_the_path", "passes_gradient_through_the_mean"),
        *("keeps_the_number_of_steps", "returns_states", "starts_anew", "converges"),
        *("ends_at_the_predicted_image", "returns_steps", "draws_reproducibly"),
        *("declares_a_probe", "leaves_its_input_alone", "returns_advantages_per_decision"),
        *("reads_only_what_its_probe_fills", "treats_members_alike", "pays_the_better_member"),
        *("is_a_probe", "estimates_final_latents", "fills_what_it_says"),
        *("leaves_the_rollout_alone", "does_not_depend_on_chunks"),
    }
)
"""Promises that stop a run if they are broken. Others matter in some runs only, or a part may break
them on purpose (as random credit does): the trial warns.
"""
REFUSED = "it raised ConfigError"
"""In the message of a finding: the part refuses the data of the promise."""
GO_ON = "If this is intended, add --no-trial (trial=False in Python)"
Warn = Callable[[str], None]


def try_parts(
    configs: Iterable[RunConfig], warn: Warn = lambda text: None, seconds: float = SECONDS
) -> None:
    """Check the losses, samplers, windows, rules and probes in `configs` that are not built in
    against their contracts.

    Args:
        configs: the runs; a part that several of them have is tried once.
        warn: called with a line per finding that stops no run.
        seconds: no check is begun after this time.

    Raises:
        ConfigError: a part breaks a promise; the message names the part, what was found and what is
            expected.
    """
    tried, deadline = set[tuple[str, str]](), time.monotonic() + seconds
    for config in configs:
        for setting, kind, spec in own_parts(config.flat()):
            known = (setting, spec.text) in tried
            if setting in ("loss", "sampler", "window", "credit") and not known:
                tried.add((setting, spec.text))
                # the run's part of the setting, also for a loss's training times; or one inside it
                made = spec.text == getattr(config.algorithm, setting) or kind == "times"
                part = getattr(run_method(config), setting) if made else build(kind, spec.text)
                _try_part(config, f"{setting}: {spec.text}", kind, part, warn, deadline)


def _try_part(
    config: RunConfig, name: str, kind: str, part: Any, warn: Warn, deadline: float
) -> None:
    """Try one part, severe promises first; `warn` of what does not stop the run."""
    check, contract = _contract(config, kind, part)
    doubtful = []
    for finding in contract.tried(SEVERE, deadline):
        if (
            finding.mark == "BROKEN"
            and finding.promise in SEVERE
            and REFUSED not in finding.message
        ):
            raise ConfigError(
                f"{name} failed the trial before the run: {finding.message.rstrip('.')}."
                f" {check} shows all findings. {GO_ON}"
            )
        if finding.mark == "advice":
            warn(f"{name}: {finding.message}")
        elif not finding.ok:
            doubtful.append(finding.promise)
    if doubtful:
        why = f"promises that are broken, or were not tried within {SECONDS:g} s"
        warn(f"{name}: {why}: {', '.join(doubtful)}; {check} explains them")


def _contract(config: RunConfig, kind: str, part: Any) -> tuple[str, Contract]:
    """The function that checks a part, and its contract with the sizes of the run."""
    steps, members = config.rollout.num_steps, config.rollout.group_size
    if kind in ("loss", "times"):
        forward = objective_of(part).draws_times
        kind = "forward_loss" if forward else "loss"
        contract = (ForwardLossContract if forward else PolicyLossContract)(part)
    elif kind == "sampler" and isinstance(part, MultistepSolver):
        kind, contract = "solver", SolverContract(part)
    elif kind == "credit":
        contract = CreditContract(part, max(1, int((trial_stds(config) > 0).sum())))
    elif kind == "probe":
        contract = ProbeContract(part, members=members)
    else:
        limits = ("makes_decisions",)  # the ODE samples for forward-process losses
        contract = (
            SamplerContract(part, steps, without=limits)
            if kind == "sampler"
            else WindowContract(part, steps)
        )
    return f"flowrl.testing.check_{kind}", contract


def reward_trial(
    config: RunConfig, reward: AnyReward, warn: Warn = lambda text: None, heldout: str = ""
) -> Inspect | None:
    """A function that tries a reward of the user on its first batch of images; None if the reward
    is built in.

    It scores the negatives of two samples, to see that they keep their values, then the samples in
    swapped order (of a reward that compares samples, two groups with their members in reverse).

    Args:
        config: the run.
        reward: its reward.
        warn: called with a line if the reward is random.
        heldout: the held-out reward's spec; empty for the training reward.

    Returns:
        A function of images, prompts and scores. It raises `ConfigError` if images change, or
        if the new scores differ by more than `SHARE` of the batch's standard deviation, and scores
        of the same samples in the same order do not.
    """
    setting, spec = (
        "heldout_rewards" if heldout else "reward",
        heldout or config.environment.sources.reward,
    )
    if not any(own_parts({setting: spec})):
        return None
    name, grouped = f"{setting}: {spec}", isinstance(reward, GroupReward)
    members = config.rollout.group_size if grouped else 1

    def inspect(images: Tensor, prompts: Sequence[Prompt], scores: Tensor) -> None:
        scores = scores.cpu()
        table = scores.view(-1, members)
        valid = table.isfinite().all(1).nonzero().flatten()
        if len(valid) < 2:
            return
        order = valid[table[valid].mean(1).argsort()]
        # the best and one in the middle: not symmetric about the batch's mean
        groups = order[[-1, (len(order) - 1) // 2]]
        rows = (groups[:, None] * members + torch.arange(members).flip(0)).flatten()
        chosen = [prompts[row] for row in rows[::members].tolist()]

        def gaps(expected: Tensor) -> Tensor:
            again = score(reward, images[rows], chosen).total.cpu()
            return (again - expected).abs().nan_to_num(torch.inf)

        others = 1 - images[rows]  # those of the batch may have been changed already
        kept = others.clone()
        with torch.random.fork_rng(devices=[]):
            score(reward, others, chosen)
            if not torch.equal(others, kept):
                raise ConfigError(
                    f"{name} failed the trial at its first scores: it changed its images in place;"
                    f" work on a copy (tensor.clone()). {GO_ON}"
                )
            finite = scores[scores.isfinite()]
            limit = max(SHARE * float(finite.std(unbiased=False)), 1e-3 * float(finite.abs().max()))
            gap = float(gaps(scores[rows]).max())
            if gap <= limit:
                return
            first = score(reward, images[rows], chosen).total.cpu()
            repeated = max(float(gaps(first).max()) for _ in range(3))
        if repeated > gap / 10:
            warn(f"{name}: the reward is random: scores repeat within {repeated:.3g} only")
            return
        raise ConfigError(
            f"{name} failed the trial at its first scores: a score depends on the batch or on its"
            f" order. {len(rows)} of {len(scores)} samples scored again in another order differ by"
            f" {gap:.2g}; expected: the same within {limit:.2g} (5% of the batch's standard"
            " deviation). Is something normalised over the batch, or are results out of order?"
            f" flowrl.testing.check_{'group_' * grouped}reward gives details. {GO_ON}"
        )

    return inspect

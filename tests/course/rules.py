"""Rules made of functions, for the lessons on credit rules of one's own."""

import torch

from flowrl.credit import zscore
from flowrl.probes import Tweedie


def rule(function, probe=None, shared=True):
    """A rule made of one function of the table and the mask."""

    class Rule:
        shared_noise = shared

        def assign(self, values, decisions):
            return function(values, decisions.mask)

    Rule.probe = Tweedie() if probe is None else probe
    return Rule


def scored(y, mask, over=("member",), std_over=None):
    return zscore(y, over, std_over, mask=mask)


def joint(y, mask):
    return scored(y, mask, ("member", "decision"))


def one_std(y, mask):
    return scored(y, mask, ("member",), ("member", "decision"))


def centred(y, mask):
    known = y.masked_fill(~mask, torch.nan)
    return known - known.nanmean(1, keepdim=True)


def std_after(y, mask):
    deviations = centred(y, mask)
    return deviations / (deviations.square().nanmean((1, 2), keepdim=True).sqrt() + 1e-4)

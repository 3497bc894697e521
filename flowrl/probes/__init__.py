"""Probes: how a rollout scores unfinished states for a credit rule. docs/guides/extend.md explains
how to write one.
"""

from flowrl.core.probe import (
    Call,
    Cost,
    Estimates,
    Grid,
    Key,
    NetworkUse,
    NoProbe,
    Probe,
    Probing,
    Scored,
    Shape,
    Solver,
    ValueProbe,
)
from flowrl.probes.branching import Branch, Branching, Comb
from flowrl.probes.critic import Critic, LatentReward
from flowrl.probes.solved import Completion, Continuation, ODEProbe, Substeps, Tweedie

__all__ = [
    "Branch",
    "Branching",
    "Call",
    "Comb",
    "Completion",
    "Continuation",
    "Cost",
    "Critic",
    "Estimates",
    "Grid",
    "Key",
    "LatentReward",
    "NetworkUse",
    "NoProbe",
    "ODEProbe",
    "Probe",
    "Probing",
    "Scored",
    "Shape",
    "Solver",
    "Substeps",
    "Tweedie",
    "ValueProbe",
]

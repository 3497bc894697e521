"""A short trial of the user's own parts at the start of a run: contract checks, and a few scores
computed again.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.protocols import AnyReward, ForwardLoss, GroupReward, MultistepSolver
from flowrl.core.types import Prompt
from flowrl.parts.registry import build
from flowrl.parts.trust import own_parts
from flowrl.rollout.values import Inspect, score_components
from flowrl.testing import credit, forward_loss, loss, probe, sampler, solver, window
from flowrl.testing.findings import OVER, Contract, maker
from flowrl.training.build import run_method, trial_stds
from flowrl.training.config import RunConfig

SECONDS = 5.0
"""Time of the trial of all parts."""
SHARE = 0.05
"""Largest difference of a score that is computed again, in standard deviations of its batch."""
MILD = frozenset(
    {
        "reports_detached_metrics",
        "ignores_rows_of_weight_0",
        "ignores_deterministic_rows",
        "survives_weights_of_0",
        "starts_at_ratio_one",
        "is_a_weighted_mean",
        "adds_up_over_parts",
        "does_not_depend_on_resolution",
        "balances_groups",
        "says_whether_it_needs_the_reference",
        "computes_in_float32",
        "knows_no_tiny_noise",
        "is_finite_at_every_step",
        "costs_what_it_declares",
        "is_deterministic",
        "reads_nothing_outside_the_mask",
        "leaves_out_masked_members",
        "ignores_a_constant",
        "treats_prompts_alike",
        "gives_a_silent_group_zero",
        "survives_extremes",
        "accepts_double_precision",
        "keeps_its_memory",
        "follows_prompts",
        "agrees_with_its_assign",
        "credits_components",
    }
)
"""Promises that matter in some runs only, or that a part may break on purpose (as random credit
does): the trial warns.
"""
WITHOUT = frozenset({"makes_decisions"})
"""Promises that are no subject of the trial: the ODE samples for forward-process losses."""
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
    for config in (one.allowed() for one in configs):
        for setting, kind, spec in own_parts(config.flat()):
            if (setting, spec.text) not in tried and setting in (
                "loss",
                "sampler",
                "window",
                "credit",
            ):
                tried.add((setting, spec.text))
                _try_part(
                    config,
                    f"{setting}: {spec.text}",
                    kind,
                    _part(config, setting, kind, spec.text),
                    warn,
                    deadline,
                )


def _part(config: RunConfig, setting: str, kind: str, text: str) -> Any:
    """The run's part of a `setting`, or a part in its options; the whole loss for its training
    times.
    """
    whole = text == getattr(config.algorithm, setting) or kind == "times"
    return getattr(run_method(config), setting) if whole else build(kind, text)


def _try_part(
    config: RunConfig, name: str, kind: str, part: Any, warn: Warn, deadline: float
) -> None:
    """Try one part; `warn` of what does not stop the run."""
    contract, make, check = _contract(config, kind, part)
    names = {promise.name for promise in contract.promises}
    severe = contract.findings(lambda: make(True), [*names & (WITHOUT | MILD)], deadline)
    untried = [
        found.promise for found in severe if found.message == OVER or REFUSED in found.message
    ]
    for found in severe:
        if found.tried and not found.ok and found.promise not in untried:
            raise ConfigError(
                f"{name} failed the trial before the run: {found.message.rstrip('.')}."
                f" {check} shows all findings. {GO_ON}"
            )
        if found.mark == "advice":
            warn(f"{name}: {found.message}")
    mild = contract.findings(lambda: make(False), [*names - MILD], deadline)
    untried += [
        found.promise for found in mild if found.message == OVER or REFUSED in found.message
    ]
    broken = [promise for promise in mild.broken if promise not in untried]
    if broken:
        warn(
            f"{name}: promises that matter in some runs are not kept: {', '.join(broken)}; {check}"
            " explains them"
        )
    if untried:
        why = f"{SECONDS:g} s were over, or the part refuses their data"
        count = f"{len(untried)} of {len(names - WITHOUT)} promises were not tried"
        warn(f"{name}: {count} ({why}): {', '.join(untried)}; {check} tries all")


REFUSED = "it raised ConfigError"
"""In the message of a finding: the part refuses the data of the check."""


def _contract(
    config: RunConfig, kind: str, part: Any
) -> tuple[Contract, Callable[[bool], Any], str]:
    """The contract of a part, a maker of its case with the sizes of the run (True: all members are
    valid), and the function that checks it.
    """
    fresh, steps = maker(part), config.rollout.num_steps
    if kind in ("loss", "times"):
        forward = isinstance(part, ForwardLoss)
        name = "forward_loss" if forward else "loss"
        return (
            (forward_loss if forward else loss).CONTRACT,
            lambda whole: fresh(),
            f"flowrl.testing.check_{name}",
        )
    if kind == "sampler" and isinstance(part, MultistepSolver):
        return solver.CONTRACT, lambda whole: solver.Case(fresh()), "flowrl.testing.check_solver"
    decisions = max(1, int((trial_stds(config) > 0).sum()))
    cases: dict[str, tuple[Contract, Callable[[bool], Any]]] = {
        "sampler": (sampler.CONTRACT, lambda whole: sampler.Case(fresh(), steps)),
        "window": (window.CONTRACT, lambda whole: window.Case(fresh(), steps)),
        "probe": (
            probe.CONTRACT,
            lambda whole: probe.Case(fresh(), None, config.rollout.group_size),
        ),
        "credit": (credit.CONTRACT, lambda whole: credit.Case(fresh(), decisions, whole)),
    }
    return *cases[kind], f"flowrl.testing.check_{kind}"


def reward_trial(
    config: RunConfig, reward: AnyReward, warn: Warn = lambda text: None, heldout: str = ""
) -> Inspect | None:
    """A function that tries a reward of the user on its first batch of images; None if the reward
    is built in.

    It scores two samples again in swapped order (of a reward that compares samples, two groups with
    their members in reverse).

    Args:
        config: the run.
        reward: its reward.
        warn: called with a line if the reward is random.
        heldout: the held-out reward's spec; empty for the training reward.

    Returns:
        A function of images, prompts and scores. It raises `ConfigError` if the new scores differ
        by more than `SHARE` of the batch's standard deviation, and scores of the same samples in
        the same order do not.
    """
    setting, spec = "heldout_rewards" if heldout else "reward", heldout or config.environment.reward
    if not any(own_parts({setting: spec})):
        return None
    name, members = (
        f"{setting}: {spec}",
        config.rollout.group_size if isinstance(reward, GroupReward) else 1,
    )

    def again(images: Tensor, prompts: Sequence[Prompt], rows: list[int]) -> Tensor:
        some = [prompts[row] for row in rows]
        if isinstance(reward, GroupReward):
            return score_components(reward, images[rows], some[::members]).total.cpu()
        return score_components(reward, images[rows], some).total.cpu()

    def inspect(images: Tensor, prompts: Sequence[Prompt], scores: Tensor) -> None:
        with torch.random.fork_rng(devices=[]):
            compare(images, prompts, scores)

    def compare(images: Tensor, prompts: Sequence[Prompt], scores: Tensor) -> None:
        scores = scores.cpu()
        valid = scores.isfinite().view(-1, members).all(1).nonzero().flatten()
        if len(valid) < 2 and members == 1:
            return
        order = valid[scores.view(-1, members)[valid].mean(1).argsort()].tolist()
        # not symmetric about the batch's mean
        chosen = dict.fromkeys((order[-1], order[(len(order) - 1) // 2]))
        rows = [group * members + member for group in chosen for member in reversed(range(members))]
        found, expected = again(images, prompts, rows), scores[rows]
        seen = scores[scores.isfinite()]
        limit = max(SHARE * float(seen.std(unbiased=False)), 1e-3 * float(seen.abs().max()))
        gap = float((found - expected).abs().nan_to_num(torch.inf).max())
        if gap <= limit:
            return
        repeated = max(
            float((again(images, prompts, rows) - found).abs().nan_to_num(torch.inf).max())
            for _ in range(3)
        )
        count, place = len(scores), int((found - expected).abs().nan_to_num(torch.inf).argmax())
        if repeated > gap / 10:
            warn(
                f"{name}: the reward is random: the same {len(rows)} samples scored again differ by"
                f" up to {repeated:.3g}"
            )
            return
        raise ConfigError(
            f"{name} failed the trial at its first scores: a score depends on the batch or on"
            f" its order. A sample scored {float(expected[place]):.4g} among {count}, and"
            f" {float(found[place]):.4g} among {len(rows)} in another order; expected: the same"
            f" within {limit:.2g} (5% of the batch's standard deviation). Is something normalised"
            " over the batch, or are results out of order?"
            f" flowrl.testing.check_{'group_' * (members > 1)}reward tells more. {GO_ON}"
        )

    return inspect

"""A short trial of the user's own parts at the start of a run: contract checks, and a few scores computed again."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.protocols import AnyReward, ForwardLoss, GroupReward, MultistepSolver
from flowrl.registry import build
from flowrl.rollout.values import Inspect, score_components, score_group_components
from flowrl.training.build import run_method, trial_stds
from flowrl.training.config import RunConfig
from flowrl.trust import own_parts
from flowrl.types import Prompt

SECONDS = 5.0
"""Time of the trial of all parts."""
SHARE = 0.05
"""Largest difference of a score that is computed again, in standard deviations of its batch."""
OWN_WAYS = {"credit": ("leaves_out_masked_members", "treats_prompts_alike", "ignores_a_constant")}
"""Promises by kind that a useful part may break on purpose: the trial warns."""
WITHOUT = ("makes_decisions",)
"""Promises that are no subject of the trial: the ODE samples for forward-process losses."""
GO_ON = "If this is intended, add --no-trial (trial=False in Python)"
Warn = Callable[[str], None]


def try_parts(configs: Iterable[RunConfig], warn: Warn = lambda text: None, seconds: float = SECONDS) -> None:
    """Check the losses, samplers, windows, rules and probes in `configs` that are not built in against their contracts.

    Args:
        configs: the runs; a part that several of them have is tried once.
        warn: called with a line per finding that stops no run.
        seconds: no check is begun after this time.

    Raises:
        ConfigError: a part breaks a promise; the message names the part, what was found and what is expected.
    """
    tried, deadline = set[tuple[str, str]](), time.monotonic() + seconds
    for config in configs:
        for setting, kind, spec in own_parts(config.flat()):
            if (setting, spec.text) not in tried and setting in ("loss", "sampler", "window", "credit"):
                tried.add((setting, spec.text))
                _try_part(config, f"{setting}: {spec.text}", kind, _part(config, setting, kind, spec.text), warn, deadline)


def _part(config: RunConfig, setting: str, kind: str, text: str) -> Any:
    """The run's part of a `setting`, or a part in its options; the whole loss for its training times."""
    whole = text == getattr(config.algorithm, setting) or kind == "times"
    return getattr(run_method(config), setting) if whole else build(kind, text)


def _try_part(config: RunConfig, name: str, kind: str, part: Any, warn: Warn, deadline: float) -> None:
    """Try one part; `warn` of what does not stop the run."""
    contract, make, check = _contract(config, kind, part)
    without = [promise.name for promise in contract.promises if promise.name in WITHOUT]
    found = contract.findings(make, without, deadline)
    untried = list(found.untried)
    for finding in found:
        if finding.promise in untried or not finding.message or finding.mark == "n/a":
            continue
        if "it raised ConfigError" in finding.message:  # the part refuses the data of the check
            untried.append(finding.promise)
        elif finding.ok or finding.promise in OWN_WAYS.get(kind, ()):
            warn(f"{name}: {finding.message}")
        else:
            raise ConfigError(f"{name} failed the trial before the run: {finding.message} {check} shows all findings. {GO_ON}")
    if untried:
        why = "5 s were over, or the part refuses their data"
        warn(f"{name}: {len(untried)} of {len(found)} promises were not tried ({why}): {', '.join(untried)}; {check} tries all")


def _contract(config: RunConfig, kind: str, part: Any) -> tuple[Any, Callable[[], Any], str]:
    """The contract of a part, a maker of its case with the sizes of the run, and the function that checks it."""
    from flowrl.testing import _cases, credit, forward_loss, loss, probe, sampler, solver, window
    from flowrl.testing.findings import maker

    steps = config.rollout.num_steps
    if kind in ("loss", "times"):
        forward = isinstance(part, ForwardLoss)
        name = "check_forward_loss" if forward else "check_loss"
        return (forward_loss if forward else loss).CONTRACT, maker(part), f"flowrl.testing.{name}"
    if kind == "sampler" and isinstance(part, MultistepSolver):
        return solver.CONTRACT, _cases.solver_case(part, 10), "flowrl.testing.check_solver"
    contract, make = {
        "sampler": lambda: (sampler.CONTRACT, _cases.sampler_case(part, steps)),
        "window": lambda: (window.CONTRACT, _cases.window_case(part, steps)),
        "probe": lambda: (probe.CONTRACT, _cases.probe_case(part, None, config.rollout.group_size)),
        "credit": lambda: (credit.CONTRACT, _cases.credit_case(part, max(1, int((trial_stds(config) > 0).sum())))),
    }[kind]()
    return contract, make, f"flowrl.testing.check_{kind}"


def reward_trial(config: RunConfig, reward: AnyReward, warn: Warn = lambda text: None) -> Inspect | None:
    """A function that tries the run's own reward on its first batch of images; None if the reward is built in.

    It scores two samples again in swapped order (of a reward that compares samples, two groups with their members in reverse).

    Args:
        config: the run.
        reward: its reward.
        warn: called with a line if the reward is random.

    Returns:
        A function of images, prompts and scores. It raises `ConfigError` if the new scores differ by more than `SHARE` of the
        batch's standard deviation, and scores of the same samples in the same order do not.
    """
    if not any(setting == "reward" for setting, _, _ in own_parts(config.flat())):
        return None
    name, members = f"reward: {config.environment.reward}", config.rollout.group_size if isinstance(reward, GroupReward) else 1

    def again(images: Tensor, prompts: Sequence[Prompt], rows: list[int]) -> Tensor:
        some = [prompts[row] for row in rows]
        if isinstance(reward, GroupReward):
            return score_group_components(reward, images[rows], some[::members]).total.cpu()
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
        chosen = dict.fromkeys((order[-1], order[(len(order) - 1) // 2]))  # not symmetric about the batch's mean
        rows = [group * members + member for group in chosen for member in reversed(range(members))]
        found, expected = again(images, prompts, rows), scores[rows]
        seen = scores[scores.isfinite()]
        limit = max(SHARE * float(seen.std(unbiased=False)), 1e-3 * float(seen.abs().max()))
        gap = float((found - expected).abs().nan_to_num(torch.inf).max())
        if gap <= limit:
            return
        repeated = max(float((again(images, prompts, rows) - found).abs().nan_to_num(torch.inf).max()) for _ in range(3))
        count, place = len(scores), int((found - expected).abs().nan_to_num(torch.inf).argmax())
        if repeated > gap / 10:
            warn(f"{name}: the reward is random: the same {len(rows)} samples scored again differ by up to {repeated:.3g}")
            return
        raise ConfigError(
            f"{name} failed the trial in the first iteration: a score depends on the batch or on its order. A sample scored "
            f"{float(expected[place]):.4g} among {count}, and {float(found[place]):.4g} with {len(rows)} of them in another order; "
            f"expected: the same within {limit:.2g} (5% of the batch's standard deviation). Is something normalised over the "
            f"batch, or are results out of order? flowrl.testing.check_{'group_' * (members > 1)}reward tells more. {GO_ON}"
        )

    return inspect

"""The microscope: agreement of each rule's credit with the true advantage, in both worlds, and its
policy gradient in 2-D.

A *cell* is a world, a policy (untrained, or during or after training with a method), a kind of
initial noise and a *look*: one seed of the training and of the trajectories. In a cell all rules
are applied to the same trajectories, under every form of the reward, and V is estimated from the
same continuations for all forms.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import CreditError, PartError, require
from flowrl.core.experience import Experience
from flowrl.core.protocols import FlowPolicy, RewardModel, Sampler
from flowrl.methods import named_method, try_credit
from flowrl.parts.prompts import PromptStream
from flowrl.parts.registry import build
from flowrl.probes import Branching, Continuation
from flowrl.rewards import NoisyReward
from flowrl.rollout import Rollout, Usage
from flowrl.training.build import make_trainer, make_world, trial_stds
from flowrl.training.config import RunConfig, preset
from flowrl_bench.arms import named_arm, tuned
from flowrl_bench.ceilings import ceiling_sums, with_values
from flowrl_bench.continuations import (
    Look,
    TrueAdvantages,
    continuation_rewards,
    from_continuations,
)
from flowrl_bench.exact import ValueGrid, exact_advantages, relative_errors
from flowrl_bench.gradients import (
    Setting,
    alignment,
    assigned,
    pathwise_gradients,
    policy_gradients,
    update_evaluations,
)
from flowrl_bench.measurements import reproducible
from flowrl_bench.true_advantage import correlation, credit_sums

RULES: dict[str, str] = {
    "uniform": "uniform",
    "uniform, noise-weighted": "weighted",
    "reward to go": "stepwise-gain(lam=1, probe=completion)",
    "stepwise gains": "stepwise-gain",
    "gains, z-scored by step": "stepwise-gain(normalise=step)",
    "one-step gains": "stepwise-gain(probe=tweedie)",
    "calibrated one-step gains": "calibrated-gain",
    "calibrated, weight 1": "calibrated-gain(gain_weight=1)",
    "calibrated, even weight": "even-gain",
    "increments alone": "turning-point-variant(where='none')",
    "turning points": "turning-point",
    "turning points at random steps": "turning-point-variant(where=random)",
    "random": "random",
}
"""Rules by their names in figures. The last one is a control."""
WORLDS, FORMS, METHODS = (
    ("mixture", "shapes"),
    ("soft", "strict"),
    ("flow-grpo", "stepwise-flow-grpo", "tp-grpo"),
)
NOISES = (0.1, 0.3)
"""Standard deviations of the noise on the soft rewards that rules see, used before training."""
GRID = ValueGrid(81)
"""The grid of exact values: 0/1 rewards need more points than smooth ones."""
DETECTED = 2.0
"""A mean gradient shorter than this many of its standard errors has no reliable direction."""
EQUAL_NFE = 10_000
"""Network evaluations per rule for "signal-to-noise at equal NFE": sampling, probes and the update.
"""


@dataclass(frozen=True)
class Size:
    """The size of a world's cells: `prompts` x `members` trajectories, `continuations` per state
    for V (0: exact values, in two dimensions); iterations of training at the stages; batches of
    gradients and of the true one.
    """

    prompts: int
    members: int
    continuations: int
    stages: Mapping[str, int]
    batches: int = 0
    truth_batches: int = 0
    looks: int = 3
    max_batch: int = 4096
    run: Mapping[str, Any] | None = None


SIZES: dict[str, Size] = {
    "mixture": Size(18, 12, 0, {"during": 10, "after": 40}, batches=16, truth_batches=8, looks=5),
    "shapes": Size(
        4, 12, 64, {"during": 4, "after": 8}, looks=3, max_batch=2048, run={"groups": 8}
    ),
}
"""Sizes of the full study. Image runs have half of the default's groups, which halves the training
time.
"""
QUICK: dict[str, Size] = {
    "mixture": Size(6, 12, 0, {"during": 5, "after": 10}, batches=4, truth_batches=4, looks=3),
    "shapes": Size(2, 6, 64, {"during": 1, "after": 2}, looks=1, max_batch=2048, run={"groups": 2}),
}


@dataclass(frozen=True)
class Cell:
    """`method` trained the policy ("" before training). `noise`: "independent" or "shared" initial
    noise of a group's members; "gradient": a comparison of policy gradients, where every rule has
    its own kind of noise.
    """

    world: str
    method: str
    stage: str
    noise: str
    look: int

    @property
    def key(self) -> str:
        """The cell in words."""
        policy = f"{self.stage} {self.method}" if self.method else self.stage
        return f"{self.world}, {policy}, {self.noise}, look {self.look}"


def cells(world: str, look: int) -> Iterator[Cell]:
    """All cells of a look. Shared noise is left out during training."""
    more = ("gradient",) if world == "mixture" else ()
    yield from (
        Cell(world, "", "before", noise, look) for noise in ("independent", "shared", *more)
    )
    for method in METHODS:
        yield Cell(world, method, "during", "independent", look)
        yield from (
            Cell(world, method, "after", noise, look) for noise in ("independent", "shared")
        )


def run_of(world: str, method: str, look: int, size: Size) -> RunConfig:
    """The training run: the world's default with noise at all steps but the last, as in the
    papers, at the settings found for the method.
    """
    arm = named_arm(method or "flow-grpo")
    changes = {"method": method or "flow-grpo", "window": ":-1", "seed": look, **(size.run or {})}
    changes |= tuned(world, arm.name)
    return preset("default").apply(world=world, iterations=max(size.stages.values()), **changes)


def check_rules(rules: Mapping[str, str], size: Size) -> None:
    """Try every rule on a random table. Raises `ConfigError` or `CreditError` for a rule that
    fails, or whose probe branches.
    """
    require(len(rules) >= 1, "rules", dict(rules), "one or more rules")
    stds = trial_stds(run_of("mixture", "", 0, size))
    for name, spec in rules.items():
        try:
            method = named_method("", credit=spec, trust=True)
            allowed = (
                "a probe without branches: trajectories that branch are compared in"
                " docs/branching.md"
            )
            require(not isinstance(method.credit.probe, Branching), "rules", spec, allowed)
            try_credit(method, stds, size.members)
        except (CreditError, PartError) as error:
            raise CreditError(f"rule {name!r}: {error}") from error


def shared_noise(spec: str) -> bool:
    """Whether a rule's own trajectories have shared initial noise."""
    return bool(getattr(build("credit", spec, trust=True), "shared_noise", False))


def session(
    method: str, selected: list[Cell], size: Size, rules: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Lines of the `selected` cells, which share a world, a look and the training `method`; stages
    in order.

    A line is {"cell", "seconds" (processor time, training included), and what `measure` returns}.
    """
    world, look = selected[0].world, selected[0].look
    started = time.process_time()
    with reproducible("training", world, method, look):
        trainer = make_trainer(run_of(world, method, look, size))
        for stage in dict.fromkeys(cell.stage for cell in selected):
            while trainer.done < size.stages.get(stage, 0):
                trainer.iteration()
            sampler = trainer.draw_sampler()
            assert isinstance(sampler, Sampler)
            for cell in (cell for cell in selected if cell.stage == stage):
                setting = setting_of(cell, trainer.policy, sampler, size)
                with reproducible("measure", cell.key):
                    result = (gradients if cell.noise == "gradient" else measure)(
                        cell, setting, size, rules
                    )
                now = time.process_time()
                yield {"cell": asdict(cell), "seconds": round(now - started, 2), **result}
                started = now


def setting_of(cell: Cell, policy: FlowPolicy, sampler: Sampler, size: Size) -> Setting:
    """The look's prompts and the soft reward."""
    run = run_of(cell.world, cell.method, cell.look, size)
    world = make_world(run)
    prompts = PromptStream(world.prompts(run.environment.task, "train"), cell.look).take(
        size.prompts
    )
    return Setting(
        policy, sampler, policy.schedule(run.rollout.num_steps), world.reward("soft"), prompts
    )


def measure(cell: Cell, setting: Setting, size: Size, rules: Mapping[str, str]) -> dict[str, Any]:
    """The correlation of every rule with the truth, by form of the reward.

    rows: one per form, noise of the reward and rule: "correlation" (corrected), "sums"
    (`credit_sums`, added up), "groups" (jackknife pseudo-values of the correlation by group),
    "steps" (correlations by decision) and before training "ceiling" (`ceiling_sums`). truth: by
    form, mean reward of the trajectories, reliability of A* and, if V is exact, the error of A* by
    decision relative to its standard deviation.
    """
    first, shared = cell.stage == "before", cell.noise == "shared"
    world = make_world(run_of(cell.world, cell.method, cell.look, size))
    forms = {form: world.reward(form) for form in FORMS}
    look = Look(setting, size.members, 10_000 + cell.look, size.max_batch)
    plain, count, scores = look.trajectories(shared), size.continuations, None
    if count:
        reward_models = list(forms.values())
        scores = continuation_rewards(
            setting, plain, count, reward_models, 20_000 + cell.look, None, size.max_batch
        )
        values = [from_continuations(rewards, plain) for rewards in scores]
    else:
        values = exact_advantages(setting, plain, list(forms.values()), GRID)
    truths = dict(zip(forms, values, strict=True))
    rolled, usages = dict[str, Rollout](), dict[str, Usage]()
    rows = list[dict[str, Any]]()
    for form, noise in [(form, 0.0) for form in FORMS] + [
        ("soft", noise) for noise in (NOISES if first else ())
    ]:
        reward: RewardModel = NoisyReward(forms[form], noise) if noise else forms[form]
        records = dict[str, Experience]()
        for name, spec in rules.items():
            rule = build("credit", spec, trust=True)
            key = repr(rule.probe)
            if key not in rolled:
                usages[key] = Usage()
                rolled[key] = look.trajectories(shared, rule.probe, usages[key])
            if key not in records:
                records[key] = setting.experience(rolled[key], reward=reward)
            credit = assigned(rule, records[key]).advantages
            row = {
                "form": form,
                "noise": noise,
                "rule": name,
                "nfe": usages[key].nfe / plain.groups.samples,
            }
            rows.append(row | agreement_row(credit, truths[form]))
            if first and not noise and scores is not None:
                arguments = scores[FORMS.index(form)], plain, records[key]
                levels = ceiling_sums(
                    lambda spec=spec: build("credit", spec, trust=True), *arguments, cell.look
                )
                rows[-1]["ceiling"] = rounded(levels)
            elif first and not noise:
                best = with_values(
                    build("credit", spec, trust=True), records[key], truths[form].state_values
                )
                rows[-1]["ceiling"] = rounded(credit_sums(best, truths[form]).sum((0, 1))[None])
    truth = {
        form: {
            "reward": float(advantages.state_values[..., -1].mean()),
            "reliability": advantages.reliability,
            "error": None if count else rounded(relative_errors(advantages), 3),
        }
        for form, advantages in truths.items()
    }
    return {
        "trajectories": plain.groups.samples,
        "continuations": count,
        "truth": truth,
        "rows": rows,
    }


def agreement_row(credit: Tensor, truth: TrueAdvantages) -> dict[str, Any]:
    """The stored part of a rule's agreement with the truth in a cell."""
    sums = credit_sums(credit, truth)
    total, count = sums.sum(0), len(sums)
    overall = correlation(total)
    left_out = [correlation(total - group) for group in sums] if count > 1 else [overall]
    return {
        "correlation": round(overall, 5),
        "sums": rounded(total.sum(0)),
        "groups": rounded(
            torch.tensor([count * overall - (count - 1) * value for value in left_out]), 4
        ),
        "steps": [round(correlation(total[step]), 3) for step in range(total.shape[0])],
    }


def rounded(values: Tensor, digits: int = 9) -> Any:
    """Nested lists of numbers with this many significant digits."""
    return [
        float(f"{v:.{digits}g}") if isinstance(v, float) else rounded(torch.tensor(v), digits)
        for v in values.tolist()
    ]


def gradients(cell: Cell, setting: Setting, size: Size, rules: Mapping[str, str]) -> dict[str, Any]:
    """Direction and signal-to-noise ratio of every rule's policy gradient of the soft reward.

    Rules with stochastic continuations are left out, because one of their batches costs as much as
    a hundred of the others.
    """
    members, rows = 8, list[dict[str, Any]]()
    truths = pathwise_gradients(
        setting, size.truth_batches, 100, 30_000 + cell.look, decisions_only=True
    )
    train_nfe = update_evaluations(setting, members)
    for name, spec in rules.items():
        rule, usage = build("credit", spec, trust=True), Usage()
        if isinstance(rule.probe, Continuation):
            continue
        estimates = policy_gradients(
            setting,
            rule,
            size.batches,
            members,
            shared_noise(spec),
            40_000 + cell.look,
            usage=usage,
        )
        result, nfe = alignment(estimates, truths), usage.nfe / size.batches
        rows.append(
            {
                "rule": name,
                "nfe_per_batch": nfe,
                "train_nfe_per_batch": train_nfe,
                "detected": result.signal_to_noise * math.sqrt(size.batches) > DETECTED,
                **asdict(result),
                "signal_to_noise_at_equal_nfe": (
                    result.signal_to_noise * math.sqrt(EQUAL_NFE / (nfe + train_nfe))
                ),
            }
        )
    return {"rows": rows}


def sizes(quick: bool) -> dict[str, Size]:
    """By world."""
    return QUICK if quick else SIZES


def with_looks(size: Size, looks: int) -> Size:
    """The size with another number of looks; 0: its own."""
    return replace(size, looks=looks) if looks else size

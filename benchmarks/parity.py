"""Training iterations recorded from the published code, replayed by the trainer: prints how far
every quantity is from theirs.

    python benchmarks/parity.py              # all recordings in tests/golden_*, about a minute
    python benchmarks/parity.py --data DIR   # other folders of the same format (their READMEs)

A replay gives the trainer the recorded weights, prompt embeddings, noise, rewards and order of
samples, and settings that mean what the published settings mean. It compares trajectories,
log-probabilities, ratios, advantages, losses, every gradient and the weights after the optimizer's
step.

difference: the largest absolute difference over the largest recorded value. Four quantities have
other units. Losses of micro-batches are relative to the largest advantage. The mean loss is
absolute, because its terms cancel. Clipped pairs are shares. Weights are in learning rates, and
compared where the gradient is above 1e-5 or exactly 0: Adam's first step has full length however
small the gradient is, so that rounding decides the others. Of forward processes, losses of
micro-batches are relative to the largest loss of a row, and copies of the weights absolute.

FAILED rows have a difference beyond its tolerance, or the error that ended the replay; the exit
status is then 1.

The method "plain" is NOT the released code: parity_plain.py compares the trainer with formulas in
plain torch where no recording tells settings apart.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from parity_compare import Difference, attempt, distance, reason, step_differences
from parity_forward import replay_forward
from parity_plain import CASES, plain_differences
from parity_recording import ZERO_GROUP, RecordedUpdate, Recording, value_table
from parity_replay import Replay, replay
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from torch import Tensor
from transformers.utils import logging as transformers_logging

from flowrl.core.experience import Decisions
from flowrl.credit import TurningPoint, process_rewards
from flowrl.flow import log_prob, log_prob_without_constants
from flowrl.run.parts.registry import build

DATA = Path(__file__).parents[1] / "tests" / "golden_iteration"
FOLDERS = DATA, DATA.parent / "golden_forward"
PLAIN = "plain"
ROUNDING = 2.0**-24
"""Largest relative error of one rounding in float32."""
FEW, KL, NETWORK, BACKWARD, SUMS = 4, 8, 40, 80, 400
ROUNDINGS = {
    **dict.fromkeys(("times", "standard deviations", "training times"), FEW),
    **dict.fromkeys(("latents", "velocities (RMS)", "completions", "means"), NETWORK),
    **dict.fromkeys(("log-probabilities", "ratios", "process rewards", "advantages"), FEW),
    "clipped pairs": 0,
    **dict.fromkeys(("policy loss / advantage", "loss / advantage", "weights of rows"), FEW),
    "mean loss": 0.5,
    "KL": KL,
    **dict.fromkeys(("gradients", "gradient norm", "clipped gradients"), BACKWARD),
    "weights / learning rate": 1 / 3e-4,
    **dict.fromkeys(("matching errors", "squared distances", "ratios of errors"), NETWORK),
    **dict.fromkeys(("row losses", "loss of micro-batches", "velocities"), NETWORK),
    "group sums": SUMS,
    "group weights": NETWORK,
    "copies of the weights": 1,
}
"""Quantity -> a bound of its rounding, in roundings of its largest value.

- Closed formulas round four times in sequence, a KL with two of them twice as often.
- A velocity is computed by about 40 operations in sequence (two blocks of attention and MLP), each
  rounded once. Steps of trajectories add up to 1, so that latents have the velocity's error. Means
  over 1,024 elements, as log-probabilities, average it: below four roundings.
- The backward pass repeats the sequence: twice as many.
- A weight up to 1 is rounded once; in units of the learning rate 3e-4 this is 1 / 3e-4 roundings.
- The mean loss is a sum that cancels, of losses up to a half.
- DGPO's group sums multiply differences of matching errors by 100, which are a quarter of the errors
  or more: 4 x 100 roundings. Its group weights and gradients are functions of them (`Row.tolerance`).
"""
MARGIN = 4
"""How many times the bound is allowed, because processors order sums differently."""
TOLERANCES = {name: MARGIN * count * ROUNDING for name, count in ROUNDINGS.items()}
"""Quantity -> largest difference."""


@dataclass(frozen=True)
class Row:
    """One comparison; or, without a number in `difference`, why there is none, in `quantity`."""

    method: str
    model: str
    state: str
    quantity: str
    difference: float

    @property
    def compared(self) -> bool:
        """Whether there is a difference."""
        return self.quantity in TOLERANCES

    @property
    def tolerance(self) -> float:
        """The largest difference that passes."""
        amplified = self.method == "dgpo" and self.quantity.startswith(("grad", "group weights"))
        tolerance = TOLERANCES.get(self.quantity, 0.0)
        return TOLERANCES["group sums"] if amplified else tolerance

    @property
    def passed(self) -> bool:
        """Whether there is a difference, and within its tolerance."""
        return self.compared and self.difference <= self.tolerance


def flow_grpo(recording: Recording) -> dict[str, Any]:
    """The settings that are Flow-GRPO's published code, in addition to those that are read from the
    recording.
    """
    global_std = recording.meta["case"]["config"]["sample"]["global_std"]
    return {
        "method": "flow-grpo",
        "sampler": "flow-sde",
        "window": ":",
        "trained_steps": ":-1",
        "credit": f"uniform(std={'batch' if global_std else 'group'})",
        "loss": "clipped(kl=without_delta)",
        "guidance_gradient": "prompt",
    }


def tp_grpo(recording: Recording) -> dict[str, Any]:
    """The settings that are TP-GRPO's published code, with the flags of its launch script."""
    return {
        "method": "tp-grpo",
        "sampler": "cps",
        "window": ":",
        "credit": "turning-point(balance=trend, balance_scope=prompt)",
        "loss": "clipped(log_prob=released_cps)",
        "guidance_gradient": "both",
    }


UNIFORM_RULES = {
    "advantages_global_std": "uniform(std=batch)",
    "advantages_group_std": "uniform(std=group)",
    "zero_group_advantages_global_std": "uniform(std=batch)",
    "zero_group_advantages_group_std": "uniform(std=group)",
}
TURNING_POINT_RULES = {
    "launch/advantages": "turning-point(balance=trend, balance_scope=prompt)",
    "launch_one_batch_of_8/advantages": "turning-point(balance=trend, balance_scope=batch)",
    "launch_unbalanced/advantages": "turning-point(balance=none)",
    "launch_keep_main/advantages": (
        "turning-point(balance=trend, balance_scope=prompt, combine=add)"
    ),
}
"""Recorded advantages -> the credit rule that reproduces them."""


def replay_iterations(
    recording: Recording,
    work: Path,
    settings: Callable[[Recording], dict[str, Any]],
    rules: Mapping[str, str],
    changes: Mapping[str, Any],
    updates: Sequence[str],
) -> Iterator[Difference]:
    """State, quantity and difference of everything that was recorded of a method with trajectories
    and ratios.
    """

    def replayed(name: str) -> Iterator[Difference]:
        update = RecordedUpdate.of(recording, name)
        result = replay(recording, update, {**settings(recording), **changes}, work)
        if name == recording.updates[0]:
            for quantity, difference in trajectory_differences(recording, result):
                yield "trajectory", quantity, difference
        for quantity, difference in update_differences(recording, update, result):
            yield name, quantity, difference

    for name in updates or recording.updates:
        yield from attempt(name, replayed(name))
    yield from attempt("credit", credit_differences(recording, rules))


REPLAYS: dict[str, Callable[..., Iterator[Difference]]] = {
    "fg": partial(replay_iterations, settings=flow_grpo, rules=UNIFORM_RULES),
    "tp": partial(replay_iterations, settings=tp_grpo, rules=TURNING_POINT_RULES),
    **dict.fromkeys(("nft", "awm", "dgpo"), replay_forward),
}
"""How to replay the recordings of each method, by the name of its folder."""


def trajectory_differences(recording: Recording, run: Replay) -> Iterator[tuple[str, float]]:
    """What sampling recorded."""
    recorded = recording.tensors(f"trajectory_{recording.case}")
    path = run.trainer.rollout.trajectories
    schedule, steps = path.schedule, recorded["log_probs"].shape[1]
    yield (
        "times",
        max(
            distance(schedule.times, recorded["sigmas"]),
            distance(schedule.network_timesteps, recorded["timesteps"]),
        ),
    )
    yield "standard deviations", distance(path.stds[:steps], recorded["transition_std"])
    pairs = [
        ("latents", path.nodes),
        ("latents_node9", path.nodes[:, 9]),
        ("final", path.nodes[:, -1]),
    ]
    known = [
        (ours[:, : recorded[name].shape[1]], recorded[name])
        for name, ours in pairs
        if name in recorded
    ]
    yield "latents", max(distance(*pair) for pair in known)
    rms = path.velocities[:, :steps].flatten(2).square().mean(2).sqrt()
    yield "velocities (RMS)", distance(rms, recorded["guided_velocity_rms"])
    sample, step = torch.cartesian_prod(torch.arange(len(path.nodes)), torch.arange(steps)).unbind(
        1
    )
    sampler = run.trainer.draw_sampler()
    gaussian = sampler.transition(
        path.nodes[sample, step], path.velocities[sample, step], schedule, step
    )
    density = (
        log_prob_without_constants
        if getattr(run.values.inner, "log_prob", "") == "released_cps"
        else log_prob
    )
    ours = density(gaussian, path.nodes[sample, step + 1]).view(-1, steps)
    yield "log-probabilities", distance(ours, recorded["log_probs"])
    if "mean_samples_0_4" in recorded:
        yield (
            "means",
            distance(gaussian.mean.unflatten(0, (-1, steps))[::4], recorded["mean_samples_0_4"]),
        )
    if "completions_samples_0_4" in recorded:
        finished, *unfinished = torch.cat(list(run.decoded)).unflatten(0, (-1, len(path.nodes)))
        decoded = torch.stack([*unfinished, finished])
        yield (
            "completions",
            distance(decoded[1:, ::4].transpose(0, 1), recorded["completions_samples_0_4"]),
        )


def update_differences(
    recording: Recording, update: RecordedUpdate, run: Replay
) -> Iterator[tuple[str, float]]:
    """What `update` recorded."""
    tables, kept, drawn = update.tables, update.kept, run.trainer.record.decisions.step.tolist()
    trained = [drawn.index(step) for step in recording.meta["case"]["trained_steps"]]
    largest = float(tables["advantages"].abs().max())

    def ours(name: str) -> Tensor:
        return run.table(name)[:, trained]

    def micro(name: str) -> Tensor:
        """Means over the recorded micro-batches, [micro-batch, step]."""
        return ours(name)[update.order.view(len(tables["micro/loss"]), -1)].mean(1)

    yield "advantages", distance(run.trainer.advantages[kept][:, trained], tables["advantages"])
    yield "log-probabilities", distance(ours("log_prob")[kept], tables["log_prob"])
    yield "ratios", distance(ours("ratio_mean")[kept], tables["ratio"])
    yield "clipped pairs", distance(micro("clip_fraction"), tables["micro/clipfrac"], 1.0)
    yield (
        "policy loss / advantage",
        distance(micro("policy_loss"), tables["micro/policy_loss"], largest),
    )
    yield "loss / advantage", distance(micro("loss"), tables["micro/loss"], largest)
    if tables["micro/kl_loss"].any():
        yield "KL", distance(micro("kl"), tables["micro/kl_loss"])
    yield "mean loss", abs(run.metrics["loss"] - float(tables["micro/loss"].mean()))
    yield from step_differences(
        run.trainer.optimizer_steps, update.steps, recording.meta["optimizer"]["lr"]
    )


def credit_differences(
    recording: Recording, rules: Mapping[str, str]
) -> Iterator[tuple[str, str, float]]:
    """Variants of the advantages, from the recorded value table alone."""
    recorded = recording.tensors("credit")
    for name, spec in rules.items():
        known = value_table(
            recorded[f"{ZERO_GROUP}_rewards" if name.startswith(ZERO_GROUP) else "rewards"]
        )
        # a rule needs one decision
        values = known if known.shape[-1] > 1 else known.repeat(1, 1, 2)
        rule: Any = build("credit", spec)
        advantages = rule.assign(values, Decisions.like(values)).flatten(0, 1)
        state = f"credit {name.removesuffix('/advantages')}"
        yield (
            state,
            "advantages",
            distance(
                advantages, recorded[name].view(len(advantages), -1)[:, : advantages.shape[1]]
            ),
        )
        if isinstance(rule, TurningPoint):
            process = process_rewards(
                values, rule.selected(values), add=rule.combine == "add"
            ).flatten(0, 1)
            yield (
                state,
                "process rewards",
                distance(process, recorded[name.replace("advantages", "process_rewards")]),
            )


def parity(
    data: Path = DATA,
    methods: Sequence[str] = (),
    cases: Sequence[str] = (),
    updates: Sequence[str] = (),
    **changes: Any,
) -> Iterator[Row]:
    """The comparisons with all recordings in `data`, or some of them; `changes` are settings that
    replace the published ones.
    """
    places = [path for path in data.glob("*") if path.is_dir() or path.suffix == ".safetensors"]
    with tempfile.TemporaryDirectory(prefix="parity-") as work:
        for method in methods or sorted({path.stem for path in places} - {"common"}):
            try:
                if method not in REPLAYS:
                    raise KeyError(f"no replay for {method!r}; known: {', '.join(REPLAYS)}")
                for recording in Recording.every(data, method):
                    if not cases or recording.case in cases:
                        compared = REPLAYS[method](
                            recording, work=Path(work), changes=changes, updates=updates
                        )
                        yield from (Row(method, recording.case, *one) for one in compared)
            except Exception as error:
                yield Row(method, "-", "-", reason(error), float("inf"))


def plain(cases: Sequence[str] = tuple(CASES), **changes: Any) -> Iterator[Row]:
    """The comparisons with formulas in plain torch; `changes` are settings of the trainer only."""
    for case in cases:
        differences = ((case, *one) for one in plain_differences(case, changes))
        yield from (Row(PLAIN, "not released", *one) for one in attempt(case, differences))


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """The table of all comparisons, the largest difference of every quantity, and the failures."""
    state = Column("state", no_wrap=True)
    quantity = Column("quantity, or reason", overflow="fold", min_width=24)
    columns = "method", "model", state, quantity, "difference", "tolerance", Column(min_width=7)
    every = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        number = f"{row.difference:.1e}", f"{row.tolerance:.0e}"
        values = number if row.compared else ("-", "-")
        verdict = "pass" if row.passed else "[bold red]FAILED"
        every.add_row(row.method, row.model, row.state, escape(row.quantity), *values, verdict)
    console.print(every)
    methods = list(dict.fromkeys(row.method for row in rows if row.compared))
    largest = Table("quantity", *methods, "tolerance", box=SIMPLE_HEAD, pad_edge=False)
    for quantity, tolerance in TOLERANCES.items():
        cells = [
            [row.difference for row in rows if (row.method, row.quantity) == (method, quantity)]
            for method in methods
        ]
        if any(cells):
            shown = [f"{max(cell):.1e}" if cell else "-" for cell in cells]
            largest.add_row(quantity, *shown, f"{tolerance:.0e}")
    console.print(largest)
    for row in rows:
        if not row.passed:
            words = "FAILED", row.method, row.model, row.state, escape(row.quantity)
            console.print(*words, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown = ", ".join(folder.name for folder in FOLDERS)
    about = f"folders of recordings, default {shown} in {DATA.parent}"
    parser.add_argument("--data", type=Path, nargs="+", default=FOLDERS, metavar="DIR", help=about)
    torch.set_num_threads(1)  # the tensors are tiny
    for quiet in (diffusers_logging, transformers_logging):
        quiet.disable_progress_bar()
    began, rows = time.perf_counter(), list[Row]()
    for folder in parser.parse_args().data:
        nothing = Row("-", "-", "-", f"no recordings in {folder}", float("inf"))
        rows += list(parity(folder)) or [nothing]
    rows += plain()
    print_rows(rows, Console(width=134))
    failed, compared = (
        sum(not row.passed for row in rows),
        sum(row.compared for row in rows),
    )
    print(f"{compared} comparisons, {failed} failed, {time.perf_counter() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

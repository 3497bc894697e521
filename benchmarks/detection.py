"""Turning points under reward noise: false calls, misses, and the error of the credit, measured and
as derived.

    python benchmarks/detection.py              # about six minutes on one core; keeps the trajectories
    python benchmarks/detection.py --report     # table and figures again, from results/detection.json

TP-GRPO on both worlds with the soft reward, before and after a short training (mixture 10, shapes
12 iterations); 18 prompts x 16 trajectories per seed, which are scored once. This table [prompt,
member, decision+1] is the truth. Normal noise is then added to it many times. Windows of 10 steps:
0:9, TP-GRPO's (the last step is deterministic), and 2:7, the default of the worlds.

Prediction: `flowrl_bench.turn_noise.expected_calls` of every true trajectory. Measurement and prediction are
of the same trajectories, so they differ by the finite number of draws only; z is their difference
in standard errors over draws. Every row has its own noise.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from detection_report import report
from flowrl_bench.measurements import reproducible
from flowrl_bench.older_windows import to_older
from flowrl_bench.results_file import provenance
from flowrl_bench.rules import TurningPointVariant
from flowrl_bench.turn_noise import (
    ExpectedCalls,
    deciding_columns,
    expected_calls,
    turn_probability,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.core.experience import Decisions
from flowrl.credit import TurningPoint, gains, process_rewards, turning_points
from flowrl.io import write_json
from flowrl.parts.prompts import PromptStream
from flowrl.probes import Completion
from flowrl.rollout import Groups, rollout, score_rollout
from flowrl.training.build import make_trainer, make_world
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "detection.json"
FIGURES = HERE.parent / "docs" / "detection"
WORLDS, WINDOWS, STAGES = ("mixture", "shapes"), ("0:9", "2:7"), ("before", "after")
LEVELS = (0.1, 0.3)
PROMPTS, MEMBERS, DRAWS, CRITERION_DRAWS, MAX_BATCH = 18, 16, 200, 40, 4096
ITERATIONS = {"mixture": 10, "shapes": 12}
CURVE = [0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0]
"""Noise of the predicted densities in the figure."""
CONFIDENCES: tuple[float | None, ...] = (None, 0.0, 1.0, 1.645)
"""Of `TurningPointVariant(reward_noise=...)`; None is the rule without it."""
EDGES = [0.25 * i for i in range(17)]
"""Of the smallest difference that decides a call, in units of the noise; the last bin is open."""


# --- trajectories
# --------------------------------------------------------------------------------------------------


def sample_table(trainer: Trainer, seed: int) -> Tensor:
    """The true values [prompt, member, decision+1] of the current policy's trajectories."""
    policy, config = trainer.policy, trainer.config
    world = make_world(config)
    prompts = PromptStream(world.prompts(config.environment.task, "train"), seed).take(PROMPTS)
    generator = torch.Generator().manual_seed(70_000 + seed)
    groups = Groups(PROMPTS, MEMBERS)
    noise = groups.noise(policy.latent_shape, generator)
    result = rollout(
        policy,
        trainer.draw_sampler(),
        trainer.schedule,
        policy.encode(prompts),
        noise,
        generator,
        groups,
        Completion(),
        max_batch=MAX_BATCH,
    )
    return score_rollout(policy, world.reward("soft"), result, prompts).total


def tables_of(world: str, window: str, seed: int, folder: Path) -> dict[str, Tensor]:
    """The true values by stage; kept in `folder`."""
    path = folder / f"{world}-{window.replace(':', '_')}-{seed}.safetensors"
    if not path.exists():
        started = time.process_time()
        settings = {
            "method": "tp-grpo",
            "window": window,
            "reward_form": "soft",
            "iterations": ITERATIONS[world],
        }
        run = preset("default").apply(world=world, seed=seed, **settings)
        # the seeds of the first results
        with reproducible("detection", world, to_older("window", window), seed):
            trainer = make_trainer(run)
            made = {"before": sample_table(trainer, seed)}
            for _ in range(run.iterations):
                trainer.iteration()
            with trainer.averaged():
                made["after"] = sample_table(trainer, seed)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({stage: table.contiguous() for stage, table in made.items()}, path)
        print(f"{path.stem}: {time.process_time() - started:.0f} processor seconds", flush=True)
    return load_file(path)


# --- measured and predicted
# -----------------------------------------------------------------------------------------------


def totals(
    called: Tensor, error: Tensor, variance: Tensor, expected: ExpectedCalls
) -> dict[str, Tensor]:
    """Per trajectory: calls, false ones, misses. Of a decision's reward: its error in the direction
    of the noise-free reward, summed over turning points and over other decisions, and its variance.
    """
    turns, error = expected.turns, error * expected.rewards.sign()
    sums = {
        "called": called,
        "false": torch.where(turns, 0.0, called),
        "missed": torch.where(turns, 1 - called, 0.0),
        "bias at turns": torch.where(turns, error, 0.0),
        "bias elsewhere": torch.where(turns, 0.0, error),
        "variance": variance,
    }
    return {name: values.double().sum(-1).mean() for name, values in sums.items()}


def noisy_tables(table: Tensor, noise: float, draws: int, seed: int) -> Iterator[Tensor]:
    """The table with independent normal noise of every score, `draws` times."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        yield table + noise * torch.randn(table.shape, generator=generator, dtype=table.dtype)


def compare(table: Tensor, noise: float, consistent: bool, seed: int) -> dict[str, Any]:
    """One row: measured over `DRAWS` draws, with standard errors, and predicted. The measured
    variance is that around the predicted mean, which the errors check.
    """
    true = table.double()
    expected = expected_calls(true, noise, consistent)
    sampled: dict[str, list[Tensor]] = {}
    for noisy in noisy_tables(true, noise, DRAWS, seed):
        called = turning_points(noisy, consistent)
        rewards = process_rewards(noisy, called)
        drawn = totals(
            called.double(),
            rewards - expected.rewards,
            (rewards - expected.mean).square(),
            expected,
        )
        for name, value in drawn.items():
            sampled.setdefault(name, []).append(value)
    predicted = totals(expected.called, expected.bias, expected.variance, expected)
    return {
        "turns": float(expected.turns.double().sum(-1).mean()),
        "reward at turns": float((expected.rewards.abs() * expected.turns).sum(-1).mean()),
        "increments' variance": 2 * noise**2 * expected.turns.shape[-1],
        "measured": {name: float(torch.stack(values).mean()) for name, values in sampled.items()},
        "error": {
            name: float(torch.stack(values).std() / DRAWS**0.5) for name, values in sampled.items()
        },
        "predicted": {name: float(value) for name, value in predicted.items()},
    }


def curve(table: Tensor) -> dict[str, list[float]]:
    """Predicted calls and false calls per trajectory at the noise of `CURVE`, consistent rule."""
    levels = [expected_calls(table, noise) for noise in CURVE]
    per = {
        "called": [calls.called for calls in levels],
        "false": [calls.false_calls for calls in levels],
    }
    return {name: [float(values.sum(-1).mean()) for values in some] for name, some in per.items()}


# --- what a call is worth, and the criterion
# ------------------------------------------------------------------------------


def smallest_difference(values: Tensor) -> Tensor:
    """Per decision, the smallest of |d_{k-1}|, |d_k|, |R - V_{k+1}| and |D|; at decision 0 without
    d_{k-1}.
    """
    column = deciding_columns(values)
    before = (column["x"] - column["w"]).abs()
    before[..., 0] = torch.inf
    pairs = (gains(values), column["z"] - column["y"], column["z"] - column["v"])
    return torch.stack([before, *(pair.abs() for pair in pairs)]).amin(0)


def calibration(table: Tensor, noise: float, seed: int) -> dict[str, list[Any]]:
    """Consistent calls by their smallest difference (`EDGES`): their number, the fraction of real
    ones (true turning points of the same direction), and the mean probability of that with a flat
    prior.
    """
    true = table.double()
    turns, edges = turning_points(true), torch.tensor(EDGES[1:])
    sums = torch.zeros(3, len(EDGES), dtype=torch.float64)
    for noisy in noisy_tables(true, noise, CRITERION_DRAWS, seed):
        called = turning_points(noisy)
        real = (turns & (gains(noisy) * gains(true) > 0))[called].double()
        place = torch.bucketize(
            (smallest_difference(noisy)[called] / noise).float(), edges, right=True
        )
        values = torch.stack(
            [torch.ones_like(real), real, turn_probability(noisy, called, noise)[called]]
        )
        sums.index_add_(1, place, values)
    counts, *others = sums.tolist()
    fractions = [
        [value / count if count else None for value, count in zip(row, counts, strict=True)]
        for row in others
    ]
    return {"calls": counts, "real": fractions[0], "flat prior": fractions[1]}


def criteria(table: Tensor, noise: float, seed: int) -> list[dict[str, Any]]:
    """By confidence: calls per trajectory, false and missed ones, root mean squared error of the
    decision's reward in units of the noise, and the correlation of the advantages (no balancing)
    with those of the noise-free table. Last, the same for increments alone.
    """
    true, decisions = table.double(), Decisions.like(table)
    turns = turning_points(true)
    unbalanced = TurningPoint(balance=None)
    rewards, target = process_rewards(true, turns), unbalanced.assign(true, decisions)
    rules = {
        str(c): TurningPointVariant(reward_noise=noise, confidence=c, rule=unbalanced)
        for c in CONFIDENCES
        if c is not None
    }
    rules = {"None": unbalanced, **rules, "increments": TurningPointVariant(where="none")}
    rows = []
    for name, rule in rules.items():
        sums = torch.zeros(5, dtype=torch.float64)
        for noisy in noisy_tables(true, noise, CRITERION_DRAWS, seed):
            called = rule.selected(noisy)
            error = (process_rewards(noisy, called) - rewards).square().mean()
            pair = torch.stack([rule.assign(noisy, decisions).flatten(), target.flatten()])
            counts = [
                part.double().sum(-1).mean() for part in (called, called & ~turns, turns & ~called)
            ]
            sums += torch.stack([*counts, error, torch.corrcoef(pair)[0, 1]]) / CRITERION_DRAWS
        called, false, missed, error, correlation = sums.tolist()
        rows.append(
            {
                "confidence": name,
                "called": called,
                "false": false,
                "missed": missed,
                "rms error / noise": error**0.5 / noise,
                "correlation": correlation,
            }
        )
    return rows


def cell(world: str, window: str, stage: str, table: Tensor, seed: int) -> dict[str, Any]:
    """Everything of one world, window and stage; `seed` is that of its noise."""
    key = {"world": world, "window": window, "stage": stage}
    rows = [
        {**key, "noise": noise, "consistent": consistent}
        | compare(table, noise, consistent, seed + number)
        for number, (noise, consistent) in enumerate(product(LEVELS, (True, False)))
    ]
    kept = [
        {**key, "noise": noise, **row} for noise in LEVELS for row in criteria(table, noise, seed)
    ]
    record: dict[str, Any] = {"rows": rows, "criteria": kept}
    if window == "0:9":
        record["calibration"] = [
            {**key, "noise": noise, **calibration(table, noise, seed)} for noise in LEVELS
        ]
        size = float(gains(table).abs().mean())
        record["curves"] = [
            {**key, "mean |d|": size, "turns": rows[0]["turns"], "noise": CURVE, **curve(table)}
        ]
    return record


def main() -> None:
    """Measure what is missing, write JSON, Markdown and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--work", type=Path, default=Path("runs/detection"), help="folder of the true reward tables"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.report:
        record: dict[str, Any] = {
            "command": "python benchmarks/detection.py",
            **provenance(),
            "seeds": options.seeds,
            "prompts": PROMPTS,
            "members": MEMBERS,
            "draws": DRAWS,
            "criterion_draws": CRITERION_DRAWS,
            "edges": EDGES,
            "iterations": ITERATIONS,
        }
        for number, (world, window, stage) in enumerate(product(WORLDS, WINDOWS, STAGES)):
            table = torch.cat(
                [tables_of(world, window, seed, options.work)[stage] for seed in options.seeds]
            )
            started = time.process_time()
            for name, rows in cell(world, window, stage, table, 80_000 + 100 * number).items():
                record.setdefault(name, []).extend(rows)
            print(
                f"{world} {window} {stage}: {time.process_time() - started:.0f} processor seconds",
                flush=True,
            )
        write_json(options.out, record)
    report(json.loads(options.out.read_text()), options.out.with_suffix(".md"), options.figures)


if __name__ == "__main__":
    main()

"""Turning points under reward noise: false calls, misses, and the error of the credit, measured and as derived.

    python benchmarks/detection.py              # about ten minutes on one core; keeps the trajectories
    python benchmarks/detection.py --report     # table and figure again, from results/detection.json

TP-GRPO on both worlds with the soft reward, before and after a short training (mixture 10, shapes 12 iterations); 18 prompts x 16
trajectories per seed, which are scored once. This table is the truth. Normal noise is then added to it many times: "image", as
`reward_noise` does it (equal images have equal scores), or "call" (every node has noise of its own). Windows: 0:9, TP-GRPO's (the
last step is deterministic), and 2:5, the default of the worlds.

Prediction: `flowrl.credit.expected_calls` of every true trajectory. Measurement and prediction are of the same trajectories, so
they differ by the finite number of draws only; z is their difference in standard errors over draws. Every row has its own noise.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from detection_report import report
from flowrl_bench.measurements import reproducible
from flowrl_bench.results_file import provenance
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.credit import ExpectedCalls, TurningPoint, expected_calls, gains, process_rewards, turn_probability, turning_points
from flowrl.credit.turning_point import deciding_nodes
from flowrl.io import write_json
from flowrl.probes import Completion
from flowrl.prompts.stream import PromptStream
from flowrl.rollout import Groups, reward_table, rollout
from flowrl.training.build import make_trainer, make_world
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "detection.json"
FIGURE = HERE.parent / "docs" / "detection" / "calls.png"
WORLDS, WINDOWS, STAGES = ("mixture", "shapes"), ("0:9", "2:5"), ("before", "after")
SCORES, LEVELS = ("image", "call"), (0.1, 0.3)
PROMPTS, MEMBERS, DRAWS, CRITERION_DRAWS, MAX_BATCH = 18, 16, 200, 40, 4096
ITERATIONS = {"mixture": 10, "shapes": 12}
CURVE = [0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0]
"""Noise of the predicted densities in the figure."""
CONFIDENCES: tuple[float | None, ...] = (None, 0.0, 1.0, 1.645)
"""Of `TurningPoint(reward_noise=...)`; None is the rule without it."""
EDGES = [0.25 * i for i in range(17)]
"""Of the smallest difference that decides a call, in units of the noise; the last bin is open."""


# --- trajectories ---------------------------------------------------------------------------------------------------------


def sample_table(trainer: Trainer, seed: int) -> Tensor:
    """The true rewards [prompt, member, node] of the current policy's trajectories."""
    policy, config = trainer.policy, trainer.config
    world = make_world(config)
    prompts = PromptStream(world.prompts(config.environment.task, "train"), seed).take(PROMPTS)
    generator = torch.Generator().manual_seed(70_000 + seed)
    groups = Groups(PROMPTS, MEMBERS)
    noise = groups.noise(policy.latent_shape, generator)
    result = rollout(
        policy, trainer.draw_sampler(), trainer.schedule, policy.encode(prompts), noise, generator, groups, Completion(),
        max_batch=MAX_BATCH,
    )  # fmt: skip
    return reward_table(policy, world.reward("soft"), result, prompts)


def tables_of(world: str, window: str, seed: int, folder: Path) -> dict[str, Tensor]:
    """The true rewards by stage; kept in `folder`."""
    path = folder / f"{world}-{window.replace(':', '_')}-{seed}.safetensors"
    if not path.exists():
        started = time.process_time()
        settings = {"method": "tp-grpo", "window": window, "reward_form": "soft", "iterations": ITERATIONS[world]}
        run = preset("default").apply(world=world, seed=seed, **settings)
        with reproducible("detection", world, window, seed):
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


def stochastic(window: str, steps: int) -> list[bool]:
    """Which steps may change the completed image."""
    start, size = map(int, window.split(":"))
    return [start <= i < start + size for i in range(steps)]


def noise_of(table: Tensor, changes: Sequence[bool], scores: str, generator: torch.Generator) -> Tensor:
    """Standard normal noise of every score; "image": one number per image of a trajectory."""
    image = torch.tensor([0, *changes]).cumsum(0) if scores == "image" else torch.arange(table.shape[-1])
    return torch.randn((*table.shape[:2], int(image[-1]) + 1), generator=generator, dtype=table.dtype)[..., image]


# --- measured and predicted -----------------------------------------------------------------------------------------------


def totals(called: Tensor, error: Tensor, variance: Tensor, expected: ExpectedCalls, trained: Tensor) -> dict[str, Tensor]:
    """Per trajectory: calls, false ones, misses, calls at deterministic steps. Over the stochastic steps, of a step's reward: its
    error in the direction of the noise-free reward, summed over turning points and over other steps, and its variance."""
    turns, error = expected.turns, error * expected.rewards.sign()
    sums = {
        "called": called,
        "false": torch.where(turns, 0.0, called),
        "missed": torch.where(turns, 1 - called, 0.0),
        "deterministic": torch.where(trained, 0.0, called),
        "bias at turns": torch.where(turns, error, 0.0),
        "bias elsewhere": torch.where(~turns & trained, error, 0.0),
        "variance": torch.where(trained, variance, 0.0),
    }
    return {name: values.double().sum(-1).mean() for name, values in sums.items()}


def compare(table: Tensor, changes: list[bool], noise: float, scores: str, consistent: bool, seed: int) -> dict[str, Any]:
    """One row: measured over `DRAWS` draws, with standard errors, and predicted. The measured variance is that around the
    predicted mean, which the errors check."""
    true, trained = table.double(), torch.tensor(changes)
    generator = torch.Generator().manual_seed(seed)
    expected = expected_calls(true, noise, consistent, changes=changes if scores == "image" else None)
    found: dict[str, list[Tensor]] = {}
    for _ in range(DRAWS):
        noisy = true + noise * noise_of(true, changes, scores, generator)
        called = turning_points(noisy, consistent)
        rewards = process_rewards(noisy, called)
        drawn = totals(called.double(), rewards - expected.rewards, (rewards - expected.mean).square(), expected, trained)
        for name, value in drawn.items():
            found.setdefault(name, []).append(value)
    predicted = totals(expected.called, expected.bias, expected.variance, expected, trained)
    return {
        "turns": float(expected.turns.double().sum(-1).mean()),
        "reward at turns": float((expected.rewards.abs() * expected.turns).sum(-1).mean()),
        "increments' variance": 2 * noise**2 * sum(changes),
        "measured": {name: float(torch.stack(values).mean()) for name, values in found.items()},
        "error": {name: float(torch.stack(values).std() / DRAWS**0.5) for name, values in found.items()},
        "predicted": {name: float(value) for name, value in predicted.items()},
    }


def curve(table: Tensor, changes: list[bool]) -> dict[str, list[float]]:
    """Predicted calls and false calls per trajectory at the noise of `CURVE`, consistent rule."""
    found = [expected_calls(table, noise, changes=changes) for noise in CURVE]
    per = {"called": [one.called for one in found], "false": [one.false_calls for one in found]}
    return {name: [float(values.sum(-1).mean()) for values in some] for name, some in per.items()}


# --- what a call is worth, and the criterion ------------------------------------------------------------------------------


def smallest_difference(rewards: Tensor) -> Tensor:
    """Per step, the smallest of |d_{i-1}|, |d_i|, |R_T - R_{i+1}| and |D|; at step 0 without d_{i-1}."""
    node = deciding_nodes(rewards)
    before = (node["x"] - node["w"]).abs()
    before[..., 0] = torch.inf
    pairs = (gains(rewards), node["z"] - node["y"], node["z"] - node["v"])
    return torch.stack([before, *(pair.abs() for pair in pairs)]).amin(0)


def calibration(table: Tensor, changes: list[bool], noise: float, seed: int) -> dict[str, list[Any]]:
    """Consistent calls by their smallest difference (`EDGES`): their number, the fraction of real ones (true turning points of
    the same direction), and the mean probability of that with a flat prior."""
    true, generator = table.double(), torch.Generator().manual_seed(seed)
    turns, edges = turning_points(true), torch.tensor(EDGES[1:])
    sums = torch.zeros(3, len(EDGES), dtype=torch.float64)
    for _ in range(CRITERION_DRAWS):
        noisy = true + noise * noise_of(true, changes, "image", generator)
        called = turning_points(noisy)
        real = (turns & (gains(noisy) * gains(true) > 0))[called].double()
        place = torch.bucketize((smallest_difference(noisy)[called] / noise).float(), edges, right=True)
        values = torch.stack([torch.ones_like(real), real, turn_probability(noisy, called, noise)[called]])
        sums.index_add_(1, place, values)
    counts, *others = sums.tolist()
    fractions = [[value / count if count else None for value, count in zip(row, counts, strict=True)] for row in others]
    return {"calls": counts, "real": fractions[0], "flat prior": fractions[1]}


def criteria(table: Tensor, changes: list[bool], noise: float, seed: int) -> list[dict[str, Any]]:
    """By confidence: calls per trajectory, false and missed ones, root mean squared error of the step's reward in units of the
    noise, and the correlation of the advantages (no balancing) with those of the noise-free table, over the stochastic steps.
    Last, the same for increments alone."""
    true, trained = table.double(), torch.tensor(changes)
    turns = turning_points(true)
    rewards, target = process_rewards(true, turns), TurningPoint(balance=None).assign(true)[..., trained]
    rules = {str(c): TurningPoint(balance=None, reward_noise=noise, confidence=c) for c in CONFIDENCES if c is not None}
    rules = {"None": TurningPoint(balance=None), **rules, "increments": TurningPoint(where="none")}
    rows = []
    for name, rule in rules.items():
        generator, sums = torch.Generator().manual_seed(seed), torch.zeros(5, dtype=torch.float64)
        for _ in range(CRITERION_DRAWS):
            noisy = true + noise * noise_of(true, changes, "image", generator)
            called = rule.selected(noisy)
            error = (process_rewards(noisy, called) - rewards)[..., trained].square().mean()
            pair = torch.stack([rule.assign(noisy)[..., trained].flatten(), target.flatten()])
            counts = [part.double().sum(-1).mean() for part in (called, called & ~turns, turns & ~called)]
            sums += torch.stack([*counts, error, torch.corrcoef(pair)[0, 1]]) / CRITERION_DRAWS
        called, false, missed, error, correlation = sums.tolist()
        rows.append({
            "confidence": name, "called": called, "false": false, "missed": missed, "rms error / noise": error**0.5 / noise,
            "correlation": correlation,
        })  # fmt: skip
    return rows


def cell(world: str, window: str, stage: str, table: Tensor, seed: int) -> dict[str, Any]:
    """Everything of one world, window and stage; `seed` is that of its noise."""
    changes, key = stochastic(window, table.shape[-1] - 1), {"world": world, "window": window, "stage": stage}
    kinds = list(product(LEVELS, SCORES, (True, False)))
    rows = [
        {**key, "noise": noise, "scores": scores, "consistent": consistent}
        | compare(table, changes, noise, scores, consistent, seed + number)
        for number, (noise, scores, consistent) in enumerate(kinds)
    ]
    kept = [{**key, "noise": noise, **row} for noise in LEVELS for row in criteria(table, changes, noise, seed)]
    found: dict[str, Any] = {"rows": rows, "criteria": kept}
    if window == "0:9":
        found["calibration"] = [{**key, "noise": noise, **calibration(table, changes, noise, seed)} for noise in LEVELS]
        size = float(gains(table)[..., changes].abs().mean())
        found["curves"] = [{**key, "mean |d|": size, "turns": rows[0]["turns"], "noise": CURVE, **curve(table, changes)}]
    return found


def main() -> None:
    """Measure what is missing, write JSON, Markdown and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--work", type=Path, default=Path("runs/detection"), help="folder of the true reward tables")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.report:
        record: dict[str, Any] = {
            "command": "python benchmarks/detection.py", **provenance(), "seeds": options.seeds, "prompts": PROMPTS,
            "members": MEMBERS, "draws": DRAWS, "criterion_draws": CRITERION_DRAWS, "edges": EDGES, "iterations": ITERATIONS,
        }  # fmt: skip
        for number, (world, window, stage) in enumerate(product(WORLDS, WINDOWS, STAGES)):
            table = torch.cat([tables_of(world, window, seed, options.work)[stage] for seed in options.seeds])
            started = time.process_time()
            for name, rows in cell(world, window, stage, table, 80_000 + 100 * number).items():
                record.setdefault(name, []).extend(rows)
            print(f"{world} {window} {stage}: {time.process_time() - started:.0f} processor seconds", flush=True)
        write_json(options.out, record)
    report(json.loads(options.out.read_text()), options.out.with_suffix(".md"), options.figure)


if __name__ == "__main__":
    main()

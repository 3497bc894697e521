"""The bias of every credit rule's gradient, measured on the 2-D world against the gradient of the
expected reward.

    python benchmarks/bias.py                     # about 10 minutes on one core; resumable
    python benchmarks/bias.py --report            # the table again

The policy is the exact mixture velocity plus its small network, with weights perturbed by N(0,
0.1^2) so that it is at no optimum. Flow-SDE (a = 0.7) on all steps but the last; soft reward; 18
prompts x 8 samples per batch. The true gradient is that through the stochastic steps, which is all
that a policy gradient can estimate; the fraction that belongs to the last step is stated with the
table. Both lengths are corrected for the noise of finitely many batches, so a cosine can be
slightly above 1. The random steps, a control, change the credit less than turning points.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from flowrl_bench.gradients import (
    Alignment,
    RawCredit,
    Setting,
    alignment,
    pathwise_gradients,
    policy_gradients,
)
from flowrl_bench.results_file import provenance
from flowrl_bench.rules import TurningPointVariant
from torch import Tensor

from flowrl.core.protocols import CreditAssigner
from flowrl.credit import GDPO, MovingAverageGain, StepwiseGain, TurningPoint, Uniform, Weighted
from flowrl.io import write_json
from flowrl.probes import Completion, Substeps, Tweedie
from flowrl.samplers import FlowSDE, Windowed
from flowrl.worlds.base import PolicyOptions, world

GROUP_SIZE = 8


@dataclass(frozen=True)
class Entry:
    """A rule, and whether its groups share their noise."""

    make: Callable[[], CreditAssigner]
    shared_noise: bool = False


RULES: dict[str, Entry] = {
    "R_T, leave-one-out baseline (raw)": Entry(RawCredit),
    "R_T - R_i, completion (raw)": Entry(lambda: RawCredit(1.0, Completion(), False)),
    "R_T - R_i, completion, leave-one-out (raw)": Entry(lambda: RawCredit(1.0, Completion())),
    "gains, completion (raw)": Entry(lambda: RawCredit(0.0, Completion(), False)),
    "gains, Tweedie (raw)": Entry(lambda: RawCredit(0.0, Tweedie(), False)),
    "Uniform(group)": Entry(Uniform),
    "Uniform(batch)": Entry(lambda: Uniform(std="batch")),
    "Uniform(group), shared noise": Entry(Uniform, True),
    "Weighted(noise)": Entry(Weighted),
    "StepwiseGain(joint), T'=5": Entry(StepwiseGain, True),
    "StepwiseGain(joint), T'=5, independent noise": Entry(StepwiseGain),
    "StepwiseGain(step), T'=5": Entry(lambda: StepwiseGain("step"), True),
    "StepwiseGain(joint), Tweedie": Entry(lambda: StepwiseGain(probe=Tweedie()), True),
    "StepwiseGain(joint), T'=2": Entry(lambda: StepwiseGain(probe=Substeps(2)), True),
    "StepwiseGain(joint), T'=8": Entry(lambda: StepwiseGain(probe=Substeps(8)), True),
    "StepwiseGain(joint), completion": Entry(lambda: StepwiseGain(probe=Completion()), True),
    "StepwiseGain(joint), lam=0.5": Entry(lambda: StepwiseGain(lam=0.5), True),
    "StepwiseGain(joint), lam=0.9": Entry(lambda: StepwiseGain(lam=0.9), True),
    "StepwiseGain(joint), lam=1": Entry(lambda: StepwiseGain(lam=1.0), True),
    "StepwiseGain(joint), lam=gamma=0.9": Entry(lambda: StepwiseGain(lam=0.9, gamma=0.9), True),
    "StepwiseGain(joint), pool=batch": Entry(lambda: StepwiseGain(pool="batch"), True),
    "MovingAverageGain": Entry(MovingAverageGain, True),
    "GDPO over stepwise gains": Entry(lambda: GDPO(StepwiseGain()), True),
    "dense gains (step, completion)": Entry(lambda: StepwiseGain("step", probe=Completion())),
    "TurningPoint (consistent)": Entry(TurningPoint),
    "TurningPoint, plain": Entry(lambda: TurningPoint(consistent=False)),
    "TurningPoint, trend balancing": Entry(lambda: TurningPoint(balance="trend")),
    "TurningPoint, no balancing": Entry(lambda: TurningPoint(balance=None)),
    "TurningPoint, no first step": Entry(lambda: TurningPoint(first_step=False)),
    "TurningPoint, joint": Entry(lambda: TurningPoint(normalise="joint")),
    "TurningPoint, random steps": Entry(lambda: TurningPointVariant(where="random")),
    "TurningPoint, added": Entry(lambda: TurningPoint(combine="add")),
    "TurningPoint, confidence 1": Entry(lambda: TurningPointVariant(confidence=1.0)),
    "TurningPoint, at least 0.1": Entry(lambda: TurningPointVariant(min_size=0.1)),
}


def setting(seed: int) -> Setting:
    """The 2-D world with a policy that is at no optimum."""
    mixture = world("mixture")
    policy = mixture.policy(PolicyOptions())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    prompts = mixture.prompts("direction", "train")
    return Setting(
        policy,
        Windowed(FlowSDE(0.7), range(9)),
        policy.schedule(10),
        mixture.reward("soft"),
        prompts,
    )


def measure(name: str, batches: int, seed: int, truths: Tensor) -> Alignment:
    """One rule."""
    entry = RULES[name]
    gradients = policy_gradients(
        setting(seed), entry.make(), batches, GROUP_SIZE, entry.shared_noise, seed=seed + 1000
    )
    return alignment(gradients, truths)


def table(results: dict[str, dict]) -> str:
    """Markdown."""
    lines = [
        (
            "| rule | cosine to the true gradient | scale | relative bias | signal to noise of a"
            " batch |"
        ),
        "|---|---|---|---|---|",
    ]
    for name, row in results.items():
        low, high = row["cosine_interval"]
        below, above = row["scale_interval"]
        lines.append(
            f"| {name} | {row['cosine']:.3f} [{low:.3f}, {high:.3f}] | {row['scale']:.2f}"
            f" [{below:.2f}, {above:.2f}] | {row['relative_bias']:.2f} |"
            f" {row['signal_to_noise']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, write JSON and Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--truth-batches", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bias.json")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {
        "batches": options.batches,
        "truth_batches": options.truth_batches,
        "seed": options.seed,
        "group_size": GROUP_SIZE,
    }
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    results = kept.get("results", {}) if kept.get("settings") == settings else {}
    missing = [name for name in RULES if name not in results]
    if missing and not options.report:
        started = time.monotonic()
        truths = pathwise_gradients(
            setting(options.seed), options.truth_batches, 400, options.seed, decisions_only=True
        )
        all_steps = pathwise_gradients(
            setting(options.seed), options.truth_batches, 400, options.seed
        )
        reached = {
            "share of the last, deterministic step": (
                1 - float(truths.mean(0) @ all_steps.mean(0) / all_steps.mean(0).square().sum())
            ),
        }
        print(
            f"true gradient: norm {float(truths.mean(0).norm()):.4f},"
            f" {time.monotonic() - started:.0f} s",
            flush=True,
        )
        for number, name in enumerate(missing, 1):
            results[name] = asdict(measure(name, options.batches, options.seed, truths))
            record = {
                "command": "python benchmarks/bias.py",
                **provenance(),
                "settings": settings,
                **reached,
                "results": {n: results[n] for n in RULES if n in results},
            }
            write_json(options.out, record)
            took = time.monotonic() - started
            print(
                f"{number}/{len(missing)} {took:.0f} s {name}: cosine"
                f" {results[name]['cosine']:.3f}",
                flush=True,
            )
    text = table({name: results[name] for name in RULES if name in results})
    record = json.loads(options.out.read_text())
    lost = record["share of the last, deterministic step"]
    settings["fraction of the whole gradient in the last step"] = round(lost, 3)
    listed = "; ".join(f"{name} {value}" for name, value in settings.items())
    head = (
        f"# Bias of the credit rules\n\n{__doc__ or ''}\n{listed}. 95% intervals by jackknife over"
        " batches.\n\n"
    )
    options.out.with_suffix(".md").write_text(head + text + "\n")
    print(text)


if __name__ == "__main__":
    main()

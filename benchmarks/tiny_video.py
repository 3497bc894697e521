"""Per-step credit on videos: a tiny random Wan, of the real classes, learns two rewards of motion.

    python benchmarks/tiny_video.py               # about 20 minutes on one core; resumable
    python benchmarks/tiny_video.py --report      # the table again

The pipeline is `flowrl_testing.tiny_wan`: its videos are noise, and a LoRA of rank 8 is trained.
Videos have 5 frames of 16 x 16 pixels (two latent frames). Rewards: `motion`, the mean absolute
change between successive frames, and `fade-in`, the mean of the last frame minus that of the first.
Scores are those of 64 videos from the same noise before and after, sampled by ODE. A seed draws the
LoRA's initial matrices and all noise of training.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flowrl_bench.results_file import provenance
from flowrl_compare.statistics import mean
from flowrl_testing.tiny import TINY_VIDEO, tiny_wan_policy

from flowrl.core.protocols import RewardModel
from flowrl.core.types import Prompt
from flowrl.io import write_json
from flowrl.methods import flow_grpo, stepwise_flow_grpo, tp_grpo
from flowrl.rewards import FunctionReward, Motion
from flowrl.rollout import initial_noise, sample_images, score
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer

METHODS = {"flow-grpo": flow_grpo, "stepwise-flow-grpo": stepwise_flow_grpo, "tp-grpo": tp_grpo}
REWARDS: dict[str, RewardModel] = {
    "motion": Motion(),
    "fade-in": FunctionReward(
        lambda videos, prompts: videos[:, -1].flatten(1).mean(1) - videos[:, 0].flatten(1).mean(1)
    ),
}
PROMPTS = [Prompt(text) for text in ("three red circles", "a dog", "a boat at sea", "rain")]
SETTINGS = {"num_steps": 6, "groups": 4, "group_size": 8, "minibatches": 2, "learning_rate": 0.01}
VIDEOS = 64


def train(method: str, reward: str, seed: int, iterations: int) -> dict[str, Any]:
    """Mean scores before and after, the paired difference with its standard error over videos, the
    spread of the base's scores, and the mean reward of every iteration's rollout.
    """
    policy = tiny_wan_policy(replace(TINY_VIDEO, lora_rank=8, lora_alpha=16.0, seed=seed))
    config = preset("tiny").apply(seed=seed, iterations=iterations, **SETTINGS)
    trainer = Trainer(policy, METHODS[method](), REWARDS[reward], PROMPTS, config)
    started = time.monotonic()
    before = evaluate(policy, REWARDS[reward])
    rows = [trainer.iteration() for _ in range(iterations)]
    after = evaluate(policy, REWARDS[reward])
    difference = after - before
    return {
        "before": float(before.mean()),
        "after": float(after.mean()),
        "difference": float(difference.mean()),
        "standard_error": float(difference.std() / VIDEOS**0.5),
        "std": float(before.std()),
        "rollouts": [row["reward_mean"] for row in rows],
        "seconds": time.monotonic() - started,
    }


def evaluate(policy: Any, reward: RewardModel) -> torch.Tensor:
    """Scores of `VIDEOS` videos of the prompts in turn."""
    prompts = PROMPTS * (VIDEOS // len(PROMPTS))
    with policy.frozen():
        batches = sample_images(
            policy, prompts, initial_noise(policy, VIDEOS), SETTINGS["num_steps"]
        )
        return torch.cat([score(reward, batch.images, batch.prompts).total for batch in batches])


def table(results: dict[str, Any]) -> str:
    """One line per reward and method: means over seeds, with Student's interval of the
    difference.
    """
    lines = [
        "| reward | method | seeds | base | trained | difference, 95% interval over seeds | lowest"
        " seed | in base's std |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for reward in REWARDS:
        for method in METHODS:
            runs = [run for name, run in results.items() if name.startswith(f"{reward} {method} ")]
            if len(runs) < 2:
                continue
            d = [run["difference"] for run in runs]
            base, after, std = (
                sum(run[key] for run in runs) / len(runs) for key in ("before", "after", "std")
            )
            lines.append(
                f"| {reward} | {method} | {len(d)} | {base:.4f} | {after:.4f} "
                f"| {mean(d).text(4, sign=True)} | {min(d):+.4f} | {mean(d).value / std:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, write the record and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "tiny_video.json"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    settings = {**SETTINGS, "iterations": options.iterations, "videos": VIDEOS}
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    results: dict[str, Any] = kept.get("results", {}) if kept.get("settings") == settings else {}
    for seed in range(options.seeds):
        for reward in REWARDS:
            for method in METHODS:
                name = f"{reward} {method} {seed}"
                if name in results or options.report:
                    continue
                results[name] = train(method, reward, seed, options.iterations)
                record = {
                    "command": (
                        f"python benchmarks/tiny_video.py --seeds {options.seeds} --iterations"
                        f" {options.iterations}"
                    ),
                    **provenance(),
                    "settings": settings,
                    "results": results,
                }
                write_json(options.out, record)
                print(
                    f"{name}: {results[name]['difference']:+.4f} in"
                    f" {results[name]['seconds']:.0f} s",
                    flush=True,
                )
    listed = "; ".join(f"{name} {value}" for name, value in settings.items())
    text = table(results)
    options.out.with_suffix(".md").write_text(
        f"# Tiny videos\n\n{__doc__ or ''}\n{listed}.\n\n{text}\n"
    )
    print(text)


if __name__ == "__main__":
    main()

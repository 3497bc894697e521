"""Finished runs that never ran: lines with a given learning curve, for the tests of the benchmark suite."""

import numpy as np
from flowrl_bench.evidence import Evidence
from flowrl_bench.measure import CURVE


def fake_line(rewards: list[float], nfe: float = 100.0, seconds: float = 1.0, **extra: float) -> dict:
    """A line whose curve has one evaluation per iteration, costing `nfe` and `seconds` each."""
    rows = []
    for i, reward in enumerate(rewards):
        row = dict.fromkeys(CURVE, 0.0) | {"iteration": i, "nfe": nfe * i, "seconds": seconds * i, "strict": reward / 2}
        rows.append(
            [({**row, "reward": reward, "soft": reward, "quality": -reward, "diversity": 1.0} | extra)[name] for name in CURVE]
        )
    seen = {"quality": -2.0, "points": 2.5, "null": 2.0}
    return {
        "curve": rows,
        "totals": {"nfe": 100.0, "train_nfe": 1.0, "calls": 4.0, "reward_calls": 2.0, "trajectories": 4, "seconds": 9.0},
        "phases": {"rollout": 1.0, "reward": 0.1, "update": 0.5},
        "gains": [[0.4, 0.2, 0.1], [0.1, 0.1, 0.1]],
        "samples": {"final": rewards[-1], "before": seen, "after": seen},
    }  # fmt: skip


def fake_evidence(seeds: int = 8, spread: float = 0.0, **arms: list[float]) -> Evidence:
    """Arms with the given rewards along training, and noise of `spread` on every seed's curve."""
    generator = np.random.default_rng(0)
    runs = {
        arm: {"task": [fake_line([r + spread * float(generator.normal()) for r in rewards]) for _ in range(seeds)]}
        for arm, rewards in arms.items()
    }
    return Evidence(runs, tuple(range(seeds)))


SLOW, FAST, FLAT = [0.0, 0.2, 0.4, 0.6], [0.0, 0.5, 0.6, 0.7], [0.0, 0.01, 0.0, 0.01]

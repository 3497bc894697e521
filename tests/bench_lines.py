"""For the tests of the benchmark suite: tiny runs, and lines with given learning curves instead of
measured ones.
"""

import numpy as np

from flowrl.bench.arms import ARMS
from flowrl.bench.evidence import Evidence
from flowrl.bench.measurements import CURVE
from flowrl.bench.results_file import make_line


def fake_line(rewards, nfe=100.0, seconds=1.0):
    """A line whose curve has one evaluation per iteration, costing `nfe` and `seconds` each."""
    rows = []
    for i, reward in enumerate(rewards):
        row = {"iteration": i, "nfe": nfe * i, "seconds": seconds * i, "reward": reward}
        row |= {"soft": reward, "strict": reward / 2, "quality": -reward, "diversity": 1.0}
        rows.append([row.get(name, 0.0) for name in CURVE])
    totals = {"nfe": 100.0, "train_nfe": 1.0, "calls": 4.0, "reward_calls": 2.0, "seconds": 9.0}
    return {
        "curve": rows,
        "totals": totals | {"trajectories": 4},
        "phases": {"rollout": 1.0, "reward": 0.1, "update": 0.5},
        "gains": [[0.4, 0.2, 0.1], [0.1, 0.1, 0.1]],
    }


def fake_evidence(seeds=8, spread=0.0, **arms):
    """Arms with the given rewards along training, and noise of `spread` on every seed's curve."""
    generator = np.random.default_rng(0)
    runs = {
        arm: [
            fake_line([r + spread * float(generator.normal()) for r in rewards])
            for _ in range(seeds)
        ]
        for arm, rewards in arms.items()
    }
    return Evidence(runs, tuple(range(seeds)))


SLOW, FAST = [0.0, 0.2, 0.4, 0.6], [0.0, 0.5, 0.6, 0.7]

SMALL = dict(iterations=1, groups=2, group_size=3, num_steps=5, window="0:3")
SMALL |= dict(eval_every=1, eval_samples=6, eval_steps=4)


def small_run(seed=0, **changes):
    """A run of one tiny iteration."""
    return ARMS["uniform"].run("mixture", {}, **{**SMALL, "seed": seed, **changes})


def small_line(seed=0, **changes):
    """A tiny run's line with an invented result."""
    row = dict.fromkeys(CURVE, 0.5) | {"iteration": 1, "seconds": 9.0}
    result = {
        "curve": [[row[name] for name in CURVE]],
        "totals": {"nfe": 3.0, "seconds": 9.0},
        "phases": {"rollout": 1.0},
        "gains": None,
    }
    return make_line(small_run(seed, **changes), result, "-")


RULE = """
from dataclasses import dataclass
from flowrl.probes import NoProbe

@dataclass(frozen=True)
class {name}:
    scale: float = 1.0
    probe = NoProbe()
    def assign(self, values, decisions):
        steps = len(decisions)
        centred = values[..., -1:] - values[..., -1:].mean(1, keepdim=True)
        return self.scale * centred.repeat(1, 1, {steps})
"""


def rule_file(path, name="Mine", steps="steps"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RULE.format(name=name, steps=steps))
    return path


def here(function, jobs, workers, *, finished, received, describe):
    """`run_jobs` in this process."""

    class Worker:
        sent = ()

        def __init__(self, key):
            self.key = key

        def send(self, message):
            received(self.key, message)

        def stopped(self):
            return False

    for key, arguments in jobs.items():
        finished(key, function(Worker(key), *arguments))
    return True

"""What the shape checks cost in a TP-GRPO iteration.

    python benchmarks/checks.py

Prints the mean cost of a checked call times the number of checked calls in an iteration, as a share
of the iteration.
"""

import os
import statistics
import subprocess
import sys

CODE = """
import time, torch
torch.set_num_threads(1)
from flowrl.training.build import make_trainer
from flowrl.training.config import RunConfig
trainer = make_trainer(RunConfig.of(method="tp-grpo", iterations=3))
trainer.iteration()
print(min(trainer.iteration()["seconds"] for _ in range(2)))
"""

COUNT = """
import time, torch, flowrl.core.types as types
torch.set_num_threads(1)
calls = 0
original = types.checked
def counting(thing):
    checked = original(thing)
    if isinstance(thing, type):
        init = checked.__init__
        def counted_init(self, *a, **k):
            global calls
            calls += 1
            init(self, *a, **k)
        checked.__init__ = counted_init
        return checked
    import functools
    @functools.wraps(checked)
    def counted(*a, **k):
        global calls
        calls += 1
        return checked(*a, **k)
    return counted
types.checked = counting
from flowrl.training.build import make_trainer
from flowrl.training.config import RunConfig
trainer = make_trainer(RunConfig.of(method="tp-grpo", iterations=3))
calls = 0
trainer.iteration()
print(calls)
"""

CALL = """
import time, torch
torch.set_num_threads(1)
from flowrl.flow import uniform_schedule
from flowrl.samplers import FlowSDE
x, schedule, step = torch.zeros(64, 8, 4, 4), uniform_schedule(10), torch.full((64,), 3)
best = 1e9
for _ in range(20):
    start = time.perf_counter()
    for _ in range(100):
        FlowSDE(0.7).transition(x, x, schedule, step)
    best = min(best, (time.perf_counter() - start) / 100)
print(best)
"""


def run(code: str, checks: str) -> float:
    """The number that `code` prints, with the checks on ("1") or off ("0")."""
    environment = {**os.environ, "FLOWRL_TYPECHECK": checks}
    return float(
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )


def main() -> None:
    """Measure and print."""
    off = statistics.median(run(CODE, "0") for _ in range(3))
    per_call = run(CALL, "1") - run(CALL, "0")
    calls = run(COUNT, "1")
    print(f"iteration without checks {off:.3f} s (median of 3 processes)")
    share = calls * per_call / off
    print(
        f"{calls:.0f} checked calls x {per_call * 1e6:.0f} us = {calls * per_call:.4f} s ="
        f" {share:.2%} of an iteration"
    )


if __name__ == "__main__":
    main()

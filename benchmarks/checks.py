"""What the checks of arguments cost: processor seconds of a TP-GRPO iteration with and without them,
in alternating fresh processes, and the number of checked calls.

    python benchmarks/checks.py [--pairs 5]
"""

import argparse
import os
import statistics
import subprocess
import sys

ITERATION = """
import sys, time, torch
torch.set_num_threads(1)
from flowrl.core import calls
from flowrl.training.build import make_trainer
from flowrl.training.config import RunConfig
trainer = make_trainer(RunConfig.of(method="tp-grpo", iterations=4))
trainer.iteration()
seconds = []
for _ in range(2):
    start = time.process_time()
    trainer.iteration()
    seconds.append(time.process_time() - start)
counted = 0
def count(frame, event, argument):
    global counted
    counted += frame.f_code.co_qualname == "checked_call.<locals>.call"
sys.settrace(count)
trainer.iteration()
print(min(seconds), counted)
"""


def iteration(checks: str) -> tuple[float, int]:
    """Seconds of an iteration with the checks on ("1") or off ("0"), and the checked calls."""
    ran = subprocess.run(
        [sys.executable, "-c", ITERATION],
        env={**os.environ, "FLOWRL_TYPECHECK": checks},
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, count = ran.stdout.split()
    return float(seconds), int(count)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="processes with and without checks")
    pairs = [(iteration("0"), iteration("1")) for _ in range(parser.parse_args().pairs)]
    shares = [on[0] / off[0] - 1 for off, on in pairs]
    print(
        f"{statistics.median(off[0] for off, _ in pairs):.3f} s without checks; "
        f"{pairs[0][1][1]} checked calls cost {statistics.median(shares):.1%} more "
        f"({min(shares):.1%} to {max(shares):.1%} in {len(pairs)} pairs)"
    )


if __name__ == "__main__":
    main()

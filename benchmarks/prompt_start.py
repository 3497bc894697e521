"""Seconds and main memory of embedding prompts with a tiny SD3 pipeline, at a first start and at a
restart. Empty the folder of FLOWRL_CACHE for a first start.

    python benchmarks/prompt_start.py --count 10000
    torchrun --nproc-per-node 2 benchmarks/prompt_start.py --count 10000
"""

import argparse
import resource
import time
from tempfile import TemporaryDirectory

import torch
from flowrl_testing.tiny import TINY, tiny_sd3

from flowrl.core.types import Prompt
from flowrl.distributed import Distributed
from flowrl.policies import load_policy


def main() -> None:
    """Print the progress and the costs of each process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="number of prompts")
    prompts = [Prompt(f"{n} red circles") for n in range(parser.parse_args().count)]
    torch.set_num_threads(1)
    with Distributed.join() as processes, TemporaryDirectory() as folder:
        tiny_sd3().save_pretrained(folder)
        policy = load_policy(folder, TINY)
        started, used = time.perf_counter(), time.process_time()
        policy.warm(prompts, processes, lambda state: print(state["prompts"]))
        seconds, cpu = time.perf_counter() - started, time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        rank = processes.rank
        print(f"process {rank}: {seconds:.1f} s, {cpu:.1f} processor s, {peak:.2f} GB at most")


if __name__ == "__main__":
    main()

"""The processes of speed.py that measure inside: CPU seconds of iterations by phase, and of options
with and without.

    python speed_child.py iterations WORLD COUNT    # {"METHOD, PHASE": seconds}, with the flowrl that is imported: any commit
    python speed_child.py options REPEATS           # {"OPTION": [[seconds without, seconds with], ...]}

Prints one line of JSON.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

METHODS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
SIZES = {
    "shapes": {"groups": 4, "group_size": 6, "num_steps": 10},
    "mixture": {
        "world": "mixture",
        "task": "direction",
        "groups": 16,
        "group_size": 12,
        "num_steps": 10,
    },
}
FORMER = {
    "groups": "prompts",
    "group_size": "members",
    "num_steps": "steps",
    "minibatches": "updates",
}
"""Names of settings at 6704dec."""


def trainer(method: str, **settings: Any) -> Any:
    """A trainer of the imported flowrl, whose interface was another one at 6704dec."""
    from flowrl.training.config import preset
    from flowrl.training.trainer import Trainer

    chosen = {"method": method, **settings}
    try:
        from flowrl.training.build import make_trainer
    except ImportError:
        config: Any = preset("default").apply(
            **{FORMER.get(name, name): value for name, value in chosen.items()}
        )
        world = config.make_world()
        policy, prompts = world.policy(config.policy_options()), world.prompts(config.task, "train")
        return Trainer(policy, config.make_method(), config.make_reward(), prompts, config)
    return make_trainer(preset("default").apply(**chosen))


def iterations(world: str, count: int) -> dict[str, float]:
    """CPU seconds of `count` iterations by method and phase, after a first one."""
    found: dict[str, float] = defaultdict(float)
    for method in METHODS:
        trained = trainer(method, **SIZES[world])
        trained.iteration()
        phase, began = "", time.process_time()

        def enter(name: str, method: str = method) -> None:
            nonlocal phase, began
            now = time.process_time()
            if phase:
                found[f"{method}, {phase}"] += now - began
            phase, began = name, now

        trained.on_phase = enter
        for _ in range(count):
            trained.iteration()
        enter("")
    return {
        name: round(seconds, 4) for name, seconds in found.items() if not name.endswith("reward")
    }


def cpu(work: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def updates(trained: Any) -> float:
    """CPU seconds of the update of an iteration."""
    marks: list[float] = []
    trained.on_phase = lambda phase: (
        marks.append(time.process_time()) if phase == "update" else None
    )
    trained.iteration()
    return time.process_time() - marks[0]


def options(repeats: int) -> dict[str, list[list[float]]]:
    """CPU seconds (without, with) of options of the working tree, which take turns."""
    cases = {
        "strict reward: pairs of advantage 0 left out of the update": zero_pairs(),
        "micro_batch auto instead of 256: update": automatic_batches(),
        "decode_batch 8 instead of 1: 16 images": decoding(),
        "AdamW fused instead of PyTorch's choice: 20 steps": fused(),
        "average of the weights in one call instead of a loop: 50 times": averages(),
    }
    found = {}
    for name, (without, included) in cases.items():
        for first in (without, included):
            first()
        found[name] = [[round(without(), 4), round(included(), 4)] for _ in range(repeats)]
    return found


Pair = tuple[Callable[[], float], Callable[[], float]]


def zero_pairs() -> Pair:
    """Without: an advantage of 1e-12 instead of 0 makes every pair count."""
    trained = trainer("flow-grpo", **SIZES["shapes"], reward_form="strict")
    known, every = trained.loss_batches, {"pair": False}

    def batches(sampler: Any, collected: Any, advantages: Any, used: Any) -> Any:
        if every["pair"]:
            advantages = torch.where(
                advantages == 0, torch.full_like(advantages, 1e-12), advantages
            )
        return known(sampler, collected, advantages, used)

    trained.loss_batches = batches

    def measured(pair: bool) -> float:
        every["pair"] = pair
        # two iterations: groups of equal rewards are not in every one
        return updates(trained) + updates(trained)

    return lambda: measured(True), lambda: measured(False)


def automatic_batches() -> Pair:
    usual, found = (
        trainer("flow-grpo", **SIZES["shapes"], micro_batch=size) for size in (256, "auto")
    )
    return lambda: updates(usual), lambda: updates(found)


def decoding() -> Pair:
    from flowrl.testing.tiny import TINY, tiny_sd3_policy

    one, eight = (tiny_sd3_policy(replace(TINY, decode_batch=size)) for size in (1, 8))
    latents = torch.randn(16, *one.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return lambda: cpu(lambda: one.decode(latents)), lambda: cpu(lambda: eight.decode(latents))


def fused() -> Pair:
    def steps(**kind: Any) -> Callable[[], float]:
        trained = trainer("flow-grpo", **SIZES["shapes"])
        parameters = [torch.nn.Parameter(p.detach().clone()) for p in trained.parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = torch.optim.AdamW(parameters, **kind)
        return lambda: cpu(lambda: [optimizer.step() for _ in range(20)])

    return steps(), steps(fused=True)


def averages() -> Pair:
    from flowrl.training.optim import update_average

    trained = trainer("flow-grpo", **SIZES["shapes"])

    def loop() -> None:
        with torch.no_grad():
            for average, parameter in zip(trained.average, trained.parameters, strict=True):
                average.lerp_(parameter, 0.1)

    def calls(work: Callable[[], Any]) -> Callable[[], float]:
        return lambda: cpu(lambda: [work() for _ in range(50)])

    return calls(loop), calls(lambda: update_average(trained.average, trained.parameters, 0.9))


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *rest = sys.argv[1:]
    print(
        json.dumps(
            iterations(rest[0], int(rest[1])) if what == "iterations" else options(int(rest[0]))
        )
    )

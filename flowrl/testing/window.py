"""The promises of a window."""

from dataclasses import dataclass
from typing import Any

import torch

from flowrl.testing.findings import Contract, expect, name_of, twice

CONTRACT = Contract("window")
promise = CONTRACT.promise

ITERATIONS = 50


@dataclass(frozen=True)
class Case:
    """A window, and the number of steps of the test grids."""

    window: Any
    steps: int = 20

    def __repr__(self) -> str:
        return name_of(self.window)


def steps_of(case: Case, iteration: int, seed: int) -> list[int]:
    """The steps of an iteration, drawn from a new generator."""
    return list(case.window.steps(case.steps, torch.Generator().manual_seed(seed), iteration))


@promise(
    "it returns one or more different steps in ascending order, from 0 to the number of steps - 1",
    basic=True,
)
def returns_steps(case: Case) -> None:
    for iteration in range(ITERATIONS):
        found = steps_of(case, iteration, seed=iteration)
        ordered = found == sorted(set(found)) and all(type(step) is int for step in found)
        fits = len(found) > 0 and found[0] >= 0 and found[-1] < case.steps
        expect(
            ordered and fits, f"the steps of iteration {iteration} among {case.steps} are {found}"
        )


@promise("the same generator state and iteration give the same steps, with no other randomness")
def draws_reproducibly(case: Case) -> None:
    hint = "Draw from the generator that is given, not from torch's global one, and keep no state."
    for iteration in (0, 1, ITERATIONS):
        first, second = twice(lambda i=iteration: steps_of(case, i, seed=0))
        found = f"the steps of iteration {iteration} are {first}, and {second} in a second call"
        expect(first == second, f"{found}. {hint}")

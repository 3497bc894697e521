"""The promises of a window."""

from typing import Any

import torch

from flowrl.testing.findings import Contract, expect, twice

CONTRACT = Contract("window")
promise = CONTRACT.promise

COUNT = 20
"""Number of steps of the test grids: the contract is checked for a window that fits 20 steps."""
ITERATIONS = 50


def steps_of(window: Any, iteration: int, seed: int) -> list[int]:
    """The steps of an iteration, drawn from a new generator."""
    return list(window.steps(COUNT, torch.Generator().manual_seed(seed), iteration))


@promise("it returns one or more different steps in ascending order, from 0 to the number of steps - 1", basic=True)
def returns_steps(window: Any) -> None:
    for iteration in range(ITERATIONS):
        found = steps_of(window, iteration, seed=iteration)
        ordered = found == sorted(set(found)) and all(type(step) is int for step in found)
        fits = len(found) > 0 and found[0] >= 0 and found[-1] < COUNT
        expect(ordered and fits, f"the steps of iteration {iteration} among {COUNT} are {found}")


@promise("the same generator state and iteration give the same steps, with no other randomness")
def draws_reproducibly(window: Any) -> None:
    hint = "Draw from the generator that is given, not from torch's global one, and keep no state."
    for iteration in (0, 1, ITERATIONS):
        first, second = twice(lambda i=iteration: steps_of(window, i, seed=0))
        found = f"the steps of iteration {iteration} are {first}, and {second} in a second call"
        expect(first == second, f"{found}. {hint}")

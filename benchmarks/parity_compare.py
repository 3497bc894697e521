"""How recorded and replayed tensors, gradients and weights are compared."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from parity_recording import Tensors, below
from parity_replay import OptimizerStep
from torch import Tensor

LEAST_GRADIENT = 1e-5
Difference = tuple[str, str, float]
"""State, quantity, difference."""


def reason(error: Exception) -> str:
    """The class and the text of an error, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def attempt(state: str, differences: Iterable[Difference]) -> Iterator[Difference]:
    """`differences`; an error ends them with its reason as the quantity, infinitely far."""
    try:
        for state, quantity, difference in differences:
            yield state, quantity, difference
    except Exception as error:
        yield state, reason(error), float("inf")


def distance(ours: Tensor, recorded: Tensor, scale: float = 0.0) -> float:
    """Largest absolute difference over `scale` (0: the largest recorded value); infinite if the
    shapes differ.
    """
    if ours.shape != recorded.shape:
        return float("inf")
    largest = float((ours.double() - recorded.double()).abs().max().nan_to_num(float("inf")))
    return largest / (scale or float(recorded.abs().max()) or 1.0)


def step_differences(
    steps: Sequence[OptimizerStep],
    recorded_steps: Sequence[Tensors],
    learning_rate: float,
    least: float = LEAST_GRADIENT,
) -> Iterator[tuple[str, float]]:
    """What the optimizer's steps recorded: the largest difference of all tensors of all steps."""
    norms, weights, shortened = [], [], []
    gradients = [float("inf")] * (len(steps) != len(recorded_steps))
    for number, (step, tensors) in enumerate(zip(steps, recorded_steps, strict=False)):
        recorded, after = below(tensors, "grad"), below(tensors, "weights_after")
        if recorded:
            scale = max(float(gradient.abs().max()) for gradient in recorded.values())
            gradients += [
                distance(step.gradients[name], gradient, scale)
                for name, gradient in recorded.items()
            ]
            gradients += [float("inf")] * (step.gradients.keys() != recorded.keys())
        norms.append(distance(torch.tensor(step.norm), tensors["grad_norm"]))
        if clipped := below(tensors, "clipped"):
            scale = max(float(gradient.abs().max()) for gradient in clipped.values())
            shortened += [distance(step.clipped[name], g, scale) for name, g in clipped.items()]
        clear = clear_gradients(steps[: number + 1], least)
        weights += [
            distance(step.weights[n][clear[n]], w[clear[n]], learning_rate)
            for n, w in after.items()
            if clear[n].any()
        ]
    if gradients:
        yield "gradients", max(gradients)
    yield "gradient norm", max(norms)
    if shortened:
        yield "clipped gradients", max(shortened)
    if weights:
        yield "weights / learning rate", max(weights)


def clear_gradients(
    steps: Sequence[OptimizerStep],
    least: float = LEAST_GRADIENT,
) -> dict[str, Tensor]:
    """The elements of every weight whose gradient was above `least` or exactly 0 at all of these
    steps."""
    kept = [{n: (g.abs() > least) | (g == 0) for n, g in step.gradients.items()} for step in steps]
    return {name: torch.stack([one[name] for one in kept]).all(0) for name in kept[0]}

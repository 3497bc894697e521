"""ODE solvers for evaluation, against the exact flow of a mixture."""

from dataclasses import replace

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.flow.mixture import GaussianMixture
from flowrl.flow.time import shifted_schedule, uniform_schedule
from flowrl.rollout import SOLVERS, Usage, integrate, solve
from flowrl.training.config import preset
from flowrl.training.run import Run
from flowrl.types import Condition

RING = GaussianMixture.ring()


class Exact:
    """The mixture's own velocity as a policy."""

    device = torch.device("cpu")

    def frozen(self):
        return torch.no_grad()

    def velocity(self, latent: torch.Tensor, timestep: torch.Tensor, condition: Condition) -> torch.Tensor:
        return RING.velocity(latent, timestep / 1000)


POLICY = Exact()
NOISE = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
CONDITION = Condition({"none": torch.zeros(400, 1)})


def error(solver: str, steps: int) -> float:
    """RMS distance from the flow followed in 1500 Euler steps."""
    end = solve(solver, POLICY, uniform_schedule(steps), CONDITION, NOISE, Usage())  # pyright: ignore[reportArgumentType]
    return float((end - fine()).square().mean().sqrt())


def fine(cache: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
    if not cache:
        cache.append(integrate(POLICY, uniform_schedule(1500), CONDITION, NOISE, Usage()))  # pyright: ignore[reportArgumentType]
    return cache[0]


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_converge_and_higher_orders_are_nearer(solver: str) -> None:
    errors = [error(solver, steps) for steps in (10, 20, 40)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.06
    if solver != "euler":
        assert error(solver, 20) < 0.6 * error("euler", 20)


def test_the_default_is_the_plain_integration() -> None:
    schedule = shifted_schedule(7)
    expected = integrate(POLICY, schedule, CONDITION, NOISE, Usage())  # pyright: ignore[reportArgumentType]
    assert torch.equal(solve("euler", POLICY, schedule, CONDITION, NOISE, Usage()), expected)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("solver", "calls"), [("euler", 6), ("heun", 11), ("dpm++", 6), ("unipc", 6)])
def test_evaluations_are_counted_and_chunks_do_not_matter(solver: str, calls: int) -> None:
    usage = Usage()
    schedule = shifted_schedule(6)
    whole = solve(solver, POLICY, schedule, CONDITION, NOISE, usage)  # pyright: ignore[reportArgumentType]
    assert (usage.calls, usage.nfe) == (calls, 400 * calls)
    parts = solve(solver, POLICY, schedule, CONDITION, NOISE, Usage(), max_batch=33)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(whole, parts)


def test_a_run_can_be_evaluated_by_another_solver(tmp_path) -> None:
    config = preset("tiny").apply(world="mixture", eval_solver="heun")
    assert Run(config, tmp_path / "a").execute()
    assert Run(replace(config, eval_solver="dpm++"), tmp_path / "b").execute()
    with pytest.raises(ConfigError, match=r"solver = 'rk4' is not allowed: one of euler, heun, dpm\+\+, unipc"):
        replace(config, eval_solver="rk4")

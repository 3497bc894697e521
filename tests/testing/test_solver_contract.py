"""The contract of multistep solvers: the built-in ones, one of a user, and one fault per
promise.
"""

import pytest
import torch

from flowrl.samplers import Multistep
from flowrl.testing import check_solver, solver, solver_contract
from flowrl.testing.findings import INAPPLICABLE, name_of

SOLVERS = [
    Multistep(),
    Multistep("unipc"),
    Multistep("sa"),
    Multistep("sa", tau=0.4),
    Multistep("sa", tau=1.0),
]
PROMISES = [promise.name for promise in solver.CONTRACT.promises]


class Midpoints:
    """Euler's method, and after the first step the slope at the middle of the step,
    extrapolated.
    """

    fault = ""

    def grid(self, schedule):
        if self.fault == "keeps_the_number_of_steps":
            return type(schedule)(schedule.times[::2])
        return schedule

    def solution(self, schedule, draw):
        times, own = schedule.times, []
        self.last = []

        def step(number, velocity, x):
            history = self.last if self.fault == "starts_anew" else own
            length, slope = times[number] - times[number + 1], velocity
            if history:
                ratio = length / (times[number - 1] - times[number])
                slope = velocity + 0.5 * ratio * (velocity - history[-1])
            if self.fault == "treats_samples_separately":
                slope = slope + 0.01 * (slope - slope.mean(0)) * (number < 5)
            if self.fault == "ends_at_the_predicted_image":
                slope = 1.01 * slope
            if self.fault == "converges":
                slope = slope + 0.1 * (velocity - history[0] if history else 0)
            history.append(velocity)
            end = x - length * slope
            return end.double() if self.fault == "returns_states" else end

        return step


@pytest.mark.parametrize("promise", solver.CONTRACT.promises, ids=lambda promise: promise.name)
@pytest.mark.parametrize("part", SOLVERS, ids=name_of)
def test_built_in_solvers(part, promise):
    assert promise.check(solver.Case(part)) in (None, INAPPLICABLE)


test_a_solver = solver_contract(Midpoints)


@pytest.mark.parametrize("name", PROMISES)
def test_faulty_solvers_are_named(name):
    faulty = Midpoints()
    faulty.fault = name
    found = check_solver(faulty)
    assert name in found.broken, str(found)


@pytest.mark.parametrize(
    ("draw", "broken"), [(torch.randn_like, ["starts_anew"]), (lambda x: torch.zeros_like(x), [])]
)
def test_noise_comes_from_the_argument_only(draw, broken):
    noise = draw

    class Own(Multistep):
        def solution(self, schedule, draw=noise):
            return super().solution(schedule, noise)

    assert [
        name for name in check_solver(Own("sa", tau=0.4)).broken if name == "starts_anew"
    ] == broken


def test_a_step_that_changes_its_input_is_named():
    class InPlace(Midpoints):
        def solution(self, schedule, draw):
            return lambda number, velocity, x: x.sub_(velocity * schedule.deltas[number])

    assert "x was modified in place" in str(check_solver(InPlace()))

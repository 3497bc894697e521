"""The planned cost of a probe in network evaluations."""

import pytest

from flowrl.core.tree import plain_tree
from flowrl.flow import uniform_schedule
from flowrl.probes import Completion, Shape, Substeps


@pytest.mark.parametrize(
    ("probe", "evaluations"),
    [
        (Substeps(3), 3 * 4 * 2),
        (Substeps(3, every=2), 3 * 2 * 2),
        (Substeps(2, every=4, guidance="off"), 3 / 2),
        (Substeps(2, guidance="off"), 3 * 4 / 2),
        (Completion(together=False), 3 * (3 + 2 + 1)),
        (Completion(solver="heun"), 3 * (6 + 4 + 2)),
    ],
    ids=repr,
)
def test_costs_of_three_trajectories_of_four_steps(probe, evaluations):
    """Without guidance an evaluation costs a half; whole numbers are integers."""
    shape = Shape(1, uniform_schedule(4), plain_tree(3, 4, (0, 1, 2, 3)), range(4))
    nfe = probe.cost(shape).nfe
    assert nfe == evaluations and isinstance(nfe, int) == float(evaluations).is_integer()

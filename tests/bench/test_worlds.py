"""The laboratory's variant of the 2-D world."""

import pytest
import torch
from flowrl_bench.worlds import Points, data
from flowrl_testing import check_world
from seeded import randn

from flowrl.worlds import mixture


@pytest.mark.parametrize("world", [Points(), Points(16)])
def test_worlds_keep_their_promises(world):
    findings = check_world(world)
    assert findings.ok and not findings.marked("advice"), str(findings)


def test_further_coordinates_are_independent_of_the_modes():
    """The base flow moves the plane as in two dimensions, and each other coordinate as N(0, s^2)
    alone.
    """
    x, t = randn(50, 5), torch.linspace(0, 1, 50)
    velocity, ring = data(5).velocity(x, t), mixture.ring()
    torch.testing.assert_close(velocity[:, :2], ring.velocity(x[:, :2], t))
    variance = (1 - t).square() * ring.std**2 + t.square()
    alone = (t - (1 - t) * ring.std**2) / variance
    torch.testing.assert_close(velocity[:, 2:], alone[:, None] * x[:, 2:], rtol=1e-4, atol=1e-4)

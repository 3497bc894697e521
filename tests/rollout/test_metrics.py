"""Signal and noise of a gradient, from the norms of a mini-batch and of its first micro-batch."""

import pytest
import torch
from seeded import randn
from small_run import BASE, trainer_of

from flowrl.rollout.metrics import LossMetrics

NAMES = {"gradient_signal", "gradient_noise"}


def test_signal_and_noise_are_unbiased():
    """12 samples' gradients with a known mean and covariance, the first 3 in a micro-batch whose
    loss is scaled by 64; 3,000 mini-batches. Within 4 standard errors, a false alarm of 1e-4.
    """
    mean, deviation = randn(32), 2 * randn(32)
    parameter = torch.nn.Parameter(torch.zeros(32))
    found = []
    for gradients in mean + deviation * randn(3000, 12, 32):
        metrics = LossMetrics(1)
        parameter.grad = 64 * gradients[:3].sum(0) / 12
        metrics.add_part([parameter], 3 / 12, torch.tensor(64.0))
        metrics.take()
        metrics.add_norm(float(gradients.mean(0).norm()))
        found.append([metrics.means[name] for name in sorted(NAMES)])
    noise, signal = torch.tensor(found).T
    for values, true in ((signal, mean.square().sum()), (noise, deviation.square().sum() / 12)):
        assert abs(values.mean() - true) < 4 * values.std() / len(values) ** 0.5


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_trainer_measures_its_first_mini_batch(minibatches):
    """Only with several micro-batches; both together are the squared norm of the gradient."""
    config = BASE.replace(minibatches=minibatches)
    whole, split = (trainer_of(config.replace(micro_batch=n)).iteration() for n in (1000, 3))
    assert not NAMES & whole.keys() and split.keys() >= NAMES
    row = split
    total = row["gradient_signal"] + row["gradient_noise"]
    assert (total == pytest.approx(row["grad_norm"] ** 2)) == (minibatches == 1)

"""Signal and noise of a gradient, from the norms of a mini-batch and of its first micro-batch; and
means by step.
"""

import pytest
import torch
from loss_rows import loss_rows
from seeded import randn
from small_run import BASE, trainer_of

from flowrl.core.types import Gaussian
from flowrl.losses import PolicyGradientLoss
from flowrl.rollout.metrics import BY_STEP, LossMetrics
from flowrl.run.config import preset

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


def test_means_by_step_are_those_of_the_first_mini_batch():
    """Nodes and log-ratios by hand, with weights 1 and 3, a row of weight 0 and a step without rows;
    the second mini-batch changes nothing.
    """
    behaviour = Gaussian(torch.zeros(4, 2), torch.ones(4))
    moved = Gaussian(torch.tensor([[0.2], [0.0], [0.4], [0.9]]).expand(4, 2).clone(), behaviour.std)
    moved.mean.requires_grad_()
    node = torch.tensor([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0], [9.0, 9.0]])
    weight = torch.tensor([1.0, 3.0, 1.0, 0.0])
    batch = loss_rows(
        moved, behaviour, next_node=node, weight=weight, step=torch.tensor([1, 1, 2, 2])
    )
    metrics = LossMetrics(4)
    for _ in range(2):
        metrics.add(1.0, PolicyGradientLoss().loss(batch), batch, batch.step)
        metrics.merge([metrics.take()])
    got = {name: metrics.means[name] for name in BY_STEP}
    first = 0.2 * 2.0 - 0.02  # m x - m^2 / 2, means over elements
    assert got["log_prob_noise"] == pytest.approx([0.0, first / 4, 0.08, 0.0])
    assert got["node_mean"] == pytest.approx([0.0, 2.0, 0.0, 0.0])
    assert got["node_rms"] == pytest.approx([0.0, ((5 + 3 * 4) / 4) ** 0.5, 0.0, 0.0])


def test_the_trained_steps_have_noise_in_half_precision():
    run = trainer_of(preset("tiny").apply(dtype="bfloat16"))
    run.iteration()  # the adapter's second matrices begin at 0
    row = run.iteration()
    trained = [share > 0 for share in row["step_shares"]]
    assert (
        [noise > 0 for noise in row["log_prob_noise"]]
        == trained
        == [r > 0 for r in row["node_rms"]]
    )
    assert 0 < max(row["log_prob_noise"]) <= row["ratio_noise"] * 1.01

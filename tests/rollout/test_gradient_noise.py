"""The signal and the noise of a mini-batch's gradient."""

import pytest
import torch
from small_run import BASE

from flowrl.rollout.metrics import gradient_noise
from flowrl.run.build import make_trainer


def test_gradient_noise_is_unbiased():
    """Gradients with |G|^2 = 3 and noise 5 of the whole, of which a quarter and an eighth are the
    processes' first parts: the means of 4,000 draws are within 5 standard errors.
    """
    generator = torch.Generator().manual_seed(0)
    mean = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    rows = mean + (8 * 1.0) ** 0.5 * torch.randn(4000, 8, 5, generator=generator)  # 5 = 8 x 5 / 8
    found = []
    for batch in rows:
        parts = [(float(batch[:2].mean(0).square().sum()), 1 / 4)]
        parts.append((float(batch[2].square().sum()), 1 / 8))
        metrics = gradient_noise(parts, float(batch.mean(0).square().sum()))
        found.append([metrics["gradient_signal"], metrics["gradient_noise"]])
    means, errors = torch.tensor(found).mean(0), torch.tensor(found).std(0) / 4000**0.5
    assert ((means - torch.tensor([3.0, 5.0])).abs() < 5 * errors).all()


def test_a_run_logs_the_noise_of_its_first_step():
    """With two micro-batches the metrics are those of the gradients' norms, whose parts a run with
    smaller micro-batches adds up; in one micro-batch nothing is known.
    """
    base = BASE.replace(minibatches=1, kl_weight=0.0, micro_batch=8)
    row = make_trainer(base).iteration()
    total = row["gradient_signal"] + row["gradient_noise"]
    assert total == pytest.approx(row["grad_norm"] ** 2, rel=1e-6)
    whole = make_trainer(base.replace(micro_batch=512)).iteration()
    assert "gradient_noise" not in whole
    assert whole["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)

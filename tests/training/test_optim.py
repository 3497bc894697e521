"""The optimizer on CUDA is fused, and averages take one call for all tensors: the same values, also
with sharded weights and a scaled loss. PyTorch has the fused kernel on the CPU as well, so that its
values can be compared without a GPU.
"""

from types import SimpleNamespace

import pytest
import torch
from small_run import SMALL, trained, trainer_of
from torch import nn

from flowrl.distributed import full
from flowrl.training.config import OptimConfig
from flowrl.training.optim import make_optimizer, update_average

ADAMW = torch.optim.AdamW


@pytest.mark.parametrize("on_cuda", [(True, True), (False, False), (True, False)])
def test_adamw_is_fused_if_all_parameters_are_on_cuda(on_cuda, monkeypatch):
    parameters = [SimpleNamespace(is_cuda=cuda) for cuda in on_cuda]
    monkeypatch.setattr(torch.optim, "AdamW", lambda *given, **named: named)
    assert make_optimizer(OptimConfig(), parameters)["fused"] is (all(on_cuda) or None)


def test_averages_of_many_tensors_have_the_bits_of_separate_ones():
    average, weights = ([torch.randn(n, 7) for n in (1, 5, 64)] for _ in range(2))
    expected = [mean.lerp(weight, 1 - 0.8) for mean, weight in zip(average, weights, strict=True)]
    update_average(average, [nn.Parameter(weight) for weight in weights], 0.8)
    assert all(map(torch.equal, average, expected))
    assert not any(mean.requires_grad for mean in average)


def steps(fused, scale, sharded, mesh, overflow_at=None):
    """Weights, averages and the last loss scale after four steps with `fused`."""
    network = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(network, mesh=mesh)
    parameters = list(network.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizer = ADAMW(parameters, lr=1e-2, betas=(0.9, 0.99), weight_decay=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
    for step in range(4):
        optimizer.zero_grad()
        loss = network(torch.randn(4, 7, generator=generator)).square().mean()
        scaler.scale(loss * (float("inf") if step == overflow_at else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        update_average(average, parameters, 0.8)
    tensors = [full(tensor).detach().flatten() for tensor in (*parameters, *average)]
    return torch.cat(tensors), scaler.get_scale()


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("scale", "overflow_at"), [(0.0, None), (1024.0, None), (1024.0, 1)])
def test_fused_steps_are_the_plain_ones(scale, overflow_at, sharded, mesh):
    plain, left = steps(None, scale, sharded, mesh, overflow_at)
    fused, left_fused = steps(True, scale, sharded, mesh, overflow_at)
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-6)
    assert left == left_fused == (scale / 2 if overflow_at else scale or 1.0)


def test_a_fused_optimizer_resumes_with_its_moments(monkeypatch):
    def fused(settings, parameters):
        return ADAMW(parameters, settings.learning_rate, fused=True)

    monkeypatch.setattr("flowrl.training.trainer.make_optimizer", fused)
    trainer, again = trainer_of(SMALL), trainer_of(SMALL)
    trainer.iteration()
    again.restore(trainer.state())
    assert again.optimizer.param_groups[0]["fused"]
    (_, expected), (_, result) = trained(trainer, 1), trained(again, 1)
    assert torch.equal(expected, result)

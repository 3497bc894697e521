"""Memory on a device against what was counted for it without one."""

from dataclasses import replace

import pytest
import torch
from device_cases import PROMPTS, REDNESS
from gpu_cases import RandomEmbeddings, random_pipeline

from flowrl import PolicyOptions
from flowrl.policies import PipelinePolicy
from flowrl.run.build import build_trainer, make_method
from flowrl.run.config import preset
from flowrl.run.models.memory import ARCHITECTURES, StorageCounter, count_memory
from flowrl.run.sizes import velocities

NARROW = {
    "sd3.5-medium": dict(
        num_layers=3, num_attention_heads=4, caption_projection_dim=256, dual_attention_layers=(0,)
    ),
    "flux.1-dev": dict(num_layers=1, num_single_layers=2, num_attention_heads=2),
}
"""Changes of the published architectures: fewer and narrower layers, prompts and images of the full
length.
"""
RESOLUTION, TRAINED, SAMPLED = 256, 4, 8


def trainer_of(name, device, checkpointing, monkeypatch):
    known = ARCHITECTURES[name]
    config = {**known.config, **NARROW[name]}
    monkeypatch.setitem(ARCHITECTURES, name, replace(known, config=config))
    sizes = dict(resolution=RESOLUTION, lora_rank=8, lora_alpha=8.0)
    narrow = dict(device=device, dtype="bfloat16", gradient_checkpointing=checkpointing)
    family = RandomEmbeddings(known.family, known.clip_tokens + known.family.text_tokens)
    pipe = random_pipeline(name, device, torch.bfloat16)
    policy = PipelinePolicy(pipe, family, PolicyOptions(**sizes, **narrow))
    config = preset("tiny").apply(method="flow-grpo", window=":-1", dtype="bfloat16")
    return build_trainer(config, policy, make_method(config), REDNESS, PROMPTS)


def peak_of(work, trainer):
    """Bytes that `work` has at most, besides what was there before."""
    work()  # the first call makes what is kept: libraries' work space, tables
    if trainer.policy.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with StorageCounter("cpu", trainer.policy.transformer) as counter:
        work()
    return counter.largest


@pytest.mark.slow  # a processor without instructions for bfloat16 needs a minute
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", NARROW)
def test_peaks_are_those_of_the_plan(name, checkpointing, device, monkeypatch):
    """Of a micro-batch of training and of a call of sampling, by at most 15%."""
    trainer = trainer_of(name, device, checkpointing, monkeypatch)
    counted = count_memory(ARCHITECTURES[name], trainer.policy.options, TRAINED, SAMPLED)
    update = peak_of(lambda: velocities(trainer, TRAINED, train=True), trainer)
    gradients = 4 * counted.trained_parameters
    assert update == pytest.approx(counted.update + gradients, rel=0.15)
    sampling = peak_of(lambda: velocities(trainer, SAMPLED, train=False), trainer)
    assert sampling == pytest.approx(counted.rollout, rel=0.15)

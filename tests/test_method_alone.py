"""The method without the machine: a trainer of plain objects."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
for name in (
    "flowrl.run", "flowrl.worlds", "flowrl.serving", "flowrl.cli", "flowrl.compare", "flowrl.testing",
    "flowrl.bench", "tyro", "pydantic",
):
    sys.modules[name] = None  # an import of it fails
"""
ITERATION = """
import torch
from flowrl.core.types import Prompt
from flowrl.flow.mixture import GaussianMixture
from flowrl.methods import METHODS
from flowrl.policies.mixture import MixturePolicy
from flowrl.rewards import FunctionReward
from flowrl.trainer import Trainer
assert "yaml" not in sys.modules  # diffusers, which a solver uses, imports it

angles = torch.arange(8) * torch.pi / 4
ring = GaussianMixture(torch.stack([angles.cos(), angles.sin()], 1), 0.15, torch.ones(8) / 8)
for method in METHODS.values():
    torch.manual_seed(0)
    policy = MixturePolicy(ring, float)
    reward = FunctionReward(lambda images, prompts: images[:, 0, 0, 0])
    sizes = {"groups": 1, "members": 540, "steps": 10}
    trainer = Trainer(policy, method(), reward, [Prompt("0"), Prompt("90")], **sizes)
    before = [parameter.clone() for parameter in trainer.parameters.values()]
    trainer.iteration()
    assert any(not torch.equal(*pair) for pair in zip(before, trainer.parameters.values()))
"""


@pytest.mark.satellite
def test_every_method_trains_without_settings_files_worlds_and_commands():
    assert len(ITERATION.strip().splitlines()) <= 25
    subprocess.run([sys.executable, "-c", WITHOUT + ITERATION], check=True)

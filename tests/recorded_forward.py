"""The policy of the recordings of forward-process methods, for tests of what surrounds their
losses.
"""

from pathlib import Path

import parity
import torch
from parity_recording import Recording, below, pipeline_folder
from parity_replay import give_embeddings, peft_name
from safetensors.torch import load_file

from flowrl.policies import PipelinePolicy
from flowrl.training.build import make_policy, make_world
from flowrl.training.config import RunConfig

FORWARD = parity.DATA.parent / "golden_forward"
COMMON = FORWARD / "common" / "inputs.safetensors"


class Recorded:
    """A recording, its policy with the current weights, and the condition on its prompts."""

    def __init__(self, method: str, work: Path):
        (self.recording,) = Recording.every(FORWARD, method)
        folder, lora = pipeline_folder(self.recording, work), self.recording.meta["lora"]
        config = RunConfig.of(
            world="model",
            task="prompts",
            reward_form="reward",
            model=str(folder),
            adapter=str(folder / "lora.safetensors"),
            prompts=str(folder / "prompts.txt"),
            reward="recorded",
            resolution=64,
            lora_rank=lora["r"],
            lora_alpha=float(lora["lora_alpha"]),
        )
        policy, prompts = make_policy(config), make_world(config).prompts("prompts", "train")
        assert isinstance(policy, PipelinePolicy)
        give_embeddings(policy.pipe, self.recording.inputs, prompts)
        self.policy = policy
        self.condition = policy.encode(prompts)
        self.common = load_file(COMMON)
        self.put("lora_current")

    def put(self, name):
        """Let the policy have these weights of the recording."""
        weights = below(self.common, name)
        with torch.no_grad():
            for key, parameter in self.policy.trainable().items():
                parameter.copy_(weights[peft_name(key)])

"""The policy that a finished run left behind."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from flowrl.errors import CheckpointError
from flowrl.protocols import FlowPolicy
from flowrl.training.config import RunConfig, load_config


def trained_policy(folder: Path, device: str = "") -> tuple[FlowPolicy, RunConfig]:
    """The policy of a finished run with its averaged weights. Raises `ConfigError` or `CheckpointError`.

    `device` left out: the CPU for a built-in world; for a model the run's own where that exists.
    """
    if not (folder / "weights.safetensors").is_file():
        raise CheckpointError(
            f"weights: {folder / 'weights.safetensors'} does not exist; {folder} must be the folder of a finished run"
        )
    config = RunConfig.from_dict(load_config(folder / "config.json"))
    own = config.device if config.model and torch.cuda.is_available() else "cpu"
    policy = config.make_world().policy(replace(config.policy_options(), device=device or own))
    load_trained(policy, folder)
    return policy, config


def load_trained(policy: FlowPolicy, folder: Path) -> None:
    """Put the averaged weights of the finished run in `folder` into its policy. Raises `CheckpointError`."""
    path = folder / "weights.safetensors"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights: {path} cannot be read: {error}") from error
    named = policy.trainable()
    if set(named) != set(tensors):
        raise CheckpointError(f"weights: {path} does not hold the weights that {folder / 'config.json'} describes")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(tensors[name])

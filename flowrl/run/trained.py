"""Policies with saved weights (`flowrl.run.saved`)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import CheckpointError, ConfigError, require
from flowrl.core.protocols import FlowPolicy
from flowrl.policies.pipeline import PipelinePolicy
from flowrl.run.build import make_policy, policy_options
from flowrl.run.config import RunConfig, load_config, preset
from flowrl.run.models.load import load_policy
from flowrl.run.models.weights import network_tensors
from flowrl.run.saved import SavedWeights, find_weights
from flowrl.run.started import with_stored_prompts
from flowrl.weights import weights_replaced


def settings_of(
    weights: Sequence[SavedWeights],
    trust: bool = False,
    model: str = "",
    original: str = "",
    **changes: Any,
) -> RunConfig:
    """The settings of the first run among the `weights`, or, without a run, those of the base
    `model`; with `changes`, and with `model` (and the `original` of a single file) in place of the
    run's.

    Raises `ConfigError` without a run and a model, if the runs have other base models or worlds
    than the first, or as `load_config`.
    """
    changes |= {"model": model, "original": original or None} if model else {}
    runs = [saved.path for saved in weights if saved.kind == "run"]
    if not runs:
        need = "the base model of these weights: --model FOLDER or a name on the Hub"
        require(bool(model), "model", model, f"{need}; {weights[0]} is no run")
        return preset("default").apply(**changes)
    first, *others = (load_config(run / "config.json", trust, **changes) for run in runs)
    for run, other in zip(runs[1:], others, strict=True):
        subjects = [(c.policy.model, c.environment.world) for c in (first, other)]
        if subjects[0] != subjects[1] or first.policy.base_weights != other.policy.base_weights:
            names = [model or name for model, name in subjects]
            raise ConfigError(
                f"weights: {run} is of another base model ({names[1]}) than {runs[0]} ({names[0]})"
            )
    return with_stored_prompts(runs[0], first)


def sampling_settings(
    weights: Sequence[SavedWeights],
    trust: bool = False,
    model: str = "",
    original: str = "",
    **changes: Any,
) -> RunConfig:
    """`settings_of`, with the size and the guidance of the run's evaluations, unless `changes` have
    them.
    """
    own = {"resolution": "eval_resolution", "guidance_scale": "eval_guidance"}
    chosen = changes | {other: None for name, other in own.items() if name in changes}
    config = settings_of(weights, trust, model, original, **chosen)
    return config.as_evaluated().replace(**changes)


def base_policy(config: RunConfig) -> FlowPolicy:
    """The policy of a run before training; of a model, without a trained LoRA and with fixed
    weights.
    """
    if not (model := config.policy.model):
        return make_policy(config)
    options = policy_options(config)
    adapter = options.adapter
    if adapter and not find_weights(adapter, option="adapter").is_full:
        adapter = None  # training began from this LoRA, which is not part of the base
    return load_policy(
        model, replace(options, adapter=adapter, fixed=True, gradient_checkpointing=False)
    )


def with_weights(policy: FlowPolicy, saved: SavedWeights) -> AbstractContextManager[None]:
    """A context in which a `base_policy` has the weights `saved`. They are read at once.

    Raises `CheckpointError` if they are missing, damaged or of another model.
    """
    if isinstance(policy, PipelinePolicy) and policy.options.trained is None:
        tensors = network_tensors(saved, policy.pipe)
        try:
            return policy.weights(tensors)
        except CheckpointError as error:
            raise CheckpointError(f"weights: {saved} does not match {error}") from error
    require(saved.kind == "run", "weights", str(saved), "a run, or one of its checkpoints")
    named = policy.trainable()
    return weights_replaced(policy, list(named.values()), _values(saved, named))


def _values(saved: SavedWeights, named: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """The weights of a run for the parameters `named`, in their order."""
    tensors = saved.tensors()
    shapes, found = ({n: tuple(t.shape) for n, t in one.items()} for one in (named, tensors))
    if shapes != found:
        name = min(n for n in shapes.keys() | found if shapes.get(n) != found.get(n))
        both = f"{found.get(name, 'missing')}, here {shapes.get(name, 'missing')}"
        raise CheckpointError(f"weights: {saved} does not match the policy: {name} is {both}")
    return [tensors[name].to(p.device, p.dtype) for name, p in named.items()]


def trained_policy(
    weights: str | Path, trust: bool = False, live: bool = False
) -> tuple[FlowPolicy, RunConfig]:
    """The policy of a run in any state, or of a checkpoint of it (RUN, RUN@000010, RUN@best), with
    its averaged weights, and the run's settings. It can be trained further.

    It is on the CPU, or for a model on the run's device if CUDA is available. For a LoRA that is no
    run's: `load_policy(MODEL, PolicyOptions(adapter=FILE))`.

    Args:
        weights: what `find_weights` accepts, of a run.
        trust: use settings of the run that name code.
        live: the weights themselves and not their average.

    Raises:
        ConfigError: the settings name code, without `trust`.
        CheckpointError: the weights are missing, damaged or of another model.
    """
    saved = find_weights(weights, live)
    allowed = "a run; of other weights: load_policy(MODEL, PolicyOptions(adapter=FILE))"
    require(saved.kind == "run", "weights", str(saved), allowed)
    config = settings_of([saved], trust)
    on_gpu = config.policy.model and torch.cuda.is_available()
    policy = make_policy(config if on_gpu else config.replace(device="cpu"))
    put_weights(policy, saved)
    return policy, config


def put_weights(policy: FlowPolicy, saved: SavedWeights) -> None:
    """Replace the trained weights of a run's policy by `saved`, for good. Raises `CheckpointError`
    if they do not fit.
    """
    named = policy.trainable()
    with torch.no_grad():
        for parameter, value in zip(named.values(), _values(saved, named), strict=True):
            parameter.copy_(value)

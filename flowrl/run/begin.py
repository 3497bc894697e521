"""What a new run begins with besides its model: the weights, averages and moments of another run
(the setting `start_from`).
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from flowrl.core.errors import ConfigError, require
from flowrl.run.checkpoint import Checkpoint, Checkpoints, restore_training_state, without_prefix
from flowrl.run.config import RunConfig, load_config
from flowrl.run.results import holds
from flowrl.run.saved import SavedWeights, find_weights
from flowrl.trainer import Trainer

SAME = ("world", "tuning", "lora_rank", "lora_alpha", "optimizer")
"""Settings that both runs must share: weights or moments mean something else with another value."""
BASE = ("model", "base_weights", "frozen_adapters", "quantize")
"""Settings of what the weights were trained on."""


def find_start(config: RunConfig) -> SavedWeights:
    """The checkpoint that `start_from` names. Raises `ConfigError` if it names no run, and
    `CheckpointError` if the run has no such checkpoint.
    """
    text = config.optim.start_from or ""
    places = Path(text), Path(text.rpartition("@")[0] or text)
    need = "a run or one of its checkpoints (RUN, RUN@000010, RUN@best, RUN@last)"
    fits = any(holds(place, "algorithm") for place in places)
    require(fits, "start_from", text, f"{need}; adapter takes other weights")
    return find_weights(text, live=True, option="start_from")


def require_start(config: RunConfig) -> str:
    """What to say of the run with which a new one begins: of its base, what differs; "" if nothing
    does.

    Raises `ConfigError` if `start_from` names no run, or one with other settings of `SAME`. Nothing
    is loaded.
    """
    if not config.optim.start_from:
        return ""
    saved = find_start(config)
    theirs = load_config(saved.path / "config.json", trust=True).typed()
    ours = config.typed()
    for name in SAME:
        if theirs[name] != ours[name]:
            raise ConfigError(
                f"start_from: {saved.path} has {name} {theirs[name]!r}, this run has"
                f" {ours[name]!r}{_advice(config)}"
            )
    other = [name for name in BASE if theirs[name] != ours[name]]
    texts = [f"{name} {theirs[name]!r}, not {ours[name]!r}" for name in other]
    base = f"; it was trained with {', '.join(texts)}" if texts else ""
    return f"begins with the weights, averages and moments of {saved.path}@{saved.checkpoint}{base}"


def _advice(config: RunConfig) -> str:
    text = f". The averaged weights alone: --adapter {config.optim.start_from}"
    return text if config.policy.model else ""


def load_start(trainer: Trainer, config: RunConfig) -> None:
    """Give a new trainer the weights, averages and moments of the checkpoint that `start_from`
    names, if there is one, on any number of processes; all else of it is as new.

    Raises `ConfigError` if the trained weights have other names or shapes.
    """
    if not config.optim.start_from:
        return
    processes, checkpoint = trainer.processes, Checkpoint({}, {})
    with processes.shared_errors():
        if processes.is_main:
            saved = find_start(config)
            checkpoint = Checkpoints(saved.path).load(saved.checkpoint)
            _require_same(without_prefix("weight.", checkpoint.tensors), trainer, config, saved)
    given = trainer.parameters, trainer.average, trainer.optimizer
    restore_training_state(checkpoint, *given, processes)
    trainer.copies.renew()


def _require_same(
    weights: Mapping[str, Tensor], trainer: Trainer, config: RunConfig, saved: SavedWeights
) -> None:
    """Raise `ConfigError` unless `weights` have the names and shapes of the trainer's."""
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in trainer.parameters.items()}
    if theirs == ours:
        return
    name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    raise ConfigError(
        f"start_from: {saved.path} has other trained weights, as in {name}:"
        f" {theirs.get(name, 'none')} there, {ours.get(name, 'none')} in this run"
        f"{_advice(config)}"
    )

"""Worlds by name, a user's, or given as objects, and a diffusers model as a world."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict

from flowrl.core.errors import CheckpointError, require
from flowrl.core.options import Whole
from flowrl.core.policy_options import PolicyOptions
from flowrl.core.processes import Processes
from flowrl.core.protocols import FlowPolicy, RewardModel, World
from flowrl.core.types import Prompt
from flowrl.rewards import evaluation_reward
from flowrl.run.distributed import Distributed
from flowrl.run.models.load import embed_prompts, load_policy
from flowrl.run.parts.prompt_sources import Sources
from flowrl.run.parts.prompts import (
    held_out,
    in_turns,
    read_prompts,
    read_sources,
    with_shares,
)
from flowrl.run.parts.registry import build, check_part
from flowrl.run.parts.specs import parse_spec
from flowrl.run.reading import read_bytes, read_json, reading


def check_hash(path: Path) -> None:
    """Raise `CheckpointError` unless `path` exists and matches the hash in its weight card, the
    JSON file of the same name.
    """
    card = path.with_suffix(".json")
    is_known = path.is_file() and card.is_file()
    if is_known:
        expected = read_json(card, dict[str, Any], CheckpointError).get("sha256")
        is_known = hashlib.sha256(read_bytes(path)).hexdigest() == expected
    if not is_known:
        raise CheckpointError(
            f"base_weights: {path} needs a card {card} with its 'sha256'; one of them is missing or"
            f" damaged, or they do not match; make both with `flowrl pretrain --out {path}`"
        )


class ModelWorld:
    """The world of a run that trains a diffusers pipeline.

    Its only task is "prompts", its only form of the reward "reward". The prompt files are read
    immediately, by the main process. Reward and policy are loaded at first use.

    Args:
        model: folder of the pipeline, or its name on the Hub (see `load_policy`).
        sources: the sources of the training and held-out prompts, and the reward. Without held-out
            ones, see `hold_out`, or else the training prompts.
        device: device of the reward's network.
        distributed: the processes.
        hold_out: without held-out prompts, hold some of the training prompts out (`held_out`).
        others: places of further prompts, for rewards that are evaluated only.

    Attributes:
        others: the prompts in each of these places.

    Raises:
        ConfigError: `prompts` or `reward` is empty, or a file of prompts cannot be read.
    """

    name = "model"
    tasks = ("prompts",)
    forms = ("reward",)
    elements = 0

    def __init__(
        self,
        model: str,
        sources: Sources,
        device: str = "cpu",
        distributed: Distributed = Distributed(),
        hold_out: bool = False,
        others: Sequence[str] = (),
    ) -> None:
        train, heldout, reward = sources.train, sources.heldout, sources.reward
        require(bool(train), "prompts", "", "a prompt file, or hf(name=NAME)")
        allowed = "NAME of a reward or path/to/file.py:Class: a model has none of its own"
        require(reward != "", "reward", reward, allowed)
        self._model, self._spec, self._device = model, reward, device
        files = "a file or a list: a resumed run reads the prompts again"
        require("-" not in {source.place for source in (*train, *heldout)}, "prompts", "-", files)
        self._every = distributed.in_main(lambda: read_sources(train))
        self._training, self._sources = self._every, train
        self._heldout = in_turns(self._every)
        self.others = distributed.in_main(lambda: {name: read_prompts(name) for name in others})
        self.evaluated_on = ""
        if heldout:
            self._heldout = in_turns(distributed.in_main(lambda: read_sources(heldout)))
        elif hold_out:
            self.hold_out(held_out(self._every))

    def hold_out(self, prompts: Sequence[Prompt]) -> None:
        """Evaluate on `prompts` and leave those with their keys out of training; without any, all
        are both. `evaluated_on` says so.
        """
        keys, count = {prompt.key for prompt in prompts}, len(self._every)
        names = [*dict.fromkeys(prompt.source for prompt in prompts)]
        need = "the sources of the start, whose held-out prompts stay; or a new run (--start-from)"
        known = {*names} <= {source.name for source in self._sources}
        require(known, "prompts", ", ".join(source.place for source in self._sources), need)
        self._heldout = in_turns(with_shares(prompts or self._every, self._sources))
        left = [prompt for prompt in self._every if prompt.key not in keys]
        every, kept = ({prompt.source for prompt in some} for some in (self._every, left))
        require(every == kept, "prompts", count, "one or more of each source that are not held out")
        self._training = with_shares(left, self._sources)
        instead = "--heldout-prompts FILE"
        self.evaluated_on = (
            f"{len(prompts)} prompts are held out of training for evaluations, which leaves"
            f" {len(self._training)} of {count}; {instead} replaces them"
            if prompts
            else f"evaluations are on the {count} training prompts, too few to hold any out;"
            f" {instead} gives others"
        )

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """The prompts of the training or the held-out file."""
        return list(self._heldout if part == "heldout" else self._training)

    def parse(self, text: str) -> Prompt:
        """Any text."""
        return Prompt(text)

    def reward(self, form: str) -> RewardModel:
        """The reward of the run, loaded once."""
        return self._reward

    @cached_property
    def _reward(self) -> RewardModel:
        reward = build("reward", self._spec, device=self._device)
        return evaluation_reward(reward)

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The pipeline's transformer, as a policy."""
        return load_policy(self._model, options)

    def embed(
        self,
        options: PolicyOptions,
        prompts: Sequence[Prompt],
        processes: Processes,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        """Embed `prompts` before the policy is loaded (`embed_prompts`)."""
        embed_prompts(self._model, options, prompts, processes, report)


def world(named: str | World) -> World:
    """A world by name, from a plug-in or a user's file, or given as an object; files are loaded
    again after a change only.

    Args:
        named: NAME, NAME(option=value) or path/to/file.py:Class; or the world itself.

    Returns:
        The world.

    Raises:
        ConfigError: the name is unknown, the file cannot be loaded, or a member of the world is
            missing or of another type.
    """
    if not isinstance(named, str):
        check_part("world", named)
        return _checked(named)
    file = parse_spec(named, "world").file
    changed = file.stat().st_mtime_ns if file and file.is_file() else 0
    return _built(named, file and file.resolve(), changed)


@cache
def _built(spec: str, file: Path | None, changed: int) -> World:
    """The world of a spec; a file is loaded again after a change."""
    return _checked(build("world", spec))


class _Members(BaseModel):
    """The types of a world's attributes."""

    model_config = ConfigDict(from_attributes=True, strict=True)

    name: Annotated[str, MinLen(1)]
    tasks: Annotated[Sequence[str], MinLen(1)]
    forms: Annotated[Sequence[str], MinLen(1)]
    elements: Whole
    defaults: Mapping[str, Any] = {}
    qualities: Mapping[str, Any] = {}


def _checked(chosen: World) -> World:
    """The world. Raises `ConfigError` for a member of another type than `World` says."""
    with reading(f"world: {type(chosen).__name__}"):
        _Members.model_validate(chosen)
    return chosen


def check_policy(chosen: World, policy: Any) -> None:
    """Check that the policy of a world is a policy and has latents of `World.elements` numbers.

    Args:
        chosen: the world.
        policy: what its method `policy` has returned.

    Raises:
        ConfigError: it does not fit.
    """
    kind, shape = type(policy).__name__, getattr(policy, "latent_shape", ())
    is_policy = isinstance(policy, FlowPolicy)
    require(is_policy, f"policy of world {chosen.name}", kind, "a flowrl.core.protocols.FlowPolicy")
    fits = chosen.elements in (0, math.prod(shape))
    allowed = f"{math.prod(shape)}, for the policy's latents of shape {shape}"
    require(fits, f"elements of world {chosen.name}", chosen.elements, allowed)


def prompts_of(chosen: World, task: str, part: str) -> list[Prompt]:
    """The prompts of a task. Raises `ConfigError` unless there are one or more."""
    prompts = list(chosen.prompts(task, part))
    fits = prompts and all(isinstance(prompt, Prompt) for prompt in prompts)
    require(bool(fits), f"{part} prompts of world {chosen.name}", prompts, "flowrl.Prompts")
    return prompts

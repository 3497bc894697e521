"""Sources of prompts in settings: a place, with a reward of its own and a share of the groups."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from flowrl.core.errors import require

TEXT = re.compile(
    r"(?P<place>.*?)(?P<at>(?:^|\s)@(?:\s+(?!weight=)(?P<reward>.+?))?)?"
    r"(?:\s+weight=(?P<weight>[^\s()]*))?",
    flags=re.DOTALL,
)


@dataclass(frozen=True)
class Source:
    """A source of prompts.

    Args:
        place: a file, a dataset or a slice (`flowrl.run.parts.prompts.read_prompts`).
        reward: spec of the reward of its images; "" for the setting `reward`.
        weight: its share of the groups, relative to the other sources.
        name: `Prompt.source` of its prompts; "" for a run with one source.
    """

    place: str
    reward: str = ""
    weight: float = 1
    name: str = ""


@dataclass(frozen=True)
class Sources:
    """The sources of a run.

    Args:
        train: those of the training prompts.
        heldout: those of the held-out prompts.
        reward: spec of the reward for the prompts of all.
    """

    train: tuple[Source, ...]
    heldout: tuple[Source, ...]
    reward: str

    @property
    def text(self) -> str:
        """The rewards in words."""
        if all(source.reward == self.reward for source in self.train):
            return self.reward
        return ", ".join(f"{source.reward} for {source.name}" for source in self.train)


def source_of(text: str, setting: str = "prompts") -> Source:
    """The source in ``PLACE @ REWARD weight=NUMBER``, of which reward and weight may be left out.
    Raises `ConfigError`, with the name of the `setting`, for another text.
    """
    place, at, reward, number = cast(re.Match[str], TEXT.fullmatch(text.strip())).groups()
    try:
        weight = 1.0 if number is None else float(number)
    except ValueError:
        weight = math.nan
    fits = bool(place) and bool(at) == bool(reward) and 0 < weight < math.inf
    allowed = "PLACE, PLACE @ REWARD or PLACE @ REWARD weight=NUMBER, the number above 0"
    require(fits, setting, text, allowed)
    return Source(place, reward or "", weight)


def place_and_reward(text: str, setting: str) -> tuple[str, str]:
    """The parts of ``PLACE @ REWARD``; of a reward alone, "" and the reward. Raises `ConfigError`
    for a weight.
    """
    source = source_of(text, setting)
    require(source.weight == 1, setting, text, "PLACE @ REWARD without a weight")
    return (source.place, source.reward) if source.reward else ("", text)


def rewards_of(texts: Sequence[str]) -> tuple[str, ...]:
    """The specs of the rewards in the texts of sources."""
    return tuple(source.reward for text in texts if (source := source_of(text)).reward)


def sources_of(prompts: Sequence[str], heldout: Sequence[str], reward: str) -> Sources:
    """The sources in the settings `prompts` and `heldout_prompts`; `reward` is that of those
    without their own.

    Raises `ConfigError` for a place that is named twice, or for a source without a reward if others
    have one.
    """
    train = [source_of(text) for text in prompts]
    held = [source_of(text, "heldout_prompts") for text in heldout]
    given = [(s, "prompts") for s in train] + [(s, "heldout_prompts") for s in held]
    for source, setting in given:
        need = "PLACE @ REWARD, since other sources have a reward of their own; or --reward"
        fits = bool(source.reward or reward) or not any(other.reward for other, _ in given)
        require(fits, setting, source.place, need)
    for setting, texts in {"prompts": train, "heldout_prompts": held}.items():
        places = [source.place for source in texts]
        twice = ", ".join(place for place, count in Counter(places).items() if count > 1)
        require(not twice, setting, twice, "each place once; weighted-sum adds rewards")
    every = [replace(source, reward=source.reward or reward) for source, _ in given]
    specs = list(dict.fromkeys(source.reward for source in every))
    if max(len(train), len(held)) > 1 or len(specs) > 1:
        every = _named(every)
    spec = specs[0] if specs else reward
    if len(specs) > 1:
        own = {source.name: source.reward for source in every}
        spec = f"by-source(models={ {text: text for text in specs} }, sources={own})"
    return Sources(tuple(every[: len(train)]), tuple(every[len(train) :]), spec)


def _named(sources: Sequence[Source]) -> list[Source]:
    """The sources with names: of a file without folder and suffix, unless two would be equal."""
    short = {
        s.place: s.place if re.search(r"[(\[]", s.place) else Path(s.place).stem for s in sources
    }
    counts = Counter(short.values())
    names = {place: name if counts[name] == 1 else place for place, name in short.items()}
    rewards = dict[str, str]()
    for source in sources:
        need = f"{rewards.setdefault(source.place, source.reward)}, as for its other prompts"
        require(
            rewards[source.place] == source.reward, f"reward of {source.place}", source.reward, need
        )
    return [replace(source, name=names[source.place]) for source in sources]

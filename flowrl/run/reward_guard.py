"""Rewards that fail: what a run does if a call of its reward raises an exception or takes too long,
within which bounds, and the counts.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import (
    ConfigError,
    DiskError,
    PartError,
    RewardContractError,
    RewardError,
    is_disk_error,
    part_call,
    require,
)
from flowrl.core.options import Count, Fraction, NonNegative, Whole, checked_options
from flowrl.core.processes import Processes
from flowrl.core.protocols import AnyReward, GroupReward, RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards.contract import (
    check_scores,
    component_methods,
    load_reward,
    marks_invalid,
    rewards_inside,
)
from flowrl.run.config import RunConfig
from flowrl.run.parts.specs import parse_spec
from flowrl.run.reward_pool import PooledReward, replaced

Scores = dict[str, Tensor]
"""Scores by component; those of a reward without components have the name ""."""
LONGEST = 300
"""Characters of an exception in a message."""


@dataclass(frozen=True)
class Stop:
    """The run stops at the first call that fails."""

    times = 0
    pause = 0.0


@checked_options
@dataclass(frozen=True)
class Retry:
    """A call that fails is repeated; the run stops if it fails every time.

    Args:
        times: repetitions, 1 or more.
        pause: seconds before each of them.
    """

    times: Count = 3
    pause: NonNegative = 2.0


@checked_options
@dataclass(frozen=True)
class Skip:
    """A call that fails is repeated. If it fails every time, its samples (of a reward that compares
    samples, its groups) are scored one by one, and those that fail again are marked invalid.

    Args:
        times: repetitions of each call, 0 or more.
        pause: seconds before each of them.
        share: largest share of an iteration's samples that may be skipped, in (0, 1].
        in_a_row: how many calls in a row may fail every time, 1 or more.
    """

    times: Whole = 1
    pause: NonNegative = 2.0
    share: Fraction = 0.5
    in_a_row: Count = 3


CHOICES = {"stop": Stop, "retry": Retry, "skip": Skip}
"""The values of the setting `on_reward_error`."""


def choice_of(text: str) -> Stop | Retry | Skip:
    """The setting `on_reward_error` as an object. Raises `ConfigError` for another text."""
    parsed = parse_spec(text, "on_reward_error")
    kind: Any = CHOICES.get(parsed.name)
    known = {item.name for item in fields(kind)} if kind else set[str]()
    allowed = "stop, retry(times=3, pause=2) or skip(times=1, pause=2, share=0.5, in_a_row=3)"
    require(bool(kind) and parsed.options.keys() <= known, "on_reward_error", text, allowed)
    try:
        return kind(**parsed.options)
    except ConfigError as error:
        raise ConfigError(f"on_reward_error: {error}") from error


class RewardGuard:
    """What a run does with failing calls of its reward, and this process's counts of them.

    Args:
        choice: what to do if a call fails.
        timeout: seconds after which a call counts as failed; 0: none.
    """

    def __init__(self, choice: Stop | Retry | Skip = Stop(), timeout: float = 0.0) -> None:
        self.choice, self.timeout = choice, timeout
        self.failures, self.skipped, self.in_a_row, self.last = Counter[str](), 0, 0, ""

    @staticmethod
    def of(config: RunConfig) -> "RewardGuard":
        """The guard that the settings describe."""
        environment = config.environment
        return RewardGuard(choice_of(environment.on_reward_error), environment.reward_timeout)

    @property
    def active(self) -> bool:
        """Whether the settings differ from stopping at the first exception."""
        return not isinstance(self.choice, Stop) or self.timeout > 0

    def around(self, reward: Any) -> Any:
        """`reward`, of which every part that is not a combination of flowrl's is guarded; `reward`
        itself if the guard is not `active`.
        """
        return replaced(reward, self._guarded) if self.active else reward

    def _guarded(self, part: Any, name: str) -> Any:
        if not isinstance(part, AnyReward) or _combines(part):
            return part
        kind = type(part.reward if isinstance(part, PooledReward) else part).__name__
        # the name of the user's class, which messages about slow calls and wrong scores contain
        base = _GuardedGroups if isinstance(part, GroupReward) else _Guarded
        return type(kind, (base,), {})(part, self, name or kind, kind)

    def call(self, name: str, title: str, function: Callable[[], Any], restart: Any) -> Any:
        """The result of `function`, which is repeated as the settings say.

        Args:
            name: the reward, by which failures are counted.
            title: the call, for messages.
            function: the call.
            restart: called after a time-out.

        Raises:
            RewardContractError, ConfigError, DiskError: at once, whatever the settings.
            RewardError: it has failed every time, or took too long.
        """
        for trial in range(self.choice.times + 1):
            if trial:
                time.sleep(self.choice.pause)
            try:
                with part_call(title):
                    result = within(self.timeout, title, function)
            except (RewardContractError, ConfigError, DiskError):
                raise
            except Exception as error:
                if is_disk_error(error):
                    raise
                if isinstance(error, RewardTimeoutError):
                    restart()
                self.failures[name] += 1
                self.last = _text(title, error)
                if trial == self.choice.times:
                    self._failed(error, title)
            else:
                self.in_a_row = 0
                return result

    def _failed(self, error: Exception, title: str) -> None:
        """Raise what a call raises that has failed every time."""
        self.in_a_row += 1
        if isinstance(self.choice, Stop):
            raise error
        tried = self.choice.times + 1
        text = f"{title} failed {tried} time{'s' * (tried > 1)}"
        if isinstance(self.choice, Skip):
            if self.in_a_row <= self.choice.in_a_row:
                raise SkippedError(text)
            text += f", the last of {self.in_a_row} calls in a row (on_reward_error allows"
            text += f" in_a_row={self.choice.in_a_row})"
        raise RewardError(f"{text}. {self._counts()}") from error

    def _counts(self) -> str:
        failed = ", ".join(f"{name} {count:,}" for name, count in self.failures.items())
        return f"Failed calls in this iteration: {failed}; the last: {self.last}"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Within this context, an error because all samples are invalid names the failed calls."""
        try:
            yield
        except RewardError as error:
            if type(error) is RewardError and self.skipped and self.last not in str(error):
                raise RewardError(f"{error}. {self._counts()}") from error
            raise

    @contextmanager
    def without_failures(self) -> Iterator[None]:
        """A context for a trial of the reward, whose findings count only if no call fails."""
        before = self.failures.total()
        try:
            yield
        except ConfigError:
            if self.failures.total() == before:
                raise

    def taken(
        self,
        samples: int,
        processes: Processes,
        invalid: int | None = None,
        what: str = "samples",
    ) -> dict[str, Any]:
        """The counts of all processes since the last call, for a metrics row: "reward_errors",
        failed calls by reward; "skipped", samples that were skipped; and "reward_error", the last
        exception. Empty without failures.

        A sample of which several images or components were skipped counts once, at most all that
        are `invalid`. All processes must call this. Raises `RewardError` if more of the `samples`
        (`what`, in the message) were skipped than the settings allow.
        """
        if not self.active:
            return {}
        parts = processes.gather((self.failures, self.skipped, self.last))
        failures = sum((part[0] for part in parts), Counter[str]())
        skipped = min(sum(part[1] for part in parts), samples if invalid is None else invalid)
        last = next((part[2] for part in parts if part[2]), "")
        self.failures, self.skipped, self.last = Counter[str](), 0, ""
        if not failures:
            return {}
        counts = {"reward_errors": dict(failures), "reward_error": last}
        if not skipped:
            return counts
        if isinstance(self.choice, Skip) and skipped > self.choice.share * samples:
            failed = ", ".join(f"{name} {count:,}" for name, count in failures.items())
            raise RewardError(
                f"{skipped:,} of {samples:,} {what} were skipped, more than on_reward_error allows"
                f" (share={self.choice.share:g}). Failed calls: {failed}; the last: {last}"
            )
        return counts | {"skipped": skipped}


class SkippedError(RewardError):
    """A call has failed every time, and its samples may be skipped."""


class RewardTimeoutError(RewardError):
    """A call has not returned within `reward_timeout`."""


def within(seconds: float, title: str, function: Callable[[], Any]) -> Any:
    """The result of `function`, in a thread if `seconds` is above 0.

    The thread has the caller's number of threads, CUDA device and stream, and computes no
    gradients. Raises `RewardTimeoutError` if it has not returned after that time; its result is
    then ignored.
    """
    if not seconds:
        return function()
    future, threads = Future[Any](), torch.get_num_threads()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def work() -> None:
        try:
            torch.set_num_threads(threads)
            if stream is not None:
                torch.cuda.set_device(stream.device)
                torch.cuda.set_stream(stream)
            with torch.no_grad():
                future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name=title, daemon=True)
    thread.start()
    thread.join(seconds)
    if not future.done():
        raise RewardTimeoutError(f"{title} did not return within {seconds:g} s (reward_timeout)")
    return future.result()


def _text(title: str, error: Exception) -> str:
    """An exception of a call on one line."""
    if isinstance(error, RewardTimeoutError):
        return str(error)
    cause = error.__cause__ if isinstance(error, PartError) and error.__cause__ else error
    return f"{title}: {type(cause).__name__}: {' '.join(str(cause).split())}"[:LONGEST]


def _combines(part: Any) -> bool:
    """Whether a reward is a combination of flowrl's, whose parts are guarded instead."""
    own = type(part).__module__.partition(".")[0] == "flowrl"
    return own and is_dataclass(part) and bool(rewards_inside(part))


class _Guard:
    """What guarded rewards share.

    Args:
        reward: the reward.
        guard: its guard.
        name: the name by which failures are counted: that of the component, or of the class.
        kind: the name of its class.
    """

    def __init__(self, reward: Any, guard: RewardGuard, name: str, kind: str) -> None:
        self.reward, self.guard, self.name = reward, guard, name
        self._kind, self._known = kind, dict[str, Scores]()
        if (methods := component_methods(reward)) is not None:
            parts = "group_parts" if isinstance(reward, GroupReward) else "parts"
            setattr(self, parts, partial(self._scores, parts))
            self.total = partial(_total, methods[1])

    @property
    def marks_invalid(self) -> bool:
        """Samples may be skipped."""
        return isinstance(self.guard.choice, Skip) or marks_invalid(self.reward)

    def load(self) -> None:
        """Load the reward."""
        load_reward(self.reward)

    def _scores(self, call: str, images: Tensor, prompts: Sequence[Prompt]) -> Scores:
        """The scores by component that the method `call` returns, NaN for samples that are
        skipped.
        """
        found = self._pieces(call, images, prompts)
        if scored := next((piece for piece in found if piece is not None), None):
            self._known[call] = {name: part[:0].float() for name, part in scored.items()}
        single = {"": torch.empty(0, device=images.device)} if call.startswith("score") else None
        known = self._known.get(call, single)
        if known is None:
            raise RewardError(
                f"{self._kind} has not scored any sample yet, so its components are not known:"
                f" {self.guard.last}"
            )
        size = (1, *images.shape[1:2]) if isinstance(self.reward, GroupReward) else (1,)
        lost = {name: part.new_full(size, torch.nan) for name, part in known.items()}
        return {
            name: torch.cat([lost[name] if piece is None else piece[name] for piece in found])
            for name in known
        }

    def _pieces(self, call: str, images: Tensor, prompts: Sequence[Prompt]) -> list[Scores | None]:
        """The scores of a batch, or piece by piece if it fails; None for a piece that is skipped
        (of a reward that compares samples, a group).
        """
        function, title = partial(self._checked, call, images, prompts), f"{self._kind}.{call}"
        if self.name != self._kind:
            title = f"{self.name} ({title})"
        restart = getattr(self.reward, "restart", lambda: None)
        try:
            return [self.guard.call(self.name, title, function, restart)]
        except SkippedError:
            if len(prompts) > 1:
                rows = [slice(row, row + 1) for row in range(len(prompts))]
                return [self._pieces(call, images[row], prompts[row])[0] for row in rows]
            self.guard.skipped += images.shape[1] if isinstance(self.reward, GroupReward) else 1
            return [None]

    def _checked(self, call: str, images: Tensor, prompts: Sequence[Prompt]) -> Scores:
        """The scores by component, which fulfil the contract of the reward itself."""
        result = getattr(self.reward, call)(images, prompts)
        parts = dict(result) if isinstance(result, Mapping) else {"": result}
        members = images.shape[1] if isinstance(self.reward, GroupReward) else None
        for name, scores in parts.items():
            origin = f"{self._kind}, component {name!r}," if name else f"{self._kind}.{call}"
            check_scores(scores, prompts, origin, marks_invalid(self.reward), members)
        return parts


class _Guarded(_Guard):
    """A reward of single samples."""

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample], NaN for samples that are skipped."""
        return self._scores("score", images, prompts)[""]


class _GuardedGroups(_Guard):
    """A reward that compares samples."""

    @property
    def evaluation(self) -> RewardModel:
        """That of the reward, guarded."""
        return self.guard.around(self.reward.evaluation)

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [prompt, member], NaN for groups that are skipped."""
        return self._scores("score_groups", images, prompts)[""]


def _total(total: Callable[[Mapping[str, Tensor]], Tensor], parts: Mapping[str, Tensor]) -> Tensor:
    """The total of components, NaN where one of them is."""
    missing = torch.stack([part.isnan() for part in parts.values()]).any(0)
    return torch.where(missing, torch.nan, total(parts))


def failures_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The failed calls and skipped samples of all `rows` of metrics.jsonl on one line; "" without
    failures.
    """
    failures = Counter[str]()
    for row in rows:
        for part in (row, row.get("evaluation") or {}):
            failures.update(part.get("reward_errors", {}))
    if not failures:
        return ""
    named = ", ".join(f"{name} {count:,}" for name, count in failures.items())
    skipped, total = (sum(row.get(name, 0) for row in rows) for name in ("skipped", "trajectories"))
    return f"Failed calls of the reward: {named}; {skipped:,} of {total:,} samples were skipped"

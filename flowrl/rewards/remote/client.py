"""A reward behind a server, as a reward."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl.errors import RewardError, require
from flowrl.rewards.combine import weighted_total
from flowrl.rewards.remote.calls import Call
from flowrl.rewards.remote.connections import Connections
from flowrl.rewards.remote.wire import Answer, GiveUp
from flowrl.types import Prompt


@dataclass(frozen=True)
class RemoteReward:
    """Scores from the reward server at `url` (docs/reward-server.md), in the order of the pictures.

    The pictures travel in requests of `batch`, `concurrency` of them at a time, over connections that are kept. An attempt
    fails where the server cannot be reached, answers with an error that may pass (500, 503, ...), says nothing for `timeout`
    seconds, or its answer is cut off; the next one follows after a pause of `backoff` seconds, doubled each time up to 20, less
    a random half. After `retries` repetitions of one request, or `deadline` seconds for the whole call, `score` raises one
    `RewardError`; the trainer then stops with its last checkpoint in place, and the run can be resumed when the server is back.
    Refusals that will not pass (a wrong token, a request too large, a prompt the reward does not know) and answers that break
    the contract (a wrong number of scores, NaN) raise it at once. A sample that the served reward marks as invalid, which the
    server says in a list of its own, is NaN here (`protocols.RewardModel`).

    `images`: "safetensors" sends float32, so that scores equal those in process; "png" sends 8 bits per channel, a fraction of
    the bytes. Metadata must be JSON; data classes in it become objects, tuples lists. The token comes from `token_file`, or from
    the environment variable FLOWRL_REWARD_TOKEN; there is no option for the token itself, because a run's record keeps its
    options. `certificate`: a file with the certificates (PEM) to trust instead of the system's.
    """

    url: str
    images: Literal["safetensors", "png"] = "safetensors"
    batch: int = 32
    concurrency: int = 4
    timeout: float = 120.0
    deadline: float = 900.0
    retries: int = 40
    backoff: float = 0.5
    token_file: str = ""
    certificate: str = ""
    _connections: Connections = field(init=False, repr=False, compare=False)
    marks_invalid: ClassVar[bool] = True

    def __post_init__(self) -> None:
        good = isinstance(self.url, str) and self.url.startswith(("http://", "https://")) and "@" not in self.url
        require(good, "remote.url", self.url, "http://HOST:PORT or https://HOST:PORT")
        require(self.images in ("safetensors", "png"), "remote.images", self.images, "safetensors or png")
        for name in ("batch", "concurrency"):
            require(getattr(self, name) >= 1, f"remote.{name}", getattr(self, name), "1 or more")
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"remote.{name}", value, "a positive number of seconds")
        require(self.retries >= 0, "remote.retries", self.retries, "0 or more")
        require(math.isfinite(self.backoff) and self.backoff >= 0, "remote.backoff", self.backoff, "0 seconds or more")
        object.__setattr__(self, "_connections", Connections(self))

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[sample, channel, height, width] and as many prompts -> [sample], on the pictures' device. Raises `RewardError`."""
        scores = [value for answer in self._ask(images, prompts) for value in answer.scores]
        return torch.tensor(scores, dtype=torch.float32, device=images.device)

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._connections.close()

    def _ask(self, images: Tensor, prompts: Sequence[Prompt], parts: bool = False) -> list[Answer]:
        """The server's answers, one per request, in the order of the pictures."""
        if images.ndim != 4 or len(images) != len(prompts):
            raise RewardError(f"remote: got images {tuple(images.shape)} and {len(prompts)} prompts; allowed: as many of each")
        call = Call(self, time.monotonic() + self.deadline, parts)
        pieces = [slice(start, start + self.batch) for start in range(0, len(prompts), self.batch)]
        if len(pieces) <= 1:
            return [call.send(images[piece], prompts[piece]) for piece in pieces]
        return call.send_all(images, prompts, pieces)


@dataclass(frozen=True)
class RemoteSum(RemoteReward):
    """A `remote` reward for a server of a weighted sum: every component arrives, is logged, and may be credited one by one.

    A `protocols.CompositeReward`: `parts` are the components' own scores, `total` weights them as the server says it does. Raises
    `RewardError` where something else than a `weighted-sum` is served, or its components or weights change between two calls (a
    server that was started again with others); otherwise as `RemoteReward`, with the same options.
    """

    _weights: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def parts(self, images: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Every component's scores [sample], unweighted."""
        answers = self._ask(images, prompts, parts=True)
        for answer in answers:
            known = self._weights or answer.weights
            if answer.weights != known:
                raise GiveUp(f"remote-sum: the weights at {self.url} were {known}, and are {answer.weights} now")
            self._weights.update(known)
        values = {name: [value for answer in answers for value in answer.parts[name]] for name in self._weights}
        return {name: torch.tensor(found, dtype=torch.float32, device=images.device) for name, found in values.items()}

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of `parts` that came from this server."""
        unknown = sorted(set(parts) - set(self._weights))
        if unknown:
            raise RewardError(
                f"remote-sum: components {', '.join(unknown)}; the server has {', '.join(self._weights) or 'none yet'}"
            )
        return weighted_total(parts, self._weights)

"""Copies of the trained weights that follow them slowly: the old policy of a forward-process loss, its averages."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from flowrl.distributed import Distributed, full_tensors, load_full_tensors
from flowrl.errors import ConfigError
from flowrl.forward import WeightCopy
from flowrl.protocols import FlowPolicy
from flowrl.training.checkpoint import Checkpoint
from flowrl.training.optim import update_average, weights_replaced


class Behaviour:
    """A copy `name` of a policy's `parameters`, which follows them as its `copy` declares.

    The trainer calls `after_update` after every step that the optimizer has taken and `after_iteration` at the end of an
    iteration, both with the number of steps so far. Within `weights` the policy has the copy's weights.

    `is_current`: the copy equals the policy's weights, because it was just made or its decay was 0 and no step has followed.
    Its velocity is then the current one without gradient, and needs no evaluation. `state` and `restore` as for the trainer.
    """

    def __init__(self, name: str, copy: WeightCopy, policy: FlowPolicy, parameters: Mapping[str, nn.Parameter]) -> None:
        self.name, self.copy, self.policy = name, copy, policy
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.is_current = True

    def after_update(self, steps: int) -> None:
        """The optimizer has changed the weights, with step number `steps`."""
        self.is_current = False
        if self.copy.every == "update":
            self._follow(steps)

    def after_iteration(self, steps: int) -> None:
        """An iteration has ended after `steps` optimizer steps."""
        if self.copy.every == "iteration":
            self._follow(steps)

    def _follow(self, steps: int) -> None:
        decay = self.copy.decay.at(steps)
        update_average(self.values, self.parameters, decay)
        self.is_current = self.is_current or decay == 0

    def samples(self, steps: int) -> bool:
        """Whether trajectories are sampled with this copy after `steps` optimizer steps."""
        begin = self.copy.sample_from
        return begin is not None and steps >= begin

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within this context the policy has the copy's weights; nothing is replaced if they are the current ones."""
        if self.is_current:
            yield
            return
        with weights_replaced(self.policy, self.parameters, self.values):
            yield

    def state(self) -> Checkpoint:
        """The copy under names that begin with "copy."; full tensors in the main process, in which sharded ones are gathered."""
        tensors = full_tensors(dict(zip(self.names, self.values, strict=True)))
        prefix = f"copy.{self.name}"
        return Checkpoint({f"{prefix}.{name}": t.clone() for name, t in tensors.items()}, {f"{prefix}.current": self.is_current})

    def restore(self, checkpoint: Checkpoint, distributed: Distributed = Distributed()) -> None:
        """Go on from `state()`, in place; the main process's checkpoint counts. Raises `ConfigError` if it lacks this copy."""
        prefix = f"copy.{self.name}."
        found = {name.removeprefix(prefix): t for name, t in checkpoint.tensors.items() if name.startswith(prefix)}
        with distributed.shared_errors():
            for name, value in zip(self.names, self.values, strict=True) if distributed.is_main else ():
                if name not in found or found[name].shape != value.shape:
                    raise ConfigError(f"checkpoint: no copy {self.name!r} of {name}; it belongs to another loss or model")
        with torch.no_grad():
            load_full_tensors(dict(zip(self.names, self.values, strict=True)), found, distributed)
        self.is_current = bool(distributed.gather(checkpoint.values.get(f"{prefix}current", False))[0])

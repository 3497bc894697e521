"""Copies of the trained weights that follow them slowly: the old policy and the averages of a
forward-process loss.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from flowrl.core.errors import ConfigError
from flowrl.core.forward import WeightCopy
from flowrl.core.protocols import FlowPolicy, ForwardLoss, PolicyLoss
from flowrl.distributed import Distributed, full_tensors, load_full_tensors
from flowrl.training.checkpoint import Checkpoint, in_own_memory
from flowrl.training.optim import update_average, weights_replaced


class Behaviour:
    """A copy of a policy's parameters that follows them as declared.

    The trainer calls `after_update` after every step that the optimizer has taken and
    `after_iteration` at the end of an iteration, both with the number of steps so far. Within
    `weights` the policy has the copy's weights.

    `is_current`: the copy equals the policy's weights, because it is new, or its decay was 0 and no
    step has followed. Its velocity is then the current one without gradient and needs no
    evaluation. `state` and `restore` as for the trainer.

    Args:
        name: name of the copy.
        copy: the loss's declaration.
        policy: the policy.
        parameters: the trained parameters by name.
    """

    def __init__(
        self,
        name: str,
        copy: WeightCopy,
        policy: FlowPolicy,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.name, self.copy, self.policy = name, copy, policy
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.is_current = True

    def after_update(self, steps: int) -> None:
        """Update the copy after optimizer step number `steps`."""
        self.is_current = False
        if self.copy.every == "update":
            self._follow(steps)

    def after_iteration(self, steps: int) -> None:
        """Update the copy after an iteration, when the optimizer has taken `steps` steps."""
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
        """Within this context the policy has the copy's weights; nothing is replaced if they are
        current.
        """
        if self.is_current:
            yield
            return
        with weights_replaced(self.policy, self.parameters, self.values):
            yield

    def state(self, copied: bool = True) -> Checkpoint:
        """The copy under names that begin with "copy."; `copied` as for the trainer.

        The main process has full tensors, gathered from all processes if they are sharded.
        """
        tensors = full_tensors(dict(zip(self.names, self.values, strict=True)))
        prefix = f"copy.{self.name}"
        named = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
        state = Checkpoint(named, {f"{prefix}.current": self.is_current})
        return in_own_memory(state, self.values) if copied else state

    def restore(self, checkpoint: Checkpoint, distributed: Distributed = Distributed()) -> None:
        """Continue from `state()`, in place, with the main process's checkpoint. Raises
        `ConfigError` if it does not contain this copy.
        """
        prefix = f"copy.{self.name}."
        found = {
            name.removeprefix(prefix): t
            for name, t in checkpoint.tensors.items()
            if name.startswith(prefix)
        }
        with distributed.shared_errors():
            for name, value in (
                zip(self.names, self.values, strict=True) if distributed.is_main else ()
            ):
                if name not in found or found[name].shape != value.shape:
                    raise ConfigError(
                        f"checkpoint: no copy {self.name!r} of {name}; it belongs to another loss"
                        " or model"
                    )
        with torch.no_grad():
            load_full_tensors(dict(zip(self.names, self.values, strict=True)), found, distributed)
        self.is_current = bool(
            distributed.gather(checkpoint.values.get(f"{prefix}current", False))[0]
        )


class Copies:
    """All copies that a loss declares, by name. `steps` counts the optimizer's steps.

    Args:
        loss: the loss.
        policy: the policy.
        parameters: the trained parameters by name.
    """

    def __init__(
        self,
        loss: PolicyLoss | ForwardLoss,
        policy: FlowPolicy,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        declared = loss.copies if isinstance(loss, ForwardLoss) else {}
        self.by_name = {
            name: Behaviour(name, copy, policy, parameters) for name, copy in declared.items()
        }
        self.steps = 0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within this context the policy has the weights for sampling: its own, or those of a
        copy.
        """
        chosen = [copy for copy in self.by_name.values() if copy.samples(self.steps)]
        with chosen[0].weights() if chosen else nullcontext():
            yield

    def after_update(self) -> None:
        """Count an optimizer step, and update the copies."""
        self.steps += 1
        for copy in self.by_name.values():
            copy.after_update(self.steps)

    def after_iteration(self) -> None:
        """Update the copies after an iteration."""
        for copy in self.by_name.values():
            copy.after_iteration(self.steps)

    def state(self, copied: bool = True) -> Checkpoint:
        """The state of all copies; empty if there are none."""
        states = [copy.state(copied) for copy in self.by_name.values()]
        values = {"optimizer_steps": self.steps} if states else {}
        return Checkpoint(
            {name: tensor for state in states for name, tensor in state.tensors.items()},
            {**values, **{name: value for state in states for name, value in state.values.items()}},
        )

    def restore(self, checkpoint: Checkpoint, distributed: Distributed) -> None:
        """Continue from `state()`."""
        for copy in self.by_name.values():
            copy.restore(checkpoint, distributed)
        self.steps = int(distributed.gather(checkpoint.values.get("optimizer_steps", 0))[0])

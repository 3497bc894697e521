"""The memory of a user's parts."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flowrl.core.errors import FlowrlError, PartError, part_call


def state_of(name: str, part: Any, error: type[FlowrlError] = PartError) -> dict[str, Tensor]:
    """Copies of the memory of a part with `state_dict`. A part may return something else than
    tensors only after some iterations: then `error` has its `name`.
    """
    with part_call(f"{type(part).__name__}.state_dict"):
        state = part.state_dict()
    wrong = state
    if isinstance(state, Mapping):
        fits = {key: isinstance(key, str) and isinstance(state[key], Tensor) for key in state}
        if all(fits.values()):
            return {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
        wrong = {key: state[key] for key in state if not fits[key]}
    text = f"{name}.state_dict() = {wrong!r:.200} is not allowed"
    raise error(f"{text}; allowed: a dictionary of tensors by name")

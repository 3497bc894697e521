"""LoRA (arXiv 2106.09685) on a diffusers transformer: adapters are added, selected, disabled,
merged, saved and loaded.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import CheckpointError, ConfigError, require
from flowrl.distributed import full, is_sharded_network
from flowrl.reading import reading

LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
)
"""The projections of the joint attention, of the image and of the text stream, as Flow-GRPO (arXiv
2505.05470) trains; not those of the second attention `attn2` that 13 blocks of SD3.5-Medium have.
"""

PREFIX = "transformer."
HAS_ADAPTERS = (
    "the model has adapters already; make them part of it first: fuse_lora, then"
    " unload_lora_weights"
)


class Adapters:
    """The LoRA layers of a network: W x + (alpha / rank) B A x, with A Gaussian, B = 0 at the
    start, both float32.

    With B = 0 the network starts as the base model. `add` and `train` add further adapters and
    select between them.

    Args:
        network: a diffusers model.
        rank: rank of the trained adapter.
        alpha: scale of the trained adapter times its rank.
        targets: ends of the names of the linear layers that get an adapter.
        seed: seed of A.
        name: name of the trained adapter.
        frozen: adapters that the network already has. They are part of every velocity, including
            the reference's, but not trained.

    Raises:
        ConfigError: one of `targets` matches no layer, or the network has other adapters already.
    """

    def __init__(
        self,
        network: Any,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        seed: int,
        name: str = "default",
        frozen: Sequence[str] = (),
    ) -> None:
        self.network = network
        if set(self.names) - set(frozen):
            raise ConfigError(HAS_ADAPTERS)
        self.name, self.frozen = name, tuple(frozen)
        self.active: tuple[str, ...] = ()
        self.layers: list[Any] = []
        self.add(name, rank, alpha, targets, seed)

    @property
    def names(self) -> tuple[str, ...]:
        """All adapters of the network, active or not."""
        return tuple(getattr(self.network, "peft_config", None) or ())

    @property
    def rank(self) -> int:
        """The rank of the trained adapter."""
        return self.network.peft_config[self.name].r

    def add(self, name: str, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
        """Add an adapter with B = 0, inactive until `train` selects it.

        Raises `ConfigError` if the name is taken or one of `targets` matches no layer.
        """
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        fits = name.isidentifier() and name not in self.names
        require(fits, "adapter_name", name, "letters, digits and _, and no name of another adapter")
        kinds = (torch.nn.Linear, LoraLayer)
        layers = [
            f".{layer}"
            for layer, module in self.network.named_modules()
            if isinstance(module, kinds)
        ]
        idle = [end for end in targets if not any(layer.endswith(f".{end}") for layer in layers)]
        require(
            not idle,
            "lora_targets",
            tuple(targets),
            f"linear layers; no linear layer's name ends with {' or '.join(idle)}",
        )
        lora: Any = LoraConfig(
            r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(targets)
        )  # pyright: ignore[reportArgumentType]
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            torch.manual_seed(seed)
            self.network.add_adapter(lora, adapter_name=name)
        self.layers = [module for module in self.network.modules() if isinstance(module, LoraLayer)]
        for layer in self.layers:
            layer._cast_input_dtype = _cast_unless_autocast
        for parameter in self._matrices().values():
            parameter.data = parameter.data.float()
        self.train(self.name, self.frozen)

    def train(self, name: str, frozen: Sequence[str] = ()) -> None:
        """Train the adapter `name`, keep `frozen` active but fixed (in the reference too), and
        deactivate all others.

        Select adapters before building a trainer, which reads the list of parameters then. Raises
        `ConfigError` for unknown names.
        """
        for chosen in (name, *frozen):
            require(chosen in self.names, "adapter", chosen, ", ".join(self.names))
        require(
            name not in frozen,
            "adapter",
            name,
            "one that is not frozen: it cannot be trained and frozen",
        )
        self.name, self.frozen = name, tuple(frozen)
        for matrix, parameter in self._matrices().items():
            parameter.requires_grad_(f".{name}." in matrix)
        self._activate(True)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The matrices A and B of the trained adapter, by name."""
        return {
            name: parameter
            for name, parameter in self._matrices().items()
            if parameter.requires_grad
        }

    def _matrices(self) -> dict[str, torch.nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self.network.named_parameters()
            if ".lora_" in name
        }

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within this context the trained adapter is inactive: the base model, with the frozen
        adapters if there are any.

        Uses PEFT's switch, without its change of `requires_grad`.
        """
        self._activate(False)
        try:
            yield
        finally:
            self._activate(True)

    def _activate(self, on: bool) -> None:
        """Switch the trained adapter on or off; frozen ones stay on."""
        self.active = (*self.frozen, self.name) if on else self.frozen
        for layer in self.layers:
            layer._active_adapter, layer._disable_adapters = list(self.active), not self.active

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within this context the weights are W + (alpha / rank) B A, so that a call costs as much
        as the base model's.

        At the end the original tensors are restored without rounding. Within `disabled` only frozen
        adapters are merged. Sharded weights are not changed. Requires `torch.no_grad`.
        """
        saved = []
        for layer in self.layers if self.active and not is_sharded_network(self.network) else ():
            weight = layer.get_base_layer().weight
            saved.append((layer, weight.data))
            for name in self.active:
                if name in layer.lora_A:
                    weight.data = weight.data + layer.get_delta_weight(name).to(weight.dtype)
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, data in saved:
                layer.get_base_layer().weight.data = data
                layer._disable_adapters = False

    def tensors(self) -> dict[str, Tensor]:
        """A and (alpha / rank) B of the trained adapter, under PEFT's names.

        Programs that ignore alpha (alpha = rank) then get the same network.
        """
        from peft import get_peft_model_state_dict

        state: Any = get_peft_model_state_dict(self.network, adapter_name=self.name)
        parts = {n: full(t.detach()) for n, t in state.items()}
        return {
            n: (t * self._scale if "lora_B" in n else t).cpu().contiguous()
            for n, t in parts.items()
        }

    @property
    def _scale(self) -> float:
        config = self.network.peft_config[self.name]
        return config.lora_alpha / config.r

    def load(self, path: Path, pipeline: type[Any]) -> None:
        """Load A and B of the trained adapter from a LoRA file or folder that `pipeline` (a
        diffusers pipeline class) reads.

        Raises `CheckpointError` if the file is missing or is not a LoRA, or if its layers or rank
        differ from this adapter's.
        """
        from peft import set_peft_model_state_dict

        with _readable("adapter", path):
            state, metadata = pipeline.lora_state_dict(
                str(path), return_lora_metadata=True, use_safetensors=True
            )
        metadata = {name.removeprefix(PREFIX): value for name, value in (metadata or {}).items()}
        file_scale = (
            metadata["lora_alpha"] / metadata.get("r", self.rank)
            if "lora_alpha" in metadata
            else 1.0
        )
        state = {name.removeprefix(PREFIX): tensor.float() for name, tensor in state.items()}
        expected = {n: t.shape for n, t in self.tensors().items()}
        if {n: t.shape for n, t in state.items()} != expected:
            ranks = sorted({t.shape[0] for n, t in state.items() if "lora_A" in n})
            raise CheckpointError(
                f"adapter: {path} has {len(state)} tensors of rank {ranks}; the model's adapter has"
                f" {len(expected)} of rank {self.rank}: choose the same rank and targets"
            )
        scaled = {
            n: t * (file_scale / self._scale) if "lora_B" in n else t for n, t in state.items()
        }
        set_peft_model_state_dict(self.network, scaled, adapter_name=self.name)


def _cast_unless_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """PEFT's `_cast_input_dtype`, but none under autocast, which would revert the cast to A's
    float32.

    Decided at every call: gradient checkpointing recomputes under the autocast of the original
    call.
    """
    return x if x.dtype == dtype or torch.is_autocast_enabled(x.device.type) else x.to(dtype)


@contextmanager
def _readable(field: str, path: Path) -> Iterator[None]:
    """Raise `CheckpointError` if the LoRA at `path` does not exist or cannot be read within this
    context.
    """
    if not path.exists():
        raise CheckpointError(f"{field}: {path} does not exist")
    with reading(f"{field}: LoRA {path}", CheckpointError):
        yield


def load_frozen_adapters(pipe: Any, specs: Sequence[str]) -> tuple[str, ...]:
    """Load LoRAs that are active but not trained into `pipe`, as diffusers does; returns their
    names.

    A spec is NAME=PATH, or PATH with the name frozen1, frozen2, ... Raises `ConfigError` if the
    model has adapters already or a name is not allowed, `CheckpointError` if a file cannot be read.
    """
    if getattr(pipe.transformer, "peft_config", None):
        raise ConfigError(HAS_ADAPTERS)
    names: list[str] = []
    for number, spec in enumerate(specs, 1):
        name, path = spec.split("=", 1) if "=" in spec else (f"frozen{number}", spec)
        if not name.isidentifier() or name in names:
            raise ConfigError(
                f"frozen_adapters: name {name!r} is not allowed; allowed: letters, digits and _,"
                " each name once"
            )
        with _readable("frozen_adapters", Path(path)):
            pipe.load_lora_weights(path, adapter_name=name, use_safetensors=True)
        names.append(name)
    return tuple(names)

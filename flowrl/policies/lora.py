"""LoRA (arXiv 2106.09685) on a diffusers transformer: adapters are added, selected, disabled, merged, saved and loaded."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from flowrl.distributed import full, is_sharded_network
from flowrl.errors import CheckpointError, ConfigError

LORA_TARGETS = tuple(
    f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
"""The projections of the joint attention, of the image and of the text stream, as Flow-GRPO (arXiv 2505.05470) trains; not those
of the second attention `attn2` that 13 blocks of SD3.5-Medium have."""

PREFIX = "transformer."
HAS_ADAPTERS = "the model has adapters already; make them part of it first: fuse_lora, then unload_lora_weights"


class Adapters:
    """The LoRA layers of a network: W x + (alpha / rank) B A x, with A Gaussian, B = 0 at the start, both float32.

    With B = 0 the network starts as the base model. `add` and `train` add further adapters and select between them.

    Args:
        network: a diffusers model.
        rank: rank of the trained adapter.
        alpha: scale of the trained adapter times its rank.
        targets: ends of the names of the linear layers that get an adapter.
        seed: seed of A.
        name: name of the trained adapter.
        frozen: adapters that the network already has. They are part of every velocity, including the reference's, but not
            trained.

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
        if set(getattr(network, "peft_config", None) or ()) - set(frozen):
            raise ConfigError(HAS_ADAPTERS)
        self.network, self.name, self.frozen = network, name, tuple(frozen)
        self.active: tuple[str, ...] = ()
        self.layers: list[Any] = []
        self._casts = False
        self.add(name, rank, alpha, targets, seed)
        self.train(name, frozen)

    @property
    def names(self) -> tuple[str, ...]:
        """All adapters of the network, active or not."""
        return tuple(self.network.peft_config)

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

        if name in (getattr(self.network, "peft_config", None) or ()):
            raise ConfigError(f"adapter name = {name!r} is not allowed: the model has one of this name")
        names = [layer for layer, _ in self.network.named_modules()]
        idle = [end for end in targets if not any(layer == end or layer.endswith(f".{end}") for layer in names)]
        if idle:
            raise ConfigError(f"lora_targets = {tuple(targets)!r} is not allowed: no layer's name ends with {' or '.join(idle)}")
        lora: Any = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(targets))  # pyright: ignore[reportArgumentType]
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")
                torch.manual_seed(seed)
                self.network.add_adapter(lora, adapter_name=name)
        except ValueError as error:
            allowed = f"names of linear layers ({error})"
            raise ConfigError(f"lora_targets = {tuple(targets)!r} is not allowed; allowed: {allowed}") from error
        self.layers = [module for module in self.network.modules() if isinstance(module, LoraLayer)]
        for parameter in self._matrices().values():
            parameter.data = parameter.data.float()
        if self._casts:
            self.cast_by_autocast()
        if name != self.name:
            self.train(self.name, self.frozen)

    def train(self, name: str, frozen: Sequence[str] = ()) -> None:
        """Train the adapter `name`, keep `frozen` active but fixed (in the reference too), and deactivate all others.

        Select adapters before building a trainer, which reads the list of parameters then. Raises `ConfigError` for unknown
        names.
        """
        for chosen in (name, *frozen):
            if chosen not in self.names:
                raise ConfigError(f"adapter {chosen!r} is not allowed; allowed: {', '.join(self.names)}")
        if name in frozen:
            raise ConfigError(f"adapter {name!r} is not allowed: it cannot be trained and frozen")
        self.name, self.frozen = name, tuple(frozen)
        for matrix, parameter in self._matrices().items():
            parameter.requires_grad_(f".{name}." in matrix)
        self._activate(True)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The matrices A and B of the trained adapter, by name."""
        return {name: parameter for name, parameter in self._matrices().items() if parameter.requires_grad}

    def _matrices(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.network.named_parameters() if ".lora_" in name}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within this context the trained adapter is inactive: the base model, with the frozen adapters if there are any.

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
        """Within this context the weights are W + (alpha / rank) B A, so that a call costs as much as the base model's.

        At the end the original tensors are restored without rounding. Within `disabled` only frozen adapters are merged. Sharded
        weights are not changed. Requires `torch.no_grad`.
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

    def cast_by_autocast(self) -> None:
        """Under autocast, pass activations to A without PEFT's cast to float32, which autocast would revert; results are equal.

        Without autocast PEFT's cast remains. The decision is made at every call, because gradient checkpointing recomputes
        activations later, under the autocast of the original call.
        """
        self._casts = True
        for layer in self.layers:
            layer._cast_input_dtype = MethodType(_cast_unless_autocast, layer)

    def tensors(self) -> dict[str, Tensor]:
        """A and (alpha / rank) B of the trained adapter, under PEFT's names.

        Programs that ignore alpha (alpha = rank) then get the same network.
        """
        from peft import get_peft_model_state_dict

        found: Mapping[str, Tensor] = get_peft_model_state_dict(self.network, adapter_name=self.name)
        parts = {n: full(t.detach()) for n, t in found.items()}
        return {n: (t * self._scale if "lora_B" in n else t).cpu().contiguous() for n, t in parts.items()}

    @property
    def _scale(self) -> float:
        config = self.network.peft_config[self.name]
        return config.lora_alpha / config.r

    def load(self, path: Path, pipeline: type[Any]) -> None:
        """Load A and B of the trained adapter from a LoRA file or folder that `pipeline` (a diffusers pipeline class) reads.

        Raises `CheckpointError` if the file is missing or is not a LoRA, or if its layers or rank differ from this adapter's.
        """
        from peft import set_peft_model_state_dict

        if not path.exists():
            raise CheckpointError(f"adapter: {path} does not exist")
        try:
            state, metadata = pipeline.lora_state_dict(str(path), return_lora_metadata=True, use_safetensors=True)
        except Exception as error:
            raise CheckpointError(f"adapter: {path} cannot be read as a LoRA in safetensors: {error}") from error
        metadata = metadata or {}
        alpha = metadata.get(f"{PREFIX}lora_alpha", metadata.get("lora_alpha"))
        file_scale = 1.0 if alpha is None else alpha / metadata.get(f"{PREFIX}r", metadata.get("r", self.rank))
        found = {name.removeprefix(PREFIX): tensor.float() for name, tensor in state.items()}
        own = self.tensors()
        if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in own.items()}:
            ranks = sorted({t.shape[0] for n, t in found.items() if "lora_A" in n})
            raise CheckpointError(
                f"adapter: {path} has {len(found)} tensors of rank {ranks}; the model's adapter has {len(own)} of rank "
                f"{self.rank}: choose the same rank and targets"
            )
        scaled = {n: t * (file_scale / self._scale) if "lora_B" in n else t for n, t in found.items()}
        set_peft_model_state_dict(self.network, scaled, adapter_name=self.name)


def _cast_unless_autocast(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """PEFT's `_cast_input_dtype`; unchanged under autocast, which casts by itself."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def load_frozen_adapters(pipe: Any, specs: Sequence[str]) -> tuple[str, ...]:
    """Load LoRAs that are active but not trained into `pipe`, as diffusers does; returns their names.

    A spec is NAME=PATH, or PATH with the name frozen1, frozen2, ... Raises `ConfigError` if the model has adapters already or a
    name is not allowed, `CheckpointError` if a file cannot be read.
    """
    if getattr(pipe.transformer, "peft_config", None):
        raise ConfigError(HAS_ADAPTERS)
    names: list[str] = []
    for number, spec in enumerate(specs, 1):
        name, path = spec.split("=", 1) if "=" in spec else (f"frozen{number}", spec)
        if not name.isidentifier() or name in names:
            raise ConfigError(f"frozen_adapters: name {name!r} is not allowed; allowed: letters, digits and _, each name once")
        if not Path(path).exists():
            raise CheckpointError(f"frozen_adapters: {path} does not exist")
        try:
            pipe.load_lora_weights(path, adapter_name=name, use_safetensors=True)
        except Exception as error:
            raise CheckpointError(f"frozen_adapters: {path} cannot be read as a LoRA for this model: {error}") from error
        names.append(name)
    return tuple(names)

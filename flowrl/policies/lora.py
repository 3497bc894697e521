"""LoRA (arXiv 2106.09685) on a diffusers transformer: adding, choosing, switching off, merging, and its file on disk."""

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

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""All attention projections, of the image and of the text stream, as Flow-GRPO (arXiv 2505.05470) trains."""

ADAPTER = "default"
PREFIX = "transformer."


class Adapters:
    """The LoRA layers of `network` (a diffusers model): W x + (alpha / rank) B A x, A Gaussian, B zero, both float32.

    B = 0: the network starts as the base model. `targets` are the ends of the names of the linear layers that get one. The
    adapter is called `name` and is the one that is trained. `beside` names adapters that the network has already: they are part
    of every velocity, and of the reference too, but are not trained. `add` and `train` make further ones and choose between them.
    Raises `ConfigError` where no layer is called so, or where the network has other adapters already.
    """

    def __init__(
        self,
        network: Any,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        seed: int,
        name: str = ADAPTER,
        beside: Sequence[str] = (),
    ) -> None:
        if set(getattr(network, "peft_config", None) or ()) - set(beside):
            raise ConfigError("the model has adapters already; make them part of it first: fuse_lora, then unload_lora_weights")
        self.network, self.on = network, True
        self.name, self.beside = name, tuple(beside)
        self.layers: list[Any] = []
        self._casts = False
        self.add(name, rank, alpha, targets, seed)
        self.train(name, beside)

    @property
    def names(self) -> tuple[str, ...]:
        """All adapters of the network, in use or not."""
        return tuple(self.network.peft_config)

    @property
    def rank(self) -> int:
        """The rank of the adapter that is trained."""
        return self.network.peft_config[self.name].r

    def add(self, name: str, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
        """Give the network one more adapter, B = 0; it does nothing until `train` names it. Raises `ConfigError` for a name
        that is taken, or where no layer is called as `targets` say."""
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        if name in (getattr(self.network, "peft_config", None) or ()):
            raise ConfigError(f"adapter name = {name!r} is not allowed: the model has one of this name")
        lora: Any = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(targets))  # pyright: ignore[reportArgumentType]
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")
                torch.manual_seed(seed)
                self.network.add_adapter(lora, adapter_name=name)
        except ValueError as error:
            raise ConfigError(f"lora targets = {tuple(targets)!r} is not allowed: names of linear layers ({error})") from error
        self.layers = [module for module in self.network.modules() if isinstance(module, LoraLayer)]
        for parameter in self._matrices().values():
            parameter.data = parameter.data.float()
        if self._casts:
            self.cast_by_autocast()
        if name != self.name:
            self.train(self.name, self.beside)

    def train(self, name: str, beside: Sequence[str] = ()) -> None:
        """From now on `name` is the adapter that is trained, `beside` are in use but frozen (the reference has them too), and all
        others are off. A trainer takes its list of parameters when it is built: choose before. Raises `ConfigError` for unknown
        names."""
        for wanted in (name, *beside):
            if wanted not in self.names:
                raise ConfigError(f"adapter {wanted!r} is not allowed: the model has {', '.join(self.names)}")
        if name in beside:
            raise ConfigError(f"adapter {name!r} is not allowed beside itself: it is the one that is trained")
        self.name, self.beside = name, tuple(beside)
        for matrix, parameter in self._matrices().items():
            parameter.requires_grad_(f".{name}." in matrix)
        for layer in self.layers:
            layer._active_adapter = [*self.beside, name]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The matrices A and B of the adapter that is trained, by name."""
        return {name: parameter for name, parameter in self._matrices().items() if parameter.requires_grad}

    def _matrices(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.network.named_parameters() if ".lora_" in name}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Without the adapter that is trained: the base model, with the frozen adapters beside it where there are some. PEFT's
        own switch, without its change of `requires_grad`."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        self.on = on
        for layer in self.layers:
            if self.beside:
                layer._active_adapter = [*self.beside, self.name] if on else list(self.beside)
            else:
                layer._disable_adapters = not on

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The weights are W + (alpha / rank) B A, so that a call costs what the base model's does. Leaving restores the very same
        tensors, so nothing drifts. Within `disabled` only what is beside is merged. Sharded weights stay as they
        are. Call it under `torch.no_grad`."""
        saved = []
        in_use = [*self.beside, self.name] if self.on else list(self.beside)
        sharded = is_sharded_network(self.network)
        for layer in self.layers if in_use and not sharded else ():
            weight = layer.get_base_layer().weight
            saved.append((layer, weight.data))
            for name in in_use:
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
        """From now on, under autocast, activations go into A as they are: PEFT would turn each into A's float32 first, for
        autocast to turn it back; the numbers are the same. Without autocast PEFT's cast stays. Decided call by call, because
        gradient checkpointing computes activations again long after the call, under the autocast of the call."""
        self._casts = True
        for layer in self.layers:
            layer._cast_input_dtype = MethodType(_cast_unless_autocast, layer)

    def tensors(self) -> dict[str, Tensor]:
        """A and (alpha / rank) B of the adapter that is trained, under PEFT's names: readers that know no alpha (they take
        alpha = rank) get the same network."""
        from peft import get_peft_model_state_dict

        found: Mapping[str, Tensor] = get_peft_model_state_dict(self.network, adapter_name=self.name)
        parts = {n: full(t.detach()) for n, t in found.items()}
        return {n: (t * self._scale if "lora_B" in n else t).cpu().contiguous() for n, t in parts.items()}

    @property
    def _scale(self) -> float:
        config = self.network.peft_config[self.name]
        return config.lora_alpha / config.r

    def load(self, path: Path, pipeline: type[Any]) -> None:
        """Take A and B of the adapter that is trained from a LoRA file or folder that `pipeline` (a diffusers pipeline class)
        reads.

        Raises `CheckpointError` where the file is missing or no LoRA, or its layers or rank are not this adapter's.
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
    """PEFT's `_cast_input_dtype`, left to autocast where that is on."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def frozen_adapters(pipe: Any, specs: Sequence[str]) -> tuple[str, ...]:
    """Load LoRAs into `pipe` as diffusers does, for use beside the one that is trained; returns their names.

    A spec is NAME=PATH, or PATH, which is then called frozen1, frozen2, ... Raises `ConfigError` where the model has adapters
    already or a name is not allowed, `CheckpointError` where a file cannot be read.
    """
    if getattr(pipe.transformer, "peft_config", None):
        raise ConfigError("the model has adapters already; make them part of it first: fuse_lora, then unload_lora_weights")
    names: list[str] = []
    for number, spec in enumerate(specs, 1):
        name, path = spec.split("=", 1) if "=" in spec else (f"frozen{number}", spec)
        if not name.isidentifier() or name in names:
            raise ConfigError(f"frozen_adapters: the name {name!r} is not allowed: letters, digits and _, each name once")
        if not Path(path).exists():
            raise CheckpointError(f"frozen_adapters: {path} does not exist")
        try:
            pipe.load_lora_weights(path, adapter_name=name, use_safetensors=True)
        except Exception as error:
            raise CheckpointError(f"frozen_adapters: {path} cannot be read as a LoRA for this model: {error}") from error
        names.append(name)
    return tuple(names)

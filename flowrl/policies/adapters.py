"""LoRA (arXiv 2106.09685) on a diffusers transformer: adding, switching off, merging, and its file on disk."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import CheckpointError, ConfigError

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""All attention projections, of the image and of the text stream, as Flow-GRPO (arXiv 2505.05470) trains."""

ADAPTER = "default"
PREFIX = "transformer."


class Adapters:
    """The LoRA layers of `network` (a diffusers model): W x + (alpha / rank) B A x, A Gaussian, B zero, both float32.

    B = 0: the network starts as the base model. `targets` are the ends of the names of the linear layers that get one.
    Raises `ConfigError` where no layer is called so, or where the network has adapters already.
    """

    def __init__(self, network: Any, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        if getattr(network, "peft_config", None):
            raise ConfigError("the model has adapters already; make them part of it first: fuse_lora, then unload_lora_weights")
        self.network, self.rank, self.scale = network, rank, alpha / rank
        lora: Any = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(targets))  # pyright: ignore[reportArgumentType]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                network.add_adapter(lora, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(f"lora targets = {tuple(targets)!r} is not allowed: names of linear layers ({error})") from error
        self.layers: list[Any] = [module for module in network.modules() if isinstance(module, LoraLayer)]
        self.on = True
        for parameter in self.parameters().values():
            parameter.data = parameter.data.float()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The matrices A and B by name."""
        return {name: parameter for name, parameter in self.network.named_parameters() if parameter.requires_grad}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model: PEFT's own switch, without its change of `requires_grad`."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        self.on = on
        for layer in self.layers:
            layer._disable_adapters = not on

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The weights are W + (alpha / rank) B A, so that a call costs what the base model's does. Leaving restores the very same
        tensors, so nothing drifts. Within `disabled` there is nothing to merge. Call it under `torch.no_grad`."""
        saved = []
        for layer in self.layers if self.on else ():
            weight = layer.get_base_layer().weight
            saved.append((layer, weight.data))
            weight.data = weight.data + layer.get_delta_weight(ADAPTER).to(weight.dtype)
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, data in saved:
                layer.get_base_layer().weight.data = data
                layer._disable_adapters = False

    @contextmanager
    def uncast(self) -> Iterator[None]:
        """Within this context, which must be one of autocast, activations go into A as they are: PEFT would turn each into A's
        float32 first, for autocast to turn it back; the numbers are the same."""
        for layer in self.layers:
            layer.cast_input_dtype_enabled = False
        try:
            yield
        finally:
            for layer in self.layers:
                layer.cast_input_dtype_enabled = True

    def tensors(self) -> dict[str, Tensor]:
        """A and (alpha / rank) B under PEFT's names: readers that know no alpha (they take alpha = rank) get the same network."""
        from peft import get_peft_model_state_dict

        found: Mapping[str, Tensor] = get_peft_model_state_dict(self.network, adapter_name=ADAPTER)
        return {n: (t * self.scale if "lora_B" in n else t).detach().cpu().contiguous() for n, t in found.items()}

    def load(self, path: Path, pipeline: type[Any]) -> None:
        """Take A and B from a LoRA file or folder that `pipeline` (a diffusers pipeline class) can read.

        Raises `CheckpointError` where the file is missing, or its layers or rank are not this adapter's.
        """
        from peft import set_peft_model_state_dict

        if not path.exists():
            raise CheckpointError(f"adapter: {path} does not exist")
        state, metadata = pipeline.lora_state_dict(str(path), return_lora_metadata=True, use_safetensors=True)
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
        scaled = {n: t * (file_scale / self.scale) if "lora_B" in n else t for n, t in found.items()}
        set_peft_model_state_dict(self.network, scaled, adapter_name=ADAPTER)

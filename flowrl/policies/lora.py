"""LoRA (arXiv 2106.09685) on a diffusers transformer: PEFT's layers are added, selected, disabled,
merged, saved and loaded.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import CheckpointError, require
from flowrl.core.sharded import full, is_sharded_network

LORA_TARGETS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
)
"""The projections of the joint attention, of the image and of the text stream, as Flow-GRPO (arXiv
2505.05470) trains; not those of the second attention `attn2` that 13 blocks of SD3.5-Medium have.
"""


Shapes = Mapping[str, tuple[int, ...]]
TRAINED = "default"
"""PEFT's name of the trained adapter."""


class Adapters:
    """The trained LoRA of a network: W x + (alpha / rank) B A x, with A Gaussian, B = 0 at the
    start, both float32.

    With B = 0 the network starts as the base model.

    Args:
        network: a diffusers model.
        rank: rank of the adapter.
        alpha: scale of the adapter times its rank.
        targets: ends of the names of the linear layers that get an adapter.
        seed: seed of A.
        frozen: adapters that the network already has. They are part of every velocity, including
            the reference's, but not trained.

    Raises:
        ConfigError: one of `targets` matches no layer, or the network has adapters that `frozen`
            does not name.
    """

    def __init__(
        self,
        network: Any,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        seed: int,
        frozen: Sequence[str] = (),
    ) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        foreign = set(getattr(network, "peft_config", ())) - set(frozen)
        require(not foreign, "adapters of the model", foreign, "none; fuse_lora, then unload_lora")
        modules = network.named_modules()
        linear = [f".{n}" for n, module in modules if isinstance(module, nn.Linear | LoraLayer)]
        idle = [end for end in targets if not any(layer.endswith(f".{end}") for layer in linear)]
        require(
            not idle,
            "lora_targets",
            tuple(targets),
            f"suffixes of names of linear layers, not {idle}",
        )
        options: dict[str, Any] = {"lora_alpha": alpha, "target_modules": list(targets)}
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            torch.manual_seed(seed)
            lora = LoraConfig(r=rank, init_lora_weights="gaussian", **options)
            network.add_adapter(lora, adapter_name=TRAINED)
        self.network, self.frozen, self.scale = network, tuple(frozen), alpha / rank
        self.layers: list[Any] = [m for m in network.modules() if isinstance(m, LoraLayer)]
        for layer in self.layers:
            layer._cast_input_dtype = _cast_unless_autocast
        for name, parameter in network.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
                parameter.requires_grad_(f".{TRAINED}." in name)
        self._activate(*frozen, TRAINED)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The matrices A and B of the trained adapter, by name."""
        named = self.network.named_parameters()
        return {name: parameter for name, parameter in named if f".{TRAINED}." in name}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within this context the trained adapter is inactive: the base model, with the frozen
        adapters if there are any.
        """
        self._activate(*self.frozen)
        try:
            yield
        finally:
            self._activate(*self.frozen, TRAINED)

    def _activate(self, *names: str) -> None:
        """PEFT's switch, without its change of `requires_grad`."""
        self.active = names
        for layer in self.layers:
            layer._active_adapter, layer._disable_adapters = list(names), not names

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within this context the weights are W + (alpha / rank) B A, so that a call costs as much
        as the base model's.

        Within `disabled` only frozen adapters are merged. Sharded weights are not changed. Requires
        `torch.no_grad`.
        """
        saved = []
        for layer in self.layers if self.active and not is_sharded_network(self.network) else ():
            weight = layer.get_base_layer().weight
            saved.append((layer, weight, weight.data))
            for name in self.active:
                if name in layer.lora_A:
                    weight.data = weight.data + layer.get_delta_weight(name).to(weight.dtype)
            layer._disable_adapters = True
        try:
            yield
        finally:
            # PEFT's `unmerge` subtracts, which would leave rounding errors in the base weights
            for layer, weight, original in saved:
                weight.data, layer._disable_adapters = original, False

    def tensors(self) -> dict[str, Tensor]:
        """A and (alpha / rank) B of the trained adapter, under PEFT's names.

        Programs that ignore alpha (alpha = rank) then get the same network.
        """
        from peft import get_peft_model_state_dict

        state: Any = get_peft_model_state_dict(self.network, adapter_name=TRAINED)
        tensors = {n: full(t.detach()) for n, t in state.items()}
        scaled = _scaled(tensors, self.scale)
        return {n: (t if t.is_meta else t.cpu()).contiguous() for n, t in scaled.items()}

    def load(self, path: str, pipeline: type[Any]) -> None:
        """Load A and B of the trained adapter from a LoRA file or folder that `pipeline` (a
        diffusers pipeline class) reads.

        Raises `CheckpointError` if the file is missing or is not a LoRA, or if its layers or rank
        differ from this adapter's.
        """
        from peft import set_peft_model_state_dict

        with _reading_lora("adapter", path):
            state, metadata = pipeline.lora_state_dict(
                path, return_lora_metadata=True, use_safetensors=True
            )
        state = {n.removeprefix("transformer."): t.float() for n, t in state.items()}
        shapes, expected = (
            {n: tuple(t.shape) for n, t in tensors.items()} for tensors in (state, self.tensors())
        )
        if shapes != expected:
            problem = _mismatch(shapes, expected)
            raise CheckpointError(f"adapter: {path} does not match {problem}")
        # a file without alpha has the scale in B, as `tensors` writes it
        alpha, rank = ((metadata or {}).get(f"transformer.{n}") for n in ("lora_alpha", "r"))
        scale = alpha / rank if alpha and rank else 1.0
        scaled = _scaled(state, scale / self.scale)
        set_peft_model_state_dict(self.network, scaled, adapter_name=TRAINED)


def _mismatch(shapes: Shapes, expected: Shapes) -> str:
    """How the matrices of a LoRA differ from the expected ones, and in which setting."""
    lacking, foreign = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected)
    if lacking or foreign:
        parts = [
            f"{len(names)} {what}, such as {names[0]}"
            for names, what in ((foreign, "others"), (lacking, "of them missing"))
            if names
        ]
        count = f"it has {len(shapes)} tensors, {len(expected)} expected"
        return f"lora_targets or the model: {count}; {'; '.join(parts)}"
    ranks, wanted = (
        sorted({shape[0] for name, shape in one.items() if "lora_A" in name})
        for one in (shapes, expected)
    )
    if ranks != wanted:
        return f"lora_rank: its rank is {', '.join(map(str, ranks))}, lora_rank is {wanted[0]}"
    name = next(name for name, shape in shapes.items() if shape != expected[name])
    both = f"{list(shapes[name])}, {list(expected[name])} expected"
    return f"the model: {name} is {both}; it is a LoRA of another model"


def _scaled(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {n: t * factor if "lora_B" in n else t for n, t in tensors.items()}


def _cast_unless_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """PEFT's `_cast_input_dtype`, but none under autocast, which would revert the cast to A's
    float32.

    Decided at every call: gradient checkpointing recomputes under the autocast of the original
    call.
    """
    return x if x.dtype == dtype or torch.is_autocast_enabled(x.device.type) else x.to(dtype)


@contextmanager
def _reading_lora(field: str, path: str) -> Iterator[None]:
    # checked first, because diffusers would look a missing path up on the Hub
    if not Path(path).exists():
        raise CheckpointError(f"{field}: {path} does not exist")
    try:
        yield
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{field}: LoRA {path} cannot be read: {what}") from error


def load_frozen_adapters(pipe: Any, specs: Sequence[str]) -> tuple[str, ...]:
    """Load LoRAs that are active but not trained into `pipe`, as diffusers does; returns their
    names.

    A spec is NAME=PATH, or PATH with the name frozen1, frozen2, ... Raises `CheckpointError` if a
    file cannot be read or two adapters have the same name.
    """
    names = []
    for number, spec in enumerate(specs, 1):
        name, _, path = spec.rpartition("=")
        names.append(name or f"frozen{number}")
        with _reading_lora("frozen_adapters", path):
            pipe.load_lora_weights(path, adapter_name=names[-1], use_safetensors=True)
    return tuple(names)

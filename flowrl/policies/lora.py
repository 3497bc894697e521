"""LoRA (arXiv 2106.09685) on a diffusers transformer: PEFT's layers are added, selected, disabled,
merged, saved and replaced.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """The LoRAs of a network: frozen ones, and at most one that is trained or replaced.

    Args:
        network: a diffusers model.
        frozen: adapters that the network already has. They are part of every velocity, including
            the reference's, but not trained.

    Raises:
        ConfigError: the network has adapters that `frozen` does not name.
    """

    def __init__(self, network: Any, frozen: Sequence[str] = ()) -> None:
        foreign = set(getattr(network, "peft_config", ())) - set(frozen)
        require(not foreign, "adapters of the model", foreign, "none; fuse_lora, then unload_lora")
        self.network, self.frozen, self.scale = network, tuple(frozen), 1.0
        self._changed()

    def add(self, rank: int, alpha: float, targets: Sequence[str], seed: int) -> "Adapters":
        """Add the trained LoRA: W x + (alpha / rank) B A x, with A Gaussian, B = 0 at the start,
        both float32. With B = 0 the network starts as the base model.

        Args:
            rank: rank of the adapter.
            alpha: scale of the adapter times its rank.
            targets: ends of the names of the linear layers that get an adapter.
            seed: seed of A.

        Raises:
            ConfigError: one of `targets` matches no layer.
        """
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        modules = self.network.named_modules()
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
            self.network.add_adapter(lora, adapter_name=TRAINED)
        self.scale = alpha / rank
        self._changed()
        for parameter in self.parameters().values():
            parameter.requires_grad_(True)
        return self

    def replace(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Have the LoRA with these `tensors`, as `tensors()` returns them, of any ranks and layers,
        in place of the last one, for sampling; None: no LoRA but the frozen ones.

        Raises `CheckpointError` for layers that the network does not have.
        """
        if TRAINED in getattr(self.network, "peft_config", ()):
            self.network.delete_adapters(TRAINED)
        if tensors is not None:
            self.require_layers(tensors)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")
                self.network.load_lora_adapter(dict(tensors), prefix=None, adapter_name=TRAINED)
        self.scale = 1.0
        self._changed()

    def _changed(self) -> None:
        """Take up the layers that the network has now."""
        from peft.tuners.lora import LoraLayer

        self.layers: list[Any] = [m for m in self.network.modules() if isinstance(m, LoraLayer)]
        for layer in self.layers:
            layer._cast_input_dtype = _cast_unless_autocast
        for name, parameter in self.network.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
                parameter.requires_grad_(False)
        self._activate(*self.frozen, TRAINED)

    def require_layers(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `CheckpointError` unless each matrix of a LoRA belongs to a layer of its width."""
        modules = dict(self.network.named_modules())
        for name, tensor in tensors.items():
            layer, _, matrix = name.partition(".lora_")
            side, width = (1, "in_features") if matrix.startswith("A") else (0, "out_features")
            size = getattr(modules.get(layer), width, None)
            if size != tensor.shape[side]:
                known = "the model has no such layer" if size is None else f"{width} is {size}"
                raise CheckpointError(
                    f"the model: {name} is {list(tensor.shape)}, {known}; it is a LoRA of another"
                    " model"
                )

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

    def load(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Start the trained adapter from a LoRA, as `tensors()` returns it: matrices of a lower
        rank fill the first rows of A and columns of B, and the other columns of B stay 0, so that
        the network is that of the LoRA.

        Returns:
            The trained layers that the LoRA does not have; they start at 0.

        Raises:
            CheckpointError: it has a higher rank, other layers or other widths.
        """
        own = {name.replace(f".{TRAINED}.", "."): p for name, p in self.parameters().items()}
        shapes, expected = (
            {name: tuple(tensor.shape) for name, tensor in named.items()}
            for named in (tensors, own)
        )
        self.require_layers(tensors)
        if problem := _mismatch(shapes, expected):
            raise CheckpointError(problem)
        with torch.no_grad():
            for name, tensor in _scaled(dict(tensors), 1 / self.scale).items():
                rows, columns = tensor.shape
                own[name].data[:rows, :columns].copy_(tensor)
        missing = {name.partition(".lora_")[0] for name in expected.keys() - shapes.keys()}
        return sorted(missing)


def is_lora(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are matrices of a LoRA and not weights of a network."""
    return any(".lora_" in name for name in tensors)


def fold(network: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add the products B A of a LoRA, as `Adapters.tensors` returns it, to the weights of
    `network`: computed in float32 and rounded once.

    Raises `CheckpointError` if a layer is missing or has another shape.
    """
    modules = dict(network.named_modules())
    for name in tensors:
        layer, _, matrix = name.partition(".lora_A.")
        if not matrix:
            continue
        weight = getattr(modules.get(layer), "weight", None)
        product = tensors[f"{layer}.lora_B.weight"].float() @ tensors[name].float()
        if weight is None or weight.shape != product.shape:
            raise CheckpointError(
                f"the model: it has no {layer} of shape {list(product.shape)}; it is a LoRA of"
                " another model"
            )
        weight.data = (weight.data.float() + product.to(weight.device)).to(weight.dtype)


def _mismatch(shapes: Shapes, expected: Shapes) -> str:
    """How the matrices of a LoRA differ from those of the trained adapter that it should fill, and
    in which setting; "" if they fit.
    """
    foreign = sorted({name.partition(".lora_")[0] for name in shapes.keys() - expected})
    if foreign:
        known = {name.partition(".lora_")[0] for name in expected}
        return (
            f"lora_targets or the model: {len(foreign)} of its"
            f" {len({name.partition('.lora_')[0] for name in shapes})} layers are not trained, such"
            f" as {foreign[0]}; trained are {len(known)}, such as {min(known)}"
        )
    ranks, wanted = (
        max((shape[0] for name, shape in one.items() if "lora_A" in name), default=0)
        for one in (shapes, expected)
    )
    if ranks > wanted:
        return f"lora_rank: its rank is {ranks}, lora_rank is {wanted}; allowed: {ranks} or more"
    return ""


def _scaled(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {n: t * factor if "lora_B" in n else t for n, t in tensors.items()}


def _cast_unless_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """PEFT's `_cast_input_dtype`, but none under autocast, which would revert the cast to A's
    float32.

    Decided at every call: gradient checkpointing recomputes under the autocast of the original
    call.
    """
    return x if x.dtype == dtype or torch.is_autocast_enabled(x.device.type) else x.to(dtype)

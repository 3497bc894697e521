"""Names of LoRA matrices in other programs: ComfyUI, and the scripts of kohya (sd-scripts,
musubi-tuner), which Forge reads too.

Sources, read in November 2026:

- ComfyUI, `comfy/lora.py` (`model_lora_keys_unet`), `comfy/utils.py` (`mmdit_to_diffusers`,
  `flux_to_diffusers`) and `comfy/weight_adapter/lora.py`: of SD3, FLUX and Qwen-Image it accepts
  diffusers' own names, "transformer.LAYER.lora_A.weight", and applies q, k and v to slices of the
  fused weight; of Wan only the original names, "diffusion_model.LAYER.lora_A.weight". Without an
  alpha its scale is 1.
- sd-scripts, `networks/lora_sd3.py`, `networks/lora_flux.py`, `networks/convert_flux_lora.py`: the
  original names with "_" for ".", after "lora_unet_", with `lora_down`, `lora_up` and `alpha`.
- musubi-tuner, `src/musubi_tuner/convert_lora.py`: the same for Wan and Qwen-Image.
- FLUX.2 [klein] and Z-Image: diffusers' converters (`loaders/lora_conversion_utils.py`), and
  ComfyUI's `z_image_to_diffusers`, by which it accepts diffusers' names of Z-Image. The original
  code of Z-Image has diffusers' names; the fused `attention.qkv` is ComfyUI's.
- Forge, `packages_3rdparty/comfyui_lora_collection/lora.py`: kohya's names of every model, and
  diffusers' of FLUX.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.policies.families import text_to_image

Format = Literal["diffusers", "comfyui", "kohya"]
Layers = Mapping[str, tuple[str, ...]]
Matrices = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank]."""


def _layers(pairs: Iterable[tuple[str, str, Mapping[str, str]]]) -> dict[str, tuple[str, ...]]:
    """The layers of a family: of each original name the names in diffusers, several if the original
    layer computes them in one product. "{}" is the number of the block.
    """
    return {
        theirs + name: tuple(ours + part for part in parts.split())
        for theirs, ours, names in pairs
        for name, parts in names.items()
    }


_IMAGE = {"qkv": "to_q to_k to_v", "proj": "to_out.0"}
_TEXT = {"qkv": "add_q_proj add_k_proj add_v_proj", "proj": "to_add_out"}
_SD3 = "transformer_blocks.{}."
_SD3_MLP = {"fc1": "net.0.proj", "fc2": "net.2"}
_FLUX_MLP = {"0": "net.0.proj", "2": "net.2"}
_FLUX_SINGLE = {
    "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
    "linear2": "proj_out",
    "modulation.lin": "norm.linear",
}
_FLUX2_MLP = {"0": "linear_in", "2": "linear_out"}
_FLUX2_SINGLE = {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"}
_WAN = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_WAN_IMAGE = {"k_img": "add_k_proj", "v_img": "add_v_proj"}
_QWEN = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_add_out"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    *("img_mod.1", "img_mlp.net.0.proj", "img_mlp.net.2"),
    *("txt_mod.1", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
)
_Z_IMAGE = (
    *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
    *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0"),
)
_Z_IMAGE_FUSED = {"qkv": "to_q to_k to_v", "out": "to_out.0"}
_Z_IMAGE_BLOCKS = ("layers.{}.", "noise_refiner.{}.", "context_refiner.{}.")


LAYERS: dict[str, Layers] = {
    "StableDiffusion3Pipeline": _layers(
        [
            ("joint_blocks.{}.x_block.attn.", _SD3 + "attn.", _IMAGE),
            ("joint_blocks.{}.x_block.attn2.", _SD3 + "attn2.", _IMAGE),
            ("joint_blocks.{}.x_block.mlp.", _SD3 + "ff.", _SD3_MLP),
            ("joint_blocks.{}.x_block.adaLN_modulation.", _SD3, {"1": "norm1.linear"}),
            ("joint_blocks.{}.context_block.attn.", _SD3 + "attn.", _TEXT),
            ("joint_blocks.{}.context_block.mlp.", _SD3 + "ff_context.", _SD3_MLP),
            (
                "joint_blocks.{}.context_block.adaLN_modulation.",
                _SD3,
                {"1": "norm1_context.linear"},
            ),
        ]
    ),
    "FluxPipeline": _layers(
        [
            ("double_blocks.{}.img_attn.", _SD3 + "attn.", _IMAGE),
            ("double_blocks.{}.img_mlp.", _SD3 + "ff.", _FLUX_MLP),
            ("double_blocks.{}.img_mod.", _SD3, {"lin": "norm1.linear"}),
            ("double_blocks.{}.txt_attn.", _SD3 + "attn.", _TEXT),
            ("double_blocks.{}.txt_mlp.", _SD3 + "ff_context.", _FLUX_MLP),
            ("double_blocks.{}.txt_mod.", _SD3, {"lin": "norm1_context.linear"}),
            ("single_blocks.{}.", "single_transformer_blocks.{}.", _FLUX_SINGLE),
        ]
    ),
    "QwenImagePipeline": _layers([(_SD3, _SD3, {name: name for name in _QWEN})]),
    "WanPipeline": _layers(
        [
            ("blocks.{}.self_attn.", "blocks.{}.attn1.", _WAN),
            ("blocks.{}.cross_attn.", "blocks.{}.attn2.", _WAN | _WAN_IMAGE),
            ("blocks.{}.ffn.", "blocks.{}.ffn.", _FLUX_MLP),
        ]
    ),
    "Flux2KleinPipeline": _layers(
        [
            ("double_blocks.{}.img_attn.", _SD3 + "attn.", _IMAGE),
            ("double_blocks.{}.img_mlp.", _SD3 + "ff.", _FLUX2_MLP),
            ("double_blocks.{}.txt_attn.", _SD3 + "attn.", _TEXT),
            ("double_blocks.{}.txt_mlp.", _SD3 + "ff_context.", _FLUX2_MLP),
            ("single_blocks.{}.", "single_transformer_blocks.{}.", _FLUX2_SINGLE),
        ]
    ),
    # ComfyUI's fused names are read, never written: later entries of a layer win
    "ZImagePipeline": _layers(
        [(block + "attention.", block + "attention.", _Z_IMAGE_FUSED) for block in _Z_IMAGE_BLOCKS]
        + [(block, block, {name: name for name in _Z_IMAGE}) for block in _Z_IMAGE_BLOCKS]
    ),
}
"""The layers of each family's blocks in the original code, by the class of its pipeline; a further
family needs one more entry.
"""
ORIGINAL_IN_COMFYUI = ("WanPipeline", "Flux2KleinPipeline")
"""Families of which ComfyUI reads the original names only (of FLUX.2, diffusers' names of the
feed-forward layers are not among those that it maps).
"""
KOHYA_IN_DIFFUSERS = (
    "FluxPipeline",
    "QwenImagePipeline",
    "Flux2KleinPipeline",
    "ZImagePipeline",
)
"""Families of which diffusers loads kohya's names. Of SD3 it loads nothing and reports no error,
and of Wan it refuses LoRAs of the attention layers.
"""
WIDER = {"proj_mlp": 4}
"""Outputs of a part of a fused layer, in widths of its queries."""
SWAPPED = "norm1_context.linear"
"""The modulation of the last text block of SD3, of two vectors: scale and shift in diffusers, shift
and scale in the original code.
"""


def to_format(tensors: Mapping[str, Tensor], form: Format, pipeline: str) -> dict[str, Tensor]:
    """A LoRA in the names of another program.

    Args:
        tensors: A and B as "LAYER.lora_A.weight" and "LAYER.lora_B.weight" by diffusers' layers,
            with alpha / rank in B.
        form: the program.
        pipeline: name of the class of the pipeline.

    Returns:
        The tensors of the file. Layers that the program fuses have A of all parts and a
        block-diagonal B, which is exact, with the sum of their ranks. kohya's have alphas equal to
        the ranks, so that programs that ignore alpha compute the same.

    Raises:
        ConfigError: no names are known for the family, or for one of the layers.
    """
    pipeline = text_to_image(pipeline)
    is_ours = form == "diffusers" or (
        form == "comfyui" and pipeline in LAYERS and pipeline not in ORIGINAL_IN_COMFYUI
    )
    if is_ours:
        return {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    if pipeline not in LAYERS:
        known = f"diffusers, or a pipeline of {', '.join(LAYERS)}"
        raise ConfigError(f"format = {form!r} is not known for {pipeline}; allowed: {known}")
    named: dict[str, Tensor] = {}
    for layer, parts in _original(tensors, LAYERS[pipeline], form).items():
        down, up = _fused(parts)
        if form == "comfyui":
            named[f"diffusion_model.{layer}.lora_A.weight"] = down
            named[f"diffusion_model.{layer}.lora_B.weight"] = up
        else:
            flat = f"lora_unet_{layer.replace('.', '_')}"
            named[f"{flat}.lora_down.weight"] = down
            named[f"{flat}.lora_up.weight"] = up
            named[f"{flat}.alpha"] = torch.tensor(float(len(down)))
    return named


def in_diffusers(form: str, pipeline: str) -> bool:
    """Whether diffusers loads a file with the names of the program `form`; pipelines by class."""
    return form != "kohya" or text_to_image(pipeline) in KOHYA_IN_DIFFUSERS


def from_format(named: Mapping[str, Tensor], pipeline: str) -> dict[str, Tensor] | None:
    """The inverse of `to_format` for original names, those of kohya or of ComfyUI, with alpha /
    rank already in B: A and B by diffusers' layers. None if a name is not one of them.
    """
    layers = LAYERS.get(text_to_image(pipeline), {})
    table = {name.replace(".", "_"): parts for name, parts in layers.items()}
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named.items():
        found = ORIGINAL.fullmatch(name)
        if found is None or _pattern(found[1].replace(".", "_")) not in table:
            return None
        if found[2]:
            pairs.setdefault(found[1].replace(".", "_"), {})[SIDES[found[2]]] = tensor
    tensors: dict[str, Tensor] = {}
    for layer, pair in pairs.items():
        if len(pair) != 2:
            return None
        number = BLOCK.search(layer)
        parts = [part.format(number and number[0]) for part in table[_pattern(layer)]]
        for part, (down, up) in _parts(pair["A"], pair["B"], parts).items():
            tensors |= {f"{part}.lora_A.weight": down, f"{part}.lora_B.weight": up}
    return tensors


def families_of(names: Iterable[str]) -> list[str]:
    """The pipelines of `LAYERS` that have a layer with one of the original `names`."""
    layers = {
        _pattern(found[1].replace(".", "_"))
        for name in names
        if (found := ORIGINAL.fullmatch(name))
    }
    tables = {kind: {name.replace(".", "_") for name in table} for kind, table in LAYERS.items()}
    return [kind for kind, table in tables.items() if layers & table]


SIDES = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B"}
ORIGINAL = re.compile(
    rf"(?:lora_unet_|diffusion_model\.)(.+?)(?:\.({'|'.join(SIDES)})\.weight|\.alpha)"
)
BLOCK = re.compile(r"(?<=(?:blocks|layers|efiner)[._])\d+")
"""Of transformer blocks, layers and refiners."""


def _pattern(layer: str) -> str:
    """The name of `layer` with {} for the number of its block."""
    return BLOCK.sub("{}", layer, count=1)


def _original(
    tensors: Mapping[str, Tensor], layers: Layers, form: str
) -> dict[str, dict[str, Matrices | None]]:
    """The matrices by original layer, and by the parts of each; None for a part without a LoRA."""
    targets = {part: (name, parts) for name, parts in layers.items() for part in parts}
    found: dict[str, dict[str, Matrices | None]] = {}
    ends = ".lora_A.weight"
    for layer in [name.removesuffix(ends) for name in tensors if name.endswith(ends)]:
        number, target = BLOCK.search(layer), targets.get(_pattern(layer))
        if number is None or target is None:
            raise ConfigError(
                f"format: no name of {layer} is known for {form}; allowed: layers of the blocks, or"
                " another format"
            )
        name, parts = (target[0].format(number[0]), target[1])
        pairs = found.setdefault(name, {part.format(number[0]): None for part in parts})
        pairs[layer] = tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
    return found


def _width(part: str) -> int:
    return WIDER.get(part.rpartition(".")[2], 1)


def _fused(parts: Mapping[str, Matrices | None]) -> Matrices:
    """One pair of matrices for all parts of a layer."""
    present = {part: pair for part, pair in parts.items() if pair is not None}
    if len(parts) == 1:
        ((part, (down, up)),) = present.items()
        return down, _swapped(part, down, up)
    unit = next(len(up) // _width(part) for part, (_, up) in present.items())
    ranks = sum(len(down) for down, _ in present.values())
    fused = next(iter(present.values()))[1].new_zeros(unit * sum(map(_width, parts)), ranks)
    row = column = 0
    for part in parts:
        if part in present:
            up = present[part][1]
            fused[row : row + len(up), column : column + up.shape[1]] = up
            column += up.shape[1]
        row += unit * _width(part)
    return torch.cat([down for down, _ in present.values()]), fused


def _parts(down: Tensor, up: Tensor, parts: Iterable[str]) -> dict[str, Matrices]:
    """The matrices of the parts of a fused layer. If B is block-diagonal, as `_fused` makes it,
    every part gets its own rows of A; else each part whose B is not zero gets the whole A.
    """
    parts = list(parts)
    if len(parts) == 1:
        return {parts[0]: (down, _swapped(parts[0], down, up))}
    unit = len(up) // sum(map(_width, parts))
    rows = dict(zip(parts, up.split([unit * _width(part) for part in parts]), strict=True))
    used = {part for part, matrix in rows.items() if matrix.any()}
    for count in range(len(parts), max(len(used), 1) - 1, -1):
        for chosen in combinations(parts, count):
            rank = len(down) // count
            own = {part: slice(i * rank, (i + 1) * rank) for i, part in enumerate(chosen)}
            blocks = {part: rows[part][:, columns] for part, columns in own.items()}
            inside = sum(int(block.count_nonzero()) for block in blocks.values())
            if len(down) % count == 0 and inside == up.count_nonzero():
                return {part: (down[own[part]], block) for part, block in blocks.items()}
    return {part: (down, rows[part]) for part in parts if part in used}


def _swapped(part: str, down: Tensor, up: Tensor) -> Tensor:
    """`up` with its halves exchanged if it belongs to a layer that is `SWAPPED`."""
    if part.endswith(SWAPPED) and len(up) == 2 * down.shape[1]:
        return torch.cat([*reversed(up.chunk(2))])
    return up

"""LoRAs in the names of other programs: each family's round trips, through diffusers' own
converters if there are any.
"""

import re
from importlib import import_module
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from seeded import seeded
from torch.testing import assert_close

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.run.models.lora_files import Lora, read_lora
from flowrl.run.models.lora_formats import LAYERS, from_format, to_format

SD3, FLUX, QWEN, WAN, KLEIN, Z_IMAGE = LAYERS
WIDTH = 3072
"""FLUX's: diffusers' converter of its single blocks has it built in."""
OUTPUTS = {"proj_mlp": 4, "ff.net.0.proj": 4, "ff_context.net.0.proj": 4, "norm1.linear": 6}
INPUTS = {"proj_out": 5, "net.2": 4}


def kind(pipeline):
    return getattr(import_module("diffusers"), pipeline)


def size(layer, widths):
    return next((count for end, count in widths.items() if layer.endswith(end)), 1)


def lora(pipeline, only="", rank=2, width=WIDTH, blocks=2):
    """Random matrices for all layers of a family's blocks whose names contain `only`."""
    generator, tensors = seeded(3), {}
    layers = [part for parts in LAYERS[pipeline].values() for part in parts]
    for layer in [name.format(block) for name in layers for block in range(blocks)]:
        if re.search(only, layer):
            down, up = (width * size(layer, widths) for widths in (INPUTS, OUTPUTS))
            tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, down, generator=generator)
            tensors[f"{layer}.lora_B.weight"] = torch.randn(up, rank, generator=generator)
    return Lora(tensors)


def require_same(left, right):
    """Exactly the same products B A (in float64: no sum has more than one term per rank)."""
    assert left.ranks.keys() == right.ranks.keys()
    for layer in left.ranks:
        products = []
        for one in (left, right):
            a, b = (one.tensors[f"{layer}.lora_{x}.weight"].double() for x in "AB")
            products.append(b[:64] @ a[:, :64])
        assert torch.equal(*products), layer


ATTENTION = r"(?:attn|attention)"
ONE_PART = r"to_q|to_out|add_v_proj"


@pytest.mark.parametrize("only", ["", ATTENTION, ONE_PART])
@pytest.mark.parametrize("form", ["diffusers", "comfyui", "kohya"])
@pytest.mark.parametrize("pipeline", LAYERS)
def test_every_format_is_read_back(pipeline, form: Any, only, tmp_path):
    given = lora(pipeline, only, width=16)
    path = tmp_path / "any.safetensors"
    save_file(to_format(given.tensors, form, pipeline), path)
    found = read_lora(path, kind(pipeline))
    require_same(found, given)
    assert set(found.ranks.values()) == {2}


def with_zero_mlp(named):
    """diffusers' reader of musubi-tuner's Wan needs matrices for all layers of a block."""
    for number, name in [(n, name) for n in range(2) for name in ("ffn_0", "ffn_2")]:
        layer = f"lora_unet_blocks_{number}_{name}"
        named |= {f"{layer}.alpha": torch.tensor(1.0)}
        named |= {f"{layer}.lora_{x}.weight": torch.zeros(1, 1) for x in ("down", "up")}
    return named


@pytest.mark.parametrize("only", ["", ATTENTION])
@pytest.mark.parametrize(
    ("pipeline", "form"),
    [
        *((FLUX, "kohya"), (QWEN, "kohya"), (WAN, "kohya"), (WAN, "comfyui")),
        *((KLEIN, "kohya"), (KLEIN, "comfyui"), (Z_IMAGE, "kohya"), (Z_IMAGE, "comfyui")),
    ],
)
def test_diffusers_reads_the_same_matrices(pipeline, form: Any, only):
    given = lora(pipeline, rf"(?!.*_img)(?=.*{only})(?!.*add_._proj)" if pipeline == WAN else only)
    named = to_format(given.tensors, form, pipeline)
    if only and (pipeline, form) == (WAN, "kohya"):
        named = with_zero_mlp(named)
    found = kind(pipeline).lora_state_dict(dict(named))
    found = {n.removeprefix("transformer."): t for n, t in found.items() if re.search(only, n)}
    # of linear1 without an MLP diffusers makes matrices for the MLP too, whose B is zero
    extra = {n for n in found if n not in given.tensors}
    assert not any(found[n].any() for n in extra if "lora_B" in n)
    require_same(Lora({n: t for n, t in found.items() if n not in extra}), given)


class Checkpoint(dict[str, torch.Tensor]):
    """The weights of an original checkpoint; what it does not have is zero."""

    def pop(self, key, *default):
        return super().pop(key, torch.zeros(6))


def test_the_layers_of_sd3_are_those_of_its_original_checkpoints():
    """diffusers has no converter for its LoRAs, but one for the weights to which they belong: the
    products of the original layers, converted, are those of diffusers' layers.
    """
    given, width = lora(SD3, width=8).tensors, 8
    last = "transformer_blocks.1.norm1_context.linear.lora_B.weight"
    given[last] = torch.randn(2 * width, 2, generator=seeded(5))
    named = to_format(given, "kohya", SD3)
    original = Checkpoint({"context_embedder.weight": torch.zeros(width, width)})
    for layer in [name.format(block) for name in LAYERS[SD3] for block in range(2)]:
        flat = f"lora_unet_{layer.replace('.', '_')}"
        down, up = (named.pop(f"{flat}.lora_{side}.weight") for side in ("down", "up"))
        original[f"{layer}.weight"] = up @ down
        assert float(named.pop(f"{flat}.alpha")) == len(down)
    assert not named
    convert = import_module("diffusers.loaders.single_file_utils")
    found = convert.convert_sd3_transformer_checkpoint_to_diffusers(original)
    layers = Lora(given).ranks.keys()
    unused = {"transformer_blocks.1.attn.to_add_out"}  # the last block has no text output
    unused |= {f"transformer_blocks.1.ff_context.net.{end}" for end in ("0.proj", "2")}
    assert unused <= layers
    for layer in layers - unused:
        down, up = (given[f"{layer}.lora_{side}.weight"] for side in "AB")
        assert_close(found[f"{layer}.weight"], up @ down, atol=1e-6, rtol=0)


def test_names_and_alphas_are_those_of_the_programs():
    """Patterns of the sources that the module names; no loader of these programs was run."""
    expected: dict[Any, str] = {
        (SD3, "comfyui"): "transformer.transformer_blocks.1.attn.add_k_proj.lora_A.weight",
        (FLUX, "comfyui"): "transformer.single_transformer_blocks.1.attn.to_q.lora_B.weight",
        (QWEN, "comfyui"): "transformer.transformer_blocks.1.attn.to_out.0.lora_B.weight",
        (WAN, "comfyui"): "diffusion_model.blocks.1.cross_attn.o.lora_B.weight",
        (SD3, "kohya"): "lora_unet_joint_blocks_1_context_block_attn_qkv.lora_down.weight",
        (FLUX, "kohya"): "lora_unet_single_blocks_1_linear1.lora_up.weight",
        (QWEN, "kohya"): "lora_unet_transformer_blocks_1_attn_to_add_out.alpha",
        (WAN, "kohya"): "lora_unet_blocks_1_self_attn_q.lora_down.weight",
        (KLEIN, "comfyui"): "diffusion_model.double_blocks.1.img_attn.qkv.lora_A.weight",
        (KLEIN, "kohya"): "lora_unet_single_blocks_1_linear1.lora_up.weight",
        (Z_IMAGE, "comfyui"): "transformer.context_refiner.1.attention.to_q.lora_A.weight",
        (Z_IMAGE, "kohya"): "lora_unet_layers_1_attention_to_out_0.lora_down.weight",
    }
    for (pipeline, form), name in expected.items():
        named = to_format(lora(pipeline, ATTENTION, width=16).tensors, form, pipeline)
        assert name in named
        assert all(form == "kohya" or not n.endswith("alpha") for n in named)
        for alpha in [n for n in named if n.endswith(".alpha")]:
            assert float(named[alpha]) == len(named[alpha.replace("alpha", "lora_down.weight")])
    fused = to_format(lora(FLUX, ATTENTION, width=16).tensors, "kohya", FLUX)
    assert fused["lora_unet_single_blocks_0_linear1.lora_up.weight"].shape == (7 * 16, 6)
    assert fused["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"].shape == (6, 16)


def test_matrices_of_other_programs_have_any_rank_and_alpha(tmp_path):
    """A full B over q, k and v, as kohya's scripts train it."""
    generator = seeded(1)
    a, b = torch.randn(5, 8, generator=generator), torch.randn(24, 5, generator=generator)
    for form, alpha in (
        ("lora_unet_{}.lora_{}.weight", 2.0),
        ("diffusion_model.{}.lora_{}.weight", 5),
    ):
        flat = form.startswith("lora_unet")
        name = "joint_blocks.3.x_block.attn.qkv"
        name = name.replace(".", "_") if flat else name
        sides = ("down", "up") if flat else "AB"
        named = {form.format(name, side): t for side, t in zip(sides, (a, b), strict=True)}
        named[form.partition(".lora_{}")[0].format(name) + ".alpha"] = torch.tensor(float(alpha))
        save_file(named, tmp_path / "a.safetensors")
        found = read_lora(tmp_path / "a.safetensors", kind(SD3))
        assert sorted(found.ranks) == [f"transformer_blocks.3.attn.to_{x}" for x in "kqv"]
        for x, rows in zip("qkv", b.split(8), strict=True):
            layer = f"transformer_blocks.3.attn.to_{x}"
            assert torch.equal(found.tensors[f"{layer}.lora_A.weight"], a)
            assert torch.equal(found.tensors[f"{layer}.lora_B.weight"], rows * (alpha / 5))


def test_the_fused_layers_of_z_image_in_comfyui_are_read():
    a, b = torch.randn(2, 8, generator=seeded(1)), torch.randn(24, 2, generator=seeded(2))
    name = "diffusion_model.layers.7.attention"
    named = {f"{name}.qkv.lora_A.weight": a, f"{name}.qkv.lora_B.weight": b}
    named |= {f"{name}.out.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    found = from_format(named, Z_IMAGE)
    assert found is not None
    layers = [f"layers.7.attention.{x}" for x in ("to_k", "to_out.0", "to_q", "to_v")]
    assert sorted(Lora(found).ranks) == layers
    assert torch.equal(found["layers.7.attention.to_v.lora_B.weight"], b[16:])


def test_a_fused_layer_without_effect_keeps_its_parts():
    given = lora(SD3, r"attn\.to_", width=8).times(0)
    named = to_format(given.tensors, "kohya", SD3)
    found = from_format({n: t for n, t in named.items() if "alpha" not in n}, SD3)
    assert found is not None and set(Lora(found).ranks.values()) == {2}
    assert found.keys() == given.tensors.keys()


def test_the_last_text_modulation_of_sd3_has_scale_and_shift_exchanged():
    a, b = torch.ones(1, 4), torch.arange(8.0)[:, None]
    layer = "transformer_blocks.23.norm1_context.linear"
    given = {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
    named = to_format(given, "kohya", SD3)
    flat = "lora_unet_joint_blocks_23_context_block_adaLN_modulation_1.lora_up.weight"
    assert named[flat].flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    found = from_format(named, SD3)
    assert found is not None and torch.equal(found[f"{layer}.lora_B.weight"], b)


def test_what_has_no_name_is_refused(tmp_path):
    odd = {f"proj_out.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    with pytest.raises(ConfigError, match="no name of proj_out is known for kohya"):
        to_format(odd, "kohya", SD3)
    with pytest.raises(ConfigError, match="'comfyui' is not known for DemoPipeline"):
        to_format(odd, "comfyui", "DemoPipeline")
    for form, ours, theirs in (
        *(("kohya", SD3, FLUX), ("kohya", FLUX, SD3), ("kohya", WAN, QWEN), ("kohya", QWEN, WAN)),
        ("comfyui", SD3, WAN),
    ):
        as_format: Any = form
        save_file(
            to_format(lora(theirs, ATTENTION, width=8).tensors, as_format, theirs),
            tmp_path / "f.safetensors",
        )
        with pytest.raises(
            CheckpointError, match=f"a LoRA for {theirs}.*; allowed: one for {ours}"
        ):
            read_lora(tmp_path / "f.safetensors", kind(ours))


def test_text_encoders_of_kohya_are_left_out_with_a_warning(tmp_path, caplog):
    given, layers = lora(SD3, ATTENTION, width=8), ("lora_te1_text_model_q", "lora_te3_encoder_k")
    texts = {
        f"{layer}.{end}": torch.ones(2, 2)
        for layer in layers
        for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    path = tmp_path / "te.safetensors"
    save_file(to_format(given.tensors, "kohya", SD3) | texts, path)
    require_same(read_lora(path, kind(SD3)), given)
    (record,) = caplog.records
    assert "has 2 layers of text encoders, such as lora_te1_text_model_q:" in record.getMessage()
    save_file(texts, path)
    with pytest.raises(CheckpointError, match=r"only 2 layers of text encoders.* a transformer"):
        read_lora(path, kind(SD3))

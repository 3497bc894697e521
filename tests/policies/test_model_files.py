"""Models in folders of all kinds and in single files: loaded as the plain folder is, or refused in
one line.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from family_cases import CASES, can_save, draw, velocity
from safetensors.torch import load_file, save_file

from flowrl.core.errors import ConfigError
from flowrl.run.config import preset
from flowrl.run.models import hub
from flowrl.run.models.hub import find_source, not_found
from flowrl.run.models.load import load_policy
from flowrl.run.plan import memory, plan
from flowrl.testing.tiny import TINY, WIDTH, make_tokenizer, seeded, tiny_sd3

BLOCK = {
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
}
OUTSIDE = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}
JOINED = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
}


def sd3_layout(network):
    """The weights of diffusers' SD3 transformer in the layout of its authors."""
    state, made = network.state_dict(), {}
    last = f"transformer_blocks.{len(network.transformer_blocks) - 1}.norm1_context.linear"
    for name, tensor in state.items():
        stem, _, end = name.rpartition(".")
        if stem in (last, "norm_out.linear"):  # (scale, shift) in diffusers
            tensor = torch.cat([*tensor.chunk(2)][::-1])
        if name.startswith("transformer_blocks."):
            _, number, rest = stem.split(".", 2)
            if rest in BLOCK:
                made[f"joint_blocks.{number}.{BLOCK[rest]}.{end}"] = tensor
            for joined, parts in JOINED.items():
                if rest == parts[0]:
                    block = f"transformer_blocks.{number}."
                    three = [state[f"{block}{part}.{end}"] for part in parts]
                    made[f"joint_blocks.{number}.{joined}.{end}"] = torch.cat(three)
        else:
            made[OUTSIDE.get(name) or f"{OUTSIDE[stem]}.{end}"] = tensor
    return {f"model.diffusion_model.{name}": tensor.contiguous() for name, tensor in made.items()}


WAN = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_out.0": "o",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "proj_out": "head.head",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    ".norm2.": ".norm3.",
}


def wan_layout(network):
    """The weights of diffusers' Wan transformer in the layout of its authors."""
    made = {}
    for name, tensor in network.state_dict().items():
        for mine, theirs in WAN.items():
            name = name.replace(mine, theirs)
        table = "modulation" if name.startswith("blocks") else "head.modulation"
        made[name.replace("scale_shift_table", table)] = tensor.contiguous()
    return made


def vae_layout(decoder):
    """The weights of diffusers' tiny image decoder in the layout of its authors."""
    made, blocks = {}, len(decoder.decoder.up_blocks)
    for name, tensor in decoder.state_dict().items():
        for number in range(blocks):
            up = f"up.{blocks - 1 - number}"
            name = name.replace(f"up_blocks.{number}.resnets", f"{up}.block")
            name = name.replace(f"up_blocks.{number}.upsamplers.0", f"{up}.upsample")
            name = name.replace(f"down_blocks.{number}.resnets", f"down.{number}.block")
            name = name.replace(f"down_blocks.{number}.downsamplers.0", f"down.{number}.downsample")
        for mine, theirs in (
            ("mid_block.resnets.0", "mid.block_1"),
            ("mid_block.resnets.1", "mid.block_2"),
            ("mid_block.attentions.0.group_norm", "mid.attn_1.norm"),
            ("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out"),
            ("mid_block.attentions.0.to_", "mid.attn_1."),
            ("conv_norm_out", "norm_out"),
            ("conv_shortcut", "nin_shortcut"),
        ):
            name = name.replace(mine, theirs)
        if "mid.attn_1" in name and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        made[f"first_stage_model.{name}"] = tensor.contiguous()
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The tiny pipelines of all families in folders."""
    root = tmp_path_factory.mktemp("folders")
    for name, case in CASES.items():
        if can_save(case):
            case.make().save_pretrained(root / name)
    return root


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same(policy, other):
    """Whether two policies have the same velocities and images, to the bit."""
    return torch.equal(velocity(policy), velocity(other)) and torch.equal(draw(policy), draw(other))


# ----- Variants

FORMS = {
    "all": ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"),
    "some": ("transformer", "text_encoder_2"),
}


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "with a frozen LoRA"])
@pytest.mark.parametrize("parts", FORMS.values(), ids=FORMS)
def test_variants_are_found_from_the_files(parts, lazy, folders, cache, tmp_path):
    """The expected weights are the variant's, rounded to float16, in exactly these parts."""
    pipe, folder = tiny_sd3(), tmp_path / "variant"
    pipe.save_pretrained(folder)
    for part in parts:
        network = getattr(pipe, part).half()
        (path,) = (folder / part).glob("*.safetensors")
        path.unlink()
        network.save_pretrained(folder / part, variant="fp16")
        network.float()
    options = TINY
    if not lazy:
        policy = CASES["sd3"].policy(seed=1)
        policy.save(tmp_path / "lora")
        options = replace(TINY, frozen_adapters=str(tmp_path / "lora"))
    loaded = load_policy(str(folder), options)
    rounded = CASES["sd3"].policy(pipe)
    assert same(loaded, rounded)
    assert not same(loaded, load_policy(str(folders / "sd3"), TINY))


def test_weights_without_a_variant_are_preferred(folders, cache, tmp_path):
    """Also beside a part that has the variant only."""
    pipe, folder = tiny_sd3(), tmp_path / "both"
    pipe.save_pretrained(folder)
    for part in ("transformer", "text_encoder"):
        getattr(tiny_sd3(seed=1), part).save_pretrained(folder / part, variant="fp16")
    pipe.text_encoder_3.save_pretrained(folder / "text_encoder_3", variant="fp16")
    (folder / "text_encoder_3" / "model.safetensors").unlink()
    assert same(load_policy(str(folder), TINY), load_policy(str(folders / "sd3"), TINY))


def test_sharded_variants_are_found_and_missing_shards_named(folders, cache, tmp_path):
    pipe, folder = tiny_sd3(), tmp_path / "shards"
    pipe.save_pretrained(folder, variant="fp16", max_shard_size="100KB")
    shards = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(shards) > 2
    assert same(load_policy(str(folder), TINY), load_policy(str(folders / "sd3"), TINY))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=rf"lacks 1 of \d+ shards .* as {shards[1].name}; .*hf"):
        load_policy(str(folder), TINY)


# ----- Single files


@pytest.mark.satellite
@pytest.mark.parametrize("name", CASES)
def test_a_file_with_diffusers_names_is_its_folder(name, folders, cache, tmp_path):
    case, file = CASES[name], tmp_path / "tuned.safetensors"
    if not can_save(case):
        pytest.skip("its processor needs torchvision")
    save_file(load_file(next((folders / name / "transformer").glob("*.safetensors"))), file)
    original = str(folders / name)
    for dtype in ("float32", "bfloat16"):
        options = replace(case.options, dtype=dtype)
        loaded = load_policy(str(file), replace(options, original=original))
        assert same(loaded, load_policy(original, options)), dtype


@pytest.mark.parametrize("load_to", ["device", "meta"])
def test_a_file_in_the_authors_layout(load_to, folders, cache, tmp_path):
    """Its transformer is its own; all other parts are those of the original."""
    pipe, file, original = tiny_sd3(), tmp_path / "tuned.safetensors", str(folders / "sd3")
    pipe.transformer = tiny_sd3(seed=5).transformer
    save_file(sd3_layout(pipe.transformer), file)
    options = replace(TINY, original=original, load_to=load_to)
    loaded = load_policy(str(file), options)
    if load_to == "meta":
        assert all(p.is_meta for p in loaded.transformer.parameters() if not p.requires_grad)
        return
    assert same(loaded, CASES["sd3"].policy(pipe))
    assert loaded.prompts.store.folder == stored_by(original)


def test_a_wan_file_in_the_authors_layout(folders, cache, tmp_path):
    """In bfloat16 some layers stay in float32, as those of a folder do."""
    file, options = tmp_path / "tuned.safetensors", CASES["wan"].options
    save_file(wan_layout(CASES["wan"].make().transformer), file)
    for dtype in ("float32", "bfloat16"):
        given = replace(options, dtype=dtype)
        loaded = load_policy(str(file), replace(given, original=str(folders / "wan")))
        assert same(loaded, load_policy(str(folders / "wan"), given)), dtype


def stored_by(model):
    """The folder with the embeddings of a model in a folder."""
    policy = load_policy(model, TINY)
    velocity(policy)
    return policy.prompts.store.folder


def narrow_clip():
    """A CLIP encoder of another width than the tiny pipeline's, by which diffusers tells them
    apart.
    """
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    tokens = make_tokenizer(clip=True)
    config = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=32,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    with seeded(3):
        return CLIPTextModelWithProjection(config).eval()


@pytest.mark.satellite
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_with_a_whole_pipeline(dtype, cache, tmp_path):
    """The original has no weights of these parts."""
    options = replace(TINY, dtype=dtype)
    pipe, file, original = tiny_sd3(seed=5), tmp_path / "all.safetensors", tmp_path / "original"
    pipe.text_encoder_2 = narrow_clip()
    # the released file has no projection of CLIP-L; diffusers makes it an identity
    pipe.text_encoder.text_projection.weight.data = torch.eye(WIDTH)
    pipe.save_pretrained(original)
    tensors = sd3_layout(pipe.transformer) | vae_layout(pipe.vae)
    for name, part in (("clip_l", 1), ("clip_g", 2), ("t5xxl", 3)):
        encoder = pipe.components["text_encoder" if part == 1 else f"text_encoder_{part}"]
        for key, tensor in encoder.state_dict().items():
            if not (part == 1 and key == "text_projection.weight"):
                tensors[f"text_encoders.{name}.transformer.{key}"] = tensor.clone().contiguous()
    save_file(tensors, file)
    expected = load_policy(str(original), options)
    reference = velocity(expected), draw(expected)
    for path in original.glob("*/*.safetensors"):
        path.unlink()
    options = replace(options, original=str(original))
    loaded = load_policy(str(file), options)
    assert torch.equal(velocity(loaded), reference[0]) and torch.equal(draw(loaded), reference[1])
    find_source(str(file), str(original)).check()
    lost = {n: t for n, t in tensors.items() if n != "first_stage_model.decoder.conv_in.weight"}
    save_file(lost, tmp_path / "lost.safetensors")
    with pytest.raises(
        ConfigError, match=r"1 of \d+ weights of the vae .*decoder\.conv_in\.weight"
    ):
        find_source(str(tmp_path / "lost.safetensors"), str(original)).check()
    first = loaded.prompts.store.folder
    assert cache in first.parents
    again = load_policy(str(file), options)
    again._load_encoders = None
    assert torch.equal(velocity(again), reference[0])  # from the stored embeddings
    for name in ("shared", "encoder.embed_tokens"):
        tensors[f"text_encoders.t5xxl.transformer.{name}.weight"] *= -1
    save_file(tensors, file)
    other = load_policy(str(file), options)
    assert not torch.equal(velocity(other), reference[0])
    assert other.prompts.store.folder != first


def test_the_plan_of_a_single_file_is_that_of_its_original(folders, tmp_path):
    file, prompts = tmp_path / "tuned.safetensors", tmp_path / "prompts.txt"
    save_file(sd3_layout(tiny_sd3().transformer), file)
    prompts.write_text("a dog\n")
    given = {"prompts": str(prompts), "reward": "jpeg-compressibility", "resolution": 16}
    original, counted = str(folders / "sd3"), []
    for model in ({"model": original}, {"model": str(file), "original": original}):
        config = preset("tiny").apply(**given, **model)
        counted.append(memory(plan(config), config))
    assert counted[0] is not None and counted[0] == counted[1]


# ----- Refusals


def without(part, *, folder=True):
    def change(path):
        for file in (path / part).iterdir():
            if folder or file.suffix == ".safetensors":
                file.unlink()
        if folder:
            (path / part).rmdir()
        return path

    return change


def pickled(path):
    (file,) = (path / "transformer").glob("*.safetensors")
    file.rename(file.with_suffix(".bin"))
    return path


def named(name, tensors=None):
    """A single file of this name, beside the folder."""

    def change(path):
        file = path.parent / name
        save_file(tensors or sd3_layout(tiny_sd3().transformer), file)
        return file

    return change


def headless(path):
    card = path / "model_index.json"
    entries = json.loads(card.read_text())
    card.write_text(json.dumps({n: v for n, v in entries.items() if n != "transformer"}))
    return path


def damaged(path):
    file = path.parent / "damaged.safetensors"
    file.write_bytes(b"no header")
    return file


EIGHT = {"a.weight": torch.zeros(2).to(torch.float8_e4m3fn)}
LACKING = {"joint_blocks.0.x": torch.zeros(2)}

REFUSED = {
    "no decoder": (without("vae"), "", r"has no folder vae, which .*; is the download complete"),
    "no weights": (
        without("text_encoder_2", folder=False),
        "",
        r"has no weights of its text_encoder_2; expected model\.safetensors",
    ),
    "pickled": (
        pickled,
        "",
        r"weights of its transformer in transformer/diffusion.*\.bin only.*python -c '?.*"
        r"use_safetensors=False.*save_pretrained",
    ),
    "no original": (named("x.safetensors"), "", r"is a single file; add --original FOLDER"),
    "a pickled file": (named("x.ckpt"), "", r"another format; allowed: a \.safetensors file"),
    "not a pipeline": (headless, "", r"model_index\.json has a transformer"),
    "damaged": (damaged, "same", r"damaged\.safetensors cannot be read"),
    "8 bits": (named("x.safetensors", EIGHT), "same", r"F32, F16 or BF16 \(a\.weight .* F8_E4M3"),
    "another model": (
        named("x.safetensors", LACKING),
        "same",
        r"is no SD3Transformer2DModel that diffusers converts .*joint_blocks\.0\.x",
    ),
    "original of a folder": (lambda path: path, "same", "original = .* unless model is a single"),
    "no such original": (named("x.safetensors"), "nowhere/x/y", "original: 'nowhere/x/y' does not"),
    "original offline": (named("x.safetensors"), "owner/model", "original: .*hf download owner/"),
}


@pytest.mark.parametrize(("change", "original", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_set_of_files_is_refused(change, original, message, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tiny_sd3().save_pretrained(folder)
    model = change(folder)
    options = replace(TINY, original=str(folder) if original == "same" else original or None)
    with pytest.raises(ConfigError, match=message) as caught:
        find_source(str(model), options.original).check()
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        load_policy(str(model), options)


def test_missing_and_other_weights_are_found_in_the_headers(folders, tmp_path):
    find_source(str(folders / "sd3")).check()
    tiny_sd3().save_pretrained(tmp_path / "model")
    (path,) = (tmp_path / "model" / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    lost = tensors.pop("proj_out.bias")
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"1 of \d+ weights of the .* as proj_out\.bias"):
        find_source(str(tmp_path / "model")).check()
    save_file({**tensors, "proj_out.bias": torch.cat([lost, lost])}, path)
    with pytest.raises(ConfigError, match=r"proj_out\.bias .* is \(32,\) in the file, \(16,\) by"):
        find_source(str(tmp_path / "model")).check()


def test_an_index_of_other_shards_is_read(folders, tmp_path):
    """Some folders have the index of a sharded copy beside a complete file."""
    tiny_sd3().save_pretrained(tmp_path / "model")
    index = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "diffusion_pytorch_model-00001.safetensors"}}))
    assert find_source(str(tmp_path / "model")).variant("transformer") is None


# ----- The Hub


class GatedRepoError(OSError):
    """As of huggingface_hub."""


@pytest.mark.parametrize(
    ("offline", "cause", "parts"),
    [
        (True, None, ("HF_HUB_OFFLINE=0", "hf download owner/model", "licence", "HF_TOKEN")),
        (False, GatedRepoError("403"), ("licence", "not accepted", "HF_TOKEN", "hf auth login")),
        (False, None, ("401 Client Error", "connection", "licence", "HF_TOKEN")),
    ],
)
def test_a_hub_that_cannot_be_read_says_why(offline, cause, parts, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    error = OSError("401 Client Error")
    error.__cause__ = cause
    message = not_found("owner/model", error)
    assert all(part in message for part in (*parts, "https://huggingface.co/owner/model"))
    assert ("HF_HUB_OFFLINE" in message) == offline


def test_a_variant_on_the_hub_is_downloaded_if_there_is_nothing_else(tmp_path):
    tried = []

    def download(model, use_safetensors, variant=None):
        tried.append(variant)
        if variant != "bf16":
            raise OSError(f"Could not find the weights in [] (variant={variant})")
        return str(tmp_path)

    kind = SimpleNamespace(download=download)
    assert hub._downloaded(kind, "owner/model") == tmp_path
    assert tried == [None, "fp16", "bf16"]

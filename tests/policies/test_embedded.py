"""No two encoders share stored embeddings of prompts, and prompts that are cut are named."""

import json
import re
import shutil

import pytest
import torch
from family_cases import CASES

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.policies import SD3
from flowrl.policies.families import Flux
from flowrl.policies.pipeline import PipelinePolicy
from flowrl.run.models import embedded, load
from flowrl.run.models.load import embed_prompts, load_policy
from flowrl.testing.tiny import TINY, tiny_flux, tiny_sd3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    tiny_sd3().save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prompts"


def stored(model, change=lambda policy: None, **options):
    """The folder of the embeddings of one prompt."""
    policy = load_policy(str(model), TINY, **options)
    change(policy)
    policy.prompts.warm([Prompt("a fox")])
    return policy.prompts.store.folder


def fake(*given, **settings):
    words = torch.ones(8, 5, 64)
    return words, None, words[:, 0], None


class Loud(SD3):
    def encode(self, pipe, texts, tokens, device):
        return super().encode(pipe, [text.upper() for text in texts], tokens, device)


def with_text_encoder(policy):
    policy.pipe.text_encoder = tiny_sd3(seed=1).text_encoder


def shorter(policy):
    policy.pipe.tokenizer_max_length = 30


REPLACED = {
    "method": lambda policy: setattr(policy.pipe, "encode_prompt", fake),
    "private method": lambda policy: setattr(
        policy.pipe, "_get_t5_prompt_embeds", lambda **given: torch.zeros(8, 24, 64)
    ),
    "text encoder": with_text_encoder,
    "tokenizer": lambda policy: setattr(policy.pipe, "tokenizer", tiny_flux().tokenizer),
    "tokenizer in place": lambda policy: setattr(policy.pipe.tokenizer_3, "padding_side", "left"),
    "length": shorter,
    "family's function": lambda policy: setattr(
        policy.family, "encode", lambda *given: [{"words": torch.ones(5, 64)}] * 8
    ),
}


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_embeddings_of_a_replaced_part_are_not_stored(change, model, cache):
    assert stored(model).parent == cache
    assert cache not in stored(model, change).parents


def test_a_given_text_encoder_is_the_one_that_embeds(model, cache):
    base, other = (load_policy(str(model), TINY) for _ in range(2))
    with_text_encoder(other)
    first, second = (policy.prompts for policy in (base, other))
    words = [c.rows(torch.tensor(c.numbers([Prompt("a fox")])))["words"] for c in (first, second)]
    assert (words[0] - words[1]).abs().max() > 0.01


PATCHED = {
    "pipeline": ("diffusers.StableDiffusion3Pipeline.encode_prompt", fake),
    "function": (
        "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3.retrieve_timesteps",
        fake,
    ),
    "text encoder": ("transformers.models.t5.modeling_t5.T5DenseActDense.forward", lambda s, x: x),
    "family": ("flowrl.policies.SD3.encode", lambda *given: [{"words": torch.ones(5, 64)}] * 8),
}


@pytest.mark.parametrize(("name", "value"), PATCHED.values(), ids=PATCHED)
def test_embeddings_of_patched_libraries_are_not_stored(name, value, model, cache, monkeypatch):
    monkeypatch.setattr(name, value)
    assert cache not in stored(model).parents


def test_embeddings_of_another_family_are_not_stored(model, cache):
    assert cache not in stored(model, family=Loud()).parents


def other_class(folder):
    """A tokenizer of another class with the same files."""
    entry = folder / "model_index.json"
    named = {"tokenizer_2": ["transformers", "CLIPTokenizer"]}
    entry.write_text(json.dumps(json.loads(entry.read_text()) | named))


def one_number(folder):
    """Of the last weight, where no sample of the file need be."""
    path = folder / "text_encoder_2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def other_link(folder):
    shutil.move(folder / "text_encoder", folder.with_name("first"))
    tiny_sd3(seed=1).text_encoder.save_pretrained(folder.with_name("second"))
    (folder / "text_encoder").symlink_to(folder.with_name("second"))


@pytest.mark.parametrize("at_once", [0, 2**24])
@pytest.mark.parametrize("change", [other_class, one_number, other_link])
def test_other_files_have_another_folder(change, at_once, model, cache, tmp_path, monkeypatch):
    """Also if the hashes of the files were stored."""
    monkeypatch.setattr(embedded, "READ_AT_ONCE", at_once)
    folder = shutil.copytree(model, tmp_path / "model")
    first = stored(folder)
    assert stored(folder) == first
    change(folder)
    assert stored(folder) != first
    assert (cache.parent / "hashes").exists() == (at_once == 0)


def test_weights_outside_the_folder_are_refused(model, cache, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    index = folder / "text_encoder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../text_encoder_2/model.safetensors"}}))
    with pytest.raises(ConfigError, match=r"index\.json = .*allowed: files of text_encoder"):
        load_policy(str(folder), TINY)
    index.unlink()
    (folder / "text_encoder" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"text_encoder = 'a LoRA' .*merge_and_unload"):
        load_policy(str(folder), TINY)


def test_what_embeds_must_not_change_between_two_prompts(model, cache, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    policy, other, late = (load_policy(str(folder), TINY) for _ in range(3))
    for used in (policy, other):
        used.encode([Prompt("a fox")])
    shorter(policy)
    with pytest.raises(ConfigError, match=r"\['tokenizer_max_length'\].* make a new policy"):
        policy.encode([Prompt("a fox")])
    one_number(folder)
    with pytest.raises(ConfigError, match="files or code of the text encoders = 'changed'"):
        other.encode([Prompt("another fox")])
    late.encode([Prompt("a fox")])
    assert cache not in late.prompts.store.folder.parents


def test_distilled_guidance_embeds_nothing(cache, tmp_path):
    tiny_flux().save_pretrained(tmp_path / "model")
    places = [stored(tmp_path / "model", family=Flux(guidance)) for guidance in (1.0, 7.0)]
    assert places[0] == places[1] and places[0].parent == cache


# Prompts that are cut at an encoder's number of tokens

WORDS = " ".join(f"w{i}" for i in range(59))
PROMPTS = [Prompt(f"{WORDS} cat"), Prompt(f"{WORDS} dog"), Prompt("a fox")]
LINES = {
    "sd3": [
        "text_encoder, text_encoder_2: 2 of 3 .* 40 tokens: ",
        "text_encoder_3: 2 of 3 .* 24 t",
    ],
    "flux": ["text_encoder: 2 of 3 .* 40 tokens: ", "text_encoder_2: 2 of 3 .* 24 tokens .max_seq"],
    "flux2-klein": ["text_encoder: 2 of 3 .* 48 tokens"],
    "z-image": ["text_encoder: 2 of 3 .* 48 tokens"],
    "qwen-image": ["text_encoder: 2 of 3 .* 24 tokens"],
    "wan": ["text_encoder: 2 of 3 .* 24 tokens"],
    "wan-2.2": ["text_encoder: 2 of 3 .* 24 tokens"],
    "wan-2.2-5b": ["text_encoder: 2 of 3 .* 24 tokens"],
    "sana": ["text_encoder: 2 of 3 .* 23 tokens"],
}


@pytest.mark.parametrize("name", LINES)
def test_every_family_says_once_a_run_how_many_prompts_are_cut(
    name, tmp_path, monkeypatch, caplog, capfd
):
    """Also if the embeddings are found on disk, and instead of what the libraries print."""
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    CASES[name].make().save_pretrained(tmp_path / "model")
    for _ in range(2):
        policy = load_policy(str(tmp_path / "model"), CASES[name].options)
        caplog.clear()
        capfd.readouterr()
        for some in (PROMPTS, PROMPTS, PROMPTS[:1]):
            policy.warm(some)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == len(LINES[name])
        for line, pattern in zip(said, LINES[name], strict=True):
            assert re.search(pattern, line), line
            assert re.search(r"the last words read are '(user\\n)?w0 w1 w2 w3", line)
        printed = capfd.readouterr()
        assert "w7 w8 w9" not in printed.out + printed.err.replace(said[0], "")


@pytest.mark.parametrize("name", LINES)
def test_a_prompt_that_just_fits_is_not_cut(name, caplog):
    """The special tokens count, and those of a chat template; 24 tokens are less than the 40 of
    CLIP.
    """
    size = {"qwen-image": 24, "flux2-klein": 21, "z-image": 40, "sana": 22}.get(name, 23)
    policy = CASES[name].policy()
    policy.warm([Prompt("x" * size)])
    assert caplog.records == []
    policy.warm([Prompt("x" * (size + 1))])
    assert len(caplog.records) == 1


@pytest.mark.satellite
@pytest.mark.parametrize("name", LINES)
def test_prompts_are_embedded_before_the_transformer_is_loaded(name, tmp_path, monkeypatch):
    order, complete, encoders = [], load._complete, PipelinePolicy.text_encoders

    def noted_network(source, part, *given):
        order.append(part)
        return complete(source, part, *given)

    def noted_encoders(policy):
        order.append("encoders")
        return encoders(policy)

    monkeypatch.setattr(load, "_complete", noted_network)
    monkeypatch.setattr(PipelinePolicy, "text_encoders", noted_encoders)
    folder, options = str(tmp_path / "model"), CASES[name].options
    CASES[name].make().save_pretrained(folder)
    prompts, policies = [Prompt("a fox"), Prompt("an owl")], []
    for cache in ("first", "other"):
        monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / cache))
        if cache == "first":
            embed_prompts(folder, options, prompts)
            assert order == ["vae", "encoders"]
            embed_prompts(folder, options, prompts)  # nothing is missing
        policies.append(load_policy(folder, options))
        policies[-1].encode(prompts)
        encoded = order.count("encoders"), order.index("transformer") > order.index("encoders")
        assert encoded == ((1, True) if cache == "first" else (2, True))
    one, other = (policy.prompts.rows(torch.tensor([0, 1])) for policy in policies)
    assert all(torch.equal(one[part], other[part]) for part in one)

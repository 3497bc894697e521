"""CLIP rewards: preprocessing by hand and against transformers' own, scores by their formulas,
weights from files.

The networks are the real transformers classes, tiny and random.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from seeded import rand
from tiny_rewards import tiny_clip, tiny_detector
from torch import nn

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.rewards.clip import Aesthetic, CLIPScore, HPSv21, PickScore, clip_pixels
from flowrl.rewards.geneval import load_detector
from flowrl.testing import check_reward

PROMPTS = [Prompt("a red fox"), Prompt("two cats"), Prompt("a red fox"), Prompt("x" * 200)]
TEXTS = [prompt.text for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def images():
    small = rand(4, 3, 6, 6)
    return nn.functional.interpolate(small, size=(40, 40), mode="bilinear")


def published_pixels(image):
    from transformers import CLIPImageProcessorPil

    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    return CLIPImageProcessorPil(**sizes)([pixels], return_tensors="pt").pixel_values


@torch.no_grad()
def reference(folder, images, texts):
    """Features and scale by transformers alone, an image and a text at a time."""
    from transformers import AutoTokenizer, CLIPModel

    model, words = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for image, text in zip(images, texts, strict=True):
        inputs = words([text], truncation=True, max_length=77, return_tensors="pt")
        rows.append(model(**inputs, pixel_values=published_pixels(image)))
    both = (torch.cat([getattr(r, name) for r in rows]) for name in ("image_embeds", "text_embeds"))
    return *both, model.logit_scale.exp()


@pytest.mark.parametrize(("height", "width"), [(64, 48), (20, 30)])
def test_pixels_equal_transformers_own(height, width):
    """Up to one level of 255 in a few values."""
    image = rand(1, 3, height, width, seed=1)
    apart = (clip_pixels(image, 32) - published_pixels(image[0])).abs()
    assert apart.max() < 1.01 / 255 / 0.26 and (apart > 1e-5).float().mean() < 1 / 500


def test_pickscore_is_the_scaled_cosine(folder, images):
    pictures, texts, scale = reference(folder, images, TEXTS)
    variants = {}, {"form": "released"}, {"batch": 3}, {"dtype": "bfloat16"}
    rewards = (PickScore(folder, tokenizer="", **options) for options in variants)
    plain, released, batched, rough = (reward.score(images, PROMPTS) for reward in rewards)
    assert torch.allclose(plain, scale * (pictures * texts).sum(1), atol=1e-3) and plain.std() > 1
    assert torch.allclose(26 * released, plain, rtol=1e-6)
    assert torch.allclose(batched, plain, atol=1e-3)
    assert rough.dtype == torch.float32 and torch.allclose(rough, plain, atol=1.5)
    assert not torch.equal(rough, plain)


def test_clipscore_is_2_5_times_the_cosine_or_0(folder, images):
    pictures, texts, _ = reference(folder, images, [f"A photo depicts {text}" for text in TEXTS])
    scores = CLIPScore(folder).score(images, PROMPTS)
    assert torch.allclose(scores, 2.5 * (pictures * texts).sum(1).clamp(min=0), atol=1e-5)
    # the space is added
    assert torch.equal(CLIPScore(folder, prefix="A photo depicts").score(images, PROMPTS), scores)


def head():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 3), nn.Dropout(0.1), nn.Linear(3, 1)
    ).eval()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_aesthetic_is_the_heads_own_output(folder, images, tmp_path, suffix):
    layers, path = head(), tmp_path / f"head{suffix}"
    weights = {f"layers.{name}": t.detach() for name, t in reversed(layers.state_dict().items())}
    torch.save(weights, path) if suffix == ".pth" else save_file(weights, path)
    reward = Aesthetic(folder, head=str(path))
    expected = layers(reference(folder, images, TEXTS)[0]).squeeze(1).detach()
    assert torch.allclose(reward.score(images, PROMPTS), expected, atol=1e-4)
    assert check_reward(reward, (images, PROMPTS)).ok


IN_LAYERS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
OTHERS = {
    "logit_scale": "logit_scale",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
}


def open_clip_names(state):
    """The weights of a `CLIPModel` of two layers under the names of OpenAI's and open_clip's files,
    which have one matrix for query, key and value, and transposed projections.
    """
    names, renamed = dict(NORMS), {new: state[old] for new, old in OTHERS.items()}
    renamed["visual.proj"] = state["visual_projection.weight"].t()
    renamed["text_projection"] = state["text_projection.weight"].t()
    for new, old in (("visual.transformer", "vision_model"), ("transformer", "text_model")):
        for layer in range(2):
            block, place = f"{new}.resblocks.{layer}.", f"{old}.encoder.layers.{layer}."
            names |= {block + part: place + former for part, former in IN_LAYERS.items()}
            for kind in ("weight", "bias"):
                parts = [state[f"{place}self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
                renamed[f"{block}attn.in_proj_{kind}"] = torch.cat(parts)
    for new, old in names.items():
        renamed |= {f"{new}.{kind}": state[f"{old}.{kind}"] for kind in ("weight", "bias")}
    return renamed


def test_hps_reads_open_clips_weights(folder, images, tmp_path):
    """In a file of other weights than the folder's."""
    other, path = tiny_clip(tmp_path / "other", seed=1), str(tmp_path / "weights.pt")
    weights = open_clip_names(load_file(other / "model.safetensors"))
    torch.save({"epoch": 1, "state_dict": weights}, path)
    reward = HPSv21(folder, weights=path)
    pictures, texts, _ = reference(other, images, TEXTS)
    scores = reward.score(images, PROMPTS)
    assert torch.allclose(scores, (pictures * texts).sum(1), atol=1e-5) and scores.std() > 0.01
    assert check_reward(reward, (images, PROMPTS)).ok


def test_hps_sees_all_of_a_wide_image(folder):
    """The score of a wide image is that of a square one with its bars."""
    image = rand(1, 3, 20, 40, seed=5)
    image[..., :10], image[..., 30:] = 0.1 * image[..., :10], 0.9 + 0.1 * image[..., 30:]
    pair = [(image, PROMPTS[:1]), (nn.functional.pad(image, (0, 0, 10, 10)), PROMPTS[:1])]
    hps, pickscore = HPSv21(folder, weights=""), PickScore(folder, tokenizer="")
    torch.testing.assert_close(*(hps.score(*given) for given in pair), atol=1e-3, rtol=0)
    wide, square = (pickscore.score(*given) for given in pair)
    assert not torch.allclose(wide, square, atol=0.1)


class Bomb:
    """Files in PyTorch's format may be named by the user; what they may contain is tensors."""

    def __reduce__(self):
        return (pytest.fail, ("code in a weight file was run",))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"text.layers.0": torch.zeros(1)}, "state_dict for CLIPModel"),
        ({"state_dict": {"weight": Bomb()}}, "cannot be loaded"),
        ({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, "features of the head = 5 .* 8"),
    ],
)
def test_foreign_weights_are_refused(folder, tmp_path, content, problem):
    path = str(tmp_path / "weights")
    torch.save(content, path)
    kind = Aesthetic(folder, head=path) if "weight" in content else HPSv21(folder, weights=path)
    with pytest.raises(ConfigError, match=problem):
        kind.load()


def drop_weights(folder):
    path, left_out = folder / "model.safetensors", ("text_model", "class_predictor")
    kept = {n: t for n, t in load_file(path).items() if not n.startswith(left_out)}
    save_file(kept, path, metadata={"format": "pt"})


def cut_file(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])


def drop_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (drop_weights, r"weights of CLIPModel that .* lacks = \['text_model"),
        (cut_file, "cannot be loaded as a model for this reward"),
        (drop_tokenizer, "tokenizer = .* one of 90 tokens, not 2"),
        (shutil.rmtree, "HF_HUB_OFFLINE=0"),
    ],
)
def test_damaged_folders_are_refused(folder, tmp_path, damage, problem):
    copied = shutil.copytree(folder, tmp_path / "model")
    damage(copied)
    with pytest.raises(ConfigError, match=problem):
        PickScore(str(copied), tokenizer="").load()


def test_another_kind_of_model_is_refused(folder, tmp_path):
    detector = tiny_detector(tmp_path / "detector")
    with pytest.raises(ConfigError, match=r"weights of CLIPModel that .* lacks"):
        PickScore(str(detector), tokenizer=folder).load()
    with pytest.raises(ConfigError, match="cannot be loaded as a model for this reward"):
        load_detector(folder)
    drop_weights(detector)
    with pytest.raises(ConfigError, match=r"Mask2FormerForUniversalSegmentation that .* lacks"):
        load_detector(str(detector))

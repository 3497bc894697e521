"""CLIP rewards: preprocessing by hand and against transformers' own, scores by their formulas,
weights from files.

The networks are the real transformers classes, tiny and random.
"""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_rewards import tiny_clip, tiny_detector
from torch import nn

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.parts.registry import build
from flowrl.rewards import Aesthetic, CLIPScore, HPSv21, PickScore
from flowrl.rewards.clip import clip_pixels, load_encoder
from flowrl.rewards.geneval import load_detector
from flowrl.rewards.weights import affine_map
from flowrl.testing import check_reward

PROMPTS = [Prompt("a red fox"), Prompt("two cats"), Prompt("a red fox"), Prompt("x" * 200)]
TEXTS = [prompt.text for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def images():
    small = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(small, size=(40, 40), mode="bilinear")


def published_pixels(image):
    from transformers import CLIPImageProcessorPil

    prepare = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    return prepare(
        [(image * 255).round().byte().permute(1, 2, 0).numpy()], return_tensors="pt"
    ).pixel_values


@torch.no_grad()
def reference(folder, images, texts):
    """Features and scale by transformers alone, an image and a text at a time."""
    from transformers import AutoTokenizer, CLIPModel

    model, words = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for image, text in zip(images, texts, strict=True):
        inputs = words([text], truncation=True, max_length=77, return_tensors="pt")
        rows.append(model(**inputs, pixel_values=published_pixels(image)))
    return (
        torch.cat([r.image_embeds for r in rows]),
        torch.cat([r.text_embeds for r in rows]),
        model.logit_scale.exp(),
    )


@pytest.mark.parametrize(("height", "width"), [(64, 48), (32, 90), (20, 30)])
def test_pixels_equal_transformers_own(height, width):
    image = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(clip_pixels(image, 32), published_pixels(image[0]), atol=1e-5)


def test_letterbox_shows_all_of_the_image_between_black_bars():
    image = torch.ones(1, 3, 8, 16)
    image[..., :2] = image[..., 14:] = 0.5
    pixels = clip_pixels(image, 16, letterbox=True)[0, 0]
    black, white, grey = ((level - 0.48145466) / 0.26862954 for level in (0.0, 1.0, 128 / 255))
    assert torch.allclose(pixels[:4], torch.tensor(black)) and torch.allclose(
        pixels[12:], torch.tensor(black)
    )
    assert torch.allclose(pixels[4:12, 2:14], torch.tensor(white)) and torch.allclose(
        pixels[4:12, :2], torch.tensor(grey)
    )
    tall = clip_pixels(image.transpose(2, 3), 16, letterbox=True)
    assert torch.equal(tall.transpose(2, 3)[0, 0], pixels)
    assert clip_pixels(torch.rand(1, 3, 1, 100), 16, letterbox=True).shape == (1, 3, 16, 16)


def test_pickscore_is_the_scaled_cosine(folder, images):
    pictures, texts, scale = reference(folder, images, TEXTS)
    scores = PickScore(folder, tokenizer="").score(images, PROMPTS)
    assert torch.allclose(scores, scale * (pictures * texts).sum(1), atol=1e-3) and scores.std() > 1
    released = PickScore(folder, tokenizer="", form="released").score(images, PROMPTS)
    assert torch.allclose(26 * released, scores, rtol=1e-6)
    assert torch.allclose(
        PickScore(folder, tokenizer="", batch=3).score(images, PROMPTS), scores, atol=1e-3
    )
    rough = PickScore(folder, tokenizer="", dtype="bfloat16").score(images, PROMPTS)
    assert (
        rough.dtype == torch.float32
        and torch.allclose(rough, scores, atol=1.5)
        and not torch.equal(rough, scores)
    )


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
    """Layers are applied in the order of their numbers: 5, 15 and 25, which sort differently as
    texts.
    """
    layers, path = head(), tmp_path / f"head{suffix}"
    weights = {
        f"layers.{5 * int(name[0]) + 5}{name[1:]}": t.detach()
        for name, t in reversed(layers.state_dict().items())
    }
    torch.save(weights, path) if suffix == ".pth" else save_file(weights, path)
    scores = Aesthetic(folder, head=str(path)).score(images, PROMPTS)
    assert torch.allclose(
        scores, layers(reference(folder, images, TEXTS)[0]).squeeze(1).detach(), atol=1e-4
    )
    assert affine_map({"weight": torch.ones(1, 3), "bias": torch.zeros(1)})[0].tolist() == [1, 1, 1]


class OpenCLIP(nn.Module):
    """A CLIP as OpenAI wrote it, from torch's own attention, with the names that open_clip's files
    have.
    """

    def __init__(self, width=16):
        super().__init__()
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.visual.class_embedding = nn.Parameter(torch.randn(width))
        self.visual.positional_embedding = nn.Parameter(torch.randn(17, width))
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.visual.transformer, self.transformer = self.blocks(width), self.blocks(width)
        self.visual.proj = nn.Parameter(torch.randn(width, 8))
        self.token_embedding = nn.Embedding(90, width)
        self.positional_embedding = nn.Parameter(torch.randn(77, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, 8))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(100.0)))

    @staticmethod
    def blocks(width):
        def block():
            layer = nn.Module()
            layer.ln_1, layer.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            layer.attn = nn.MultiheadAttention(width, 2, batch_first=True)
            layer.mlp = nn.Module()
            layer.mlp.c_fc, layer.mlp.c_proj = nn.Linear(width, 32), nn.Linear(32, width)
            return layer

        stack = nn.Module()
        stack.resblocks = nn.ModuleList([block(), block()])
        return stack

    @staticmethod
    def run(stack, x, mask=None):
        for layer in stack.resblocks:
            y = layer.ln_1(x)
            x = x + layer.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
            hidden = layer.mlp.c_fc(layer.ln_2(x))
            x = x + layer.mlp.c_proj(hidden * torch.sigmoid(1.702 * hidden))
        return x

    def pictures(self, pixels):
        v = self.visual
        x = v.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([v.class_embedding.expand(len(x), 1, -1), x], 1) + v.positional_embedding
        return v.ln_post(self.run(v.transformer, v.ln_pre(x))[:, 0]) @ v.proj

    def texts(self, tokens, end):
        count = tokens.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)
        x = self.run(
            self.transformer, self.token_embedding(tokens) + self.positional_embedding[:count], mask
        )
        first_end = (tokens == end).int().argmax(1)
        return self.ln_final(x)[torch.arange(len(x)), first_end] @ self.text_projection


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory):
    torch.manual_seed(3)
    network, path = OpenCLIP().eval(), tmp_path_factory.mktemp("hps") / "weights.pt"
    torch.save({"epoch": 1, "state_dict": network.state_dict()}, path)
    return network, str(path)


def test_hps_reads_open_clips_weights(folder, images, open_clip):
    network, path = open_clip
    words = load_encoder(folder).tokenizer
    tokens = words(
        TEXTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        texts, pictures = (
            network.texts(tokens, words.eos_token_id),
            network.pictures(clip_pixels(images, 32)),
        )
    expected, scores = (
        torch.cosine_similarity(pictures, texts),
        HPSv21(folder, weights=path).score(images, PROMPTS),
    )
    assert torch.allclose(scores, expected, atol=1e-4) and scores.std() > 0.01


def test_hps_sees_all_of_a_wide_image(folder, open_clip):
    image, bars, text = (
        torch.rand(1, 3, 20, 40, generator=torch.Generator().manual_seed(5)),
        torch.zeros(1, 3, 40, 40),
        PROMPTS[:1],
    )
    # the edges differ from the centre
    image[..., :10], image[..., 30:] = 0.1 * image[..., :10], 0.9 + 0.1 * image[..., 30:]
    bars[:, :, 10:30] = image
    hps, pickscore = HPSv21(folder, weights=open_clip[1]), PickScore(folder, tokenizer="")
    assert torch.allclose(hps.score(image, text), hps.score(bars, text), atol=1e-3)
    assert not torch.allclose(pickscore.score(image, text), pickscore.score(bars, text), atol=0.1)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code in a weight file was run",))


def test_foreign_weights_are_refused(folder, tmp_path):
    for name, content, told in (
        ("text", {"text.layers.0": torch.zeros(1)}, "state_dict for CLIPModel"),
        ("part", {"logit_scale": torch.zeros(())}, "Missing key"),
        ("bomb", {"state_dict": {"weight": Bomb()}}, "is no file of tensors"),
    ):
        torch.save(content, tmp_path / name)
        with pytest.raises(ConfigError, match=told):
            HPSv21(folder, weights=str(tmp_path / name)).load()
    for content, told in (
        ({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, "a head for 8 features"),
        ({"weight": torch.zeros(2, 5), "bias": torch.zeros(2)}, "no stack of linear layers"),
        ({"weight": Bomb()}, "is no file of tensors"),
    ):
        path = tmp_path / f"head{told}"
        torch.save(content, path)
        with pytest.raises(ConfigError, match=told):
            Aesthetic(folder, head=str(path)).load()


def drop_weights(folder):
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if not name.startswith(("text_model", "class_predictor"))
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def cut_file(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])


def drop_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (drop_weights, "its files lack .* of the weights, such as text_model"),
        (cut_file, "cannot be loaded as the model that this reward needs"),
        (drop_tokenizer, "a tokenizer for 90 pieces of text"),
        (shutil.rmtree, "HF_HUB_OFFLINE=0"),
    ],
)
def test_damaged_folders_are_refused(folder, tmp_path, damage, told):
    copied = shutil.copytree(folder, tmp_path / "model")
    damage(copied)
    with pytest.raises(ConfigError, match=told):
        PickScore(str(copied), tokenizer="").load()


def test_another_kind_of_model_is_refused(folder, tmp_path):
    detector = tiny_detector(tmp_path / "detector")
    with pytest.raises(ConfigError, match="is no CLIPModel: its files lack"):
        PickScore(str(detector), tokenizer=folder).load()
    with pytest.raises(ConfigError, match="cannot be loaded as the model that this reward needs"):
        load_detector(folder)
    drop_weights(detector)
    with pytest.raises(
        ConfigError, match="is no Mask2FormerForUniversalSegmentation: its files lack"
    ):
        load_detector(str(detector))


@pytest.mark.parametrize("name", ["pickscore", "clipscore", "aesthetic", "hpsv2.1"])
def test_keeps_the_contract(name, folder, images, open_clip, tmp_path):
    torch.save(head().state_dict(), tmp_path / "head.pth")
    options = {
        "pickscore": "tokenizer=''",
        "clipscore": "batch=2",
        "aesthetic": f"head='{tmp_path}/head.pth'",
    }
    reward = build(
        "reward", f"{name}(model='{folder}', {options.get(name, f'weights={open_clip[1]!r}')})"
    )
    found = check_reward(reward, (images, PROMPTS))
    assert found.ok, found

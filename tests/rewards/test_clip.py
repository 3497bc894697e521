"""CLIP rewards: preprocessing by hand and against Pillow's and transformers' own, scores by their formulas, weights from files.

The networks are the real transformers classes, tiny and random.
"""

import math

import pytest
import torch
from safetensors.torch import save_file
from tiny_rewards import tiny_clip
from torch import nn

from flowrl.errors import ConfigError
from flowrl.registry import build
from flowrl.rewards import Aesthetic, CLIPScore, HPSv21, PickScore
from flowrl.rewards.clip import clip_pixels, load_encoder
from flowrl.rewards.weights import affine_map, from_open_clip
from flowrl.testing import check_reward
from flowrl.types import Prompt

PROMPTS = [Prompt("a red fox"), Prompt("two cats"), Prompt("a red fox"), Prompt("x" * 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.nn.functional.interpolate(torch.rand(4, 3, 6, 6, generator=generator), size=(40, 40), mode="bilinear")


def reference(folder, images, texts):
    """Features by transformers alone, a picture and a text at a time."""
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    model, words = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prepare = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    rows = []
    with torch.no_grad():
        for image, text in zip(images, texts, strict=True):
            levels = (image * 255).round().byte().permute(1, 2, 0).numpy()
            inputs = words([text], truncation=True, max_length=77, return_tensors="pt")
            rows.append(model(**inputs, pixel_values=prepare([levels], return_tensors="pt").pixel_values))
    return torch.cat([r.image_embeds for r in rows]), torch.cat([r.text_embeds for r in rows]), model


class TestPixels:
    def test_a_grey_picture_by_hand(self):
        pixels = clip_pixels(torch.full((1, 3, 300, 300), 0.5))
        assert pixels.shape == (1, 3, 224, 224)
        by_hand = [
            (128 / 255 - 0.48145466) / 0.26862954,
            (128 / 255 - 0.4578275) / 0.26130258,
            (128 / 255 - 0.40821073) / 0.27577711,
        ]
        assert torch.allclose(pixels[0, :, 100, 100], torch.tensor(by_hand), atol=1e-6)
        assert by_hand[0] == pytest.approx(0.0763, abs=1e-4)

    def test_a_picture_of_the_right_size_is_not_resampled(self):
        levels = torch.arange(8 * 8 * 3).view(1, 3, 8, 8)
        pixels = clip_pixels(levels / 255, 8)
        back = pixels * torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
        back = back + torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
        assert torch.equal((back * 255).round().long(), levels)

    def test_the_middle_is_cut_out(self):
        image = torch.zeros(1, 3, 8, 16)
        image[..., 4:12] = 1
        white = clip_pixels(image, 8)[0, 0]
        assert torch.allclose(white, torch.full_like(white, (1 - 0.48145466) / 0.26862954), atol=1e-6)

    def test_the_whole_picture_between_black_bars(self):
        image = torch.ones(1, 3, 8, 16)
        image[..., :2] = image[..., 14:] = 0.5
        pixels = clip_pixels(image, 16, letterbox=True)[0, 0]
        black, white, grey = ((level - 0.48145466) / 0.26862954 for level in (0.0, 1.0, 128 / 255))
        assert torch.allclose(pixels[:4], torch.tensor(black)) and torch.allclose(pixels[12:], torch.tensor(black))
        assert torch.allclose(pixels[4:12, 2:14], torch.tensor(white)) and torch.allclose(pixels[4:12, :2], torch.tensor(grey))
        tall = clip_pixels(image.transpose(2, 3), 16, letterbox=True)
        assert torch.equal(tall.transpose(2, 3)[0, 0], pixels)
        assert clip_pixels(torch.rand(1, 3, 1, 100), 16, letterbox=True).shape == (1, 3, 16, 16)
        square = torch.rand(1, 3, 20, 20)
        assert torch.equal(clip_pixels(square, 16, letterbox=True), clip_pixels(square, 16))

    @pytest.mark.parametrize(("height", "width"), [(50, 50), (64, 48), (32, 90), (20, 30)])
    def test_equals_transformers_own(self, height, width):
        from transformers import CLIPImageProcessorPil

        image = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(1))
        prepare = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        levels = (image[0] * 255).round().byte().permute(1, 2, 0).numpy()
        assert torch.allclose(clip_pixels(image, 32), prepare([levels], return_tensors="pt").pixel_values, atol=1e-5)


def test_features_equal_transformers_own(folder, images):
    pictures, texts, model = reference(folder, images, [p.text for p in PROMPTS])
    encoder = load_encoder(folder)
    assert torch.allclose(encoder.images(images), pictures, atol=1e-5)
    assert torch.allclose(encoder.texts([p.text for p in PROMPTS]), texts, atol=1e-5)
    assert encoder.scale == pytest.approx(model.logit_scale.exp().item())
    assert texts[0].sub(texts[1]).norm() > 0.1 and pictures[0].sub(pictures[1]).norm() > 0.01


def test_pickscore_is_the_scaled_cosine(folder, images):
    pictures, texts, model = reference(folder, images, [p.text for p in PROMPTS])
    scores = PickScore(folder, tokenizer="").score(images, PROMPTS)
    assert torch.allclose(scores, model.logit_scale.exp().detach() * (pictures * texts).sum(1), atol=1e-3)
    released = PickScore(folder, tokenizer="", form="released").score(images, PROMPTS)
    assert torch.allclose(26 * released, scores, rtol=1e-6)
    with pytest.raises(ConfigError, match="form = 'loose' is not allowed; allowed: exact or released"):
        build("reward", "pickscore(form=loose)")


def test_clipscore_is_2_5_times_the_cosine_or_0(folder, images):
    pictures, texts, _ = reference(folder, images, [f"A photo depicts {p.text}" for p in PROMPTS])
    cosines = (pictures * texts).sum(1)
    scores = CLIPScore(folder).score(images, PROMPTS)
    assert torch.allclose(scores, 2.5 * cosines.clamp(min=0), atol=1e-5)
    assert torch.equal(CLIPScore(folder, prefix="A photo depicts").score(images, PROMPTS), scores)  # the space is added
    turned = CLIPScore(str(folder), prefix="", weight=1.0).score(images, PROMPTS)
    _, plain, _ = reference(folder, images, [p.text for p in PROMPTS])
    assert torch.allclose(turned, (pictures * plain).sum(1).clamp(min=0), atol=1e-5)


def head():
    generator = torch.Generator().manual_seed(2)
    layers = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 3), nn.Dropout(0.1), nn.Linear(3, 1)).eval()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_aesthetic_is_the_heads_own_output(folder, images, tmp_path, suffix):
    layers = head()
    weights, path = {f"layers.{name}": t.detach() for name, t in layers.state_dict().items()}, tmp_path / f"head{suffix}"
    torch.save(weights, path) if suffix == ".pth" else save_file(weights, path)
    pictures, _, _ = reference(folder, images, [p.text for p in PROMPTS])
    scores = Aesthetic(folder, head=str(path)).score(images, PROMPTS)
    assert torch.allclose(scores, layers(pictures).squeeze(1).detach(), atol=1e-4)


def test_layers_are_taken_in_the_order_of_their_numbers():
    layers = head()
    weights = {f"layers.{10 + int(name[0]) * 5}{name[1:]}": t for name, t in layers.state_dict().items()}
    weights = dict(reversed(weights.items()))
    weight, bias = affine_map(weights)
    x = torch.randn(5, 8)
    assert torch.allclose((x.double() @ weight + bias).float(), layers(x).squeeze(1), atol=1e-4)
    assert affine_map({"weight": torch.ones(1, 3), "bias": torch.zeros(1)})[0].tolist() == [1, 1, 1]


class OpenCLIP(nn.Module):
    """A CLIP as OpenAI wrote it, from torch's own attention, with the names that open_clip's files have."""

    def __init__(self, width=16, tokens=90, positions=77, patches=16):
        super().__init__()
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.visual.class_embedding = nn.Parameter(torch.randn(width))
        self.visual.positional_embedding = nn.Parameter(torch.randn(patches + 1, width))
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.visual.transformer, self.transformer = self.blocks(width), self.blocks(width)
        self.visual.proj = nn.Parameter(torch.randn(width, 8))
        self.token_embedding = nn.Embedding(tokens, width)
        self.positional_embedding = nn.Parameter(torch.randn(positions, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, 8))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(100.0)))

    @staticmethod
    def blocks(width):
        def block():
            one = nn.Module()
            one.ln_1, one.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            one.attn = nn.MultiheadAttention(width, 2, batch_first=True)
            one.mlp = nn.Module()
            one.mlp.c_fc, one.mlp.c_proj = nn.Linear(width, 32), nn.Linear(32, width)
            return one

        stack = nn.Module()
        stack.resblocks = nn.ModuleList([block(), block()])
        return stack

    @staticmethod
    def run(stack, x, mask=None):
        for one in stack.resblocks:
            y = one.ln_1(x)
            x = x + one.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
            hidden = one.mlp.c_fc(one.ln_2(x))
            x = x + one.mlp.c_proj(hidden * torch.sigmoid(1.702 * hidden))
        return x

    def pictures(self, pixels):
        v = self.visual
        x = v.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([v.class_embedding.expand(len(x), 1, -1), x], 1) + v.positional_embedding
        return v.ln_post(self.run(v.transformer, v.ln_pre(x))[:, 0]) @ v.proj

    def texts(self, tokens, end):
        count = tokens.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)
        x = self.run(self.transformer, self.token_embedding(tokens) + self.positional_embedding[:count], mask)
        first_end = (tokens == end).int().argmax(1)
        return self.ln_final(x)[torch.arange(len(x)), first_end] @ self.text_projection


@pytest.fixture(scope="module")
def other(folder, tmp_path_factory):
    torch.manual_seed(3)
    network = OpenCLIP(tokens=len(load_encoder(folder).tokenizer)).eval()
    path = tmp_path_factory.mktemp("hps") / "weights.pt"
    torch.save({"epoch": 1, "state_dict": network.state_dict()}, path)
    return network, path


def test_hps_reads_open_clips_weights(folder, images, other):
    network, path = other
    words = load_encoder(folder).tokenizer
    with torch.no_grad():
        pictures = network.pictures(clip_pixels(images, 32))
        tokens = words(
            [p.text for p in PROMPTS], padding="max_length", truncation=True, max_length=77, return_tensors="pt"
        ).input_ids
        texts = network.texts(tokens, words.eos_token_id)
    expected = torch.cosine_similarity(pictures, texts)
    scores = HPSv21(folder, weights=str(path)).score(images, PROMPTS)
    assert torch.allclose(scores, expected, atol=1e-4)
    assert scores.std() > 0.01
    assert not torch.allclose(HPSv21(folder, weights="").score(images, PROMPTS), expected, atol=1e-2)


def test_hps_sees_all_of_a_wide_picture(folder, other):
    _, path = other
    picture = torch.rand(1, 3, 20, 40, generator=torch.Generator().manual_seed(5))
    bars = torch.zeros(1, 3, 40, 40)
    bars[:, :, 10:30] = picture
    hps, clipscore = HPSv21(folder, weights=str(path)), PickScore(folder, tokenizer="")
    text = [Prompt("a red fox")]
    assert torch.allclose(hps.score(picture, text), hps.score(bars, text), atol=0.02)
    assert not torch.allclose(clipscore.score(picture, text), clipscore.score(bars, text), atol=1.0)


def test_foreign_weights_are_refused(folder, images, tmp_path):
    with pytest.raises(ConfigError, match=r"'text\.layers\.0' is no weight of a CLIP model"):
        from_open_clip({"text.layers.0": torch.zeros(1)})
    save_file({"logit_scale": torch.zeros(())}, tmp_path / "part.safetensors")
    with pytest.raises(ConfigError, match="does not fit the model"):
        HPSv21(folder, weights=str(tmp_path / "part.safetensors")).score(images, PROMPTS)
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="is no file of tensors"):
        Aesthetic(folder, head=str(tmp_path / "junk.safetensors")).score(images, PROMPTS)
    save_file({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, tmp_path / "narrow.safetensors")
    with pytest.raises(ConfigError, match="a head for 8 features"):
        Aesthetic(folder, head=str(tmp_path / "narrow.safetensors")).score(images, PROMPTS)
    with pytest.raises(ConfigError, match="no stack of linear layers"):
        affine_map({"weight": torch.zeros(2, 5), "bias": torch.zeros(2)})


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code in a weight file was run",))


def test_code_in_a_weight_file_does_not_run(folder, images, tmp_path):
    torch.save({"state_dict": {"weight": Bomb()}}, tmp_path / "bomb.pt")
    with pytest.raises(ConfigError, match="is no file of tensors"):
        Aesthetic(folder, head=str(tmp_path / "bomb.pt")).score(images, PROMPTS)


def test_missing_models_say_what_to_do(images, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE=0"):
        build("reward", "clipscore(model='/no/such/folder')").score(images, PROMPTS)
    with pytest.raises(ConfigError, match="dtype = 'int8' is not allowed; allowed: one of float32"):
        build("reward", "pickscore(dtype=int8)").score(images, PROMPTS)


def test_batches_and_precision(folder, images):
    whole = PickScore(folder, tokenizer="").score(images, PROMPTS)
    assert torch.allclose(PickScore(folder, tokenizer="", batch=3).score(images, PROMPTS), whole, atol=1e-3)
    rough = PickScore(folder, tokenizer="", dtype="bfloat16").score(images, PROMPTS)
    assert rough.dtype == torch.float32 and torch.allclose(rough, whole, atol=1.5) and not torch.equal(rough, whole)


def test_weights_are_loaded_once(folder):
    assert load_encoder(folder, "", "cpu", "float32", 32, "") is load_encoder(folder, "", "cpu", "float32", 32, "")


@pytest.mark.parametrize("name", ["pickscore", "clipscore", "aesthetic", "hpsv2.1"])
def test_keeps_the_contract(name, folder, images, other, tmp_path):
    torch.save(head().state_dict(), tmp_path / "head.pth")
    options = {"pickscore": "tokenizer=''", "clipscore": "batch=2", "aesthetic": f"head='{tmp_path}/head.pth'"}
    reward = build("reward", f"{name}(model='{folder}', {options.get(name, f'weights={str(other[1])!r}')})")
    found = check_reward(reward, (images, PROMPTS))
    assert found.ok, found

"""ImageReward and HPSv3: the scores of the authors' own code for tiny weights, and refusals."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file
from tiny_preference import (
    ROPE,
    SCORES,
    SPECIAL,
    TEXT,
    TEXTS,
    VISION,
    bert_words,
    hpsv3_weights,
    image_reward_weights,
    pictures,
    qwen_words,
)

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import Prompt
from flowrl.rewards.hpsv3 import TEMPLATE, HPSv3, patches, sides
from flowrl.rewards.image_reward import ImageReward
from flowrl.run.parts.registry import build
from flowrl.testing import check_reward

PROMPTS = [Prompt(text) for text in TEXTS]
pytestmark = pytest.mark.satellite


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import AddedToken
    from transformers import BertTokenizer, Qwen2Tokenizer, Qwen2VLConfig

    folder = tmp_path_factory.mktemp("preference")
    torch.save(image_reward_weights(), folder / "image-reward.pt")
    save_file(hpsv3_weights(), folder / "hpsv3.safetensors")
    BertTokenizer(vocab={w: i for i, w in enumerate(bert_words())}).save_pretrained(folder / "bert")
    words = Qwen2Tokenizer(vocab={w: i for i, w in enumerate(qwen_words())}, merges=[])
    words.add_tokens([AddedToken(token, special=True) for token in SPECIAL])
    words.save_pretrained(folder / "qwen")
    text = {**TEXT, "rope_parameters": ROPE | {"rope_type": "default", "rope_theta": 1e6}}
    image = words.convert_tokens_to_ids("<|image_pad|>")
    config = Qwen2VLConfig(text_config=text, vision_config=VISION, image_token_id=image)
    config.save_pretrained(folder / "qwen")
    return folder


@pytest.fixture
def rewards(folder):
    spec = f"image-reward(weights='{folder}/image-reward.pt', tokenizer='{folder}/bert')"
    large = f"hpsv3(model='{folder}/qwen', weights='{folder}/hpsv3.safetensors', dtype=float32)"
    return {"image-reward": build("reward", spec), "hpsv3": build("reward", large)}


@pytest.mark.parametrize(("name", "size"), SCORES)
def test_scores_are_those_of_the_authors_code(rewards, name, size):
    """For texts of different lengths; resized pixels differ from Pillow's by a level."""
    scores = rewards[name].score(pictures(*size), PROMPTS)
    error = 1e-3 if size == (40, 56) else 1e-5
    assert scores.tolist() == pytest.approx(SCORES[name, size], rel=error)


@pytest.mark.parametrize("name", ["image-reward", "hpsv3"])
def test_precision_and_batch(rewards, name):
    reward = rewards[name]
    scores = reward.score(pictures(), PROMPTS)
    one = type(reward)(**{**vars(reward), "batch": 1})
    assert torch.allclose(one.score(pictures(), PROMPTS), scores, rtol=1e-4)
    rough = type(reward)(**{**vars(reward), "dtype": "bfloat16"}).score(pictures(), PROMPTS)
    assert rough.dtype == torch.float32 and torch.allclose(rough, scores, rtol=0.2)
    assert not torch.equal(rough, scores) and check_reward(reward, (pictures(), PROMPTS)).ok


def test_hpsv3s_instruction_is_the_published_one():
    digest = "c05297261c718ca50f6be3eadfaa9e0d3411190868c6105d4e495f6d4fd2feed"
    assert hashlib.sha256(TEMPLATE.encode()).hexdigest() == digest


@pytest.mark.parametrize(
    ("image", "result"),
    [((512, 512), (448, 448)), ((1024, 768), (504, 364)), ((60, 90), (392, 560))],
)
def test_sides_by_hand(image, result):
    assert sides(*image) == result


def test_patches_equal_transformers_own(folder):
    from transformers import Qwen2VLConfig, Qwen2VLImageProcessorPil

    config = Qwen2VLConfig.from_pretrained(folder / "qwen").vision_config
    exact = pictures(448, 448)
    rows, grid = patches(exact, config)
    limits = {"shortest_edge": 256 * 28 * 28, "longest_edge": 256 * 28 * 28}
    arrays = [(p * 255).round().byte().permute(1, 2, 0).numpy() for p in exact]
    expected = Qwen2VLImageProcessorPil(size=limits)(arrays, return_tensors="pt")
    assert expected.image_grid_thw.tolist() == [list(grid)] * 2
    assert torch.allclose(rows, expected.pixel_values, atol=1e-5)


def test_special_tokens_in_prompts_are_refused(rewards):
    bad = Prompt("a fox <|Reward|>")
    assert "<|Reward|>" in rewards["hpsv3"].refuses(bad)
    with pytest.raises(RewardError, match="special token"):
        rewards["hpsv3"].score(pictures()[:1], [bad])


def test_files_that_lack_weights_are_refused(folder, tmp_path):
    weights = image_reward_weights()
    del weights["blip.text_encoder.encoder.layer.1.crossattention.self.query.bias"]
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"weights of BlipTextModel that .* lacks"):
        ImageReward(str(tmp_path / "weights.pt"), str(folder / "bert")).load()
    weights = hpsv3_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"weights of Qwen2VLModel that .* lacks"):
        HPSv3(str(folder / "qwen"), str(tmp_path / "weights.safetensors")).load()

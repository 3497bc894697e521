"""Tiny ImageReward and HPSv3 with weights by a formula, under the names of the published files.

    python tests/tiny_preference.py

in an environment with image-reward 1.5, hpsv3 1.0.0 (both --no-deps), transformers 4.45.2, timm
0.6.13 and fairscale prints the scores of the authors' own code (`SCORES`).
"""

import itertools
import json
import sys
import zlib
from pathlib import Path
from types import ModuleType

import torch

TEXTS = ["a red fox", "two cats, one dog"]
SCORES = {
    ("image-reward", (32, 32)): [17.529861450195312, 8.066483497619629],
    ("image-reward", (40, 56)): [29.06494140625, 9.880186080932617],
    ("hpsv3", (448, 448)): [-2.5923664569854736, -4.194995403289795],
    ("hpsv3", (40, 56)): [-3.275052547454834, -4.215449810028076],
}
"""By name and size of the images; only the second sizes are resized."""
CHARACTERS = "abcdefghijklmnopqrstuvwxyz,"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
WIDTH = 64


def pictures(height=40, width=56):
    """[2, 3, height, width], smooth, multiples of 1/255."""
    x, y = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij")
    waves = [torch.sin(9 * x + k * y + 1.3 * k) + torch.cos((k + 2) * x * y) for k in range(6)]
    return ((torch.stack(waves).view(2, 3, height, width) / 4 + 0.5) * 255).round() / 255


def by_formula(shapes):
    """Weights of given shapes, from their names: around 1 for the scales of norms."""
    result = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        start = zlib.crc32(name.encode()) % 1000
        wave = torch.sin(start + 1.7 * torch.arange(count, dtype=torch.float64) ** 1.2)
        scale = 0.3 if len(shape) > 1 and "embed" not in name else 0.5
        one = "norm" in name.lower() or "ln_q" in name
        result[name] = (float(one and name.endswith("weight")) + scale * wave).float().view(shape)
    return result


def linear(name, outputs, inputs, bias=True):
    weight = {f"{name}.weight": [outputs, inputs]}
    return weight | ({f"{name}.bias": [outputs]} if bias else {})


def norm(name, width=WIDTH):
    return {f"{name}.weight": [width], f"{name}.bias": [width]}


def image_reward_weights():
    """Two layers, images of 32 pixels in patches of 8."""
    see, read = "blip.visual_encoder.", "blip.text_encoder."
    shapes = {f"{see}cls_token": [1, 1, WIDTH], f"{see}pos_embed": [1, 17, WIDTH]}
    shapes |= {f"{see}patch_embed.proj.weight": [WIDTH, 3, 8, 8]}
    shapes |= {f"{see}patch_embed.proj.bias": [WIDTH], **norm(f"{see}norm")}
    shapes[f"{read}embeddings.word_embeddings.weight"] = [len(bert_words()) + 2, WIDTH]
    shapes[f"{read}embeddings.position_embeddings.weight"] = [40, WIDTH]
    shapes |= norm(f"{read}embeddings.LayerNorm")
    for layer in range(2):
        block = f"{see}blocks.{layer}."
        shapes |= norm(f"{block}norm1") | norm(f"{block}norm2")
        shapes |= linear(f"{block}attn.qkv", 3 * WIDTH, WIDTH)
        shapes |= linear(f"{block}attn.proj", WIDTH, WIDTH)
        shapes |= linear(f"{block}mlp.fc1", 4 * WIDTH, WIDTH)
        shapes |= linear(f"{block}mlp.fc2", WIDTH, 4 * WIDTH)
        block = f"{read}encoder.layer.{layer}."
        for kind in ("attention", "crossattention"):
            for letter in ("query", "key", "value"):
                shapes |= linear(f"{block}{kind}.self.{letter}", WIDTH, WIDTH)
            shapes |= linear(f"{block}{kind}.output.dense", WIDTH, WIDTH)
            shapes |= norm(f"{block}{kind}.output.LayerNorm")
        shapes |= linear(f"{block}intermediate.dense", 96, WIDTH)
        shapes |= linear(f"{block}output.dense", WIDTH, 96) | norm(f"{block}output.LayerNorm")
    sizes = [WIDTH, 1024, 128, 64, 16, 1]
    for number, (inputs, outputs) in zip((0, 2, 4, 6, 7), itertools.pairwise(sizes), strict=True):
        shapes |= linear(f"mlp.layers.{number}", outputs, inputs)
    return by_formula(shapes)


VISION = dict(depth=2, embed_dim=32, hidden_size=WIDTH, num_heads=2, mlp_ratio=2)
TEXT = dict(hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
TEXT |= dict(num_key_value_heads=2)
ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


def hpsv3_weights():
    """Two layers each; grouped queries; the head's inner widths as published."""
    shapes = {
        "visual.patch_embed.proj.weight": [32, 3, 2, 14, 14],
        **norm("visual.merger.ln_q", 32),
    }
    shapes |= linear("visual.merger.mlp.0", 128, 128) | linear("visual.merger.mlp.2", WIDTH, 128)
    words = len(qwen_words()) + len(SPECIAL) + 1
    shapes |= {"model.embed_tokens.weight": [words, WIDTH], "model.norm.weight": [WIDTH]}
    shapes |= {"lm_head.weight": [words, WIDTH]}
    for layer in range(2):
        block = f"visual.blocks.{layer}."
        shapes |= norm(f"{block}norm1", 32) | norm(f"{block}norm2", 32)
        shapes |= linear(f"{block}attn.qkv", 96, 32) | linear(f"{block}attn.proj", 32, 32)
        shapes |= linear(f"{block}mlp.fc1", 64, 32) | linear(f"{block}mlp.fc2", 32, 64)
        block = f"model.layers.{layer}."
        shapes |= linear(f"{block}self_attn.q_proj", WIDTH, WIDTH)
        shapes |= linear(f"{block}self_attn.k_proj", 32, WIDTH)
        shapes |= linear(f"{block}self_attn.v_proj", 32, WIDTH)
        shapes |= linear(f"{block}self_attn.o_proj", WIDTH, WIDTH, False)
        shapes |= linear(f"{block}mlp.gate_proj", 96, WIDTH, False)
        shapes |= linear(f"{block}mlp.up_proj", 96, WIDTH, False)
        shapes |= linear(f"{block}mlp.down_proj", WIDTH, 96, False)
        for kind in ("input", "post_attention"):
            shapes[f"{block}{kind}_layernorm.weight"] = [WIDTH]
    shapes |= linear("rm_head.0", 1024, WIDTH) | linear("rm_head.3", 16, 1024)
    return by_formula(shapes | linear("rm_head.5", 2, 16))


def bert_words():
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *CHARACTERS, *(f"##{c}" for c in CHARACTERS)]


def qwen_words():
    """The 256 bytes as GPT-2's tokenizer writes them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*map(chr, shown), *(chr(256 + n) for n in range(256 - len(shown)))]


def authors():
    """The scores of the authors' code."""

    class Anything(ModuleType):
        __path__ = ()

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    from PIL import Image
    from transformers import Qwen2VLConfig, Qwen2VLImageProcessor, Qwen2VLProcessor

    site = next(p for p in map(Path, sys.path) if (p / "ImageReward").is_dir())
    for name in ("ImageReward", "hpsv3"):  # their __init__ imports all that training needs
        package = ModuleType(name)
        package.__path__ = [str(site / name)]
        sys.modules[name] = package
    package = ModuleType("ImageReward.models")
    package.__path__ = [str(site / "ImageReward" / "models")]
    sys.modules["ImageReward.models"] = package
    tops = "trl peft datasets fire pandas deepspeed matplotlib matplotlib.pyplot"
    for name in [*tops.split(), "matplotlib.patches", "torch.utils.tensorboard"]:
        sys.modules.setdefault(name, Anything(name))
    from ImageReward import ImageReward as released
    from ImageReward.models.BLIP.med import BertConfig, BertModel
    from ImageReward.models.BLIP.vit import VisionTransformer
    from transformers import BertTokenizer, Qwen2Tokenizer

    def images(*size):
        levels = (pictures(*size) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        return [Image.fromarray(array) for array in levels]

    folder = Path("/tmp/tiny-preference")
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(bert_words()))

    class Blip(torch.nn.Module):
        def __init__(self, **_):
            super().__init__()
            self.visual_encoder = VisionTransformer(32, 8, embed_dim=WIDTH, depth=2, num_heads=1)
            self.tokenizer = BertTokenizer(str(folder / "vocab.txt"))
            self.text_encoder = BertModel(
                BertConfig(
                    vocab_size=len(bert_words()) + 2,
                    hidden_size=WIDTH,
                    num_hidden_layers=2,
                    num_attention_heads=1,
                    intermediate_size=96,
                    max_position_embeddings=40,
                    encoder_width=WIDTH,
                    add_cross_attention=True,
                ),
                add_pooling_layer=False,
            )

    released.BLIP_Pretrain = Blip
    transform, head = released._transform, released.MLP
    released._transform = lambda size: transform(32)
    released.MLP = lambda size: head(WIDTH)
    network = released.ImageReward("").eval()
    state = network.load_state_dict(image_reward_weights(), strict=False)
    assert not state.unexpected_keys and all("position_ids" in n for n in state.missing_keys), state
    for size in (32, 32), (40, 56):
        scores = [network.score(*pair) for pair in zip(TEXTS, images(*size), strict=True)]
        print("image-reward", size, scores)

    from hpsv3 import inference
    from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT

    words = qwen_words()
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2Tokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), padding_side="right"
    )
    tokenizer.add_tokens(SPECIAL[1:], special_tokens=True)
    tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    config = Qwen2VLConfig(
        **TEXT,
        vision_config=VISION,
        rope_scaling=ROPE,
        image_token_id=len(words) + 6,
        use_cache=False,
        tie_word_embeddings=False,
    )
    config.vocab_size = len(tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    model = Qwen2VLRewardModelBT(
        config,
        output_dim=2,
        reward_token="special",
        special_token_ids=tokenizer.convert_tokens_to_ids(["<|Reward|>"]),
        rm_head_type="ranknet",
    ).eval()
    model.load_state_dict(hpsv3_weights(), strict=True)
    template = (
        "{% for message in messages %}{% if loop.first %}<|im_start|>system\nYou are a helpful"
        " assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{% for content in"
        " message['content'] %}{% if content['type'] == 'image' %}<|vision_start|><|image_pad|>"
        "<|vision_end|>{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor"
        " %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    inferencer = object.__new__(inference.HPSv3RewardInferencer)
    inferencer.device, inferencer.model, inferencer.use_special_tokens = "cpu", model, True
    inferencer.processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, chat_template=template
    )
    with torch.no_grad():
        for size in (448, 448), (40, 56):
            print("hpsv3", size, inferencer.reward(images(*size), TEXTS)[:, 0].tolist())


if __name__ == "__main__":
    authors()

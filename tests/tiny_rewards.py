"""Randomly initialised CLIP models and detectors of the real classes, small enough for tests of the
rewards that use them.
"""

from importlib import import_module
from importlib.util import find_spec

import torch

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789'\".,:-()"


def tiny_clip(folder, seed=0, size=32):
    """Write a `CLIPModel` of two layers for images of `size` pixels, and a tokenizer of letters, to
    `folder`; returns it.
    """
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    pieces = [*CHARACTERS, *(f"{c}</w>" for c in CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    words = {piece: i for i, piece in enumerate(pieces)}
    layers = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text = layers | dict(
        vocab_size=len(words), bos_token_id=len(words) - 2, eos_token_id=len(words) - 1
    )
    vision = {**layers, "image_size": size, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(
            CLIPConfig(
                text_config=text, vision_config=vision, projection_dim=8, initializer_factor=8.0
            )
        )
    model.save_pretrained(folder)
    CLIPTokenizer(vocab=words, merges=[]).save_pretrained(folder)
    return folder


def tiny_detector(folder, seed=0):
    """Write a Mask2Former of COCO objects for images of 64 pixels to `folder`; returns it."""
    transformers = import_module("transformers")
    swin = transformers.SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=6,
        id2label=dict(enumerate(("person", "cat", "dog", "mouse"))),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    transformers.Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(
        folder
    )
    return folder


WORDS = "<pad> <unk> <s> </s> <image> yes Yes no first second one 1 two 2 three 3 four 4 answer"
TEMPLATE = (
    "<s> {% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}answer {% endif %}"
)


def words_tokenizer(special, **options):
    """A tokenizer of words between spaces, with some special tokens, and the number of each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    distinct = dict.fromkeys((*WORDS.split(), *CHARACTERS, *special))
    words = {word: i for i, word in enumerate(distinct)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=list(special),
        **options,
    )
    return tokenizer, words


def tiny_judge(folder, seed=0):
    """Write a LLaVA of two layers for images of 32 pixels, with a tokenizer of some words and a
    chat template, to `folder`; returns it. Its processor does not need torchvision.
    """
    transformers = import_module("transformers")
    tokenizer, words = words_tokenizer(["<image>"], bos_token="<s>")
    layers = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    vision = transformers.CLIPVisionConfig(**layers, image_size=32, patch_size=8)
    text = transformers.LlamaConfig(
        **layers, vocab_size=len(words), initializer_range=0.5, num_key_value_heads=2
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=words["<image>"]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(**sizes),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


QWEN_IMAGE = "<|vision_start|> <|image_pad|> <|vision_end|>"


def tiny_qwen(folder, name, seed=0):
    """Write a "Qwen2_5_VL" or "Qwen3VL" of two layers, which divides images into 4 x 4 patches, to
    `folder`; returns its processor. Its processor of videos needs torchvision: without it none of
    the processor is written, and the one that is returned knows images only.
    """
    transformers = import_module("transformers")
    tokenizer, words = words_tokenizer([*QWEN_IMAGE.split(), "<|video_pad|>"])
    patch, own = {
        "Qwen2_5_VL": (14, dict(window_size=56, fullatt_block_indexes=[1])),
        "Qwen3VL": (16, dict(deepstack_visual_indexes=[0], num_position_embeddings=16)),
    }[name]
    layers = dict(hidden_size=16, intermediate_size=32)
    text = dict(
        **layers,
        vocab_size=len(words),
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]),
    )
    vision = dict(**layers, depth=2, num_heads=2, patch_size=patch, out_hidden_size=16, **own)
    numbers = {
        f"{token}_token_id": words[f"<|{word}|>"]
        for token, word in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, **numbers
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(folder)
    sizes = {"shortest_edge": (4 * patch) ** 2, "longest_edge": (4 * patch) ** 2}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=patch, size=sizes)
    kind = getattr(transformers, f"{name}Processor")
    template = TEMPLATE.replace("IMAGE", QWEN_IMAGE)
    if find_spec("torchvision"):
        video = f"{'Qwen2VL' if name == 'Qwen2_5_VL' else name}VideoProcessor"
        videos = getattr(transformers, video)()
        kind(images, tokenizer, videos, chat_template=template).save_pretrained(folder)
        return kind.from_pretrained(folder)

    class ImagesOnly(kind):
        def check_argument_for_proper_class(self, name, argument):
            """Without a check that there is a processor of videos."""

    return ImagesOnly(images, tokenizer, None, chat_template=template)

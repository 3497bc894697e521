"""Randomly initialised CLIP models and detectors of the real classes, small enough for tests of the
rewards that use them.
"""

from importlib import import_module

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
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}answer {% endif %}"
)


def tiny_judge(folder, seed=0):
    """Write a LLaVA of two layers for images of 32 pixels, with a tokenizer of some words and a
    chat template, to `folder`; returns it. Its processor does not need torchvision.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers = import_module("transformers")
    distinct = dict.fromkeys((*WORDS.split(), *CHARACTERS))
    words = {word: i for i, word in enumerate(distinct)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )
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
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder

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

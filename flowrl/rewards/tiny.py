"""Randomly initialised reward networks of the real transformers classes, small enough for tests. Nothing is downloaded."""

from pathlib import Path

import torch

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789'\".,:-()"


def tiny_clip(folder: Path, seed: int = 0, size: int = 32) -> Path:
    """Write a `CLIPModel` of two layers for pictures of `size` pixels, and a tokenizer of letters, to `folder`; returns it."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    pieces = [*CHARACTERS, *(f"{c}</w>" for c in CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    words = {piece: i for i, piece in enumerate(pieces)}
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**layers, "vocab_size": len(words), "bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1}
    vision = {**layers, "image_size": size, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8, initializer_factor=8.0))
    model.save_pretrained(folder)
    CLIPTokenizer(vocab=words, merges=[]).save_pretrained(folder)
    return folder

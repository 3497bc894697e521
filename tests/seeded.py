"""Random numbers that a seed fixes."""

import torch


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rand(*shape, seed=0, **options):
    return torch.rand(shape, generator=seeded(seed), **options)


def randn(*shape, seed=0, **options):
    return torch.randn(shape, generator=seeded(seed), **options)

"""Images from prompts and noise: the same samples as by hand, batch by batch, with noise that is
drawn when it is needed.
"""

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.rollout import ImageBatch, Usage, initial_noise, sample_images, solve
from flowrl.testing.tiny import tiny_sd3_policy
from flowrl.worlds.base import world

PROMPTS = [
    world("shapes").parse(text)
    for text in ("three red circles", "two blue squares", "one green triangle")
] * 2


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_batches_are_the_samples_of_the_solver_decoded(shapes_policy, solver):
    """Bit for bit, if the solver splits its network calls at the same samples."""
    noise = initial_noise(shapes_policy, len(PROMPTS), seed=3)
    schedule, condition = shapes_policy.schedule(4), shapes_policy.encode(PROMPTS)
    expected = solve(shapes_policy, schedule, condition, noise, Usage(), 4, solver)
    batches = list(sample_images(shapes_policy, PROMPTS, noise, 4, solver, max_batch=4))
    assert [len(batch.images) for batch in batches] == [4, 2]
    images = ImageBatch.cat(batches)
    assert torch.equal(images.latents, expected) and images.prompts == PROMPTS
    decoded = torch.cat([shapes_policy.decode(part) for part in expected.split(4)])
    assert torch.equal(images.images, decoded)
    assert torch.equal(images[2:5].images, decoded[2:5]) and images[2:5].prompts == PROMPTS[2:5]


def test_noise_depends_on_seed_and_count_alone(mixture_policy):
    expected = torch.randn(3, 2, 1, 1, generator=torch.Generator().manual_seed(20240))
    assert torch.equal(initial_noise(mixture_policy, 3), expected)
    assert not torch.equal(initial_noise(mixture_policy, 3, seed=1), expected)


def test_noise_may_be_drawn_lazily(mixture_policy):
    prompts = [world("mixture").parse("towards 90 degrees")] * 5
    noise, drawn = initial_noise(mixture_policy, 5), []
    latents = (drawn.append(1) or latent for latent in noise)
    batches = sample_images(mixture_policy, prompts, latents, 3, max_batch=2)
    first = next(batches)
    assert len(drawn) == 2, "a batch draws its own latents only"
    at_once = ImageBatch.cat(sample_images(mixture_policy, prompts, noise, 3, max_batch=2))
    assert torch.equal(ImageBatch.cat([first, *batches]).images, at_once.images)


def test_prompts_are_embedded_before_the_first_batch():
    """Text encoders visit the device once, not once per batch."""
    policy, visits = tiny_sd3_policy(), []
    prompts, embed = [Prompt(f"a dog, number {i}") for i in range(5)], policy.prompts.encode
    policy.prompts.encode = lambda texts: visits.append(len(texts)) or embed(texts)
    batches = list(sample_images(policy, prompts, initial_noise(policy, 5), 1, max_batch=2))
    assert len(batches) == 3 and visits == [6], "five prompts and the negative one"


@pytest.mark.parametrize(
    ("noise", "options", "words"),
    [(2, {}, "noise = 2"), (3, {"max_batch": 0}, "max_batch = 0"), (3, {"solver": "rk4"}, "'rk4'")],
)
def test_what_is_wrong_is_named(mixture_policy, noise, options, words):
    prompts = [world("mixture").parse("towards 90 degrees")] * 3
    latents = initial_noise(mixture_policy, noise)
    with pytest.raises(ConfigError, match=words):
        list(sample_images(mixture_policy, prompts, latents, 2, **options))

"""Families that read reference images, on tiny random pipelines of the real classes. The references
have some hundred pixels, not a million.
"""

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from family_cases import REDNESS, STEPS, config_of, fill, noise_of
from seeded import randn, seeded
from torch.testing import assert_close

from flowrl import PolicyOptions
from flowrl.core.errors import ConfigError
from flowrl.core.prompt import Prompt, ReferenceImage
from flowrl.methods import METHODS
from flowrl.policies import FluxKontext, PipelinePolicy, QwenImageEdit, QwenImageEditPlus
from flowrl.policies.families import in_groups
from flowrl.rollout import Usage, solve
from flowrl.run.build import build_trainer, make_method
from flowrl.run.checkpoint import restore_trainer, trainer_state
from flowrl.run.models.hub import family_of
from flowrl.run.models.load import embed_prompts, load_policy
from flowrl.run.models.weights import given_weights
from flowrl.testing import policy_contract
from flowrl.testing.tiny import (
    TINY,
    TINY_UNCUT,
    tiny_flux,
    tiny_flux_kontext,
    tiny_flux_policy,
    tiny_qwen_image,
    tiny_qwen_image_edit,
)


def picture(height, width, seed=0):
    pixels = torch.rand(3, height, width, generator=seeded(seed))
    return ReferenceImage.of_pixels(pixels)


WIDE, SQUARE, TALL = picture(40, 60), picture(40, 40, 1), picture(60, 40, 2)
EDITS = [
    Prompt("make it blue", images=(WIDE,)),
    Prompt("remove the fox", images=(SQUARE,)),
    Prompt("make it blue", images=(TALL,)),
]


@dataclass(frozen=True)
class Case:
    make: Any
    family: Any
    options: PolicyOptions
    prompts: list[Prompt] = field(default_factory=lambda: EDITS)

    def policy(self, **changes):
        pipe, options = self.make(), replace(self.options, **changes)
        return PipelinePolicy(pipe, self.family, options, **given_weights(pipe, options))

    def pictures(self, pipe, noise, guidance):
        """The plain pipeline's images, one call per prompt."""
        pipe.set_progress_bar_config(disable=True)
        side = self.options.resolution
        given = dict(height=side, width=side, output_type="pt", num_inference_steps=STEPS)
        given |= self.family.guidance_arguments(guidance, "blurry")
        if self.options.max_sequence_length:
            given |= dict(max_sequence_length=24, max_area=side * side)
        made = []
        for number, prompt in enumerate(self.prompts):
            own = [image.pillow() for image in prompt.images]
            own = {"image": own[0] if len(own) == 1 else own} if own else {}
            latents = noise[number : number + 1]
            made.append(pipe(prompt=prompt.text, latents=latents, **own, **given).images)
        return torch.cat(made)


CASES = {
    "kontext": Case(tiny_flux_kontext, FluxKontext(), TINY),
    "qwen-image-edit": Case(tiny_qwen_image_edit, QwenImageEdit(), TINY_UNCUT),
    "qwen-image-edit-plus": Case(
        partial(tiny_qwen_image_edit, plus=True),
        QwenImageEditPlus(),
        TINY_UNCUT,
        [EDITS[0], Prompt("both in one", images=(SQUARE, TALL)), EDITS[2]],
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(autouse=True)
def small_references(monkeypatch):
    """The pipelines' sizes of references, which are their own constants."""
    places = "flux.pipeline_flux_kontext", "qwenimage.pipeline_qwenimage_edit"
    flux, qwen = (import_module(f"diffusers.pipelines.{place}") for place in places)
    plus = import_module(f"diffusers.pipelines.{places[1]}_plus")
    monkeypatch.setattr(flux, "PREFERRED_KONTEXT_RESOLUTIONS", [(16, 24), (24, 16), (16, 16)])
    scaled = qwen.calculate_dimensions
    monkeypatch.setattr(qwen, "calculate_dimensions", lambda area, ratio: scaled(56 * 56, ratio))
    monkeypatch.setattr(plus, "CONDITION_IMAGE_SIZE", 56 * 56)
    monkeypatch.setattr(plus, "VAE_IMAGE_SIZE", 56 * 56)


def contract(name):
    case = CASES[name]
    changes = dict(guidance_scale=3.0, negative_prompt="blurry")
    prompts = [*case.prompts[:2], Prompt("add a hat", images=(TALL,))]
    return policy_contract(lambda: case.policy(**changes), prompts=prompts)


test_kontext = contract("kontext")
test_qwen_image_edit = contract("qwen-image-edit")
test_qwen_image_edit_plus = contract("qwen-image-edit-plus")


def draw(policy, prompts, noise):
    return policy.decode(
        solve(policy, policy.schedule(STEPS), policy.encode(prompts), noise, Usage())
    )


def rows_of(policy, prompts):
    return policy.prompts.rows(policy.encode(prompts).tensors["prompt"])


@pytest.mark.satellite
def test_train_save_resume_and_the_plain_pipelines_image(case, tmp_path):
    """With references of three sizes and a reward that compares the image with them."""

    def seen(images, prompts):
        means = [prompt.images[0].pixels().mean() for prompt in prompts]
        return (
            REDNESS.function(images, prompts) - (images.mean((1, 2, 3)) - torch.stack(means)).abs()
        )

    reward = replace(REDNESS, function=seen)

    def make():
        config = config_of(method="flow-grpo")
        policy = fill(case.policy(guidance_scale=3.0, negative_prompt="blurry"), std=0.4)
        return build_trainer(config, policy, make_method(config), reward, case.prompts)

    trainer, again = make(), make()
    row = trainer.iteration()
    assert row["grad_norm"] > 0 and 0 <= row["ratio_deviation"] < 1e-5
    state = trainer_state(trainer)
    trainer.iteration()
    restore_trainer(again, state)
    again.iteration()
    assert all(map(torch.equal, trainer.average, again.average))
    trainer.policy.save(tmp_path / "lora")
    pipe, noise = case.make(), noise_of(trainer.policy, 3)
    base = case.pictures(pipe, noise, 3.0)
    pipe.load_lora_weights(tmp_path / "lora")
    plain = case.pictures(pipe, noise, 3.0)
    assert (draw(trainer.policy, case.prompts, noise) - plain).square().mean().sqrt() < 1e-6
    assert (plain - base).square().mean().sqrt() > 1e-5


@pytest.mark.satellite
@pytest.mark.parametrize(("name", "method"), [*zip(itertools.cycle(CASES), METHODS)], ids=METHODS)
def test_every_method_trains_on_edits(name, method):
    case = CASES[name]
    config = config_of(method=method)
    trainer = build_trainer(config, case.policy(), make_method(config), REDNESS, case.prompts)
    for _ in range(2):
        row = trainer.iteration()
        assert row["grad_norm"] >= 0 and row["reward_mean"] == row["reward_mean"]


def test_references_are_conditions(case):
    """They have no noise, no place in the latent, and the same rows for policy and reference; the
    grid is that of the image alone.
    """
    policy = case.policy()
    rows = rows_of(policy, case.prompts)
    side = case.options.resolution // 4
    assert policy.latent_shape == (side * side, 16)
    tokens = [sum(h * w for h, w in one if h) for one in rows["sizes"].tolist()]
    assert [int(row.any(-1).sum()) for row in rows["reference"]] == tokens
    again = rows_of(case.policy(), case.prompts[::-1])
    assert_close(again["reference"][0, : tokens[2]], rows["reference"][2, : tokens[2]])
    plain = tiny_flux() if case.family.images[0] == 0 else tiny_qwen_image()
    base = PipelinePolicy(plain, family_of(type(plain).__name__), case.options)
    assert torch.equal(policy.schedule(4).times, base.schedule(4).times)


@pytest.mark.parametrize(
    ("edit", "plain", "options"),
    [
        ("kontext", tiny_flux, TINY),
        ("qwen-image-edit", tiny_qwen_image, TINY_UNCUT),
    ],
)
def test_without_a_reference_it_is_text_to_image(edit, plain, options):
    """In float64, from the same embeddings."""
    case = CASES[edit]
    base = type(case.family).__mro__[1]()
    family = type(case.family)()  # Kontext has another distilled guidance
    family = replace(family, distilled_guidance=3.5) if edit == "kontext" else family
    policy = PipelinePolicy(plain(), base, options)
    networks = [plain().transformer.double(), case.make().transformer.double()]
    networks[1].load_state_dict(networks[0].state_dict())
    given = rows_of(policy, [Prompt("a fox"), Prompt("a red house")])
    rows = {n: row.double() if row.is_floating_point() else row for n, row in given.items()}
    noise, times = noise_of(policy).double(), torch.tensor([900.0, 300.0]).double()
    none = {
        "reference": noise.new_zeros(2, 0, noise.shape[2]),
        "sizes": torch.zeros(2, 0, 2).long(),
    }
    expected = base.velocity(networks[0], noise, times, rows, policy.latent_size)
    given = noise, times, {**rows, **none}, policy.latent_size
    assert_close(family.velocity(networks[1], *given), expected, atol=1e-6, rtol=0)
    one = {"reference": randn(2, 4, noise.shape[2]).double(), "sizes": torch.full((2, 1, 2), 2)}
    other = family.velocity(networks[1], noise, times, {**rows, **one}, policy.latent_size)
    assert (other - expected).abs().max() > 1e-4


def test_kontext_makes_images_of_texts_too():
    """In one batch with edits."""
    case = replace(CASES["kontext"], prompts=[EDITS[0], Prompt("a fox"), EDITS[2]])
    policy = case.policy()
    noise = noise_of(policy, 3)
    plain = case.pictures(case.make(), noise, 1.0)
    assert_close(draw(policy, case.prompts, noise), plain, atol=5e-6, rtol=0)


def test_rows_with_references_of_one_size_share_a_call(monkeypatch):
    policy, calls = CASES["kontext"].policy(), []
    noise, times = noise_of(policy, 4), torch.full((4,), 500.0)
    condition = policy.encode([*EDITS, EDITS[0]])
    policy.transformer.register_forward_hook(lambda *_: calls.append(1))
    together = policy.velocity(noise, times, condition)
    assert len(calls) == 3
    monkeypatch.setattr("flowrl.policies.families.is_sharded_network", lambda network: True)
    assert_close(policy.velocity(noise, times, condition), together, atol=1e-6, rtol=0)
    assert len(calls) == 7
    kept = in_groups("abab", lambda some, key: torch.tensor(some) * 10, None)
    assert kept.tolist() == [0, 10, 20, 30]


def test_prompts_need_the_images_that_a_pipeline_reads():
    for policy, prompt, message in (
        (
            tiny_flux_policy(),
            EDITS[0],
            r"images of the prompt 'make it blue' = 1 .*allowed: 0 with FluxPipeline",
        ),
        (
            CASES["qwen-image-edit"].policy(),
            Prompt("a fox"),
            r"images of the prompt 'a fox' = 0 .*allowed: 1 with QwenImageEditPipeline",
        ),
        (
            CASES["kontext"].policy(),
            Prompt("a fox", images=(WIDE, TALL)),
            "= 2 .*allowed: 0 to 1 with FluxKontextPipeline",
        ),
    ):
        for call in (policy.encode, policy.warm):
            with pytest.raises(ConfigError, match=message):
                call([prompt])
    with pytest.raises(ConfigError, match=r"max_sequence_length = 24 .*does not cut prompts"):
        CASES["qwen-image-edit"].policy(max_sequence_length=24).encode(EDITS)


def test_embeddings_are_stored_by_text_and_image(tmp_path, monkeypatch):
    """Of the decoder's weights, too; nothing is encoded again."""
    folder = tmp_path / "kontext"
    tiny_flux_kontext().save_pretrained(folder)
    embed_prompts(str(folder), TINY, EDITS)
    policy, embed, calls = load_policy(str(folder), TINY), PipelinePolicy._embed, []

    def watched(self, prompts):
        calls.extend(prompts)
        return embed(self, prompts)

    monkeypatch.setattr(PipelinePolicy, "_embed", watched)
    numbers = policy.encode(EDITS).tensors["prompt"]
    assert not calls and len({*numbers.tolist()}) == 3
    rows = rows_of(PipelinePolicy(tiny_flux_kontext(), FluxKontext(), TINY), EDITS)
    assert calls
    assert_close(rows_of(policy, EDITS), rows, atol=1e-6, rtol=0)
    other = tiny_flux_kontext()
    torch.nn.init.ones_(other.vae.encoder.conv_in.bias)
    other.save_pretrained(folder)
    calls.clear()
    changed = rows_of(load_policy(str(folder), TINY), EDITS)
    assert calls and (changed["reference"] - rows["reference"]).abs().max() > 1e-3

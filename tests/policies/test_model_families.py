"""What every model family promises, on tiny random pipelines of the real classes."""

import gc
import json
from dataclasses import dataclass, replace

import pytest
import torch
from all_but_last import AllButLast

from flowrl.errors import CheckpointError, ConfigError
from flowrl.losses import ClippedLoss
from flowrl.methods import flow_grpo, stepwise_flow_grpo, tp_grpo
from flowrl.policies.flux import Flux
from flowrl.policies.load import family_of, load_policy
from flowrl.policies.pipeline import ModelOptions, PipelinePolicy
from flowrl.policies.qwen_image import QwenImage
from flowrl.policies.sd3 import SD3
from flowrl.probes import Completion, Tweedie
from flowrl.protocols import FlowPolicy
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Usage, integrate, rollout
from flowrl.samplers import FlowSDE
from flowrl.testing.tiny import TINY, tiny_flux, tiny_qwen_image, tiny_sd3
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer
from flowrl.types import Prompt

TEXTS = ["three red circles", "a dog"]
PROMPTS = [Prompt(text) for text in TEXTS]
STEPS = 4
REDNESS = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3)))


@dataclass(frozen=True)
class Case:
    """A family, its tiny pipeline, and the plain pipeline's names for classifier-free guidance."""

    make: object
    family: object
    scale: str
    plain: dict

    def policy(self, **changes) -> PipelinePolicy:
        return PipelinePolicy(self.make(), self.family, replace(TINY, **changes))

    def picture(self, pipe, noise, guidance=1.0, texts=TEXTS, **more):
        """The plain pipeline's own images, [sample, 3, 16, 16]."""
        pipe.set_progress_bar_config(disable=True)
        size = dict(height=16, width=16, num_inference_steps=STEPS, max_sequence_length=TINY.max_sequence_length)
        call = {**size, **self.plain, self.scale: guidance, **more}
        return pipe(texts, latents=noise, output_type="pt", **call).images


CASES = {
    "sd3": Case(tiny_sd3, SD3(), "guidance_scale", {}),
    "flux": Case(tiny_flux, Flux(), "true_cfg_scale", {"guidance_scale": 3.5}),
    "qwen-image": Case(tiny_qwen_image, QwenImage(), "true_cfg_scale", {}),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def noise_of(policy, count=2, seed=0):
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))


def draw(policy, noise, texts=TEXTS):
    condition = policy.encode([Prompt(text) for text in texts])
    return policy.decode(integrate(policy, policy.schedule(STEPS), condition, noise, Usage()))


def train_once(policy, method=None, iterations=1, **changes):
    config = preset("tiny").apply(num_steps=STEPS, groups=2, group_size=3, minibatches=1, learning_rate=1e-2, **changes)
    trainer = Trainer(policy, method or flow_grpo(FlowSDE(0.7)), REDNESS, PROMPTS, config)
    return trainer, [trainer.iteration() for _ in range(iterations)]


def test_the_protocol(case):
    policy = case.policy()
    assert isinstance(policy, FlowPolicy)
    velocity = policy.velocity(noise_of(policy), torch.tensor([1000.0, 250.0]), policy.encode(PROMPTS))
    assert velocity.shape == (2, *policy.latent_shape) and velocity.dtype == torch.float32
    assert policy.decode(noise_of(policy)).shape == (2, 3, 16, 16)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_ode_samples_are_those_of_the_plain_pipeline(case, guidance):
    policy = case.policy(guidance_scale=guidance, negative_prompt="blurry")
    noise = noise_of(policy)
    plain = case.picture(case.make(), noise, guidance, negative_prompt=["blurry"] * 2)
    torch.testing.assert_close(draw(policy, noise), plain, atol=2e-6, rtol=0)
    assert (plain[0] - plain[1]).abs().max() > 0.1  # the pictures are not all the same


def test_guidance_changes_the_picture_and_its_gradient_may_leave_out_the_negative_branch(case):
    off, on, saving = case.policy(), case.policy(guidance_scale=3.0), case.policy(guidance_scale=3.0, guidance_gradient="prompt")
    noise, time = noise_of(off), torch.full((2,), 600.0)
    velocities, gradients = [], []
    for policy in (off, on, saving):
        velocity = policy.velocity(noise, time, policy.encode(PROMPTS))
        gradients.append(torch.autograd.grad((noise * velocity).mean(), list(policy.trainable().values()), allow_unused=True))
        velocities.append(velocity.detach())
    torch.testing.assert_close(velocities[1], velocities[2], atol=5e-6, rtol=0)
    assert (velocities[0] - velocities[1]).abs().max() > 1e-4
    norms = [torch.cat([g.flatten() for g in found if g is not None]) for found in gradients]
    assert (norms[1] - norms[2]).norm() > 1e-3 * norms[1].norm()
    with on.guided(1.0):
        torch.testing.assert_close(on.velocity(noise, time, on.encode(PROMPTS)), velocities[0], atol=5e-6, rtol=0)
    assert torch.equal(on.velocity(noise, time, on.encode(PROMPTS)).detach(), velocities[1])


def test_guidance_is_the_formula_of_two_evaluations(case):
    policy = case.policy(guidance_scale=2.5, negative_prompt="blurry")
    noise, time = noise_of(policy), torch.full((2,), 600.0)
    guided = policy.velocity(noise, time, policy.encode(PROMPTS))
    with policy.guided(1.0):
        towards = policy.velocity(noise, time, policy.encode(PROMPTS))
        away = policy.velocity(noise, time, policy.encode([Prompt("blurry")] * 2))
    guide = case.family.guide if isinstance(case.family, QwenImage) else lambda away, towards, s: away + s * (towards - away)
    torch.testing.assert_close(guided, guide(away, towards, 2.5), atol=5e-6, rtol=0)


@pytest.mark.parametrize("make", [flow_grpo, stepwise_flow_grpo, tp_grpo])
def test_one_update_with_every_method(case, make):
    policy = case.policy()
    trainer, (row,) = train_once(policy, make(FlowSDE(0.7), ClippedLoss(clip_range=1e-2, kl_weight=0.1)))
    assert row["ratio_deviation"] < 1e-4 and row["grad_norm"] > 0
    assert row["kl"] == pytest.approx(0, abs=1e-9)
    assert max(float(p.detach().abs().max()) for n, p in policy.trainable().items() if "lora_B" in n) > 0
    assert trainer.iteration()["kl"] > 0


@pytest.mark.parametrize("probe", [Tweedie(), Completion()])
def test_probes(case, probe):
    policy, groups = case.policy(), Groups(2, 2)
    generator = torch.Generator().manual_seed(0)
    noise = groups.noise(policy.latent_shape, generator)
    condition, schedule = policy.encode(PROMPTS), policy.schedule(STEPS)
    result = rollout(policy, AllButLast(FlowSDE()), schedule, condition, noise, generator, groups, probe)
    assert sorted(result.estimates) == list(range(STEPS - 1))
    first = result.estimates[0].latents
    if isinstance(probe, Completion):
        expected = integrate(policy, schedule, condition.repeat(2), noise, Usage())
    else:
        with policy.frozen():
            expected = noise - policy.velocity(noise, torch.full((4,), 1000.0), condition.repeat(2))
    torch.testing.assert_close(first, expected, atol=5e-6, rtol=0)


def test_a_saved_lora_is_read_by_plain_diffusers(case, tmp_path):
    """alpha is not the rank, so a reader that forgot the scale would draw another picture."""
    policy = case.policy(lora_rank=4, lora_alpha=16.0)
    noise = noise_of(policy)
    before = draw(policy, noise)
    train_once(policy)
    trained = draw(policy, noise)
    policy.save(tmp_path / "lora")
    assert [path.name for path in (tmp_path / "lora").iterdir()] == ["pytorch_lora_weights.safetensors"]
    plain = case.make()
    plain.load_lora_weights(tmp_path / "lora")
    torch.testing.assert_close(case.picture(plain, noise), trained, atol=5e-6, rtol=0)
    assert (trained - before).abs().max() > 1e-3
    again = case.policy(lora_rank=4, lora_alpha=16.0, adapter=str(tmp_path / "lora"))
    for name, parameter in policy.trainable().items():
        torch.testing.assert_close(again.trainable()[name], parameter, atol=0, rtol=0)
    torch.testing.assert_close(draw(again, noise), trained, atol=1e-6, rtol=0)


def test_a_lora_of_plain_diffusers_is_taken_up_with_its_own_alpha(case, tmp_path):
    from peft import LoraConfig, get_peft_model_state_dict

    pipe = case.make()
    lora = LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, target_modules=["to_q", "to_k"])
    pipe.transformer.add_adapter(lora)
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    metadata = {"r": 2, "lora_alpha": 6, "target_modules": ["to_k", "to_q"]}
    layers = get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(tmp_path, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata)
    policy = case.policy(lora_rank=2, lora_alpha=2.0, lora_targets=("to_q", "to_k"), adapter=str(tmp_path))
    noise = noise_of(policy)
    torch.testing.assert_close(draw(policy, noise), case.picture(pipe, noise), atol=5e-6, rtol=0)
    with pytest.raises(CheckpointError, match=r"rank \[2\].*of rank 4"):
        case.policy(lora_rank=4, lora_targets=("to_q", "to_k"), adapter=str(tmp_path))
    with pytest.raises(CheckpointError, match="does not exist"):
        case.policy(adapter=str(tmp_path / "none"))


def test_full_fine_tuning_and_its_reference(case, tmp_path):
    policy = case.policy(tuning="full")
    noise, time, condition = noise_of(policy), torch.full((2,), 600.0), policy.encode(PROMPTS)
    base = policy.velocity(noise, time, condition).detach()
    train_once(policy, flow_grpo(loss=ClippedLoss(kl_weight=0.1)))
    with torch.no_grad():
        assert (policy.velocity(noise, time, condition) - base).abs().max() > 1e-3
    with policy.reference():
        torch.testing.assert_close(policy.velocity(noise, time, condition), base, atol=0, rtol=0)
    policy.save(tmp_path / "full")
    plain = case.make()
    plain.transformer = type(plain.transformer).from_pretrained(tmp_path / "full", subfolder="transformer")
    torch.testing.assert_close(case.picture(plain, noise), draw(policy, noise), atol=2e-6, rtol=0)
    with pytest.raises(ConfigError, match="keep_reference"), case.policy(tuning="full", keep_reference=False).reference():
        pass


def test_the_reference_is_the_base_model(case):
    policy = case.policy()
    noise, time, condition = noise_of(policy), torch.full((2,), 600.0), policy.encode(PROMPTS)
    base = policy.velocity(noise, time, condition).detach()
    train_once(policy)
    with policy.reference():
        assert torch.equal(policy.velocity(noise, time, condition), base)
    assert not torch.equal(policy.velocity(noise, time, condition).detach(), base)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("train", ["lora", "full"])
def test_narrow_networks_with_float32_around_them(case, dtype, train):
    policy, exact = case.policy(dtype=dtype, tuning=train), case.policy(tuning="nothing")
    noise, time = noise_of(policy), torch.full((2,), 600.0)
    velocity = policy.velocity(noise, time, policy.encode(PROMPTS))
    assert velocity.dtype == torch.float32
    error = (velocity - exact.velocity(noise, time, exact.encode(PROMPTS))).norm() / velocity.norm()
    assert 0 < error < (0.05 if dtype == "bfloat16" else 0.01)
    assert all(p.dtype == torch.float32 for p in policy.trainable().values())
    frozen = {p.dtype for p in policy.transformer.parameters() if not p.requires_grad}
    assert frozen == ({getattr(torch, dtype)} if train == "lora" else set())
    trainer, (row,) = train_once(policy)
    assert row["grad_norm"] > 0 and row["ratio_deviation"] < 5e-2
    assert trainer.state().tensors["weight." + trainer.names[0]].dtype == torch.float32


def test_the_same_weights_sample_and_train_in_a_narrow_network(case):
    """In the same batch the ratio is exactly 1: sampling merges nothing into the rounded weights."""
    policy = case.policy(dtype="bfloat16")
    train_once(policy)
    noise, time, condition = noise_of(policy), torch.full((2,), 600.0), policy.encode(PROMPTS)
    with policy.frozen():
        sampled = policy.velocity(noise, time, condition)
    assert torch.equal(sampled, policy.velocity(noise, time, condition).detach())


def test_activations_enter_a_narrow_adapter_as_they_are(case, monkeypatch):
    policy = case.policy(dtype="bfloat16")
    noise, time, condition = noise_of(policy), torch.full((2,), 600.0), policy.encode(PROMPTS)
    layer, seen = policy.adapters.layers[0], []
    layer.lora_A["default"].register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
    sparing = policy.velocity(noise, time, condition)
    for adapted in policy.adapters.layers:
        monkeypatch.delattr(adapted, "_cast_input_dtype")
    assert torch.equal(sparing, policy.velocity(noise, time, condition))
    assert seen == [torch.bfloat16, torch.float32]
    rows = {name: rows.bfloat16() for name, rows in policy.prompts.rows(condition.tensors["prompt"]).items()}
    policy.family.velocity(policy.transformer, noise.bfloat16(), time, rows, policy._size)  # without autocast PEFT's cast is back


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_nothing(case, dtype):
    gradients = []
    for checkpointing in (False, True):
        policy = case.policy(gradient_checkpointing=checkpointing, dtype=dtype)
        for parameter in policy.trainable().values():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
        calls = []
        policy.transformer.transformer_blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        velocity = policy.velocity(noise_of(policy), torch.full((2,), 600.0), policy.encode(PROMPTS))
        with policy.reference():  # in between, as a KL term has it
            policy.velocity(noise_of(policy), torch.full((2,), 600.0), policy.encode(PROMPTS))
        velocity.square().sum().backward()
        assert len(calls) == 2 + checkpointing  # computed again in the backward pass
        gradients.append([p.grad for p in policy.trainable().values() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed, atol=1e-6, rtol=1e-5)


def test_pictures_are_decoded_in_small_batches(case):
    whole, parts = case.policy(decode_batch=8), case.policy(decode_batch=2)
    latents = noise_of(whole, 5)
    sizes, decode = [], parts.pipe.vae.decode
    parts.pipe.vae.decode = lambda z, **more: (sizes.append(len(z)), decode(z, **more))[1]
    torch.testing.assert_close(parts.decode(latents), whole.decode(latents), atol=1e-6, rtol=0)
    assert sizes == [2, 2, 1]


def test_prompts_are_embedded_once(case):
    policy = case.policy()
    condition = policy.encode(PROMPTS)
    assert (policy.prompts.misses, policy.prompts.hits) == (3, 0)  # and the negative prompt
    again = policy.encode([PROMPTS[1], PROMPTS[1]])
    assert (policy.prompts.misses, policy.prompts.hits) == (3, 3)
    assert all(tensor.ndim == 1 for tensor in condition.tensors.values())  # a number per sample, not an embedding
    rows = policy.prompts.rows(condition.tensors["prompt"])  # of an earlier call: brought back
    late = policy.prompts.rows(again.tensors["prompt"])
    for name, tensor in rows.items():
        assert torch.equal(tensor[1], late[name][0]) and torch.equal(tensor[1], late[name][1])
    alone = case.policy()
    rows_alone = alone.prompts.rows(alone.encode(PROMPTS[1:]).tensors["prompt"])
    for name, row in rows_alone.items():  # whatever the neighbours, but for padding
        size = row.shape[1]
        assert torch.equal(row[0], rows[name][1, :size]) and not rows[name][1, size:].any()


def test_encoders_visit_the_device_only_for_new_prompts(case):
    policy = case.policy()
    encoder, visits = getattr(policy.pipe, case.family.encoders[-1]), []
    whole = encoder.to
    encoder.to = lambda place: (visits.append(str(place)), whole(place))[1]
    policy._device = torch.device("cpu", 0)  # another name for the same place, to tell coming from going
    policy.encode(PROMPTS)
    assert visits == ["cpu:0", "cpu"]
    policy.encode(PROMPTS)
    assert visits == ["cpu:0", "cpu"]


def test_more_prompts_than_the_cache_holds_cost_one_pass(case, tmp_path, monkeypatch):
    """Ten prompts and the negative one, three of them in main memory: one call of the encoders, whatever is used how often, and
    the same velocities as with room for all."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    policy, roomy = case.policy(prompt_cache=3), case.policy()
    prompts, embed, calls = [Prompt(f"number {n}") for n in range(10)], policy.prompts.encode, []
    policy.prompts.encode = lambda texts: (calls.append(len(texts)), embed(texts))[1]
    policy.warm(prompts)
    time = torch.full((2,), 600.0)
    early, known = policy.encode(prompts[:2]), roomy.encode(prompts[:2])
    for start in (0, 4, 8, 0):
        few = prompts[start : start + 2]
        found = policy.velocity(noise_of(policy), time, policy.encode(few))
        assert torch.equal(found, roomy.velocity(noise_of(roomy), time, roomy.encode(few)))
    policy.encode(prompts[6:8])
    assert torch.equal(*[p.velocity(noise_of(p), time, c) for p, c in ((policy, early), (roomy, known))])  # of an earlier call
    assert calls == [11] and len(policy.prompts) == 3 and len(list(tmp_path.glob("flowrl-prompts-*/*"))) == 8
    del policy, embed
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_line(case, monkeypatch):
    def full(tensors, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flowrl.policies.prompt_cache.save_file", full)
    with pytest.raises(ConfigError, match=r"prompt_cache = 2: .* No space left on device\); set TMPDIR"):
        case.policy(prompt_cache=2).warm([Prompt(str(n)) for n in range(3)])


def test_a_run_resumes_to_the_same_numbers(case):
    whole, rows = train_once(case.policy(), iterations=3)
    first, _ = train_once(case.policy(), iterations=1)
    second, _ = train_once(case.policy(), iterations=0)
    second.restore(first.state())
    later = [second.iteration() for _ in range(2)]
    drop = ("seconds", "phases")
    for a, b in zip(rows[1:], later, strict=True):
        assert {k: v for k, v in a.items() if k not in drop} == {k: v for k, v in b.items() if k not in drop}
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters, second.parameters, strict=True))


def test_a_model_is_loaded_from_its_folder(case, tmp_path):
    pipe = case.make()
    pipe.save_pretrained(tmp_path / "model")
    policy = load_policy(str(tmp_path / "model"), TINY)
    assert type(policy.family) is type(case.family)
    noise = noise_of(policy)
    torch.testing.assert_close(draw(policy, noise), case.picture(pipe, noise), atol=2e-6, rtol=0)
    half = load_policy(str(tmp_path / "model"), replace(TINY, dtype="bfloat16"))
    assert half.pipe.text_encoder.dtype == torch.bfloat16 and half.pipe.vae.dtype == torch.float32
    card = tmp_path / "model" / "model_index.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "_class_name": "PixArtAlphaPipeline"}))
    known = "known: StableDiffusion3Pipeline, FluxPipeline, QwenImagePipeline"
    with pytest.raises(ConfigError, match=f"no family for a PixArtAlphaPipeline; {known}"):
        load_policy(str(tmp_path / "model"), TINY)


def test_what_is_wrong_is_said(case, tmp_path):
    with pytest.raises(ConfigError, match=r"no folder with a model_index.json"):
        load_policy(str(tmp_path / "none"), TINY)
    with pytest.raises(ConfigError, match="height = 15"):
        case.policy(height=15)
    with pytest.raises(ConfigError, match=r"lora_targets = \('nowhere',\)"):
        case.policy(lora_targets=("nowhere",))
    pipe = case.make()
    PipelinePolicy(pipe, case.family, TINY)
    with pytest.raises(ConfigError, match="has adapters already"):
        PipelinePolicy(pipe, case.family, TINY)
    with pytest.raises(ConfigError, match="nothing to save"):
        case.policy(tuning="nothing").save(tmp_path / "x")
    with pytest.raises(ConfigError, match="pipeline = "):
        PipelinePolicy(case.make(), Flux() if isinstance(case.family, SD3) else SD3(), TINY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "int8"}, "float32, bfloat16"),
        ({"guidance_scale": 0.5}, "guidance_scale = 0.5"),
        ({"guidance_gradient": "none"}, "both, prompt"),
        ({"tuning": "some"}, "lora, full, nothing"),
        ({"lora_rank": 0}, "rank = 0"),
        ({"lora_alpha": 0.0}, "alpha"),
        ({"max_sequence_length": -1}, "max_sequence_length"),
        ({"max_sequence_length": 513}, "1 to 512"),
        ({"decode_batch": 0}, "decode_batch"),
    ],
)
def test_bad_options_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        ModelOptions(**changes)


def test_families_are_known_by_their_pipeline():
    assert isinstance(family_of("FluxPipeline"), Flux) and isinstance(family_of("StableDiffusion3Pipeline"), SD3)

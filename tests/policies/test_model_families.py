"""What every model family promises, on tiny random pipelines of the real classes."""

import gc
from dataclasses import replace

import pytest
import torch
from family_cases import CASES, PROMPTS, TEXTS, TIME, draw, fill, noise_of, trainer_of, velocity
from flowrl_compare.results import load_run
from safetensors.torch import load_file

from flowrl.cli.main import main
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.types import Prompt
from flowrl.methods import stepwise_flow_grpo, tp_grpo
from flowrl.policies import (
    LORA_TARGETS,
    PipelinePolicy,
    compile_blocks,
    has_compiled_blocks,
    load_policy,
)
from flowrl.testing import policy_contract
from flowrl.testing.tiny import TINY, tiny_flux, tiny_sd3
from flowrl.training.build import trained_policy

test_qwen_image = policy_contract(
    lambda: CASES["qwen-image"].policy(guidance_scale=4.0, negative_prompt=" ")
)
test_wan = policy_contract(
    lambda: CASES["wan"].policy(guidance_scale=5.0, negative_prompt="blurry")
)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=["sd3", "flux"])
def pair(request):
    """For promises of the code that all families share."""
    return CASES[request.param]


@pytest.mark.parametrize(
    ("guidance", "height", "width", "steps", "frames"),
    [(1.0, 32, 16, 7, 9), (4.5, 32, 16, 7, 9), (4.5, 16, 64, 3, 1)],
)
def test_images_and_grid_are_the_plain_pipelines(case, guidance, height, width, steps, frames):
    """Prompts of different length, in one batch with a negative prompt of a third; 1e-6 is
    rounding.
    """
    sizes = {"height": height, "width": width}
    sizes |= {"num_frames": frames} if "num_frames" in case.plain else {}
    policy = case.policy(guidance_scale=guidance, negative_prompt="blurry", **sizes)
    pipe = case.make()
    plain = case.picture(pipe, noise_of(policy), guidance, steps, **sizes)
    torch.testing.assert_close(draw(policy, steps=steps), plain, atol=5e-6, rtol=0)
    schedule = policy.schedule(steps)
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps)
    assert (plain[0] - plain[1]).abs().max() > 0.1  # the images are not all the same


def test_guidance_and_its_gradient_without_the_negative_branch(case):
    scales = {"off": {}, "on": {"guidance_scale": 3.0}}
    scales["prompt"] = {"guidance_scale": 3.0, "guidance_gradient": "prompt"}
    velocities, gradients = {}, {}
    for name, changes in scales.items():
        policy = case.policy(**changes)
        result, weights = velocity(policy), list(policy.trainable().values())
        loss = (noise_of(policy) * result).mean()
        parts = torch.autograd.grad(loss, weights, allow_unused=True)
        gradients[name] = torch.cat([part.flatten() for part in parts if part is not None])
        velocities[name] = result.detach()
    torch.testing.assert_close(velocities["on"], velocities["prompt"], atol=5e-6, rtol=0)
    assert (velocities["off"] - velocities["on"]).abs().max() > 1e-4
    assert (gradients["on"] - gradients["prompt"]).norm() > 1e-3 * gradients["on"].norm()
    policy = case.policy(guidance_scale=3.0)
    with policy.guided(1.0):
        torch.testing.assert_close(velocity(policy), velocities["off"], atol=5e-6, rtol=0)
    with pytest.raises(ZeroDivisionError), policy.guided(1.0):
        raise ZeroDivisionError
    assert torch.equal(velocity(policy).detach(), velocities["on"])


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("guidance", "method"), [(1.0, tp_grpo), (3.0, stepwise_flow_grpo)], ids=["plain", "guided"]
)
def test_train_save_reload_resume(case, dtype, guidance, method, tmp_path):
    """Rollouts with probes, updates with a KL, saving, the same image from plain diffusers, and a
    resume to the bit.

    The root mean square differences from a float32 network with the same rounded weights are
    1.4e-7, 1.8e-4 in float16 and, in bfloat16, 1.8e-3 (SD3) and 5.9e-3 (FLUX, whose transformer
    rounds its time input, in plain diffusers too).
    """
    qwen = case is CASES["qwen-image"]
    ends = tuple(name.removeprefix("attn.") for name in LORA_TARGETS)
    changes = {} if case is CASES["wan"] else {"lora_targets": ends}

    def make():
        policy = case.policy(
            dtype=dtype, guidance_scale=guidance, negative_prompt="blurry", **changes
        )
        fill(policy, std=0.4 if qwen else 0.15)
        return trainer_of(policy, method, minibatches=2)

    trainer, again = make(), make()
    row = trainer.iteration()
    # Qwen's larger adapter moves further in the second update
    largest = 1e-1 if dtype == "bfloat16" or qwen else 5e-2
    assert row["grad_norm"] > 0 and row["kl"] > 0 and 0 <= row["ratio_deviation"] < largest
    state = trainer.state()
    trainer.iteration()
    again.restore(state)
    again.iteration()
    assert all(torch.equal(a, b) for a, b in zip(trainer.parameters, again.parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(trainer.average, again.average, strict=True))
    trainer.policy.save(tmp_path / "lora")
    pipe, noise = case.make(), noise_of(trainer.policy)
    if case is not CASES["wan"] or dtype == "float32":  # whose layers in float32 are not rounded
        pipe.transformer.to(getattr(torch, dtype)).to(torch.float32)
    base = case.picture(pipe, noise, guidance)
    pipe.load_lora_weights(tmp_path / "lora")
    plain = case.picture(pipe, noise, guidance)
    error = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 7e-3}[dtype]
    assert (draw(trainer.policy) - plain).square().mean().sqrt() < error
    assert (plain - base).square().mean().sqrt() > 2 * error  # a lost adapter would show


def test_a_saved_lora_is_read_by_plain_diffusers(case, tmp_path):
    """alpha is not the rank, so a reader that forgot the scale would draw another picture."""
    policy = case.policy(lora_rank=4, lora_alpha=16.0)
    before = draw(policy)
    trainer_of(policy).iteration()
    trained = draw(policy)
    policy.save(tmp_path / "lora")
    assert [path.name for path in (tmp_path / "lora").iterdir()] == [
        "pytorch_lora_weights.safetensors"
    ]
    plain = case.make()
    plain.load_lora_weights(tmp_path / "lora")
    torch.testing.assert_close(case.picture(plain, noise_of(policy)), trained, atol=5e-6, rtol=0)
    assert (trained - before).abs().max() > 1e-3
    again = case.policy(lora_rank=4, lora_alpha=16.0, adapter=str(tmp_path / "lora"))
    for name, parameter in policy.trainable().items():
        torch.testing.assert_close(again.trainable()[name], parameter, atol=0, rtol=0)


def test_a_lora_of_plain_diffusers_is_taken_up_with_its_own_alpha(case, tmp_path):
    from peft import LoraConfig, get_peft_model_state_dict

    pipe, settings = case.make(), {"r": 2, "lora_alpha": 6, "target_modules": ["to_k", "to_q"]}
    pipe.transformer.add_adapter(LoraConfig(init_lora_weights=False, **settings))
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    layers = get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(
        tmp_path, transformer_lora_layers=layers, transformer_lora_adapter_metadata=settings
    )
    options = {"lora_targets": ("to_q", "to_k"), "adapter": str(tmp_path)}
    policy = case.policy(lora_rank=2, lora_alpha=2.0, **options)
    picture = case.picture(pipe, noise_of(policy))
    torch.testing.assert_close(draw(policy), picture, atol=5e-6, rtol=0)
    with pytest.raises(CheckpointError, match=r"rank \{2\}; the layers or the rank"):
        case.policy(lora_rank=4, **options)
    with pytest.raises(CheckpointError, match="does not exist"):
        case.policy(adapter=str(tmp_path / "none"))


def test_full_fine_tuning_and_its_reference(case, tmp_path):
    policy = case.policy(tuning="full")
    base = velocity(policy).detach()
    trainer_of(policy).iteration()
    with torch.no_grad():
        assert (velocity(policy) - base).abs().max() > 1e-3
    with policy.reference():
        torch.testing.assert_close(velocity(policy), base, atol=0, rtol=0)
    policy.save(tmp_path / "full")
    plain = case.make()
    plain.transformer = type(plain.transformer).from_pretrained(
        tmp_path / "full", subfolder="transformer"
    )
    torch.testing.assert_close(
        case.picture(plain, noise_of(policy)), draw(policy), atol=5e-6, rtol=0
    )
    with (
        pytest.raises(ConfigError, match="keep_reference"),
        case.policy(tuning="full", keep_reference=False).reference(),
    ):
        pass


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("train", ["lora", "full"])
def test_narrow_networks_with_float32_around_them(pair, dtype, train):
    policy, exact = pair.policy(dtype=dtype, tuning=train), velocity(pair.policy(tuning="nothing"))
    narrow = velocity(policy)
    assert narrow.dtype == torch.float32
    error = (narrow - exact).norm() / narrow.norm()
    assert 0 < error < (0.05 if dtype == "bfloat16" else 0.01)
    assert all(p.dtype == torch.float32 for p in policy.trainable().values())
    frozen = {p.dtype for p in policy.transformer.parameters() if not p.requires_grad}
    assert frozen == ({getattr(torch, dtype)} if train == "lora" else set())
    trainer = trainer_of(policy)
    assert trainer.iteration()["grad_norm"] > 0
    assert trainer.state().tensors["weight." + trainer.names[0]].dtype == torch.float32


def test_the_same_weights_sample_and_train_in_a_narrow_network(case):
    """In the same batch the ratio is exactly 1: sampling merges nothing into the rounded
    weights.
    """
    policy = fill(case.policy(dtype="bfloat16"))
    with policy.frozen():
        sampled = velocity(policy)
    assert torch.equal(sampled, velocity(policy).detach())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_nothing(case, dtype):
    gradients = []
    for checkpointing in (False, True):
        policy, calls = fill(case.policy(gradient_checkpointing=checkpointing, dtype=dtype)), []
        policy.adapters.layers[0].register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        found = velocity(policy)
        with policy.reference():  # in between, as a KL term has it
            velocity(policy)
        found.square().sum().backward()
        assert len(calls) == 2 + checkpointing  # computed again in the backward pass
        gradients.append([p.grad for p in policy.trainable().values() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed, atol=1e-6, rtol=1e-5)


def test_pictures_are_decoded_in_small_batches_and_in_the_decoders_precision(case):
    parts, narrow = case.policy(decode_batch=2), case.policy(decode_dtype="bfloat16")
    latents, sizes, decode = noise_of(parts, 5), [], parts.pipe.vae.decode
    parts.pipe.vae.decode = lambda z, **more: (sizes.append(len(z)), decode(z, **more))[1]
    images = case.policy(decode_batch=8).decode(latents)
    torch.testing.assert_close(parts.decode(latents), images, atol=1e-6, rtol=0)
    assert sizes == [2, 2, 1]
    assert {p.dtype for p in narrow.pipe.vae.parameters()} == {torch.bfloat16}
    rounded = narrow.decode(latents)
    assert rounded.dtype == torch.float32 and 0 < (rounded - images).abs().max() < 0.05


def test_a_condition_has_numbers_of_prompts_that_are_embedded_once(case):
    """Whatever the neighbours, but for padding; conditions of several calls may be joined."""
    policy, alone, texts = case.policy(), case.policy(), []
    embed = policy.prompts.encode
    policy.prompts.encode = lambda new: (texts.extend(new), embed(new))[1]
    early, late, both = (policy.encode(prompts) for prompts in (PROMPTS[:1], PROMPTS[1:], PROMPTS))
    assert sorted(texts) == sorted([*TEXTS, ""])
    assert all(tensor.ndim == 1 for tensor in both.tensors.values())
    joined = type(early).cat([early, late])
    with torch.no_grad():
        pair = [policy.velocity(noise_of(policy), TIME, given) for given in (joined, both)]
    assert torch.equal(*pair)
    rows = policy.prompts.rows(both.tensors["prompt"])
    for name, row in alone.prompts.rows(alone.encode(PROMPTS[1:]).tensors["prompt"]).items():
        size = row.shape[1]
        assert torch.equal(row[0], rows[name][1, :size]) and not rows[name][1, size:].any()


def test_more_prompts_than_the_cache_holds_cost_one_pass(pair, tmp_path, monkeypatch):
    """Ten prompts and the negative one, three of them in main memory, and those of the latest call
    on the device: one call of the encoders, and the same velocities as with room for all.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    policy, roomy = pair.policy(prompt_cache=3), pair.policy()
    prompts, embed, calls = [Prompt(f"number {n}") for n in range(10)], policy.prompts.encode, []
    policy.prompts.encode = lambda texts: (calls.append(len(texts)), embed(texts))[1]
    policy.warm(prompts)

    def velocities(conditions):
        return [
            p.velocity(noise_of(p), TIME, c)
            for p, c in zip((policy, roomy), conditions, strict=True)
        ]

    conditions = [[p.encode(prompts[i : i + 2]) for p in (policy, roomy)] for i in (0, 4, 8, 0)]
    assert len(policy.prompts._table["words"]) == 3
    assert all(torch.equal(*velocities(pair)) for pair in conditions)  # of earlier calls, too
    assert calls == [11] and len(list(tmp_path.glob("flowrl-prompts-*/*"))) == 8
    del policy, embed
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_line(monkeypatch):
    def full(tensors, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flowrl.policies.prompt_cache.save_file", full)
    with pytest.raises(
        ConfigError, match=r"prompt_cache = 2: .* No space left on device\); set TMPDIR"
    ):
        CASES["sd3"].policy(prompt_cache=2).warm([Prompt(str(n)) for n in range(3)])


def test_encoders_wait_in_main_memory_also_after_a_failure(case, monkeypatch):
    policy, visits = case.policy(), []
    encoders = [getattr(policy.pipe, name) for name in case.family.encoders]
    for encoder in encoders:
        monkeypatch.setattr(encoder, "to", lambda place: visits.append(str(place)))
    # another name for the same place, to tell coming from going
    policy.device = torch.device("cpu", 0)
    visit = ["cpu:0"] * len(encoders) + ["cpu"] * len(encoders)
    for _ in range(2):
        policy.encode(PROMPTS)
        assert visits == visit
    assert not any(p.requires_grad for encoder in encoders for p in encoder.parameters())
    monkeypatch.setattr(type(policy.family), "encode", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.encode([Prompt("new")])
    assert visits == visit * 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_blocks_compute_the_same(dtype):
    """Sampling, the reference and a gradient under checkpointing, where the blocks run again in the
    backward pass.
    """
    results = []
    for backend in ("", "eager"):
        options = {"dtype": dtype, "compile": backend, "gradient_checkpointing": True}
        policy = fill(CASES["flux"].policy(**options))
        assert has_compiled_blocks(policy.transformer) == bool(backend)
        condition = policy.encode(PROMPTS)
        with policy.frozen():
            sampled = velocity(policy)
        with policy.reference():
            reference = velocity(policy)
        for count in (2, 1, 2):  # a smaller last batch, then the usual one again
            few = condition.take(torch.arange(count))
            policy.velocity(noise_of(policy, count), TIME[:count], few).square().sum().backward()
        gradients = [p.grad for p in policy.trainable().values() if p.grad is not None]
        results.append((sampled, reference, *gradients))
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match="compile = 'nothing'"):
        compile_blocks(policy.transformer, "nothing")


def test_a_model_is_loaded_from_its_folder(case, tmp_path):
    pipe, folder = case.make(), str(tmp_path)
    pipe.save_pretrained(folder)
    policy = load_policy(folder, case.options)
    assert type(policy.family) is type(case.family)
    picture = case.picture(pipe, noise_of(policy))
    torch.testing.assert_close(draw(policy), picture, atol=5e-6, rtol=0)
    half = load_policy(folder, replace(case.options, dtype="bfloat16"))
    assert half.pipe.text_encoder.dtype == torch.bfloat16 and half.pipe.vae.dtype == torch.float32


def test_other_models_are_refused(tmp_path):
    tiny_sd3().save_pretrained(tmp_path)
    card = tmp_path / "model_index.json"
    card.write_text(card.read_text().replace("StableDiffusion3Pipeline", "PixArtAlphaPipeline"))
    known = "known: StableDiffusion3Pipeline, FluxPipeline, QwenImagePipeline"
    with pytest.raises(ConfigError, match=f"no family for a PixArtAlphaPipeline; {known}"):
        load_policy(str(tmp_path), TINY)
    with pytest.raises(ConfigError, match=r"no folder with a model_index.json"):
        load_policy(str(tmp_path / "none"), TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-image", "wan"])
def test_a_preset_is_planned_trained_and_resumed(name, tmp_path, capsys):
    """With the preset's window, guidance, negative prompt and LoRA targets; videos have motion and
    diversity as metrics.
    """
    case, video, run = CASES[name], name == "wan", tmp_path / "run"
    red = f"{tmp_path}/red.py:Red"
    (tmp_path / "red.py").write_text(
        "class Red:\n    def score(self, images, prompts): return images[:, 0].mean((1, 2))\n"
    )
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    case.make().save_pretrained(tmp_path / "model")
    model = "wan2.1-t2v-1.3b" if video else name
    reward = f"frame-mean(reward='{red}', frames=2)" if video else red
    words = ["train", "--preset", f"{model},flow-grpo,pickscore", f"--model={tmp_path}/model"]
    words += [f"--prompts={tmp_path}/prompts.txt", f"--reward={reward}", "--heldout-prompts="]
    words += (
        "--negative-prompt=blurry --resolution=16 --max-sequence-length=24 --iterations=2"
        " --groups=2 --group-size=3 --eval-samples=2 --eval-steps=3 --lora-rank=2"
        " --learning-rate=0.03 --device=cpu --dtype=float32 --tracker=none"
        + " --width=16 --num-frames=5 --num-steps=4 --heldout-rewards=motion --diversity=pixels"
        * video
    ).split()
    assert main([*words, "--plan", "--dtype=bfloat16"]) == 0
    told = capsys.readouterr().out
    assert "x 2 (guidance) = " in told and "trained ones" in told
    assert main([*words, f"--out={run}", "--checkpoint-every=1", "--keep-checkpoints=2"]) == 0
    record, weights = load_run(run), load_file(run / "weights.safetensors")
    assert record.finished and record.rows[1]["grad_norm"] > 0
    if video:
        last = record.rows[-1]["evaluation"]
        assert last["heldout"]["motion"] > 0.01 and last["diversity"] > 0
        grid = ["--prompts=a dog", "--count=2", f"--out={run}/grid.png", "--trust"]
        assert main(["sample", f"--weights={run}", *grid]) == 0
        # first, middle and last frame
        assert load_file(run / "samples.safetensors")["after"].shape == (2, 3, 16, 3 * 16)
        card = (run / "README.md").read_text()
        assert "text-to-video" in card and "num_frames=5, " in card and ").frames[0]" in card
        assert main([*words, f"--out={tmp_path}/images", "--reward=jpeg-compressibility"]) == 2
        assert "frame-mean(reward=...)" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--from", "000001", "--trust"]) == 0
    again = load_file(run / "weights.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    policy, _ = trained_policy(run, trust=True)
    plain = case.make()
    plain.load_lora_weights(run / "lora")
    trained = case.picture(plain, noise_of(policy), policy.guidance_scale)
    torch.testing.assert_close(draw(policy), trained, atol=1e-5, rtol=0)
    ends = {name.split(".lora_")[0].split(".", 2)[2] for name in policy.trainable()}
    assert ends == set(case.family.lora_targets) if video else "txt_mlp.net.2" in ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 15}, "height = 15 is not allowed; allowed: a multiple of"),
        ({"lora_targets": ("nowhere",)}, r"lora_targets = \('nowhere',\)"),
        ({"dtype": "int8"}, "dtype = 'int8' .*one of float32, bfloat16, float16"),
        ({"max_sequence_length": 513}, r"max_sequence_length = 513 .* in \[0, 512\]"),
        ({"tuning": "full", "frozen_adapters": ("x",)}, "none unless tuning is lora"),
        ({"num_frames": 6}, "num_frames = 6"),
    ],
)
def test_wrong_options_are_refused(changes, message):
    for name in ("sd3", "wan"):
        with pytest.raises(ConfigError, match=message):
            CASES[name].policy(**changes)


def test_wrong_pipelines_are_refused(tmp_path):
    pipe = tiny_sd3()
    policy = CASES["sd3"].policy(pipe)
    with pytest.raises(ConfigError, match=r"adapters of the model = \{'default'\}"):
        CASES["sd3"].policy(pipe)
    with pytest.raises(ConfigError, match="nothing to save"):
        CASES["sd3"].policy(tuning="nothing").save(tmp_path / "x")
    with pytest.raises(ConfigError, match="pipeline = 'FluxPipeline'"):
        PipelinePolicy(tiny_flux(), policy.family, policy.options)

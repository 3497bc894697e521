"""What every model family promises, on tiny random pipelines of the real classes."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from family_cases import CASES, PROMPTS, TEXTS, TIME, draw, fill, noise_of, trainer_of, velocity
from safetensors.torch import load_file

from flowrl.cli.main import main
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.types import Prompt
from flowrl.distributed import Distributed
from flowrl.methods import stepwise_flow_grpo, tp_grpo
from flowrl.policies import LORA_TARGETS, SD3, Flux, PipelinePolicy, compile_blocks, load_policy
from flowrl.testing import policy_contract
from flowrl.testing.tiny import TINY, tiny_flux, tiny_sd3
from flowrl.training.build import trained_policy
from flowrl.training.optim import prepare_policy
from flowrl.training.results import load_run

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


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize(
    ("height", "width", "steps", "frames"), [(16, 16, 4, 5), (32, 16, 7, 9), (16, 64, 3, 1)]
)
def test_images_and_grid_are_the_plain_pipelines(case, guidance, height, width, steps, frames):
    """Prompts of different length, in one batch with a negative prompt of a third; 1e-6 is
    rounding.
    """
    sizes = dict(
        height=height, width=width, **{"num_frames": frames} if "num_frames" in case.plain else {}
    )
    policy, pipe = (
        case.policy(guidance_scale=guidance, negative_prompt="blurry", **sizes),
        case.make(),
    )
    plain = case.picture(pipe, noise_of(policy), guidance, steps, **sizes)
    torch.testing.assert_close(draw(policy, steps=steps), plain, atol=5e-6, rtol=0)
    schedule = policy.schedule(steps)
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps)
    assert (plain[0] - plain[1]).abs().max() > 0.1  # the images are not all the same


def test_guidance_changes_the_picture_and_its_gradient_may_leave_out_the_negative_branch(case):
    off, on, saving = (
        case.policy(),
        case.policy(guidance_scale=3.0),
        case.policy(guidance_scale=3.0, guidance_gradient="prompt"),
    )
    noise, velocities, gradients = noise_of(off), [], []
    for policy in (off, on, saving):
        found = velocity(policy)
        gradients.append(
            torch.autograd.grad(
                (noise * found).mean(), list(policy.trainable().values()), allow_unused=True
            )
        )
        velocities.append(found.detach())
    torch.testing.assert_close(velocities[1], velocities[2], atol=5e-6, rtol=0)
    assert (velocities[0] - velocities[1]).abs().max() > 1e-4
    norms = [torch.cat([g.flatten() for g in found if g is not None]) for found in gradients]
    assert (norms[1] - norms[2]).norm() > 1e-3 * norms[1].norm()
    with on.guided(1.0):
        torch.testing.assert_close(velocity(on), velocities[0], atol=5e-6, rtol=0)
    assert torch.equal(velocity(on).detach(), velocities[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
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

    def make():
        targets = (
            tuple(name.removeprefix("attn.") for name in LORA_TARGETS)
            if case.family.lora_targets == LORA_TARGETS
            else ()
        )
        policy = case.policy(
            dtype=dtype, guidance_scale=guidance, negative_prompt="blurry", lora_targets=targets
        )
        fill(policy, std=0.4 if case is CASES["qwen-image"] else 0.15)
        return trainer_of(policy, method, minibatches=2)

    trainer, again = make(), make()
    row = trainer.iteration()
    # whose larger adapter moves further in the second update
    wide = dtype == "bfloat16" or case is CASES["qwen-image"]
    assert (
        row["grad_norm"] > 0
        and row["kl"] > 0
        and 0 <= row["ratio_deviation"] < (1e-1 if wide else 5e-2)
    )
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
    rms = lambda difference: float(difference.square().mean().sqrt())  # noqa: E731
    error = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 7e-3}[dtype]
    assert rms(draw(trainer.policy) - plain) < error
    assert rms(plain - base) > 2 * error  # a lost adapter would show


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

    pipe = case.make()
    pipe.transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, target_modules=["to_q", "to_k"])
    )
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    metadata = {"r": 2, "lora_alpha": 6, "target_modules": ["to_k", "to_q"]}
    layers = get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(
        tmp_path, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata
    )
    policy = case.policy(
        lora_rank=2, lora_alpha=2.0, lora_targets=("to_q", "to_k"), adapter=str(tmp_path)
    )
    torch.testing.assert_close(
        draw(policy), case.picture(pipe, noise_of(policy)), atol=5e-6, rtol=0
    )
    with pytest.raises(CheckpointError, match=r"rank \[2\].*of rank 4"):
        case.policy(lora_rank=4, lora_targets=("to_q", "to_k"), adapter=str(tmp_path))
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
    policy, exact = pair.policy(dtype=dtype, tuning=train), pair.policy(tuning="nothing")
    found = velocity(policy)
    assert found.dtype == torch.float32
    assert (
        0
        < (found - velocity(exact)).norm() / found.norm()
        < (0.05 if dtype == "bfloat16" else 0.01)
    )
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


def test_activations_enter_a_narrow_adapter_as_they_are(pair, monkeypatch):
    policy, seen = pair.policy(dtype="bfloat16"), []
    policy.adapters.layers[0].lora_A["default"].register_forward_pre_hook(
        lambda module, given: seen.append(given[0].dtype)
    )
    sparing = velocity(policy)
    rows = policy.prompts.rows(policy.encode(PROMPTS).tensors["prompt"])
    # PEFT's cast is back
    policy.family.velocity(
        policy.transformer, noise_of(policy).bfloat16(), TIME, rows, policy.latent_size
    )
    for adapted in policy.adapters.layers:
        monkeypatch.delattr(adapted, "_cast_input_dtype")
    assert torch.equal(sparing, velocity(policy))
    assert seen == [torch.bfloat16, torch.float32, torch.float32]


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
    whole, parts, narrow = (
        case.policy(decode_batch=8),
        case.policy(decode_batch=2),
        case.policy(decode_dtype="bfloat16"),
    )
    latents = noise_of(whole, 5)
    sizes, decode = [], parts.pipe.vae.decode
    parts.pipe.vae.decode = lambda z, **more: (sizes.append(len(z)), decode(z, **more))[1]
    images = whole.decode(latents)
    torch.testing.assert_close(parts.decode(latents), images, atol=1e-6, rtol=0)
    assert sizes == [2, 2, 1] and {p.dtype for p in narrow.pipe.vae.parameters()} == {
        torch.bfloat16
    }
    rounded = narrow.decode(latents)
    assert rounded.dtype == torch.float32 and 0 < (rounded - images).abs().max() < 0.05


def test_a_condition_has_numbers_of_prompts_that_are_embedded_once(case):
    """Whatever the neighbours, but for padding; conditions of several calls may be joined."""
    policy, alone, embed, texts = case.policy(), case.policy(), None, []
    embed = policy.prompts.encode
    policy.prompts.encode = lambda new: (texts.extend(new), embed(new))[1]
    early, late, both = (policy.encode(prompts) for prompts in (PROMPTS[:1], PROMPTS[1:], PROMPTS))
    assert sorted(texts) == sorted([*TEXTS, ""]) and all(
        tensor.ndim == 1 for tensor in both.tensors.values()
    )
    joined = type(early).cat([early, late])
    assert joined.keys == early.keys | late.keys
    with torch.no_grad():
        assert torch.equal(
            *(policy.velocity(noise_of(policy), TIME, found) for found in (joined, both))
        )
    rows = policy.prompts.rows(both.tensors["prompt"])
    for name, row in alone.prompts.rows(alone.encode(PROMPTS[1:]).tensors["prompt"]).items():
        size = row.shape[1]
        assert torch.equal(row[0], rows[name][1, :size]) and not rows[name][1, size:].any()


def test_only_the_latest_prompts_are_on_the_device(pair):
    policy = pair.policy()
    for start in range(0, 6, 2):
        policy.encode([Prompt(f"number {start}"), Prompt(f"number {start + 1}")])
    policy.warm([Prompt(f"word {n}") for n in range(9)])
    assert len(policy.prompts._table["words"]) == 3


def test_more_prompts_than_the_cache_holds_cost_one_pass(pair, tmp_path, monkeypatch):
    """Ten prompts and the negative one, three of them in main memory: one call of the encoders,
    whatever is used how often, and the same velocities as with room for all.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    policy, roomy = pair.policy(prompt_cache=3), pair.policy()
    prompts, embed, calls = [Prompt(f"number {n}") for n in range(10)], policy.prompts.encode, []
    policy.prompts.encode = lambda texts: (calls.append(len(texts)), embed(texts))[1]
    policy.warm(prompts)
    early, known = policy.encode(prompts[:2]), roomy.encode(prompts[:2])
    for start in (0, 4, 8, 0):
        few = prompts[start : start + 2]
        found = policy.velocity(noise_of(policy), TIME, policy.encode(few))
        assert torch.equal(found, roomy.velocity(noise_of(roomy), TIME, roomy.encode(few)))
    policy.encode(prompts[6:8])
    # of an earlier call
    assert torch.equal(
        *[p.velocity(noise_of(p), TIME, c) for p, c in ((policy, early), (roomy, known))]
    )
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
    policy = case.policy()
    encoders, visits = [getattr(policy.pipe, name) for name in case.family.encoders], []
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


def test_a_warm_cache_needs_no_encoders(pair):
    policy = pair.policy()
    policy.warm(PROMPTS)
    gone = [weakref.ref(getattr(policy.pipe, name)) for name in pair.family.encoders]
    policy.release_encoders()
    gc.collect()
    assert all(encoder() is None for encoder in gone)
    assert torch.equal(velocity(policy), velocity(pair.policy()))
    with pytest.raises(ConfigError, match="'another' is new, but the text encoders were released"):
        policy.encode([Prompt("another")])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_blocks_compute_the_same(dtype):
    """Sampling, the reference and a gradient under checkpointing, where the blocks run again in the
    backward pass.
    """
    results = []
    for backend in ("", "eager"):
        policy = fill(
            CASES["flux"].policy(dtype=dtype, compile=backend, gradient_checkpointing=True)
        )
        condition = policy.encode(PROMPTS)
        with policy.frozen():
            sampled = velocity(policy)
        with policy.reference():
            reference = velocity(policy)
        for count in (2, 1, 2):  # a smaller last batch, then the usual one again
            few = condition.take(torch.arange(count))
            policy.velocity(noise_of(policy, count), TIME[:count], few).square().sum().backward()
        results.append(
            (
                sampled,
                reference,
                *(p.grad for p in policy.trainable().values() if p.grad is not None),
            )
        )
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match="compile = 'nothing'"):
        compile_blocks(policy.transformer, "nothing")


def test_compiled_blocks_are_not_compiled_again_as_a_whole(monkeypatch):
    # nothing is called, so nothing is compiled
    monkeypatch.setattr("flowrl.training.optim._require_compiler", lambda: None)
    blocks, plain = CASES["flux"].policy(compile="eager"), CASES["flux"].policy()
    for policy in (blocks, plain):
        prepare_policy(policy, Distributed(), compiled=True)
    assert blocks.transformer._compiled_call_impl is None
    assert all(
        block._compiled_call_impl is not None for block in blocks.transformer.transformer_blocks
    )
    assert plain.transformer._compiled_call_impl is not None


@pytest.mark.slow
def test_batches_of_many_sizes_are_three_compilations_of_a_block(pair):
    """PyTorch compiles a block for the first size, again with the size as a variable, and for a
    single row; other sizes take the second version, so that padding to a few sizes would save no
    compilation. Both networks have two kinds of blocks.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    policy = fill(pair.policy(compile="eager"))
    condition = policy.encode(PROMPTS[:1])
    for rows in (12, 5, 7, 3, 9, 11, 2, 1, 12, 10):
        with torch.no_grad():
            policy.velocity(
                torch.zeros(rows, *policy.latent_shape),
                TIME[:1].expand(rows),
                condition.repeat(rows),
            )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * 3


def test_a_model_is_loaded_from_its_folder(case, tmp_path):
    pipe = case.make()
    pipe.save_pretrained(tmp_path / "model")
    policy = load_policy(str(tmp_path / "model"), case.options)
    assert type(policy.family) is type(case.family)
    torch.testing.assert_close(
        draw(policy), case.picture(pipe, noise_of(policy)), atol=5e-6, rtol=0
    )
    half = load_policy(str(tmp_path / "model"), replace(case.options, dtype="bfloat16"))
    assert half.pipe.text_encoder.dtype == torch.bfloat16 and half.pipe.vae.dtype == torch.float32
    card = tmp_path / "model" / "model_index.json"
    card.write_text(
        json.dumps({**json.loads(card.read_text()), "_class_name": "PixArtAlphaPipeline"})
    )
    known = "known: StableDiffusion3Pipeline, FluxPipeline, QwenImagePipeline"
    with pytest.raises(ConfigError, match=f"no family for a PixArtAlphaPipeline; {known}"):
        load_policy(str(tmp_path / "model"), TINY)
    with pytest.raises(ConfigError, match=r"no folder with a model_index.json"):
        load_policy(str(tmp_path / "none"), TINY)


@pytest.mark.parametrize("name", ["qwen-image", "wan"])
def test_a_preset_is_planned_trained_and_resumed_and_plain_diffusers_reads_the_lora(
    name, tmp_path, capsys
):
    """With the preset's window, guidance, negative prompt and LoRA targets; videos have motion and
    diversity as metrics.
    """
    case, video = CASES[name], name == "wan"
    (tmp_path / "red.py").write_text(
        "class Red:\n    def score(self, images, prompts): return images[:, 0].mean((1, 2))\n"
    )
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    case.make().save_pretrained(tmp_path / "model")
    red = f"{tmp_path}/red.py:Red"
    settings = {
        "model": tmp_path / "model",
        "prompts": tmp_path / "prompts.txt",
        "heldout-prompts": "",
        "resolution": 16,
        "max-sequence-length": 24,
        "iterations": 2,
        "groups": 2,
        "group-size": 3,
        "eval-samples": 2,
        "eval-steps": 3,
        "lora-rank": 2,
        "learning-rate": 0.03,
        "device": "cpu",
        "dtype": "float32",
        "tracker": "none",
        "reward": f"frame-mean(reward='{red}', frames=2)" if video else red,
        "negative-prompt": "blurry",
        **(
            {
                "width": 16,
                "num-frames": 5,
                "num-steps": 4,
                "heldout-rewards": "motion",
                "diversity": "pixels",
            }
            if video
            else {}
        ),
    }
    model = "wan2.1-t2v-1.3b" if video else name
    words = [
        "train",
        "--preset",
        f"{model},flow-grpo,pickscore",
        *(f"--{key}={value}" for key, value in settings.items()),
    ]
    assert main([*words, "--plan", "--dtype=bfloat16"]) == 0
    told = capsys.readouterr().out
    assert "x 2 (guidance) = " in told and "trained ones" in told
    run = tmp_path / "run"
    assert main([*words, f"--out={run}", "--checkpoint-every=1", "--keep-checkpoints=2"]) == 0
    record, weights = load_run(run), load_file(run / "weights.safetensors")
    assert (
        record.finished
        and [row["trajectories"] for row in record.rows[1:]] == [6, 6]
        and record.rows[1]["grad_norm"] > 0
    )
    if video:
        last = record.rows[-1]["evaluation"]
        assert last["heldout"]["motion"] > 0.01 and last["diversity"] > 0
        sampled = [
            "sample",
            "--weights",
            str(run),
            "--prompts",
            "a dog",
            "--count=2",
            f"--out={run}/grid.png",
            "--trust",
        ]
        assert main(sampled) == 0
        # first, middle and last frame
        assert load_file(run / "samples.safetensors")["after"].shape == (2, 3, 16, 3 * 16)
        card = (run / "README.md").read_text()
        assert "text-to-video" in card and "num_frames=5, " in card and ").frames[0]" in card
        assert main([*words, f"--out={tmp_path}/images", "--reward=jpeg-compressibility"]) == 2
        assert "frame-mean(reward=...)" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--from", "000001", "--trust"]) == 0
    again = load_file(run / "weights.safetensors")
    assert (
        all(torch.equal(again[name], weights[name]) for name in weights) and load_run(run).finished
    )
    policy, _ = trained_policy(run, trust=True)
    plain = case.make()
    base = case.picture(plain, noise_of(policy), policy.guidance_scale)
    plain.load_lora_weights(run / "lora")
    trained = case.picture(plain, noise_of(policy), policy.guidance_scale)
    torch.testing.assert_close(draw(policy), trained, atol=1e-5, rtol=0)
    assert (trained - base).abs().max() > 1e-3
    ends = {name.split(".lora_")[0].split(".", 2)[2] for name in policy.trainable()}
    assert ends == set(case.family.lora_targets) if video else "txt_mlp.net.2" in ends


def test_what_is_wrong_is_said(case, tmp_path):
    for changes, message in (
        ({"height": 15}, "height = 15 is not allowed; allowed: a multiple of"),
        (
            {"lora_targets": ("nowhere",)},
            r"lora_targets = \('nowhere',\) .*no linear layer's name ends with nowhere",
        ),
        (
            {"dtype": "int8"},
            "dtype = 'int8' is not allowed; allowed: one of float32, bfloat16, float16",
        ),
        ({"guidance_scale": 0.5}, "guidance_scale = 0.5"),
        ({"max_sequence_length": 513}, r"max_sequence_length = 513 .* in \[0, 512\]"),
        ({"tuning": "full", "frozen_adapters": ("x",)}, "left out unless tuning is lora"),
        ({"num_frames": 6}, "num_frames = 6"),
    ):
        with pytest.raises(ConfigError, match=message):
            case.policy(**changes)
    pipe = case.make()
    case.policy(pipe)
    with pytest.raises(ConfigError, match="has adapters already"):
        case.policy(pipe)
    with pytest.raises(ConfigError, match="nothing to save"):
        case.policy(tuning="nothing").save(tmp_path / "x")
    other = (tiny_flux, Flux()) if isinstance(case.family, SD3) else (tiny_sd3, SD3())
    with pytest.raises(ConfigError, match="pipeline = "):
        PipelinePolicy(other[0](), case.family, case.options)

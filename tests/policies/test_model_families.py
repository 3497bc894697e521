"""What every model family promises, on tiny random pipelines of the real classes."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from family_cases import (
    CASES,
    PROMPTS,
    TIME,
    config_of,
    draw,
    fill,
    noise_of,
    saved,
    trainer_of,
    velocity,
)
from seeded import seeded
from torch.testing import assert_close

from flowrl.core.errors import CheckpointError, ConfigError, DiskError
from flowrl.core.types import Prompt
from flowrl.methods import METHODS
from flowrl.policies import LORA_TARGETS, PipelinePolicy, has_compiled_blocks, pipeline
from flowrl.run.checkpoint import restore_trainer, trainer_state
from flowrl.run.models import load
from flowrl.run.models.embedded import EmbeddingsFolder
from flowrl.run.models.hub import family_of
from flowrl.run.models.load import load_policy
from flowrl.run.models.prompt_cache import DiskStore
from flowrl.run.plan import plan
from flowrl.testing import policy_contract
from flowrl.testing.tiny import TINY, tiny_flux, tiny_qwen_image21, tiny_sd3

test_qwen_image = policy_contract(
    lambda: CASES["qwen-image"].policy(guidance_scale=4.0, negative_prompt=" ")
)
test_qwen_image21 = policy_contract(
    lambda: CASES["qwen-image-2.1"].policy(
        tiny_qwen_image21(channels=3), guidance_scale=4.0, negative_prompt="blurry"
    ),
    prompts=(
        "a red box",
        "a red car",
    ),  # of one length: the pipeline puts a batch behind the longest
)
test_flux2_klein = policy_contract(lambda: CASES["flux2-klein"].policy(guidance_scale=4.0))
test_z_image = policy_contract(
    lambda: CASES["z-image"].policy(guidance_scale=4.0, negative_prompt="blurry")
)
test_wan = policy_contract(
    lambda: CASES["wan"].policy(guidance_scale=5.0, negative_prompt="blurry")
)
test_wan22 = policy_contract(
    lambda: CASES["wan-2.2"].policy(guidance_scale=5.0, negative_prompt="blurry")
)
test_sana = policy_contract(
    lambda: CASES["sana"].policy(guidance_scale=4.0), call={"use_resolution_binning": False}
)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=["sd3", "flux"])
def pair(request):
    """For promises of the code that all families share."""
    return CASES[request.param]


@pytest.mark.parametrize(
    ("guidance", "height", "width", "steps", "frames"), [(4.5, 32, 16, 5, 9), (1.0, 16, 64, 3, 1)]
)
def test_images_and_grid_are_the_plain_pipelines(case, guidance, height, width, steps, frames):
    """Prompts of different length, in one batch with a negative prompt of a third; 1e-6 is
    rounding.
    """
    more = {"num_frames": frames} if "num_frames" in case.plain else {}
    given = {"guidance_scale": guidance, "negative_prompt": case.negative, **more}
    unit = case.options.resolution // 16
    height, width = unit * height, unit * width
    policy = case.policy(resolution=height, width=width, **given)
    pipe, sizes = case.make(), {"height": height, "width": width, **more}
    plain = case.picture(pipe, noise_of(policy), guidance, steps, **sizes)
    assert_close(draw(policy, steps=steps), plain, atol=5e-6, rtol=0)
    schedule = policy.schedule(steps)
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps)
    assert (plain[0] - plain[1]).abs().max() > 0.1  # the images are not all the same


def test_guidance_and_its_gradient_without_the_negative_branch(case):
    off, on = velocity(case.policy()), case.policy(guidance_scale=3.0)
    velocities, gradients = [], []
    for policy in (on, case.policy(guidance_scale=3.0, guidance_gradient="prompt")):
        velocities.append(velocity(policy))
        loss, weights = (noise_of(policy) * velocities[-1]).mean(), policy.trainable().values()
        parts = torch.autograd.grad(loss, [*weights], materialize_grads=True, allow_unused=True)
        gradients.append(torch.cat([part.flatten() for part in parts]))
    assert_close(*velocities, atol=5e-6, rtol=0)
    assert (gradients[0] - gradients[1]).norm() > 1e-3 * gradients[0].norm()
    with on.guided(1.0):
        assert_close(velocity(on), off, atol=5e-6, rtol=0)
    with pytest.raises(ZeroDivisionError), on.guided(1.0):
        raise ZeroDivisionError
    assert torch.equal(velocity(on), velocities[0])
    assert (off - velocities[0]).abs().max() > 1e-4


def test_positions_of_a_long_prompt_are_exact_in_bfloat16():
    """FLUX.2's tokens have numbers up to 511; bfloat16 would round those above 256."""
    policy, seen = CASES["flux2-klein"].policy(dtype="bfloat16", max_sequence_length=300), []
    policy.transformer.pos_embed.register_forward_pre_hook(lambda _, ids: seen.append(ids[0]))
    velocity(policy)
    tokens = [ids[:, 3].tolist() for ids in seen if len(ids) == 300]
    assert tokens == [[float(n) for n in range(300)]]


def test_two_transformers_by_time(caplog):
    """Wan 2.2: the one for more noise, and for the boundary itself, is trained; the other is frozen
    and has no gradient.
    """
    policy = fill(CASES["wan-2.2"].policy())
    noise, condition = noise_of(policy), policy.encode(PROMPTS)
    rows, boundary = policy.prompts.rows(condition.tensors["prompt"]), policy._boundary
    high, low = (
        policy.family.velocity(network, noise, torch.full((2,), time), rows, policy.latent_size)
        for network, time in ((policy.pipe.transformer, boundary), (policy.pipe.transformer_2, 540))
    )
    assert not any("lora" in name for name, _ in policy.pipe.transformer_2.named_parameters())
    for times in ([boundary, 540.0], [540.0, boundary], [boundary] * 2, [540.0] * 2):
        times = torch.tensor(times)
        early = (times == boundary).view(-1, 1, 1, 1, 1)
        made = policy.velocity(noise, times, condition)
        assert_close(made, torch.where(early, high, low), atol=1e-6, rtol=0)
        options = dict(allow_unused=True, materialize_grads=True, retain_graph=True)
        mine, theirs = (
            torch.autograd.grad(v.square().sum(), [*policy.trainable().values()], **options)
            for v in (made, torch.where(early, high, 0 * high))
        )
        assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert caplog.text.count("below 550 have no gradient") == 1
    lonely = CASES["wan-2.2"].make()
    lonely.transformer_2 = None
    with pytest.raises(ConfigError, match=r"boundary_ratio of the model = 0\.55"):
        CASES["wan-2.2"].policy(lonely)


def test_every_prompt_of_qwen_image_21_has_its_own_position(monkeypatch):
    """A call per length of a prompt, or per row with sharded weights; a grid of the model's own."""
    case = CASES["qwen-image-2.1"]
    policy = case.policy()
    condition, noise, calls = policy.encode([*PROMPTS, PROMPTS[0]]), noise_of(policy, 3), []
    policy.transformer.register_forward_hook(lambda *_: calls.append(1))
    times = torch.tensor([900.0, 500.0, 100.0])
    together = policy.velocity(noise, times, condition)
    assert len(calls) == 2
    monkeypatch.setattr("flowrl.policies.families.is_sharded_network", lambda network: True)
    assert_close(policy.velocity(noise, times, condition), together, atol=1e-6, rtol=0)
    assert len(calls) == 5
    pipe = case.make()
    pipe.register_to_config(sample_sigmas=[1.0, 0.6, 0.3])
    policy = case.policy(pipe)
    case.picture(pipe, noise_of(policy), steps=3)
    assert torch.equal(policy.schedule(3).times, pipe.scheduler.sigmas)
    assert policy.schedule(5).steps == 5
    with pytest.raises(ConfigError, match=r"max_sequence_length = 24 .*does not cut prompts"):
        case.policy(max_sequence_length=24).encode(PROMPTS)


TURNS = (
    *("sd3", "flux", "flux2-klein", "z-image", "qwen-image", "wan"),
    *("qwen-image-2.1", "wan-2.2", "sana"),
)
ROWS = [(TURNS[i % 9], ("float32", "bfloat16")[i // 9 % 2], name) for i, name in enumerate(METHODS)]


@pytest.mark.parametrize(("family", "dtype", "method"), ROWS, ids=METHODS)
def test_train_save_reload_resume(family, dtype, method, tmp_path):
    """Rollouts with probes, updates with a KL, the costs that the plan counts, saving, the same
    image from plain diffusers, and a resume to the bit.

    The root mean square differences from a float32 network with the same rounded weights are
    1.7e-7 and, in bfloat16, 1e-3 (SD3) and 1.8e-2 (FLUX, whose transformer rounds its time input,
    in plain diffusers too). alpha is not the rank, so a reader that forgot the scale would draw
    another image.
    """
    case, wan = CASES[family], family.startswith("wan")
    guidance = 3.0 if dtype == "float32" else 1.0
    changes = {"dtype": dtype, "guidance_scale": guidance, "negative_prompt": case.negative}
    if family in ("sd3", "flux", "qwen-image"):
        changes["lora_targets"] = tuple(name.removeprefix("attn.") for name in LORA_TARGETS)

    def make():
        return trainer_of(fill(case.policy(**changes), std=0.4), method=method)

    trainer, again = make(), make()
    row = trainer.iteration()
    assert row["grad_norm"] > 0 and row["kl"] > 0 and 0 <= row.get("ratio_deviation", 0) < 1e-5
    counts, drawn = vars(plan(config_of(method=method))), method in ("granular-grpo", "tree-grpo")
    for name in ("probe_nfe", "reward_calls", "gradient_nfe", *["nfe"] * (not drawn)):
        assert row[name] == counts[name], name
    state = trainer_state(trainer)
    trainer.iteration()
    restore_trainer(again, state)
    again.iteration()
    for mine, other in (
        (trainer.parameters.values(), again.parameters.values()),
        (trainer.average, again.average),
    ):
        assert all(map(torch.equal, mine, other))
    trainer.policy.save(tmp_path / "lora")
    assert [path.suffix for path in (tmp_path / "lora").iterdir()] == [".safetensors"]
    loaded = case.policy(**changes, adapter=str(tmp_path / "lora")).trainable()
    assert_close(loaded, trainer.policy.trainable(), atol=0, rtol=0)
    pipe, noise = case.make(), noise_of(trainer.policy)
    if not wan or dtype == "float32":  # whose layers in float32 are not rounded
        pipe.transformer.to(getattr(torch, dtype)).to(torch.float32)
    base = case.picture(pipe, noise, guidance)
    pipe.load_lora_weights(tmp_path / "lora")
    plain = case.picture(pipe, noise, guidance)
    narrow = 1e-2 if family == "qwen-image-2.1" else 2e-2  # whose tiny decoder is weak
    error = 1e-6 if dtype == "float32" else narrow
    assert (draw(trainer.policy) - plain).square().mean().sqrt() < error
    assert (plain - base).square().mean().sqrt() > 2 * error  # a lost adapter would show


def test_a_lora_of_plain_diffusers_is_taken_up_with_its_own_alpha(pair, tmp_path):
    from peft import LoraConfig, get_peft_model_state_dict

    pipe, settings = pair.make(), {"r": 2, "lora_alpha": 6, "target_modules": ["to_k", "to_q"]}
    pipe.transformer.add_adapter(LoraConfig(init_lora_weights=False, **settings))
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.1, generator=seeded(len(name)))
    layers = get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(
        tmp_path, transformer_lora_layers=layers, transformer_lora_adapter_metadata=settings
    )
    options = {"lora_targets": ("to_q", "to_k"), "adapter": str(tmp_path)}
    policy = pair.policy(lora_rank=2, lora_alpha=2.0, **options)
    picture = pair.picture(pipe, noise_of(policy))
    assert_close(draw(policy), picture, atol=5e-6, rtol=0)
    for changes, message in (
        ({"lora_rank": 1}, "lora_rank: its rank is 2, lora_rank is 1; allowed: 2 or more"),
        (
            {"lora_targets": ("to_q", "to_v")},
            r"lora_targets or the model: .* are not trained, such as .*to_k; trained .* such as",
        ),
    ):
        with pytest.raises(CheckpointError, match=f"does not match {message}"):
            pair.policy(**{"lora_rank": 2, **options, **changes})
    with pytest.raises(CheckpointError, match="does not exist"):
        pair.policy(adapter=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": 5, "lora_alpha": 3.0},
        {"lora_rank": 3, "lora_targets": ("to_q", "to_k", "to_v")},
        {"tuning": "full"},
        {"fixed": True},
    ],
)
def test_training_starts_from_a_lora_of_another_rank(pair, tmp_path, changes, caplog):
    """Of a lower rank, of fewer layers; with full fine-tuning, as a part of the weights."""
    first = fill(pair.policy(lora_rank=2, lora_targets=("to_q", "to_k")), std=0.2)
    first.save(tmp_path)
    policy = pair.policy(**{"lora_targets": ("to_q", "to_k"), **changes}, adapter=str(tmp_path))
    assert_close(velocity(policy).detach(), velocity(first).detach(), atol=5e-6, rtol=0)
    missing = changes.get("lora_targets", ())[2:]
    assert ("lacks" in caplog.text and "start at 0" in caplog.text) == bool(missing)
    if not changes.get("fixed"):
        trainer_of(policy).iteration()
        with policy.reference():  # the base model, without the LoRA
            base = velocity(pair.policy(fixed=True))
            assert_close(velocity(policy), base, atol=1e-6, rtol=0)


def test_a_policy_has_other_weights_for_a_while(pair, tmp_path):
    """LoRAs of any rank, one after the other, and all weights of a transformer."""
    fixed = pair.policy(fixed=True)
    base, cases = velocity(fixed), []
    for rank, targets in ((2, ("to_q",)), (4, ("to_k", "to_v"))):
        trained = fill(pair.policy(lora_rank=rank, lora_targets=targets), std=0.2)
        cases.append((trained, trained.adapters.tensors()))
    full = pair.policy(tuning="full")
    trainer_of(full).iteration()
    cases.append((full, {name: p.detach() for name, p in full.transformer.named_parameters()}))
    for trained, tensors in [*cases, *reversed(cases)]:
        with fixed.weights(tensors):
            assert_close(velocity(fixed), velocity(trained).detach(), atol=5e-6, rtol=0)
            assert (velocity(fixed) - base).abs().max() > 1e-3
        assert torch.equal(velocity(fixed), base)
    with (
        pytest.raises(CheckpointError, match="another model"),
        fixed.weights({"nowhere.lora_A.weight": torch.ones(2, 4)}),
    ):
        pass
    assert torch.equal(velocity(fixed), base)


def test_a_lora_of_another_model_is_named(pair):
    """With other layers, or with other widths of the same ones."""
    policy = pair.policy()
    tensors = policy.adapters.tensors()
    name = next(name for name in tensors if "lora_A" in name)
    wide = {**tensors, name: torch.ones(4, 7)}
    for other, message in (
        (wide, rf"{name} is \[4, 7\], in_features is \d+; it is a LoRA of another model"),
        ({"blocks.0.x.lora_A.weight": torch.ones(4, 8)}, "the model has no such layer"),
    ):
        with pytest.raises(CheckpointError, match=message):
            policy.adapters.load(other)
    own = policy.adapters.tensors()
    assert all(torch.equal(own[name], tensors[name]) for name in tensors)


def test_full_fine_tuning_and_its_reference(pair, tmp_path):
    policy = pair.policy(tuning="full")
    base = velocity(policy).detach()
    trainer_of(policy).iteration()
    with torch.no_grad():
        assert (velocity(policy) - base).abs().max() > 1e-3
    with policy.reference():
        assert_close(velocity(policy), base, atol=0, rtol=0)
    policy.save(tmp_path)
    plain = pair.make()
    plain.transformer = type(plain.transformer).from_pretrained(tmp_path / "transformer")
    assert_close(pair.picture(plain, noise_of(policy)), draw(policy), atol=5e-6, rtol=0)
    with (
        pytest.raises(ConfigError, match="keep_reference"),
        pair.policy(tuning="full", keep_reference=False).reference(),
    ):
        pass


def test_narrow_networks_with_float32_around_them(pair):
    policy = pair.policy(dtype="bfloat16", tuning="full")
    exact, narrow = velocity(pair.policy(fixed=True)), velocity(policy)
    assert narrow.dtype == torch.float32
    assert 0 < (narrow - exact).norm() / narrow.norm() < 0.05
    assert {p.dtype for p in policy.transformer.parameters()} == {torch.float32}


def test_gradient_checkpointing_changes_nothing(case):
    gradients = []
    for checkpointing in (False, True):
        options, calls = dict(gradient_checkpointing=checkpointing, dtype="bfloat16"), []
        policy = fill(case.policy(**options))
        policy.adapters.layers[0].register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        loss = velocity(policy).square().sum()
        passes = len(calls)
        with policy.reference():  # in between, as a KL term has it
            velocity(policy)
        loss.backward()
        assert len(calls) == (2 + checkpointing) * passes  # again in the backward pass
        gradients.append([p.grad for p in policy.trainable().values() if p.grad is not None])
    assert len(gradients[0]) > 0
    assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_pictures_are_decoded_in_small_batches_and_in_the_decoders_precision(pair):
    parts, narrow = pair.policy(decode_batch=2), pair.policy(decode_dtype="bfloat16")
    latents, sizes, decode = noise_of(parts, 5), [], parts.pipe.vae.decode
    parts.pipe.vae.decode = lambda z, **more: (sizes.append(len(z)), decode(z, **more))[1]
    images, rounded = parts.decode(latents), narrow.decode(latents)
    assert sizes == [2, 2, 1]
    assert_close(images, pair.policy().decode(latents), atol=1e-6, rtol=0)
    assert {p.dtype for p in narrow.pipe.vae.parameters()} == {torch.bfloat16}
    assert rounded.dtype == torch.float32 and 0 < (rounded - images).abs().max() < 0.05
    tiled = pair.policy(decode_tiling=True)
    assert tiled.pipe.vae.use_tiling and not parts.pipe.vae.use_tiling


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_are_frozen_under_a_lora(pair, dtype, tmp_path):
    """int8 changes velocities slightly; sampling and training have the same weights."""
    pair.make().save_pretrained(tmp_path)
    options = replace(pair.options, dtype=dtype)
    exact = fill(load_policy(str(tmp_path), options))
    pytest.importorskip("torchao")
    policy = fill(load_policy(str(tmp_path), replace(options, quantize="int8")))
    kinds = {type(p.data).__name__ for p in policy.transformer.parameters()}
    assert kinds == {"Int8Tensor", "Tensor"}
    rounded, expected = velocity(policy).detach(), velocity(exact)
    assert 0 < (rounded - expected).norm() / expected.norm() < 0.05
    with policy.frozen():
        assert torch.equal(velocity(policy), rounded)
    assert policy.trainable().keys() == exact.trainable().keys()
    assert trainer_of(policy).iteration()["grad_norm"] > 0
    assert not torch.equal(velocity(policy), rounded)


@pytest.mark.parametrize(
    ("kind", "found", "message"),
    [("int8", None, "torchao: pip install torchao"), ("nf4", True, "int8 on the CPU")],
)
def test_quantisation_that_cannot_be_is_refused(kind, found, message, monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match=message):
        load.quantization(replace(TINY, quantize=kind))


def on_disk(policy, limit=2048):
    """The policy, with its embeddings in a temporary folder."""
    folder = EmbeddingsFolder(policy.pipe, policy.family, lambda: None)
    policy.prompts.store = DiskStore(folder, limit)
    return policy


def test_more_prompts_than_the_cache_holds_cost_one_pass(tmp_path, monkeypatch):
    """Ten prompts and the negative one, three of them in main memory, and those of the latest call
    on the device: one call of the encoders, and the same velocities as with room for all.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    both = [on_disk(CASES["sd3"].policy(), 3), CASES["sd3"].policy()]
    cache, prompts, calls = both[0].prompts, [Prompt(f"number {n}") for n in range(10)], []
    embed = cache.encode
    cache.encode = lambda texts: (calls.append(len(texts)), embed(texts))[1]
    both[0].warm(prompts)
    conditions = [[p.encode(prompts[i : i + 2]) for p in both] for i in (0, 4, 8, 0)]
    assert len(cache._table["words"]) == 3
    for given in conditions:  # of earlier calls, too
        noise = noise_of(both[1])
        few, all_kept = (p.velocity(noise, TIME, c) for p, c in zip(both, given, strict=True))
        assert torch.equal(few, all_kept)
    assert calls == [11] and len(cache.store._memory) == 3
    assert len(list(tmp_path.glob("flowrl-prompts-*/*"))) == 11
    del both, cache, embed
    gc.collect()
    assert list(tmp_path.glob("flowrl-*")) == []


def test_a_full_disk_is_one_clear_line(monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    policy = on_disk(CASES["sd3"].policy())
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=9999))
    with pytest.raises(DiskError, match=r"/flowrl-prompts-.*: 0\.00 GB needed, 0\.00 .*TMPDIR"):
        policy.warm(PROMPTS)
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(DiskError, match=r"/flowrl-.*: No space left on device; set FLOWRL_CACHE"):
        policy.warm(PROMPTS)


@pytest.mark.satellite
def test_embeddings_on_disk_are_found_again(case, tmp_path, monkeypatch):
    """By a policy of the same text encoders, precision and length, whatever its transformer; it
    does not load its encoders unless a file is damaged or deleted.
    """
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    pipe, asked, loads, embed = case.make(), [Prompt(""), *PROMPTS], [], PipelinePolicy._embed
    saved(case, tmp_path / "model")
    watched = lambda self, some: loads.append(some) or embed(self, some)  # noqa: E731
    monkeypatch.setattr(PipelinePolicy, "_embed", watched)

    def table(**changes):
        policy = load_policy(str(tmp_path / "model"), replace(case.options, **changes))
        found = policy.prompts.rows(torch.tensor(policy.prompts.numbers(asked)))
        assert all(getattr(policy.pipe, name) is None for name in case.family.encoders)
        return found

    first, files = table(), sorted(tmp_path.glob("cache/prompts/*/*"))
    assert len(files) == 3 and loads == [asked]
    pipe.transformer.requires_grad_(False)
    next(pipe.transformer.parameters()).add_(1)
    pipe.transformer.save_pretrained(tmp_path / "model" / "transformer")
    for embedded in (0, 2):
        loads.clear()
        for name, tensor in table().items():
            assert_close(tensor, first[name], atol=1e-6 * embedded, rtol=0)
        assert [len(some) for some in loads] == [1] * embedded
        files[0].write_bytes(files[0].read_bytes()[:-1] + b"!")
        files[1].unlink()
    encoder = getattr(pipe, case.family.encoders[-1]).requires_grad_(False)
    next(encoder.parameters()).add_(1)
    encoder.save_pretrained(tmp_path / "model" / case.family.encoders[-1])
    loads.clear()
    shorter = [{"max_sequence_length": 20}] * bool(case.options.max_sequence_length)
    changes = [*shorter, {"dtype": "bfloat16"}, {"dtype": "float32"}]
    for some in changes:
        table(**some)
    assert loads == [asked] * len(changes)


def test_encoders_wait_in_main_memory_also_after_a_failure(pair, monkeypatch):
    policy, visits = pair.policy(), []
    encoders = [getattr(policy.pipe, name) for name in pair.family.encoders]
    for encoder in encoders:
        monkeypatch.setattr(encoder, "to", lambda place: visits.append(str(place)))
    # another name for the same place, to tell coming from going
    policy.device = torch.device("cpu", 0)
    visit = ["cpu:0"] * len(encoders) + ["cpu"] * len(encoders)
    policy.encode(PROMPTS)
    policy.encode(PROMPTS)
    assert visits == visit
    monkeypatch.setattr(type(policy.family), "encode", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.encode([Prompt("new")])
    assert visits == visit * 2


@pytest.mark.slow
def test_compiled_blocks_compute_the_same(monkeypatch):
    """Sampling, the reference and a gradient under checkpointing, where the blocks run again in the
    backward pass.
    """
    results = []
    monkeypatch.setattr(pipeline, "COMPILER", "eager")
    for compiled in (False, True):
        policy = fill(CASES["flux"].policy(compile=compiled, gradient_checkpointing=True))
        assert has_compiled_blocks(policy.transformer) == compiled
        condition = policy.encode(PROMPTS)
        with policy.frozen():
            sampled = velocity(policy)
        with policy.reference():
            reference = velocity(policy)
        for count in (2, 1, 2):  # a smaller last batch, then the usual one again
            few = condition.take(torch.arange(count))
            policy.velocity(noise_of(policy, count), TIME[:count], few).square().sum().backward()
        gradients = [p.grad for p in policy.trainable().values() if p.grad is not None]
        results.append([sampled, reference, *gradients])
    assert_close(*results, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sd3", {"resolution": 68}, "height = 68 .* a multiple of 4, at most 64"),
        ("wan", {"lora_targets": ("nowhere",)}, r"lora_targets = \('nowhere',\)"),
        ("sd3", {"tuning": "full", "frozen_adapters": "x"}, "none unless tuning is lora"),
        (
            "sd3",
            {"tuning": "full", "quantize": "int8"},
            "quantize = .int8.*none unless tuning is lora",
        ),
        ("sd3", {"load_to": "cpu", "quantize": "int8"}, "quantize = .*none with sharded weights"),
        ("sd3", {"num_frames": 6}, "num_frames = 6 .*makes images"),
        ("wan-2.2", {"load_to": "cpu"}, "weights = 'sharded.*whole, not sharded"),
        ("wan", {"num_frames": 6}, "num_frames = 6 .* 1 more than a multiple of 4"),
    ],
)
def test_wrong_options_are_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        CASES[name].policy(**changes)


def test_wrong_pipelines_and_models_are_refused(tmp_path):
    pipe = tiny_sd3()
    pipe.save_pretrained(tmp_path)
    policy = CASES["sd3"].policy(pipe)
    with pytest.raises(ConfigError, match=r"adapters of the model = \{'default'\}"):
        CASES["sd3"].policy(pipe)
    with pytest.raises(ConfigError, match="nothing to save"):
        CASES["sd3"].policy(fixed=True).save(tmp_path / "x")
    with pytest.raises(ConfigError, match="pipeline = 'FluxPipeline'"):
        PipelinePolicy(tiny_flux(), policy.family, policy.options)
    card = tmp_path / "model_index.json"
    card.write_text(card.read_text().replace("StableDiffusion3Pipeline", "PixArtAlphaPipeline"))
    supported = r"PixArtAlphaPipeline is not supported; supported pipelines: Stable.*, WanPipeline"
    add = r"docs/model-families\.md shows how to add one, a family in six functions"
    nearest = "; the nearest is Flux, with the same AutoencoderKL, T5EncoderModel$"
    with pytest.raises(ConfigError, match=rf"{supported}.*; {add}{nearest}"):
        load_policy(str(tmp_path), TINY)
    for name, family in {
        "WanVACEPipeline": "Wan",
        "Flux2Pipeline": "Flux2Klein",
        "QwenImageEditInpaintPipeline": "QwenImageEdit",
        "SanaSprintPipeline": "Sana",
    }.items():
        with pytest.raises(ConfigError, match=f"{name} is not .*the nearest is {family}, with"):
            family_of(name)
    with pytest.raises(ConfigError, match=f"{add}$"):
        family_of("UnknownPipeline")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, r"is a folder without a readable model_index\.json"),
        (lambda folder: folder / "none", "does not exist; allowed: the folder of a pipeline"),
        (
            lambda folder: "owner/model",
            r"downloads are off: set HF_HUB_OFFLINE=0, or .*hf download owner/",
        ),
    ],
)
def test_a_model_in_another_format_is_refused_with_a_remedy(make, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_policy(str(make(tmp_path)), TINY)

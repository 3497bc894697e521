"""Published sizes counted on shapes alone, and their memory: against sums by hand, and what must
grow with what.
"""

import gc
import itertools
import json
from collections import Counter
from dataclasses import astuple, replace

import pytest
import torch
import yaml
from loading import ROOT
from small_run import TINY_MODEL

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.policies import Adapters
from flowrl.rewards import FunctionReward
from flowrl.run.build import build_trainer, make_method, policy_options
from flowrl.run.config import preset
from flowrl.run.io import cache_folder
from flowrl.run.models import memory
from flowrl.run.models.memory import ARCHITECTURES, StorageCounter, architecture_of
from flowrl.run.plan import (
    CARDS,
    memory_text,
    named_card,
    plan,
    planned_and_measured,
    sized,
    times,
    times_text,
)
from flowrl.run.plan import memory as count_plan
from flowrl.testing.tiny import TINY, tiny_flux_policy, tiny_sd3, tiny_sd3_policy


@pytest.mark.satellite
@pytest.mark.parametrize(
    ("name", "billion", "layers", "tokens"),
    [
        ("sd3.5-medium", 2.47, 191, 333),
        ("flux.1-dev", 11.9, 266, 512),
        ("qwen-image", 20.4, 480, 512),
        ("wan2.1-t2v-1.3b", 1.42, 240, 512),
        ("wan2.2-t2v-a14b", 14.3, 320, 512),
        ("sana_1600m", 1.6, 160, 300),
        ("flux.1-kontext-dev", 11.9, 266, 512),
        ("qwen-image-edit-2509", 20.4, 480, 300),
    ],
)
def test_sizes_are_the_published_ones(name, billion, layers, tokens):
    """As the model cards say; with SD3's table of positions, which is not trained."""
    known = ARCHITECTURES[name]
    network = known.build()
    tensors = [*network.parameters(), *network.buffers()]
    assert sum(t.numel() for t in tensors if t.is_meta) / 1e9 == pytest.approx(billion, rel=0.01)
    adapters = Adapters(network.requires_grad_(False))
    adapters.add(32, 64.0, known.family.lora_targets, seed=0)
    assert len(adapters.layers) == layers
    if name == "flux.1-dev":  # as Flow-GRPO's code has it
        trained = sum(p.numel() for p in adapters.parameters().values())
        assert trained / 1e6 == pytest.approx(52.3, abs=0.05)
    assert known.clip_tokens + known.family.text_tokens == tokens
    widths = ("joint_attention_dim", "caption_channels")
    width = next((network.config[name] for name in widths if name in network.config), 4096)
    assert known.text_width == width
    assert architecture_of(f"somewhere/{name}") is known


@pytest.mark.satellite
def test_a_plan_counts_what_its_settings_say(tmp_path, monkeypatch):
    """Rows of a call that is smaller than max_batch; both branches' gradient or one; the prompt's
    length; all images that are scored together; no trajectories if they wait in main memory.
    """
    tiny_sd3().save_pretrained(tmp_path)
    sizes = dict(resolution=32, groups=2, group_size=3, max_batch=4, micro_batch=2, lora_rank=4)
    sizes |= dict(eval_samples=1, decode_batch=2, max_sequence_length=24, guidance_gradient="both")
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(
        model=str(tmp_path), dtype="bfloat16", **sizes
    )

    def counted(**changes):
        changed = config.replace(**changes)
        return count_plan(plan(changed), changed)

    assert plan(config).rows_per_call == 2 * 4
    assert plan(config.replace(max_batch=100)).rows_per_call == 2 * 6
    base = counted()
    assert base.trained == memory.OPTIMIZER_BYTES * base.trained_parameters
    phases = max(base.update, base.rollout, base.decode)
    permanent = base.weights + base.trained + base.trajectories
    assert base.peak == base.encoders > permanent + phases  # they embed alone
    assert replace(base, encoders=0).peak == permanent + phases
    frozen = counted(frozen_adapters="style.safetensors")  # it may have a part for the encoders
    assert frozen.peak - base.peak == base.weights + base.trained
    full = counted(tuning="full")
    assert full.trained == memory.OPTIMIZER_BYTES * full.trained_parameters
    assert full.trained > base.trained and full.weights >= base.weights
    assert counted(gradient_checkpointing=False).update > 1.2 * base.update
    assert counted(micro_batch=4).update > 1.5 * base.update
    assert base.trajectories == 6 * 21 * 4 * 16 * 16 * 4
    assert counted(offload=True).trajectories == 0
    assert counted(guidance_gradient="prompt").update < 0.7 * base.update
    assert counted(max_sequence_length=48).update > 1.1 * base.update
    assert counted(lora_targets=("to_q",)).trained == base.trained // 15 * 3
    assert counted(groups=10).decode - counted(groups=5).decode == 5 * 3 * 3 * 32 * 32 * 4
    assert counted(decode_dtype="bfloat16").decode < base.decode
    assert "not measured" in memory_text(plan(config), config)
    assert memory_text(plan(config), config.replace(model="some/other-model")) == ""
    network, every = tiny_sd3().transformer, config.replace(tuning="full")
    modules = network, *network.transformer_blocks
    whole, *blocks = (sum(p.numel() for p in m.parameters()) for m in modules)
    block = max(blocks)
    outside = whole - sum(blocks) + 2 * block
    for launch, gathered in (("fsdp2", outside), ("zero2", 2 * whole)):  # its reference, too
        shard = count_plan(plan(every, 4, launch), every)
        assert shard.trained == full.trained // 4 and shard.gathered == 2 * gathered + 6 * block
        assert full.weights - shard.weights == pytest.approx(1.5 * whole, rel=0.1)
    assert "fsdp2 stores 1 / 4 in each" in memory_text(plan(every, 4, "fsdp2"), every)
    more = policy_options(config.replace(lora_rank=5))
    wide = memory.counts_of(architecture_of(str(tmp_path)), more)
    monkeypatch.setattr(memory, "count", lambda *_: wide)
    assert counted() == base  # stored, unless the file is damaged
    for file in (cache_folder() / "counts").iterdir():
        file.write_text("[1, 2]")
    assert counted().trained > base.trained


@pytest.mark.satellite
def test_presets_fill_a_card_and_dispatch_few_operations():
    """At most 1,000 operations per pair in 72 GB; fewer rows fit into 24 GB. Not measured."""
    for card, full, least, most in (("H100", 0.85, 700, 1000), ("RTX 4090", 0.55, 6000, 7000)):
        config = sized(preset("sd3.5-medium,flow-grpo,ocr").apply(planned=True), card)
        counts = plan(config)
        counted = count_plan(counts, config)
        assert full * CARDS[card].memory < counted.peak <= 0.9 * CARDS[card].memory
        assert counts.rows_per_call == counts.rows_per_micro_batch == config.batches.rows > 1
        assert least < times(counts, config, counted, card).operations <= most
    assert "bottleneck         update, 68%" in times_text(counts, config, card)
    # 77 + 128 tokens of width 4,096, and 2,048 pooled numbers in float16
    assert "1,265 prompts x 1.7 MB = 2.1 GB" in memory_text(counts, config)
    assert not times_text(counts, config.replace(model="unknown"), card)
    large = sized(preset("flux.1-dev,flow-grpo,ocr").apply(planned=True), card)
    shown = times_text(plan(large), large, card)
    assert "does not fit       29.2 GB of 24" in shown and "hours" not in shown
    assert shown.endswith("remedy             with --quantize nf4 it needs 11.3 GB")
    nf4 = sized(preset("flux.1-dev,flow-grpo,ocr").apply(planned=True, quantize="nf4"), "24GB")
    assert "speed is unknown" in times_text(plan(nf4), nf4, "24GB")
    many = nf4.replace(decode_batch=8, gradient_checkpointing=False, micro_batch=8)
    options = "with --gradient-checkpointing True it needs 17.0 GB"
    assert options in times_text(plan(many), many, "RTX 3090")
    assert "GB also with --decode-batch 1 --gradient" in times_text(plan(nf4), nf4, "10 GB")


def test_images_are_decoded_in_batches_that_fit(monkeypatch):
    """8 images take 6.7 GB, 4 take 3.5; without text encoders, which embed alone and need 11."""
    known = replace(ARCHITECTURES["sd3.5-medium"], encoder_parameters=0)
    monkeypatch.setattr("flowrl.run.plan.known_architecture", lambda config: known)
    rows = {"micro_batch": 1, "max_batch": 1, "gradient_checkpointing": True}
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(planned=True, **rows)
    for card, count in (("20GB", 8), ("12GB", 4), ("8GB", 1)):
        assert sized(config, card).batches.decode_batch == count
    config = config.replace(decode_batch=8)
    shown = times_text(plan(config), config, "9 GB")
    assert shown.endswith("remedy             with --decode-batch 1 it needs 7.3 GB")
    for card in ("RTX 9", "0GB", "GB"):
        with pytest.raises(ConfigError, match=r"allowed: one of B200, .* as in 16GB"):
            sized(config, card)


@pytest.mark.satellite
@pytest.mark.parametrize("file", sorted((ROOT / "flowrl/presets/models").glob("*.yaml")), ids=str)
def test_presets_state_the_least_memory_that_the_plan_counts(file):
    least = dict(micro_batch=1, max_batch=1, gradient_checkpointing=True, decode_batch=1)
    about = yaml.safe_load(file.read_text())["about"]
    task, stated = "edits" if "edits" in about else "pickscore", about["memory"]
    if stated.startswith("unknown"):  # see docs/models/qwen-image-and-wan.md
        return
    config = preset(f"{file.stem},flow-grpo,{task}").apply(planned=True, compile=False, **least)
    assert f"computed {count_plan(plan(config), config).peak / 1e9:.0f} GB or more" in stated


@pytest.mark.satellite
def test_the_stored_counts_are_those_of_the_tested_diffusers():
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(planned=True)
    known, chosen = ARCHITECTURES["sd3.5-medium"], policy_options(config)
    stored = memory.preset_counts()[memory.counts_key(known, chosen)]
    assert json.loads(json.dumps(astuple(memory.count(known, chosen)))) == stored


SMALL = {**TINY_MODEL, "lora_rank": 4}
# its old network differs from the current one after an update
LATE = {"loss": "dgpo(beta_dpo=1.0, clip=0.01, decay=(0, 0.3, 0.6), times=steps(count=4, steps=7))"}


@pytest.mark.satellite
@pytest.mark.parametrize(
    ("method", "changes", "micro"),
    [("flow-grpo", {"guidance_gradient": "prompt"}, 6), ("flow-grpo", {}, 3), ("dgpo", LATE, 24)],
    ids=["prompt", "both", "unguided"],
)
def test_the_network_is_called_as_often_as_the_plan_counts(method, changes, micro, tmp_path):
    pipe = tiny_sd3()
    pipe.save_pretrained(tmp_path)
    config = preset(f"sd3.5-medium,{method},ocr").apply(
        model=str(tmp_path), groups=2, group_size=6, micro_batch=micro, max_batch="auto", **SMALL
    )
    config = config.replace(drop_zero_advantages=False, **{"guidance_gradient": "both", **changes})
    counts = plan(config)
    counted = count_plan(counts, config)
    policy = tiny_sd3_policy(policy_options(config))
    calls = Counter()
    count = lambda *_: calls.update([torch.is_grad_enabled()])  # noqa: E731
    policy.transformer.register_forward_pre_hook(count)
    red = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)))
    trainer = build_trainer(config, policy, make_method(config), red, [Prompt("a dog")])
    trainer.iteration()  # in the first one an old network may be the current one
    calls.clear()
    trainer.iteration()
    work = (calls[False], counted.forward_operations), (calls[True], counted.gradient_operations)
    operations = sum(number * each for number, each in work) / counts.evaluations
    assert times(counts, config, counted, "L4").operations == pytest.approx(operations)


def test_a_finished_run_has_planned_and_measured_seconds():
    names = (
        "H100 80GB HBM3",
        "A100-SXM4-80GB",
        "GeForce RTX 4090",
        "L40S",
        "RTX 6000 Ada Generation",
        "T4",
    )
    cards = [named_card(f"NVIDIA {name}") for name in names]
    assert cards == ["H100", "A100", "RTX 4090", "L40S", "RTX 6000 Ada", ""]
    config = sized(preset("sd3.5-medium,flow-grpo,ocr").apply(planned=True), "L4")
    phases = {"rollout": 20.0, "decode": 0.5, "reward": 1.5, "update": 30.0}
    rows = [{"iteration": n, "phases": {k: n * v for k, v in phases.items()}} for n in range(3)]
    shown = planned_and_measured(config, rows, "L4")
    assert "planned, 33.00 s measured" in shown and "planned, 45.00 s measured" in shown
    assert not planned_and_measured(config.replace(model="unknown"), rows, "L4")


@pytest.mark.parametrize(
    ("make", "train"), [(tiny_sd3_policy, True), (tiny_flux_policy, False)], ids=["sd3", "flux"]
)
def test_the_counter_agrees_with_the_allocators_records(make, train):
    """PyTorch's profiler records what the allocator of the CPU does; its sum contains operations'
    work space too.
    """
    policy = make(replace(TINY, resolution=64, gradient_checkpointing=train))
    condition = policy.encode([Prompt("a dog")] * 8)
    noise, time = torch.randn(8, *policy.latent_shape), torch.full((8,), 500.0)

    def once():
        with torch.set_grad_enabled(train):
            velocity = policy.velocity(noise, time, condition)
            if train:
                velocity.square().mean().backward()
        policy.transformer.zero_grad()

    once()
    gc.collect()  # what earlier tests left must not be freed in between
    with StorageCounter("cpu") as counter:
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):
                counter.add(item)
        before = counter.largest
        once()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as records:
        once()
    events = records.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    peak = max(itertools.accumulate(changes))
    assert counter.largest - before == pytest.approx(peak, rel=0.02)

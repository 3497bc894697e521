"""Counting operations against closed forms, the meter, and the benchmark of full-size models at the
size of a toy.
"""

import json
import subprocess
import sys
from dataclasses import replace

import gpu
import gpu_cases
import pytest
import torch
from gpu_cases import RandomEmbeddings, random_pipeline
from gpu_compute import (
    Meter,
    MeteredFamily,
    NetworkCost,
    PhaseWork,
    matrix_product_ceiling,
    network_cost,
    share_of_ceiling,
)

from flowrl.core.types import Prompt
from flowrl.policies import ARCHITECTURES, SD3, PipelinePolicy
from flowrl.testing.tiny import (
    CLIP_TOKENS,
    TINY,
    WIDTH,
    tiny_flux_policy,
    tiny_sd3,
    tiny_sd3_policy,
)


def cost_of(policy):
    return network_cost(
        policy, policy.prompts.rows(policy.encode([Prompt("a dog")]).tensors["prompt"])
    )


def closed_form(rank):
    """Forward and backward operations of `tiny_sd3` at 16 x 16 pixels, by hand. Width D, I image
    tokens, W words, rank r.

    Layer 0 has a second attention of the image without a LoRA, layer 1 is the last: of its text
    stream only q, k, v are used. Nothing before layer 0's first adapters has a gradient: its q, k,
    v need none with respect to their inputs, and its second attention needs none at all.
    """
    d, i, w, r = 32, 16, CLIP_TOKENS + TINY.max_sequence_length, rank
    joint = i + w
    linear = lambda n, a, b: 2 * n * a * b  # noqa: E731
    attention = lambda n: 2 * 2 * n * n * d  # noqa: E731
    embeddings = (
        linear(i, 4 * 2 * 2, d)
        + linear(1, 256, d)
        + linear(1, 2 * WIDTH, d)
        + 2 * linear(1, d, d)
        + linear(w, 2 * WIDTH, d)
    )
    modulations = linear(1, d, 9 * d) + 2 * linear(1, d, 6 * d) + 2 * linear(1, d, 2 * d)
    projected = [i] * 4 + [w] * 4 + [i] * 4 + [w] * 3  # tokens of every adapted layer
    second = 4 * linear(i, d, d)
    feed = 2 * (linear(i, d, 4 * d) * 2) + 2 * linear(w, d, 4 * d)
    out = linear(i, d, 2 * 2 * 4)
    attended = 2 * attention(joint) + attention(i)
    base = sum(linear(n, d, d) for n in projected)
    unit = sum(linear(n, d, r) for n in projected)
    forward = embeddings + modulations + base + second + 2 * unit + feed + attended + out
    first = [i, i, i, w, w, w]  # q, k, v of layer 0: the image and the words
    inputs = base - sum(linear(n, d, d) for n in first)
    lora = 4 * unit - sum(linear(n, d, r) for n in first)
    return forward, inputs + lora + feed + 2 * (attended - attention(i)) + out


@pytest.mark.parametrize("rank", [1, 4])
def test_operations_are_those_of_the_closed_form(rank):
    cost = cost_of(tiny_sd3_policy(replace(TINY, lora_rank=rank)))
    assert (cost.forward, cost.backward) == closed_form(rank)


def test_frozen_weights_cost_no_weight_gradients_and_recomputation_does_not_count():
    """All weights: gradients of activations and of weights, twice the forward pass. A LoRA: of
    activations, and little more.
    """
    plain, full = cost_of(tiny_sd3_policy()), cost_of(tiny_sd3_policy(replace(TINY, tuning="full")))
    assert full.backward > 1.9 * full.forward and plain.backward < 1.3 * plain.forward
    assert cost_of(tiny_sd3_policy(replace(TINY, gradient_checkpointing=True))) == plain
    assert cost_of(tiny_sd3_policy(replace(TINY, tuning="nothing"))).backward == 0
    assert cost_of(tiny_flux_policy()).backward > 0


def metered(make=tiny_sd3_policy, **changes):
    policy = make(replace(TINY, **changes))
    meter = Meter(policy.device)
    policy.family = MeteredFamily(policy.family, meter)
    meter.watch(list(policy.trainable().values()))
    return policy, meter


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_meter_counts_latents_and_the_networks_time(checkpointing, guidance):
    policy, meter = metered(gradient_checkpointing=checkpointing, guidance_scale=guidance)
    noise, told = torch.randn(3, *policy.latent_shape), torch.full((3,), 500.0)
    condition = policy.encode([Prompt("a")] * 3)
    factor = 2 if guidance > 1 else 1
    meter.phase("rollout")
    with policy.frozen():
        policy.velocity(noise, told, condition)
    meter.phase("update")
    for _ in range(2):
        policy.velocity(noise, told, condition).square().sum().backward()
    meter.phase("rollout")
    meter.phase("")
    assert (meter.work["rollout"].sampled, meter.work["rollout"].trained) == (3 * factor, 0)
    assert (meter.work["update"].sampled, meter.work["update"].trained) == (0, 6 * factor)
    assert meter.work["update"].operations(NetworkCost(10, 7)) == 6 * factor * 17
    for work in meter.work.values():
        assert 0 < work.network_seconds <= work.seconds


def test_the_backward_pass_is_the_networks_time():
    """A forward pass without its backward would be less than half of it."""
    policy, meter = metered()
    noise, told = torch.randn(8, *policy.latent_shape), torch.full((8,), 500.0)
    condition = policy.encode([Prompt("a")] * 8)
    velocity = policy.velocity(noise, told, condition)
    meter.phase("update")
    velocity.square().sum().backward()
    meter.phase("")
    assert meter.work["update"].network_seconds > 0.5 * meter.work["update"].seconds
    assert PhaseWork().operations(NetworkCost(1, 1)) == 0


PEAKS = """
import torch
from flowrl.training.memory import peak_memory
cpu, held = torch.device("cpu"), []
before = peak_memory(cpu)
held.append(torch.ones(2 * before // 4))
after = peak_memory(cpu)
held.clear()
print(before, after, peak_memory(cpu))
"""


def test_the_peak_memory_of_a_process():
    """In bytes: a process that has loaded PyTorch takes more than 100 MB, and the peak never
    falls.
    """
    told = subprocess.run(
        [sys.executable, "-c", PEAKS], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    before, after, later = map(int, told.split())
    assert 1e8 < before < 1e12 and later >= after > 1.9 * before


def test_a_ceiling_is_the_rate_of_large_products():
    assert (
        1e8 < matrix_product_ceiling(torch.device("cpu"), torch.bfloat16, (64, 2048), 0.01) < 1e15
    )
    with pytest.raises(ValueError, match="2,048 or more"):
        matrix_product_ceiling(torch.device("cpu"), torch.float32, (256, 512))


def test_a_share_above_the_ceiling_is_refused():
    assert share_of_ceiling(50.0, 2.0, 100.0) == 0.25 and share_of_ceiling(0.0, 0.0, 1.0) == 0.0
    with pytest.raises(ValueError, match=r"use of 327% is impossible.*1 threads"):
        share_of_ceiling(654e9, 2.0, 100e9)


def test_random_embeddings_have_the_true_shape_and_belong_to_their_text():
    policy = PipelinePolicy(tiny_sd3(), RandomEmbeddings(SD3(), 64), TINY)
    rows = policy.prompts.rows(
        policy.encode([Prompt("one"), Prompt("two"), Prompt("one")]).tensors["prompt"]
    )
    assert rows["words"].shape == (3, 64, 2 * WIDTH) and rows["pooled"].shape == (3, 2 * WIDTH)
    assert torch.equal(rows["words"][0], rows["words"][2]) and not torch.equal(
        rows["words"][0], rows["words"][1]
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full_size_pipelines_have_the_published_decoder(name):
    """83.8 million parameters with the encoder, an eighth of the sides."""
    pipe = random_pipeline(name, "meta", torch.float32)
    assert sum(p.numel() for p in pipe.vae.parameters()) / 1e6 == pytest.approx(83.8, rel=0.01)
    assert pipe.vae_scale_factor == 8 and all(p.is_meta for p in pipe.transformer.parameters())
    assert pipe.scheduler.config.shift == (1.0 if "schnell" in name else 3.0)


def test_weights_are_made_in_the_networks_precision(monkeypatch):
    small = replace(ARCHITECTURES["sd3.5-medium"], config={**tiny_sd3().transformer.config})
    monkeypatch.setitem(ARCHITECTURES, "sd3.5-medium", small)
    monkeypatch.setattr(
        gpu_cases, "DECODER", {**gpu_cases.DECODER, "block_out_channels": (32,) * 4}
    )
    pipe = random_pipeline("sd3.5-medium", "cpu", torch.bfloat16)
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in pipe.vae.parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


TOY = [
    "--tiny",
    "--models",
    "tiny-flux",
    "--repeats",
    "1",
    "--set",
    "members=2",
    "steps=3",
    "checkpointing=off",
]


def test_the_benchmark_runs_prints_one_table_and_goes_on_where_it_was(
    tmp_path, capsys, monkeypatch
):
    words = [
        *TOY,
        "--methods",
        "flow-grpo",
        "tp-grpo",
        "--variants",
        "guidance 4.5",
        "--out",
        str(tmp_path),
    ]
    gpu.main(words)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 + 3 and len({len(line) for line in shown[1:3]}) == 1
    assert [line.split()[1] for line in shown[3:]] == ["flow-grpo", "tp-grpo", "flow-grpo"]
    whole = json.loads((tmp_path / "gpu.json").read_text())
    uniform, turning, guided = whole["lines"]
    assert whole["command"].endswith(str(tmp_path)) and whole["versions"]["torch"] == str(
        torch.__version__
    )
    for line, samples, trained in ((uniform, 6, 4), (turning, 2 * 6, 4), (guided, 12, 8)):
        assert (
            line["phases"]["rollout"]["sampled"] == samples
            and line["phases"]["update"]["trained"] == trained
        )
        work = line["phases"]["update"]
        assert work["operations"] == trained * (
            line["forward_operations"] + line["backward_operations"]
        )
        assert work["use"] > 0 and 0 < work["other"] < 1 and line["warm"]
    (tmp_path / "gpu.jsonl").write_text((tmp_path / "gpu.jsonl").read_text() + '{"case": {"mod')
    monkeypatch.setattr(gpu, "measure", lambda *given: pytest.fail("measured again"))
    gpu.main(words)
    again = capsys.readouterr()
    assert again.out.splitlines() == shown and "a broken line" in again.err


def test_time_that_is_up_and_failures_are_said(tmp_path, capsys, monkeypatch):
    words = [*TOY, "--methods", "flow-grpo", "--variants", "none", "--out", str(tmp_path)]
    gpu.main([*words, "--minutes", "0"])
    told = capsys.readouterr()
    assert "not measured, the time is up" in told.err and "0 of 1 configurations" in told.out

    def fails(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(gpu, "measure", fails)
    gpu.main(words)
    assert "out of memory" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no such setting"):
        gpu.main([*words, "--set", "nothing=1"])
    with pytest.raises(SystemExit, match="a int is needed"):
        gpu.main([*words, "--set", "members=many"])


def test_every_optimisation_is_switched_once():
    base = gpu_cases.Setting()
    changes = gpu_cases.variants(base, "inductor")
    assert changes["base"] == {} and all(
        replace(base, **change) != base for name, change in changes.items() if change
    )
    assert {key for change in changes.values() for key in change} >= {
        "checkpointing",
        "compile",
        "micro_batch",
        "max_batch",
        "decode_batch",
        "decode_dtype",
        "dtype",
        "guidance",
        "kl_weight",
    }
    other = gpu_cases.variants(replace(base, checkpointing=False, compile="inductor"), "inductor")
    assert other["checkpointing on"] == {"checkpointing": True} and other["compile off"] == {
        "compile": ""
    }

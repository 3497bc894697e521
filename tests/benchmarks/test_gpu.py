"""Counting operations against closed forms, the meter, and the benchmark of full-size models at the
size of a toy.
"""

import json
from dataclasses import replace

import gpu
import pytest
import torch
from flowrl_testing.tiny import CLIP_TOKENS, TINY, WIDTH, tiny_sd3_policy
from gpu_compute import Meter, MeteredFamily, NetworkCost, network_cost, share_of_ceiling

from flowrl.core.types import Prompt


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
    noise, time = torch.randn(3, *policy.latent_shape), torch.full((3,), 500.0)
    condition = policy.encode([Prompt("a")] * 3)
    factor = 2 if guidance > 1 else 1
    meter.phase("rollout")
    with policy.frozen():
        policy.velocity(noise, time, condition)
    meter.phase("update")
    for _ in range(2):
        policy.velocity(noise, time, condition).square().sum().backward()
    meter.phase("rollout")
    meter.phase("")
    assert (meter.work["rollout"].sampled, meter.work["rollout"].trained) == (3 * factor, 0)
    assert (meter.work["update"].sampled, meter.work["update"].trained) == (0, 6 * factor)
    assert meter.work["update"].operations(NetworkCost(10, 7)) == 6 * factor * 17
    for work in meter.work.values():
        assert 0 < work.network_seconds <= work.seconds


def test_a_share_above_the_ceiling_is_refused():
    assert share_of_ceiling(50.0, 2.0, 100.0) == 0.25 and share_of_ceiling(0.0, 0.0, 1.0) == 0.0
    with pytest.raises(ValueError, match=r"use of 327% is impossible.*1 threads"):
        share_of_ceiling(654e9, 2.0, 100e9)


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
    assert [line.split("|")[2].strip() for line in shown[3:]] == [
        "flow-grpo",
        "tp-grpo",
        "flow-grpo",
    ]
    results = json.loads((tmp_path / "gpu.json").read_text())
    uniform, turning, guided = results["lines"]
    assert results["command"].endswith(str(tmp_path)) and results["versions"]["torch"] == str(
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
    assert capsys.readouterr().out.splitlines() == shown

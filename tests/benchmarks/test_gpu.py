"""Counting operations against closed forms, the meter, and the benchmark of full-size models at the
size of a toy.
"""

import json
from dataclasses import replace

import full_size
import pytest
import torch
from gpu_compute import Meter, MeteredFamily, NetworkCost, network_cost, share_of_ceiling

from flowrl.core.types import Prompt
from flowrl.testing.tiny import CLIP_TOKENS, TINY, tiny_sd3_policy


def cost_of(policy):
    return network_cost(
        policy, policy.prompts.rows(policy.encode([Prompt("a dog")]).tensors["prompt"])
    )


def of_adapters(rank):
    """Forward and backward operations of the adapters of `tiny_sd3` at 16 x 16 pixels, by hand:
    two products of width 32 and `rank` for each token of every adapted layer; backward twice as
    many, but q, k, v of layer 0 need no gradient of their inputs.

    Layer 0 has a second attention of the image without adapters, layer 1 is the last: of its text
    stream only q, k, v are used.
    """
    image, words = 16, CLIP_TOKENS + TINY.max_sequence_length
    tokens = 8 * image + 7 * words
    product = 2 * 32 * rank
    return 2 * tokens * product, (4 * tokens - 3 * (image + words)) * product


def test_operations_of_adapters_are_those_of_the_closed_form():
    one, four = (cost_of(tiny_sd3_policy(replace(TINY, lora_rank=rank))) for rank in (1, 4))
    assert (four.forward - one.forward, four.backward - one.backward) == of_adapters(3)


def metered(**changes):
    policy = tiny_sd3_policy(replace(TINY, **changes))
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
    counted = {name: (work.sampled, work.trained) for name, work in meter.work.items()}
    assert counted == {"rollout": (3 * factor, 0), "update": (0, 6 * factor)}
    assert meter.work["update"].operations(NetworkCost(10, 7)) == 6 * factor * 17
    assert all(0 < work.network_seconds <= work.seconds for work in meter.work.values())


def test_a_share_above_the_ceiling_is_refused():
    assert share_of_ceiling(50.0, 2.0, 100.0) == 0.25 and share_of_ceiling(0.0, 0.0, 1.0) == 0.0
    with pytest.raises(ValueError, match=r"use of 327% is impossible.*1 threads"):
        share_of_ceiling(654e9, 2.0, 100e9)


# The full-size benchmark at tiny size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method", "evaluations"), [("tiny-sd3", "flow-grpo", 4), ("tiny-flux", "tp-grpo", 6)]
)
def test_the_whole_path_at_tiny_size(model, method, evaluations, tmp_path, capsys):
    """Written, trained, killed, resumed with the same numbers, exported, drawn by plain diffusers,
    and counted.
    """
    code = full_size.main(
        ["--model", model, "--methods", method, "--threads", "1", "--out", str(tmp_path)]
    )
    report = json.loads((tmp_path / f"full_size-{model}.json").read_text())
    assert (code, report["failures"], report["resumed_equals_killed"]) == (0, [], True), (
        capsys.readouterr().out
    )
    killed, resumed = report["runs"]
    assert (killed["end"], resumed["end"]) == ("killed", "resumed")
    assert sum(phase["phase"] == "rollout" for phase in killed["phases"]) == 2
    assert f"{evaluations} network evaluations" in "\n".join(report["plan"][method])
    assert all(abs(line["error"]) < 0.5 for line in report["memory"])  # of a megabyte

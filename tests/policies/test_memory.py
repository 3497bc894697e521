"""Memory counted on shapes: against sums by hand, and what must grow with what."""

from dataclasses import replace

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.policies import memory
from flowrl.policies.architectures import ARCHITECTURES
from flowrl.policies.memory import OPTIMISED, count_memory, encoder_parameters
from flowrl.training.config import preset
from flowrl.training.plan import memory_text, plan


def test_the_counter_knows_what_is_alive():
    """Three tensors of 4 kB made, at most two of them at a time; the weight is not counted."""
    layer = torch.nn.Linear(32, 32, bias=False, device="meta")
    x = torch.empty(32, 32, device="meta")

    def work():
        y = layer.weight @ x
        z = y + 1
        del y
        return z * 2

    with torch.no_grad():
        assert memory._largest(work, layer) == 2 * 32 * 32 * 4


def test_the_backward_pass_is_counted_too():
    """tanh(tanh(x)) keeps both results; on the way back a gradient joins them, and the root's own is made first."""
    layer = torch.nn.Linear(1, 1, device="meta")
    x = torch.empty(1024, device="meta", requires_grad=True)
    forward = memory._largest(lambda: x.tanh().tanh(), layer)
    both = memory._largest(lambda: x.tanh().tanh().sum().backward(), layer)
    assert forward == 2 * 4096 and both > forward + 4096


@pytest.fixture
def small(monkeypatch):
    """SD3.5-Medium with 4 layers, FLUX with 1 + 2: as wide as the real ones."""
    layers = {
        "sd3.5-medium": {"num_layers": 4, "dual_attention_layers": (0,)},
        "flux.1-dev": {"num_layers": 1, "num_single_layers": 2},
    }
    for name, fewer in layers.items():
        known = ARCHITECTURES[name]
        monkeypatch.setitem(ARCHITECTURES, name, replace(known, config={**known.config, **fewer}))


@pytest.mark.parametrize("name", ["sd3.5-medium", "flux.1-dev"])
def test_memory_grows_with_what_it_should(name, small):
    sizes = {"resolution": 256, "rollout_rows": 2, "decode_batch": 1}
    one, two = (count_memory(name, update_rows=rows, **sizes) for rows in (1, 2))
    assert 1.9 < two.update / one.update < 2.1 and one.rollout == two.rollout
    stored = count_memory(name, update_rows=1, checkpointing=False, **sizes)
    assert stored.update > 1.4 * one.update
    assert (one.trained, one.weights - stored.weights) == (OPTIMISED * one.trained_parameters, 0)
    frozen = one.parameters * 2
    assert one.weights - frozen == stored.weights - frozen > 0.15e9  # the decoder, 50 million weights in float32
    full = count_memory(name, update_rows=1, full=True, **sizes)
    assert full.trained == OPTIMISED * full.parameters and full.weights == one.weights - frozen
    beside = count_memory(name, update_rows=1, full=True, reference=True, **sizes)
    assert (beside.weights, beside.update) == (one.weights, full.update)
    assert 0 < full.rollout - 2 * full.parameters <= one.rollout  # the weights in bfloat16, which autocast keeps during a call
    assert one.peak == one.weights + one.trained + max(one.update, one.rollout, one.decode, one.encoders)


def test_encoders_have_their_published_sizes():
    """T5 XXL 4.76, CLIP L 0.12 and bigG 0.69 billion."""
    assert encoder_parameters(ARCHITECTURES["flux.1-dev"]) / 1e9 == pytest.approx(4.76 + 0.124, abs=0.02)
    assert encoder_parameters(ARCHITECTURES["sd3.5-medium"]) / 1e9 == pytest.approx(4.76 + 0.124 + 0.695, abs=0.02)


def test_a_plan_tells_the_memory_of_models_it_knows(small):
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(dtype="bfloat16")
    told = memory_text(plan(config), config)
    assert "not measured" in told and "micro-batch of 8 rows" in told and "11.2 GB text encoders" in told
    assert memory_text(plan(config), config.replace(model="some/other-model")) == ""
    assert "no GPU is used here" in memory_text(plan(config), config.replace(dtype="float32", decode_batch=3))
    with pytest.raises(ConfigError, match="dtype"):
        count_memory("sd3.5-medium", dtype="int8")

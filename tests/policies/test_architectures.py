"""Published sizes counted on shapes alone, and their memory: against sums by hand, and what must
grow with what.
"""

import gc
import itertools
import math
from dataclasses import replace

import pytest
import torch
import transformers

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.policies import ARCHITECTURES, Adapters, Architecture, Size, count_memory, memory
from flowrl.policies.memory import OPTIMIZER_BYTES
from flowrl.testing.tiny import (
    CLIP_TOKENS,
    TINY,
    tiny_flux,
    tiny_flux_policy,
    tiny_qwen_image,
    tiny_qwen_image_policy,
    tiny_sd3,
    tiny_sd3_policy,
)
from flowrl.training.config import preset
from flowrl.training.plan import architecture_of, memory_text, plan
from flowrl.training.plan import memory as count_plan


@pytest.mark.parametrize(
    ("name", "billion", "layers", "tokens"),
    [
        ("sd3.5-medium", 2.47, 191, 333),
        ("sd3.5-large", 8.1, 303, 333),
        ("flux.1-dev", 11.9, 266, 512),
        ("flux.1-schnell", 11.9, 266, 512),
        ("qwen-image", 20.4, 480, 512),
        ("wan2.1-t2v-1.3b", 1.42, 240, 512),
    ],
)
def test_sizes_are_the_published_ones(name, billion, layers, tokens):
    """As the model cards say; with SD3's table of positions, which is not trained."""
    known = ARCHITECTURES[name]
    network = known.build()
    assert all(tensor.is_meta for tensor in network.parameters())
    assert sum(
        tensor.numel() for tensor in [*network.parameters(), *network.buffers()]
    ) / 1e9 == pytest.approx(billion, rel=0.01)
    adapters = Adapters(network.requires_grad_(False), 32, 64.0, known.family.lora_targets, seed=0)
    assert len(adapters.layers) == layers
    expected = sum(32 * (layer.in_features + layer.out_features) for layer in adapters.layers)
    assert sum(p.numel() for p in adapters.parameters().values()) == expected
    if name == "flux.1-dev":  # as Flow-GRPO's code has it
        assert expected / 1e6 == pytest.approx(52.3, abs=0.05)
    assert known.text_tokens == tokens and known.pipeline.transformer.config.in_channels % 16 == 0
    assert math.prod(known.latent_shape(Size(64, 32))) == 16 * 8 * 4


def test_the_counter_counts_living_storages():
    """Three tensors of 4 kB made, at most two of them at a time; the weight is not counted."""
    layer = torch.nn.Linear(32, 32, bias=False, device="meta")
    x = torch.empty(32, 32, device="meta")

    def work():
        y = layer.weight @ x
        z = y + 1
        del y
        return z * 2

    with torch.no_grad():
        assert memory._peak(work, layer) == 2 * 32 * 32 * 4


def test_the_backward_pass_is_counted_too():
    """tanh(tanh(x)) keeps both results; on the way back a gradient joins them, and the root's own
    is made first.
    """
    layer = torch.nn.Linear(1, 1, device="meta")
    x = torch.empty(1024, device="meta", requires_grad=True)
    forward = memory._peak(lambda: x.tanh().tanh(), layer)
    both = memory._peak(lambda: x.tanh().tanh().sum().backward(), layer)
    assert forward == 2 * 4096 and both > forward + 4096


@pytest.fixture
def small(monkeypatch):
    """SD3.5-Medium with 4 layers, FLUX with 1 + 2, Qwen-Image with 2: as wide as the real ones."""
    layers = {
        "sd3.5-medium": {"num_layers": 4, "dual_attention_layers": (0,)},
        "flux.1-dev": {"num_layers": 1, "num_single_layers": 2},
        "qwen-image": {"num_layers": 2},
    }
    for name, fewer in layers.items():
        known = ARCHITECTURES[name]
        monkeypatch.setitem(ARCHITECTURES, name, replace(known, config={**known.config, **fewer}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3.5-medium", "flux.1-dev", "qwen-image"])
def test_memory_grows_with_what_it_should(name, small):
    sizes = {"resolution": 256, "rollout_rows": 2, "decode_batch": 1}
    one, two = (count_memory(name, update_rows=rows, **sizes) for rows in (1, 2))
    assert 1.9 < two.update / one.update < 2.1 and one.rollout == two.rollout
    stored = count_memory(name, update_rows=1, checkpointing=False, **sizes)
    assert stored.update > 1.4 * one.update
    assert (one.trained, one.weights - stored.weights) == (
        OPTIMIZER_BYTES * one.trained_parameters,
        0,
    )
    # of SD3's positions, 226 million numbers
    table = sum(buffer.numel() for buffer in ARCHITECTURES[name].build().buffers())
    frozen = (one.parameters + table) * 2
    # the decoder, 50 million weights in float32
    assert one.weights - frozen == stored.weights - frozen > 0.15e9
    full = count_memory(name, update_rows=1, full=True, **sizes)
    assert (
        full.trained == OPTIMIZER_BYTES * full.parameters
        and full.weights == one.weights - frozen + 4 * table
    )
    beside = count_memory(name, update_rows=1, full=True, reference=True, **sizes)
    assert (beside.weights, beside.update) == (one.weights + 4 * table, full.update)
    # the weights in bfloat16, which autocast keeps during a call
    assert 0 < full.rollout - 2 * full.parameters <= one.rollout
    assert one.peak == one.weights + one.trained + max(
        one.update, one.rollout, one.decode, one.encoders
    )


def test_encoders_have_the_parameters_of_the_published_classes():
    """T5 XXL's encoder, CLIP L and bigG; Qwen2.5-VL-7B with its vision tower; UMT5 XXL's
    encoder.
    """
    t5 = dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)
    clip = dict(
        projection_dim=768,
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        num_hidden_layers=12,
    )
    wide = dict(
        projection_dim=1280,
        hidden_size=1280,
        intermediate_size=5120,
        num_attention_heads=20,
        num_hidden_layers=32,
    )
    text = dict(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    vision = dict(
        depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584
    )

    def count(model, config, **sizes):
        with torch.device("meta"):
            network = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return sum(p.numel() for p in network.parameters())

    flux = count(
        "T5EncoderModel", "T5Config", vocab_size=32128, feed_forward_proj="gated-gelu", **t5
    )
    flux += count("CLIPTextModelWithProjection", "CLIPTextConfig", **clip)
    sd3 = flux + count("CLIPTextModelWithProjection", "CLIPTextConfig", **wide)
    qwen = count(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        text_config=text,
        vision_config=vision,
    )
    wan = count("UMT5EncoderModel", "UMT5Config", vocab_size=256384, **t5)
    found = {known.encoder_parameters for known in ARCHITECTURES.values()}
    assert [known.encoder_parameters for known in ARCHITECTURES.values()] == [
        sd3,
        sd3,
        flux,
        flux,
        qwen,
        wan,
    ] and len(found) == 4


@pytest.mark.slow
def test_a_plan_tells_the_memory_of_models_it_knows(small):
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(dtype="bfloat16")
    told = memory_text(plan(config), config)
    assert (
        "not measured" in told
        and "micro-batch of 4 rows" in told
        and "11.2 GB text encoders" in told
    )
    assert memory_text(plan(config), config.replace(model="some/other-model")) == ""
    assert (
        "this machine has none" in memory_text(plan(config), config.replace(device="cuda"))
    ) != torch.cuda.is_available()
    with pytest.raises(ConfigError, match=r"model = 'sdxl' .* sd3\.5-medium"):
        count_memory("sdxl")


@pytest.mark.parametrize("make", [tiny_sd3, tiny_flux, tiny_qwen_image])
def test_a_folder_has_its_pipelines_architecture(make, tmp_path):
    pipe = make()
    pipe.save_pretrained(tmp_path, safe_serialization=True)
    known = Architecture.of_folder(tmp_path)
    assert math.prod(known.latent_shape(Size(16, 16))) == 4 * 8 * 8 and known.text_width == 32 * (
        1 + (make is tiny_sd3)
    )
    assert known.text_tokens == (256 + CLIP_TOKENS if make is tiny_sd3 else 512)
    encoders = [
        getattr(pipe, name)
        for name in ("text_encoder", "text_encoder_2", "text_encoder_3")
        if hasattr(pipe, name)
    ]
    assert known.encoder_parameters == sum(
        p.numel() for encoder in encoders for p in encoder.parameters()
    )
    assert [t.shape for t in known.build().parameters()] == [
        t.shape for t in pipe.transformer.parameters()
    ]
    assert (
        architecture_of(str(tmp_path)) == known
        and architecture_of(str(tmp_path / "nothing")) is None
    )
    (tmp_path / "vae/config.json").unlink()
    assert architecture_of(str(tmp_path)) is None


def test_a_plan_counts_what_its_settings_say(tmp_path):
    """Rows of a call that is smaller than max_batch; both branches' gradient or one; the prompt's
    length; all images that are scored together; no trajectories if they wait in main memory.
    """
    tiny_sd3().save_pretrained(tmp_path, safe_serialization=True)
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(
        model=str(tmp_path),
        resolution=32,
        groups=2,
        group_size=3,
        max_batch=4,
        micro_batch=2,
        eval_samples=1,
        decode_batch=2,
        dtype="bfloat16",
        lora_rank=4,
        max_sequence_length=24,
        guidance_gradient="both",
    )
    small = config.replace(max_batch=100)
    assert (plan(config).rows_per_call, plan(small).rows_per_call) == (2 * 4, 2 * 6)
    base = counted(config)
    assert (
        base.trajectories == 6 * 21 * 4 * 16 * 16 * 4
        and counted(config.replace(offload=True)).trajectories == 0
    )
    assert counted(config.replace(guidance_gradient="prompt")).update < 0.7 * base.update
    assert counted(config.replace(max_sequence_length=48)).update > 1.1 * base.update
    assert counted(config.replace(lora_targets=("to_q",))).trained == base.trained // 15 * 3
    one, two = (counted(config.replace(groups=groups)).decode for groups in (5, 10))
    assert two - one == 5 * 3 * 3 * 32 * 32 * 4
    assert counted(config.replace(decode_dtype="bfloat16")).decode < base.decode


def counted(config):
    return count_plan(plan(config), config)


@pytest.mark.parametrize("make", [tiny_sd3_policy, tiny_flux_policy, tiny_qwen_image_policy])
@pytest.mark.parametrize("train", [False, True])
def test_the_counter_agrees_with_the_allocators_records(make, train):
    """PyTorch's profiler records what the allocator of the CPU does; its sum contains operations'
    work space too.
    """
    policy = make(replace(TINY, height=64, width=64, gradient_checkpointing=train))
    condition = policy.encode([Prompt("a dog")] * 8)
    noise, told = torch.randn(8, *policy.latent_shape), torch.full((8,), 500.0)

    def once():
        with torch.set_grad_enabled(train):
            velocity = policy.velocity(noise, told, condition)
            if train:
                velocity.square().mean().backward()

    def fresh():
        for parameter in policy.trainable().values():
            parameter.grad = None

    once()
    fresh()
    gc.collect()  # what earlier tests left must not be freed in between
    with memory.StorageCounter("cpu") as counter:
        counter.add_all()
        before = counter.largest
        once()
    fresh()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as records:
        once()
    changes = [
        event.nbytes()
        for event in records.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert counter.largest - before == pytest.approx(max(itertools.accumulate(changes)), rel=0.02)

"""Published sizes counted on shapes alone, and their memory: against sums by hand, and what must grow with what."""

import gc
import itertools
from dataclasses import replace

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.policies import (
    ARCHITECTURES,
    LORA_TARGETS,
    SD3,
    Adapters,
    Architecture,
    Flux,
    architecture,
    count_memory,
    memory,
)  # fmt: skip
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
from flowrl.types import Prompt


@pytest.mark.parametrize(
    ("name", "billion", "layers"),
    [
        ("sd3.5-medium", 2.47, 191),
        ("sd3.5-large", 8.1, 303),
        ("flux.1-dev", 11.9, 266),
        ("flux.1-schnell", 11.9, 266),
        ("qwen-image", 20.4, 480),
    ],
)
def test_sizes_are_the_published_ones(name, billion, layers):
    """2.5, 8.1, 12 and 20 billion, as the model cards say; with SD3's table of positions, which is not trained."""
    network = architecture(name).build()
    assert all(tensor.is_meta for tensor in network.parameters())
    numbers = sum(tensor.numel() for tensor in [*network.parameters(), *network.buffers()])
    assert numbers / 1e9 == pytest.approx(billion, rel=0.01)
    network.requires_grad_(False)
    adapters = Adapters(network, 32, 64.0, LORA_TARGETS, seed=0)
    assert len(adapters.layers) == layers
    expected = sum(32 * (layer.in_features + layer.out_features) for layer in adapters.layers)
    assert sum(p.numel() for p in adapters.parameters().values()) == expected


@pytest.mark.parametrize(
    ("rank", "more", "million"),
    [(32, (), 52.3), (64, ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"), 179.3)],
)
def test_a_published_lora_of_flux_has_the_published_size(rank, more, million):
    """Attention alone, and with both streams' feed-forward layers, as Flow-GRPO's code has it for FLUX.1-dev."""
    adapters = Adapters(architecture("flux.1-dev").build().requires_grad_(False), rank, 2.0 * rank, (*LORA_TARGETS, *more), 0)
    assert sum(p.numel() for p in adapters.parameters().values()) / 1e6 == pytest.approx(million, abs=0.05)


def test_an_embedding_has_the_families_shape():
    """77 CLIP tokens and 256 of T5 for SD3.5, 512 of T5 for FLUX, 512 of Qwen2.5-VL and UMT5; a latent has 16 channels."""
    for name, known in ARCHITECTURES.items():
        expected = 77 + SD3().text_tokens if name.startswith("sd3") else Flux().text_tokens
        patch = 1 if name.startswith(("sd3", "wan")) else 4
        assert (known.text_tokens, known.latent_channels * patch) == (expected, known.config["in_channels"])
        assert known.latent_factor == 8


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"sd3\.5-medium, sd3\.5-large, flux\.1-dev"):
        architecture("sdxl")


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
    """tanh(tanh(x)) keeps both results; on the way back a gradient joins them, and the root's own is made first."""
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
    assert (one.trained, one.weights - stored.weights) == (OPTIMIZER_BYTES * one.trained_parameters, 0)
    table = sum(buffer.numel() for buffer in architecture(name).build().buffers())  # of SD3's positions, 226 million numbers
    frozen = (one.parameters + table) * 2
    assert one.weights - frozen == stored.weights - frozen > 0.15e9  # the decoder, 50 million weights in float32
    full = count_memory(name, update_rows=1, full=True, **sizes)
    assert full.trained == OPTIMIZER_BYTES * full.parameters and full.weights == one.weights - frozen + 4 * table
    beside = count_memory(name, update_rows=1, full=True, reference=True, **sizes)
    assert (beside.weights, beside.update) == (one.weights + 4 * table, full.update)
    assert 0 < full.rollout - 2 * full.parameters <= one.rollout  # the weights in bfloat16, which autocast keeps during a call
    assert one.peak == one.weights + one.trained + max(one.update, one.rollout, one.decode, one.encoders)


def test_encoders_have_the_parameters_of_the_published_classes():
    """T5 XXL's encoder, CLIP L and bigG: 4.76, 0.12 and 0.69 billion. Qwen2.5-VL-7B with its vision tower: 8.29 billion.
    UMT5 XXL's encoder: 5.68 billion."""
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        T5Config,
        T5EncoderModel,
        UMT5Config,
        UMT5EncoderModel,
    )

    t5 = T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
    )
    clip = {"projection_dim": 768, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    wide = {"projection_dim": 1280, "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20}
    with torch.device("meta"):
        encoders = [
            T5EncoderModel(t5),
            CLIPTextModelWithProjection(CLIPTextConfig(**clip, num_hidden_layers=12)),
            CLIPTextModelWithProjection(CLIPTextConfig(**wide, num_hidden_layers=32)),
        ]
    counts = [sum(p.numel() for p in encoder.parameters()) for encoder in encoders]
    text = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4}  # fmt: skip
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    with torch.device("meta"):
        qwen = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    assert ARCHITECTURES["qwen-image"].encoder_parameters == sum(p.numel() for p in qwen.parameters())
    umt5 = UMT5Config(vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)
    with torch.device("meta"):
        wan = UMT5EncoderModel(umt5)
    assert ARCHITECTURES["wan2.1-t2v-1.3b"].encoder_parameters == sum(p.numel() for p in wan.parameters())
    assert ARCHITECTURES["flux.1-dev"].encoder_parameters == sum(counts[:2])
    assert ARCHITECTURES["sd3.5-medium"].encoder_parameters == sum(counts)


@pytest.mark.slow
def test_a_plan_tells_the_memory_of_models_it_knows(small):
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(dtype="bfloat16")
    told = memory_text(plan(config), config)
    assert "not measured" in told and "micro-batch of 4 rows" in told and "11.2 GB text encoders" in told
    assert memory_text(plan(config), config.replace(model="some/other-model")) == ""
    assert ("this machine has none" in memory_text(plan(config), config.replace(device="cuda"))) != torch.cuda.is_available()
    with pytest.raises(ConfigError, match="dtype"):
        count_memory("sd3.5-medium", dtype="int8")


@pytest.mark.parametrize("make", [tiny_sd3, tiny_flux, tiny_qwen_image])
def test_a_folder_has_its_pipelines_architecture(make, tmp_path):
    pipe = make()
    pipe.save_pretrained(tmp_path, safe_serialization=True)
    known = Architecture.of_folder(tmp_path)
    assert known.latent_channels == 4 and known.latent_factor == pipe.vae_scale_factor == 2
    assert (
        known.text_tokens == (256 + CLIP_TOKENS if make is tiny_sd3 else 512)
        and known.text_width == known.config["joint_attention_dim"]
    )
    encoders = [getattr(pipe, name) for name in ("text_encoder", "text_encoder_2", "text_encoder_3") if hasattr(pipe, name)]
    assert known.encoder_parameters == sum(p.numel() for encoder in encoders for p in encoder.parameters())
    assert [t.shape for t in known.build().parameters()] == [t.shape for t in pipe.transformer.parameters()]
    assert architecture_of(str(tmp_path)) == known and architecture_of(str(tmp_path / "nothing")) is None
    (tmp_path / "vae/config.json").unlink()
    assert architecture_of(str(tmp_path)) is None


def test_a_plan_counts_what_its_settings_say(tmp_path):
    """Rows of a call that is smaller than max_batch; both branches' gradient or one; the prompt's length; all images that are
    scored together; no trajectories if they wait in main memory."""
    tiny_sd3().save_pretrained(tmp_path, safe_serialization=True)
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(
        model=str(tmp_path), resolution=32, groups=2, group_size=3, max_batch=4, micro_batch=2, eval_samples=1, decode_batch=2,
        dtype="bfloat16", lora_rank=4, max_sequence_length=24, guidance_gradient="both",
    )  # fmt: skip
    small = config.replace(max_batch=100)
    assert (plan(config).rows_per_call, plan(small).rows_per_call) == (2 * 4, 2 * 6)
    base = counted(config)
    assert base.trajectories == 6 * 21 * 4 * 16 * 16 * 4 and counted(config.replace(offload=True)).trajectories == 0
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
    """PyTorch's profiler records what the allocator of the CPU does; its sum contains operations' work space too."""
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as records:
        once()
    changes = [event.nbytes() for event in records.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert counter.largest - before == pytest.approx(max(itertools.accumulate(changes)), rel=0.02)

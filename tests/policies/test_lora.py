"""Several named adapters: which is trained, which are in use, what the reference has, and their files."""

from dataclasses import replace

import pytest
import torch

from flowrl.cli import main
from flowrl.errors import CheckpointError, ConfigError
from flowrl.losses import ClippedLoss
from flowrl.methods import flow_grpo
from flowrl.rewards import FunctionReward
from flowrl.rollout import Usage, integrate
from flowrl.samplers import FlowSDE
from flowrl.testing.tiny import TINY, tiny_flux, tiny_flux_policy, tiny_sd3, tiny_sd3_policy
from flowrl.training.build import model_options
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.trainer import Trainer
from flowrl.types import Prompt

PROMPTS = [Prompt("three red circles"), Prompt("a dog")]
TIME = torch.full((2,), 600.0)
REDNESS = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3)))


@pytest.fixture(params=[(tiny_sd3_policy, tiny_sd3), (tiny_flux_policy, tiny_flux)], ids=["sd3", "flux"])
def family(request):
    return request.param


def noise_of(policy):
    return torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))


def velocity(policy):
    with torch.no_grad():
        return policy.velocity(noise_of(policy), TIME, policy.encode(PROMPTS))


def fill(policy, seed):
    """Weights that do something, in the adapter that is trained."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)


def train_once(policy, **changes):
    config = preset("tiny").apply(num_steps=3, groups=2, group_size=3, minibatches=1, learning_rate=1e-2, **changes)
    trainer = Trainer(policy, flow_grpo(FlowSDE(0.7), ClippedLoss(clip_range=1e-2, kl_weight=0.1)), REDNESS, PROMPTS, config)
    return trainer, trainer.iteration()


@pytest.fixture
def style(family, tmp_path):
    """A saved LoRA of another rank and of fewer layers, and the velocity of the model that has it."""
    policy = family[0](replace(TINY, lora_rank=2, lora_alpha=6.0, lora_targets=("to_q", "to_k")))
    fill(policy, 1)
    policy.save(tmp_path / "style")
    return tmp_path / "style", velocity(policy)


def test_a_frozen_adapter_is_part_of_policy_and_reference(family, style):
    make, _ = family
    path, with_style = style
    policy = make(replace(TINY, frozen_adapters=(f"style={path}",), adapter_name="mine"))
    assert policy.adapters.names == ("style", "mine") and policy.adapters.frozen == ("style",)
    assert all(".mine." in name for name in policy.trainable())
    torch.testing.assert_close(velocity(policy), with_style, atol=2e-6, rtol=0)
    assert (with_style - velocity(make())).abs().max() > 1e-2
    frozen = {n: p.detach().clone() for n, p in policy.transformer.named_parameters() if not p.requires_grad}
    _, row = train_once(policy)
    assert row["kl"] == pytest.approx(0, abs=1e-9) and row["ratio_deviation"] < 1e-4
    assert all(torch.equal(p, dict(policy.transformer.named_parameters())[n]) for n, p in frozen.items())
    assert (velocity(policy) - with_style).abs().max() > 1e-3
    with policy.reference():
        torch.testing.assert_close(velocity(policy), with_style, atol=2e-6, rtol=0)
    with policy.reference(), policy.frozen():  # merges the frozen adapters only
        torch.testing.assert_close(velocity(policy), with_style, atol=5e-6, rtol=0)
    trained = velocity(policy)
    with policy.frozen():
        torch.testing.assert_close(velocity(policy), trained, atol=5e-6, rtol=0)
    assert torch.equal(velocity(policy), trained)  # merging left nothing behind


def test_plain_diffusers_stacks_the_files_to_the_same_picture(family, style, tmp_path):
    make, plain = family
    policy = make(replace(TINY, frozen_adapters=(str(style[0]),), adapter_name="mine", lora_rank=3))
    train_once(policy)
    policy.save(tmp_path / "mine")
    pipe = plain()
    pipe.load_lora_weights(style[0], adapter_name="style")
    pipe.load_lora_weights(tmp_path / "mine", adapter_name="mine")
    pipe.set_adapters(["style", "mine"])
    pipe.set_progress_bar_config(disable=True)
    call = dict(height=16, width=16, num_inference_steps=3, max_sequence_length=TINY.max_sequence_length, output_type="latent")
    guidance = {"guidance_scale": 1.0} if plain is tiny_sd3 else {"guidance_scale": 3.5}
    noise = noise_of(policy)
    expected = pipe([p.text for p in PROMPTS], latents=noise, **call, **guidance).images
    ours = integrate(policy, policy.schedule(3), policy.encode(PROMPTS), noise, Usage())
    torch.testing.assert_close(ours, expected, atol=5e-6, rtol=0)


def test_adapters_are_added_and_chosen(family):
    make, _ = family
    policy = make(replace(TINY, adapter_name="first"))
    base = velocity(policy)
    fill(policy, 1)
    first = velocity(policy)
    policy.adapters.add("second", rank=2, alpha=2.0, targets=("to_v",), seed=3)
    assert torch.equal(velocity(policy), first) and all(".first." in name for name in policy.trainable())
    policy.adapters.train("second")
    assert torch.equal(velocity(policy), base) and all(".second." in name for name in policy.trainable())
    fill(policy, 2)
    alone = velocity(policy)
    policy.adapters.train("second", frozen=["first"])
    both = velocity(policy)
    assert min((both - other).abs().max() for other in (base, first, alone)) > 1e-3
    with policy.reference():
        assert torch.equal(velocity(policy), first)
    assert torch.equal(velocity(policy), both)
    assert {t.shape[0] for n, t in policy.adapters.tensors().items() if "lora_A" in n} == {2}
    policy.adapters.train("first")
    assert torch.equal(velocity(policy), first) and policy.adapters.rank == TINY.lora_rank
    with policy.reference():
        assert torch.equal(velocity(policy), base)


def test_a_run_with_a_frozen_adapter_resumes(family, style):
    make, _ = family
    options = replace(TINY, frozen_adapters=(str(style[0]),))
    whole, _ = train_once(make(options))
    state = whole.state()
    expected = whole.iteration()
    again, _ = train_once(make(options))
    again.restore(state)
    found = again.iteration()
    drop = ("seconds", "phases")
    assert {k: v for k, v in found.items() if k not in drop} == {k: v for k, v in expected.items() if k not in drop}
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters, again.parameters, strict=True))


def test_what_is_wrong_is_said(family, style, tmp_path):
    make, _ = family
    policy = make()
    with pytest.raises(ConfigError, match="'other' is not allowed; allowed: default"):
        policy.adapters.train("other")
    with pytest.raises(ConfigError, match="cannot be trained and frozen"):
        policy.adapters.train("default", frozen=["default"])
    with pytest.raises(ConfigError, match="has one of this name"):
        policy.adapters.add("default", 1, 1.0, ("to_q",), 0)
    with pytest.raises(ConfigError, match="name 'a b'"):
        make(replace(TINY, frozen_adapters=(f"a b={style[0]}",)))
    with pytest.raises(CheckpointError, match="none does not exist"):
        make(replace(TINY, frozen_adapters=(str(tmp_path / "none"),)))
    with pytest.raises(ConfigError, match="left out unless tuning is lora"):
        replace(TINY, tuning="full", frozen_adapters=("x",))
    with pytest.raises(ConfigError, match="adapter_name"):
        replace(TINY, adapter_name="a.b")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "pytorch_lora_weights.safetensors").write_bytes(b"no safetensors")
    for changes in ({"adapter": str(broken)}, {"frozen_adapters": (str(broken),)}):
        with pytest.raises(CheckpointError, match="broken cannot be read as a LoRA"):
            make(replace(TINY, **changes))


def test_settings_of_a_run_reach_the_model(tmp_path):
    (tmp_path / "prompts.txt").write_text("a dog\n")
    files = {"model": "somewhere", "prompts": str(tmp_path / "prompts.txt"), "reward": "jpeg-compressibility"}
    changes = {"frozen_adapters": "style=a,b", "decode_batch": 3, "decode_dtype": "bfloat16", "compile": True}
    changes |= {"lora_targets": ("attn.to_q", "ff.net.2"), "guidance_gradient": "prompt", "prompt_cache": 7}
    options = model_options(preset("default").apply(**files, **changes))
    assert options.frozen_adapters == ("style=a", "b") and options.compile == "inductor"
    assert (options.decode_batch, options.decode_dtype) == (3, "bfloat16")
    assert preset("default").apply(**files).optim.betas == (0.9, 0.999) and RunConfig().optim.betas == (0.9, 0.99)
    trainer, _ = train_once(tiny_sd3_policy(), betas=(0.5, 0.75))
    assert trainer.optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert (options.lora_targets, options.guidance_gradient, options.prompt_cache) == (("attn.to_q", "ff.net.2"), "prompt", 7)
    usual = model_options(preset("default").apply(**files))
    assert (usual.frozen_adapters, usual.compile, usual.decode_batch, usual.decode_dtype) == ((), "", 8, "float32")
    for wrong in ({"decode_dtype": "int8"}, {"guidance_gradient": "none"}, {"prompt_cache": 0}, {"lora_targets": (1,)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            preset("default").apply(**files, **wrong)


def test_lists_and_specs_are_read_from_files(tmp_path):
    text = """
        algorithm: {window: ":", trained_steps: 0:9, drop_zero_advantages: true}
        optim: {betas: [0.9, 0.95]}
        policy: {model: some/model, lora_targets: [attn.to_q, ff.net.2], prompt_cache: 7}
        """
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml")
    values = {"window": ":", "trained_steps": "0:9", "drop_zero_advantages": True, "betas": (0.9, 0.95), "prompt_cache": 7}
    expected = preset("default").apply(**values, model="some/model", lora_targets=("attn.to_q", "ff.net.2"))
    assert config == expected
    assert RunConfig.from_dict(config.as_dict()) == config
    (tmp_path / "run.yaml").write_text(text.replace("0.95", "1.0"))
    with pytest.raises(ConfigError, match=r"line 3: betas = \(0.9, 1.0\) is not allowed; allowed: 2 values, each a number in"):
        load_config(tmp_path / "run.yaml")


def test_another_rank_is_one_clear_line(tmp_path, capsys):
    policy = tiny_sd3_policy(replace(TINY, lora_rank=2))
    policy.save(tmp_path / "lora")
    tiny_sd3().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a dog\n")
    words = ["train", "--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), "--preset", "tiny"]
    words += [
        "--reward",
        "jpeg-compressibility",
        "--resolution",
        "16",
        "--max-sequence-length",
        "24",
        "--device",
        "cpu",
        "--lora-rank",
        "4",
    ]
    words += ["--dtype", "float32", "--out", str(tmp_path / "run"), "--adapter", str(tmp_path / "lora")]
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("flowrl: error: adapter: ") and "of rank [2]" in told
    assert told.endswith("of rank 4: choose the same rank and targets")

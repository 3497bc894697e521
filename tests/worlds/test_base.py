"""Training a diffusers model from the command line: prompts from a file, a reward by name, weights
that others read.
"""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.losses import ClippedLoss
from flowrl.parts.prompts import read_prompts
from flowrl.testing.tiny import tiny_flux, tiny_sd3
from flowrl.training.build import make_world, run_method, trained_policy
from flowrl.training.config import RunConfig, preset
from flowrl.training.results import load_run

REWARD = """
class Redness:
    def score(self, images, prompts):
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
"""
SIZES = [
    "--resolution",
    "16",
    "--max-sequence-length",
    "24",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--lora-rank",
    "2",
    "--lora-alpha",
    "8",
]


@pytest.fixture
def folder(tmp_path):
    """Prompts, a reward, and a tiny SD3 pipeline on disk."""
    (tmp_path / "prompts.txt").write_text(
        "# training prompts\na red fox\n\n  a red car  \na red hat\n"
    )
    (tmp_path / "reward.py").write_text(REWARD)
    tiny_sd3().save_pretrained(tmp_path / "model")
    return tmp_path


def arguments(folder, *more):
    files = [
        "--model",
        str(folder / "model"),
        "--prompts",
        str(folder / "prompts.txt"),
        "--reward",
        f"{folder}/reward.py:Redness",
    ]
    return [
        "train",
        *files,
        *SIZES,
        "--preset",
        "tiny",
        "--out",
        str(folder / "run"),
        "--learning-rate",
        "0.03",
        *more,
    ]


def test_train_a_model_and_read_its_lora_with_plain_diffusers(folder, capsys):
    assert (
        main(arguments(folder, "--groups", "3", "--method", "tp-grpo", "--guidance-scale", "2"))
        == 0
    )
    assert "tp-grpo on" in capsys.readouterr().out
    run = load_run(folder / "run")
    assert run.finished and len(run.rows) == 3 and run.rows[1]["trajectories"] == 9
    config = json.loads((folder / "run" / "config.json").read_text())
    assert (
        config["rollout"]["groups"],
        config["rollout"]["num_steps"],
        config["policy"]["lora_rank"],
    ) == (3, 4, 2)
    assert config["environment"]["world"] == "model"
    assert run.rows[0]["evaluation"].keys() == {"reward", "seconds"}
    policy, _ = trained_policy(folder / "run", trust=True)
    plain = tiny_sd3()
    plain.load_lora_weights(folder / "run" / "lora")
    plain.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    call = dict(
        height=16,
        width=16,
        num_inference_steps=3,
        max_sequence_length=24,
        guidance_scale=1.0,
        output_type="latent",
    )
    latent = plain("a red fox", latents=noise, **call).images
    from flowrl.core.types import Prompt
    from flowrl.rollout import Usage, integrate

    with policy.guided(1.0):  # pyright: ignore[reportAttributeAccessIssue]
        ours = integrate(
            policy, policy.schedule(3), policy.encode([Prompt("a red fox")]), noise, Usage()
        )
    torch.testing.assert_close(ours, latent, atol=5e-6, rtol=0)
    assert (
        main(
            [
                "sample",
                "--weights",
                str(folder / "run"),
                "--trust",
                "--prompts",
                "any words",
                "--count",
                "2",
                "--num-steps",
                "2",
                "--out",
                str(folder / "grid.png"),
            ]
        )
        == 0
    )
    assert (folder / "grid.png").stat().st_size > 0


def test_a_killed_run_resumes_to_the_same_weights(folder, monkeypatch):
    from flowrl.training.trainer import Trainer

    assert main(arguments(folder, "--checkpoint-every", "1")) == 0
    whole = load_file(folder / "run" / "weights.safetensors")
    (folder / "run").rename(folder / "whole")
    iteration = Trainer.iteration

    def dies(trainer):
        if trainer.done == 1:
            raise RuntimeError("killed")
        return iteration(trainer)

    monkeypatch.setattr(Trainer, "iteration", dies)
    assert main(arguments(folder, "--checkpoint-every", "1")) == 1
    monkeypatch.undo()
    assert main(["train", "--resume", str(folder / "run"), "--trust"]) == 0
    again = load_file(folder / "run" / "weights.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_compare_methods_on_a_model(folder, capsys):
    out = str(folder / "cmp")
    options = [word for word in arguments(folder)[1:] if word not in ("--out", str(folder / "run"))]
    compared = [
        "compare",
        *options,
        "--methods",
        "flow-grpo",
        "tp-grpo",
        "--seeds",
        "0",
        "--workers",
        "1",
        "--out",
        out,
    ]
    assert main(compared) == 0
    assert f"Comparing flow-grpo, tp-grpo on {folder / 'model'} (" in capsys.readouterr().out
    run = folder / "cmp" / "runs" / "tp-grpo-seed0"
    assert load_run(run).finished and (run / "lora").is_dir()
    assert (
        f"on the model {folder / 'model'}, task prompts"
        in (folder / "cmp" / "report.html").read_text()
    )
    whole = load_file(run / "weights.safetensors")
    (run / "done.json").unlink()
    assert main(["compare", "--resume", out]) == 2
    assert main(["compare", "--resume", out, "--trust", "--workers", "1"]) == 0
    again = load_file(run / "weights.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_full_fine_tuning_of_flux_against_its_reference(folder):
    tiny_flux().save_pretrained(folder / "model")
    assert (
        main(
            arguments(folder, "--tuning", "full", "--kl-weight", "0.1", "--learning-rate", "0.001")
        )
        == 0
    )
    run = load_run(folder / "run")
    assert [row["kl"] >= 0 for row in run.rows[1:]] == [True, True]
    transformer = type(tiny_flux().transformer).from_pretrained(
        folder / "run" / "full", subfolder="transformer"
    )
    averaged = load_file(folder / "run" / "weights.safetensors")
    assert all(torch.equal(p, averaged[name]) for name, p in transformer.named_parameters())


def test_held_out_prompts_have_their_own_file(folder):
    (folder / "held.jsonl").write_text('{"prompt": "two cats", "count": 2}\n')
    files = {"prompts": str(folder / "prompts.txt"), "heldout_prompts": str(folder / "held.jsonl")}
    config = preset("default").apply(
        model="somewhere", reward=f"{folder}/reward.py:Redness", **files
    )
    world = make_world(config)
    assert [p.text for p in world.prompts("prompts", "train")] == [
        "a red fox",
        "a red car",
        "a red hat",
    ]
    (held,) = world.prompts("prompts", "heldout")
    assert (held.text, held.metadata) == ("two cats", {"count": 2})
    assert config.policy.lora_rank == 32 and make_world(config).reward("reward") is not None
    loss = run_method(config).loss
    assert isinstance(loss, ClippedLoss) and loss.clip_range == 1e-4
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict())), trust=True) == config


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompts", "missing.txt"], "missing.txt cannot be read"),
        (["--reward", ""], "a model has none of its own"),
        (["--model", "nowhere/at-all"], "no folder with a model_index.json"),
        (["--world", "shapes"], "model if `model` is given"),
        (["--prompts", ""], "prompts = ''"),
        (["--groups", "0"], "groups = 0"),
        (["--guidance-scale", "0.2"], "guidance_scale = 0.2"),
        (["--resolution", "17"], "height = 17"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, capsys, more, words):
    logging.getLogger("diffusers").setLevel(logging.CRITICAL)
    assert main([*arguments(folder), *more]) == 2
    told = capsys.readouterr().err.splitlines()[-1]  # before it: progress of loading
    assert told.startswith("flowrl: error: ") and words in told


def test_prompt_files(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\n# two\n three \n")
    assert [p.text for p in read_prompts(text)] == ["one", "three"]
    text.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="contains no prompt"):
        read_prompts(text)
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "one", "tag": "colour"}\n\n{"text": "two"}\n')
    with pytest.raises(ConfigError, match="line 3 is no JSON object"):
        read_prompts(objects)
    with pytest.raises(ConfigError, match="prompts = ''"):
        make_world(preset("default").apply(model="somewhere", reward="x"))
    with pytest.raises(ConfigError, match="world = 'model'"):
        RunConfig.of(world="model")

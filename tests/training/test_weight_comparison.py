"""`flowrl evaluate`: paired scores of base and trained weights, from runs and from LoRAs of any
program.
"""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from scipy import stats

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.rewards.combine import FunctionReward
from flowrl.testing.tiny import TINY, tiny_sd3, tiny_sd3_policy
from flowrl.training.weight_comparison import (
    SamplingSettings,
    compare_scores,
    compare_weights,
    sample_and_score,
)
from flowrl.worlds.base import PolicyOptions, world

REWARDS = """
class Redness:
    def score(self, images, prompts):
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))

class Dark:
    marks_invalid = True
    def score(self, images, prompts):
        scores = -images.mean((1, 2, 3))
        scores[[prompt.text == "a red car" for prompt in prompts]] = float("nan")
        return scores
"""
PROMPTS = ("a red fox", "a red car", "a red hat")
SIZES = [
    "--resolution",
    "16",
    "--max-sequence-length",
    "24",
    "--device",
    "cpu",
    "--dtype",
    "float32",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A short run of a tiny SD3 pipeline with guidance."""
    root = tmp_path_factory.mktemp("evaluated")
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    (root / "reward.py").write_text(REWARDS)
    tiny_sd3().save_pretrained(root / "model")
    files = [
        "--model",
        str(root / "model"),
        "--prompts",
        str(root / "prompts.txt"),
        "--reward",
        f"{root}/reward.py:Redness",
    ]
    more = [
        "--lora-rank",
        "2",
        "--preset",
        "tiny",
        "--learning-rate",
        "0.3",
        "--ema-decay",
        "0",
        "--groups",
        "1",
        "--guidance-scale",
        "2",
        "--tracker",
        "none",
    ]
    assert main(["train", *files, *SIZES, *more, "--out", str(root / "run")]) == 0
    return root


def results(path):
    return json.loads((path / "evaluation.json").read_text())


def test_a_run_is_compared_with_its_base_model(folder, capsys):
    run, rewards = folder / "run", f"{folder}/reward.py"
    several = ["--reward", f"{rewards}:Redness", "--reward", f"{rewards}:Dark"]
    assert (
        main(
            [
                "evaluate",
                "--weights",
                str(run),
                "--trust",
                *several,
                "--count",
                "2",
                "--batch",
                "4",
                "--html",
            ]
        )
        == 0
    )
    shown, found = capsys.readouterr().out, results(run / "evaluation")
    assert (
        set(found["scores"]) == {f"{rewards}:Redness", f"{rewards}:Dark"}
        and "difference [95% interval]" in shown
    )
    redness, dark = found["scores"].values()
    assert redness["trained"] != redness["base"] and f"{redness['difference']:+.4f}" in shown
    assert (redness["prompts"], redness["invalid"], dark["prompts"], dark["invalid"]) == (
        3,
        0,
        2,
        2,
    )
    assert [line["prompt"] for line in found["each"]] == list(PROMPTS) and found["guidance"] == 2
    assert found["each"][1]["scores"][f"{rewards}:Dark"] == [None, None]
    page = (run / "evaluation" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and "a red hat" in page and "http" not in page
    assert (run / "evaluation" / "grid.png").stat().st_size > 1000
    for card in (run / "README.md", run / "lora" / "README.md"):
        assert f"{redness['difference']:+.4f} [{redness['low']:+.4f}" in card.read_text()
        # nobody else has these folders
        assert str(folder) not in card.read_text().replace("](", "")


def test_a_lora_gives_the_numbers_of_the_run_it_comes_from(folder, tmp_path):
    """Through diffusers' own loader, as a LoRA from any other program."""
    common = [
        "--reward",
        f"{folder}/reward.py:Redness",
        "--num-steps",
        "3",
        "--guidance-scale",
        "2",
        "--batch",
        "2",
    ]
    assert (
        main(
            [
                "evaluate",
                "--weights",
                str(folder / "run"),
                "--trust",
                *common,
                "--out",
                str(tmp_path / "a"),
            ]
        )
        == 0
    )
    again = [
        "--model",
        str(folder / "model"),
        "--prompts",
        str(folder / "prompts.txt"),
        *SIZES,
        *common,
    ]
    files = {
        "folder": folder / "run" / "lora",
        "file": folder / "run" / "lora" / "pytorch_lora_weights.safetensors",
    }
    (expected,) = results(tmp_path / "a")["scores"].values()
    for name, weights in files.items():
        assert (
            main(["evaluate", "--weights", str(weights), *again, "--out", str(tmp_path / name)])
            == 0
        )
        (found,) = results(tmp_path / name)["scores"].values()
        for key in ("base", "trained", "low", "high"):
            assert found[key] == pytest.approx(expected[key], abs=2e-6), (name, key)


def test_whole_transformers_can_be_compared_too(folder, tmp_path):
    other = tiny_sd3(seed=5)
    other.transformer.save_pretrained(tmp_path / "full" / "transformer")
    again = [
        "--model",
        str(folder / "model"),
        "--prompts",
        str(folder / "prompts.txt"),
        *SIZES,
        "--num-steps",
        "2",
        "--limit",
        "2",
    ]
    assert (
        main(
            [
                "evaluate",
                "--weights",
                str(tmp_path / "full"),
                *again,
                "--reward",
                f"{folder}/reward.py:Redness",
            ]
        )
        == 0
    )
    (found,) = results(tmp_path / "full" / "evaluation")["scores"].values()
    assert found["prompts"] == 2 and found["base"] != found["trained"]


def test_every_prompt_is_embedded_once_for_both_weights(folder, tmp_path, monkeypatch):
    """However many prompts the run kept in training: here fewer than it has. The text encoders
    visit the device once.
    """
    from flowrl.policies.families import SD3
    from flowrl.policies.prompt_cache import PromptCache

    shutil.copytree(folder / "run", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["policy"]["prompt_cache"] = 2
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    texts, encode, warm, visits = [], SD3.encode, PromptCache.warm, []
    monkeypatch.setattr(
        SD3,
        "encode",
        lambda self, pipe, text, *more: (texts.append(text), encode(self, pipe, text, *more))[1],
    )
    monkeypatch.setattr(
        PromptCache,
        "warm",
        lambda self, given: (visits.append(len(self._numbers)), warm(self, given))[1],
    )
    common = [
        "--reward",
        f"{folder}/reward.py:Redness",
        "--num-steps",
        "1",
        "--count",
        "2",
        "--batch",
        "2",
    ]
    lora = ["--model", str(folder / "model"), "--prompts", str(folder / "prompts.txt"), *SIZES]
    for weights, more in ((tmp_path / "run", ["--trust"]), (folder / "run" / "lora", lora)):
        assert (
            main(
                [
                    "evaluate",
                    "--weights",
                    str(weights),
                    *more,
                    *common,
                    "--out",
                    str(tmp_path / "out"),
                ]
            )
            == 0
        )
        assert sorted(texts) == ["", *sorted(PROMPTS)] and visits[0] == 0 and set(visits[1:]) == {4}
        texts.clear(), visits.clear()


def test_weights_that_changed_nothing_differ_by_nothing(tmp_path):
    """A run of the image world whose learning rate rounds to no change: every difference is 0 to
    rounding, in all three forms.
    """
    out = tmp_path / "run"
    assert (
        main(
            [
                "train",
                "--preset",
                "tiny",
                "--learning-rate",
                "1e-12",
                "--weight-decay",
                "0",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert main(["evaluate", "--weights", str(out), "--limit", "3", "--num-steps", "4"]) == 0
    found = results(out / "evaluation")["scores"]
    assert set(found) == {"strict", "graded", "soft"}
    assert all(abs(score["difference"]) < 1e-5 for score in found.values())


def test_the_mixture_world_too(tmp_path):
    out = tmp_path / "run"
    assert main(["train", "--preset", "tiny", "--world", "mixture", "--out", str(out)]) == 0
    assert main(["evaluate", "--weights", str(out), "--limit", "2", "--count", "3", "--html"]) == 0
    assert (out / "evaluation" / "report.html").exists()


def test_the_interval_is_students_over_prompts():
    """Golden: scipy's paired t-test on the prompts' means."""
    generator = torch.Generator().manual_seed(3)
    base = torch.rand(12, 4, generator=generator)
    trained = base + 0.1 + 0.3 * torch.randn(12, 4, generator=generator)
    found = compare_scores(base, trained)
    test = stats.ttest_rel(trained.double().mean(1), base.double().mean(1))
    interval = test.confidence_interval(0.95)  # pyright: ignore[reportAttributeAccessIssue]
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert found.difference == pytest.approx(found.trained - found.base)
    assert found.better == pytest.approx(float((trained.mean(1) > base.mean(1)).double().mean()))


def test_intervals_cover():
    """Differences of mean 0.2 and spread 1, 10 prompts, 2,000 trials: about 95% of the intervals
    hold 0.2 (1,900 +- 4 x 9.7).
    """
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(2000):
        found = compare_scores(torch.zeros(10, 1), 0.2 + torch.randn(10, 1, generator=generator))
        hits += found.low <= 0.2 <= found.high
    assert abs(hits - 1900) < 39


def test_invalid_pairs_are_left_out():
    nan = float("nan")
    found = compare_scores(
        torch.tensor([[1.0, nan], [nan, nan], [3.0, 5.0]]),
        torch.tensor([[2.0, 9.0], [1.0, 1.0], [4.0, 8.0]]),
    )
    assert (found.base, found.trained, found.difference, found.prompts, found.invalid) == (
        2.5,
        4.0,
        1.5,
        2,
        3,
    )
    with pytest.raises(ConfigError, match="invalid"):
        compare_scores(torch.tensor([[nan]]), torch.tensor([[1.0]]))
    single = compare_scores(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    assert single.difference == 1.0 and math.isnan(single.low)


def test_images_do_not_depend_on_batches():
    chosen = world("shapes")
    policy, prompts = chosen.policy(PolicyOptions()), chosen.prompts("compositional", "heldout")[:3]
    reward = {"bright": FunctionReward(lambda images, _: images.mean((1, 2, 3)))}
    whole, parts = (
        sample_and_score(
            policy, prompts, reward, SamplingSettings(steps=3, count=2, batch=batch, shown=2)
        )
        for batch in (64, 4)
    )
    torch.testing.assert_close(whole.scores["bright"], parts.scores["bright"], atol=1e-5, rtol=0)
    assert whole.shown.shape == parts.shown.shape == (2, 3, 64, 64)
    one = sample_and_score(policy, prompts, reward, SamplingSettings(steps=3, count=1, batch=64))
    # image j of prompt i: noise i count + j
    assert not torch.equal(whole.scores["bright"][1:, 0], one.scores["bright"][1:, 0])


def test_prompts_are_embedded_once_for_both_weights():
    """Five prompts and the negative one, of which main memory holds two: one call of the encoders
    for all batches and weights.
    """
    policy = tiny_sd3_policy(replace(TINY, prompt_cache=2, guidance_scale=2.0))
    embed, calls = policy.prompts.encode, []
    policy.prompts.encode = lambda texts: (calls.append(len(texts)), embed(texts))[1]
    reward = {"bright": FunctionReward(lambda images, _: images.mean((1, 2, 3)))}
    prompts = [Prompt(f"number {n}") for n in range(5)]
    compare_weights(
        policy, lambda: None, prompts, reward, SamplingSettings(steps=2, count=2, batch=3), {}
    )
    assert calls == [6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--weights", "nowhere"],
            "the folder of a run; for a LoRA or a transformer give its --model too",
        ),
        (
            ["--weights", "nowhere", "--model", "m", "--prompts", "text[0:2]", "--reward", "ocr"],
            "nowhere does not exist",
        ),
        (["--weights", "w", "--model", "m", "--reward", "ocr"], "prompts = "),
        (["--weights", "w", "--model", "m", "--prompts", "text[0:2]"], "reward = "),
        (["--weights", "w", "--limit", "-1"], "limit = -1"),
        (
            [
                "--weights",
                ".",
                "--model",
                "m",
                "--prompts",
                "text[0:2]",
                "--reward",
                "ocr",
                "--guidance-scale",
                "0",
            ],
            "guidance_scale = 0.0",
        ),
        (
            [
                "--weights",
                ".",
                "--model",
                "m",
                "--prompts",
                "text[0:2]",
                "--reward",
                "ocr",
                "--resolution",
                "0",
            ],
            "resolution = 0",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_steps_are_not_the_usual_ones(folder, tmp_path, capsys):
    assert (
        main(
            [
                "evaluate",
                "--weights",
                str(folder / "run"),
                "--trust",
                "--num-steps",
                "0",
                "--out",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert "steps = 0 is not allowed" in capsys.readouterr().err


def test_a_lora_of_another_model_is_refused(folder, tmp_path, capsys):
    from flowrl.testing.tiny import tiny_flux_policy

    tiny_flux_policy().save(tmp_path / "flux")
    again = [
        "--model",
        str(folder / "model"),
        "--prompts",
        str(folder / "prompts.txt"),
        *SIZES,
        "--num-steps",
        "1",
        "--limit",
        "1",
    ]
    assert (
        main(
            [
                "evaluate",
                "--weights",
                str(tmp_path / "flux"),
                *again,
                "--reward",
                f"{folder}/reward.py:Redness",
            ]
        )
        == 2
    )
    assert (
        "holds no LoRA and no transformer for this model"
        in capsys.readouterr().err.splitlines()[-1]
    )

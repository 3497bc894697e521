"""`flowrl evaluate`: paired scores of base and trained weights, from runs and from LoRAs of any
program.
"""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from seeded import seeded
from small_run import TINY_MODEL, model_files, words
from torch.testing import assert_close

from flowrl.cli.evaluate import table
from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.rewards.combine import FunctionReward
from flowrl.run.config import load_config
from flowrl.run.io import write_json
from flowrl.run.parts.prompts import read_prompts
from flowrl.run.report.benchmarks import benchmark_score, tasks_of
from flowrl.run.report.weight_comparison import (
    Compared,
    SamplingSettings,
    compare_scores,
    sample_and_score,
)
from flowrl.run.results import decimals
from flowrl.run.statistics import mean, mean_of_means
from flowrl.run.worlds import world
from flowrl.testing.tiny import tiny_flux, tiny_flux_policy, tiny_sd3
from flowrl.worlds.built_in import PolicyOptions

DARK = """
class Dark:
    marks_invalid = True
    def score(self, images, prompts):
        scores = -images.mean((1, 2, 3))
        scores[[prompt.text == "a red car" for prompt in prompts]] = float("nan")
        return scores
"""
PROMPTS = ("a red fox", "a red car", "a red hat")
BRIGHT = {"bright": FunctionReward(lambda images, _: images.mean((1, 2, 3)))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A short run of a tiny SD3 pipeline with guidance."""
    root = tmp_path_factory.mktemp("evaluated")
    (root / "dark.py").write_text(DARK)
    training = {"preset": "tiny", "lora_rank": 2, "learning_rate": 0.3, "ema_decay": 0, "groups": 1}
    more = {"guidance_scale": 2, "tracker": "none", "out": root / "run"}
    assert main(["train", *words(**model_files(root, PROMPTS), **training, **more)]) == 0
    return root


def base(folder):
    """The model and its prompts."""
    return {"model": folder / "model", "prompts": folder / "prompts.txt", **TINY_MODEL}


def redness(folder):
    return f"{folder}/reward.py:Redness"


def evaluated(out, **options):
    """evaluation.json of a command, and the difference by its first reward."""
    assert main(["evaluate", *words(**options, out=out)]) == 0
    values = json.loads((out / "evaluation.json").read_text())
    return values, next(iter(values["scores"].values()))


def test_a_run_is_compared_with_its_base_model(folder, capsys):
    run, rewards = folder / "run", [redness(folder), f"{folder}/dark.py:Dark"]
    options = {"weights": run, "trust": True, "reward": rewards, "count": 2, "batch": 4}
    values, red = evaluated(run / "evaluation", **options, html=True)
    shown = capsys.readouterr().out
    assert list(values["scores"]) == rewards and "difference [95% interval]" in shown
    assert red["trained"] != red["base"] and f"{red['difference']:+.4f}" in shown
    assert values["prompts"] == 3 and values["guidance"] == 2
    dark = values["scores"][rewards[1]]
    assert (red["prompts"], red["invalid"], dark["prompts"], dark["invalid"]) == (3, 0, 2, 2)
    page = (run / "evaluation" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and "a red hat" in page and "http" not in page
    assert (values["iteration"], values["live"]) == (2, False)
    for card in (run / "README.md", run / "lora" / "README.md"):
        text = card.read_text()
        assert f"{red['difference']:+.4f} [{red['low']:+.4f}" in text
        # these folders exist on this machine only
        assert str(folder) not in text.replace("](", "")


def test_a_lora_gives_the_numbers_of_the_run_it_comes_from(folder, tmp_path):
    """Through diffusers' own loader, as a LoRA from any other program; a file is not looked for
    under its usual name.
    """
    run, lora = folder / "run", folder / "run" / "lora"
    common = {"reward": redness(folder), "num_steps": 3, "guidance_scale": 2, "batch": 2}
    _, expected = evaluated(tmp_path / "run", weights=run, trust=True, **common)
    usual = "pytorch_lora_weights.safetensors"
    shutil.copy(lora / usual, tmp_path / "mine.safetensors")
    other = {name: 0 * tensor for name, tensor in load_file(lora / usual).items()}
    save_file(other, tmp_path / usual)
    for weights in (lora, tmp_path / "mine.safetensors"):
        _, score = evaluated(tmp_path / weights.stem, weights=weights, **base(folder), **common)
        for key in ("base", "trained", "low", "high"):
            assert score[key] == pytest.approx(expected[key], abs=2e-6), (weights, key)


def test_whole_transformers_can_be_compared_too(folder, tmp_path):
    tiny_sd3(seed=5).transformer.save_pretrained(tmp_path / "full" / "transformer")
    options = {"reward": redness(folder), "num_steps": 2, "limit": 2}
    _, score = evaluated(tmp_path / "out", weights=tmp_path / "full", **base(folder), **options)
    assert score["prompts"] == 2 and score["base"] != score["trained"]


def test_every_prompt_is_embedded_once_for_both_weights(folder, tmp_path, monkeypatch):
    """However many prompts the run kept in training: here fewer than it has. Other weights of the
    same model need no further embeddings.
    """
    from flowrl.policies.pipeline import PipelinePolicy

    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    write_json(path, load_config(path, trust=True).replace(prompt_cache=2).as_dict())
    texts, embed = [], PipelinePolicy._embed
    watched = lambda self, some: texts.extend(p.text for p in some) or embed(self, some)  # noqa: E731
    monkeypatch.setattr(PipelinePolicy, "_embed", watched)
    common = {"reward": redness(folder), "num_steps": 1, "count": 2, "batch": 2}
    run, lora = tmp_path / "run", folder / "run" / "lora"
    for sources in ({"weights": run, "trust": True}, {"weights": lora, **base(folder)}):
        evaluated(tmp_path / "out", **sources, **common)
        assert sorted(texts) == ["", *sorted(PROMPTS)]


def test_the_interval_is_students_over_prompts():
    """Golden: scipy's paired t-test on the prompts' means."""
    generator = seeded(3)
    before = torch.rand(12, 4, generator=generator)
    after = before + 0.1 + 0.3 * torch.randn(12, 4, generator=generator)
    score = compare_scores(before, after)
    test = stats.ttest_rel(after.double().mean(1), before.double().mean(1))
    interval = test.confidence_interval(0.95)  # pyright: ignore[reportAttributeAccessIssue]
    assert (score.low, score.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert score.difference == pytest.approx(score.trained - score.base)
    assert score.better == pytest.approx(float((after.mean(1) > before.mean(1)).double().mean()))


def test_a_small_difference_has_digits_in_the_table_and_the_page():
    trained = torch.tensor([[0.5], [0.25], [0.75]])
    score = compare_scores(trained - torch.tensor([[2e-5], [1e-5], [3e-5]]), trained)
    scores = {
        "small": score,
        "one": replace(score, prompts=1),
        "large": replace(score, low=-9.5),
    }
    found = SimpleNamespace(
        compared=[Compared("mine", "base", scores)],
        prompts=("a", "b", "c"),
        how=SamplingSettings(),
        benchmark=[],
    )
    head, small, one, large, _ = table(found).splitlines()
    assert "0.499980  0.500000" in small and "+0.000020 [-0.000005, +0.000045]" in small
    assert "[one prompt]" in one and "+0.0000 [-9.5000, +0.0000]" in large
    assert len({len(line) for line in (head, small, one, large)}) == 1


def test_invalid_pairs_are_left_out():
    nan = math.nan
    before, after = [[1.0, nan], [nan, nan], [3.0, 5.0]], [[2.0, 9.0], [1.0, 1.0], [4.0, 8.0]]
    score = compare_scores(torch.tensor(before), torch.tensor(after))
    assert (score.base, score.trained, score.difference) == (2.5, 4.0, 1.5)
    assert (score.prompts, score.invalid) == (2, 3)
    with pytest.raises(ConfigError, match="scores = 'NaN' is not allowed"):
        compare_scores(torch.tensor([[nan]]), torch.tensor([[1.0]]))
    assert compare_scores(torch.tensor([[1.0]]), torch.tensor([[2.0]])).high == math.inf


def test_images_do_not_depend_on_batches():
    chosen = world("shapes")
    policy, prompts = chosen.policy(PolicyOptions()), chosen.prompts("compositional", "heldout")[:3]
    single, parts, together = (
        sample_and_score(policy, prompts, BRIGHT, SamplingSettings(3, count, batch=batch, shown=2))
        for count, batch in ((1, 64), (2, 4), (2, 64))
    )
    scores = [side.scores["bright"] for side in (single, parts, together)]
    assert_close(scores[2], scores[1], atol=1e-5, rtol=0)
    # the first image of each prompt is shown
    means = parts.shown.mean((1, 2, 3))
    assert parts.shown.shape == together.shown.shape == (2, 3, 64, 64)
    assert_close(means, scores[1][:2, 0], atol=1e-5, rtol=0)
    # image j of prompt i: noise i count + j
    assert not torch.equal(scores[2][1:, 0], scores[0][1:, 0])


LORA = {"weights": ".", "model": "m", "prompts": "text[0:2]", "reward": "ocr"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "nowhere"}, "nowhere does not exist; allowed: the folder of a run (RUN), a"),
        ({"weights": "a/b"}, "not among the downloaded weights"),
        ({"weights": "nowhere@best"}, "nowhere@best does not exist"),
        ({"weights": "."}, "holds no weights (empty)"),
        (LORA | {"weights": "nowhere"}, "nowhere does not exist"),
        (LORA | {"live": True}, ". is no run, so it has no live weights"),
        (LORA | {"resolution": 0}, "resolution = 0"),
    ],
)
def test_what_is_wrong_is_said(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", *words(**options)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_lora_of_another_model_is_refused(folder, tmp_path, capsys):
    tiny_flux_policy().save(tmp_path / "flux")
    lora = folder / "run" / "lora" / "pytorch_lora_weights.safetensors"
    save_file({"weight": torch.ones(2)}, tmp_path / "no.safetensors")
    other = {"weights": tmp_path / "flux", "reward": redness(folder), "num_steps": 1, "limit": 1}
    run = {"weights": folder / "run", "trust": True, "num_steps": 0, "out": tmp_path}
    bare = {name: value for name, value in other.items() if name != "reward"}
    for options, message in (
        (base(folder) | other, "flux/pytorch_lora_weights.safetensors does not match the model"),
        (base(folder) | other | {"weights": tmp_path / "no.safetensors"}, "holds weight; allowed"),
        (base(folder) | other | {"weights": [lora, lora]}, "allowed: weights that differ"),
        (base(folder) | bare, "reward = "),
        ({"weights": lora, "reward": redness(folder)}, "prompts = "),
        ({**other, "weights": lora, "prompts": "text[0:2]"}, "model = "),
        (run, "steps = 0 is not allowed"),
    ):
        options = {**options, "weights": options["weights"]}
        assert main(["evaluate", *words_of(options)]) == 2
        assert message in capsys.readouterr().err


def words_of(options):
    """Words of a command whose --weights are several in one option."""
    weights = options.pop("weights")
    weights = weights if isinstance(weights, list) else [weights]
    return ["--weights", *map(str, weights), *words(**options)]


def test_a_size_has_its_time_shift(tmp_path, monkeypatch):
    """sigma = e^mu / (e^mu + 1 / sigma' - 1) for sigma' = 1, 3/4, ... with mu of the tokens."""
    from flowrl.policies.pipeline import PipelinePolicy

    pipe, grids = tiny_flux(), []
    tiny_flux_policy().save(tmp_path / "lora")
    schedule = PipelinePolicy.schedule
    monkeypatch.setattr(
        PipelinePolicy,
        "schedule",
        lambda policy, steps: grids.append(schedule(policy, steps)) or grids[-1],
    )
    files = model_files(tmp_path, PROMPTS[:1], pipe)
    for options in ({"resolution": 48, "width": 32}, {"resolution": 16}):
        given = {**files, **options, "num_steps": 4, "device": "cpu", "trust": True}
        evaluated(tmp_path / "out", weights=tmp_path / "lora", **given)
        config, sigma = pipe.scheduler.config, torch.arange(4, 0, -1) / 4
        tokens = options["resolution"] * options.get("width", 16) / 16
        slope = (config.max_shift - config.base_shift) / (
            config.max_image_seq_len - config.base_image_seq_len
        )
        shift = math.exp(config.base_shift + slope * (tokens - config.base_image_seq_len))
        assert_close(grids[-1].times[:4], shift / (shift + 1 / sigma - 1))


def test_a_benchmark_has_a_table_of_its_tasks(folder, tmp_path, capsys):
    run = {"weights": folder / "run", "trust": True, "benchmark": "geneval"}
    cheap = {"reward": redness(folder), "num_steps": 1, "limit": 12, "html": True}
    values, red = evaluated(tmp_path / "out", **run, **cheap)
    shown, (base, trained) = capsys.readouterr().out, values["benchmark_scores"]
    assert (values["count"], values["prompts"], values["benchmark"]) == (4, 12, "geneval")
    assert "compositional[0:64], generated prompts; published scores" in shown
    assert [*base["tasks"]] == [
        prompt.metadata["tag"] for prompt in read_prompts("compositional[0:6]")
    ]
    assert base["weights"] == "base" and base["score"] == pytest.approx(red["base"])  # two a task
    assert base["low"] < base["score"] < base["high"] and base["tasks"] != trained["tasks"]
    digits = decimals(trained["score"] - base["score"])
    for text in (shown, (tmp_path / "out" / "report.html").read_text()):
        assert f"{trained['score']:.{digits}f} [" in text and "single object" in text
    assert shown.index("\nbase ") < shown.index("\nrun ")
    (tmp_path / "own.txt").write_text('a cup that says "A"')
    own = run | {"benchmark": "ocr", "prompts": tmp_path / "own.txt", "count": 2}
    rewards = [redness(folder), f"{folder}/dark.py:Dark"]
    values, _ = evaluated(tmp_path / "out", **own, reward=rewards, num_steps=1)
    shown = capsys.readouterr().out
    assert values["count"] == 2 and values["benchmark_prompts"] == str(tmp_path / "own.txt")
    header = shown.splitlines()[-4]
    assert (
        header.split("  ")[0] == "weights"
        and header.count("[95%]") == 2
        and "overall" not in header
    )
    assert "[one prompt]" in shown and values["benchmark_scores"][0]["low"] is None


def test_the_benchmarks_rewards_and_prompts_are_those_of_its_name(tmp_path, monkeypatch):
    from flowrl.cli.evaluate import Evaluate

    chosen = Evaluate(("run",), benchmark="ocr").completed()
    assert (chosen.reward, chosen.prompts, chosen.count) == (
        ("ocr(form=released)",),
        "text[0:64]",
        1,
    )
    chosen = Evaluate(("run",), benchmark="geneval", count=2, reward=("ocr",)).completed()
    assert (chosen.reward, chosen.prompts, chosen.count) == (("ocr",), "compositional[0:64]", 2)
    assert Evaluate(("run",)).completed().count == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--benchmark genevl", "unknown benchmark 'genevl' (did you mean 'geneval'?)"),
        (
            "--benchmark drawbench",
            "allowed: a file with DrawBench, 200 prompts, as text or a table",
        ),
        ("--benchmark geneval --limit 5", "of color_attr there is none"),
        ("--benchmark geneval --prompts text[0:2]", "tag of the prompt 'a"),
    ],
)
def test_what_a_benchmark_lacks_is_said(options, message, folder, capsys):
    given = ["evaluate", "--weights", str(folder / "run"), "--trust", *options.split()]
    assert main([*given, "--reward", redness(folder)]) == 2
    assert message in capsys.readouterr().err


def test_a_benchmark_is_of_a_model(tmp_path, capsys):
    assert main(["train", *words(preset="tiny", world="mixture", out=tmp_path / "run")]) == 0
    assert main(["evaluate", *words(weights=tmp_path / "run", benchmark="ocr")]) == 2
    assert (
        "benchmark = 'ocr' is not allowed; allowed: left out without a" in capsys.readouterr().err
    )


def test_tasks_have_equal_weights():
    """Golden: Welch's interval for the difference of two means, halved."""
    generator = seeded(4)
    first, second = torch.randn(9, generator=generator), 3 * torch.randn(5, generator=generator)
    found = mean_of_means([first, second])
    test = stats.ttest_ind(first.double(), -second.double(), equal_var=False)
    interval = test.confidence_interval(0.95)  # pyright: ignore[reportAttributeAccessIssue]
    halves = interval.low / 2, interval.high / 2
    assert (found.low, found.high) == pytest.approx(halves, abs=1e-6)
    assert mean_of_means([first]) == mean(first)
    assert mean_of_means([[1.0, 1.0], [0.0, 0.0]]).text() == "0.500 [0.500, 0.500]"
    assert mean_of_means([[1.0, 0.0], [0.0]]).high == math.inf
    scores = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, math.nan], [math.nan, math.nan]])
    one = benchmark_score("base", "ocr", scores, ["a", "a", "b", "b"])
    assert one.tasks == {"a": 0.75, "b": 0.0} and one.score == 0.375
    with pytest.raises(ConfigError, match=r"one or more images of every task \(b\)"):
        benchmark_score("base", "ocr", scores, ["a", "a", "a", "b"])
    assert tasks_of("", []) is None and tasks_of("ocr", read_prompts("text[0:2]")) == ["", ""]

"""The model card, from the files of a run alone."""

import json
import math

import pytest
import yaml
from small_run import write_rows

from flowrl.run.build import METHOD_FILE
from flowrl.run.config import preset
from flowrl.run.io import write_json
from flowrl.run.models.base import describe_base
from flowrl.run.report.card import card_text, write_card
from flowrl.run.results import decimals, without_folders

SD3 = "stabilityai/stable-diffusion-3.5-medium"


@pytest.fixture
def folder(tmp_path):
    rows = []
    for iteration, reward in ((0, 0.25), (7, 0.75)):
        evaluation = {"reward": reward, "strict": reward / 2, "seconds": 1.0}
        counts = {"nfe_total": 12345, "seconds_total": 67.8, "trajectories": 96 * iteration // 7}
        rows.append({"iteration": iteration, "evaluation": evaluation, **counts})
    write_rows(tmp_path, rows)
    (tmp_path / "done.json").write_text("{}")
    (tmp_path / "prompts.txt").write_text("a fox\n")
    return tmp_path


def run_config(folder, **changes):
    prompts = str(folder / "prompts.txt")
    config = preset("sd3.5-medium,tp-grpo,ocr").apply(prompts=prompts, **changes)
    write_json(folder / "config.json", config.as_dict())
    return config


def test_the_card_calls_each_pipeline_with_the_guidance_of_the_training(folder):
    sd3 = run_config(folder, guidance_scale=1.0, max_sequence_length=77)
    assert "guidance_scale=1.0, max_sequence_length=77).images" in card_text(folder, sd3)
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    flux = sd3.replace(model=str(folder))
    assert "scale" not in card_text(folder, flux).split("```")[1]
    text = card_text(folder, flux.replace(guidance_scale=2.0))
    assert 'true_cfg_scale=2.0, negative_prompt=""' in text
    (folder / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    text = card_text(folder, flux.replace(guidance_scale=4.0, negative_prompt=" "))
    assert 'true_cfg_scale=4.0, negative_prompt=" "' in text


@pytest.mark.parametrize(("tuning", "kind"), [("lora", "adapter"), ("full", "finetune")])
def test_header_code_and_numbers(folder, tuning, kind):
    text = card_text(folder, run_config(folder, tuning=tuning))
    _, header, body = text.split("---\n", 2)
    values, is_lora = yaml.safe_load(header), tuning == "lora"
    assert (values["base_model"], values["pipeline_tag"]) == (SD3, "text-to-image")
    assert values["base_model_relation"] == kind and ("lora" in values["tags"]) == is_lora
    code = body.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert ("load_lora_weights" in code) == is_lora == ("AutoModel" not in code)
    for words in (
        "| `ocr(form=released)` | 0.2500 | 0.7500 |",
        "| `strict` | 0.1250 | 0.3750 |",
        "7 iterations, 12,345 network evaluations in rollouts and 68 seconds",
    ):
        assert words in body
    assert '.to("cuda")' not in code and "This trains 300 iterations; the weights in" in body
    assert "This trains" not in card_text(folder, run_config(folder, iterations=7, tuning=tuning))
    assert "`seconds`" not in body and str(folder) not in text


OWN = dict(sampler="", window="", loss="", noise_level=0, clip_range=0, eval_solver="heun")


def test_the_numbers_are_those_that_ran(folder):
    """Also of the method's own settings, which config.json leaves empty or 0, of a forward-process
    loss, and of a method whose parts need the user's code.
    """
    text = card_text(folder, run_config(folder, method="flow-grpo", credit="", **OWN))
    for words in (
        "sampler `flow-sde(noise_level=0.7)` (window `:-1`)",
        "loss `clipped` (clip range 0.0001, KL weight 0.0001)",
        "7 iterations of 4",
        "steps (solver heun), guidance 4.5",
    ):
        assert words in text
    forward = dict(method="diffusion-nft", credit="", trained_steps=":", guidance_scale=1)
    config = run_config(folder, **OWN | forward | {"kl_weight": 0.25, "train_guidance_scale": 4.5})
    text = card_text(folder, config)
    assert "guidance 1 (4.5 in the loss, 4.5 for the reference), sampler `multistep`" in text
    assert "loss `diffusion-nft` (KL weight 0.25)" in text
    ran = {"sampler": "Mine(noise_level=0.3)", "window": ":", "credit": "Rule", "loss": "Own"}
    write_json(folder / METHOD_FILE, ran | {"clip_range": "0.2", "kl_weight": "0"})
    mine = preset("sd3.5-medium,flow-grpo,ocr").apply(
        prompts=config.environment.prompts, sampler="no.py:Mine", credit="no.py:Rule"
    )
    own = card_text(folder, mine)
    assert "sampler `Mine(noise_level=0.3)`" in own and "loss `Own` (clip range 0.2, KL" in own


def test_a_run_that_ends_with_its_best_checkpoint_shows_its_scores(folder):
    first, best = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    last = best | {"iteration": 9, "evaluation": {"reward": 0.1, "seconds": 1.0}}
    write_rows(folder, [first, best, last | {"exported": 7, "stopped": "mine: it fell"}])
    text = card_text(folder, run_config(folder))
    assert "| 0.2500 | 0.7500 |" in text and "weights of iteration 7:" in text
    assert "stopped after iteration 9 of" in text and "by mine: it fell." in text


@pytest.mark.parametrize("setting", ["adapter", "start_from"])
def test_a_run_that_began_with_other_weights_names_them(folder, setting):
    assert "began" not in card_text(folder, run_config(folder))
    text = card_text(folder, run_config(folder, **{setting: "/home/me/runs/first@best"}))
    for words in (
        "Training began with the weights `first@best`: the scores before training are of these",
        ", without those of the weights with which it began.",
    ):
        assert words in text
    assert "/home" not in text


def test_small_gains_have_digits(folder):
    rows = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    rows[1]["evaluation"]["reward"] = 0.25002
    write_rows(folder, rows)
    assert "| 0.250000 | 0.250020 |" in card_text(folder, run_config(folder))
    assert [decimals(x) for x in (0.0, 0.5, 0.002, -2e-5, 1e-12)] == [3, 3, 4, 6, 9]
    assert decimals(2e-5, math.inf, -0.03, least=4) == 4


def test_the_base_model_of_a_folder(folder, tmp_path):
    snapshot = tmp_path / "models--stabilityai--stable-diffusion-3.5-medium" / "snapshots" / "1a2b"
    local, recorded = tmp_path / "my-sd3", tmp_path / "saved"
    for place, name in ((snapshot, None), (local, None), (recorded, str(snapshot))):
        place.mkdir(parents=True)
        index = {"_class_name": "StableDiffusion3Pipeline", "_name_or_path": name}
        write_json(place / "model_index.json", {k: v for k, v in index.items() if v})
    config = run_config(folder)
    note = "In training, `my-sd3` was a local folder: replace it by the folder or the Hub name"
    for place, expected in ((snapshot, SD3), (recorded, SD3), (local, "my-sd3")):
        header = card_text(folder, config.replace(model=str(place))).split("---\n")[1]
        values = yaml.safe_load(header)
        assert values["base_model"] == expected and values["base_model_relation"] == "adapter"
        text = card_text(folder, config.replace(model=str(place)))
        assert ("local folder" in header) == (note in text) == (place == local)


def test_a_base_model_is_described_without_loading_it(tmp_path):
    def describe(index, card="", model="local", **given):
        place = tmp_path / "local"
        place.mkdir(exist_ok=True)
        write_json(place / "model_index.json", {"_class_name": "FluxPipeline", **index})
        (place / "README.md").write_text(card)
        found = describe_base(str(tmp_path / model), **given)
        return found.name, found.pipeline, found.licence_name, found.folder and found.folder.name

    card = "---\nlicense: other\nlicense_name: dev\nbase_model:\n- a/b\n---\n"
    assert describe({}) == ("", "FluxPipeline", "", "local")
    assert describe({}, card) == ("a/b", "FluxPipeline", "dev", "local")
    assert describe({"_name_or_path": "c/d"}, card)[0] == "c/d"
    assert describe({"_name_or_path": "c/d"}, card, name="e/f")[0] == "e/f"
    assert describe({}, "---\nlicense: mit\n---\n")[2] == "mit"
    for broken in ("---\n: [\n---\n", "---\njust text\n---\n", "no header"):
        assert describe({}, broken) == ("", "FluxPipeline", "", "local")
    original = str(tmp_path / "local")
    file = describe({}, card, model="one.safetensors", original=original)
    assert file == ("", "FluxPipeline", "", None)
    assert describe_base("owner/not-downloaded").folder is None


def test_an_evaluation_and_names_with_special_characters(folder):
    """Markdown code on one line, bars escaped within tables, and nothing of the author's
    folders.
    """
    config, reward = run_config(folder), "/home/me/mine.py:A|`b`(x=1)"
    score = {"base": 0.1, "trained": 0.4, "difference": 0.3, "low": 0.2, "high": 0.4}
    scores = {reward: score, "<script>": score | {"low": None, "high": None}}
    command = "flowrl evaluate --weights /home/me/run"
    content = {"command": command, "prompts": 9, "count": 2, "scores": scores, "iteration": 7}
    (folder / "evaluation").mkdir()
    write_json(folder / "evaluation" / "evaluation.json", content)
    weights = folder / config.policy.tuning
    weights.mkdir()
    (folder / "config.yaml").write_text("method: tp-grpo\n")
    write_card(folder)
    text = (folder / "README.md").read_text()
    assert "| `` mine.py:A\\|`b`(x=1) `` | 0.1000 | 0.4000 | +0.3000 [+0.2000, +0.4000] |" in text
    assert "| `<script>` | 0.1000 | 0.4000 | +0.3000 |" in text and "/home" not in text
    assert "`flowrl evaluate --weights run` on 9 prompts with 2 images per prompt" in text
    assert (weights / "README.md").read_text() == text and (weights / "config.yaml").exists()
    # of another checkpoint, of weights without an average, of other weights in this folder
    (folder / "evaluation" / "grid.png").write_bytes(b"an image")
    shown = "](evaluation/grid.png)"
    for change, is_theirs in (
        ({}, True),
        ({"iteration": 4}, False),
        ({"live": True}, False),
        ({"iteration": 7}, True),
        ({"iteration": None}, False),
    ):
        write_json(folder / "evaluation" / "evaluation.json", content | change)
        write_card(folder)
        text = (weights / "README.md").read_text()
        assert ("on 9 prompts" in text) == (shown in text) == is_theirs, change
        assert (weights / "evaluation" / "grid.png").exists() == is_theirs, change
    assert without_folders("a ~/b/c.py:D('/e/f.txt') ../g/h i/j") == "a c.py:D('f.txt') h i/j"

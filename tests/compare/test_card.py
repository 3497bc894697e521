"""The model card, from the files of a run alone."""

import pytest
import yaml
from flowrl_compare.card import card_text, without_folders, write_card
from small_run import write_rows

from flowrl.io import write_json
from flowrl.training.config import preset

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
    assert "`seconds`" not in body and str(folder) not in text


def test_an_evaluation_and_names_with_special_characters(folder):
    """Markdown code on one line, bars escaped within tables, and nothing of the author's
    folders.
    """
    config, reward = run_config(folder), "/home/me/mine.py:A|`b`(x=1)"
    score = {"base": 0.1, "trained": 0.4, "difference": 0.3, "low": 0.2, "high": 0.4}
    scores = {reward: score, "<script>": score | {"low": None, "high": None}}
    command = "flowrl evaluate --weights /home/me/run"
    content = {"command": command, "prompts": 9, "count": 2, "scores": scores}
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
    assert without_folders("a ~/b/c.py:D('/e/f.txt') ../g/h i/j") == "a c.py:D('f.txt') h i/j"

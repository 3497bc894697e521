"""The model card of a run: what was trained and on what, the measured scores, and how to use and
repeat it.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowrl.cli.pages import render
from flowrl.core.errors import ConfigError, require
from flowrl.io import write_bytes
from flowrl.parts.plugins import versions
from flowrl.reading import read_json
from flowrl.training.config import RunConfig, load_config
from flowrl.training.logging import scalars
from flowrl.training.results import load_run

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def write_card(folder: Path) -> None:
    """Write README.md to the folder of a finished run of a model, and to lora/ or full/ together
    with the files it refers to.

    Scores come from metrics.jsonl and, if `flowrl evaluate` has written it,
    evaluation/evaluation.json; nothing is measured.
    """
    config = load_config(folder / "config.json")
    text = card_text(folder, config)
    write_bytes(folder / "README.md", text.encode())
    weights = folder / config.policy.tuning
    if not weights.is_dir():
        return
    write_bytes(weights / "README.md", text.replace(f"]({config.policy.tuning}/", "](").encode())
    for name in (
        "config.yaml",
        "samples/over-time.png",
        "samples/prompts.txt",
        "evaluation/grid.png",
    ):
        if (folder / name).exists():
            write_bytes(weights / name, (folder / name).read_bytes())


def card_text(folder: Path, config: RunConfig) -> str:
    """The card of the run in `folder`: the YAML header of the Hub, then Markdown."""
    run, base = load_run(folder), base_model(config.policy.model)
    first, last = run.evaluations[0], run.evaluations[-1]
    before, after = scalars(first["evaluation"]), scalars(last["evaluation"])
    measured = [name for name in after if name != "seconds" and name in before]
    return render(
        "model-card.md.j2",
        header=yaml.safe_dump(_header(config, base), sort_keys=False),
        config=config,
        base=base or Path(config.policy.model).name,
        reward=without_folders(config.environment.reward),
        prompts=without_folders(config.environment.prompts),
        heldout_prompts=without_folders(config.environment.heldout_prompts),
        guidance=_guidance(config),
        scores={
            without_folders(config.environment.reward) if name == "reward" else name: (
                before[name],
                after[name],
            )
            for name in measured
        },
        last=last,
        images=sum(row.get("trajectories", 0) for row in run.rows),
        evaluation=_evaluation(folder / "evaluation" / "evaluation.json"),
        over_time=(folder / "samples" / "over-time.png").exists(),
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
    )


def _header(config: RunConfig, base: str) -> dict[str, Any]:
    relation = (
        {
            "base_model": base,
            "base_model_relation": "adapter" if config.policy.tuning == "lora" else "finetune",
        }
        if base
        else {}
    )
    made = "video" if config.policy.num_frames > 1 else "image"
    lora = ["lora"] if config.policy.tuning == "lora" else []
    tags = ["diffusers", *lora, "reinforcement-learning", "flow-matching", config.algorithm.method]
    return {
        **relation,
        "library_name": "diffusers",
        "pipeline_tag": f"text-to-{made}",
        "tags": tags,
    }


def _evaluation(path: Path) -> dict[str, Any] | None:
    """What `flowrl evaluate` has written, if anything."""
    if not path.is_file():
        return None
    found: _Evaluation = read_json(path, _Evaluation)
    scores = {without_folders(name): score for name, score in found.scores.items()}
    return {**vars(found), "command": without_folders(found.command), "scores": scores}


@dataclass(frozen=True)
class _Difference:
    base: float
    trained: float
    difference: float
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        require(
            (self.low is None) == (self.high is None), "low", self.low, "a number if `high` is one"
        )


@dataclass(frozen=True)
class _Evaluation:
    """What the card shows of evaluation.json."""

    command: str
    prompts: int
    count: int
    scores: dict[str, _Difference]


def base_model(model: str) -> str:
    """The base model's name on the Hub; "" for a folder that does not record it."""
    index = Path(model) / "model_index.json"
    if not index.is_file():
        return model if HUB_NAME.fullmatch(model) else ""
    try:
        named = str(read_json(index, dict[str, Any]).get("_name_or_path", ""))
    except ConfigError:
        return ""
    return named if HUB_NAME.fullmatch(named) and not Path(named).exists() else ""


def without_folders(text: str) -> str:
    """`text` with every path reduced to its last part, since the card is read on other machines."""
    return re.sub(r"(?<![\w.-])(?:~|\.{1,2})?(?:/[\w.-]+)+/(?=[\w.-])", "", text)


def _guidance(config: RunConfig) -> str:
    """The arguments of classifier-free guidance. Their names and defaults differ: in FLUX
    `guidance_scale` is an input of the network.
    """
    index = Path(config.policy.model) / "model_index.json"
    name = (
        str(read_json(index, dict[str, Any]).get("_class_name", ""))
        if index.is_file()
        else config.policy.model
    )
    scale, negative = config.policy.guidance_scale, json.dumps(config.policy.negative_prompt)
    if any(family in name.lower() for family in ("flux", "qwen")):
        return f", true_cfg_scale={scale}, negative_prompt={negative}" if scale != 1 else ""
    return f", guidance_scale={scale}" + (
        f", negative_prompt={negative}" if config.policy.negative_prompt else ""
    )

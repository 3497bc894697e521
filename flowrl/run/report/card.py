"""The model card of a run: what was trained and on what, the measured scores, and how to use and
repeat it.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowrl.core.errors import ConfigError
from flowrl.run.build import METHOD_FILE, method_parts
from flowrl.run.config import RunConfig, load_config
from flowrl.run.io import write_bytes
from flowrl.run.logging import scalars
from flowrl.run.parts.plugins import versions
from flowrl.run.reading import read_bytes, read_json
from flowrl.run.records import load_run
from flowrl.run.report.figures import proxy_and_heldout
from flowrl.run.report.pages import render
from flowrl.run.report.style import save
from flowrl.run.results import changes_of, decimals, untrained_of

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")
BESIDE = ("config.yaml", "samples/over-time.png", "samples/prompts.txt", "evaluation/grid.png")
"""Files that a card refers to."""


def finish_run(folder: Path) -> list[str]:
    """After `flowrl train`: the card of a model's run, and proxy.png if the run has held-out
    metrics; the lines to print.
    """
    if load_config(folder / "config.json", trust=True).policy.model:
        write_card(folder)
    run = load_run(folder)
    figure = proxy_and_heldout({run.arm: [run]})
    if figure is None:
        return []
    save(figure, folder / "proxy.png", dpi=130)
    return [f"Proxy and held-out metrics: {folder / 'proxy.png'}"]


def write_card(folder: Path) -> None:
    """Write README.md to the folder of a finished run of a model, and to lora/ or full/ together
    with the files it refers to.

    Scores come from metrics.jsonl and, if `flowrl evaluate` has written it,
    evaluation/evaluation.json; nothing is measured.
    """
    config = load_config(folder / "config.json", trust=True)
    text, weights = card_text(folder, config), folder / config.policy.tuning
    write_bytes(folder / "README.md", text.encode())
    if not weights.is_dir():
        return
    write_bytes(weights / "README.md", text.replace(f"]({weights.name}/", "](").encode())
    for name in BESIDE:
        if (folder / name).exists():
            write_bytes(weights / name, read_bytes(folder / name))


def card_text(folder: Path, config: RunConfig) -> str:
    """The card of the run in `folder`: the YAML header of the Hub, then Markdown."""
    model = config.policy.model or ""
    run, base = load_run(folder), base_model(model)
    last, path = run.rows[-1], folder / "evaluation" / "evaluation.json"
    best = last.get("exported", last["iteration"])
    (result,) = (row["evaluation"] for row in run.rows if row["iteration"] == best)
    until = [row for row in run.rows if row["iteration"] <= best]
    before, after = scalars(untrained_of(until)), scalars(result)
    scores = {
        config.environment.reward if name == "reward" else name: (before[name], after[name])
        for name in after
        if name != "seconds" and name in before
    }
    return render(
        "model-card.md.j2",
        header=yaml.safe_dump(_header(config, base), sort_keys=False),
        config=config,
        base=base or Path(model).name,
        known=bool(base),
        local=without_folders,
        guidance=_guidance(config),
        loss_guidance=config.loss_guidance().scales(config.policy.guidance_scale),
        method=_method(folder, config),
        scores=scores,
        decimals=decimals,
        last=last,
        changes=changes_of(run.rows),
        best=best,
        images=sum(row.get("trajectories", 0) for row in run.rows),
        evaluation=read_json(path, _Evaluation) if path.is_file() else None,
        over_time=(folder / "samples" / "over-time.png").exists(),
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
    )


def _header(config: RunConfig, base: str) -> dict[str, Any]:
    is_lora = config.policy.tuning == "lora"
    relation = "adapter" if is_lora else "finetune"
    method = config.algorithm.method
    tags = ["diffusers", "lora", "reinforcement-learning", "flow-matching", method]
    return {
        "base_model": base or Path(config.policy.model or "").resolve().name,
        "base_model_relation": relation,
        "library_name": "diffusers",
        "pipeline_tag": f"text-to-{'video' if config.policy.num_frames > 1 else 'image'}",
        "tags": [tag for tag in tags if tag != "lora" or is_lora],
    }


@dataclass(frozen=True)
class _Difference:
    base: float
    trained: float
    difference: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class _Evaluation:
    """What the card shows of evaluation.json."""

    command: str
    prompts: int
    count: int
    scores: dict[str, _Difference]


def _method(folder: Path, config: RunConfig) -> dict[str, str]:
    """The parts and numbers of the method that ran."""
    path = folder / METHOD_FILE
    return read_json(path, dict[str, str]) if path.is_file() else method_parts(config)


def _model_index(model: str) -> dict[str, Any]:
    """The content of model_index.json in the folder `model`; empty for a name on the Hub."""
    path = Path(model) / "model_index.json"
    return read_json(path, dict[str, Any]) if path.is_file() else {}


def base_model(model: str) -> str:
    """The base model's name on the Hub, also of a folder in the Hub's cache; "" for a folder that
    does not record it.
    """
    try:
        recorded = str(_model_index(model).get("_name_or_path", ""))
    except ConfigError:
        recorded = ""
    for name in (recorded, model):
        if cached := CACHED.search(name):
            return f"{cached[1]}/{cached[2]}"
        if HUB_NAME.fullmatch(name) and not Path(name).exists():
            return name
    return ""


def without_folders(text: str) -> str:
    """`text` with every path reduced to its last part, since the card is read on other machines."""
    return re.sub(r"(?<![\w.-])(?:~|\.{1,2})?(?:/[\w.-]+)+/(?=[\w.-])", "", text)


def _guidance(config: RunConfig) -> str:
    """The arguments of classifier-free guidance. Their names and defaults differ: in FLUX
    `guidance_scale` is an input of the network.
    """
    policy, model = config.policy, config.policy.model or ""
    name = str(_model_index(model).get("_class_name", model)).lower()
    scale, negative = policy.guidance_scale, json.dumps(policy.negative_prompt)
    if "flux" in name or "qwen" in name:
        return f", true_cfg_scale={scale}, negative_prompt={negative}" if scale != 1 else ""
    end = f", negative_prompt={negative}" if policy.negative_prompt else ""
    return f", guidance_scale={scale}{end}"

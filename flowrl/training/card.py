"""The settings of a run as YAML, and the model card: what was trained, on what, what it measured, how to do it again."""

import json
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from flowrl.io import write_bytes
from flowrl.settings import settings_text
from flowrl.training.config import RunConfig, load_config
from flowrl.training.logging import scalars
from flowrl.training.results import RunRecord, load_run

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
CODE = {
    "lora": (
        'pipe = DiffusionPipeline.from_pretrained("{base}", torch_dtype=torch.bfloat16).to("cuda")\n'
        'pipe.load_lora_weights("{here}")'
    ),
    "full": (
        'transformer = AutoModel.from_pretrained("{here}", subfolder="transformer", torch_dtype=torch.bfloat16)\n'
        'pipe = DiffusionPipeline.from_pretrained("{base}", transformer=transformer, torch_dtype=torch.bfloat16).to("cuda")'
    ),
}


def write_config(folder: Path, config: RunConfig) -> None:
    """config.yaml: all settings, for ``flowrl train --config``."""
    comment = f"All settings of this run; repeat it with: flowrl train --config config.yaml --out NEW_FOLDER ({versions()})"
    write_bytes(folder / "config.yaml", settings_text(config.as_dict(), comment).encode())


def versions() -> str:
    """The versions of what the numbers depend on."""
    found = []
    for package in ("flowrl-lab", "torch", "diffusers", "transformers", "peft"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def write_card(folder: Path) -> None:
    """README.md in the folder of a finished run of a model, and beside its weights in lora/ or full/, with what they need there.

    Scores come from metrics.jsonl and, where ``flowrl evaluate`` has left one, evaluation/evaluation.json; nothing is measured.
    """
    config, run = load_config(folder / "config.json"), load_run(folder)
    text = card_text(folder, config, run)
    write_bytes(folder / "README.md", text.encode())
    weights = folder / config.policy.tuning
    if not weights.is_dir():
        return
    write_bytes(weights / "README.md", text.replace(f"]({config.policy.tuning}/", "](").encode())
    for name in ("config.yaml", "samples/over-time.png", "samples/prompts.txt", "evaluation/grid.png"):
        if (folder / name).exists():
            (weights / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, weights / name)


def base_model(model: str) -> str:
    """The base model's name on the Hub; "" for a folder that does not say where it came from."""
    index = Path(model) / "model_index.json"
    if not index.is_file():
        return model if HUB_NAME.fullmatch(model) else ""
    try:
        named = str(json.loads(index.read_text()).get("_name_or_path", ""))
    except (json.JSONDecodeError, OSError):
        return ""
    return named if HUB_NAME.fullmatch(named) and not Path(named).exists() else ""


def without_folders(text: str) -> str:
    """`text` with every path to a file or folder cut down to its last part: a card is for others."""
    return re.sub(r"(?<![\w.-])(?:~|\.{1,2})?(?:/[\w.-]+)+/(?=[\w.-])", "", text)


def card_text(folder: Path, config: RunConfig, run: RunRecord) -> str:
    """The card: the Hub's YAML header, then what a reader must know before relying on the weights."""
    base = base_model(config.policy.model)
    header: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": "adapter" if config.policy.tuning == "lora" else "finetune",
    }
    header = {key: value for key, value in header.items() if base} | {
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": [
            "diffusers",
            *(["lora"] * (config.policy.tuning == "lora")),
            "reinforcement-learning",
            "flow-matching",
            config.algorithm.method,
        ],
    }
    reward = without_folders(config.environment.reward).partition("(")[0]
    title = f"{(base or Path(config.policy.model).name).rpartition('/')[2]}, {config.algorithm.method}, {reward}"
    parts = [
        "---\n" + yaml.safe_dump(header, sort_keys=False) + "---",
        f"# {title}",
        _what(config, base),
        "## Use\n\n" + _use(config, base),
        "## Measured\n\n" + _measured(folder, config, run),
        "## Trained on\n\n" + _settings(config, run),
        "## Limits\n\n" + _limits(config),
    ]
    return "\n\n".join(parts) + "\n"


def _what(config: RunConfig, base: str) -> str:
    weights = (
        f"A LoRA of rank {config.policy.lora_rank}"
        if config.policy.tuning == "lora"
        else "All weights of the transformer, fine-tuned"
    )
    return (
        f"{weights} for `{base or Path(config.policy.model).name}`, trained by reinforcement learning ({config.algorithm.method}"
        f"{', credit rule ' + config.algorithm.credit if config.algorithm.credit else ''}) to raise the reward `{without_folders(config.environment.reward)}`."
    )


def _use(config: RunConfig, base: str) -> str:
    code = CODE[config.policy.tuning].format(base=base or Path(config.policy.model).name, here="THIS_FOLDER")
    classes = "DiffusionPipeline" if config.policy.tuning == "lora" else "AutoModel, DiffusionPipeline"
    tokens = f", max_sequence_length={config.policy.max_sequence_length}" if config.policy.max_sequence_length else ""
    size = f"height={config.policy.resolution}, width={config.policy.resolution}"
    call = f'image = pipe("a prompt", {size}, num_inference_steps={config.evaluation.eval_steps}{_guidance(config)}{tokens}).images[0]'
    return f"```python\nimport torch\nfrom diffusers import {classes}\n\n{code}\n{call}\n```"


def _guidance(config: RunConfig) -> str:
    """Classifier-free guidance as the pipeline takes it: SD3's own default is another one, and what FLUX calls
    `guidance_scale` is told to the network."""
    index = Path(config.policy.model) / "model_index.json"
    name = str(json.loads(index.read_text()).get("_class_name", "")) if index.is_file() else config.policy.model
    if "flux" not in name.lower():
        return f", guidance_scale={config.policy.guidance_scale}"
    return f', true_cfg_scale={config.policy.guidance_scale}, negative_prompt=""' if config.policy.guidance_scale != 1 else ""


def _measured(folder: Path, config: RunConfig, run: RunRecord) -> str:
    first, last, reward = run.evaluations[0], run.evaluations[-1], f"`{without_folders(config.environment.reward)}`"
    before, after = scalars(first["evaluation"]), scalars(last["evaluation"])
    held = (
        f"held-out prompts of `{without_folders(config.environment.heldout_prompts)}`"
        if config.environment.heldout_prompts
        else "training prompts (there were no held-out ones)"
    )
    lines = [
        f"Mean over {config.evaluation.eval_samples} {held}, one picture each from the same noise, {config.evaluation.eval_steps} ODE steps, guidance "
        f"{config.policy.guidance_scale:g}, averaged (EMA) weights:",
        "",
        "| score | before | after |",
        "|---|---|---|",
        *(
            f"| {reward if name == 'reward' else name} | {before[name]:.4f} | {value:.4f} |"
            for name, value in after.items()
            if name != "seconds" and name in before
        ),
        "",
        f"After {last['iteration']} iterations, {last['nfe_total']:,} network evaluations of rollouts, "
        f"{last['seconds_total']:,.0f} seconds on {config.policy.device}. One run with one seed ({config.seed}).",
        *_evaluated(folder),
    ]
    if (folder / "samples" / "over-time.png").exists():
        lines += ["", "![The same prompts from the same noise, over the iterations](samples/over-time.png)"]
    return "\n".join(lines)


def _evaluated(folder: Path) -> list[str]:
    """What `flowrl evaluate` found, if it was run."""
    path = folder / "evaluation" / "evaluation.json"
    if not path.is_file():
        return ["", "No interval: `flowrl evaluate --weights THIS_RUN --prompts FILE` measures the paired difference with one."]
    found = json.loads(path.read_text())
    rows = [
        f"| `{without_folders(name)}` | {s['base']:.4f} | {s['trained']:.4f} | "
        + (
            f"{s['difference']:+.4f} [{s['low']:+.4f}, {s['high']:+.4f}] |"
            if s["low"] is not None
            else f"{s['difference']:+.4f} |"
        )
        for name, s in found["scores"].items()
    ]
    told = f"And by `{without_folders(found['command'])}`: {found['prompts']} prompts, {found['count']} pictures each,"
    return [
        "",
        f"{told} differences with 95% intervals over prompts:",
        "",
        "| score | before | after | difference |",
        "|---|---|---|---|",
        *rows,
    ]


def _settings(config: RunConfig, run: RunRecord) -> str:
    trained, c = sum(row.get("trajectories", 0) for row in run.rows), config
    return (
        f"Prompts: `{without_folders(c.environment.prompts)}`. {c.iterations} iterations of {c.rollout.groups} groups of {c.rollout.group_size} pictures "
        f"({trained:,} in all) at {c.policy.resolution} px, {c.rollout.num_steps} steps, sampler {c.algorithm.sampler} (noise {c.algorithm.noise_level:g}, "
        f"window {c.algorithm.window}), loss {c.algorithm.loss} (clip {c.algorithm.clip_range:g}, KL weight {c.algorithm.kl_weight:g}), learning rate {c.optim.learning_rate:g}, "
        f"precision {c.policy.dtype}.\n\n"
        "Repeat the run with the settings beside this file:\n\n"
        "```bash\nflowrl train --config config.yaml --out NEW_FOLDER\n```\n\n"
        f"Made with {versions()}. On a GPU a repetition agrees up to the order of floating-point sums."
    )


def _limits(config: RunConfig) -> str:
    return (
        f"- The scores above are those of `{without_folders(config.environment.reward)}`, which is what training maximised. A higher score "
        "can mean better pictures, or pictures that please the reward alone: look at the samples, and at rewards that were "
        "not trained on.\n"
        "- One seed: nothing here says how another run would end.\n"
        "- Diversity, safety, other resolutions, guidance scales and kinds of prompts were not measured.\n"
        "- The licence and the terms of use of the base model, and of the reward's weights, apply."
    )

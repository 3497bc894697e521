"""The model card of a run: what was trained and on what, the measured scores, and how to use and
repeat it.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.policies.families import Family, Flux, text_to_image
from flowrl.rollout import EVALUATION_SEED
from flowrl.run.build import METHOD_FILE, method_parts
from flowrl.run.checkpoint import Checkpoints
from flowrl.run.config import RunConfig, load_config
from flowrl.run.export import base_of, prompt_tokens
from flowrl.run.io import write_bytes
from flowrl.run.models.base import BaseModel
from flowrl.run.models.hub import family_of
from flowrl.run.models.lora_formats import in_diffusers
from flowrl.run.models.memory import architecture_of
from flowrl.run.parts.plugins import versions
from flowrl.run.reading import read_bytes, read_json, read_text
from flowrl.run.records import RunRecord, load_run
from flowrl.run.report.figures import proxy_and_heldout
from flowrl.run.report.pages import render
from flowrl.run.report.style import save
from flowrl.run.results import BEST, best_apart, changes_of, decimals, untrained_of, without_folders
from flowrl.run.saved import SavedWeights, best_checkpoint
from flowrl.run.strips import REFERENCE
from flowrl.run.table import scalars

BESIDE = ("config.yaml", "samples/over-time.png", "samples/prompts.txt", REFERENCE)
GRID = "evaluation/grid.png"
"""Files that a card refers to; `GRID` only with an evaluation of its weights."""


def finish_run(folder: Path) -> list[str]:
    """After `flowrl train`: the card of a model's run, and proxy.png if the run has held-out
    metrics; the lines to print.
    """
    if load_config(folder / "config.json", trust=True).policy.model:
        write_card(folder)
    run, lines = load_run(folder), list[str]()
    figure = proxy_and_heldout({run.arm: [run]})
    if figure is not None:
        save(figure, folder / "proxy.png", dpi=130)
        lines.append(f"Proxy and held-out metrics: {folder / 'proxy.png'}")
    if best := best_apart(folder):
        name = f"{folder / BEST} has the weights of iteration {best}"
        lines.append(f"{name}, the best evaluation; {folder} has those of the last")
    return lines


@dataclass(frozen=True)
class Exported:
    """What a card describes.

    Args:
        weights: the weights of a run.
        form: their format: that of a LoRA, "merged", or "full" for a transformer alone.
        file: the name of the file; "" for the usual one.
        base: the base model.
    """

    weights: SavedWeights
    form: str
    file: str
    base: BaseModel


def write_card(folder: Path) -> None:
    """Write README.md to the folder of a finished run of a model, and to lora/ or full/ together
    with the files it refers to.

    Scores come from metrics.jsonl and, if `flowrl evaluate` has written it,
    evaluation/evaluation.json; nothing is measured.
    """
    config = load_config(folder / "config.json", trust=True)
    tuning, form = config.policy.tuning, {"lora": "diffusers"}.get(config.policy.tuning, "full")
    text = card_text(folder, config)
    write_bytes(folder / "README.md", text.encode())
    if (folder / tuning).is_dir():
        write_beside(folder / tuning, text, folder)
    if best := best_apart(folder):
        saved = SavedWeights("run", folder, f"{best:06d}")
        text = card_text(folder, config, Exported(saved, form, "", base_of(config)))
        write_beside(folder / BEST / tuning, text, folder)


def write_beside(weights: Path, text: str, run: Path) -> None:
    """Write the card `text` of a `run` to the folder `weights`, with the files it refers to."""
    write_bytes(weights / "README.md", text.replace(f"]({weights.name}/", "](").encode())
    grid = weights / GRID
    if not grid.with_name("evaluation.json").exists():
        grid.unlink(missing_ok=True)  # of an earlier card
    for name in (*BESIDE, GRID) if f"]({GRID})" in text else BESIDE:
        if (run / name).exists():
            write_bytes(weights / name, read_bytes(run / name))


def card_text(folder: Path, config: RunConfig, exported: Exported | None = None) -> str:
    """The card of weights of the run in `folder`: the YAML header of the Hub, then Markdown.
    Without `exported`, of those in lora/ or full/ at its end.
    """
    model, form = config.policy.model or "", {"lora": "diffusers"}.get(config.policy.tuning, "full")
    what = exported or Exported(SavedWeights("run", folder), form, "", base_of(config))
    run, base = load_run(folder), what.base
    if not run.rows:
        raise ConfigError(f"weights: {folder} has no metrics yet, so its card cannot be written")
    last = run.rows[-1]
    number = int(what.weights.checkpoint or last.get("exported", last["iteration"]))
    return render(
        "model-card.md.j2",
        header=yaml.safe_dump(
            _header(config, base, what.form, (folder / REFERENCE).is_file()), sort_keys=False
        ),
        config=config,
        base=base.name or Path(model).name,
        known=bool(base.name),
        local=without_folders,
        exported=what,
        in_diffusers=in_diffusers(what.form, base.pipeline),
        sampled=config.as_evaluated().policy,
        snippet=_snippet(folder, config.as_evaluated(), what),
        number=number,
        began=config.policy.adapter or config.optim.start_from or "",
        reason=_reason(what.weights, last),
        tokens=prompt_tokens(config, base),
        loss_guidance=config.loss_guidance().scales(config.policy.guidance_scale),
        method=_method(folder, config),
        scores={} if what.weights.live else _scores(config, run, number),
        decimals=decimals,
        last=last,
        finished=run.finished,
        changes=changes_of(run.rows),
        images=sum(row.get("trajectories", 0) for row in run.rows),
        evaluation=_evaluation(folder, number, what.weights.live),
        grid=GRID if (folder / GRID).exists() else "",
        over_time=(folder / "samples" / "over-time.png").exists(),
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
    )


def _scores(config: RunConfig, run: RunRecord, number: int) -> dict[str, tuple[float, float]]:
    """By score its means before training and at iteration `number`; none if that was not
    evaluated.
    """
    until = [row for row in run.rows if row["iteration"] <= number]
    result = until[-1]["evaluation"] if until and until[-1]["iteration"] == number else None
    after, before = scalars(result or {}), scalars(untrained_of(until))
    return {
        config.environment.sources.text if name == "reward" else name: (before[name], after[name])
        for name in after
        if name != "seconds" and name in before
    }


def _reason(weights: SavedWeights, last: dict[str, Any]) -> str:
    """Which weights of the run these are, and why."""
    if not weights.checkpoint:
        if "exported" in last:
            return "the best evaluated iteration, to which the stopped run returned"
        best = best_apart(weights.path)
        other = f"; {BEST}/ has iteration {best}, the best evaluation" if best else ""
        return f"the end of the run{other}"
    name = f"checkpoint {weights.checkpoint}"
    with suppress(CheckpointError):
        if best_checkpoint(weights.path) == weights.checkpoint:
            return f"{name}, the highest held-out reward among the kept checkpoints"
    if Checkpoints(weights.path).newest == weights.checkpoint:
        return f"{name}, the newest one"
    return f"{name}, chosen by its number"


def _header(config: RunConfig, base: BaseModel, form: str, edits: bool) -> dict[str, Any]:
    is_lora = form not in ("merged", "full")
    method = config.algorithm.method
    tags = ["diffusers", "lora", "reinforcement-learning", "flow-matching", method]
    kind = "video" if config.policy.num_frames > 1 else "image"
    return {
        "base_model": base.name or Path(config.policy.model or "").resolve().name,
        "base_model_relation": "adapter" if is_lora else "finetune",
        **base.licence,
        "library_name": "diffusers",
        "pipeline_tag": "image-to-image" if edits else f"text-to-{kind}",
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
    """What the card shows of evaluation.json, and which weights of the run it is of."""

    command: str
    prompts: int
    count: int
    scores: dict[str, _Difference]
    iteration: int | None = None
    live: bool = False


def _evaluation(folder: Path, number: int, live: bool) -> _Evaluation | None:
    """The evaluation in the run's folder; None if it is of other weights than those, averaged or
    `live`, of iteration `number`.
    """
    path = folder / "evaluation" / "evaluation.json"
    found = read_json(path, _Evaluation) if path.is_file() else None
    is_theirs = found is not None and (found.iteration, found.live) == (number, live)
    return found if is_theirs else None


def _method(folder: Path, config: RunConfig) -> dict[str, str]:
    """The parts and numbers of the method that ran."""
    path = folder / METHOD_FILE
    return read_json(path, dict[str, str]) if path.is_file() else method_parts(config)


NOISE = {
    "StableDiffusion3Pipeline": "channels, {h} // pipe.vae_scale_factor,"
    " {w} // pipe.vae_scale_factor",
    "FluxPipeline": "{h} // side * ({w} // side), channels",
    "Flux2KleinPipeline": "channels, {h} // side, {w} // side",
    "ZImagePipeline": "channels, {h} // pipe.vae_scale_factor, {w} // pipe.vae_scale_factor",
    "QwenImagePipeline": "{h} // side * ({w} // side), channels",
    "QwenImage21Pipeline": "{h} // pipe.vae_scale_factor * ({w} // pipe.vae_scale_factor),"
    " channels",
    "SanaPipeline": "channels, {h} // pipe.vae_scale_factor, {w} // pipe.vae_scale_factor",
    "WanPipeline": "channels, ({f} - 1) // pipe.vae_scale_factor_temporal + 1,"
    " {h} // pipe.vae_scale_factor_spatial, {w} // pipe.vae_scale_factor_spatial",
}
"""The shape of the noise of one image by pipeline, with its `channels`, and the `side` in pixels of
a 2 x 2 patch of the latent image.
"""
EULER = "FlowMatchEulerDiscreteScheduler"


def _snippet(folder: Path, config: RunConfig, what: Exported) -> str:
    """Python that draws the first sample of the run's evaluations with plain diffusers; "" if
    diffusers does not read the file, or if the base model is a single file.
    """
    policy, base = config.policy, what.base
    is_file = (policy.model or "").endswith(".safetensors")
    if is_file or not in_diffusers(what.form, base.pipeline):
        return ""
    model = json.dumps(base.name or Path(policy.model or "").name)
    given = f"torch_dtype=torch.{policy.dtype}"
    euler, classes, lines = _euler(base), ["DiffusionPipeline"], list[str]()
    if what.form == "full":
        classes.append("AutoModel")
        own = f'AutoModel.from_pretrained("THIS_FOLDER", subfolder="transformer", {given})'
        lines.append(f"transformer = {own}")
        given = f"transformer=transformer, {given}"
    if what.form == "merged":
        model = '"THIS_FOLDER"'
    lines.append('device = "cuda" if torch.cuda.is_available() else "cpu"')
    lines.append(f"pipe = DiffusionPipeline.from_pretrained({model}, {given}).to(device)")
    if what.form not in ("full", "merged"):
        file = f", weight_name={json.dumps(what.file)}" if what.file else ""
        lines.append(f'pipe.load_lora_weights("THIS_FOLDER"{file})')
    if euler:
        classes.append(EULER)
        lines.append(euler)
    prompts = folder / "samples" / "prompts.txt"
    text = read_text(prompts).partition("\n")[0] if prompts.is_file() else "a prompt"
    call = [f"prompt={json.dumps(text)}", *_call(config, base)]
    if (folder / REFERENCE).is_file():
        lines.append(f'image = load_image("THIS_FOLDER/{REFERENCE}")')
        call.insert(1, "image=image")
    if prompts.is_file() and text_to_image(base.pipeline) in NOISE:
        lines += _noise(config, base.pipeline)
        call.insert(1, "latents=noise.to(pipe.device, pipe.dtype)")
    kind, images = ("video", "frames") if policy.num_frames > 1 else ("image", "images")
    lines.append(f"{kind} = pipe({', '.join(call)}).{images}[0]")
    imported = [f"from diffusers import {', '.join(sorted(classes, key=str.lower))}"]
    if (folder / REFERENCE).is_file():
        imported.append("from diffusers.utils import load_image")
    return "\n".join(["import torch", *imported, "", *lines])


def _euler(base: BaseModel) -> str:
    """The line that replaces the pipeline's scheduler, if it is not Euler's (as Wan's UniPC)."""
    path = (base.folder or Path()) / "scheduler" / "scheduler_config.json"
    known = base.folder is not None and path.is_file()
    kind = read_json(path, dict[str, Any]).get("_class_name") if known else EULER
    if kind == EULER and (known or base.pipeline != "WanPipeline"):
        return ""
    settings = "pipe.scheduler.config"
    given = f"{settings}.num_train_timesteps, shift={settings}.flow_shift"
    return f"pipe.scheduler = {EULER}({given})"


def _noise(config: RunConfig, pipeline: str) -> list[str]:
    """Lines that draw the noise of the first sample of an evaluation."""
    policy = config.policy
    sizes = {"h": policy.resolution, "w": policy.width or policy.resolution, "f": policy.num_frames}
    shape, lines = (
        NOISE[text_to_image(pipeline)].format(**sizes),
        ["channels = pipe.transformer.config.in_channels"],
    )
    if "side" in shape:
        lines.append("side = 2 * pipe.vae_scale_factor")
    draw = f"generator=torch.Generator().manual_seed({EVALUATION_SEED})"
    lines.append(f"shape = ({config.evaluation.eval_samples}, {shape})")
    return [*lines, f"noise = torch.randn(shape, {draw})[:1]"]


def _call(config: RunConfig, base: BaseModel) -> list[str]:
    """The arguments of the pipeline's call; those of guidance as its family has them."""
    policy = config.policy
    known = None if base.pipeline else architecture_of(policy.model or "")
    family = family_of(base.pipeline) if base.pipeline else known.family if known else Family()
    guidance = family.guidance_arguments(policy.guidance_scale, policy.negative_prompt)
    # FLUX and Qwen-Image guide only with a negative prompt
    if not policy.negative_prompt and "true_cfg_scale" not in guidance:
        guidance.pop("negative_prompt", None)
    if "true_cfg_scale" in guidance and policy.guidance_scale == 1:
        own = guidance.get("guidance_scale", Flux.distilled_guidance)  # the pipelines' default
        guidance = {"guidance_scale": own} if own != Flux.distilled_guidance else {}
    sizes = family.size_arguments(*policy.size)
    call = [f"{name}={value}" for name, value in sizes.items()]
    call += [f"num_frames={policy.num_frames}"] * (policy.num_frames > 1)
    call.append(f"num_inference_steps={config.evaluation.eval_steps}")
    call += [f"{name}={json.dumps(value)}" for name, value in guidance.items()]
    tokens = prompt_tokens(config, base) if policy.max_sequence_length else ""
    return [*call, f"max_sequence_length={tokens}"] if tokens else call

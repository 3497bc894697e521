"""What a run was started with, its settings and its prompts, and what a resume may change of them.

Options of `flowrl train --resume` and edits of config.json are changes; config.yaml has the
settings of the last start or resume, and is not to be edited. The prompts of worlds that are not
built in are in prompts.jsonl and heldout-prompts.jsonl.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, FlowrlError
from flowrl.core.prompt import Prompt
from flowrl.core.protocols import World
from flowrl.run.checkpoint import Checkpoints, read_values
from flowrl.run.config import SIZES, TRACKER, RunConfig, load_config
from flowrl.run.io import write_bytes
from flowrl.run.parts.prompt_sources import Source, source_of
from flowrl.run.parts.prompts import prompt_lines, read_prompts
from flowrl.run.parts.registry import KINDS
from flowrl.run.parts.settings import options_text
from flowrl.run.parts.trust import trust_option
from flowrl.run.reading import read_bytes, read_json
from flowrl.run.results import changes_text
from flowrl.run.worlds import prompts_of

FILES = {"train": "prompts.jsonl", "heldout": "heldout-prompts.jsonl"}
"""The stored prompts by part."""
SETTINGS = {"train": "prompts", "heldout": "heldout_prompts"}


@dataclass(frozen=True)
class Fixed:
    """Why a setting of a run cannot change, and the option by which a new run with another value
    begins with the weights of this one; "" if they do not fit.
    """

    why: str
    option: str = ""


FREE = (
    *(*SIZES, "iterations", "chunk", "overlap_rewards", "offload", "prompt_cache"),
    *("on_reward_error", "reward_timeout"),
    *("device", "reward_device", "attention_backend", "eval_every", *TRACKER),
    *("checkpoint_every", "keep_checkpoints", "observe", "save_experience", "strict"),
)
"""Settings of memory, speed, length, failures and logging, which a resume may change."""
BEGUN = "a run reads it only before its first iteration"
OF_LORA = "the trained weights are the matrices of this LoRA"
OF_METHOD = "it belongs to the method, whose memory and metrics are in the checkpoint"
ON_TOP = "the weights were trained on top of it"
OF_WEIGHTS = "the trained weights belong to it"
ONE_SIZE = "the samples before and after training have one size"
FIXED = {
    **dict.fromkeys(("world", "model", "original", "base_weights", "tuning"), Fixed(OF_WEIGHTS)),
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_targets"), Fixed(OF_LORA, "adapter")),
    "optimizer": Fixed("the checkpoint contains the moments of this optimizer", "adapter"),
    **dict.fromkeys(("frozen_adapters", "quantize"), Fixed(ON_TOP, "start_from")),
    **dict.fromkeys(("seed", "loss_scale"), Fixed(BEGUN, "start_from")),
    **dict.fromkeys(("adapter", "start_from"), Fixed(BEGUN)),
    "task": Fixed("evaluations and the samples before training are of this task", "start_from"),
    **dict.fromkeys(
        ("resolution", "width", "num_frames", "eval_resolution"), Fixed(ONE_SIZE, "start_from")
    ),
    **dict.fromkeys(
        ("method", "credit", "sampler", "loss", "window", "initial_noise", "num_steps"),
        Fixed(OF_METHOD, "start_from"),
    ),
}
"""Settings that no resume can change. All that are in neither table change the numbers of a run,
so that a resume changes them only with consent (`Run.change`).
"""
OTHER_DEVICE = Fixed("random generators of CPU and GPU have different states", "start_from")


def plain_settings(config: RunConfig) -> dict[str, Any]:
    """The settings by name as JSON has them."""
    typed = config.typed().items()
    return {name: [*value] if isinstance(value, tuple) else value for name, value in typed}


def differences(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """[before, now] by setting, of those settings (`plain_settings`) of the run in `folder` that
    differ. Sizes that are auto now are as before, and so are the run's own held-out prompts.
    """
    same = [name for name in SIZES if now[name] == "auto"]
    if now["heldout_prompts"] == [str(folder / FILES["heldout"])]:
        same.append("heldout_prompts")
    pairs = {
        name: [_as_now(before[name], now[name]), now[name]]
        for name in now
        if name in before and name not in same
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _as_now(before: Any, now: Any) -> Any:
    """The value of a setting before, which was one text in earlier versions, as it is written
    now.
    """
    return (
        [*filter(None, [before])] if isinstance(now, list) and isinstance(before, str) else before
    )


def changed_settings(folder: Path, config: RunConfig) -> dict[str, list[Any]]:
    """The `differences` of `config` from the settings of the last start of the run in `folder`;
    none if config.yaml, which has these, is missing or damaged.
    """
    try:
        before = load_config(folder / "config.yaml", trust=True)
    except ConfigError:  # it is written again
        return {}
    return differences(folder, plain_settings(before), plain_settings(config))


def told_changes(folder: Path, config: RunConfig) -> dict[str, list[Any]]:
    """The `changed_settings` but for those that `config` has as the newest checkpoint has them:
    config.yaml was edited, which changes nothing, or no iteration was kept with the other value.
    """
    changed, checkpoints, kept = changed_settings(folder, config), Checkpoints(folder), {}
    with suppress(FlowrlError):  # a damaged checkpoint is refused later
        kept = read_values(checkpoints.path(checkpoints.newest)).get("settings", {})
    return {
        name: values
        for name, values in changed.items()
        if name not in kept or values[-1] != _as_now(kept[name], values[-1])
    }


def _is_free(name: str, values: Sequence[Any]) -> bool:
    """Whether a resume may change a setting from one of `values` to the other: it is one of `FREE`,
    or names a file or folder that was moved.
    """
    if name in SETTINGS.values():
        if any(isinstance(value, str) for value in values):  # "with other content"
            return False
        moved = [[_without_folder(text) for text in value] for value in values]
        return all(values) and moved[0] == moved[-1]
    texts = all(isinstance(value, str) and value and "(" not in value for value in values)
    return name in FREE or (texts and len({Path(value).name for value in values}) == 1)


def _without_folder(text: str) -> Source:
    source = source_of(text)
    place = source.place
    return replace(source, place=place if "(" in place else Path(place).name)


def recorded_changes(
    folder: Path, config: RunConfig, checkpoint: Mapping[str, Any], digest: str
) -> dict[str, list[Any]]:
    """What has changed since the values of a `checkpoint` of the run in `folder` and changes its
    numbers: not the free settings, except for the length of a run whose learning rate decays over
    it. The `digest` is that of the training prompts now. Raises `ConfigError` for `FIXED` settings,
    which are not found earlier if config.yaml is missing.
    """
    if before := checkpoint.get("settings"):
        changed = differences(folder, before, plain_settings(config))
    else:  # of an earlier version
        changed = changed_settings(folder, config)
    if checkpoint.get("prompts", digest) != digest and "prompts" not in changed:
        source = ", ".join(config.environment.prompts) or config.environment.world_name
        changed["prompts"] = [source, f"{source} with other content"]
    _refuse_fixed(folder, config, changed)
    kept = {"iterations"} if config.optim.final_share != 1 else set()
    names = [name for name in changed if name in kept or not _is_free(name, changed[name])]
    return {name: changed[name] for name in names}


def require_resumable(folder: Path, config: RunConfig, start: str, change: bool) -> str:
    """What to say of the run in `folder`, which has ended; "" if it continues with `config`: it has
    not ended, has more iterations now, or continues from the checkpoint `start`.

    Raises `ConfigError` for changed settings that are `FIXED`, that would have no effect, or that
    need `change`.
    """
    changed = told_changes(folder, config)
    _refuse_fixed(folder, config, changed)
    ended = "" if start else _ended(folder, config)
    if ended and changed:
        raise ConfigError(
            f"{ended}, so the changed settings have no effect: {changes_text(changed)}. Undo the"
            f" change, or continue from a checkpoint with --from: {Checkpoints(folder).listed()}"
        )
    need = {name: values for name, values in changed.items() if not _is_free(name, values)}
    if need and not change:
        new = new_run(folder, config, changed, "start_from")
        raise ConfigError(
            f"{folder}: changed settings: {changes_text(need)}: the numbers of the run would no"
            " longer be those of one setting. `flowrl train --resume` takes them with --change"
            " (change=True in Python), and the run records them with the iteration. Or begin a new"
            f" run with its weights: {new}"
        )
    return ended


def begins_again(folder: Path) -> str:
    """That a resume of the run in `folder` begins it again and replaces its iterations, because it
    has no checkpoint; "" if it has one, or no iteration.
    """
    metrics = folder / "metrics.jsonl"
    if Checkpoints(folder).newest or not metrics.exists():
        return ""
    recorded = max(0, read_bytes(metrics, None).count(b"\n") - 1)  # row 0 is the untrained model's
    rows = f"{recorded} recorded iteration{'s' * (recorded != 1)}"
    text = (
        f"{folder} has no checkpoint: the run begins again at iteration 1 and replaces its {rows}"
    )
    return text if recorded else ""


def _refuse_fixed(folder: Path, config: RunConfig, changed: Mapping[str, Sequence[Any]]) -> None:
    refused = [name for name in changed if name in FIXED and not _is_free(name, changed[name])]
    reasons = {name: FIXED[name] for name in refused}
    if "device" in changed and len({str(name).partition(":")[0] for name in changed["device"]}) > 1:
        reasons["device"] = OTHER_DEVICE
    if not reasons:
        return
    texts = (f"{changes_text({name: changed[name]})} ({reasons[name].why})" for name in reasons)
    options = {reason.option for reason in reasons.values()}
    option = "" if "" in options else min(options)  # an adapter is less than a checkpoint
    if option == "adapter" and not (config.policy.model and config.policy.tuning == "lora"):
        option = ""
    what = {
        "": "a new run",
        "adapter": "a new run with the weights of this one",
        "start_from": "a new run with the weights, averages and optimizer of this one",
    }
    raise ConfigError(
        f"{folder}: a resume cannot change {'; '.join(texts)}. Begin {what[option]}:"
        f" {new_run(folder, config, changed, option)}"
    )


def new_run(
    folder: Path, config: RunConfig, changed: Mapping[str, Sequence[Any]], option: str
) -> str:
    """The command of a new run with the settings of the run in `folder` but for the `changed` ones,
    which `option` gives the weights of this run.
    """
    given = {name: values[-1] for name, values in changed.items()}
    given |= {option: f"{folder}@last"} if option else {}
    preset = shlex.quote(str(folder / "config.yaml"))
    trust = trust_option(config.flat())
    return f"flowrl train --preset {preset} {options_text(given)} --out NEW{trust}"


def _ended(folder: Path, config: RunConfig) -> str:
    """That the run in `folder` has ended; "" if it has not, or `config` has more iterations."""
    path = folder / "done.json"
    if not path.exists():
        return ""
    done = read_json(path, dict[str, Any])
    iterations, stopped = int(done["iterations"]), done.get("stopped", "")
    if not stopped and config.iterations > iterations:
        return ""
    why = f"it was stopped by {stopped}" if stopped else "--iterations N continues it to N"
    return f"the run in {folder} has ended after iteration {iterations} ({why})"


def stored_lines(world: World, task: str, part: str) -> bytes:
    """The prompts as JSON lines; of metadata that JSON cannot represent, the name of the type."""
    return prompt_lines(prompts_of(world, task, part), lambda value: type(value).__name__)


def store_prompts(folder: Path, world: World, config: RunConfig) -> None:
    """Write the prompts of a world that is not built in to `folder`."""
    environment = config.environment
    own = environment.world not in KINDS["world"].built_in
    for part, name in FILES.items() if own else ():
        path, lines = folder / name, stored_lines(world, environment.task, part)
        if not path.exists() or read_bytes(path) != lines:
            write_bytes(path, lines)


def changed_prompts(folder: Path, world: World, config: RunConfig) -> dict[str, str]:
    """Of the parts of the prompts that differ from those stored in `folder`, where they are from
    and how many they are.
    """
    environment, changed = config.environment, dict[str, str]()
    for part, name in FILES.items():
        if not (folder / name).exists():
            continue
        stored, lines = read_bytes(folder / name), stored_lines(world, environment.task, part)
        if stored != lines:
            setting = SETTINGS[part]
            given = getattr(environment, setting) or environment.prompts
            source = ", ".join(given) or world.name
            before, now = (text.count(b"\n") for text in (stored, lines))
            changed[part] = f"{setting} {source} ({before} prompts at the start, {now} now)"
    return changed


def with_stored_prompts(folder: Path, config: RunConfig) -> RunConfig:
    """The settings of the run of a model in `folder` with its stored prompts, if it has them: its
    files of prompts may have changed, or be on another machine.
    """
    if not config.policy.model or not all((folder / name).exists() for name in FILES.values()):
        return config
    files = {SETTINGS[part]: str(folder / name) for part, name in FILES.items()}
    return config.replace(reward=config.environment.sources.reward, **files)


def stored_heldout(folder: Path, config: RunConfig) -> list[Prompt]:
    """The prompts that the run in `folder` has held out of training, which stay those of its
    evaluations whatever the training prompts are; none if it has not, or no longer.
    """
    paths = [folder / name for name in FILES.values()]
    chosen = {SETTINGS["heldout"], "hold_out"} & changed_settings(folder, config).keys()
    splits = config.environment.hold_out and not config.environment.heldout_prompts
    if chosen or not splits or not config.policy.model or not all(p.exists() for p in paths):
        return []
    train, held = map(read_bytes, paths)
    return [] if train == held else read_prompts(paths[1])


def resumed_prompts(
    folder: Path, world: World, config: RunConfig, change: bool
) -> tuple[RunConfig, str]:
    """The settings with which the run in `folder` continues, and what to say of changed prompts.

    Evaluations keep the stored held-out prompts, so that they stay comparable, unless the setting
    `heldout_prompts` has changed. Raises `ConfigError` for changed prompts without consent to a
    `change`, and for other held-out prompts of a user's world or of several sources.
    """
    changed = changed_prompts(folder, world, config)
    name, settings = SETTINGS["heldout"], changed_settings(folder, config)
    if "hold_out" in settings or (name in settings and not _is_free(name, settings[name])):
        changed.pop("heldout", None)
    model, held = bool(config.policy.model), folder / FILES["heldout"]
    if not changed:
        return config, ""
    several = len(config.environment.sources.train) > 1
    if not change or ("heldout" in changed and (several or not model)):
        raise ConfigError(
            f"{folder}: prompts have changed since the run started: {'; '.join(changed.values())}."
            f" Restore them; the run's own are in {folder / FILES['train']} and {held}."
            " `flowrl train --resume` takes other training prompts with --change (change=True in"
            " Python)"
        )
    text = f"changed prompts: {'; '.join(changed.values())}"
    if "heldout" in changed:
        config = config.replace(heldout_prompts=str(held))
        text += f"; evaluations keep those in {held}"
    return config, text

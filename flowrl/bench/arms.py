"""The arms of the tuned comparison: each method's settings, and its searched numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl.compare.arms import (
    check_arms,
    credit_arms,
    load_arms,
    of_arm,
    parse_arm,
    rule_name,
    together,
)
from flowrl.compare.bounds import CREDIT
from flowrl.core.errors import ConfigError, require
from flowrl.methods import METHODS
from flowrl.run import presets
from flowrl.run.build import check, run_method
from flowrl.run.config import RunConfig, preset
from flowrl.run.parts.registry import options_of
from flowrl.run.parts.specs import parse_options, parse_spec
from flowrl.run.presets import METHOD_SETTINGS

_EULER = {"eval_steps": 20, "eval_solver": "euler"}
_DPM = {"eval_steps": 10, "eval_solver": "dpm++"}
WORLDS: dict[str, dict[str, Any]] = {
    "mixture": {
        "world": "mixture",
        "task": "direction",
        "window": "0:5",
        "iterations": 40,
        "eval_every": 2,
        "eval_samples": 768,
        **_EULER,
    },
    "shapes": {
        "world": "shapes",
        "task": "compositional",
        "window": "2:7",
        "iterations": 24,
        "eval_every": 4,
        "eval_samples": 768,
        **_DPM,
    },
}
"""Settings that all compared runs of a world share, besides the defaults.

The window is also that of methods with a published window of their own.
"""
SHORT: dict[str, dict[str, Any]] = {
    "mixture": {"eval_every": 4, "eval_samples": 384},
    "shapes": {"iterations": 12, "eval_every": 4, "eval_samples": 384, **_EULER},
}
"""How a world's tuning runs differ from these. They sample images by 20 Euler steps; results use 10
steps of DPM-Solver++ at half the cost.
"""


@dataclass(frozen=True)
class Knob:
    """A number that is searched on the grid start * factor^k: a setting of the run, or a name in
    braces in a spec.

    `start` has the start per world; in a user's world it is `elsewhere` of a run of uniform credit.
    `most` is the largest value that is tried.
    """

    factor: float
    start: Mapping[str, float]
    elsewhere: Callable[[RunConfig], float] | None = None
    most: float = math.inf

    def value(self, world: str, level: int) -> float:
        """The value at a level, to three digits."""
        start = self.start.get(world, next(iter(self.start.values())))
        if world not in self.start and self.elsewhere is not None:
            start = self.elsewhere(preset("default").apply(**settings_of(world)))
        return float(f"{min(start * self.factor**level, self.most):.3g}")


def settings_of(world: str) -> dict[str, Any]:
    """The settings that all runs in a world share: of `WORLDS`, of a user's world by its spec, or
    of a model, which is written as ``model(model=PATH, prompts=FILE, ...)``.
    """
    if world in WORLDS:
        return WORLDS[world]
    spec = parse_spec(world, "world")
    return dict(spec.options) if spec.name == "model" else {"world": world}


def short_name(world: str) -> str:
    """A world on a line of text: a model without its settings."""
    return f"model {settings_of(world)['model']}" if world.startswith("model(") else world


def world_label(world: str) -> str:
    """A world in words."""
    labels = {"mixture": "2-D world", "shapes": "image world"}
    return labels.get(world) or (
        short_name(world) if world.startswith("model(") else f"world {world.rpartition('/')[2]}"
    )


def chosen_worlds(
    world: str, model: str = "", prompts: str = "", reward: str = "", settings: str = ""
) -> list[str]:
    """The worlds that options name: those of `WORLDS` for "all", one of them, a user's world by its
    spec, or a model with its prompts, its reward and further `settings` as ``option=value, ...``.
    Raises `ConfigError` for a world or settings that do not exist.
    """
    if model:
        chosen = {
            "model": model,
            "prompts": prompts,
            "reward": reward,
            **parse_options(settings, "set"),
        }
        options = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value != "")
        world = f"model({options})"
    else:
        alone = prompts or reward or settings
        require(not alone, "prompts, reward, set", alone, "given with --model only")
    if world == "all":
        return list(WORLDS)
    if world not in WORLDS:
        check(preset("default").apply(**settings_of(world)))
    return [world]


MOST_CLIP = 0.9
"""The largest clip range that is tried; losses allow less than 1."""


def _own_clip(run: RunConfig) -> float:
    return float(getattr(run_method(run).loss, "clip_range", 0.0))


def _own_rate(run: RunConfig) -> float:
    return run.optim.learning_rate


CLIP = Knob(3.0, {"mixture": 2e-2, "shapes": 2e-3}, _own_clip, MOST_CLIP)
"""The clip range of log-ratios grows with the square root of the latent's dimension at equal KL:
1e-4 at d = 65,536 is 1.8e-2 at d = 2, and images of this world are near 1e-3.
"""
RATE = Knob(2.0, {"mixture": 2e-2, "shapes": 4e-3}, _own_rate)
NOISE = Knob(1.4, {"mixture": 0.7, "shapes": 0.7})
POLICY: dict[str, Knob] = {"clip_range": CLIP, "learning_rate": RATE, "noise_level": NOISE}
"""The knobs of every method that trains on the steps of a stochastic sampler."""


def everywhere(factor: float, start: float, most: float = math.inf) -> Knob:
    """A knob with the same start in both worlds."""
    return Knob(factor, dict.fromkeys(WORLDS, start), most=most)


@dataclass(frozen=True)
class Arm:
    """A method with fixed `settings`, in whose specs `{name}` stands for the value of a knob, and
    the `knobs` to search.

    `worlds` are those in which it is compared; `control` marks a control. `same` names a method
    that is the same rule with the same settings, whose runs would repeat this arm's numbers.
    """

    name: str
    settings: Mapping[str, Any]
    knobs: Mapping[str, Knob] = field(default_factory=lambda: POLICY)
    worlds: tuple[str, ...] = ("mixture",)
    control: bool = False
    same: str = ""

    def values(self, world: str, levels: Mapping[str, int]) -> dict[str, float]:
        """The knobs' values at levels of the grid; a knob without a level is at its start."""
        return {name: knob.value(world, levels.get(name, 0)) for name, knob in self.knobs.items()}

    def changes(self, world: str, values: Mapping[str, float]) -> dict[str, Any]:
        """The settings of a run with these values of the knobs."""
        settings, used = dict[str, Any](), set[str]()
        for name, setting in self.settings.items():
            chosen = (
                setting.get(world, setting["shapes"]) if isinstance(setting, Mapping) else setting
            )
            for knob in self.knobs:  # other braces are a dictionary's
                if isinstance(chosen, str) and f"{{{knob}}}" in chosen:
                    used.add(knob)
                    chosen = chosen.replace(f"{{{knob}}}", format(values[knob], "g"))
            settings[name] = chosen
        return {**settings, **{name: value for name, value in values.items() if name not in used}}

    def run(self, world: str, values: Mapping[str, float], **more: Any) -> RunConfig:
        """The run in a world."""
        shared, changes = {**settings_of(world), **more}, self.changes(world, values)
        return preset("default").apply(**{**shared, **changes, **more})


BOTH = ("mixture", "shapes")
_OWN = METHOD_SETTINGS["world"]
ONE_STEP = "weighted(weights=noise, rule=\"sibling-relative(probe='comb(branches=6, count=1)')\")"
"""The rule of the tuned arm tempflow-grpo: 6 draws at one drawn step. The method draws 6 at every
step.
"""
_ARMS = (
    Arm("uniform", {"method": "flow-grpo"}, worlds=BOTH),
    Arm(
        "uniform, larger groups",
        {"method": "flow-grpo", "group_size": {"mixture": 29, "shapes": 25}},
        worlds=BOTH,
        control=True,
    ),
    Arm("stepwise gains", {"method": "stepwise-flow-grpo"}, worlds=BOTH),
    Arm("turning points", {"method": "tp-grpo"}, worlds=BOTH),
    Arm(
        "turning points at random steps",
        {"credit": "turning-point-variant(where=random)"},
        worlds=BOTH,
        control=True,
    ),
    Arm(
        "increments alone",
        {"credit": "turning-point-variant(where='none')"},
        worlds=BOTH,
        same="dense-grpo",
    ),
    Arm("branch-grpo", {"method": "branch-grpo", "sampler": "flow-sde"}, worlds=BOTH),
    Arm(
        "diffusion-nft",
        {"method": "diffusion-nft", "loss": "diffusion-nft(beta={beta})"},
        {"learning_rate": RATE, "beta": everywhere(3.0, 1.0)},
        worlds=BOTH,
    ),
    Arm(
        "tempflow-grpo",
        {"method": "tempflow-grpo", "credit": ONE_STEP, "groups": 16, "group_size": 24},
    ),
    Arm("granular-grpo", {"method": "granular-grpo", "group_size": 36}),
    Arm("tree-grpo", {"method": "tree-grpo"}),
    Arm(
        "awm",
        {"method": "awm", "loss": "awm(clip={clip}, kl_weight={kl})"},
        {"learning_rate": RATE, "clip": everywhere(3.0, 1.0), "kl": everywhere(10.0, 1e-3)},
    ),
    Arm(
        "dgpo",
        {"method": "dgpo", "loss": "dgpo(beta_dpo={beta}, sample_from=None)"},
        {"learning_rate": RATE, "beta": everywhere(3.0, 1.0)},
    ),
    Arm("v-grpo", {"method": "v-grpo", **_OWN["v-grpo"]}, {"learning_rate": RATE}, BOTH),
    Arm("epg", {"method": "epg", **_OWN["epg"]}, {"learning_rate": RATE}, BOTH),
    Arm(
        "fdfo",
        {"method": "fdfo", "window": ":", **_OWN["fdfo"]},
        {"learning_rate": RATE, "noise_level": everywhere(2.0, 0.045, most=1.0)},
        BOTH,
    ),
    Arm("rsm", {"method": "rsm", **_OWN["rsm"]}, worlds=BOTH),
    Arm(
        "step-nft",
        {"method": "step-nft", "loss": "step-nft(scale={scale})"},
        {"learning_rate": RATE, "noise_level": NOISE, "scale": everywhere(3.0, 1.0)},
        BOTH,
    ),
    Arm("noise-weighted", {"method": "noise-weighted"}),
    Arm("gains over a moving average", {"credit": "moving-average-gain"}),
    Arm("gains, one-step estimate", {"credit": "stepwise-gain(probe=tweedie)"}),
    Arm("random credit", {"method": "flow-grpo", "credit": "random(seed=0)"}, control=True),
    Arm("true advantages", {"credit": CREDIT}, control=True),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ARMS}
"""The compared arms. An iteration of "uniform, larger groups" costs as many forward equivalents
(`flowrl.run.costs`) as one of turning points, up to the rounding of the size.
"""


def tuned(world: str, arm: str) -> dict[str, float]:
    """The tuned values of an arm in a world; the start of the grid without a search."""
    entry = presets.tuned().get(world, {}).get(arm)
    return entry["values"] if entry else ARMS[arm].values(world, {})


def in_world(arm: Arm, world: str) -> bool:
    """Whether an arm is compared in a world."""
    return world in arm.worlds or world not in WORLDS


def is_tuned(world: str, arm: str) -> bool:
    """Whether an arm has tuned values in a world."""
    return arm in presets.tuned().get(world, {})


def tuned_entry(arm: Arm, world: str, values: Mapping[str, float]) -> dict[str, Any]:
    """What `flowrl bench tune --save` writes for an arm: its method, the tuned values, and the
    settings of a run with them.
    """
    method = "" if arm.control else arm.same or arm.settings.get("method", "")
    settings = {"window": settings_of(world).get("window", ""), **arm.changes(world, values)}
    if arm.same:
        settings = {**settings, "method": arm.same}
        del settings["credit"]
    return {"method": method, "values": dict(values), "settings": settings}


def named_arm(name: str) -> Arm:
    """An arm of `ARMS`, a method of flowrl by name, or a credit rule by its spec. Raises
    `ConfigError` for neither.
    """
    if name in ARMS:
        return ARMS[name]
    same = [
        arm
        for arm in ARMS.values()
        if name in (arm.settings.get("method"), arm.same) and not arm.control
    ]
    if same:
        return same[0]
    if name in METHODS:
        return Arm(name, {"method": name}, worlds=BOTH)
    require(
        "{" not in name,
        "method",
        name,
        "a method, a credit rule's spec, or one of " + ", ".join(ARMS),
    )
    try:
        return own_arm(rule_name(name), credit_arms([name])[rule_name(name)])
    except ConfigError as error:
        raise ConfigError(
            f"method = {name!r} is not allowed; allowed: {', '.join(ARMS)}, a method, or a credit"
            f" rule's spec: {error}"
        ) from error


def own_arm(name: str, settings: Mapping[str, Any]) -> Arm:
    """An arm of one's own, as in `flowrl compare --arm`, in both worlds.

    The knobs are those of `POLICY` that `settings` do not set and that its kernel or its loss has.

    Raises `ConfigError` for a name of `ARMS`, or if the settings are not allowed or are those of
    uniform credit.
    """
    require(name not in ARMS, "arm", name, "a name that is not one of " + ", ".join(ARMS))
    arm = Arm(
        name,
        settings,
        {knob: value for knob, value in POLICY.items() if knob not in settings},
        BOTH,
    )
    for world in BOTH:
        # rewards may differ: all arms have the world's scores
        base = ARMS["uniform"].run(world, {}, heldout_rewards=("soft",))
        check_arms(base, {"uniform": {}, name: settings}, (0,))
    with of_arm(name):
        count = settings.get("iterations")
        require(
            count is None, "iterations", count, "left out: all arms have those of the benchmark"
        )
        run = arm.run("mixture", arm.values("mixture", {}))
        check(run)
    parts = {
        "clip_range": ("loss", run_method(run).loss),
        "noise_level": ("sampler", run_method(run).sampler),
    }
    without = [
        knob
        for knob, (kind, part) in parts.items()
        if not (hasattr(part, knob) or _accepts(kind, settings, knob))
    ]
    return replace(
        arm, knobs={knob: value for knob, value in arm.knobs.items() if knob not in without}
    )


def _accepts(kind: str, settings: Mapping[str, Any], option: str) -> bool:
    """Whether the part of a `kind` that `settings` name has an `option`, under whatever attribute
    it keeps the value.
    """
    spec = settings.get(kind)
    return bool(spec) and option in options_of(kind, parse_spec(spec, kind).name)


def own_arms(texts: Sequence[str], file: Path | None = None, trust: bool = False) -> list[Arm]:
    """The arms of `texts` ("NAME: setting=value, ...") and of a YAML file, as `flowrl compare`
    reads them.
    """
    typed, read = together(*map(parse_arm, texts)), load_arms(file, trust) if file else {}
    return [own_arm(name, settings) for name, settings in together(typed, read).items()]

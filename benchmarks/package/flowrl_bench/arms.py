"""The arms of the tuned comparison: each method's settings, and its searched numbers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, require
from flowrl.methods import METHODS
from flowrl.training.build import check
from flowrl.training.compare import rule_name
from flowrl.training.config import RunConfig, preset
from flowrl_bench.digest import MEASURED

_EULER = {"eval_steps": 20, "eval_solver": "euler"}
_DPM = {"eval_steps": 10, "eval_solver": "dpm++"}
WORLDS: dict[str, dict[str, Any]] = {
    "mixture": {"world": "mixture", "task": "direction", "iterations": 40, "eval_every": 2, "eval_samples": 768, **_EULER},
    "shapes": {"world": "shapes", "task": "compositional", "iterations": 24, "eval_every": 4, "eval_samples": 768, **_DPM},
}
"""Settings that all compared runs of a world share, besides the defaults; image runs are made for two further tasks."""
TASKS: dict[str, tuple[str, ...]] = {"mixture": ("direction",), "shapes": ("compositional", "text", "preference")}
SHORT: dict[str, dict[str, Any]] = {
    "mixture": {"eval_every": 4, "eval_samples": 384},
    "shapes": {"iterations": 12, "eval_every": 4, "eval_samples": 384, **_EULER},
}
"""How a world's tuning runs differ from these. Images are sampled by 20 Euler steps there, and by 10 of DPM-Solver++ in results,
for half the cost."""


@dataclass(frozen=True)
class Knob:
    """A number that is searched on the grid start * factor^k: a setting of the run, or a name in braces in a spec.

    `start` has the start per world.
    """

    factor: float
    start: Mapping[str, float]

    def value(self, world: str, level: int) -> float:
        """The value at a level, to three digits."""
        return float(f"{self.start[world] * self.factor**level:.3g}")


CLIP = Knob(3.0, {"mixture": 2e-2, "shapes": 2e-3})
"""The clip range of log-ratios grows with the square root of the latent's dimension at equal KL: 1e-4 at d = 65,536 is
1.8e-2 at d = 2, and images of this world are near 1e-3."""
RATE = Knob(2.0, {"mixture": 2e-2, "shapes": 4e-3})
NOISE = Knob(1.4, {"mixture": 0.7, "shapes": 0.7})
POLICY: dict[str, Knob] = {"clip_range": CLIP, "learning_rate": RATE, "noise_level": NOISE}
"""Of every method that trains on the steps of a stochastic sampler."""


def everywhere(factor: float, start: float) -> Knob:
    """A knob with the same start in both worlds."""
    return Knob(factor, dict.fromkeys(WORLDS, start))


@dataclass(frozen=True)
class Arm:
    """A method with fixed `settings`, in whose specs `{name}` stands for the value of a knob, and the `knobs` to search.

    `worlds` are those in which it is compared; `control` marks a control. `same` names a method that is the same rule with the
    same settings, whose runs would repeat this arm's numbers.
    """

    name: str
    settings: Mapping[str, Any]
    knobs: Mapping[str, Knob] = field(default_factory=lambda: POLICY)
    worlds: tuple[str, ...] = ("mixture",)
    control: bool = False
    same: str = ""

    @property
    def label(self) -> str:
        """The name in tables and figures."""
        return f"{self.name}{f' = {self.same}' if self.same else ''}{' (control)' if self.control else ''}"

    def values(self, world: str, levels: Mapping[str, int]) -> dict[str, float]:
        """The knobs' values at levels of the grid; a knob without a level is at its start."""
        return {name: knob.value(world, levels.get(name, 0)) for name, knob in self.knobs.items()}

    def changes(self, world: str, values: Mapping[str, float]) -> dict[str, Any]:
        """The settings of a run with these values of the knobs."""
        found, used = dict[str, Any](), set[str]()
        for name, setting in self.settings.items():
            chosen = setting[world] if isinstance(setting, Mapping) else setting
            if isinstance(chosen, str) and "{" in chosen:
                used |= {knob for knob in self.knobs if f"{{{knob}}}" in chosen}
                chosen = chosen.format(**{knob: format(values[knob], "g") for knob in self.knobs})
            found[name] = chosen
        return {**found, **{name: value for name, value in values.items() if name not in used}}

    def run(self, world: str, values: Mapping[str, float], **more: Any) -> RunConfig:
        """The run in a world."""
        return preset("default").apply(**{**WORLDS[world], **self.changes(world, values), **more})


BOTH = ("mixture", "shapes")
_ARMS = (
    Arm("uniform", {"method": "flow-grpo"}, worlds=BOTH),
    Arm(
        "uniform, larger groups",
        {"method": "flow-grpo", "group_size": {"mixture": 40, "shapes": 36}},
        worlds=BOTH,
        control=True,
    ),
    Arm("stepwise gains", {"method": "stepwise-flow-grpo"}, worlds=BOTH),
    Arm("turning points", {"method": "tp-grpo"}, worlds=BOTH),
    Arm("turning points at random steps", {"credit": "turning-point(where=random)"}, worlds=BOTH, control=True),
    Arm("increments alone", {"credit": "turning-point(where='none')"}, worlds=BOTH, same="dense-grpo"),
    Arm("branch-grpo", {"method": "branch-grpo"}, worlds=BOTH),
    Arm(
        "diffusion-nft",
        {"method": "diffusion-nft", "loss": "diffusion-nft(beta={beta})"},
        {"learning_rate": RATE, "beta": everywhere(3.0, 1.0)},
        worlds=BOTH,
    ),
    Arm("tempflow-grpo", {"method": "tempflow-grpo", "group_size": 24, **MEASURED["tempflow-grpo"]}),
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
    Arm("noise-weighted", {"method": "noise-weighted"}),
    Arm("gains over a moving average", {"credit": "moving-average-gain"}),
    Arm("gains, one-step estimate", {"credit": "stepwise-gain(probe=tweedie)"}),
    Arm("random credit", {"method": "random", "credit": "random(seed=0)"}, control=True),
    Arm("true advantages", {"credit": "stepwise-gain(probe='continuation:8')"}, control=True),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ARMS}
"""The compared arms. "uniform, larger groups" has as many network evaluations per iteration as stepwise gains."""


TUNED = Path(__file__).parent / "tuned.json"
"""What `flowrl bench tune --save` has written: the values that were found, by world and arm."""


def tuned(world: str, arm: str) -> dict[str, float]:
    """The values found for an arm in a world; the start of the grid without a search."""
    return _tuned().get(world, {}).get(arm) or ARMS[arm].values(world, {})


def is_tuned(world: str, arm: str) -> bool:
    """Whether values were found for an arm in a world."""
    return arm in _tuned().get(world, {})


@cache
def _tuned() -> dict[str, dict[str, dict[str, float]]]:
    return json.loads(TUNED.read_text()) if TUNED.exists() else {}


def named_arm(name: str) -> Arm:
    """An arm of `ARMS`, a method of flowrl by name, or a credit rule by its spec. Raises `ConfigError` for neither."""
    if name in ARMS:
        return ARMS[name]
    same = [arm for arm in ARMS.values() if name in (arm.settings.get("method"), arm.same) and not arm.control]
    if same:
        return same[0]
    if name in METHODS:
        return Arm(name, {"method": name}, worlds=BOTH)
    require("{" not in name, "method", name, "a method, a credit rule's spec, or one of " + ", ".join(ARMS))
    arm = Arm(rule_name(name), {"credit": name, "method": rule_name(name)}, worlds=BOTH)
    try:
        check(arm.run("mixture", arm.values("mixture", {})))
    except ConfigError as error:
        raise ConfigError(
            f"method = {name!r} is not allowed; allowed: {', '.join(ARMS)}, a method, or a credit rule's spec: {error}"
        ) from error
    return arm

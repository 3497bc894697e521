"""The rows of the study of merit: credit rules on branched and plain trajectories, and probes, each
as settings of a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.training.config import RunConfig, preset
from flowrl.training.presets import WORLD_DEFAULTS
from flowrl_bench.digest import MEASURED

Kind = Literal["method", "probe", "tree rule", "ceiling", "run"]
WORLDS = ("mixture", "shapes")
HELD_OUT = {"eval_samples": 192, "eval_steps": 20, "eval_solver": "euler"}


@dataclass(frozen=True)
class Row:
    """A credit rule with its probe, as `settings` of a run: a method by name, or a rule by spec.

    Methods and probes are also trained, rows of kind "run" are only trained, and the others are
    only compared with the true advantage.
    """

    name: str
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> bool:
        """Whether training runs are part of the study."""
        return self.kind in ("method", "probe", "run")

    @property
    def judged(self) -> bool:
        """Whether its credit is compared with the true advantage."""
        return self.kind != "run"

    def run(self, world: str, **changes: Any) -> RunConfig:
        """The default run of a world with this rule, in the world's window even if the method has
        its own.
        """
        shared = {**HELD_OUT, "window": WORLD_DEFAULTS[world]["window"]}
        return preset("default").apply(world=world, **{**shared, **self.settings, **changes})


CHANGES: dict[str, dict[str, Any]] = {
    "branch-grpo": {"sampler": "flow-sde"},
    **{name: {**settings, "group_size": 12} for name, settings in MEASURED.items()},
}
"""Changes to methods: all rows have the same kernel, and groups of 12."""


def _methods() -> Iterator[Row]:
    papers = (
        "flow-grpo",
        "stepwise-flow-grpo",
        "tp-grpo",
        "branch-grpo",
        "tempflow-grpo",
        "granular-grpo",
        "tree-grpo",
    )
    for name in papers:
        yield Row(name, "method", {"method": name, **CHANGES.get(name, {})})


RUNS: dict[str, dict[str, Any]] = {
    "tempflow-grpo, groups of 24": {
        "method": "tempflow-grpo",
        **MEASURED["tempflow-grpo"],
        "group_size": 24,
    },
    "granular-grpo, groups of 36": {"method": "granular-grpo", "group_size": 36},
    **{name: {"method": name} for name in ("diffusion-nft", "awm", "dgpo")},
}
"""Combs with the published number of draws, which take fewer evaluations than Flow-GRPO's groups of
12; and the methods whose losses have no decisions to credit.
"""

PROBES: dict[str, str] = {
    "Substeps(5)": "substeps(count=5)",
    "Tweedie": "tweedie",
    "Substeps(2)": "substeps(count=2)",
    "Substeps(3)": "substeps(count=3)",
    "Substeps(2), DPM-Solver++": "substeps(count=2,solver=dpm++)",
    "Substeps(3), DPM-Solver++": "substeps(count=3,solver=dpm++)",
    "Substeps(2), UniPC": "substeps(count=2,solver=unipc)",
    "Substeps(3), UniPC": "substeps(count=3,solver=unipc)",
    "Substeps(3), Heun": "substeps(count=3,solver=heun)",
    "Substeps(5), every second node": "substeps(count=5,every=2)",
    "Substeps(3), every second node": "substeps(count=3,every=2)",
    "Substeps(3), DPM-Solver++, every second node": "substeps(count=3,solver=dpm++,every=2)",
    "Substeps(5), half of the members, Tweedie control": "some-members(fraction=0.5)",
    "Substeps(5), half of the members, uniform control": (
        "some-members(fraction=0.5,control=uniform)"
    ),
    "Substeps(5), bfloat16": "substeps(count=5,dtype=bfloat16)",
    "Substeps(5), no guidance": "substeps(count=5,guidance=off)",
    "Completion": "completion",
    "Completion, every second node": "completion(every=2)",
}
"""Probes of stepwise gains, by their names in tables."""

SHAPES: dict[str, str] = {
    "branch-grpo": "branch(children=(1,1,2,1,2))",
    "tree-grpo": "branch(children=(1,2,2))",
    "tempflow-grpo": "comb(branches=6,count=1)",
    "granular-grpo": "comb(branches=1,count=1,strides=(1,2,3))",
}
"""The trees of the named methods (`flowrl.methods`)."""

SHARED_NOISE = ("branch-grpo", "tree-grpo", "granular-grpo")

RULES: dict[str, str] = {
    "uniform": "uniform(probe={})",
    "gain": "stepwise-gain(probe={})",
    "sibling": "sibling-relative(probe={})",
    "sibling, not normalised": "sibling-relative(normalise=False,leave_one_out=True,probe={})",
    "depth, per prompt": "depth-relative(probe={})",
    "depth, per tree": "depth-relative(scope=tree,probe={})",
    "backed-up, softmax": "backed-up(probe={})",
    "backed-up, mean": "backed-up(backup=mean,probe={})",
}
"""Rules that read the values of a branched tree."""


def _rows() -> Iterator[Row]:
    yield from _methods()
    for name, probe in PROBES.items():
        if name != "Substeps(5)":  # the row of stepwise-flow-grpo
            yield Row(f"gains, {name}", "probe", {"credit": f"stepwise-gain(probe='{probe}')"})
    for shape, tree in SHAPES.items():
        for rule, spec in RULES.items():
            noise = "shared" if shape in SHARED_NOISE else "independent"
            yield Row(
                f"{rule}, tree of {shape}",
                "tree rule",
                {"credit": spec.format(f"'{tree}'"), "initial_noise": noise},
            )
    for name, settings in RUNS.items():
        yield Row(name, "run", settings)
    yield Row(
        "gains, 16 continuations", "ceiling", {"credit": "stepwise-gain(probe='continuation:16')"}
    )


ROWS: dict[str, Row] = {row.name: row for row in _rows()}
"""All rows by name, in the order of the tables."""
REFERENCE = "stepwise-flow-grpo"
"""The row that cheap probes are compared with: gains of Substeps(5)."""

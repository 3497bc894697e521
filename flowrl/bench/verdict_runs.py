"""The runs of the verdict: its tasks and arms, the searches for their settings, and the runs on
fresh seeds.

Every arm has equally many iterations and trajectories. In the 2-D world the arm `ORACLE` has exact
values, whose cost does not count; its lead is what a credit rule can gain, as a reference and not
as a strict bound.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl.bench.arms import ARMS as METHOD_ARMS
from flowrl.bench.arms import MOST_CLIP, POLICY, WORLDS, Arm, Knob
from flowrl.bench.digest import config_id
from flowrl.bench.evidence import Line
from flowrl.bench.results_file import Lines, ResultsFile
from flowrl.bench.suite import execute_study
from flowrl.bench.tune import SEEDS, Search, chosen
from flowrl.core.options import Workers
from flowrl.run.build import check
from flowrl.run.config import RunConfig
from flowrl.run.presets import METHOD_SETTINGS


def exact(points: int = 29, reach: float = 4.0) -> str:
    """The oracle in two dimensions, on a grid.

    Z per decision gives all decisions the same scale, as uniform credit has it. With joint Z, most
    of the variance belongs to the last drawn step once groups are nearly solved, next to the steps
    that have no credit.

    Advantages on the default grid correlate with those of 113 x 113 points by 0.998 or more in each
    group and decision if 5 of 10 steps are drawn (up to 12 iterations). With 9 of 10, medians over
    groups are 0.987 or more, and single ones of small gains lower. Rewards with steps need a finer
    grid.
    """
    return f"stepwise-gain(normalise='step', probe='exact(points={points}, reach={reach:g})')"


SAMPLED = "stepwise-gain(normalise='step', probe='continuation:64')"
"""The oracle elsewhere: Monte Carlo, so that its headroom is the best known, at least."""
_OWN = METHOD_SETTINGS["world"]


def _method_arm(name: str) -> Arm:
    """An arm of the tuned comparison, with the initial noise of its method."""
    arm = METHOD_ARMS[name]
    own = {"initial_noise": "auto"} if "method" in arm.settings else {}
    return replace(arm, settings={**own, **arm.settings})


ARMS: dict[str, dict[str, Any] | Arm] = {
    **{
        name: _method_arm(name)
        for name in (
            "uniform, larger groups",
            "noise-weighted",
            "stepwise gains",
            "turning points",
            "turning points at random steps",
            "increments alone",
            "branch-grpo",
            "tree-grpo",
            "granular-grpo",
            "rsm",
            "diffusion-nft",
            "awm",
            "dgpo",
            "v-grpo",
            "epg",
            "fdfo",
            "step-nft",
        )
    },
    "tempflow-grpo": {"method": "tempflow-grpo", **_OWN["tempflow-grpo"]},
    **{f"uniform, {groups} groups": {"groups": groups} for groups in (10, 8, 6)},
    "turning points, not the first": {"credit": "turning-point(first_step=false)"},
    "calibrated values": {"credit": "calibrated-gain()"},
    "calibrated values and critic": {"credit": "calibrated-gain(probe=critic)"},
    "calibrated values of the hidden state": {
        "credit": "calibrated-gain(probe='critic(reads=hidden, base=zero)')"
    },
    "calibrated values as a baseline": {"credit": "calibrated-gain(gain_weight=0)"},
    "calibrated values, full weight": {"credit": "calibrated-gain(gain_weight=1)"},
    "values, not calibrated": {"credit": "stepwise-gain(probe=tweedie)"},
    "random credit": {"credit": "random(seed=0)"},
}
"""The arms besides uniform credit and exact values. "uniform, larger groups" cost as much per
iteration as turning points.
"""
ONLY_IN_2D = (
    "granular-grpo",
    "calibrated values of the hidden state",
    "calibrated values, full weight",
    "values, not calibrated",
    "random credit",
)
FORM = "reward"
"""The column of the primary outcome: the trained form of the score."""
UNIFORM, ORACLE = "uniform", "oracle"


@dataclass(frozen=True)
class Task:
    """The 2-D world with `changes` of its settings, or a world of `flowrl.worlds.points`.

    `dimension` scales the first clip of the search: log-ratios are means over the coordinates.
    `oracle` is the credit rule whose lead over uniform credit is the headroom; "" if there is none.
    `tuned_in` names the task of the searches, if not this one.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    world: str = "mixture"
    dimension: int = 2
    oracle: str = exact()
    tuned_in: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the oracle has exact values."""
        return "probe='exact" in self.oracle

    def arms(self, iterations: int) -> dict[str, Arm]:
        """Uniform credit, the oracle and further arms, with the searched numbers.

        The oracle with exact values trains on scores without noise, which are the expectations of
        noisy ones.
        """
        clip = 0.06 * (2 / self.dimension) ** 0.5
        knobs = {
            "clip_range": Knob(3.0, {self.world: clip}, most=MOST_CLIP),
            "learning_rate": Knob(2.0, {self.world: 2e-2}),
            "noise_level": Knob(1.4, {self.world: 0.7}),
        }
        if self.world == "shapes":
            knobs = POLICY
        shared = {
            **dict(iterations=iterations, eval_every=2, eval_samples=384, eval_steps=20),
            **dict(initial_noise="independent", method="flow-grpo", window="0:5"),
            **self.changes,
        }
        known = {"reward_noise": 0.0} if self.is_exact else {}
        arms: dict[str, Mapping[str, Any] | Arm] = {
            "uniform": {},
            **({"oracle": {"credit": self.oracle, **known}} if self.oracle else {}),
        }
        arms |= {
            name: arm
            for name, arm in ARMS.items()
            if self.world != "shapes" or name not in ONLY_IN_2D
        }
        return {name: self._arm(name, more, shared, knobs) for name, more in arms.items()}

    def _arm(
        self,
        name: str,
        more: Mapping[str, Any] | Arm,
        shared: Mapping[str, Any],
        knobs: Mapping[str, Knob],
    ) -> Arm:
        """An arm in this task: with the task's grid, where its knobs are those of `POLICY`."""
        if not isinstance(more, Arm):
            return Arm(name, {**shared, **more}, knobs)
        world = self.world if self.world in WORLDS else "mixture"
        own = {
            setting: chosen.get(world, chosen) if isinstance(chosen, Mapping) else chosen
            for setting, chosen in more.settings.items()
        }
        searched = {
            knob: knobs[knob] if POLICY.get(knob) is value else value
            for knob, value in more.knobs.items()
        }
        return Arm(name, {**shared, **own}, searched)


POINTS: dict[str, Task] = {
    "default": Task(),
    "noise-0.3": Task({"reward_noise": 0.3}),
    "strict": Task({"reward_form": "strict"}, oracle=exact(57, 5)),
    "16-dimensions": Task({}, "points(dimension=16)", 16, SAMPLED),
}
"""In two dimensions: the default task, with 5 of 10 steps drawn and a smooth reward, and three in
which exact credit leads by twice the smallest difference that matters for different reasons: noise
on the score, a reward of 0 or 1, more dimensions.
"""
IMAGES: dict[str, Task] = {
    task: Task(
        dict(task=task, window="2:7", iterations=12, eval_steps=10, eval_solver="dpm++"),
        "shapes",
        oracle="",
        tuned_in="compositional",
    )
    for task in ("compositional", "text", "preference")
}
"""Tasks of the image world, by name: for comparisons of arms, as no oracle is affordable."""


@dataclass(frozen=True)
class Campaign:
    """The comparison in one world: its `tasks`, the length of a run, the `budget` of an arm's
    search in runs, and the fresh `seeds` from `first_seed` on (searches use `tune.SEEDS`).
    """

    label: str
    tasks: Mapping[str, Task]
    budget: int
    seeds: int
    iterations: int = 20
    first_seed: int = 7000


CAMPAIGNS = {
    "points": Campaign("2-D world", POINTS, 24, 15),
    "images": Campaign("image world", IMAGES, 12, 10),
}


class Study:
    """The searches and the runs of a campaign, in two files: PATH with the runs on fresh seeds, and
    PATH-tuning with the searches. Runs that they have are not made again.
    """

    def __init__(self, campaign: Campaign, path: Path, workers: Workers = 0) -> None:
        self.campaign, self.tasks, self.workers = campaign, dict(campaign.tasks), workers
        # rules that the tasks name
        own = {"credit": next((task.oracle for task in self.tasks.values()), "")}
        tuning = path.with_name(f"{path.stem}-tuning{path.suffix}")
        self.tuning, self.results = (ResultsFile(file, own=own) for file in (tuning, path))
        self.arms = {name: task.arms(campaign.iterations) for name, task in self.tasks.items()}
        self.searches = {
            (name, arm.name): self._search(name, task, arm)
            for name, task in self.tasks.items()
            for arm in self.arms[name].values()
        }
        for search in self.searches.values():
            check(search.config(((0,) * len(search.arm.knobs), SEEDS[0])))

    def _search(self, name: str, task: Task, arm: Arm) -> Search:
        """The search for an arm. Tasks that differ in nothing that the arm reads share it."""
        if task.tuned_in:
            named = replace(self.arms[task.tuned_in][arm.name], name=f"{arm.name}, {task.tuned_in}")
            return Search(named, task.world, self.campaign.budget, FORM, short=False)
        twin = next(other for other, known in self.arms.items() if same(known, arm))
        named = replace(arm, name=f"{arm.name}, {twin}")
        return Search(named, task.world, self.campaign.budget, FORM)

    def values(self) -> dict[tuple[str, str], dict[str, float]]:
        """The values that the finished searches have chosen, by task and arm."""
        lines = self.tuning.unchecked()
        by_search = {key: chosen(search, lines) for key, search in self.searches.items()}
        return {key: values for key, values in by_search.items() if values is not None}

    def runs(self) -> Iterator[tuple[tuple[str, str, int], RunConfig | None]]:
        """The runs on fresh seeds, by task, arm and seed; None while their search is unfinished."""
        first, values = self.campaign.first_seed, self.values()
        for name, arm in self.searches:
            own, world = values.get((name, arm)), self.tasks[name].world
            for seed in range(first, first + self.campaign.seeds):
                run = self.arms[name][arm].run(world, own, seed=seed) if own is not None else None
                yield (name, arm, seed), run

    def execute(self, command: str, say: Any = print) -> bool:
        """Make what is missing: the searches, then the runs on fresh seeds; False if paused."""
        searches = list({search.arm.name: search for search in self.searches.values()}.values())

        def runs() -> Iterator[tuple[str, RunConfig | None]]:
            for (task, arm, _), run in self.runs():
                yield f"{task}, {arm}", run

        files = searches, self.tuning, runs, self.results
        return execute_study(*files, command, self.workers, say)

    def pairs(self, any_code: bool = False) -> dict[str, list[Lines]]:
        """By task, the lines by arm of every seed that all arms have."""
        lines = self.results.read(any_code=any_code)
        runs = {key: lines.get(config_id(run)) for key, run in self.runs() if run}
        return {name: list(_pairs(name, arms, runs)) for name, arms in self.arms.items()}


def same(arms: Mapping[str, Arm], arm: Arm) -> bool:
    """Whether the arm of this name has the same settings and knobs."""
    other = arms[arm.name]
    return (other.settings, other.knobs) == (arm.settings, arm.knobs)


def _pairs(
    name: str, arms: Iterable[str], runs: Mapping[tuple[str, str, int], Line | None]
) -> Iterator[Lines]:
    """The lines of all arms of a task, by seed."""
    for seed in sorted({seed for task, _, seed in runs if task == name}):
        pair = {arm: line for arm in arms if (line := runs.get((name, arm, seed)))}
        if pair.keys() == set(arms):
            yield pair

"""Headroom: how much better credit could be than uniform credit, task by task.

A task is the 2-D world with one thing changed. Its headroom is the primary outcome of the oracle
minus that of uniform credit, both tuned with the same number of runs, on fresh seeds that are
paired. The primary outcome is the mean held-out reward over training, in the trained form, without
the noise of the scores. Both arms have equally many iterations and trajectories; what the oracle's
values cost does not count. Headroom indicates what a credit rule can gain; it is no strict bound: a
window leaves steps without credit, and the network changes there, too (`benchmarks/exact.py`).

`ARMS` can be tuned and run like these two, random credit as a control.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl_compare.statistics import Estimate, collapsed, mean

from flowrl.core.errors import require
from flowrl.core.options import Workers
from flowrl.training.build import check
from flowrl.training.config import RunConfig
from flowrl.training.presets import METHOD_SETTINGS
from flowrl_bench.arms import ARMS as METHOD_ARMS
from flowrl_bench.arms import MOST_CLIP, POLICY, WORLDS, Arm, Knob
from flowrl_bench.digest import config_id
from flowrl_bench.evidence import Line, column, spent
from flowrl_bench.remaining import Pace
from flowrl_bench.results_file import Lines, ResultsFile
from flowrl_bench.suite import Suite
from flowrl_bench.tune import SEEDS, Search, chosen, over_training, tune


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


_VALUES: dict[str, dict[str, Any] | Arm] = {
    "larger groups": {"groups": 8, "group_size": 24},
    **{
        name: {"credit": f"calibrated-gain({options})"}
        for name, options in {
            "calibrated, Tweedie": "",
            "calibrated, critic": "probe='critic(base=zero)'",
            "calibrated, both": "probe=critic",
            "calibrated, hidden": "probe='critic(reads=hidden, base=zero)'",
            "calibrated, cross-fit": "cross_fit=true",
            "weight 0": "gain_weight=0",
            "weight 1": "gain_weight=1",
        }.items()
    },
    "even weight": {"credit": "even-gain"},
    "gains, Tweedie": {"credit": "stepwise-gain(probe=tweedie)"},
    **{
        f"GAE {lam:g}": {"credit": f"stepwise-gain(probe=critic, lam={lam:g})"}
        for lam in (0, 0.8, 1)
    },
}
ARMS: dict[str, dict[str, dict[str, Any] | Arm]] = {
    "published": {
        "stepwise gains": {"method": "stepwise-flow-grpo", "initial_noise": "auto"},
        "turning points": {"method": "tp-grpo", "initial_noise": "auto"},
        "random credit": {"credit": "random(seed=0)"},
    },
    "values": _VALUES,
    "verdict": {
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
        "calibrated values": _VALUES["calibrated, Tweedie"],
        "calibrated values and critic": _VALUES["calibrated, both"],
        "calibrated values of the hidden state": _VALUES["calibrated, hidden"],
        "calibrated values as a baseline": _VALUES["weight 0"],
        "calibrated values, full weight": _VALUES["weight 1"],
        "values, not calibrated": _VALUES["gains, Tweedie"],
        "random credit": {"credit": "random(seed=0)"},
    },
}
"""Further arms, in sets. Stepwise-Flow-GRPO has the shared initial noise of its paper. "larger
groups" are half as many, for the same number of samples; "uniform, larger groups" cost as much per
iteration as turning points. The questions of the sets "verdict" and "images" are those of
`flowrl_bench.verdict`.

The primary question of the set "values", fixed before its runs: whether "calibrated, Tweedie" leads
uniform credit in the mean reward over training, in the tasks default, 9-of-10, noise-0.3,
noise-0.3-9-of-10 and 16-dimensions, one comparison each, with 15 seeds from 6000. All other arms
and outcomes are secondary. On images the same question is asked in the three tasks with seeds 0 to
4, both arms at the settings found for uniform credit, by `flowrl compare`.
"""
ARMS["images"] = {
    name: arm
    for name, arm in ARMS["verdict"].items()
    if name
    not in (
        "granular-grpo",
        "calibrated values of the hidden state",
        "calibrated values, full weight",
        "values, not calibrated",
        "random credit",
    )
}
FORM = "reward"
"""The column of the primary outcome: the trained form of the score."""
MARGIN = 0.05
"""The smallest effect of interest, as a fraction of what can be gained in a task."""
COSTS = ("forwards", "stated seconds")
"""Budgets in which the costs of arms are compared, of `flowrl_bench.evidence.AXES`."""
TELLS, CANNOT, UNCLEAR = "can tell", "cannot tell", "unclear"


@dataclass(frozen=True)
class Task:
    """The 2-D world with `changes` of its settings, or a world of `flowrl_bench.worlds`.

    `dimension` scales the first clip of the search: log-ratios are means over the coordinates.
    `oracle` is the credit rule whose lead over uniform credit is the headroom; "" if there is none.
    `tuned_in` names the task of the searches, if not this one.
    """

    label: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    world: str = "mixture"
    dimension: int = 2
    oracle: str = exact()
    tuned_in: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the oracle has exact values."""
        return "probe='exact" in self.oracle

    def arms(self, size: "Size") -> dict[str, Arm]:
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
            **dict(iterations=size.iterations, eval_every=2, eval_samples=384, eval_steps=20),
            **dict(initial_noise="independent", method="flow-grpo", window="0:5"),
            **self.changes,
        }
        known = {"reward_noise": 0.0} if self.is_exact else {}
        arms: dict[str, Mapping[str, Any] | Arm] = {
            "uniform": {},
            **({"oracle": {"credit": self.oracle, **known}} if self.oracle else {}),
        }
        for name in size.sets:
            arms |= ARMS[name]
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


_ALL: dict[str, Any] = {"window": ":-1"}
_NOISY: dict[str, Any] = {"reward_noise": 0.3}
TASKS: dict[str, Task] = {
    "default": Task("default: 5 of 10 steps drawn, smooth reward"),
    "9-of-10": Task("9 of 10 steps drawn", _ALL),
    "19-of-20": Task("19 of 20 steps drawn", {**_ALL, "num_steps": 20}),
    "39-of-40": Task("39 of 40 steps drawn", {**_ALL, "num_steps": 40}),
    "graded": Task("graded reward", {"reward_form": "graded"}, oracle=exact(57, 5)),
    "strict": Task("strict reward", {"reward_form": "strict"}, oracle=exact(57, 5)),
    "noise-0.1": Task("noise of 0.1 on the score", {"reward_noise": 0.1}),
    "noise-0.3": Task("noise of 0.3 on the score", _NOISY),
    "noise-0.3-9-of-10": Task("noise of 0.3, 9 of 10 steps drawn", {**_ALL, **_NOISY}),
    "noise-0.3-19-of-20": Task(
        "noise of 0.3, 19 of 20 steps drawn", {**_ALL, **_NOISY, "num_steps": 20}
    ),
    "parts": Task(
        "early and late part, 9 of 10 steps drawn",
        _ALL,
        "points(nested=true)",
        oracle=exact(57),
    ),
    "16-dimensions": Task("16 dimensions", {}, "points(dimension=16)", 16, SAMPLED),
    "64-dimensions": Task("64 dimensions", {}, "points(dimension=64)", 64, SAMPLED),
}
"""The family, by name."""
IMAGES: dict[str, Task] = {
    task: Task(
        f"images: {task}",
        {
            **dict(task=task, window="2:7", iterations=12, eval_steps=10, eval_solver="dpm++"),
        },
        "shapes",
        oracle="",
        tuned_in="compositional",
    )
    for task in ("compositional", "text", "preference")
}
"""Tasks of the image world, by name: for comparisons of arms, as no oracle is affordable."""
QUICK = ("default", "9-of-10", "noise-0.3")


@dataclass(frozen=True)
class Size:
    """`iterations` of a run, `budget` of an arm's search in runs, the number of fresh `seeds` and the
    first of them (searches use `tune.SEEDS`), and further arms, the `sets` of `ARMS`.
    """

    iterations: int = 20
    budget: int = 18
    seeds: int = 5
    first_seed: int = 5000
    sets: tuple[str, ...] = ()


QUICK_SIZE = Size(10, 8, 3)


@dataclass(frozen=True)
class Result:
    """An arm's mean and final held-out reward, how many seeds collapsed, the leads over uniform
    credit in both, paired by seed, its cost by budget (of `COSTS`) as a multiple of that of uniform
    credit, and the processor's seconds of a run.
    """

    mean: float
    final: float
    collapses: int
    lead: Estimate
    final_lead: Estimate
    costs: Mapping[str, float]
    seconds: float

    @staticmethod
    def of(lines: Sequence[Line], uniform: Sequence[Line]) -> "Result":
        """From the lines of both arms, by seed."""
        curves, others = ([column(line, FORM) for line in runs] for runs in (lines, uniform))
        means, finals = (
            [[of(curve) for curve in runs] for runs in (curves, others)]
            for of in (over_training, lambda curve: curve[-1])
        )
        lead, final_lead = (
            mean([a - b for a, b in zip(*both, strict=True)]) for both in (means, finals)
        )

        def total(runs: Sequence[Line], budget: str) -> float:
            return sum(spent(line, budget)[-1] for line in runs)

        return Result(
            mean=fmean(means[0]),
            final=fmean(finals[0]),
            collapses=sum(map(collapsed, curves)),
            lead=lead,
            final_lead=final_lead,
            costs={budget: total(lines, budget) / total(uniform, budget) for budget in COSTS},
            seconds=total(lines, "seconds") / len(lines),
        )


@dataclass(frozen=True)
class Row:
    """The result of a task: means over seeds of the primary outcome of both arms, the held-out
    reward before training, the best during training (of the better arm), the headroom, and the
    results of all arms.
    """

    name: str
    task: Task
    uniform: float
    oracle: float
    start: float
    best: float
    headroom: Estimate
    values: Mapping[str, Mapping[str, float]]
    seeds: int
    arms: Mapping[str, Result]

    @property
    def gain(self) -> float:
        """What can be gained."""
        return self.best - self.start

    @property
    def margin(self) -> float:
        """The smallest effect of interest."""
        return MARGIN * self.gain

    @property
    def label(self) -> str:
        """The verdict on the task. An oracle that collapsed shows no bound: a window leaves steps
        without credit, where the network changes, too (`benchmarks/exact.py`).
        """
        is_bound = self.task.is_exact and not self.arms["oracle"].collapses
        return verdict(self.headroom, self.margin, is_bound)


def verdict(headroom: Estimate, margin: float, is_bound: bool) -> str:
    """Whether a task can tell rules of credit apart: not if the headroom is a bound of what a rule
    can gain and its upper confidence limit is below the margin; yes if the headroom is at least
    twice the margin and its interval excludes 0.
    """
    if is_bound and headroom.high < margin:
        return CANNOT
    return TELLS if headroom.value >= 2 * margin and headroom.low > 0 else UNCLEAR


def row_of(
    name: str, task: Task, pairs: Sequence[Mapping[str, Line]], values: Mapping[str, Any]
) -> Row:
    """The result of a task from the lines of all arms, by seed."""
    lines = {arm: [pair[arm] for pair in pairs] for arm in pairs[0]}
    arms = {arm: Result.of(runs, lines["uniform"]) for arm, runs in lines.items()}
    curves = {arm: [column(line, FORM) for line in lines[arm]] for arm in ("uniform", "oracle")}
    return Row(
        name,
        task,
        uniform=arms["uniform"].mean,
        oracle=arms["oracle"].mean,
        start=fmean(curve[0] for curve in curves["uniform"]),
        best=max(fmean(map(max, runs)) for runs in curves.values()),
        headroom=arms["oracle"].lead,
        values=values,
        seeds=len(pairs),
        arms=arms,
    )


class HeadroomStudy:
    """The searches and the runs of some tasks, in two files: PATH with the runs on fresh seeds, and
    PATH-tuning with the searches. Runs that they have are not made again.

    Raises `ConfigError` for a task or settings that do not exist.
    """

    def __init__(
        self, tasks: Mapping[str, Task], path: Path, size: Size = Size(), workers: Workers = 0
    ) -> None:
        self.tasks, self.size, self.workers = dict(tasks), size, workers
        missing = [t.tuned_in for t in tasks.values() if t.tuned_in and t.tuned_in not in tasks]
        require(
            not missing,
            "tasks",
            tuple(tasks),
            f"with {', '.join(missing)}, in which others are tuned",
        )
        require(size.seeds >= 2, "seeds", size.seeds, "2 or more: an interval needs a spread")
        # rules that the command names
        own = {"credit": next((task.oracle for task in tasks.values()), "")}
        tuning = path.with_name(f"{path.stem}-tuning{path.suffix}")
        self.tuning, self.results = (ResultsFile(file, own=own) for file in (tuning, path))
        self.searches = {
            (name, arm.name): self._search(name, task, arm)
            for name, task in self.tasks.items()
            for arm in task.arms(size).values()
        }
        for search in self.searches.values():
            check(search.config(((0,) * len(search.arm.knobs), SEEDS[0])))

    def _search(self, name: str, task: Task, arm: Arm) -> Search:
        """The search for an arm. Tasks that differ in nothing that the arm reads share it."""
        if task.tuned_in:
            task = self.tasks[task.tuned_in]
            named = replace(task.arms(self.size)[arm.name], name=f"{arm.name}, {task.tuned_in}")
            return Search(named, task.world, self.size.budget, FORM, short=False)
        twins = (other for other, known in TASKS.items() if same(known.arms(self.size), arm))
        named = replace(arm, name=f"{arm.name}, {next(twins, name)}")
        return Search(named, task.world, self.size.budget, FORM)

    def values(self) -> dict[tuple[str, str], dict[str, float]]:
        """The values that the finished searches have chosen, by task and arm."""
        lines = self.tuning.unchecked()
        by_search = {key: chosen(search, lines) for key, search in self.searches.items()}
        return {key: values for key, values in by_search.items() if values is not None}

    def runs(self) -> Iterator[tuple[tuple[str, str, int], RunConfig]]:
        """The runs on fresh seeds, by task, arm and seed, of finished searches."""
        arms = {name: task.arms(self.size) for name, task in self.tasks.items()}
        for (name, arm), values in self.values().items():
            world = self.tasks[name].world
            for seed in range(self.size.first_seed, self.size.first_seed + self.size.seeds):
                yield (name, arm, seed), arms[name][arm].run(world, values, seed=seed)

    def execute(self, command: str, say: Any = print) -> bool:
        """Make what is missing: the searches, then the runs on fresh seeds; False if paused."""
        searches = list({search.arm.name: search for search in self.searches.values()}.values())
        lines = self.tuning.unchecked()
        missing = sum(search.budget - len(search.scores(lines)) for search in searches)
        total, pace = sum(search.budget for search in searches), Pace(missing)

        def searched(line: Mapping[str, Any], done: int) -> None:
            values = ", ".join(f"{knob} {value:g}" for knob, value in line["values"].items())
            place = f"search {done}/{total} {line['arm']}, {values}, seed {line['seed']}"
            say(f"{place}: {line['score']:.3f}; {pace.finished()}", flush=True)

        if missing and not tune(searches, self.tuning.path, command, self.workers, searched):
            return False
        names = {config_id(run): key for key, run in self.runs()}
        runs = {config_id(run): run for _, run in self.runs()}
        pace = Pace(len(runs.keys() - self.results.read().keys()))

        def finished(done: int, count: int, line: Mapping[str, Any]) -> None:
            task, arm, seed = names[line["id"]]
            say(f"{done}/{count} {task}, {arm}, seed {seed}; {pace.finished()}", flush=True)

        allowed = {**{line.get("id", ""): None for line in self.results.unchecked()}, **runs}
        return Suite(runs, self.results, allowed, command).execute(self.workers, finished)

    def rows(self) -> list[Row]:
        """The results of the tasks of which two or more seeds are complete."""
        values, complete = self.values(), list[Row]()
        for name, pairs in self.pairs().items():
            task = self.tasks[name]
            if len(pairs) >= 2 and task.oracle:
                at = {arm: values[name, arm] for arm in task.arms(self.size)}
                complete.append(row_of(name, task, pairs, at))
        return complete

    def pairs(self, any_code: bool = False) -> dict[str, list[Lines]]:
        """By task, the lines by arm of every seed that all arms have."""
        lines = self.results.read(any_code=any_code)
        runs = {key: lines.get(config_id(run)) for key, run in self.runs()}
        return {
            name: list(_pairs(name, task.arms(self.size), runs))
            for name, task in self.tasks.items()
        }


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

"""An analysis of the main comparison that shares no code with `flowrl_bench`.

It finds the runs of every arm by their settings, from the table *Chosen settings* of the page and
the tables of arms and tasks below, computes all numbers of the page by the definitions of
``docs/verdicts.md``, and compares them to the printed precision. The exit status is 1 if a number
differs. Two seconds; no network evaluations.

The column *mean* is the mean of the piecewise linear curve over the whole run, by iterations. Leads use the seeds that all arms of all tasks have, other
numbers those that all arms of the task have.

    python benchmarks/reanalysis_verdict.py --all
"""

import argparse
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reanalysis_page import Row, table
from reanalysis_statistics import (
    BACKWARD,
    FEWEST,
    FLOPS,
    LEVEL,
    SMALLEST,
    Settings,
    Values,
    holm,
    outside,
    read_lines,
    t_test,
    won,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/verdict/details.md"
UNIFORM, EXACT, LARGER = "Flow-GRPO", "exact values", "Flow-GRPO, more samples"
OURS, RANDOM_POINTS = "calibrated values (ours)", "TP-GRPO, random points"
TEN, EIGHT, SIX = (f"Flow-GRPO, {groups} prompts" for groups in (10, 8, 6))
NOT_FIRST = "TP-GRPO, not the first step"
BUDGETS = ("update", "forward equivalent", "second")
PER_UPDATE, _, PER_SECOND = BUDGETS
PER_UPDATE_ASKED = (
    (EXACT, UNIFORM),
    ("Stepwise-Flow-GRPO", UNIFORM),
    ("TP-GRPO", UNIFORM),
    (OURS, UNIFORM),
    ("TP-GRPO", RANDOM_POINTS),
)
PER_SECOND_ASKED = (
    LARGER,
    "weights by noise",
    "Stepwise-Flow-GRPO",
    "TP-GRPO",
    "DenseGRPO",
    OURS,
    "TempFlow-GRPO",
    "RSM",
    "BranchGRPO",
    "TreeGRPO",
    "DiffusionNFT",
    "DGPO",
    "V-GRPO",
    "FDFO",
    "EPG",
)
ASKED = (
    *((arm, PER_UPDATE, than) for arm, than in PER_UPDATE_ASKED),
    *((arm, PER_SECOND, UNIFORM) for arm in PER_SECOND_ASKED),
)
"""The questions: arm, budget, and the arm that it is compared with."""
CONTROLS = (
    ("BranchGRPO", PER_SECOND, EIGHT),
    ("TreeGRPO", PER_SECOND, TEN),
    ("TempFlow-GRPO", PER_SECOND, SIX),
    ("RSM", PER_SECOND, SIX),
    (TEN, PER_SECOND, UNIFORM),
    (EIGHT, PER_SECOND, UNIFORM),
    (SIX, PER_SECOND, UNIFORM),
    ("TP-GRPO", PER_SECOND, LARGER),
    ("DenseGRPO", PER_SECOND, LARGER),
    ("TP-GRPO", PER_UPDATE, NOT_FIRST),
)
"""Likewise, without verdicts."""
UNCHANGED: Settings = {
    "method": "flow-grpo",
    "credit": "",
    "sampler": "",
    "loss": "",
    "initial_noise": "independent",
    "groups": 16,
    "group_size": 12,
    "minibatches": 4,
    "clip_range": 0.002,
    "noise_level": 0.0,
    "kl_weight": 0.0,
    "gradient_checkpointing": False,
    "guidance_scale": 1.0,
    "num_steps": 10,
    "eval_every": 2,
    "eval_samples": 384,
    "reward_form": "soft",
    "reward_noise": 0.0,
}
"""Settings of a run that neither its task, its arm nor its search changes."""


def method(name: str, **more: Any) -> Settings:
    return {"method": name, "initial_noise": "auto", **more}


def critic(options: str) -> Settings:
    return {"credit": f"calibrated-gain({options})"}


IN_BOTH: dict[str, Settings] = {
    UNIFORM: {},
    TEN: {"groups": 10},
    EIGHT: {"groups": 8},
    SIX: {"groups": 6},
    LARGER: method("flow-grpo", group_size=29),
    "weights by noise": method("noise-weighted"),
    "Stepwise-Flow-GRPO": method("stepwise-flow-grpo"),
    "TP-GRPO": method("tp-grpo"),
    NOT_FIRST: {"credit": "turning-point(first_step=false)"},
    RANDOM_POINTS: {"credit": "turning-point-variant(where=random)"},
    "DenseGRPO": {"credit": "turning-point-variant(where='none')"},
    "BranchGRPO": method("branch-grpo", sampler="flow-sde"),
    "TreeGRPO": method("tree-grpo"),
    "RSM": method("rsm", groups=6, group_size=30),
    "TempFlow-GRPO": {"method": "tempflow-grpo", "groups": 6, "group_size": 30},
    "DiffusionNFT": method("diffusion-nft", loss="diffusion-nft(beta={beta})"),
    "AWM": method("awm", loss="awm(clip={clip}, kl_weight={kl})"),
    "DGPO": method("dgpo", loss="dgpo(beta_dpo={beta}, sample_from=None)"),
    "V-GRPO": method("v-grpo", minibatches=1),
    "EPG": method("epg", minibatches=1),
    "FDFO": method("fdfo", groups=96, group_size=2, minibatches=1, window=":"),
    "pi-StepNFT": method("step-nft", loss="step-nft(scale={scale})"),
    OURS: critic(""),
    "calibrated values and critic": critic("probe=critic"),
    "calibrated values as a baseline": critic("gain_weight=0"),
}
IN_POINTS: dict[str, Settings] = {
    EXACT: {"reward_noise": 0.0},
    "Granular-GRPO": method("granular-grpo", group_size=36),
    "calibrated values of the hidden state": critic("probe='critic(reads=hidden, base=zero)'"),
    "calibrated values, full weight": critic("gain_weight=1"),
    "values, not calibrated": {"credit": "stepwise-gain(probe=tweedie)"},
    "random credit": {"credit": "random(seed=0)"},
}
"""How arms differ from uniform credit, besides the searched numbers."""


def exact(probe: str) -> Settings:
    return {"credit": f"stepwise-gain(normalise='step', probe='{probe}')"}


class World(NamedTuple):
    """`fixed`: settings of all runs; by task its settings, and those of single arms in it.
    `scored`: FLOPs of the decoder and of the reward for an image, in forward passes.
    """

    file: str
    first_seed: int
    fixed: Settings
    tasks: Mapping[str, Settings]
    arms: Mapping[str, Settings]
    only: Mapping[str, Mapping[str, Settings]]
    scored: tuple[float, float]


WORLDS = {
    "2-d world": World(
        "verdict-points.jsonl",
        7000,
        {
            **{"world": "mixture", "task": "direction", "window": "0:5", "iterations": 20},
            **{"eval_steps": 20, "eval_solver": "euler"},
        },
        {
            "default": {},
            "noise-0.3": {"reward_noise": 0.3},
            "strict": {"reward_form": "strict"},
            "16-dimensions": {"world": "points(dimension=16)"},
        },
        {**IN_BOTH, **IN_POINTS},
        {
            "default": {EXACT: exact("exact(points=29, reach=4)")},
            "noise-0.3": {EXACT: exact("exact(points=29, reach=4)")},
            "strict": {EXACT: exact("exact(points=57, reach=5)")},
            "16-dimensions": {EXACT: exact("continuation:64")},
        },
        (0.0, 0.0),
    ),
    "image world": World(
        "verdict-images.jsonl",
        7000,
        {
            **{"world": "shapes", "window": "2:7", "iterations": 12},
            **{"eval_steps": 10, "eval_solver": "dpm++"},
        },
        {task: {"task": task} for task in ("compositional", "text", "preference")},
        {**IN_BOTH, LARGER: method("flow-grpo", group_size=25)},
        {},
        (3_178_496 / 8_396_800, 1_333_248 / 8_396_800),
    ),
}
"""By heading of the page."""
SD35 = FLOPS["forward"]
STATED = (FLOPS["gradient"] / SD35, 2_514_971_787_264 / SD35, 381_679_304_704 / SD35)
"""Of SD3.5-Medium at 512 pixels, in its forward passes: an evaluation with a gradient, a decoded
image, and a score by PickScore. The FLOPs are those of ``benchmarks/results/flops.json``.
"""


class Run(NamedTuple):
    """Held-out rewards at the evaluations, and what was spent up to them, by budget."""

    rewards: Values
    spent: Mapping[str, Values]

    @property
    def collapsed(self) -> bool:
        """Whether the run ends below its best, or below its start."""
        end = self.rewards[-1] + 1e-9
        return bool(end < self.rewards.max() - 0.1 or end < self.rewards[0] - 0.02)

    def average(self, budget: str, end: float) -> float:
        """Mean of the piecewise linear curve up to `end`."""
        x = self.spent[budget]
        points = np.append(x[x < end], end)
        return float(np.trapezoid(np.interp(points, x, self.rewards), points) / end)


def run_of(line: Mapping[str, Any], world: World) -> Run:
    columns = np.array(line["curve"], dtype=float).T
    updates, sampled, updated = columns[:3]
    gradients, decodes, calls = columns[11:14]
    plain = sampled + updated - gradients  # probes are a part of the sampled ones
    decode, reward = world.scored
    spent = {
        PER_UPDATE: updates,
        "forward equivalent": plain + BACKWARD * gradients + decode * decodes + reward * calls,
        PER_SECOND: 2 * plain + 2 * STATED[0] * gradients + STATED[1] * decodes + STATED[2] * calls,
    }
    return Run(columns[4], spent)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a line without their groups and its seed."""
    groups = [value for value in config.values() if isinstance(value, Mapping)]
    alone = {n: v for n, v in config.items() if not isinstance(v, Mapping) and n != "seed"}
    return alone | {name: value for group in groups for name, value in group.items()}


def expected(world: World, task: str, arm: str, numbers: Mapping[str, str]) -> Settings:
    """The settings of an arm with its searched numbers, as the page prints them."""
    settings = {**UNCHANGED, **world.fixed, **world.tasks[task], **world.arms[arm]}
    settings |= world.only.get(task, {}).get(arm, {})
    used = set(re.findall(r"{(\w+)}", settings["loss"]))
    settings["loss"] = settings["loss"].format(**numbers)
    return settings | {name: float(text) for name, text in numbers.items() if name not in used}


Runs = dict[str, dict[str, dict[int, Run]]]
"""By task, arm and seed."""


def find(lines: Sequence[Mapping[str, Any]], world: World, chosen: str) -> tuple[Runs, int]:
    """The runs of the arms in the table `chosen`, and the number of lines of no arm."""
    names = [cell.replace(" ", "_") for cell in head(chosen)[2:]]
    runs: Runs = defaultdict(dict)
    settings, used = [flat(line["config"]) for line in lines], set[int]()
    for task, arm, *cells in table(chosen):
        numbers = {n: cell for n, cell in zip(names, cells, strict=True) if cell != "-"}
        wanted = expected(world, task, arm, numbers)
        found = [i for i, s in enumerate(settings) if all(s[n] == v for n, v in wanted.items())]
        runs[task][arm] = {int(lines[i]["config"]["seed"]): run_of(lines[i], world) for i in found}
        if len(runs[task][arm]) < len(found):
            raise ValueError(f"two runs of {arm} in the task {task} have the same seed")
        used |= set(found)
    searched = {*UNCHANGED, *world.fixed, "task", "learning_rate"}
    for name in {name for i in used for name in settings[i]} - searched:
        values = {str(settings[i][name]) for i in used if name in settings[i]}
        if len(values) > 1:
            raise ValueError(f"{name} differs between runs: {', '.join(sorted(values))}")
    return runs, len(lines) - len(used)


def head(text: str) -> list[str]:
    return [cell.strip() for cell in text[text.index("| ") :].split("\n", 1)[0][1:-1].split(" | ")]


class Campaign:
    """The numbers of a world."""

    def __init__(self, runs: Runs) -> None:
        shared = {t: set.intersection(*map(set, arms.values())) for t, arms in runs.items()}
        self.runs = {
            task: {
                arm: {seed: own[seed] for seed in sorted(shared[task])} for arm, own in a.items()
            }
            for task, a in runs.items()
            if shared[task]
        }
        self.arms = set.intersection(*(set(arms) for arms in self.runs.values()))
        self.seeds = sorted(set.intersection(*(shared[task] for task in self.runs)))
        self.gains = {
            task: max(np.mean([run.rewards[-1] for run in own.values()]) for own in arms.values())
            - np.mean([run.rewards[0] for run in arms[UNIFORM].values()])
            for task, arms in self.runs.items()
        }

    def leads(self, arm: str, budget: str, than: str, tasks: Sequence[str]) -> Values:
        """[seed]: in fractions of what can be gained, averaged over tasks."""

        def lead(task: str, seed: int) -> float:
            pair = [self.runs[task][name][seed] for name in (arm, than)]
            end = min(run.spent[budget][-1] for run in pair)
            first, second = (run.average(budget, end) for run in pair)
            return float((first - second) / self.gains[task])

        rows = [[lead(task, seed) for task in tasks] for seed in self.seeds]
        return np.array(rows, np.float64).mean(1)

    def answers(self) -> Iterator[tuple[str, ...]]:
        """The rows of *Questions*."""
        asked = [question for question in ASKED if question[0] in self.arms]
        values = [self.leads(*question, list(self.runs)) for question in asked]
        pairs = [(math.nan, math.nan)] * len(asked)
        if len(self.seeds) >= FEWEST:
            pairs = corrected(values)
        for (*words, percents, wins), leads, pair in zip(
            self.asked(asked), values, pairs, strict=True
        ):
            printed = (f"{p:.6f}" for p in pair)
            yield *words, percents, *printed, wins, verdict(leads.mean(), *pair)

    def asked(self, questions: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, ...]]:
        """Question, budget, lead and seeds won."""
        for arm, budget, than in questions:
            leads = self.leads(arm, budget, than, list(self.runs))
            yield f"{arm} against {than}", budget, percent(leads), f"{100 * won(leads):.0f}%"

    def arm(self, name: str, tasks: Sequence[str]) -> tuple[str, ...]:
        """The row of an arm."""
        own = [list(self.runs[task][name].values()) for task in tasks]
        others = [list(self.runs[task][UNIFORM].values()) for task in tasks]

        def average(of: Any) -> str:
            return f"{np.mean([np.mean([of(run) for run in runs]) for runs in own]):.6f}"

        def cost(budget: str) -> str:
            ratios = [
                sum(run.spent[budget][-1] for run in runs)
                / sum(run.spent[budget][-1] for run in base)
                for runs, base in zip(own, others, strict=True)
            ]
            return f"{np.mean(ratios):.6f}"

        lost = sum(run.collapsed for runs in own for run in runs)
        return (
            name,
            average(lambda run: run.average(PER_UPDATE, run.spent[PER_UPDATE][-1])),
            average(lambda run: run.rewards[-1]),
            f"{lost} of {sum(map(len, own))}",
            *(cost(budget) for budget in BUDGETS[1:]),
            *(
                "-" if name == UNIFORM else percent(self.leads(name, budget, UNIFORM, tasks))
                for budget in BUDGETS
            ),
        )


def corrected(values: Sequence[Values]) -> list[tuple[float, float]]:
    """By question both p-values after Holm's correction over all of them."""
    tests = [t_test(leads) for leads in values]
    margins = [
        outside(test.mean, float(leads.std(ddof=1)) / len(leads) ** 0.5, SMALLEST, len(leads) - 1)
        for test, leads in zip(tests, values, strict=True)
    ]
    p = holm([test.p for test in tests] + margins)
    return list(zip(p[: len(tests)], p[len(tests) :], strict=True))


def verdict(lead: float, difference: float, margin: float) -> str:
    if math.isnan(difference):
        return "no verdict: too few seeds"
    if difference >= LEVEL:
        return "no difference that matters" if margin < LEVEL else "undecided at this power"
    return ("better" if lead > 0 else "worse") + ", by less than matters" * (margin < LEVEL)


def percent(leads: Values) -> str:
    mean, low, high = (f"{100 * number:+.6f}" for number in t_test(leads)[:3])
    return f"{mean} [{low}, {high}]"


QUESTIONS_HEAD = (
    *("question", "at equal", "lead, %", "p, difference", "p, margin", "seeds won", "verdict"),
)
CONTROLS_HEAD = (*QUESTIONS_HEAD[:3], "seeds won")
ARMS_HEAD = (
    *("arm", "mean", "final", "collapsed", "cost", "cost as SD3.5-Medium"),
    *(f"lead per {budget}, %" for budget in BUDGETS),
)


def table_rows(
    place: str, text: str, names: Sequence[str], own: Sequence[Sequence[str]]
) -> Iterator[Row]:
    """A row per cell, and one each for the head and the first column."""
    page = table(text)
    yield Row(place, "head", " / ".join(head(text)), " / ".join(names))
    yield Row(place, "rows", " / ".join(r[0] for r in page), " / ".join(r[0] for r in own))
    for cells, second in zip(page, own, strict=False):
        for name, *both in zip(names[1:], cells[1:], second[1:], strict=True):
            yield Row(place, f"{cells[0]}, {name}", *both)


def world_rows(title: str, text: str, results: Path) -> Iterator[Row]:
    """All numbers of a world."""
    world, parts = WORLDS[title], dict(part.split("\n", 1) for part in text.split("\n### "))
    lines = read_lines(results / world.file)
    runs, left = find(lines, world, parts["Chosen settings"])
    arms = [*world.arms]
    for task, found in runs.items():
        yield Row(title, f"arms in {task}", " / ".join(sorted(found)), " / ".join(sorted(arms)))
    yield Row(title, "lines of no arm", "0", str(left))
    campaign = Campaign(runs)
    stated = re.search(r"\d+ seeds from \d+", text)
    seeds = f"{len(campaign.seeds)} seeds from {campaign.seeds[0]}"
    yield Row(title, "seeds", stated[0] if stated else "", seeds)
    yield from table_rows(
        f"{title}, questions", parts["Questions"], QUESTIONS_HEAD, list(campaign.answers())
    )
    yield from table_rows(
        f"{title}, controls", parts["Controls"], CONTROLS_HEAD, list(campaign.asked(CONTROLS))
    )
    groups = {"All arms, averaged over tasks": list(campaign.runs)}
    groups |= {f"Task {task}": [task] for task in campaign.runs}
    for heading, tasks in groups.items():
        names = [row[0] for row in table(parts[heading])]
        own = [campaign.arm(name, tasks) for name in names]
        yield from table_rows(f"{title}, {heading}", parts[heading], ARMS_HEAD, own)
        yield Row(title, f"{heading}, arms", " / ".join(sorted(names)), " / ".join(sorted(arms)))
    for task, gain in campaign.gains.items():
        printed = re.search(r"What can be gained: ([\d.]+)\.\n", parts[f"Task {task}"])
        yield Row(
            title, f"{task}, what can be gained", printed[1] if printed else "", f"{gain:.6f}"
        )
    shown = sorted(name for name in parts if name.startswith("Task "))
    yield Row(title, "tasks", " / ".join(shown), " / ".join(sorted(groups)[1:]))


def all_rows(results: Path = RESULTS, page: Path = PAGE) -> list[Row]:
    """Every number that is compared."""
    rows = list[Row]()
    for section in page.read_text("utf-8").split("\n## ")[1:]:
        title = section.split("\n", 1)[0].lower()
        rows += world_rows(title, section, results)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="print every number, not only those that differ"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    rows = all_rows(options.results, options.page)
    differing = [row for row in rows if not row.agrees]
    for row in rows if options.all else differing:
        print(f"{' ' if row.agrees else '!'} {row.place}: {row.what}")
        print(f"      page {row.page}\n      own  {row.own}")
    print(f"{len(rows)} entries of the page compared, {len(differing)} differ")
    return 1 if differing or not rows else 0


if __name__ == "__main__":
    sys.exit(main())

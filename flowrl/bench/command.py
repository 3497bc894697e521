"""`flowrl bench tune`, `rule`, `record`, `verdict` and `redo`."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Le, Lt

from flowrl.core.errors import require
from flowrl.core.options import Workers
from flowrl.run.io import require_new_file, write_bytes
from flowrl.run.reading import is_json


@dataclass(frozen=True)
class Tune:
    """Find each arm's best learning rate, clip and noise level, with the same number of short runs
    for every arm.

    Examples: flowrl bench tune flow-grpo tp-grpo my_rules.py:MyRule --world mixture

    flowrl bench tune --arm "gspo: loss=my_loss.py:GSPO"
    """

    methods: tyro.conf.Positional[tuple[str, ...]] = ()
    """Methods or arms by name, or credit rules as path/to/file.py:Class or NAME(option=value);
    default: all compared arms, or none with `arm` or `arms`.
    """
    arm: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An arm of your own as "NAME: setting=value, ..."; can be repeated. Numbers that it sets are
    not searched.
    """
    arms: Path | None = None
    """A YAML file with more arms: below "arms:", one line "NAME: {setting: value}" per arm."""
    trust: bool = False
    """Run code that the file of `arms` names, and use its addresses and keys."""
    world: str = "mixture"
    """mixture (two dimensions), shapes (images), all (both), or a world of yours:
    path/to/file.py:Class or a plug-in.
    """
    model: str = ""
    """A diffusers model instead of a world: its folder, with `prompts` and `reward`."""
    prompts: str = ""
    """Prompts of the model's runs, as for `flowrl train`."""
    reward: str = ""
    """Reward of the model's runs, as for `flowrl train`."""
    set: str = ""
    """Further settings of the model's runs, as in "resolution=512, guidance_scale=4.5"."""
    budget: Annotated[int, Ge(0), Le(200)] = 0
    """Runs per arm and world; half of them repeat the best points with other seeds. 0 = 72 in the
    2-D world, 12 in others.
    """
    out: Path = Path("runs/tuning.jsonl")
    """The log: one line per run. Runs in it are not repeated."""
    workers: Workers = 0
    """Number of methods tuned in parallel, 0 = one per core, or a Dask cluster
    (docs/guides/cluster.md).
    """
    show: bool = False
    """Print the best values in the log; start no runs."""
    save: Path | None = None
    """A JSON file for the chosen values, by world and arm; entries of other arms are kept."""

    def main(self) -> int:
        """Search, print and save the choices."""
        from flowrl.bench.arms import ARMS, chosen_worlds, in_world, named_arm, own_arms, short_name
        from flowrl.bench.tune import Search, choices, for_paper, save, tune, usual_budget

        if self.show:
            require(self.budget == Tune.budget, "budget", self.budget, "left out with --show")
        else:
            require_new_file(self.out, lambda data: data.startswith(b"{"))
        if self.save is not None:
            require_new_file(self.save, is_json, "save")
        worlds = chosen_worlds(self.world, self.model, self.prompts, self.reward, self.set)
        extra = own_arms(self.arm, self.arms, self.trust)
        arms = [*(named_arm(name) for name in self.methods or (ARMS if not extra else ())), *extra]
        names = [arm.name for arm in arms]
        require(len(set(names)) == len(names), "arm", names, "each name once")
        searches = [
            Search(arm, world, self.budget or usual_budget(world))
            for world in worlds
            for arm in arms
            if in_world(arm, world)
        ]
        total = sum(search.budget for search in searches)

        def progress(line: Mapping[str, Any], done: int) -> None:
            values = ", ".join(f"{name} {value:g}" for name, value in line["values"].items())
            place = f"{done}/{total} {short_name(line['world'])}, {line['arm']}"
            print(f"{place}, {values}, seed {line['seed']}: {line['score']:.3f}", flush=True)

        command = shlex.join(["flowrl", *sys.argv[1:]])
        finished = self.show or tune(searches, self.out, command, self.workers, progress)
        print(choices(searches, self.out))
        if not self.show:
            folder = self.out.with_name(f"{self.out.stem}-paper")
            print(f"Wrote {', '.join(map(str, for_paper(searches, self.out, folder, command)))}")
        if self.save is not None:
            save(searches, self.out, self.save)
        return 0 if finished else _paused()


@dataclass(frozen=True)
class Rule:
    """Tune a credit rule or another arm of your own and compare it with tuned baselines; print the
    time left after each run.

    Examples: flowrl bench rule my_rules.py:MyRule

    flowrl bench rule --arm "gspo: loss=my_loss.py:GSPO"
    """

    rule: tyro.conf.Positional[str] = ""
    """A credit rule: path/to/file.py:Class, NAME or NAME(option=value)."""
    arm: str = ""
    """Instead of a rule, an arm as "NAME: setting=value, ...". Numbers that it sets are not
    searched.
    """
    arms: Path | None = None
    """Instead of a rule, a YAML file with one arm: below "arms:", "NAME: {setting: value}"."""
    trust: bool = False
    """Run code that the file of `arms` names, and use its addresses and keys."""
    quick: bool = False
    """Fewer search runs and fewer seeds; in the image world, no search, and uniform credit as the
    only baseline.
    """
    world: str = "all"
    """mixture (two dimensions), shapes (images), all (both), or a world of yours:
    path/to/file.py:Class or a plug-in. In your own world, the baselines are tuned too.
    """
    model: str = ""
    """A diffusers model instead of a world: its folder, with `prompts` and `reward`."""
    prompts: str = ""
    """Prompts of the model's runs, as for `flowrl train`."""
    reward: str = ""
    """Reward of the model's runs, as for `flowrl train`."""
    set: str = ""
    """Further settings of the model's runs, as in "resolution=512, guidance_scale=4.5"."""
    seeds: Annotated[int, Ge(0), Le(1000)] = 0
    """Seeds per arm and world; 0 = 20 in two dimensions and 8 elsewhere (--quick: 8 and 5)."""
    first_seed: Annotated[int, Ge(0), Lt(2**31)] = 200
    """The first seed of the comparison; no published table uses seeds from 10000 on."""
    budget: Annotated[int, Ge(-1), Le(200)] = -1
    """Search runs per world (0: none); -1 = 72 in two dimensions and 12 elsewhere (--quick: 72,
    none for images, and 6 elsewhere).
    """
    bound: bool = False
    """Also run exact credit in the 2-D world, if no curves for these settings are shipped."""
    out: Path | None = None
    """Folder of the results and the page; default: runs/rule-NAME. Existing runs are not repeated.
    """
    workers: Workers = 0
    """Number of parallel runs, 0 = one per core, or a Dask cluster (docs/guides/cluster.md)."""

    def main(self) -> int:
        """Tune, run, judge, write."""
        from flowrl.bench.arms import chosen_worlds, own_arms
        from flowrl.bench.rule_bench import bench_rule
        from flowrl.bench.rule_plan import make_parts

        arms = [
            *([self.rule] if self.rule else []),
            *own_arms([self.arm] if self.arm else [], self.arms, self.trust),
        ]
        names = [arm if isinstance(arm, str) else arm.name for arm in arms]
        require(len(arms) == 1, "rule", names, "one credit rule, or one arm with --arm or --arms")
        worlds = chosen_worlds(self.world, self.model, self.prompts, self.reward, self.set)
        world = self.world if self.world == "all" and not self.model else worlds[0]
        parts = make_parts(self.quick, world, self.seeds, self.budget, self.bound, self.first_seed)
        command = shlex.join(["flowrl", *sys.argv[1:]])
        return 0 if bench_rule(arms[0], parts, self.out, self.workers, command) else 130


@dataclass(frozen=True)
class Record:
    """Enter an arm into the contest for the least cost until Flow-GRPO's result: run it and the
    standing record on fresh seeds, print one line, and write the try's file.

    Examples: flowrl bench record my_arms.yaml --quick

    flowrl bench record my_arm.yaml --why "a better baseline"
    """

    arms: tyro.conf.Positional[Path]
    """A YAML file: below "arms:", "NAME: {setting: value}"; one arm, or several with `quick`. Its
    files must be committed: the seeds are a function of the commit and their content.
    """
    world: Literal["images", "points"] = "images"
    """images (three tasks), or points (four tasks of the 2-D world)."""
    quick: bool = False
    """Rank the arms and the standing record on two tasks and four seeds with half of the budget;
    nothing is entered.
    """
    whole: bool = False
    """With `quick`: all tasks and the whole budget, on the four seeds."""
    why: str = ""
    """One line on why the arm is cheap, for the table."""
    search_runs: Annotated[int, Ge(0)] = 0
    """Runs that your search for the arm's settings took."""
    trust: bool = False
    """Run code that the arms' file or the standing record names."""
    records: Path = Path("benchmarks/records")
    """The folder of all tries; the file is RECORDS/WORLD/NAME.json."""
    out: Path = Path("runs/record")
    """Folder of the single runs. Existing runs are not repeated."""
    workers: Workers = 0
    """Number of parallel runs, 0 = one per core, or a Dask cluster (docs/guides/cluster.md)."""

    def main(self) -> int:
        """Run, judge, write."""
        from flowrl.bench.record import Runner, attempt, ranked
        from flowrl.compare.arms import load_arms

        arms = load_arms(self.arms, self.trust)
        runner = Runner(
            self.world, self.out, shlex.join(["flowrl", *sys.argv[1:]]), self.workers, _say
        )
        if self.quick:
            rows = ranked(arms, self.records, runner, self.whole)
            if rows is None:
                return _paused()
            for name, ratio, tasks, fallen in rows:
                each = ", ".join(f"{task} {own.text()}" for task, own in tasks.items())
                print(f"{ratio.text():<22} {each}; {fallen} collapsed  {name}")
            return 0
        require(not self.whole, "whole", True, "only with --quick")
        require(len(arms) == 1, "arms", ", ".join(arms), "one arm, or several with --quick")
        require(bool(self.why), "why", self.why, "one line on why the arm is cheap")
        ((name, settings),) = arms.items()
        done = attempt(
            name,
            settings,
            self.arms,
            self.records,
            runner,
            self.why,
            self.search_runs,
            self.trust,
        )
        if done is None:
            return _paused()
        print(f"{done.line}\nWrote {self.records / self.world / name}.json")
        return 0


@dataclass(frozen=True)
class Verdict:
    """Judge the comparison of all methods from its finished runs, and write its tables and chart.
    With `run` the missing searches and runs of a world are made first.

    Example: flowrl bench verdict --run images --workers 2
    """

    run: Literal["", "points", "images"] = ""
    """Make the missing runs of this world: points (the 2-D world) or images. You can stop with
    Ctrl-C; the same command continues.
    """
    points: Path = Path("benchmarks/results/verdict-points.jsonl")
    """Results in the 2-D world; the searches are next to it (-tuning.jsonl)."""
    images: Path = Path("benchmarks/results/verdict-images.jsonl")
    """Results in the image world; skipped if the file does not exist."""
    out: Path = Path("runs/verdict")
    """Folder for questions.csv, arms.csv, costs-points.png, costs-images.png and leads.png."""
    workers: Workers = 0
    """Number of processes, 0 = one per core, or a Dask cluster (docs/guides/cluster.md). The
    numbers do not depend on it.
    """

    def main(self) -> int:
        """Run, judge and write."""
        from flowrl.bench.verdict import Verdicts
        from flowrl.bench.verdict_page import (
            arm_rows,
            costs_figure,
            leads_figure,
            question_rows,
            summary,
        )
        from flowrl.bench.verdict_runs import CAMPAIGNS, Study
        from flowrl.compare.paper import csv_text
        from flowrl.run.costs import STATED_NAME
        from flowrl.run.report.style import png

        files = {"points": self.points, "images": self.images}
        if self.run:
            require_new_file(files[self.run], lambda data: data.startswith(b"{"), self.run)
            study = Study(CAMPAIGNS[self.run], files[self.run], self.workers)
            if not study.execute(shlex.join(["flowrl", *sys.argv[1:]])):
                return _paused()
        worlds = {}
        for name, path in files.items():
            if not any(map(os.path.isfile, (path, f"{path}.xz"))):
                continue
            study = Study(CAMPAIGNS[name], path)
            pairs = study.pairs(any_code=True)
            seeds, needed = sum(map(len, pairs.values())), study.campaign.seeds * len(pairs)
            if seeds == needed:
                worlds[name] = Verdicts(pairs), study
            else:  # no verdict before the declared number of seeds
                print(
                    f"{study.campaign.label}: skipped, because only {seeds} of {needed} seeds have"
                    " all arms"
                )
        require(
            bool(worlds), "points", str(self.points), "a file with every run of at least one world"
        )
        judged = {name: verdicts for name, (verdicts, _) in worlds.items()}
        written = {
            "questions.csv": csv_text(list(question_rows(judged))).encode(),
            "arms.csv": csv_text(list(arm_rows(worlds))).encode(),
            "leads.png": png(leads_figure(judged)),
        }
        for name, verdicts in judged.items():
            title = f"Cost until Flow-GRPO's result over Flow-GRPO's, at prices of {STATED_NAME}"
            written[f"costs-{name}.png"] = png(costs_figure(verdicts, title))
        for file, data in written.items():
            write_bytes(self.out / file, data)
        print(f"{summary(judged)}\nWrote {', '.join(str(self.out / file) for file in written)}")
        return 0


@dataclass(frozen=True)
class Redo:
    """Repeat a run of a results file, and compare every number except seconds with its line.

    Example: flowrl bench redo 51720b9e28e950ce --out benchmarks/results/verdict-points.jsonl
    """

    key: tyro.conf.Positional[str]
    """The id of the run."""
    out: Path
    """The results file."""
    trust: bool = False
    """Run code that the lines of the file name, and use their addresses and keys."""

    def main(self) -> int:
        """Repeat and compare."""
        from flowrl.bench.results_file import ResultsFile
        from flowrl.bench.suite import redo

        repeat = redo(self.key, ResultsFile(self.out, self.trust))
        if repeat.same:
            print(f"{self.key}: identical to the last digit")
            return 0
        print(
            f"{self.key}: differs in {len(repeat.differing)} numbers"
            f" (first: {repeat.differing[0]}), by at most {repeat.largest:.3g}"
        )
        judged = (
            "no more than the rounding of another processor explains"
            if repeat.close
            else "more than the rounding of another processor explains"
        )
        print(
            f"Reward: {repeat.early:.2g} apart in the first quarter of the evaluations,"
            f" {repeat.final:.2g} in the last; {judged}"
        )
        return 0 if repeat.close else 1


@dataclass(frozen=True)
class Bench:
    """Benchmarks: compare your own rule with tuned baselines, search settings, enter the contest
    for the least cost, judge the comparison of all methods, and repeat a run of a results file.
    """

    which: tyro.conf.OmitSubcommandPrefixes[Tune | Rule | Record | Verdict | Redo]

    def main(self) -> int:
        """Run the chosen one."""
        return self.which.main()


def _say(line: str) -> None:
    print(line, flush=True)


def _paused() -> int:
    """Print how to continue; returns the exit status."""
    print(f"Paused; finished runs are kept. Continue with: {shlex.join(['flowrl', *sys.argv[1:]])}")
    return 130

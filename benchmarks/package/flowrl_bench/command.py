"""`flowrl bench claims`, `tune`, `rule`, `microscope`, `headroom` and `verdict`."""

import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Gt, Le, Lt

from flowrl.core.errors import require
from flowrl.core.options import Workers
from flowrl.io import require_new_file, write_bytes
from flowrl.reading import is_json


@dataclass(frozen=True)
class Claims:
    """Test the papers' claims: run what the results file lacks, judge the claims, and write the
    page.

    Arms and rules were fixed before the runs, so there is no `--arm`. For an arm of your own, use
    `flowrl bench rule --arm`.

    Example: flowrl bench claims --quick --workers 2
    """

    quick: bool = False
    """Only the 2-D world, with five seeds and some of the open questions: a subset of the full
    suite's runs, in the same file.
    """
    world: str = "all"
    """mixture (two dimensions), shapes (images, headline claims only) or all."""
    only: tuple[str, ...] = ()
    """Ids of the claims to test; default: all."""
    out: Path = Path("runs/claims/claims.jsonl")
    """The results file: one line per run. Runs in it are not repeated."""
    page: Path | None = None
    """Folder for claims.md, claims.html, their figures and claims/details.md; default: the folder
    of the results.
    """
    workers: Workers = 0
    """Number of parallel runs, 0 = one per core, or a Dask cluster (docs/guides/cluster.md). Every
    run uses one thread, so the numbers do not depend on this option.
    """
    minutes: Annotated[float, Gt(0)] = math.inf
    """Start no more runs after this many minutes; the same command continues later."""
    judge: bool = False
    """Judge the existing runs, even if other code made them, and write the page; start no runs."""
    look: bool = False
    """With --judge: measure missing samples of samplers (FILE-samples.json) with the current code;
    a run whose result then differs from its line is refused.
    """
    redo: Annotated[str | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Repeat the run with this id from its line in `out` (rules of your own included), compare
    every number except seconds, report whether the rounding of another processor explains the
    differences, and stop.
    """
    trust: bool = False
    """Run code that the lines in `out` name, and use their addresses and keys."""
    list: bool = False
    """Print the claims and their rules, and stop."""

    def main(self) -> int:
        """Run, judge, write."""
        from flowrl_bench import claims_details
        from flowrl_bench.catalogue import CLAIMS, RETIRED
        from flowrl_bench.claims import QUICK_SEEDS, SEEDS
        from flowrl_bench.claims_page import (
            TITLE,
            claims_page,
            read_inputs,
        )
        from flowrl_bench.evidence import evaluation_rows
        from flowrl_bench.page import require_page
        from flowrl_bench.results_file import ResultsFile, SamplesFile, joined
        from flowrl_bench.suite import (
            Suite,
            complete_samples,
            kept_memory,
            needed,
            needed_samples,
            quick,
        )
        from flowrl_bench.tables import COST_ARMS, judge_all

        require(
            self.world in ("all", "mixture", "shapes"),
            "world",
            self.world,
            "mixture, shapes or all",
        )
        exists = any(map(os.path.isfile, (self.out, f"{self.out}.xz")))
        require(
            exists or not self.judge, "out", str(self.out), "an existing results file, with --judge"
        )
        for name in self.only:
            require(name in CLAIMS, "only", name, f"one of {', '.join(CLAIMS)}")
        offered = CLAIMS if self.only or not self.quick else quick(CLAIMS)
        chosen = {key: claim for key, claim in offered.items() if not self.only or key in self.only}
        if self.list:
            print("\n".join(f"{c.id}: {c.says} ({c.primary.words()})" for c in chosen.values()))
            return 0
        require(self.judge or not self.look, "look", self.look, "only with --judge")
        if self.redo is None and not self.judge:
            require_new_file(self.out, lambda data: True)
        file = ResultsFile(self.out, self.trust)
        if self.redo is not None:
            return _redo(self.redo, file)
        folder, option = self.page or self.out.parent, "page" if self.page else "out"
        require_page(folder, "claims", TITLE, option)
        require_page(folder / "claims", "details", claims_details.TITLE, option)
        seeds = {"mixture": QUICK_SEEDS, "shapes": ()} if self.quick else SEEDS
        suite = Suite(
            needed(chosen, "mixture" if self.quick else self.world, seeds),
            file,
            {**needed(CLAIMS, "all", SEEDS), **needed(RETIRED, "all", SEEDS)},
        )
        finished = self.judge
        if not self.judge:
            missing = len(suite.runs.keys() - file.read(suite.allowed).keys())
            progress = _progress(missing, len(suite.runs), "runs remain", self.out, _run_name)
            finished = suite.execute(self.workers, progress, self.minutes)
        lines = file.read(suite.allowed, any_code=self.judge)
        memory = kept_memory(
            self.out.with_name(f"{self.out.stem}-memory.json"),
            COST_ARMS if finished and not (self.quick or self.only or self.judge) else None,
            code=next(iter(lines.values()))["code"] if lines else "",
        )
        samples = SamplesFile(self.out.with_name(f"{self.out.stem}-samples.json"))
        if finished and (self.look or not self.judge):
            observed = {
                key: config for key, config in needed_samples(chosen, seeds).items() if key in lines
            }
            finished = complete_samples(samples, observed, self.workers, _samples)
        lines = joined(lines, samples.read())
        judged = judge_all(CLAIMS, lines)
        inputs = read_inputs(judged, lines, self.out)
        page = claims_page(inputs)
        written = page.write(folder, "claims", "claims")
        rows, settings = evaluation_rows(({}, line) for line in lines.values())
        command = shlex.join(["flowrl", *sys.argv[1:]])
        written += page.for_paper(folder / "claims-paper", rows, settings, command)
        written += claims_details.details_page(inputs, memory).write(folder / "claims", "details")
        for case in judged:
            if case.claim.id in chosen:
                print(f"{case.claim.id} ({case.world}, {case.seeds[0]} seeds): {case.label}")
        print(f"Wrote {', '.join(map(str, written))}")
        return 0 if finished else _paused()


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
        from flowrl_bench.arms import ARMS, chosen_worlds, in_world, named_arm, own_arms, short_name
        from flowrl_bench.tune import Search, choices, for_paper, save, tune, usual_budget

        if self.show:
            default = Tune.__dataclass_fields__["budget"].default
            require(self.budget == default, "budget", self.budget, "left out with --show")
        else:
            require_new_file(self.out, lambda data: True)
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
        from flowrl_bench.arms import chosen_worlds, own_arms
        from flowrl_bench.rule_bench import bench_rule
        from flowrl_bench.rule_plan import make_parts

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
class Microscope:
    """Compare each rule's credit with the true advantage of the step, in both worlds (43 minutes of
    one core for the published page).

    Example: flowrl bench microscope --rules my_rules.py:MyRule --world mixture
    """

    rules: tuple[str, ...] = ()
    """Rules besides the built-in ones: path/to/file.py:Class, NAME or NAME(option=value)."""
    world: str = "all"
    """mixture (two dimensions), shapes (images) or all."""
    looks: Annotated[int, Ge(0), Le(1000)] = 0
    """Number of seeds for training and for trajectories; 0 = 5 in two dimensions and 3 for images
    (--quick: 3 and 2).
    """
    quick: bool = False
    """Fewer trajectories, shorter training; for a first impression."""
    out: Path | None = None
    """The results file, one line per cell; default: runs/microscope/microscope.jsonl (--quick:
    quick.jsonl). Existing cells are kept.
    """
    page: Path | None = None
    """Folder for microscope.md, microscope.html and their figures; default: the folder of the
    results.
    """
    workers: Workers = 0
    """Number of processes, 0 = one per core, or a Dask cluster (docs/guides/cluster.md). The numbers
    do not depend on it.
    """

    def main(self) -> int:
        """Measure, draw, write."""
        from flowrl_bench.microscope import RULES, WORLDS, check_rules, sizes, with_looks
        from flowrl_bench.microscope_numbers import Lines
        from flowrl_bench.microscope_page import TITLE, microscope_page, summary
        from flowrl_bench.microscope_study import Study, check_out
        from flowrl_bench.page import require_page
        from flowrl_bench.rule_names import named_rules

        require(self.world in ("all", *WORLDS), "world", self.world, "mixture, shapes or all")
        all_sizes = {
            world: with_looks(size, self.looks) for world, size in sizes(self.quick).items()
        }
        chosen = {world: size for world, size in all_sizes.items() if self.world in ("all", world)}
        rules = {**RULES, **named_rules(self.rules, RULES)}
        check_rules(rules, all_sizes["mixture"])
        out = self.out or Path("runs/microscope") / (
            "quick.jsonl" if self.quick else "microscope.jsonl"
        )
        check_out(out)
        option = "page" if self.page else "out"
        require_page(self.page or out.parent, "microscope", TITLE, option)
        command = shlex.join(["flowrl", *sys.argv[1:]])
        study = Study(chosen, rules, out, command)
        keys = [cell.key for cells in study.sessions().values() for cell in cells]
        missing = len(set(keys) - study.read().keys())
        progress = _progress(missing, len(keys), "cells remain", out, _cell_name)
        finished = study.execute(self.workers, progress)
        cell_lines = study.read()
        lines = Lines(cell_lines)
        if lines.worlds():
            page = microscope_page(cell_lines, all_sizes, str(out), command)
            folder = self.page or out.parent
            written = page.write(folder, "microscope", "microscope")
            rows = [
                {name: value for name, value in row.items() if not isinstance(value, list)}
                for line in cell_lines.values()
                for row in ({**line["cell"], **part} for part in line["rows"])
            ]
            settings = [{"credit": rule} for rule in rules.values()]
            written += page.for_paper(folder / "microscope-paper", rows, settings, command)
            print(f"{summary(lines)}\nWrote {', '.join(map(str, written))}")
        return 0 if finished else _paused()


@dataclass(frozen=True)
class Headroom:
    """Measure how much any credit rule could gain over uniform credit: compare an oracle with
    uniform credit, both tuned, in a family of tasks around the 2-D world.

    Example: flowrl bench headroom --tasks default 9-of-10 noise-0.3 --workers 2
    """

    tasks: tuple[str, ...] = ()
    """Tasks by name; default: all (--quick: default, 9-of-10 and noise-0.3). Runs in `out` are not
    repeated.
    """
    credit: str = ""
    """A credit rule that replaces the oracle, as a control: the headroom of random is negative, and
    that of uniform is 0.
    """
    arms: tuple[Literal["published", "values", "verdict", "images"], ...] = ()
    """Further arms to tune and run. published: Stepwise-Flow-GRPO, TP-GRPO and random credit;
    values: credit from cheap values, and fewer but larger groups; verdict: the arms of the main
    comparison; images: those that it runs on images.
    """
    budget: Annotated[int, Ge(0), Le(200)] = 0
    """Search runs per arm; 0 = 18 (--quick: 8)."""
    seeds: Annotated[int, Ge(0), Le(1000)] = 0
    """Fresh seeds per arm and task; 0 = 5 (--quick: 3)."""
    first_seed: Annotated[int, Ge(0), Lt(2**31)] = 5000
    """The first fresh seed."""
    quick: bool = False
    """Shorter runs, smaller searches, fewer tasks; for a first impression."""
    out: Path = Path("runs/headroom/headroom.jsonl")
    """The results file, one line per run. The searches (-tuning.jsonl) and the table (.csv) are
    written next to it.
    """
    page: Path | None = None
    """Folder for the page and its map, which are named after the results file; default: the folder
    of the results.
    """
    workers: Workers = 0
    """Number of processes, 0 = one per core, or a Dask cluster (docs/guides/cluster.md). The numbers
    do not depend on it.
    """

    def main(self) -> int:
        """Search, run, write."""
        from flowrl_bench.evidence import evaluation_rows, labelled
        from flowrl_bench.headroom import IMAGES, QUICK, QUICK_SIZE, TASKS, HeadroomStudy, Size
        from flowrl_bench.headroom_page import TITLE, headroom_page, summary, table
        from flowrl_bench.page import require_page

        names = self.tasks or (QUICK if self.quick else tuple(TASKS))
        known = {**TASKS, **IMAGES}
        for name in names:
            require(name in known, "tasks", name, f"one of {', '.join(known)}")
        folder, spreadsheet = self.page or self.out.parent, self.out.with_suffix(".csv")
        require_new_file(self.out, lambda data: True)
        require_new_file(spreadsheet, lambda data: data.startswith(b"task,"))
        page = self.out.stem
        require_page(folder, page, TITLE)
        size = QUICK_SIZE if self.quick else Size()
        seeds = self.seeds or size.seeds
        size = replace(size, seeds=seeds, first_seed=self.first_seed, sets=self.arms)
        size = replace(size, budget=self.budget or size.budget)
        tasks = {name: known[name] for name in dict.fromkeys(names)}
        if self.credit:
            tasks = {name: replace(task, oracle=self.credit) for name, task in tasks.items()}
        study = HeadroomStudy(tasks, self.out, size, self.workers)
        command = shlex.join(["flowrl", *sys.argv[1:]])
        finished = study.execute(command)
        if rows := study.rows():
            document = headroom_page(rows, size, command)
            written = document.write(folder, page, page)
            runs = labelled("task", study.runs(), study.results.read())
            evaluated, settings = evaluation_rows(runs)
            written += document.for_paper(folder / f"{page}-paper", evaluated, settings, command)
            write_bytes(spreadsheet, table(rows).encode())
            print(f"{summary(rows)}\nWrote {', '.join(map(str, [*written, spreadsheet]))}")
        return 0 if finished else _paused()


@dataclass(frozen=True)
class Verdict:
    """Judge the main comparison from its finished runs, and write its page. The runs come from
    `flowrl bench headroom` with the options that the page states.

    Example: flowrl bench verdict --points runs/verdict/points.jsonl
    """

    points: Path = Path("benchmarks/results/verdict-points.jsonl")
    """Results in the 2-D world."""
    images: Path = Path("benchmarks/results/verdict-images.jsonl")
    """Results in the image world; skipped if the file does not exist."""
    page: Path = Path("runs/verdict")
    """Folder for the page and its chart."""

    def main(self) -> int:
        """Judge and write."""
        from flowrl_bench.evidence import evaluation_rows, labelled
        from flowrl_bench.page import require_page
        from flowrl_bench.verdict import CAMPAIGNS, Verdicts
        from flowrl_bench.verdict_page import TITLE, details, summary

        require_page(self.page, "details", TITLE)
        files = {"points": self.points, "images": self.images}
        studies = {
            name: CAMPAIGNS[name].study(path)
            for name, path in files.items()
            if any(map(os.path.isfile, (path, f"{path}.xz")))
        }
        require(bool(studies), "points", str(self.points), "a file with results")
        worlds = {}
        for name, study in studies.items():
            pairs = study.pairs(any_code=True)
            seeds, needed = sum(map(len, pairs.values())), study.size.seeds * len(pairs)
            if seeds == needed:
                worlds[name] = Verdicts(pairs), study
            else:  # no verdict before the declared number of seeds
                label = CAMPAIGNS[name].label
                print(f"{label}: skipped, because only {seeds} of {needed} seeds have all arms")
        require(
            bool(worlds), "points", str(self.points), "a file with every run of at least one world"
        )
        command = shlex.join(["flowrl", *sys.argv[1:]])
        page = details(worlds, command)
        written = page.write(self.page, "details")
        rows, settings = evaluation_rows(
            ({"world": name, **labels}, line)
            for name, (_, study) in worlds.items()
            for labels, line in labelled("task", study.runs(), study.results.read(any_code=True))
        )
        written += page.for_paper(self.page / "details-paper", rows, settings, command)
        print(f"{summary(worlds)}\nWrote {', '.join(map(str, written))}")
        return 0


@dataclass(frozen=True)
class Bench:
    """Benchmarks: test the papers' claims, compare your own rule with tuned baselines, inspect
    credit under a microscope, and measure how much credit can gain.
    """

    which: tyro.conf.OmitSubcommandPrefixes[Claims | Tune | Rule | Microscope | Headroom | Verdict]

    def main(self) -> int:
        """Run the chosen one."""
        return self.which.main()


def _redo(key: str, file: Any) -> int:
    from flowrl_bench.suite import redo

    repeat = redo(key, file)
    if repeat.same:
        print(f"{key}: identical to the last digit")
        return 0
    print(
        f"{key}: differs in {len(repeat.differing)} numbers (first: {repeat.differing[0]}), by at"
        f" most {repeat.largest:.3g}"
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


def _progress(
    missing: int, total: int, noun: str, path: Path, name: Callable[[Mapping[str, Any]], str]
) -> Callable[[int, int, Mapping[str, Any]], None]:
    """Print how many lines of a results file are missing; the returned function prints one line per
    finished line of the file.
    """
    from flowrl_bench.remaining import Pace

    if missing:
        print(f"{missing} of {total} {noun} (results: {path}); press Ctrl-C to pause", flush=True)
    pace = Pace(missing)

    def progress(done: int, total: int, line: Mapping[str, Any]) -> None:
        print(f"{done}/{total} {name(line)}; {pace.finished()}", flush=True)

    return progress


def _run_name(line: Mapping[str, Any]) -> str:
    config = line["config"]
    parts = config["environment"]["world"], config["algorithm"]["method"]
    return f"{' '.join(parts)} seed {config['seed']}"


def _cell_name(line: Mapping[str, Any]) -> str:
    from flowrl_bench.microscope import Cell

    return Cell(**line["cell"]).key


def _paused() -> int:
    """Print how to continue; returns the exit status."""
    print(f"Paused; finished runs are kept. Continue with: {shlex.join(['flowrl', *sys.argv[1:]])}")
    return 130


def _samples(done: int, total: int) -> None:
    if done == total or done % 10 == 0:
        print(f"samples: {done}/{total} jobs", flush=True)

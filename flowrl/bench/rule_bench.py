"""`flowrl bench rule`: tune a credit rule or another arm of your own and compare it with tuned
baselines in both worlds.
"""

import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.bench.arms import WORLDS, Arm, own_arm, settings_of, tuned, world_label
from flowrl.bench.digest import config_id
from flowrl.bench.evidence import Evidence, evaluation_rows, labelled
from flowrl.bench.page import Heading, require_page
from flowrl.bench.results_file import ResultsFile
from flowrl.bench.rule_headroom import bound_among
from flowrl.bench.rule_page import (
    TITLE,
    World,
    findings_table,
    judged,
    rule_page,
    sentence,
    terminal,
)
from flowrl.bench.rule_plan import BASELINES, ORACLE, Key, Part
from flowrl.bench.suite import execute_study
from flowrl.bench.tune import Tried, chosen, tried
from flowrl.compare.arms import arm_run, credit_arms, meaning, rule_name
from flowrl.compare.results import difference
from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Workers
from flowrl.run.build import make_method
from flowrl.run.config import RunConfig
from flowrl.run.io import write_json
from flowrl.run.reading import read_json
from flowrl.run.workers import worker_count

TUNING, RESULTS, ARM = "tuning.jsonl", "results.jsonl", "arm.json"
"""The files of a rule's folder that hold runs, and the settings of the arm."""
Say = Callable[[str], None]


def own_name(spec: str) -> str:
    """What a rule is called: by its class, or by its whole spec if the class has a baseline's name.
    Raises `ConfigError` for a baseline.
    """
    name = rule_name(spec)
    chosen = spec if name in BASELINES else name
    require(chosen not in BASELINES, "rule", spec, "a rule that is not always included")
    return chosen


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two arms have the same settings, in whatever spelling of their parts."""
    return meaning(arm_run(RunConfig(), one)) == meaning(arm_run(RunConfig(), other))


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings of an arm: of a credit rule alone its spec."""
    return (
        settings["credit"] if settings.keys() == {"method", "credit"} else difference("", settings)
    )


def results_folder(rule: str | Arm) -> Path:
    """runs/rule-NAME for an arm or a rule's spec."""
    name = rule_name(rule) if isinstance(rule, str) else rule.name
    return Path("runs") / ("rule-" + re.sub(r"[^\w.=,-]+", "_", name).strip("_"))


def known_arm(rule: str | Arm, folder: Path) -> Arm:
    """The arm `rule`, or that of a rule's spec, with the spellings of a folder's results if they
    have runs of it.

    Raises `ConfigError` if they have runs of another arm, or of this one before a file of its parts
    was changed; or if the name is that of a baseline.
    """
    if isinstance(rule, str):
        own_name(rule)
    name, settings = (
        ("", credit_arms([rule])[rule_name(rule)])
        if isinstance(rule, str)
        else (rule.name, rule.settings)
    )
    path = folder / ARM
    held = read_json(path, dict[str, Any]) if path.exists() else None
    instead = f"choose another --out, or delete {TUNING} and {RESULTS} in {folder} to start again"
    if held is not None and not _same(held, settings):
        raise ConfigError(
            f"results: {folder} contains runs of another rule, {settings_text(held)}: {instead}"
        )
    for file in (ResultsFile(folder / place, own=held or {}) for place in (TUNING, RESULTS)):
        if any(config_id(file.settings(line)) != line["id"] for line in file.unchecked()):
            raise ConfigError(
                f"results: {folder} contains runs of {settings_text(settings)} from before its file"
                f" changed: {instead}"
            )
    settings = held or settings
    if isinstance(rule, str):
        name = own_name(settings["credit"])
    return own_arm(name, settings)


class Bench:
    """A comparison in a folder: what it contains, and what is missing.

    `rule` is the spec of a credit rule, or any other arm (`flowrl.bench.arms.own_arm`).

    Raises `CreditError` if a rule breaks its contract (it is tried on random tables), and
    `ConfigError` if its name is a baseline's, or the folder has runs of another rule, of the rule
    before its file was changed, or of code with other numbers.
    """

    def __init__(
        self, rule: str | Arm, parts: Sequence[Part], out: Path | None = None, workers: Workers = 0
    ) -> None:
        if isinstance(workers, int):
            worker_count(workers, 1)
        self.folder = out or results_folder(rule)
        self.arm = known_arm(rule, self.folder)
        self.name, self.text = self.arm.name, settings_text(self.arm.settings)
        require_page(self.folder, "rule", TITLE, "out")
        is_ours = any((self.folder / name).exists() for name in (ARM, TUNING, RESULTS))
        is_free = is_ours or not self.folder.exists() or not any(self.folder.iterdir())
        need = "a new folder, or one of `flowrl bench rule`; this one contains other files"
        require(is_free, "out", str(self.folder), need)
        self.parts, self.workers = list(parts), workers
        named = {
            name: value
            for part in parts
            if part.world not in WORLDS
            for name, value in settings_of(part.world).items()
        }
        files = (
            ResultsFile(self.folder / name, own={**named, **self.arm.settings})
            for name in (TUNING, RESULTS)
        )
        self.tuning, self.results = files
        for part in self.parts:
            make_method(self.arm.run(part.world, self.arm.values(part.world, {})))
        self.searches = [search for part in self.parts for search in part.searches(self.arm)]
        self.command = shlex.join(
            ["flowrl", "bench", "rule", *self._words(rule), "--out", str(self.folder)]
        )
        self.tuning.read()
        self.results.read()

    def _words(self, rule: str | Arm) -> list[str]:
        return [self.text] if isinstance(rule, str) else ["--arm", f"{self.name}: {self.text}"]

    def values(self, part: Part) -> dict[str, float] | None:
        """The values at which the rule runs: those its search chose (None: unfinished), else
        uniform credit's.
        """
        search, usual = part.search(self.arm), tuned(part.world, "uniform")
        return (
            chosen(search, self.tuning.unchecked())
            if search
            else {knob: usual[knob] for knob in self.arm.knobs}
        )

    def baselines(self, part: Part) -> dict[str, dict[str, float] | None]:
        """The values of the baselines that are searched here, by name (None: unfinished)."""
        lines = self.tuning.unchecked()
        return {
            search.arm.name: chosen(search, lines)
            for search in part.searches(self.arm)
            if search.arm is not self.arm
        }

    def searched(self, part: Part) -> dict[str, list[Tried]]:
        """The settings that the searches in the part's world have tried, by arm."""
        lines = self.tuning.unchecked()
        return {search.arm.name: tried(search, lines) for search in part.searches(self.arm)}

    def exact(self, part: Part) -> list[RunConfig]:
        """The runs of exact credit to make: none if their curves are shipped."""
        runs = part.exact() if part.bound else []
        return [] if bound_among(runs, {}, "") else runs

    def runs(self) -> Iterator[tuple[Key, RunConfig | None]]:
        """World, arm and seed of every run of the results, and its settings, None until its search
        is finished.
        """
        for part in self.parts:
            values, searched = self.values(part), self.baselines(part)
            by_arm = {self.name: values, **searched}
            complete = {name: numbers for name, numbers in searched.items() if numbers}
            for name, runs in part.arms(
                self.arm, values or self.arm.values(part.world, {}), complete
            ).items():
                for run in runs:
                    yield (part.world, name, run.seed), run if by_arm.get(name, True) else None
            for run in self.exact(part):
                yield (part.world, ORACLE.name, run.seed), run

    def execute(self, say: Say = print) -> bool:
        """Make the missing searches, then the missing results; False if Ctrl-C paused it."""
        write_json(self.folder / ARM, dict(self.arm.settings))

        def runs() -> Iterator[tuple[str, RunConfig | None]]:
            for (world, arm, _), run in self.runs():
                yield f"{world_label(world)}, {arm}", run

        files = self.searches, self.tuning, runs, self.results
        return execute_study(*files, self.command, self.workers, say)

    def worlds(self) -> list[World]:
        """The worlds with two or more seeds that all arms have, judged."""
        lines, evaluated = self.results.read(), []
        for part in self.parts:
            values, searched = self.values(part), self.baselines(part)
            complete = {name: numbers for name, numbers in searched.items() if numbers}
            if values is None or len(complete) < len(searched):
                continue
            arms = {
                name: [lines.get(config_id(run)) for run in runs]
                for name, runs in part.arms(self.arm, values, complete).items()
            }
            indices = [
                index
                for index in range(part.seeds)
                if all(arm_lines[index] is not None for arm_lines in arms.values())
            ]
            if len(indices) < 2:
                continue
            runs = {
                name: [line for index in indices if (line := arm_lines[index])]
                for name, arm_lines in arms.items()
            }
            arm_values = {
                **{name: complete.get(name) or tuned(part.world, name) for name in part.baselines},
                self.name: values,
            }
            evaluated.append(
                World(
                    part,
                    Evidence(runs, tuple(part.numbers[index] for index in indices)),
                    arm_values,
                    self.searched(part),
                    bound_among(part.exact(), lines, f"{self.command} --bound"),
                )
            )
        return judged(self.name, evaluated) if evaluated else []


def bench_rule(
    rule: str | Arm,
    parts: Sequence[Part],
    out: Path | None = None,
    workers: Workers = 0,
    command: str = "",
    say: Say = print,
) -> bool:
    """Tune and compare the rule, print the findings, and write rule.md, rule.html and the folder
    rule-paper (`flowrl.compare.paper`); False if the runs were paused.

    Runs in the folder are reused, whatever path named the rule then. Raises what `Bench` raises.
    """
    bench = Bench(rule, parts, out, workers)
    command = command or bench.command
    finished = bench.execute(say)
    worlds = bench.worlds()
    if worlds:
        page = rule_page(bench.name, bench.text, worlds, command)
        written = page.write(bench.folder, "rule")
        page.blocks = [Heading("Findings"), findings_table(worlds), *page.blocks]
        rows, settings = evaluation_rows(labelled("world", bench.runs(), bench.results.read()))
        written += page.for_paper(bench.folder / "rule-paper", rows, settings, command)
        for world in worlds:
            for text in (sentence(bench.name, world), world.tells(bench.name)):
                say("\n" + textwrap.fill(text, 80))
        say("\n" + terminal(bench.name, worlds))
        say(f"\nWrote {', '.join(map(str, written))}")
    if not finished:
        say(f"Paused; finished runs are kept. Continue with: {command}")
    return finished

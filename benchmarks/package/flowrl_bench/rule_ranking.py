"""A credit rule of your own against the built-in ones: claims, microscope, costs, and a page that ranks them.

A rule has several spellings (paths); its name in tables and the folder of its results are chosen so that no two rules share one.
"""

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import ConfigError, require
from flowrl.specs import identity
from flowrl.training.build import make_method
from flowrl.training.compare import rule_name
from flowrl.workers import worker_count
from flowrl_bench.claims import GAINS, POINTS, UNIFORM, Arm, Claim, gains
from flowrl_bench.claims_page import band
from flowrl_bench.digest import config_id
from flowrl_bench.evidence import MEASURES
from flowrl_bench.microscope import MicroscopeConfig, run_microscope
from flowrl_bench.microscope_page import TITLES, figures
from flowrl_bench.page import Document, Image, Table, bands, require_page
from flowrl_bench.results_file import Lines, ResultsFile
from flowrl_bench.statistics import mean, rate, wins
from flowrl_bench.suite import Suite, arm_memory, evidence, needed
from flowrl_bench.tables import Judged, comparison_table, cost_table, judge_together, summary
from flowrl_bench.verdicts import BETTER, NO_WORSE, Compare, by_seed

RIVALS: dict[str, Arm] = {
    "uniform": UNIFORM,
    "stepwise gains": GAINS,
    "stepwise gains, one-step estimate": gains("probe=tweedie"),
    "turning points": POINTS,
    "random": {"credit": "random"},
}
"""The built-in rules in the ranking."""
TITLE = " against the built-in rules"
"""The end of the page's title."""
RIVAL_SPECS = frozenset(changes.get("credit", "") for changes in RIVALS.values())


def _with_file(spec: str) -> str:
    """`rule_name`, after the name of its file."""
    name = rule_name(spec)
    return name if name == spec else f"{Path(spec[: -len(name) - 1]).stem}:{name}"


_NAMES: tuple[Callable[[str], str], ...] = (rule_name, _with_file, str)
"""The possible names of a rule, shortest first."""


def named_rules(specs: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """`specs` by names that differ from each other and from those `taken`.

    A class in a file has its own name; if that is not unique, the file's name comes first (v1:Mine), or its whole path. Raises
    `ConfigError` if two specs are the same rule, or a spec is only the name of a built-in rule.
    """
    named: dict[str, str] = {}
    for place, spec in enumerate(specs):
        for earlier in specs[:place]:
            if identity(earlier) == identity(spec):
                raise ConfigError(f"rule = {spec!r} is not allowed: it is the same rule as {earlier!r}; name each rule once")
        free = (
            name(spec)
            for name in _NAMES
            if sum(name(other) == name(spec) for other in specs) == 1 and name(spec) not in {*taken, *named}
        )
        found = next(free, None)
        if found is None:
            raise ConfigError(f"rule = {spec!r} is not allowed: the built-in rule of that name is always included")
        named[found] = spec
    return named


def _specs(file: ResultsFile) -> list[str]:
    """The rules in a results file besides the rivals, as their lines spell them."""
    specs = (line.get("config", {}).get("algorithm", {}).get("credit") for line in file.unchecked())
    return [spec for spec in dict.fromkeys(specs) if spec and spec not in RIVAL_SPECS]


def results_folder(spec: str, root: Path = Path("runs")) -> Path:
    """`root`/rule-NAME; if another rule's results are there, with the file's name too, or its whole path."""
    folders = [root / ("rule-" + re.sub(r"[^\w.=,-]+", "_", name(spec)).strip("_")) for name in _NAMES]

    def free(folder: Path) -> bool:
        return all(identity(other) == identity(spec) for other in _specs(ResultsFile(folder / "results.jsonl")))

    return next(filter(free, folders), folders[-1])


def known_spelling(spec: str, file: ResultsFile) -> str:
    """The spelling of the rule `spec` in the results; `spec` itself if they have no runs of it.

    Raises `ConfigError` if they have runs of another rule, or of this one before its file was changed.
    """
    instead = f"choose another --out, or delete {file.path} to start again"
    for known in _specs(file):
        if identity(known) != identity(spec):
            raise ConfigError(f"results: {file.path} holds runs of another rule, {known}: {instead}")
        mine = [line for line in file.unchecked() if line["config"]["algorithm"]["credit"] == known]
        if any(config_id(replace(file, rule=known).settings(line)) != line["id"] for line in mine):
            raise ConfigError(f"results: {file.path} holds runs of {spec} from before its file was changed: {instead}")
        return known
    return spec


def rule_claims(name: str, spec: str) -> dict[str, Claim]:
    """The questions about a new credit rule, as claims with verdict rules in the 2-D world. `name`: no rival's."""
    require(name not in RIVALS, "name of the rule", name, f"none of the rivals' names, {', '.join(RIVALS)}")
    arms: dict[str, Arm] = {**RIVALS, name: {"credit": spec}}
    versus = Compare(name, "uniform", expects=BETTER)
    few = {arm: arms[arm] for arm in ("uniform", "stepwise gains", name)}

    def ask(key: str, says: str, rule: Any, arms: Mapping[str, Arm] = arms, **base: Any) -> Claim:
        return Claim(key, says, "your rule", "-", arms, rule, base=base)

    claims = (
        ask("beats-uniform", "It beats uniform credit.", versus),
        ask("beats-random", "It beats random credit: it contains some signal.", Compare(name, "random", expects=BETTER)),
        ask("beats-stepwise", "It beats stepwise gains.", Compare(name, "stepwise gains", expects=BETTER)),
        ask("fewer-updates", "It reaches equal rewards in fewer updates.", Compare(name, "uniform", "updates", BETTER)),
        ask("fewer-evaluations", "It needs fewer network evaluations for that.", Compare(name, "uniform", "nfe", BETTER)),
        ask("final", "Its final reward is no worse than uniform credit's.", Compare(name, "uniform", "final", NO_WORSE)),
        ask("noise", "With noise of 0.3 on every score, it beats uniform credit.", versus, few, reward_noise=0.3),
        ask("strict", "With a reward of 0 or 1, it beats uniform credit.", versus, few, reward_form="strict"),
        ask("steps", "With 20 denoising steps, it beats uniform credit.", versus, few, num_steps=20),
        ask("equal-evaluations", "At equal evaluations, it leads.", Compare(name, "uniform", "reward at equal nfe", BETTER)),
    )  # fmt: skip
    return {claim.id: claim for claim in claims}


@dataclass(frozen=True)
class Rank:
    """One line of the ranking."""

    name: str
    cells: tuple[str, ...]
    area: float


def ranking(claims: Mapping[str, Claim], lines: Lines, seeds: tuple[int, ...]) -> list[Rank]:
    """All arms by mean reward over training, best first."""
    found = evidence(claims["beats-uniform"], "mixture", lines, seeds)
    if found is None:
        return []
    ranks = []
    for arm in found.runs:
        areas = found.values(arm, "area")
        others = [found.values(other, "area") for other in found.runs if other != arm]
        won = float(np.mean([wins(areas, other) for other in others]))
        ratios = [mean(by_seed(found.differences(arm, "uniform", axis))).exponential().text(2) for axis in ("updates", "nfe")]
        area, final, lost = mean(by_seed(areas)), mean(by_seed(found.values(arm, "final"))), rate(found.values(arm, "collapse"))
        lowest = f"{found.values(arm, 'final').min():.3f}"
        ranks.append(Rank(arm, (area.text(), final.text(), lowest, lost.text(2), *ratios, f"{won:.2f}"), area.value))
    return sorted(ranks, key=lambda rank: -rank.area)


def bench_rule(
    spec: str,
    seeds: int,
    out: Path | None,
    execute: Callable[[Suite], bool],
    progress: Callable[[int, int], None],
    workers: int = 0,
    microscope: MicroscopeConfig | None = None,
) -> bool:
    """Make the runs, apply the microscope, write rule.md and rule.html; False if the runs were paused.

    The rule is tried on random tables first. Results in the folder are used, whatever path the rule was named by then; those of
    more seeds stay there but are not on the page. Raises `CreditError` if the rule breaks its contract, `ConfigError` if its
    name is a rival's, or the folder's results are of another rule or of other code.
    """
    worker_count(workers, 1)
    microscope = microscope or MicroscopeConfig()
    (name,) = named_rules([spec], {*RIVALS, *microscope.rules})
    microscope = replace(microscope, rules={name: spec, **microscope.rules})
    file = ResultsFile((out or results_folder(spec)) / "results.jsonl")
    spec = known_spelling(spec, file)
    file = replace(file, rule=spec)
    require_page(file.path.parent, "rule", TITLE)
    claims, chosen = rule_claims(name, spec), tuple(range(seeds))
    runs = needed(claims, "mixture", {"mixture": chosen})
    for config in {config.rollout.num_steps: config for config in runs.values() if config.algorithm.credit == spec}.values():
        make_method(config)
    kept = max([seeds, *(line["seed"] + 1 for line in file.unchecked() if isinstance(line.get("seed"), int))])
    allowed = needed(claims, "mixture", {"mixture": tuple(range(kept))})
    suite = Suite(runs, file, allowed, shlex.join(["flowrl", "bench", "claims", "--out", str(file.path)]))
    finished = execute(suite)
    lines = {key: line for key, line in file.read(allowed).items() if key in runs}
    rows = run_microscope(microscope, workers, progress) if finished else []
    memory = arm_memory(["mixture"], {name: {"credit": spec}}) if finished else []
    written = rule_page(name, spec, claims, lines, chosen, rows, memory).write(file.path.parent, "rule")
    print(f"Wrote {', '.join(map(str, written))}")
    return finished


def rule_page(
    name: str,
    spec: str,
    claims: Mapping[str, Claim],
    lines: Lines,
    seeds: tuple[int, ...],
    rows: Sequence[dict[str, Any]],
    memory: Sequence[Mapping[str, Any]],
) -> Document:
    """The page: ranking, verdicts, the microscope's figures, costs, and all comparisons."""
    page = Document(f"{name}{TITLE}", kind=TITLE)
    ranks = ranking(claims, lines, seeds)
    place = next((i for i, rank in enumerate(ranks, 1) if rank.name == name), None)
    result = f"`{spec}` is number {place} of {len(ranks)} by mean reward over training" if place else "No seed is complete yet"
    page.text(f"{result} (2-D world, {len(seeds)} seeds; means with 95% intervals).")
    page.heading("Ranking")
    ratios = ("updates over uniform's", "NFE over uniform's")
    head = ("rule", MEASURES["area"].label, MEASURES["final"].label, "worst final", "collapse rate", *ratios, "seeds won")
    page.blocks.append(Table(head, [(rank.name, *rank.cells) for rank in ranks]))
    page.text(
        "Ratios compare the budgets at which the runs of a seed first reach common rewards. Verdicts have Holm's correction over "
        "all of this page's comparisons (`docs/verdicts.md`)."
    )
    found = evidence(claims["beats-uniform"], "mixture", lines, seeds)
    if found is not None:
        curves = {arm: band(next(iter(tasks.values()))) for arm, tasks in found.runs.items()}
        drawn = bands({"2-D world": curves}, "updates (iterations)", "held-out reward")
        page.blocks.append(Image("rule-curves", drawn, "Learning curves"))
    page.heading("Verdicts")
    judged = [Judged(claim, "mixture", lines, seeds) for claim in claims.values()]
    judge_together(judged)
    page.blocks.append(summary(judged, "verdict"))
    if rows:
        stages = sorted({row["iteration"] for row in rows})
        for key, figure in figures(rows, stages[len(stages) // 2]).items():
            page.heading(TITLES[key])
            page.blocks.append(Image(f"rule-{key}", figure, TITLES[key]))
    page.heading("Costs")
    page.blocks.append(cost_table(lines, {name: {"credit": spec}, **RIVALS}, memory))
    page.heading("All comparisons")
    for one in judged:
        if one.verdict is not None:
            page.text(f"`{one.claim.id}`: {one.claim.rule.words()}.")
            page.blocks.append(comparison_table(one.verdict.comparisons, one.claim.asks))
    return page

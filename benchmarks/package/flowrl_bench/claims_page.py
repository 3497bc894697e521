"""The page of the claims, made only from results files: answers, one figure, tables. The details
are on a separate page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.reading import read_json
from flowrl_bench.arms import WORLDS
from flowrl_bench.claims import SEEDS, Claim
from flowrl_bench.claims_figures import leads
from flowrl_bench.default_settings import FILE, survival_table
from flowrl_bench.digest import rules_digest
from flowrl_bench.evidence import BUDGET, MEASURES
from flowrl_bench.main_comparison import Arm, answers, arms_of, lead_table
from flowrl_bench.page import Document, Image, Table
from flowrl_bench.results_file import Lines
from flowrl_bench.tables import (
    BRIEF,
    CLAIM,
    DEPENDS,
    MISSING,
    QUESTION,
    SELF_TEST,
    SYMBOLS,
    WORLD_NAMES,
    Judged,
    family,
)
from flowrl_bench.verdicts import ALIKE, BETTER, FAILS, HOLDS, UNDECIDED, WORSE

TITLE = "Tests of the papers' claims"
DETAILS = "claims/details.md"
LEGEND = (
    f"{SYMBOLS[BETTER]} better, {SYMBOLS[WORSE]} worse, {SYMBOLS[ALIKE]} no difference that"
    f" matters, {SYMBOLS[UNDECIDED]} undecided; {SYMBOLS[HOLDS]} the claim holds, {SYMBOLS[FAILS]}"
    " it does not. Numbers are differences of mean reward (0 to 1) over training, at equal"
    " budgets, with 95% intervals over paired seeds. [The verdict rules](verdicts.md) were written"
    " before the runs."
)
DEFINITIONS = (
    "The runs use the definitions of version 0.1: credit rules count ODE steps as steps. "
    "In the image runs TP-GRPO's rule for the first step was inactive: it applies to step 0 only, and their "
    "stochastic steps are 2 to 6."
)
"""Also in the README, next to the same numbers."""
MAIN_TEXT = (
    "Every arm has the learning rate, clip and noise level that a search of equal size found for"
    " it. *Larger groups*: uniform credit with as many network evaluations per update as stepwise"
    " gains. The worst seed is by mean reward over training. The clip that the search found for"
    " uniform credit collapses in some seeds; [narrower-clip](claims/details.md#narrower-clip)"
    " compares the papers' rules with its second-best clip. A click on a column's head sorts."
)
SURVIVAL_TEXT = (
    "The papers' headlines at the worlds' default settings and at tuned settings. The runs at"
    " default settings are those of the question [tuning](claims/details.md#tuning), if it has runs"
    " in that world; else they are older and have [a page of their"
    " own](claims/at-default-settings.md)."
)
CLAIMS_TEXT = (
    "The papers' statements in our words. A link leads to the rule, the arms, every comparison and"
    " the reported number."
)
QUESTIONS_TEXT = (
    "No paper reports these. The answer refers to the arms that it names, or to the arm that the"
    " details name first."
)
METHOD = (
    "The unit is the seed; runs of one seed share prompts and noise, and tasks are averaged within"
    " the seed. p-values have Holm's correction over a family: the main comparison, the papers'"
    " claims, the other questions, the self-test. Held-out prompts and their noise are the same for"
    " all runs, so intervals do not cover the choice of prompts. *Per evaluation* counts forward"
    " equivalents ([definition](verdicts.md#forward-equivalents)). *Per second* is processor time of one core"
    " with tiny networks; large models can differ. Verdicts are about these worlds."
)
CHOICE = (
    "The rule to take has the largest lead per evaluation among methods that are better than"
    " uniform credit there, not worse than larger groups, and neither worse per second nor in"
    " collapses. This selection was defined after the first 2-D runs had been seen. All numbers are"
    " on [the page of details](claims/details.md)."
)
AGAIN = (
    "`flowrl bench claims --out FILE` makes the missing runs and this page, `flowrl bench claims"
    " --out FILE --redo ID` repeats one run and compares every number. The file contains all runs;"
    " none is left out."
)


@dataclass(frozen=True)
class Inputs:
    """The data of the page: the verdicts, the lines and their file, the lines at default settings,
    and the false-alarm rates (benchmarks/results/calibration.json).
    """

    judged: Sequence[Judged]
    lines: Lines
    path: Path
    defaults: Lines = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)


def read_calibration(results: Path) -> dict[str, Any]:
    """The calibration next to a results file; empty if there is none."""
    path = results.with_name("calibration.json")
    return read_json(path) if path.exists() else {}


def claims_page(inputs: Inputs) -> Document:
    """Answers, a figure, the tables, then method and provenance."""
    page, judged = Document(TITLE), inputs.judged
    worlds = {world: arms_of(judged, world) for world in WORLDS}
    page.items(answers(judged))
    for world, arms in worlds.items():
        if arms:
            name = WORLD_NAMES[world]
            page.blocks.append(
                Image(
                    f"leads-{world}",
                    leads(arms, name),
                    f"Dot plot of each method's lead over uniform credit in the {name}",
                )
            )
    page.text(LEGEND)
    page.text(DEFINITIONS)
    page.text(_false_alarms(inputs.calibration, worlds))
    page.heading("Main comparison: every arm against uniform credit")
    page.text(MAIN_TEXT)
    for world, arms in worlds.items():
        page.heading(_capital(WORLD_NAMES[world]), 3)
        if arms:
            page.blocks.append(lead_table(arms))
        else:
            page.text(_missing(world))
    page.heading("What survives: default settings and tuned settings")
    page.text(SURVIVAL_TEXT)
    page.blocks.append(survival_table(judged, inputs.defaults))
    for title, kind, words in (
        ("Claims of the papers", (CLAIM, SELF_TEST), CLAIMS_TEXT),
        ("Open questions", (QUESTION,), QUESTIONS_TEXT),
    ):
        page.heading(title)
        page.text(words)
        page.blocks.append(by_world([one for one in judged if family(one) in kind]))
    page.heading("Method and provenance")
    page.text(METHOD)
    page.text(CHOICE)
    for words in provenance(inputs.lines, inputs.path):
        page.text(words)
    page.text(AGAIN)
    return page


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _missing(world: str) -> str:
    return f"{_capital(WORLD_NAMES[world])}: {MISSING}."


def _false_alarms(calibration: Mapping[str, Any], worlds: Mapping[str, Mapping[str, Arm]]) -> str:
    """The simulated rates for the number of seeds of each world's main comparison."""
    if not calibration:
        return "False-alarm rates: see [the verdict rules](verdicts.md)."
    parts = []
    for world, arms in worlds.items():
        number = max((len(arm.evidence.seeds) for arm in arms.values()), default=len(SEEDS[world]))
        laws = calibration["false alarms"].values()
        known = [int(seeds) for seeds in next(iter(laws))]
        seeds = str(max([n for n in known if n <= number] or [min(known)]))
        single = [law[seeds]["better or worse, mean reward over training"] for law in laws]
        every = [law[seeds] for law in calibration["families"].values()]
        parts.append(
            f"{WORLD_NAMES[world]} ({seeds} seeds): {_percent(single)} of single comparisons,"
            f" {_percent(every)} of families of 20"
        )
    return (
        "False alarms among arms that are alike, in simulated learning curves (mean, largest over"
        f" laws): {'; '.join(parts)}."
    )


def _percent(rates: Sequence[float]) -> str:
    return f"{100 * sum(rates) / len(rates):.1f}% ({100 * max(rates):.1f}%)"


def by_world(judged: Sequence[Judged]) -> Table:
    """A row per claim, with the answer in each world."""
    claims: dict[str, Claim] = {one.claim.id: one.claim for one in judged}
    cells = {(one.claim.id, one.world): cell(one) for one in judged}
    rows = [
        (
            f"[{key}]({DETAILS}#{key})",
            claim.says,
            *(cells.get((key, world), "-") for world in WORLDS),
        )
        for key, claim in claims.items()
    ]
    asks = bool(judged) and judged[-1].claim.asks
    head = ("question" if asks else "claim", "in words", *(WORLD_NAMES[world] for world in WORLDS))
    return Table(head, rows, (head[0], "in words", *head[2:]))


def cell(one: Judged) -> str:
    """The symbol and the verdict; the number of a single comparison, and the symbols of several by
    arm.
    """
    if one.verdict is None:
        return MISSING
    found = one.verdict.comparisons
    if len(found) == 1:
        estimate = found[0].estimate
        number = estimate.text(2, found[0].difference)
        ratio = "ratio " if MEASURES[found[0].measure].unit == BUDGET else ""
        return f"{_brief(one.label)}, {ratio}{number}"
    if one.label != DEPENDS and not one.label.endswith("parts hold"):
        return _brief(one.label)
    names = [part.arms.partition(" minus ")[0].partition(" over ")[0] for part in found]
    named = len(set(names)) == len(names) and not any(name.startswith("(") for name in names)
    symbols = [SYMBOLS[part.verdict] for part in found]
    parts = (
        [f"{name} {symbol}" for name, symbol in zip(names, symbols, strict=True)]
        if named
        else symbols
    )
    return (
        (", " if named else " ").join(parts)
        if one.label == DEPENDS
        else f"{one.label}: {' '.join(symbols)}"
    )


def _brief(label: str) -> str:
    return f"{SYMBOLS[label]} {BRIEF.get(label, label)}"


def processor(line: Mapping[str, Any]) -> str:
    """The processor that a line names: 'AMD EPYC' of 'one core of 2 (AMD EPYC)'."""
    return line["hardware"].partition(" (")[2].removesuffix(")") or line["hardware"]


def mixed_seeds(lines: Lines) -> dict[tuple[str, int], list[str]]:
    """World and seed of runs that were made on more than one kind of processor, with the
    processors.
    """
    found: dict[tuple[str, int], set[str]] = {}
    for line in lines.values():
        found.setdefault((line["config"]["environment"]["world"], line["seed"]), set()).add(
            processor(line)
        )
    return {key: sorted(kinds) for key, kinds in sorted(found.items()) if len(kinds) > 1}


def provenance(lines: Lines, path: Path) -> list[str]:
    """Runs, commits, versions, processors, code and rules; whether all arms of a seed ran on one
    kind of processor.
    """
    if not lines:
        return ["No run has finished yet."]
    values = list(lines.values())

    def counted(name: str) -> str:
        found = [line[name] for line in values]
        return ", ".join(f"`{one}` ({found.count(one)} runs)" for one in sorted(set(found)))

    hours = sum(line["totals"]["seconds"] for line in values) / 3600
    kinds = [processor(line) for line in values]
    processors = ", ".join(f"{kind} ({kinds.count(kind)} runs)" for kind in sorted(set(kinds)))
    versions = ", ".join(f"{name} {number}" for name, number in values[0]["versions"].items())
    words = (
        f"{len(values)} runs ({hours:.1f} hours of one core in training) in `{path.name}`;"
        f" processors: {processors}; commits {counted('commit')}; code {counted('code')}; rules"
        f" when they were made {counted('rules')}, now `{rules_digest()}`; {versions}."
    )
    mixed = mixed_seeds(lines)
    if not mixed:
        return [words, "All arms of one seed ran on one kind of processor."]
    seeds = "; ".join(
        f"{WORLD_NAMES.get(world, world)}, seed {seed} ({', '.join(kinds)})"
        for (world, seed), kinds in mixed.items()
    )
    return [
        words,
        (
            "Warning: the arms of these seeds ran on different kinds of processors, so their"
            f" differences contain rounding: {seeds}."
        ),
    ]


def default_lines(results: Path) -> Path:
    """The results file at default settings, next to a results file."""
    return results.with_name(FILE)

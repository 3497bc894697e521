"""The page of the claims, made only from results files: answers, one figure, tables. The details
are on a separate page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl_compare.costs import RATE, STATED_NAME

from flowrl.reading import read_json
from flowrl_bench.arms import WORLDS
from flowrl_bench.claims import Claim
from flowrl_bench.claims_figures import leads
from flowrl_bench.default_settings import FILE, survival_table
from flowrl_bench.digest import rules_digest
from flowrl_bench.evidence import BUDGET, MEASURES
from flowrl_bench.leads import LEADS
from flowrl_bench.main_comparison import POSITION, answers, arms_of, lead_table
from flowrl_bench.page import Document, Image, Table
from flowrl_bench.results_file import Lines, ResultsFile
from flowrl_bench.statistics import SMALLEST
from flowrl_bench.tables import BRIEF, MISSING, SYMBOLS, WORLD_NAMES, Judged, marked
from flowrl_bench.verdicts import FEWEST, GAINS

TITLE = "Tests of the papers' claims"
DETAILS = "claims/details.md"
INTRODUCTION = (
    "The papers on credit per step say that their rules learn faster than uniform credit, which"
    " gives all steps the credit of the finished image. We tested their claims with tuned settings"
    " in two small worlds: samples in two dimensions, and images of shapes. *Better* and *worse* are"
    " differences that matter, after a correction for the number of questions; the figures show"
    " every method's lead with its interval."
)
LEGEND = (
    f"{', '.join(f'{symbol} {verdict}' for verdict, symbol in SYMBOLS.items())}. Matters: at least"
    " 5% of what can be gained in the world. Numbers are differences of mean reward (0 to 1) over"
    " training, at equal budgets, with 95% intervals over paired seeds. Each question has one"
    " primary outcome with a verdict; numbers without a symbol are secondary and have none. [The"
    " verdict rules](verdicts.md) say how verdicts are corrected for the number of questions."
)
DEFINITIONS = (
    "The runs use the definitions of version 0.1: credit rules count ODE steps as steps. In the"
    " image runs TP-GRPO's rule for the first step was inactive: it applies to step 0 only, and"
    " their stochastic steps are 2 to 6. *True advantages* are means of 8 stochastic continuations"
    " in these runs, which have noise: this control is no upper bound."
)
"""Also in the README, next to the same numbers."""
MAIN_TEXT = (
    "Every arm has the learning rate, clip and noise level that a search of equal size found for"
    " it. *Larger groups*: uniform credit in groups of 29 (2-D world) and 25 (images), whose"
    " updates cost as many forward equivalents as those of turning points; their search and runs are"
    " to be made."
    " [larger-groups-earlier](claims/details.md#larger-groups-earlier) has the runs of an earlier"
    " definition. The worst seed is by mean reward over training. The clip that the search found"
    " for uniform credit collapses in some seeds; [narrower-clip](claims/details.md#narrower-clip)"
    " compares the papers' rules with its second-best clip. A click on a column's head sorts."
)
SURVIVAL_TEXT = (
    "The papers' headlines at the worlds' default settings (secondary) and at tuned"
    " settings. The runs at"
    " default settings are those of the question [tuning](claims/details.md#tuning), if it has runs"
    " in that world; else they are older and have [a page of their"
    " own](claims/at-default-settings.md)."
)
CLAIMS_TEXT = (
    "The papers' statements in our words, and the verdict that would agree with them. A link leads"
    " to the rules, the arms, every comparison and the reported number."
)
QUESTIONS_TEXT = (
    "No paper reports these. A number is that of the first comparison that the details name. The"
    f" control of *{POSITION}* changes the credit less than turning points do."
)
MARGIN_TEXT = (
    "A difference matters from 5% of the gain on: the mean final reward of the best arm in the"
    " results minus the reward before training. These gains are best known values and may grow."
)
CHANGED_TEXT = (
    "Primary outcomes whose arms had another verdict by the earlier rules, which judged all 239"
    " comparisons, some of them twice, with a smallest effect of 0.02 in every world. All"
    " comparisons that are not primary have lost their verdicts. The earlier NFE counted an"
    " evaluation with a gradient as one."
)
METHOD = (
    "The unit is the seed; runs of one seed share prompts and noise, and tasks are averaged within"
    " the seed. Holm's correction covers all verdicts of a world; each self-test is a family"
    " of its own. Held-out prompts and their noise are the same for"
    " all runs, so intervals do not cover the choice of prompts. *Per evaluation* counts forward"
    " equivalents ([definition](verdicts.md#forward-equivalents)). *Per second* is"
    " processor time of one core in the 2-D world. On images it is"
    f" {STATED_NAME} at 512 pixels: counted FLOPs with guidance over an assumed {RATE / 1e12:.0f}"
    " TFLOP/s ([definition](verdicts.md#forward-equivalents)). Verdicts are about these worlds. The"
    " primary outcomes were chosen after the"
    " runs of this page had been seen, and before all later ones."
)
CHOICE = (
    "The rule to take has the largest lead per evaluation among methods whose verdict is better"
    " and for which no interval shows a loss per second, against larger groups, or in collapses."
    " This selection was defined after the first 2-D runs had been seen. All numbers are"
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
    the false-alarm rates (calibration.json), and earlier verdicts (claims-earlier-verdicts.json).
    """

    judged: Sequence[Judged]
    lines: Lines
    path: Path
    defaults: Lines = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    earlier: Sequence[Mapping[str, Any]] = ()


def read_beside(results: Path, name: str) -> Any:
    """A JSON file next to a results file; an empty object if there is none."""
    path = results.with_name(name)
    return read_json(path) if path.exists() else {}


def read_inputs(judged: Sequence[Judged], lines: Lines, path: Path) -> Inputs:
    """The page's data, with the files next to the results."""
    defaults = ResultsFile(path.with_name(FILE)).read(any_code=True)
    earlier = read_beside(path, f"{path.stem}-earlier-verdicts.json")
    calibration = read_beside(path, "calibration.json")
    return Inputs(judged, lines, path, defaults, calibration, earlier.get("rows", ()))


def claims_page(inputs: Inputs) -> Document:
    """Answers, a figure, the tables, then method and provenance."""
    page, judged = Document(TITLE), inputs.judged
    worlds = {world: arms_of(judged, world) for world in WORLDS}
    page.text(INTRODUCTION)
    page.items(answers(judged))
    page.text(LEGEND)
    for world, arms in worlds.items():
        if arms:
            name = WORLD_NAMES[world]
            page.blocks.append(
                Image(
                    f"leads-{world}",
                    leads(arms, world),
                    f"Dot plot of each method's lead over uniform credit in the {name}",
                )
            )
    page.text(DEFINITIONS)
    page.text(_false_alarms(inputs.calibration))
    page.heading("Main comparison: every arm against uniform credit")
    page.text(MAIN_TEXT)
    for world, arms in worlds.items():
        page.heading(_capital(WORLD_NAMES[world]), 3)
        if arms:
            page.blocks.append(lead_table(arms, world))
        else:
            page.text(f"{_capital(WORLD_NAMES[world])}: {MISSING}.")
    page.heading("What survives: default settings and tuned settings")
    page.text(SURVIVAL_TEXT)
    page.blocks.append(survival_table(judged, inputs.defaults))
    for title, asks, words in (
        ("Claims of the papers", False, CLAIMS_TEXT),
        ("Open questions", True, QUESTIONS_TEXT),
    ):
        page.heading(title)
        page.text(words)
        page.blocks.append(by_world([j for j in judged if j.claim.asks == asks]))
    page.heading("Smallest difference that matters")
    page.text(MARGIN_TEXT)
    page.blocks.append(margin_table())
    if inputs.earlier:
        page.heading("What changed")
        page.text(CHANGED_TEXT)
        page.blocks.append(changed_table(judged, inputs.earlier))
    page.heading("Method and provenance")
    page.text(METHOD)
    page.text(CHOICE)
    for words in provenance(inputs.lines, inputs.path):
        page.text(words)
    page.text(AGAIN)
    return page


def _missing(world: str) -> str:
    return f"{_capital(WORLD_NAMES[world])}: {MISSING}."


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _false_alarms(calibration: Mapping[str, Any]) -> str:
    """The largest measured rates of families with a wrong label."""
    if not calibration:
        return "False-alarm rates: see [the verdict rules](verdicts.md)."
    families = calibration["families"]
    rates = [row for row in families if row["seeds"] >= FEWEST]
    mean = sum(row["any"] for row in rates) / len(rates)
    worst = max(row["any"] for row in rates)
    return (
        f"False alarms in learning curves resampled from these runs: {100 * mean:.1f}% of families"
        f" of {calibration['family']} have a wrong label of any kind; {100 * worst:.1f}% for the"
        f" worst of {len(rates)} combinations of arm, number of seeds and truth"
        f" ({calibration['experiments']} families each)."
    )


def by_world(judged: Sequence[Judged]) -> Table:
    """A row per claim, with the answer in each world."""
    claims: dict[str, Claim] = {case.claim.id: case.claim for case in judged}
    cells = {(case.claim.id, case.world): cell(case) for case in judged}
    asks = bool(judged) and judged[0].claim.asks
    rows = [
        (
            f"[{key}]({DETAILS}#{key})",
            claim.says,
            *(() if asks else (claim.expects,)),
            *(cells.get((key, world), "-") for world in WORLDS),
        )
        for key, claim in claims.items()
        if claim not in LEADS
    ]
    names = ("question" if asks else "claim", "in words", *(() if asks else ("agrees if",)))
    head = (*names, *(WORLD_NAMES[world] for world in WORLDS))
    return Table(head, rows, head)


def cell(one: Judged) -> str:
    """The symbol, the verdict and the number of the primary comparison; the number of a secondary
    one.
    """
    primary = one.primary
    if primary is None:
        return MISSING
    ratio = "ratio " if MEASURES[primary.measure].unit == BUDGET else ""
    label = BRIEF.get(one.label, one.label)
    words = f"{SYMBOLS[one.label]} {label}" if one.label in SYMBOLS else label
    return f"{words}, {ratio}{primary.estimate.text(3, primary.difference)}"


def margin_table() -> Table:
    """What can be gained, and the smallest difference that matters, by task."""
    head = ("world", "task", "before training", "best known", "by", "smallest difference")
    rows = [
        (
            WORLD_NAMES[world],
            task,
            f"{known.start:.4f}",
            f"{known.best:.4f}",
            known.arm,
            f"{SMALLEST * known.size:.4f}",
        )
        for (world, task), known in GAINS.items()
    ]
    return Table(head, rows, ("world", "task", "by"))


def changed_table(judged: Sequence[Judged], earlier: Sequence[Mapping[str, Any]]) -> Table:
    """The primary outcomes whose arms had other verdicts by the earlier rules: of the same measure
    (also at equal NFE instead of forward equivalents), or in the same claim.
    """
    head = ("question", "world", "earlier verdicts", "verdict")
    leads, rows = [claim.id for claim in LEADS], []
    for case in judged:
        if case.label not in SYMBOLS:
            continue
        world, measure, *runs = case.claim.outcome(case.world, case.claim.primary)
        old = [
            f"{row['verdict']} (`{row['claim']}`{_by(row['measure'], measure)})"
            for row in earlier
            if row["outcome"][0] == world
            and row["outcome"][2:] == runs
            and (
                row["measure"].replace("nfe", "forwards") == measure
                or row["claim"] == case.claim.id not in leads
            )
        ]
        if any(not words.startswith(f"{case.label} (") for words in old):
            names = f"`{case.claim.id}`", WORLD_NAMES[case.world]
            rows.append((*names, "; ".join(old), marked(case.label)))
    return Table(head, rows, head)


def _by(measure: str, other: str) -> str:
    return "" if measure == other else f", {MEASURES[measure].label}"


def processor(line: Mapping[str, Any]) -> str:
    """The processor that a line names: 'AMD EPYC' of 'one core of 2 (AMD EPYC)'."""
    return line["hardware"].partition(" (")[2].removesuffix(")") or line["hardware"]


def mixed_seeds(lines: Lines) -> dict[tuple[str, int], list[str]]:
    """World and seed of runs that were made on more than one kind of processor, with the
    processors.
    """
    processors: dict[tuple[str, int], set[str]] = {}
    for line in lines.values():
        processors.setdefault((line["config"]["environment"]["world"], line["seed"]), set()).add(
            processor(line)
        )
    return {key: sorted(kinds) for key, kinds in sorted(processors.items()) if len(kinds) > 1}


def provenance(lines: Lines, path: Path) -> list[str]:
    """Runs, commits, versions, processors, code and rules; whether all arms of a seed ran on one
    kind of processor.
    """
    if not lines:
        return ["No run has finished yet."]
    values = list(lines.values())

    def counted(name: str) -> str:
        entries = [line[name] for line in values]
        return ", ".join(
            f"`{entry}` ({entries.count(entry)} runs)" for entry in sorted(set(entries))
        )

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

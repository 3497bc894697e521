"""The page of the claims, made from the results file alone."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl_bench.claim_figures import add_pictures
from flowrl_bench.claims import Claim
from flowrl_bench.costs import cost_table, level_table
from flowrl_bench.document import Document
from flowrl_bench.evidence import NEVER
from flowrl_bench.history import EARLIER_RULES
from flowrl_bench.post_hoc import LATER, NOTES
from flowrl_bench.records import rules_hash
from flowrl_bench.tables import WORLD_WORDS, Judged, Lines, by_task, comparison_table, count, judge_all, levels, summary

INTRODUCTION = (
    "Each claim of three papers, in our words, beside what happens in the built-in worlds: the same code, the same "
    "budgets, several seeds, intervals. A verdict is computed by a rule that was written before the runs (the third "
    "paragraph tells what was changed afterwards); it speaks of these worlds, not of large models. Numbers are "
    "interquartile means with 95% intervals from a stratified bootstrap over seeds (tasks are the strata), widened for "
    "few seeds; runs of one seed share their prompts and noise, so differences are paired. Held-out prompts and their "
    "noise are the same for all runs: intervals speak of other seeds of training, not of other prompts. There are about a"
    " hundred intervals, not corrected for their number: a few will miss."
)
WORDS = (
    "Words: *mean reward over training* is the held-out soft reward, 0 to 1, of ODE samples by the averaged weights, its "
    "mean over all evaluations after the start. *Updates* are iterations of sampling and learning; *NFE* are network "
    "evaluations: those of sampling, scoring and the update. *Seconds* are those of one core, with tiny networks: their "
    "ratios need not be a large model's. A *share of the baseline's* budget is what a rule needs to reach the baseline's "
    f"final reward, over the baseline's whole run; a run that never gets there counts as {NEVER:g}. *Log-density* is that "
    "of samples under the data."
)
COSTS = (
    "As measured, per rule: evaluations and reward calls of a trajectory, sequential calls and seconds of an iteration, "
    "and what a million evaluations (sampling, scoring and training) bought in reward over the whole run, of which a rule"
    " that is done early spends most for nothing. Peak memory is that of a process which makes a run of two iterations "
    "and nothing else."
)
LEVEL = (
    "The price of a level of reward that all of these runs reach, at the default clip and at one ten times as wide "
    "(interquartile means; ratios are those of paired runs). This table was added after the data had been seen."
)
AFTERWARDS = (
    "Asked after the data had been seen, of runs that were there: to be read as hints, not as tests. No verdict above "
    "rests on them."
)
ARMS = "Arms are options of `flowrl train`, with `--world mixture --eval-every 2` in the 2-D world. Levels are without intervals."
AGAIN = (
    "FILE is the results file. `flowrl bench claims --out FILE` makes what is missing in it, and this page; `flowrl bench claims "
    "--out FILE --redo ID` makes one run again from its line and compares every number; `--only ID` in its place runs a single "
    "claim. All runs are in the file, none is left out."
)


def claims_page(judged: Sequence[Judged], lines: Lines, path: Path, memory: Sequence[Mapping[str, Any]] = ()) -> Document:
    """The whole page: summary, tables, figures, every rule and comparison, costs, and how to make it again."""
    page = Document("The papers' claims, tested")
    claims, questions = [j for j in judged if not j.claim.asks], [j for j in judged if j.claim.asks]
    later = [j for j in judge_all(LATER, lines) if j.verdict is not None]
    page.text(INTRODUCTION)
    page.text(WORDS)
    page.text(_where(lines, path))
    page.heading("Claims")
    page.text(count(claims))
    page.blocks.append(summary(claims, "verdict"))
    _notes(page, claims)
    page.heading("Open questions")
    page.text("What no paper reports. Better, worse and no difference are about the arm that is named first.")
    page.blocks.append(summary(questions, "answer"))
    _notes(page, questions)
    if later:
        page.heading("Asked afterwards")
        page.text(AFTERWARDS)
        page.blocks.append(summary(later, "answer"))
    add_pictures(page, judged)
    page.heading("Cost")
    page.text(COSTS)
    page.blocks.append(cost_table(lines, memory=memory))
    prices = level_table(lines)
    if prices is not None:
        page.heading("What a level costs")
        page.text(LEVEL)
        page.blocks.append(prices)
    page.heading("Every rule and comparison")
    page.text(ARMS)
    for one in (*judged, *later):
        _details(page, one)
    page.heading("Make it again")
    page.text(AGAIN)
    return page


def _notes(page: Document, judged: Sequence[Judged]) -> None:
    """What to mind, of the claims that a note was written for."""
    ids = [name for name in dict.fromkeys(j.claim.id for j in judged) if name in NOTES]
    if ids:
        page.text("To be read with care:")
    for words in dict.fromkeys(NOTES[name] for name in ids):
        page.text(f"{', '.join(f'`{name}`' for name in ids if NOTES[name] == words)}: {words}")


def _details(page: Document, one: Judged) -> None:
    """A claim's rule, its arms, where they stand, and every comparison."""
    page.text(f"`{one.claim.id}` in the {WORLD_WORDS[one.world]}: {one.claim.rule.words()}. {_arms(one.claim)}")
    if one.verdict is not None:
        told = levels(one)
        if told:
            page.text(told)
        page.blocks.append(comparison_table((*one.verdict.comparisons, *by_task(one)), one.claim.asks))


def _where(lines: Lines, path: Path) -> str:
    if not lines:
        return "No run has finished yet."
    values = list(lines.values())
    commits = sorted({line["commit"] for line in values})
    machines = sorted({line["hardware"] for line in values})
    versions = ", ".join(f"{name} {number}" for name, number in values[0]["versions"].items())
    hours = sum(line["totals"]["seconds"] for line in values) / 3600
    kept = "; ".join(
        _rules_of(rules, sum(line["rules"] == rules for line in values)) for rules in sorted({line["rules"] for line in values})
    )
    return (
        f"{len(values)} runs ({hours:.1f} hours of one core in training) in `{path.name}`; commit {', '.join(commits)}; "
        f"{versions}; {'; '.join(machines)}; code `{values[0]['code']}`, rules `{rules_hash()}`: {kept}."
    )


def _rules_of(rules: str, runs: int) -> str:
    if rules == rules_hash():
        return f"{runs} runs were made under them"
    return f"{runs} under earlier ones, `{rules}` ({EARLIER_RULES.get(rules, 'how they differed is not recorded')})"


def _arms(claim: Claim) -> str:
    def told(changes: Mapping[str, Any]) -> str:
        return " ".join(f"--{name.replace('_', '-')} {_quoted(str(value))}" for name, value in changes.items()) or "defaults"

    base = f" All: {told(claim.base)}." if claim.base else ""
    return "Arms: " + "; ".join(f"{arm}: `{told(changes)}`" for arm, changes in claim.arms.items()) + "." + base


def _quoted(value: str) -> str:
    """For a shell; what has single quotes gets double ones, which read better than escapes."""
    return f'"{value}"' if "'" in value and not set(value) & set('"$`\\!') else shlex.quote(value)

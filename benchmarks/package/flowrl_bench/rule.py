"""A rule of the user's own against the built-in ones: claims, microscope, cost, and a page that ranks them."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.diagnostics.statistics import improvement, level
from flowrl.errors import require
from flowrl.training.build import make_method
from flowrl_bench.claim_figures import method_bands
from flowrl_bench.claim_plots import bands
from flowrl_bench.claims import Claim
from flowrl_bench.costs import cost_table, peak_memory
from flowrl_bench.document import Document, Picture, Table
from flowrl_bench.evidence import MEASURES, NEVER
from flowrl_bench.inspection import EQUAL_NFE, MicroscopeConfig, inspect
from flowrl_bench.microscope_plots import QUESTIONS, figures
from flowrl_bench.records import Ledger
from flowrl_bench.rule_names import known_as, lines_of, named_rules, results_folder
from flowrl_bench.runner import Suite, evidence, needed
from flowrl_bench.tables import comparison_table, judged_table
from flowrl_bench.verdicts import Answer, Beats, Needs, NoWorse

RIVALS: dict[str, dict[str, Any]] = {
    "uniform": {"method": "flow-grpo"},
    "stepwise gains": {"method": "stepwise-flow-grpo"},
    "stepwise gains, one-step estimate": {"credit": "stepwise-gain(probe=tweedie)"},
    "turning points": {"method": "tp-grpo"},
    "random": {"credit": "random"},
}
"""The built-in rules that it is ranked against."""
RIVAL_SPECS = frozenset(changes.get("credit", "") for changes in RIVALS.values())


def rule_claims(name: str, spec: str) -> dict[str, Claim]:
    """What a new credit rule is asked, as claims with verdict rules, on the 2-D world. `name`: none of the rivals'."""
    require(name not in RIVALS, "name of the rule", name, f"another than those of the rivals, {', '.join(RIVALS)}")
    arms = {**RIVALS, name: {"credit": spec}}
    versus = Beats(name, "uniform")
    few = {arm: arms[arm] for arm in ("uniform", "stepwise gains", name)}

    def ask(key: str, says: str, rule: Any, arms: Mapping[str, Any] = arms, **base: Any) -> Claim:
        return Claim(key, says, "your rule", "-", arms, rule, base=base)

    claims = (
        ask("beats-uniform", "It beats uniform credit.", versus),
        ask("beats-random", "It beats random credit: there is any signal.", Beats(name, "random")),
        ask("beats-stepwise", "It beats stepwise gains.", Beats(name, "stepwise gains")),
        ask("fewer-updates", "It reaches uniform credit's final reward in fewer updates.", Needs(name, "uniform", "updates")),
        ask("fewer-evaluations", "It needs fewer network evaluations for that.", Needs(name, "uniform", "nfe")),
        ask("final", "Its final reward is no worse than uniform credit's.", NoWorse(name, "uniform", "final")),
        ask("noise", "With noise of 0.3 on every score it beats uniform credit.", versus, few, reward_noise=0.3),
        ask("strict", "With a reward of 0 or 1 it beats uniform credit.", versus, few, reward_form="strict"),
        ask("steps", "With 20 denoising steps it beats uniform credit.", versus, few, steps=20),
        ask("equal-evaluations", "At equal evaluations it is ahead.", Answer((name,), "uniform", "reward at equal nfe")),
    )  # fmt: skip
    return {claim.id: claim for claim in claims}


@dataclass(frozen=True)
class Rank:
    """One line of the ranking."""

    name: str
    cells: tuple[str, ...]
    area: float


def ranking(claims: Mapping[str, Claim], lines: Mapping[str, Any], seeds: tuple[int, ...]) -> list[Rank]:
    """All arms by mean reward over training (interquartile mean over seeds), best first."""
    found = evidence(claims["beats-uniform"], "mixture", lines, seeds)
    if found is None:
        return []
    ranks = []
    for arm in found.runs:
        area = level(found.values(arm, "area"))
        chances = [
            improvement(found.values(arm, "area"), found.values(other, "area")).value for other in found.runs if other != arm
        ]
        shares = [found.share(arm, axis, "uniform").text(2) for axis in ("updates", "nfe")]
        final = level(found.values(arm, "final")).text()
        ranks.append(Rank(arm, (area.text(), final, *shares, f"{float(np.mean(chances)):.2f}"), area.value))
    return sorted(ranks, key=lambda rank: -rank.area)


def bench_rule(
    spec: str,
    seeds: int,
    out: Path | None,
    execute: Callable[[Suite], bool],
    progress: Callable[[int, int], None],
    workers: int = 0,
    look: MicroscopeConfig | None = None,
) -> bool:
    """Make the runs, look through the microscope, write rule.md and rule.html; False where the runs were paused.

    The rule is tried on random tables first. Results that lie in the folder are used, whatever path the rule was named by then;
    those of more seeds than asked for stay there, and out of the page. Raises `CreditError` where the rule breaks its contract,
    `ConfigError` where its name is a rival's or the folder's results are of another rule, or of other code.
    """
    require(workers >= 0, "workers", workers, "0 (one per core) or more")
    look = look or MicroscopeConfig()
    (name,) = named_rules([spec], {*RIVALS, *look.rules})
    look = replace(look, rules={name: spec, **look.rules})
    path = (out or results_folder(spec, RIVAL_SPECS)) / "results.jsonl"
    spec = known_as(spec, path, RIVAL_SPECS)
    claims, chosen = rule_claims(name, spec), tuple(range(seeds))
    runs = needed(claims, "mixture", {"mixture": chosen})
    for config in {config.rollout.num_steps: config for config in runs.values() if config.algorithm.credit == spec}.values():
        make_method(config)
    kept = max([seeds, *(line["seed"] + 1 for line in lines_of(path))])
    allowed = needed(claims, "mixture", {"mixture": tuple(range(kept))})
    again = shlex.join(["flowrl", "bench", "claims", "--out", str(path)])
    suite = Suite(runs, Ledger(path), allowed, again)
    finished = execute(suite)
    lines = {key: line for key, line in suite.ledger.read(suite.allowed).items() if key in runs}
    rows = inspect(look, workers, progress) if finished else []
    memory = peak_memory(("mixture",), {name: {"credit": spec}}) if finished else []
    written = rule_page(name, spec, claims, lines, chosen, rows, memory).write(path.parent, "rule")
    print(f"Wrote {', '.join(map(str, written))}")
    return finished


def rule_page(
    name: str,
    spec: str,
    claims: Mapping[str, Claim],
    lines: Mapping[str, Any],
    seeds: tuple[int, ...],
    rows: Sequence[dict[str, Any]],
    memory: Sequence[Mapping[str, Any]],
) -> Document:
    """The page: where the rule stands, what it was asked, what the microscope saw, what it costs."""
    page = Document(f"{name} against the built-in rules")
    ranks = ranking(claims, lines, seeds)
    place = next((i for i, rank in enumerate(ranks, 1) if rank.name == name), None)
    stands = f"`{spec}` is number {place} of {len(ranks)} by mean reward over training" if place else "No seed is complete yet"
    page.text(f"{stands} (2-D world, {len(seeds)} seeds; interquartile means with 95% intervals).")
    page.heading("Ranking")
    head = (
        "rule",
        MEASURES["area"].label,
        MEASURES["final"].label,
        "share of uniform's updates",
        "share of its NFE",
        "P(beats another)",
    )
    page.blocks.append(Table(head, [(rank.name, *rank.cells) for rank in ranks]))
    page.text(
        "Shares: the budget until uniform credit's final reward, over its whole run. A run that never gets there counts as "
        f"{NEVER:g}, so that uniform credit's own share can exceed 1."
    )
    found = evidence(claims["beats-uniform"], "mixture", lines, seeds)
    if found is not None:
        curves = {"2-D world": method_bands(found.runs)}
        page.blocks.append(Picture("rule-curves", bands(curves, "updates (iterations)", "held-out reward"), "Learning curves"))
    page.heading("What it was asked")
    page.blocks.append(judged_table(claims, lines, seeds))
    if rows:
        stage = sorted({row["iteration"] for row in rows})[len({row["iteration"] for row in rows}) // 2]
        for key, figure in figures(rows, stage, EQUAL_NFE).items():
            page.heading(QUESTIONS[key])
            page.blocks.append(Picture(f"rule-{key}", figure, QUESTIONS[key]))
    page.heading("Cost")
    page.blocks.append(cost_table(lines, {name: {"credit": spec}, **RIVALS}, memory))
    page.heading("Every comparison")
    for claim in claims.values():
        runs = evidence(claim, "mixture", lines, seeds)
        if runs is not None:
            page.text(f"`{claim.id}`: {claim.rule.words()}.")
            page.blocks.append(comparison_table(claim.rule.judge(runs).comparisons, claim.asks))
    return page

"""The microscope's page."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl_bench.document import Document, Picture, Table
from flowrl_bench.inspection import EQUAL_NFE
from flowrl_bench.microscope_plots import QUESTIONS, figures, table

ANSWERS = {
    "credit": "The true advantage of a taken step is V(x_{i+1}) - V(x_i), V the expected final reward when the stochastic "
    "sampler goes on. V is estimated by Monte Carlo continuation; the noise of that estimate is taken out of the correlation, "
    "and signs are counted only where the true one is more than two standard errors from 0. Bars are 95% intervals (bootstrap "
    "over groups).",
    "steps": "The same correlation, step by step.",
    "gradient": "The true gradient is the pathwise one, through the stochastic steps. Signal-to-noise is that of one batch; at "
    "equal NFE, cheap rules may average more batches. Those evaluations are all that a batch costs: sampling, the rule's probes, "
    "and one per trajectory and stochastic step for the policy's update, which is the same for all rules.",
    "training": "The policy is trained by uniform credit for so many iterations, and every rule looks at the same policies.",
    "noise": "The rules see rewards with noise on every score; the truth they are compared with is the reward without.",
}


def microscope_document(rows: Sequence[dict[str, Any]], stage: int, made: Mapping[str, Any]) -> Document:
    """The page: a figure per question, then all numbers.

    `made` is what the results file says of the rows: "command", "seconds", "cpu_seconds", "seed", and where they were made
    ("commit", "versions", "hardware", "code").
    """
    page = Document("The microscope: how close credit is to the truth")
    page.text(
        "Two-dimensional world. The rule called true advantage (16 continuations) estimates V itself, from 16 continuations per "
        "node; what it lacks to a correlation of 1 is their noise."
    )
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    page.text(
        f"Made in {made['seconds']:.0f} seconds ({made['cpu_seconds']:.0f} of computing) by `{made['command']}`, seed "
        f"{made['seed']}; commit {made['commit']}; {versions}; {made['hardware']}; code `{made['code']}`."
    )
    for name, figure in figures(rows, stage, EQUAL_NFE).items():
        page.heading(QUESTIONS[name])
        page.text(ANSWERS[name])
        page.blocks.append(Picture(name, figure, QUESTIONS[name]))
    page.heading("All numbers")
    page.text(
        "NFE per trajectory are those of sampling and of the rule's probes; the update's come on top, the same for all rules."
    )
    for part in table(rows).split("\n\n"):
        head, _, *body = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in part.splitlines()]
        page.blocks.append(Table(head, body))
    return page

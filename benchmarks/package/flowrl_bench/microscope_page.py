"""The microscope's page: answers, two figures, short tables, method and provenance, from the lines
of its results file.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl_bench.microscope import EQUAL_NFE, FORMS, METHODS, NOISES, Size, cells
from flowrl_bench.microscope_figures import PLACES, SCORES, correlations, panels, stages
from flowrl_bench.microscope_numbers import (
    Lines,
    ceiling_of,
    change,
    difference,
    gradient_mean,
    measurable,
    needed,
    over_looks,
    pooled_correlation,
    row_of,
)
from flowrl_bench.page import Document, Image, Table
from flowrl_bench.statistics import Estimate

TITLE = "The microscope: credit and gradients compared with the ground truth"
GAINS, ONE_STEP, BY_STEP, RANDOM = (
    "stepwise gains",
    "one-step gains",
    "gains, z-scored by step",
    "random",
)
"""Rules named in the answers."""


def microscope_page(
    rows: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, Size], results: str, command: str
) -> Document:
    """The page of the lines `rows` (by cell) of the file `results`."""
    lines, page = Lines(rows), Document(TITLE)
    page.text(
        "How well does a rule's credit agree with what a step really contributed? The true advantage"
        " of a step is $V(z_{i+1}) - V(z_i)$: the expected final reward if the"
        " stochastic sampler continues, after the step and before it. In the 2-D world"
        " $V$ is exact."
        " On images it is the best known: a mean of continuations, so a ceiling is at least the"
        " stated one. A *ceiling* is the correlation of the rule if every value is known: the rule"
        " is applied to a table of $V$ instead of estimated rewards. Rules that read only the final"
        " reward are at their ceiling. Bars are 95% intervals over looks; a look is a seed of"
        " training, trajectories and continuations."
    )
    page.items(answers(lines))
    page.blocks.append(
        Image(
            "correlations",
            correlations(lines),
            "Correlation of every rule's credit with the true advantage",
        )
    )
    page.blocks.append(correlation_table(lines))
    page.text(
        "Each cell: correlation on independent trajectories [95% interval] / ceiling. NFE: sampling"
        " and probe, per trajectory. Turning points at random steps, a control, also change the"
        " credit less."
    )
    if any(
        lines.of(world, "after", method=method) for world in lines.worlds() for method in METHODS
    ):
        page.heading("Stages of training")
        page.blocks.append(
            Image(
                "stages",
                stages(lines),
                "Correlation before, during and after training with each method",
            )
        )
        page.text(stages_text(lines))
    page.heading("Initial noise: shared or independent")
    page.text(NOISE)
    if lines.of("mixture", noise="gradient"):
        page.heading("Policy gradient and reward noise in the 2-D world")
        page.text(
            "Before training, smooth reward. *Cosine*: mean gradient of the rule and the pathwise"
            " gradient through the stochastic steps, corrected for noise. *Signal to noise*:"
            " length of the mean gradient over the deviation of one batch, for as many batches as"
            f" {EQUAL_NFE:,} evaluations allow (sampling, probe, update). *Reward noise*:"
            " correlation if every score that the rule reads has normal noise of this standard"
            " deviation."
        )
        page.blocks.append(gradient_table(lines))
    page.heading("Trajectories that a verdict needs")
    page.text(
        "Trajectories at one policy that are needed to find a difference of 0.05 between the"
        " correlations of two rules with a probability of 80% (two-sided t test at 5%, all pairs of"
        " rules but random). The unit is the group, whose spread is measured within looks. The last"
        " column is the difference that all looks of this page together find with that probability,"
        " for the median pair; it includes the differences between training runs and prompts."
    )
    page.blocks.append(needed_table(lines))
    page.heading("Method")
    for words in method_text(lines, sizes):
        page.text(words)
    page.heading("Provenance")
    planned = sum(
        1
        for world in lines.worlds()
        for look in range(sizes[world].looks)
        for _ in cells(world, look)
    )
    page.text(provenance_text(lines, results, command, planned))
    return page


def _number(estimate: Estimate, digits: int = 2, sign: bool = False) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.value:{'+' if sign else ''}.{digits}f}"
    return estimate.text(digits, sign)


def answers(lines: Lines) -> list[str]:
    """Up to five sentences, computed from the lines; those whose rules or cells are missing are
    left out.
    """
    rules, columns, rows = (
        [rule for rule in lines.rules() if rule != RANDOM],
        panels(lines),
        list[str](),
    )
    best = []
    for world, form, title in columns:
        rule = max(rules, key=lambda rule: over_looks(lines.of(world), form, rule).value)
        best.append(f"{title}: {rule}, {_number(over_looks(lines.of(world), form, rule))}")
    rows.append(
        f"**Highest correlation with the true advantage**, before training. {'; '.join(best)}."
    )
    if {ONE_STEP, GAINS} <= set(rules):
        gaps = "; ".join(
            f"{title}: {_number(difference(lines.of(w), f, ONE_STEP, GAINS), sign=True)}"
            for w, f, title in columns
        )
        rows.append(
            "**One-step gains minus stepwise gains** (five substeps), on the same trajectories."
            f" {gaps}."
        )
    if {GAINS, BY_STEP} <= set(rules):
        tops = "; ".join(
            f"{title}: {ceiling_of(lines.of(w), f, GAINS):.2f},"
            f" {ceiling_of(lines.of(w), f, BY_STEP):.2f}"
            for w, f, title in columns
        )
        rows.append(
            "**Ceilings**: correlation of the true advantage with itself, z-scored over the group,"
            f" and by step. {tops}."
        )
    return rows + [
        words for words in (_noise_change(lines, rules), _training_change(lines, rules)) if words
    ]


def _noise_change(lines: Lines, rules: Sequence[str]) -> str:
    """The largest effect of shared noise, by world and reward."""
    parts = []
    for world, form, title in panels(lines):
        if lines.of(world, noise="shared"):
            changes = [
                (change(lines.of(world), lines.of(world, noise="shared"), form, rule), rule)
                for rule in rules
            ]
            largest, rule = max(changes, key=lambda item: abs(item[0].value))
            parts.append(f"{title}: {rule}, {_number(largest, sign=True)}")
    return (
        "**Shared instead of independent noise**: the largest change of a correlation, before"
        f" training. {'; '.join(parts)}."
        if parts
        else ""
    )


def _training_change(lines: Lines, rules: Sequence[str]) -> str:
    """The largest fall in training, by world and reward."""
    parts = []
    for world, form, title in panels(lines):
        trained = [(method, lines.of(world, "after", method=method)) for method in METHODS]
        valid = [(method, after) for method, after in trained if after and measurable(after, form)]
        changes = [
            (change(lines.of(world), after, form, rule), rule, method)
            for method, after in valid
            for rule in rules
        ]
        if changes:
            largest, rule, method = min(changes, key=lambda item: item[0].value)
            parts.append(f"{title}: {rule} after {method}, {_number(largest, sign=True)}")
    return f"**Training**: the largest fall of a correlation. {'; '.join(parts)}." if parts else ""


def correlation_table(lines: Lines) -> Table:
    """A row per rule."""
    columns, rows = panels(lines), []
    for rule in lines.rules():
        row = []
        for world, form, _ in columns:
            group = lines.of(world)
            row.append(
                f"{_number(over_looks(group, form, rule))} / {ceiling_of(group, form, rule):.2f}"
            )
        nfe = row_of(lines.of(lines.worlds()[0])[0], FORMS[0], rule)["nfe"]
        rows.append((rule, *row, f"{nfe:.0f}"))
    return Table(("rule", *(title for _, _, title in columns), "NFE"), rows)


def stages_text(lines: Lines) -> str:
    """The effect of training on the reward."""
    parts = []
    for world in lines.worlds():
        for method in METHODS:
            after = lines.of(world, "after", method=method)
            if after:
                old, new = (
                    _mean([line["truth"]["soft"]["reward"] for line in group])
                    for group in (lines.of(world), after)
                )
                parts.append(f"{PLACES[world]}, {method}: {old:.2f} to {new:.2f}")
    silent = [
        f"{title}, {method}"
        for world, form, title in panels(lines)
        for method in METHODS
        if (after := lines.of(world, "after", method=method)) and not measurable(after, form)
    ]
    missing = (
        " Without a correlation, since (almost) all of these images get the same reward:"
        f" {'; '.join(silent)}."
        if silent
        else ""
    )
    return (
        "All rules are applied to the policy of each training run, with trajectories of"
        " independent noise. Mean smooth reward of these trajectories before and after:"
        f" {'; '.join(parts)}.{missing}"
    )


def _looks(count: int) -> str:
    return f"{count} look{'s' if count != 1 else ''}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


NOISE = (
    "Stepwise-Flow-GRPO gives all members of a group the same initial noise; the other methods do"
    " not. All rules were applied to trajectories of both kinds: a rule's own kind and a common"
    " kind for all rules are both in the first figure. In one panel, points of the same kind are"
    " measured on the same trajectories."
)


def gradient_table(lines: Lines) -> Table:
    """A row per rule."""
    gradient_lines, credit, rows = lines.of("mixture", noise="gradient"), lines.of("mixture"), []
    for rule in lines.rules():
        cosine, ratio = (
            gradient_mean(gradient_lines, rule, name)
            for name in ("cosine", "signal_to_noise_at_equal_nfe")
        )
        noisy = [_number(over_looks(credit, "soft", rule, noise)) for noise in NOISES]
        rows.append(
            (
                rule,
                _number(cosine) if cosine else "no signal found",
                _number(ratio) if ratio else "-",
                *noisy,
            )
        )
    return Table(
        ("rule", "cosine", "signal to noise", *(f"reward noise {noise:g}" for noise in NOISES)),
        rows,
    )


def needed_table(lines: Lines) -> Table:
    """A row per world and reward."""
    head = (
        "",
        "trajectories, median pair",
        "worst pair",
        "measured here",
        "looks",
        "difference found",
    )
    rules, rows = [rule for rule in lines.rules() if rule != RANDOM], []
    for world, form, title in panels(lines):
        requirement = needed(lines.of(world), form, rules)
        reach = f"{requirement.found:.2f}" if math.isfinite(requirement.found) else "-"
        rows.append(
            (
                title,
                f"{requirement.middle:,}",
                f"{requirement.worst:,}",
                f"{requirement.trajectories:,}",
                str(requirement.looks),
                reach,
            )
        )
    return Table(head, rows)


def method_text(lines: Lines, sizes: Mapping[str, Size]) -> list[str]:
    """How the numbers were measured."""
    sentences = []
    for world in lines.worlds():
        size, first, later = (
            sizes[world],
            lines.of(world),
            lines.of(world, "after", method=METHODS[0]),
        )
        count = first[0]["continuations"]
        sentences.append(
            f"{PLACES[world][0].upper()}{PLACES[world][1:]}: {_looks(len(first))} before training"
            f" and {_looks(len(later))} after it, {size.prompts} prompts x {size.members}"
            f" trajectories in each,"
            f" {f'{count} continuations per state' if count else 'exact values'},"
            f" {size.stages['during']} and {size.stages['after']} iterations of training"
        )
    paragraphs = [
        (
            f"{'. '.join(sentences)}. The sampler has noise at all of 10 steps but the last."
            " Policies are trained on the smooth reward at the settings found for each method (image"
            " runs have 8 groups instead of 16), and examined under both rewards."
        ),
        (
            "The correlation is Pearson's over all stochastic steps of all trajectories of all"
            " looks. Intervals are t intervals of the jackknife over looks, without correction for"
            " the number of comparisons."
        ),
    ]
    if lines.of("mixture"):
        paragraphs.append(exact_text(lines))
    if lines.of("shapes"):
        reliable = "; ".join(
            f"{title} {_mean([line['truth'][form]['reliability'] for line in lines.of(world)]):.2f}"
            for world, form, title in panels(lines)
            if world == "shapes"
        )
        paragraphs.append(
            "On images, correlations are divided by the root of the reliability of the truth."
            f" Reliability before training: {reliable}. For a 0/1 reward, $V$ is a probability, and"
            " the standard error comes from the sample variance. Tests compare both corrections"
            " with closed forms. Ceilings use three quarters of the continuations for the table of"
            " values and the rest for the truth, in turn. The error of the table is removed by"
            " adding noise to it and extrapolating to none (SIMEX, a parabola). In simulations with"
            " known ceilings and reliabilities of 0.7 to 0.9, the result was 0.00 to 0.03 too low."
        )
    return paragraphs


def exact_text(lines: Lines) -> str:
    """How exact values are computed, and their largest error by stage of training."""
    parts = []
    for stage in ("before", "during", "after"):
        errors = [
            math.sqrt(1 - line["truth"][form]["reliability"])
            for line in lines.lines.values()
            for form in FORMS
            if (line["cell"]["world"], line["cell"]["stage"]) == ("mixture", stage)
            and "truth" in line
            and measurable([line], form)
        ]
        if errors:
            parts.append(f"{stage} training {max(errors):.1%}")
    return (
        "In the 2-D world, $V$ is computed backwards over the steps by dynamic programming on a"
        " grid, without continuations and extrapolations. The error of the true advantages is"
        " estimated from a grid of half as many points per axis. Its root mean square, relative to"
        f" their standard deviation, in the worst cell: {', '.join(parts)}."
    )


def provenance_text(lines: Lines, results: str, command: str, planned: int) -> str:
    """The machines and versions behind the lines."""
    all_lines = list(lines.lines.values())
    versions = ", ".join(f"{name} {number}" for name, number in all_lines[0]["versions"].items())
    commits, machines = (
        ", ".join(sorted({str(line[name]) for line in all_lines}))
        for name in ("commit", "hardware")
    )
    minutes = sum(line["seconds"] for line in all_lines) / 60
    rest = (
        f" of {planned} planned ones (the command makes the rest)"
        if len(all_lines) < planned
        else ""
    )
    return (
        f"Made by `{command}` in {minutes:.0f} minutes of processor time: {len(all_lines)} cells"
        f"{rest} in `{results}`, which holds all raw numbers, also by step. Commit {commits};"
        f" {versions}; {machines}; code `{all_lines[0]['code']}`."
    )


def summary(lines: Lines) -> str:
    """For the terminal: correlations of every rule before training."""
    columns, rules = panels(lines), lines.rules()
    width = max(map(len, rules))
    rows = [
        f"{'':{width}}  "
        + "  ".join(f"{PLACES[world]}, {SCORES[form]:14}" for world, form, _ in columns)
    ]
    for rule in rules:
        cells = [
            f"{pooled_correlation([row_of(line, form, rule) for line in lines.of(w)]):.2f}"
            for w, form, _ in columns
        ]
        rows.append(f"{rule:{width}}  " + "  ".join(f"{cell:25}" for cell in cells))
    return "\n".join(rows)

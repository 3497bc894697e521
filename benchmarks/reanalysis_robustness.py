"""Dependence of the main comparison on the test, on single seeds, on timing and on one cost, for
``reanalysis.py``.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from reanalysis_statistics import (
    FORWARDS,
    SAMPLING,
    SECONDS,
    STATED,
    Key,
    Results,
    Run,
    Settings,
    Values,
    by_seed,
    lead,
    t_test,
)
from scipy import stats

BUDGETS = ("training", f"equal {FORWARDS}", f"equal {STATED}")
LATE_NODES = 4 * 4
"""Evaluations per trajectory of stepwise gains at the nodes after the one that follows the window's
last stochastic step: 4 new evaluations of 5 substeps at nodes 6 to 9, for steps that are
deterministic and not trained (window 0:5 of 10 steps).
"""


def sign_flip(values: Values) -> float:
    """p-value of the mean under exchanges of the two arms of every seed: all of them up to 16
    seeds, else 65,536 random ones.
    """
    n = len(values)
    if n <= 16:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (2**16, n))
        signs[0] = 1
    return float((np.abs(signs @ values) >= abs(values.sum()) - 1e-12).mean())


def cheaper(run: Run) -> Run:
    """A run of stepwise gains as if the estimates at `LATE_NODES` had not been made; the learning
    curve is the same.
    """
    curve = run.curve.copy()
    per_trajectory = run.curve[-1, SAMPLING] / run.trajectories
    curve[:, SAMPLING] *= 1 - LATE_NODES / per_trajectory
    return run._replace(curve=curve)


def leads(first: Mapping[Key, Run], second: Mapping[Key, Run], budget: str) -> Values:
    keys = sorted(set(first) & set(second))
    return by_seed(
        {key: lead(first[key], second[key], f"mean reward over {budget}") for key in keys}
    )


def lines(arms: Mapping[str, Settings], results: Results, world: str = "mixture") -> Iterator[str]:
    """A line per arm and budget; p-values are uncorrected."""
    runs_of = {name: results.find(world, settings) for name, settings in arms.items()}
    uniform = runs_of.pop("uniform")
    yield (
        "arm, budget: lead over uniform; p of t / sign flips / t without one seed (lowest to"
        " highest)"
    )
    for name, runs in runs_of.items():
        for budget in BUDGETS:
            values = leads(runs, uniform, budget)
            if len(values) < 3:
                continue
            without = [t_test(np.delete(values, seed)).p for seed in range(len(values))]
            tests = (
                f"{t_test(values).p:.2g} / {sign_flip(values):.2g} / {min(without):.2g} to"
                f" {max(without):.2g}"
            )
            yield f"{name}, {budget}: {values.mean():+.3f}; {tests}"
    yield "\ncollapse rates: p of the interval's normal statistic is on the page; exact McNemar p"
    for name, runs in runs_of.items():
        keys = sorted(set(runs) & set(uniform))
        more = sum(runs[key].collapsed and not uniform[key].collapsed for key in keys)
        less = sum(uniform[key].collapsed and not runs[key].collapsed for key in keys)
        exact = stats.binomtest(more, more + less).pvalue if more + less else 1.0
        yield f"{name}: {more} seeds more, {less} fewer; {exact:.2g}"
    fewer = leads(
        {key: cheaper(run) for key, run in runs_of["stepwise gains"].items()},
        uniform,
        f"equal {FORWARDS}",
    )
    text = "mean {0.mean:+.3f} [{0.low:.3f}, {0.high:.3f}], p {0.p:.2g}".format(t_test(fewer))
    yield (
        f"\nstepwise gains per evaluation, without {LATE_NODES} evaluations per trajectory after"
        f" the window: {text}"
    )
    yield "\nruns whose first interval took more than five times the arm's median seconds"
    for name, runs in {"uniform": uniform, **runs_of}.items():
        first = {key: run.curve[1, SECONDS] for key, run in runs.items()}
        middle = float(np.median(list(first.values()))) if first else 0.0
        slow = [key for key, seconds in first.items() if seconds > 5 * middle]
        for key in slow:
            rest = {other: run for other, run in runs.items() if other not in slow}
            without = leads(rest, uniform, BUDGETS[2]).mean() if name != "uniform" else 0.0
            yield (
                f"{name}, seed {key[0]}: {first[key]:.2f} s, median {middle:.2f} s; lead per second"
                f" without it {without:+.3f}"
            )

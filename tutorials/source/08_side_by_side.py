# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8 · Side by side
#
# **After this lesson you can** review a comparison of fine-tuning methods: compute confidence intervals, compare costs in several
# units, separate the effect of a rule from the effect of a setting, and name the experiment that would refute a claim.
#
# **Time** 95 minutes, of which the computer needs about one. **You need** the lessons from GRPO on a flow to TP-GRPO: uniform, stepwise and turning-point credit.
#
# We begin with a result that looks conclusive: three rules with the same model, the same settings and one seed. Then we test this result.

# %% tags=["hide-input"]
import itertools
import math
from dataclasses import replace
from statistics import median

import matplotlib.pyplot as plt
import torch

from flowrl import world
from flowrl.flow import log_prob
from flowrl.losses import ClippedLoss
from flowrl.run.report.style import spread_labels
from flowrl.bench.rules import TurningPointVariant
from flowrl_course import lesson_08 as lesson
from flowrl_course.figures import COLOURS, INK, NOISE, animation, clean, panels, plane, target
from flowrl_course.runs import learn, start

torch.set_num_threads(1)
RULES = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
TIGHT = 2e-3
# iterations; the step-wise rules converge earlier
LENGTH = {"flow-grpo": 20, "stepwise-flow-grpo": 12, "tp-grpo": 12}


def tight_run(rule, seed):
    """One run with the settings of the first figure."""
    return learn(rule, seed=seed, clip_range=TIGHT, iterations=LENGTH[rule])


runs = {(rule, TIGHT): [tight_run(rule, 0)] for rule in RULES}


def opening():
    """Samples for six held-out directions during training, and the reward."""
    wanted = torch.tensor(
        [target(prompt) for prompt in world("mixture").prompts("direction", "heldout")]
    )
    hue = torch.atan2(wanted[:, 1], wanted[:, 0]) / (2 * math.pi) % 1
    figure, axes = panels(4, width=2.6, height=2.9)
    dots = []
    for cell, rule in zip(axes, RULES, strict=False):
        plane(cell)
        cell.set_title(rule, color=COLOURS[rule], fontsize=10)
        cell.scatter(*wanted.T, c=hue, cmap="hsv", vmin=0, vmax=1, marker="x", s=60)
        colours = hue.repeat(16)
        dots.append(
            cell.scatter(
                *wanted.repeat(16, 1).T, c=colours, cmap="hsv", vmin=0, vmax=1, s=7, alpha=0.7
            )
        )
    for rule in RULES:
        run = runs[rule, TIGHT][0]
        axes[3].plot(run.iterations, run.reward, color=COLOURS[rule])
    now = axes[3].axvline(0, color=NOISE, linewidth=1)
    axes[3].set(xlabel="iteration", ylim=(0, 1.02), title="reward")
    clean(axes[3])
    figure.draw_without_rendering()

    def draw(frame):
        row = min(frame, 10)
        for dot, rule in zip(dots, RULES, strict=True):
            points = runs[rule, TIGHT][0].points
            dot.set_offsets(points[min(row, len(points) - 1)])
        now.set_xdata([runs[RULES[0], TIGHT][0].iterations[row]] * 2)

    return animation(figure, draw, frames=15, seconds=5)


opening()

# %% [markdown]
# The prompts describe six directions (crosses); the colour of a sample is that of its direction. With Stepwise-Flow-GRPO the samples have reached
# the targets after 8 iterations, with TP-GRPO after 10 (both stop at 12), while Flow-GRPO has not converged after 20. So it is tempting to conclude that *step-wise credit learns
# several times faster*. The four parts of this lesson test this conclusion with four questions.
#
# 1. **Is the result due to chance?** One seed is one random sample.
# 2. **At what cost?** The cost of an iteration differs between the rules.
# 3. **Is it the rule, or a setting that suits the rule?** The same settings for all rules are not necessarily fair.
# 4. **Is it the part that gives the rule its name?** TP-GRPO without turning points is a rule too.
#
# ## 1 Is the result due to chance?
#
# A seed determines the initial weights of the small network, the order of the prompts and all noise, so the reward after training differs from seed to seed. How precise is a mean over a few seeds? With
# $n$ seeds, let $\bar R$ be the mean of their rewards and SD the sample standard deviation (divided by $n - 1$). Then the 95% confidence interval of the mean over infinitely many seeds is
#
# $$\bar R \pm q_{n-1}\, \frac{\mathrm{SD}}{\sqrt n},$$
#
# in which $q_{n-1}$ is the 97.5% quantile of Student's t distribution: 4.30 for three seeds, 2.57 for six, and 1.96 only for very many. The quantile is
# large for few seeds because SD itself is an estimate from few numbers. In most tables $\pm$ is SD, which measures something else: the spread of single seeds.
#
# ### Exercise 1 · how many seeds?
#
# *Difficulty: medium · kind: design · importance: essential · time: 7 minutes*
#
# Earlier runs of a method had the sample standard deviation `spread`. You want an interval that is at most $\pm$ `half` wide. Return the smallest number of seeds for which it is, if SD stays the same, or `None` if 17 seeds are not enough. `lesson.T_QUANTILE[d]` is the quantile for `d` degrees of freedom, 1 to 16. Estimate the result for `spread=0.1` and `half=0.1` before you compute it.


# %% tags=["exercise"]
def seeds_needed(spread, half):
    """The smallest number of seeds whose interval is at most +- half; None if over 17."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** $n$ is in the root and in the quantile, so the inequality has no simple solution: try $n = 2, 3, \dots$ How many degrees of freedom do $n$ seeds leave?


# %% tags=["solution"]
def seeds_needed(spread, half):
    """The smallest number of seeds whose interval is at most +- half; None if over 17."""
    for n in range(2, 18):
        if lesson.T_QUANTILE[n - 1] * spread / math.sqrt(n) <= half:
            return n
    return None


# %%
lesson.check_seeds(seeds_needed)

# %% [markdown] tags=["explanation"]
# **Why.** Seven seeds are needed for an interval as wide as $\pm$ the spread of single runs. With 1.96 instead of the quantile the answer would be four, and the interval would miss the true mean more often than in 5 cases of 100. Half the width needs about four times as many seeds. The formula assumes normally distributed results. Rewards near their maximum of 1 are not normally distributed, so plot the single runs as well.


# %%
def interval(values):
    """Mean, and half the width of its 95% interval, of values [seed]."""
    n = len(values)
    return float(values.mean()), lesson.T_QUANTILE[n - 1] * float(values.std()) / math.sqrt(n)


# %% [markdown]
# Now we train five more seeds of each rule. `learn` (in `flowrl_course.runs`) runs the trainer with a fixed evaluation: 96 ODE samples of the averaged weights for six
# held-out directions, with the same noise in every evaluation.

# %%
for rule in RULES:
    runs[rule, TIGHT] += [tight_run(rule, seed) for seed in range(1, 6)]
rewards = {key: torch.stack([run.reward for run in repeats]) for key, repeats in runs.items()}
iterations = runs[RULES[0], TIGHT][0].iterations
for at in (4, -1):
    print(
        f"reward after {'8 iterations' if at == 4 else '20 (Flow-GRPO) or 12 iterations'},"
        " mean and 95% interval"
    )
    for rule in RULES:
        three, six = (
            interval(rewards[rule, TIGHT][:3, at]),
            interval(rewards[rule, TIGHT][:, at]),
        )
        print(
            f"  {rule:<20} 3 seeds {three[0]:.2f} ± {three[1]:.2f}    6 seeds {six[0]:.2f} ±"
            f" {six[1]:.2f}"
        )

# %% [markdown] tags=["expected"]
# reward after 8 iterations, mean and 95% interval
#   flow-grpo            3 seeds 0.23..0.29 ± 0.00..0.05    6 seeds 0.24..0.30 ± 0.00..0.03
#   stepwise-flow-grpo   3 seeds 0.93..0.99 ± 0.00..0.05    6 seeds 0.94..0.99 ± 0.00..0.03
#   tp-grpo              3 seeds 0.80..0.90 ± 0.05..0.18    6 seeds 0.85..0.93 ± 0.03..0.08
# reward after 20 (Flow-GRPO) or 12 iterations, mean and 95% interval
#   flow-grpo            3 seeds 0.40..0.58 ± 0.05..0.35    6 seeds 0.50..0.70 ± 0.10..0.28
#   stepwise-flow-grpo   3 seeds 0.90..0.99 ± 0.00..0.10    6 seeds 0.91..0.99 ± 0.00..0.07
#   tp-grpo              3 seeds 0.90..0.99 ± 0.00..0.12    6 seeds 0.93..0.99 ± 0.00..0.05

# %% tags=["hide-input"]
figure, axes = panels(width=6.4, height=3.4)
for rule in RULES:
    means, halves = zip(*(interval(column) for column in rewards[rule, TIGHT].T), strict=True)
    means, halves = torch.tensor(means), torch.tensor(halves)
    along = iterations[: len(means)]
    axes.plot(along, rewards[rule, TIGHT].T, color=COLOURS[rule], linewidth=0.7, alpha=0.5)
    axes.plot(along, means, color=COLOURS[rule], linewidth=2.4)
    axes.fill_between(
        along, means - halves, means + halves, color=COLOURS[rule], alpha=0.18, linewidth=0
    )
for text, x, y, rule in (
    ("Stepwise", 4.6, 0.72, RULES[1]),
    ("TP-GRPO", 8.2, 0.72, RULES[2]),
    ("Flow-GRPO", 15.6, 0.3, RULES[0]),
):
    axes.text(
        x,
        y,
        text,
        color=COLOURS[rule],
        fontweight="bold",
        ha="right" if rule == RULES[1] else "left",
    )
axes.set_xticks(range(0, 21, 4))
axes.set(
    xlabel="iteration",
    ylabel="held-out reward",
    ylim=(0.15, 1.02),
    title="six seeds each (thin), mean and 95% interval (band)",
)
clean(axes)
plt.show()

# %% [markdown]
# In the early iterations the ranking is not due to chance. At iterations 4 and 6 of the figure, every seed of Stepwise is above every seed of TP-GRPO, and these are above every seed of Flow-GRPO. At the end the
# two step-wise rules are equal. Flow-GRPO has the widest band, because its seeds begin to learn at different times. The spread is a result in itself: the
# number of iterations that Flow-GRPO needs depends strongly on the seed.
#
# An interval describes one rule. For a *difference* there is a test without assumptions about the shape of the distribution. If two rules were equivalent,
# the labels of their seeds would be arbitrary. So every split of all rewards into two groups of these sizes would be equally likely. The *p value* is the fraction of all splits whose
# means differ at least as much, in either direction, as those of the observed split.
#
# ### Exercise 2 · a permutation test
#
# *Difficulty: medium · kind: code · importance: useful · time: 10 minutes*
#
# Return this p value for the rewards `a` and `b`, both `[seed]`. `itertools.combinations(range(n), size)` lists all choices of `size` indices. Rounding must not decide a tie, so compare with `>= observed - 1e-6` (rewards are float32, with a relative precision of about $10^{-7}$).


# %% tags=["exercise"]
def permutation_p(a, b):
    """Exact two-sided p for the difference of the means of a [seed] and b [seed]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Put both groups into one tensor. Every choice of `len(a)` indices gives one split: its mean minus the mean of the rest. Count the splits whose absolute difference reaches the observed one.


# %% tags=["solution"]
def permutation_p(a, b):
    """Exact two-sided p for the difference of the means of a [seed] and b [seed]."""
    values = torch.cat([a, b]).double()
    observed = abs(float(a.double().mean() - b.double().mean()))
    as_large, splits = 0, 0
    for chosen in itertools.combinations(range(len(values)), len(a)):
        first = torch.zeros(len(values), dtype=torch.bool)
        first[list(chosen)] = True
        as_large += abs(float(values[first].mean() - values[~first].mean())) >= observed - 1e-6
        splits += 1
    return as_large / splits


# %%
lesson.check_permutation(permutation_p)

# %% [markdown] tags=["explanation"]
# **Why.** The observed split is one of the splits, so $p$ is never 0. With three seeds against three there are 20 splits, and the smallest possible $p$ is 2/20 = 0.1. *Three seeds per rule cannot reach
# the 5% level, whatever the result.* With six per rule there are 924 splits. The differences are absolute because we would have reported a difference of either sign.

# %%
print("splits of 3 + 3 seeds:", math.comb(6, 3), "   of 6 + 6:", math.comb(12, 6))
for at in (4, 6):
    stepwise, turning = (
        rewards["stepwise-flow-grpo", TIGHT][:, at],
        rewards["tp-grpo", TIGHT][:, at],
    )
    p3, p6 = permutation_p(stepwise[:3], turning[:3]), permutation_p(stepwise, turning)
    print(
        f"Stepwise against TP-GRPO after {int(iterations[at])} iterations: p = {p3:.3f} with 3"
        f" seeds, {p6:.3f} with 6"
    )

# %% [markdown] tags=["expected"]
# splits of 3 + 3 seeds: 20    of 6 + 6: 924
# Stepwise against TP-GRPO after 8 iterations: p = 0.100 with 3 seeds, 0.001..0.030 with 6
# Stepwise against TP-GRPO after 12 iterations: p = 0.100..1.000 with 3 seeds, 0.060..1.000 with 6

# %% [markdown]
# How far apart are the means of three and three seeds *without* any difference between the methods? The next cell trains Flow-GRPO with ten seeds, calls three of them "method A" and three others "method B", and compares the two "methods". There
# are 2,100 such pairs, and every difference is due to chance.
#
# ### Exercise 3 · a method against itself
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# Many papers plot the mean ± one standard deviation of three seeds, and call a difference real if these bars do not overlap. In what fraction of the 2,100 pairs of *the same* method will the bars not overlap?
#
# - **a** below 1%, because there is no difference
# - **b** about 10%
# - **c** about 50%

# %% tags=["exercise"]
apart_by_chance = "..."

# %% [markdown] tags=["hint"]
# **Hint.** How precisely do three numbers determine a standard deviation? What happens if all three are close together by chance?

# %% tags=["solution"]
apart_by_chance = "b"

# %%
lesson.check_apart(apart_by_chance)

# %% [markdown] tags=["explanation"]
# **Why.** The means of three seeds vary with the standard deviation $\mathrm{SD}/\sqrt 3$, so a gap of two SD would be rare. But SD is estimated from the same three numbers, and is often far too small by chance. Then the bars are short, and do not overlap although nothing differs.

# %% [markdown]
# **Try it.** The figure simulates 4,000 comparisons of two rules, paired by seed. Leave the true difference at 0 and exchange the 95% interval for the other bars. Then raise the true difference to 1: how many seeds find it in 80% of the comparisons?

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("chance")

# %%
more = [tight_run("flow-grpo", seed) for seed in range(6, 10)]
same = torch.stack([run.reward[-1] for run in [*runs["flow-grpo", TIGHT], *more]])
triples = list(itertools.combinations(range(10), 3))
means = torch.tensor([float(same[list(three)].mean()) for three in triples])
spreads = torch.tensor([float(same[list(three)].std()) for three in triples])
pairs = torch.tensor(
    [
        (i, j)
        for i, j in itertools.combinations(range(120), 2)
        if not set(triples[i]) & set(triples[j])
    ]
)
gaps = (means[pairs[:, 0]] - means[pairs[:, 1]]).abs()
apart = gaps > spreads[pairs].sum(1)
print(
    f"{len(pairs):,} pairs of the same method; the median difference is"
    f" {float(gaps.median()):.2f}, one in twenty is above {float(gaps.quantile(0.95)):.2f}"
)
print(
    f"bars of ± one standard deviation do not overlap in {float(apart.float().mean()):.0%} of"
    " them"
)

# %% [markdown] tags=["expected"]
# 2,100 pairs of the same method; the median difference is 0.06..0.13, one in twenty is above 0.18..0.31
# bars of ± one standard deviation do not overlap in 5..16% of them

# %% tags=["hide-input"]
figure, axes = panels(width=6.4, height=2.7)
axes.hist(gaps, bins=40, color=NOISE, alpha=0.75)
axes.axvline(float(gaps.quantile(0.95)), color=INK, linewidth=1)
axes.text(
    float(gaps.quantile(0.95)) + 0.005,
    axes.get_ylim()[1] * 0.9,
    "one in twenty is beyond",
    fontsize=9,
    va="top",
)
axes.set(
    xlabel="difference of the mean rewards of 3 + 3 seeds",
    ylabel="pairs",
    title="Flow-GRPO against itself, 20 iterations",
)
clean(axes)
plt.show()

# %% [markdown]
# Such a figure is useful for every comparison with few seeds, and it needs only more seeds of one method. If non-overlapping bars showed a real difference,
# *the same method* would differ from itself in about one pair of ten.
#
# How many seeds are enough? To detect a true difference $\delta$ at a standard deviation SD with a power of 80% at the 5% level, we need about
#
# $$n \approx 2\,(1.96 + 0.84)^2\, \frac{\mathrm{SD}^2}{\delta^2}$$
#
# seeds per rule. For example, one recorded `flowrl compare` of the default preset (images, three seeds) ended at a soft reward of 0.868 ± 0.011 for Flow-GRPO and 0.877 ± 0.013 for Stepwise-Flow-GRPO. Here ± is the standard deviation.

# %%
first, second, spread = 0.868, 0.877, math.sqrt((0.011**2 + 0.013**2) / 2)
half = lesson.T_QUANTILE[4] * spread * math.sqrt(2 / 3)
print(
    f"difference {second - first:.3f}, 95% interval {second - first - half:+.3f} to"
    f" {second - first + half:+.3f}"
)
print(
    f"seeds per rule to find a difference of {second - first:.3f}:"
    f" {2 * (1.96 + 0.84) ** 2 * spread**2 / (second - first) ** 2:.0f}"
)

# %% [markdown]
# That comparison excludes a difference as large as 0.04 in favour of Stepwise, and one as large as 0.02 in favour of Flow-GRPO. It does not show that the difference is 0.
#
# All runs are evaluated on the same six directions and the same noise. Fixed prompts make differences between rules more precise, but the interval
# is then valid for these six prompts only. A claim about prompts in general needs randomly chosen prompts.
#
# ## 2 At what cost?
#
# An iteration of Flow-GRPO samples 96 trajectories of 10 steps, which takes 960 network evaluations (NFE). Stepwise adds substeps and TP-GRPO adds completions, as the lessons on both explain. The update adds a forward *and* a backward pass
# for every pair of a trajectory and a random step. A backward pass costs about two forward passes, so a trained pair counts as three:
#
# $$\text{work} = \text{NFE while sampling} + 3 \times \text{pairs trained}.$$
#
# Reports often contain only the first term, or neither. `Curve.sampled`, `Curve.trained` and `Curve.work` are the two terms and the sum.

# %%
for rule in RULES:
    run = runs[rule, TIGHT][0]
    per = [
        float(column[-1] / run.iterations[-1])
        for column in (run.sampled, run.trained, run.work)
    ]
    print(
        f"{rule:<20} an iteration: {per[0]:5.0f} NFE while sampling, {per[1]:.0f} pairs"
        f" trained, {per[2]:5.0f} forward passes of work"
    )

# %% [markdown]
# To compare costs, we compute from each curve the cost at which it *reaches* a certain reward.
#
# ### Exercise 4 · the cost of a target
#
# *Difficulty: medium · kind: code · importance: essential · time: 8 minutes*
#
# `cost` and `reward` are `[evaluation]`, `cost` increases. Return the cost at which the curve first reaches `target`, by linear interpolation between evaluations, or `math.nan` if it never does.


# %% tags=["exercise"]
def reach(cost, reward, target):
    """The cost at which the curve first reaches the target; nan if it does not."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Find the first index with `reward >= target`. There are two special cases: no such index, and index 0. Otherwise interpolate between this evaluation and the one before.


# %% tags=["solution"]
def reach(cost, reward, target):
    """The cost at which the curve first reaches the target; nan if it does not."""
    above = (reward >= target).nonzero().flatten()
    if len(above) == 0:
        return math.nan
    i = int(above[0])
    if i == 0:
        return float(cost[0])
    part = (target - reward[i - 1]) / (reward[i] - reward[i - 1])
    return float(cost[i - 1] + part * (cost[i] - cost[i - 1]))


# %%
lesson.check_reach(reach)

# %% [markdown] tags=["explanation"]
# **Why.** Without interpolation the result is rounded to whole evaluation intervals, and one interval is here half of Stepwise's total. The *first* crossing favours
# noisy curves, so reports should mention this choice. A run that never reaches the target must not get the last cost. With `nan` every mean becomes `nan`, which cannot be overlooked.

# %% [markdown]
# The next exercise shows how these `nan` can still get lost in a report.
#
# ### Exercise 5 · the missing runs
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 6 minutes*
#
# A colleague computes the cost of a target for five seeds of two rules. The summary prefers rule A, although most of its runs never reach the target. What is wrong? Repair `summary(costs)`, so that a run that never reaches the target counts as more expensive than every other run.
# Return the **median** over *all* seeds `[seed]` as a number, which is `math.inf` or nan if most runs never reach the target. (The median of an even number of costs is the mean of the two in the middle.)


# %% tags=["exercise"]
def summary(costs):
    """The typical cost of reaching the target; costs is [seed], nan for a run that never
    reaches it.
    """
    return float(costs.nanmean())


# %% [markdown] tags=["hint"]
# **Hint.** Which runs does `nanmean` average? Replace each `nan` by a number that is larger than every cost; the function `median` of Python's module `statistics` is already imported.


# %% tags=["solution"]
def summary(costs):
    """The typical cost of reaching the target; costs is [seed], nan for a run that never
    reaches it.
    """
    return median(math.inf if math.isnan(cost) else cost for cost in costs.tolist())


# %%
lesson.check_summary(summary)

# %% [markdown] tags=["explanation"]
# **Why.** `nanmean` averages only the runs that reached the target, which are the best ones (survivorship bias). The more runs fail, the better the mean can look. A median needs only the order of the costs, so a failed run can be included without a number for its cost.

# %%
five = {
    "A": torch.tensor([9.0, 10.0, math.nan, math.nan, math.nan]),
    "B": torch.tensor([12.0, 12.0, 13.0, 13.0, 14.0]),
}
for name, costs in five.items():
    print(
        f"rule {name}: mean of the runs that reach the target {float(costs.nanmean()):.1f},"
        f" median of all {summary(costs):.1f}"
    )

# %% [markdown]
# Back to our runs: how much cheaper is step-wise credit, in each unit of cost?

# %%
PRICES = {
    "iterations": "iterations",
    "sampled": "NFE while sampling",
    "work": "forward passes in all",
    "seconds": "seconds",
}


def mean_curve(repeats, price):
    """Mean cost and mean reward over seeds, both [evaluation]."""
    return torch.stack([getattr(run, price) for run in repeats]).mean(0), torch.stack(
        [run.reward for run in repeats]
    ).mean(0)


def speedup(rule, price, goal):
    """How many times cheaper than Flow-GRPO the rule reaches the goal."""
    return reach(*mean_curve(runs["flow-grpo", TIGHT], price), goal) / reach(
        *mean_curve(runs[rule, TIGHT], price), goal
    )


for rule in RULES[1:]:
    ratios = ", ".join(
        f"{speedup(rule, price, 0.4):.1f} in {label}"
        for price, label in PRICES.items()
        if price != "seconds"
    )
    print(f"to reach 0.4, {rule} is cheaper by a factor of {ratios}")

# %% [markdown] tags=["expected"]
# to reach 0.4, stepwise-flow-grpo is cheaper by a factor of 3.0..4.4 in iterations, 1.1..1.6 in NFE while sampling, 1.8..2.6 in forward passes in all
# to reach 0.4, tp-grpo is cheaper by a factor of 2.5..3.4 in iterations, 0.5..0.75 in NFE while sampling, 1.05..1.4 in forward passes in all

# %% tags=["hide-input", "varies"]
figure, axes = panels(2, width=4.7, height=3.4)
goals = torch.linspace(0.25, 0.55, 31)
for cell, rule in zip(axes, RULES[1:], strict=True):
    ends = []
    for price, style in zip(PRICES, ("-", "--", "-.", ":"), strict=True):
        line = [speedup(rule, price, float(goal)) for goal in goals]
        cell.plot(goals, line, style, color=COLOURS[rule], linewidth=2)
        ends.append(line[-1])
    low, high = 0, 1.1 * max(ends)
    for label, height in zip(
        PRICES.values(), spread_labels(ends, low, high, (high - low) * 0.09), strict=True
    ):
        cell.text(0.556, height, label, color=COLOURS[rule], fontsize=8.5, va="center")
    cell.axhline(1, color=NOISE, linewidth=1)
    cell.set(
        xlabel="reward to reach",
        ylabel="times cheaper than Flow-GRPO",
        title=rule,
        xlim=(0.25, 0.78),
        ylim=(0, None),
    )
    cell.set_xticks([0.25, 0.35, 0.45, 0.55])
    clean(cell)
plt.show()
for rule in RULES[1:]:
    print(
        f"seconds to reach 0.4, {rule}: cheaper by a factor of"
        f" {speedup(rule, 'seconds', 0.4):.1f} on the machine that built this page"
    )

# %% [markdown]
# The same experiment gives four different speed-ups. Stepwise needs less than a third of the iterations. However, its lead in sampling evaluations is small, and TP-GRPO needs *more* of them. If the update is included, both are cheaper again. The factor in seconds is different, because the time of a tiny network depends on calls and not on
# evaluations (Stepwise needs 14 sequential calls per iteration, the others 10). The factor also depends on the target reward. So a statement such as "x times faster" needs the unit of cost and the target.
#
# Choose the cost that limits you: calls of the reward model if it is slow, forward passes if the GPUs are busy, or seconds *on your hardware with your model*.
#
# ## 3 Is it the rule, or the setting?
#
# All three rules used the same settings. But a setting can suit one rule better than another, and then the choice of the settings decides the comparison. A metric of the trainer shows which setting matters here.

# %%
for rule in RULES:
    clipped = sum(run.clipped for run in runs[rule, TIGHT]) / 6
    print(
        f"{rule:<20} {clipped:.0%} of all (trajectory, step) pairs have a ratio beyond the"
        " clip range"
    )

# %% [markdown] tags=["expected"]
# flow-grpo            54..64% of all (trajectory, step) pairs have a ratio beyond the clip range
# stepwise-flow-grpo   66..76% of all (trajectory, step) pairs have a ratio beyond the clip range
# tp-grpo              64..74% of all (trajectory, step) pairs have a ratio beyond the clip range

# %% [markdown]
# For every rule, most pairs have a ratio $\rho$ outside $1 \pm c$: the clip range $c = 0.002$ is very narrow. It is the default of the image world, whose latents have 128 elements. The log-probability is a *mean* over the elements of the latent (the lesson on GRPO). The standard deviation of a mean of 2 elements
# is $\sqrt{128/2} = 8$ times that of a mean of 128. In two dimensions the same number is therefore a clip range that is eight times narrower. It is the same for all rules, but it may affect them differently.
#
# ### Exercise 6 · a wider clip range
#
# *Difficulty: medium · kind: prediction · importance: essential · time: 3 minutes*
#
# With this clip range Stepwise needs less than a third of the iterations of Flow-GRPO. The next cell repeats the runs with a clip range ten and a hundred times wider. What will happen to this lead?
#
# - **a** little: the clip range is the same for all rules
# - **b** it grows, because better credit can make larger steps
# - **c** it shrinks until the rules need about equally many iterations

# %% tags=["exercise"]
wider = "..."

# %% [markdown] tags=["hint"]
# **Hint.** A pair that moved against its advantage is pulled back, with any clip range. With which rule does an update move the most pairs in the wrong direction?

# %% tags=["solution"]
wider = "c"

# %%
lesson.check_wider(wider)

# %% [markdown] tags=["explanation"]
# **Why.** A narrow range stops each pair after a small change, and Flow-GRPO, whose gradient is the noisiest, loses the most by this. With a wide range all rules can use large steps. The cell after the next figure measures this mechanism.

# %% [markdown]
# **Try it.** Go from 128 elements to 2: the change of the policy is the same, and more of its draws are beyond the range.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("ratio", elements=128, change=0.01, clip=0.002)

# %%
CLIPS = (TIGHT, 2e-2, 2e-1)
for clip in CLIPS[1:]:
    for rule in RULES:
        runs[rule, clip] = [
            learn(rule, seed=seed, clip_range=clip, iterations=8) for seed in range(4)
        ]
print("reaches a mean reward of 0.5 after")
for clip in CLIPS:
    for rule in RULES:
        costs = [
            reach(*mean_curve(runs[rule, clip], price), 0.5)
            for price in ("iterations", "work")
        ]
        print(
            f"  clip {clip:<6g} {rule:<20} {costs[0]:5.1f} iterations   {costs[1]:8,.0f}"
            " forward passes"
        )

# %% [markdown] tags=["expected"]
# reaches a mean reward of 0.5 after
#   clip 0.002  flow-grpo             15.0..20.0 iterations     36,000..48,000 forward passes
#   clip 0.002  stepwise-flow-grpo     3.9..5.2 iterations     15,500..20,500 forward passes
#   clip 0.002  tp-grpo                5.2..6.5 iterations     30,000..37,500 forward passes
#   clip 0.02   flow-grpo              5.2..6.5 iterations     12,500..15,600 forward passes
#   clip 0.02   stepwise-flow-grpo     2.8..3.6 iterations     11,000..14,200 forward passes
#   clip 0.02   tp-grpo                3.7..4.6 iterations     21,300..26,500 forward passes
#   clip 0.2    flow-grpo              2.8..3.4 iterations      6,700..8,200 forward passes
#   clip 0.2    stepwise-flow-grpo     2.6..3.2 iterations     10,000..12,600 forward passes
#   clip 0.2    tp-grpo                2.6..3.2 iterations     15,000..18,500 forward passes

# %% tags=["hide-input"]
figure, axes = panels(3, 2, width=3.5, height=2.7, sharey=True)
for column, clip in enumerate(CLIPS):
    for row, price in enumerate(("iterations", "work")):
        cell = axes[row][column]
        for rule in RULES:
            for run in runs[rule, clip][:4]:
                cell.plot(
                    getattr(run, price),
                    run.reward,
                    color=COLOURS[rule],
                    linewidth=0.7,
                    alpha=0.45,
                )
            cell.plot(
                *mean_curve(runs[rule, clip][:4], price), color=COLOURS[rule], linewidth=2.2
            )
        cell.set(
            xlim=(0, (8, 48_000)[row]),
            ylim=(0.15, 1.02),
            xlabel=("iteration", "forward passes in all (thousands)")[row],
        )
        if row == 1:
            cell.set_xticks([0, 20_000, 40_000], ["0", "20", "40"])
        if row == 0:
            cell.set_title(f"clip {clip:g}")
        clean(cell)
    axes[0][0].set_ylabel("held-out reward")
    axes[1][0].set_ylabel("held-out reward")
for text, x, y, rule in (
    ("Stepwise", 3.9, 0.62, RULES[1]),
    ("TP", 7.1, 0.56, RULES[2]),
    ("Flow-GRPO", 5.0, 0.29, RULES[0]),
):
    axes[0][0].text(
        x,
        y,
        text,
        color=COLOURS[rule],
        fontsize=9,
        fontweight="bold",
        ha="right" if rule == RULES[1] else "left",
    )
plt.show()

# %% [markdown]
# The lead in iterations shrinks from left to right and is nearly 0 at a clip range of 0.2. Since an iteration of Flow-GRPO is the cheapest, the *order* in the lower row is reversed: Stepwise needs the fewest forward passes on the left, uniform credit on the right. So the narrow clip range slowed uniform credit most. The reason is not the number of its pairs
# outside the range, which is the smallest, but their direction. Outside the range, pairs that moved along their advantage have no gradient. Pairs that moved against it keep their gradient, which points back. The loss below counts both kinds.


# %%
class CountingLoss:
    """The clipped loss, which counts the pairs beyond the clip range, and those of them that
    moved along their advantage.
    """

    needs_reference, trains_zero_advantages, unit = False, False, "transition"

    def __init__(self):
        self.inner, self.along, self.beyond = ClippedLoss(clip_range=TIGHT), 0, 0

    def loss(self, batch):
        with torch.no_grad():
            change = (
                log_prob(batch.new, batch.next_node)
                - log_prob(batch.behaviour, batch.next_node)
            ).exp() - 1
            outside = change.abs() > TIGHT
            self.along += int((outside & (change * batch.advantages > 0)).sum())
            self.beyond += int(outside.sum())
        return self.inner.loss(batch)


for rule in RULES:
    loss = CountingLoss()
    for seed in range(3):
        trainer = start(rule, seed, clip_range=TIGHT)
        trainer.method = replace(trainer.method, loss=loss)
        for _ in range(3):
            trainer.iteration()
    print(
        f"{rule:<20} of the pairs beyond the clip range, {loss.along / loss.beyond:.0%} moved"
        " along their advantage (first 3 iterations)"
    )

# %% [markdown]
# Each iteration has four mini-batches. The first update moves all pairs. With uniform credit, whose gradient is the noisiest, nearly as many pairs move against their advantage as along it (half would be no signal at all). In the next three updates the pairs that moved against their advantage dominate the gradient, and reverse much of the first update. The
# step-wise rules move more pairs in the right direction at once, so less is reversed. (You can test this explanation: with `minibatches=1` no pair is clipped.)
#
# The wide clip range has a disadvantage: some runs fall after their maximum. A complete table would have a column for the final reward.
#
# A fair comparison needs the **same tuning effort**, not the same settings. Each rule gets its best setting from the same list, chosen on some seeds and reported on others. Different seeds are necessary because the best of three noisy numbers is too good on average, and this bias grows with the number of settings.
#
# ### Exercise 7 · equal tuning
#
# *Difficulty: medium · kind: code · importance: essential · time: 8 minutes*
#
# `results` is `[rule, setting, seed]`. Choose each rule's setting with the first `tuning` seeds, and return `[rule]`: its mean result on the *other* seeds.


# %% tags=["exercise"]
def tuned(results, tuning):
    """The mean of each rule at its own best setting, on seeds that did not choose the setting;
    [rule].
    """
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** There are two steps: for each rule the setting with the highest mean over the first `tuning` seeds (`argmax` over settings), then the mean of this setting over the remaining seeds.


# %% tags=["solution"]
def tuned(results, tuning):
    """The mean of each rule at its own best setting, on seeds that did not choose the setting;
    [rule].
    """
    best = results[..., :tuning].mean(-1).argmax(1)
    return results[torch.arange(len(results)), best, tuning:].mean(-1)


# %%
lesson.check_tuned(tuned)

# %% [markdown] tags=["explanation"]
# **Why.** Selecting and reporting on the same seeds overstates the result, like tuning on a test set. One common setting for all rules, chosen by their mean, would again favour the rule that it suits.


# %%
def reward_at(run, price, budget):
    """The reward at a cost of `budget`, by linear interpolation between evaluations."""
    cost, reward = getattr(run, price), run.reward
    i = int(
        torch.searchsorted(cost, torch.tensor(budget, dtype=cost.dtype)).clamp(
            1, len(cost) - 1
        )
    )
    part = (budget - cost[i - 1]) / (cost[i] - cost[i - 1])
    return float(reward[i - 1] + part * (reward[i] - reward[i - 1]))


for price, budget in (("iterations", 6), ("work", 14_400)):
    table = torch.tensor(
        [
            [[reward_at(run, price, budget) for run in runs[rule, clip][:4]] for clip in CLIPS]
            for rule in RULES
        ]
    )
    print(
        f"reward after {budget:,} {'forward passes' if price == 'work' else price}: by clip"
        f" {CLIPS}, and tuned"
    )
    for rule, row, chosen in zip(
        RULES, table.mean(-1).tolist(), tuned(table, 2).tolist(), strict=True
    ):
        print(f"  {rule:<20} {row[0]:.2f}  {row[1]:.2f}  {row[2]:.2f}   tuned {chosen:.2f}")

# %% [markdown] tags=["expected"]
# reward after 6 iterations: by clip (0.002, 0.02, 0.2), and tuned
#   flow-grpo            0.21..0.28  0.45..0.60  0.85..0.98   tuned 0.85..0.99
#   stepwise-flow-grpo   0.66..0.89  0.88..0.98  0.85..0.98   tuned 0.85..0.99
#   tp-grpo              0.42..0.56  0.80..0.92  0.83..0.96   tuned 0.85..0.98
# reward after 14,400 forward passes: by clip (0.002, 0.02, 0.2), and tuned
#   flow-grpo            0.21..0.28  0.45..0.60  0.85..0.98   tuned 0.85..0.99
#   stepwise-flow-grpo   0.30..0.43  0.50..0.68  0.58..0.79   tuned 0.52..0.76
#   tp-grpo              0.21..0.28  0.26..0.35  0.34..0.46   tuned 0.32..0.46

# %% [markdown]
# (14,400 forward passes are six iterations of Flow-GRPO.) Per iteration and tuned, the three rules are close. Per forward pass, tuned uniform credit is ahead. Two seeds per rule, three clip ranges, one learning rate and one world are too few to judge the rules. However, they show that the *first figure* of this lesson measures mainly the effect of a clip range.
#
# The project's own comparison has 15 seeds, 40 iterations and a larger search (the claims of `docs/studies.md`). Per iteration, the mean reward over training is higher than with tuned uniform credit: by 0.034 with Stepwise (95% interval 0.013 to 0.055) and by 0.040 with TP-GRPO (0.020 to 0.060). At equal cost in forward passes it is lower, by 0.044 and 0.041. These differences have the same signs as ours, but two seeds are too few to measure their size.
#
# ## 4 Is it the part that gives the rule its name?
#
# TP-GRPO differs from Flow-GRPO in three parts: rewards of unfinished states (by ODE completion), normalisation step by step, and long-term rewards at turning points. The third gives the rule its name. To measure its effect, we need **controls** that change only this part. They have the same completions,
# but the long-term reward at *other* steps, or at no step. The other steps are as many, change the credit by as much and in the same direction as turning points, but need not turn (`where="sign"` in the lesson on TP-GRPO). The clip range is the narrow one again, where the lead over Flow-GRPO is largest:

# %%
controls = {
    "turning points": [run.reward[:5] for run in runs["tp-grpo", TIGHT]],
    "other steps": [
        learn(
            rule=TurningPointVariant(where="sign"), seed=s, clip_range=TIGHT, iterations=8
        ).reward
        for s in range(6)
    ],
    "none": [
        learn(
            rule=TurningPointVariant(where="none"), seed=s, clip_range=TIGHT, iterations=8
        ).reward
        for s in range(6)
    ],
}
controls = {name: torch.stack(curves) for name, curves in controls.items()}
ends = {name: curves[:, -1] for name, curves in controls.items()}
for name in ("other steps", "none"):
    mean, half = interval(ends["turning points"] - ends[name])
    p = permutation_p(ends["turning points"], ends[name])
    print(
        f"turning points minus {name:<13} after 8 iterations: {mean:+.3f} ± {half:.3f} seed by"
        f" seed, p = {p:.2f}"
    )
lead = ends["turning points"] - rewards["flow-grpo", TIGHT][:, 4]
print(
    f"turning points minus Flow-GRPO     after 8 iterations: {interval(lead)[0]:+.3f} ±"
    f" {interval(lead)[1]:.3f}"
)

# %% [markdown] tags=["expected"]
# turning points minus other steps   after 8 iterations: -0.070..0.070 ± 0.015..0.130 seed by seed, p = 0.10..1.00
# turning points minus none          after 8 iterations: -0.080..0.030 ± 0.020..0.090 seed by seed, p = 0.10..1.00
# turning points minus Flow-GRPO     after 8 iterations: +0.540..0.700 ± 0.030..0.090

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.2, height=3.1)
shades = {"turning points": COLOURS["tp-grpo"], "other steps": INK, "none": NOISE}
axes[0].plot(
    iterations[:5],
    rewards["flow-grpo", TIGHT][:, :5].mean(0),
    color=COLOURS["flow-grpo"],
    linewidth=2,
)
axes[0].text(6, 0.275, "Flow-GRPO", color=COLOURS["flow-grpo"], fontsize=9)
for name, curves in controls.items():
    axes[0].plot(iterations[:5], curves.T, color=shades[name], linewidth=0.7, alpha=0.5)
    axes[0].plot(iterations[:5], curves.mean(0), color=shades[name], linewidth=2.2)
axes[0].set(xlabel="iteration", ylabel="held-out reward", title="TP-GRPO and its controls")
for place, (name, values) in enumerate(ends.items()):
    mean, half = interval(values)
    axes[1].errorbar(place, mean, yerr=half, color=shades[name], marker="o", capsize=4)
    axes[1].scatter([place + 0.15] * 6, values, color=shades[name], s=12, alpha=0.7)
axes[1].set_xticks(range(3), [*ends], fontsize=9)
for label, shade in zip(axes[1].get_xticklabels(), shades.values(), strict=True):
    label.set_color(shade)
axes[1].set(
    xlim=(-0.5, 2.6),
    ylabel="held-out reward",
    title="after 8 iterations: seeds, mean, 95% interval",
)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# Both intervals contain 0. After 8 iterations turning points minus other steps is -0.023 ± 0.029, so with six seeds it is undecided whether the turning matters. However, without any turning point the reward changes by less than 0.1, and the lead over Flow-GRPO is 0.62. Most of this lead must come from the parts that the controls share with TP-GRPO. (With 15 seeds at tuned settings, random instead of real turning points change the reward over training by -0.004. The 95% interval is -0.009 to 0.001; see `docs/studies.md`. Random steps change the credit less than turning points. Other steps with equal changes in the same direction, in six seeds of three tasks with images at tuned settings: turning points are better by +0.1 percent of what can be gained, 95% interval -2.5 to +2.8; see `docs/log.md`.) The differences are paired by seed. Runs of one seed have the same prompts and initial weights, so
# the common effect of the seed cancels.
#
# The paper (arXiv 2602.06422) compares TP-GRPO with Flow-GRPO, and two definitions of turning points with each other; the controls are additions of this lesson. Their result may not transfer to other scales: turning points may matter with larger changes of the reward along a trajectory, with other rewards, or with larger models. To show that turning points help there, the same control is needed at that scale.
#
# ## Which result would refute the claim?
#
# Before a comparison, write down each claim together with the result that would refute it. If no result would refute the claim, the comparison does not test it.
#
# | claim | refuted if | result |
# |---|---|---|
# | the order is not due to chance | two groups of seeds of one rule differ as much | not refuted, early in training |
# | step-wise credit is cheaper | it is not, in the cost that matters | depends on the cost |
# | step-wise credit needs far fewer iterations | equal tuning of Flow-GRPO closes most of the gap | refuted in this world |
# | TP-GRPO's lead is due to turning points | without them most of the lead remains | refuted in this world |
# | turning points are better than other steps | other steps with equal changes of the credit do as well | undecided |
#
# ### Exercise 8 · a review
#
# *Difficulty: harder · kind: debugging · importance: useful · time: 10 minutes*
#
# A report on this lesson contains seven claims, some of them wrong. Judge each by this notebook alone: `"supported"`, `"contradicted"`, or `"open"` (not decided by this notebook).
#
# - **A** With a clip range of 0.002, step-wise credit needs fewer iterations than uniform credit to reach a reward of 0.4.
# - **B** Step-wise credit needs at most half as many iterations as uniform credit, for every clip range.
# - **C** In this world TP-GRPO's lead is due to its turning points.
# - **D** In this world, each rule at its best clip range, uniform credit reaches a reward of 0.5 with the fewest forward passes.
# - **E** The ratio of seconds between the rules, as measured here, holds for a 2.5-billion-parameter model.
# - **F** The intervals of part 1 also cover the choice of the held-out prompts.
# - **G** For image models, uniform credit is as good as step-wise credit if the clip range is tuned.

# %% tags=["exercise"]
verdicts = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ..., "F": ..., "G": ...}

# %% [markdown] tags=["hint"]
# **Hint.** For each claim ask first whether the notebook contains an experiment about it at all. If not, the claim is open, even if it is plausible. A claim about *every* setting is contradicted by one counterexample.

# %% tags=["solution"]
verdicts = {
    "A": "supported",
    "B": "contradicted",
    "C": "contradicted",
    "D": "supported",
    "E": "open",
    "F": "contradicted",
    "G": "open",
}

# %%
lesson.check_claims(verdicts)

# %% [markdown] tags=["explanation"]
# **Why.** The tables of parts 2 and 3 decide A, B and D, and the control without turning points decides C. F is contradicted because all runs use the same prompts. E and G concern large models, which this notebook does not measure. The small world only shows which experiment could decide them: for G, an image model with uniform credit whose clip range is tuned with the same effort as
# that of the other rule.

# %% [markdown]
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Three seeds per rule, and every seed of A is better than every seed of B. The exact two-sided permutation test gives **a** p = 0.05, **b** p = 0.1, **c** p below 0.01.
# 2. A table gives 0.80 ± 0.02 for five seeds, in which ± is the standard deviation. The 95% interval of the mean is about **a** 0.80 ± 0.02, **b** 0.80 ± 0.025, **c** 0.80 ± 0.04.
# 3. Rule A needs half as many iterations as rule B, with twice the NFE per iteration. Your reward model is by far the most expensive part, and is called once per finished image, equally often per iteration. For you **a** A is cheaper, **b** both cost the same, **c** B is cheaper.
# 4. Two rules are compared at the default settings of one of them. The best repair is **a** default settings for each, chosen by its authors, **b** the same tuning effort for both, reported on new seeds, **c** the same tuning effort for both, reported at the best seed.
# 5. A rule leads by 0.62. A control without the part that gives the rule its name differs from the rule by 0.00 ± 0.02. The lead comes from **a** this part, **b** the parts that rule and control share, **c** chance.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** Question 1: how many splits are as extreme as the observed one? Question 2: use the quantile 2.78 for four degrees of freedom. Question 3: count only calls of the reward model. Questions 4 and 5: parts 3 and 4.

# %% tags=["solution"]
quiz = {1: "b", 2: "b", 3: "a", 4: "b", 5: "b"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: 2 of the 20 splits are as extreme, one in each direction. 2: $2.78 \cdot 0.02/\sqrt 5 = 0.025$. 3: half the iterations need half the calls of the reward model. 4: defaults result from unknown effort, and the best seed is selected by chance. 5: the control has all parts but one, and the same reward.

# %% [markdown]
# ## Summary
#
# | question | tool | in `flowrl` |
# |---|---|---|
# | how precise is a number | $\bar R \pm q_{n-1}\, \mathrm{SD}/\sqrt n$ over seeds | `flowrl compare --seeds 0 1 2 3 4 5` |
# | is a difference due to chance | exact permutation test; the method against itself | `run.results.load_comparison` returns the curves of all seeds |
# | at what cost | iterations, NFE, NFE + 3 × pairs trained, seconds | `nfe_total`, `train_nfe_total`, `seconds_total` of every metrics line |
# | rule or setting | equal tuning effort for all rules; report on other seeds | `--clip-range`, `--learning-rate`, `--loss`; the metric `clip_fraction` |
# | which part of the rule | controls that keep all but one part | `--credit "turning-point-variant(where=sign)"`, `where=none` |
#
# ## Symbols
#
# {symbols: $R$; $\rho$; $c$; NFE; turning point}
#
# ## Further reading
#
# - Henderson et al. 2018, *Deep reinforcement learning that matters* (arXiv 1709.06560): seeds, settings and code change published orders.
# - Colas et al. 2018, *How many random seeds?* (arXiv 1806.08295): tests and their power with few seeds.
# - Agarwal et al. 2021, *Deep reinforcement learning at the edge of the statistical precipice* (arXiv 2108.13264): intervals for comparisons with few runs.
# - Engstrom et al. 2020, *Implementation matters in deep policy gradients* (arXiv 2005.12729): details that explain a lead attributed to the method.
# - Patterson et al. 2023, *Empirical design in reinforcement learning* (arXiv 2304.01315): a guide to whole experiments.
#
# **Next:** [9 · Write your own credit rule](09_your_own_rule.ipynb) applies these tools to a rule of your own, from the idea to the comparison.

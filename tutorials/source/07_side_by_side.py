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
# # 7 · Side by side
#
# **After this lesson you can** read a comparison of fine-tuning methods as a referee reads it: put an interval on it, ask what the
# horizontal axis hides, tell the effect of a rule from the effect of a setting, and say which experiment would change your mind.
#
# **Time** 75 minutes, of which the computer needs one or two. **You need** lessons 3 to 6: uniform, stepwise and turning-point credit.
#
# We begin with a result that looks finished: same model, same settings, one seed, three rules. Then we take it apart.

# %% tags=["hide-input"]
import itertools
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from flowrl_course import lesson_07 as lesson
from flowrl_course.figures import COLOURS, INK, NOISE, animation, clean, panels, plane
from flowrl_course.runs import learn, start
from flowrl.credit import TurningPoint
from flowrl.flow.gaussian import log_prob
from flowrl.losses import ClippedLoss
from flowrl.plots.style import spread_labels
from flowrl.worlds.mixture import split, target

torch.set_num_threads(1)
RULES = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
TIGHT = 2e-3
LENGTH = {"flow-grpo": 20, "stepwise-flow-grpo": 12, "tp-grpo": 12}  # iterations; two of the rules have arrived by then


def tight_run(rule, seed):
    """One run with the settings of the opening picture."""
    return learn(rule, seed=seed, clip=TIGHT, iterations=LENGTH[rule])


runs = {(rule, TIGHT): [tight_run(rule, 0)] for rule in RULES}


def opening():
    """Samples for six held-out directions during training, and the reward beside them."""
    wanted = torch.tensor([target(prompt) for prompt in split("direction")["heldout"]])
    hue = torch.atan2(wanted[:, 1], wanted[:, 0]) / (2 * math.pi) % 1
    figure, axes = panels(4, width=2.6, height=2.9)
    dots = []
    for cell, rule in zip(axes, RULES, strict=False):
        plane(cell)
        cell.set_title(rule, color=COLOURS[rule], fontsize=10)
        cell.scatter(*wanted.T, c=hue, cmap="hsv", vmin=0, vmax=1, marker="x", s=60)
        colours = hue.repeat(16)
        dots.append(cell.scatter(*wanted.repeat(16, 1).T, c=colours, cmap="hsv", vmin=0, vmax=1, s=7, alpha=0.7))
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
# Six directions are asked for (crosses); samples have the colour of the direction they were asked for. Stepwise-Flow-GRPO has brought
# them home after 8 iterations and TP-GRPO after 10 (both stop at 12), while Flow-GRPO is still on its way at 20. A paper could end here: *step-wise credit learns
# several times faster*. Four questions stand before that sentence, and they are the four parts of this lesson.
#
# 1. **Is it luck?** One seed is one draw.
# 2. **At what price?** An iteration of the three rules does not cost the same.
# 3. **Is it the rule, or a setting that suits the rule?** "The same settings for all" is not the same as fair.
# 4. **Is it the part of the rule that gives it its name?** TP-GRPO without turning points is a rule too.
#
# ## 1 Is it luck?
#
# A seed draws the small network's first weights, the order of the prompts and all noise. Call the reward of seed $k$ after training $r_k$. With
# $n$ seeds, mean $\bar r$ and sample standard deviation $s$ (divided by $n - 1$), the mean that infinitely many seeds would
# give lies, 95 times in 100, within
#
# $$\bar r \pm t_{n-1}\, \frac{s}{\sqrt n},$$
#
# where $t_{n-1}$ is the 97.5% quantile of Student's distribution: 4.30 for three seeds, 2.57 for six, 1.96 only for very many. It is that
# large because $s$ itself was guessed from three numbers. The $\pm$ in most tables is $s$, which says something else: how far single seeds lie apart.
#
# ### Exercise 1 · an interval from few seeds *(easy, 5 minutes)*
#
# `values` is `[seed]`. `lesson.T_QUANTILE[d]` is the quantile for `d` degrees of freedom.


# %% tags=["exercise"]
def interval(values):
    """Mean, and half the width of its 95% interval."""
    return ..., ...


# %% tags=["solution"]
def interval(values):
    """Mean, and half the width of its 95% interval."""
    n = len(values)
    return float(values.mean()), lesson.T_QUANTILE[n - 1] * float(values.std()) / math.sqrt(n)


# %%
lesson.check_interval(interval)

# %% [markdown] tags=["explanation"]
# **Why.** `Tensor.std` divides by $n - 1$ unless told otherwise, and $n$ seeds leave $n - 1$ degrees of freedom. Taking 1.96 for three seeds makes the interval less
# than half as wide as it should be: it misses the true mean in 19 cases of 100, not in 5. The formula assumes roughly normal seeds; rewards near
# their ceiling of 1 are not, which is one reason to look at the points as well.

# %% [markdown]
# Five more seeds of each rule. `learn` (in `flowrl_course.runs`) is the trainer of `flowrl` with a fixed evaluation: 96 ODE samples of the averaged weights for six
# directions that were never trained on, the same noise every time.

# %%
for rule in RULES:
    runs[rule, TIGHT] += [tight_run(rule, seed) for seed in range(1, 6)]
rewards = {key: torch.stack([run.reward for run in found]) for key, found in runs.items()}
iterations = runs[RULES[0], TIGHT][0].iterations
for at in (4, -1):
    print(f"reward after {'8 iterations' if at == 4 else '20 (Flow-GRPO) or 12 iterations'}, mean and 95% interval")
    for rule in RULES:
        three, six = interval(rewards[rule, TIGHT][:3, at]), interval(rewards[rule, TIGHT][:, at])
        print(f"  {rule:<20} 3 seeds {three[0]:.2f} ± {three[1]:.2f}    6 seeds {six[0]:.2f} ± {six[1]:.2f}")

# %% tags=["hide-input"]
figure, axes = panels(width=6.4, height=3.4)
for rule in RULES:
    means, halves = zip(*(interval(column) for column in rewards[rule, TIGHT].T), strict=True)
    means, halves = torch.tensor(means), torch.tensor(halves)
    along = iterations[: len(means)]
    axes.plot(along, rewards[rule, TIGHT].T, color=COLOURS[rule], linewidth=0.7, alpha=0.5)
    axes.plot(along, means, color=COLOURS[rule], linewidth=2.4)
    axes.fill_between(along, means - halves, means + halves, color=COLOURS[rule], alpha=0.18, linewidth=0)
for text, x, y, rule in (("Stepwise", 4.6, 0.72, RULES[1]), ("TP-GRPO", 8.2, 0.72, RULES[2]), ("Flow-GRPO", 15.6, 0.3, RULES[0])):
    axes.text(x, y, text, color=COLOURS[rule], fontweight="bold", ha="right" if rule == RULES[1] else "left")
axes.set_xticks(range(0, 21, 4))
axes.set(
    xlabel="iteration", ylabel="held-out reward", ylim=(0.15, 1.02), title="six seeds each (thin), mean and 95% interval (band)"
)
clean(axes)
plt.show()

# %% [markdown]
# Early on the ranking is not luck: at iterations 4 and 6 every seed of Stepwise is above every seed of TP-GRPO, and these are above every seed of Flow-GRPO. At the end the
# two step-wise rules lie on top of each other, and the widest band is Flow-GRPO's, whose seeds wake up at different times. A spread is not a nuisance to be averaged away: it
# says that how *long* Flow-GRPO takes depends on the seed a good deal.
#
# An interval speaks about one rule. For a *difference* there is a test that assumes nothing about the shape of the distribution. If rule $a$ and rule $b$ were the same thing,
# the labels on their seeds would mean nothing, and every way to deal the $n_a + n_b$ rewards into two heaps of these sizes would be as likely. So deal them in all ways: $p$ is the share of splits whose
# heaps differ in their means at least as much, in either direction, as the split that happened.
#
# ### Exercise 2 · all ways to deal the seeds *(medium, 10 minutes)*
#
# `itertools.combinations(range(n), k)` lists the choices. Rounding must not decide a tie, so compare with `>= observed - 1e-6` (rewards are float32, exact to about $10^{-7}$).


# %% tags=["exercise"]
def permutation_p(a, b):
    """Exact two-sided p for the difference of the means of a [seed] and b [seed]."""
    return ...


# %% tags=["solution"]
def permutation_p(a, b):
    """Exact two-sided p for the difference of the means of a [seed] and b [seed]."""
    values = torch.cat([a, b]).double()
    observed = abs(float(a.double().mean() - b.double().mean()))
    as_large, splits = 0, 0
    for chosen in itertools.combinations(range(len(values)), len(a)):
        heap = torch.zeros(len(values), dtype=torch.bool)
        heap[list(chosen)] = True
        as_large += abs(float(values[heap].mean() - values[~heap].mean())) >= observed - 1e-6
        splits += 1
    return as_large / splits


# %%
lesson.check_permutation(permutation_p)

# %% [markdown] tags=["explanation"]
# **Why.** The observed split is one of the splits, so $p$ is never 0: with three seeds against three there are 20 splits, and the smallest $p$ that any result can reach is 2/20 = 0.1. *Three seeds a side cannot reach
# 5%, whatever they show.* With six a side there are 924. Absolute differences, because before the experiment you would have written a paper about either sign.

# %%
print("splits of 3 + 3 seeds:", math.comb(6, 3), "   of 6 + 6:", math.comb(12, 6))
for at in (4, 6):
    stepwise, turning = rewards["stepwise-flow-grpo", TIGHT][:, at], rewards["tp-grpo", TIGHT][:, at]
    p3, p6 = permutation_p(stepwise[:3], turning[:3]), permutation_p(stepwise, turning)
    print(f"Stepwise against TP-GRPO after {int(iterations[at])} iterations: p = {p3:.3f} with 3 seeds, {p6:.3f} with 6")

# %% [markdown]
# What do three seeds do when there is *nothing* to find? Train Flow-GRPO with ten seeds, call three of them "method A" and three others "method B", and look at how far apart the two "methods" end. There
# are 2,100 such pairs, and every difference is chance.

# %%
same = torch.stack(
    [run.reward[-1] for run in [*runs["flow-grpo", TIGHT], *(tight_run("flow-grpo", seed) for seed in range(6, 10))]]
)
triples = list(itertools.combinations(range(10), 3))
means = torch.tensor([float(same[list(three)].mean()) for three in triples])
spreads = torch.tensor([float(same[list(three)].std()) for three in triples])
pairs = torch.tensor([(i, j) for i, j in itertools.combinations(range(120), 2) if not set(triples[i]) & set(triples[j])])
gaps = (means[pairs[:, 0]] - means[pairs[:, 1]]).abs()
apart = gaps > spreads[pairs].sum(1)
print(
    f"{len(pairs):,} pairs of the same method; the median difference is {float(gaps.median()):.2f}, one in twenty is above {float(gaps.quantile(0.95)):.2f}"
)
print(f"bars of ± one standard deviation do not overlap in {float(apart.float().mean()):.0%} of them")

# %% tags=["hide-input"]
figure, axes = panels(width=6.4, height=2.7)
axes.hist(gaps, bins=40, color=NOISE, alpha=0.75)
axes.axvline(float(gaps.quantile(0.95)), color=INK, linewidth=1)
axes.text(float(gaps.quantile(0.95)) + 0.005, axes.get_ylim()[1] * 0.9, "one in twenty is beyond", fontsize=9, va="top")
axes.set(xlabel="difference of the mean rewards of 3 + 3 seeds", ylabel="pairs", title="Flow-GRPO against itself, 20 iterations")
clean(axes)
plt.show()

# %% [markdown]
# Keep this picture in mind when a table of three seeds has a bold number in it. It is worth making for every comparison: it needs no second method, only more seeds of the first. The rule of thumb
# "the error bars do not overlap, so it is real" would have declared *the same method* different from itself in one pair of ten.
#
# How many seeds would it take? To find a true difference $\delta$ with a spread $s$ four times in five at the 5% level, about
#
# $$n \approx 2\,(1.96 + 0.84)^2\, \frac{s^2}{\delta^2}$$
#
# seeds for each rule. The image world of `flowrl compare` is a case in point. One recorded run of its default preset (three seeds) ended at a soft reward of 0.868 ± 0.011 for Flow-GRPO and 0.877 ± 0.013 for
# Stepwise-Flow-GRPO, where ± is the standard deviation.

# %%
first, second, spread = 0.868, 0.877, math.sqrt((0.011**2 + 0.013**2) / 2)
half = lesson.T_QUANTILE[4] * spread * math.sqrt(2 / 3)
print(f"difference {second - first:.3f}, 95% interval {second - first - half:+.3f} to {second - first + half:+.3f}")
print(
    f"seeds per rule to find a difference of {second - first:.3f}: {2 * (1.96 + 0.84) ** 2 * spread**2 / (second - first) ** 2:.0f}"
)

# %% [markdown]
# That run says: no difference as large as 0.04 in favour of Stepwise, and none as large as 0.02 in favour of Flow-GRPO. It does not say that there is none.
#
# And what was *not* drawn anew? All runs are evaluated on the same six directions and the same noise. That makes differences between rules sharper, but the interval
# then speaks of these six prompts. A claim about prompts in general needs prompts as draws too.
#
# ## 2 At what price?
#
# An iteration of Flow-GRPO samples 96 trajectories of 10 steps: 960 network evaluations (NFE). Stepwise adds substeps, TP-GRPO adds completions (lessons 5 and 6). But sampling is not all: the update runs forward *and* backward
# through every (trajectory, stochastic step) pair. A backward pass costs about two forward ones, so a trained pair counts three:
#
# $$\text{work} = \text{NFE while sampling} + 3 \times \text{pairs trained}.$$
#
# Reports often give the first term alone, or neither. `Curve.sampled`, `Curve.trained` and `Curve.work` hold all three.

# %%
for rule in RULES:
    run = runs[rule, TIGHT][0]
    per = [float(column[-1] / run.iterations[-1]) for column in (run.sampled, run.trained, run.work)]
    print(
        f"{rule:<20} an iteration: {per[0]:5.0f} NFE while sampling, {per[1]:.0f} pairs trained, {per[2]:5.0f} forward passes of work"
    )

# %% [markdown]
# To compare prices one asks what it costs to *reach* a reward, and reads the answer off the curve.
#
# ### Exercise 3 · the cost of a target *(medium, 8 minutes)*
#
# `cost` and `reward` are `[evaluation]`, `cost` grows. Return the cost at which the curve first reaches `target`, on a straight line between evaluations; `math.nan` where it never does.


# %% tags=["exercise"]
def reach(cost, reward, target):
    """The cost at which the curve first reaches the target; nan where it does not."""
    return ...


# %% tags=["solution"]
def reach(cost, reward, target):
    """The cost at which the curve first reaches the target; nan where it does not."""
    above = (reward >= target).nonzero().flatten()
    if len(above) == 0:
        return math.nan
    i = int(above[0])
    if i == 0:
        return float(cost[0])
    share = (target - reward[i - 1]) / (reward[i] - reward[i - 1])
    return float(cost[i - 1] + share * (cost[i] - cost[i - 1]))


# %%
lesson.check_reach(reach)

# %% [markdown] tags=["explanation"]
# **Why.** Without the straight line the answer jumps by a whole evaluation interval, which here would be worth half of Stepwise's total. The *first* crossing is a choice that
# flatters noisy curves, so say it when you use it. And a run that never arrives must not get the last cost as if it had: `nan` spreads through every average and cannot be overlooked.

# %%
PRICES = {"iterations": "iterations", "sampled": "NFE while sampling", "work": "forward passes in all", "seconds": "seconds"}


def mean_curve(found, price):
    """Mean cost and mean reward over seeds, both [evaluation]."""
    return torch.stack([getattr(run, price) for run in found]).mean(0), torch.stack([run.reward for run in found]).mean(0)


def speedup(rule, price, goal, clip=TIGHT):
    """How many times cheaper than Flow-GRPO the rule reaches the goal."""
    return reach(*mean_curve(runs["flow-grpo", clip], price), goal) / reach(*mean_curve(runs[rule, clip], price), goal)


for rule in RULES[1:]:
    found = ", ".join(f"{speedup(rule, price, 0.4):.1f} in {label}" for price, label in PRICES.items() if price != "seconds")
    print(f"to reach 0.4, {rule} is cheaper by a factor of {found}")

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
    for label, height in zip(PRICES.values(), spread_labels(ends, low, high, (high - low) * 0.09), strict=True):
        cell.text(0.556, height, label, color=COLOURS[rule], fontsize=8.5, va="center")
    cell.axhline(1, color=NOISE, linewidth=1)
    cell.set(xlabel="reward to reach", ylabel="times cheaper than Flow-GRPO", title=rule, xlim=(0.25, 0.78), ylim=(0, None))
    cell.set_xticks([0.25, 0.35, 0.45, 0.55])
    clean(cell)
plt.show()
for rule in RULES[1:]:
    print(
        f"seconds to reach 0.4, {rule}: cheaper by a factor of {speedup(rule, 'seconds', 0.4):.1f} on the machine that made this page"
    )

# %% [markdown]
# One experiment, four speed-ups. Stepwise needs about a quarter of the iterations but *more* sampling evaluations; with training counted it is cheaper again, and seconds say another thing still, because in a tiny network time goes by calls and not by
# evaluations (Stepwise needs 14 sequential calls an iteration, the others 10). The factor also depends on the reward one asks for. "x times faster" without *in what* and *to where* is not a statement.
#
# Which price is yours? If the reward model is a slow judge, reward calls. If GPUs are full, work. If you wait for it, seconds *on your hardware with your model*.
#
# ## 3 Is it the rule, or the setting?
#
# All three rules ran with the same settings. That sounds fair. But a setting can suit one rule and starve another, and who copies the settings decides the race. Which setting could it be here? A metric that the trainer
# logs anyway gives it away.

# %%
for rule in RULES:
    share = sum(run.clipped for run in runs[rule, TIGHT]) / 6
    print(f"{rule:<20} {share:.0%} of all (trajectory, step) pairs have a ratio beyond the clip")

# %% [markdown]
# Most pairs are outside the trust region, for every rule: the clip $c = 0.002$ is very tight. It was made for the image world, whose latents have 128 elements. The log-probability is a *mean* over the latent's elements (lesson 3), and the mean of 2 elements
# swings $\sqrt{128/2} = 8$ times as far as that of 128 when every element moves as much. Copied into the plane, the same number means a trust region eight times narrower. It is there for all rules, so nobody was cheated. Was it neutral?
#
# *Before you run the next cell, write down a guess: with a clip ten and a hundred times wider, what happens to Stepwise's fourfold lead in iterations?*

# %%
CLIPS = (TIGHT, 2e-2, 2e-1)
for clip in CLIPS[1:]:
    for rule in RULES:
        runs[rule, clip] = [learn(rule, seed=seed, clip=clip, iterations=8) for seed in range(4)]
print("reaches a mean reward of 0.5 after")
for clip in CLIPS:
    for rule in RULES:
        costs = [reach(*mean_curve(runs[rule, clip], price), 0.5) for price in ("iterations", "work")]
        print(f"  clip {clip:<6g} {rule:<20} {costs[0]:5.1f} iterations   {costs[1]:8,.0f} forward passes")

# %% tags=["hide-input"]
figure, axes = panels(3, 2, width=3.5, height=2.7, sharey=True)
for column, clip in enumerate(CLIPS):
    for row, price in enumerate(("iterations", "work")):
        cell = axes[row][column]
        for rule in RULES:
            for run in runs[rule, clip][:4]:
                cell.plot(getattr(run, price), run.reward, color=COLOURS[rule], linewidth=0.7, alpha=0.45)
            cell.plot(*mean_curve(runs[rule, clip][:4], price), color=COLOURS[rule], linewidth=2.2)
        cell.set(xlim=(0, (8, 48_000)[row]), ylim=(0.15, 1.02), xlabel=("iteration", "forward passes in all (thousands)")[row])
        if row == 1:
            cell.set_xticks([0, 20_000, 40_000], ["0", "20", "40"])
        if row == 0:
            cell.set_title(f"clip {clip:g}")
        clean(cell)
    axes[0][0].set_ylabel("held-out reward")
    axes[1][0].set_ylabel("held-out reward")
for text, x, y, rule in (("Stepwise", 3.9, 0.62, RULES[1]), ("TP", 7.1, 0.56, RULES[2]), ("Flow-GRPO", 5.0, 0.29, RULES[0])):
    axes[0][0].text(x, y, text, color=COLOURS[rule], fontsize=9, fontweight="bold", ha="right" if rule == RULES[1] else "left")
plt.show()

# %% [markdown]
# The lead in iterations shrinks from left to right and is nearly gone at 0.2; and since an iteration of Flow-GRPO is the cheapest, the *order* in the lower row turns around. Nothing about the rules changed: the tight clip had held uniform credit back most. Not because more of its pairs
# are outside; fewer are. It matters *which*. Pairs that moved along their advantage stop counting once they are outside; pairs that moved against it go on counting, and pull back. A loss that watches itself can count both.


# %%
class Watching:
    """The clipped loss, noting which share of the pairs beyond the clip moved along their advantage."""

    needs_reference = False

    def __init__(self):
        self.inner, self.along, self.beyond = ClippedLoss(clip_range=TIGHT), 0, 0

    def loss(self, batch):
        with torch.no_grad():
            change = (log_prob(batch.new, batch.next_node) - log_prob(batch.behaviour, batch.next_node)).exp() - 1
            outside = change.abs() > TIGHT
            self.along += int((outside & (change * batch.advantages > 0)).sum())
            self.beyond += int(outside.sum())
        return self.inner.loss(batch)


for rule in RULES:
    watching = Watching()
    for seed in range(3):
        trainer = start(rule, seed, clip=TIGHT)
        trainer.method = replace(trainer.method, loss=watching)
        for _ in range(3):
            trainer.iteration()
    print(
        f"{rule:<20} of the pairs beyond the clip, {watching.along / watching.beyond:.0%} moved along their advantage (first 3 iterations)"
    )

# %% [markdown]
# Each iteration makes four updates. The first moves all pairs, and uniform credit, whose gradient is the noisiest, moves nearly as many of them against their advantage as along it (half would be no signal at all). The next three updates then hear mostly from those that want back, and undo much of the first. The
# step-wise rules move more pairs the right way at once and have less to undo. (You can test this explanation: with `updates=1` nothing is ever clipped.)
#
# The wide clip has a price of its own: some runs fall back after their peak. (How they end, not only how fast they rise, would be one more column in an honest table.)
#
# So what is fair? Not the same settings, but the **same effort spent on settings**: each rule gets its best setting out of the same list, chosen on some seeds and reported on others. The second half matters: the best of three noisy numbers is too good on average, and those who tried more settings get more of that luck.
#
# ### Exercise 4 · equal tuning *(medium, 8 minutes)*
#
# `scores` is `[rule, setting, seed]`. Choose each rule's setting with the first `tuning` seeds, and return `[rule]`: its mean score on the *other* seeds.


# %% tags=["exercise"]
def tuned(scores, tuning):
    """Each rule at its own best setting, on seeds that did not choose it; [rule]."""
    return ...


# %% tags=["solution"]
def tuned(scores, tuning):
    """Each rule at its own best setting, on seeds that did not choose it; [rule]."""
    best = scores[..., :tuning].mean(-1).argmax(1)
    return scores[torch.arange(len(scores)), best, tuning:].mean(-1)


# %%
lesson.check_tuned(tuned)

# %% [markdown] tags=["explanation"]
# **Why.** Selecting and reporting on the same seeds is the most common way to overstate a result without any bad will; it is the same mistake as tuning on a test set. One common setting for all rules, chosen for the average, brings back the problem that tuning was to cure.


# %%
def reward_at(run, price, budget):
    """The reward when so much has been spent, on a straight line between evaluations."""
    cost, reward = getattr(run, price), run.reward
    i = int(torch.searchsorted(cost, torch.tensor(budget, dtype=cost.dtype)).clamp(1, len(cost) - 1))
    share = (budget - cost[i - 1]) / (cost[i] - cost[i - 1])
    return float(reward[i - 1] + share * (reward[i] - reward[i - 1]))


for price, budget in (("iterations", 6), ("work", 14_400)):
    table = torch.tensor([[[reward_at(run, price, budget) for run in runs[rule, clip][:4]] for clip in CLIPS] for rule in RULES])
    print(f"reward after {budget:,} {'forward passes' if price == 'work' else price}: by clip {CLIPS}, and tuned")
    for rule, row, chosen in zip(RULES, table.mean(-1).tolist(), tuned(table, 2).tolist(), strict=True):
        print(f"  {rule:<20} {row[0]:.2f}  {row[1]:.2f}  {row[2]:.2f}   tuned {chosen:.2f}")

# %% [markdown]
# (14,400 forward passes are six iterations of Flow-GRPO.) Per iteration and tuned, the three rules are close. Per forward pass, tuned uniform credit is ahead. This does not make uniform credit the best rule: two seeds a side, three clips, one learning rate, one world. It makes the *opening picture* a statement about a clip.
#
# ## 4 Is it the part that gives the rule its name?
#
# TP-GRPO differs from Flow-GRPO in three things: rewards of unfinished states (by ODE completion), a normalisation for every step by itself, and long-term rewards at turning points. Its name says the third. A **control** keeps everything but that: the same completions,
# but the long-term reward paid at *randomly* placed steps (as many as there are turning points), or nowhere. Back at the tight clip, where the lead over Flow-GRPO is largest:

# %%
controls = {
    "turning points": [run.reward[:5] for run in runs["tp-grpo", TIGHT]],
    "random places": [learn(rule=TurningPoint(where="random"), seed=s, clip=TIGHT, iterations=8).reward for s in range(6)],
    "none": [learn(rule=TurningPoint(where="none"), seed=s, clip=TIGHT, iterations=8).reward for s in range(6)],
}
controls = {name: torch.stack(found) for name, found in controls.items()}
ends = {name: found[:, -1] for name, found in controls.items()}
for name in ("random places", "none"):
    mean, half = interval(ends["turning points"] - ends[name])
    p = permutation_p(ends["turning points"], ends[name])
    print(f"turning points minus {name:<13} after 8 iterations: {mean:+.3f} ± {half:.3f} seed by seed, p = {p:.2f}")
lead = ends["turning points"] - rewards["flow-grpo", TIGHT][:, 4]
print(f"turning points minus Flow-GRPO     after 8 iterations: {interval(lead)[0]:+.3f} ± {interval(lead)[1]:.3f}")

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.2, height=3.1)
shades = {"turning points": COLOURS["tp-grpo"], "random places": "#E69F00", "none": NOISE}
axes[0].plot(iterations[:5], rewards["flow-grpo", TIGHT][:, :5].mean(0), color=COLOURS["flow-grpo"], linewidth=2)
axes[0].text(6, 0.275, "Flow-GRPO", color=COLOURS["flow-grpo"], fontsize=9)
for name, found in controls.items():
    axes[0].plot(iterations[:5], found.T, color=shades[name], linewidth=0.7, alpha=0.5)
    axes[0].plot(iterations[:5], found.mean(0), color=shades[name], linewidth=2.2)
axes[0].set(xlabel="iteration", ylabel="held-out reward", title="TP-GRPO and its controls")
for place, (name, values) in enumerate(ends.items()):
    mean, half = interval(values)
    axes[1].errorbar(place, mean, yerr=half, color=shades[name], marker="o", capsize=4)
    axes[1].scatter([place + 0.15] * 6, values, color=shades[name], s=12, alpha=0.7)
axes[1].set_xticks(range(3), [*ends], fontsize=9)
for label, shade in zip(axes[1].get_xticklabels(), shades.values(), strict=True):
    label.set_color(shade)
axes[1].set(xlim=(-0.5, 2.6), ylabel="held-out reward", title="after 8 iterations: seeds, mean, 95% interval")
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# The controls rise as fast. What gives TP-GRPO its lead over Flow-GRPO here are the rewards of unfinished states, not the turning points. The difference is taken seed by seed because runs of one seed share their prompts and first weights: what a seed does to both
# cancels. Pair whatever can be paired.
#
# The paper (arXiv 2602.06422) compares TP-GRPO with Flow-GRPO, and two definitions of turning points with each other; the controls here are ours. What they show may not carry over: turning points may matter where trajectories swing more, with other rewards, or with larger models. But a claim "turning points help" needs *this* control, at *that* scale.
#
# ## What would change your mind?
#
# A useful habit: before a comparison, write the claim, and beside it the result that would make you drop it. Someone who cannot name such a result is not testing the claim.
#
# | claim | would be dropped if | what we saw |
# |---|---|---|
# | the order is not luck | two groups of seeds of one rule differ as much | they do not, early in training |
# | step-wise credit is cheaper | it is not, in the price that matters | depends on the price |
# | step-wise credit is better | tuning Flow-GRPO as hard closes the gap | it does, in this world |
# | turning points earn TP-GRPO's lead | random turning points do as well | they do, in this world |
#
# ### Exercise 5 · referee *(harder, 10 minutes)*
#
# Judge each claim by this notebook alone: `"supported"`, `"contradicted"`, or `"open"` (nothing here decides it).
#
# - **A** With a clip of 0.002, step-wise credit needs fewer iterations than uniform credit to reach a reward of 0.4.
# - **B** Step-wise credit needs at most half as many iterations as uniform credit, whatever the clip.
# - **C** In this world TP-GRPO's lead comes from its turning points.
# - **D** In this world, each rule at its best clip, uniform credit reaches a reward of 0.5 with the fewest forward passes.
# - **E** The ratio of seconds between the rules, as measured here, holds for a 2.5-billion-parameter model.
# - **F** The intervals of part 1 also cover the choice of the held-out prompts.
# - **G** For image models, uniform credit is as good as step-wise credit once the clip is right.

# %% tags=["exercise"]
verdicts = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ..., "F": ..., "G": ...}

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
# **Why.** A, B and D are read off the tables of parts 2 and 3, C off the controls. F is about what was drawn: seeds were, prompts were not. E and G reach beyond what was measured, in opposite directions; a small world cannot settle them. It can say cheaply which experiment would: for G, an image model with uniform credit, its clip tuned with as much effort as
# the competitor's.

# %% [markdown]
# ## To keep
#
# | question | tool | in `flowrl` |
# |---|---|---|
# | how sure is one number | $\bar r \pm t_{n-1}\, s/\sqrt n$ over seeds | `flowrl compare --seeds 0 1 2 3 4 5` |
# | is a difference luck | exact permutation test; the method against itself | `training.results.load_comparison` gives the curves of all seeds |
# | at what price | iterations, NFE, NFE + 3 × pairs trained, seconds | `nfe_total`, `train_nfe_total`, `seconds_total` of every metrics line |
# | rule or setting | same effort of tuning for all; report on other seeds | `--clip-range`, `--learning-rate`, `--loss`; the metric `clip_fraction` |
# | which part of the rule | controls that keep all but one part | `--credit "turning-point(where=random)"`, `where=none` |
#
# **Next:** [8 · Write your own credit rule](08_your_own_rule.ipynb) turns the tools around: a rule of yours, from the idea to a comparison that would convince you.

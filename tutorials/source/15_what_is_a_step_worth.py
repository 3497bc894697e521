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
# # 15 · What is a step worth?
#
# **After this lesson you can** compute the exact value of an unfinished sample, compute a step's worth as a difference of two values, say when cheap estimates of values give wrong credit, and calibrate them.
#
# **Time** 85 minutes, of which the computer needs about one. **You need** the lesson on Stepwise-Flow-GRPO; the lesson Test your own rule helps.
#
# Credit by decision needs values of unfinished states. The papers estimate them with further network evaluations (the lessons on Stepwise-Flow-GRPO, TP-GRPO and branching). In two dimensions we can compute them exactly, for every point of the plane, and compare cheaper values with them.
# The animation shows the exact value of all states for one prompt, from noise to finished samples, before training. The white cross is the target. The twelve dots are a group of trajectories, and the curves on the right are their values. At which steps is the result decided?

# %% tags=["hide-input"]
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch

from flowrl.credit import CalibratedGain, StepwiseGain, Uniform, calibrated_gains, calibration
from flowrl.probes import Critic, NoProbe, Tweedie
from flowrl.rollout import Groups, predicted, score_rollout
from flowrl.bench.exact import Exact, ValueGrid, exact_advantages
from flowrl.bench.gradients import Setting, assigned
from flowrl.bench.rules import EvenGain
from flowrl.bench.true_advantage import compare_credit
from flowrl_course import lesson_15 as lesson
from flowrl_course.figures import (
    ACCENT,
    COLOURS,
    DATA,
    INK,
    OTHERS,
    animation,
    clean,
    panels,
    plane,
    target,
)
from flowrl_course.progress import progress
from flowrl_course.runs import learn, start

torch.set_num_threads(1)
# 9 of 10 steps are drawn: decision k is step k, and the last step is deterministic
WORLD = {"window": "0:9", "initial_noise": "independent", "clip_range": 0.06, "group_size": 12}
GRID = ValueGrid(points=57, reach=5.0)  # the square [-5, 5]^2


def setting_of(trainer):
    """The trainer's present policy, with its sampler, reward and prompts."""
    return Setting(
        trainer.policy,
        trainer.draw_sampler(),
        trainer.schedule,
        trainer.reward,
        trainer.prompts.prompts,
    )


@torch.no_grad()
def transitions(setting, prompt, places, step):
    """Means [row, 2] and standard deviation of what the sampler draws at `step` from `places`
    [row, 2].
    """
    x = places.float().view(-1, 2, 1, 1)
    times = setting.schedule.network_timesteps[step].expand(len(x))
    velocity = setting.policy.velocity(x, times, setting.policy.encode([prompt] * len(x)))
    gaussian = setting.sampler.transition(
        x, velocity, setting.schedule, torch.full((len(x),), step)
    )
    return gaussian.mean.flatten(1).double(), float(gaussian.std[0])


def value_tables(setting, prompt):
    """Exact values at the points of the grid, [node, point, point]: dynamic programming, from
    the end.
    """
    rewards = setting.reward.score(
        GRID.places.float().view(-1, 2, 1, 1), [prompt] * GRID.points**2
    )
    tables = [rewards.double().view(1, GRID.points, GRID.points)]
    for step in reversed(range(setting.schedule.steps)):
        means, std = transitions(setting, prompt, GRID.places, step)
        expected = GRID.smoothed(tables[0], std) if std else tables[0]
        tables.insert(0, GRID.at(expected, means[None]).view_as(expected))
    return torch.cat(tables)


def read(table, places):
    """A table [point, point], interpolated at `places` [..., 2]."""
    return GRID.at(table[None], places.double().reshape(1, -1, 2)).view(places.shape[:-1])


def show_values(axes, table, prompt, title):
    """A table of values as colours over the plane."""
    plane(axes, title)
    shown = axes.imshow(
        table.T, extent=(-5, 5, -5, 5), origin="lower", vmin=0, vmax=1, cmap="viridis"
    )
    axes.scatter(*target(prompt), marker="x", s=60, color="white", zorder=3)
    axes.set(xlim=(-3.4, 3.4), ylim=(-3.4, 3.4))
    return shown


trainer = start(rule=CalibratedGain(probe=Critic(base="zero")), **WORLD)
beginning = setting_of(trainer)
PROMPT = beginning.prompts[0]
rollout = beginning.rollout(
    Groups(18, 12), torch.Generator().manual_seed(1), NoProbe(), max_batch=8192
)
paths = rollout.trajectories.nodes.flatten(2)[:12]  # the first group [member, node, 2]
tables = value_tables(beginning, PROMPT)
heights = torch.stack([read(table, paths[:, node]) for node, table in enumerate(tables)], 1)


def opening():
    """Exact values over the plane and along a group."""
    figure, (left, right) = panels(2, width=3.9, height=3.5)
    shown = show_values(left, tables[0], PROMPT, "node 0")
    dots = left.scatter(
        *paths[:, 0].T, s=16, color="white", edgecolor=INK, linewidth=0.6, zorder=4
    )
    lines = [right.plot([], [], color=DATA, linewidth=1)[0] for _ in paths]
    right.set(
        xlim=(0, 10), ylim=(0, 1.02), xlabel="node (0 = noise, 10 = finished)", ylabel="V*"
    )
    right.set_title("exact values of the group's states")
    clean(right)
    figure.colorbar(shown, ax=left, shrink=0.8)
    figure.canvas.draw()

    def draw(frame):
        node = min(frame, 10)
        shown.set_data(tables[node].T)
        dots.set_offsets(paths[:, node])
        left.set_title(f"V* at node {node}")
        for line, height in zip(lines, heights, strict=True):
            line.set_data(range(node + 1), height[: node + 1])

    return animation(figure, draw, frames=14, seconds=9, dpi=60)


opening()

# %% [markdown]
# ## Backwards from the end
#
# The exact value $V^*_j(z)$ of a state $z$ at node $j$ is the expected reward if the sampler continues from it with the present policy. For a finished sample it is the reward. Before the end, step $j$ draws $z_{j+1} = \mu_j(z) + \mathrm{std}_j\,\varepsilon$, so that
#
# $$V^*_j(z) = \mathbb E_\varepsilon\, V^*_{j+1}(\mu_j(z) + \mathrm{std}_j\,\varepsilon).$$
#
# If we know $V^*_{j+1}$ on a grid, we also know $V^*_j$: evaluate the network once at every grid point, and take the expectation over the two numbers of $\varepsilon$. Ten such steps backwards are *dynamic programming*. They need no trajectory at all.
#
# ### Exercise 1 · one step backwards
#
# *Difficulty: medium · kind: formula · importance: essential · time: 7 minutes*
#
# `value` is a function of places `[..., 2]`, which returns $V^*_{j+1}$ there, `[...]`. `means` is `[row, 2]`, `std` a number. The expectation over $\varepsilon$ is a weighted sum over the points `draws` `[draw, 2]` with `weights` `[draw]` (a quadrature; the weights sum to 1). Return $V^*_j$, `[row]`.


# %% tags=["exercise"]
def backward_step(value, means, std, draws, weights):
    """The expected value after a step with these means."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** All places that the step may reach are `[row, draw, 2]`: give `means` an axis for the draws. Weight the values there, not the places.


# %% tags=["solution"]
def backward_step(value, means, std, draws, weights):
    """The expected value after a step with these means."""
    places = means[:, None] + std * draws
    return (value(places) * weights).sum(-1)


# %%
lesson.check_backward(backward_step)

# %% [markdown] tags=["explanation"]
# **Why.** The value after the step depends on the draw, and the value before it is the average over the draws. $V^*_{j+1}$ at the mean place would be the value of a step without noise. It is higher near the target, because $V^*$ is curved there. `flowrl.bench.exact` does the same with a finer expectation, and follows deterministic steps without interpolation. The probe `Exact` uses it for the states of a rollout.

# %% [markdown]
# Ten of your steps give the value of the noise. The next cell compares the table with that of the animation, and its mean over the noise of 2,000 trajectories with their mean reward.

# %%
numbers, masses = (torch.tensor(part) for part in np.polynomial.hermite_e.hermegauss(9))
draws = torch.cartesian_prod(numbers, numbers)
weights = torch.cartesian_prod(masses, masses).prod(1)
weights = weights / weights.sum()
ours = tables[-1]
for step in reversed(range(10)):
    means, std = transitions(beginning, PROMPT, GRID.places, step)
    after = ours
    ours = backward_step(
        lambda places, after=after: read(after, places), means, std, draws, weights
    ).view_as(after)
alone = replace(beginning, prompts=[PROMPT])
sampled = alone.rollout(
    Groups(1, 2000), torch.Generator().manual_seed(3), NoProbe(), max_batch=8192
)
starts, rewards = (
    sampled.trajectories.nodes[:, 0].flatten(1),
    alone.experience(sampled).values[0, :, -1],
)
error = float(rewards.std()) / len(rewards) ** 0.5
print(
    "mean value of the noise of 2,000 trajectories, 10 steps backwards:"
    f" {float(read(ours, starts).mean()):.3f}"
)
print(f"their mean reward: {float(rewards.mean()):.3f} ± {error:.3f}")
lowest, highest = (float(read(ours, starts).quantile(q)) for q in (0.05, 0.95))
print(f"the values of 90% of the noise lie between {lowest:.2f} and {highest:.2f}")
print(
    "largest difference from the animation's tables:"
    f" {float((ours - tables[0]).abs().max()):.4f}"
)

# %% [markdown]
# ## A step's worth
#
# The worth of decision $k$ is the change in value that its draw causes, the true advantage $A^*_k = V^*_{k+1} - V^*_k$. Two properties follow from the backward step, without any assumption:
#
# 1. $\mathbb E[A^*_k \mid z_k] = 0$, because $V^*_k$ is the expectation of $V^*_{k+1}$;
# 2. the sum telescopes, $R = V^*_0 + A^*_0 + \dots + A^*_{D-1}$.
#
# By the first property the terms of the second are uncorrelated. So their variances add up to that of $R$, and each decision has a share in it.
#
# ### Exercise 2 · shares in the variance
#
# *Difficulty: easy · kind: formula · importance: essential · time: 5 minutes*
#
# `values` is the table of exact values `[prompt, member, decision+1]`; its last column is $R$. Return the parts of the variance within prompts, `[1 + decision]`: first the mean square of the deviations of $V^*_0$ from its group's mean, then the mean square of each $A^*_k$.


# %% tags=["exercise"]
def variance_parts(values):
    """The variance of the first value and of every step's worth."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** `values.diff(dim=-1)` has all $A^*_k$. The group's mean of the first column is a mean over dimension 1.


# %% tags=["solution"]
def variance_parts(values):
    """The variance of the first value and of every step's worth."""
    first = values[..., :1] - values[..., :1].mean(1, keepdim=True)
    return torch.cat([first, values.diff(dim=-1)], -1).square().mean((0, 1))


# %%
lesson.check_parts(variance_parts)

# %% [markdown] tags=["explanation"]
# **Why.** $A^*_k$ already has mean 0, so its mean square is its variance. The value of the initial noise has no mean of 0, so we subtract the mean of its group. Uniform credit gives every decision $R$, that is, all parts at once. With nine equal parts its correlation with $A^*_k$ would be $1/3$.

# %%
many = beginning.rollout(
    Groups(18, 96), torch.Generator().manual_seed(2), NoProbe(), max_batch=8192
)
exact = exact_advantages(beginning, many, grid=GRID)[0].state_values
parts = variance_parts(exact)
total = (exact[..., -1] - exact[..., -1].mean(1, keepdim=True)).square().mean()
one = exact[0, exact[0, :, -1].argmax()]
print("V* along the best of a group:     " + " ".join(f"{value:.2f}" for value in one))
print("its steps' worth A*:              " + " ".join(f"{value:+.2f}" for value in one.diff()))
print(f"V*_0 + sum of A*: {float(one[0] + one.diff().sum()):.2f}; R: {float(one[-1]):.2f}")
print(
    "largest mean of A* of a decision: "
    + f"{float(exact.diff(dim=-1).mean((0, 1)).abs().max()):.3f}"
)
print(f"sum of the parts: {float(parts.sum()):.3f}; variance of R: {float(total):.3f}")
print(
    "share of V*_0 and of decisions 0 to 8: "
    + " ".join(f"{share:.0%}" for share in parts / parts.sum())
)

# %% [markdown]
# This trajectory owes its success to decisions 0 and 4; decision 2 was a step back. Over all groups, decisions 1 to 4 hold most of the variance. The last two hold hardly any, because the sample is nearly finished by then.
#
# ## Cheap values
#
# For images we cannot compute $V^*$. Two estimates $V_k$ cost no network evaluation:
#
# - **the one-step estimate**: the reward of $\hat x_0 = x_t - t\,v$, the clean estimate of the lesson on flow matching. The rollout has already computed the velocity (the probe `Tweedie`; each decision takes a decode and a reward call);
# - **a critic**: a small network that regresses the final reward on the state and the time (the probe `Critic`). After each iteration it is fitted to the rewards of this iteration, so its values for the next one come from earlier policies.
#
# How good is such a value? For credit only differences within a group matter. So we take the deviations from the group's mean, of the value and of the final reward. Their squared correlation $r^2$, decision by decision, is the fraction of the variance of the final reward that the value predicts.
#
# ### Exercise 3 · values of a trained policy
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 4 minutes*
#
# The next cells train for 12 iterations, until the mean reward is above 0.9. What happens to $r^2$ of the *exact* value of early states, such as those of decisions 0 to 3?
#
# - **a** It stays the same, since exact values have no error.
# - **b** It rises towards 1, since the outcome is nearly certain.
# - **c** It falls towards 0.

# %% tags=["exercise"]
early_values = "..."

# %% [markdown] tags=["hint"]
# **Hint.** If nearly every trajectory of a group ends near the target, how much do the values of its early states differ? Which steps cause the differences between rewards that remain?

# %% tags=["solution"]
early_values = "c"

# %%
lesson.check_early_values(early_values)

# %% [markdown] tags=["explanation"]
# **Why.** $r^2$ compares members of a group. Once the policy reaches the target from nearly every state that it visits, these early states have nearly the same value. The differences that remain between rewards come from the last draws, which early states cannot predict.

# %% [markdown]
# The next cell trains the 2-D world with credit from a critic (`CalibratedGain`, which a later section explains). After 0, 4, 8 and 12 iterations it draws the same 18 groups with the present policy, and computes the exact values, the one-step estimates and the critic's values of their states.

# %%
KINDS = ("exact", "one-step", "critic")
stages = {}
for stage in progress((0, 4, 8, 12), "stage"):
    while trainer.done < stage:
        trainer.iteration()
    present, found = setting_of(trainer), {}
    for kind, probe in (("one-step", Tweedie()), ("critic", trainer.method.credit.probe)):
        result = present.rollout(
            Groups(18, 12), torch.Generator().manual_seed(1), probe, max_batch=8192
        )
        rewarded = score_rollout(present.policy, present.reward, result, present.prompts)
        # the value table [prompt, member, decision+1]
        found[kind] = predicted(probe, rewarded)
    found["truth"] = exact_advantages(present, result, grid=GRID)[0]
    found["exact"] = found["truth"].state_values
    found["record"], found["paths"] = (
        present.experience(result),
        result.trajectories.nodes.flatten(2),
    )
    found["map"] = value_tables(present, PROMPT)
    stages[stage] = found
    print(
        f"after {stage:2d} iterations: mean reward {float(found['exact'][..., -1].mean()):.2f}"
    )

# %% [markdown] tags=["expected"]
# after  0 iterations: mean reward 0.18
# after  4 iterations: mean reward 0.35
# after  8 iterations: mean reward 0.88..0.95
# after 12 iterations: mean reward 0.94..0.98

# %% [markdown]
# Here is $r^2$ of the three kinds of values.


# %%
def deviations(values):
    """From the group's mean."""
    return values - values.mean(1, keepdim=True)


def quality(stage, kind):
    """r2 of the final reward on the values, [decision]."""
    return calibration(deviations(stages[stage][kind])).r2[0, 0, :-1]


for stage in stages:
    print(f"after {stage} iterations, r2 by decision 0 to 8")
    for kind in KINDS:
        print(f"  {kind:<9}" + " ".join(f"{value:.2f}" for value in quality(stage, kind)))

# %% [markdown] tags=["expected"]
# after 0 iterations, r2 by decision 0 to 8
#   exact    0.11 0.16 0.39 0.60 0.74 0.84 0.92 0.98 0.99
#   one-step 0.00 0.17 0.39 0.61 0.74 0.84 0.91 0.98 0.99
#   critic   0.00 0.00 0.00 0.00 0.00 0.00 0.00 0.00 0.00
# after 4 iterations, r2 by decision 0 to 8
#   exact    0.05 0.13 0.27 0.45 0.64 0.83 0.91 0.97 0.99
#   one-step 0.00 0.00 0.28 0.47 0.62 0.82 0.90 0.97 0.99
#   critic   0.03 0.07 0.17 0.30 0.38 0.51 0.54 0.55 0.53
# after 8 iterations, r2 by decision 0 to 8
#   exact    0.00..0.09 0.00..0.09 0.00..0.16 0.00..0.12 0.00..0.13 0.21..0.37 0.45..0.61 0.67..0.83 0.78..0.94
#   one-step 0.00..0.10 0.00..0.08 0.00..0.08 0.00..0.08 0.00..0.08 0.00..0.13 0.25..0.41 0.62..0.78 0.78..0.94
#   critic   0.00..0.08 0.00..0.08 0.00..0.08 0.00..0.09 0.00..0.12 0.11..0.27 0.26..0.42 0.34..0.50 0.27..0.43
# after 12 iterations, r2 by decision 0 to 8
#   exact    0.00..0.12 0.00..0.15 0.00..0.12 0.00..0.16 0.00..0.15 0.00..0.18 0.28..0.48 0.52..0.72 0.71..0.91
#   one-step 0.00..0.10 0.00..0.10 0.00..0.11 0.00..0.10 0.00..0.10 0.00..0.10 0.00..0.12 0.26..0.46 0.68..0.88
#   critic   0.00..0.10 0.00..0.10 0.00..0.12 0.00..0.10 0.00..0.10 0.00..0.10 0.00..0.10 0.00..0.11 0.00..0.15

# %% tags=["hide-input"]
SHADES = {"exact": INK, "one-step": DATA, "critic": ACCENT}


def compare_values():
    """Cheap values against exact ones at node 5, and r2 by decision."""
    figure, axes = panels(4, width=2.9, height=3.4)
    for cell, stage in zip(axes, (4, 8), strict=False):
        found = stages[stage]
        cell.plot([0, 1], [0, 1], color="#a9adb5", linewidth=1)
        for kind in ("one-step", "critic"):
            cell.scatter(
                found["exact"][..., 5].flatten(),
                found[kind][..., 5].flatten(),
                s=6,
                color=SHADES[kind],
                alpha=0.6,
            )
        cell.set(
            xlabel="exact value at node 5",
            ylabel="cheap value",
            title=f"after {stage} iterations",
            ylim=(-0.2, 1.3),
        )
        clean(cell)
    for cell, stage in zip(axes[2:], (4, 8), strict=True):
        for kind in KINDS:
            cell.plot(
                range(9),
                quality(stage, kind),
                "o-",
                color=SHADES[kind],
                markersize=3,
                linewidth=1.4,
                label=kind,
            )
        cell.set(
            xlabel="decision k",
            ylabel="r² of the reward on $V_k$",
            ylim=(-0.03, 1.03),
            title=f"after {stage} iterations",
        )
        clean(cell)
    figure.legend(
        *axes[2].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.suptitle("Values of early states stop predicting the reward", fontsize=11)
    plt.show()


compare_values()

# %% [markdown]
# Before training, the one-step estimate is as good as the exact value from decision 1 on, and the critic predicts nothing. After four iterations the critic explains half or more of what exact values explain. Later both get worse, for two reasons.
# First, training moves $v$ away from the mean velocity, so the one-step estimate is no longer the mean of the finished samples (the lesson Test your own rule). The critic has learned from earlier policies. Second, even the *exact* value of an early state now predicts little, because the last steps decide what remains of the variance.
#
# ## Why raw gains fail
#
# The obvious credit is the gain of the cheap value, $g_k = V_{k+1} - V_k = A^*_k + e_k$, with an error $e_k$. Uniform credit is $R$, that is, $A^*_k$ plus the luck of all other steps. Both are the true advantage plus something else. Which of them is closer to it?
#
# ### Exercise 4 · break-even
#
# *Difficulty: harder · kind: formula · importance: useful · time: 8 minutes*
#
# $A^*_k$ has the standard deviation `worth`, $R$ has `reward`, and the error $e_k$ is uncorrelated with $A^*_k$. Return the standard deviation of $e_k$ at which gain and reward have the same correlation with $A^*_k$. Before you compute it, guess whether it exceeds `worth`.


# %% tags=["exercise"]
def break_even(worth, reward):
    """The error of a gain at which it is no better than the reward."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** If $X$ is $A^*$ plus something uncorrelated, the correlation of $X$ and $A^*$ is std$(A^*)\,/\,$std$(X)$. When are the two standard deviations of $X$ equal?


# %% tags=["solution"]
def break_even(worth, reward):
    """The error of a gain at which it is no better than the reward."""
    return (reward**2 - worth**2) ** 0.5


# %%
lesson.check_break_even(break_even)

# %% [markdown] tags=["explanation"]
# **Why.** Both correlations have the same numerator, so the total variances must be equal: $\operatorname{var}(A^*_k) + \operatorname{var}(e_k) = \operatorname{var}(R)$. A raw gain is better than uniform credit as long as its error is smaller than the luck of all other steps. With nine equal steps the error may be $\sqrt 8 = 2.8$ times as large as the gain itself. However, the luck shrinks as training succeeds, and the error does not.


# %%
def spread(table):
    """The standard deviation within groups, [column]."""
    return deviations(table).square().mean((0, 1)).sqrt()


def sizes(stage):
    """Standard deviations by decision: A*, the error of the one-step estimate's gain, and
    break-even.
    """
    found = stages[stage]
    worth, reward = spread(found["truth"].values), spread(found["exact"])[-1]
    errors = spread((found["one-step"] - found["exact"]).diff(dim=-1))
    return worth, errors, break_even(worth, reward)


for stage in (0, 8):
    print(f"after {stage} iterations, standard deviations by decision 0 to 8")
    for name, numbers in zip(
        ("true gain A*", "error of gain", "break-even"), sizes(stage), strict=True
    ):
        print(f"  {name:<14}" + " ".join(f"{number:.2f}" for number in numbers))

# %% [markdown] tags=["expected"]
# after 0 iterations, standard deviations by decision 0 to 8
#   true gain A*  0.08 0.14 0.12 0.11 0.10 0.08 0.07 0.04 0.03
#   error of gain 0.05 0.05 0.04 0.03 0.03 0.02 0.02 0.01 0.00
#   break-even    0.28 0.26 0.27 0.27 0.28 0.28 0.29 0.29 0.29
# after 8 iterations, standard deviations by decision 0 to 8
#   true gain A*  0.00..0.02 0.01..0.03 0.01..0.03 0.01..0.03 0.02..0.04 0.02..0.04 0.03..0.05 0.02..0.04 0.02..0.04
#   error of gain 0.22..0.28 0.28..0.34 0.21..0.27 0.13..0.19 0.07..0.13 0.04..0.10 0.00..0.06 0.00..0.05 0.00..0.04
#   break-even    0.05..0.09 0.05..0.09 0.05..0.09 0.05..0.09 0.05..0.09 0.05..0.09 0.04..0.08 0.05..0.09 0.05..0.09


# %%
def visited(stage):
    """The states of the first group at node 3 [member, 2], and their exact values [member]."""
    states = stages[stage]["paths"][:12, 3]
    return states, read(stages[stage]["map"][3], states)


# the part of the plane that the figure shows
square = torch.cartesian_prod(*2 * [torch.linspace(-3.4, 3.4, 69)])
for stage in (0, 8):
    values, everywhere = visited(stage)[1], read(stages[stage]["map"][3], square)
    print(
        f"after {stage} iterations, V* at node 3: states of the first group {values.min():.2f}"
        f" to {values.max():.2f}, square of the figure {everywhere.min():.2f} to"
        f" {everywhere.max():.2f}"
    )

# %% [markdown] tags=["expected"]
# after 0 iterations, V* at node 3: states of the first group 0.01 to 0.63, square of the figure 0.00 to 0.80
# after 8 iterations, V* at node 3: states of the first group 0.75..0.93 to 0.87..0.99, square of the figure 0.00..0.35 to 0.87..0.99


# %% tags=["hide-input"]
def compare_sizes():
    """The three standard deviations before training and after 8 iterations, and exact values
    over the plane.
    """
    figure, axes = panels(4, width=2.9, height=3.4)
    for cell, stage in zip(axes, (0, 8), strict=False):
        for numbers, shade, label in zip(
            sizes(stage),
            (INK, DATA, OTHERS[3]),
            ("true gain", "error", "break-even"),
            strict=True,
        ):
            cell.plot(
                range(9), numbers, "o-", color=shade, markersize=3, linewidth=1.4, label=label
            )
        cell.set(xlabel="decision k", ylabel="std within groups (reward)", ylim=(-0.01, 0.42))
        clean(cell)
    axes[0].set_title("before training: gains win")
    axes[1].set_title("after 8: early gains lose")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False
    )
    for cell, stage in zip(axes[2:], (0, 8), strict=True):
        shown = show_values(
            cell, stages[stage]["map"][3], PROMPT, f"V* at node 3, after {stage}"
        )
        cell.scatter(
            *visited(stage)[0].T, s=10, color="white", edgecolor=INK, linewidth=0.5, zorder=4
        )
    figure.colorbar(shown, ax=axes[3], shrink=0.8)
    plt.show()


compare_sizes()

# %% [markdown]
# Before training, the error of every gain is far below break-even. After eight iterations the states that trajectories still visit at node 3 have nearly the same high value (right: $V^*$ over the plane, with the states of a group), so no step can gain much. Far from the target the value is still low, but the policy no longer goes there. The errors of the early gains are then larger than both $A^*$ and the luck of the other steps. Normalisation makes this worse: Z divides by the standard deviation of the group's gains. Once the group is nearly solved, this is the size of the errors, so errors alone get credit of unit size.
#
# The next cell applies the rules of earlier lessons to the four records. It prints the correlation of the credit with $A^*$ over all decisions; "exact" is the same rule with the exact values.

# %%
RULES = {
    "uniform": (Uniform(), "exact"),  # it reads the rewards only
    "gains, one-step": (StepwiseGain(probe=Tweedie()), "one-step"),
    "gains, critic": (StepwiseGain(probe=Tweedie()), "critic"),
    "gains, one-step, Z per decision": (
        StepwiseGain(normalise="step", probe=Tweedie()),
        "one-step",
    ),
    "gains, exact": (StepwiseGain(probe=Tweedie()), "exact"),
}


def show_correlations(rules):
    """The correlation of credit with A*, by rule and stage."""
    print(f"{'iterations':<32}" + "".join(f"{stage:6d}" for stage in stages))
    for name, (rule, kind) in rules.items():
        records = [replace(found["record"], values=found[kind]) for found in stages.values()]
        reports = [
            compare_credit(assigned(rule, record).advantages, found["truth"])
            for record, found in zip(records, stages.values(), strict=True)
        ]
        print(
            f"{name:<32}"
            + "".join(f"{report.overall.correlation.value:6.2f}" for report in reports)
        )


show_correlations(RULES)

# %% [markdown] tags=["expected"]
# iterations                           0     4     8    12
# uniform                           0.31  0.31  0.23..0.29 0.25..0.31
# gains, one-step                   0.92  0.76  0.05..0.11 -0.04..0.02
# gains, critic                     0.01  0.38  0.17..0.23 0.05..0.11
# gains, one-step, Z per decision   0.78  0.69  0.31..0.37 0.18..0.24
# gains, exact                      0.98  0.99  0.91..0.97 0.87..0.93

# %% [markdown]
# Gains of one-step estimates are nearly perfect before training, and noise after it. Uniform credit stays near 0.3; with nine equal steps it would be $1/3$ (exercise 2). With Z per decision the early errors do not outweigh the late gains, but the rule still ends below uniform credit. The exact values show that the rule itself is not the cause: with them its correlation stays above 0.85.
#
# ## Calibration
#
# The r² above need no exact values, so a run can measure them with its own rewards, and notice when a value stops predicting them. `CalibratedGain` uses two numbers per decision, from a regression of the final reward on the value within groups. Let $\tilde V_k$ and $\tilde R$ be the deviations of value and reward from the means of their group. The *slope* $s_k$ shrinks the value to the reward that it predicts, $\hat R_k = s_k \tilde V_k$, and $r^2_k$ is the fraction of the squares of $\tilde R$ that this prediction explains.
#
# ### Exercise 5 · slope and r²
#
# *Difficulty: medium · kind: formula · importance: essential · time: 10 minutes*
#
# `value` and `reward` are `[prompt, member]`, the values of one decision and the final rewards. Derive two numbers from sums over all prompts and members, and return them:
#
# - the slope $s$ that minimises $\sum (\tilde R - s\tilde V)^2$;
# - the share $r^2$ by which this $s$ makes the sum smaller than it is for $s = 0$.
#
# Then limit the slope to $[0, 1]$ (not in $r^2$). If the minimum is at a negative slope, both numbers are 0.


# %% tags=["exercise"]
def calibrate(value, reward):
    """Slope and r2 of the reward on the value, within groups."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** `deviations` above subtracts the group's mean. The sum is a parabola in $s$ with the coefficients $\sum\tilde R^2$, $\sum\tilde V\tilde R$ and $\sum\tilde V^2$. Set a negative $\sum \tilde V \tilde R$ to 0 first; then both numbers are 0.


# %% tags=["solution"]
def calibrate(value, reward):
    """Slope and r2 of the reward on the value, within groups."""
    v, r = value - value.mean(1, keepdim=True), reward - reward.mean(1, keepdim=True)
    together, values, rewards = (v * r).sum().clamp(min=0), v.square().sum(), r.square().sum()
    return (together / values).clamp(max=1), together.square() / (values * rewards)


# %%
lesson.check_calibrate(calibrate)

# %% [markdown] tags=["explanation"]
# **Why.** The sum is $\sum\tilde R^2 - 2s\sum\tilde V\tilde R + s^2\sum\tilde V^2$, so
#
# $$s = \frac{\sum \tilde V \tilde R}{\sum \tilde V^2},\quad r^2 = \frac{(\sum \tilde V \tilde R)^2}{\sum \tilde V^2 \sum \tilde R^2}.$$
#
# $s\,\tilde V$ is the best prediction of $\tilde R$ that is proportional to $\tilde V$. One slope for all groups has many samples; a slope per group would have twelve. The slope is at most 1 because we want to shrink a cheap value, and not to stretch it by chance. In `flowrl`: `credit.calibration`; every training run logs `value_slope` and `value_r2` of a rule with values.

# %%
for stage in (0, 8):
    pairs = [
        calibrate(stages[stage]["one-step"][..., k], stages[stage]["one-step"][..., -1])
        for k in range(9)
    ]
    print(f"one-step estimate after {stage} iterations, decisions 0 to 8")
    print("  slope " + " ".join(f"{float(slope):.2f}" for slope, _ in pairs))
    print("  r2    " + " ".join(f"{float(r2):.2f}" for _, r2 in pairs))

# %% [markdown] tags=["expected"]
# one-step estimate after 0 iterations, decisions 0 to 8
#   slope 0.00 1.00 1.00 0.99 0.97 0.98 0.94 0.97 1.00
#   r2    0.00 0.17 0.39 0.61 0.74 0.84 0.91 0.98 0.99
# one-step estimate after 8 iterations, decisions 0 to 8
#   slope 0.00..0.16 0.00..0.10 0.00..0.12 0.00..0.12 0.00..0.11 0.12..0.32 0.64..0.84 0.77..0.97 0.80..1.00
#   r2    0.00..0.10 0.00..0.08 0.00..0.08 0.00..0.08 0.00..0.08 0.00..0.13 0.25..0.41 0.62..0.78 0.78..0.94

# %% [markdown]
# In a run these two numbers also show what is wrong with a value.
#
# ### Exercise 6 · read a log of values
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 6 minutes*
#
# Three runs log the slope (before it is limited) and r² of their values by decision, here for decisions 1, 4 and 8. Which cause explains which log? Answer with the letters.
#
# | | mean reward | slope at 1, 4, 8 | r² at 1, 4, 8 |
# |---|---|---|---|
# | 1 | 0.21 | 0.20, 0.19, 0.20 | 0.17, 0.74, 0.99 |
# | 2 | 0.96 | 0.01, 0.02, 0.90 | 0.00, 0.00, 0.86 |
# | 3 | 0.20 | 0.00, 0.00, 0.00 | 0.00, 0.00, 0.00 |
#
# | | cause |
# |---|---|
# | A | a critic in its first iteration |
# | B | values in other units: the probe returns a reward from 0 to 5, the run's rewards are from 0 to 1 |
# | C | one-step estimates of a policy that has nearly solved its task |

# %% tags=["exercise"]
causes = {1: ..., 2: ..., 3: ...}

# %% [markdown] tags=["hint"]
# **Hint.** r² does not change if all values are multiplied by a number. What does the slope do? Then compare the mean rewards.

# %% tags=["solution"]
causes = {1: "B", 2: "C", 3: "A"}

# %%
lesson.check_causes(causes)

# %% [markdown] tags=["explanation"]
# **Why.** In log 1 the values predict the reward well, with a slope of 1/5 at every decision: they are five times too wide. Calibration corrects this error. In log 2 only the last states predict anything, and the mean reward says why. In log 3 the values have no relation to the reward, since the critic has not learned from any reward yet.

# %% [markdown]
# The credit of a decision can now use two sources. The gain of the predictions, $\hat R_{k+1} - \hat R_k$, has no later luck, but it has the error of $\hat R_{k+1}$. The final reward beyond the prediction, $\tilde R - \hat R_k$, has no such error, but it has all later luck. The calibrated credit $A_k$ is a weighted mean of the two. The weight of the first is the r² of the value *after* the decision, and the second has the rest.
#
# ### Exercise 7 · calibrated credit
#
# *Difficulty: medium · kind: formula · importance: essential · time: 7 minutes*
#
# `values` is `[prompt, member, decision+1]`, with the final reward in the last column; `slope` and `r2` are `[decision+1]`, both 1 at the end. Return $A_k$ before Z, `[prompt, member, decision]`. Which rule do you expect if all other slopes and r² are 0?


# %% tags=["exercise"]
def calibrated_credit(values, slope, r2):
    """The calibrated gain before Z."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Compute all $\hat R_j$ at once, `[prompt, member, decision+1]`; $\tilde R$ is the last column. $\hat R_{k+1}$ and $\hat R_k$ are the table without its first and without its last column.


# %% tags=["solution"]
def calibrated_credit(values, slope, r2):
    """The calibrated gain before Z."""
    predictions = slope * (values - values.mean(1, keepdim=True))
    reward, weight = predictions[..., -1:], r2[1:]
    return weight * predictions[..., 1:] + (1 - weight) * reward - predictions[..., :-1]


# %%
lesson.check_credit(calibrated_credit)

# %% [markdown] tags=["explanation"]
# **Why.** Both sources contain $-\hat R_k$, so
#
# $$A_k = r^2_{k+1}\,\hat R_{k+1} + (1 - r^2_{k+1})\,\tilde R - \hat R_k.$$
#
# With slopes and r² of 0, $A_k = \tilde R$: uniform credit. (At the last decision $\hat R_D = \tilde R$ as well.) With exact values and slopes of 1, $A_k$ is $A^*_k$ plus $1 - r^2_{k+1}$ times what comes later, which has mean 0. Between the two, the weight of a value is what it has predicted of the reward. In `flowrl`: `credit.calibrated_gains`, and `credit.CalibratedGain` with Z.

# %%
table = stages[4]["one-step"]
fit = calibration(deviations(table))
ours = calibrated_credit(table, fit.slope[0, 0], fit.r2[0, 0])
print(
    "largest difference from the library:"
    f" {float((ours - calibrated_gains(table)).abs().max()):.0e}"
)
nothing = torch.eye(10)[-1]  # slope and r2 are 0 except at the end
same = torch.allclose(
    calibrated_credit(table, nothing, nothing), deviations(table[..., -1:]).expand(-1, -1, 9)
)
print("values that predict nothing give uniform credit:", same)
show_correlations(
    {
        "uniform": RULES["uniform"],
        "gains, one-step": RULES["gains, one-step"],
        "calibrated, one-step": (CalibratedGain(), "one-step"),
        "calibrated, critic": (CalibratedGain(), "critic"),
        "calibrated, exact values": (CalibratedGain(), "exact"),
        "even weight, one-step": (EvenGain(), "one-step"),
    }
)

# %% [markdown] tags=["expected"]
# largest difference from the library: 0..1e-6
# values that predict nothing give uniform credit: True
# iterations                           0     4     8    12
# uniform                           0.31  0.31  0.23..0.29 0.25..0.31
# gains, one-step                   0.92  0.76  0.05..0.11 -0.04..0.02
# calibrated, one-step              0.65  0.56  0.29..0.35 0.27..0.33
# calibrated, critic                0.31  0.39  0.21..0.27 0.25..0.31
# calibrated, exact values          0.68  0.62  0.38..0.44 0.34..0.40
# even weight, one-step             0.89  0.79  0.40..0.46 0.36..0.42

# %% [markdown]
# Calibrated credit does not fail with its values: its correlation is above that of uniform credit while the one-step estimate predicts the reward, and returns to it afterwards. The first column shows the price. Before training the raw gains are nearly right. However, r² of an early value is small, so calibration gives much of the credit to the luck of later steps. This happens even with exact values, because r² measures how much of the reward is *decided*, not how much of the value is *error*.
#
# A least-squares weight would tell the two apart. It needs $\operatorname{var}(A^*_k)$, the part of the unexplained reward that a decision holds, which we cannot get from rewards and cheap values alone. The last line assumes an equal part for all decisions (`EvenGain`, a rule for experiments). Its correlation is higher than that of r² at every stage.
#
# ## Headroom
#
# How much can better credit gain? *Headroom* is the lead over uniform credit of an oracle, which credits gains of the exact value. (Its Z is per decision. With joint Z the last drawn step would get most of the credit of a solved group.) The next cell trains with five rules, three seeds, 12 iterations and two clip ranges.
#
# ### Exercise 8 · correlation and training
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 4 minutes*
#
# The even weight correlates better with $A^*$ than the weight r², at every stage. With which of the two is the mean held-out reward over training higher?
#
# - **a** the even weight, with both clip ranges
# - **b** the even weight, but only with the wide clip range
# - **c** the even weight with neither clip range

# %% tags=["exercise"]
better_trained = "..."

# %% [markdown] tags=["hint"]
# **Hint.** In the lesson Test your own rule, `EstimateToGo` trained better than a rule with a much higher correlation. Which of the two weights uses more of a value that predicts little?

# %% tags=["solution"]
better_trained = "c"

# %%
lesson.check_better_trained(better_trained)

# %% [markdown] tags=["explanation"]
# **Why.** The correlation treats noise and bias alike. The luck in $\tilde R$ is noise, which averages out over iterations. The error of a value is a bias that accumulates, and the even weight takes most of the gain even where the value predicts little. The next cell measures the result.

# %%
COMPARED = {
    "uniform": (Uniform(), COLOURS["flow-grpo"]),
    "gains, one-step": (StepwiseGain(probe=Tweedie()), COLOURS["stepwise-flow-grpo"]),
    "calibrated, one-step": (CalibratedGain(), COLOURS["calibrated"]),
    "even weight, one-step": (EvenGain(), COLOURS["even-weight"]),
    "oracle": (StepwiseGain(normalise="step", probe=Exact(points=29, reach=4.0)), INK),
}
SETTINGS = {**WORLD, "iterations": 12, "eval_every": 2}
runs = {
    (name, clip): [
        learn(rule=rule, seed=seed, **{**SETTINGS, "clip_range": clip}) for seed in range(3)
    ]
    for clip in (0.06, 0.18)
    for name, (rule, _) in COMPARED.items()
}
for (name, clip), curves in runs.items():
    over = " ".join(f"{float(curve.reward.mean()):.2f}" for curve in curves)
    last = " ".join(f"{float(curve.reward[-1]):.2f}" for curve in curves)
    print(
        f"clip {clip:.2f}  {name:<22} held-out reward, mean over training: {over}; last:"
        f" {last}"
    )
for name in COMPARED:
    print(
        f"{name:<22} evaluations in forward passes:"
        f" {int(runs[name, 0.06][0].work[-1] / 1000):,} thousand"
    )

# %% [markdown] tags=["expected"]
# clip 0.06  uniform                held-out reward, mean over training: 0.56..0.62 0.50..0.56 0.57..0.63; last: 0.94..1.00 0.93..0.99 0.95..1.00
# clip 0.06  gains, one-step        held-out reward, mean over training: 0.61..0.67 0.65..0.71 0.70..0.76; last: 0.59..0.79 0.65..0.85 0.72..0.92
# clip 0.06  calibrated, one-step   held-out reward, mean over training: 0.70..0.76 0.72..0.78 0.73..0.79; last: 0.96..1.00 0.96..1.00 0.93..0.99
# clip 0.06  even weight, one-step  held-out reward, mean over training: 0.68..0.74 0.71..0.77 0.72..0.78; last: 0.82..1.00 0.82..1.00 0.80..1.00
# clip 0.06  oracle                 held-out reward, mean over training: 0.69..0.75 0.74..0.80 0.73..0.79; last: 0.95..1.00 0.96..1.00 0.96..1.00
# clip 0.18  uniform                held-out reward, mean over training: 0.62..0.68 0.67..0.73 0.69..0.75; last: 0.96..1.00 0.95..1.00 0.94..1.00
# clip 0.18  gains, one-step        held-out reward, mean over training: 0.38..0.44 0.40..0.46 0.38..0.44; last: 0.16..0.36 0.10..0.30 0.01..0.21
# clip 0.18  calibrated, one-step   held-out reward, mean over training: 0.72..0.78 0.74..0.80 0.76..0.82; last: 0.95..1.00 0.96..1.00 0.94..1.00
# clip 0.18  even weight, one-step  held-out reward, mean over training: 0.67..0.73 0.67..0.73 0.67..0.73; last: 0.82..1.00 0.74..0.94 0.86..1.00
# clip 0.18  oracle                 held-out reward, mean over training: 0.72..0.78 0.75..0.81 0.75..0.81; last: 0.94..1.00 0.96..1.00 0.95..1.00
# uniform                evaluations in forward passes: 63 thousand
# gains, one-step        evaluations in forward passes: 63 thousand
# calibrated, one-step   evaluations in forward passes: 63 thousand
# even weight, one-step  evaluations in forward passes: 63 thousand
# oracle                 evaluations in forward passes: 1,153 thousand


# %% tags=["hide-input"]
def compare_runs():
    """Held-out reward against evaluations."""
    figure, axes = panels(2, width=4.6, height=3.6, sharey=True)
    for cell, clip in zip(axes, (0.06, 0.18), strict=True):
        for name, (_, shade) in COMPARED.items():
            for number, curve in enumerate(runs[name, clip]):
                label = name if number == 0 else None
                cell.plot(
                    curve.work[1:] / 1000,
                    curve.reward[1:],
                    "o-",
                    color=shade,
                    markersize=3,
                    linewidth=1.1,
                    label=label,
                )
        cell.set(
            xscale="log",
            xlabel="evaluations in thousands (update: three each)",
            ylim=(0.05, 1.02),
            title=f"clip {clip:.2f}",
        )
        cell.set_xticks(
            [20, 50, 100, 200, 500, 1000], ["20", "50", "100", "200", "500", "1000"]
        )
        cell.set_xlim(9, 1500)
        cell.minorticks_off()
        clean(cell)
    axes[0].set_ylabel("held-out reward")
    figure.legend(
        *axes[1].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(
        "Raw gains rise and fall; calibrated gains stay high; the oracle needs 18 times the"
        " evaluations",
        fontsize=11,
    )
    plt.show()


compare_runs()

# %% [markdown]
# - **Raw gains** start fast and fall, far with the wide clip range. Their early gains reward errors of the value.
# - **Calibrated gains** rise as fast and stay high. With either clip range their mean reward over training is above that of uniform credit, and near that of the oracle. They take as many network evaluations as uniform credit (not counting a decode and a reward call per decision). The oracle takes 18 times as many, for its grid.
# - **The even weight** trains no better than r², although its credit correlates better with $A^*$ at every stage.
# - **The clip range** matters as much as the rule: it changes the mean of uniform credit by about 0.1, as much as some of the leads here.
#
# These runs do not decide between the rules: three seeds, one world, one learning rate, nothing tuned. Each rule has its own best clip range, so a comparison has to tune all of them. `docs/verdict.md` does so for exact values and uniform credit in several tasks. `docs/guides/cheap-values.md` has the rule's options, the algebra of its weight, a tuned comparison with the even weight, and commands for comparisons of your own.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Why is $V^*_j(z)$ not the value of the mean place, $V^*_{j+1}(\mu_j(z))$? **a** $V^*_{j+1}$ is curved, so the mean of the values differs from the value of the mean. **b** The mean place is outside the data. **c** The quadrature has an error.
# 2. $A^*_3$ of a trajectory is $+0.3$. What does this mean? **a** Its reward is 0.3 above the mean of the group. **b** The draw of decision 3 raised the expected reward by 0.3. **c** All draws up to decision 3 together raised it by 0.3.
# 3. A gain has an error as large as $A^*_k$ itself. Compared with uniform credit of nine equal steps, it is **a** worse, since half of it is error, **b** equally good, **c** better, since uniform credit contains the luck of eight other steps.
# 4. Two gains of a solved group are errors of size 0.01. Z over the group makes them **a** about 0.01 in size, **b** about 1 in size, **c** 0.
# 5. Even with exact values, calibrated credit correlates less with $A^*$ than gains do before training. Why? **a** r² of an early value is small, so much of the credit is later luck. **b** The slope stretches the values. **c** Exact values have errors too.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are in the explanations of exercises 1 and 2, in that of the break-even, after the figure of standard deviations, and after the last table of correlations, in this order.

# %% tags=["solution"]
quiz = {1: "a", 2: "b", 3: "c", 4: "b", 5: "a"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: the expectation is taken over values, not over places. 2: it is the change of the expectation by one draw. 3: break-even is at 2.8 times the gain. 4: Z divides by the standard deviation, whatever its cause. 5: r² measures what is decided, not the error of the value.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $V^*_j(z)$ | expected reward from a state on; dynamic programming in two dimensions | the probe `flowrl.bench.exact.Exact`, `exact_advantages` |
# | $A^*_k = V^*_{k+1} - V^*_k$ | worth of a step; mean 0, variances add up to that of $R$ | `TrueAdvantages.values` |
# | reward of $\hat x_0$; critic | values without network evaluations | the probes `Tweedie`, `Critic` |
# | $V_{k+1} - V_k$ | raw gain; worse than $R$ if its error exceeds the other steps' luck | `credit.StepwiseGain` |
# | $s_k$, $r^2_k$ | regression of the reward on the value, within groups | `credit.calibration`; the metrics `value_slope`, `value_r2` |
# | $r^2_{k+1}\hat R_{k+1} + (1 - r^2_{k+1})\tilde R - \hat R_k$ | calibrated gain; uniform credit if values predict nothing | `credit.CalibratedGain`, the method `value-grpo` |
# | oracle − uniform | headroom: what credit can gain | `flowrl bench verdict` |
#
# On the command line: `flowrl compare --world mixture --methods flow-grpo value-grpo`. `docs/guides/cheap-values.md` shows how to replace the critic by a value of your own.
#
# ## Symbols
#
# {symbols: $z_j$; decision $k$; $D$; $\mu$, std; $V_k$; $V^*_k$; $A^*_k$; $R$; $A$; $Z$}
#
# ## Further reading
#
# - Schulman et al. 2015, *High-dimensional continuous control using generalised advantage estimation* (arXiv 1506.02438): gains of an imperfect value, mixed with the reward-to-go by $\lambda$.
# - Gu et al. 2016, *Q-Prop* (arXiv 1611.02247): an imperfect critic, used as far as its measured covariance with the return allows.
# - Dai et al. 2025, *VARD* (arXiv 2505.15791): a learned value of noisy states for fine-tuning diffusion models.
# - *DiNa-LRM* (2026, arXiv 2602.11146): a reward model that evaluates noisy latents without decoding them.
# - *π_RL* (2025, arXiv 2510.25889): a critic on the hidden states of a flow-matching policy, for robots.
#
# **Back to** [0 · Tour](00_tour.ipynb).

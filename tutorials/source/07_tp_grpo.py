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
# # 7 · TP-GRPO
#
# **After this lesson you can** compute the reward of any state by completing it with the ODE, find turning points by hand, in code and with the paper's labels, balance them, and test a criterion against a null model: how often would pure noise
# satisfy it?
#
# **Time** 105 minutes, of which the computer needs about one. **You need** the lesson on Stepwise-Flow-GRPO (gains, notation).
#
# TP-GRPO (Tong et al. 2026, arXiv 2602.06422) addresses the same problem as Stepwise-Flow-GRPO, that all decisions get one reward, and adds an observation. Some decisions *turn* a trajectory: the decision before moved the reward against the total change, and this one
# and the rest of the trajectory move it with the total change. TP-GRPO gives such a decision more credit than its own gain.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import torch

from flowrl import preset, world
from flowrl.credit import TurningPoint, Uniform, gains, reward_to_go
from flowrl.probes import Completion
from flowrl.samplers import FlowSDE, Windowed
from flowrl.worlds import PolicyOptions
from flowrl.bench.explain import explain
from flowrl.bench.rules import TurningPointVariant
from flowrl_course import lesson_07 as lesson
from flowrl_course import recorded
from flowrl_course.batches import (
    STEPS,
    credit_gradients,
    ode_images,
    pairwise_cosines,
    sample_groups,
)
from flowrl_course.figures import (
    ACCENT,
    COLOURS,
    DATA,
    INK,
    NOISE,
    OTHERS,
    animation,
    clean,
    panels,
    pixels,
)
from flowrl_course.recorded import cosine, measured
from flowrl_course.runs import train

shapes = world("shapes")
base = shapes.policy(PolicyOptions())
prompts = shapes.prompts("compositional", "train")[:16]
judge = shapes.reward("soft")
# steps 0 to 8 are decisions 0 to 8, the last step follows the ODE
sampler = Windowed(FlowSDE(0.7), range(9))
batch = sample_groups(base, judge, prompts, members=12, sampler=sampler, probe=Completion())
# [prompt, member, decision+1]: 16 prompts, 12 members, 10 columns
values, decisions = batch.values, batch.decisions
# the nodes of the table's columns: the states before the decisions, and the image
COLUMNS = [*range(9), 10]


def clearest(values):
    """The trajectory with the clearest turn upwards: low before, high after, (prompt, member,
    decision).
    """
    fall, rise = -gains(values)[..., :-1], reward_to_go(values)[..., 1:]
    score = torch.minimum(fall, torch.minimum(rise, gains(values)[..., 1:]))
    rises = (values[..., -1:] > values[..., :1]) & (values[..., -1:] > values[..., 2:])
    score = torch.where(rises, score, -1.0)
    index = int(score.argmax())
    count, members = score.shape[-1], values.shape[1]
    return index // count // members, index // count % members, index % count + 1


group, member, turn = clearest(values)


def completions(index):
    """The completion before every decision of one trajectory, and its finished state, [column,
    *latent].
    """
    latents = [batch.rollout.estimates[node][index] for node in range(9)]
    return torch.stack([*latents, batch.rollout.trajectories.images_latent[index]])


def opening():
    """One trajectory: its completions, their rewards, its turning point."""
    row = values[group, member]
    figure = plt.figure(figsize=(9.5, 4.0), layout="constrained")
    grid = figure.add_gridspec(2, 10, height_ratios=[1, 2.4])
    for column, image in enumerate(base.decode(completions(group * 12 + member))):
        cell = figure.add_subplot(grid[0, column])
        cell.imshow(pixels(image), interpolation="nearest")
        cell.set(xticks=[], yticks=[])
        cell.set_title(f"{row[column]:.2f}", fontsize=9)
    axes = figure.add_subplot(grid[1, :])
    axes.plot(COLUMNS, row, "o-", color=COLOURS["tp-grpo"])
    axes.scatter(
        [turn],
        [float(row[turn])],
        s=220,
        facecolors="none",
        edgecolors=ACCENT,
        linewidths=2.2,
        zorder=5,
    )
    axes.annotate(
        f"decision {turn} turns it",
        (turn, float(row[turn])),
        xytext=(14, -4),
        textcoords="offset points",
        color=ACCENT,
    )
    axes.set(
        xlabel="decision k (0: from noise; 10: the image)",
        ylabel="reward of the completion",
        xlim=(-0.5, 10.5),
        ylim=(0, 1.1),
        xticks=COLUMNS,
    )
    axes.set_title(
        f'"{prompts[group].text}": the ODE completion before every decision, and its reward',
        fontsize=10,
    )
    clean(axes)
    plt.show()


opening()

# %% [markdown]
# ## Completing a state
#
# TP-GRPO's $V_k$ is the reward of the image that the *ODE* reaches from the state before decision $k$ with the remaining steps of the sampler's own grid. In other words, it is the reward if no more noise were added. $R$ is the reward of the finished image. The paper writes $R(x_t^{\mathrm{ODE}(t)})$ for it.
#
# ### Exercise 1 · complete
#
# *Difficulty: easy · kind: code · importance: essential · time: 5 minutes*
#
# `x` is the state at node `node` of the grid `times` (tensor, $T+1$ entries), `velocity(x, t)` the network at a time $t$ (a number). The times fall from 1 (noise) to 0 (image), unevenly spaced. Return the state at the last node.


# %% tags=["exercise"]
def complete(velocity, x, node, times):
    """The ODE's end point from a state at node `node`."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Loop over the steps `node` to $T - 1$. Each is an Euler step of length `times[i] - times[i + 1]` with the velocity at `times[i]`.


# %% tags=["solution"]
def complete(velocity, x, node, times):
    """The ODE's end point from a state at node `node`."""
    for i in range(node, len(times) - 1):
        x = x - (times[i] - times[i + 1]) * velocity(x, times[i])
    return x


# %%
lesson.check_complete(complete)

# %% [markdown] tags=["explanation"]
# **Why.** A completion takes the remaining steps only, and starts from the state itself. The lesson on Stepwise-Flow-GRPO used $T'$ substeps on an even grid from every node; a completion from node $j$ uses the sampler's own grid and takes $T - j$ of its $T$ steps.

# %%
everyone, paths, node = batch.condition.repeat(12), batch.rollout.trajectories, 4


def network(x, t):
    """The policy's velocity for all trajectories of the batch at time t; the input of an image
    transformer is 1000 t, per sample.
    """
    return base.velocity(x, torch.full((len(x),), 1000.0 * float(t)), everyone)


with torch.no_grad():
    ours = complete(network, paths.nodes[:, node], node, paths.schedule.times)
print(
    "largest difference from the library:"
    f" {float((ours - batch.rollout.estimates[node]).abs().max()):.0e} (latents are of size 1)"
)
print(
    f"{batch.usage.nfe / 192:g} network evaluations per trajectory in {batch.usage.calls}"
    f" sequential calls, {batch.usage.reward_calls / 192:g} images scored"
)

# %% [markdown] tags=["expected"]
# largest difference from the library: 0..1e-4 (latents are of size 1)
# 55 network evaluations per trajectory in 10 sequential calls, 10 images scored

# %% [markdown]
# Ten steps of the rollout and the completions before nine decisions need $10 + (9 + \dots + 1) = 55$ evaluations, since the first velocity of every completion is the rollout's own (the released code needs 64). They need only ten *sequential* calls, because at each step one batched call evaluates the trajectories and all unfinished completions.
#
# The animation shows the states of the first figure's trajectory (left) and their completions (middle). The completion changes at decisions that determine something about the image, and is constant at the others.


# %% tags=["hide-input"]
def moving():
    """A state, its completion, and the completion's reward, decision by decision."""
    index, row = group * 12 + member, values[group, member]
    states = base.decode(paths.nodes[index, COLUMNS])
    ends = base.decode(completions(index))
    figure, axes = panels(3, width=2.5, height=2.7, width_ratios=[1, 1, 1.6])
    shown = [
        cell.imshow(pixels(images[0]))
        for cell, images in zip(axes, (states, ends), strict=False)
    ]
    for cell, title in zip(axes, ("the state", "its completion"), strict=False):
        cell.set(xticks=[], yticks=[], title=title)
    line = axes[2].plot([], [], "o-", color=COLOURS["tp-grpo"], markersize=4)[0]
    axes[2].set(
        xlim=(-0.3, 10.3),
        ylim=(0, 1.1),
        xlabel="decision",
        xticks=range(0, 11, 2),
        title="reward of the completion",
    )
    clean(axes[2])
    figure.canvas.draw()

    def draw(frame):
        column = min(frame, 9)
        for image, images in zip(shown, (states, ends), strict=True):
            image.set_data(pixels(images[column]))
        line.set_data(COLUMNS[: column + 1], row[: column + 1])

    return animation(figure, draw, frames=13, seconds=6.5, dpi=64)


moving()

# %% [markdown]
# ## Turning points by hand
#
# Write $g_k = V_{k+1} - V_k$ for the increments (the gains of the lesson on Stepwise-Flow-GRPO; the paper's equation 7). The total change $R - V_0$ is the *trend*. Decision $k \ge 1$ is a **turning point** (Definition 4.1) if the decision before went against the trend and this one goes with it:
#
# $$\operatorname{sign}(g_{k-1})\operatorname{sign}(R - V_0) < 0, \qquad \operatorname{sign}(g_k)\operatorname{sign}(R - V_0) > 0.$$
#
# A turning point is **consistent** (Definition 5.1) if the change after the decision also has its sign: $g_k\,(R - V_{k+1}) > 0$. The first decision has none before it. By the paper's Remark 5.2 it counts if $g_0\,(R - V_0) > 0$ (plain), or if $g_0\,(R - V_1) > 0$ (consistent). A difference of zero never qualifies.
#
# The paper says *step* instead of *decision*, because in the paper (almost) every step is random. ODE steps are not decisions, so $V_0$ belongs to the state before the first *random* step, and "before" and "after" skip the ODE steps. With the window `2:7` the first decision is step 2, so $V_0$ is the value before step 2, and Remark 5.2 applies to this step.
#
# The figure has three trajectories of a group with four decisions, so five columns:

# %%
names = ("a", "b", "c")
rows = [
    [0.50, 0.40, 0.30, 0.45, 0.60],
    [0.50, 0.60, 0.70, 0.55, 0.40],
    [0.50, 0.55, 0.52, 0.65, 0.62],
]
table = torch.tensor([rows])
figure, axes = panels(3, width=2.9, height=2.4, sharey=True)
for cell, name, row, shade in zip(
    axes, names, table[0], (DATA, ACCENT, OTHERS[0]), strict=True
):
    cell.plot(range(5), row, "o-", color=shade)
    for j, value in enumerate(row):
        cell.annotate(
            f"{value:.2f}",
            (j, float(value)),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    for i in range(4):
        cell.text(i + 0.5, 0.215, f"decision {i}", ha="center", fontsize=6.5, color=NOISE)
    cell.set(
        title=f"trajectory {name}",
        xlabel="column",
        xticks=range(5),
        xlim=(-0.4, 4.4),
        ylim=(0.2, 0.8),
    )
    clean(cell)
axes[0].set_ylabel("reward of the completion")
plt.show()

# %% [markdown]
# ### Exercise 2 · by hand
#
# *Difficulty: medium · kind: formula · importance: essential · time: 8 minutes*
#
# List the turning points of each trajectory: the numbers of the decisions, under the plain rule and under the consistent rule. An empty list means none.

# %% tags=["exercise"]
plain_by_hand = {"a": ..., "b": ..., "c": ...}
consistent_by_hand = {"a": ..., "b": ..., "c": ...}


# %% [markdown] tags=["hint"]
# **Hint.** Write the four increments of a trajectory and the sign of its trend in one line. From decision 1 on, a turning point is the second of a pair: against the trend, then with it. Decision 0 has a rule of its own. For the consistent rule compare the last column with the column *after* the decision.

# %% tags=["solution"]
plain_by_hand = {"a": [2], "b": [2], "c": [0, 2]}
consistent_by_hand = {"a": [2], "b": [2], "c": [0]}

# %%
lesson.check_by_hand(plain_by_hand, consistent_by_hand)

# %% [markdown] tags=["explanation"]
# **Why.** *a* falls, falls, rises, rises and ends higher ($R - V_0 = +0.1$): decision 2 is the first to go with the trend after one against it, and the rise continues. *b* is the mirror image of *a*. *c* has the increments +0.05, −0.03, +0.13, −0.03 with $R - V_0 = +0.12$. Decision 2 follows a
# decision down and goes up, so it is a turning point. However, after it the reward *falls* (0.62 − 0.65), so it is not consistent. Decision 0 goes up, and so does the rest of the trajectory.

# %% [markdown]
# ## Turning points by code
#
# ### Exercise 3 · the plain rule
#
# *Difficulty: medium · kind: code · importance: essential · time: 8 minutes*
#
# For values `[prompt, member, decision+1]` return booleans `[prompt, member, decision]`: the plain rule for decisions $k \ge 1$, and `False` at decision 0 (the next exercise adds it).


# %% tags=["exercise"]
def plain_turns(values):
    """Where a decision goes with the trend after one against it; decision 0 is False."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Multiply the sign of each increment by the sign of the trend: +1 is with the trend, -1 against it. Compare neighbouring entries, and write the result at the later one.


# %% tags=["solution"]
def plain_turns(values):
    """Where a decision goes with the trend after one against it; decision 0 is False."""
    trend = (values[..., -1:] - values[..., :1]).sign()
    along = values.diff(dim=-1).sign() * trend
    turns = torch.zeros_like(along, dtype=torch.bool)
    turns[..., 1:] = (along[..., :-1] < 0) & (along[..., 1:] > 0)
    return turns


# %%
lesson.check_plain(plain_turns)

# %% [markdown] tags=["explanation"]
# **Why.** The product with the sign of the trend is positive for decisions with the trend and negative for those against it. The mark belongs to the *later* of the two. With strict inequalities a zero difference is neither with nor against the trend.

# %% [markdown]
# ### Exercise 4 · the consistent rule, and the first decision
#
# *Difficulty: medium · kind: code · importance: essential · time: 8 minutes*
#
# Keep the plain turning points that are consistent, and add the first decision if it qualifies by the consistent criterion.


# %% tags=["exercise"]
def consistent_turns(values):
    """The consistent turning points of all decisions, the first included."""
    turns = plain_turns(values)
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The condition $g_k (R - V_{k+1}) > 0$ can be computed for all decisions at once. Combine it with `turns` by `&`; for decision 0 it is the whole criterion.


# %% tags=["solution"]
def consistent_turns(values):
    """The consistent turning points of all decisions, the first included."""
    turns = plain_turns(values)
    agrees = values.diff(dim=-1) * (values[..., -1:] - values[..., 1:]) > 0
    turns &= agrees
    turns[..., 0] = agrees[..., 0]
    return turns


# %%
lesson.check_consistent(consistent_turns)

# %% [markdown] tags=["explanation"]
# **Why.** $R - V_{k+1}$ is the change *after* decision $k$, whereas $R - V_k$ would include its own gain and have its sign too often. The last decision never qualifies, since none follows it.

# %%
consistent = consistent_turns(values)
print(
    f"consistent turning points per trajectory: {float(consistent.float().sum(-1).mean()):.2f}"
)
print(
    "fraction of trajectories by decision:",
    " ".join(f"{value:.2f}" for value in consistent.float().mean((0, 1))),
)

# %% [markdown]
# ### Exercise 5 · a rule that does nothing
#
# *Difficulty: harder · kind: debugging · importance: useful · time: 6 minutes*
#
# A colleague applies the same function to the same trajectories, with another reward. The next cell prints the log of the first iteration. No decision ever turns. What is the cause?
#
# - **a** the completions start from fresh noise, so that the signs are random
# - **b** the reward is 0 or 1
# - **c** the base model is so good that no trajectory loses reward
# - **d** the turning points are consistent, but balancing dropped them

# %% tags=["hide-input"]
others = (values > 0.95).float()
print(
    f"mean reward {float(others[..., -1].mean()):.2f}, std within groups"
    f" {float(others[..., -1].std(1).mean()):.2f}"
)
print(
    "fraction of decisions with a loss: "
    + " ".join(f"{value:.2f}" for value in (gains(others) < 0).float().mean((0, 1)))
)
print(
    "fraction that turn:                "
    + " ".join(f"{value:.2f}" for value in consistent_turns(others).float().mean((0, 1)))
)

# %% tags=["exercise"]
cause = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Take a decision that gains after a loss, and ask which values $V_{k+1}$ and $R$ can then have in order to satisfy $g_k\,(R - V_{k+1}) > 0$.

# %% tags=["solution"]
cause = "b"

# %%
lesson.check_cause(cause)

# %% [markdown] tags=["explanation"]
# **Why.** With rewards of 0 and 1 a gain leads to $V_{k+1} = 1$, after which nothing can rise, so $R - V_{k+1} \le 0$. A loss leads to 0, after which nothing can fall. Hence no decision is consistent. The rule then silently becomes plain increments. Use a continuous reward with it.

# %% [markdown]
# ## The paper's notation and figures
#
# The paper and its repository explain the method by a figure of cases (normal points and turning points) and a figure of the method. To read them, translate the notation:
#
# | in the paper (arXiv version) | here | remark |
# |---|---|---|
# | time $t = T, \dots, 1$ | decision $k = T - t$ | the paper counts the steps that remain, all of them random; its $t = T$ is our decision 0 |
# | incremental reward $r_t$, equation 7 | $g_k = V_{k+1} - V_k$ | the change between two ODE completions |
# | aggregated reward $r_t^\text{agg}$, equation 8 | $R - V_k$ | only at turning points; a normal point has $r_t$ |
# | turning point, Definition 4.1; consistent, Definition 5.1 | plain rule, consistent rule | "without" and "with constraint" in Table 1 |
# | first step, Remark 5.2 | $k = 0$, in any window | no decision before it; the criterion has one condition |
# | balancing, Appendix D | exercise 7 | |
#
# For every marked point of such a figure, find the signs of the decision *before* it, of the decision itself, and of the whole trajectory. These three signs decide the plain rule. The consistent rule adds a fourth, that of the change after the decision.
#
# The main result is Figure 4, rewards over training. Its panel on PickScore supports the statement that step 700 reaches what Flow-GRPO reaches at step 2300. Ask the same questions as in the lesson on Stepwise-Flow-GRPO:
#
# - The axis counts optimiser steps. However, an iteration of TP-GRPO needs the rewards of ten images per trajectory instead of one. With the fewest possible evaluations it costs about 2.2 times as much, the update included: 55 evaluations and 27 for the update (nine decisions, three each) against 10 and 27. The factor of 3.3 in steps is therefore a factor of about 1.5 in computing.
# - The curves are without the KL penalty, the numbers of Table 1 with it.
# - No curve uses increments *without* turning points, so the figure cannot tell which of the two ideas helps. The last sections of this lesson make this comparison.
#
# The next cell shows a case: a trajectory with five decisions, with the paper's labels on the horizontal axis.

# %%
case = torch.tensor([0.40, 0.50, 0.35, 0.30, 0.45, 0.75])
figure, axes = panels(width=6.4, height=3.0)
axes.plot(range(6), case, "o-", color=COLOURS["tp-grpo"])
for j, value in enumerate(case.tolist()):
    axes.annotate(
        f"{value:.2f}",
        (j, value),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        fontsize=9,
    )
for i in range(5):
    axes.text(i + 0.5, 0.215, f"t = {5 - i}", ha="center", fontsize=9, color=NOISE)
axes.axhline(float(case[0]), color=NOISE, linestyle=":", linewidth=1)
axes.annotate(
    "",
    (5.25, float(case[-1])),
    (5.25, float(case[0])),
    arrowprops={"arrowstyle": "->", "color": INK},
)
axes.text(5.28, 0.56, r"$R - V_0$", color=INK, fontsize=8)
axes.set(
    xlabel="column (the paper's t labels the decision between two columns)",
    ylabel="reward of the completion",
    xlim=(-0.3, 5.8),
)
axes.set(ylim=(0.2, 0.85), xticks=range(6), title="A case with the paper's labels")
clean(axes)
plt.show()

# %% [markdown]
# ### Exercise 6 · with the paper's labels
#
# *Difficulty: medium · kind: formula · importance: useful · time: 6 minutes*
#
# Find all consistent turning points of this trajectory, the first decision included. Give a dict from the paper's $t$ to the aggregated reward $r_t^\text{agg}$.

# %% tags=["exercise"]
aggregated_rewards = {...: ...}


# %% [markdown] tags=["hint"]
# **Hint.** Write the increments and the sign of $R - V_0$. Find the turning points with our numbers of decisions first, then translate: $t = T - k$ with $T = 5$.

# %% tags=["solution"]
aggregated_rewards = {5: 0.35, 2: 0.45}

# %%
lesson.check_paper_labels(aggregated_rewards)

# %% [markdown] tags=["explanation"]
# **Why.** The increments are +0.10, −0.15, −0.05, +0.15, +0.30, and $R - V_0 = +0.35$. Decision 3 goes up after one down, and the rise continues, so it is a consistent turning point: $t = 5 - 3 = 2$, and $r_2^\text{agg} = R - V_3 = 0.75 - 0.30$. Decision 0 goes up, and so does the rest, so Remark 5.2 applies: $t = 5$ and
# $r_5^\text{agg} = R - V_0$. Decision 4 also goes up, but after one up. In the figure the aggregated reward of $t = 2$ spans two decisions: it is three times the increment $r_2 = 0.15$.

# %% [markdown]
# ## Credit of a turning point
#
# At a turning point the increment $g_k$ is *replaced* by the long-term reward $R - V_k$ (equation 8), the total change from this decision to the end. Since $R - V_k = g_k + (R - V_{k+1})$, and under the consistent rule both parts have one sign, this change has the sign of $g_k$ and is larger. All other decisions keep their increment. Then each decision is normalised over the members by itself, as "step by step" in the lesson on Stepwise-Flow-GRPO.
#
# The last part is **balancing** (Appendix D of the paper). Suppose a batch has $n_+$ turning points of positive and $n_-$ of negative long-term reward. Only the $\min(n_+, n_-)$ largest of each sign keep their long-term reward, and the others get $g_k$. If only one sign occurs, all turning points keep it.
#
# ### Exercise 7 · balance
#
# *Difficulty: harder · kind: code · importance: useful · time: 10 minutes*
#
# `turns` are booleans, `size` $= R - V_k$, both `[prompt, member, decision]`; the whole table is one batch. Return which turning points remain. There are no ties.


# %% tags=["exercise"]
def balance(turns, size):
    """The turning points that keep their long-term reward."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Take the positive and the negative sizes at turning points separately, sort them, and find the $n$-th largest of each sign, with $n = \min(n_+, n_-)$. A turning point remains if its size is at least as large as that threshold. Treat $n = 0$ first.


# %% tags=["solution"]
def balance(turns, size):
    """The turning points that keep their long-term reward."""
    up, down = size[turns & (size > 0)], size[turns & (size < 0)]
    count = min(len(up), len(down))
    if count == 0:
        return turns
    least, most = up.sort(descending=True).values[count - 1], down.sort().values[count - 1]
    return turns & ((size >= least) | (size <= most))


# %%
lesson.check_balance(balance)

# %% [markdown] tags=["explanation"]
# **Why.** Balancing gives the large credits equally many positive and negative signs. Otherwise a batch in which nearly every turn is upward would have mostly positive credit before the normalisation, which subtracts the mean of each decision. In `flowrl` this is `credit.balanced`. The released code ranks by the trend $R - V_0$ of the whole trajectory instead of $R - V_k$ (`TurningPoint(balance="trend")`).

# %%
kept = balance(consistent_turns(table), reward_to_go(table))
print(
    "kept by R - V_k:", [f"{names[m]} at decision {i}" for _, m, i in kept.nonzero().tolist()]
)
by_trend = TurningPoint(balance="trend").selected(table)
print(
    "kept by trend  :",
    [f"{names[m]} at decision {i}" for _, m, i in by_trend.nonzero().tolist()],
)
rule = TurningPoint()
selected, aggregated = rule.selected(values, decisions.mask), reward_to_go(values)[consistent]
print(
    f"in our batch: {int((aggregated > 0).sum())} turns up, {int((aggregated < 0).sum())}"
    f" down; {int(selected.sum())} remain"
)
print("same as ours:", torch.equal(selected, balance(consistent, reward_to_go(values))))

# %% [markdown] tags=["expected"]
# kept by R - V_k: ['a at decision 2', 'b at decision 2']
# kept by trend  : ['b at decision 2', 'c at decision 0']
# in our batch: 96..108 turns up, 173..185 down; 192..216 remain
# same as ours: True

# %% [markdown]
# `explain` prints the increments, the turning points and the advantages; without a table it uses the three trajectories above.

# %%
print(explain(rule, name="TP-GRPO"))

# %% [markdown]
# Balancing by size keeps *a*, whereas balancing by trend, as in the released code (sign and rank are those of $R - V_0$), keeps *c*. With few trajectories such choices have a large effect. In decision 2, the credit of *a* and *b* is $R - V_k = \pm 0.30$, whereas that of *c* is its increment +0.13. The three are normalised together although they measure different things, as in
# the published method.
#
# ## How many turning points would pure noise have?
#
# The rule looks for patterns of signs, and random numbers have such patterns too. The interpretation of a count therefore needs the count of a *null model*: rewards without any structure.
#
# ### Exercise 8 · the null model
#
# *Difficulty: medium · kind: code · importance: useful · time: 8 minutes*
#
# `turning` is a function such as `consistent_turns`. Return the mean number of turning points *per trajectory* when the `columns` columns of the table are independent standard normal numbers. (Our table has ten: nine decisions and the finished image.) Use at least 5,000 trajectories, for a standard error below 0.02.


# %% tags=["exercise"]
def noise_count(turning, columns=10):
    """Turning points per trajectory in pure noise."""
    generator = torch.Generator().manual_seed(0)
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Sample a tensor `[prompt, member, decision+1]` of normal numbers with many trajectories, call `turning`, sum over decisions, and take the mean. With 40,000 trajectories the error is below 0.01.


# %% tags=["solution"]
def noise_count(turning, columns=10):
    """Turning points per trajectory in pure noise."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100, 400, columns, generator=generator)
    return float(turning(noise).float().sum(dim=-1).mean())


# %%
lesson.check_null(noise_count)

# %% [markdown] tags=["explanation"]
# **Why.** Sum over the decisions of a trajectory, and take the mean over trajectories. The signs depend only on the order of the rewards, so every continuous distribution gives the same count.

# %% [markdown]
# Independent noise is one null model, but rewards along a trajectory resemble a random walk. Let us add two null models. One is a random walk. The other is a *shuffle*, the most demanding one, which gives every trajectory at each decision the increment of another, random trajectory. The shuffle keeps the sizes of the increments at each decision and removes only
# the dependence between the decisions of a trajectory.
#
# ### Exercise 9 · more than chance?
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# Predict how the number of consistent turning points in our batch compares with the null models.
#
# - **a** far more than in all of them, since the method would otherwise have nothing to credit
# - **b** more than in noise and in a random walk, since the reward along a trajectory has a direction
# - **c** not more than in any of them

# %% tags=["exercise"]
against_chance = "..."

# %% [markdown] tags=["hint"]
# **Hint.** A turning point needs a decision *against* the trend, and the first decision needs none before it. Do noise and a random walk have such decisions?

# %% tags=["solution"]
against_chance = "c"

# %%
lesson.check_against_chance(against_chance)

# %% [markdown] tags=["explanation"]
# **Why.** Noise and a random walk satisfy the definition, too. A walk has fewer changes of sign than noise, but its first decision and the consistency condition hold more often, so the count can go either way; only a strong drift lowers it. The definition finds wiggles of the reward. It cannot tell whether a wiggle is an event in the image or an accident.

# %%
generator = torch.Generator().manual_seed(1)
walk = torch.randn(100, 400, 10, generator=generator).cumsum(-1)
increments = gains(values).flatten(0, 1)
shuffles = torch.stack(
    [
        increments.gather(0, torch.rand(increments.shape, generator=generator).argsort(0))
        for _ in range(50)
    ]
)
start = values[..., 0].flatten()[None, :, None]
shuffled = torch.cat([start.expand(50, -1, -1), start + shuffles.cumsum(-1)], dim=-1)
error = float(consistent.float().sum(-1).std()) / len(increments) ** 0.5
counts = {
    "measured": float(consistent.float().sum(-1).mean()),
    "independent noise": noise_count(consistent_turns),
    "random walk": float(consistent_turns(walk).float().sum(-1).mean()),
    "shuffled increments": float(consistent_turns(shuffled).float().sum(-1).mean()),
}
for name, value in counts.items():
    print(
        f"{name:<20} {value:.2f}"
        + (
            f" ± {error:.2f} (standard error, {len(increments)} trajectories)"
            if name == "measured"
            else ""
        )
    )
for name, tried in (("measured", values), ("shuffled", shuffled)):
    fractions = consistent_turns(tried).float().mean((0, 1))
    print(
        f"{name:<9} fraction by decision: " + " ".join(f"{value:.2f}" for value in fractions)
    )
aggregated = reward_to_go(values)[consistent].abs()
swing = gains(values).abs()[consistent]
print(
    f"of the measured ones, {float((aggregated < 0.01).float().mean()):.0%} have |R - V_k| <"
    f" 0.01 and {float((swing < 0.01).float().mean()):.0%} have |g_k| < 0.01"
)

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.0)
axes[0].bar(
    range(9),
    consistent.float().mean((0, 1)),
    color=COLOURS["tp-grpo"],
    alpha=0.75,
    label="measured",
)
for name, tried, style in (
    ("independent noise", torch.randn(100, 400, 10, generator=generator), ":"),
    ("random walk", walk, "--"),
    ("shuffled increments", shuffled, "-"),
):
    fractions = consistent_turns(tried).float().mean((0, 1))
    axes[0].plot(range(9), fractions, style, color=NOISE if style != "-" else INK, label=name)
axes[0].set(
    xlabel="decision",
    ylabel="fraction of trajectories",
    title="Consistent turning points: data and chance",
    ylim=(0, 0.62),
)
axes[0].legend(frameon=False, fontsize=8)
size = reward_to_go(values).abs()
axes[1].semilogy(range(8), [size[..., i].median() for i in range(8)], "o--", color=NOISE)
axes[1].semilogy(
    range(8),
    [size[..., i][consistent[..., i]].median() for i in range(8)],
    "o-",
    color=COLOURS["tp-grpo"],
)
axes[1].text(0.1, 0.06, "all decisions", color=NOISE)
axes[1].text(2.6, 0.35, "turning points", color=COLOURS["tp-grpo"])
axes[1].set(
    xlabel="decision",
    ylabel=r"median of $|R - V_k|$",
    title="Late turning points change the reward little",
)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# The measured count is below that of independent noise and of a random walk, and within its error of the shuffle. However, the totals agree because two differences cancel: decision 0 is consistent much less often than after shuffling, and decisions 2 to 7 turn somewhat more often. **So the number of turning points says nothing about their value.** An early gain tends to be
# followed by a loss and an early loss by a gain: the values come back towards their mean, and a reward close to its bound of 1 can mostly fall. In the right panel, from decision 5 on, the remaining change at a turning point is tiny, but step-by-step normalisation scales it up to full size.
#
# This does not show that the credit $R - V_k$ is wrong. It shows that a large number of turning points is not evidence for the method, and that it may help to ignore turning points with $|R - V_k| < 0.01$: `TurningPointVariant(min_size=0.01)`.
#
# ## The first reward must be the trajectory's own
#
# $V_0$, the reward of the pure ODE, enters $g_0$ and the trend, and therefore every sign. It must start from the trajectory's *own* noise. The released code draws new noise for $V_0$ (its comment says the same noise). To measure the effect, the next cell replaces $V_0$ by the reward of new noise for every trajectory.

# %%
wrong = values.clone()
wrong[..., 0] = ode_images(
    base, judge, [prompt for prompt in prompts for _ in range(12)], STEPS, seed=99
).rewards.view(16, 12)
flipped = (wrong[..., -1] - wrong[..., 0]).sign() != (values[..., -1] - values[..., 0]).sign()
after = consistent_turns(wrong)
print(f"trend of another sign: {float(flipped.float().mean()):.0%} of the trajectories")
print(
    f"turning points: {int((consistent & after).sum())} stay,"
    f" {int((consistent & ~after).sum())} are lost, {int((~consistent & after).sum())} are new"
)
first = [
    TurningPoint().assign(table, decisions)[..., 0].flatten() for table in (values, wrong)
]
print(
    "correlation of the first decision's advantages with the right ones:"
    f" {float(torch.corrcoef(torch.stack(first))[0, 1]):.2f}"
)

# %% [markdown] tags=["expected"]
# trend of another sign: 30..34% of the trajectories
# turning points: 188..202 stay, 80..92 are lost, 93..105 are new
# correlation of the first decision's advantages with the right ones: 0.30..0.38

# %% [markdown]
# A third of the trajectories get a trend of the wrong sign. Nearly a third of the turning points are lost, and about as many false turning points appear. The correlation of the first decision's credit with the right credit is low. In `flowrl` node 0 of every completion *is* the trajectory's $z_0$, and a test verifies this.
#
# ## Does the position matter?
#
# Turning points give long-term credit to certain decisions. To learn whether the *position* of these decisions matters, we need a control that differs in the position only. A mark at decision $k$ changes the credit by $R - V_{k+1}$, so the control should also change the credit as much.
#
# ### Exercise 10 · a control
#
# *Difficulty: medium · kind: design · importance: useful · time: 8 minutes*
#
# Write the control: from `turns` `[prompt, member, decision]` (booleans, consistent turning points) return marks of the same shape, at random decisions. Every trajectory must keep its number of marks. Decide first at which decisions a mark has an effect, and make these equally likely. Use `generator` for all random numbers.


# %% tags=["exercise"]
def random_marks(turns, generator):
    """As `turns`, but at random decisions."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** If a trajectory has three turning points, how many marks should the same trajectory have in the control? `torch.rand(shape, generator=generator).argsort(-1)` has one random permutation in each row. What is $R - V_{k+1}$ at the last decision?


# %% tags=["solution"]
def random_marks(turns, generator):
    """As `turns`, but at random decisions."""
    early, last = turns[..., :-1], turns[..., -1:]
    order = torch.rand(early.shape, generator=generator).argsort(-1)
    return torch.cat([early.gather(-1, order), last], dim=-1)


# %%
lesson.check_random_marks(random_marks)

# %% [markdown] tags=["explanation"]
# **Why.** The control keeps the number of marks of *every* trajectory. Marks with the same overall rate would also change how many a trajectory has, which depends on its rewards. A permutation of trajectories would do the same. At the last decision $R - V_k = g_k$, so a mark there changes nothing, and a consistent turning point is never there.


# %% [markdown]
# Random decisions still change the credit less than turning points, which prefer decisions with much to come. `flowrl` has three controls that keep more (`flowrl.bench.rules.TurningPointVariant`): *another member's* (`where="shift"`) gives every member the marks of another member of its prompt, so that each decision keeps its number of marks; *same dose* (`"dose"`) exchanges marks among trajectories whose $|R - V_{k+1}|$ is of the same size; *same dose and signs* (`"sign"`) does so only among those whose gain and $R - V_{k+1}$ have the same sign, as at turning points.
#
# The next cell compares versions of the rule on the same trajectories: increments alone, turning points, and these controls. As in the lesson on Stepwise-Flow-GRPO, it prints the cosine between the gradients of four independent batches (task `preference`, window `2:7`: steps 2 to 6 are decisions 0 to 4). The rule for the first decision acts on step 2 here, and the last decision, step 6, never turns.

# %%
window = Windowed(FlowSDE(0.7), range(2, 7))
palette = shapes.prompts("preference", "train")
batches = [
    sample_groups(base, judge, palette[8 * k % 24 :][:8], 12, window, Completion(), seed=k)
    for k in range(4)
]
rules = {
    "uniform (Flow-GRPO)": Uniform(),
    "increments alone": TurningPointVariant(where="none"),
    "turning points": TurningPoint(),
    "another member's": TurningPointVariant(where="shift"),
    "same dose": TurningPointVariant(where="dose"),
    "same dose and signs": TurningPointVariant(where="sign"),
    "increments, joint": TurningPointVariant(
        where="none", rule=TurningPoint(normalise="joint")
    ),
    "turning points, joint": TurningPoint(normalise="joint"),
}
by_batch = [credit_gradients(batch, list(rules.values())) for batch in batches]
for name, gradients in zip(rules, zip(*by_batch, strict=True), strict=True):
    pairs = pairwise_cosines(gradients)
    print(
        f"{name:<22} cosine between batches {pairs.mean():.2f} (std over pairs"
        f" {pairs.std():.2f})"
    )

# %% [markdown]
# How much do the marks of each rule change the credit? The next cell prints the fraction of decisions with a mark, and $|R - V_{k+1}|$ at the marks.

# %%
drawn = torch.cat([batch.values for batch in batches])
changed = (drawn[..., -1:] - drawn[..., 1:]).abs()  # [prompt, member, decision]
marks = {
    name: torch.cat(
        [rules[name].selected(batch.values, batch.decisions.mask) for batch in batches]
    )
    for name in ("turning points", "another member's", "same dose", "same dose and signs")
}
marks["random (exercise 10)"] = random_marks(
    marks["turning points"], torch.Generator().manual_seed(0)
)
for name, chosen in marks.items():
    by_decision = " ".join(f"{share:4.0%}" for share in chosen.float().mean((0, 1)))
    print(
        f"{name:<20} marks {float(chosen.float().mean()):.0%} of the decisions, one by one"
        f" {by_decision}; dose (rms change of the credit at a mark)"
        f" {float(changed[chosen].square().mean().sqrt()):.4f}"
    )

# %% [markdown] tags=["expected"]
# turning points       marks 15% of the decisions, one by one  38..41%  11..14%  11..14%  9..12%   0%; dose (rms change of the credit at a mark) 0.0780..0.0890
# another member's     marks 15% of the decisions, one by one  38..41%  11..14%  11..14%  9..12%   0%; dose (rms change of the credit at a mark) 0.0750..0.0950
# same dose            marks 15% of the decisions, one by one  38..41%  11..14%  11..14%  9..12%   0%; dose (rms change of the credit at a mark) 0.0740..0.0890
# same dose and signs  marks 15% of the decisions, one by one  38..41%  11..14%  11..14%  9..12%   0%; dose (rms change of the credit at a mark) 0.0740..0.0890
# random (exercise 10) marks 15% of the decisions, one by one  14..25%  14..25%  14..25%  14..25%   0%; dose (rms change of the credit at a mark) 0.0600..0.0850

# %% [markdown]
# Increments alone, turning points, and all controls give equally clear gradients. The gain over uniform credit therefore comes from the credit of single decisions. Which decisions have the long-term reward makes no measurable difference, in part because few have it: 15%, about half of them the first decision, for which the rule has one condition only.
#
# The dose is the root mean square of $R - V_{k+1}$ at the marks. The three controls of `flowrl` have the turning points' numbers of marks, decision by decision, and their dose to within 10%; random decisions have other numbers and a smaller dose. "Same dose and signs" differs from turning points in the turning alone, "same dose" also in the direction: turning points
# have a gain and an $R - V_{k+1}$ of the same sign, so on average their credit is larger than the gain, in its direction. With exact values $R - V_{k+1}$ is luck, with mean 0 over all samples; marks that are chosen by its sign make its mean differ from 0, so the credit is biased.
#
# Joint instead of step-by-step normalisation, the choice of the lesson on Stepwise-Flow-GRPO, gives
# clearer gradients, although the recorded runs below have no more reward with it. The paper reports that turning points improve SD3.5, without such controls. Four batches cannot resolve effects of the reported size.
#
# ## Training
#
# The next cell trains for five iterations each with the same settings and seed: Flow-GRPO, TP-GRPO, and TP-GRPO with marks of the same dose and signs at decisions that need not turn.

# %%
settings = preset("default").apply(task="preference", groups=8, group_size=12, iterations=5)
changes = {
    "flow-grpo": {"method": "flow-grpo"},
    "tp-grpo": {"method": "tp-grpo"},
    "control": {"method": "control", "credit": "turning-point-variant(where=sign)"},
}
runs = {name: train(settings.replace(**change)) for name, change in changes.items()}
for name, run in runs.items():
    scores = run.evaluation.scores
    print(
        f"{name:<13} training reward"
        f" {' '.join(f'{value:.2f}' for value in run.curve('reward_mean'))}; held out: soft"
        f" {scores['soft']:.2f}, strict {scores['strict']:.2f}; sampling"
        f" {sum(run.curve('nfe')):,} NFE"
    )

# %% [markdown] tags=["expected"]
# flow-grpo     training reward 0.75 0.79 0.80 0.83..0.87 0.85..0.91; held out: soft 0.80..0.89, strict 0.55..0.80; sampling 4,800 NFE
# tp-grpo       training reward 0.75 0.80 0.82 0.85..0.91 0.87..0.93; held out: soft 0.80..0.90, strict 0.55..0.82; sampling 16,800 NFE
# control       training reward 0.75 0.80 0.82 0.85..0.91 0.87..0.93; held out: soft 0.80..0.90, strict 0.55..0.82; sampling 16,800 NFE

# %% tags=["hide-input"]
figure, axes = panels(width=5.6, height=2.8)
for (name, run), place in zip(
    runs.items(), ((3.6, 0.8), (2.1, 0.86), (4.1, 0.92)), strict=True
):
    shade = COLOURS.get(name, OTHERS[0])
    axes.plot(
        range(1, 6),
        run.curve("reward_mean"),
        "o--" if name == "control" else "o-",
        color=shade,
    )
    axes.text(*place, name, color=shade)
axes.set(
    xlabel="iteration",
    ylabel="mean training reward (soft)",
    title="Marks of the same dose and signs elsewhere: nearly the same",
    xticks=range(1, 6),
    ylim=(0.7, 0.95),
)
clean(axes)
plt.show()

# %% [markdown]
# The curves of the two versions of TP-GRPO, with turning points and with marks elsewhere, are almost equal. The differences between all three runs are within chance (the standard error of `strict` is about 0.05), and the two versions cost 3.5 times the sampling. However, five iterations with one seed prove nothing about the method. A conclusive comparison needs several seeds, the cost, and a
# control that differs only in the idea itself. The recorded runs below have the first two; their control, random decisions, changes the credit less. The lesson Side by side shows how such a comparison is made.
#
# ## The paper's figures, reproduced
#
# The training above is short. The next cells show recorded runs with settings from a search of equal size for every rule: 15 seeds in the 2-D world, and at least 11 seeds with images (`docs/studies.md` has their commands).
#
# Numbers are differences of the mean held-out reward over training, unless a row says otherwise, with 95% intervals over paired seeds. Rows are from the 2-D world unless they say *images*. The published values belong to SD3.5 and other rewards, so only directions can be compared. *Better* and *worse* are differences from 0 that remain after a correction for several questions. *Slight* is an effect below what matters (5% of what can be gained), and *equal* means that larger effects are excluded; 5% are 0.04 in the 2-D world and 0.008 with images. *Undecided* is neither, or not significant after the correction for several questions, although a single interval may exclude 0. The other items of the paper, and what is still to be run, are in `docs/papers/coverage.md`; `docs/verdict.md` compares all methods in later runs with other settings, so its numbers differ.

# %% tags=["hide-input"]
recorded.table(
    ("Table 1: turning points - uniform", "better", measured("tp-beats-uniform"), "better"),
    ("  images", "", measured("tp-beats-uniform", 0, "shapes"), "undecided"),
    ("  at equal evaluations", "not reported", measured("lead-turning-points"), "worse"),
    (
        "  images, at equal evaluations",
        "not reported",
        measured("lead-turning-points", 0, "shapes"),
        "worse",
    ),
    (
        "Figure 4: ratio of updates, equal reward",
        "0.30 (700 of 2300)",
        measured("tp-beats-uniform", 1),
        "weaker",
    ),
    ("  images", "", measured("tp-beats-uniform", 1, "shapes"), "weaker"),
    (
        "first step on: cosine, true gradient",
        "Remark 5.2, no ablation",
        cosine("TurningPoint (consistent)"),
        "equal",
    ),
    ("  first step off", "", cosine("TurningPoint, no first step"), "equal"),
    ("balancing: none - balanced", "Appendix D, no ablation", measured("balancing"), "equal"),
    ("random decisions - turning points", "not at hand", measured("random-points"), "equal"),
    ("  images", "not at hand", measured("random-points", 0, "shapes"), "equal"),
    (
        "increments alone - turning points",
        "not at hand",
        measured("increments-alone"),
        "equal",
    ),
)

# %% tags=["hide-input"]
both = {"per update": "updates", "per evaluation": "forwards"}
recorded.curves(
    {f"Figure 4, {words}": ("tp-beats-uniform", axis) for words, axis in both.items()}
)
recorded.curves(
    {f"With images, {words}": ("tp-beats-uniform", axis) for words, axis in both.items()},
    "shapes",
)

# %% [markdown]
# The lead of turning points is real per update in the 2-D world, but much smaller than the published one, and much of it is a fall of uniform credit after update 12. Per evaluation turning points trail while the reward rises, since every iteration also pays for the completions. This early part decides the mean over training, although turning points are ahead at the end in the 2-D world. With images uniform credit is still ahead where its evaluations end. On SD3.5, with thousands of updates, the balance may differ.
#
# The control of the training above, at tuned settings: turning points minus marks of the same dose and signs is +0.3 [-0.5, +1.1] percent of what can be gained in the 2-D world (15 seeds) and +0.1 [-2.5, +2.8] percent with images (6 seeds; `docs/log.md`). So the rule gains little or nothing from where it puts its marks.

# %% tags=["hide-input"]
area = "area"
recorded.dots(
    {
        "Window": ("tp-window", area),
        "Noise level": ("tp-noise", area),
        "Group size G": ("scale-groups", area),
    }
)
recorded.dots(
    {
        "Position": ("random-points", area),
        "KL: reward": ("kl-frontier-points", area),
        "KL: density": ("kl-frontier-points", "quality"),
    }
)

# %% [markdown]
# No ablation shows an effect that matters, and several are undecided, such as that of the noise level. In particular, long-term rewards at random positions do as well as turning points, here with 15 seeds, although this control, some of whose marks are at the last decision, changes the credit less. `docs/log.md` compares the controls above in the 2-D world. "Equal" excludes only effects above 0.04, which is as large as the lead itself: increments alone differ by -0.011, and the interval does not exclude that they lose most of the lead of 0.040 over uniform credit. With and without the first step the cosines agree to within 0.01, and balancing changes the reward by less than 0.01.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Two trajectories are in the same state before decision $k$, and draw different noise from there on. Which of their rewards must be equal? **a** $V_k$ **b** $R$ **c** $V_{k+1}$, and so the gain $g_k$
# 2. A trajectory rises at every decision. Under the consistent rule its turning points are **a** all decisions, **b** decision 0 only, **c** none.
# 3. At a turning point the credit is $R - V_k$. Which disadvantage does this have? **a** It contains the luck of all later decisions. **b** It has the wrong sign if the trend is down. **c** It does not depend on decision $k$.
# 4. A method marks 1.6 decisions per trajectory, and pure noise has 1.6, too. This shows that **a** the method is useless, **b** the marks are at random positions, **c** the count is not evidence for the method.
# 5. Which comparison tests whether turning points help? **a** TP-GRPO against Flow-GRPO **b** TP-GRPO against increments alone, and against changes of equal size at random decisions **c** TP-GRPO with and without KL

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are in the sections on completions, on turning points by hand, on the credit of a turning point, on noise, and on the position, in this order.

# %% tags=["solution"]
quiz = {1: "a", 2: "b", 3: "a", 4: "c", 5: "b"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: the completion is a function of the state and draws no noise, whereas $V_{k+1}$ and $R$ depend on the noise of decision $k$. 2: no decision $k \ge 1$ follows one against the trend, but decision 0 goes up, and so does the rest. 3: $R - V_k = g_k + g_{k+1} + \dots$, and the later gains do not depend on the noise of decision $k$ alone. 4: a null model refutes the argument from the count, not the method. 5: the other comparisons change several ideas at once.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $V_k$ by ODE completion | reward without noise from the state before decision $k$ | the probe `Completion()` |
# | $g_k = V_{k+1} - V_k$ | increment | `credit.gains` |
# | $R - V_0$ | global trend | inside `credit.turning_points` |
# | turning points | plain, consistent, first decision | `credit.turning_points(values, consistent, first_step)` |
# | $R - V_k$ | long-term reward | `credit.reward_to_go` |
# | $\min(n_+, n_-)$ | balancing | `credit.balanced` |
# | all of it | TP-GRPO's credit | `credit.TurningPoint`, `--method tp-grpo` |
#
# On the command line: `flowrl explain turning-point --rewards table.csv` shows the credit of the rule for a table of your own.
#
# ## Symbols
#
# {symbols: $z_j$; decision $k$; window; $V_k$; $R$; $g_k$; $R - V_k$; $R - V_0$; turning point; $A$}
#
# ## Further reading
#
# - Tong et al. 2026, *Alleviating sparse rewards by modeling step-wise and long-term sampling effects in flow-based GRPO* (arXiv 2602.06422), with code at github.com/YunzeTong/TurningPoint-GRPO. The differences between paper and code are listed in `docs/papers/tp-grpo.md`.
# - *DenseGRPO* (arXiv 2601.20218): increments of ODE completions without turning points, the natural control for this
#   method; its noise level per step is not in `dense-grpo`.
# - Wang and Yu 2025, *CPS* (arXiv 2509.05952): the kernel of TP-GRPO's released code.
# - Arjona-Medina et al. 2018, *RUDDER* (arXiv 1806.07857): redistribution of a delayed reward over the steps that caused it.
# - Harutyunyan et al. 2019, *Hindsight credit assignment* (arXiv 1912.02503): another definition of the credit of an action, from what happened later.
#
# **Next:** [8 · Side by side](08_side_by_side.ipynb) compares the three methods with several seeds and controls.

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
# # 6 · TP-GRPO
#
# **After this lesson you can** score any state by completing it with the ODE, find turning points by hand, in code and with the paper's labels, balance them, and test a criterion against a null model: how often would pure noise
# satisfy it?
#
# **Time** 80 minutes, of which the computer needs about one. **You need** lesson 5 (gains, notation).
#
# TP-GRPO (Tong et al. 2026, arXiv 2602.06422) addresses the same problem as Stepwise-Flow-GRPO, one reward for all steps, and adds an observation. Some steps *turn* a trajectory: before them the reward moved away from its final value, from
# them on it moves towards it. TP-GRPO gives such a step more credit than its own gain.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import torch

from flowrl import preset, world
from flowrl.credit import TurningPoint, Uniform, gains, reward_to_go
from flowrl.samplers import AllButLast, FlowSDE, Window
from flowrl.probes import Completion
from flowrl.worlds import PolicyOptions
from flowrl_bench.explain import explain
from flowrl_course import lesson_06 as lesson
from flowrl_course.batches import STEPS, credit_gradients, ode_images, pairwise_cosines, sample_groups
from flowrl_course.figures import ACCENT, COLOURS, DATA, INK, NOISE, OTHERS, animation, clean, panels, pixels
from flowrl_course.runs import train

shapes = world("shapes")
base = shapes.policy(PolicyOptions())
prompts = shapes.prompts("compositional", "train")[:16]
judge = shapes.reward("soft")
batch = sample_groups(base, judge, prompts, members=12, sampler=AllButLast(FlowSDE(0.7)), probe=Completion())
rewards = batch.rewards


def clearest(rewards):
    """The trajectory with the clearest turn upwards: low before, high after, (prompt, member, step)."""
    fall, rise = -gains(rewards)[..., :-1], reward_to_go(rewards)[..., 1:]
    score = torch.minimum(fall, torch.minimum(rise, gains(rewards)[..., 1:]))
    score = torch.where(rewards[..., -1:] > rewards[..., :1], score, -1.0)
    index = int(score.argmax())
    steps, members = score.shape[-1], rewards.shape[1]
    return index // steps // members, index // steps % members, index % steps + 1


group, member, turn = clearest(rewards)


def opening():
    """One trajectory: its completions, its rewards, its turning point."""
    row = rewards[group, member]
    latents = torch.stack([batch.rollout.estimates[node][group * 12 + member] for node in range(11)])
    figure = plt.figure(figsize=(9.5, 4.0), layout="constrained")
    grid = figure.add_gridspec(2, 11, height_ratios=[1, 2.4])
    for node, image in enumerate(base.decode(latents)):
        cell = figure.add_subplot(grid[0, node])
        cell.imshow(pixels(image), interpolation="nearest")
        cell.set(xticks=[], yticks=[])
        cell.set_title(f"{row[node]:.2f}", fontsize=9)
    axes = figure.add_subplot(grid[1, :])
    axes.plot(range(11), row, "o-", color=COLOURS["tp-grpo"])
    axes.scatter([turn], [float(row[turn])], s=220, facecolors="none", edgecolors=ACCENT, linewidths=2.2, zorder=5)
    axes.annotate(f"step {turn} turns it", (turn, float(row[turn])), xytext=(14, -4), textcoords="offset points", color=ACCENT)
    axes.set(
        xlabel="node j (0 = noise, 10 = image)",
        ylabel="reward of the completion",
        xlim=(-0.5, 10.5),
        ylim=(0, 1.1),
        xticks=range(11),
    )
    axes.set_title(f'"{prompts[group].text}": the ODE completion of every node, and its reward', fontsize=10)
    clean(axes)
    plt.show()


opening()

# %% [markdown]
# ## Completing a state
#
# TP-GRPO's $R_j$ is the reward of the image that the *ODE* reaches from node $j$ with the remaining steps of the sampler's own grid: the reward if no more noise were added. The paper writes $R(x_t^{\mathrm{ODE}(t)})$ for it.
#
# ### Exercise 1 · complete
#
# *Difficulty: easy · importance: essential · time: 5 minutes*
#
# `x` is the state at node `node` of the grid `times` (tensor, $T+1$ entries), `velocity(x, t)` the network at a time $t$ (a number). Return the state at $t = 0$.


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
# **Why.** A completion takes the remaining steps only, and starts from the state itself. Lesson 5 used $T'$ substeps on an even grid from every node; a completion from node $j$ uses the sampler's own grid and takes $T - j$ steps.

# %%
everyone, paths, node = batch.condition.repeat(12), batch.rollout.trajectories, 4


def network(x, t):
    """The policy's velocity for all trajectories of the batch at time t; the input of an image transformer is 1000 t, per sample."""
    return base.velocity(x, torch.full((len(x),), 1000.0 * float(t)), everyone)


with torch.no_grad():
    ours = complete(network, paths.nodes[:, node], node, paths.schedule.times)
print(
    f"largest difference from the library: {float((ours - batch.rollout.estimates[node]).abs().max()):.0e} (latents are of size 1)"
)
print(
    f"{batch.usage.nfe / 192:g} network evaluations per trajectory in {batch.usage.calls} sequential calls, {batch.usage.reward_calls / 192:g} images scored"
)

# %% [markdown] tags=["expected"]
# largest difference from the library: 0..1e-4 (latents are of size 1)
# 55 network evaluations per trajectory in 10 sequential calls, 10 images scored

# %% [markdown]
# Ten steps and their completions need $10 + 9 + \dots + 1 = 55$ evaluations, since the first velocity of every completion is the rollout's own (64 in the released code). They need only ten *sequential* calls: at each step one batched call evaluates the trajectories and all unfinished completions.
#
# The animation shows the states of the first figure's trajectory (left) and their completions (middle). The completion changes in steps that decide something about the image, and is constant in the others.


# %% tags=["hide-input"]
def moving():
    """A state, its completion, and the completion's reward, node by node."""
    index, row = group * 12 + member, rewards[group, member]
    states = base.decode(paths.nodes[index])
    ends = base.decode(torch.stack([batch.rollout.estimates[node][index] for node in range(11)]))
    figure, axes = panels(3, width=2.5, height=2.7, width_ratios=[1, 1, 1.6])
    shown = [cell.imshow(pixels(images[0])) for cell, images in zip(axes, (states, ends), strict=False)]
    for cell, title in zip(axes, ("the state", "its completion"), strict=False):
        cell.set(xticks=[], yticks=[], title=title)
    line = axes[2].plot([], [], "o-", color=COLOURS["tp-grpo"], markersize=4)[0]
    axes[2].set(xlim=(-0.3, 10.3), ylim=(0, 1.1), xlabel="node", xticks=range(0, 11, 2), title="reward of the completion")
    clean(axes[2])
    figure.canvas.draw()

    def draw(frame):
        node = min(frame, 10)
        for image, images in zip(shown, (states, ends), strict=True):
            image.set_data(pixels(images[node]))
        line.set_data(range(node + 1), row[: node + 1])

    return animation(figure, draw, frames=14, seconds=7, dpi=64)


moving()

# %% [markdown]
# ## Turning points by hand
#
# Write $d_i = R_{i+1} - R_i$ for the increments (lesson 5's gains; the paper's equation 7) and $D = R_T - R_0$ for the *trend*. Step $i \ge 1$ is a **turning point** (Definition 4.1) if the step before went against the trend and this step goes with it:
#
# $$\operatorname{sign}(d_{i-1})\operatorname{sign}(D) < 0, \qquad \operatorname{sign}(d_i)\operatorname{sign}(D) > 0.$$
#
# A turning point is **consistent** (Definition 5.1) if the change after the step also has the sign of the step: $d_i\,(R_T - R_{i+1}) > 0$. The first step has no step before it. By the paper's Remark 5.2 it counts if $d_0 D > 0$ (plain), or if $d_0\,(R_T - R_1) > 0$ (consistent). A difference of zero never qualifies.
#
# The figure has three trajectories of a group with five nodes:

# %%
names = ("a", "b", "c")
table = torch.tensor([[[0.50, 0.40, 0.30, 0.45, 0.60], [0.50, 0.60, 0.70, 0.55, 0.40], [0.50, 0.55, 0.52, 0.65, 0.62]]])
figure, axes = panels(3, width=2.9, height=2.4, sharey=True)
for cell, name, row, shade in zip(axes, names, table[0], (DATA, ACCENT, COLOURS["dance-grpo"]), strict=True):
    cell.plot(range(5), row, "o-", color=shade)
    for j, value in enumerate(row):
        cell.annotate(f"{value:.2f}", (j, float(value)), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    for i in range(4):
        cell.text(i + 0.5, 0.215, f"step {i}", ha="center", fontsize=7.5, color=NOISE)
    cell.set(title=f"trajectory {name}", xlabel="node", xticks=range(5), xlim=(-0.4, 4.4), ylim=(0.2, 0.8))
    clean(cell)
axes[0].set_ylabel("reward of the completion")
plt.show()

# %% [markdown]
# ### Exercise 2 · by hand
#
# *Difficulty: medium · importance: essential · time: 8 minutes*
#
# List the turning points of each trajectory: the numbers of the steps, under the plain rule and under the consistent rule. An empty list means none.

# %% tags=["exercise"]
plain = {"a": ..., "b": ..., "c": ...}
consistent = {"a": ..., "b": ..., "c": ...}


# %% [markdown] tags=["hint"]
# **Hint.** Write the four increments of a trajectory and the sign of its trend in one line. A turning point is a pair: against the trend, then with it. For the consistent rule compare the last reward with the reward *after* the step.

# %% tags=["solution"]
plain = {"a": [2], "b": [2], "c": [0, 2]}
consistent = {"a": [2], "b": [2], "c": [0]}

# %%
lesson.check_by_hand(plain, consistent)

# %% [markdown] tags=["explanation"]
# **Why.** *a* falls, falls, rises, rises and ends higher ($D = +0.1$): step 2 is the first to go with the trend after a step against it, and the rise continues. *b* is the mirror image of *a*. *c* has the steps +0.05, −0.03, +0.13, −0.03 with $D = +0.12$. Step 2 follows a
# step down and goes up, so it is a turning point; but after it the reward *falls* (0.62 − 0.65), so it is not consistent. Step 0 goes up, and so does the rest of the trajectory.

# %% [markdown]
# ## Turning points by code
#
# ### Exercise 3 · the plain rule
#
# *Difficulty: medium · importance: essential · time: 8 minutes*
#
# For rewards `[prompt, member, node]` return booleans `[prompt, member, step]`: the plain rule for steps $i \ge 1$, and `False` at step 0 (the next exercise adds it).


# %% tags=["exercise"]
def plain_turns(rewards):
    """Where a step goes with the trend after one that went against it; step 0 is False."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Multiply the sign of each increment by the sign of the trend: +1 is with the trend, -1 against it. Compare neighbouring entries, and write the result at the later one.


# %% tags=["solution"]
def plain_turns(rewards):
    """Where a step goes with the trend after one that went against it; step 0 is False."""
    trend = (rewards[..., -1:] - rewards[..., :1]).sign()
    along = rewards.diff(dim=-1).sign() * trend
    turns = torch.zeros_like(along, dtype=torch.bool)
    turns[..., 1:] = (along[..., :-1] < 0) & (along[..., 1:] > 0)
    return turns


# %%
lesson.check_plain(plain_turns)

# %% [markdown] tags=["explanation"]
# **Why.** The product with the sign of the trend is positive for steps with the trend and negative for steps against it. The mark belongs to the *later* of the two steps. With strict inequalities a zero difference is neither with nor against the trend.

# %% [markdown]
# ### Exercise 4 · the consistent rule, and the first step
#
# *Difficulty: medium · importance: essential · time: 8 minutes*
#
# Keep the plain turning points that are consistent, and add the first step if it qualifies.


# %% tags=["exercise"]
def consistent_turns(rewards):
    """The consistent turning points of all steps, the first included."""
    turns = plain_turns(rewards)
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The condition $d_i (R_T - R_{i+1}) > 0$ can be computed for all steps at once. Combine it with `turns` by `&`; for step 0 it is the whole criterion.


# %% tags=["solution"]
def consistent_turns(rewards):
    """The consistent turning points of all steps, the first included."""
    turns = plain_turns(rewards)
    agrees = rewards.diff(dim=-1) * (rewards[..., -1:] - rewards[..., 1:]) > 0
    turns &= agrees
    turns[..., 0] = agrees[..., 0]
    return turns


# %%
lesson.check_consistent(consistent_turns)

# %% [markdown] tags=["explanation"]
# **Why.** $R_T - R_{i+1}$ is the change *after* step $i$; $R_T - R_i$ would include the step's own gain and have its sign too often. There are two consequences. The last step never qualifies, since no step follows it. With 0/1 rewards *no* step $i \ge 1$ qualifies: after $d_{i-1} < 0 < d_i$ the reward is 1 and
# cannot rise further. Use a continuous reward with this rule.

# %%
found = consistent_turns(rewards)
print(f"consistent turning points per trajectory: {float(found.float().sum(-1).mean()):.2f}")
print("fraction of trajectories by step:", " ".join(f"{value:.2f}" for value in found.float().mean((0, 1))))

# %% [markdown]
# ## The paper's notation and figures
#
# The paper and its repository explain the method by a figure of cases (normal points and turning points) and a figure of the method. To read them, translate the notation:
#
# | in the paper (arXiv version) | here | remark |
# |---|---|---|
# | time $t = T, \dots, 1$ | step $i = T - t$ | the paper counts the steps that remain; its $t = T$ is our step 0 |
# | incremental reward $r_t$, equation 7 | $d_i = R_{i+1} - R_i$ | the change between two ODE completions |
# | aggregated reward $r_t^\text{agg}$, equation 8 | $R_T - R_i$ | only at turning points; a normal point has $r_t$ |
# | turning point, Definition 4.1; consistent, Definition 5.1 | plain rule, consistent rule | "without" and "with constraint" in Table 1 |
# | first step, Remark 5.2 | $i = 0$ | no step before it; the criterion has one condition |
# | balancing, Appendix D | exercise 6 | |
#
# For every marked point of such a figure ask: which sign has the step *before* it, which sign has the step itself, and which sign has the whole trajectory? Three signs decide the plain rule. The consistent rule adds a fourth, that of the change after the step.
#
# The main result is Figure 4, rewards over training. Its panel on PickScore supports the statement that step 700 reaches what Flow-GRPO reaches at step 2300. Ask the same questions as in lesson 5:
#
# - The axis counts optimiser steps. An iteration of TP-GRPO scores ten images per trajectory instead of one. With the fewest possible evaluations it costs about 2.2 times as much, the update included, so the factor of 3.3 in steps is a factor of about 1.5 in computing.
# - The curves are without the KL penalty, the numbers of Table 1 with it.
# - No curve uses increments *without* turning points, so the figure cannot tell which of the two ideas helps. The last sections of this lesson make this comparison.
#
# The next cell draws a case: a trajectory with five steps, with the paper's labels on the horizontal axis.

# %%
case = torch.tensor([0.40, 0.50, 0.35, 0.30, 0.45, 0.75])
figure, axes = panels(width=6.4, height=3.0)
axes.plot(range(6), case, "o-", color=COLOURS["tp-grpo"])
for j, value in enumerate(case.tolist()):
    axes.annotate(f"{value:.2f}", (j, value), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9)
for i in range(5):
    axes.text(i + 0.5, 0.215, f"t = {5 - i}", ha="center", fontsize=9, color=NOISE)
axes.axhline(float(case[0]), color=NOISE, linestyle=":", linewidth=1)
axes.annotate("", (5.25, float(case[-1])), (5.25, float(case[0])), arrowprops={"arrowstyle": "->", "color": INK})
axes.text(5.32, 0.56, "D", color=INK)
axes.set(xlabel="node (the paper's t labels the step between two nodes)", ylabel="reward of the completion", xlim=(-0.3, 5.5))
axes.set(ylim=(0.2, 0.85), xticks=range(6), title="A case with the paper's labels")
clean(axes)
plt.show()

# %% [markdown]
# ### Exercise 5 · with the paper's labels
#
# *Difficulty: medium · importance: useful · time: 6 minutes*
#
# Find all consistent turning points of this trajectory, the first step included. Give a dict from the paper's $t$ to the aggregated reward $r_t^\text{agg}$.

# %% tags=["exercise"]
aggregated_rewards = {...: ...}


# %% [markdown] tags=["hint"]
# **Hint.** Write the increments and the sign of $D$. Find the turning points with our step numbers first, then translate: $t = T - i$ with $T = 5$.

# %% tags=["solution"]
aggregated_rewards = {5: 0.35, 2: 0.45}

# %%
lesson.check_paper_labels(aggregated_rewards)

# %% [markdown] tags=["explanation"]
# **Why.** The increments are +0.10, −0.15, −0.05, +0.15, +0.30, and $D = +0.35$. Step 3 goes up after a step down, and the rise continues, so it is a consistent turning point: $t = 5 - 3 = 2$, and $r_2^\text{agg} = R_T - R_3 = 0.75 - 0.30$. Step 0 goes up, and so does the rest, so Remark 5.2 applies: $t = 5$ and
# $r_5^\text{agg} = R_T - R_0$. Step 4 also goes up, but after a step up. In the figure the aggregated reward of $t = 2$ spans two steps: it is three times the increment $r_2 = 0.15$.

# %% [markdown]
# ## Credit of a turning point
#
# At a turning point the increment $d_i$ is *replaced* by the long-term reward $R_T - R_i$ (equation 8), the total change from this step to the end. Under the consistent rule this change has the sign of $d_i$ and is larger. All other steps keep their increment. Then each step is normalised over the members, step by step.
#
# The last part is **balancing** (Appendix D of the paper). In a batch with $n_+$ turning points of positive and $n_-$ of negative long-term reward, only the $k = \min(n_+, n_-)$ largest of each sign keep their long-term reward; the others get $d_i$. If there is one sign only, all turning points keep it.
#
# ### Exercise 6 · balance
#
# *Difficulty: harder · importance: useful · time: 10 minutes*
#
# `turns` are booleans, `size` $= R_T - R_i$, both `[prompt, member, step]`; the whole table is one batch. Return which turning points remain. There are no ties.


# %% tags=["exercise"]
def balance(turns, size):
    """The turning points that keep their long-term reward."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Take the positive and the negative sizes at turning points separately, sort them, and find the $k$-th largest of each sign. A turning point remains if its size is at least as large as that threshold. Treat $k = 0$ first.


# %% tags=["solution"]
def balance(turns, size):
    """The turning points that keep their long-term reward."""
    up, down = size[turns & (size > 0)], size[turns & (size < 0)]
    k = min(len(up), len(down))
    if k == 0:
        return turns
    least, most = up.sort(descending=True).values[k - 1], down.sort().values[k - 1]
    return turns & ((size >= least) | (size <= most))


# %%
lesson.check_balance(balance)

# %% [markdown] tags=["explanation"]
# **Why.** Balancing gives the large credits equally many positive and negative signs; otherwise a batch in which nearly every turn is upward would have mostly positive credit. In `flowrl` this is `credit.balanced`; the released code ranks by the trend $D$ of the whole trajectory instead of $R_T - R_i$ (`TurningPoint(balance="trend")`).

# %%
kept = balance(consistent_turns(table), reward_to_go(table))
print("kept by R_T - R_i:", [f"{names[m]} at step {i}" for _, m, i in kept.nonzero().tolist()])
by_trend = TurningPoint(balance="trend").selected(table)
print("kept by trend    :", [f"{names[m]} at step {i}" for _, m, i in by_trend.nonzero().tolist()])
rule = TurningPoint()
selected, aggregated = rule.selected(rewards), reward_to_go(rewards)[consistent_turns(rewards)]
print(f"in our batch: {int((aggregated > 0).sum())} turns up, {int((aggregated < 0).sum())} down; {int(selected.sum())} remain")
print("same as ours:", torch.equal(selected, balance(consistent_turns(rewards), reward_to_go(rewards))))

# %% [markdown] tags=["expected"]
# kept by R_T - R_i: ['a at step 2', 'b at step 2']
# kept by trend    : ['b at step 2', 'c at step 0']
# in our batch: 96..108 turns up, 173..185 down; 192..216 remain
# same as ours: True

# %% [markdown]
# `explain` prints the increments, the turning points and the advantages; without a table it uses the three trajectories above.

# %%
print(explain(rule, name="TP-GRPO"))

# %% [markdown]
# Balancing by size keeps *a*; balancing by trend, as in the released code (sign and rank are those of $D$), keeps *c*. With few trajectories such choices have a large effect. In the advantages of step 2, the credit of *a* and *b* is $R_T - R_i = \pm 0.30$, that of *c* is its increment +0.13, and the three are normalised together although they measure different things, as in
# the published method.
#
# ## How many turning points would pure noise have?
#
# The rule looks for patterns of signs, and random numbers have such patterns too. The interpretation of a count therefore needs the count of a *null model*: rewards without any structure.
#
# ### Exercise 7 · the null model
#
# *Difficulty: medium · importance: useful · time: 8 minutes*
#
# `turning` is a function such as `consistent_turns`. Return the mean number of turning points *per trajectory* when the rewards at the `nodes` nodes are independent standard normal numbers. (Our trajectories have eleven nodes, but their last step is an ODE step, whose increment is exactly 0, so it never qualifies.) Use enough trajectories for an error of about 0.02.


# %% tags=["exercise"]
def noise_count(turning, nodes=10):
    """Turning points per trajectory in pure noise."""
    generator = torch.Generator().manual_seed(0)
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Draw a tensor `[prompt, member, node]` of normal numbers with many trajectories, call `turning`, sum over steps, and take the mean. With 40,000 trajectories the error is below 0.01.


# %% tags=["solution"]
def noise_count(turning, nodes=10):
    """Turning points per trajectory in pure noise."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100, 400, nodes, generator=generator)
    return float(turning(noise).float().sum(dim=-1).mean())


# %%
lesson.check_null(noise_count)

# %% [markdown] tags=["explanation"]
# **Why.** Sum over the steps of a trajectory, and take the mean over trajectories. The signs depend only on the order of the rewards, so every continuous distribution gives the same count.

# %% [markdown]
# Independent noise is one null model, but rewards along a trajectory resemble a random walk. The next cell adds two null models: a random walk, and a *shuffle*, the most demanding one, which gives every trajectory at each step the increment of another, random trajectory. The shuffle keeps the sizes of the increments at each step and removes only
# the dependence between the steps of a trajectory.

# %%
generator = torch.Generator().manual_seed(1)
walk = torch.randn(100, 400, 10, generator=generator).cumsum(-1)
increments = gains(rewards).flatten(0, 1)[:, :9]
shuffles = torch.stack([increments.gather(0, torch.rand(increments.shape, generator=generator).argsort(0)) for _ in range(50)])
start = rewards[..., 0].flatten()[None, :, None]
shuffled = torch.cat([start.expand(50, -1, -1), start + shuffles.cumsum(-1)], dim=-1)
error = float(found.float().sum(-1).std()) / len(increments) ** 0.5
counts = {
    "measured": float(found.float().sum(-1).mean()),
    "independent noise": noise_count(consistent_turns),
    "random walk": float(consistent_turns(walk).float().sum(-1).mean()),
    "shuffled increments": float(consistent_turns(shuffled).float().sum(-1).mean()),
}
for name, value in counts.items():
    print(
        f"{name:<20} {value:.2f}"
        + (f" ± {error:.2f} (standard error, {len(increments)} trajectories)" if name == "measured" else "")
    )
for name, values in (("measured", rewards), ("shuffled", shuffled)):
    print(
        f"{name:<9} fraction by step: " + " ".join(f"{value:.2f}" for value in consistent_turns(values).float().mean((0, 1))[:9])
    )
aggregated = reward_to_go(rewards)[found].abs()
swing = gains(rewards).abs()[found]
print(
    f"of the measured ones, {float((aggregated < 0.01).float().mean()):.0%} have |R_T - R_i| < 0.01 and {float((swing < 0.01).float().mean()):.0%} have |d_i| < 0.01"
)

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.0)
steps = range(9)
axes[0].bar(steps, found.float().mean((0, 1))[:9], color=COLOURS["tp-grpo"], alpha=0.75, label="measured")
for name, values, style in (
    ("independent noise", torch.randn(100, 400, 10, generator=generator), ":"),
    ("random walk", walk, "--"),
    ("shuffled increments", shuffled, "-"),
):
    axes[0].plot(
        steps, consistent_turns(values).float().mean((0, 1))[:9], style, color=NOISE if style != "-" else INK, label=name
    )
axes[0].set(xlabel="step", ylabel="fraction of trajectories", title="Consistent turning points: data and chance", ylim=(0, 0.62))
axes[0].legend(frameon=False, fontsize=8)
size = reward_to_go(rewards).abs()
axes[1].semilogy(range(8), [size[..., i].median() for i in range(8)], "o--", color=NOISE)
axes[1].semilogy(range(8), [size[..., i][found[..., i]].median() for i in range(8)], "o-", color=COLOURS["tp-grpo"])
axes[1].text(0.1, 0.06, "all steps", color=NOISE)
axes[1].text(2.6, 0.35, "turning points", color=COLOURS["tp-grpo"])
axes[1].set(xlabel="step", ylabel=r"median of $|R_T - R_i|$", title="Late turning points have no effect")
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# The measured count is below that of independent noise and of a random walk, and within its error of the shuffle: **the number of turning points in this world is explained by chance.** By step there is a difference. Step 0 is consistent much less often than after shuffling, and steps 2 to 6 turn somewhat more often. An early gain tends to be
# followed by a loss, plausibly because a reward close to its bound of 1 can mostly fall. On the right, from step 5 on, the remaining change at a turning point is tiny, but step-by-step normalisation scales it up to full size.
#
# This does not show that the credit $R_T - R_i$ is wrong. It shows that a large number of turning points is no evidence for the method, and that `TurningPoint(min_size=0.01)` may be useful.
#
# ## The first reward must be the trajectory's own
#
# $R_0$, the reward of the pure ODE, enters $d_0$ and the trend, and therefore every sign. It must start from the trajectory's *own* noise. The released code draws new noise for $R_0$ (its comment says the same noise). To measure the effect, the next cell replaces $R_0$ by the reward of new noise for every trajectory.

# %%
wrong = rewards.clone()
wrong[..., 0] = ode_images(base, judge, [prompt for prompt in prompts for _ in range(12)], STEPS, seed=99).rewards.view(16, 12)
flipped = (wrong[..., -1] - wrong[..., 0]).sign() != (rewards[..., -1] - rewards[..., 0]).sign()
after = consistent_turns(wrong)
print(f"trend of another sign: {float(flipped.float().mean()):.0%} of the trajectories")
print(
    f"turning points: {int((found & after).sum())} stay, {int((found & ~after).sum())} are lost, {int((~found & after).sum())} are new"
)
steps_0 = [TurningPoint().assign(values)[..., 0].flatten() for values in (rewards, wrong)]
print(f"correlation of the first step's advantages with the right ones: {float(torch.corrcoef(torch.stack(steps_0))[0, 1]):.2f}")

# %% [markdown] tags=["expected"]
# trend of another sign: 30..34% of the trajectories
# turning points: 188..202 stay, 80..92 are lost, 93..105 are new
# correlation of the first step's advantages with the right ones: 0.30..0.38

# %% [markdown]
# A third of the trajectories get a trend of the wrong sign. Nearly a third of the turning points are lost, and about as many false turning points appear. The correlation of the first step's credit with the right credit is low. In `flowrl` node 0 of every completion *is* the trajectory's $x_T$, and a test verifies this.
#
# ## Does the position matter?
#
# The next cell compares versions of the rule on the same trajectories: increments alone, turning points, and as a control the long-term reward at *random* steps, as many per trajectory as there were turning points. As in lesson 5, it prints the cosine between the gradients of four independent batches (task `preference`, window 2:5).

# %%
window = Window(FlowSDE(0.7), 2, 5)
palette = shapes.prompts("preference", "train")
batches = [sample_groups(base, judge, palette[8 * k % 24 :][:8], 12, window, Completion(), seed=k) for k in range(4)]
rules = {
    "uniform (Flow-GRPO)": Uniform(),
    "increments alone": TurningPoint(where="none"),
    "turning points": TurningPoint(),
    "random steps": TurningPoint(where="random"),
    "increments, joint": TurningPoint(where="none", normalise="joint"),
    "turning points, joint": TurningPoint(normalise="joint"),
}
by_batch = [credit_gradients(batch, list(rules.values())) for batch in batches]
for name, gradients in zip(rules, zip(*by_batch, strict=True), strict=True):
    pairs = pairwise_cosines(gradients)
    print(f"{name:<22} cosine between batches {pairs.mean():.2f} (std over pairs {pairs.std():.2f})")
steps = batches[0].rollout.trajectories.schedule.stochastic
fraction = torch.cat([TurningPoint().selected(batch.rewards)[..., steps].flatten() for batch in batches]).float().mean()
print(f"fraction of trained steps with credit R_T - R_i: {float(fraction):.0%}")

# %% [markdown]
# Increments alone, turning points, and random steps give equally clear gradients. The gain over uniform credit therefore comes from scoring the steps one by one; the *position* of the long-term reward makes no measurable difference, in part because few steps have it. Joint instead of step-by-step normalisation, lesson 5's choice, does
# make a difference. The paper reports that turning points improve SD3.5 (GenEval 0.967 for Flow-GRPO, 0.971 to 0.973 with turning points, without a control at random steps). Four batches cannot resolve effects of that size.
#
# ## Training
#
# The next cell trains for five iterations each with the same settings and seed: Flow-GRPO, TP-GRPO, and TP-GRPO with random steps instead of turning points.

# %%
settings = preset("default").apply(task="preference", groups=8, group_size=12, iterations=5)
changes = {
    "flow-grpo": {"method": "flow-grpo"},
    "tp-grpo": {"method": "tp-grpo"},
    "random steps": {"method": "random steps", "credit": "turning-point(where=random)"},
}
runs = {name: train(settings.replace(**change)) for name, change in changes.items()}
for name, run in runs.items():
    scores = run.evaluation.scores
    print(
        f"{name:<13} training reward {' '.join(f'{value:.2f}' for value in run.curve('reward_mean'))}; held out: soft {scores['soft']:.2f}, strict {scores['strict']:.2f}; "
        f"sampling {sum(run.curve('nfe')):,} NFE"
    )

# %% [markdown] tags=["expected"]
# flow-grpo     training reward 0.75 0.79 0.80 0.83..0.87 0.85..0.91; held out: soft 0.80..0.89, strict 0.55..0.80; sampling 4,800 NFE
# tp-grpo       training reward 0.75 0.80 0.82 0.85..0.91 0.87..0.93; held out: soft 0.80..0.90, strict 0.55..0.82; sampling 16,800 NFE
# random steps  training reward 0.75 0.80 0.82 0.85..0.91 0.87..0.93; held out: soft 0.80..0.90, strict 0.55..0.82; sampling 16,800 NFE

# %% tags=["hide-input"]
figure, axes = panels(width=5.6, height=2.8)
for (name, run), place in zip(runs.items(), ((3.6, 0.8), (2.1, 0.86), (4.1, 0.92)), strict=True):
    shade = COLOURS.get(name, OTHERS[0])
    axes.plot(range(1, 6), run.curve("reward_mean"), "o--" if name == "random steps" else "o-", color=shade)
    axes.text(*place, name, color=shade)
axes.set(
    xlabel="iteration",
    ylabel="mean training reward (soft)",
    title="Random steps instead of turning points: nearly the same",
    xticks=range(1, 6),
    ylim=(0.7, 0.95),
)
clean(axes)
plt.show()

# %% [markdown]
# The curves of the two versions of TP-GRPO, with turning points and with random steps, are almost equal. The differences between all three runs are within chance (the standard error of `strict` is about 0.05), and the two versions cost 3.5 times the sampling. Five iterations with one seed prove nothing about the method. A conclusive comparison needs several seeds, the cost, and a
# control that differs only in the idea itself. Lesson 7 makes such a comparison.
#
# ## To keep
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $R_j$ by ODE completion | reward without noise after node $j$ | the probe `Completion()` |
# | $d_i = R_{i+1} - R_i$ | increment | `credit.gains` |
# | $D = R_T - R_0$ | global trend | inside `credit.turning_points` |
# | turning points | plain, consistent, first step | `credit.turning_points(rewards, consistent, first_step)` |
# | $R_T - R_i$ | long-term reward | `credit.reward_to_go` |
# | $\min(n_+, n_-)$ | balancing | `credit.balanced` |
# | all of it | TP-GRPO's credit | `credit.TurningPoint`, `--method tp-grpo` |
#
# On the command line: `flowrl explain turning-point --rewards table.csv` shows the credit of the rule for a table of your own.
#
# ## Further reading
#
# - Tong et al. 2026, *Alleviating sparse rewards by modeling step-wise and long-term sampling effects in flow-based GRPO* (arXiv 2602.06422), with code at github.com/YunzeTong/TurningPoint-GRPO. The differences between paper and code are listed in `docs/differences.md`.
# - *DenseGRPO* (arXiv 2601.20218): increments of ODE completions without turning points, the natural control for this method.
# - Wang and Yu 2025, *CPS* (arXiv 2509.05952): the kernel of TP-GRPO's released code.
# - Arjona-Medina et al. 2018, *RUDDER* (arXiv 1806.07857): redistribution of a delayed reward over the steps that caused it.
# - Harutyunyan et al. 2019, *Hindsight credit assignment* (arXiv 1912.02503): another definition of the credit of an action, from what happened later.
#
# **Next:** [7 · Side by side](07_side_by_side.ipynb) compares the three methods with several seeds and controls.

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
# # 6 · Stepwise-Flow-GRPO
#
# **After this lesson you can** estimate the reward of an unfinished image, translate the paper's figure and labels into steps, say which transitions are decisions, compute the credit of each decision from its gain, explain why the gains are normalised jointly, and measure the value of better credit
# in network evaluations.
#
# **Time** 105 minutes, of which the computer needs one to two. **You need** the lesson on Flow-GRPO, and the Tweedie estimate of the lesson on flow matching.
#
# The lesson goes from the estimate of a finished image to the credit of a decision, and from there to its price: decisions and gains (exercise 1), estimates (2), the paper's first figure (3), where reward is gained and how gains are normalised (4 to 7), what better credit is worth (8 and 9), and training.
#
# Flow-GRPO gives every step of a trajectory the same credit. The animation shows two trajectories of one group, from the same noise. Before every random step it shows an estimate of the finished image (computed as in
# exercise 2) and the reward of the estimate. Which of the two has the better *first two steps*?

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowrl import preset, world
from flowrl.credit import StepwiseGain, Uniform
from flowrl.probes import Completion, Substeps
from flowrl.samplers import FlowSDE, Windowed
from flowrl.worlds import PolicyOptions
from flowrl_course import lesson_06 as lesson
from flowrl_course import recorded
from flowrl_course.batches import credit_gradients, ode_images, pairwise_cosines, sample_groups
from flowrl_course.figures import (
    ACCENT,
    COLOURS,
    DATA,
    INK,
    NOISE,
    OTHERS,
    SIGNED,
    ImageRow,
    animation,
    clean,
    panels,
    pixels,
    show_images,
)
from flowrl_course.recorded import cosine, measured
from flowrl_course.runs import train

shapes = world("shapes")
base = shapes.policy(PolicyOptions())
prompts = shapes.prompts("compositional", "train")[:8]
judge = shapes.reward("soft")
# steps 0 to 8 are random, the last one follows the ODE
sampler = Windowed(FlowSDE(0.7), range(9))
batch = sample_groups(
    base, judge, prompts, members=12, sampler=sampler, probe=Substeps(5), shared_noise=True
)
# the nodes of the table's columns: the states before the random steps, and the image
COLUMNS = [*range(9), 10]


def crossing(values):
    """The two members of one group whose reward curves cross most clearly: (prompt, early
    leader, final winner).
    """
    lead = values[:, :, None] - values[:, None]
    ahead, behind = lead[..., 1:-1].amax(-1), -lead[..., -1]
    size = torch.minimum(ahead, behind).flatten()
    index = int(size.argmax())
    members = values.shape[1]
    return index // members**2, index // members % members, index % members


group, leader, winner = crossing(batch.values)
estimates = batch.rollout.estimates


def estimate_of(member):
    """The estimated image at every column of the table, the last one finished, [column,
    channel, height, width].
    """
    index = group * 12 + member
    latents = [estimates[node] for node in range(9)]
    # node 0 has one row per group
    latents = [rows[index if len(rows) == len(prompts) * 12 else group] for rows in latents]
    return base.decode(
        torch.stack([*latents, batch.rollout.trajectories.images_latent[index]])
    )


def opening():
    """Two trajectories, their estimated images, and their reward curves."""
    figure, axes = panels(3, width=2.6, height=2.9, width_ratios=[1, 1, 2])
    frames, shades = [estimate_of(leader), estimate_of(winner)], (ACCENT, DATA)
    shown, lines = [], []
    for cell, images, shade, name in zip(
        axes[:2], frames, shades, ("trajectory A", "trajectory B"), strict=True
    ):
        shown.append(cell.imshow(pixels(images[0])))
        cell.set(xticks=[], yticks=[])
        cell.set_title(name, color=shade)
    for shade in shades:
        lines.append(axes[2].plot([], [], "o-", color=shade, markersize=4)[0])
    for member, shade, name in ((leader, ACCENT, "A"), (winner, DATA, "B")):
        axes[2].text(
            10.5,
            float(batch.values[group, member, -1]),
            name,
            color=shade,
            fontweight="bold",
            va="center",
        )
    axes[2].set(
        xlim=(-0.3, 11.4),
        ylim=(0, 1.05),
        xticks=range(0, 11, 2),
        xlabel="node (0 = noise, 10 = image)",
        ylabel="reward of the estimate",
    )
    axes[2].set_title(f'"{prompts[group].text}"')
    clean(axes[2])
    figure.get_layout_engine().set(wspace=0.06)
    figure.canvas.draw()

    def draw(frame):
        column = min(frame, 9)
        for image, images, line, member in zip(
            shown, frames, lines, (leader, winner), strict=True
        ):
            image.set_data(pixels(images[column]))
            line.set_data(COLUMNS[: column + 1], batch.values[group, member, : column + 1])

    return animation(figure, draw, frames=13, seconds=6.5)


opening()

# %% [markdown]
# A leads after two steps and ends lower. Flow-GRPO gives *every* step of A a lower advantage than every step of B, the good early steps included. This credit is right on average over many trajectories,
# but noisy, because the credit of each random step contains the effects of eight others. Stepwise-Flow-GRPO (Savani et al. 2026, arXiv 2603.28718) gives a step its own gain. Its Figure 1 has two such crossing curves.
#
# ## Decisions
#
# Credit belongs to **decisions**, the transitions that were drawn at random. An ODE step has only one possible result. The policy chooses nothing there, so an ODE step is not a decision and has no credit. We number the decisions $k = 0, \dots, D - 1$ in the order of sampling.
# Here steps 0 to 8 are random and step 9 follows the ODE, so there are ten steps and $D = 9$ decisions, and decision $k$ is step $k$. In contrast, with the window `2:7` of the lesson on Flow-GRPO, $D = 5$ and decision 0 is step 2.
#
# A credit rule reads a table with $D + 1$ columns, the **value table** `[prompt, member, decision+1]`. Column $k < D$ belongs to the state in which decision $k$ is made, column $D$ to the finished image. The next cell prints the decisions of our batch.

# %%
decisions = batch.decisions
print("decision k:  " + "  ".join(f"{k:4d}" for k in range(len(decisions))))
print("its step:    " + "  ".join(f"{step:4d}" for step in decisions.step))
print("its time t:  " + "  ".join(f"{time:4.2f}" for time in decisions.time))
print(f"value table: {tuple(batch.values.shape)} = prompts, members, D + 1")

# %% [markdown]
# ## Gains
#
# Let $V_k$ be the reward of the image that is estimated in the state before decision $k$. It stands for the expected reward there, but is the reward of one continuation. $V_D = R$ is the reward of the finished image. Decision $k$ gains
#
# $$g_k = V_{k+1} - V_k.$$
#
# The gain contains everything up to the next decision: the random step, and all ODE steps between the two. The last gain, $R - V_{D-1}$, contains the ODE steps to the finished image.
#
# ### Exercise 1 · values from gains
#
# *Difficulty: medium · kind: formula · importance: essential · time: 5 minutes*
#
# The log of a run contains the gains `[prompt, member, decision]` and the final rewards `[prompt, member]`, but not the value table. Recover it, `[prompt, member, decision+1]`.


# %% tags=["exercise"]
def values_from_gains(gained, final):
    """The value table of these gains and final rewards."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** What do the gains from decision $k$ to the last one add up to? `flip(-1).cumsum(-1).flip(-1)` sums from an entry to the end.


# %% tags=["solution"]
def values_from_gains(gained, final):
    """The value table of these gains and final rewards."""
    later = gained.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([final[..., None] - later, final[..., None]], dim=-1)


# %%
lesson.check_values(values_from_gains)

# %% [markdown] tags=["explanation"]
# **Why.** The gains *telescope*: $g_k + \dots + g_{D-1} = R - V_k$. In particular $\sum_k g_k = R - V_0$, so gains distribute the total change over the decisions. There is one column more than decisions. In `flowrl`: `credit.gains`.


# %%
def step_gains(values):
    """The change of the value in each decision."""
    return values[..., 1:] - values[..., :-1]


gained = step_gains(batch.values)
print(
    "sum of gains equals R - V_0:",
    torch.allclose(gained.sum(-1), batch.values[..., -1] - batch.values[..., 0], atol=1e-6),
)
for name, member in (("A", leader), ("B", winner)):
    print(
        f"{name}: R = {batch.values[group, member, -1]:.2f}, gains "
        + " ".join(f"{value:+.2f}" for value in gained[group, member])
    )
final = batch.values[group, :, -1]
for name, member in (("A", leader), ("B", winner)):
    print(
        f"{name}: uniform credit"
        f" {(final[member] - final.mean()) / final.std(unbiased=False):+.2f} at every step"
    )

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.0)
axes[0].plot(COLUMNS, batch.values[group].T, color="#d3d6dc", linewidth=0.8)
for name, member, shade in (("A", leader, ACCENT), ("B", winner, DATA)):
    axes[0].plot(COLUMNS, batch.values[group, member], "o-", color=shade, markersize=4)
    axes[0].text(
        10.15,
        float(batch.values[group, member, -1]),
        name,
        color=shade,
        fontweight="bold",
        va="center",
    )
    offset = -0.2 if name == "A" else 0.2
    axes[1].bar(
        torch.arange(9) + offset, gained[group, member], width=0.4, color=shade, label=name
    )
axes[0].set(
    xlabel="node",
    ylabel="reward of the estimate",
    title="The crossing (grey: the rest of the group)",
    xlim=(-0.3, 10.8),
)
axes[1].set(xlabel="decision k", ylabel="gain", title="Gains of A and B", xticks=range(9))
axes[1].axhline(0, color=INK, linewidth=0.8)
axes[1].legend(frameon=False)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# All curves begin at the same point: in Stepwise-Flow-GRPO the members of a group start from the *same* noise $z_0$, so that differences come from the decisions alone.
#
# ## Rewards of unfinished images
#
# The reward needs a clean image, so $V_k$ needs an estimate of the clean image. The Tweedie estimate $\hat x_0 = x_t - t v$ from a state $x_t$ is free. However, at early states it is the *mean* of all images that are still possible, and a judge
# of sharp images is unreliable for blurred means. The paper uses $T' = 5$ Euler steps on an even grid over $[t, 0]$ instead (its Figure 10 has similar results with 2, 5 and 8).
#
# ### Exercise 2 · a substep estimate
#
# *Difficulty: medium · kind: code · importance: essential · time: 8 minutes*
#
# `x` `[sample, dim]` is the state at time `t` (a number), `v` its velocity, which the rollout has already computed. `velocity(x, t)` evaluates the network at a time that is also a number, which is one network function evaluation (NFE). Return the estimate after `count` Euler steps of equal length from $t$ to 0,
# with as few network evaluations as possible.


# %% tags=["exercise"]
def substep_estimate(velocity, x, t, v, count):
    """The estimated image: `count` Euler steps from time t to 0."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Every substep has length $t/T'$. Substep 0 uses `v`; substep $k$ evaluates `velocity` at the current state and at time $t - k\,t/T'$.


# %% tags=["solution"]
def substep_estimate(velocity, x, t, v, count):
    """The estimated image: `count` Euler steps from time t to 0."""
    length = t / count
    for k in range(count):
        if k > 0:
            v = velocity(x, t - k * length)
        x = x - length * v
    return x


# %%
lesson.check_substeps(substep_estimate)

# %% [markdown] tags=["explanation"]
# **Why.** The first velocity is the rollout's own, so $T'$ steps cost $T' - 1$ new evaluations: with ten steps and nine decisions $10 + 9 \cdot 4 = 46$ evaluations per trajectory instead of the $10 + 9 \cdot 5 = 55$ of a direct implementation, and fewer if a group shares its first node. `count = 1` is the Tweedie
# estimate. In `flowrl` the probe `Substeps(5)` does this for the states of all decisions and trajectories in at most $T + T' - 1$ network calls.

# %% [markdown]
# **Try it.** Twelve small images make the exact velocity a closed form. Move the step, and compare the free one-step estimate with those that cost evaluations: which is the first one that a judge of sharp images could score?

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("estimates")

# %% [markdown]
# The next cell compares your function with the library on the image model, and then four estimators: one, two and five steps, and the whole remaining ODE on the sampler's own grid (as in TP-GRPO, the next lesson). The same seed gives the same trajectories. The distance of $V_k$ from $R$ contains the noise of all later decisions, which no estimate can know, so only its difference between estimators tells how good they are.

# %%
paths, node = batch.rollout.trajectories, 3
everyone = batch.condition.repeat(12)


def network(x, t):
    """The policy's velocity for all trajectories of the batch at time t; the input of an image
    transformer is 1000 t, per sample.
    """
    return base.velocity(x, torch.full((len(x),), 1000.0 * float(t)), everyone)


with torch.no_grad():
    ours = substep_estimate(
        network, paths.nodes[:, node], paths.schedule.times[node], paths.velocities[:, node], 5
    )
print(
    f"largest difference from the library: {float((ours - estimates[node]).abs().max()):.0e}"
    " (latents are of size 1)"
)
probes = {
    "1 step (Tweedie)": Substeps(1),
    "2 steps": Substeps(2),
    "5 steps": Substeps(5),
    "whole ODE": Completion(),
}
tables = {}
for name, probe in probes.items():
    scored = sample_groups(base, judge, prompts, 12, sampler, probe, shared_noise=True)
    tables[name] = scored
    error = (scored.values - scored.values[..., -1:]).square().mean((0, 1)).sqrt()
    print(
        f"{name:<17} {scored.usage.nfe / 96:5.1f} NFE per trajectory; rms of V_k - R for k = 1"
        " to 6: " + " ".join(f"{e:.2f}" for e in error[1:7])
    )

# %% [markdown] tags=["expected"]
# largest difference from the library: 0..1e-3 (latents are of size 1)
# 1 step (Tweedie)    9.1 NFE per trajectory; rms of V_k - R for k = 1 to 6: 0.62 0.52 0.38 0.22 0.16 0.08
# 2 steps            17.2 NFE per trajectory; rms of V_k - R for k = 1 to 6: 0.37 0.33 0.25 0.19 0.14 0.08
# 5 steps            41.4 NFE per trajectory; rms of V_k - R for k = 1 to 6: 0.33 0.28 0.22 0.21 0.16 0.08
# whole ODE          45.8 NFE per trajectory; rms of V_k - R for k = 1 to 6: 0.33 0.29 0.22 0.21 0.15 0.08

# %% tags=["hide-input"]
index, shown = group * 12 + winner, [1, 2, 3, 4, 5, 7]
rows = []
for name in ("1 step (Tweedie)", "5 steps", "whole ODE"):
    scored = tables[name]
    latents = [scored.rollout.estimates[node][index] for node in shown]
    latents = torch.stack([*latents, scored.rollout.trajectories.images_latent[index]])
    rows.append(
        ImageRow(base.decode(latents), scored.values[group, winner, [*shown, -1]], name)
    )
heads = [*(f"before decision {k}" for k in shown), "finished"]
show_images(
    *rows,
    heads=heads,
    title=(
        f'Estimates of trajectory B ("{prompts[group].text}") by three estimators, and their'
        " rewards"
    ),
    size=1.1,
)
plt.show()
figure, axes = panels(2, width=4.0, height=2.9)
shades = dict(
    zip(
        probes,
        (NOISE, OTHERS[0], OTHERS[1], OTHERS[3]),
        strict=True,
    )
)
for name, scored in tables.items():
    mean = scored.values.mean((0, 1))
    axes[0].plot(COLUMNS, mean, "o-", color=shades[name], markersize=3, label=name)
    distance = (scored.values - scored.values[..., -1:]).square().mean((0, 1)).sqrt()
    axes[1].plot(COLUMNS, distance, "o-", color=shades[name], markersize=3)
axes[0].set(
    xlabel="decision k (10: image)",
    ylabel="mean of V_k",
    title="Blurred estimates have low rewards",
    ylim=(0, 0.8),
)
axes[1].set(
    xlabel="decision k (10: image)",
    ylabel="rms of V_k - R",
    title="Distance from R, later noise included",
    ylim=(0, None),
)
axes[0].legend(frameon=False, fontsize=8)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# The rewards of one-step estimates begin near that of a grey blur and rise for all trajectories, so their gains mostly measure the sharpness of the estimate. Five substeps are close to the whole ODE. (With a sampler of ten steps both cost about the same, since five or six steps remain on average. With forty steps the ODE would cost four times as much.) On the right no estimator comes near 0 at early states, because most of the noise
# that determines the image has not been drawn yet.

# %% [markdown]
# ## Figure 1 of the paper
#
# The animation at the top is this world's version of the paper's Figure 1, with other estimates (five substeps instead of Tweedie). You do not need the paper for this section; its times are printed below. In it, $t$ is always the time of a state. Read such a figure in this order:
#
# 1. **Axis.** The paper labels states by their time $t$, from 1 (noise) to 0. It writes $r_t$ for the reward at $t$ and $g_t = r_{t-1} - r_t$ for the gain, in which $t-1$ is the *next*, less noisy state of the grid. So $g_t$ belongs to the step that *leaves* the state at $t$.
# 2. **Quantity.** Each curve shows the PickScore of the Tweedie estimate $\hat x_0(t)$ of a single trajectory. An estimate at an early state is not an image that the sampler would produce.
# 3. **Claim.** Trajectory 0 dips at $t = 0.86$ and recovers, trajectory 1 drops at $t = 0.71$, and both end near 0.90. Uniform credit is nearly equal for both. Gains differ at the marked steps.
# 4. **Evidence.** Two trajectories illustrate the idea. The evidence for faster learning is in the right panel and in Figures 4 and 5. Figure 4 has training steps on the horizontal axis, so it omits the extra cost of the estimates; Figure 5 has hours. Table 2 gives the factor between the two: an iteration takes 1.8 to 2.4 times as long. For every such curve, ask also how many seeds were run.
#
# ### Exercise 3 · from the paper's labels to steps
#
# *Difficulty: easy · kind: formula · importance: useful · time: 5 minutes*
#
# The next cell prints the grid of SD3 with ten steps, whose nodes match the times in the caption. (In the paper every step is random, so step $i$ is decision $i$.) Give the numbers of our steps: the step whose gain the paper calls $g_{0.86}$, the step whose gain it calls $g_{0.71}$, and the step that leads *into* the dip at $t = 0.86$.

# %%
scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
scheduler.set_timesteps(10)
print("node: " + "  ".join(f"{node:4d}" for node in range(10)))
print("t:    " + "  ".join(f"{float(t):.2f}" for t in scheduler.sigmas[:10]))

# %% tags=["exercise"]
figure_1 = {"g at 0.86": ..., "g at 0.71": ..., "into the dip at 0.86": ...}


# %% [markdown] tags=["hint"]
# **Hint.** Find the two times in the row `t`, and read the node number above. Step $i$ leaves node $i$ and enters node $i + 1$.

# %% tags=["solution"]
figure_1 = {"g at 0.86": 3, "g at 0.71": 5, "into the dip at 0.86": 2}

# %%
lesson.check_figure_1(figure_1)

# %% [markdown] tags=["explanation"]
# **Why.** $t = 0.86$ is node 3 and $t = 0.71$ node 5, and step $i$ leaves node $i$. The low point of a dip at node 3 is the *result* of step 2, whose gain is negative; step 3 leads out of the dip, so $g_{0.86}$ is positive for trajectory 0. For every label in such a figure, decide whether it names a state or the step after the state.

# %%
figure, axes = panels(width=7.0, height=3.0)
grid = batch.rollout.trajectories.schedule.times
for member, shade, name in ((leader, ACCENT, "A"), (winner, DATA, "B")):
    axes.plot(
        COLUMNS,
        batch.values[group, member],
        "o-",
        color=shade,
        markersize=4,
        label=f"trajectory {name}",
    )
low = int(gained[group, leader].argmin())
start, end = (float(batch.values[group, leader, column]) for column in (low, low + 1))
axes.annotate(
    "",
    (COLUMNS[low + 1], end),
    (low, start),
    arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.6},
)
label = f"$g_{{{float(grid[low]):.2f}}}$ = {end - start:+.2f}: decision {low}"
axes.text(low + 1.6, (start + end) / 2 - 0.07, label, fontsize=9)
axes.set(
    xticks=COLUMNS,
    xlabel="t of the state (noise → image)",
    ylabel="reward of the estimate",
    ylim=(0, 1.05),
)
axes.set_xticklabels([*(f"{float(t):.2f}" for t in grid[:-2]), "0"])
axes.set_title("The two trajectories with the paper's labels", fontsize=10)
axes.legend(frameon=False, fontsize=8, loc="center right")
clean(axes)
plt.show()
print(f"largest loss of trajectory A: decision {low}, {start:.2f} to {end:.2f}")

# %% [markdown]
# Trajectory A is an extreme case of the paper's argument: a good early decision is followed by one that loses most of the reward, and uniform credit gives both the same negative number.
#
# ## When is reward gained?
#
# Let us see at which decisions most of the reward is gained. Before we compute it, predict the result.
#
# ### Exercise 4 · the largest gains
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# We compute the mean $|g_k|$ of each decision over all trajectories. How does it depend on $k$?
#
# - **a** it grows with $k$, since the estimates become more accurate
# - **b** it is largest at the first decisions and nearly 0 at the last
# - **c** it is largest in the middle, where the image takes shape

# %% tags=["exercise"]
largest_gains = "..."

# %% [markdown] tags=["hint"]
# **Hint.** A gain is large if the decision changes the estimated image in a way that the judge can see. Remember the experiment of the lesson on Flow-GRPO in which one step alone was random.

# %% tags=["solution"]
largest_gains = "b"

# %%
lesson.check_largest_gains(largest_gains)

# %% [markdown] tags=["explanation"]
# **Why.** A gain compares two estimates, before and after the noise of one decision. Early noise selects among many images, so the estimates differ. Late noise changes an image that is nearly determined. The accuracy of the estimate is another matter: an accurate estimate can have a small gain.

# %% [markdown]
# The next cell prints the mean $|g_k|$ per decision, and the values of the paper (read off its Figure 2; SD3.5 and another reward, so only the shape can be compared).

# %%
paper = torch.tensor([0.031, 0.022, 0.018, 0.011, 0.009, 0.0065, 0.006, 0.007, 0.011, 0.0006])
size = gained.abs().mean((0, 1))
print("mean |gain| here:      " + " ".join(f"{value:.3f}" for value in size))
print("fraction here:         " + " ".join(f"{value:5.1%}" for value in size / size.sum()))
print("fraction in the paper: " + " ".join(f"{value:5.1%}" for value in paper / paper.sum()))

# %% tags=["hide-input"]
figure, axes = panels(width=6.0, height=2.8)
axes.bar(
    torch.arange(9) - 0.2,
    100 * size / size.sum(),
    width=0.4,
    color=COLOURS["stepwise-flow-grpo"],
)
axes.bar(torch.arange(10) + 0.2, 100 * paper / paper.sum(), width=0.4, color=NOISE)
axes.text(3.6, 16, "this world", color=COLOURS["stepwise-flow-grpo"])
axes.text(7.0, 10.5, "the paper (SD3.5)", color=NOISE)
axes.set(
    xlabel="decision (0 = from pure noise)",
    ylabel="fraction of all |gain| (%)",
    title="Early steps have the largest gains",
)
axes.set_xticks(range(10))
clean(axes)
plt.show()

# %% [markdown]
# In both, the early decisions have the largest gains. Here the first three are about equal, and those after decision 6 are nearly 0. The paper's values fall faster at first and rise again at step 8, which does not happen in this world. (The paper's ten steps are all random, whereas only nine of ours are.)
#
# ## Normalise jointly or step by step?
#
# GRPO divides by a standard deviation. For gains this can be the standard deviation over the members, *step by step* (decision by decision), or over members and decisions of the group *jointly*. The paper uses the second, and compares both in its Figure 9. With mean and std over members and decisions of the group,
#
# $$A_k = \frac{g_k - \operatorname{mean}(g)}{\operatorname{std}(g) + 10^{-4}}.$$
#
# ### Exercise 5 · who gets the credit?
#
# *Difficulty: medium · kind: formula · importance: essential · time: 8 minutes*
#
# In one group, the gains of decision $k$ have the mean `means[k]` and the (population) standard deviation `stds[k]` over the members; both are `[decision]`. Return the mean square of $A_k$ over the members, `[decision]`, with joint normalisation (neglect the $10^{-4}$). (Think about two more questions before you open the explanation: what is it with normalisation step by step, and what credit does a decision get whose gain is large, but equal for all members?)


# %% tags=["exercise"]
def mean_squares(means, stds):
    """The mean square of every decision's joint advantage."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** $\operatorname{mean}(g)$ is the mean of `means`. The mean square of $g_k - \operatorname{mean}(g)$ over members has two parts, the variance and the square of the mean's distance. $\operatorname{std}(g)^2$ is the average of these mean squares over the decisions.


# %% tags=["solution"]
def mean_squares(means, stds):
    """The mean square of every decision's joint advantage."""
    squares = stds.square() + (means - means.mean()).square()
    return squares / squares.mean()


# %%
lesson.check_mean_squares(mean_squares)

# %% [markdown] tags=["explanation"]
# **Why.** Step by step every decision gets the mean square 1. Jointly, a decision with large differences between members keeps more credit than one with small differences. But the joint mean is not the mean of the decision. A gain that all members share remains as credit, although it says nothing about which member chose better. It adds noise to the gradient, and no bias, because it is a baseline.
#
# Mean and standard deviation run over decisions only. An ODE step has a gain of about 0 for every member, so as an entry of the table it would lower the standard deviation. The advantages of all decisions would then grow with the number of ODE steps. In `flowrl`: `credit.StepwiseGain()`; its other pools are options (`normalise="step"`, `pool="batch"`).


# %%
def joint_advantages(gained):
    """Stepwise-Flow-GRPO's credit from gains."""
    centred = gained - gained.mean(dim=(1, 2), keepdim=True)
    return centred / (gained.std(dim=(1, 2), keepdim=True, unbiased=False) + 1e-4)


joint = joint_advantages(gained)
alone = StepwiseGain(normalise="step").assign(batch.values, batch.decisions)
print(
    "joint, mean |A| per decision:        "
    + " ".join(f"{value:.2f}" for value in joint.abs().mean((0, 1)))
)
print(
    "step by step, mean |A| per decision: "
    + " ".join(f"{value:.2f}" for value in alone.abs().mean((0, 1)))
)

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.6, height=3.1)
for cell, values, title in (
    (axes[0], joint, "joint: late decisions are small"),
    (axes[1], alone, "step by step: all alike"),
):
    shown = cell.imshow(values[group], cmap=SIGNED, vmin=-3, vmax=3, aspect="auto")
    cell.set(xlabel="decision", ylabel="member", title=title)
    cell.set_xticks(range(9))
figure.colorbar(shown, ax=axes, label="advantage (blue: positive)")
plt.show()

# %% [markdown]
# Normalised step by step, decisions 7 and 8 get advantages of the same size as decision 1, although their gains are a hundred times smaller. So the normalisation amplifies differences that hardly matter. Normalised jointly, all decisions have one unit: an advantage is the gain minus the group's mean gain, in standard deviations of the group. What remains at the last decisions (about 0.09) is this common mean, not a gain.
#
# With shared noise the joint rule has a useful property: $\sum_k A_k = (R - \operatorname{mean} R)/\operatorname{std}(g)$, up to the $10^{-4}$. The reason is that the gains sum to $R - V_0$, all members share $V_0$, and $D$ times the mean gain is $\operatorname{mean} R - V_0$. The total credit of a trajectory is therefore that of Flow-GRPO, up to a factor per group. Only its distribution over the decisions differs.

# %%
total = joint.sum(-1)
flow = batch.values[..., -1] - batch.values[..., -1].mean(1, keepdim=True)
spread = gained.std(dim=(1, 2), unbiased=False)[:, None] + 1e-4
print(
    "largest |std(g) x sum of A - (R - mean R)|:"
    f" {float((total * spread - flow).abs().max()):.0e}"
)

# %% [markdown] tags=["expected"]
# largest |std(g) x sum of A - (R - mean R)|: 0..1e-5

# %% [markdown]
# ### Exercise 6 · the estimate of the wrong state
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 6 minutes*
#
# A colleague computes gains as follows (independent noise, one prompt). All shapes are right and nothing fails, but one line is wrong. Which one?
#
# ```python
# latents = [estimates[j] for j in range(9)]                               # line 1: before decisions 0 to 8
# before = torch.stack([judge.score(base.decode(x), texts) for x in latents], dim=-1)      # line 2
# final = judge.score(base.decode(images_latent), texts)                   # line 3
# values = torch.cat([final[:, None], before], dim=-1)                     # line 4: the value table
# gained = values[:, 1:] - values[:, :-1]                                  # line 5
# ```

# %% tags=["exercise"]
wrong_line = ...

# %% [markdown] tags=["hint"]
# **Hint.** Write down for one trajectory which two rewards are subtracted for decision 0, and which for decision 8.

# %% tags=["solution"]
wrong_line = 4

# %%
lesson.check_wrong_line(wrong_line)

# %% [markdown] tags=["explanation"]
# **Why.** The finished image belongs to the last column. With the final reward in front, "decision 0" gets $V_0 - R$, the *negative* total change, and every other decision the gain of the one before it. The shape of the table is right, so nothing fails. A cheap test finds such errors: the gains of a trajectory must sum to $R - V_0$.

# %% [markdown]
# ## From gains to reward-to-go
#
# A gain ignores later effects: a decision may lower the expected reward now and raise it later. The other extreme is the *reward-to-go* $R - V_k$, the total gain from decision $k$ on. Generalised advantage estimation (arXiv 1506.02438, equation 16, with $V_k$ as the value) interpolates between them:
#
# $$A_k = \sum_{j \ge 0} \lambda^j\, g_{k+j}, \qquad \lambda = 0:\ g_k, \qquad \lambda = 1:\ R - V_k.$$
#
# TP-GRPO uses the reward-to-go at its turning points, as the lesson on TP-GRPO shows. The paper compares gains with generalised advantages in its Figure 7, and finds plain gains as good as the alternatives.
#
# ### Exercise 7 · the error of the estimates
#
# *Difficulty: harder · kind: formula · importance: useful · time: 10 minutes*
#
# Suppose that every estimate is wrong by an independent error, $V_j = V^*_j + e_j$, with standard deviation 1. The reward of the finished image has no error. The sum $A_k$ runs over `remaining` $= D - k$ gains. Return the standard deviation of the error that the $e_j$ cause in $A_k$, for `lam` $= \lambda$ between 0 and 1. Which $\lambda$ makes it smallest, and what does this $\lambda$ cost?


# %% tags=["exercise"]
def credit_error(lam, remaining):
    """The standard deviation of the error of A_k."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Most $V_j$ occur in two neighbouring gains. Collect the factor of each $V_j$ in the sum: of $V_k$, of those between, and of $R$. Only then add up variances.


# %% tags=["solution"]
def credit_error(lam, remaining):
    """The standard deviation of the error of A_k."""
    weights = [(1 - lam) * lam**j for j in range(remaining - 1)]
    return (1 + sum(weight**2 for weight in weights)) ** 0.5


# %%
lesson.check_credit_error(credit_error)

# %% [markdown] tags=["explanation"]
# **Why.** $V_k$ has the factor $-1$, $V_{k+j}$ the factor $\lambda^{j-1} - \lambda^j = (1-\lambda)\lambda^{j-1}$, and $R$ the factor $\lambda^{D-1-k}$. A gain contains two errors, so $\sqrt2$; the reward-to-go contains one, so 1. At $\lambda = 1$ the credit contains instead the luck of all later decisions, which the gain does not have. If the error of the estimates exceeds this luck, a larger $\lambda$ is better. In `flowrl`: `StepwiseGain(lam=...)`.

# %% [markdown]
# ## The value of better credit
#
# A credit rule determines a gradient. If the gradient is mostly noise, two independent batches give gradients in different directions. To measure this, the next cell samples four batches (8 groups of 12, task `preference`, the window of the lesson on Flow-GRPO). It computes the policy gradient of each rule on the *same* trajectories, and
# prints the cosine between the gradients of different batches (about half a minute).

# %%
window = Windowed(FlowSDE(0.7), range(2, 7))
palette = shapes.prompts("preference", "train")
batches = [
    sample_groups(base, judge, part, 12, window, Substeps(5), shared_noise=True, seed=seed)
    for seed, part in enumerate(palette[8 * k % 24 :][:8] for k in range(4))
]
rules = {
    "uniform (Flow-GRPO)": Uniform(),
    "gains, joint": StepwiseGain(),
    "gains, step by step": StepwiseGain(normalise="step"),
    "reward-to-go, joint": StepwiseGain(lam=1.0),
}
cosines, by_rule = {}, {}
by_batch = [credit_gradients(batch, list(rules.values())) for batch in batches]
for name, gradients in zip(rules, zip(*by_batch, strict=True), strict=True):
    by_rule[name], pairs = list(gradients), pairwise_cosines(gradients)
    cosines[name] = float(pairs.mean())
    print(
        f"{name:<22} cosine between batches {cosines[name]:.2f} (std over pairs"
        f" {pairs.std():.2f})"
    )

# %% [markdown]
# Credit for single decisions gives a much clearer gradient than uniform credit, and joint normalisation a clearer one than step by step, in agreement with the paper. (The agreement of two gradients does not prove that their direction is right. The lesson Test your own rule compares it with the true gradient; in two dimensions the direction of the jointly normalised gains is right.)
#
# ### Exercise 8 · how many batches?
#
# *Difficulty: harder · kind: formula · importance: optional · time: 8 minutes*
#
# Write a batch's gradient as signal plus noise, $a + b$, with the signal-to-noise ratio $q = |a|^2 / \mathbb E|b|^2$. In many dimensions the noises of two batches are nearly orthogonal to each other and to $a$. So the inner product of two batches is about $|a|^2$, and the squared length of each is about $|a|^2 + \mathbb E|b|^2$. Their cosine is therefore about $q/(q + 1)$. The mean of $n$ batches divides $\mathbb E|b|^2$ by $n$. How many batches of rule 1
# (cosine `weak`) have the same $q$ as one batch of rule 2 (cosine `strong`)? The number need not be whole.


# %% tags=["exercise"]
def batches_worth(weak, strong):
    """How many batches of the weaker rule one batch of the stronger is worth."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Solve cosine $= q/(q + 1)$ for $q$. With $n$ batches $q$ is $n$ times as large; set it equal to the $q$ of the other rule.


# %% tags=["solution"]
def batches_worth(weak, strong):
    """How many batches of the weaker rule one batch of the stronger is worth."""
    return strong / (1 - strong) * (1 - weak) / weak


# %%
lesson.check_worth(batches_worth)

# %% [markdown] tags=["explanation"]
# **Why.** Solving for $q$ gives cosine / (1 − cosine), and $n$ batches have $nq$. So the answer is the ratio of the two $q$, not of the cosines.


# %%
def worth_without(left_out):
    """How many batches of uniform credit one of gains is worth, without one batch."""
    kept = [
        [gradient for index, gradient in enumerate(by_rule[name]) if index != left_out]
        for name in ("uniform (Flow-GRPO)", "gains, joint")
    ]
    return batches_worth(*(float(pairwise_cosines(gradients).mean()) for gradients in kept))


worth, parts = worth_without(None), [worth_without(index) for index in range(4)]
spent, plain = batches[0].usage.nfe / 96, 10
print(
    f"one batch of stepwise credit is worth about {worth:.0f} batches of uniform credit"
    f" ({min(parts):.0f} to {max(parts):.0f} if one of the four batches is left out)"
)
print(
    f"sampling: {spent:.1f} against {plain} NFE per trajectory, {spent / plain:.1f} times as"
    " many"
)
print(
    f"with the update (5 decisions, 3 each): {(spent + 15) / (plain + 15):.1f} times as many"
)

# %% [markdown]
# Sampling costs less than the 41.4 evaluations above: with this window only five states need an estimate, and the members of a group share the first three nodes. (Decision 0 is step 2 here, and its gain counts from the shared state.) An update costs about three evaluations per decision: one forward, and two for the backward pass.
#
# On this task, at the start of training, stepwise credit is worth more than it costs. On the task `compositional` the same experiment is inconclusive: with 96 trajectories all cosines are about as small as their spread over pairs. (Replace `"preference"` above to see this.) Moreover, a clearer gradient does not imply a better
# model after training.
#
# ### Exercise 9 · choose the estimate
#
# *Difficulty: harder · kind: design · importance: useful · time: 8 minutes*
#
# You train a model with 40 sampling steps. Gains are computed at 5 decisions, and one trajectory may cost at most 80 evaluations for sampling and estimates. Each member starts from its own noise. An estimate with $T'$ substeps costs $T' - 1$ new evaluations, since the rollout has computed the first velocity. The ODE completion from node $j$ costs $40 - j - 1$. Choose the `nodes` of the five decisions (increasing, before node 39)
# and the `probe`: `"completion"`, or the number $T'$ of substeps. The estimates must be as close to the whole ODE as those of five substeps above. The figure after exercise 4 shows after which of ten decisions nearly nothing is gained; a node of 40 is four times as far.

# %% tags=["exercise"]
choice_of_probe = {"nodes": [...], "probe": ...}

# %% [markdown] tags=["hint"]
# **Hint.** Sampling costs 40 evaluations, so 40 remain for the five estimates, 8 each on average. What do completions cost at nodes that are early enough to have a gain?

# %% tags=["solution"]
choice_of_probe = {"nodes": [4, 8, 12, 16, 20], "probe": 5}

# %%
lesson.check_choice_of_probe(choice_of_probe)

# %% [markdown] tags=["explanation"]
# **Why.** Five estimates of five substeps cost $5 \cdot 4 = 20$ evaluations at any nodes; up to nine substeps fit. Completions fit only if the remaining steps are few, that is, at late nodes, where nothing is gained any more. Two substeps would be cheaper, but their early estimates above are farther from $R$. Substeps have the advantage that their cost does not depend on the number of sampling steps.

# %% [markdown]
# **Try it.** Move the sampling steps from 10 to 40 with all steps random, and compare the estimates of five substeps with full completions (TP-GRPO, the next lesson). Then train five steps only.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("budget")

# %% [markdown]
# ## Training
#
# The clearer gradient suggests faster training. To test this, the next cell trains for six iterations with each rule, with the same settings and seed (about half a minute).

# %%
settings = preset("default").apply(task="preference", groups=8, group_size=12, iterations=6)
runs = {
    name: train(settings.replace(method=name)) for name in ("flow-grpo", "stepwise-flow-grpo")
}
for name, run in runs.items():
    scores = run.evaluation.scores
    print(
        f"{name:<19} training reward"
        f" {' '.join(f'{value:.2f}' for value in run.curve('reward_mean'))}; held out: soft"
        f" {scores['soft']:.2f}, strict {scores['strict']:.2f}; sampling"
        f" {sum(run.curve('nfe')):,} NFE"
    )

# %% [markdown] tags=["expected"]
# flow-grpo           training reward 0.75 0.79 0.80 0.83..0.87 0.85..0.91 0.85..0.91; held out: soft 0.83..0.91, strict 0.60..0.84; sampling 5,760 NFE
# stepwise-flow-grpo  training reward 0.78 0.70 0.85 0.85..0.92 0.80..0.90 0.87..0.95; held out: soft 0.84..0.93, strict 0.60..0.84; sampling 13,584 NFE

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.0, height=2.8, sharey=True)
for name, run in runs.items():
    rewards, spent_nfe = run.curve("reward_mean"), torch.tensor(run.curve("nfe")).cumsum(0)
    axes[0].plot(range(1, 7), rewards, "o-", color=COLOURS[name], label=name)
    axes[1].plot(spent_nfe / 1000, rewards, "o-", color=COLOURS[name])
axes[0].legend(frameon=False, fontsize=8, loc="lower right")
axes[0].set(xlabel="iteration", ylabel="mean training reward (soft)", title="Per iteration")
axes[1].set(xlabel="network evaluations while sampling (thousands)", title="Per evaluation")
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# After six iterations with one seed and 8 groups each, the difference of the two is within chance (96 held-out samples, standard error about 0.05 in `strict`). Flow-GRPO used about two fifths of the evaluations for sampling. So in this short run the clearer gradient does *not* give a better model. The lesson Side by side shows how many seeds such a comparison needs.
#
# ## The paper's figures, reproduced
#
# The training above is short. The next cells show recorded runs with settings from a search of equal size for every rule: 15 seeds in the 2-D world, and at least 11 seeds with images (`docs/studies.md` has their commands).
#
# Numbers are differences of the mean held-out reward over training, unless a row says otherwise, with 95% intervals over paired seeds. Rows are from the 2-D world unless they say *images*. The published values belong to SD3.5 and other rewards, so only directions can be compared. *Better* and *worse* are differences from 0 that remain after a correction for several questions. *Slight* is an effect below what matters (5% of what can be gained), and *equal* means that larger effects are excluded; 5% are 0.04 in the 2-D world and 0.008 with images. *Undecided* is neither, or not significant after the correction for several questions, although a single interval may exclude 0. The other items of the paper, and what is still to be run, are in `docs/papers/coverage.md`; `docs/verdict.md` compares all methods in later runs with other settings, so its numbers differ.

# %% tags=["hide-input"]
recorded.table(
    (
        "Figure 4: gains - uniform, per update",
        "better in 3 of 4",
        measured("stepwise-updates"),
        "undecided",
    ),
    ("  images", "", measured("stepwise-updates", 0, "shapes"), "better"),
    (
        "Figure 5: per evaluation",
        "better per hour in 3 of 4",
        measured("stepwise-cost"),
        "worse",
    ),
    ("  images", "", measured("stepwise-cost", 0, "shapes"), "worse"),
    (
        "  images, per second of SD3.5-Medium",
        "",
        measured("stepwise-cost", 2, "shapes"),
        "worse",
    ),
    ("Figure 9: joint - by step", "better", measured("joint-normalisation"), "equal"),
    (
        "  joint: cosine to the true gradient",
        "not at hand",
        cosine("StepwiseGain(joint), T'=5"),
        "close",
    ),
    (
        "  by step: cosine to the true gradient",
        "not at hand",
        cosine("StepwiseGain(step), T'=5"),
        "worse",
    ),
    ("Figure 10: T' = 1 minus 5", "similar", measured("substeps"), "worse"),
    ("  T' = 2 minus 5", "similar", measured("substeps", 1), "worse"),
    ("  T' = 8 minus 5", "similar", measured("substeps", 2), "slight"),
    (
        "DDIM-inspired SDE - Flow-SDE, gains",
        "better; curves not at hand",
        measured("ddim-sde"),
        "slight",
    ),
    ("  log-density of untrained samples", "cleaner", measured("ddim-sde", 2), "better"),
)

# %% [markdown]
# Here is the same noise after the two short runs of this lesson. Both models improve on the base model, and differ from each other in details.

# %% tags=["hide-input"]
shown = palette[:6]
rows = []
for name, policy in (
    ("base model", base),
    *((name, run.policy) for name, run in runs.items()),
):
    finished = ode_images(policy, judge, shown, seed=4)
    rows.append(ImageRow(finished.images, finished.rewards, name))
show_images(
    *rows,
    heads=[prompt.text for prompt in shown],
    size=1.1,
    title="The same noise, before and after six iterations",
)
plt.show()

# %% [markdown]
# The recorded learning curves per update, per evaluation and per second, first in the 2-D world, then with images:

# %% tags=["hide-input"]
axes_of = {"Per update": "updates", "Per evaluation": "forwards", "Per second": "seconds"}
recorded.curves({title: ("stepwise-updates", axis) for title, axis in axes_of.items()})
recorded.curves(
    {title: ("stepwise-updates", axis) for title, axis in axes_of.items()}, "shapes"
)

# %% [markdown]
# Per update stepwise gains end higher, in the 2-D world because some runs with uniform credit fall again. Per evaluation the order is reversed while the reward rises, because an iteration costs more, as in the paper's Table 2. The paper nevertheless reports a lead per hour on SD3.5. One difference may explain this: our worlds are easy, so uniform credit learns them in few iterations. Rewards, which cost nearly nothing here, do not: Stepwise-Flow-GRPO scores more images, so dear rewards would favour uniform credit.

# %% tags=["hide-input"]
area = "area"
recorded.dots(
    {
        "Figure 9": ("joint-normalisation", area),
        "Figure 10": ("substeps", area),
        "The SDE": ("ddim-sde", area),
    }
)
recorded.dots(
    {"Figure 7, moving average": ("plain-gains", area), "Figure 7, λ": ("lambda", area)}
)

# %% [markdown]
# Two results contradict the paper in this world. One or two substeps are far worse than five: the reward rises at first and then falls. A shift of the last gain that all members share is a baseline and does no harm, so it cannot be the reason. The error of $V_{k+1}$ also depends on decision $k$, and training on it can raise the reward of the estimate instead of that of the image; this was not tested. And joint normalisation does not learn faster than step by step, although its gradient is clearer and closer to the true one. The DDIM-inspired SDE gives better samples before training, but does not speed up learning.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. A trajectory has 10 steps, of which steps 2 to 6 are random. How many columns has its value table? **a** 5 **b** 6 **c** 11
# 2. The members of a group share $z_0$ and each has $R - V_0 = 0$, but different gains. With joint normalisation the sum of the advantages of a trajectory is **a** 0, **b** the same positive number for all, **c** different for each member.
# 3. All estimates of unfinished images are too low by the same amount; only $R$ is exact. Which gain is wrong? **a** the first **b** the last **c** all of them
# 4. Why can step-by-step normalisation harm? **a** It changes the sign of gains. **b** It gives decisions without effect advantages of full size. **c** It removes the differences between members.
# 5. Rule B has a clearer gradient than rule A at equal trajectories. Which measurement decides between them? **a** the cosine between batches **b** the reward per update **c** the reward at equal evaluations, over several seeds

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are in the sections on decisions, on joint normalisation, on gains, on joint or step by step, and on training, in this order.

# %% tags=["solution"]
quiz = {1: "b", 2: "a", 3: "b", 4: "b", 5: "c"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: five decisions and the finished image. 2: the gains of each member sum to $R - V_0 = 0$, and so do the advantages, because the mean gain is 0, too. 3: a common error cancels in $V_{k+1} - V_k$, but not in $R - V_{D-1}$. 4: the std of a decision without effect is tiny, and the division removes this information. 5: the cosine says nothing about cost or about the model after training.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | decision $k$ | a transition that was drawn; ODE steps are not decisions | `Decisions`: `step`, `time`, `mask`, ... |
# | $V_k$; $R$ | reward of the image that is estimated before decision $k$; of the finished image | value table: `score_rollout(...).values[..., k]`; `[..., -1]` |
# | $T'$ | Euler steps of the estimate | the probe `Substeps(5)`; `Tweedie()` is 1 |
# | $g_k = V_{k+1} - V_k$ | gain of decision $k$, with the ODE steps up to the next one | `credit.gains` |
# | joint $A_k$ | gains, one mean and std per group | `credit.StepwiseGain()` |
# | $\lambda$ | 0: gains, 1: reward-to-go | `StepwiseGain(lam=...)`, `credit.generalised_gains` |
# | same $z_0$ | members of a group share their noise | `Groups(..., shared_noise=True)` |
#
# On the command line: `flowrl train --method stepwise-flow-grpo --task preference --out runs/stepwise`.
#
# ## Symbols
#
# {symbols: $z_j$; step $i$; $\hat x_0$; decision $k$; $D$; $V_k$; $R$; $g_k$; $R - V_k$; $T'$}
#
# ## Further reading
#
# - Savani et al. 2026, *Stepwise credit assignment for GRPO on flow-matching models* (arXiv 2603.28718): the paper of this lesson. No code is public.
# - Schulman et al. 2015, *High-dimensional continuous control using generalized advantage estimation* (arXiv 1506.02438): equation 16 is the sum before exercise 7.
# - He et al. 2025, *TempFlow-GRPO* (arXiv 2508.04324): credit of a step from branches, and weights by the noise of a step.
# - *DenseGRPO* (arXiv 2601.20218): gains of ODE completions, normalised step by step; its noise level per step is not in
#   `dense-grpo`.
# - Ng, Harada and Russell 1999, *Policy invariance under reward transformations* (ICML): why differences of a potential, such as gains, do not change the optimal policy.
#
# **Next:** [7 · TP-GRPO](07_tp_grpo.ipynb) gives some steps credit for everything that follows them.

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
# # 12 · Branching
#
# **After this lesson you can** measure the credit of a decision by splitting the trajectory there, explain what siblings isolate and what a comparison by depth adds, choose leaf or edge weights, and count the cost of a tree.
#
# **Time** 80 minutes, of which the computer needs less than one. **You need** the lesson on Stepwise-Flow-GRPO; the lesson Test your own rule helps with the last two sections.
#
# The lessons on Stepwise-Flow-GRPO and TP-GRPO computed values of unfinished states by extra evaluations, on which nothing is trained. A *branching rollout* gets these values from the trajectories themselves: at some steps a trajectory continues as several, each with its own noise. All of them are trained, and they share the evaluations of their common past.
# The figure shows one such tree in the 2-D world. Its trajectory splits at step 0 and at step 2; the cross is the target. Which of the two splits changed the expected result more?

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import numpy as np
import torch

from flowrl.credit import (
    DepthRelative,
    SiblingRelative,
    StepwiseGain,
    Uniform,
    group_deviations,
)
from flowrl.probes import Branch, Comb
from flowrl.rollout import Groups, Usage
from flowrl.bench.gradients import (
    RawCredit,
    Setting,
    alignment,
    assigned,
    pathwise_gradients,
    policy_gradients,
)
from flowrl.bench.true_advantage import compare_credit, true_advantages
from flowrl_course import lesson_12 as lesson
from flowrl_course.figures import (
    ACCENT,
    COLOURS,
    DATA,
    NOISE,
    OTHERS,
    clean,
    panels,
    plane,
    target,
)
from flowrl_course.progress import progress
from flowrl_course.runs import learn, start

torch.set_num_threads(1)
# steps 0 to 4 are decisions 0 to 4 in this world; the trajectory splits at two of them
SPLITS = Branch({0: 2, 2: 2})
MEMBERS = 12  # leaves of a prompt: 3 trees of 4 leaves

trainer = start()
beginning = Setting(
    trainer.policy,
    trainer.draw_sampler(),
    trainer.schedule,
    trainer.reward,
    trainer.prompts.prompts,
)


def sampled(probe, usage=None):
    """Trees of all 18 prompts, or independent trajectories."""
    return beginning.rollout(
        Groups(18, MEMBERS), torch.Generator().manual_seed(0), probe, usage, max_batch=8192
    )


usage = Usage()
rollout = sampled(SPLITS, usage)
record = beginning.experience(rollout)
# [prompt, member, decision+1]: 18 prompts, 12 leaves, 6 columns
values, decisions = record.values, record.decisions
tree = decisions.tree
# the value of every state [prompt, unit], from the rewards of the leaves
estimated = tree.values(values[..., -1])


def draw_tree(axes, tree, heights, units):
    """Edges from parent to child over the nodes: decisions solid, ODE steps dashed."""
    for unit in units:
        above = int(tree.parent[unit])
        if above >= 0:
            look = (
                {"linestyle": "-", "color": DATA}
                if tree.drawn[unit]
                else {"linestyle": (0, (2, 2)), "color": "#a9adb5"}
            )
            axes.plot(
                [tree.node[above], tree.node[unit]],
                [heights[above], heights[unit]],
                linewidth=1.2,
                **look,
            )


def opening():
    """The tree of one root in the plane, and its values."""
    early = estimated[:, tree.at(1)].view(18, 3, 2).diff(dim=-1).abs().squeeze(-1)
    late = estimated[:, tree.at(3)].view(18, 3, 2, 2).diff(dim=-1).abs().amax((2, 3))
    prompt, root = divmod(int(torch.minimum(early, late).argmax()), 3)
    units = [unit for unit in range(tree.units) if int(tree.roots[unit]) == root]
    points, heights = rollout.trajectories.states[prompt].flatten(1), estimated[prompt]
    figure, (left, right) = panels(2, width=4.3, height=3.6)
    plane(left, f'"{beginning.prompts[prompt].text}"')
    colours = dict(cmap="viridis", vmin=0, vmax=1)
    for unit in units:
        above = int(tree.parent[unit])
        if above >= 0:
            left.plot(*points[[above, unit]].T, color="#a9adb5", linewidth=1, zorder=1)
    shown = left.scatter(*points[units].T, c=heights[units], s=26, zorder=2, **colours)
    left.scatter(*target(beginning.prompts[prompt]), marker="x", s=90, color=ACCENT, zorder=3)
    draw_tree(right, tree, heights, units)
    right.scatter(
        tree.node[units], heights[units], c=heights[units], s=26, zorder=2, **colours
    )
    right.set(
        xlabel="node (0 = noise, 10 = finished)",
        ylabel="mean reward of the leaves behind the state",
        ylim=(-0.03, 1.03),
    )
    right.set_title("Values (solid: decisions, dashed: ODE)")
    clean(right)
    figure.colorbar(shown, ax=right, label="value")
    plt.show()


opening()

# %% [markdown]
# ## States and their values
#
# The states of a group form a tree. In `flowrl.core.tree.Tree` every distinct state is a *unit* $u$ with these fields:
#
# - `parent` `[unit]`: the state from which it was drawn (-1: initial noise);
# - `node` `[unit]`: its place on the time grid;
# - `drawn` `[unit]`: whether the transition into it was drawn and is therefore a decision (ODE steps are not);
# - `passes` `[member, unit]`: which states a trajectory passes.
#
# Here a group of 12 has 3 roots with 4 leaves each. The exact value $V^*(u)$ of a state is the expected reward of a trajectory that continues from it. Let $L(u)$ be the leaves behind $u$. The tree estimates $V^*(u)$ by their mean reward:
#
# $$V(u) = \frac{1}{|L(u)|}\sum_{\ell \in L(u)} R_\ell.$$
#
# ### Exercise 1 · a value from its children
#
# *Difficulty: medium · kind: formula · importance: essential · time: 5 minutes*
#
# The children of a state may have different numbers of leaves. `values` `[prompt, child]` are the children's $V$, `leaves` `[child]` their numbers of leaves. Return the parent's $V$, `[prompt]`, without the rewards. When is it the plain mean of the children's values?


# %% tags=["exercise"]
def parent_value(values, leaves):
    """The value of a state from those of its children."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** What is the sum of the rewards behind a child, in terms of its $V$ and its number of leaves? Add up the sums of all children.


# %% tags=["solution"]
def parent_value(values, leaves):
    """The value of a state from those of its children."""
    return (values * leaves).sum(dim=-1) / leaves.sum()


# %%
lesson.check_parent(parent_value)

# %% [markdown] tags=["explanation"]
# **Why.** Every leaf counts once, so a child counts as often as it has leaves. The plain mean is the same if siblings have equally many leaves. Otherwise it is another estimate of $V^*$ (`mean="child"` in `flowrl`). Both are unbiased as long as the shape of the tree does not depend on rewards. In `flowrl`: `tree.values`. The value table `[prompt, member, decision+1]` has $V$ of the states from which a member's decisions start, and the member's own reward in the last column (`tree.value_table`).


# %%
def leaf_values(rewards, passes):
    """The mean reward of the leaves behind every state [prompt, unit]."""
    return (rewards @ passes) / passes.sum(dim=0)


ours = leaf_values(values[..., -1], tree.passes.float())
print(f"largest difference from the library: {float((ours - estimated).abs().max()):.0e}")
print(f"states of a group by node: {tree.counts}")
print(
    f"network evaluations of a group: {usage.nfe // 18}; 12 independent trajectories of 10"
    " steps take 120"
)

# %% [markdown] tags=["expected"]
# largest difference from the library: 0..1e-5
# states of a group by node: [3, 6, 6, 12, 12, 12, 12, 12, 12, 12, 12]
# network evaluations of a group: 99; 12 independent trajectories of 10 steps take 120

# %% [markdown]
# ## Why siblings isolate a decision
#
# Let $A^*_k = V^*_{k+1} - V^*_k$ be the true advantage of decision $k$. The reward of a trajectory is a sum,
#
# $$R = V^*_0 + A^*_0 + A^*_1 + \dots + A^*_{D-1},$$
#
# in which $V^*_0$ is the value of the initial noise. ODE steps add nothing. The terms are uncorrelated, because the mean of $A^*_k$ given the state before the decision is 0. So the variance of $R$ is the sum of their variances. Uniform credit gives decision $k$ the whole sum. However, two siblings $u, u'$ have the same parent, so everything before them cancels, not only on average but exactly:
#
# $$V(u) - V(u') = A^*(u) - A^*(u') + \text{what the leaves draw afterwards}.$$
#
# What comes afterwards remains, averaged over the leaves behind each sibling. In this world we can measure the truth. The next cell estimates $V^*$ by 128 continuations from every state before and after a decision (`true_advantages`, the lesson Test your own rule). It does so for the trees and for independent trajectories.

# %%
plain = sampled(RawCredit().probe)
truths = {
    name: true_advantages(beginning, result, 128)
    for name, result in progress([("plain", plain), ("tree", rollout)], "true advantages,")
}


def within(table):
    """Mean square of the deviations from the prompt's mean, over the first two axes."""
    return (table - table.mean(1, keepdim=True)).square().mean((0, 1))


truth = truths["plain"]
variance = within(truth.values) - truth.errors.square().mean((0, 1))
beginnings = within(truth.state_values[..., :1]) - truth.state_errors[..., :1].square().mean(
    (0, 1)
)
total = within(truth.state_values[..., -1:])
print(
    "variance of V*_0, the initial noise:     "
    + " ".join(f"{value:.4f}" for value in beginnings)
)
print(
    "variance of A*_k, decisions 0 to 4:      "
    + " ".join(f"{value:.4f}" for value in variance)
)
print(
    f"their sum: {float(variance.sum() + beginnings.sum()):.3f}; variance of R:"
    f" {float(total):.3f}"
)
print(
    "share of each decision:                  "
    + " ".join(f"{value:.0%}" for value in variance / total)
)

# %% [markdown]
# The sum of the variances is that of $R$, up to the sampling error. No decision holds more than a quarter of it, so most of a decision's uniform credit is the luck of the others.
#
# ## Comparing siblings
#
# The simplest comparison is Z over siblings, by analogy with GRPO's Z over a group.
#
# ### Exercise 2 · Z over siblings
#
# *Difficulty: medium · kind: code · importance: essential · time: 8 minutes*
#
# `values` is `[prompt, unit]`, `parent` `[unit]` (-1 for a root). Return for every state $(V - \text{mean}) / (\text{std} + 10^{-4})$ over the states with the same parent, with the population standard deviation. Roots and states without siblings get 0.


# %% tags=["exercise"]
def sibling_credit(values, parent):
    """Z over siblings, [prompt, unit]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Loop over `parent[parent >= 0].unique()`. The mask `parent == above` selects a family; assign its credit in place.


# %% tags=["solution"]
def sibling_credit(values, parent):
    """Z over siblings, [prompt, unit]."""
    credit = torch.zeros_like(values)
    for above in parent[parent >= 0].unique():
        family = parent == above
        same = values[:, family]
        credit[:, family] = (same - same.mean(1, keepdim=True)) / (
            same.std(1, keepdim=True, unbiased=False) + 1e-4
        )
    return credit


# %%
lesson.check_siblings(sibling_credit)

# %% [markdown] tags=["explanation"]
# **Why.** A state without siblings equals its own mean, so the numerator is exactly 0 and we need no special case. Roots have no common parent: their noise was not drawn from one state, and the policy did not choose it. In `flowrl`: `credit.SiblingRelative`.

# %%
credit = SiblingRelative(probe=SPLITS).assign(values, decisions)  # [prompt, member, decision]
ours = tree.decision_table(sibling_credit(estimated, tree.parent))
print("same as the library:", torch.allclose(ours, credit, atol=1e-5))
print(
    "mean |A| per decision: " + " ".join(f"{value:.3f}" for value in credit.abs().mean((0, 1)))
)
small = estimated[0, tree.at(3)].view(-1, 2)
print(
    "pairs of siblings after decision 2: "
    + "  ".join(f"{a:.2f}|{b:.2f}" for a, b in small.tolist())
)
pairs = sibling_credit(estimated, tree.parent)[0, tree.at(3)].view(-1, 2)
print(
    "their Z:                            "
    + "  ".join(f"{a:+.2f}|{b:+.2f}" for a, b in pairs.tolist())
)

# %% [markdown]
# **Z over two siblings is always ±1**, whatever their difference, because the standard deviation of two numbers is half of their difference. (The $10^{-4}$ has an effect only if the two are nearly equal.) So with two siblings the rule keeps only the sign: a split that decides everything gets the same credit as one that decides nothing. If decisions differ in importance, leave the differences in units of the reward (`SiblingRelative(normalise=False)`), or use
# gains $V(u) - V(\text{parent})$ with one normalisation for all decisions (`StepwiseGain(probe=Branch(...))`).
#
# A second property concerns the size of the difference, because the mean over $n$ siblings contains the draw itself.
#
# ### Exercise 3 · shrinkage
#
# *Difficulty: medium · kind: code · importance: useful · time: 8 minutes*
#
# `worth` `[family, sibling]` are the true advantages of siblings, and `estimate` `[family, sibling]` their estimated values: the parent's value plus `worth` plus the noise of what comes afterwards. Return one number, the slope of the regression (through 0) of the difference *estimate minus mean over the siblings* on `worth`: the mean of their product over the mean square of `worth`. With `leave_one_out` the mean is that of the other
# siblings only. Before you run the cells, guess the slope for two siblings.


# %% tags=["exercise"]
def shrinkage(worth, estimate, leave_one_out=False):
    """The factor by which the sibling difference shrinks the true advantage."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The mean over the siblings is `estimate.mean(1, keepdim=True)`. The mean of the others follows from the sum: subtract the value itself and divide by the number of the others.


# %% tags=["solution"]
def shrinkage(worth, estimate, leave_one_out=False):
    """The factor by which the sibling difference shrinks the true advantage."""
    count, total = worth.shape[1], estimate.sum(1, keepdim=True)
    mean = (total - estimate) / (count - 1) if leave_one_out else total / count
    return float(((estimate - mean) * worth).mean() / worth.square().mean())


# %%
lesson.check_shrinkage(shrinkage)

# %% [markdown] tags=["explanation"]
# **Why.** If one draw has the true advantage $A^*$, its estimate is $V^*(\text{parent}) + A^*$ on average, and those of the others are $V^*(\text{parent})$. The mean over all $n$ is therefore $V^*(\text{parent}) + A^*/n$, and the expected difference is $(1 - 1/n) A^*$: half of the advantage with two siblings. The mean of the *others* does not contain the draw. So nothing shrinks, and this mean is a proper baseline, independent of the draw's own noise. The two differ only by the factor $n/(n-1)$
# (`SiblingRelative(leave_one_out=True)`), which matters if decisions have different numbers of children.

# %% [markdown]
# The next figure shows your slopes for 100,000 families in which the parent's value, the advantages and the noise are standard normal.

# %% tags=["hide-input"]
sizes = [2, 3, 4, 6, 8, 12]


def measured(count, leave_one_out=False):
    """The slope for families of `count` siblings."""
    generator = torch.Generator().manual_seed(0)
    worth, noise = torch.randn(2, 100_000, count, generator=generator)
    return shrinkage(
        worth, torch.randn(100_000, 1, generator=generator) + worth + noise, leave_one_out
    )


figure, axes = panels(width=5.2, height=2.8)
axes.plot(sizes, [1 - 1 / count for count in sizes], color=NOISE, linewidth=1)
axes.plot(sizes, [measured(count) for count in sizes], "o", color=ACCENT)
axes.plot(sizes, [measured(count, True) for count in sizes], "s", color=DATA)
axes.text(6.6, 1.04, "others only (leave-one-out)", color=DATA)
axes.text(4.4, 0.68, "own value in the mean; line: 1 - 1/n", color=ACCENT)
axes.set(
    xlabel="siblings n",
    ylabel="slope on the true advantage",
    ylim=(0.4, 1.12),
    title="Two siblings measure half of the advantage",
)
clean(axes)
plt.show()

# %% [markdown]
# ## What a comparison by depth credits
#
# BranchGRPO compares a state with *all* states of the same node in its tree, Multi-GRPO with those of the prompt. Such a *depth rule* also credits decisions at which nothing branches (1, 3 and 4 here). What do these decisions get credit for?
#
# A deviation from a mean is linear, so the credit of a state splits exactly into three parts: $V^*(\text{parent})$ (what was decided before), $A^*$ (the decision's own part) and $V - V^*$ (what came afterwards).
#
# ### Exercise 4 · credit of the last decision
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 4 minutes*
#
# Decision 4 is the last one, and comes after all splits. Which part of its credit under a depth rule is largest, measured by the mean square?
#
# - **a** its own part
# - **b** what was decided before
# - **c** what came afterwards

# %% tags=["exercise"]
largest_part = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Twelve states are compared at this node, and each has one leaf. What differs between their parents? How much chance is left after decision 4?

# %% tags=["solution"]
largest_part = "b"

# %%
lesson.check_largest_part(largest_part)

# %% [markdown] tags=["explanation"]
# **Why.** At the last decision the parents differ in everything that their ancestors drew: the initial noise and four decisions. The decision itself is only one draw, and nothing random follows. So the depth rule gives decision 4 credit that mostly belongs to its ancestors.

# %% [markdown]
# The next cell computes the deviations of each part, from the siblings' mean and from the mean of the prompt's states at that node.

# %%
# V of parent and of child
before, after = truths["tree"].state_values[..., :-1], truths["tree"].state_values[..., 1:]
# [prompt, member, decision]
tables = {"before": before, "own": after - before, "after": values[..., 1:] - after}
# [prompt, unit]: once per edge, not per member
parts = {name: tree.edge_means(part) for name, part in tables.items()}
groups = {"siblings": tree.parent, "depth": tree.node}
sizes = {
    rule: {
        part: torch.stack(
            [
                group_deviations(numbers, group)[:, tree.at(node)].square().mean()
                for node in range(1, 6)
            ]
        )
        for part, numbers in parts.items()
    }
    for rule, group in groups.items()
}
for rule, by_part in sizes.items():
    print(f"{rule}, mean square by decision 0 to 4")
    for part, numbers in by_part.items():
        print(f"  {part:<7}" + " ".join(f"{number:.3f}" for number in numbers))
    everything = torch.stack(list(by_part.values())).sum(0)
    shares = (by_part["own"] / everything).nan_to_num()
    print("  own / all: " + " ".join(f"{share:.0%}" for share in shares))
    # states in the mean
    others = [(2 if rule == "siblings" else tree.counts[node]) for node in range(1, 6)]
    scaled = [float(everything[k]) * (n / (n - 1)) ** 2 for k, n in enumerate(others)]
    print(
        "  all, with the mean of the others: " + " ".join(f"{number:.3f}" for number in scaled)
    )

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.2, height=3.0, sharey=True)
shades = {"before": "#a9adb5", "own": ACCENT, "after": OTHERS[1]}
for cell, by_part in zip(axes, sizes.values(), strict=True):
    bottom = torch.zeros(5)
    for part, numbers in by_part.items():
        cell.bar(range(5), numbers, bottom=bottom, color=shades[part], width=0.7, label=part)
        bottom += numbers
    cell.set(xlabel="decision (splits at 0 and 2)", xticks=range(5), ylim=(0, 0.09))
    clean(cell)
axes[0].set(
    ylabel="mean square of the parts (reward²)", title="Siblings: the part from before is 0"
)
axes[1].set_title("Depth: late decisions get the ancestors' luck")
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# Among siblings the part from before is exactly 0, and decisions without siblings get 0 altogether. Under the depth rule the part from before grows with every decision. At decision 4 it is about four fifths of the credit: a state without siblings differs from the others mostly by what its ancestors drew. (The Monte Carlo error of $V^*$ adds a little to "own".)
#
# Is this credit wrong? Not for the expected gradient. The part from before is fixed when decision $k$ is drawn, and $\mathbb E[\nabla \log \pi(z_{k+1} \mid z_k) \mid z_k] = 0$. So this part adds variance, but no bias. (As in exercise 3, a state's own share in the mean shrinks its credit, here by about $1 - 1/n$ with $n$ states at the node.) The sibling rule's credit has a smaller mean square at decisions 0 and 2, but only because it measures half of the advantage (exercise 3). At equal scale, with the mean of the others, it has the larger one (last line of each table): a difference of two siblings contains what both draw afterwards. And decisions 1, 3 and 4 get no credit at all, so
# the rule does not estimate their part of the gradient.
#
# ## Weights of leaves and edges
#
# Many leaves share an early decision of the tree. The policy gradient is a sum over decisions, $\sum_k \mathbb E[A_k \nabla \log \pi_k]$, so an unbiased estimate needs the same total weight for each decision. With **leaf weights** an edge counts once for every leaf behind it, as in a mean over trajectories: $1/D$ for every decision. With **edge weights** each distinct edge counts once, as in BranchGRPO's released code.
#
# ### Exercise 5 · edge weights
#
# *Difficulty: easy · kind: formula · importance: useful · time: 4 minutes*
#
# `counts` are $n_0, \dots, n_T$, the numbers of states at the nodes of a tree whose steps are all drawn, so that step $i$ is decision $i$. Return each decision's share of the loss with edge weights, `[decision]`.


# %% tags=["exercise"]
def edge_shares(counts):
    """The share of every decision in a mean over distinct edges."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Every state except a root has one edge into it. Which decision leads to node $i + 1$?


# %% tags=["solution"]
def edge_shares(counts):
    """The share of every decision in a mean over distinct edges."""
    edges = torch.tensor(counts[1:], dtype=torch.float)
    return edges / edges.sum()


# %%
lesson.check_shares(edge_shares)

# %% [markdown] tags=["explanation"]
# **Why.** Every state except a root has one edge into it, so decision $i$ has $n_{i+1}$ edges. In `flowrl`: `Branch(..., weight="edge")`; the default is `"leaf"`. A transition that $n$ members share then has the weight $1/n$ for each of them.

# %%
published = Branch({0: 2, 3: 2, 6: 2, 9: 2}).tree(20, range(20), 16, False, torch.Generator())
by_edge = edge_shares(published.counts)
by_leaf = published.leaves / published.leaves[published.node > 0].sum()
by_leaf = torch.stack([by_leaf[published.at(node)].sum() for node in range(1, 21)])
print("BranchGRPO's tree, states by node:", published.counts)
print(
    f"step 0:  {by_edge[0]:.2%} of the loss with edge weights, {by_leaf[0]:.2%} with leaf"
    " weights"
)
print(
    f"step 19: {by_edge[-1]:.2%} of the loss with edge weights, {by_leaf[-1]:.2%} with leaf"
    " weights"
)

# %% [markdown]
# Edge weights turn the gradient towards the late steps, independently of the credit rule. This can be a deliberate choice, but it is not the objective of the papers' equations.
#
# ## Cost
#
# A rollout evaluates every state once, except the finished images: $\sum_{i<T} n_i$ evaluations in $T$ calls of the network, since all states of a node share a call.
#
# ### Exercise 6 · the evaluations of a tree
#
# *Difficulty: medium · kind: formula · importance: essential · time: 6 minutes*
#
# A group has `roots` trees. `children[step]` is the number of children at that step (1 if absent), and the sampler has `steps` steps. Return the number of network evaluations of the group's rollout.


# %% tags=["exercise"]
def evaluations(roots, children, steps):
    """Network evaluations of one group's rollout."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Follow the number of states from step to step: add it to the total, then multiply it by the number of children at this step.


# %% tags=["solution"]
def evaluations(roots, children, steps):
    """Network evaluations of one group's rollout."""
    total, states = 0, roots
    for step in range(steps):
        total += states
        states *= children.get(step, 1)
    return total


# %%
lesson.check_evaluations(evaluations)

# %% [markdown] tags=["explanation"]
# **Why.** All children of a state use the same evaluation: they share the velocity and so the mean of the transition, and differ in their noise only. So a split itself costs nothing, and every further state costs one evaluation per step. Late splits are cheap, early ones are not.

# %% [markdown]
# ### Exercise 7 · design a tree
#
# *Difficulty: medium · kind: design · importance: useful · time: 8 minutes*
#
# Choose the shape of a group for the sibling rule. The sampler has 10 steps, of which steps 0 to 4 are decisions. Your shape should have
#
# - at least 12 leaves and at least two roots;
# - siblings at three or more of the five decisions;
# - at most 100 evaluations (12 independent trajectories need 120).


# %% tags=["exercise"]
roots, children = ..., ...  # children: {step: number of children}

# %% [markdown] tags=["hint"]
# **Hint.** Three splits in two multiply the number of roots by 8. Where in the window are splits cheapest? `evaluations(roots, children, 10)` gives the cost.

# %% tags=["solution"]
roots, children = 2, {2: 2, 3: 2, 4: 2}

# %%
lesson.check_shape(roots, children)

# %% [markdown] tags=["explanation"]
# **Why.** This shape has 16 leaves and needs 98 evaluations. With a split at decision 0 instead of decision 2 the limit is exceeded, because all later steps have more states (next cell). The price of late splits is that the initial noise and the first decisions are compared by few roots only. Splits at steps 5 to 9 would produce identical children, because the ODE draws no noise.

# %%
for steps in ((2, 3, 4), (0, 3, 4), (0, 1, 2)):
    needed = evaluations(2, dict.fromkeys(steps, 2), 10)
    print(
        f"two roots, splits in two at decisions {', '.join(map(str, steps))}: 16 leaves,"
        f" {needed} evaluations"
    )

# %% [markdown]
# The update shares evaluations too: it needs one per *parent*, whose children have the same transition (`flowrl` expands the pairs after the network). The next cell counts both for the published shapes. (A comb is a trunk of ODE steps with draws at some of them, each finished by the ODE. Its decisions are the draws. Every member has one drawn transition: its row of `decisions.drawn` `[member, decision]` has a single True, and the mask leaves out the rest.)


# %%
def shape_of(probe, steps, decisions, members):
    """The tree of one group."""
    return probe.tree(
        steps, tuple(decisions), members, False, torch.Generator().manual_seed(0)
    )


shapes = {
    "24 trajectories": shape_of(Branch({}), 10, range(10), 24),
    "24 from one noise": shape_of(Branch({0: 24}), 10, range(10), 24),
    "3 roots, 2 at 2, 4, 6": shape_of(Branch({2: 2, 4: 2, 6: 2}), 10, range(10), 24),
    "BranchGRPO": published,
    "TreeGRPO": shape_of(Branch({0: 3, 1: 3, 2: 3}), 10, range(3), 27),
    "TempFlow-GRPO": shape_of(Comb(branches=6), 10, range(9), 54),
    "Granular-GRPO, stride 1": shape_of(Comb(branches=12), 16, range(8), 96),
    "Granular-GRPO": shape_of(Comb(branches=12, strides=(1, 2, 3)), 16, range(8), 288),
}
print(
    f"{'one group':<26}{'sampling':>9}{'leaves':>8}{'per leaf':>10}{'calls':>7}{'update':>8}"
)
for name, shape in shapes.items():
    sampling, updates = sum(shape.counts[:-1]), len(shape.parent[shape.drawn].unique())
    print(
        f"{name:<26}{sampling:>9,}{shape.members:>8}{sampling / shape.members:>10.2f}"
        f"{shape.steps:>7}{updates:>8}"
    )

# %% [markdown]
# "Sampling" and "update" are network evaluations. A group of 24 leaves from 3 roots needs half the evaluations of 24 independent trajectories, in both columns. TreeGRPO trains only the 13 states of its window. (BranchGRPO reports 13.68 per image; this number counts the finished states as well.) The saving has a statistical cost: leaves of one tree are dependent, so 24 leaves of 3 trees contain less information about the prompt than 24 trajectories.
#
# ## Four methods, one formulation
#
# A method on trees consists of a *shape* (which states share a past), a *value* of every state, and a *comparison*. The published methods choose them as follows:
#
# | method | shape | value | compared with | in `flowrl` |
# |---|---|---|---|---|
# | BranchGRPO (arXiv 2509.06040) | splits spread over an SDE trajectory | mean of the leaves | all states of the node in the tree | `Branch`, `DepthRelative("tree", "sample")` |
# | TempFlow-GRPO (arXiv 2508.04324) | 6 draws at every step of an ODE trunk but the last, finished by the ODE | the one leaf | siblings | `Comb`, `SiblingRelative`, `Weighted("noise")` |
# | Granular-GRPO (arXiv 2510.01982) | the same, each draw finished with strides 1, 2, 3 | the leaf of each stride | siblings, Z summed over strides | `Comb(strides=...)`, `SiblingRelative` |
# | TreeGRPO (arXiv 2512.08153) | splits at consecutive steps, ODE elsewhere | leaf Z, backed up with weights | all leaves of the prompt | `Branch`, `BackedUp` |
#
# (The table has the released code of TempFlow-GRPO: 9 decisions, 54 leaves per seed. flowrl's method `tempflow-grpo` has the same shape: a group is a multiple of 6 leaves per decision, 30 with the five decisions of this world.)
#
# A plain group is a tree without splits, and shared noise is one root that splits at step 0. Since $V$ fills the value table `[prompt, member, decision+1]`, the rules of the lessons on Stepwise-Flow-GRPO and TP-GRPO work on trees unchanged: a gain is $V(u) - V(\text{parent})$. If the ODE finishes a draw, the leaf estimates the value of the ODE's continuation, as TP-GRPO's completions do, and not $V^*$ of the stochastic sampler. TreeGRPO weights children by the softmax of their log-probabilities. However, they are drawn with these probabilities already, so the plain mean is the unbiased choice
# (`BackedUp(backup="mean")`).

# %% tags=["hide-input"]
figure, axes = panels(4, width=2.6, height=2.9)
drawn = {
    "BranchGRPO": published,
    "TempFlow-GRPO, one step": shape_of(
        Comb(branches=6, count=1, low=3, high=4), 10, range(10), 6
    ),
    "Granular-GRPO, one step": shape_of(
        Comb(branches=4, count=1, low=3, high=4, strides=(1, 2, 3)), 16, range(8), 12
    ),
    "TreeGRPO": shape_of(Branch({2: 3, 3: 3, 4: 3}), 10, range(2, 5), 27),
}
for cell, (name, shape) in zip(axes, drawn.items(), strict=True):
    order = torch.arange(shape.members).float()
    # heights: mean over leaves
    draw_tree(cell, shape, (order @ shape.passes.float()) / shape.leaves, range(shape.units))
    cell.set(xlabel="node", yticks=[], title=name)
    cell.spines[["top", "right", "left"]].set_visible(False)
figure.suptitle("Four shapes: decisions are solid, ODE steps are dashed", fontsize=11)
plt.show()

# %% [markdown]
# ## Credit and gradients compared with the truth
#
# The next cell applies four rules to the same trees, before training. It prints the correlation of the credit with $A^*$ by decision, and 95% intervals over the 18 prompts.

# %%
RULES = {
    "uniform": (Uniform(), COLOURS["flow-grpo"]),
    "depth": (DepthRelative(probe=SPLITS), COLOURS["depth"]),
    "sibling": (SiblingRelative(probe=SPLITS), COLOURS["sibling"]),
    "gains": (StepwiseGain(probe=SPLITS), COLOURS["stepwise-flow-grpo"]),
}
print("correlation with A*   all decisions      decision 0    1     2     3     4")
for name, (rule, _) in RULES.items():
    advantages = assigned(rule, record).advantages
    report, credited = (
        compare_credit(advantages, truths["tree"]),
        advantages.abs().mean((0, 1)) > 1e-5,
    )
    overall = report.overall.correlation
    interval = f"{overall.value:.2f} [{overall.low:.2f}, {overall.high:.2f}]"
    by_step = [
        f"{report.per_step[i].correlation.value:5.2f}" if credited[i] else "    -"
        for i in range(5)
    ]
    print(f"{name:<21} {interval:<24}" + " ".join(by_step))

# %% [markdown]
# At the splits, siblings and gains have a *lower* correlation than the depth rule, although they remove the luck from before. A comparison with one sibling adds the sibling's own luck, which is as large as that of the draw. The depth rule compares with the mean of 6 or 12 states. At the decisions without a split, siblings and gains have no credit to correlate. Over all decisions, the depth rule and uniform credit agree better with $A^*$.
#
# Next we compare gradients. Besides the direction and the noise we look at the *scale*, the factor by which a rule stretches the true gradient.
#
# ### Exercise 8 · the scale of a gradient
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 5 minutes*
#
# The loss is a mean over five decisions, and a rule with the true advantages would have the scale 1. Predict the scale of the sibling difference in units of the reward (`SiblingRelative(normalise=False)`) on our trees, whose splits into two are at decisions 0 and 2. Assume that all decisions contribute equally to the gradient.


# %% tags=["exercise"]
scale = ...

# %% [markdown] tags=["hint"]
# **Hint.** Two factors: which fraction of the decisions gets credit, and which part of the advantage do two siblings measure (exercise 3)?

# %% tags=["solution"]
scale = 2 / 5 * 1 / 2

# %%
lesson.check_scale(scale)

# %% [markdown] tags=["explanation"]
# **Why.** Two of five decisions get credit, and each is shrunk by one half because a sibling's own value is in the mean. Leave-one-out removes the second factor and not the first.

# %%
direction = pathwise_gradients(beginning, batches=20, repeats=100, seed=1, decisions_only=True)
candidates = {
    "12 trajectories, R - mean of others": RawCredit(),
    "sibling difference": SiblingRelative(probe=SPLITS, normalise=False),
    "sibling, leave-one-out": SiblingRelative(
        probe=SPLITS, normalise=False, leave_one_out=True
    ),
    "sibling, Z": RULES["sibling"][0],
    "gains, joint Z": RULES["gains"][0],
    "depth, Z": RULES["depth"][0],
}
print(f"{'':<38}{'cosine':>7}{'':<15}{'scale':>7}{'signal/noise of a batch':>26}{'NFE':>6}")
for name, rule in progress(candidates.items(), "rule"):
    used = Usage()
    result = alignment(
        policy_gradients(beginning, rule, 24, MEMBERS, seed=2, usage=used), direction
    )
    interval = f"[{result.cosine_interval[0]:.2f}, {result.cosine_interval[1]:.2f}]"
    print(
        f"{name:<38}{result.cosine:>7.2f} {interval:<14}{result.scale:>7.2f}"
        f"{result.signal_to_noise:>26.2f}{used.nfe // 24 // 18:>6}"
    )

# %% [markdown]
# No direction is measurably wrong (intervals may exceed 1, see the lesson Test your own rule). The scale of the sibling difference is near $2/5 \times 1/2$, and leave-one-out doubles it. The signal-to-noise ratio of the sibling rules and gains is about half that of the others. With two splits in five decisions and one sibling each, the comparison loses more signal than variance. The depth rule on trees has the ratio of independent trajectories with fewer
# evaluations. A split at every decision would give the sibling rule credit at all of them, but it needs $2^5$ leaves per tree.
#
# ## Training
#
# Let us train with three methods: uniform credit on 12 independent trajectories, and the depth and the sibling rule on 3 trees of 4 leaves. All have the same sampler, learning rate and independent initial noise, ten iterations, seeds 0 to 2. The lesson Side by side showed how much the clip range matters, so each method runs with two.

# %%
SHARED = {
    "group_size": MEMBERS,
    "iterations": 10,
    "eval_every": 2,
    "initial_noise": "independent",
}
methods = {"uniform": None, "depth": RULES["depth"][0], "sibling": RULES["sibling"][0]}
runs = {
    (name, clip): [learn(rule=rule, seed=seed, clip_range=clip, **SHARED) for seed in range(3)]
    for clip in (2e-2, 2e-3)
    for name, rule in methods.items()
}
for (name, clip), curves in runs.items():
    ends = " ".join(f"{curve.reward[-1]:.2f}" for curve in curves)
    print(f"clip {clip:.3f}  {name:<8} reward after training, three seeds: {ends}")
BUDGET = 15_000  # forward passes: about those of the sibling rule's ten iterations
for name in methods:
    found = [float(np.interp(BUDGET, curve.work, curve.reward)) for curve in runs[name, 2e-2]]
    print(
        f"clip 0.020  {name:<8} reward after {BUDGET:,} forward passes: "
        + " ".join(f"{reward:.2f}" for reward in found)
    )
for name in methods:
    curve = runs[name, 2e-2][0]
    print(
        f"{name:<8} evaluations: {int(curve.sampled[-1]):,} in sampling,"
        f" {int(curve.trained[-1]):,} in updates"
    )

# %% [markdown] tags=["expected"]
# clip 0.020  uniform  reward after training, three seeds: 0.80..0.98 0.80..0.98 0.80..0.98
# clip 0.020  depth    reward after training, three seeds: 0.80..0.98 0.80..0.98 0.80..0.98
# clip 0.020  sibling  reward after training, three seeds: 0.55..0.90 0.55..0.90 0.55..0.90
# clip 0.002  uniform  reward after training, three seeds: 0.24..0.35 0.24..0.35 0.24..0.35
# clip 0.002  depth    reward after training, three seeds: 0.24..0.35 0.24..0.35 0.24..0.35
# clip 0.002  sibling  reward after training, three seeds: 0.24..0.35 0.24..0.35 0.24..0.35
# clip 0.020  uniform  reward after 15,000 forward passes: 0.28..0.48 0.28..0.48 0.28..0.48
# clip 0.020  depth    reward after 15,000 forward passes: 0.42..0.66 0.42..0.66 0.42..0.66
# clip 0.020  sibling  reward after 15,000 forward passes: 0.55..0.90 0.55..0.90 0.55..0.90
# uniform  evaluations: 14,400 in sampling, 7,200 in updates
# depth    evaluations: 11,880 in sampling, 4,680 in updates
# sibling  evaluations: 11,880 in sampling, 1,080 in updates

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.2, height=3.0, sharey=True)
for cell, clip in zip(axes, (2e-2, 2e-3), strict=True):
    for name in methods:
        curves = runs[name, clip]
        for curve in curves:
            cell.plot(
                curve.work / 1000,
                curve.reward,
                "o-",
                color=RULES[name][1],
                markersize=3,
                linewidth=1,
            )
    cell.set(xlabel="evaluations in thousands (update: three each)", ylim=(0.15, 1.0))
    clean(cell)
for place, name in zip(((0.04, 0.9), (0.04, 0.82), (0.04, 0.74)), methods, strict=True):
    axes[1].text(*place, name, color=RULES[name][1], transform=axes[1].transAxes)
axes[0].set(ylabel="held-out reward", title="Clip 0.02: sibling ahead per evaluation")
axes[1].set_title("Clip 0.002: none of them learns")
plt.show()

# %% [markdown]
# With the wide clip range, the depth rule and uniform credit are above the sibling rule after ten iterations, as the signal-to-noise ratios suggest. At equal evaluations, the axis shown, the order is reversed: after 15,000 forward passes the sibling rule has the highest mean of the three seeds, and uniform credit the lowest. The trees need fewer evaluations of both kinds. The sibling rule needs the fewest in updates: a decision without a sibling has advantage 0, and such decisions need no evaluation. With the narrow clip range none of the three gets far within these iterations, because the clip limits the runs, and not the credit. So a comparison at this clip range would have shown no difference.
#
# These runs do not decide between the methods: they have three seeds, one tree shape, one world and no tuning. `docs/verdict.md` has the project's tuned comparison. The structural results hold in general. Siblings isolate a decision, and two of them measure half its advantage. Depth rules add the ancestors' luck as variance. The number of states determines a tree's evaluations.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Two siblings end with rewards 0.50 and 0.51. Their Z is **a** about ±0.01, **b** about ±1, **c** about ±0.5.
# 2. Why does the comparison of siblings remove the luck from before exactly? **a** The luck averages out over many leaves. **b** Siblings have the same initial noise only. **c** Siblings have the same parent, so the same past.
# 3. A depth rule gives decision 4 credit for what its ancestors drew. What does this do to the expected gradient? **a** It adds variance but no bias. **b** It biases the gradient towards late decisions. **c** It scales the gradient down.
# 4. A tree doubles the number of its states at step 0 instead of at step 8 of 10. The evaluations of its rollout **a** stay the same, since the number of leaves is the same, **b** increase, **c** decrease.
# 5. A mean over distinct edges of BranchGRPO's tree, compared with a mean over trajectories, **a** gives late decisions more weight, **b** gives early decisions more weight, **c** gives the same weights, but costs less.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are after exercise 2, in the section on siblings, after the figure of the three parts, in the section on cost, and in the section on weights, in this order.

# %% tags=["solution"]
quiz = {1: "b", 2: "c", 3: "a", 4: "b", 5: "a"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: the standard deviation of two numbers is half of their difference. 2: everything before the split is the same state. 3: what is fixed before a draw multiplies a gradient with mean 0. 4: from the split on, every step has twice the states. 5: there are more distinct edges at late steps.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $u$, $n_i$ | distinct state, number of them at node $i$ | `flowrl.core.tree.Tree`, `tree.counts` |
# | $V(u)$ | mean reward of the leaves behind $u$ | `tree.values` |
# | splits, combs | which states share a past | the probes `Branch`, `Comb` |
# | Z over siblings; leave-one-out | isolates a decision; removes the factor $1 - 1/n$ | `credit.SiblingRelative` |
# | Z over a node's states | own decision and ancestors' luck | `credit.DepthRelative` |
# | $V(u) - V(\text{parent})$ | gain on a tree | `StepwiseGain(probe=Branch(...))` |
# | leaf, edge | $1/D$ per decision, or in proportion to $n_{i+1}$ | `Branch(..., weight=...)` |
# | $\sum_{i<T} n_i$; parents | evaluations of sampling; of the update | `usage.nfe`; the metric `train_nfe` |
#
# On the command line: `flowrl compare --methods flow-grpo branch-grpo tempflow-grpo --world mixture`. A rule of your own needs one file, as in the lesson Your own credit rule.
#
# ## Symbols
#
# {symbols: $z_j$; decision $k$; $D$; $V_k$; $V^*_k$; $A^*_k$; $R$; $A$; $w$; $Z$}
#
# ## Further reading
#
# - The four papers of the table above: arXiv 2509.06040, 2508.04324, 2510.01982 and 2512.08153.
# - Kazemnejad et al. 2024, *VinePPO* (arXiv 2410.01679): state values by continuation, for language models.
# - Kool, van Hoof and Welling 2019, *Buy 4 REINFORCE samples, get a baseline for free!* (ICLR workshop): the leave-one-out mean.
#
# **Next:** [13 · The forward process](13_forward_process.ipynb) needs no decisions at all.

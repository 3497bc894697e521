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
# # 9 · Write your own credit rule
#
# **After this lesson you can** turn an idea about credit into a class, test the class against the contract that the trainer relies on, give it a memory that survives checkpoints, and use it in the trainer and on the command line.
#
# **Time** 55 minutes and two projects of 20 and 45 minutes; the computer needs less than half a minute. **You need** the lessons from GRPO on a flow to TP-GRPO.
#
# A credit rule maps a table of values to a table of advantages. On the left, the figure shows the table of one group: rewards of ODE completions, and those of the finished samples in the last column. The other three panels show the credit that three rules compute from this table (blue is positive, red negative).

# %% tags=["hide-input"]
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from flowrl.credit import (
    StepwiseGain,
    TurningPoint,
    Uniform,
    credit_of,
    gains,
    reward_to_go,
    zscore,
)
from flowrl.core.experience import Credit, Needs
from flowrl.probes import Completion, NoProbe, Probe, Tweedie
from flowrl.run.parts.registry import build
from flowrl.testing import check_credit
from flowrl_course import lesson_09 as lesson
from flowrl_course.batches import sample_groups
from flowrl_course.figures import SIGNED, clean, panels
from flowrl_course.runs import learn, start

torch.set_num_threads(1)
# all steps but the last are decisions; clip range: Side by side
WORLD = {"window": ":-1", "clip_range": 2e-2}


def table_of(trainer, probe):
    """Groups of a trainer's policy with their value table: 18 prompts, 12 members that share
    their noise.
    """
    prompts = trainer.prompts.prompts
    return sample_groups(
        trainer.policy,
        trainer.reward,
        prompts,
        12,
        trainer.draw_sampler(),
        probe,
        shared_noise=True,
    )


untrained = start(**WORLD)
batches = {
    "one-step estimate": table_of(untrained, Tweedie()),
    "ODE completion": table_of(untrained, Completion()),
}
tables = {
    name: batch.values for name, batch in batches.items()
}  # [prompt, member, decision+1]: 18 prompts, 12 members, 10 columns
decisions = batches["ODE completion"].decisions


def opening():
    """The values of the group with the largest range, and the credit of three rules."""
    table = tables["ODE completion"]
    group = int((table[..., -1].amax(1) - table[..., -1].amin(1)).argmax())
    figure, axes = panels(4, width=2.9, height=3.0)
    axes[0].imshow(table[group], cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes[0].set(
        title="values (0 to 1)",
        xlabel="decision (9: finished)",
        ylabel="member",
        xticks=range(0, 10, 3),
    )
    for cell, (name, rule) in zip(
        axes[1:],
        {
            "Flow-GRPO": Uniform(),
            "Stepwise": StepwiseGain(),
            "TP-GRPO": TurningPoint(),
        }.items(),
        strict=True,
    ):
        cell.imshow(
            rule.assign(table, decisions)[group], cmap=SIGNED, vmin=-3, vmax=3, aspect="auto"
        )
        cell.set(title=f"{name}: credit (-3 to 3)", xlabel="decision", xticks=range(0, 9, 2))
    plt.show()


opening()

# %% [markdown]
# ## The idea
#
# We begin with the quantity that a rule should estimate. A **decision** is a transition that was drawn (the lesson on Stepwise-Flow-GRPO). Here steps 0 to 8 are the decisions $k = 0, \dots, 8$, so $D = 9$; the last step follows the ODE.
# Let $V^*_k$ be the expected reward if the *stochastic* sampler continues from the state before decision $k$, and $V^*_D = R$ the reward of the finished sample. Decision $k$ changes this expectation by
#
# $$A^*_k = V^*_{k+1} - V^*_k,$$
#
# the **true advantage** of the decision. The sum over the decisions is $R - V^*_0$. We cannot compute $V^*$ for images, so a credit rule estimates $A^*$ from a table of values $V_k$. The rules of the last lessons differ in where these values come from:
#
# | rule | value $V_k$ | network evaluations per trajectory |
# |---|---|---|
# | Flow-GRPO | none; every decision gets $R$ minus the group's mean | 10 |
# | Stepwise-Flow-GRPO | reward of 5 Euler substeps | 46 |
# | TP-GRPO | reward of the ODE completion | 55 |
#
# (Slightly fewer if a group shares its first node.)
#
# Our idea is a cheaper rule. The one-step estimate $\hat x_0 = x_t - t v$ needs only the velocity that the rollout has computed already, so it costs no further network evaluation.
# If its reward is close to $V^*$, step-wise credit costs no more than Flow-GRPO. In this lesson we build the rule. In the lesson Test your own rule we test whether the estimate is good enough.
#
# ## From the idea to a class
#
# A rule is any object with two members:
#
# - `probe`, which says how unfinished states get a value: `NoProbe()`, `Tweedie()` (short for `Substeps(1)`), `Substeps(n)`, `Completion()`;
# - `assign(values, decisions)`, which maps values `[prompt, member, decision+1]` to advantages `[prompt, member, decision]`. Column $k < D$ is the value of the state before decision $k$, the last column the reward of the finished sample. `decisions` describes the axis: `step`, `time`, `delta`, `std` `[decision]`, and `mask` `[prompt, member, decision]`.
#
# The mask is true for the entries that count. It is false for transitions that were not drawn for this member or are not trained, and for samples without a valid reward. The trainer sets the advantages of these entries to 0. However, a rule must also leave them out of every mean, standard deviation and count, as `zscore(..., mask=decisions.mask)` does.
#
# What a rule needs besides the table is declared in an attribute `needs`: with `needs = Needs(shared_noise=True)` the members of a group start from the same noise. A rule needs no base class and no registration. Our first draft computes gains of the one-step estimate, normalised over members and decisions as in Stepwise-Flow-GRPO.


# %%
class Draft:
    """The credit of a decision is its change of the one-step estimate's reward."""

    probe = NoProbe()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        values -= values[..., :1]
        gained = values[..., 1:] - values[..., :-1]
        return (gained - gained.mean((1, 2), keepdim=True)) / gained.std(
            (1, 2), unbiased=False, keepdim=True
        )


# %% [markdown]
# The trainer, `flowrl compare` and the checkpoints rely on the promises in the protocol's docstring. `flowrl.testing` checks all of them on difficult tables: groups of equal values, a group of one, values of $10^6$, permuted members, invalid samples, transitions that were not drawn. Let us see what it says about the draft.

# %%
print(
    *[
        line
        for line in str(check_credit(Draft())).splitlines()
        if "not tried, because" not in line
    ],
    sep="\n",
)

# %% [markdown]
# The first fault hides the others: `check_credit` does not try the remaining promises as long as the rule changes its input.
#
# ### Exercise 1 · repair the draft
#
# *Difficulty: easy · kind: debugging · importance: essential · time: 10 minutes*
#
# The draft has four faults. Repair one, run `check_credit` again, and repeat. Begin with the fault that the report names. `zscore(gains(values), over=("member", "decision"), mask=decisions.mask)` from `flowrl.credit` normalises over the entries that count and handles the special cases. You can also write the normalisation yourself.


# %% tags=["exercise"]
class EstimateGain:
    """The credit of a decision is its change of the one-step estimate's reward."""

    probe = NoProbe()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        values -= values[..., :1]
        gained = values[..., 1:] - values[..., :-1]
        return (gained - gained.mean((1, 2), keepdim=True)) / gained.std(
            (1, 2), unbiased=False, keepdim=True
        )


# %% [markdown] tags=["hint"]
# **Hint.** Compare four points with the protocol. Which columns does the probe fill? Does `assign` change its argument? Which entries are in the mean and the standard deviation? What does the last line compute for a group whose values are all equal?


# %% tags=["solution"]
@dataclass(frozen=True)
class EstimateGain:
    """The credit of a decision is its change of the one-step estimate's reward."""

    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        return zscore(gains(values), over=("member", "decision"), mask=decisions.mask)


# %%
lesson.check_mended(EstimateGain)

# %% [markdown] tags=["explanation"]
# **Why.** With `NoProbe()` only the finished sample has a reward. All other columns are `nan`, so that a rule that reads them fails at once. `-=` writes into the caller's table, which the trainer still needs for its metrics.
# A group of equal values has a standard deviation of 0. The division then gives `nan`, which the optimizer would write into all weights. `zscore` adds $10^{-4}$ and subtracts
# one of the values before the mean, so that equal values give exactly 0. Without the mask, the `nan` of an invalid sample would reach the credit of its whole group. Transitions outside the mask would change the scale of the others. (The subtraction of the first column has no effect on gains; the fault was to do it in place.)

# %%
findings = check_credit(EstimateGain())
print(
    findings.ok, f"{sum(finding.ok for finding in findings)} of {len(findings)} promises kept"
)

# %% [markdown]
# In a test file, two lines run the same suite with one pytest case per promise:
#
# ```python
# from flowrl.testing import credit_contract
# test_estimate_gain = credit_contract(EstimateGain())
# ```
#
# ## A second rule: reward-to-go
#
# The gain $g_k = V_{k+1} - V_k$ depends on two estimates. The lesson on Stepwise-Flow-GRPO had an alternative, the reward-to-go $R - V_k$: the total gain from decision $k$ to the *finished* sample. Its first term is the reward itself, not an estimate.
#
# ### Exercise 2 · reward-to-go
#
# *Difficulty: medium · kind: design · importance: essential · time: 12 minutes*
#
# The credit of decision $k$ is $R - V_k$. Choose its normalisation, `zscore(y, over=..., std_over=..., mask=...)`. `over` are the axes of the mean and `std_over` those of the standard deviation (of $y$ itself, before the mean is subtracted), each a tuple of `"prompt"`, `"member"` and `"decision"`. The rule must have these properties:
#
# - The rewards of a prompt have no effect on the credit of another prompt.
# - No decision gets credit for being early: if all members of a group have the same $R - V_k$ at a decision, its credit is 0.
# - A decision at which $R - V_k$ differs little between members keeps a small credit.
# - What is outside the mask has no effect.


# %% tags=["exercise"]
@dataclass(frozen=True)
class EstimateToGo:
    """The credit of a decision is the final reward minus the estimate before it."""

    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        return ...


# %% [markdown] tags=["hint"]
# **Hint.** `values` has one column more than there are decisions. Column $k$ is the state before decision $k$, so drop the last column of the subtracted term. `values[..., -1:]` is the last column with its axis. Over which axis must the mean run, so that only differences between members remain? With a standard deviation per decision, all decisions would have credit of the same size.


# %% tags=["solution"]
@dataclass(frozen=True)
class EstimateToGo:
    """The credit of a decision is the final reward minus the estimate before it."""

    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        return zscore(
            reward_to_go(values), ("member",), ("member", "decision"), mask=decisions.mask
        )


# %%
lesson.check_to_go(EstimateToGo)

# %% [markdown] tags=["explanation"]
# **Why.** $R - V_k$ is the sum of the gains from decision $k$ to the end, so a decision is also credited with the gains that follow it. This adds noise. In return, an error of $V_k$ enters one credit only. With gains it enters two: that of decision $k$ and, with the opposite sign, that of decision $k - 1$.
# The mean is taken decision by decision because $R - V_k$ shrinks along a trajectory. A mean over all decisions would therefore give early decisions credit for being early.

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=2.9, sharey=True)
for cell, (name, rule) in zip(
    axes, {"gains": EstimateGain(), "reward-to-go": EstimateToGo()}.items(), strict=True
):
    credit = rule.assign(tables["one-step estimate"], decisions)[0]
    cell.plot(credit.T, color="#56B4E9", linewidth=1.2, alpha=0.8)
    cell.axhline(0, color="#22252b", linewidth=0.8)
    cell.set(
        xlabel="decision", xticks=range(0, 9, 2), title=f"{name}: 12 members of one group"
    )
    clean(cell)
axes[0].set_ylabel("credit")
plt.show()

# %% [markdown]
# The lines of the gains cross often: the credit of a decision says little about the next one. Reward-to-go changes slowly along a trajectory, since neighbouring decisions share most of their terms.
#
# ### Exercise 3 · a biased estimate
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 5 minutes*
#
# Suppose the one-step estimate is too optimistic at one node: for all members of all groups, $V_5$ is too high by 0.2. For which of our two rules does the *sign* of some credit change?
#
# - **a** for both
# - **b** for `EstimateGain` only
# - **c** for `EstimateToGo` only
# - **d** for neither, because all members have the same error

# %% tags=["exercise"]
changed_by_bias = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Write down which gains and which rewards-to-go contain $V_5$. Over which entries does each rule take the mean that it subtracts?

# %% tags=["solution"]
changed_by_bias = "b"

# %%
lesson.check_bias(changed_by_bias)

# %% [markdown] tags=["explanation"]
# **Why.** The error adds 0.2 to $g_4$ and $-0.2$ to $g_5$. The mean over members *and* decisions contains both, so they cancel in it, and the error stays in the credit. `EstimateToGo` subtracts the mean of each decision, which contains the error of this decision. Only the standard deviation changes a little, and with it the size of the credit.

# %%
biased = tables["one-step estimate"].clone()
biased[..., 5] += 0.2
for name, rule in (("EstimateGain", EstimateGain()), ("EstimateToGo", EstimateToGo())):
    changed = (
        rule.assign(biased, decisions).sign()
        != rule.assign(tables["one-step estimate"], decisions).sign()
    )
    rates = changed.double().mean((0, 1))
    print(
        f"{name:<13} fraction of changed signs by decision:",
        " ".join(f"{float(rate):.2f}" for rate in rates),
    )

# %% [markdown]
# A common error of all members does no harm to reward-to-go. With gains, it decides the sign of many credits at the two decisions around the node.
#
# ## The rule in the trainer
#
# `start` and `learn` (in `flowrl_course.runs`) pass a rule to the trainer of the lesson on Flow-GRPO. The trainer reads `probe` and `needs`, fills the columns of the table, and calls `assign` once per iteration.

# %%
for name, rule in (("EstimateGain", EstimateGain), ("EstimateToGo", EstimateToGo)):
    curves = [learn(seed=seed, rule=rule(), iterations=8, **WORLD) for seed in range(2)]
    before, after = (
        torch.stack([curve.reward[at] for curve in curves]).mean() for at in (0, -1)
    )
    evaluations = float(curves[0].sampled[-1]) / 8 / 96  # 8 rollouts of 96 trajectories
    print(
        f"{name:<13} {evaluations:.1f} network evaluations per trajectory; reward {before:.2f}"
        f" -> {after:.2f} (mean of two seeds)"
    )

# %% [markdown] tags=["expected"]
# EstimateGain  9.1 network evaluations per trajectory; reward 0.21 -> 0.80..0.99 (mean of two seeds)
# EstimateToGo  9.1 network evaluations per trajectory; reward 0.21 -> 0.60..0.99 (mean of two seeds)

# %% [markdown]
# Both rules run, and the reward rises. They cost less than the 10 evaluations of Flow-GRPO, because a group shares its first node. Two short runs show no more than this. Whether a rule is better than another one, and whether it stays good, is the subject of the lesson Test your own rule.
#
# On the command line a rule is a class in a file. `build` reads the same text as `flowrl compare --credit`:

# %%
RULE = '''
from dataclasses import dataclass

from flowrl.core.experience import Needs
from flowrl.credit import reward_to_go, zscore
from flowrl.probes import Probe, Tweedie


@dataclass(frozen=True)
class EstimateToGo:
    """The credit of a decision is the final reward minus the estimate before it."""

    clamp: float = 5.0
    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        to_go, group = reward_to_go(values), ("member", "decision")
        return zscore(to_go, ("member",), group, self.clamp, decisions.mask)
'''
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "my_rules.py"
    file.write_text(RULE)
    loaded = build("credit", f"{file}:EstimateToGo(clamp=2.0)")
print(
    f"clamp {loaded.clamp}, probe {loaded.probe};",
    "contract kept" if check_credit(loaded).ok else "contract broken",
)

# %% [markdown]
# ```bash
# flowrl explain my_rules.py:EstimateToGo stepwise-gain                 # the credit of both rules on one table
# flowrl compare --world mixture --credit "my_rules.py:EstimateToGo(clamp=2.0)"
# ```
#
# ## Projects
#
# The projects are two rules of your own. Each has a check, a reference solution and a measurement of its effect.
#
# ### Exercise 4 · your own rule for a reward that fails
#
# *Difficulty: project · kind: design · importance: useful · time: 20 minutes*
#
# A reward model sometimes fails and returns 5 too much, for rewards between 0 and 1. One such failure distorts its whole group: the mean and the standard deviation follow the outlier, and all other members get nearly equal advantages. The next cell simulates this reward.


# %%
def broken(table, fraction):
    """The table with 5 added to a fraction of the final rewards."""
    chance = torch.Generator().manual_seed(5)
    return table + 5.0 * (torch.rand(table[..., -1:].shape, generator=chance) < fraction)


# %% [markdown]
# Design a rule that tolerates such failures. The check requires four properties:
#
# - it keeps the contract, also for invalid samples (their reward is `nan`) and for equal rewards;
# - it needs no network evaluations besides the rollout, and gives all decisions of a trajectory the same credit;
# - without failures, its credit has a correlation of at least 0.8 with uniform credit;
# - if a fifth of the rewards fail, the correlation with uniform credit on the *correct* rewards is still at least 0.55.


# %% tags=["exercise"]
@dataclass(frozen=True)
class RobustCredit:
    """The same credit at every decision, for a reward that sometimes fails."""

    probe: Probe = NoProbe()

    def assign(self, values, decisions):
        return ...


# %% [markdown] tags=["hint"]
# **Hint.** Replace the reward by a statistic that does not depend on the *size* of an outlier, such as the rank within the group. `final[:, :, None] > final[:, None, :]` is `[prompt, member, member]` and compares every member with every other one. How do you treat equal rewards?


# %% tags=["solution"]
@dataclass(frozen=True)
class RobustCredit:
    """Every decision gets the z-score of the rank of the finished sample's reward."""

    probe: Probe = NoProbe()

    def assign(self, values, decisions):
        final = values[..., -1]
        below = (final[:, :, None] > final[:, None, :]).to(final).sum(dim=-1)
        equal = (final[:, :, None] == final[:, None, :]).to(final).sum(dim=-1)
        ranks = below + (equal - 1) / 2
        return zscore(
            ranks[..., None].repeat(1, 1, len(decisions)),
            over=("member",),
            mask=decisions.mask,
        )


# %%
lesson.check_robust(RobustCredit)

# %% [markdown] tags=["explanation"]
# **Why.** A rank has a bounded size, so a failure moves one member to the top and leaves the order of the others unchanged. The comparison table `[prompt, member, member]` counts how many members each one exceeds, and gives ties their mean rank. For example, the ranks of .2, .5, .5, .9 are 0, 1.5, 1.5, 3. Every comparison with `nan` is false, so an invalid sample changes no rank. Two `argsort`s would give equal rewards different ranks.
# Other designs pass as well, for example deviations from the median in units of the median deviation, with a limit.

# %% [markdown]
# The next cell compares the reference solution (or your own rule, if you wrote one) with uniform credit on the table of this lesson. It prints the correlation with uniform credit on the *correct* rewards.

# %%
table = tables["ODE completion"]
correct = Uniform().assign(table, decisions).flatten()
print("correlation with uniform credit on correct rewards")
for fraction in (0.0, 0.05, 0.2):
    means = [
        torch.corrcoef(
            torch.stack([rule.assign(broken(table, fraction), decisions).flatten(), correct])
        )[0, 1]
        for rule in (Uniform(), RobustCredit())
    ]
    print(
        f"{fraction:4.0%} of the rewards fail: uniform credit {float(means[0]):.2f}   robust"
        f" credit {float(means[1]):.2f}"
    )

# %% [markdown]
# Ranks ignore the *size* of a difference, so their correlation is below 1 with correct rewards. As soon as some rewards fail, it is higher than that of uniform credit.
#
# ### Exercise 5 · a rule with memory
#
# *Difficulty: project · kind: code · importance: useful · time: 45 minutes*
#
# All rules so far scale each group by its own standard deviation. A group of nearly equal rewards then gets advantages of the same size as a group with large differences. Let us use **one scale** for all groups instead, and keep it across iterations.
# Let $y_k$ be $R - V_k$ minus its mean over members, at each decision, and $\langle y^2\rangle$ the mean over the whole table. With the memory $m$,
#
# $$m \leftarrow 0.9\, m + 0.1\, \langle y^2 \rangle, \qquad A = \operatorname{clamp}\!\left(\frac{y}{\sqrt m + 10^{-4}},\, \pm 5\right).$$
#
# All means are over the entries of `decisions.mask`. For the first table $m = \langle y^2\rangle$. Update $m$ with the present table before you use it. The memory must be part of checkpoints:
# `state_dict()` returns it as named tensors (empty before the first table), and `load_state_dict(state)` restores it, including the empty memory.


# %% tags=["exercise"]
@dataclass
class OneScale:
    """R - V_k, divided by a running root mean square."""

    decay: float = 0.9
    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)
    squares: torch.Tensor | None = field(default=None, repr=False)

    def assign(self, values, decisions):
        return ...

    def state_dict(self):
        return ...

    def load_state_dict(self, state): ...


# %% [markdown] tags=["hint"]
# **Hint.** Start with `state_dict` and `load_state_dict` for `self.squares`, including the empty state. In `assign`, compute the centred values, then the new `self.squares`, then divide. `zscore` does not help, since it has no memory. Set the entries outside the mask to `nan` with `masked_fill`, and take means with `nanmean`, which leaves them out.


# %% tags=["solution"]
@dataclass
class OneScale:
    """R - V_k, divided by a running root mean square."""

    decay: float = 0.9
    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)
    squares: torch.Tensor | None = field(default=None, repr=False)

    def assign(self, values, decisions):
        y = reward_to_go(values).masked_fill(~decisions.mask, torch.nan)
        y = y - y.nanmean(dim=1, keepdim=True)
        new = y.square().nanmean()
        self.squares = (
            new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        )
        return (y / (self.squares.sqrt() + 1e-4)).clamp(-5, 5)

    def state_dict(self):
        return {} if self.squares is None else {"squares": self.squares.clone()}

    def load_state_dict(self, state):
        self.squares = state["squares"].clone() if "squares" in state else None


# %%
lesson.check_remembers(OneScale)

# %% [markdown] tags=["explanation"]
# **Why.** The squares are averaged and the root is taken last, because a mean of roots would underestimate the scale. The present table is added first, so that the first table has a scale too. `clone` separates the checkpoint from the memory in use.
# The contract suite gives the rule several tables, saves its state and loads it into a new copy. It requires bitwise equal results, since a resumed training run depends on them.

# %%
shown = tables["one-step estimate"]
for name, rule in (("one scale", OneScale()), ("a std per group", EstimateToGo())):
    sizes = rule.assign(shown, decisions).abs().mean((1, 2))
    # the second table: all differences halved
    smaller = rule.assign(0.5 * shown, decisions).abs().mean()
    line = (
        f"smallest {float(sizes.min()):.2f}, largest {float(sizes.max()):.2f}, mean"
        f" {float(sizes.mean()):.2f}"
    )
    print(
        f"{name:<16} mean |credit| of a group: {line}; of the second table"
        f" {float(smaller):.2f}"
    )

# %% [markdown]
# With one scale, groups with small differences get smaller credit than others, and a table with smaller differences gets smaller credit than the table before it. We wanted both effects. Whether they help training is open until we test them.
# If a test shows no effect of a part of your rule, leave this part out.
#
# ## Rules that read more than values
#
# A rule may need more than the table: the states, the log-probabilities, the parts of a composite reward, or the prompts. Such a rule names the fields in `needs`, and `assign` has a third argument, the record of the iteration, with the fields `prompts`, `valid`, `parts`, `trajectories`, `log_probs` and `condition`.
# Of the last three, only those that the rule names are gathered. A rule may also return a `Credit`: advantages $A$, and *weights* $w$ in $[0, 1]$, both `[prompt, member, decision]`. An advantage is the credit of a decision. A weight is the share of the decision in the loss, which is a weighted mean, so only ratios of weights matter.
#
# For example, the following rule has the credit of `EstimateToGo`, and gives a smaller weight to decisions with unusually large noise: $\log \pi$ of the drawn transition is lower if the draw is far from the transition's mean.


# %%
@dataclass(frozen=True)
class LikelyDraws:
    """The credit of EstimateToGo; decisions with unlikely draws have less weight."""

    probe: Probe = Tweedie()
    needs = Needs(fields=("log_probs",), shared_noise=True)

    def assign(self, values, decisions, record):
        mask = decisions.mask
        # [prompt, member, decision]; nan where nothing was drawn
        logs = record.log_probs.masked_fill(~mask, -torch.inf)
        weights = (
            (logs - logs.amax(dim=(0, 1), keepdim=True)).exp().masked_fill(~mask, 0.0)
        )  # 1 for the likeliest of each decision
        return Credit(EstimateToGo().assign(values, decisions), weights)


credit = credit_of(LikelyDraws(), batches["one-step estimate"].experience)
print("advantages", tuple(credit.advantages.shape), " weights", tuple(credit.weights.shape))
print(
    "mean weight by decision:",
    " ".join(f"{weight:.2f}" for weight in credit.weights.mean((0, 1))),
)
print(
    f"{sum(finding.ok for finding in check_credit(LikelyDraws()))} of"
    f" {len(check_credit(LikelyDraws()))} promises kept"
)

# %% [markdown]
# The trainer calls `credit_of`, which calls `assign` with what the rule needs, checks the result, and sets everything outside the mask to 0. (We have not measured the effect of this rule on training. A loss with unequal weights has another optimum than one with equal weights.)
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. A rule has `probe = NoProbe()` and reads column 3 of the table. What happens? **a** The column contains 0, so the credit is too small. **b** The column contains `nan`, and the contract check fails. **c** The trainer computes the column when it is read.
# 2. The trainer sets advantages outside the mask to 0. Why must a rule use the mask as well? **a** It need not; the mask only saves time. **b** Otherwise the optimizer updates on invalid samples. **c** Otherwise excluded entries change the mean and the scale of the others.
# 3. The estimate $V_5$ of *one* member is too high. Which of its credits are wrong if the rule uses gains? **a** Those of decisions 4 and 5, with opposite signs. **b** That of decision 5 only. **c** Those of all decisions from 5 on.
# 4. Two short runs end at 0.97 with `EstimateGain` and at 0.93 with `EstimateToGo`. What follows? **a** `EstimateGain` is the better rule. **b** The two rules are equally good. **c** Both rules run, and more is not known.
# 5. During training the differences between the rewards shrink to half in all groups. The advantages of uniform credit, Z within each group, **a** shrink to half, **b** stay as large as before, **c** double.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are in the explanation of exercise 1 (for two questions), in that of exercise 2, after the training runs, and in the last project, in this order.

# %% tags=["solution"]
quiz = {1: "b", 2: "c", 3: "a", 4: "c", 5: "b"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: columns that the probe does not fill are `nan`, so that the mistake shows at once. 2: statistics are computed before the trainer applies the mask. 3: $V_5$ is in $g_4$ with a plus and in $g_5$ with a minus. 4: two seeds and one setting cannot tell two rules apart. 5: the differences are divided by their own standard deviation, which shrinks by the same factor.

# %% [markdown]
# ## Summary
#
# | step | what | where |
# |---|---|---|
# | idea | $A^*_k = V^*_{k+1} - V^*_k$ of decision $k$; how is $V^*$ estimated, and at what cost? | `probes.Tweedie`, `Substeps`, `Completion`, `NoProbe` |
# | class | `probe`, `assign(values, decisions)`; `needs`; `state_dict` for a memory | `protocols.CreditAssigner`, `experience.Needs`, `protocols.Stateful` |
# | mask | entries outside `decisions.mask` are left out of all statistics | `zscore(..., mask=decisions.mask)` |
# | more than values | `assign(values, decisions, record)` may return advantages and weights | `experience.Needs`, `Experience`, `Credit` |
# | contract | does the rule keep the promises on which the trainer relies? | `flowrl.testing.check_credit`, `credit_contract` |
# | file | a class in a file, with options in brackets | `flowrl compare --credit "my_rules.py:MyRule(clamp=2.0)"` |
#
# The rules of this lesson also run in the image world. We have not measured how well they train images.
#
# ## Symbols
#
# {symbols: decision $k$; $D$; $V_k$; $V^*_k$; $R$; $g_k$; $R - V_k$; $A$; $w$; $Z$}
#
# ## Further reading
#
# - Savani et al. 2026, *Stepwise-Flow-GRPO* (arXiv 2603.28718), and Tong et al. 2026, *TP-GRPO* (arXiv 2602.06422): the rules that this lesson starts from.
# - Schulman et al. 2015, *High-dimensional continuous control using generalized advantage estimation* (arXiv 1506.02438): a family between gains and reward-to-go.
# - Arjona-Medina et al. 2018, *RUDDER* (arXiv 1806.07857): credit by differences of a predicted return.
#
# **Next:** [10 · Test your own rule](10_test_your_rule.ipynb) compares the credit of these rules with the ground truth, and trains with them under equal conditions.

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
# **Time** 45 minutes and two projects of 20 and 45 minutes; the computer needs less than half a minute. **You need** the lessons from GRPO on a flow to TP-GRPO.
#
# A credit rule maps a table of values to a table of advantages. The figure shows the table of one group on the left (rewards of ODE completions, and of the finished samples in the last column), and the credit that three rules compute from it (red is positive, blue negative).

# %% tags=["hide-input"]
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from flowrl.credit import StepwiseGain, TurningPoint, Uniform, credit_of, gains, reward_to_go, zscore
from flowrl.core.experience import Credit
from flowrl.probes import Completion, NoProbe, Probe, Tweedie
from flowrl.parts.registry import build
from flowrl_testing import check_credit
from flowrl_course import lesson_09 as lesson
from flowrl_course.batches import sample_groups
from flowrl_course.figures import clean, panels
from flowrl_course.runs import learn, start

torch.set_num_threads(1)
WORLD = {"window": ":-1", "clip_range": 2e-2}  # all steps but the last are decisions; clip range: Side by side


def table_of(trainer, probe):
    """Groups of a trainer's policy with their value table: 18 prompts, 12 members that share their noise."""
    prompts = trainer.prompts.prompts
    return sample_groups(trainer.policy, trainer.reward, prompts, 12, trainer.draw_sampler(), probe, shared_noise=True)


untrained = start(**WORLD)
batches = {"one-step estimate": table_of(untrained, Tweedie()), "ODE completion": table_of(untrained, Completion())}
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
    axes[0].set(title="values (0 to 1)", xlabel="decision (9: finished)", ylabel="member", xticks=range(0, 10, 3))
    for cell, (name, rule) in zip(
        axes[1:], {"Flow-GRPO": Uniform(), "Stepwise": StepwiseGain(), "TP-GRPO": TurningPoint()}.items(), strict=True
    ):
        cell.imshow(rule.assign(table, decisions)[group], cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto")
        cell.set(title=f"{name}: credit (-3 to 3)", xlabel="decision", xticks=range(0, 9, 2))
    plt.show()


opening()

# %% [markdown]
# ## The idea
#
# A **decision** is a transition that was drawn (the lesson on Stepwise-Flow-GRPO). Here steps 0 to 8 are the decisions $k = 0, \dots, 8$, so $D = 9$; the last step follows the ODE. Let $V_k$ be the expected reward if the *stochastic* sampler continues from the state before decision $k$, and $V_D = R$ the reward of the finished sample. Decision $k$ changes this expectation by
#
# $$A^*_k = V_{k+1} - V_k,$$
#
# the **true advantage** of the decision. The sum over the decisions is $R - V_0$. A credit rule estimates $A^*$ from a table of values $R_k$, and the rules of the last lessons differ in these estimates of $V_k$:
#
# | rule | estimate of $V_k$ | network evaluations per trajectory |
# |---|---|---|
# | Flow-GRPO | none; every decision gets $R$ minus the group's mean | 10 |
# | Stepwise-Flow-GRPO | reward of 5 Euler substeps | 46 |
# | TP-GRPO | reward of the ODE completion | 55 |
#
# (Slightly fewer if a group shares its first node.)
#
# The idea of this lesson is a cheap rule. The one-step estimate $\hat x_0 = x - t v$ from a state $x$ at time $t$ needs only the velocity that the rollout has computed already, so it costs no further network evaluation.
# If its reward is a good estimate of $V$, step-wise credit costs no more than Flow-GRPO. This lesson builds the rule; the lesson Test your own rule tests whether the estimate is good enough.
#
# ## From the idea to a class
#
# A rule is any object with two members:
#
# - `probe`, the way in which unfinished states are scored: `NoProbe()`, `Tweedie()` (short for `Substeps(1)`), `Substeps(n)`, `Completion()`;
# - `assign(values, decisions)`, which maps values `[prompt, member, decision+1]` to advantages `[prompt, member, decision]`. Column $k < D$ is the value of the state before decision $k$, the last column the reward of the finished sample. `decisions` describes the axis: `step`, `time`, `delta`, `std` `[decision]`, and `mask` `[prompt, member, decision]`.
#
# The mask is true for the entries that count. False are transitions that were not drawn for this member, that are not trained, and samples that the reward could not judge. The trainer sets their advantages to 0. A rule must leave them out of every mean, standard deviation and count; `zscore(..., mask=decisions.mask)` does.
#
# With an attribute `shared_noise = True` the members of a group start from the same noise. A rule needs no base class and no registration. The first draft below computes gains of the one-step estimate, normalised over members and steps as in Stepwise.


# %%
class Draft:
    """The credit of a decision is its change of the one-step estimate's reward."""

    probe = NoProbe()
    shared_noise = True

    def assign(self, values, decisions):
        values -= values[..., :1]
        gained = values[..., 1:] - values[..., :-1]
        return (gained - gained.mean((1, 2), keepdim=True)) / gained.std((1, 2), unbiased=False, keepdim=True)


# %% [markdown]
# The trainer, `flowrl compare` and the checkpoints rely on the promises in the protocol's docstring. `flowrl_testing` checks all of them with difficult tables: groups of equal values, a group of one, values of $10^6$, permuted members, invalid samples, transitions that were not drawn.

# %%
print(*[line for line in str(check_credit(Draft())).splitlines() if "not tried, because" not in line], sep="\n")

# %% [markdown]
# One fault hides the others: the remaining promises are not checked as long as the rule changes its input.
#
# ### Exercise 1 · repair the draft
#
# *Difficulty: easy · importance: essential · time: 10 minutes*
#
# The draft has four faults. Repair one, run `check_credit` again, and repeat; a rule that changes its input breaks other promises too, so repair that first. `zscore(gains(values), over=("member", "decision"), mask=decisions.mask)` from `flowrl.credit` normalises over the entries that count and handles the special cases. You can also write the normalisation yourself.


# %% tags=["exercise"]
class EstimateGain:
    """The credit of a decision is its change of the one-step estimate's reward."""

    probe = NoProbe()
    shared_noise = True

    def assign(self, values, decisions):
        values -= values[..., :1]
        gained = values[..., 1:] - values[..., :-1]
        return (gained - gained.mean((1, 2), keepdim=True)) / gained.std((1, 2), unbiased=False, keepdim=True)


# %% [markdown] tags=["hint"]
# **Hint.** Compare four points with the protocol: which columns does the probe score, does `assign` change its argument, which entries are in the mean and the standard deviation, and what does the last line compute for a group whose values are all equal?


# %% tags=["solution"]
@dataclass(frozen=True)
class EstimateGain:
    """The credit of a decision is its change of the one-step estimate's reward."""

    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, values, decisions):
        return zscore(gains(values), over=("member", "decision"), mask=decisions.mask)


# %%
lesson.check_mended(EstimateGain)

# %% [markdown] tags=["explanation"]
# **Why.** With `NoProbe()` the rollout scores the finished sample only. All other columns are `nan`, so that a rule that reads them fails at once. `-=` writes into the caller's table, which the trainer still needs for its metrics.
# A group of equal values has a standard deviation of 0. The division gives `nan`, which the optimizer would write into all weights. `zscore` adds $10^{-4}$ and subtracts
# one of the values before the mean, so that equal values give exactly 0. Without the mask, the values of an invalid sample (`nan`) would reach the credit of its whole group, and transitions outside the mask would change the scale of the others. (The subtraction of the first column was not a fault, but it has no effect on gains.)

# %%
findings = check_credit(EstimateGain())
print(findings.ok, f"{sum(finding.ok for finding in findings)} of {len(findings)} promises kept")

# %% [markdown]
# In a test file the same suite takes two lines, with one pytest case per promise:
#
# ```python
# from flowrl_testing import credit_contract
# test_estimate_gain = credit_contract(EstimateGain())
# ```
#
# ## A second rule: reward-to-go
#
# The gain $R_{k+1} - R_k$ depends on two estimates. An alternative is the reward-to-go of the lesson on Stepwise-Flow-GRPO, the total gain from decision $k$ to the *finished* sample, $R - R_k$. Its first term is the reward itself, not an estimate.
#
# ### Exercise 2 · reward-to-go
#
# *Difficulty: medium · importance: essential · time: 10 minutes*
#
# The credit of decision $k$ is $R - R_k$. Normalise with the mean over members at each decision, and one standard deviation for the whole group: `zscore(y, over=("member",), std_over=("member", "decision"), mask=decisions.mask)`.
# (The standard deviation is that of $y$ itself, before the mean is subtracted.)


# %% tags=["exercise"]
@dataclass(frozen=True)
class EstimateToGo:
    """The credit of a decision is the final reward minus the estimate before it."""

    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, values, decisions):
        return ...


# %% [markdown] tags=["hint"]
# **Hint.** `values` has one column more than there are decisions. Column $k$ is the state before decision $k$, so drop the last column of the subtracted term. `values[..., -1:]` is the last column with its axis.


# %% tags=["solution"]
@dataclass(frozen=True)
class EstimateToGo:
    """The credit of a decision is the final reward minus the estimate before it."""

    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, values, decisions):
        return zscore(reward_to_go(values), ("member",), ("member", "decision"), mask=decisions.mask)


# %%
lesson.check_to_go(EstimateToGo)

# %% [markdown] tags=["explanation"]
# **Why.** $R - R_k$ is the sum of the gains from decision $k$ to the end: a decision is credited with those that follow it. This adds noise. In return, an error of the estimate $R_k$ enters one credit only. With gains it enters two: that of decision $k$, and with the opposite sign that of decision $k - 1$.
# The mean is taken decision by decision because $R - R_k$ decreases along a trajectory: a mean over the decisions would give early ones positive credit for being early.

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=2.9, sharey=True)
for cell, (name, rule) in zip(axes, {"gains": EstimateGain(), "reward-to-go": EstimateToGo()}.items(), strict=True):
    credit = rule.assign(tables["one-step estimate"], decisions)[0]
    cell.plot(credit.T, color="#56B4E9", linewidth=1.2, alpha=0.8)
    cell.axhline(0, color="#22252b", linewidth=0.8)
    cell.set(xlabel="decision", xticks=range(0, 9, 2), title=f"{name}: 12 members of one group")
    clean(cell)
axes[0].set_ylabel("credit")
plt.show()

# %% [markdown]
# The lines of the gains cross often: the credit of a decision says little about the next one. Reward-to-go changes slowly along a trajectory, since neighbouring decisions share most of their terms.
#
# ## The rule in the trainer
#
# `start` and `learn` (in `flowrl_course.runs`) pass a rule to the trainer of the lesson on Flow-GRPO. The trainer reads `probe` and `shared_noise`, scores the columns, and calls `assign` once per iteration.

# %%
for name, rule in (("EstimateGain", EstimateGain), ("EstimateToGo", EstimateToGo)):
    curves = [learn(seed=seed, rule=rule(), iterations=8, **WORLD) for seed in range(2)]
    before, after = (torch.stack([curve.reward[at] for curve in curves]).mean() for at in (0, -1))
    evaluations = float(curves[0].sampled[-1]) / 8 / 96  # 8 rollouts of 96 trajectories
    print(
        f"{name:<13} {evaluations:.1f} network evaluations per trajectory; reward {before:.2f} -> {after:.2f} (mean of two seeds)"
    )

# %% [markdown] tags=["expected"]
# EstimateGain  9.1 network evaluations per trajectory; reward 0.21 -> 0.80..0.99 (mean of two seeds)
# EstimateToGo  9.1 network evaluations per trajectory; reward 0.21 -> 0.60..0.99 (mean of two seeds)

# %% [markdown]
# Both rules run, and the reward rises; they cost less than the 10 evaluations of Flow-GRPO, because a group shares its first node. That is all that two short runs show. Whether a rule is better than another one, and whether it stays good, is the subject of the lesson Test your own rule.
#
# On the command line a rule is a class in a file. `build` reads the same text as `flowrl compare --credit`:

# %%
RULE = '''
from dataclasses import dataclass

from flowrl.credit import reward_to_go, zscore
from flowrl.probes import Probe, Tweedie


@dataclass(frozen=True)
class EstimateToGo:
    """The credit of a decision is the final reward minus the estimate before it."""

    clamp: float = 5.0
    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, values, decisions):
        return zscore(reward_to_go(values), ("member",), ("member", "decision"), self.clamp, decisions.mask)
'''
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "my_rules.py"
    file.write_text(RULE)
    loaded = build("credit", f"{file}:EstimateToGo(clamp=2.0)", trust=True)
print(f"clamp {loaded.clamp}, probe {loaded.probe};", "contract kept" if check_credit(loaded).ok else "contract broken")

# %% [markdown]
# ```bash
# flowrl explain my_rules.py:EstimateToGo stepwise-gain                 # the credit of both rules on one table
# flowrl compare --world mixture --credit "my_rules.py:EstimateToGo(clamp=2.0)"
# ```
#
# ## Projects
#
# The projects are two rules with problems of their own. Each has a check, a reference solution and a measurement of its effect.
#
# ### Exercise 3 · ranks instead of rewards
#
# *Difficulty: project · importance: useful · time: 20 minutes*
#
# A reward model that sometimes fails (a score of 5 instead of 0 to 1) distorts a group: the mean and the standard deviation follow the outlier, and all other members get nearly equal advantages. Ranks are robust against outliers.
# Write a rule with the same credit at every decision: the z-score, over the members of a group, of the *ranks* of $R$ within the group. Equal rewards share their mean rank: the ranks of the rewards .2, .5, .5, .9 are 0, 1.5, 1.5, 3. An invalid sample has the reward `nan`, and every comparison with `nan` is false: it gets no rank and changes none.


# %% tags=["exercise"]
@dataclass(frozen=True)
class RankCredit:
    """Every decision gets the z-score of the rank of the finished sample's reward."""

    probe: Probe = NoProbe()

    def assign(self, values, decisions):
        return ...


# %% [markdown] tags=["hint"]
# **Hint.** Compare every member with every other one: `final[:, :, None] > final[:, None, :]` is `[prompt, member, member]`. A row's sum is the number of members that it exceeds. Which number must be added for ties?


# %% tags=["solution"]
@dataclass(frozen=True)
class RankCredit:
    """Every decision gets the z-score of the rank of the finished sample's reward."""

    probe: Probe = NoProbe()

    def assign(self, values, decisions):
        final = values[..., -1]
        below = (final[:, :, None] > final[:, None, :]).to(final).sum(dim=-1)
        equal = (final[:, :, None] == final[:, None, :]).to(final).sum(dim=-1)
        ranks = below + (equal - 1) / 2
        return zscore(ranks[..., None].repeat(1, 1, len(decisions)), over=("member",), mask=decisions.mask)


# %%
lesson.check_rank(RankCredit)

# %% [markdown] tags=["explanation"]
# **Why.** The comparison table `[prompt, member, member]` counts for each member how many members it exceeds, and gives ties their mean rank. Two `argsort`s would give equal rewards different ranks, in the order of the group.

# %% [markdown]
# The next cell adds 5 to a fraction of the scores. It prints the correlation of each rule's credit with uniform credit on the *correct* scores.


# %%
def broken(table, fraction):
    """The table with 5 added to a fraction of the final rewards."""
    chance = torch.Generator().manual_seed(5)
    return table + 5.0 * (torch.rand(table[..., -1:].shape, generator=chance) < fraction)


table = tables["ODE completion"]
correct = Uniform().assign(table, decisions).flatten()
print("correlation with uniform credit on correct scores")
for fraction in (0.0, 0.05, 0.2):
    means = [
        torch.corrcoef(torch.stack([rule.assign(broken(table, fraction), decisions).flatten(), correct]))[0, 1]
        for rule in (Uniform(), RankCredit())
    ]
    print(f"{fraction:4.0%} of the scores broken: rewards {float(means[0]):.2f}   ranks {float(means[1]):.2f}")

# %% [markdown]
# Ranks ignore the *size* of a difference, so their correlation is below 1 with correct scores. With broken scores it is higher than that of the rewards.
#
# ### Exercise 4 · a rule with memory
#
# *Difficulty: project · importance: useful · time: 45 minutes*
#
# All rules so far scale each group by its own standard deviation. A group of nearly equal rewards then gets advantages of the same size as a group with large differences. Use **one scale** for all groups instead, and keep it across iterations.
# With the centred values $y = (R - R_k) - \operatorname{mean}_{\text{members}}(R - R_k)$, at each decision,
#
# $$m \leftarrow 0.9\, m + 0.1\, \langle y^2 \rangle, \qquad A = \operatorname{clamp}\!\left(\frac{y}{\sqrt m + 10^{-4}},\, \pm 5\right),$$
#
# where $\langle\cdot\rangle$ is the mean over the whole table; all means are over the entries of `decisions.mask`. For the first table $m = \langle y^2\rangle$. Update $m$ with the present table before you use it. The memory of a rule must be part of checkpoints:
# `state_dict()` returns the memory as named tensors (empty before the first table), `load_state_dict(state)` restores it, also the empty memory.


# %% tags=["exercise"]
@dataclass
class OneScale:
    """R - R_k, divided by a running root mean square."""

    decay: float = 0.9
    probe: Probe = Tweedie()
    shared_noise: bool = True
    squares: torch.Tensor | None = field(default=None, repr=False)

    def assign(self, values, decisions):
        return ...

    def state_dict(self):
        return ...

    def load_state_dict(self, state): ...


# %% [markdown] tags=["hint"]
# **Hint.** Start with `state_dict` and `load_state_dict` for `self.squares`, including the empty state. In `assign`, compute the centred values, then the new `self.squares`, then divide. `zscore` is of no use here, since it has no memory. Set the entries outside the mask to `nan` with `masked_fill`, and take means with `nanmean`, which leaves them out; the trainer sets these advantages to 0.


# %% tags=["solution"]
@dataclass
class OneScale:
    """R - R_k, divided by a running root mean square."""

    decay: float = 0.9
    probe: Probe = Tweedie()
    shared_noise: bool = True
    squares: torch.Tensor | None = field(default=None, repr=False)

    def assign(self, values, decisions):
        y = reward_to_go(values).masked_fill(~decisions.mask, torch.nan)
        y = y - y.nanmean(dim=1, keepdim=True)
        new = y.square().nanmean()
        self.squares = new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        return (y / (self.squares.sqrt() + 1e-4)).clamp(-5, 5)

    def state_dict(self):
        return {} if self.squares is None else {"squares": self.squares.clone()}

    def load_state_dict(self, state):
        self.squares = state["squares"].clone() if "squares" in state else None


# %%
lesson.check_remembers(OneScale)

# %% [markdown] tags=["explanation"]
# **Why.** The squares are averaged and the root is taken last; a mean of roots would underestimate the scale. The present table is added first, so that the first table has a scale too. `clone` separates the checkpoint from the memory in use.
# The contract suite gives the rule several tables, saves its state, loads it into a new copy, and requires bitwise equal results, on which a resumed training run depends.

# %%
shown = tables["one-step estimate"]
for name, rule in (("one scale", OneScale()), ("a std per group", EstimateToGo())):
    sizes = rule.assign(shown, decisions).abs().mean((1, 2))
    smaller = rule.assign(0.5 * shown, decisions).abs().mean()  # the second table: all differences halved
    line = f"smallest {float(sizes.min()):.2f}, largest {float(sizes.max()):.2f}, mean {float(sizes.mean()):.2f}"
    print(f"{name:<16} mean |credit| of a group: {line}; of the second table {float(smaller):.2f}")

# %% [markdown]
# With one scale, groups with small differences get smaller credit than others, and a table of smaller differences gets smaller credit than the table before it. Both effects are intended. Whether they help training is open until it is tested.
# Leave out a part of a rule that has no measured effect.
#
# ## Rules that read more than values
#
# A rule may need more than the table: the states, the log-probabilities, the values of the components of a composite reward, or the prompts. Then it has `credit(experience)` instead of `assign`. The record `experience` of type `Experience` has `values` and `decisions` as above, and `prompts`, `parts`, `trajectories`, `log_probs` and `condition`;
# `reads_fields` lists which of the last three the rule needs, so that no others are gathered. The result is a `Credit`: advantages, and optionally *weights* in $[0, 1]$, both `[prompt, member, decision]`. An advantage is the credit of a decision. A weight is its share in the loss, which is a weighted mean, so only ratios of weights matter.
#
# The following rule has the credit of `EstimateToGo`, and gives a smaller weight to decisions that drew much noise: $\log \pi$ of the drawn transition, the mean over elements, is lower if the draw is far from the transition's mean.


# %%
@dataclass(frozen=True)
class LikelyDraws:
    """The credit of EstimateToGo; decisions with unlikely draws have less weight."""

    probe: Probe = Tweedie()
    shared_noise: bool = True
    reads_fields: tuple = ("log_probs",)

    def credit(self, experience):
        mask = experience.decisions.mask
        logs = experience.log_probs.masked_fill(~mask, -torch.inf)  # [prompt, member, decision]; nan where nothing was drawn
        weights = (
            (logs - logs.amax(dim=(0, 1), keepdim=True)).exp().masked_fill(~mask, 0.0)
        )  # 1 for the likeliest of each decision
        return Credit(EstimateToGo().assign(experience.values, experience.decisions), weights)


credit = credit_of(LikelyDraws(), batches["one-step estimate"].experience)
print("advantages", tuple(credit.advantages.shape), " weights", tuple(credit.weights.shape))
print("mean weight by decision:", " ".join(f"{weight:.2f}" for weight in credit.weights.mean((0, 1))))
print(f"{sum(finding.ok for finding in check_credit(LikelyDraws()))} of {len(check_credit(LikelyDraws()))} promises kept")

# %% [markdown]
# `credit_of` is what the trainer calls. It accepts both forms, checks the result, and sets everything outside the mask to 0. (The effect of this rule on training has not been measured. A loss with unequal weights has another optimum than one with equal weights.)
#
# ## To keep
#
# | step | what | where |
# |---|---|---|
# | idea | $A^*_k = V_{k+1} - V_k$ of decision $k$; what is the estimate of $V$, and what does it cost? | `probes.Tweedie`, `Substeps`, `Completion`, `NoProbe` |
# | class | `probe`, `assign(values, decisions)`; `shared_noise`; `state_dict` for a memory | `protocols.CreditAssigner`, `Stateful` |
# | mask | entries outside `decisions.mask` are left out of all statistics | `zscore(..., mask=decisions.mask)` |
# | more than values | `credit(experience)` returns advantages and weights | `protocols.ExperienceCredit`, `experience.Experience`, `Credit` |
# | contract | does the rule keep the promises that the trainer relies on? | `testing.check_credit`, `testing.credit_contract` |
# | file | a class in a file, with options in brackets | `flowrl compare --credit "my_rules.py:MyRule(clamp=2.0)"` |
#
# The rules of this lesson also run in the image world. Their performance on images has not been measured.
#
# ## Further reading
#
# - Savani et al. 2026, *Stepwise-Flow-GRPO* (arXiv 2603.28718), and Tong et al. 2026, *TP-GRPO* (arXiv 2602.06422): the rules that this lesson starts from.
# - Schulman et al. 2015, *High-dimensional continuous control using generalized advantage estimation* (arXiv 1506.02438): a family between gains and reward-to-go.
# - Arjona-Medina et al. 2018, *RUDDER* (arXiv 1806.07857): credit by differences of a predicted return.
#
# **Next:** [10 · Test your own rule](10_test_your_rule.ipynb) compares the credit of these rules with the ground truth, and trains with them under equal conditions.

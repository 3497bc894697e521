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
# # 10 · Test your own rule
#
# **After this lesson you can** compare a rule's credit and gradient with the ground truth, find the errors that this comparison misses, plan a comparison with tuned baselines before the first run, and reach a verdict.
#
# **Time** 100 minutes and a project of 40 minutes; the computer needs about one minute. **You need** the lessons Side by side and Your own credit rule.
#
# The animation shows the quantity that every credit rule estimates. On the left, the sampler denoises a trajectory; the cross is its target. On the right are the *expected* reward before each of its decisions, and two estimates of this expectation.

# %% tags=["hide-input"]
import math
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch

from flowrl.credit import StepwiseGain, TurningPoint, Uniform, gains, reward_to_go, zscore
from flowrl.bench.gradients import (
    Setting,
    alignment,
    pathwise_gradients,
    policy_gradients,
    update_evaluations,
)
from flowrl.run.statistics import mean
from flowrl.bench.statistics import detectable, holm
from flowrl.bench.true_advantage import Look, compare_credit, true_advantages
from flowrl.flow import sample as draw_from
from flowrl.core.experience import Credit, Needs
from flowrl.probes import Completion, Probe, Tweedie
from flowrl_course import lesson_10 as lesson
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
    plane,
    target,
)
from flowrl_course.progress import progress
from flowrl_course.runs import learn, start

torch.set_num_threads(1)
# all steps but the last are decisions; clip range: Side by side
WORLD = {"window": ":-1", "clip_range": 2e-2}


@dataclass(frozen=True)
class EstimateGain:
    """The credit of a decision is its change of the one-step estimate's reward (the lesson
    Your own credit rule, exercise 1).
    """

    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        return zscore(gains(values), over=("member", "decision"), mask=decisions.mask)


@dataclass(frozen=True)
class EstimateToGo:
    """The credit of a decision is the final reward minus the estimate before it (the lesson
    Your own credit rule, exercise 2).
    """

    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        return zscore(
            reward_to_go(values), ("member",), ("member", "decision"), mask=decisions.mask
        )


def setting_of(trainer):
    """A trainer's policy, sampler, grid and reward, with all 18 training prompts, for the
    diagnostics.
    """
    return Setting(
        trainer.policy,
        trainer.draw_sampler(),
        trainer.schedule,
        trainer.reward,
        trainer.prompts.prompts,
    )


beginning = setting_of(start(**WORLD))
look = Look(beginning, members=12, seed=0)
truths = {
    shared: true_advantages(beginning, look.trajectories(shared), continuations=48)
    for shared in (False, True)
}
tables = {}
for name, probe in (("one-step estimate", Tweedie()), ("ODE completion", Completion())):
    result = look.trajectories(True, probe)
    # [prompt, member, decision+1]: 18 prompts, 12 members, 10 columns
    tables[name] = beginning.experience(result).values
# the nodes of the table's columns: the states before decisions 0 to 8, and the finished sample
COLUMNS = [*range(9), 10]


def opening():
    """The trajectory whose expected reward changed most, and two estimates of this reward."""
    values = truths[True].state_values
    prompt, member = divmod(int((values[..., -1] - values.amin(-1)).argmax()), look.members)
    row = prompt * look.members + member
    nodes = look.trajectories(True).trajectories.nodes[row].flatten(1)
    truth = truths[True]
    figure, (left, right) = panels(2, width=4.1, height=3.4)
    plane(left)
    left.scatter(*target(beginning.prompts[prompt]), marker="x", s=90, color=INK)
    (path,) = left.plot([], [], color=NOISE, linewidth=1)
    dot = left.scatter([0], [0], s=60, color=DATA)
    value, error = truth.state_values[prompt, member], truth.state_errors[prompt, member]
    right.fill_between(
        COLUMNS, value - 2 * error, value + 2 * error, color=DATA, alpha=0.2, linewidth=0
    )
    right.plot(COLUMNS, value, color=DATA, linewidth=2.4)
    right.plot(
        COLUMNS, tables["one-step estimate"][prompt, member], color=ACCENT, linestyle="--"
    )
    right.plot(
        COLUMNS,
        tables["ODE completion"][prompt, member],
        color=OTHERS[0],
        linestyle=":",
        linewidth=2,
    )
    labels = (
        ("expected reward V*", DATA),
        ("one-step estimate", ACCENT),
        ("ODE completion", OTHERS[0]),
    )
    for height, (text, shade) in zip((0.95, 0.87, 0.79), labels, strict=True):
        right.text(0.02, height, text, color=shade, transform=right.transAxes, fontsize=9)
    now = right.axvline(0, color=NOISE, linewidth=1)
    right.set(
        xlabel="state before decision (10: finished)",
        ylabel="reward",
        ylim=(-0.03, 1.45),
        title="V* (± 2 standard errors), and two estimates",
    )
    right.set_yticks([0, 0.5, 1])
    clean(right)
    figure.draw_without_rendering()

    def draw(frame):
        node = min(frame, 10)
        path.set_data(*nodes[: node + 1].T)
        dot.set_offsets(nodes[node])
        left.set_title(f"node {node}")
        now.set_xdata([node, node])

    return animation(figure, draw, frames=15, seconds=5)


opening()

# %% [markdown]
# ## Credit compared with the true advantage
#
# Decision $k$ draws the transition from $z_k$ to $z_{k+1}$; only the last step is deterministic here. Its true advantage is $A^*_k = V^*_{k+1} - V^*_k$, in which $V^*_k$ is the expected reward if the *stochastic* sampler continues from $z_k$. In two dimensions we can measure $V^*$: run the sampler from a state to the end many times, and average the rewards.
#
# ### Exercise 1 · the value of a state
#
# *Difficulty: medium · kind: code · importance: essential · time: 12 minutes*
#
# `latents` is `[sample, ...]`, all at node `node`. `go(latents, i)` draws step $i$ for every row; steps are $0, \dots, T-1$ with $T$ = `steps`. `reward(latents)` returns one reward per row. Return `[sample]`: the mean reward of `count` continuations of each state.


# %% tags=["exercise"]
def state_value(latents, node, steps, go, reward, count):
    """The expected final reward of each state, by Monte Carlo."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Copy each state `count` times with `repeat_interleave`, draw the remaining steps for all copies together, compute the rewards, and average those of one state. Which steps remain from node $j$?


# %% tags=["solution"]
def state_value(latents, node, steps, go, reward, count):
    """The expected final reward of each state, by Monte Carlo."""
    copies = latents.repeat_interleave(count, dim=0)
    for step in range(node, steps):
        copies = go(copies, step)
    return reward(copies).view(len(latents), count).mean(dim=1)


# %%
lesson.check_state_value(state_value)

# %% [markdown] tags=["explanation"]
# **Why.** Rewards are averaged, not states: the reward of the mean state is a different number (and meaningless for images). `repeat_interleave` puts the copies of one state next to each other, so that `.view(len(latents), count)` gives each state its own row. `repeat` would mix all states in every row and still return the right shape. The error of the mean decreases like $1/\sqrt{\text{count}}$, so half the error
# costs four times the work. This is too expensive for training.

# %% [markdown]
# The next cell compares your function with the library's values, for three members of a group at two nodes.

# %%
policy, schedule, asked = beginning.policy, beginning.schedule, beginning.prompts[0]
chance = torch.Generator().manual_seed(11)


def go(latents, step):
    """One stochastic step of the policy for every row, all for the first prompt."""
    count = len(latents)
    with torch.no_grad():
        velocity = policy.velocity(
            latents,
            schedule.network_timesteps[step].expand(count),
            policy.encode([asked] * count),
        )
        return draw_from(
            beginning.sampler.transition(
                latents, velocity, schedule, torch.full((count,), step)
            ),
            chance,
        )


def reward(latents):
    """The reward of every row."""
    return beginning.reward.score(policy.decode(latents), [asked] * len(latents))


# the group of the first prompt
nodes = look.trajectories(True).trajectories.nodes[: look.members]
for node in (3, 7):
    estimate = state_value(nodes[:, node], node, schedule.steps, go, reward, 400)
    # decision k starts at node k
    theirs, error = (
        truths[True].state_values[0, :, node],
        truths[True].state_errors[0, :, node],
    )
    print(
        f"node {node}: yours {estimate[:3].numpy().round(2)}, library"
        f" {theirs[:3].numpy().round(2)} ± {error[:3].numpy().round(2)} for three members"
    )

# %% [markdown]
# Both agree within the Monte Carlo error. `true_advantages` computes these values for the states of all decisions of 18 groups of 12 trajectories (with and without shared noise), with standard errors. `compare_credit` compares a rule's credit with $A^*$. It corrects the correlation for the Monte Carlo noise of the ground truth; the interval is a bootstrap over groups.

# %%
RULES = {
    "Flow-GRPO": (Uniform(), False, COLOURS["flow-grpo"]),
    "Stepwise": (StepwiseGain(), True, COLOURS["stepwise-flow-grpo"]),
    "TP-GRPO": (TurningPoint(), False, COLOURS["tp-grpo"]),
    "EstimateGain": (EstimateGain(), True, COLOURS["estimate-gain"]),
}


def examine(rule, shared, looking=look, known=truths):
    """A rule's credit on the trajectories of `looking`, and its agreement with the ground
    truth.
    """
    credit = looking.credit(rule, shared)
    return credit, compare_credit(credit.advantages, known[shared], draws=300)


print(
    "                 evaluations per trajectory   correlation with A*      same sign where A*"
    " is clear"
)
reports = {}
for name, (rule, shared, _) in RULES.items():
    credit, report = examine(rule, shared)
    reports[name] = credit, report
    overall = report.overall
    interval = f"[{overall.correlation.low:.2f}, {overall.correlation.high:.2f}]"
    print(
        f"{name:<16} {credit.nfe_per_trajectory:10.1f} {overall.correlation.value:29.2f}"
        f" {interval:<14} {overall.sign.value:10.0%}"
    )

# %% tags=["hide-input"]
figure, axes = panels(5, width=2.5, height=2.9)
for cell, (name, (_, shared, shade)) in zip(axes[:4], RULES.items(), strict=True):
    credit, report = reports[name]
    truth = truths[shared].values.flatten()
    cell.scatter(truth, credit.advantages.flatten(), s=2, color=shade, alpha=0.35)
    cell.set_title(f"{name}: {report.overall.correlation.value:.2f}", color=shade, fontsize=10)
    cell.set(xlabel="true advantage", xlim=(-0.6, 0.6), ylim=(-5.2, 5.2))
    clean(cell)
axes[0].set_ylabel("credit")
for name, (_, _, shade) in RULES.items():
    axes[4].plot(
        range(9),
        [one.correlation.value for one in reports[name][1].per_step],
        color=shade,
        marker="o",
        markersize=3,
    )
axes[4].set(
    xlabel="decision", xticks=range(0, 9, 2), ylim=(0, 1.05), title="correlation by decision"
)
clean(axes[4])
plt.show()

# %% [markdown]
# Uniform credit has a low correlation, since most of the credit of a decision is due to other decisions. The points of the step-wise rules are close to a line, and those of the one-step estimate are the closest. How can a *cheaper* estimate be better than a completion? The next cell compares how much each kind of value varies between the members of a group.

# %%
print(
    "standard deviation within groups   before decision 0    1    2    3    4    5    6    7  "
    "  8  finished"
)
for name, table in {"V*": truths[True].state_values, **tables}.items():
    spread = (table - table.mean(1, keepdim=True)).square().mean((0, 1))
    if name == "V*":
        # without the Monte Carlo error
        spread = (spread - truths[True].state_errors.square().mean((0, 1))).clamp(min=0)
    print(f"{name:<48}" + " ".join(f"{value:.2f}" for value in spread.sqrt()))

# %% [markdown]
# $V^*$ is a mean over all continuations, so it varies little at first (the members share their noise) and spreads as the draws accumulate. The completion involves no draw. It is the one end to which the ODE leads from the state, a finished sample, so from decision 1 on its reward varies nearly as much as final rewards do. The one-step
# estimate is a mean of ends. Its reward is a smoother function of the state and spreads almost as $V^*$ does. The blur that harms an image makes a value more like an expectation.
#
# ## The gradient compared with the true gradient
#
# The update of the weights follows the gradient $\sum_k A_k \nabla_\theta \log \pi(z_{k+1} \mid z_k)$, a sum over the decisions. In this world we can differentiate the reward through the sampler, so we know the gradient of the expected reward (`pathwise_gradients`). Three numbers compare a rule's gradient with it. The **cosine** between its mean and the true gradient is 1 if its direction has no bias. The other two are the **signal-to-noise ratio** of one batch, and the cost of a batch,
# including the evaluations of the update.

# %%
direction = pathwise_gradients(beginning, batches=20, repeats=100, seed=1, decisions_only=True)
print(
    "              cosine to the true gradient   signal to noise of a batch   the same per"
    " 10,000 evaluations"
)
for name, (rule, shared, _) in progress(RULES.items(), "rule"):
    result = alignment(
        policy_gradients(beginning, rule, batches=40, members=8, shared_noise=shared, seed=2),
        direction,
    )
    batch = reports[name][0].nfe_per_trajectory * 8 * len(
        beginning.prompts
    ) + update_evaluations(beginning, 8)
    interval = f"[{result.cosine_interval[0]:.2f}, {result.cosine_interval[1]:.2f}]"
    equal = result.signal_to_noise * math.sqrt(10_000 / batch)
    print(
        f"{name:<14} {result.cosine:10.2f} {interval:<16} {result.signal_to_noise:16.2f}"
        f" {equal:28.2f}"
    )

# %% [markdown]
# (An interval may exceed 1: the length of a gradient is corrected for noise, and the estimate of the noise is noisy itself.) Everything so far favours the one-step estimate. Its cosine is not measurably below that of Stepwise, its signal-to-noise ratio is the highest of the four, and its lead per evaluation is larger still.
#
# A rule may also return weights (the lesson Your own credit rule). The correlation with $A^*$ does not depend on weights, since they change a decision's share in the loss and not its credit. The gradient depends on them. The next cell compares `EstimateToGo` with and without weights $w$, which are smaller for unlikely draws.


# %%
@dataclass(frozen=True)
class LikelyDraws(EstimateToGo):
    """The credit of EstimateToGo; decisions with unlikely draws have less weight (the lesson
    Your own credit rule).
    """

    needs = Needs(fields=("log_probs",), shared_noise=True)

    def assign(self, values, decisions, record):
        mask = decisions.mask
        logs = record.log_probs.masked_fill(~mask, -torch.inf)  # [prompt, member, decision]
        weights = (logs - logs.amax(dim=(0, 1), keepdim=True)).exp().masked_fill(~mask, 0.0)
        return Credit(super().assign(values, decisions), weights)


for name, rule in (("equal weights", EstimateToGo()), ("likely draws", LikelyDraws())):
    result = alignment(
        policy_gradients(beginning, rule, batches=40, members=8, shared_noise=True, seed=2),
        direction,
    )
    interval = f"[{result.cosine_interval[0]:.2f}, {result.cosine_interval[1]:.2f}]"
    print(f"{name:<14} {result.cosine:10.2f} {interval:<16} {result.signal_to_noise:16.2f}")

# %% [markdown]
# These weights do no harm, but they do not help either. Both gradients have the right direction, and the weighted one is slightly noisier: weights that are unrelated to the credit only reduce the effective number of decisions.
#
# ## The same diagnostics during training
#
# ### Exercise 2 · what will training show?
#
# *Difficulty: medium · kind: prediction · importance: essential · time: 3 minutes*
#
# `EstimateGain` has the highest correlation with $A^*$ and the highest signal-to-noise ratio of the four rules. The next cell trains with it for 20 iterations, with three seeds. What will the held-out reward do?
#
# - **a** rise, and stay near its maximum
# - **b** rise, and then fall
# - **c** stay near its first value

# %% tags=["exercise"]
course_of_reward = "..."

# %% [markdown] tags=["hint"]
# **Hint.** For which policy did we compute the diagnostics? The one-step estimate $\hat x_0 = x_t - t v$ uses the velocity $v$. What does training change?

# %% tags=["solution"]
course_of_reward = "b"

# %%
lesson.check_course(course_of_reward)

# %% [markdown] tags=["explanation"]
# **Why.** At the start the gradient has the right direction, so the reward rises. However, the diagnostics concern the untrained policy. Training changes the velocity, and with it the estimate on which the credit depends. The next cells show the reward first, then the cause.


# %%
def train(rule, seeds=3, iterations=20):
    """One curve per seed."""
    return [
        learn(seed=seed, rule=rule(), iterations=iterations, **WORLD) for seed in range(seeds)
    ]


runs = {"EstimateGain": train(EstimateGain)}
for curve in runs["EstimateGain"]:
    print(
        "held-out reward every 4 iterations:",
        " ".join(f"{reward:.2f}" for reward in curve.reward[::2].tolist()),
    )

# %% [markdown] tags=["expected"]
# held-out reward every 4 iterations: 0.18..0.24 0.40..0.95 0.80..1.00 0.60..1.00 0.40..1.00 0.20..1.00
# held-out reward every 4 iterations: 0.18..0.24 0.40..0.95 0.80..1.00 0.60..1.00 0.40..1.00 0.20..1.00
# held-out reward every 4 iterations: 0.18..0.24 0.40..0.95 0.80..1.00 0.60..1.00 0.40..1.00 0.20..1.00

# %% [markdown]
# The reward rises quickly, and then it falls, with every seed. The diagnostics above used the *untrained* policy. The next cell repeats them for a policy trained with `EstimateGain` for 6 iterations, near its maximum, and for 18.


# %%
def pointing(rolled, prompts):
    """The mean distance of the one-step estimates from the centre in the direction of the
    prompt, [step].
    """
    path = rolled.trajectories
    times, velocities = path.schedule.times[:-1, None], path.velocities.flatten(2)
    estimates = path.nodes.flatten(2)[:, :-1] - times * velocities
    towards = torch.tensor([target(prompt) for prompt in prompts])
    towards = towards.repeat_interleave(rolled.groups.members, 0)
    return (estimates * (towards / towards.norm(dim=1, keepdim=True))[:, None]).sum(-1).mean(0)


stages = {}
trainer = start(rule=EstimateGain(), seed=1, iterations=20, **WORLD)
for stage in (0, 6, 18):
    while trainer.done < stage:
        trainer.iteration()
    later = Look(setting_of(trainer), members=12, seed=0)
    known = {True: true_advantages(later.setting, later.trajectories(True), continuations=48)}
    rolled = later.trajectories(True, Tweedie())
    estimated = later.setting.experience(rolled).values
    stages[stage] = (
        known[True].state_values.mean((0, 1)),
        estimated.mean((0, 1)),
        pointing(rolled, later.setting.prompts),
    )
    parts = []
    for name, rule in (("Stepwise", StepwiseGain()), ("EstimateGain", EstimateGain())):
        correlation = examine(rule, True, later, known)[1].overall.correlation
        parts.append(
            f"{name} {correlation.value:.2f} [{correlation.low:.2f}, {correlation.high:.2f}]"
        )
    print(f"after {stage:2d} iterations, correlation with A*: {', '.join(parts)}")

# %% [markdown] tags=["expected"]
# after  0 iterations, correlation with A*: Stepwise 0.70 [0.65, 0.74], EstimateGain 0.91 [0.90, 0.93]
# after  6 iterations, correlation with A*: Stepwise 0.60..0.72 [0.55..0.68, 0.64..0.78], EstimateGain 0.02..0.20 [-0.05..0.15, 0.06..0.25]
# after 18 iterations, correlation with A*: Stepwise 0.60..0.80 [0.50..0.75, 0.68..0.90], EstimateGain 0.00..0.20 [-0.08..0.15, 0.04..0.25]

# %% tags=["hide-input"]
figure, axes = panels(3, width=3.4, height=3.1)
for cell, stage in zip(axes[:2], (0, 18), strict=True):
    cell.plot(COLUMNS, stages[stage][0], color=DATA, linewidth=2.4)
    cell.plot(COLUMNS, stages[stage][1], color=ACCENT, linestyle="--", linewidth=2)
    cell.set(
        xlabel="state before decision (10: finished)",
        title=f"after {stage} iterations",
        ylim=(0, 1.03),
        ylabel="mean reward",
    )
    clean(cell)
axes[0].text(0.3, 0.42, "expected reward V*", color=DATA, fontsize=9)
axes[0].text(0.3, 0.52, "reward of the one-step estimate", color=ACCENT, fontsize=9)
for stage, dashes, place in (
    (0, (1, 1), (0.7, 0.25)),
    (6, (4, 1, 1, 1), (4.2, 2.5)),
    (18, (4, 1), (0.7, 7.6)),
):
    axes[2].plot(range(10), stages[stage][2], color=ACCENT, dashes=dashes, linewidth=2)
    axes[2].text(*place, f"after {stage}", color=ACCENT, fontsize=9)
axes[2].axhline(2, color=INK, linewidth=1, linestyle=":")
axes[2].text(9, 1.4, "target", fontsize=9, ha="right")
axes[2].set(
    xlabel="node (0 = noise, 10 = finished)",
    ylabel="distance from the centre",
    title="one-step estimate, towards the target",
)
clean(axes[2])
plt.show()
print(
    "distance of the estimate at node 0:",
    ", ".join(f"{float(rows[2][0]):.1f} after {stage}" for stage, rows in stages.items()),
)

# %% [markdown] tags=["expected"]
# <image>
# distance of the estimate at node 0: 0.0 after 0, 3.0..3.6 after 6, 7.0..10.0 after 18

# %% [markdown]
# $\hat x_0 = x_t - t v$ is the conditional mean of the finished sample *if $v$ is the mean velocity*, as after flow matching. Reinforcement learning does not preserve this property. It changes $v$ so that trajectories reach the target, most strongly at early steps.
# The one-step estimate extrapolates this change and overshoots the target (right panel; the target is at 2). At the early nodes its reward is no longer related to $V^*$, so the credit is noise with a bias. The problem was present already at iteration 6, when the reward was near its maximum.
#
# `EstimateToGo` depends less on the quality of the estimate. The next cell compares it with the ground truth, before training and for the policy after 18 iterations, and trains with it.

# %%
before, after = (
    examine(EstimateToGo(), True)[1],
    examine(EstimateToGo(), True, later, known)[1],
)
print(
    f"correlation with A*: before training {before.overall.correlation.value:.2f}, after 18"
    f" iterations {after.overall.correlation.value:.2f}"
)
runs["EstimateToGo"] = train(EstimateToGo)
for name, repeats in runs.items():
    reward = torch.stack([run.reward for run in repeats]).mean(0)
    print(
        f"{name:<13} mean over three seeds: highest reward {float(reward.max()):.2f}, last"
        f" reward {float(reward[-1]):.2f}"
    )

# %% [markdown] tags=["expected"]
# correlation with A*: before training 0.49, after 18 iterations 0.05..0.30
# EstimateGain  mean over three seeds: highest reward 0.94..0.99, last reward 0.40..0.90
# EstimateToGo  mean over three seeds: highest reward 0.96..1.00, last reward 0.93..1.00

# %% [markdown]
# Before training, the credit of `EstimateToGo` correlates less with the true advantage than that of `EstimateGain`. Yet its reward does not fall. The correlation with $A^*$ measures noise and bias together, for one policy. Training averages out the noise, but it accumulates the bias.
#
# So diagnostics for one policy can find errors, but they cannot show that a rule is good. For this we need training runs.
#
# ## A protocol before the runs
#
# Three seeds at one clip range are not a comparison (the lesson Side by side). Five choices decide the outcome of a comparison, so we make them before the first run:
#
# | choice | in this lesson | reason |
# |---|---|---|
# | measure | mean reward over training | a single final reward is noisy; a run that falls must lose |
# | budgets | equal updates; equal forward passes | rules differ in the cost of an update |
# | tuning | each rule's best of three clip ranges, on seeds that no result uses | the same setting can suit one rule |
# | seeds | 8 per rule, compared in pairs | runs of a seed share prompts, initial weights and noise |
# | smallest effect of interest | 0.02 | a smaller difference would not change what you do |
#
# ### Exercise 3 · mean reward over training
#
# *Difficulty: medium · kind: code · importance: essential · time: 10 minutes*
#
# `cost` (from 0, increasing, not evenly spaced) and `reward` are `[evaluation]`. The learning curve is linear between evaluations. Return its mean from cost 0 to `budget`: the area below the curve up to the budget, divided by the budget. The budget is at most `cost[-1]`, and it is not necessarily an evaluation.


# %% tags=["exercise"]
def mean_reward(cost, reward, budget):
    """The mean of the learning curve from 0 to `budget`."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Compute the reward at the budget by interpolation (the lesson Side by side, exercise 3). Keep the evaluations before the budget, append this point, and integrate with `torch.trapezoid(y, x)`.


# %% tags=["solution"]
def mean_reward(cost, reward, budget):
    """The mean of the learning curve from 0 to `budget`."""
    budget = torch.as_tensor(budget, dtype=cost.dtype)
    i = int(torch.searchsorted(cost, budget).clamp(1, len(cost) - 1))
    part = (budget - cost[i - 1]) / (cost[i] - cost[i - 1])
    end = reward[i - 1] + part * (reward[i] - reward[i - 1])
    area = torch.trapezoid(
        torch.cat([reward[:i], end[None]]), torch.cat([cost[:i], budget[None]])
    )
    return float(area / budget)


# %%
lesson.check_mean_reward(mean_reward)

# %% [markdown] tags=["explanation"]
# **Why.** The mean of the evaluated rewards would give every evaluation the same weight, whatever it cost, and would depend on the spacing of the evaluations. Without the piece up to the budget, two rules with different costs per update would be compared over different budgets.

# %% [markdown]
# The measure gives one number per run. We subtract the numbers of two rules *seed by seed*, which gives one paired difference per seed. The mean of these differences has a t interval and a p-value for the null hypothesis of no difference (`flowrl.run.statistics.mean`).
#
# A p-value is the probability of a difference at least as large as the observed one if the true difference is 0. It does not say whether the difference matters, and a large p-value is not evidence of equality. The verdicts of `docs/guides/benchmarks.md` separate the two questions:
#
# 1. **no difference that matters**: the *whole* 95% interval lies between -0.02 and 0.02, even if it excludes 0;
# 2. **better** or **worse**: otherwise, if the p-value is below 0.05 after a correction for the number of comparisons;
# 3. **undecided**: everything else.
#
# ### Exercise 4 · a verdict
#
# *Difficulty: easy · kind: code · importance: essential · time: 8 minutes*
#
# `inference` has the attributes `value`, `low` and `high`: the mean difference and its 95% interval. `adjusted` is the corrected p-value. Return one of the four strings `"better"`, `"worse"`, `"no difference that matters"`, `"undecided"`.


# %% tags=["exercise"]
def verdict(inference, adjusted, smallest=0.02):
    """The verdict on a mean paired difference (rule minus baseline; more reward is better)."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Three `if`s in the order of the list above. The first one reads both ends of the interval and no p-value, the second one reads the p-value and the sign of the mean.


# %% tags=["solution"]
def verdict(inference, adjusted, smallest=0.02):
    """The verdict on a mean paired difference (rule minus baseline; more reward is better)."""
    if -smallest < inference.low and inference.high < smallest:
        return "no difference that matters"
    if adjusted < 0.05:
        return "better" if inference.value > 0 else "worse"
    return "undecided"


# %%
lesson.check_verdict(verdict)

# %% [markdown] tags=["explanation"]
# **Why.** The order matters: with many seeds a difference of 0.005 is significant, and still does not matter. The whole interval must be inside, not only the mean: a mean of 0.01 with an interval from -0.3 to 0.3 is compatible with a large difference of either sign. "Undecided" is a result too. It says that the experiment was too small, not that the rules are equal.

# %% [markdown]
# ### Exercise 5 · find the unfair line
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 5 minutes*
#
# A colleague compares a new rule with uniform credit. `search(rule, clip, seed)` and `run(rule, clip, seed)` train once; `search` returns the mean reward over training. The program runs, and reports that the rule is better. One line makes the comparison unfair. Which one?
#
# ```python
# grids = {rule: {clip: sum(search(rule, clip, seed) for seed in (100, 101)) for clip in CLIPS} for rule in rules}  # line 1
# best = max(CLIPS, key=lambda clip: grids["new rule"][clip])                                                    # line 2
# runs = {rule: [run(rule, best, seed) for seed in range(8)] for rule in rules}                                  # line 3
# budget = min(float(each.work[-1]) for rule in rules for each in runs[rule])                                    # line 4
# means = {rule: torch.tensor([mean_reward(each.work, each.reward, budget) for each in runs[rule]]) for rule in rules}  # line 5
# print(mean(means["new rule"] - means["uniform"]))                                                              # line 6
# ```

# %% tags=["exercise"]
unfair_line = ...

# %% [markdown] tags=["hint"]
# **Hint.** Compare the program with the table of choices above. For each row of the table, which line implements it, and does this line treat both rules alike?

# %% tags=["solution"]
unfair_line = 2

# %%
lesson.check_unfair_line(unfair_line)

# %% [markdown] tags=["explanation"]
# **Why.** Line 2 chooses the clip range that is best for the new rule, and line 3 trains uniform credit with it as well. A rule with smaller advantages often needs another clip range, so the baseline loses because of its setting. The program must choose `best` for each rule. Line 6 subtracts seed by seed, and line 4 takes the smallest budget that all runs reached; both are right.

# %% [markdown]
# The next cell is the whole experiment: it tunes the clip range of each rule on seeds 100 and 101, trains with seeds 0 to 7, and compares. With two baselines and two budgets there are four comparisons. Holm's method corrects their p-values, so that the probability of *any* false "better" or "worse" among them stays below 5%.

# %%
CLIPS = (0.06, 0.2, 0.6)
UPDATES = 12
BASELINES = {"Flow-GRPO": {}, "Stepwise": {"method": "stepwise-flow-grpo"}}


def tuned_runs(name, seeds=8, **how):
    """Search the clip range on two seeds, then train with others; one curve per seed."""
    settings = {"iterations": UPDATES, "window": ":-1", **how}

    def search(clip):
        repeats = [learn(seed=seed, clip_range=clip, **settings) for seed in (100, 101)]
        return sum(mean_reward(run.iterations, run.reward, UPDATES) for run in repeats) / 2

    means = [search(clip) for clip in CLIPS]
    best = CLIPS[means.index(max(means))]
    listed = ", ".join(
        f"{clip:g}: {each:.2f}" for clip, each in zip(CLIPS, means, strict=True)
    )
    print(
        f"{name:<14} mean reward on the search seeds by clip range {listed}; chosen {best:g}"
    )
    return [learn(seed=seed, clip_range=best, **settings) for seed in range(seeds)]


def compare(rule, baselines):
    """Paired differences of the mean reward over training, at equal updates and at equal
    forward passes.
    """
    differences = {}
    for name, theirs in baselines.items():
        for price in ("iterations", "work"):
            budget = min(float(getattr(run, price)[-1]) for run in [*rule, *theirs])
            mine, other = (
                torch.tensor(
                    [mean_reward(getattr(run, price), run.reward, budget) for run in each]
                )
                for each in (rule, theirs)
            )
            differences[name, price] = mine - other
    inferences = {key: mean(values) for key, values in differences.items()}
    adjusted = dict(
        zip(inferences, holm([inference.p for inference in inferences.values()]), strict=True)
    )
    return differences, inferences, adjusted


def report(name, inferences):
    """The differences of the rule `name` to each baseline, with their 95% intervals."""
    print(f"\n{name} minus baseline, mean reward over training, 8 paired seeds")
    for (baseline, price), inference in inferences.items():
        unit = "updates" if price == "iterations" else "forward passes"
        print(
            f"  {baseline:<10} at equal {unit:<15} {inference.value:+.3f}"
            f" [{inference.low:+.3f}, {inference.high:+.3f}]"
        )


def conclude(inferences, adjusted):
    """The verdict on each difference."""
    for (baseline, price), inference in inferences.items():
        unit, p = (
            "updates" if price == "iterations" else "forward passes",
            adjusted[baseline, price],
        )
        print(
            f"{baseline:<10} at equal {unit:<15} p after correction {p:.2g}:"
            f" {verdict(inference, p)}"
        )


baselines = {name: tuned_runs(name, **how) for name, how in BASELINES.items()}
togo = tuned_runs("EstimateToGo", rule=EstimateToGo())
differences, inferences, adjusted = compare(togo, baselines)
report("EstimateToGo", inferences)

# %% [markdown] tags=["expected"]
# Flow-GRPO      mean reward on the search seeds by clip range 0.06: 0.50..0.62, 0.2: 0.66..0.77, 0.6: 0.60..0.77; chosen 0.2..0.6
# Stepwise       mean reward on the search seeds by clip range 0.06: 0.74..0.83, 0.2: 0.74..0.84, 0.6: 0.72..0.84; chosen 0.06..0.6
# EstimateToGo   mean reward on the search seeds by clip range 0.06: 0.66..0.77, 0.2: 0.70..0.81, 0.6: 0.67..0.80; chosen 0.06..0.6
#
# EstimateToGo minus baseline, mean reward over training, 8 paired seeds
#   Flow-GRPO  at equal updates         +0.040..0.130 [0.000..0.090, +0.080..0.180]
#   Flow-GRPO  at equal forward passes  +0.045..0.140 [0.000..0.100, +0.085..0.190]
#   Stepwise   at equal updates         -0.050..0.010 [-0.080..-0.010, -0.020..0.040]
#   Stepwise   at equal forward passes  +0.140..0.240 [+0.100..0.200, +0.180..0.280]

# %% tags=["varies"]
conclude(inferences, adjusted)

# %% tags=["hide-input"]
figure, axes = panels(3, width=3.6, height=3.1)
curves = {
    "Flow-GRPO": (baselines["Flow-GRPO"], COLOURS["flow-grpo"]),
    "Stepwise": (baselines["Stepwise"], COLOURS["stepwise-flow-grpo"]),
    "EstimateToGo": (togo, COLOURS["reward-to-go"]),
}
for cell, price in zip(axes[:2], ("iterations", "work"), strict=True):
    for name, (each, shade) in curves.items():
        for run in each:
            cell.plot(getattr(run, price), run.reward, color=shade, linewidth=0.6, alpha=0.45)
        cell.plot(
            getattr(each[0], price),
            torch.stack([run.reward for run in each]).mean(0),
            color=shade,
            linewidth=2.3,
            label=name,
        )
    cell.set(
        ylim=(0, 1.03),
        xlabel="updates" if price == "iterations" else "forward passes in all (thousands)",
    )
    clean(cell)
axes[0].set_ylabel("held-out reward")
axes[0].legend(frameon=False, fontsize=8, loc="lower right")
axes[1].set_xticks(range(0, 80_001, 20_000), ["0", "20", "40", "60", "80"])
for row, ((name, price), values) in enumerate(differences.items()):
    shade = curves[name][1]
    axes[2].plot(values, [row] * len(values), "o", color=shade, markersize=4, alpha=0.6)
    found = inferences[name, price]
    spread = [[found.value - found.low], [found.high - found.value]]
    axes[2].errorbar(found.value, row, xerr=spread, color=INK, marker="|", capsize=3)
    axes[2].text(
        0.32,
        row,
        f"{name}\nper {'update' if price == 'iterations' else 'pass'}",
        fontsize=8,
        va="center",
        color=shade,
    )
axes[2].axvspan(-0.02, 0.02, color=NOISE, alpha=0.2, linewidth=0)
axes[2].set(
    xlim=(-0.1, 0.45),
    ylim=(3.6, -0.6),
    yticks=[],
    xlabel="difference of mean reward",
    title="one dot per seed; band: ± 0.02",
)
axes[2].set_xticks([-0.1, 0, 0.1, 0.2, 0.3])
clean(axes[2])
plt.show()

# %% [markdown]
# On the machine that built this page, `EstimateToGo` is *better* than tuned uniform credit at both budgets. Compared with Stepwise it is *undecided* at equal updates and *better* at equal forward passes, because Stepwise spends more than four times the evaluations on sampling.
#
# This answer holds for its protocol only: 12 updates, three clip ranges, one learning rate, one small world. The project's own comparison has a search for every method and more seeds; its results, in `docs/verdict.md`, may differ. A short budget favours the rule that rises fastest. A long one also counts what happens afterwards.
#
# ## How small a difference could have been found?
#
# The width of an interval depends on the spread of the paired differences and on the number of seeds. A verdict rule is a program, so you can simulate how often it is wrong, and how often it finds a true difference (its *power*).
#
# ### Exercise 6 · false alarms and power
#
# *Difficulty: medium · kind: code · importance: useful · time: 10 minutes*
#
# Simulate `draws` experiments. In each, the paired differences `[seed]` of `seeds` seeds are normal with mean `effect` and standard deviation `spread`, drawn from `generator`. `judge(differences)` returns a verdict. Return the fraction of experiments with the verdict `"better"`.


# %% tags=["exercise"]
def rate_of_better(judge, spread, seeds, effect, draws, generator):
    """How often an experiment ends with the verdict "better"."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** `torch.randn(seeds, generator=generator)` has mean 0 and standard deviation 1. Each experiment needs new noise, so draw inside the loop over experiments.


# %% tags=["solution"]
def rate_of_better(judge, spread, seeds, effect, draws, generator):
    """How often an experiment ends with the verdict "better"."""
    verdicts = [
        judge(effect + spread * torch.randn(seeds, generator=generator)) for _ in range(draws)
    ]
    return verdicts.count("better") / draws


# %%
lesson.check_rate(rate_of_better)

# %% [markdown] tags=["explanation"]
# **Why.** With `effect` 0 the fraction is the rate of false alarms in favour of the rule, at most 2.5% for a two-sided test at 5%. With a true effect it is the power. If a pilot gives the spread, both are known before the first run. `flowrl.bench.statistics.detectable` computes the smallest effect with a power of 80%.


# %%
def judge(values):
    """The verdict on one comparison, without a correction."""
    one = mean(values)
    return verdict(one, one.p)


SPREAD = 0.05  # about that of the differences to Flow-GRPO above
print(f"spread {SPREAD} of the paired differences; fraction of the verdict 'better'")
for seeds in (3, 8, 20):
    rates = [
        rate_of_better(judge, SPREAD, seeds, effect, 400, torch.Generator().manual_seed(1))
        for effect in (0.0, 0.03, 0.06)
    ]
    line = "   ".join(
        f"effect {effect:.2f}: {rate:.0%}"
        for effect, rate in zip((0.0, 0.03, 0.06), rates, strict=True)
    )
    print(
        f"  {seeds:2d} seeds   {line}   smallest effect found in 80%:"
        f" {detectable(SPREAD, seeds):.3f}"
    )

# %% [markdown]
# Three seeds find a difference of 0.06 in about a quarter of the experiments. Every report needs such a statement, because "no significant difference" may mean that the experiment could not have found one. The simulation assumes normal differences. Runs that collapse are not normal, so report collapses and the worst seed as well.
#
# ### Exercise 7 · plan a comparison
#
# *Difficulty: medium · kind: design · importance: useful · time: 8 minutes*
#
# Plan a comparison of two rules. A pilot gave a spread of 0.05 of the paired differences. You can afford 64 runs, and for each rule a run of the search costs as much as a run of the result. The plan should find a difference of 0.035 in 80% of the experiments, and tune both rules. Choose the number of clip ranges, of seeds per clip range in the search, and of seeds per rule in the result.


# %% tags=["exercise"]
plan = {"clips": ..., "search_seeds": ..., "seeds": ...}

# %% [markdown] tags=["hint"]
# **Hint.** Start with the seeds: `detectable(0.05, seeds)` is the smallest effect that `seeds` seeds find in 80%. How many runs remain for the search, for each of the two rules?

# %% tags=["solution"]
plan = {"clips": 4, "search_seeds": 3, "seeds": 20}

# %%
lesson.check_plan(plan)

# %% [markdown] tags=["explanation"]
# **Why.** With 20 seeds the smallest effect is 0.033 (the printout above). Two rules then use 40 runs, so 24 remain, 12 for each rule: 4 clip ranges with 3 seeds, or 6 with 2. With one seed per clip range, the search would often choose a lucky seed. With fewer than three clip ranges, the best value may be outside the grid.

# %% [markdown]
# `flowrl bench rule` does all of this for a rule in a file: the search, the runs, the verdicts with Holm's correction, and the smallest difference that it could have found. It compares at equal updates, forward equivalents and seconds of SD3.5-Medium.
#
# ```bash
# flowrl bench rule my_rules.py:EstimateToGo --quick    # 8 seeds, uniform credit as baseline
# flowrl bench rule my_rules.py:EstimateToGo            # 20 seeds, three baselines
# ```
#
# ## Project
#
# ### Exercise 8 · calibrated estimates
#
# *Difficulty: project · kind: formula · importance: useful · time: 40 minutes*
#
# `EstimateGain` uses $V_k$ as if it were as accurate as $R$. We can measure its accuracy from the table itself: over all prompts and members, how well does $V_k$ predict $R$? Let $\tilde V_k$ be the deviation of $V_k$ from the mean of its *group*, so that $\tilde V_D$ is that of the reward. The *slope* $s_k$ minimises the mean square of $\tilde V_D - s_k \tilde V_k$ over prompts *and* members (add $10^{-8}$ to the denominator). With the predicted reward $\hat R_k = s_k\, \tilde V_k$ the credit is $A_k = Z\big(\hat R_{k+1} - \hat R_k\big)$.
#
# If the estimate does not predict the final reward, $s_k$ is near 0 and the estimate has no effect. In the last column, that of the reward, $s_D = 1$. $Z$ is that of `EstimateToGo`: the mean over members decision by decision, one standard deviation per group.
# Leave out members outside the mask: `decisions.mask.any(dim=-1)` is true for the members that count.


# %% tags=["exercise"]
@dataclass(frozen=True)
class CalibratedGain:
    """Gains of estimates, each estimate scaled by its regression coefficient for the final
    reward.
    """

    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        return ...


# %% [markdown] tags=["hint"]
# **Hint.** Set the values of members that do not count to `nan`, and take means with `nanmean`. Compute the deviations $\tilde V$ `[prompt, member, decision+1]` first, then the slopes `[decision+1]`, then the predictions, and the gains of the predictions last.


# %% tags=["solution"]
@dataclass(frozen=True)
class CalibratedGain:
    """Gains of estimates, each estimate scaled by its regression coefficient for the final
    reward.
    """

    probe: Probe = Tweedie()
    needs = Needs(shared_noise=True)

    def assign(self, values, decisions):
        known = values.masked_fill(~decisions.mask.any(dim=-1, keepdim=True), torch.nan)
        centred = known - known.nanmean(dim=1, keepdim=True)
        squares = centred.square().nanmean((0, 1)) + 1e-8
        predicted = (centred * centred[..., -1:]).nanmean((0, 1)) / squares * centred
        group = ("member", "decision")
        return zscore(gains(predicted), ("member",), group, mask=decisions.mask)


# %%
lesson.check_calibrated(CalibratedGain)

# %% [markdown] tags=["explanation"]
# **Why.** The values are centred within the group first: otherwise the slope would measure the differences between easy and hard *prompts*. The slope is pooled over prompts, because a slope from the twelve members of one group would mostly fit the noise of this group.
# Both values are calibrated before their difference is taken, so that the sum over decisions is still $\tilde V_D$ if all members start from the same noise.

# %%
before, after = (
    examine(CalibratedGain(), True)[1],
    examine(CalibratedGain(), True, later, known)[1],
)
print(
    f"correlation with A*: before training {before.overall.correlation.value:.2f}, after 18"
    f" iterations {after.overall.correlation.value:.2f}"
)
for title, table in (
    ("before training", tables["one-step estimate"]),
    ("after 18 iterations", estimated),
):
    print(
        f"slopes {title}:",
        " ".join(
            f"{slope:.2f}" for slope in lesson.calibration_slopes(table).flatten().tolist()
        ),
    )

# %% [markdown] tags=["expected"]
# correlation with A*: before training 0.90, after 18 iterations 0.25..0.60
# slopes before training: 0.00 1.53 1.14 0.91 0.97 0.96 0.96 0.97 0.98 1.00
# slopes after 18 iterations: 0.00 -0.20..0.20 -0.20..0.20 -0.25..0.15 -0.25..0.15 -0.15..0.20 -0.10..0.30 0.15..0.70 0.65..1.00 1.00

# %% [markdown]
# After 18 iterations of `EstimateGain` the estimate is no longer valid in the early columns. There the slopes are close to 0; they rise to 1 in the last columns. So this rule should not fail as `EstimateGain` did. Whether it is better than the others is a question for the same protocol:

# %%
calibrated = tuned_runs("CalibratedGain", rule=CalibratedGain())
_, inferences, adjusted = compare(calibrated, baselines)
report("CalibratedGain", inferences)

# %% [markdown] tags=["expected"]
# CalibratedGain mean reward on the search seeds by clip range 0.06: 0.72..0.83, 0.2: 0.73..0.83, 0.6: 0.68..0.80; chosen 0.06..0.6
#
# CalibratedGain minus baseline, mean reward over training, 8 paired seeds
#   Flow-GRPO  at equal updates         +0.060..0.150 [+0.020..0.110, +0.090..0.200]
#   Flow-GRPO  at equal forward passes  +0.065..0.160 [+0.020..0.115, +0.095..0.210]
#   Stepwise   at equal updates         -0.025..0.025 [-0.050..0.010, -0.010..0.050]
#   Stepwise   at equal forward passes  +0.160..0.260 [+0.120..0.220, +0.190..0.300]

# %% tags=["varies"]
conclude(inferences, adjusted)

# %% [markdown]
# On the machine that built this page, the difference to Stepwise at equal updates does not matter: the whole interval lies within ± 0.02. At equal forward passes the rule is better, because it needs fewer of them per update. This result is about 12 updates in a world of two dimensions. We have measured nothing for images, whose one-step estimates are blurred.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. The one-step estimate correlates better with $A^*$ than the reward of an ODE completion does, before training. Why? **a** The completion has errors of discretisation. **b** $V^*$ is a mean over continuations; a completion is a single end, whose reward varies as much as final rewards. **c** The one-step estimate has been trained on rewards.
# 2. A rule's mean gradient has a cosine of 0.98 with the true gradient, and a low signal-to-noise ratio. What helps? **a** Larger batches. **b** A different credit rule, since the direction is biased. **c** A smaller learning rate, since the gradient is too long.
# 3. Why did `EstimateGain` fail after it had the best diagnostics? **a** Its credit is noisy. **b** Training changed the velocity, so its values stopped predicting the reward. **c** The clip range was too small.
# 4. The mean difference is 0.012, its 95% interval reaches from -0.03 to 0.054, and the corrected p-value is 0.6. What may a report say? **a** The rules are equally good. **b** The rule is slightly better. **c** The experiment could not decide.
# 5. Why are the seeds of the search not used for the result? **a** The chosen setting was lucky on them, so their rewards are too high. **b** Pairs need new noise. **c** Otherwise the p-values are correlated.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are after the table of standard deviations, in the section on the gradient, after the figure of a trained policy, in the explanation of the verdict, and in the table of the protocol, in this order.

# %% tags=["solution"]
quiz = {1: "b", 2: "a", 3: "b", 4: "c", 5: "a"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: a single end has the spread of finished samples, already before the first decisions. 2: noise averages out over samples, and the direction is right. 3: the estimate assumes a mean velocity, which training does not preserve. 4: neither end of the interval lies within ± 0.02. 5: the best of several noisy means is above its expectation.

# %% [markdown]
# ## Summary
#
# | question | tool | where |
# |---|---|---|
# | is the credit close to $A^*$? *For which policy?* | correlation, corrected for noise | `flowrl.bench.true_advantage` |
# | is the gradient unbiased, and how noisy is it? | cosine, signal-to-noise ratio | `flowrl.bench.gradients` |
# | does the rule stay good? | the same diagnostics for a trained policy | `Look`, `true_advantages` |
# | is it better than tuned baselines? | mean reward over training, paired seeds, Holm's correction, four verdicts | `flowrl bench rule`, `docs/guides/benchmarks.md` |
# | how small a difference could have been found? | simulation, or the noncentral t distribution | `flowrl.bench.statistics.detectable` |
#
# ## Symbols
#
# {symbols: decision $k$; $D$; $V_k$; $V^*_k$; $A^*_k$; $R$; $A$; $w$; $Z$; $c$}
#
# ## Further reading
#
# - Ilyas et al. 2018, *A closer look at deep policy gradients* (arXiv 1811.02553): gradients of policy-gradient methods compared with the true one.
# - Tucker et al. 2018, *The mirage of action-dependent baselines* (arXiv 1802.10031): a claimed reduction of variance that did not exist.
# - Colas et al. 2018, *How many random seeds?* (arXiv 1806.08295): power of tests between two algorithms.
# - Holm 1979, *A simple sequentially rejective multiple test procedure* (Scandinavian Journal of Statistics 6): the correction.
# - Lakens 2017, *Equivalence tests* (Social Psychological and Personality Science 8): the smallest effect of interest.
#
# **Next:** [11 · Scale up](11_scale_up.ipynb) uses the same objects with SD3.5 and FLUX.

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
# # 8 · Write your own credit rule
#
# **After this lesson you can** turn an idea about credit into a class, hold it to the contract that the trainer relies on, measure how close its credit is to the truth, and find out, in a comparison, what the measurement missed.
#
# **Time** 90 minutes and three projects of 20 to 45 minutes; the computer needs one or two. **You need** lessons 3 to 7.
#
# The picture shows what every credit rule guesses at. On the left a trajectory is denoised; it was asked to go to the cross. On the right, the reward to be *expected* at each of its nodes, and two cheap guesses of it.

# %% tags=["hide-input"]
import math
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
import torch

from flowrl_course import lesson_08 as lesson
from flowrl_course.figures import ACCENT, COLOURS, DATA, INK, NOISE, animation, clean, panels, plane
from flowrl_course.lesson_07 import T_QUANTILE
from flowrl_course.runs import learn, start
from flowrl.credit import StepwiseGain, TurningPoint, Uniform, gains, reward_to_go, zscore
from flowrl.diagnostics.gradient import Setting, alignment, pathwise_gradients, policy_gradients, update_evaluations
from flowrl.diagnostics.true_advantage import Look, compare_credit, true_advantages
from flowrl.flow.gaussian import sample as draw_from
from flowrl.rollout import reward_table
from flowrl.testing import check_credit
from flowrl.types import Completion, NoProbe, Probe, Tweedie
from flowrl.worlds.mixture import target

torch.set_num_threads(1)
WORLD = {"window": "all-but-last", "clip_range": 2e-2}  # every step but the last is a decision; the clip is lesson 7's middle one


def setting_of(trainer):
    """A trainer's policy, sampler, grid and reward, with all 18 training prompts: what the microscope looks at."""
    return Setting(trainer.policy, trainer.method.sampler, trainer.schedule, trainer.reward, trainer.prompts.prompts)


beginning = setting_of(start(**WORLD))
look = Look(beginning, members=12, seed=0)
truths = {shared: true_advantages(beginning, look.trajectories(shared), continuations=48) for shared in (False, True)}
tables = {}
for name, probe in (("one-step estimate", Tweedie()), ("ODE completion", Completion())):
    result = look.trajectories(True, probe)
    tables[name] = reward_table(beginning.policy, beginning.reward, result, beginning.prompts)


def opening():
    """The trajectory whose prospects changed most, its expected reward, and two guesses."""
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
    steps = range(len(value))
    right.fill_between(steps, value - 2 * error, value + 2 * error, color=DATA, alpha=0.2, linewidth=0)
    right.plot(steps, value, color=DATA, linewidth=2.4)
    right.plot(steps, tables["one-step estimate"][prompt, member], color=ACCENT, linestyle="--")
    right.plot(steps, tables["ODE completion"][prompt, member], color=COLOURS["tp-grpo"], linestyle=":", linewidth=2)
    labels = (("expected reward V", DATA), ("one-step estimate", ACCENT), ("ODE completion", "#00734f"))
    for height, (text, shade) in zip((0.95, 0.87, 0.79), labels, strict=True):
        right.text(0.02, height, text, color=shade, transform=right.transAxes, fontsize=9)
    now = right.axvline(0, color=NOISE, linewidth=1)
    right.set(
        xlabel="node (0 = noise, 10 = finished)",
        ylabel="reward",
        ylim=(-0.03, 1.45),
        title="V (± 2 standard errors), and two guesses",
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
# ## The idea
#
# Let $V(x_i)$ be the reward to be expected when the *stochastic* sampler goes on from the state $x_i$. The step from $x_i$ to $x_{i+1}$ changed that expectation by
#
# $$A^*_i = V(x_{i+1}) - V(x_i),$$
#
# and this is its **true advantage**: what this step's noise was worth, no more and no less. Summed over the steps it gives $R_T - V(x_0)$. A credit rule is a guess of $A^*$ from a table of rewards, and the rules of lessons 4 to 6 differ in what they take for $V$:
#
# | rule | takes for $V(x_j)$ | network evaluations per trajectory |
# |---|---|---|
# | Flow-GRPO | nothing; every step gets $R_T$ less the group's mean | 10 |
# | Stepwise-Flow-GRPO | reward of 5 Euler substeps | 50 |
# | TP-GRPO | reward of the ODE completion | 55 |
#
# (A few less where a group shares its first node.)
#
# Our idea is a lazy one. The one-step estimate $\hat x_0 = x_j - t_j v_j$ needs the velocity that the rollout has computed anyway. It is free. If its reward is a decent guess of $V$, step-wise credit costs no more than Flow-GRPO. A picture of one
# step is blurred, and the Stepwise paper takes five. Is blur a reason here?
#
# ## From the idea to a class
#
# A rule is any object with two things:
#
# - `probe`, which says how unfinished states are scored: `NoProbe()`, `Tweedie()`, `Substeps(n)`, `Completion()`;
# - `assign(rewards, schedule)`: rewards `[prompt, member, node]` to advantages `[prompt, member, step]`, step $i$ leading from node $i$ to node $i + 1$.
#
# An attribute `shared_noise = True` makes a group start from one noise. Nothing is inherited and nothing registered. Here is a first draft, written in a hurry: gains of the one-step estimate, normalised over members and steps like Stepwise's.


# %%
class Draft:
    """Pays each step what it added to the reward of the one-step estimate."""

    probe = NoProbe()
    shared_noise = True

    def assign(self, rewards, schedule):
        rewards -= rewards[..., :1]
        gained = rewards[..., 1:] - rewards[..., :-1]
        return (gained - gained.mean((1, 2), keepdim=True)) / gained.std((1, 2), unbiased=False, keepdim=True)


# %% [markdown]
# The trainer, the comparison and the checkpoints rely on promises that stand in the protocol's docstring. `flowrl.testing` tries all of them on tables chosen to break things: groups that are all equal, a group of one, rewards of $10^6$, permuted members.

# %%
print(*[line for line in str(check_credit(Draft())).splitlines() if "not tried, because" not in line], sep="\n")

# %% [markdown]
# One fault hides the others: as long as the rule reads nodes that nobody has scored, the rest need not be tried.
#
# ### Exercise 1 · mend the draft *(easy, 10 minutes)*
#
# The draft has three faults. Mend one, run `check_credit` again, and read on. `zscore(values, over=("member", "step"))` from `flowrl.credit` does the normalisation with its care for special cases, but you may do without it.


# %% tags=["exercise"]
class EstimateGain:
    """Pays each step what it added to the reward of the one-step estimate."""

    probe = NoProbe()
    shared_noise = True

    def assign(self, rewards, schedule):
        rewards -= rewards[..., :1]
        gained = rewards[..., 1:] - rewards[..., :-1]
        return (gained - gained.mean((1, 2), keepdim=True)) / gained.std((1, 2), unbiased=False, keepdim=True)


# %% tags=["solution"]
@dataclass(frozen=True)
class EstimateGain:
    """Pays each step what it added to the reward of the one-step estimate."""

    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, rewards, schedule):
        return zscore(gains(rewards), over=("member", "step"))


# %%
lesson.check_mended(EstimateGain)

# %% [markdown] tags=["explanation"]
# **Why.** With `NoProbe()` the rollout scores the finished sample only, and all other nodes are `nan`, so that a rule that reads them is found out at once. `-=` writes into the caller's table, which the trainer still needs for its metrics. And a group whose members are all equal has a standard deviation of 0: dividing by it gives `nan`, which the optimiser would spread over all weights. `zscore` adds $10^{-4}$ and subtracts
# one of the rewards before the mean, so that equal rewards leave an exact 0. (Subtracting the first node was no fault, only no use: gains do not see it.)

# %%
findings = check_credit(EstimateGain())
print(findings.ok, f"{sum(finding.ok for finding in findings)} of {len(findings)} promises kept")

# %% [markdown]
# In a test file the same suite is two lines, one pytest case per promise:
#
# ```python
# from flowrl.testing import credit_contract
# test_estimate_gain = credit_contract(EstimateGain())
# ```
#
# Keeping the contract means that the rule can be trained with. It does not mean that the rule is any good.
#
# ## Under the microscope: credit against the true advantage
#
# In the plane we can afford to measure $V$: from a state, let the stochastic sampler run to the end many times, and average the rewards.
#
# ### Exercise 2 · the value of a state *(medium, 12 minutes)*
#
# `latents` is `[sample, ...]`, all standing at `node`. `go(latents, i)` draws step $i$ for every row; steps are $0, \dots, T-1$ with $T$ = `steps`. `score(latents)` gives one reward per row. Return `[sample]`: the mean reward of `count` continuations of each state.


# %% tags=["exercise"]
def state_value(latents, node, steps, go, score, count):
    """The expected final reward of each state, by Monte Carlo."""
    return ...


# %% tags=["solution"]
def state_value(latents, node, steps, go, score, count):
    """The expected final reward of each state, by Monte Carlo."""
    copies = latents.repeat_interleave(count, dim=0)
    for step in range(node, steps):
        copies = go(copies, step)
    return score(copies).view(len(latents), count).mean(dim=1)


# %%
lesson.check_state_value(state_value)

# %% [markdown] tags=["explanation"]
# **Why.** Rewards are averaged, not states: the reward of the mean is another number (and for pictures a meaningless one). `repeat_interleave` puts the copies of one state next to each other, so that `.view(len(latents), count)` gives each state its own row; `repeat` would mix all states into every row and still return the right shape. The error of the mean shrinks like $1/\sqrt{\text{count}}$: half the error
# costs four times the work, which is why nobody trains with this.

# %%
policy, schedule, asked = beginning.policy, beginning.schedule, beginning.prompts[0]
chance = torch.Generator().manual_seed(11)


def go(latents, step):
    """One stochastic step of the policy for every row, all for the first prompt."""
    count = len(latents)
    with torch.no_grad():
        velocity = policy.velocity(latents, schedule.network_timesteps[step].expand(count), policy.encode([asked] * count))
        return draw_from(beginning.sampler.transition(latents, velocity, schedule, torch.full((count,), step)), chance)


def score(latents):
    """The reward of every row."""
    return beginning.reward.score(policy.decode(latents), [asked] * len(latents))


nodes = look.trajectories(True).trajectories.nodes[: look.members]  # the group of the first prompt
for node in (3, 7):
    own = state_value(nodes[:, node], node, schedule.steps, go, score, 400)
    theirs, error = truths[True].state_values[0, :, node], truths[True].state_errors[0, :, node]
    print(
        f"node {node}: yours {own[:3].numpy().round(2)}, library {theirs[:3].numpy().round(2)} ± {error[:3].numpy().round(2)} for three members"
    )

# %% [markdown]
# `true_advantages` does this for every node of 18 groups of 12 trajectories (twice: groups that share their noise, and groups that do not), and keeps the standard errors. `compare_credit` then sets a rule's credit against $A^*$. The Monte Carlo noise of the truth is taken out of the correlation; the interval is a bootstrap over groups.

# %%
RULES = {
    "Flow-GRPO": (Uniform(), False, COLOURS["flow-grpo"]),
    "Stepwise": (StepwiseGain(), True, COLOURS["stepwise-flow-grpo"]),
    "TP-GRPO": (TurningPoint(), False, COLOURS["tp-grpo"]),
    "EstimateGain": (EstimateGain(), True, "#CC79A7"),
}


def examine(rule, shared, looking=look, known=truths):
    """A rule's credit on the look's trajectories, and how it agrees with the truth."""
    credit = looking.credit(rule, shared)
    return credit, compare_credit(credit.advantages, known[shared], draws=300)


print("                 evaluations per trajectory   correlation with A*      same sign where A* is clear")
reports = {}
for name, (rule, shared, _) in RULES.items():
    credit, report = examine(rule, shared)
    reports[name] = credit, report
    found = report.overall
    interval = f"[{found.correlation.low:.2f}, {found.correlation.high:.2f}]"
    print(f"{name:<16} {credit.nfe_per_trajectory:10.1f} {found.correlation.value:29.2f} {interval:<14} {found.sign.value:10.0%}")

# %% tags=["hide-input"]
figure, axes = panels(5, width=2.5, height=2.9)
steps = list(truths[True].steps)
for cell, (name, (_, shared, shade)) in zip(axes[:4], RULES.items(), strict=True):
    credit, report = reports[name]
    truth = truths[shared].values[..., steps].flatten()
    cell.scatter(truth, credit.advantages[..., steps].flatten(), s=2, color=shade, alpha=0.35)
    cell.set_title(f"{name}: {report.overall.correlation.value:.2f}", color=shade, fontsize=10)
    cell.set(xlabel="true advantage", xlim=(-0.6, 0.6), ylim=(-5.2, 5.2))
    clean(cell)
axes[0].set_ylabel("credit")
for name, (_, _, shade) in RULES.items():
    axes[4].plot(steps, [step.correlation.value for step in reports[name][1].per_step], color=shade, marker="o", markersize=3)
axes[4].set(xlabel="step", xticks=range(0, 9, 2), ylim=(0, 1.05), title="correlation by step")
clean(axes[4])
plt.show()

# %% [markdown]
# Uniform credit is a cloud: of what a step gets, most was earned by other steps. The step-wise rules lie along a line, and the free estimate lies on the narrowest one of all. Why would a *cheaper* guess be better than a completion? $V$ is an average over everything that may still happen. The completion follows the ODE to *one* possible end, and its reward swings with that end; the one-step
# estimate is the mean of the ends, and its reward is smoother, like $V$. What was blur in a picture is calm in a value.
#
# ## Under the microscope: the gradient
#
# Credit is a means; what moves the weights is the gradient $\sum_i A_i \nabla_\theta \log \pi(x_{i+1} \mid x_i)$. In this world the reward can be differentiated through the sampler, so the gradient of the expected reward is known (`pathwise_gradients`). Three numbers say how close a rule's gradient is to it: the **cosine** of its mean to the truth (1: no bias in direction), the **signal-to-noise** of one batch, and what a batch
# costs, the update's evaluations included.

# %%
direction = pathwise_gradients(beginning, batches=20, repeats=100, seed=1, decisions_only=True)
print("              cosine to the true gradient   signal to noise of a batch   the same per 10,000 evaluations")
for name, (rule, shared, _) in RULES.items():
    found = alignment(policy_gradients(beginning, rule, batches=40, members=8, shared_noise=shared, seed=2), direction)
    batch = reports[name][0].nfe_per_trajectory * 8 * len(beginning.prompts) + update_evaluations(beginning, 8)
    interval = f"[{found.cosine_interval[0]:.2f}, {found.cosine_interval[1]:.2f}]"
    equal = found.signal_to_noise * math.sqrt(10_000 / batch)
    print(f"{name:<14} {found.cosine:10.2f} {interval:<16} {found.signal_to_noise:16.2f} {equal:28.2f}")

# %% [markdown]
# (An interval may reach beyond 1: noise is taken out of a gradient's length, and the estimate of the noise has noise of its own.) Everything speaks for the lazy rule. Nothing says that its direction is worse than Stepwise's, one batch carries more signal than any other rule's, and per evaluation the lead is larger still. Stop here for a moment. Would you publish?
#
# ## The comparison
#
# Training, with what lesson 7 taught: several seeds, two prices, the same clip for all (its middle one, chosen for nobody).


# %%
def train(rule=None, method="flow-grpo", seeds=3, iterations=20, **settings):
    """One curve per seed."""
    return [
        learn(method, seed, rule() if rule else None, iterations=iterations, **{**WORLD, **settings}) for seed in range(seeds)
    ]


runs = {"Flow-GRPO": train(), "Stepwise": train(method="stepwise-flow-grpo"), "EstimateGain": train(EstimateGain)}
SHADES = {name: shade for name, (_, _, shade) in RULES.items()}


def table_of(found):
    """Best and final reward, mean over seeds, and the work until a mean reward of 0.9, in thousands of forward passes."""
    mean, work = torch.stack([run.reward for run in found]).mean(0), found[0].work
    i = int((mean >= 0.9).int().argmax())
    cost = work[i - 1] + (0.9 - mean[i - 1]) / (mean[i] - mean[i - 1]) * (work[i] - work[i - 1])
    finals = torch.stack([run.reward[-1] for run in found])
    half = T_QUANTILE[len(finals) - 1] * float(finals.std()) / math.sqrt(len(finals))
    return f"best {float(mean.max()):.2f}   final {float(finals.mean()):.2f} ± {half:.2f}   reaches 0.9 after {float(cost) / 1000:4.1f} thousand"


for name, found in runs.items():
    print(f"{name:<14} {table_of(found)}")


# %% tags=["hide-input"]
def draw_runs(chosen, labels):
    """Reward against iterations and against work."""
    figure, axes = panels(2, width=4.4, height=3.2, sharey=True)
    for name, found in chosen.items():
        for cell, price in zip(axes, ("iterations", "work"), strict=True):
            for run in found:
                cell.plot(getattr(run, price), run.reward, color=SHADES[name], linewidth=0.7, alpha=0.5)
            cell.plot(
                getattr(found[0], price), torch.stack([run.reward for run in found]).mean(0), color=SHADES[name], linewidth=2.3
            )
    for name, (x, y) in labels.items():
        axes[0].text(x, y, name, color=SHADES[name], fontsize=9, fontweight="bold")
    axes[0].set(xlabel="iteration", ylabel="held-out reward", ylim=(0, 1.03), xticks=range(0, 21, 4))
    axes[1].set(xlabel="forward passes in all (thousands)", xlim=(0, 80_000))
    axes[1].set_xticks(range(0, 80_001, 20_000), ["0", "20", "40", "60", "80"])
    for cell in axes:
        clean(cell)
    plt.show()


draw_runs(runs, {"Flow-GRPO": (9.5, 0.32), "Stepwise": (14.8, 0.9), "EstimateGain": (12.2, 0.45)})

# %% [markdown]
# (± is the 95% interval over three seeds.) The lazy rule rises as fast as Stepwise for half the price. And then it falls, with every seed. The microscope had looked at the *untrained* policy. Let us take it to a policy that has been trained by `EstimateGain` for 6 iterations, at its best, and for 18.


# %%
def pointing(rolled, prompts):
    """How far the one-step estimates of each node lie from the centre in the direction that was asked for, [node]."""
    path = rolled.trajectories
    estimates = path.nodes.flatten(2)[:, :-1] - path.schedule.times[:-1, None] * path.velocities.flatten(2)
    towards = torch.tensor([target(prompt) for prompt in prompts]).repeat_interleave(rolled.groups.members, 0)
    return (estimates * (towards / towards.norm(dim=1, keepdim=True))[:, None]).sum(-1).mean(0)


stages = {}
trainer = start(rule=EstimateGain(), seed=1, iterations=20, **WORLD)
for stage in (0, 6, 18):
    while trainer.done < stage:
        trainer.iteration()
    later = Look(setting_of(trainer), members=12, seed=0)
    known = {True: true_advantages(later.setting, later.trajectories(True), continuations=48)}
    rolled = later.trajectories(True, Tweedie())
    estimated = reward_table(later.setting.policy, later.setting.reward, rolled, later.setting.prompts)
    stages[stage] = known[True].state_values.mean((0, 1)), estimated.mean((0, 1)), pointing(rolled, later.setting.prompts)
    told = []
    for name, rule in (("Stepwise", StepwiseGain()), ("EstimateGain", EstimateGain())):
        found = examine(rule, True, later, known)[1].overall.correlation
        told.append(f"{name} {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]")
    print(f"after {stage:2d} iterations, correlation with A*: {', '.join(told)}")

# %% tags=["hide-input"]
figure, axes = panels(3, width=3.4, height=3.1)
for cell, stage in zip(axes[:2], (0, 18), strict=True):
    cell.plot(range(11), stages[stage][0], color=DATA, linewidth=2.4)
    cell.plot(range(11), stages[stage][1], color=ACCENT, linestyle="--", linewidth=2)
    cell.set(xlabel="node (0 = noise, 10 = finished)", title=f"after {stage} iterations", ylim=(0, 1.03), ylabel="mean reward")
    clean(cell)
axes[0].text(0.3, 0.42, "expected reward V", color=DATA, fontsize=9)
axes[0].text(0.3, 0.52, "reward of the one-step estimate", color=ACCENT, fontsize=9)
for stage, shade in ((0, NOISE), (6, "#E69F00"), (18, ACCENT)):
    axes[2].plot(range(10), stages[stage][2], color=shade, linewidth=2)
    axes[2].text(*{0: (0.7, 0.25), 6: (0.1, 2.15), 18: (0.7, 7.6)}[stage], f"after {stage}", color=shade, fontsize=9)
axes[2].axhline(2, color=INK, linewidth=1, linestyle=":")
axes[2].text(9, 1.4, "target", fontsize=9, ha="right")
axes[2].set(
    xlabel="node (0 = noise, 10 = finished)", ylabel="distance from the centre", title="where the one-step estimate points"
)
clean(axes[2])
plt.show()
print(
    "distance of the estimate at node 0:", ", ".join(f"{float(found[2][0]):.1f} after {stage}" for stage, found in stages.items())
)

# %% [markdown]
# There it is. $\hat x_0 = x_t - t v$ is the mean of what will come *if $v$ is the mean velocity*, as flow matching made it. Reinforcement learning is under no such obligation: it bends $v$ so that the trajectory is steered to the target, and pushes hardest early. The estimate takes the push for a promise and shoots beyond the target (right; the target is at 2). At the early nodes its
# reward no longer says anything about $V$, and the credit there is noise, with a bias that nobody asked for. The damage was done by iteration 6, when the reward was near its best.
#
# A good guess of $V$ on yesterday's policy is no promise for tomorrow's. How can one use an estimate without being at its mercy?
#
# ### Exercise 3 · pay to the end *(medium, 10 minutes)*
#
# Pay step $i$ everything that was gained from there to the *finished* sample, $R_T - R_i$. Normalise with the mean over members at each step, and one standard deviation for the whole group: `zscore(values, over=("member",), std_over=("member", "step"))`. (The standard deviation is that of the values as they are, before a mean is taken away.)


# %% tags=["exercise"]
@dataclass(frozen=True)
class EstimateToGo:
    """Pays each step the final reward less the estimate before the step."""

    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, rewards, schedule):
        return ...


# %% tags=["solution"]
@dataclass(frozen=True)
class EstimateToGo:
    """Pays each step the final reward less the estimate before the step."""

    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, rewards, schedule):
        return zscore(reward_to_go(rewards), over=("member",), std_over=("member", "step"))


# %%
lesson.check_to_go(EstimateToGo)

# %% [markdown] tags=["explanation"]
# **Why.** $R_i$ is a function of $x_i$ alone, and the score $\nabla_\theta \log \pi(x_{i+1} \mid x_i)$ has mean zero given $x_i$. So $\mathbb E[R_i\, \nabla_\theta \log \pi] = 0$: subtracting $R_i$ changes nothing on average *however wrong the estimate is*. It is a baseline. In `EstimateGain` the estimate also stood at the other end, $R_{i+1}$, where it does depend on the step, and there its errors are paid for. The price: $R_T$ carries the noise of all later steps. Between the two lies
# `StepwiseGain(lam=...)`: 0 pays gains, 1 pays to the end.

# %%
RULES["EstimateToGo"] = (EstimateToGo(), True, "#E69F00")
SHADES["EstimateToGo"] = "#E69F00"
before, after = examine(EstimateToGo(), True)[1], examine(EstimateToGo(), True, later, known)[1]
print(
    f"correlation with A*: before training {before.overall.correlation.value:.2f}, on the spoilt policy {after.overall.correlation.value:.2f}"
)
runs["EstimateToGo"] = train(EstimateToGo)
for name, found in runs.items():
    print(f"{name:<14} {table_of(found)}")
draw_runs(runs, {"Flow-GRPO": (9.5, 0.32), "Stepwise": (2.0, 0.97), "EstimateGain": (12.2, 0.45), "EstimateToGo": (6.4, 0.62)})

# %% [markdown]
# Its credit agrees with the truth less well at the start, and it learns a little later, but it stays. The rule with the *better* microscope reading was the worse rule. Correlation with $A^*$ measures noise and bias at once, on one policy; training amplifies the bias and averages out the noise.
#
# ## Projects
#
# Three rules to write by yourself. Each has a check, a reference solution and one measurement that shows what it is worth. Stars say how hard: ★ to ★★★.
#
# ### Exercise 4 · ★ ranks instead of rewards *(project, 20 minutes)*
#
# A reward model that sometimes breaks (a score of 5 where 0 to 1 is usual) ruins a group: the mean and the standard deviation follow the outlier, and all others look alike. Ranks do not care. Write a rule that pays every step the same: the z-score over the members of the *ranks* of $R_T$. Equal rewards share their mean rank: of rewards .2, .5, .5, .9 the ranks are 0, 1.5, 1.5, 3.


# %% tags=["exercise"]
@dataclass(frozen=True)
class RankCredit:
    """Every step gets the z-score of the rank of the finished sample's reward."""

    probe: Probe = NoProbe()

    def assign(self, rewards, schedule):
        return ...


# %% tags=["solution"]
@dataclass(frozen=True)
class RankCredit:
    """Every step gets the z-score of the rank of the finished sample's reward."""

    probe: Probe = NoProbe()

    def assign(self, rewards, schedule):
        final = rewards[..., -1]
        below = (final[:, :, None] > final[:, None, :]).to(final).sum(dim=-1)
        equal = (final[:, :, None] == final[:, None, :]).to(final).sum(dim=-1)
        ranks = below + (equal - 1) / 2
        steps = rewards.shape[-1] - 1
        return zscore(ranks[..., None].repeat(1, 1, steps), over=("member",))


# %%
lesson.check_rank(RankCredit)

# %% [markdown] tags=["explanation"]
# **Why.** The comparison table `[prompt, member, member]` counts for each member how many it beats, and shares ties fairly; two `argsort`s would give equal rewards different ranks, by their place in the group. `repeat` makes real copies: `expand` would share memory between steps, which the suite's promise about shared memory would notice.


# %%
class BreaksSometimes:
    """The true reward, but 5 is added to a share of the scores."""

    def __init__(self, share):
        self.share = share

    def score(self, images, prompts):
        broken = torch.rand(len(images), generator=torch.Generator().manual_seed(5)) < self.share
        return beginning.reward.score(images, prompts) + 5.0 * broken


print("correlation with A*, 95% interval")
for share in (0.0, 0.05, 0.2):
    line = []
    for rule in (Uniform(), RankCredit()):
        found = compare_credit(
            look.credit(rule, False, BreaksSometimes(share)).advantages, truths[False], 300
        ).overall.correlation
        line.append(f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]")
    print(f"{share:4.0%} of the scores broken: rewards {line[0]}   ranks {line[1]}")

# %% [markdown]
# Ranks throw away how *much* better a sample was, and with a reward that works they pay for it. They hold where the rewards break down.
#
# ### Exercise 5 · ★★ calibrated estimates *(project, 35 minutes)*
#
# `EstimateGain` trusts $R_j$ as much as $R_T$. But the table itself says how far an estimate can be trusted: over all prompts and members, how much of $R_T$ does $R_j$ predict? With $c_j = R_j - \overline{R_j}$, the deviation from the *group's* mean, let
#
# $$\beta_j = \frac{\langle c_j\, c_T \rangle}{\langle c_j^2 \rangle + 10^{-8}}, \qquad \hat V_j = \beta_j\, c_j, \qquad A = Z\big(\hat V_{j+1} - \hat V_j\big),$$
#
# where $\langle\cdot\rangle$ averages over prompts *and* members, and $Z$ is that of exercise 3. This is the regression of $R_T$ on $R_j$: if the estimate no longer says anything about the end, $\beta_j$ falls to 0 and nobody is paid for it. At the last node $\beta_T = 1$.


# %% tags=["exercise"]
@dataclass(frozen=True)
class CalibratedGain:
    """Pays the gains of estimates that are trusted as far as they predict the final reward."""

    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, rewards, schedule):
        return ...


# %% tags=["solution"]
@dataclass(frozen=True)
class CalibratedGain:
    """Pays the gains of estimates that are trusted as far as they predict the final reward."""

    probe: Probe = Tweedie()
    shared_noise: bool = True

    def assign(self, rewards, schedule):
        centred = rewards - rewards[:, :1]
        centred = centred - centred.mean(dim=1, keepdim=True)
        slopes = (centred * centred[..., -1:]).mean((0, 1)) / (centred.square().mean((0, 1)) + 1e-8)
        return zscore(gains(slopes * centred), over=("member",), std_over=("member", "step"))


# %%
lesson.check_calibrated(CalibratedGain)

# %% [markdown] tags=["explanation"]
# **Why.** Centring within the group first: otherwise easy and hard prompts make the slope, and it says how well the estimate tells *prompts* apart. Pooling over prompts: a slope from the twelve members of one group would mostly be noise, and would fit the group's own luck. Both values are calibrated before their difference is taken, so that the sum over steps is still $c_T$. Subtracting one member before
# the mean keeps equal rewards exactly 0.

# %%
RULES["CalibratedGain"] = (CalibratedGain(), True, "#56B4E9")
SHADES["CalibratedGain"] = "#56B4E9"
before, after = examine(CalibratedGain(), True)[1], examine(CalibratedGain(), True, later, known)[1]
print(
    f"correlation with A*: before training {before.overall.correlation.value:.2f}, on the spoilt policy {after.overall.correlation.value:.2f}"
)
for title, table in (("before training", tables["one-step estimate"]), ("on the spoilt policy", estimated)):
    centred = table - table.mean(1, keepdim=True)
    slopes = (centred * centred[..., -1:]).mean((0, 1)) / (centred.square().mean((0, 1)) + 1e-8)
    print(f"slopes {title}:", " ".join(f"{slope:.2f}" for slope in slopes.tolist()))
runs["CalibratedGain"] = train(CalibratedGain)
for name in ("Stepwise", "EstimateGain", "EstimateToGo", "CalibratedGain"):
    print(f"{name:<14} {table_of(runs[name])}")

# %% [markdown]
# As fast as the gains, and it stays. The slopes show how: on the spoilt policy they are close to 0 at the early nodes, where the estimate has lost its meaning, and 1 at the last ones, where it has kept it. In this world a free estimate with a regression does what Stepwise does with five times the evaluations while sampling, for half the work in all. (Was it luck? Three seeds. Would it hold for pictures? Nobody has measured it. Lesson 7 says what to do.)
#
# ### Exercise 6 · ★★★ a rule that remembers *(project, 45 minutes)*
#
# All rules so far scale each group by its own standard deviation. A group whose members are nearly equal is thereby blown up to the same size as one with real differences. Use **one ruler** for all groups instead, and keep it across iterations: with the centred values $y = R_T - R_i - \overline{(\cdot)}$ (mean over members, step by step),
#
# $$m \leftarrow 0.9\, m + 0.1\, \langle y^2 \rangle, \qquad A = \operatorname{clamp}\!\left(\frac{y}{\sqrt m + 10^{-4}},\, \pm 5\right),$$
#
# with $\langle\cdot\rangle$ over the whole table and $m = \langle y^2\rangle$ at the first one; the present table is part of $m$ when it is measured. A rule with memory must survive a checkpoint: `state_dict()` returns its memory as named tensors (empty before the first table), `load_state_dict(state)` takes it up again.


# %% tags=["exercise"]
@dataclass
class OneRuler:
    """Pays R_T - R_i, measured by a running root mean square."""

    decay: float = 0.9
    probe: Probe = Tweedie()
    shared_noise: bool = True
    squares: torch.Tensor | None = field(default=None, repr=False)

    def assign(self, rewards, schedule):
        return ...

    def state_dict(self):
        return ...

    def load_state_dict(self, state): ...


# %% tags=["solution"]
@dataclass
class OneRuler:
    """Pays R_T - R_i, measured by a running root mean square."""

    decay: float = 0.9
    probe: Probe = Tweedie()
    shared_noise: bool = True
    squares: torch.Tensor | None = field(default=None, repr=False)

    def assign(self, rewards, schedule):
        values = reward_to_go(rewards)
        values = values - values[:, :1]
        values = values - values.mean(dim=1, keepdim=True)
        new = values.square().mean()
        self.squares = new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        return (values / (self.squares.sqrt() + 1e-4)).clamp(-5, 5)

    def state_dict(self):
        return {} if self.squares is None else {"squares": self.squares.clone()}

    def load_state_dict(self, state):
        self.squares = state["squares"].clone() if "squares" in state else None


# %%
lesson.check_remembers(OneRuler)

# %% [markdown] tags=["explanation"]
# **Why.** Squares are averaged and the root is taken last; averaging roots would underestimate the ruler whenever it varies. The present table goes in first, so that the very first one has a ruler. `clone` keeps the checkpoint apart from the living memory. The contract suite plays a whole story for this: it shows the rule several tables, saves, loads into a fresh copy, and demands the same numbers
# to the last bit; a resumed training run depends on that.

# %%
for shown in (tables["one-step estimate"], estimated):
    ruler = OneRuler()
    sizes = {"one ruler": ruler.assign(shown, None), "a std per group": EstimateToGo().assign(shown, None)}
    told = ", ".join(
        f"{name} {float(a.abs().mean((1, 2)).min()):.2f} to {float(a.abs().mean((1, 2)).max()):.2f}" for name, a in sizes.items()
    )
    print("mean |credit| of a group, smallest to largest:", told)
SHADES["OneRuler"] = "#8C6D1F"
SHADES["no memory"] = NOISE
runs["OneRuler"] = train(OneRuler)
runs["no memory"] = train(lambda: OneRuler(decay=0.0))
for name in ("EstimateToGo", "OneRuler", "no memory"):
    print(f"{name:<14} {table_of(runs[name])}")

# %% [markdown]
# The ruler does what it should: groups in which there is little to tell get little credit, others more. But three seeds show no difference in training, neither from the common ruler nor from remembering it (`decay=0` forgets at once; that is the control). A null result is a result, and cheap to have: of rules that do equally well, keep the one that is simplest to explain.
#
# ## All together

# %% tags=["hide-input"]
finalists = ("Flow-GRPO", "Stepwise", "EstimateGain", "EstimateToGo", "CalibratedGain", "OneRuler")
draw_runs(
    {name: runs[name] for name in finalists},
    {name: (13.2, 0.5 - 0.08 * place) for place, name in enumerate(finalists)},
)
for name in finalists:
    print(f"{name:<14} {table_of(runs[name])}")

# %% [markdown]
# ## To keep
#
# | step | what | in `flowrl` |
# |---|---|---|
# | idea | $A^*_i = V(x_{i+1}) - V(x_i)$; what is your guess of $V$, and what does it cost? | `types.Tweedie`, `Substeps`, `Completion`, `NoProbe` |
# | class | `probe`, `assign(rewards, schedule)`; `shared_noise`; `state_dict` where it remembers | `protocols.CreditAssigner`, `Stateful` |
# | contract | does it keep what the trainer relies on? | `testing.check_credit`, `testing.credit_contract` |
# | microscope | close to $A^*$? gradient unbiased, and how noisy? *On which policy?* | `diagnostics.true_advantage`, `diagnostics.gradient` |
# | comparison | seeds, prices, settings, controls (lesson 7) | `flowrl compare --credit my_rules.py:MyRule` |
#
# The rules of this lesson run in the image world as they are: put one into a file and name it, `flowrl compare --credit my_rules.py:CalibratedGain`. What is true of them there, you would be among the first to know.
#
# **Next:** [9 · Scale up](09_scale_up.ipynb) takes the same objects to SD3.5 and FLUX.

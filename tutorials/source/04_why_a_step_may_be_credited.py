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
# # 4 · Why a step may be credited
#
# **After this lesson you can** prove which credits leave the policy gradient unchanged, use values of states as baselines and as credit, choose $\lambda$, predict how the noise grows with the number of decisions, decide how far old samples can be trusted, and recognise a credit whose choice biases it.
#
# **Time** 105 minutes, of which the computer needs less than one. **You need** the lesson on GRPO.
#
# The lesson on GRPO gave every step of a trajectory the same credit, which depends only on the reward of the finished sample. The papers of this course give each step a credit of its own. Is the result still the policy gradient? This lesson answers the question with one theorem, and checks every line of it against exact numbers.
#
# For exact numbers we need a policy so small that its gradient is known. We keep the exact flow of the ring, and give the policy one parameter, a vector in the plane: the *wind* $\theta$. In every decision the wind is subtracted from the velocity, $v_\theta(x, t) = v(x, t) - \theta$, so it moves all samples in its direction. The reward is that of the lesson on GRPO: $R = e^{-d^2/2}$ at distance $d$ from the target at 45 degrees.
# Let us see what a wind towards the target does.

# %% tags=["hide-input"]
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from flowrl import Prompt
from flowrl.credit import generalised_gains, process_rewards, reward_to_go, turning_points
from flowrl.probes import NoProbe
from flowrl.rollout import Groups
from flowrl.samplers import FlowSDE, Windowed
from flowrl.bench.exact import Exact, exact_advantages
from flowrl.bench.gradients import (
    RawCredit,
    Setting,
    alignment,
    pathwise_gradients,
    policy_gradients,
)
from flowrl_course import lesson_04 as lesson
from flowrl_course.chain import CALM, TARGET, Chain, reward, velocity, walk
from flowrl_course.figures import (
    ACCENT,
    COLOURS,
    DATA,
    INK,
    OTHERS,
    clean,
    panels,
    plane,
)
from flowrl_course.progress import progress
from flowrl_course.runs import start

torch.set_num_threads(1)
chain = Chain(steps=10)  # 9 decisions; the last step follows the ODE
TOWARDS = TARGET / TARGET.norm()  # the direction of the target, a unit vector
strengths = torch.linspace(0, 3.2, 33, dtype=torch.float64)
heights = torch.stack([chain.objective(strength * TOWARDS) for strength in strengths])
slope = float(chain.gradient() @ TOWARDS)


def opening():
    """Samples in two winds, and the expected reward for all strengths."""
    figure, axes = panels(3, width=3.4, height=3.3)
    for cell, strength, title in (
        (axes[0], 0.0, "calm"),
        (axes[1], 1.0, "wind 1 towards the target"),
    ):
        points = chain.roll(600, seed=1, wind=strength * TOWARDS)[-1]
        plane(cell, title)
        cell.scatter(*points.T, s=5, color=DATA, alpha=0.6)
        cell.scatter(*TARGET, s=120, marker="*", color=ACCENT, zorder=3)
        if strength:
            cell.annotate(
                "",
                TOWARDS.tolist(),
                (0, 0),
                arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0},
            )
            cell.text(-0.9, -0.5, "θ", color=INK)
    axes[2].plot(strengths, heights, color=INK)
    axes[2].plot(strengths[:16], heights[0] + slope * strengths[:16], ":", color=ACCENT)
    axes[2].text(0.75, 0.27, f"slope in calm {slope:.3f}", color=ACCENT)
    axes[2].set(
        xlabel="strength of the wind",
        ylabel="expected reward J",
        title="exact J, all winds towards the target",
    )
    clean(axes[2])
    plt.show()


opening()
print(f"exact J in calm: {float(heights[0]):.4f}")
print(
    "exact gradient of J by the wind, in calm: "
    + " ".join(f"{part:.4f}" for part in chain.gradient().tolist())
)

# %% [markdown]
# The curve on the right is not an average over samples. The expected reward $J$ is computed by dynamic programming on a grid, backwards from the reward, and the computation is differentiated with respect to the wind. (The lesson What is a step worth? writes this program; here it is inside `Chain.objective`, `Chain.gradient` and `Chain.values`.)
# So the slope at the beginning is exact, and every estimate of this lesson must agree with it.
#
# ## The chain and its gradient
#
# We count the nodes from the noise, so $z_0$ is noise and $z_T$ the finished sample. All steps but the last are decisions: decision $k$ draws
#
# $$z_{k+1} = \mu_k(z_k) + \mathrm{std}_k\,\varepsilon_k,\qquad k = 0, \dots, D-1,$$
#
# in which $\varepsilon_k$ is standard normal noise and $\mathrm{std}_k$ the standard deviation of the transition. Then an ODE step finishes the sample, so $D = T - 1$. The lesson on GRPO derived
#
# $$\nabla J = \mathbb E\Big[\sum_k \psi_k\,R\Big],\qquad \psi_k = \nabla_\theta\log\pi_\theta(z_{k+1}\mid z_k).$$
#
# $\psi_k$ is called the *score* of decision $k$: the direction in which the parameter must move to make this transition more likely. (The score of the lesson on ODE and SDE was the gradient of a log-density by the state; this one is the gradient by the parameter.)
# A wind $\theta$ moves the mean of decision $k$ by $\mathrm{push}_k\,\theta$, with a number that depends on the step only (`Chain.pushes`). The last step has no wind, because a policy gradient does not contain the effect of ODE steps.
#
# ### Exercise 1 · the score of a decision
#
# *Difficulty: easy · kind: formula · importance: essential · time: 4 minutes*
#
# `z_next` and `mean` are `[sample, 2]`; `std` and `push` are numbers, those of the decision. Return $\psi_k$, the gradient of the log-density (summed over both dimensions) by the wind, `[sample, 2]`.


# %% tags=["exercise"]
def score(z_next, mean, std, push):
    """The gradient of log pi(z_next) by the wind, which moves the mean by push * wind."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Differentiate $-\lvert z - \mu\rvert^2/(2\,\mathrm{std}^2)$ with respect to $\mu$ first. The chain rule then multiplies by the derivative of $\mu$ with respect to $\theta$.


# %% tags=["solution"]
def score(z_next, mean, std, push):
    """The gradient of log pi(z_next) by the wind, which moves the mean by push * wind."""
    return push * (z_next - mean) / std**2


# %%
lesson.check_score(score)

# %% [markdown] tags=["explanation"]
# **Why.** $\nabla_\mu\log\pi = (z - \mu)/\mathrm{std}^2$, and $\mu$ moves by $\mathrm{push}_k\,\theta$. If the policy itself made the transition, $z - \mu = \mathrm{std}\,\varepsilon$, so $\psi_k = \mathrm{push}_k\,\varepsilon_k/\mathrm{std}_k$: a score is noise times a factor. For a network, the push becomes the derivative of its output with respect to the weights; the rest is the same.

# %% [markdown]
# The next cell samples 40,000 trajectories and compares the average of $\sum_k\psi_k R$ with the exact gradient. From now on we call the sum for one trajectory an *estimate*. Its *noise* is its root mean square deviation from the mean, in units of the true gradient's length.


# %%
def scores_of(chain, nodes, wind=CALM):
    """psi of all decisions [sample, decision, 2]; nodes is [node, sample, 2]."""
    steps = range(chain.decisions)
    return torch.stack(
        [
            score(nodes[k + 1], chain.mean(nodes[k], k, wind), chain.stds[k], chain.pushes[k])
            for k in steps
        ],
        1,
    )


def estimates(credit, scores):
    """Every trajectory's sum of score times credit [sample, 2]."""
    return (scores * credit[..., None]).sum(1)


def noise_of(samples, truth):
    """Root mean square deviation from the mean, in lengths of the truth."""
    return float(samples.var(0).sum().sqrt() / truth.norm())


def report(name, samples, truth):
    """The mean of estimates with its standard error, beside the truth, and the noise."""
    error = samples.std(0) / len(samples) ** 0.5
    parts = "  ".join(
        f"{float(m):6.3f} ± {float(e):.3f}"
        for m, e in zip(samples.mean(0), error, strict=True)
    )
    print(f"{name:<26} {parts}   noise {noise_of(samples, truth):4.1f}")


nodes = chain.roll(40_000, seed=3)
values = chain.values(nodes)  # V_0 ... V_8 and R, [sample, 10]
rewards = values[:, -1]
scores, truth = scores_of(chain, nodes), chain.gradient()
everywhere = torch.ones(1, chain.decisions)
print(f"{'exact gradient':<26} " + "           ".join(f"{float(part):6.3f}" for part in truth))
report("R", estimates(rewards[:, None] * everywhere, scores), truth)
report(
    "R - mean reward",
    estimates((rewards - rewards.mean())[:, None] * everywhere, scores),
    truth,
)

# %% [markdown]
# The average is right, but the noise is large: more than five times the gradient's length with $R$, and 4.5 times with the mean reward as a baseline. In the rest of the lesson we reduce this noise. Which other credits $A_k$ can replace $R$ in $\sum_k\psi_k A_k$, so that the mean stays the same and the noise falls?
#
# ## Terms with mean zero
#
# Two kinds of terms can be added to the credit of decision $k$, or removed from it, without any effect on the mean.
#
# **What comes before** (causality). Let $f$ be any function of the states up to $z_k$. Then $\mathbb E[\psi_k f] = 0$. To see why, suppose that we know $z_0, \dots, z_k$. Then $f$ is a fixed number, and only $z_{k+1}$ is still random:
#
# $$\mathbb E\big[\psi_k f\mid z_0, \dots, z_k\big] = f\int\pi_\theta\,\nabla\log\pi_\theta = f\,\nabla\!\int\pi_\theta = f\,\nabla 1 = 0 .$$
#
# The average over $z_0, \dots, z_k$ is 0 as well. In words: a decision is not the cause of what happened before it.
#
# **What comes later, if its mean is zero.** Let $h$ be a quantity with $\mathbb E[h \mid z_0, \dots, z_{k+1}] = 0$. It may depend on later decisions, but its mean is 0 for every $z_{k+1}$. Then $\mathbb E[\psi_k h] = 0$ too, because $\psi_k$ is a fixed number once $z_{k+1}$ is known. We need this second rule as often as the first.
#
# ### Exercise 2 · which terms vanish?
#
# *Difficulty: medium · kind: prediction · importance: essential · time: 8 minutes*
#
# The exact value $V^*_j(z)$ is the expected reward if the sampler continues from $z$ at node $j$. Predict before you run the next cell: for which $f$ is $\mathbb E[\psi_4 f] = 0$? Answer `True` if the term vanishes.
#
# | | $f$ |
# |---|---|
# | A | $\lvert z_0\rvert^2$ |
# | B | $V^*_4(z_4)$ |
# | C | $V^*_5(z_5)$ |
# | D | $R - V^*_5(z_5)$ |
# | E | $V^*_3(z_3) - V^*_2(z_2)$, the gain of decision 2 |
# | F | $V^*_7(z_7) - V^*_6(z_6)$, the gain of decision 6 |
# | G | the mean reward of the other three members of a group of four |
# | H | the mean reward of all four members |

# %% tags=["exercise"]
vanishes = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ..., "F": ..., "G": ..., "H": ...}

# %% [markdown] tags=["hint"]
# **Hint.** Decision 4 draws $z_5$. Apply the two rules in turn: is $f$ known before this draw? If not, what is the mean of $f$ once $z_5$ is known?

# %% tags=["solution"]
vanishes = {
    "A": True,
    "B": True,
    "C": False,
    "D": True,
    "E": True,
    "F": True,
    "G": True,
    "H": False,
}

# %%
lesson.check_vanishing(vanishes)

# %% [markdown] tags=["explanation"]
# **Why.** A, B and E are known before the draw; G is independent of it. D and F have mean 0 once $z_5$ is known: $V^*_5$ *is* the mean of $R$, and a gain has mean 0 given the state that it starts from. C is the effect of decision 4 on the reward. H contains a quarter of the member's own reward, and so a quarter of C. So the group's mean as the baseline shortens the gradient by the factor $1 - 1/G$.

# %%
others = rewards.view(-1, 4)
others = ((others.sum(1, keepdim=True) - others) / 3).flatten()
candidates = {
    "A": nodes[0].square().sum(1),
    "B": values[:, 4],
    "C": values[:, 5],
    "D": rewards - values[:, 5],
    "E": values[:, 3] - values[:, 2],
    "F": values[:, 7] - values[:, 6],
    "G": others,
    "H": rewards.view(-1, 4).mean(1).repeat_interleave(4),
}
for letter, f in candidates.items():
    terms = scores[:, 4] @ TOWARDS * f
    error = float(terms.std() / len(terms) ** 0.5)
    away = abs(float(terms.mean())) / error
    print(
        f"{letter}  mean {float(terms.mean()):7.4f} ± {error:.4f}  "
        f" {'not 0' if away > 4 else 'consistent with 0'}"
    )

# %% [markdown]
# The measurement agrees: only C and H differ from 0 by more than four standard errors, and H is about a quarter of C.
#
# In a game with a reward after every move, causality removes the rewards of earlier moves. For images, however, the only reward comes at the end, *after* every decision, and causality removes nothing from it. It becomes useful once we split $R$ into parts, and the values of states do this.
#
# ## Baselines that depend on the state
#
# Causality allows any baseline $b(z_k)$, not only a constant: $\mathbb E[\psi_k\,(R - b(z_k))] = \mathbb E[\psi_k R]$. The noise, however, depends on $b$. A good baseline predicts the reward from the state, because the part of the reward that can be predicted before the decision is not its effect.
#
# ### Exercise 3 · design a baseline
#
# *Difficulty: harder · kind: design · importance: useful · time: 12 minutes*
#
# Write a baseline of your own, without the exact values: `baseline(z, time)` gets the states `[sample, 2]` and their time, a number, and returns `[sample]`. It may use the functions `velocity(z, time)`, `[sample, 2]`, and `reward(points)`, `[sample]`. The variance of the estimate must be at most half of that with the mean reward as the baseline. There are several good answers.


# %% tags=["exercise"]
def baseline(z, time):
    """An estimate of the final reward from a state and its time."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The lesson on flow matching has an estimate of the finished sample from any state. What is its reward?


# %% tags=["solution"]
def baseline(z, time):
    """An estimate of the final reward from a state and its time."""
    return reward(z - time * velocity(z, time))


# %%
lesson.check_baseline(baseline)

# %% [markdown] tags=["explanation"]
# **Why.** $z - t\,v$ is the mean of the finished samples (the Tweedie estimate), and its reward a cheap estimate of $V^*_k$. The estimate need not be right: with a wrong baseline the mean is still right, only less noise is removed. The best baseline in each decision is $\mathbb E[\lvert\psi_k\rvert^2 R \mid z_k]/\mathbb E[\lvert\psi_k\rvert^2\mid z_k]$ (differentiate the variance by $b$), and $V^*_k(z_k)$ is close to it.

# %%
constant = (rewards - rewards.mean())[:, None] * everywhere
guessed = rewards[:, None] - torch.stack(
    [baseline(nodes[k], chain.times[k]) for k in range(chain.decisions)], 1
)
to_go = rewards[:, None] - values[:, :-1]
print(f"{'exact gradient':<26} " + "           ".join(f"{float(part):6.3f}" for part in truth))
report("R - mean reward", estimates(constant, scores), truth)
report("R - your baseline", estimates(guessed, scores), truth)
report("R - V_k, exact values", estimates(to_go, scores), truth)

# %% [markdown]
# All three means agree with the exact gradient within two standard errors. To the printed digits, the Tweedie baseline has the same noise as exact values. It needs one velocity per state, which the rollout has already computed.
#
# The credit $R - V_k$, with an exact or an estimated value, is called the *reward to go*: the part of the reward that is gained from decision $k$ on.
#
# ## V, Q and the advantage
#
# Reinforcement learning uses two values. $V^*_k(z_k)$ is the expected reward from a state, and $Q_k(z_k, a)$ the expected reward after action $a$ in this state. Our action *is* the next state, $a = z_{k+1}$. Hence $Q_k(z_k, z_{k+1}) = V^*_{k+1}(z_{k+1})$, and the exact advantage $A^*_k$ of a decision is a difference of two values:
#
# $$A^*_k = Q_k - V^*_k = V^*_{k+1}(z_{k+1}) - V^*_k(z_k),\qquad R = V^*_0(z_0) + \sum_k A^*_k .$$
#
# So $A^*_k$ is the gain of decision $k$ with exact values.
#
# **Theorem.** All of these have the same expectation, decision by decision, and their sum over decisions is $\nabla J$:
#
# $$\mathbb E[\psi_k R] = \mathbb E[\psi_k (R - b(z_k))] = \mathbb E[\psi_k (R - V^*_k)] = \mathbb E[\psi_k A^*_k] .$$
#
# *Proof.* Insert $R = V^*_0 + \sum_j A^*_j$ into $\mathbb E[\psi_k R]$ and consider one term at a time. $V^*_0$ and the gains with $j < k$ are functions of the states up to $z_k$, so they vanish by the first rule. The gains with $j > k$ have mean 0 given $z_{k+1}$, so they vanish by the second. Only $A^*_k$ remains. The same holds for the other credits, which contain fewer of these terms. ∎
#
# The next figure shows this proof in numbers. Left: the mean of $\psi_k A^*_j$ (the component towards the target) for every pair of a decision $k$ and a gain $j$. Right: the standard deviation of the same products.

# %%
gains = values.diff(dim=-1)  # A* of all decisions [sample, decision]
towards = scores @ TOWARDS
products = towards[:, :, None] * gains[:, None, :]  # [sample, k, j]
mean, spread = products.mean(0), products.std(0)
significance = (mean / (spread / len(nodes[0]) ** 0.5)).abs()
off = ~torch.eye(9, dtype=torch.bool)
print(f"sum of the diagonal {float(mean.diagonal().sum()):.4f}; exact {slope:.4f}")
print(
    "largest |mean| off the diagonal, in standard errors:"
    f" {float(significance[off].max()):.1f}"
)
print(
    "smallest mean on the diagonal, in standard errors:"
    f" {float(significance.diagonal().min()):.1f}"
)
print(
    "share of the squares off the diagonal, which are pure noise:"
    f" {float(spread[off].square().sum() / spread.square().sum()):.0%}"
)

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.6, height=3.8)
for cell, table, title in (
    (axes[0], mean, "mean: only the diagonal"),
    (axes[1], spread, "noise: most of it below the diagonal"),
):
    shown = cell.imshow(table, cmap="Blues", vmin=0)
    cell.set(
        xlabel="gain of decision j",
        ylabel="score of decision k",
        title=title,
        xticks=range(9),
        yticks=range(9),
    )
    figure.colorbar(shown, ax=cell, shrink=0.8)
axes[1].stairs(
    [j + 0.5 for j in range(9)],
    [j - 0.5 for j in range(10)],
    baseline=None,
    color=ACCENT,
    linewidth=1.5,
)
axes[1].text(3.6, 1.2, "reward to go adds up\nthis side of each row", color=ACCENT, fontsize=9)
axes[1].text(0.9, 7.6, "gained before decision k", color="white", fontsize=9)
plt.show()

# %% [markdown]
# A row of the figure is one decision. Uniform credit adds up the whole row. The reward to go starts at the diagonal: it leaves out the lower left triangle, the gains *before* the decision. $A^*_k$ is the diagonal alone. The means off the diagonal are 0, so all three credits have the same expectation. However, every additional cell adds its noise.
# The noise is largest on the lower left, because there the large scores of late decisions are multiplied by the large gains of early decisions.
#
# ### Exercise 4 · two bugs
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 8 minutes*
#
# A colleague writes the estimate with the reward to go, and subtracts the mean credit to reduce the noise further. In training, the reward falls. Find and repair **two bugs**. `values` is `[sample, decision+1]` with the reward in the last column, `scores` is `[sample, decision, 2]`.


# %% tags=["exercise"]
def to_go_estimate(values, scores):
    """sum_k psi_k (R - V_k), [sample, 2]; the credit is centred."""
    credit = values[:, -1:] - values[:, 1:]
    credit = credit - credit.mean(dim=1, keepdim=True)
    return (scores * credit[..., None]).sum(dim=1)


# %% [markdown] tags=["hint"]
# **Hint.** Go through everything that is subtracted from the reward. Is it known before decision $k$ is made, or independent of it?


# %% tags=["solution"]
def to_go_estimate(values, scores):
    """sum_k psi_k (R - V_k), [sample, 2]; the credit is centred."""
    credit = values[:, -1:] - values[:, :-1]
    credit = credit - credit.mean(dim=0, keepdim=True)
    return (scores * credit[..., None]).sum(dim=1)


# %%
lesson.check_repaired(to_go_estimate)

# %% [markdown] tags=["explanation"]
# **Why.** `values[:, 1:]` is the value *after* the draw. It removes exactly the effect of decision $k$, and $\mathbb E[\psi_k(R - V^*_{k+1})] = 0$ (term D of exercise 2). `mean(dim=1)` averages over the decisions of the trajectory itself, and so contains later ones. `mean(dim=0)` averages over all trajectories, including its own, which matters only in small groups.
# Neither bug raises an error, so compare a new estimate with a known gradient before you train with it. The next cell does so for each bug alone.

# %% [markdown]
# Let us look at the estimates. Each dot is the mean of 24 trajectories, a small batch; the arrow is the exact gradient. The colleague's version is on the right.

# %% tags=["hide-input"]
late_baseline = rewards[:, None] - values[:, 1:]
both = late_baseline - late_baseline.mean(dim=1, keepdim=True)
CLOUDS = {
    "uniform: R - mean": estimates(constant, scores),
    "reward to go: R - V": to_go_estimate(values, scores),
    "exact: A*": estimates(gains, scores),
    "with both bugs": estimates(both, scores),
}
figure, axes = panels(4, width=2.7, height=2.9, sharex=True, sharey=True)
shades = [COLOURS[rule] for rule in ("flow-grpo", "reward-to-go", "stepwise-flow-grpo")]
for cell, (name, samples), shade in zip(
    axes, CLOUDS.items(), [*shades, OTHERS[0]], strict=True
):
    batches = samples[:9600].view(-1, 24, 2).mean(1)
    cell.scatter(*batches.T, s=5, color=shade, alpha=0.5)
    cell.annotate(
        "", truth.tolist(), (0, 0), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.8}
    )
    cell.scatter(*samples.mean(0), marker="+", s=90, color="black", zorder=4)
    cell.set(
        title=name, aspect="equal", xlabel="component x", xlim=(-0.3, 0.55), ylim=(-0.3, 0.55)
    )
    clean(cell)
axes[0].set_ylabel("component y")
figure.suptitle("Arrow: exact gradient; cross: mean of all estimates", fontsize=11)
plt.show()
for name, samples in CLOUDS.items():
    report(name, samples, truth)
report("only V_{k+1}", estimates(late_baseline, scores), truth)
report("only mean(dim=1)", estimates(to_go - to_go.mean(dim=1, keepdim=True), scores), truth)

# %% [markdown]
# The first three crosses are at the tip of the arrow, but the clouds differ. With exact credit the cloud is the smallest. Uniform credit needs about six times as many trajectories for the same precision, because the variance is the square of the noise. The baseline $V^*_{k+1}$ alone gives the mean 0, in agreement with the theorem. The mean over a trajectory's own decisions alone halves the gradient. With both bugs together the gradient points away from the target.
#
# ## Between gain and reward to go: λ
#
# $A^*_k$ needs exact values, which we do not have for images. Suppose that we have only estimates $V_k$. Then the gain $g_k = V_{k+1} - V_k$ is biased: the error of $V_{k+1}$ depends on decision $k$, so causality does not remove it. The reward to go $R - V_k$ has no such bias, because $V_k$ is a baseline. Between them are the changes over $n$ decisions, $V_{k+n} - V_k$. Generalised advantages (Schulman et al. 2015) average all of them: the change over $n$ decisions has the weight $(1-\lambda)\lambda^{n-1}$, and the longest one, $R - V_k$, has the weight that remains, $\lambda^{D-k-1}$. The average is the gain at $\lambda = 0$ and the reward to go at $\lambda = 1$.
#
# ### Exercise 5 · generalised advantages
#
# *Difficulty: harder · kind: formula · importance: essential · time: 12 minutes*
#
# Write this average $A_k^\lambda$ as a sum over the gains $g_k, g_{k+1}, \dots, g_{D-1}$: which weight does each have? Then compute it. `values` is `[sample, decision+1]` with the reward in the last column; return `[sample, decision]`.


# %% tags=["exercise"]
def lambda_credit(values, lam):
    """The average of the changes over 1, 2, ... decisions."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The gain $g_{k+j}$ is part of every change over more than $j$ decisions. What do the weights of these add up to? With the result $A_k^\lambda$ has a recursion that contains $A_{k+1}^\lambda$. At which decision does it start?


# %% tags=["solution"]
def lambda_credit(values, lam):
    """The average of the changes over 1, 2, ... decisions."""
    gains = values.diff(dim=-1)
    credit = [gains[:, -1]]
    for k in reversed(range(gains.shape[1] - 1)):
        credit.insert(0, gains[:, k] + lam * credit[0])
    return torch.stack(credit, dim=1)


# %%
lesson.check_lambda(lambda_credit)

# %% [markdown] tags=["explanation"]
# **Why.** The weights of all changes over more than $j$ decisions add up to $\lambda^j$, so
#
# $$A_k^\lambda = g_k + \lambda\,g_{k+1} + \lambda^2 g_{k+2} + \dots + \lambda^{D-1-k} g_{D-1} = g_k + \lambda A_{k+1}^\lambda .$$
#
# The recursion goes backwards from the last decision, because a decision affects later gains only. A recursion forwards would credit earlier gains. With exact values even that has the right mean, because these terms vanish. So a test of the mean cannot find this bug; only the noise shows it. In `flowrl`: `credit.generalised_gains`.

# %% [markdown]
# Written with gains, the average is $A_k^\lambda = \sum_j \lambda^j g_{k+j}$. Values are often wrong because they are outdated: a network that estimates them has learned from the policy before its last updates. To imitate this, we give the policy a wind of strength $\sqrt2$. On its trajectories we compare its own exact values with the exact values *of the calm policy*, which are outdated.
#
# ### Exercise 6 · outdated values
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# The next cell measures the bias of the gradient for several $\lambda$. With the outdated values, the bias is
#
# - **a** the same for all $\lambda$, because the values are equally wrong
# - **b** smallest at $\lambda = 0$, because a gain contains the fewest terms
# - **c** smallest at $\lambda = 1$
# - **d** 0 for all $\lambda$, because values are only baselines

# %% tags=["exercise"]
bias = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Write down the credit for $\lambda = 0$ and for $\lambda = 1$. In which of them does a value occur that depends on decision $k$ itself?

# %% tags=["solution"]
bias = "c"

# %%
lesson.check_bias(bias)

# %% [markdown] tags=["explanation"]
# **Why.** At $\lambda = 1$ the sum telescopes to $R - V_k$, in which the wrong value is only a baseline. For $\lambda < 1$ the credit contains $(1 - \lambda)V_{k+1}$, whose error depends on decision $k$, so the bias is largest at $\lambda = 0$.

# %%
now = torch.ones(2, dtype=torch.float64)
later = chain.roll(100_000, seed=4, wind=now)
later_scores, later_truth = scores_of(chain, later, now), chain.gradient(now)
tables = {
    "its own values": chain.values(later, now),
    "values of the calm policy": chain.values(later, CALM),
}
lams = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
curves = {}
for name, table in tables.items():
    rows = [estimates(lambda_credit(table, lam), later_scores) for lam in lams]
    bias = [float((row.mean(0) - later_truth).norm() / later_truth.norm()) for row in rows]
    curves[name] = bias, [noise_of(row, later_truth) for row in rows]
    for label, numbers in (
        (f"{name}, lambda", lams),
        ("  bias", bias),
        ("  noise of one estimate", curves[name][1]),
    ):
        print(f"{label:<34}" + " ".join(f"{value:5.2f}" for value in numbers))
error = (
    noise_of(
        estimates(lambda_credit(tables["its own values"], 1.0), later_scores), later_truth
    )
    / len(later[0]) ** 0.5
)
print(f"standard error of a bias: {error:.3f}")
largest = max(
    float((generalised_gains(table[None], lam)[0] - lambda_credit(table, lam)).abs().max())
    for table in tables.values()
    for lam in lams
)
print(f"largest difference from the library: {largest:.0e}")
print(
    "lambda = 1 is the reward to go:",
    torch.allclose(lambda_credit(values, 1.0), reward_to_go(values[None])[0]),
)

# %% [markdown] tags=["expected"]
# its own values, lambda             0.00  0.25  0.50  0.75  0.90  1.00
#   bias                             0.01  0.01  0.01  0.01  0.01  0.01
#   noise of one estimate            2.94  2.94  2.97  3.05  3.14  3.25
# values of the calm policy, lambda  0.00  0.25  0.50  0.75  0.90  1.00
#   bias                             0.31  0.29  0.26  0.19  0.11  0.02
#   noise of one estimate            2.93  2.92  2.93  2.97  3.02  3.10
# standard error of a bias: 0.010
# largest difference from the library: 0..1e-9
# lambda = 1 is the reward to go: True

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.0, height=3.0)
for (name, (bias, noise)), shade in zip(curves.items(), (DATA, ACCENT), strict=True):
    axes[0].plot(lams, bias, "o-", color=shade, markersize=4, label=name)
    axes[1].plot(lams, noise, "o-", color=shade, markersize=4)
axes[0].set(
    xlabel="λ",
    ylabel="bias / length of the gradient",
    title="Wrong values: less bias with larger λ",
)
axes[0].legend(frameon=False, fontsize=9)
axes[1].set(
    xlabel="λ",
    ylabel="noise / length of the gradient",
    title="The price in noise",
    ylim=(2.5, 3.5),
)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# With the policy's own values no bias exceeds the standard error of 0.01, and the smallest $\lambda$ has the least noise. With outdated values the gain is wrong by 31% of the gradient's length, and the reward to go has no bias beyond two standard errors.
#
# The cost of $\lambda = 1$ is here only a tenth more noise. So the reward to go is the better choice unless the batch is tiny, because noise averages out and bias does not. This result holds for our chain. In games with a thousand moves, later decisions add much noise, so $\lambda$ between 0.9 and 0.99 is common there. The lesson What is a step worth? estimates the best mixture for each decision from data.
#
# ## The number of decisions
#
# How does the noise grow with $D$? Let us first neglect that the credit of a decision depends on the noise of this decision. Then the variance of the estimate is a sum over decisions,
#
# $$\sum_k \mathbb E\lvert\psi_k\rvert^2 \cdot \operatorname{var}(A_k).$$
#
# Gains of different decisions are uncorrelated, because each has mean 0 given all earlier states. So the variance of a credit is the sum of the variances of the parts that it contains: $\operatorname{var}(V^*_0)$, and $\operatorname{var}(A^*_j)$ for each $j$.
#
# ### Exercise 7 · the noise of three credits
#
# *Difficulty: harder · kind: formula · importance: useful · time: 10 minutes*
#
# `sizes` `[decision]` has $\mathbb E\lvert\psi_k\rvert^2$; `shares` `[1 + decision]` has $\operatorname{var}(V^*_0)$ and then $\operatorname{var}(A^*_k)$ of every decision. Return this sum for uniform credit $R - J$, the reward to go $R - V^*_k$, and the gain $A^*_k$. What are the three numbers for $D$ decisions of equal size 1 and equal share $1/D$, with $\operatorname{var}(V^*_0) = 0$?


# %% tags=["exercise"]
def noise_parts(sizes, shares):
    """The variance of the estimate with uniform credit, reward to go, and gain."""
    return ..., ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** Draw a table like the figure above, with row $k$ and a column for $V^*_0$ and for each gain. Mark the cells that each credit contains in row $k$. `flip(0).cumsum(0).flip(0)` sums from an entry to the end.


# %% tags=["solution"]
def noise_parts(sizes, shares):
    """The variance of the estimate with uniform credit, reward to go, and gain."""
    own = shares[1:]
    rest = own.flip(0).cumsum(0).flip(0)
    return sizes.sum() * shares.sum(), (sizes * rest).sum(), (sizes * own).sum()


# %%
lesson.check_noise(noise_parts)

# %% [markdown] tags=["explanation"]
# **Why.** Each credit is the sum over its part of the row. For equal decisions the three numbers are $D$, $(D+1)/2$ and $1$. So the reward to go removes nearly half of the variance, and exact credit leaves one part in $D$. The more decisions there are, the more exact credit can reduce the noise.

# %%
COUNTS = (3, 5, 10, 20, 40)
measured, predicted, floors = [], [], []
print("decisions | measured variance / |gradient|^2      | predicted             | floor")
print("          | uniform  to go  gain  uniform / gain | uniform  to go  gain  |")
for steps in COUNTS:
    other = Chain(steps)
    path = other.roll(20_000, seed=6)
    table, its_scores, its_truth = other.values(path), scores_of(other, path), other.gradient()
    final = table[:, -1:]
    credits = (
        (final - final.mean()).expand(-1, other.decisions),
        final - table[:, :-1],
        table.diff(dim=-1),
    )
    measured.append(
        [noise_of(estimates(credit, its_scores), its_truth) ** 2 for credit in credits]
    )
    sizes = its_scores.square().sum(2).mean(0)
    shares = torch.cat([table[:, :1].var(0), table.diff(dim=-1).square().mean(0)])
    predicted.append(
        [float(part / its_truth.square().sum()) for part in noise_parts(sizes, shares)]
    )
    row = " ".join(f"{value:6.1f}" for value in measured[-1])
    guess = " ".join(f"{value:6.1f}" for value in predicted[-1])
    floors.append(
        float(other.expected_terms(path).sum(1).var(0).sum() / its_truth.square().sum())
    )
    print(
        f"{other.decisions:9d} | {row}  {measured[-1][0] / measured[-1][2]:14.1f} | {guess}  |"
        f" {floors[-1]:5.1f}"
    )
sizes = scores.square().sum(2).mean(0)
shares = gains.square().mean(0)
print("size of the score, decisions 0 to 8: " + " ".join(f"{value:.2f}" for value in sizes))
print(
    "share of the gain, decisions 0 to 8: "
    + " ".join(f"{value:.0%}" for value in shares / rewards.var())
)

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.2, height=3.2)
decisions = [steps - 1 for steps in COUNTS]
for column, (name, shade) in enumerate(
    (
        ("uniform", COLOURS["flow-grpo"]),
        ("reward to go", COLOURS["reward-to-go"]),
        ("gain", COLOURS["stepwise-flow-grpo"]),
    )
):
    axes[0].plot(
        decisions,
        [row[column] for row in measured],
        "o-",
        color=shade,
        markersize=4,
        label=name,
    )
    axes[0].plot(decisions, [row[column] for row in predicted], ":", color=shade)
axes[0].set(
    xscale="log",
    yscale="log",
    xlabel="decisions D",
    ylabel="variance / |gradient|²",
    ylim=(0.2, 2000),
)
axes[0].plot([], [], ":", color=INK, label="predicted")
axes[0].plot(decisions, floors, "--", color=INK, linewidth=1, label="floor")
axes[0].set_title("Uniform credit: more decisions, more noise")
axes[0].set_xticks(decisions, [str(count) for count in decisions])
axes[0].minorticks_off()
axes[0].legend(frameon=False, fontsize=9)
axes[1].plot(
    range(9), sizes / sizes.sum(), "o-", color=ACCENT, markersize=4, label="size of the score"
)
axes[1].plot(
    range(9), shares / shares.sum(), "o-", color=INK, markersize=4, label="share of the gain"
)
axes[1].set(
    xlabel="decision k (10 steps)",
    ylabel="fraction of the sum",
    title="Late scores are large, late gains small",
)
axes[1].legend(frameon=False, fontsize=9)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# Consider uniform credit first. Its variance grows with $D$, from 4 to 47 squared lengths of the gradient, and the simple sum predicts it well. The right-hand panel shows the reason. The scores of late decisions are large, because their $\mathrm{std}_k$ is small, but their gains are small, because the sample is nearly finished. Uniform credit multiplies these large scores by a reward that was determined by earlier decisions.
#
# With the reward to go and with gains, the variance does not grow much. However, the variance with gains does not fall with $D$ either, although the sum predicts this. The sum neglects that a gain depends on the noise of its own decision, and this dependence is the signal. The expected term $\mathbb E[\psi_k A^*_k\mid z_k]$ varies with the state: a trajectory on the far side of the ring has another gradient than one near the target. The column *floor* is the variance of the sum of these expectations along trajectories (`Chain.expected_terms`). Only more trajectories reduce it, not a better credit. Floor and predicted noise together explain at least 85% of the variance that is measured for gains.
#
# So the ratio of uniform to exact credit rises from 1.3 at two decisions to 15.5 at 39. This ratio limits the benefit of credit per step, and the reward to go achieves most of it. The condition is exact values, or a good estimate as in exercise 3.
#
# ## Old samples
#
# So far every policy has made its own samples. In practice the samples of one rollout are used for several updates. What can we conclude about a new policy $\pi'$ from samples of the old one?
#
# **The improvement is a sum of advantages.** Under the *new* policy, $\sum_k A^*_k = R - V^*_0(z_0)$ with the values $V^*$ of the *old* one. Its mean under the new policy is $J(\pi') - J(\pi)$, since both policies begin with the same noise. So
#
# $$J(\pi') - J(\pi) = \mathbb E_{\pi'}\Big[\sum_k A^*_k\Big]$$
#
# (Kakade & Langford 2002). The samples come from $\pi$, so this mean under $\pi'$ needs importance weights (the lesson on GRPO), made of the ratios $\rho_k = \pi'(z_{k+1}\mid z_k)/\pi(z_{k+1}\mid z_k)$.
#
# The loss of PPO and GRPO takes one ratio for each decision: its *surrogate* is $L(\pi') = \mathbb E_\pi[\sum_k\rho_k A^*_k]$. The ratio $\rho_k$ corrects the probability of decision $k$. It does not correct the probability of the state $z_k$ from which the decision starts, although the new policy visits other states than the old one.
#
# ### Exercise 8 · two estimates of an improvement
#
# *Difficulty: medium · kind: formula · importance: essential · time: 8 minutes*
#
# `log_ratios` $\log\rho_k$ and `advantages` $A^*_k$ are `[sample, decision]`. Return two numbers, means over samples of the sum over decisions: the surrogate, and an estimate whose mean is exactly $J(\pi') - J(\pi)$. Weigh each $A^*_k$ with as few ratios as possible. Which of the two numbers has the larger noise?


# %% tags=["exercise"]
def improvement(log_ratios, advantages):
    """The surrogate, and the estimate with the weight of the path up to each decision."""
    return ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** $A^*_k$ is known once $z_{k+1}$ is. Which draws decide how likely the path up to there is? The logarithm of a product is a sum of logarithms; `cumsum(dim=1)` has the sums up to every decision.


# %% tags=["solution"]
def improvement(log_ratios, advantages):
    """The surrogate, and the estimate with the weight of the path up to each decision."""
    step, path = log_ratios.exp(), log_ratios.cumsum(dim=1).exp()
    return (step * advantages).sum(dim=1).mean(), (path * advantages).sum(dim=1).mean()


# %%
lesson.check_improvement(improvement)

# %% [markdown] tags=["explanation"]
# **Why.** The probability of the path up to $z_{k+1}$ changes by the factor $\rho_0\rho_1\cdots\rho_k$, so
#
# $$J(\pi') - J(\pi) = \mathbb E_{\pi}\Big[\sum_k \rho_0\rho_1\cdots\rho_k\,A^*_k\Big].$$
#
# Later ratios have mean 1 given $z_{k+1}$ and may be left out, which is causality again. A product of nine ratios varies far more than one ratio: its logarithm is a sum of nine terms, and the exponential turns a spread into a factor. The surrogate has little noise, but weighs the states of the old policy. At $\pi' = \pi$ all ratios are 1, and both estimates have the policy gradient of the theorem.

# %% [markdown]
# We know $J$ exactly for every wind, so let us see how far the surrogate can be trusted. The old policy is calm; the new ones have winds of increasing strength towards the target.


# %%
def log_ratios_to(wind):
    """log pi'(z_{k+1} | z_k) - log pi(z_{k+1} | z_k) of the calm policy's samples [sample,
    decision].
    """
    columns = []
    for k in range(chain.decisions):
        new, old = (
            (nodes[k + 1] - chain.mean(nodes[k], k, w)).square().sum(1) for w in (wind, CALM)
        )
        columns.append((old - new) / (2 * chain.stds[k] ** 2))
    return torch.stack(columns, 1)


def clipped(log_ratios, advantages, clip_range=0.2):
    """PPO's surrogate, per trajectory."""
    ratios = log_ratios.exp()
    return torch.minimum(
        ratios * advantages, ratios.clamp(1 - clip_range, 1 + clip_range) * advantages
    ).sum(1)


tried = torch.arange(0, 3.21, 0.2, dtype=torch.float64)
found = {"surrogate": [], "whole path": [], "clipped": [], "error": [], "effective": []}
for strength in tried:
    logs = log_ratios_to(strength * TOWARDS)
    surrogate, whole = improvement(logs, gains)
    found["surrogate"].append(float(surrogate))
    found["whole path"].append(float(whole))
    found["error"].append(
        float((logs.cumsum(1).exp() * gains).sum(1).std() / len(logs) ** 0.5)
    )
    found["clipped"].append(float(clipped(logs, gains).mean()))
    weights = logs.sum(1).exp()
    found["effective"].append(float(weights.mean() ** 2 / weights.square().mean()))
exact = heights - heights[0]
print(
    "strength   exact  surrogate  whole path          clipped  effective share of the samples"
)
for place in (1, 2, 3, 4, 5, 7, 10, 15):
    strength = float(tried[place])
    print(
        f"{strength:8.1f}  {float(exact[2 * place]):6.3f}  {found['surrogate'][place]:9.3f} "
        f" {found['whole path'][place]:6.3f} ± {found['error'][place]:.3f} "
        f" {found['clipped'][place]:11.3f}  {found['effective'][place]:10.2%}"
    )

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.3)
low, high = (
    torch.tensor(found["whole path"]) + sign * 2 * torch.tensor(found["error"])
    for sign in (-1, 1)
)
axes[0].fill_between(tried, low, high, color=OTHERS[0], alpha=0.2)
axes[0].plot(
    tried, found["whole path"], color=OTHERS[0], label="whole path, ± 2 standard errors"
)
axes[0].plot(strengths, exact, color=INK, linewidth=2, label="exact")
axes[0].plot(
    tried, found["surrogate"], color=ACCENT, label="surrogate: one ratio per decision"
)
axes[0].plot(tried, found["clipped"], color=DATA, label="clipped surrogate, c = 0.2")
axes[0].set(
    xlabel="strength of the new wind", ylabel="improvement of J over calm", ylim=(-0.05, 0.6)
)
axes[0].set_title("Far away, the surrogate is too high")
axes[0].legend(frameon=False, fontsize=8, loc="upper left")
axes[1].semilogy(tried, found["effective"], "o-", color=OTHERS[0], markersize=4)
axes[1].set(
    xlabel="strength of the new wind",
    ylabel="effective share of the samples",
    title="Whole paths: few samples dominate",
)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# - Up to a strength of 0.4 surrogate and whole path agree with the exact curve to about 6%. The surrogate has the right value and the right slope at the old policy, and its error is of second order in the strength.
# - Further out the **surrogate** keeps rising. It averages over the old states, in which the same wind always helps, and so it misses that the new policy overshoots. The printed exact $J$ is lower at a strength of 3 than at 2.
# - The **whole path** agrees with the exact values until its noise becomes large. The *effective share* of the samples is $\bar u^2/\overline{u^2}$, in which $u$ are the weights of the paths. It is the number of equally weighted samples with the same precision, as a fraction of all samples. At a strength of 2 it is 0.14%: a few of the 40,000 trajectories determine the average, and even the standard error is no longer reliable.
# - The **clip** removes the incentive to go further: a decision whose ratio has left $[1-c, 1+c]$ in the direction of its advantage contributes no gradient. The clipped curve stops rising at a strength between 0.8 and 1, where the surrogate still agrees to about 6%. Its height has no meaning; what matters is that no update can increase it beyond this strength.
#
# So there are two reasons for the clip. The weights of whole paths are right, but soon too noisy. One ratio per decision has little noise, but is wrong far from the old policy. Close to the old policy both are accurate. There is also a bound: the error of the surrogate is at most a constant times the largest KL divergence between the policies (Schulman et al. 2015, TRPO, theorem 1).
#
# ## A credit that chooses
#
# The gain and the reward to go have the same mean. May a rule choose between them, decision by decision? TP-GRPO (the lesson of this name) does: at *turning points* it credits $R - V_k$, elsewhere the gain. Write $F_k = R - V^*_{k+1}$ for the *luck* that follows decision $k$. Since $R - V^*_k = A^*_k + F_k$, the credit of such a rule is
#
# $$A_k = A^*_k + \mathbb 1[\text{decision } k \text{ is marked}]\;F_k .$$
#
# The second rule of this lesson removes the last term if its mean is 0 for every $z_{k+1}$. $F_k$ has this property. Does it also hold for $F_k$ at the marked decisions only?
#
# ### Exercise 9 · a credit that chooses
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 10 minutes*
#
# Take exact values and a chain in one dimension, in which the reward rises with the state. Predict $\mathbb E[\psi_k A_k]$ for each way to mark decision $k$, in comparison with the true $\mathbb E[\psi_k A^*_k] > 0$. Answer `"equal"`, `"larger"` or `"smaller"`.
#
# | | decision $k$ is marked |
# |---|---|
# | A | always |
# | B | if a coin shows heads |
# | C | if the decision before lost value, $A^*_{k-1} < 0$ |
# | D | if it gained value itself, $A^*_k > 0$ |
# | E | if what follows has the sign of its gain, $A^*_k F_k > 0$ (TP-GRPO's rule for $k = 0$) |
# | F | if what follows has the opposite sign, $A^*_k F_k < 0$ |
# | G | as in E, but $k$ is the last decision |

# %% tags=["exercise"]
choosing = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ..., "F": ..., "G": ...}

# %% [markdown] tags=["hint"]
# **Hint.** Suppose that $z_{k+1}$ is known, so that the sign of $A^*_k$ is fixed. Which values of $F_k$ does the rule keep, and what is the mean of those?

# %% tags=["solution"]
choosing = {
    "A": "equal",
    "B": "equal",
    "C": "equal",
    "D": "equal",
    "E": "larger",
    "F": "smaller",
    "G": "equal",
}

# %%
lesson.check_choosing(choosing)

# %% [markdown] tags=["explanation"]
# **Why.** In A to D the mark is known once $z_{k+1}$ is known, or independent of the chain, so $F_k$ keeps its mean of 0. In E the rule looks at $F_k$ itself. Given $z_{k+1}$ it keeps only the luck with the sign of the gain. Because $\mathbb E[F_k \mid z_{k+1}] = 0$, the positive and the negative part of $F_k$ both have half of its mean absolute value, so the added credit has the mean
#
# $$\tfrac12 \operatorname{sign}(A^*_k)\;\mathbb E\big[\lvert F_k\rvert \mid z_{k+1}\big].$$
#
# It is a bonus in the direction of the gain, however small the gain is. F has the same bonus with the opposite sign. At the last decision $V^*_{k+1} = R$, so there is no luck to add.

# %% [markdown]
# The next cell measures the means in such a chain: five decisions with standard deviations of 1, 0.8, 0.6, 0.4 and 0.3, and $R = 1/(1 + e^{-3x})$ of the last state. The rule of TP-GRPO (with its condition of consistency) also asks for a change of sign at $k \ge 1$: the decision before must have gone against $R - V^*_0$, and decision $k$ along it.

# %%
line_values, line_scores = walk(1_000_000, seed=8)
table = line_values[:, None]  # every sample is a group of one
marked = turning_points(table)
line_credits = {
    "R": line_values[:, -1:].expand(-1, 5),
    "R - V_k": reward_to_go(table)[:, 0],
    "gain": line_values.diff(dim=-1),
    "TP-GRPO": process_rewards(table, marked)[:, 0],
}
print("decision                        0     1     2     3     4")
for name, credit in line_credits.items():
    print(
        f"mean of psi_k A_k, {name:<8} "
        + " ".join(f"{mean:5.3f}" for mean in (line_scores * credit).mean(0))
    )
errors = (
    torch.stack([(line_scores * credit).std(0) for credit in line_credits.values()])
    / len(table) ** 0.5
)
print(f"largest standard error {float(errors.max()):.3f}")
print(
    "fraction of marks, TP-GRPO   "
    + " ".join(f"{share:5.2f}" for share in marked[:, 0].double().mean(0))
)
bonus = (line_credits["TP-GRPO"] - line_credits["gain"])[:, 0] * line_credits["gain"][
    :, 0
].sign()
luck = (line_values[:, -1] - line_values[:, 1]).abs().mean()
print(
    f"decision 0: added credit in the direction of the gain {float(bonus.mean()):.3f}, half of"
    f" the mean |F| {float(luck) / 2:.3f}"
)
for name in ("gain", "TP-GRPO"):
    credit = line_credits[name]
    print(
        f"divided by the std, {name:<8} "
        + " ".join(f"{mean:5.2f}" for mean in (line_scores * credit).mean(0) / credit.std(0))
    )

# %% [markdown]
# The rows of $R$, $R - V_k$ and the gain agree within the standard errors. With TP-GRPO's rule the mean of decision 0 is a third too large, and the excess falls to 0 at the last decision. At decision 0 the added credit is half of the mean luck, as derived. With exact values a rule that chooses in this way is therefore biased: the sign of each decision's mean is right, but its weight relative to other decisions (and states, and prompts) is not.
#
# TP-GRPO then divides each decision's credit by its standard deviation over the group. The marks add luck to this deviation as well. After the division the mean of decision 0 is 13% *smaller* than that of the gain, not a third larger.
#
# The chain shows means only. It does not show which credit needs fewer samples: in one dimension most of the noise of $\psi_k A_k$ comes from the signal itself, and in an image with thousands of elements it does not.
#
# ## The same with the weights of a network
#
# The proof does not use any property of the wind. The next cell repeats the comparison with the policy of the 2-D world, a network with 4,802 weights, and all of its prompts, by functions of the library: `RawCredit` is a credit without normalisation, `Exact` the values by dynamic programming, and `policy_gradients` the estimate of each of 24 batches. The true gradient comes from another method (derivatives through the sampler with fixed noise).

# %%
trainer = start(window="0:9", initial_noise="independent")
setting = Setting(
    trainer.policy,
    trainer.draw_sampler(),
    trainer.schedule,
    trainer.reward,
    trainer.prompts.prompts,
)
# the prompt of this lesson
ours = replace(setting, prompts=[Prompt("towards 45 degrees", {"angle": 45})])
sampled = ours.rollout(Groups(1, 200), torch.Generator().manual_seed(0), NoProbe())
library = exact_advantages(ours, sampled, grid=chain.grid)[0].state_values[0]
drawn = sampled.trajectories.nodes.flatten(2).double().transpose(0, 1)
print(
    "largest difference of our values from the library's:"
    f" {float((chain.values(drawn) - library).abs().max()):.0e}"
)
network_truth = pathwise_gradients(setting, batches=32, repeats=256, decisions_only=True)
cheap = Exact(points=29, reach=4.0)
RULES = {
    "uniform: R - others' mean": RawCredit(),
    "reward to go: R - V": RawCredit(lam=1.0, probe=cheap, baseline=False),
    "exact: A*": RawCredit(lam=0.0, probe=cheap, baseline=False),
}
print(
    f"{sum(weights.numel() for weights in setting.parameters):,} weights,"
    f" {len(setting.prompts)} prompts with 12 trajectories each"
)
for name, rule in progress(RULES.items(), "rule"):
    agreement = alignment(
        policy_gradients(setting, rule, batches=24, members=12), network_truth
    )
    low, high = agreement.scale_interval
    print(
        f"{name:<26} scale {agreement.scale:.2f} [{low:.2f}, {high:.2f}]   noise of one batch"
        f" {1 / agreement.signal_to_noise:.1f}"
    )
windows = {
    "window 0:9": range(9),
    "window 2:7": range(2, 7),
    "steps 0, 2, 4, 6, 8": range(0, 9, 2),
}
for name, steps in progress(windows.items(), "window"):
    one = replace(setting, sampler=Windowed(FlowSDE(0.7), steps))
    drawn_only, whole = (
        pathwise_gradients(one, batches=8, repeats=256, decisions_only=part).mean(0)
        for part in (True, False)
    )
    cosine = torch.cosine_similarity(drawn_only, whole, dim=0)
    print(
        f"decisions alone, {name}: cosine with the gradient of all steps"
        f" {cosine:.2f}, length {drawn_only.norm() / whole.norm():.2f}"
    )

# %% [markdown] tags=["expected"]
# largest difference of our values from the library's: 0..1e-5
# 4,802 weights, 18 prompts with 12 trajectories each
# uniform: R - others' mean  scale 0.96 [0.63, 1.29]   noise of one batch 3.1
# reward to go: R - V        scale 1.00 [0.90, 1.11]   noise of one batch 0.9
# exact: A*                  scale 0.98 [0.89, 1.07]   noise of one batch 0.8
# decisions alone, window 0:9: cosine with the gradient of all steps 0.99..1.00, length 0.93..0.98
# decisions alone, window 2:7: cosine with the gradient of all steps 0.97..1.00, length 0.62..0.72
# decisions alone, steps 0, 2, 4, 6, 8: cosine with the gradient of all steps 0.97..1.00, length 0.50..0.62

# %% [markdown]
# **Try it.** For two weights, a constant that is added to the velocity, a gradient is a point in the plane. More groups in a batch shrink the cloud of every rule, but they do not change the share of each step. Compare Flow-GRPO with the gains and the turning points of the next lessons, as published and not divided by a standard deviation.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("cloud")

# %% [markdown]
# All intervals contain the scale 1, so each credit gives the true gradient on average. However, the noise of one batch of 216 trajectories is about four times as large with uniform credit. So it needs about fifteen batches for the precision of one batch with exact credit.
#
# The last three rows measure what the ODE steps contribute to the gradient, the terms that the lesson on GRPO dropped. If only the last step follows the ODE, they are 4% of its length. In the window `2:7`, they are a third, in nearly the same direction. In the last row every second step is random, so ODE steps lie *between* decisions. The log-probability of a decision is differentiated at a fixed state, although the ODE step before it has moved this state with the same weights. Here this costs almost half of the length, and hardly any of the direction.
#
# The theorem does *not* cover four parts of the methods of the next lessons:
#
# - **Normalisation.** A division by a standard deviation changes the scale of a group, and so the weights of the prompts. With the member's own reward in the group's mean, the gradient is shorter by the factor $1 - 1/G$ (term H). A normalisation over members and decisions contains later decisions, like the second bug of exercise 4; its effect is small only because a group has many members.
# - **Wrong values.** The gains of Stepwise-Flow-GRPO are differences of estimates by a few ODE substeps (five in the paper). They are biased as far as the error of an estimate depends on the decision. $R - V_k$ is unbiased for every $V_k$, if it is always used or its use does not depend on later draws. The lesson Test your own rule compares such credit with the true gradient.
# - **A choice by later draws.** TP-GRPO uses $R - V_k$ where it agrees in sign with the gain, so it is biased even with exact values (exercise 9).
# - **Old samples.** The theorem holds at the policy that made the samples. The clip keeps later updates near it.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Which of these can be subtracted from the reward in the credit of decision $k$ without changing the expected gradient? **a** the exact value after the decision, $V^*_{k+1}(z_{k+1})$, **b** the reward of the Tweedie estimate at $z_k$, **c** the mean credit of the trajectory's own decisions.
# 2. The value estimates $V_k$ are wrong, and their error depends on the state. Which credit still has the right expected gradient? **a** the gain $V_{k+1} - V_k$, **b** the reward to go $R - V_k$, **c** neither.
# 3. With exact values, uniform credit and gains have the same expected gradient. Why are gains better? **a** less noise, **b** less bias, **c** fewer network evaluations.
# 4. The variance of the estimate with uniform credit is nine times that with gains. For the same precision it needs **a** three times, **b** nine times, **c** 81 times as many trajectories.
# 5. Why does the surrogate overestimate the improvement far from the old policy? **a** Its noise is too large. **b** The clip raises it. **c** It corrects the decisions, but not the states from which they start.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** Question 1: which of them is known before decision $k$ is made? Question 2: exercise 6. Question 4: how does the variance of a mean depend on the number of samples? Question 5: which probability does $\rho_k$ correct?

# %% tags=["solution"]
quiz = {1: "b", 2: "b", 3: "a", 4: "b", 5: "c"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: the Tweedie estimate is a function of $z_k$. 2: $V_k$ is then a baseline. 3: the terms that are missing in gains have mean 0, and only add noise. 4: the variance of a mean of $n$ estimates is proportional to $1/n$. 5: the ratio $\rho_k$ belongs to the transition from $z_k$; the new policy visits other $z_k$.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $z_j$ | state at node $j$ ($z_0$ is noise) | `Trajectories.nodes` |
# | $D$, $k$, $\mathrm{std}_k$ | number of decisions, index of a decision, its standard deviation | `Decisions`, `samplers.transition_stds` |
# | $\psi_k = \nabla_\theta\log\pi_\theta(z_{k+1}\mid z_k)$ | score of a decision | `losses.PolicyGradientLoss` |
# | $\mathbb E[\psi_k f(z_0, \dots, z_k)] = 0$ | causality; any baseline $b(z_k)$ leaves the mean unchanged | `flowrl.bench.gradients.RawCredit` |
# | $V^*_k$, $Q_k = V^*_{k+1}(z_{k+1})$ | value before and after the decision | the probe `flowrl.bench.exact.Exact` |
# | $A^*_k = V^*_{k+1}(z_{k+1}) - V^*_k(z_k)$ | gain; same expected gradient as $R$ | `credit.gains` |
# | $R - V_k(z_k)$ | reward to go; unbiased for every $V_k$, unless later draws decide whether it is used | `credit.reward_to_go` |
# | $A_k^\lambda$ | generalised advantage: gain at 0, reward to go at 1 | `credit.generalised_gains` |
# | $\rho_k$; $\mathbb E_\pi[\sum_k\rho_k A^*_k]$ | ratio of a decision; surrogate, right near the old policy | `losses.ClippedLoss` |
#
# ## Symbols
#
# {symbols: $z_j$; decision $k$; $D$; $\mu$, std; $R$; $V_k$; $V^*_k$; $A^*_k$; $\rho$; $c$}
#
# ## Further reading
#
# - Sutton, McAllester, Singh & Mansour 1999, *Policy gradient methods for reinforcement learning with function approximation* (NeurIPS 12): the theorem with $Q$.
# - Greensmith, Bartlett & Baxter 2004, *Variance reduction techniques for gradient estimates in reinforcement learning* (JMLR 5): the best baseline.
# - Schulman et al. 2015, *High-dimensional continuous control using generalised advantage estimation* (arXiv 1506.02438): $\lambda$, bias and variance.
# - Kakade & Langford 2002, *Approximately optimal approximate reinforcement learning* (ICML): the improvement as a sum of advantages.
# - Schulman et al. 2015, *Trust region policy optimization* (arXiv 1502.05477): the bound on the surrogate's error.
# - Achiam 2018, *Spinning Up in Deep RL*, part 3: the derivation of the policy gradient with causality, for games.
#
# **Next:** [5 · Flow-GRPO](05_flow_grpo.ipynb) fine-tunes an image model with uniform credit.

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
# # 3 · GRPO on a flow
#
# **After this lesson you can** treat denoising as a decision process, derive the policy gradient and its baseline, write the log-probability, the group's advantage, the clipped loss and the KL penalty, and train a flow with them: first with plain
# PyTorch in under 80 lines, then with the library in ten.
#
# **Time** 125 minutes, of which the computer needs less than one. **You need** the lesson on ODE and SDE.
#
# The data are the ring again, now with *prompts*: "towards 45 degrees" describes points at that angle, and the reward is $\exp(-d^2/2)$ for a point at distance $d$ from the target. The base model samples from the ring and ignores the prompt.

# %% tags=["hide-input"]
import math
from copy import deepcopy
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import nn

from flowrl import Trainer, Updates, world
from flowrl.flow import GaussianMixture
from flowrl.worlds import PolicyOptions
from flowrl_course import lesson_03 as lesson
from flowrl_course.figures import ACCENT, COLOURS, DATA, NOISE, clean, panels, plane
from flowrl_course.progress import progress

ring = GaussianMixture.ring()
torch.set_num_threads(1)  # the networks are tiny


def opening():
    """The reward of one prompt, and what the untrained model does."""
    figure, axes = panels(2, width=3.4, height=3.4)
    target = 2 * torch.tensor([math.cos(math.pi / 4), math.sin(math.pi / 4)])
    grid = torch.linspace(-3.4, 3.4, 120)
    x, y = torch.meshgrid(grid, grid, indexing="xy")
    reward = torch.exp(-((x - target[0]) ** 2 + (y - target[1]) ** 2) / 2)
    plane(axes[0], "reward for “towards 45 degrees”")
    axes[0].contourf(x, y, reward, levels=12, cmap="Blues")
    plane(axes[1], "samples before training")
    axes[1].scatter(
        *ring.sample(500, torch.Generator().manual_seed(0)).T, s=4, color=NOISE, alpha=0.6
    )
    axes[1].scatter(*target, s=90, marker="*", color=ACCENT)
    plt.show()


opening()

# %% [markdown]
# ## Denoising as decisions
#
# | reinforcement learning | here |
# |---|---|
# | state | $z_i$, its time $t_i$, and the prompt |
# | action | the next state $z_{i+1}$ |
# | policy | the Gaussian $\pi(z_{i+1} \mid z_i)$ of the lesson on ODE and SDE; its mean depends on the network, its standard deviation does not |
# | episode | $T$ steps from noise to image |
# | reward | one number $R$, for the finished image |
#
# To make an action more likely, the update needs its log-probability. The elements of the next state are independent given $z_i$: each is Gaussian with its mean $\mu$ and with the standard deviation $\mathrm{std}$ of the whole step, $\sigma_t\sqrt\Delta$ in the lesson on ODE and SDE.
#
# A latent has many elements. The log-density of the whole latent is the sum over them; public code uses the **mean**, so that ratios of probabilities do not grow with the resolution (an image latent of SD3.5 has 65,536 elements). The section *Mean or sum?* below explains what this means for the clip range.
#
# ### Exercise 1 · log-probability
#
# *Difficulty: easy · kind: formula · importance: essential · time: 4 minutes*
#
# Write the log-density of the next state, as its mean over elements. `x` and `mean` are `[sample, dim]`, `std` is `[sample]`; return `[sample]`. Include the terms without $\mu$.


# %% tags=["exercise"]
def log_prob(x, mean, std):
    """Log-density per element of the next node."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The density of one element is $\frac{1}{\sqrt{2\pi}\,\mathrm{std}}\exp\big(-\frac{(x-\mu)^2}{2\,\mathrm{std}^2}\big)$. Take the logarithm. Only one of its three terms differs between the elements of a sample.


# %% tags=["solution"]
def log_prob(x, mean, std):
    """Log-density per element of the next node."""
    squares = (x - mean).square().mean(dim=1)
    return -squares / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)


# %%
lesson.check_log_prob(log_prob)

# %% [markdown] tags=["explanation"]
# **Why.** The log-density of an element is
#
# $$\log \pi(x) = -\frac{(x-\mu)^2}{2\,\mathrm{std}^2} - \log\mathrm{std} - \tfrac12\log 2\pi .$$
#
# Only the first term depends on the network; the other terms cancel in every ratio. They stay because `log_prob` should return a log-density. Code that omits them *and* the factor
# $1/(2\,\mathrm{std}^2)$ silently weighs the steps by $2\,\mathrm{std}^2$.

# %% [markdown]
# ## The policy gradient
#
# The goal is a large expected reward, $J(\theta) = \mathbb E[R]$. A program or a server has no gradient of $R$. If the reward is itself a network, its gradient can be propagated through the sampler, as in ReFL (arXiv 2304.05977), DRaFT (2309.17400) and AlignProp (2310.03739). The policy gradient works for every reward, because it differentiates the policy only. Write $q(\text{path})$ for the probability density of a trajectory,
# $q(z_0) \prod_i \pi(z_{i+1} \mid z_i)$, in which $z_0$ is node 0, the noise. Then
#
# $$\nabla J = \nabla\!\int\! R\, q = \int\! R\, \nabla q = \int\! R\, q\, \nabla\log q = \mathbb E\Big[R \sum_i \nabla\log\pi(z_{i+1} \mid z_i)\Big].$$
#
# The third equality is the chain rule, $\nabla\log q = \nabla q / q$. In the fourth, $q(z_0)$ drops out, because it does not depend on the weights. The result needs samples, their rewards, and the gradients of log-probabilities (Williams 1992, REINFORCE).
#
# *For later:* the derivation assumes that $R$ depends on the weights only through the drawn path. ODE steps use the network as well, but draw nothing. If they follow the last draw, the exact gradient has one more term, $\mathbb E[\nabla_\theta R]$ at fixed draws; ODE steps before the first draw or between draws add others, because they move the state of the next draw. GRPO drops all these terms, because they contain the gradient of the reward.
# In this lesson they belong to one step, the last; with the window `2:7` of the lesson on Flow-GRPO, to five steps of ten. (The lesson Why a step may be credited measures them.) Training then improves the decisions, and changes the other steps only because all steps share the weights.
#
# Any number $b$ that does not depend on the action may be subtracted from $R$, because
#
# $$\mathbb E\big[b\,\nabla\log\pi\big] = b \int \pi\,\nabla\log\pi = b\,\nabla\!\int\!\pi = b\,\nabla 1 = 0.$$
#
# Such a *baseline* is free: the expected gradient is unchanged for every $b$. The noise of the estimate is not. If all rewards are near 5, every sampled action is made more likely, with a weight of about 5. The small differences between rewards then contribute little to the sum.
# With $b$ near the mean reward, good actions become more likely and bad actions less likely.
#
# ### Exercise 2 · the policy gradient
#
# *Difficulty: medium · kind: formula · importance: essential · time: 6 minutes*
#
# Take one step and one dimension: actions `x` `[sample]` from $\mathcal N(\mu, \mathrm{std}^2)$ (`mean` and `std` are numbers) with `rewards` `[sample]`. Return every sample's estimate of $\mathrm dJ/\mathrm d\mu$ with the baseline `baseline` (a number or `[sample]`), `[sample]`.


# %% tags=["exercise"]
def gradient_samples(x, mean, std, rewards, baseline):
    """(R - b) times the derivative of log pi(x) with respect to the mean, for every sample."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Differentiate $-(x-\mu)^2/(2\,\mathrm{std}^2)$ with respect to $\mu$, and multiply by the reward minus the baseline.


# %% tags=["solution"]
def gradient_samples(x, mean, std, rewards, baseline):
    """(R - b) times the derivative of log pi(x) with respect to the mean, for every sample."""
    return (rewards - baseline) * (x - mean) / std**2


# %%
lesson.check_gradient_samples(gradient_samples)

# %% [markdown] tags=["explanation"]
# **Why.** The derivative of $-(x-\mu)^2/(2\,\mathrm{std}^2)$ with respect to $\mu$ is $(x-\mu)/\mathrm{std}^2$; the other terms of $\log\pi$ do not contain $\mu$. The baseline is subtracted from the reward. It must not be subtracted after the product.

# %% [markdown]
# For the reward $e^{-x^2/2}$ the exact gradient is known in closed form. The next cell compares estimates with different baselines, first for this reward, then for the same reward plus 5.

# %%
mu, width, count = 1.0, 0.5, 400_000
x = mu + width * torch.randn(count, generator=torch.Generator().manual_seed(2))
reward = torch.exp(-(x**2) / 2)
truth = -mu / (1 + width**2) ** 1.5 * math.exp(-(mu**2) / (2 * (1 + width**2)))
print(f"exact gradient {truth:.3f}, mean reward {reward.mean():.2f}")
for name, values, b in (
    ("reward, b = 0", reward, 0.0),
    ("reward, b = mean reward", reward, float(reward.mean())),
    ("reward + 5, b = 0", reward + 5, 0.0),
    ("reward + 5, b = mean reward", reward + 5, float(reward.mean()) + 5),
):
    estimate = gradient_samples(x, mu, width, values, b)
    print(f"{name:<28} mean {estimate.mean():6.3f}, std of one sample {estimate.std():6.2f}")
for size in (2, 4, 12):
    grouped = reward[: count // size * size].view(-1, size)
    means = grouped.mean(dim=1, keepdim=True).expand_as(grouped).flatten()
    estimate = gradient_samples(x[: len(means)], mu, width, grouped.flatten(), means)
    print(
        f"b = mean of a group of {size:2d}       mean {estimate.mean():6.3f}, which is"
        f" {float(estimate.mean()) / truth:.2f} of the exact gradient"
    )

# %% tags=["hide-input"]
figure, axes = panels(width=4.8, height=3.0)
shifts = torch.linspace(-1, 2, 31)
axes.plot(
    shifts,
    [gradient_samples(x, mu, width, reward, float(b)).std() for b in shifts],
    color=DATA,
)
axes.axvline(float(reward.mean()), color=ACCENT, linestyle=":")
axes.text(float(reward.mean()) + 0.05, 2.9, "mean reward", color=ACCENT)
axes.set(
    xlabel="baseline b",
    ylabel="std of one sample's estimate",
    title="Every baseline has the right mean; the noise differs",
)
axes.set_ylim(0, None)
clean(axes)
plt.show()

# %% [markdown]
# **Try it.** The same in the plane. Raise the reward offset, first with the group mean and then without a baseline: the middle of the cloud stays, and its spread grows only without a baseline. Then raise the group size.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("gradient")

# %% [markdown]
# All constant baselines give the exact gradient on average, within the sampling error. An offset of 5 in the reward multiplies the noise by about 9 if $b = 0$. With the mean reward as the baseline the offset has no effect. With the mean of the *own group* the average is $1 - 1/G$ times the exact gradient: the mean contains the sample's own reward, which
# depends on the action. This factor changes the length of the gradient, not its direction.
#
# ## The group as the baseline
#
# GRPO (Shao et al. 2024, arXiv 2402.03300) needs no learned value function. It draws a *group* of $G$ samples for one prompt, uses the mean of the group as the baseline, and divides by the group's standard deviation. The result is the *group advantage* $A_{p,m}$ of member $m$ of prompt $p$.
#
# ### Exercise 3 · repair the group advantage
#
# *Difficulty: easy · kind: debugging · importance: essential · time: 6 minutes*
#
# `rewards` is `[prompt, member]`. A group advantage must have these properties:
#
# - The reward of other prompts has no effect on a group's advantages.
# - A constant added to all rewards of a group has no effect; neither has a positive factor (apart from the last property).
# - The advantages of a group have mean 0, and their mean square is 1.
# - A group of equal rewards gets 0. For this, the public code adds $10^{-4}$ to the standard deviation.
#
# The draft below runs without an error and has three mistakes. Repair it.


# %% tags=["exercise"]
def group_advantage(rewards):
    """How much better than the group, in its standard deviations: [prompt, member]."""
    centred = rewards - rewards.mean(dim=0)
    return centred / rewards.std(dim=1, keepdim=True)


# %% [markdown] tags=["hint"]
# **Hint.** Which axis has the members? With which divisor is the mean square of the advantages exactly 1? `torch.std` divides by $G - 1$ unless you pass `correction=0`. What is 0/0?


# %% tags=["solution"]
def group_advantage(rewards):
    """How much better than the group, in its standard deviations: [prompt, member]."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, correction=0, keepdim=True) + 1e-4)


# %%
lesson.check_group_advantage(group_advantage)

# %% [markdown] tags=["explanation"]
# **Why.** The properties determine the advantage,
#
# $$A_{p,m} = \frac{R_{p,m} - \operatorname{mean}_m R_p}{\operatorname{std}_m R_p + 10^{-4}} ,$$
#
# with the population standard deviation (divide by $G$). The draft compared the same member of different prompts, which does not fail, because `[member]` broadcasts to `[prompt, member]`. The comparison within a prompt removes the difficulty of the prompt. With the $10^{-4}$, a group of equal rewards gets 0 instead of 0/0. The division by the standard deviation has a cost: groups in which
# nearly all rewards are equal count as much as others, so their noise is amplified.

# %% [markdown]
# ## Ratio and clip
#
# To make an action with $A > 0$ more likely and one with $A < 0$ less likely, follow the gradient of $A \log\pi$. Samples are drawn once and used for several updates. After the first update, the current policy is no longer the one that sampled, so each term is
# reweighted by the ratio $\rho = \pi/\pi_\text{old} = \exp(\log\pi - \log\pi_\text{old})$: the loss is $-A\rho$, and at $\rho = 1$ its gradient is $-A\,\nabla\log\pi$. The reweighted loss is accurate only near $\rho = 1$. The clip of PPO (Schulman et al. 2017, arXiv
# 1707.06347) with *clip range* $c$ removes the incentive to go further in the direction of the advantage: once a pair with $A > 0$ has $\rho > 1 + c$, or a pair with $A < 0$ has $\rho < 1 - c$, its loss stays constant. Everywhere else it is $-A\rho$, also for a ratio that has moved far in the *wrong* direction.
#
# <details><summary><b>The importance-sampling identity</b></summary>
#
# Let $f$ be a function of the draw $z$. If the old policy can draw everything that the new one can, then
#
# $$\mathbb E_{\pi}[f] = \int \pi\,f\,\mathrm dz = \int \pi_\text{old}\,\frac{\pi}{\pi_\text{old}}\,f\,\mathrm dz = \mathbb E_{\pi_\text{old}}[\rho\,f].$$
#
# With $f = 1$ the mean of $\rho$ is 1. With $f = A$, the derivative of $\mathbb E_{\pi_\text{old}}[\rho\,A]$ is $\mathbb E_{\pi_\text{old}}[\rho\,A\,\nabla\log\pi]$, since $\nabla\rho = \rho\,\nabla\log\pi$; at $\rho = 1$ this is the policy gradient.
# The identity has two prices. The variance of $\rho f$ grows fast as the policies move apart. And it holds for *one* draw: if several are made in a row, the weight of the last one is the product of all ratios so far. The lesson Why a step may be credited measures both.
#
# </details>
#
# ### Exercise 4 · the clipped loss
#
# *Difficulty: medium · kind: formula · importance: essential · time: 8 minutes*
#
# Write this loss. It is a continuous function of each ratio; return its mean over pairs. The three tensors are `[pair]`: one entry for each (sample, step). Before you write code, sketch the loss of a pair with $A = 1$ and of one with $A = -1$ as a function of $\rho$.


# %% tags=["exercise"]
def clipped_loss(new_log_prob, old_log_prob, advantage, clip_range):
    """PPO's clipped objective as a loss, one number."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Compare your sketch with $-A\rho$ and with $-A\operatorname{clip}(\rho, 1-c, 1+c)$: which of the two is it for small, and which for large ratios? Both signs of $A$ have the same answer. Compute the ratio from the difference of the log-probabilities, and take the mean last.


# %% tags=["solution"]
def clipped_loss(new_log_prob, old_log_prob, advantage, clip_range):
    """PPO's clipped objective as a loss, one number."""
    ratio = (new_log_prob - old_log_prob).exp()
    return torch.maximum(
        -advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range)
    ).mean()


# %%
lesson.check_clipped_loss(clipped_loss)

# %% [markdown] tags=["explanation"]
# **Why.** The loss is
#
# $$L = \operatorname{mean}\ \max\big(-A\rho,\ -A\,\operatorname{clip}(\rho, 1-c, 1+c)\big).$$
#
# For a *loss* the pessimistic choice is the maximum. For a positive advantage, a ratio above $1 + c$ has no gradient, but a ratio below $1 - c$ still has a gradient, which points back towards 1. The minimum does the
# reverse: it stops corrections and does not limit the change of the policy.

# %% [markdown]
# The figure shows your loss for one pair as a function of its ratio, with $c = 0.2$, which is wider than in practice:

# %% tags=["hide-input"]
figure, axes = panels(2, width=3.6, height=2.7)
ratios = torch.linspace(0.5, 1.5, 101)
for cell, sign in zip(axes, (1.0, -1.0), strict=True):
    lost = [
        clipped_loss(rho.log(), torch.tensor(0.0), torch.tensor(sign), 0.2) for rho in ratios
    ]
    cell.axvspan(0.8, 1.2, color=NOISE, alpha=0.08)
    cell.plot(ratios, -sign * ratios, ":", color=NOISE, label="without clip")
    cell.plot(ratios, lost, color=ACCENT, label="with clip")
    title = (
        "A = +1: nothing to gain above 1 + c"
        if sign > 0
        else "A = -1: nothing to gain below 1 - c"
    )
    cell.set(xlabel="ratio $\\rho$", ylabel="loss of the pair")
    cell.set_title(title, fontsize=10)
    cell.legend(frameon=False, fontsize=8)
    clean(cell)
plt.show()

# %% [markdown]
# The flat part of the curve has no gradient: the ratio has moved far enough in the direction of the advantage. In the other direction the loss keeps growing, and its gradient points back.

# %% [markdown]
# ## A penalty on the distance from the base model
#
# A reward rarely measures everything that matters. A penalty on the distance from the base model preserves what the reward does not measure. The distance is the KL divergence of each step, $\mathrm{KL}(\pi \,\|\, \pi_\text{ref}) = \mathbb E_\pi[\log\pi - \log\pi_\text{ref}]$, again as a mean over elements. Both policies have the same standard deviation, since it does not depend on the network.
#
# ### Exercise 5 · KL
#
# *Difficulty: medium · kind: formula · importance: useful · time: 6 minutes*
#
# Find the expectation in closed form. `mean` and `reference_mean` are `[sample, dim]`, `std` is `[sample]`; return `[sample]`. How does the KL change if the step is half as noisy?


# %% tags=["exercise"]
def kl(mean, reference_mean, std):
    """KL per element of two Gaussians [sample, dim] of the same std [sample]: [sample]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** For one element, write $x = \mu + \mathrm{std}\,\varepsilon$ and insert it into the difference of the two log-densities. Which terms cancel, and which have mean 0?


# %% tags=["solution"]
def kl(mean, reference_mean, std):
    """KL per element of two Gaussians [sample, dim] of the same std [sample]: [sample]."""
    return (mean - reference_mean).square().mean(dim=1) / (2 * std**2)


# %%
lesson.check_kl(kl)

# %% [markdown] tags=["explanation"]
# **Why.** With $x = \mu + \mathrm{std}\,\varepsilon$ and $\delta = \mu - \mu_\text{ref}$ the difference of the log-densities is $\big((\mathrm{std}\,\varepsilon + \delta)^2 - (\mathrm{std}\,\varepsilon)^2\big)/(2\,\mathrm{std}^2)$. The mixed term has mean 0. What remains, for a whole latent, is
#
# $$\mathrm{KL}(\pi \,\|\, \pi_\text{ref}) = \frac{\|\mu - \mu_\text{ref}\|^2}{2\,\mathrm{std}^2},$$
#
# and per element the mean of the squares instead of their sum. With half the noise the same change of the mean has four times the KL. $\mathrm{std}$ belongs to the *transition*, $\sigma_t\sqrt\Delta$ for Flow-SDE; one public code base uses $\sigma_t$ without $\sqrt\Delta$, which weighs the steps differently.

# %% [markdown]
# ## The whole loop, without the library
#
# The velocity is the exact velocity of the ring plus the output of a small network, which starts at zero and has the prompt as an input. The next three exercises write the parts of an iteration: roll out, credit, update.

# %% tags=["setup"]
STEPS, PROMPTS, MEMBERS, LEVEL = 10, 16, 12, 0.7
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(5, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
)
nn.init.zeros_(net[-1].weight)
nn.init.zeros_(net[-1].bias)
untrained = deepcopy(net.state_dict())
times = torch.linspace(1, 0, STEPS + 1)


def velocity(x, t, direction):
    """Exact velocity plus the network's correction; t is [sample]."""
    return ring.velocity(x, t) + net(torch.cat([x, t[:, None], direction], dim=1))


def transition(x, i, direction):
    """Mean and std of the policy at step i [sample]; sigma uses times[1] where t = 1."""
    t, s = times[i], times[i + 1]
    v = velocity(x, t, direction)
    variance = LEVEL**2 * t / (1 - torch.where(t == 1, times[1], t))
    pull = (variance * (t - s) / (2 * t))[:, None] * (x + (1 - t[:, None]) * v)
    return x - (t - s)[:, None] * v - pull, (variance * (t - s)).sqrt()


def reward_of(points, direction):
    """exp(-d^2 / 2), d the distance from the target."""
    return torch.exp(-(points - 2 * direction).square().sum(dim=1) / 2)


def directions(count, generator):
    """Random unit vectors."""
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


# %% [markdown]
# ### Exercise 6 · the rollout
#
# *Difficulty: medium · kind: code · importance: essential · time: 10 minutes*
#
# Write the sampler. `direction` is `[sample, 2]`. Node 0 is standard normal noise. The first `random_steps` of the `STEPS` steps draw the next node from the policy, and the others are ODE steps with the policy's velocity. Return all nodes, `[node, sample, 2]`. Take all random numbers from `generator`.
#
# `transition(x, step, direction)` and `velocity(x, t, direction)` expect one step and one time for every sample, as tensors `[sample]`. Training uses the default, `STEPS - 1` random steps; evaluation uses `random_steps=0`.


# %% tags=["exercise"]
def rollout(direction, generator, random_steps=STEPS - 1):
    """Nodes [node, sample, dim]; the steps after the first `random_steps` follow the ODE."""
    nodes = [...]
    return torch.stack(nodes)


# %% [markdown] tags=["hint"]
# **Hint.** `torch.full((len(direction),), i)` is step $i$ for every sample, and `times[step]` its time. A random step is `mean + std[:, None] * noise` with fresh noise. An ODE step from $t$ to $s$ subtracts $(t - s)\,v$.


# %% tags=["solution"]
def rollout(direction, generator, random_steps=STEPS - 1):
    """Nodes [node, sample, dim]; the steps after the first `random_steps` follow the ODE."""
    nodes = [torch.randn(len(direction), 2, generator=generator)]
    for i in range(STEPS):
        x, step = nodes[-1], torch.full((len(direction),), i)
        if i < random_steps:
            mean, std = transition(x, step, direction)
            nodes.append(mean + std[:, None] * torch.randn(x.shape, generator=generator))
        else:
            v = velocity(x, times[step], direction)
            nodes.append(x - (times[i] - times[i + 1]) * v)
    return torch.stack(nodes)


# %%
lesson.check_rollout(rollout, net)

# %% [markdown] tags=["explanation"]
# **Why.** The rollout keeps all nodes, because the update needs the state and the action of every decision. The last step follows the ODE. Its noise would remain in the finished sample, and no later step could remove it.

# %% [markdown]
# ### Exercise 7 · the credit
#
# *Difficulty: medium · kind: code · importance: essential · time: 6 minutes*
#
# `nodes` is the result of a rollout with the default number of random steps. Its samples are `MEMBERS` samples of the first prompt, then `MEMBERS` of the second, and so on. `score(points, direction)` computes rewards `[sample]`. Return one advantage for every *decision*, `[sample, decision]`: GRPO credits all decisions of a sample with the group advantage of its reward.


# %% tags=["exercise"]
def credit(nodes, direction, score=reward_of):
    """The advantage of every decision [sample, decision]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Which node is the finished sample? `group_advantage` takes `[prompt, member]`; `view(-1, MEMBERS)` makes the groups. How many of the steps are decisions?


# %% tags=["solution"]
def credit(nodes, direction, score=reward_of):
    """The advantage of every decision [sample, decision]."""
    rewards = score(nodes[-1], direction)
    advantage = group_advantage(rewards.view(-1, MEMBERS)).flatten()
    return advantage[:, None].repeat(1, STEPS - 1)


# %%
lesson.check_credit(credit)

# %% [markdown] tags=["explanation"]
# **Why.** Nothing in the reward says which decision was good, so all nine get the same number. The last step is not a decision: it draws nothing, and has no log-probability. This function is the only part that differs between the three papers of this course.

# %% [markdown]
# ### Exercise 8 · the update
#
# *Difficulty: harder · kind: code · importance: essential · time: 20 minutes*
#
# `nodes`, `direction` and `advantage` are the results above. Train on all pairs (sample, decision):
#
# 1. Compute the log-probability of every transition under the policy that drew it, without gradients.
# 2. Shuffle all pairs with `torch.randperm` and `generator`, and split them into `minibatches` chunks.
# 3. For each chunk compute the new log-probabilities and `clipped_loss`, and take one step of the optimizer.
#
# `torch.cartesian_prod(torch.arange(samples), torch.arange(STEPS - 1)).unbind(1)` lists all pairs as two tensors. The function returns nothing.


# %% tags=["exercise"]
def update(optimizer, nodes, direction, advantage, clip_range, minibatches, generator):
    """One pass over all pairs (sample, decision), with one optimizer step per mini-batch."""
    ...


# %% [markdown] tags=["hint"]
# **Hint.** With the two tensors `sample` and `step`, the states are `nodes[step, sample]`, the next states `nodes[step + 1, sample]`, and the advantages `advantage[sample, step]`. When must the old log-probabilities be computed?


# %% tags=["solution"]
def update(optimizer, nodes, direction, advantage, clip_range, minibatches, generator):
    """One pass over all pairs (sample, decision), with one optimizer step per mini-batch."""

    def log_probs(sample, step):
        gaussian = transition(nodes[step, sample], step, direction[sample])
        return log_prob(nodes[step + 1, sample], *gaussian)

    every = torch.cartesian_prod(torch.arange(len(direction)), torch.arange(STEPS - 1))
    with torch.no_grad():
        old = log_probs(*every.unbind(1))
    for part in torch.randperm(len(every), generator=generator).chunk(minibatches):
        sample, step = every[part].unbind(1)
        loss = clipped_loss(
            log_probs(sample, step), old[part], advantage[sample, step], clip_range
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# %%
lesson.check_update(update, net)

# %% [markdown] tags=["explanation"]
# **Why.** The old log-probabilities belong to the weights that drew the trajectories, so they are computed once, before the first step of the optimizer. Steps 1 and 2 of this exercise and both earlier ones need no gradients. This saves the memory of the activations.

# %% [markdown]
# An iteration joins the three parts. They are `flowrl`'s sampler, credit rule and update.


# %%
def iteration(optimizer, generator, clip_range, minibatches, score=reward_of):
    """One iteration of GRPO."""
    with torch.no_grad():
        direction = directions(PROMPTS, generator).repeat_interleave(MEMBERS, 0)
        nodes = rollout(direction, generator)
        advantage = credit(nodes, direction, score)
    update(optimizer, nodes, direction, advantage, clip_range, minibatches, generator)


# %% [markdown]
# Training is a loop of a few lines. We evaluate with the ODE on prompts that are not used in training.


# %%
def train(iterations, seed=0, clip_range=2e-2, minibatches=4):
    """Mean reward of the ODE's samples, before and after every iteration."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    curve = []
    for _ in range(iterations):
        with torch.no_grad():
            held_out = directions(256, torch.Generator().manual_seed(99))
            points = rollout(held_out, torch.Generator().manual_seed(98), random_steps=0)[-1]
            curve.append(float(reward_of(points, held_out).mean()))
        iteration(optimizer, generator, clip_range, minibatches)
    return curve


curve = train(60)
print(
    f"reward of held-out prompts: {curve[0]:.3f} before, {curve[20]:.3f} after 20 iterations,"
    f" {curve[-1]:.3f} at the end"
)

# %% [markdown] tags=["expected"]
# reward of held-out prompts: 0.174 before, 0.55..0.70 after 20 iterations, 0.97..1.00 at the end

# %% tags=["hide-input"]
figure, axes = panels(4, width=2.9, height=3.0)
axes[0].plot(curve, color=COLOURS["flow-grpo"])
axes[0].set(
    xlabel="iteration", ylabel="reward, held-out prompts", title="own loop", ylim=(0, 1)
)
clean(axes[0])
for cell, degrees in zip(axes[1:], (45, 170, 290), strict=True):
    angle = math.radians(degrees)
    direction = torch.tensor([[math.cos(angle), math.sin(angle)]]).repeat(300, 1)
    with torch.no_grad():
        points = rollout(direction, torch.Generator().manual_seed(7), random_steps=0)[-1]
    plane(cell, f"towards {degrees} degrees")
    cell.scatter(*ring.sample(400, torch.Generator().manual_seed(0)).T, s=3, color="#d5d8dd")
    cell.scatter(*(2 * direction[0]), s=260, marker="*", facecolor="none", edgecolor=ACCENT)
    cell.scatter(*points.T, s=8, color=DATA, alpha=0.6)
    print(
        f"towards {degrees} degrees: reward {reward_of(points, direction).mean():.3f},"
        f" standard deviation {points.std(0).mean():.3f}"
    )
axes[1].text(
    0, -3.0, "300 samples (blue), target (star)", ha="center", fontsize=8, color=NOISE
)
print(f"one blob of the ring: standard deviation {ring.std:.3f}")
plt.show()

# %% [markdown] tags=["expected"]
# towards 45 degrees: reward 0.97..1.00, standard deviation 0.000..0.030
# towards 170 degrees: reward 0.95..1.00, standard deviation 0.000..0.030
# towards 290 degrees: reward 0.95..1.00, standard deviation 0.000..0.050
# one blob of the ring: standard deviation 0.250
#
# <image>

# %% [markdown]
# The reward rises, at the cost of diversity: for each prompt all 300 samples, from 300 different noises, end at nearly the same point. The reward is largest at one point, so a policy that only maximises it loses all diversity, here that of the whole
# ring and even that within a blob. The KL penalty of exercise 5, which this loop omits, limits this loss.

# %% [markdown]
# ## Why not differentiate the reward?
#
# Our reward is differentiable. Then the weights can also be trained by backpropagation from the reward through the ODE's last step (the idea of ReFL, arXiv 2304.05977, and of DRaFT-1, arXiv 2309.17400) or through all steps (as in AlignProp, arXiv 2310.03739). The next two cells compare both with GRPO at equal cost in network evaluations. A backward pass counts as two, so a sample costs GRPO $10 + 9 + 3 \cdot 9 = 46$ evaluations (rollout, old log-probabilities, update), and backpropagation through $K$ of the ten steps $10 + 2K$.
#
# There are three scores to maximise. The first is the lesson's reward. The second is 1 near the target and 0 elsewhere. The third can be hacked, as a learned reward may be: far outside the ring, where there are no data, it is larger than at the target.


# %%
def hit(x, direction):
    """1 near the target, 0 elsewhere."""
    return 0.5 + 0.5 * (reward_of(x, direction) - 0.6).sign()


def hackable(x, direction):
    """The reward, plus up to 1.6 outside the ring."""
    return reward_of(x, direction) + 0.8 * (x.norm(dim=1) - 2.2).clamp(0, 2)


def differentiate(optimizer, generator, score, last):
    """One update by backpropagation through the `last` steps of the ODE."""
    direction = directions(PROMPTS, generator).repeat_interleave(MEMBERS, 0)
    with torch.no_grad():
        x = rollout(direction, generator, random_steps=0)[STEPS - last]
    for i in range(STEPS - last, STEPS):
        v = velocity(x, times[torch.full((len(x),), i)], direction)
        x = x - (times[i] - times[i + 1]) * v
    optimizer.zero_grad()
    (-score(x, direction).mean()).backward()
    optimizer.step()


# %%
def compare(score, last, iterations, seed):
    """Score and reward of held-out prompts at the cost of `iterations` of GRPO."""
    net.load_state_dict(untrained)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(iterations * 46 // (STEPS + 2 * last) if last else iterations):
        if last:
            differentiate(optimizer, generator, score, last)
        else:
            iteration(optimizer, generator, 2e-2, 4, score)
    direction = directions(256, torch.Generator().manual_seed(99))
    with torch.no_grad():
        x = rollout(direction, torch.Generator().manual_seed(98), random_steps=0)[-1]
    return [float(form(x, direction).mean()) for form in (score, reward_of)]


LAST = {"GRPO": 0, "last step": 1, "all steps": 10}
plan = [(score, method, 20) for score in (reward_of, hit, hackable) for method in LAST]
print("score      cost  method     its mean, three seeds  reward, three seeds")
for score, method, iterations in progress([*plan, (hackable, "GRPO", 60)], "row"):
    runs = torch.tensor([compare(score, LAST[method], iterations, seed) for seed in range(3)])
    columns = ("  ".join(f"{value:4.2f}" for value in column) for column in runs.T)
    print(f"{score.__name__:9}  {iterations:4d}  {method:9} ", "    ".join(columns))

# %% [markdown] tags=["expected"]
# score      cost  method     its mean, three seeds  reward, three seeds
# reward_of    20  GRPO       0.55..0.75  0.55..0.75  0.55..0.75    0.55..0.75  0.55..0.75  0.55..0.75
# reward_of    20  last step  0.97..1.00  0.97..1.00  0.97..1.00    0.97..1.00  0.97..1.00  0.97..1.00
# reward_of    20  all steps  0.40..0.75  0.40..0.75  0.40..0.75    0.40..0.75  0.40..0.75  0.40..0.75
# hit          20  GRPO       0.40..0.65  0.40..0.65  0.40..0.65    0.45..0.68  0.45..0.68  0.45..0.68
# hit          20  last step  0.14  0.14  0.14    0.17  0.17  0.17
# hit          20  all steps  0.14  0.14  0.14    0.17  0.17  0.17
# hackable     20  GRPO       0.50..0.70  0.50..0.70  0.50..0.70    0.35..0.60  0.35..0.60  0.35..0.60
# hackable     20  last step  1.55..1.60  1.55..1.60  1.55..1.60    0.00..0.02  0.00..0.02  0.00..0.02
# hackable     20  all steps  0.90..1.40  0.90..1.40  0.90..1.40    0.02..0.15  0.02..0.15  0.02..0.15
# hackable     60  GRPO       1.40..1.70  1.40..1.70  1.40..1.70    0.02..0.20  0.02..0.20  0.02..0.20

# %% [markdown]
# (The cost is in iterations of GRPO. All methods have the same learning rate, which was tuned for none of them.) For the smooth reward, the gradient through the last step is far more efficient than GRPO. The gradient through all steps is not: an update costs more, so there are 30 of them instead of 76. A reward of 0 and 1 has the gradient 0 almost everywhere. There backpropagation learns nothing, and GRPO learns as before.
# With the hackable score, every method in the end raises the score and loses the reward that was meant. Backpropagation has lost it within the smaller budget, in which GRPO still raises the reward from 0.17 to about 0.5. With three times the budget GRPO has lost it as well. So the policy gradient does not protect against a flawed reward. It exploits the flaw more slowly, which leaves more time to notice it on a second metric. The KL penalty and early stopping work for both kinds of gradient.
#
# For images there are two more differences. Backpropagation needs the activations of the network, of the decoder and of the reward network in memory. And many rewards, such as text recognition, detectors, judges behind a server and human ratings, have no usable gradient.
#
# ## Before the next run: a prediction
#
# ### Exercise 9 · one mini-batch
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# The loop above makes four updates from each rollout. Suppose it made only one, with all pairs in one mini-batch. What fraction of the pairs would have a ratio outside $1 \pm c$ when the loss is computed?
#
# - **a** none, in every iteration
# - **b** about the same fraction as with four mini-batches
# - **c** more, because the one update uses four times as many pairs

# %% tags=["exercise"]
clipped_with_one_minibatch = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Which weights drew the trajectories, and which weights compute $\log\pi$ in the first mini-batch after the rollout?

# %% tags=["solution"]
clipped_with_one_minibatch = "a"

# %%
lesson.check_one_minibatch(clipped_with_one_minibatch)

# %% [markdown] tags=["explanation"]
# **Why.** In the first mini-batch after a rollout the current policy is still the one that sampled, so $\rho = 1$ for every pair. The clip acts only from the second update on. With one update per rollout the loss is plain policy gradient, and the clip range has no effect.

# %% [markdown]
# The run with the library below prints the fraction of clipped pairs with four mini-batches; afterwards we print it with one.
#
# ## The same with the library
#
# `Trainer` composes four parts: a sampler, a credit rule (here `Uniform`: every step gets the group advantage of the final reward), a loss, and a reward. Two of its metrics to watch: the mean of the ratio should stay near 1, and some pairs, not most, should be clipped.

# %%
from flowrl.losses import ClippedLoss
from flowrl.methods import Method
from flowrl.samplers import FlowSDE

mixture = world("mixture")
reward, prompts = mixture.reward("soft"), mixture.prompts("direction", "train")
# trains all steps but the last
method = Method("flow-grpo", FlowSDE(0.7), loss=ClippedLoss(clip_range=2e-2))
numbers = {
    "groups": 16,
    "members": 12,
    "steps": 10,
    "optimizer": partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.99), weight_decay=1e-4),
}
trainer = Trainer(
    mixture.policy(PolicyOptions()),
    method,
    reward,
    prompts,
    updates=Updates(minibatches=4),
    **numbers,
)
history = [trainer.iteration() for _ in range(30)]
for row in history[::10] + history[-1:]:
    print(
        f"iteration {row['iteration']:2d}: training reward {row['reward_mean']:.3f}, clipped"
        f" {row['clip_fraction']:.0%}, ratio {row['ratio_mean']:.4f}"
    )

# %% [markdown] tags=["expected"]
# iteration  1: training reward 0.238, clipped 1%, ratio 1.0000
# iteration 11: training reward 0.31..0.37, clipped 6..12%, ratio 0.9950..1.0050
# iteration 21: training reward 0.60..0.76, clipped 17..27%, ratio 0.9900..1.0100
# iteration 30: training reward 0.82..0.93, clipped 17..27%, ratio 0.9900..1.0100

# %%
trainer = Trainer(
    mixture.policy(PolicyOptions()),
    method,
    reward,
    prompts,
    updates=Updates(minibatches=1),
    **numbers,
)
for row in [trainer.iteration() for _ in range(3)]:
    print(
        f"one mini-batch, iteration {row['iteration']}: clipped {row['clip_fraction']:.0%},"
        f" ratio {row['ratio_mean']:.4f}"
    )

# %% [markdown]
# ## Mean or sum?
#
# A mean of log-probabilities is the logarithm of a geometric mean: with $d$ elements, $\rho_\text{mean} = \rho_\text{sum}^{1/d}$. The first is the ratio in public code, the second is the ratio of the densities of the whole latents.
#
# Suppose an update changes the mean of every element by a thousandth of the standard deviation. How far does the ratio move from 1? With the mean, the larger the latent, the closer the ratio stays to 1. With the sum it moves further away.

# %%
generator = torch.Generator().manual_seed(0)
sizes = [2, 16, 128, 1024, 8192, 65536]
spread = {"sum": [], "mean": []}
for size in sizes:
    noise = torch.randn(256, size, generator=generator)
    change = 1e-3 * torch.randn(size, generator=generator).sign()
    terms = (noise.square() - (noise - change).square()) / 2
    spread["sum"].append(float(terms.sum(1).exp().std()))
    spread["mean"].append(float(terms.mean(1).exp().std()))
    print(
        f"{size:6d} elements: std of the ratio {spread['sum'][-1]:.1e} with the sum,"
        f" {spread['mean'][-1]:.1e} with the mean"
    )
low, high = (65536 * math.log1p(sign * 1e-4) for sign in (-1, 1))
print(
    "a mean ratio of 1 ± 1e-4 with 65536 elements is a ratio of the whole latents from"
    f" 1/{math.exp(-low):.0f} to {math.exp(high):.0f}"
)

# %% tags=["hide-input"]
figure, axes = panels(width=4.8, height=3.0)
for name, shade in (("sum", ACCENT), ("mean", DATA)):
    axes.loglog(sizes, spread[name], "o-", color=shade, markersize=4)
    axes.text(sizes[-1] * 1.25, spread[name][-1], name, color=shade, va="center")
axes.axhline(1e-4, color=NOISE, linestyle=":", linewidth=1)
axes.text(3e3, 1.25e-4, "Flow-GRPO's clip range, 1e-4", fontsize=8, color=NOISE)
axes.set(
    xlabel="elements of the latent",
    ylabel="std of the ratio",
    title="the ratio after the same small change",
    xlim=(1.5, 3e5),
)
clean(axes)
plt.show()

# %% [markdown]
# **Try it.** Change the number of elements, first with the mean and then with the sum, and watch the share of draws beyond the clip range.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("ratio", elements=65536, change=0.001)

# %% [markdown]
# The printed spread with the mean is $\delta/\sqrt d$, in which $\delta$ is the change in standard deviations, here $10^{-3}$. Three consequences:
#
# - A clip range belongs to a number of elements. A value from a paper on SD3.5 does not suit a model with smaller latents.
# - A clip of $10^{-4}$ is not stricter than PPO's usual 0.2. With 65,536 elements the spread reaches it at a change of $10^{-4} \cdot 256 = 0.026$ standard deviations, and the ratio of whole latents may then be as large as 700.
# - With the mean, $\rho$ no longer reweights samples correctly. At $\rho = 1$ the gradient of the loss is still the policy gradient, divided by $d$. Adam is not sensitive to this constant factor.
#
# ### Exercise 10 · translate a clip range
#
# *Difficulty: medium · kind: formula · importance: useful · time: 5 minutes*
#
# A paper uses `clip_range` with latents of `elements` elements. Your latents have `own_elements`. Find the change $\delta$ whose spread equals the paper's clip range, and return the spread of the same $\delta$ for your number of elements.


# %% tags=["exercise"]
def translated_clip(clip_range, elements, own_elements):
    """The clip range that corresponds to the same change per element."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** At which $\delta$ does the spread $\delta/\sqrt d$ equal the paper's clip range? Insert this $\delta$ for your own number of elements.


# %% tags=["solution"]
def translated_clip(clip_range, elements, own_elements):
    """The clip range that corresponds to the same change per element."""
    return clip_range * (elements / own_elements) ** 0.5


# %%
lesson.check_translated_clip(translated_clip)

# %% [markdown] tags=["explanation"]
# **Why.** The ratio typically differs from 1 by $\delta/\sqrt d$, so it reaches $c$ at $\delta = c\sqrt d$. The same $\delta$ needs the same $c\sqrt d$. For this lesson's loop with 2 elements, Flow-GRPO's $10^{-4}$ becomes 0.018; the loop uses 0.02.
#
# This rule concerns the *spread* of the log-ratio. Its mean is $-\delta^2/2$ for every $d$, and reaches $-c$ at $\delta = \sqrt{2c}$. From $d = 2/c$ elements on (20,000 for $c = 10^{-4}$) the mean reaches the clip range before the spread does. Most ratios are then below 1, and the clip no longer
# acts equally on both signs of the advantage. GRPO-Guard (arXiv 2510.22319) subtracts this mean from the log-ratio.

# %%
for elements in (2, 128, 16384):
    print(
        "Flow-GRPO's clip range of 1e-4 at 65536 elements corresponds to"
        f" {translated_clip(1e-4, 65536, elements):.1e} at {elements} elements"
    )

# %% [markdown]
# ## Failed runs
#
# ### Exercise 11 · read a run
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 8 minutes*
#
# Three runs failed. Which settings explain which log? Answer with the letters.
#
# | | log |
# |---|---|
# | 1 | reward 0.17, after four iterations 0.56, after nine 0.03; mean ratio 0.25 in the last mini-batch of iteration 7 |
# | 2 | reward 0.17 to 0.18 for twenty iterations; 100% clipped from the second mini-batch of each iteration on |
# | 3 | reward 0.17 to 0.18 for ten iterations; mean absolute advantage 0.000 |
#
# | | settings |
# |---|---|
# | A | all members of a group start from the same noise, *and* the only stochastic step has noise that does not affect the reward |
# | B | clip range of 0.9, learning rate ten times too large |
# | C | clip range of 1e-9 |

# %% tags=["exercise"]
diagnosis = {1: ..., 2: ..., 3: ...}


# %% [markdown] tags=["hint"]
# **Hint.** Start with the log in which all advantages are 0: which settings give every member of a group the same reward? Then compare the clip ranges with the fractions of clipped pairs.

# %% tags=["solution"]
diagnosis = {1: "B", 2: "C", 3: "A"}

# %%
lesson.check_diagnosis(diagnosis)

# %% [markdown] tags=["explanation"]
# **Why.** A clip range that is never reached allows the policy to leave the region in which its samples are valid; the ratio is the first metric to show this. With a clip range near 0, every pair that moved with its advantage in the first mini-batch has no gradient in the later ones, while the pairs that moved against theirs are pulled back; so the later mini-batches undo the first. If all members get the same
# reward, all advantages are 0: check the spread within groups first.

# %% [markdown]
# ### Exercise 12 · find the bug
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 6 minutes*
#
# A colleague's iteration runs without an error. The ratio stays near 1, a few percent of the pairs are clipped, and the mean absolute advantage is 0.8. Yet the reward is 0.17 before training and 0.17 after 30 iterations. One line is wrong. Which one?
#
# ```python
# direction = directions(PROMPTS, generator).repeat_interleave(MEMBERS, 0)                           # line 1
# nodes = rollout(direction, generator)                                                              # line 2
# reward = reward_of(nodes[0], direction)                                                            # line 3
# advantage = group_advantage(reward.view(PROMPTS, MEMBERS)).flatten()                               # line 4
# sample, step = torch.cartesian_prod(torch.arange(len(reward)), torch.arange(STEPS - 1)).unbind(1)  # line 5
# ```

# %% tags=["exercise"]
wrong_line = ...

# %% [markdown] tags=["hint"]
# **Hint.** The advantages are not 0, but training on them does not raise the reward. Of what is each quantity computed?

# %% tags=["solution"]
wrong_line = 3

# %%
lesson.check_wrong_line(wrong_line)

# %% [markdown] tags=["explanation"]
# **Why.** Papers call the data $x_0$, but node 0 of a trajectory, $z_0$, is the noise; the image is the last node. So line 3 scores the noise, which no decision can change. The advantages then compare the luck of the first draw, and training on them moves the policy at random.

# %% [markdown]
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Why does the update need no gradient of the reward? **a** The reward is constant. **b** The score function $\nabla\log\pi$ carries the dependence on the weights. **c** The reward is differentiated by finite differences.
# 2. Adding 10 to all rewards changes the group advantage: **a** not at all, **b** by 10, **c** by $10/\mathrm{std}$.
# 3. A pair has $A = -1$ and $\rho = 1.3$ with $c = 0.2$. Its gradient **a** is zero, **b** lowers $\rho$, **c** raises $\rho$.
# 4. Without a KL penalty the trained policy loses **a** reward, **b** diversity, **c** its noise level.
# 5. With the mean over elements, a clip range of $10^{-4}$ at 65,536 elements is **a** much stricter than 0.2 on the ratio of whole latents, **b** weaker, **c** the same.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are in the sections on the policy gradient, the group, the clip, the penalty, and mean or sum, in this order.

# %% tags=["solution"]
quiz = {1: "b", 2: "a", 3: "b", 4: "b", 5: "b"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: $\nabla q = q\,\nabla\log q$. 2: mean and reward shift together. 3: for $A < 0$ the clip stops the gradient only below $1 - c$; above it the pair must still become less likely. 4: the reward is largest at one point. 5: it allows ratios of whole latents up to 700.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $\log\pi(z_{i+1}\mid z_i)$, mean over elements | log-probability | `flow.log_prob` |
# | $\mathbb E[(R - b)\sum_i\nabla\log\pi]$ | policy gradient, $b$ any baseline | `losses.PolicyGradientLoss` |
# | $A = (R - \bar R)/(\mathrm{std} + 10^{-4})$ | group advantage | `credit.Uniform`, `credit.zscore` |
# | $\max(-A\rho, -A\operatorname{clip}\rho)$ | clipped loss | `losses.ClippedLoss(clip_range)` |
# | $\|\mu-\mu_\text{ref}\|^2/(2\,\mathrm{std}^2)$ | KL | `flow.kl`, `ClippedLoss(kl_weight=...)` |
# | one iteration | rollout, score, credit, update | `Trainer.iteration` |
#
# ## Symbols
#
# {symbols: $z_j$; step $i$; $\pi(z_{i+1} \mid z_i)$; $\mu$, std; $\rho$; $p$, $m$, $G$; $R$; $A$; $c$; $\beta$}
#
# ## Further reading
#
# - Williams 1992, *Simple statistical gradient-following algorithms* (Machine Learning 8): the policy gradient and its baseline.
# - Black et al. 2023, *DDPO* (arXiv 2305.13301): denoising as a decision process, with PPO's loss.
# - Schulman et al. 2017, *PPO* (arXiv 1707.06347): equation 7 is the clipped loss.
# - Shao et al. 2024, *DeepSeekMath* (arXiv 2402.03300): GRPO for language models.
# - Liu et al. 2025, *Understanding R1-Zero-like training* (arXiv 2503.20783): the bias from dividing by the group's standard deviation.
# - Zheng et al. 2025, *GSPO* (arXiv 2507.18071): the ratio of a whole text as a geometric mean over tokens, the counterpart of the mean over elements.
#
# **Next:** [4 · Why a step may be credited](04_why_a_step_may_be_credited.ipynb) proves which other credits the gradient allows.

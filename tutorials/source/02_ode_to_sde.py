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
# # 2 · From ODE to SDE
#
# **After this lesson you can** turn the sampler's ODE into an SDE with the same marginal distributions, compute its error with few steps, choose between the kernels that papers
# use, and identify the steps of a sampler that are decisions, which reinforcement learning can credit.
#
# **Time** 50 minutes, of which the computer needs less than one. **You need** lesson 1.
#
# An ODE maps each noise to one image: it has no probabilities that training could raise. Reinforcement learning needs a *policy*. The animation shows trajectories from one initial noise:
# one of the ODE, and sixty of an SDE with the same velocity.

# %% tags=["hide-input"]
import math

import matplotlib.pyplot as plt
import torch

from flowrl.flow import GaussianMixture, uniform_schedule
from flowrl.samplers import CPS, DDIMSDE, ODE, AllButLast, FlowSDE, Window, transition_stds
from flowrl_course import lesson_02 as lesson
from flowrl_course.figures import ACCENT, DATA, NOISE, OTHERS, animation, clean, panels, plane

ring = GaussianMixture.ring()


def follow(sampler, noise, steps, seed=0, data=ring):
    """All nodes [node, sample, dim] of a sampler of `flowrl` with the exact velocity of the data."""
    generator = torch.Generator().manual_seed(seed)
    schedule, nodes = uniform_schedule(steps), [noise]
    for i in range(steps):
        x, index = nodes[-1], torch.full((len(noise),), i)
        gaussian = sampler.transition(x, data.velocity(x, schedule.times[i].expand(len(x))), schedule, index)
        nodes.append(gaussian.mean + gaussian.std[:, None] * torch.randn(x.shape, generator=generator))
    return torch.stack(nodes)


def opening():
    """One noise, one ODE path, sixty SDE paths."""
    start = torch.tensor([[0.9, 1.3]]).repeat(60, 1)
    straight, random = follow(ODE(), start, 40), follow(AllButLast(FlowSDE(0.7)), start, 40)
    figure, axes = panels(2, width=3.2, height=3.5)
    parts = []
    for cell, path, title, shade in ((axes[0], straight, "ODE: one end", DATA), (axes[1], random, "SDE: a policy", ACCENT)):
        plane(cell, title)
        cell.scatter(*ring.sample(400, torch.Generator().manual_seed(0)).T, s=3, color="#d5d8dd")
        cell.scatter(*start[0], s=30, color=NOISE, zorder=3)
        dots = cell.scatter(*path[0].T, s=8, color=shade, zorder=4)
        lines = [cell.plot([], [], color=shade, linewidth=0.5, alpha=0.4)[0] for _ in range(60)]
        parts.append((path, dots, lines))

    def draw(frame):
        node = min(frame, 40)
        for path, dots, lines in parts:
            dots.set_offsets(path[node])
            for i, line in enumerate(lines):
                line.set_data(*path[: node + 1, i].T)

    return animation(figure, draw, frames=50, seconds=5, dpi=60)


opening()

# %% [markdown]
# ## Noise that preserves the marginals
#
# A noise term $\sigma\,\mathrm dw$ spreads the distribution; a drift along the *score*
# $\nabla \log p_t$, towards higher density, cancels the spread exactly (this follows from the Fokker-Planck equation; Song et al. 2020, arXiv 2011.13456). With decreasing time,
#
# $$\mathrm dx = \Big[v - \tfrac{\sigma_t^2}{2}\nabla \log p_t(x)\Big]\mathrm dt + \sigma_t\,\mathrm dw .$$
#
# In one small step of length $\Delta$, $x$ changes by $-\Delta$ times the bracket plus Gaussian noise of variance $\sigma_t^2\Delta$, which is the meaning of $\sigma_t\,\mathrm dw$.
#
# For any $\sigma_t$ the marginals $p_t$ (the distributions of $x_t$ at each $t$) are those of the ODE. The score of a flow needs no new network: given the data point $x_0$, $x_t$ is Gaussian with mean $(1-t)x_0$ and standard deviation $t$, and the
# gradient of its log-density is $-(x_t - (1-t)x_0)/t^2 = -\varepsilon/t$. The mean over all $x_0$ given $x$ is
# $\nabla \log p_t(x) = -\mathbb E[\varepsilon \mid x_t = x]/t$, and lesson 1 computed the noise estimate from the velocity: $\hat\varepsilon = x + (1-t)v$.
#
# ### Exercise 1 · the score from the velocity *(easy, 4 minutes)*
#
# Combine the two formulas; `x` and `velocity` are `[sample, dim]`, `time` is `[sample]`.


# %% tags=["exercise"]
def score(x, velocity, time):
    """The gradient of log p_t at x [sample, dim], from its velocity; time is [sample]."""
    return ...


# %% tags=["solution"]
def score(x, velocity, time):
    """The gradient of log p_t at x [sample, dim], from its velocity; time is [sample]."""
    t = time[:, None]
    return -(x + (1 - t) * velocity) / t


# %%
lesson.check_score(score)

# %% [markdown] tags=["explanation"]
# **Why.** The score points from noise to data, opposite to the noise estimate, and it grows as $t$ decreases, because the noise is then on a finer scale. The check compares it with the gradient of
# the ring's exact log-density, computed by autograd.

# %% [markdown]
# ## One step of Flow-SDE
#
# One such step from $t$ to $s = t - \Delta$ is a step of the Euler-Maruyama method. The next node is Gaussian, and this Gaussian *is* the policy:
#
# $$x_s \sim \mathcal N\big(\mu,\ \sigma^2\Delta\, I\big),\qquad \mu = x - \Delta v - \frac{\sigma^2\Delta}{2t}\big(x + (1-t)v\big).$$
#
# Flow-GRPO (Liu et al. 2025, arXiv 2505.05470) uses $\sigma = a\sqrt{t/(1-t)}$, which is large early and small late. $a$ is the *noise level*, 0.7 in the paper.
#
# ### Exercise 2 · the transition *(medium, 6 minutes)*
#
# Return mean `[sample, dim]` and standard deviation (a number) of $x_s$, in this order. Here $t < 1$ is one number for the whole batch.


# %% tags=["exercise"]
def flow_sde_step(x, velocity, t, s, noise_level):
    """Mean and std of the next node."""
    return ..., ...


# %% tags=["solution"]
def flow_sde_step(x, velocity, t, s, noise_level):
    """Mean and std of the next node."""
    delta = t - s
    variance = noise_level**2 * t / (1 - t)
    noise = x + (1 - t) * velocity
    mean = x - delta * velocity - variance * delta / (2 * t) * noise
    return mean, (variance * delta) ** 0.5


# %%
lesson.check_flow_sde(flow_sde_step)

# %% [markdown] tags=["explanation"]
# **Why.** The drift is multiplied by $\Delta$, the noise by $\sqrt\Delta$, because variances add up over time, not standard deviations. The noise is drawn later; mean and standard deviation define the policy.

# %% [markdown]
# At $t = 1$, where every path starts, the denominator of $\sigma$ is zero. The released code and `FlowSDE` use the next grid time $s$ in the denominator of this step, $\sigma = a\sqrt{1/(1-s)}$, which is finite. The wrapper
# `AllButLast` makes the last step an ODE step, for a reason given below.
#
# To test the marginals with many small steps, compare the SDE's samples with the ODE's from other noise, halfway and at the end: in a figure, and by the quantiles of the distance from the centre.

# %%
start = [torch.randn(2500, 2, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
by_ode, by_sde = follow(ODE(), start[0], 250), follow(AllButLast(FlowSDE(0.7)), start[1], 250)
levels = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
for name, node in (("t = 0.5", 125), ("t = 0", 250)):
    for kind, path in (("ODE", by_ode), ("SDE", by_sde)):
        quantiles = torch.quantile(path[node].norm(dim=1), levels)
        print(f"{name:8} {kind}: quantiles of |x| " + "  ".join(f"{q:.2f}" for q in quantiles.tolist()))

# %% tags=["hide-input"]
figure, axes = panels(4, width=2.6, height=2.8)
for cell, path, node, title in (
    (axes[0], by_ode, 125, "ODE, t = 0.5"),
    (axes[1], by_sde, 125, "SDE, t = 0.5"),
    (axes[2], by_ode, 250, "ODE, t = 0"),
    (axes[3], by_sde, 250, "SDE, t = 0"),
):
    plane(cell, title)
    cell.scatter(*path[node, :1500].T, s=2, alpha=0.5, color=DATA if "ODE" in title else ACCENT)
plt.show()

# %% [markdown]
# ## Few steps: grain
#
# 250 steps per image are too expensive for training. With ten steps, Euler-Maruyama is no longer exact, and its error is visible: images look grainy, because too much noise remains in them.
#
# The amount can be computed. Let all data be one point $x_0$ and the velocity exact. Then $x_t = (1-t)x_0 + t\varepsilon$, and the step's mean is $(1-s)x_0 + \big(s - \frac{\sigma^2\Delta}{2t}\big)\varepsilon$; the new
# noise adds variance $\sigma^2\Delta$. The exact variance would be $s^2$.
#
# ### Exercise 3 · excess variance *(medium, 8 minutes)*
#
# Return the excess of the variance of $x_s$ over $s^2$ after one step, simplified or not.


# %% tags=["exercise"]
def excess_variance(t, s, sigma):
    """Variance of x_s after one Flow-SDE step from time t, minus s squared; numbers."""
    return ...


# %% tags=["solution"]
def excess_variance(t, s, sigma):
    """Variance of x_s after one Flow-SDE step from time t, minus s squared; numbers."""
    delta = t - s
    return (s - sigma**2 * delta / (2 * t)) ** 2 + sigma**2 * delta - s**2


# %%
lesson.check_excess_variance(excess_variance)

# %% [markdown] tags=["explanation"]
# **Why.** Multiplied out, the excess is $\Delta^2\sigma^2\big(\frac1t + \frac{\sigma^2}{4t^2}\big)$: always positive, and of second order in $\Delta$, so that the sum over the $1/\Delta$ steps vanishes with small steps. It grows
# with the noise level: more exploration costs image quality.

# %% [markdown]
# Two kernels avoid the excess by construction. Both start from the two estimates and restore the right amount of noise: new noise of standard deviation $\sigma$, and old noise for the rest,
#
# $$x_s \sim \mathcal N\Big((1-s)\,\hat x_0 + \sqrt{s^2 - \sigma^2}\;\hat\varepsilon,\ \ \sigma^2 I\Big).$$
#
# *Coefficients-Preserving Sampling* (CPS; Wang & Yu 2025, arXiv 2509.05952) sets $\sigma = s\,\sin(\eta\pi/2)$; Stepwise-Flow-GRPO (arXiv 2603.28718) uses a *DDIM-inspired* one with $\sigma = a\,s\sqrt{1-t}$.
#
# ### Exercise 4 · CPS *(medium, 6 minutes)*
#
# Return mean and standard deviation of the next node with CPS's $\sigma$; `t`, `s` and `eta` are numbers, so `math.sin` will do.


# %% tags=["exercise"]
def cps_step(x, velocity, t, s, eta):
    """Mean [sample, dim] and std (a number) of the next node; 0 <= eta <= 1."""
    return ..., ...


# %% tags=["solution"]
def cps_step(x, velocity, t, s, eta):
    """Mean [sample, dim] and std (a number) of the next node; 0 <= eta <= 1."""
    clean, noise = x - t * velocity, x + (1 - t) * velocity
    std = s * math.sin(eta * math.pi / 2)
    return (1 - s) * clean + math.sqrt(max(0, s**2 - std**2)) * noise, std


# %%
lesson.check_cps(cps_step)

# %% [markdown] tags=["explanation"]
# **Why.** Old and new noise are independent, so their *variances* must add up to $s^2$: $(s^2 - \sigma^2) + \sigma^2$. This formula has no factor $\Delta$: $\sigma$ is the standard deviation of the step itself.
# At $\eta = 0$ the step is the ODE step; at $\eta = 1$ all noise is new.

# %% [markdown]
# The next figure has all kernels with ten steps each on a ring with sharp blobs (standard deviation 0.05), where the excess noise is easy to see:

# %%
sharp = GaussianMixture.ring(std=0.05)
noise = torch.randn(3000, 2, generator=torch.Generator().manual_seed(3))
kernels = {
    "ODE": ODE(),
    "Flow-SDE 0.7": FlowSDE(0.7),
    "Flow-SDE 0.7, last step ODE": AllButLast(FlowSDE(0.7)),
    "CPS 0.7": CPS(0.7),
    "DDIM-SDE 0.7": DDIMSDE(0.7),
}
figure, axes = panels(6, width=2.0, height=2.3)
for cell, (name, kernel) in zip(axes[:5], kernels.items(), strict=True):
    final = follow(kernel, noise, 10, data=sharp)[-1]
    plane(cell, name.replace(", ", "\n"), extent=2.6)
    cell.scatter(*final[:1500].T, s=2, alpha=0.5, color=ACCENT)
    nearest = torch.cdist(final, sharp.means).min(dim=1).values
    print(f"{name:28} median distance to the nearest blob's centre {float(nearest.median()):.3f}")
plane(axes[5], "data", extent=2.6)
axes[5].scatter(*sharp.sample(1500, torch.Generator().manual_seed(8)).T, s=2, alpha=0.5, color=DATA)
exact = torch.cdist(sharp.sample(20000, torch.Generator().manual_seed(9)), sharp.means).min(dim=1).values
print(f"{'data':28} median distance to the nearest blob's centre {float(exact.median()):.3f}")
plt.show()

# %% [markdown]
# If all steps are random, the noise of Flow-SDE's last step remains in the sample as grain. An ODE step as the last step removes this noise; the remaining excess is small here.
#
# All other samples are *sharper* than the data, those of the ODE included: ten steps end with a jump to a conditional mean, which has lost part of the spread. A sharp sample is not an exact one. CPS adds new noise to conditional means at every step, and with a
# fixed $\eta$ more steps increase its loss of spread.
#
# ## Which steps are decisions?
#
# A step of standard deviation 0 has only one possible next node. Such a step has no log-probability, and its ratio is 1 for every policy, so it has no part in the loss.

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.0)
schedule = uniform_schedule(10)
shades = {"Flow-SDE 0.7": DATA, "CPS 0.7": ACCENT, "DDIM-SDE 0.7": OTHERS[0]}
for name, shade in shades.items():
    stds = transition_stds(kernels[name], schedule)
    axes[0].plot(range(10), stds, "o-", color=shade, label=name, markersize=4)
axes[0].set(xlabel="step", ylabel="std of the transition", title="0 = not a decision", xticks=range(10))
axes[0].legend(frameon=False, fontsize=8)
clean(axes[0])
same_start = torch.randn(300, 2, generator=torch.Generator().manual_seed(4)).repeat_interleave(20, 0)
spread, changed = [], []
for step in range(10):
    final = follow(Window(FlowSDE(0.7), step, 1), same_start, 10).unflatten(1, (300, 20))[-1]
    spread.append(float(final.var(dim=1).sum(1).mean().sqrt()))
    blob = torch.cdist(final, ring.means).argmin(2)
    changed.append(float((blob != blob.mode(dim=1, keepdim=True).values).float().mean()))
axes[1].bar(range(10), changed, color=DATA)
axes[1].set(
    xlabel="the one step that is stochastic",
    ylabel="share of samples",
    title="ends at another blob than its siblings",
    xticks=range(10),
)
clean(axes[1])
plt.show()
print("spread of the end points per step:", " ".join(f"{value:.2f}" for value in spread))
print("another blob, per step:           ", " ".join(f"{value:.2f}" for value in changed))

# %% [markdown]
# On the right, one step at a time is stochastic and all others follow the ODE, from the same initial noise. Early noise decides *which* blob the sample ends in; late noise only moves the sample within its blob. Stepwise credit is based
# on this observation: steps differ in their effect, and a rule with equal credit for all steps ignores the difference.
#
# ### Exercise 5 · count the decisions *(easy, 4 minutes)*
#
# For each kernel with ten steps on the even grid, how many steps are decisions (standard deviation above 0)? Consider both ends: $t = 1$ and $s = 0$. The kernels are as published, without a wrapper: Flow-SDE with the
# released code's $\sigma$ at $t = 1$ (see above).

# %% tags=["exercise"]
decisions = {"FlowSDE": ..., "CPS": ..., "DDIMSDE": ...}

# %% tags=["solution"]
decisions = {"FlowSDE": 10, "CPS": 9, "DDIMSDE": 8}

# %%
lesson.check_decisions(decisions)

# %% [markdown] tags=["explanation"]
# **Why.** Flow-SDE's $\sigma\sqrt\Delta$ is positive at every step, including the last one, whose noise remains in the image; the paper therefore makes the last step an ODE step (`AllButLast`). CPS and the
# DDIM-inspired kernel have a factor $s$, which is 0 at the last step; the latter also has a factor $\sqrt{1-t}$, which is 0 at the first step.

# %% [markdown]
# ## The same with the library
#
# All kernels have the same method. It accepts any schedule, and a batch with different steps; `Window` makes only some steps stochastic.

# %%
index = torch.tensor([3, 3, 7, 9])
x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
velocity = ring.velocity(x, schedule.times[index])
for sampler in (FlowSDE(0.7), CPS(0.7), Window(FlowSDE(0.7), start=2, size=4)):
    gaussian = sampler.transition(x, velocity, schedule, index)
    print(f"{sampler!s:62} std at steps 3, 3, 7, 9: {[round(s, 3) for s in gaussian.std.tolist()]}")
t, s = float(schedule.times[3]), float(schedule.times[4])
mean, std = flow_sde_step(x[:2], velocity[:2], t, s, 0.7)
library = FlowSDE(0.7).transition(x[:2], velocity[:2], schedule, index[:2])
print("ours agrees:", torch.allclose(mean, library.mean, atol=1e-6), abs(std - float(library.std[0])) < 1e-6)

# %% [markdown]
# ## To keep
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $\nabla\log p_t = -\hat\varepsilon/t$ | score | `flow.noise_estimate` |
# | $\sigma = a\sqrt{t/(1-t)}$, std $\sigma\sqrt\Delta$ | Flow-SDE | `samplers.FlowSDE(noise_level)` |
# | $\sigma = s\sin(\eta\pi/2)$, std $\sigma$ | CPS | `samplers.CPS(noise_level)` |
# | $\sigma = a s\sqrt{1-t}$, std $\sigma$ | DDIM-inspired SDE | `samplers.DDIMSDE(noise_level)` |
# | std = 0 | not a decision: masked | `Schedule.stochastic` |
# | some steps only | window | `samplers.Window`, `RandomWindow`, `SlidingWindow`, `AllButLast` |
#
# **Next:** [3 · GRPO on a flow](03_grpo_on_a_flow.ipynb) makes the better paths more likely.

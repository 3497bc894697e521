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
# **After this lesson you can** turn the sampler's ODE into an SDE, prove that both have the same marginal distributions, compute the error of the SDE with few steps, choose between
# the kernels of the papers, and design a sampler whose random steps (*decisions*) suit reinforcement learning.
#
# **Time** 95 minutes, of which the computer needs less than one. **You need** the lesson on flow matching.
#
# An ODE maps each noise to one image, so it has no probabilities that training could raise. Reinforcement learning needs a *policy*, which draws the next state at random. The animation shows trajectories from one initial noise:
# one of the ODE, and sixty of an SDE with the same velocity.

# %% tags=["hide-input"]
import math
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

from flowrl.flow import GaussianMixture, uniform_schedule
from flowrl.samplers import CPS, DDIMSDE, ODE, FlowSDE, Windowed, transition_stds
from flowrl_course import lesson_02 as lesson
from flowrl_course.figures import ACCENT, DATA, NOISE, OTHERS, animation, clean, panels, plane

ring = GaussianMixture.ring()


def follow(sampler, noise, steps, seed=0, data=ring):
    """All nodes [node, sample, dim] of a sampler of `flowrl` with the exact velocity of the
    data.
    """
    generator = torch.Generator().manual_seed(seed)
    schedule, nodes = uniform_schedule(steps), [noise]
    for i in range(steps):
        x, index = nodes[-1], torch.full((len(noise),), i)
        gaussian = sampler.transition(
            x, data.velocity(x, schedule.times[i].expand(len(x))), schedule, index
        )
        nodes.append(
            gaussian.mean + gaussian.std[:, None] * torch.randn(x.shape, generator=generator)
        )
    return torch.stack(nodes)


def opening():
    """One noise, one ODE path, sixty SDE paths."""
    start = torch.tensor([[0.9, 1.3]]).repeat(60, 1)
    straight, random = (
        follow(ODE(), start, 40),
        follow(Windowed(FlowSDE(0.7), range(39)), start, 40),
    )
    figure, axes = panels(2, width=3.2, height=3.5)
    parts = []
    for cell, path, title, shade in (
        (axes[0], straight, "ODE: one end", DATA),
        (axes[1], random, "SDE: a policy", ACCENT),
    ):
        plane(cell, title)
        cell.scatter(
            *ring.sample(400, torch.Generator().manual_seed(0)).T, s=3, color="#d5d8dd"
        )
        cell.scatter(*start[0], s=30, color=NOISE, zorder=3)
        dots = cell.scatter(*path[0].T, s=8, color=shade, zorder=4)
        lines = [
            cell.plot([], [], color=shade, linewidth=0.5, alpha=0.4)[0] for _ in range(60)
        ]
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
# Let us add noise to the path. Alone, a noise term $\sigma_t\,\mathrm dw$ spreads the distribution. However, a drift along the *score* $\nabla \log p_t$, towards higher density, cancels the spread exactly
# ($p_t$ is the density of $x_t$). With decreasing time,
#
# $$\mathrm dx = \Big[v - \tfrac{\sigma_t^2}{2}\nabla \log p_t(x)\Big]\mathrm dt + \sigma_t\,\mathrm dw .$$
#
# In a small step of length $\Delta$, $x$ changes by $-\Delta$ times the bracket plus Gaussian noise of variance $\sigma_t^2\Delta$, which is the meaning of $\sigma_t\,\mathrm dw$.
# For any $\sigma_t$ the *marginals* (the densities $p_t$ at each single time $t$) are those of the ODE.
#
# <details><summary><b>Derivation: the ODE and the SDE have the same marginals (six lines)</b></summary>
#
# Let $\tau = 1 - t$ be the time of generation, which increases, and $p$ the density of $x$ at time $\tau$.
#
# 1. The ODE moves points with velocity $-v$ in $\tau$. Probability is conserved, so $p$ satisfies the continuity equation $\partial_\tau p = \nabla\cdot(v\,p)$.
# 2. Take an SDE with an unknown drift $b$, $\mathrm dx = b\,\mathrm d\tau + \sigma\,\mathrm dw$ (with $\sigma$ short for $\sigma_t$), and a test function $f$. A second-order Taylor expansion of $f$ gives $\frac{\mathrm d}{\mathrm d\tau}\mathbb E[f] = \mathbb E\big[b\cdot\nabla f + \tfrac{\sigma^2}{2}\nabla^2 f\big]$: the second-order term stays, because $\mathrm dw$ has variance $\mathrm d\tau$.
# 3. Write both expectations as integrals over $p$ and integrate by parts. The result is the Fokker-Planck equation, $\partial_\tau p = -\nabla\cdot(b\,p) + \tfrac{\sigma^2}{2}\nabla^2 p$.
# 4. The noise term has the form of a drift: $\nabla^2 p = \nabla\cdot(\nabla p) = \nabla\cdot(p\,\nabla\log p)$.
# 5. Hence $\partial_\tau p = -\nabla\cdot\big[(b - \tfrac{\sigma^2}{2}\nabla\log p)\,p\big]$. This is line 1 if $b = -v + \tfrac{\sigma^2}{2}\nabla\log p$.
# 6. With this $b$ both densities satisfy the same equation from the same initial density $\mathcal N(0, I)$ at $t = 1$, so they are equal at every time. With $\mathrm d\tau = -\mathrm dt$, $b\,\mathrm d\tau$ is the bracket above times $\mathrm dt$.
#
# Only the densities at single times are equal. The paths differ: the end point of the ODE is a function of its initial noise, that of the SDE also depends on all later noise. Source: Song et al. 2020 (arXiv 2011.13456, appendix D.1).
#
# </details>
#
# The score of a flow needs no new network: we can compute it from the velocity. Given the data point $x_0$, $x_t$ is Gaussian with mean $(1-t)x_0$ and standard deviation $t$, and the
# gradient of its log-density is $-(x_t - (1-t)x_0)/t^2 = -\varepsilon/t$. The score of the marginal is the mean of these gradients over all $x_0$ given $x$:
# differentiate $p_t(x) = \int p(x_0)\,p(x \mid x_0)\,\mathrm dx_0$ and divide by $p_t(x)$. Hence
# $\nabla \log p_t(x) = -\mathbb E[\varepsilon \mid x_t = x]/t$. The lesson on flow matching computed this mean from the velocity: $\hat\varepsilon = x + (1-t)v$.
#
# <details><summary><b>Tweedie's formula with the score</b></summary>
#
# Take the conditional mean of $x_t = (1-t)\,x_0 + t\,\varepsilon$ given $x_t = x$: $x = (1-t)\,\hat x_0 + t\,\hat\varepsilon$. Insert $\hat\varepsilon = -t\,\nabla\log p_t(x)$ and solve for the clean estimate:
#
# $$\hat x_0 = \mathbb E[x_0\mid x_t = x] = \frac{x + t^2\,\nabla\log p_t(x)}{1-t}.$$
#
# This is Tweedie's formula in its usual form (Robbins 1956; Efron 2011). Given an observation with Gaussian noise of variance $t^2$, the mean of the signal is the observation plus $t^2$ times the score. Here it is divided by the factor $1-t$ of the data. With the score of exercise 1 it becomes $x - t\,v$, the estimate of the lesson on flow matching.
# Velocity, score, clean estimate and noise estimate are four forms of one conditional mean.
#
# </details>
#
# ### Exercise 1 · the score from the velocity
#
# *Difficulty: easy · kind: formula · importance: essential · time: 4 minutes*
#
# Write the score as a function of state and velocity; `x` and `velocity` are `[sample, dim]`, `time` is `[sample]`.


# %% tags=["exercise"]
def score(x, velocity, time):
    """The gradient of log p_t at x [sample, dim], from its velocity; time is [sample]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Insert the formula for $\hat\varepsilon$ into $-\hat\varepsilon/t$. `time` is `[sample]`; write `time[:, None]` to use it with `[sample, dim]`.


# %% tags=["solution"]
def score(x, velocity, time):
    """The gradient of log p_t at x [sample, dim], from its velocity; time is [sample]."""
    t = time[:, None]
    return -(x + (1 - t) * velocity) / t


# %%
lesson.check_score(score)

# %% [markdown] tags=["explanation"]
# **Why.** With both formulas, $\nabla\log p_t(x) = -(x + (1-t)v)/t$. The score points from noise to data, opposite to the noise estimate, and it grows as $t$ decreases, because the noise is then on a finer scale. The check compares it with the gradient of
# the ring's exact log-density, computed by autograd.

# %% [markdown]
# ## One step of Flow-SDE
#
# A sampler takes steps of finite length. For a step from $t$ to the next time $s = t - \Delta$, the Euler-Maruyama method keeps the bracket of the SDE constant. Then the next node is Gaussian, $x_s \sim \mathcal N(\mu, \mathrm{std}^2 I)$, and this Gaussian *is* the policy. Its mean contains the velocity and $\Delta\sigma_t^2/2$ times the score; we call the second term the *score correction*.
# Flow-GRPO (Liu et al. 2025, arXiv 2505.05470) uses $\sigma_t = a\sqrt{t/(1-t)}$, which is large early and small late. The number $a$ is the *noise level*, 0.7 in the paper.
#
# ### Exercise 2 · the transition
#
# *Difficulty: medium · kind: formula · importance: essential · time: 10 minutes*
#
# Derive mean `[sample, dim]` and standard deviation (a number) of $x_s$ from the SDE, and return them in this order, as functions of state and velocity. Here $t < 1$ is one number for the whole batch. In which direction does a step move, and which of the two results is proportional to $\Delta$?


# %% tags=["exercise"]
def flow_sde_step(x, velocity, t, s, noise_level):
    """Mean and std of the next node."""
    return ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** Compute $\sigma_t^2 = a^2\,t/(1-t)$ first: the mean contains $\sigma_t^2\Delta$, the standard deviation its root. The bracket in the mean is the noise estimate of exercise 1.


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
# **Why.** With the score of exercise 1,
#
# $$\mu = x - \Delta v - \frac{\sigma_t^2\Delta}{2t}\big(x + (1-t)v\big),\qquad \mathrm{std} = \sigma_t\sqrt\Delta .$$
#
# The drift is multiplied by $\Delta$ and the noise by $\sqrt\Delta$, because the variances of independent noise add up over time, not the standard deviations. The function draws no noise itself: mean and standard deviation define the policy.

# %% [markdown]
# At $t = 1$, where every path starts, the denominator of $\sigma_t$ is zero. The released code and `FlowSDE` use the next time $s$ in the denominator of this step, $\sigma_t = a\sqrt{1/(1-s)}$, which is finite. The wrapper
# `Windowed` makes some steps stochastic and the others ODE steps. Here only the last step is an ODE step, for a reason given below.
#
# Are the marginals really the same? Let us take 250 small steps, and compare samples of the SDE with samples of the ODE from other noise, halfway and at the end. We compare the quantiles of the distance from the centre, then the points themselves.

# %%
start = [
    torch.randn(2500, 2, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
]
by_ode, by_sde = (
    follow(ODE(), start[0], 250),
    follow(Windowed(FlowSDE(0.7), range(249)), start[1], 250),
)
levels = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
for name, node in (("t = 0.5", 125), ("t = 0", 250)):
    for kind, path in (("ODE", by_ode), ("SDE", by_sde)):
        quantiles = torch.quantile(path[node].norm(dim=1), levels)
        print(
            f"{name:8} {kind}: quantiles of |x| "
            + "  ".join(f"{q:.2f}" for q in quantiles.tolist())
        )

# %% tags=["hide-input"]
figure, axes = panels(4, width=2.6, height=2.8)
for cell, path, node, title in (
    (axes[0], by_ode, 125, "ODE, t = 0.5"),
    (axes[1], by_sde, 125, "SDE, t = 0.5"),
    (axes[2], by_ode, 250, "ODE, t = 0"),
    (axes[3], by_sde, 250, "SDE, t = 0"),
):
    plane(cell, title)
    cell.scatter(
        *path[node, :1500].T, s=2, alpha=0.5, color=DATA if "ODE" in title else ACCENT
    )
plt.show()

# %% [markdown]
# The quantiles agree within the sampling error of 2500 points (about 0.02 to 0.03), although each SDE path received new noise 249 times. So far the library has followed the path. Now write the sampler yourself, and see which part of the step preserves the marginals.
#
# ### Exercise 3 · the sampling loop
#
# *Difficulty: medium · kind: code · importance: essential · time: 10 minutes*
#
# Follow the SDE from the points `x` at `times[0]` to `times[-1]`, and return the final points. In every step, evaluate the velocity, call `flow_sde_step`, and draw the next points with `generator`.
# `velocity(x, t)` maps `[sample, dim]` and `[sample]` to `[sample, dim]`; `times` is a list of decreasing numbers below 1. With `correct=False` the sampler leaves out the score correction: the mean of every step is that of the ODE, $x - \Delta v$, and the noise is unchanged.


# %% tags=["exercise"]
def sde_ends(velocity, x, times, noise_level, correct, generator):
    """The points [sample, dim] after all steps of the grid; x holds the points at times[0]."""
    ...
    return x


# %% [markdown] tags=["hint"]
# **Hint.** `pairwise(times)` gives the steps `t, s`, and `torch.full((len(x),), t)` one time per sample. If `correct` is false, replace only the mean. Which three quantities give the next points?


# %% tags=["solution"]
def sde_ends(velocity, x, times, noise_level, correct, generator):
    """The points [sample, dim] after all steps of the grid; x holds the points at times[0]."""
    for t, s in pairwise(times):
        v = velocity(x, torch.full((len(x),), t))
        mean, std = flow_sde_step(x, v, t, s, noise_level)
        if not correct:
            mean = x - (t - s) * v
        x = mean + std * torch.randn(x.shape, generator=generator)
    return x


# %%
lesson.check_sde_ends(sde_ends)

# %% [markdown] tags=["explanation"]
# **Why.** The loop is the rollout of reinforcement learning: it evaluates the network, computes the policy's mean and standard deviation, draws the next state, and repeats. Both versions add the same noise. The velocity is defined for points $x_t$ that contain noise of standard deviation $t$, and removes exactly that amount.
# Without the correction the added noise accumulates, and the points contain more noise than the velocity removes.

# %% [markdown]
# The next cell measures the spread of the result: the root mean square distance to the nearest blob's centre, for noise levels from 0 to 1. The starting points are exact samples of $p_t$ at $t = 0.98$, because $\sigma_t$ is infinite at $t = 1$.

# %%
times = torch.linspace(0.98, 0, 120).tolist()
generator = torch.Generator().manual_seed(2)
clean_points, noise_points = (
    ring.sample(2000, generator),
    torch.randn(2000, 2, generator=generator),
)
first = (1 - times[0]) * clean_points + times[0] * noise_points
noise_levels = [0.0, 0.2, 0.4, 0.7, 1.0]
ends = {
    correct: [
        sde_ends(ring.velocity, first, times, level, correct, torch.Generator().manual_seed(3))
        for level in noise_levels
    ]
    for correct in (True, False)
}


def blob_spread(points):
    """Root mean square distance to the nearest blob's centre."""
    return float(torch.cdist(points, ring.means).min(dim=1).values.square().mean().sqrt())


spread_of = {correct: [blob_spread(points) for points in ends[correct]] for correct in ends}
print("noise level a             " + "  ".join(f"{level:4.1f}" for level in noise_levels))
print("with the correction       " + "  ".join(f"{value:4.2f}" for value in spread_of[True]))
print("without the correction    " + "  ".join(f"{value:4.2f}" for value in spread_of[False]))
print(f"data                      {blob_spread(ring.sample(20000, generator)):4.2f}")

# %% tags=["hide-input"]
figure, axes = panels(3, width=3.2, height=3.0)
for cell, correct in zip(axes[:2], (True, False), strict=True):
    plane(cell, f"a = 0.7, {'with' if correct else 'without'} the correction")
    cell.scatter(*ends[correct][3].T, s=2, alpha=0.5, color=DATA if correct else ACCENT)
for correct, shade, label, height in (
    (True, DATA, "with", 0.27),
    (False, ACCENT, "without", 0.6),
):
    axes[2].plot(noise_levels, spread_of[correct], "o-", color=shade, markersize=4)
    axes[2].text(0.35, height, label, color=shade)
axes[2].set(
    xlabel="noise level a",
    ylabel="distance to the nearest centre (rms)",
    title="The correction preserves the spread",
)
axes[2].set_ylim(0, None)
clean(axes[2])
plt.show()

# %% [markdown]
# **Try it.** Raise the noise level in one dimension, where the exact density can be drawn. With the score correction the histogram keeps following the density at every time; without it the points spread.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("marginals")

# %% [markdown]
# With the correction the spread is that of the data at every noise level. Without it the spread grows with the noise level: by about a fifth at $a = 0.4$, to more than twice that of the data at $a = 1$. An implementation without the correction raises no error, and even its training works.
# Only its samples are too noisy. So compare the spread of every new sampler with that of the ODE.
#
# Such a comparison can also find other bugs. A colleague's loop uses your `flow_sde_step` with the score correction, and yet the spread is wrong. The next cell prints it for different numbers of steps.

# %%
for steps in (15, 60, 240):
    grid = torch.linspace(0.98, 0, steps + 1).tolist()
    ours = sde_ends(
        ring.velocity, first[:1000], grid, 0.7, True, torch.Generator().manual_seed(3)
    )
    theirs = lesson.colleague_ends(ring.velocity, first[:1000], grid, 0.7)
    print(
        f"{steps:3d} steps: spread {blob_spread(ours):.2f} with your loop,"
        f" {blob_spread(theirs):.2f} with the colleague's"
    )

# %% [markdown]
# ### Exercise 4 · read the log
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 6 minutes*
#
# Which bug explains the colleague's numbers?
#
# - **a** the noise is multiplied by $\mathrm{std}^2$ instead of std
# - **b** the same noise is added in every step
# - **c** `correct=False` was passed
# - **d** the grid is too coarse for Euler-Maruyama

# %% tags=["exercise"]
cause = "..."

# %% [markdown] tags=["hint"]
# **Hint.** By which factor does the spread grow if there are four times as many steps? For each bug, say whether its effect grows, falls or stays if the steps become smaller.

# %% tags=["solution"]
cause = "b"

# %%
lesson.check_cause(cause)

# %% [markdown] tags=["explanation"]
# **Why.** The colleague wrote `noise = torch.randn(...)` above the loop. Then all steps push a sample in the same direction: the standard deviations add up instead of the variances. With $n$ steps the sum is proportional to $n\sqrt{1/n} = \sqrt n$, so four times as many steps double the spread.
# A test with two different numbers of steps finds such an error; a test with one number may not.

# %% [markdown]
# ## Few steps: grain
#
# 250 steps per image are too expensive for training. With ten steps, Euler-Maruyama is no longer exact, and its error is visible: images look grainy, because too much noise remains in them.
#
# We can compute how much. Let all data be one point $x_0$ and the velocity exact. Then $x_t = (1-t)x_0 + t\varepsilon$, and the step's mean is $(1-s)x_0 + \big(s - \frac{\sigma_t^2\Delta}{2t}\big)\varepsilon$. The new
# noise adds variance $\sigma_t^2\Delta$. The exact variance would be $s^2$.
#
# ### Exercise 5 · excess variance
#
# *Difficulty: medium · kind: formula · importance: useful · time: 8 minutes*
#
# Return the excess of the variance of $x_s$ over $s^2$ after one step, simplified or not.


# %% tags=["exercise"]
def excess_variance(t, s, sigma):
    """Variance of x_s after one Flow-SDE step from time t, minus s squared; numbers."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** After the step, the only random parts of $x_s$ are $\varepsilon$, with the coefficient given above, and the new noise. They are independent, so square the coefficient, add the new variance, and subtract $s^2$.


# %% tags=["solution"]
def excess_variance(t, s, sigma):
    """Variance of x_s after one Flow-SDE step from time t, minus s squared; numbers."""
    delta = t - s
    return (s - sigma**2 * delta / (2 * t)) ** 2 + sigma**2 * delta - s**2


# %%
lesson.check_excess_variance(excess_variance)

# %% [markdown] tags=["explanation"]
# **Why.** Multiplied out, the excess is $\Delta^2\sigma_t^2\big(\frac1t + \frac{\sigma_t^2}{4t^2}\big)$. It is always positive and of second order in $\Delta$, so the sum over the $1/\Delta$ steps vanishes with small steps. It grows
# with the noise level: more exploration costs image quality.

# %% [markdown]
# Two kernels avoid the excess by construction. Both start from the estimates $\hat x_0 = x - tv$ and $\hat\varepsilon = x + (1-t)v$, and mix three parts: $\hat x_0$, the old noise $\hat\varepsilon$, and independent new noise with standard deviation std. The coefficients of the first two follow from one requirement. If both estimates are exact, $x_s$ has the distribution of $(1-s)\,x_0 + s\,\varepsilon'$ with standard normal $\varepsilon'$, for each $x_0$. Only std remains to be chosen.
#
# *Coefficients-Preserving Sampling* (CPS; Wang & Yu 2025, arXiv 2509.05952) sets $\mathrm{std} = s\,\sin(\eta\pi/2)$ with a noise level $\eta$ between 0 and 1. Stepwise-Flow-GRPO (arXiv 2603.28718, equation 8) uses a *DDIM-inspired* kernel with $\mathrm{std} = a\,s\sqrt{1-t}$.
# (Both papers write $\sigma$ for this std. It has no factor $\sqrt\Delta$.)
#
# ### Exercise 6 · CPS
#
# *Difficulty: medium · kind: formula · importance: useful · time: 8 minutes*
#
# Find the two coefficients. Return mean and standard deviation of the next node with CPS's std; `t`, `s` and `eta` are numbers, so use `math.sin`.


# %% tags=["exercise"]
def cps_step(x, velocity, t, s, eta):
    """Mean [sample, dim] and std (a number) of the next node; 0 <= eta <= 1."""
    return ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** The old and the new noise are independent: what do their variances add up to? The coefficient of $\hat x_0$ does not depend on std. Rounding can make $s^2 - \mathrm{std}^2$ slightly negative; `max(0, ...)` prevents an error.


# %% tags=["solution"]
def cps_step(x, velocity, t, s, eta):
    """Mean [sample, dim] and std (a number) of the next node; 0 <= eta <= 1."""
    clean, noise = x - t * velocity, x + (1 - t) * velocity
    std = s * math.sin(eta * math.pi / 2)
    return (1 - s) * clean + math.sqrt(max(0, s**2 - std**2)) * noise, std


# %%
lesson.check_cps(cps_step)

# %% [markdown] tags=["explanation"]
# **Why.** The kernel is
#
# $$x_s \sim \mathcal N\Big((1-s)\,\hat x_0 + \sqrt{s^2 - \mathrm{std}^2}\;\hat\varepsilon,\ \ \mathrm{std}^2 I\Big).$$
#
# Old and new noise are independent, so their *variances* must add up to $s^2$: $(s^2 - \mathrm{std}^2) + \mathrm{std}^2$.
# At $\eta = 0$ the step is the ODE step; at $\eta = 1$ all noise is new.

# %% [markdown]
# Let us compare the kernels with ten steps each on a ring with sharp blobs (standard deviation 0.05), where excess noise is easy to see.
#
# ### Exercise 7 · sharper or wider?
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 4 minutes*
#
# For each sampler with ten steps, will the blobs of its samples be `"sharper"` or `"wider"` than those of the data?

# %% tags=["exercise"]
blobs = {"ODE": ..., "Flow-SDE, all steps random": ..., "CPS": ...}

# %% [markdown] tags=["hint"]
# **Hint.** Look at the last step, which ends at $s = 0$. To which point does the mean of each kernel lead, and is noise added to this point?

# %% tags=["solution"]
blobs = {"ODE": "sharper", "Flow-SDE, all steps random": "wider", "CPS": "sharper"}

# %%
lesson.check_blobs(blobs)

# %% [markdown] tags=["explanation"]
# **Why.** At $s = 0$ the ODE and CPS end at $\hat x_0$, the conditional mean, which has less spread than the data. Flow-SDE adds noise of standard deviation $\sigma_t\sqrt\Delta$ to its last mean, and no later step removes this noise.

# %%
sharp = GaussianMixture.ring(std=0.05)
noise = torch.randn(3000, 2, generator=torch.Generator().manual_seed(3))
kernels = {
    "ODE": ODE(),
    "Flow-SDE 0.7": FlowSDE(0.7),
    "Flow-SDE 0.7, last step ODE": Windowed(FlowSDE(0.7), range(9)),
    "CPS 0.7": CPS(0.7),
    "DDIM-SDE 0.7": DDIMSDE(0.7),
}
figure, axes = panels(6, width=2.0, height=2.3)
for cell, (name, kernel) in zip(axes[:5], kernels.items(), strict=True):
    final = follow(kernel, noise, 10, data=sharp)[-1]
    plane(cell, name.replace(", ", "\n"), extent=2.6)
    cell.scatter(*final[:1500].T, s=2, alpha=0.5, color=ACCENT)
    nearest = torch.cdist(final, sharp.means).min(dim=1).values
    print(
        f"{name:28} median distance to the nearest blob's centre {float(nearest.median()):.3f}"
    )
plane(axes[5], "data", extent=2.6)
axes[5].scatter(
    *sharp.sample(1500, torch.Generator().manual_seed(8)).T, s=2, alpha=0.5, color=DATA
)
exact = (
    torch.cdist(sharp.sample(20000, torch.Generator().manual_seed(9)), sharp.means)
    .min(dim=1)
    .values
)
print(f"{'data':28} median distance to the nearest blob's centre {float(exact.median()):.3f}")
plt.show()

# %% [markdown]
# If all steps are random, the noise of Flow-SDE's last step remains in the sample as grain. With an ODE step as the last step this noise is missing, and only the opposite error remains.
#
# All other samples are *sharper* than the data, those of the ODE included. Ten steps end with a jump to a conditional mean, which has lost part of the spread. So a sharp sample is not necessarily an exact sample. CPS adds new noise to conditional means at every step, and
# part of its loss of spread remains with any number of steps.
#
# ## Which steps are decisions?
#
# A step of standard deviation 0 has only one possible next node. Such a step has no density and no log-probability, so it has no part in the loss. Reinforcement learning can credit only the other steps, the *decisions*. How many are there, and how much do they matter?
#
# ### Exercise 8 · count the decisions
#
# *Difficulty: easy · kind: prediction · importance: useful · time: 4 minutes*
#
# For each kernel with ten steps on the even grid, how many steps are decisions (standard deviation above 0)? Consider both ends: $t = 1$ and $s = 0$. The kernels are as published, without a wrapper: Flow-SDE with the
# released code's $\sigma_t$ at $t = 1$ (see above).

# %% tags=["exercise"]
decisions = {"FlowSDE": ..., "CPS": ..., "DDIMSDE": ...}


# %% [markdown] tags=["hint"]
# **Hint.** Insert the first step ($t = 1$, $s = 0.9$) and the last one ($t = 0.1$, $s = 0$) into each formula for the standard deviation, and look for a factor 0.

# %% tags=["solution"]
decisions = {"FlowSDE": 10, "CPS": 9, "DDIMSDE": 8}

# %%
lesson.check_decisions(decisions)

# %% [markdown] tags=["explanation"]
# **Why.** Flow-SDE's $\sigma_t\sqrt\Delta$ is positive at every step, including the last one, whose noise remains in the image. The paper therefore makes the last step an ODE step (the window `:-1`). CPS and the
# DDIM-inspired kernel have a factor $s$, which is 0 at the last step. The latter also has a factor $\sqrt{1-t}$, which is 0 at the first step.

# %% [markdown]
# ### Exercise 9 · one random step
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# Now make a *single* step of Flow-SDE stochastic and let all others follow the ODE. Take 20 samples from the same initial noise. Which random step sends most of them to different blobs?
#
# - **a** one of the first steps
# - **b** a step in the middle
# - **c** one of the last steps
# - **d** all steps alike, because the noise level $a$ is the same

# %% tags=["exercise"]
random_step = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Compare the standard deviation of a step with the distance to the next blob. How do the later ODE steps change a point that was moved?

# %% tags=["solution"]
random_step = "a"

# %%
lesson.check_random_step(random_step)

# %% [markdown] tags=["explanation"]
# **Why.** Early the standard deviation is large and the point is still between the blobs, so a small move changes the blob to which the ODE leads. Late the point is inside a blob, and the noise is too small to leave it.

# %% [markdown]
# **Try it.** Choose the random steps of 240 paths from one noise. Which ones send the paths to other blobs, and which only move them within a blob?

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("one-noise")

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.0)
schedule = uniform_schedule(10)
shades = {"Flow-SDE 0.7": DATA, "CPS 0.7": ACCENT, "DDIM-SDE 0.7": OTHERS[0]}
for name, shade in shades.items():
    stds = transition_stds(kernels[name], schedule)
    axes[0].plot(range(10), stds, "o-", color=shade, label=name, markersize=4)
axes[0].set(
    xlabel="step", ylabel="std of the transition", title="0 = not a decision", xticks=range(10)
)
axes[0].legend(frameon=False, fontsize=8)
clean(axes[0])
same_start = torch.randn(300, 2, generator=torch.Generator().manual_seed(4)).repeat_interleave(
    20, 0
)
spread, changed = [], []
for step in range(10):
    final = follow(Windowed(FlowSDE(0.7), [step]), same_start, 10).unflatten(1, (300, 20))[-1]
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
# On the right, 20 samples from the same initial noise are *siblings*. A bar is the share of samples that end at another blob than most of their siblings. The printed spread is the root of the end points' variance among siblings, summed over both coordinates. Early noise decides *which* blob the sample ends in; late noise only moves the sample within its blob. Stepwise credit is based
# on this observation: steps differ in their effect, and a rule with equal credit for all steps ignores the difference.
#
# With kernel, noise level and window you can design the decisions of a policy. The steps outside the window use the network too, but GRPO's gradient does not contain their effect (the lesson on GRPO). A good design explores enough to find better samples, and still produces samples without grain.
#
# ### Exercise 10 · design the decisions
#
# *Difficulty: medium · kind: design · importance: useful · time: 8 minutes*
#
# Choose a sampler for ten steps on the sharp ring, such as `Windowed(FlowSDE(0.2), range(3, 6))`. It must have
#
# - at least four decisions;
# - exploration: at least 60% of its samples end at another blob than the ODE from the same noise;
# - no grain: the median distance to the nearest centre is at most that of the data (0.059).

# %% tags=["exercise"]
my_sampler = ...

# %% [markdown] tags=["hint"]
# **Hint.** The right-hand figure shows which steps explore, and the list of median distances shows which step leaves grain. The noise level scales the exploration of every step.

# %% tags=["solution"]
my_sampler = Windowed(FlowSDE(0.7), range(5))

# %%
lesson.check_sampler(my_sampler)

# %% [markdown] tags=["explanation"]
# **Why.** Early decisions explore, and the ODE steps after them remove the grain, so five decisions at the beginning are enough. CPS with all nine decisions is another good answer, because it leaves no grain. Fewer decisions also make training cheaper, since only decisions are trained.

# %% [markdown]
# ## The same with the library
#
# All kernels have the same method. It accepts any schedule and a batch with different steps.

# %%
index = torch.tensor([3, 3, 7, 9])
x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
velocity = ring.velocity(x, schedule.times[index])
for sampler in (FlowSDE(0.7), CPS(0.7), Windowed(FlowSDE(0.7), range(2, 6))):
    gaussian = sampler.transition(x, velocity, schedule, index)
    print(
        f"{sampler!s:62} std at steps 3, 3, 7, 9:"
        f" {[round(s, 3) for s in gaussian.std.tolist()]}"
    )
t, s = float(schedule.times[3]), float(schedule.times[4])
mean, std = flow_sde_step(x[:2], velocity[:2], t, s, 0.7)
library = FlowSDE(0.7).transition(x[:2], velocity[:2], schedule, index[:2])
print(
    "ours agrees:",
    torch.allclose(mean, library.mean, atol=1e-6),
    abs(std - float(library.std[0])) < 1e-6,
)

# %% [markdown]
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. We double the noise level of Flow-SDE and take very many small steps. The distribution of the final samples **a** becomes wider, **b** stays the same, **c** has more blobs.
# 2. The ODE and the SDE have the same marginals. So from the *same* initial noise **a** they end at the same point, **b** they end at the same blob, **c** neither; only the distribution over all noises is the same.
# 3. We halve the step length $\Delta$ of Flow-SDE. The std of a transition is multiplied by **a** 1/2, **b** $1/\sqrt2$, **c** 1.
# 4. An ODE step has no part in the loss of reinforcement learning because **a** the network is not evaluated in it, **b** its next node is certain, so it has no log-probability, **c** its velocity does not depend on the weights.
# 5. Images of a Flow-SDE sampler with ten steps are grainy. Which change removes the grain and keeps most of the exploration? **a** ODE steps at the end, **b** ODE steps at the beginning, **c** a larger noise level.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** For questions 1 and 2 read the sentence below the SDE and the end of the derivation again. Questions 3 to 5 are about the transition, the decisions and the grain.

# %% tags=["solution"]
quiz = {1: "b", 2: "c", 3: "b", 4: "b", 5: "a"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: the score correction grows with $\sigma_t^2$ and cancels the spread. 2: the end point of the SDE also depends on all later noise. 3: $\mathrm{std} = \sigma_t\sqrt\Delta$. 4: a step with std 0 has one possible result for given weights. 5: grain is the noise of late steps, exploration that of early steps.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $\nabla\log p_t = -\hat\varepsilon/t$ | score | `flow.noise_estimate` |
# | $\sigma_t = a\sqrt{t/(1-t)}$, std $\sigma_t\sqrt\Delta$ | Flow-SDE | `samplers.FlowSDE(noise_level)` |
# | $-\frac{\sigma_t^2\Delta}{2t}\hat\varepsilon$ | score correction: keeps the marginals | part of the mean |
# | std $= s\sin(\eta\pi/2)$ | CPS | `samplers.CPS(noise_level)` |
# | std $= a s\sqrt{1-t}$ | DDIM-inspired SDE | `samplers.DDIMSDE(noise_level)` |
# | std = 0 | not a decision: no credit, no part in the loss | `samplers.transition_stds`, `experience.Decisions` |
# | some steps only | window, a Python slice such as `2:7` | `samplers.Windowed`; `FixedWindow`, `RandomWindow`, `SlidingWindow` |
#
# ## Symbols
#
# {symbols: $x_t$; $v$; $s$; $\hat x_0$; $\hat\varepsilon$; $\mu$, std; $\sigma_t$; decision $k$; window}
#
# ## Further reading
#
# - Song et al. 2020, *Score-based generative modeling through stochastic differential equations* (arXiv 2011.13456): appendix D.1 derives the ODE from the SDE, the direction opposite to this lesson.
# - Albergo, Boffi and Vanden-Eijnden 2023, *Stochastic interpolants* (arXiv 2303.08797): ODE and SDE of the same path, with a free choice of $\sigma_t$.
# - Ma et al. 2024, *SiT* (arXiv 2401.08740): compares choices of $\sigma_t$ for image models, after training.
# - Karras et al. 2022, *EDM* (arXiv 2206.00364): when added noise corrects errors of the solver, and when it adds errors.
# - Song et al. 2020, *DDIM* (arXiv 2010.02502): equation 12 is the family of kernels that includes CPS and the DDIM-inspired SDE.
#
# **Next:** [3 · GRPO on a flow](03_grpo_on_a_flow.ipynb) makes the better paths more likely.

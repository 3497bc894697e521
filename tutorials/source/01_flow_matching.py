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
# # 1 · Flow matching from scratch
#
# **After this lesson you can** write the straight path between noise and data, train a network on its velocity, turn noise into
# samples with an ODE, and estimate the finished sample from any state on the way.
#
# **Time** 45 minutes, of which the computer needs less than one. **You need** PyTorch and the notion of an expectation.
#
# All examples are in two dimensions, where the exact solution is known in closed form and errors can be plotted.

# %% tags=["hide-input"]
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import nn

from flowrl.flow import GaussianMixture
from flowrl_course import lesson_01 as lesson
from flowrl_course.figures import ACCENT, DATA, NOISE, animation, clean, panels, plane

ring = GaussianMixture.ring()
generator = torch.Generator().manual_seed(1)


def opening():
    """Noise becomes data along the exact flow."""
    times = torch.linspace(1, 0, 41)
    path = [torch.randn(400, 2, generator=generator)]
    for t, s in pairwise(times):
        path.append(path[-1] - (t - s) * ring.velocity(path[-1], t.expand(400)))
    figure, axes = panels(width=3.6, height=3.8)
    plane(axes)
    dots = axes.scatter(*path[0].T, s=6, color=DATA, alpha=0.7)

    def draw(frame):
        node = min(frame, 40)
        dots.set_offsets(path[node])
        axes.set_title(f"t = {float(times[node]):.2f}   ({'noise' if node == 0 else 'data' if node == 40 else 'on the way'})")

    return animation(figure, draw, frames=52, seconds=4)


opening()

# %% [markdown]
# ## The path
#
# Call a data point $x_0$ and a draw of standard Gaussian noise $\varepsilon$. Flow matching joins the two by a straight line,
#
# $$x_t = (1 - t)\, x_0 + t\, \varepsilon, \qquad t \in [0, 1],$$
#
# with time running **from $t = 1$ (noise) to $t = 0$ (data)** during generation. Papers and public code of this field use this
# direction, and so does `flowrl`. Other texts use the opposite direction, which is the most common source of wrong signs.
#
# The data are eight small Gaussian blobs on a circle (`GaussianMixture.ring()`).
#
# ### Exercise 1 · interpolate
#
# *Difficulty: easy · importance: essential · time: 3 minutes*
#
# Write the path for a whole batch: `clean` and `noise` are `[sample, dim]`, and every sample has its own `time` `[sample]`.


# %% tags=["exercise"]
def interpolate(clean, noise, time):
    """x_t of every sample."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** `time` is `[sample]` and the points are `[sample, dim]`: give the time a second axis with `time[:, None]`.


# %% tags=["solution"]
def interpolate(clean, noise, time):
    """x_t of every sample."""
    t = time[:, None]
    return (1 - t) * clean + t * noise


# %%
lesson.check_interpolate(interpolate)

# %% [markdown] tags=["explanation"]
# **Why.** `time[:, None]` broadcasts the time over the dimensions, so that sample $i$ uses its own $t_i$. Without the new axis,
# `[sample]` against `[sample, dim]` either fails or, if the two sizes agree, silently mixes up samples and dimensions.
# In `flowrl` this function is `flowrl.flow.interpolate`; its shape annotations detect this error.

# %% tags=["hide-input"]
figure, axes = panels(5, width=2.2, height=2.4)
clean_points = ring.sample(500, torch.Generator().manual_seed(0))
noise_points = torch.randn(500, 2, generator=torch.Generator().manual_seed(1))
for cell, t in zip(axes, (1.0, 0.75, 0.5, 0.25, 0.0), strict=True):
    points = interpolate(clean_points, noise_points, torch.full((500,), t))
    plane(cell, f"t = {t:g}")
    cell.scatter(*points.T, s=3, color=NOISE if t == 1 else DATA, alpha=0.6)
plt.show()

# %% [markdown]
# ## The velocity
#
# Along one line, the velocity is constant: $\mathrm{d}x_t/\mathrm{d}t = \varepsilon - x_0$. During generation only the
# point $x_t$ is known, neither $x_0$ nor $\varepsilon$, and many lines pass near every point. The field that moves the whole
# *distribution* correctly is their average,
#
# $$v(x, t) = \mathbb{E}\left[\varepsilon - x_0 \mid x_t = x\right].$$
#
# The average is sufficient: the density at a point changes only by the net flow in and out. This flow is the density times
# the *mean* velocity there. Least squares estimates this mean: a network trained to predict $\varepsilon - x_0$ from $(x_t, t)$ with a squared error
# converges to $v$ (Lipman et al. 2022, arXiv 2210.02747, theorem 2; Liu et al. 2022, arXiv 2209.03003).
#
# <details><summary><b>Derivation: the mean velocity preserves the distribution at every time (four lines)</b></summary>
#
# Let $f$ be a smooth test function. If two families of distributions have the same $\mathbb E[f]$ for every $f$, they are equal.
#
# 1. Along the lines, $\frac{\mathrm d}{\mathrm dt}\mathbb E[f(x_t)] = \mathbb E[\nabla f(x_t)\cdot(\varepsilon - x_0)]$, by the chain rule.
# 2. $\nabla f(x_t)$ is a fixed vector once $x_t$ is known. Average over all lines through $x_t$ first: the right-hand side is $\mathbb E[\nabla f(x_t)\cdot v(x_t, t)]$. Only the conditional mean is left.
# 3. Points $y_t$ that move by $\mathrm dy/\mathrm dt = v(y, t)$ satisfy $\frac{\mathrm d}{\mathrm dt}\mathbb E[f(y_t)] = \mathbb E[\nabla f(y_t)\cdot v(y_t, t)]$. This is the same equation. Integrated by parts it is the continuity equation, $\partial_t p_t = -\nabla\cdot(v\,p_t)$.
# 4. Both start from the noise at $t = 1$, and the equation determines the densities at all other times. So $y_t$ has the distribution of $x_t$ at every $t$, although the points of the ODE do not follow the lines.
#
# </details>
#
# ### Exercise 2 · the training loss
#
# *Difficulty: medium · importance: essential · time: 6 minutes*
#
# `network(x, t)` maps `[sample, dim]` and `[sample]` to `[sample, dim]`. Return the mean squared error over the batch and the dimensions.


# %% tags=["exercise"]
def flow_matching_loss(network, clean, noise, time):
    """Mean squared error of the predicted velocity at x_t."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Compute $x_t$ with your function of exercise 1. The target is the derivative of $x_t$ by $t$, which does not depend on $t$.


# %% tags=["solution"]
def flow_matching_loss(network, clean, noise, time):
    """Mean squared error of the predicted velocity at x_t."""
    x = interpolate(clean, noise, time)
    return (network(x, time) - (noise - clean)).square().mean()


# %%
lesson.check_loss(flow_matching_loss)

# %% [markdown] tags=["explanation"]
# **Why.** The input of the network is $x_t$, not $x_0$ or $\varepsilon$ alone. The target is $\varepsilon - x_0$, the direction *towards noise*, because $t$
# grows towards noise. With a sum instead of a mean, the learning rate would depend on the batch size and the resolution.

# %% [markdown]
# Training takes a few seconds. The target is noisy, so the loss does not fall to zero: the remainder is the
# variance of $\varepsilon - x_0$ around its conditional mean, which no network can predict.

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))


def learned(x, t):
    """The network's velocity; its input is the point and the time."""
    return net(torch.cat([x, t[:, None]], dim=1))


optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
losses = []
for update in range(4000):
    clean_batch = ring.sample(512, generator)
    noise_batch = torch.randn(512, 2, generator=generator)
    time_batch = torch.rand(512, generator=generator)
    loss = flow_matching_loss(learned, clean_batch, noise_batch, time_batch)
    optimizer.param_groups[0]["lr"] = 2e-3 * (1 - update / 4000)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss: first 100 updates {sum(losses[:100]) / 100:.2f}, last 100 updates {sum(losses[-100:]) / 100:.2f}")

# %% [markdown] tags=["expected"]
# loss: first 100 updates 2.45..2.60, last 100 updates 1.95..2.07

# %% [markdown]
# For a Gaussian mixture the velocity can be written down: at time $t$ mode $k$ has become $\mathcal N((1-t)\,m_k,\; c_t I)$ with
# $c_t = (1-t)^2 s^2 + t^2$ ($m_k$ is the blob's centre, $s$ its standard deviation). The posterior probability of each mode follows from Bayes' rule, and within a mode all estimates are linear.
# `GaussianMixture.velocity` computes this field, so the error of the network can be measured at every point.

# %% tags=["hide-input"]
figure, axes = panels(4, width=2.9, height=3.0)
grid = torch.cartesian_prod(torch.linspace(-3, 3, 13), torch.linspace(-3, 3, 13))
for cell, t in zip(axes[:3], (0.9, 0.5, 0.15), strict=True):
    time = torch.full((len(grid),), t)
    exact = ring.velocity(grid, time)
    with torch.no_grad():
        guess = learned(grid, time)
    plane(cell, f"direction of travel at t = {t:g}")
    for field, shade, label in ((exact, DATA, "exact"), (guess, ACCENT, "learned")):
        cell.quiver(*grid.T, *(-field.T), color=shade, angles="xy", scale=40, width=0.006, alpha=0.8, label=label)
axes[0].legend(loc="lower left", fontsize=8, framealpha=0.9)
errors = []
for t in (ts := torch.linspace(0.02, 1, 25)):
    x = interpolate(ring.sample(4000, generator), torch.randn(4000, 2, generator=generator), t.expand(4000))
    with torch.no_grad():
        gap = learned(x, t.expand(4000)) - ring.velocity(x, t.expand(4000))
    errors.append(float(gap.square().mean().sqrt()))
axes[3].plot(ts, errors, color=ACCENT)
axes[3].set(xlabel="time t", title="error where the data are", ylim=(0, None), ylabel="root mean square")
clean(axes[3])
plt.show()

# %% [markdown]
# The arrows show $-v$, the direction in which a sample travels. Near $t = 1$ all samples travel towards the centre, because the conditional mean of the data is
# then nearly the overall mean. Later the field splits towards the eight blobs. The error of the network is largest at small $t$, where the true field changes fastest.
#
# ## From noise to data
#
# To generate, solve $\mathrm{d}x/\mathrm{d}t = v$ from $t_0 = 1$ along a grid $t_0 > t_1 > \dots > t_T = 0$. The simplest solver is
# Euler's method: with $\Delta_i = t_i - t_{i+1} > 0$,
#
# $$x_{i+1} = x_i - \Delta_i\, v(x_i, t_i).$$
#
# In `flowrl`, states are *nodes* ($T + 1$ of them, node 0 is noise) and moves are *steps* ($T$ of them, step $i$ leads from node $i$ to node $i + 1$).
#
# ### Exercise 3 · Euler's method
#
# *Difficulty: medium · importance: essential · time: 6 minutes*
#
# `velocity(x, t)` maps `[sample, dim]` and `[sample]` to `[sample, dim]`, like `network` above; `times` `[node]` are the $T + 1$ grid points. Return all nodes, `[node, sample, dim]`.


# %% tags=["exercise"]
def euler(velocity, noise, times):
    """All nodes of the ODE's path."""
    nodes = [noise]
    ...
    return torch.stack(nodes)


# %% [markdown] tags=["hint"]
# **Hint.** Loop over neighbouring grid points with `pairwise(times)`. A step needs the last node, the velocity there, and the length $t - s$; `t.expand(len(x))` makes a time for every sample.


# %% tags=["solution"]
def euler(velocity, noise, times):
    """All nodes of the ODE's path."""
    nodes = [noise]
    for t, s in pairwise(times):
        x = nodes[-1]
        nodes.append(x - (t - s) * velocity(x, t.expand(len(x))))
    return torch.stack(nodes)


# %%
lesson.check_euler(euler)

# %% [markdown] tags=["explanation"]
# **Why.** The sign is negative because $\Delta_i$ is positive and time decreases. The velocity is evaluated at the node where the step *starts*, at $t_i$;
# the pair $(x_i, t_{i+1})$ is not a state of the flow.

# %%
noise = torch.randn(1500, 2, generator=torch.Generator().manual_seed(5))
figure, axes = panels(5, width=2.3, height=2.5)
for cell, steps in zip(axes[:4], (1, 2, 5, 20), strict=True):
    with torch.no_grad():
        final = euler(learned, noise, torch.linspace(1, 0, steps + 1))[-1]
    plane(cell, f"learned, {steps} step{'s' * (steps > 1)}")
    cell.scatter(*final.T, s=2, color=ACCENT, alpha=0.5)
plane(axes[4], "data")
axes[4].scatter(*ring.sample(1500, generator).T, s=2, color=DATA, alpha=0.5)
plt.show()

# %% [markdown]
# One step ends at the mean of the data, where there is no data; ten to twenty steps are enough here. RL on image models trains
# with about 10 steps and evaluates with 28 to 40, because sampling is the expensive part.
#
# ## Estimates of the final sample
#
# At every time the velocity gives estimates of both ends of the line. If $v = \varepsilon - x_0$ and $x_t = (1-t)x_0 + t\varepsilon$, then
#
# $$\hat x_0 = x_t - t\,v, \qquad \hat\varepsilon = x_t + (1-t)\,v,$$
#
# and if $v$ is the conditional mean, both are conditional means, since they are linear in $v$: $\hat x_0 = \mathbb E[x_0 \mid x_t]$. This is the **Tweedie estimate**. It is the cheapest way to score an
# unfinished image, and stepwise credit is based on it (the lesson on Stepwise-Flow-GRPO).
#
# ### Exercise 4 · the Tweedie estimate
#
# *Difficulty: easy · importance: essential · time: 3 minutes*
#
# Write $\hat x_0$ for a batch: `x` and `velocity` are `[sample, dim]`, `time` is `[sample]`.


# %% tags=["exercise"]
def tweedie(x, velocity, time):
    """The estimate of x_0 from the state, its velocity [sample, dim], and its time [sample]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Solve the two equations above the exercise for $x_0$, or step along the line for the remaining time $t$.


# %% tags=["solution"]
def tweedie(x, velocity, time):
    """The estimate of x_0 from the state, its velocity [sample, dim], and its time [sample]."""
    return x - time[:, None] * velocity


# %%
lesson.check_tweedie(tweedie)

# %% [markdown] tags=["explanation"]
# **Why.** A step from $x_t$ along the line for the whole remaining time $t$ ends at $x_0$. At $t = 0$ no time remains and $\hat x_0 = x_t$; at $t = 1$ the estimate
# is the mean of all data for every noise.

# %% tags=["hide-input"]
times = torch.linspace(1, 0, 41)
path = euler(ring.velocity, noise[:600], times)
estimates = torch.stack([tweedie(x, ring.velocity(x, t.expand(600)), t.expand(600)) for x, t in zip(path, times, strict=True)])
figure, axes = panels(4, width=2.9, height=3.0)
for cell, node in zip(axes[:3], (8, 16, 28), strict=True):
    plane(cell, f"t = {float(times[node]):.2f}")
    cell.scatter(*path[node].T, s=4, color=NOISE, alpha=0.5, label="state $x_t$")
    cell.scatter(*estimates[node].T, s=4, color=ACCENT, alpha=0.7, label=r"estimate $\hat x_0$")
axes[0].legend(loc="upper left", fontsize=8, framealpha=0.9)
distance = (estimates - path[-1]).norm(dim=2).mean(1)
axes[3].plot(times, distance, color=ACCENT, label="estimate")
axes[3].plot(times, (path - path[-1]).norm(dim=2).mean(1), color=NOISE, label="state")
axes[3].set(xlim=(1, 0), ylim=(0, None), xlabel="time t (noise → data)", title="mean distance from the final point")
axes[3].legend(frameon=False, fontsize=8)
clean(axes[3])
plt.show()
mode, early = (torch.cdist(e, ring.means).argmin(1) for e in (path[-1], estimates[4]))
print(
    f"t = {float(times[4]):.1f}: the blob nearest to the estimate is the final one in {float((mode == early).float().mean()):.0%} of the samples"
)

# %% [markdown]
# The estimate starts at the mean of all data, which is far from every blob: at first it is further from the final point than the state. It moves outwards fast; from $t = 0.7$ on it is nearer
# to the final point than the state, and by $t = 0.4$ much nearer. Its *direction* is right from the beginning: the ODE is
# deterministic, so the noise alone determines the final point, and on this symmetric ring the angle of the noise determines the blob. An ODE therefore has no decisions
# that reinforcement learning could credit, and the lesson on ODE and SDE adds randomness.
#
# ## The same with the library
#
# `flowrl` has these functions with checked shapes, and counts every network evaluation.

# %%
from flowrl import world
from flowrl.flow import tweedie as library_tweedie
from flowrl.rollout import Usage, solve
from flowrl.worlds import PolicyOptions

mixture = world("mixture")
policy = mixture.policy(PolicyOptions())  # the exact field of this ring plus a network that starts at zero
prompts = [mixture.parse("towards 45 degrees")] * 200
usage = Usage()
start = torch.randn(200, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
points = solve(policy, policy.schedule(20), policy.encode(prompts), start, usage)
reference = euler(ring.velocity, start.flatten(1), torch.linspace(1, 0, 21))[-1]
print(
    f"{usage.nfe} network evaluations in {usage.calls} calls; largest difference from ours {float((points.flatten(1) - reference).abs().max()):.1e}"
)
x, t = path[10], times[10].expand(600)
print("tweedie agrees:", torch.allclose(library_tweedie(x, ring.velocity(x, t), t), tweedie(x, ring.velocity(x, t), t)))

# %% [markdown] tags=["expected"]
# 4000 network evaluations in 20 calls; largest difference from ours 0..1e-4
# tweedie agrees: True

# %% [markdown]
# ### Exercise 5 · how many steps?
#
# *Difficulty: harder · importance: useful · time: 10 minutes*
#
# The error of Euler's method decreases like $1/T$. Check this: return the root mean square distance, over samples, between the final points of `euler` with `steps` steps and those with
# 640 steps, both with the exact field `ring.velocity` from the same `noise`. Use even grids.


# %% tags=["exercise"]
def euler_error(noise, steps):
    """Root mean square distance of the T-step result from the 640-step result."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Call `euler` twice with `torch.linspace(1, 0, steps + 1)` and the same noise, and take the last node of each. The squared distance is a sum over dimensions; the mean over samples and the root come after it.


# %% tags=["solution"]
def euler_error(noise, steps):
    """Root mean square distance of the T-step result from the 640-step result."""
    ends = [euler(ring.velocity, noise, torch.linspace(1, 0, count + 1))[-1] for count in (steps, 640)]
    return float((ends[0] - ends[1]).square().sum(dim=1).mean().sqrt())


# %%
lesson.check_euler_error(euler_error)

# %% [markdown] tags=["explanation"]
# **Why.** The distance of a sample is the root of the *sum* over its two coordinates; the mean is over samples. Both sides must start from the same noise, since the ODE maps each noise to its own point.

# %% tags=["hide-input"]
counts = [2, 5, 10, 20, 40, 80]
measured = [euler_error(noise[:400], count) for count in counts]
figure, axes = panels(width=4.6, height=3.0)
axes.loglog(counts, measured, "o-", color=DATA, label="measured")
axes.loglog(counts, [measured[2] * 10 / c for c in counts], ":", color=NOISE, label="∝ 1 / T")
axes.set(xlabel="steps T", ylabel="error of the end point", title="Euler's method is of first order")
axes.set_xticks(counts, [str(c) for c in counts])
axes.minorticks_off()
axes.legend(frameon=False)
clean(axes)
plt.show()

# %% [markdown]
# ## To keep
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $x_t = (1-t)x_0 + t\varepsilon$ | the path | `flow.interpolate` |
# | $v = \mathbb E[\varepsilon - x_0 \mid x_t]$ | velocity | `FlowPolicy.velocity` |
# | $t_0 = 1 > \dots > t_T = 0$ | grid | `Schedule.times` |
# | $\hat x_0 = x_t - tv$ | Tweedie estimate | `flow.tweedie` |
# | $x_{i+1} = x_i - \Delta_i v$ | Euler step | `samplers.ODE`, `rollout.solve` |
#
# ## Further reading
#
# - Lipman et al. 2022, *Flow matching for generative modeling* (arXiv 2210.02747): the training loss, and why it estimates the mean velocity (theorem 2).
# - Liu et al. 2022, *Rectified flow* (arXiv 2209.03003): the same straight paths, found independently.
# - Lipman et al. 2024, *Flow matching guide and code* (arXiv 2412.06264): a textbook treatment with exercises in PyTorch.
# - Esser et al. 2024, *SD3* (arXiv 2403.03206): flow matching at scale; section 5.3.2 explains the shift of the time grid.
#
# **Next:** [2 · From ODE to SDE](02_ode_to_sde.ipynb) makes the path random without changing where it ends.

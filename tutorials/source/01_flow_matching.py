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
# samples with an ODE, estimate the finished sample from any state on the way, and recognise a broken sampler by its samples.
#
# **Time** 90 minutes, of which the computer needs less than one. **You need** PyTorch and the notion of an expectation.
#
# All methods of this course fine-tune a flow model, so we build one first. We work in two dimensions, where the exact solution is known in closed form and every error can be plotted.
# The animation shows where the lesson leads: random points become data.

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
        axes.set_title(
            f"t = {float(times[node]):.2f}  "
            f" ({'noise' if node == 0 else 'data' if node == 40 else 'on the way'})"
        )

    return animation(figure, draw, frames=52, seconds=4)


opening()

# %% [markdown]
# ## The path
#
# To turn noise into data, a model needs a path between them. Let $x_0$ be a data point and $x_1 = \varepsilon$ standard Gaussian noise. Flow matching joins the two by a straight line on which $x_t$ moves at constant speed. During generation, time decreases **from $t = 1$ (noise) to $t = 0$ (data)**. The papers and the public code of this field use this
# direction, and so does `flowrl`. Other texts use the opposite direction, which is the most common cause of wrong signs.
#
# Our data are eight small Gaussian blobs on a circle (`GaussianMixture.ring()`).
#
# ### Exercise 1 · repair the path
#
# *Difficulty: easy · kind: debugging · importance: essential · time: 4 minutes*
#
# The draft below should return $x_t$ for a whole batch: `clean` ($x_0$) and `noise` ($\varepsilon$) are `[sample, dim]`, and every sample has its own `time` `[sample]`. It has two mistakes. The first is visible at $t = 1$. The second raises an error for most shapes, and none for as many samples as dimensions.


# %% tags=["exercise"]
def interpolate(clean, noise, time):
    """x_t of every sample."""
    return clean + time * (clean - noise)


# %% [markdown] tags=["hint"]
# **Hint.** A point that moves at constant speed has moved by the fraction $t$ of the way from $x_0$ to $\varepsilon$. `time` is `[sample]` and the points are `[sample, dim]`: give the time a second axis with `time[:, None]`.


# %% tags=["solution"]
def interpolate(clean, noise, time):
    """x_t of every sample."""
    t = time[:, None]
    return (1 - t) * clean + t * noise


# %%
lesson.check_interpolate(interpolate)

# %% [markdown] tags=["explanation"]
# **Why.** The way from $x_0$ to $\varepsilon$ is $\varepsilon - x_0$, so $x_t = x_0 + t\,(\varepsilon - x_0) = (1-t)\,x_0 + t\,\varepsilon$. `time[:, None]` broadcasts the time over the dimensions, so each sample uses its own time. Without the new axis,
# `[sample]` and `[sample, dim]` either do not broadcast or, if the two sizes agree, samples and dimensions are silently mixed up.
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
# Along one line, $x_t = (1 - t)\, x_0 + t\, \varepsilon$, the velocity is constant: $\mathrm{d}x_t/\mathrm{d}t = \varepsilon - x_0$. During generation, however, we know only the
# point $x_t$, neither $x_0$ nor $\varepsilon$, and many lines pass near every point. The field that moves the whole
# *distribution* correctly is the average over these lines,
#
# $$v(x, t) = \mathbb{E}\left[\varepsilon - x_0 \mid x_t = x\right].$$
#
# Why is the average sufficient? Suppose that two lines cross at a point: the same mass leaves the point whether each half goes its own way or all of it takes the mean direction. The density at a point changes only by the net flow in and out, and this flow is the density times
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
# *Difficulty: medium · kind: formula · importance: essential · time: 6 minutes*
#
# `network(x, t)` maps `[sample, dim]` and `[sample]` to `[sample, dim]`. Return the mean squared error over the batch and the dimensions.


# %% tags=["exercise"]
def flow_matching_loss(network, clean, noise, time):
    """Mean squared error of the predicted velocity at x_t."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Compute $x_t$ with your function of exercise 1. The target is the derivative of $x_t$ with respect to $t$, which does not depend on $t$.


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
# ### Exercise 3 · the training loop
#
# *Difficulty: medium · kind: code · importance: essential · time: 10 minutes*
#
# Training a flow needs no simulation of paths: every update sees points at random times. Write the loop. Each of the `updates` updates draws `size` new data points with `data.sample(size, generator)`, new noise, and a new uniform time for every sample. Take all random numbers from `generator`, in this order. Then it computes the loss of exercise 2 and takes one step of the optimizer. Return the list of the losses as plain numbers.


# %% tags=["exercise"]
def train(velocity, optimizer, data, updates, generator, size=512):
    """The loss of every update, after training the network inside `velocity`."""
    losses = []
    ...
    return losses


# %% [markdown] tags=["hint"]
# **Hint.** One update has two halves: draw three tensors and compute the loss; then the three calls with which every PyTorch loop ends. The points have two dimensions: `torch.randn(size, 2, generator=generator)`.


# %% tags=["solution"]
def train(velocity, optimizer, data, updates, generator, size=512):
    """The loss of every update, after training the network inside `velocity`."""
    losses = []
    for _ in range(updates):
        clean = data.sample(size, generator)
        noise = torch.randn(size, 2, generator=generator)
        time = torch.rand(size, generator=generator)
        loss = flow_matching_loss(velocity, clean, noise, time)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
lesson.check_train(train)

# %% [markdown] tags=["explanation"]
# **Why.** The loss is an expectation over data, noise and time, so each update needs a fresh sample of all three. With one time for the whole batch the expectation is the same, but the gradient is far noisier, because all samples have the same time.
# `loss.item()` keeps the number without the graph; a list of loss tensors would keep the activations of every update in memory.

# %% [markdown]
# Now we train a network with your loop, which takes between five seconds and a minute. The learning rate decreases linearly to 0.

# %%
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(3, 96),
    nn.SiLU(),
    nn.Linear(96, 96),
    nn.SiLU(),
    nn.Linear(96, 96),
    nn.SiLU(),
    nn.Linear(96, 2),
)


def learned(x, t):
    """The network's velocity; its input is the point and the time."""
    return net(torch.cat([x, t[:, None]], dim=1))


optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / 4000)
optimizer.register_step_post_hook(lambda *_: rate.step())
losses = train(learned, optimizer, ring, 4000, generator)
print(
    f"loss: first 100 updates {sum(losses[:100]) / 100:.2f}, last 100 updates"
    f" {sum(losses[-100:]) / 100:.2f}"
)

# %% [markdown] tags=["expected"]
# loss: first 100 updates 2.45..2.60, last 100 updates 1.95..2.07

# %% [markdown]
# The loss stops at about 2. Is that bad? For this data we can find out, because the exact velocity can be written down. At time $t$ a blob has become a Gaussian. Its centre is $1 - t$ times the centre of the blob, and its variance is $(1-t)^2$ times that of the blob, plus $t^2$. The posterior probability of each blob follows from Bayes' rule, and within a blob all estimates are linear.
# `GaussianMixture.velocity` computes this field.
#
# ### Exercise 4 · the loss of the exact field
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# The next cell computes the same loss with the *exact* velocity of the ring in place of the network. What will it print?
#
# - **a** 0, up to rounding
# - **b** about 1, half of the network's loss
# - **c** about 2, like the network's loss

# %% tags=["exercise"]
exact_loss = "..."

# %% [markdown] tags=["hint"]
# **Hint.** The target of a sample is $\varepsilon - x_0$, and the exact velocity is the *mean* of the targets at a point. How many different targets are there at one point?

# %% tags=["solution"]
exact_loss = "c"

# %%
lesson.check_exact_loss(exact_loss)

# %% [markdown] tags=["explanation"]
# **Why.** Many lines with different directions pass through one point, and the direction of each is a target. Even the exact field predicts only their mean, so the loss keeps the variance of $\varepsilon - x_0$ around it.
# So the loss alone is a poor measure of a flow's quality. Compare it with the loss of a better model, or look at samples.

# %%
many = (
    ring.sample(20000, torch.Generator().manual_seed(2)),
    torch.randn(20000, 2, generator=torch.Generator().manual_seed(3)),
)
exact = flow_matching_loss(
    ring.velocity, *many, torch.rand(20000, generator=torch.Generator().manual_seed(4))
)
print(f"loss of the exact velocity: {float(exact):.2f}")

# %% [markdown]
# The network is close to the best possible loss. A direct comparison with the exact field shows where it is wrong.

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
        cell.quiver(
            *grid.T,
            *(-field.T),
            color=shade,
            angles="xy",
            scale=40,
            width=0.006,
            alpha=0.8,
            label=label,
        )
axes[0].legend(loc="lower left", fontsize=8, framealpha=0.9)
errors = []
for t in (ts := torch.linspace(0.02, 1, 25)):
    x = interpolate(
        ring.sample(4000, generator), torch.randn(4000, 2, generator=generator), t.expand(4000)
    )
    with torch.no_grad():
        gap = learned(x, t.expand(4000)) - ring.velocity(x, t.expand(4000))
    errors.append(float(gap.square().mean().sqrt()))
axes[3].plot(ts, errors, color=ACCENT)
axes[3].set(
    xlabel="time t",
    title="error where the data are",
    ylim=(0, None),
    ylabel="root mean square",
)
clean(axes[3])
plt.show()

# %% [markdown]
# The arrows show $-v$, the direction in which a sample moves. Near $t = 1$ all samples move towards the centre, because the conditional mean of the data is
# then nearly the overall mean. Later the field splits towards the eight blobs. The error is below about 0.1 for $t > 0.5$. Below, it has two peaks: near 0, and near 0.2, where the blobs separate.
#
# ## From noise to data
#
# With the velocity we can generate samples: we solve $\mathrm{d}x/\mathrm{d}t = v$ along a grid of times $1 = t_0 > t_1 > \dots > t_T = 0$. We write $z_i$ for the state at $t_i$, so $z_0$ is noise and $z_T$ the sample.
# In `flowrl` these states are called *nodes* ($T + 1$ of them), and step $i$ of the $T$ *steps* leads from node $i$ to node $i + 1$. The simplest solver is Euler's method: with the step length $\Delta = t_i - t_{i+1} > 0$,
#
# $$z_{i+1} = z_i - \Delta\, v(z_i, t_i).$$
#
# ### Exercise 5 · Euler's method
#
# *Difficulty: medium · kind: code · importance: essential · time: 6 minutes*
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
# **Why.** The sign is negative because $\Delta$ is positive and time decreases. The velocity is evaluated at the node where the step *starts*, at $t_i$. For the time $t_{i+1}$ the state $z_i$ has too much noise, and the network was never trained on such a pair.

# %% [markdown]
# How many steps does the sampler need? Let us begin with the extreme case.
#
# ### Exercise 6 · a single step
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# The next cell samples with 1, 2, 5 and 20 steps. The first figure uses **one** step from $t = 1$ to $t = 0$. Where will its 1500 samples be?
#
# - **a** on the eight blobs, but with too large a spread
# - **b** close together near the centre of the ring
# - **c** on the circle, also between the blobs
# - **d** in a Gaussian cloud like the noise

# %% tags=["exercise"]
one_step = "..."

# %% [markdown] tags=["hint"]
# **Hint.** At $t = 1$ the state is pure noise and contains no information about $x_0$. Which value does $\mathbb E[\varepsilon - x_0 \mid x_1]$ then have, and where does a step of length 1 lead?

# %% tags=["solution"]
one_step = "b"

# %%
lesson.check_one_step(one_step)

# %% [markdown] tags=["explanation"]
# **Why.** At $t = 1$ the noise is known and the data point is not, so $v(x, 1) = x - \mathbb E[x_0]$. One step of length 1 subtracts it and ends at $\mathbb E[x_0]$, the mean of the data, for every noise. More steps let the later velocities choose a blob.

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
# One step ends near the mean of the data, where there is no data. With 20 steps the rings agree except for a few points between the blobs; more steps do not remove these, because they come from the error of the network. Reinforcement learning on image models trains
# with about 10 steps and evaluates with 28 to 40, because most of the cost is sampling.
#
# ## Estimates of the finished sample
#
# Often we need to know early what a sample will become, for example to compute a reward for an unfinished image. At every time the velocity gives estimates of both ends of the line. If the state $x_t = (1-t)x_0 + t\varepsilon$ and the velocity $v = \varepsilon - x_0$ of one line are known, both ends $x_0$ and $\varepsilon$ are determined. With the field's $v$, the mean over all lines through $x_t$, the same two formulas give estimates $\hat x_0$ and $\hat\varepsilon$.
#
# ### Exercise 7 · the Tweedie estimate
#
# *Difficulty: easy · kind: formula · importance: essential · time: 5 minutes*
#
# Solve for both ends, and return $\hat x_0$ for a batch: `x` and `velocity` are `[sample, dim]`, `time` is `[sample]`. Is $\hat x_0$ the *mean* of the clean points behind $x_t$, or only one of them?


# %% tags=["exercise"]
def tweedie(x, velocity, time):
    """The estimate of x_0; x and velocity are [sample, dim], time is [sample]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Eliminate $\varepsilon$ from $v = \varepsilon - x_0$ and $x_t = (1-t)x_0 + t\varepsilon$, or step along the line for the remaining time.


# %% tags=["solution"]
def tweedie(x, velocity, time):
    """The estimate of x_0; x and velocity are [sample, dim], time is [sample]."""
    return x - time[:, None] * velocity


# %%
lesson.check_tweedie(tweedie)

# %% [markdown] tags=["explanation"]
# **Why.** A step from $x_t$ along the line for the whole remaining time $t$ ends at $x_0$, and one of length $1-t$ in the other direction at $\varepsilon$:
#
# $$\hat x_0 = x_t - t\,v, \qquad \hat\varepsilon = x_t + (1-t)\,v .$$
#
# Both are linear in $v$. So if $v$ is the conditional mean, they are conditional means too. At $t = 0$ no time remains and $\hat x_0 = x_t$; at $t = 1$ the estimate
# is the mean of all data for every noise.

# %% [markdown]
# The estimate $\hat x_0 = x_t - t\,v = \mathbb E[x_0 \mid x_t]$ is called the **Tweedie estimate**. It is the cheapest estimate of a finished image, and the lesson on Stepwise-Flow-GRPO computes rewards from it. The estimate of the noise is $\hat\varepsilon = x_t + (1-t)\,v$.

# %% tags=["hide-input"]
times = torch.linspace(1, 0, 41)
path = euler(ring.velocity, noise[:600], times)
estimates = torch.stack(
    [
        tweedie(x, ring.velocity(x, t.expand(600)), t.expand(600))
        for x, t in zip(path, times, strict=True)
    ]
)
figure, axes = panels(4, width=2.9, height=3.0)
for cell, node in zip(axes[:3], (8, 16, 28), strict=True):
    plane(cell, f"t = {float(times[node]):.2f}")
    cell.scatter(*path[node].T, s=4, color=NOISE, alpha=0.5, label="state $x_t$")
    cell.scatter(
        *estimates[node].T, s=4, color=ACCENT, alpha=0.7, label=r"estimate $\hat x_0$"
    )
axes[0].legend(loc="upper left", fontsize=8, framealpha=0.9)
distance = (estimates - path[-1]).norm(dim=2).mean(1)
axes[3].plot(times, distance, color=ACCENT, label="estimate")
axes[3].plot(times, (path - path[-1]).norm(dim=2).mean(1), color=NOISE, label="state")
axes[3].set(
    xlim=(1, 0),
    ylim=(0, None),
    xlabel="time t (noise → data)",
    title="mean distance from the final point",
)
axes[3].legend(frameon=False, fontsize=8)
clean(axes[3])
plt.show()
mode, early = (torch.cdist(e, ring.means).argmin(1) for e in (path[-1], estimates[4]))
print(
    f"t = {float(times[4]):.1f}: the blob nearest to the estimate is the final one in"
    f" {float((mode == early).float().mean()):.0%} of the samples"
)

# %% [markdown]
# The estimate starts at the mean of all data, which is far from every blob: at first it is further from the final point than the state. However, it moves outwards fast; from $t = 0.7$ on it is nearer
# to the final point than the state, and by $t = 0.4$ much nearer. Its *direction* is right as soon as the estimate leaves the centre: the ODE is
# deterministic, so the noise alone determines the final point, and on this symmetric ring the angle of the noise determines the blob. After this first noise nothing is random, so there is no later decision
# that reinforcement learning could credit. The lesson on ODE and SDE adds random steps.
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
# the exact field of this ring plus a network that starts at zero
policy = mixture.policy(PolicyOptions())
prompts = [mixture.parse("towards 45 degrees")] * 200
usage = Usage()
start = torch.randn(200, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
points = solve(policy, policy.schedule(20), policy.encode(prompts), start, usage)
reference = euler(ring.velocity, start.flatten(1), torch.linspace(1, 0, 21))[-1]
print(
    f"{usage.nfe} network evaluations in {usage.calls} calls; largest difference from ours"
    f" {float((points.flatten(1) - reference).abs().max()):.1e}"
)
x, t = path[10], times[10].expand(600)
print(
    "tweedie agrees:",
    torch.allclose(
        library_tweedie(x, ring.velocity(x, t), t), tweedie(x, ring.velocity(x, t), t)
    ),
)

# %% [markdown] tags=["expected"]
# 4000 network evaluations in 20 calls; largest difference from ours 0..1e-4
# tweedie agrees: True

# %% [markdown]
# ## The error of the solver
#
# ### Exercise 8 · how many steps?
#
# *Difficulty: harder · kind: code · importance: useful · time: 10 minutes*
#
# In theory, the error of Euler's method decreases like $1/T$. Let us check this. Compare the final points of `euler` with `steps` steps and with 640 steps, both with the exact field `ring.velocity`, the same `noise` and even grids. Return the root mean square of their distances over samples.


# %% tags=["exercise"]
def euler_error(noise, steps):
    """Root mean square distance of the T-step result from the 640-step result."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Call `euler` twice with `torch.linspace(1, 0, steps + 1)` and the same noise, and take the last node of each. The squared distance is a sum over dimensions; the mean over samples and the root come after it.


# %% tags=["solution"]
def euler_error(noise, steps):
    """Root mean square distance of the T-step result from the 640-step result."""
    ends = [
        euler(ring.velocity, noise, torch.linspace(1, 0, count + 1))[-1]
        for count in (steps, 640)
    ]
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
axes.set(
    xlabel="steps T", ylabel="error of the end point", title="Euler's method is of first order"
)
axes.set_xticks(counts, [str(c) for c in counts])
axes.minorticks_off()
axes.legend(frameon=False)
clean(axes)
plt.show()

# %% [markdown]
# From five steps on, the measured error follows $1/T$: ten times the accuracy costs ten times the evaluations. A better solver needs fewer evaluations for the same error.
#
# ### Exercise 9 · a better solver
#
# *Difficulty: harder · kind: design · importance: optional · time: 12 minutes*
#
# Design a solver whose error is at most half of Euler's with the same budget. `velocity(x, t)` is as in exercise 5, and `evaluations` is the number of times that you may call it; it is even. Return the final points only.
# The check uses 20 evaluations on the ring. There are several good answers.


# %% tags=["exercise"]
def better_ends(velocity, noise, evaluations):
    """The points at t = 0, with at most `evaluations` calls of `velocity`."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Euler's method uses the velocity at the start of a step for the whole step. With half as many steps you have two evaluations for each. Where is the velocity more typical of the step?


# %% tags=["solution"]
def better_ends(velocity, noise, evaluations):
    """The points at t = 0, with at most `evaluations` calls of `velocity`."""
    x = noise
    for t, s in pairwise(torch.linspace(1, 0, evaluations // 2 + 1)):
        middle = x - (t - s) / 2 * velocity(x, t.expand(len(x)))
        x = x - (t - s) * velocity(middle, ((t + s) / 2).expand(len(x)))
    return x


# %%
lesson.check_better_ends(better_ends)

# %% [markdown] tags=["explanation"]
# **Why.** This is the midpoint method: a half step of Euler's method finds the middle, and the velocity there is used for the whole step. In theory its error falls like $1/T^2$, so even half as many steps have a smaller error. Heun's method, which averages the velocities at both ends, and multistep methods, which reuse earlier velocities, are as good.
# Samplers for reinforcement learning use Euler steps nevertheless. Their random steps (the lesson on ODE and SDE) have errors of their own, and the policy needs a Gaussian whose mean is linear in *one* velocity.

# %%
accurate = euler(ring.velocity, noise[:400], torch.linspace(1, 0, 641))[-1]
for evaluations in (10, 20, 40):
    gap = better_ends(ring.velocity, noise[:400], evaluations) - accurate
    print(
        f"{evaluations} evaluations: error {euler_error(noise[:400], evaluations):.4f} with"
        f" Euler, {float(gap.square().sum(1).mean().sqrt()):.4f} with your solver"
    )

# %% [markdown]
# ## Broken samplers
#
# A wrong sampler raises no error. It returns points, and only their distribution shows that something is wrong. The next cell draws samples from three broken samplers, each with 10 Euler steps and the exact velocity; the data are grey.

# %% tags=["hide-input"]
figure, axes = panels(3, width=2.9, height=3.0)
for number, cell in enumerate(axes, 1):
    plane(cell, f"sampler {number}")
    cell.scatter(*ring.sample(800, torch.Generator().manual_seed(0)).T, s=3, color="#d5d8dd")
    cell.scatter(*lesson.broken_samples(number, 600).T, s=4, color=ACCENT, alpha=0.6)
plt.show()

# %% [markdown]
# ### Exercise 10 · name the bug
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 6 minutes*
#
# Each sampler has one of these bugs. Which?
#
# | | bug |
# |---|---|
# | A | the velocity is evaluated at $t = 1$ in every step |
# | B | the last step of the grid is missing |
# | C | the noise is `torch.rand(600, 2)` |

# %% tags=["exercise"]
bugs = {1: ..., 2: ..., 3: ...}

# %% [markdown] tags=["hint"]
# **Hint.** For each bug ask what it changes: where the paths start, where they end, or in which direction they move. Then look for the figure with that change.

# %% tags=["solution"]
bugs = {1: "C", 2: "A", 3: "B"}

# %%
lesson.check_bugs(bugs)

# %% [markdown] tags=["explanation"]
# **Why.** `torch.rand` is uniform on $[0, 1)$, so all noise has angles between 0 and 90 degrees, and only the blobs there are reached. At $t = 1$ the velocity points away from the mean of the data. So ten steps with this velocity shrink the noise towards the mean, and no sample reaches a blob.
# Without the last step the samples are states at $t = 0.1$: they still contain noise, and their blobs are at 0.9 of the radius.

# %% [markdown]
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Two lines with different directions cross at a point $x$ at the same time $t$. The exact velocity there is **a** the direction of the nearer line, **b** a mean of the directions, weighted by how likely each line is, **c** undefined.
# 2. The training loss of a flow has not fallen for 2,000 updates and is far above 0. This shows that **a** the network is too small, **b** the learning rate is too small, **c** nothing by itself.
# 3. A colleague's code has $x_t = t\,x_0 + (1-t)\,\varepsilon$. In this notation the velocity, and the direction of time during generation, are **a** $x_0 - \varepsilon$, increasing, **b** $\varepsilon - x_0$, decreasing, **c** $\varepsilon - x_0$, increasing.
# 4. At which time is the Tweedie estimate the same for every state? **a** at $t = 0$, **b** at $t = 1$, **c** at no time.
# 5. Two samples of the ODE start from the same noise, with the same prompt. Their final points are **a** equal, **b** different, because each step adds noise, **c** in the same blob, but not equal.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** Questions 1 and 2 belong to the sections on the velocity and its training. For question 3 differentiate the path; for question 4 insert $v(x, 1)$ into the estimate; for question 5 look for a random number in Euler's method.

# %% tags=["solution"]
quiz = {1: "b", 2: "c", 3: "a", 4: "b", 5: "a"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: $v$ is the conditional mean of $\varepsilon - x_0$. 2: the exact field has a loss of about 2 here. 3: $\mathrm dx_t/\mathrm dt = x_0 - \varepsilon$, and $t = 1$ is data. 4: $v(x, 1) = x - \mathbb E[x_0]$, so $\hat x_0 = \mathbb E[x_0]$. 5: the ODE has no random numbers after the noise.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $x_t = (1-t)x_0 + t\varepsilon$ | the path | `flow.interpolate` |
# | $v = \mathbb E[\varepsilon - x_0 \mid x_t]$ | velocity | `FlowPolicy.velocity` |
# | $t_0 = 1 > \dots > t_T = 0$ | grid | `Schedule.times` |
# | $\hat x_0 = x_t - tv$ | Tweedie estimate | `flow.tweedie` |
# | $z_{i+1} = z_i - \Delta\,v(z_i, t_i)$ | Euler step | `samplers.ODE`, `rollout.solve` |
#
# ## Symbols
#
# {symbols: $t$; $T$; $\varepsilon$; $x_t$; $v$; $z_j$; $s$; $\hat x_0$; $\hat\varepsilon$; NFE}
#
# ## Further reading
#
# - Lipman et al. 2022, *Flow matching for generative modeling* (arXiv 2210.02747): the training loss, and why it estimates the mean velocity (theorem 2).
# - Liu et al. 2022, *Rectified flow* (arXiv 2209.03003): the same straight paths, found independently.
# - Lipman et al. 2024, *Flow matching guide and code* (arXiv 2412.06264): a textbook treatment with exercises in PyTorch.
# - Esser et al. 2024, *SD3* (arXiv 2403.03206): flow matching at scale; section 5.3.2 explains the shift of the time grid.
#
# **Next:** [2 · From ODE to SDE](02_ode_to_sde.ipynb) adds noise to the path and preserves the distribution of the samples.

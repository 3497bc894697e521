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
# # 13 · The forward process
#
# **After this lesson you can** explain why DiffusionNFT, AWM and DGPO need no SDE, say what their rewards weight, derive NFT's gradient, say what stops each of their steps, and count their network evaluations.
#
# **Time** 90 minutes, of which the computer needs about one. **You need** the lesson on GRPO; the measurements use the gradients of the lesson Test your own rule.
#
# Since the lesson on ODE and SDE we have turned the ODE into an SDE, because a policy gradient needs the log-probability of every step. Forward-process methods need no log-probability. They take finished samples and their rewards, add noise to the samples again as in pretraining, and regress the velocity with weights that depend on the rewards.
# The figure shows which states each kind of update uses, for the same eight samples.

# %% tags=["hide-input"]
import math

import matplotlib.pyplot as plt
import torch

from flowrl.credit import StepwiseGain, Uniform
from flowrl.flow import (
    DrawnSteps,
    PermutedTimes,
    interpolate,
    uniform_schedule,
    velocity_target,
)
from flowrl.core.forward import ForwardBatch
from flowrl.losses import AWM, DGPO, DiffusionNFT
from flowrl.probes import NoProbe
from flowrl.rollout import Groups
from flowrl.rollout.forward import credited
from flowrl.samplers import ODE, FlowSDE, Multistep, Windowed
from flowrl.worlds.mixture import WIDTH, ring
from flowrl.bench.gradients import (
    Setting,
    alignment,
    forward_gradients,
    pathwise_gradients,
    policy_gradients,
)
from flowrl_course import lesson_13 as lesson
from flowrl_course.figures import (
    ACCENT,
    COLOURS,
    DATA,
    INK,
    NOISE,
    OTHERS,
    SIGNED,
    clean,
    panels,
    plane,
    target,
)
from flowrl_course.progress import progress
from flowrl_course.runs import learn, start

torch.set_num_threads(1)
SHADES = {name: COLOURS[name] for name in ("flow-grpo", "diffusion-nft", "awm", "dgpo")}
# the eight modes; the target of the prompt "towards 0 degrees"
data, centre = ring(), torch.tensor([2.0, 0.0])


def settings_of(trainer):
    """The trainer's policy with samplers of four kinds."""
    sde, window = (Windowed(FlowSDE(0.7), range(count)) for count in (9, 5))
    samplers = {"sde": sde, "window": window, "euler": ODE(), "dpm++": Multistep()}
    given = (trainer.schedule, trainer.reward, trainer.prompts.prompts)
    return {
        name: Setting(trainer.policy, sampler, *given) for name, sampler in samplers.items()
    }


def reward(points):
    """The soft reward of that prompt, [sample]."""
    return torch.exp(-(points - centre).square().sum(-1) / (2 * WIDTH**2))


def opening():
    """Eight trajectories, and the same finished samples with fresh noise."""
    setting = settings_of(start())["sde"]
    prompt = next(i for i, prompt in enumerate(setting.prompts) if target(prompt)[0] > 1.9)
    generator = torch.Generator().manual_seed(8)
    path = setting.rollout(
        Groups(len(setting.prompts), 8), generator, Uniform().probe
    ).trajectories
    nodes = path.nodes.view(len(setting.prompts), 8, 11, 2)[prompt]
    rewards = torch.exp(
        -(nodes[:, -1] - torch.tensor(target(setting.prompts[prompt]))).square().sum(-1) / 2
    )
    colours = plt.get_cmap(SIGNED)(
        (0.5 + (rewards - rewards.mean()) / rewards.std() / 4).clamp(0, 1).numpy()
    )
    figure, (left, right) = panels(2, width=4.0, height=4.0)
    plane(left, "Flow-GRPO: transitions of the sampler")
    plane(right, "Forward process: finished samples, fresh noise")
    for member, shade in enumerate(colours):
        left.plot(*nodes[member].T, "o-", color=shade, markersize=2.5, linewidth=1)
        for noise in torch.randn(4, 2, generator=generator):
            time = torch.rand(1, generator=generator)
            ends = torch.stack([nodes[member, -1], noise])
            right.plot(*ends.T, color=shade, linewidth=0.6, alpha=0.7)
            right.scatter(*((1 - time) * ends[0] + time * ends[1]), color=[shade], s=9)
    for cell in (left, right):
        cell.scatter(
            *nodes[:, -1].T, c=colours, s=45, zorder=3, edgecolors=INK, linewidths=0.6
        )
        cell.scatter(*target(setting.prompts[prompt]), marker="x", s=90, color=INK, zorder=4)
    figure.suptitle("Eight samples of one prompt, blue: good, red: bad", fontsize=11)
    plt.show()


opening()

# %% [markdown]
# ## From a transition to a regression
#
# Let us first write the policy gradient as a regression. Flow-GRPO's step $i$ from time $t$ to $s = t - \Delta$ is a Gaussian whose mean is linear in the velocity (the lesson on ODE and SDE, with $\sigma_t^2 = a^2 t/(1-t)$ and the noise level $a$):
#
# $$\mu(v) = \Big(1 - \frac{a^2 \Delta}{2(1-t)}\Big)\, z_i - \kappa\, v, \qquad \kappa = \Delta\,(1 + a^2/2).$$
#
# Let $v^{\mathrm T}$ be the velocity that would have led exactly to the drawn state, $\mu(v^{\mathrm T}) = z_{i+1}$. Then
#
# $$-\log \pi(z_{i+1} \mid z_i) = \frac{|z_{i+1} - \mu(v)|^2}{2\,\mathrm{std}^2} + \text{const} = \frac{\kappa^2}{2\,\mathrm{std}^2}\,|v - v^{\mathrm T}|^2 + \text{const}.$$
#
# So the policy gradient is a *regression weighted by advantages*, whose target is the draw of one step.
#
# ### Exercise 1 · the target of a transition
#
# *Difficulty: medium · kind: formula · importance: useful · time: 6 minutes*
#
# Return $v^{\mathrm T}$ `[sample, dim]` of transitions from `z` at time `t` to `z_next` at time `s` (numbers, `t` < 1).


# %% tags=["exercise"]
def transition_target(z, z_next, t, s, noise_level):
    """The velocity whose mean is the state that was drawn."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Set $\mu(v) = z_{i+1}$, bring the term with $z_i$ to the other side and divide by $-\kappa$. For $a = 0$ the result is the slope $(z_i - z_{i+1})/\Delta$.


# %% tags=["solution"]
def transition_target(z, z_next, t, s, noise_level):
    """The velocity whose mean is the state that was drawn."""
    delta = t - s
    kappa = delta * (1 + noise_level**2 / 2)
    return ((1 - noise_level**2 * delta / (2 * (1 - t))) * z - z_next) / kappa


# %%
lesson.check_target(transition_target)

# %% [markdown] tags=["explanation"]
# **Why.** $z_{i+1} = \mu(v_{\text{old}}) + \mathrm{std}\,\xi$ with the step's noise $\xi$, so $v^{\mathrm T} = v_{\text{old}} - (\mathrm{std}/\kappa)\,\xi$: the target is the old velocity plus noise. For $a = 0$ it is the slope $(z_i - z_{i+1})/\Delta$ of the step.

# %% [markdown]
# Pretraining regresses the same velocity towards another target, $v^* = \varepsilon - x_0$ at $x_t = (1-t)\,x_0 + t\,\varepsilon$. The mean of $v^{\mathrm T}$ is always $v_{\text{old}}$. That of $v^*$ is $v_{\text{old}}(x_t)$ only if $v_{\text{old}}$ is the conditional mean of $v^*$ over its own samples, as before training. In this section it is, so the two targets have one mean, but they differ in their noise. The next cell takes *one* state at $t = 0.7$ and draws 20,000 targets for it, as each method would:
#
# - Flow-GRPO continues from it with the SDE. The target is $v^{\mathrm T}$ of the next step, and the reward is that of the finished sample.
# - In the forward process it is a noised sample. The target is $v^* = (x_t - x_0)/t$, and the reward is that of $x_0$. (We know the data here, so the cell draws $x_0$ from the exact $p(x_0 \mid x_t)$.)
#
# Which target do you expect to be more closely related to the reward?

# %%
count, level, now = 20_000, 0.7, 0.7
state = torch.tensor([0.35, 0.85])
generator = torch.Generator().manual_seed(1)


def continued(level, steps, count):
    """The targets of the next transition and the rewards of SDE continuations of the state,
    [sample, 2] and [sample].
    """
    sampler, grid, x = (
        Windowed(FlowSDE(level), range(steps - 1)),
        uniform_schedule(steps),
        state.repeat(count, 1),
    )
    begin = round((1 - now) * steps)
    for step in range(begin, steps):
        velocity = data.velocity(x, grid.times[step].expand(count))
        gaussian = sampler.transition(x, velocity, grid, torch.full((count,), step))
        x = gaussian.mean + gaussian.std[:, None] * torch.randn(count, 2, generator=generator)
        if step == begin:
            targets = transition_target(
                state.repeat(count, 1), x, now, float(grid.times[step + 1]), level
            )
    return targets, reward(x)


first_target, first_reward = continued(level, 10, count)
pool = data.sample(1_000_000, generator)
likelihood = torch.exp(-(state - (1 - now) * pool).square().sum(1) / (2 * now**2))
chosen = torch.multinomial(likelihood, count, replacement=True, generator=generator)
clean_points = pool[chosen]
views = {
    "transition": (first_target, first_reward),
    "finished sample": ((state - clean_points) / now, reward(clean_points)),
}
exact = data.velocity(state[None], torch.tensor([now]))[0]
print(f"exact velocity ({exact[0]:+.2f}, {exact[1]:+.2f})")
for name, (values, rewards) in views.items():
    mean, terms = (
        values.mean(0),
        (rewards - rewards.mean())[:, None] * (values - values.mean(0)),
    )
    signal, noise = terms.mean(0), terms.std(0).norm()
    spread = (values - mean).square().sum(1).mean().sqrt()
    print(
        f"{name:<16} mean ({mean[0]:+.2f}, {mean[1]:+.2f}), spread {spread:.2f}; covariance"
        f" with R ({signal[0]:+.2f}, {signal[1]:+.2f}), signal/noise of a sample"
        f" {signal.norm() / noise:.2f}"
    )

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.2, height=3.6)
for cell, (name, (values, rewards)) in zip(axes, views.items(), strict=True):
    dots = cell.scatter(*values[:700].T, c=rewards[:700], cmap="viridis", s=5, vmin=0, vmax=1)
    signal, tail = ((rewards - rewards.mean())[:, None] * values).mean(0), values.mean(0)
    cell.annotate(
        "",
        tail + 4 * signal / signal.norm(),
        tail,
        arrowprops=dict(arrowstyle="-|>", color=ACCENT, linewidth=2.4),
    )
    cell.set(
        xlabel="first coordinate of the target",
        ylabel="second coordinate",
        aspect="equal",
        xlim=(-11, 11),
        ylim=(-10, 10),
    )
    cell.set_title(f"Target: {name}")
    clean(cell)
figure.colorbar(dots, ax=axes[1], label="reward")
figure.suptitle(
    "One state, 700 of its targets; arrow: direction of the covariance with R", fontsize=11
)
plt.show()

# %% [markdown]
# Both means are the exact velocity, up to the sampling error. The transition's target contains the noise of one step out of six, and the reward depends on all of them. The finished sample determines its reward completely. So its target separates good samples from bad ones, and the signal/noise of a sample is about twice as large.
#
# The two covariances are not multiples of each other. To see why, integrate by parts over the Gaussian noise of each target:
#
# $$\operatorname{Cov}(R, v^{\mathrm T}) \approx -\frac{a^2}{1 + a^2/2}\,\frac{t}{1-t}\,\nabla V^*(x_t), \qquad \operatorname{Cov}(R, v^*) = -\frac{t}{1-t}\,\nabla\,\mathbb E[R \mid x_t].$$
#
# The first holds for fine steps; $V^*$ is the expected reward if the SDE continues from $x_t$, the value in the lesson Test your own rule. For $a = \sqrt 2$ the factor $a^2/(1 + a^2/2)$ is 1, and the SDE is the exact reverse of the forward process, so that $V^*(x_t) = \mathbb E[R \mid x_t]$. The two covariances must then agree. For $a = 0.7$ the factor is 0.39, and the SDE reaches other samples from this state.

# %%
for noise_level, steps, draws in ((0.7, 70, 100_000), (math.sqrt(2), 70, 200_000)):
    targets, rewards = continued(noise_level, steps, draws)
    terms = (rewards - rewards.mean())[:, None] * targets
    signal, error = terms.mean(0), terms.std(0).max() / math.sqrt(draws)
    print(
        f"transition, noise level {noise_level:.2f}, {steps} steps: mean reward"
        f" {rewards.mean():.3f}, covariance with R ({signal[0]:+.3f}, {signal[1]:+.3f}) ±"
        f" {error:.3f}"
    )
values, rewards = views["finished sample"]
signal = ((rewards - rewards.mean())[:, None] * values).mean(0)
print(
    f"finished sample: mean reward {rewards.mean():.3f}, covariance with R ({signal[0]:+.3f},"
    f" {signal[1]:+.3f})"
)

# %% [markdown]
# With the noise level $\sqrt 2$ and small steps both targets have the same covariance with $R$, up to the Monte Carlo error and the size of the steps. So the targets answer the same question, and the difference above comes from the noise level of 0.7.
#
# We can now answer two questions.
#
# **What do the losses need?** Rows $(x_0, \text{prompt}, R)$. The loss computes new $x_t$ and $v^*$ from $x_0$ and $\varepsilon$ at any time $t$. It stores no trajectory and computes no probability.
#
# **Why does the solver not matter?** Because the loss uses only the result of the sampling. An SDE, the Euler method, DPM-Solver++ of second order (NFT and DGPO) or SA-Solver (AWM; both in `samplers.Multistep`) only have to produce samples of the policy.
#
# Is $-|v - v^*|^2$ a log-likelihood? Not exactly. With suitable weights over $t$, its mean over $t$ and $\varepsilon$ is a lower bound of $\log p(x_0)$, the ELBO of diffusion models. With other weights it is a surrogate. The gradients of the next sections are therefore not exactly that of $\mathbb E[R]$. We will measure how close they are.
#
# ## What the reward weights
#
# We begin with weights $w(x_0) \ge 0$. The minimiser of $\mathbb E[\,w\,|v(x_t) - v^*|^2]$ is a weighted mean,
#
# $$v_w(x_t) = \frac{\mathbb E[w\, v^* \mid x_t]}{\mathbb E[w \mid x_t]},$$
#
# which is the exact velocity of the *tilted* data $p_w(x_0) \propto w(x_0)\,p(x_0)$. In this world we know the tilted data for the weight $R$: the reward is a Gaussian bump, and a Gaussian mixture times a bump is again a Gaussian mixture.


# %%
good, mean_reward = data.tilted(centre, WIDTH), data.expected_bump(centre, WIDTH)
std_reward = math.sqrt(data.expected_bump(centre, WIDTH / math.sqrt(2)) - mean_reward**2)


def expected_reward(x, t):
    """E[R | x_t = x], [sample]."""
    return mean_reward * (good.log_marginal(x, t) - data.log_marginal(x, t)).exp()


def covariance(x, t):
    """Cov(R, v* | x_t = x), [sample, dim]."""
    return expected_reward(x, t)[:, None] * (good.velocity(x, t) - data.velocity(x, t))


t, (values, rewards) = torch.tensor([now]), views["finished sample"]
regressed = (rewards[:, None] * values).sum(0) / rewards.sum()
tilted_velocity, mean_here = (
    good.velocity(state[None], t)[0],
    expected_reward(state[None], t)[0],
)
print(f"mean and std of R over the data: {mean_reward:.3f}, {std_reward:.3f}")
print(
    f"at the state above: E[R | x_t] = {mean_here:.3f}, mean over the draws"
    f" {rewards.mean():.3f}"
)
print(
    f"exact velocity of the tilted data ({tilted_velocity[0]:+.2f}, {tilted_velocity[1]:+.2f})"
)
print(f"weighted mean of the targets      ({regressed[0]:+.2f}, {regressed[1]:+.2f})")

# %% [markdown]
# Let the *optimality* $r(x_0) \in [0, 1]$ be the probability that a sample counts as good. Then the data split into a positive and a negative part, $p_+ \propto r\,p$ and $p_- \propto (1 - r)\,p$. With $\alpha(x_t) = \mathbb E[r \mid x_t]$ their velocities add up, $v_{\text{old}} = \alpha\, v_+ + (1-\alpha)\, v_-$, and both differences from $v_{\text{old}}$ have the same direction,
#
# $$\alpha\,(v_+ - v_{\text{old}}) = (1-\alpha)\,(v_{\text{old}} - v_-) = \operatorname{Cov}(r, v^* \mid x_t) =: \delta(x_t).$$
#
# So all information of the rewards about the velocity at $x_t$ is in this covariance $\delta$, as long as $v_{\text{old}}$ is the conditional mean of $v^*$. This section and the next ones assume it, as before training. The three methods differ in how far they go along $\delta$, and in what stops them.

# %% tags=["hide-input"]
NEGATIVE, POSITIVE = plt.get_cmap(SIGNED)((0.1, 0.9))
axis = torch.linspace(-3, 3, 11)
points = torch.cartesian_prod(axis, axis)
time = torch.full((len(points),), 0.5)
old, plus, delta = (
    data.velocity(points, time),
    good.velocity(points, time),
    covariance(points, time),
)
alpha = expected_reward(points, time)[:, None]
minus = (old - alpha * plus) / (1 - alpha)
figure, axes = panels(3, width=3.5, height=3.7)
shown = (
    ("Old velocity, and samples", old, NOISE),
    ("Positive (blue), negative (red)", plus, POSITIVE),
    (r"Their direction $\delta$", delta, INK),
)
for cell, (name, field, shade) in zip(axes, shown, strict=True):
    plane(cell, name)
    cell.scatter(*data.sample(500, torch.Generator().manual_seed(0)).T, s=3, color="#d5d8dd")
    cell.quiver(
        *points.T, *-field.T, color=shade, scale=12 if field is delta else 60, width=0.005
    )
    cell.scatter(*centre, marker="x", s=90, color=INK, zorder=4)
axes[1].quiver(*points.T, *-minus.T, color=NEGATIVE, scale=60, width=0.005)
figure.suptitle(
    "Velocities at t = 0.5 with r = R (arrows: towards data, the direction of sampling)",
    fontsize=11,
)
plt.show()

# %% [markdown]
# ## DiffusionNFT: two branches
#
# DiffusionNFT (arXiv 2509.16117) regresses two mixtures of the old velocity and the trained one. The paper calls the mixing strength β; we write $\beta_\text{NFT}$, since $\beta$ is the weight of the KL penalty.
#
# $$v_\pm = v_{\text{old}} \pm \beta_\text{NFT}\,(v - v_{\text{old}}), \qquad L = \mathbb E\big[\, r\,|v_+ - v^*|^2 + (1 - r)\,|v_- - v^*|^2 \,\big].$$
#
# The second term uses *bad* samples: it regresses towards them a velocity on the *other side* of $v_{\text{old}}$. The optimality is computed from the advantage, $r = \tfrac12 + A/(2 A_{\max})$ with $A$ clipped to $\pm A_{\max}$, and $A_{\max} = 5$ in the released code.
#
# ### Exercise 2 · where the loss pulls
#
# *Difficulty: medium · kind: formula · importance: essential · time: 8 minutes*
#
# For a *single* sample with optimality $r$ and target $v^*$, which velocity $v$ minimises the loss? All velocities are `[sample, dim]`, `r` is `[sample]`; return $v$, `[sample, dim]`. Before you compute: where is the minimum for $r = \tfrac12$, and is it further from $v_{\text{old}}$ for a large or a small $\beta_\text{NFT}$?


# %% tags=["exercise"]
def nft_minimum(old, target, r, beta):
    """The velocity that minimises the loss of each sample."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Write $d = v - v_{\text{old}}$ and $e = v^* - v_{\text{old}}$. The loss is $r\,|\beta d - e|^2 + (1-r)\,|\beta d + e|^2$. Set its derivative with respect to $d$ to 0.


# %% tags=["solution"]
def nft_minimum(old, target, r, beta):
    """The velocity that minimises the loss of each sample."""
    return old + (2 * r - 1)[:, None] / beta * (target - old)


# %%
lesson.check_minimum(nft_minimum)

# %% [markdown] tags=["explanation"]
# **Why.** The derivative is $2\beta\,[\beta d - (2r-1)\,e]$, so the minimum is at $d = (2r-1)\,e/\beta_\text{NFT}$. A good sample ($r > \tfrac12$) attracts, a bad one repels, and $r = \tfrac12$ has no effect. A *small* $\beta_\text{NFT}$ means a far minimum: $v_\pm$ must differ by $2(2r-1)e$. Only $v$ is trained; $v_{\text{old}}$ is a constant, computed by a copy of the weights that follows slowly. In `flowrl` this is `DiffusionNFT(error="velocity")`. The default is the loss of the released code, which measures the errors of the clean estimates $x_t - t\,v_\pm$ and divides each branch by its mean absolute error.

# %% [markdown]
# To find the gradient, let $d = v - v_{\text{old}}$ and expand both squares. Their weighted sum is
#
# $$|v_{\text{old}} - v^*|^2 + 2\beta_\text{NFT}\,(2r-1)\,\langle v_{\text{old}} - v^*, d\rangle + \beta_\text{NFT}^2\, |d|^2 .$$
#
# - The **value** at $d = 0$ is $|v_{\text{old}} - v^*|^2$. It does not contain $r$.
# - The **gradient** at $d = 0$ is $2\beta_\text{NFT}\,(2r-1)\,(v_{\text{old}} - v^*)$, with $2r - 1 = A/A_{\max}$ inside the clip. Its mean given $x_t$ is $-4\beta_\text{NFT}\,\delta$ (before training, when $v_{\text{old}}$ is the mean of $v^*$).
# - The **curvature** $2\beta_\text{NFT}^2$ is positive for every reward. The minimum is at $d = \tfrac{2}{\beta_\text{NFT}}\,\delta(x_t)$.
#
# The released code multiplies by $A_{\max}/\beta_\text{NFT}$, measures clean estimates (factor $t^2$) and divides by $\eta = t \cdot \operatorname{mean}|v_{\text{old}} - v^*|$ (at $d = 0$ the same for both branches, without gradient).
#
# ### Exercise 3 · the gradient of the first update
#
# *Difficulty: medium · kind: formula · importance: essential · time: 8 minutes*
#
# Return the gradient of the released loss of each sample with respect to its velocity $v$ at $v = v_{\text{old}}$, `[sample, dim]`. `advantage` (within the clip) and `time` are `[sample]`. The loss is $\frac{A_{\max}}{\beta_\text{NFT}}\, t^2\, \big[r\,|v_+ - v^*|^2 + (1-r)\,|v_- - v^*|^2\big] / \eta$ with means over the elements, so a derivative has a factor 1/dim.


# %% tags=["exercise"]
def nft_gradient(advantage, old, target, time):
    """The gradient at v = v_old, [sample, dim]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** At $v = v_{\text{old}}$ both branches have the same error and the same $\eta$. Differentiate the two squares with respect to $v$, insert $2r - 1 = A/A_{\max}$, and watch which constants cancel. Do not forget the factor 1/dim of the mean.


# %% tags=["solution"]
def nft_gradient(advantage, old, target, time):
    """The gradient at v = v_old, [sample, dim]."""
    error = old - target
    eta = time[:, None] * error.abs().mean(dim=1, keepdim=True)
    return 2 * advantage[:, None] * time[:, None] ** 2 * error / eta / error.shape[1]


# %%
lesson.check_gradient(nft_gradient)

# %% [markdown] tags=["explanation"]
# **Why.** $\frac{A_{\max}}{\beta_\text{NFT}} \cdot 2\beta_\text{NFT}\,\frac{A}{A_{\max}}\,(v_{\text{old}} - v^*)\,\frac{t^2}{\eta} = 2A\,t^2\,(v_{\text{old}} - v^*)/\eta$. A step against this gradient moves the velocity towards the target of a good sample and away from that of a bad one, in proportion to $A$. $\beta_\text{NFT}$ has no effect on the first gradient.

# %% [markdown]
# ### Exercise 4 · reversed rewards
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# Suppose a bug reverses the sign of all advantages. We compute NFT's loss at the first update, $v = v_{\text{old}}$, for the same samples. What changes?
#
# - **a** The value of the loss rises, and its gradient changes sign.
# - **b** The value stays exactly the same, and the gradient changes sign.
# - **c** Neither changes, since the two branches are symmetric.

# %% tags=["exercise"]
reversed_rewards = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Insert $d = 0$ into the expanded loss above. Which of its three terms contains $r$?

# %% tags=["solution"]
reversed_rewards = "b"

# %%
lesson.check_reversed(reversed_rewards)

# %% [markdown] tags=["explanation"]
# **Why.** At $d = 0$ both branches are $v_{\text{old}}$, so the weights $r$ and $1 - r$ multiply the same error and add up to 1. Only the term that is linear in $d$ contains $r$, and with it the gradient. The next cell measures both for different rewards of the same 2,000 samples.

# %%
generator = torch.Generator().manual_seed(3)
clean_points, noise = data.sample(2000, generator), torch.randn(2000, 2, generator=generator)
time = torch.rand(2000, generator=generator) * 0.9 + 0.1
noised, aim = interpolate(clean_points, noise, time), velocity_target(clean_points, noise)
old = data.velocity(noised, time)
advantages = (reward(clean_points) - mean_reward) / std_reward


def batch_of(new, advantages):
    """The rows that a forward-process loss sees; old, average and reference networks are the
    exact velocity.
    """
    rows = torch.arange(len(time))
    weight = torch.ones_like(time)
    return ForwardBatch(
        time, aim, new, advantages, weight, rows * 0, rows, old=old, average=old, reference=old
    )


def value_and_gradient(loss, advantages):
    """The loss at v = v_old and its gradient, [sample, dim]."""
    new = old.clone().requires_grad_()
    value = loss.loss(batch_of(new, advantages)).loss
    (gradient,) = torch.autograd.grad(value, new)
    return value.item(), gradient


loss = DiffusionNFT(kl_weight=0.0)
reference = value_and_gradient(loss, advantages)[1]
shuffled = advantages[torch.randperm(2000, generator=generator)]
cases = {
    "rewards as they are": advantages,
    "all signs changed": -advantages,
    "twice as large": 2 * advantages,
    "shuffled": shuffled,
}
for name, chosen in {**cases, "all 0": 0 * advantages}.items():
    value, gradient = value_and_gradient(loss, chosen)
    cosine = torch.nn.functional.cosine_similarity(
        gradient.flatten(), reference.flatten(), dim=0
    )
    print(
        f"{name:<20} value {value:.4f}   gradient: length {gradient.norm():.4f}, cosine with"
        f" the first {cosine:+.2f}"
    )
ours = nft_gradient(advantages, old, aim, time) / len(time)
print(
    "largest difference of your gradient from autograd's:"
    f" {float((ours - reference).abs().max()):.0e}"
)

# %% [markdown] tags=["expected"]
# rewards as they are  value 4.4409   gradient: length 0.0231, cosine with the first +1.00
# all signs changed    value 4.4409   gradient: length 0.0231, cosine with the first -1.00
# twice as large       value 4.4409   gradient: length 0.0461, cosine with the first +1.00
# shuffled             value 4.4409   gradient: length 0.0221, cosine with the first -0.01
# all 0                value 4.4409   gradient: length 0.0000, cosine with the first +0.00
# largest difference of your gradient from autograd's: 0..1e-7

# %% [markdown]
# The value is the same for good, reversed, random and absent rewards. So a constant loss at the first update does not indicate a defect, and a falling loss later does not indicate success. Look at the gradient, at the metrics `positive` and `negative` separately, or at the reward.
#
# ### $\beta_\text{NFT}$ determines the step length
#
# If one iteration went to the minimum, the new velocity would be $v_{\text{old}} + \tfrac{2}{\beta_\text{NFT}}\,\delta$, with $\delta = \operatorname{Cov}(R, v^* \mid x_t) / (2 A_{\max} \operatorname{std} R)$. In this world we know all of it in closed form. So let us see what samples the ODE of this velocity produces: one complete inner optimum for several values of $\beta_\text{NFT}$.


# %%
def follow(strength, steps=50, samples=1500):
    """ODE samples of v_old + strength Cov(R, v* | x_t)."""
    x = torch.randn(samples, 2, generator=torch.Generator().manual_seed(4))
    for i in range(steps):
        t = torch.full((samples,), 1 - i / steps)
        x = x - (data.velocity(x, t) + strength * covariance(x, t)) / steps
    return x


betas = (3.0, 1.0, 0.3, 0.1, 0.03)
ends = {"old": follow(0.0), **{beta: follow(1 / (5 * beta * std_reward)) for beta in betas}}
for beta, points in ends.items():
    density = data.log_marginal(points, torch.zeros(len(points))).mean()
    name = "old policy" if beta == "old" else f"beta_NFT {beta:g}"
    print(
        f"{name:<13} mean reward {reward(points).mean():.2f}, mean log-density under the data"
        f" {density:.1f}"
    )

# %% tags=["hide-input"]
figure, axes = panels(4, width=2.6, height=2.9)
for cell, beta in zip(axes, ("old", 1.0, 0.3, 0.03), strict=True):
    plane(cell, "old policy" if beta == "old" else rf"$\beta_{{NFT}} = {beta:g}$", extent=4.4)
    cell.scatter(*ends[beta][:400].T, s=4, color=DATA)
    cell.scatter(*centre, marker="x", s=80, color=ACCENT, zorder=3)
figure.suptitle("Samples after one complete inner optimum of NFT", fontsize=11)
plt.show()

# %% [markdown]
# With $\beta_\text{NFT} = 1$ a whole inner optimum moves the policy a little; the method makes many iterations, each from a new $v_{\text{old}}$. With 0.1 it goes most of the way. With 0.03 it extrapolates beyond the data, so the log-density falls. The paper uses 1, and 0.1 for OCR, where the old copy lags most.
#
# ## AWM: the advantage as the weight
#
# Advantage-weighted matching (AWM, arXiv 2509.25050) uses minus the matching loss as the log-likelihood, $\log p(x_0) \approx -\ell(v)$ with $\ell(v) = |v - v^*|^2$ times a weight over $t$. It inserts this into PPO's ratio $\rho = \exp(\log p - \log p_{\text{old}})$, both with the same $t$ and $\varepsilon$. The published settings make *one* update per iteration, so $\log p_{\text{old}} = \log p$. The ratio is then exactly 1, nothing is clipped, and the gradient is $A\,\nabla\ell$: regression with the advantage as the weight.
#
# A negative weight pushes $v$ away from the targets of bad samples. How far? Given $x_t$, the objective is
#
# $$\mathbb E[A\,|v - v^*|^2 \mid x_t] = \mathbb E[A \mid x_t]\,|d|^2 - 2\,\langle \operatorname{Cov}(A, v^* \mid x_t), d\rangle + \text{const}.$$
#
# The slope at $d = 0$ is that of NFT. However, the curvature is $2\,\mathbb E[A \mid x_t]$, which is negative at all states that lead to bad samples. There the objective has no minimum, and falls with every further step. A penalty $\lambda\,|v - v_{\text{old}}|^2$ adds $2\lambda$.
#
# ### Exercise 5 · an inner optimum
#
# *Difficulty: medium · kind: formula · importance: useful · time: 8 minutes*
#
# `advantages` `[sample]` and `targets` `[sample, dim]` belong to samples with the same $x_t$. Return the $v$ `[dim]` that minimises $\operatorname{mean}_m\, A_m\,|v - v^*_m|^2 + \lambda\,|v - v_{\text{old}}|^2$, or `None` if there is no minimum. `old` is `[dim]`, `penalty` = $\lambda$.


# %% tags=["exercise"]
def inner_optimum(advantages, targets, old, penalty):
    """The minimiser [dim], or None."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Set the derivative with respect to $v$ to 0. It is linear in $v$; its slope decides whether the zero is a minimum.


# %% tags=["solution"]
def inner_optimum(advantages, targets, old, penalty):
    """The minimiser [dim], or None."""
    curvature = advantages.mean() + penalty
    if curvature <= 0:
        return None
    return ((advantages[:, None] * targets).mean(dim=0) + penalty * old) / curvature


# %%
lesson.check_optimum(inner_optimum)

# %% [markdown] tags=["explanation"]
# **Why.** The derivative $2\operatorname{mean}_m A_m (v - v^*_m) + 2\lambda(v - v_{\text{old}})$ is linear in $v$. Its slope is twice the mean advantage plus $2\lambda$, and a zero of the derivative is a minimum only if this slope is positive. With weights $w \ge 0$ and $\lambda = 0$ we get the weighted mean of the section above. (If mean and penalty cancel exactly, the objective is a plane.)

# %% [markdown]
# The next figure shows the objective along the direction of $\delta$ at two states. It has AWM's scale of the advantages ($A/5$), and NFT's loss in the same units, with the curvature $2\beta_\text{NFT}$.

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.3)
steps = torch.linspace(-0.5, 3, 100)
sites = {
    "a state that leads to good samples": torch.tensor([[0.9, 0.3]]),
    "a state that leads to bad ones": torch.tensor([[-0.7, 0.5]]),
}
for cell, (name, place) in zip(axes, sites.items(), strict=True):
    moment = torch.tensor([0.6])
    curve = (expected_reward(place, moment) - mean_reward) / std_reward / 5
    slope = covariance(place, moment).norm() / std_reward / 5
    lines = {
        "AWM, no penalty": (curve, "#a9adb5"),
        r"AWM, $\lambda = 0.5$": (curve + 0.5, SHADES["awm"]),
        r"NFT, $\beta_{NFT} = 1$": (torch.tensor(1.0), SHADES["diffusion-nft"]),
        r"NFT, $\beta_{NFT} = 0.1$": (torch.tensor(0.1), OTHERS[3]),
    }
    for label, (bend, shade) in lines.items():
        cell.plot(steps, bend * steps**2 - 2 * slope * steps, color=shade, label=label)
    cell.set(
        xlabel=r"component of $v - v_{old}$ along $\delta$ (units of velocity)",
        ylim=(-1.6, 1.6),
    )
    cell.set_title(f"{name}: E[A | x] = {float(5 * curve):+.2f}", fontsize=10)
    clean(cell)
axes[0].set_ylabel("objective, minus its value at 0")
axes[0].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# All curves have the same slope at 0, and different curvatures. Without a penalty, AWM has no minimum at the state of the right panel. (In practice the learning rate and the small number of updates per iteration limit the step, but not over many iterations.) AWM's penalties are distances from the base model, `kl_weight`, and from a slow average of the weights, `average_weight`. The decay of the average is 0 at first, and with one update per iteration the average then *equals* the current weights. So this penalty has no gradient in the beginning. NFT needs no separate penalty, because its curvature does not depend on $A$.
#
# ## DGPO: a group as one preference
#
# DGPO (arXiv 2510.08425) prefers the good part of a group to the bad part, as direct preference optimisation does with two samples. With the sharpness $\beta_\text{DGPO}$ (β in the paper),
#
# $$S = \frac{\beta_\text{DGPO}}{G} \sum_m A_m\,\big(\ell_m(v) - \ell_m(v_{\text{ref}})\big), \qquad L = -\log \operatorname{sigmoid}(-S)/\beta_\text{DGPO} .$$
#
# An advantage-weighted sum of log-likelihood ratios also contains $\sum_m A_m \log C$, in which $C$ is the unknown normalisation of the prompt. This term cancels because $\sum_m A_m = 0$. Therefore a group must be *complete*, at one time and (in the released code) with one noise for all members.
#
# ### Exercise 6 · the weights of a group
#
# *Difficulty: medium · kind: formula · importance: useful · time: 6 minutes*
#
# The gradient is that of $\frac1G \sum_m w_m\,\ell_m(v)$ with constants $w_m$. Return them, `[group, member]`. `advantages`, `errors` ($\ell_m(v)$) and `reference` ($\ell_m(v_{\text{ref}})$) are `[group, member]`, `beta` is $\beta_\text{DGPO}$.


# %% tags=["exercise"]
def dgpo_weights(advantages, errors, reference, beta):
    """The weight of every member's matching error in the gradient."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Use the chain rule: the derivative of $-\log\operatorname{sigmoid}(-S)$ with respect to $S$, times the derivative of $S$ with respect to $\ell_m$. One factor is common to the group, one belongs to the member.


# %% tags=["solution"]
def dgpo_weights(advantages, errors, reference, beta):
    """The weight of every member's matching error in the gradient."""
    s = beta * (advantages * (errors - reference)).mean(dim=1, keepdim=True)
    return torch.sigmoid(s) * advantages


# %%
lesson.check_weights(dgpo_weights)

# %% [markdown] tags=["explanation"]
# **Why.** The derivative of $-\log\operatorname{sigmoid}(-S)$ is $\operatorname{sigmoid}(S)$, and $\nabla S = \frac{\beta_\text{DGPO}}{G}\sum_m A_m\nabla\ell_m$. The factor $\beta_\text{DGPO}$ cancels against the division, so it changes the sharpness of the sigmoid and not the scale of the gradient.

# %%
group = torch.tensor([[1.2, 0.6, -0.4, -1.4]])
before = torch.tensor([[1.0, 1.4, 0.9, 1.1]])
print("progress of the group      S        weights of the members          their sum")
for step in (0.0, 0.5, 2.0):
    after = before - step * group / 2
    s = float((group * (after - before)).mean())
    weights = dgpo_weights(group, after, before, 1.0)[0]
    print(
        f"errors fall by {step / 2:4.2f} A   {s:+.2f}   "
        + " ".join(f"{w:+.2f}" for w in weights)
        + f"   {abs(weights.sum()):12.2f}"
    )
half = dgpo_weights(group[:, :2], before[:, :2], before[:, :2], 1.0)[0]
print(
    "half a group:                     "
    + " ".join(f"{w:+.2f}" for w in half)
    + f"                 {half.sum():.2f}"
)

# %% [markdown]
# At the beginning all weights are $A/2$, again the advantage. As the errors of good members fall, $S$ decreases and the sigmoid approaches 0. So it stops the step, relative to the *reference* and not to the last iteration. With the published $\beta_\text{DGPO} = 100$ this happens after a hundredth of the progress, which suits the small errors of image models. Errors in two dimensions are larger, so we use 1.
#
# ### Exercise 7 · find the line
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 4 minutes*
#
# A colleague's loss runs, and its values look plausible. However, the updates depend on the unknown normalisation $C$ of the prompt again. Which line is the cause?
#
# ```python
# advantages = zscore(rewards, over=("member",))                   # line 1: [group, member]
# advantages = advantages.clamp(-1, 1)                             # line 2
# gaps = advantages * (errors - reference)                         # line 3
# s = beta * gaps.mean(dim=1)                                      # line 4: [group]
# loss = -torch.nn.functional.logsigmoid(-s).mean() / beta         # line 5
# ```

# %% tags=["exercise"]
wrong_line = ...

# %% [markdown] tags=["hint"]
# **Hint.** Which property of the advantages removes $C$? Compute it for rewards 0, 0, 0, 1 after each line.

# %% tags=["solution"]
wrong_line = 2

# %%
lesson.check_wrong_line(wrong_line)

# %% [markdown] tags=["explanation"]
# **Why.** For rewards 0, 0, 0, 1 the advantages are -0.58 (three times) and 1.73. After the clamp the last one is 1, and the sum is -0.73 instead of 0. Then the term with $\log C$ does not cancel. In Flow-GRPO the same clamp would only bound an outlier. For the same reason, invalid members must be left out *before* advantages are computed.

# %% [markdown]
# ## How noisy, and how close to the true gradient?
#
# AWM's paper argues that matching towards the clean $x_0$ has less variance than the policy gradient, whose target is a noisy transition. The next cell measures both, at *equal evaluations*. All rows have 18 prompts with 12 trajectories of 10 steps and 9 trained pairs, so 19 evaluations per trajectory. (With the window `:5` there are 15.) The second row has the *same states and advantages* as the first, and only another target: $v^*$ of the trajectory's own finished sample (`noise="path"`). Each gradient is measured with 192 batches, because the signal-to-noise ratio of a noisy gradient varies by a quarter between sets of 24.
# The truth is $\nabla\,\mathbb E[R]$ of ODE samples (pathwise, the lesson Test your own rule). `one batch` is the mean cosine of a single batch's gradient with the truth, which combines bias and noise.

# %%
NINE = PermutedTimes()  # 9 of the 10 times
BATCHES = 192
MATCHING = dict(weight="t2", kl_weight=0.0, average_weight=0.0)
LOSSES = {
    "Flow-GRPO": ("sde", None),
    "AWM, same states": ("sde", AWM(**MATCHING, times=NINE, noise="path")),
    "AWM, fresh noise": ("sde", AWM(**MATCHING, times=NINE)),
    "AWM, Euler": ("euler", AWM(**MATCHING, times=NINE)),
    "AWM, DPM++": ("dpm++", AWM(**MATCHING, times=NINE)),
    "NFT, DPM++": ("dpm++", DiffusionNFT(kl_weight=0.0, times=NINE)),
    "DGPO, DPM++": (
        "dpm++",
        DGPO(beta_dpo=1.0, clip=None, kl_weight=0.0, times=DrawnSteps(9, 9)),
    ),
    "Flow-GRPO, window": ("window", None),
}


def compared(trainer, rule, names, truth, batches=24):
    """The gradients of the losses by name; prints one row each."""
    settings, gradients = settings_of(trainer), {}
    for name in progress(names, "loss"):
        kind, loss = LOSSES[name]
        given = (settings[kind], rule)
        gradients[name] = (
            policy_gradients(*given, batches, 12, seed=2)
            if loss is None
            else forward_gradients(*given, loss, batches, 12, seed=2)
        )
        result = alignment(gradients[name], truth)
        one = torch.nn.functional.cosine_similarity(
            gradients[name], truth.mean(0)[None]
        ).mean()
        low, high = result.cosine_interval
        print(
            f"{name:<20}{result.cosine:>7.2f} [{low:.2f},"
            f" {high:.2f}]{result.signal_to_noise:>14.2f}{one:>12.2f}"
        )
    return gradients


HEAD = f"{'':<20}{'cosine with the truth':>21}{'signal/noise':>14}{'one batch':>12}"
print("before training\n" + HEAD)
beginning = start()
truth = pathwise_gradients(settings_of(beginning)["euler"], 30, 100, seed=1)
early = compared(beginning, Uniform(), tuple(LOSSES), truth, BATCHES)
same = alignment(early["AWM, Euler"][:24], early["AWM, DPM++"][:24])
print(f"cosine of AWM's mean gradients with Euler and with DPM++: {same.cosine:.2f}")
ratio = (
    alignment(early["AWM, same states"], truth).signal_to_noise
    / alignment(early["Flow-GRPO"], truth).signal_to_noise
)
print(
    f"signal/noise on the same states, AWM over Flow-GRPO: {ratio:.1f}, squared {ratio**2:.0f}"
)

# %% [markdown]
# On the same states with the same advantages, the target $v^*$ has about four times the signal-to-noise ratio of the transition's target. The ratio grows with the square root of the number of trajectories, so Flow-GRPO would need about 16 times as many to reach it (last line). This confirms the paper's claim in this world, at this point of training. (The mean of $v^*$ over the SDE's own continuations is not exactly $v_{\text{old}}$: the states and finished samples of an SDE trajectory have the joint distribution of the forward process only for $a = \sqrt 2$. With fresh noise they always have it.) Two further observations:
#
# - A large part of Flow-GRPO's disadvantage comes from the late steps, decisions that hardly influence the reward. With the window `:5` (last row) it has half of the forward process's ratio, for 15 evaluations.
# - SDE, Euler and DPM++ give the same gradient within the error, as expected. AWM, NFT and DGPO differ little, because before training all three are covariances of the advantage with $v^*$.
#
# The direction of the surrogate is close to $\nabla\,\mathbb E[R]$, but not the same: the intervals of AWM, NFT and DGPO exclude 1. (An interval may exceed 1, see the lesson Test your own rule.)
#
# Does this hold during training? The derivation above used that $v_{\text{old}}(x_t)$ is the mean of $v^*$ given $x_t$. Before training this is exact, because the policy has the velocity of its own samples.
#
# ### Exercise 8 · gradients after training
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# We train a policy with Flow-GRPO for 12 iterations, and then measure the gradients again. What happens to the cosine of AWM's and NFT's gradients with $\nabla\,\mathbb E[R]$, about 0.95 before training?
#
# - **a** It stays near 0.95, since no step of the derivation depends on the policy.
# - **b** It falls well below, since $v_{\text{old}}$ is no longer the mean velocity of its own samples.
# - **c** It rises to 1, since the samples are better.

# %% tags=["exercise"]
cosine_after_training = "..."

# %% [markdown] tags=["hint"]
# **Hint.** In the lesson Test your own rule, training changed the velocity, and the one-step estimate was no longer a mean. Which assumption of this lesson is the same?

# %% tags=["solution"]
cosine_after_training = "b"

# %%
lesson.check_after_training(cosine_after_training)

# %% [markdown] tags=["explanation"]
# **Why.** Reinforcement learning changes $v$ so that the ODE's samples get more reward. Nothing keeps it equal to the conditional mean of $\varepsilon - x_0$ over these samples. The regression then contains a second term, which does not depend on rewards.

# %% [markdown]
# The next cell repeats the measurement for a policy that Flow-GRPO has trained for 12 iterations, and one that AWM has trained for 8. It also measures *plain matching*, the gradient with advantage 1 for every sample: if $v_{\text{old}}$ is the mean of $v^*$, this gradient is 0 up to noise.


# %%
class Ones:
    """The same advantage for every sample: matching without rewards."""

    probe = NoProbe()

    def assign(self, values, decisions):
        # [prompt, member, decision]; with DPM++ one decision
        return torch.ones(decisions.mask.shape)


def plain_matching(trainer):
    """The length of the mean gradient of plain matching."""
    return (
        forward_gradients(
            settings_of(trainer)["dpm++"], Ones(), LOSSES["AWM, DPM++"][1], 24, 12, seed=2
        )
        .mean(0)
        .norm()
    )


print(
    f"mean gradient before training: plain matching {plain_matching(beginning):.3f}, AWM"
    f" {early['AWM, DPM++'].mean(0).norm():.3f}"
)
AFTER = {
    "Flow-GRPO": (12, start(clip_range=0.02, learning_rate=1e-2)),
    "AWM": (
        8,
        start("awm", sampler="flow-sde()", loss="awm(average_weight=0.1)", learning_rate=1e-2),
    ),
}
late = {}
for name, (iterations, trainer) in AFTER.items():
    mean = [trainer.iteration()["reward_mean"] for _ in range(iterations)][-1]
    print(f"\nafter {iterations} iterations of {name}, mean reward {mean:.2f}\n" + HEAD)
    truth_late = pathwise_gradients(settings_of(trainer)["euler"], 30, 100, seed=1)
    late[name] = compared(
        trainer,
        Uniform(),
        ("Flow-GRPO", "Flow-GRPO, window", "AWM, DPM++", "NFT, DPM++"),
        truth_late,
    )
    print(
        f"mean gradient: plain matching {plain_matching(trainer):.3f}, AWM"
        f" {late[name]['AWM, DPM++'].mean(0).norm():.3f}"
    )

# %% [markdown] tags=["expected"]
# mean gradient before training: plain matching 0.003, AWM 0.014
#
# after 12 iterations of Flow-GRPO, mean reward 0.70..0.82
#                     cosine with the truth  signal/noise   one batch
# Flow-GRPO              0.86..0.99 [0.83..0.97, 0.88..1.01]          1.20..2.20        0.72..0.88
# Flow-GRPO, window      0.74..0.88 [0.70..0.86, 0.76..0.92]          1.60..2.80        0.66..0.82
# AWM, DPM++             0.60..0.82 [0.52..0.78, 0.64..0.88]          0.85..1.50        0.42..0.66
# NFT, DPM++             0.55..0.78 [0.48..0.74, 0.58..0.84]          1.05..1.90        0.44..0.68
# mean gradient: plain matching 0.200..0.380, AWM 0.028..0.060
#
# after 8 iterations of AWM, mean reward 0.68..0.80
#                     cosine with the truth  signal/noise   one batch
# Flow-GRPO              0.86..1.00 [0.83..0.98, 0.88..1.02]          1.15..2.10        0.70..0.89
# Flow-GRPO, window      0.60..0.82 [0.56..0.79, 0.63..0.86]          1.10..2.00        0.50..0.72
# AWM, DPM++             0.20..0.50 [0.14..0.45, 0.24..0.56]          0.70..1.30        0.13..0.36
# NFT, DPM++             0.60..0.82 [0.52..0.76, 0.64..0.88]          0.85..1.55        0.45..0.67
# mean gradient: plain matching 0.110..0.240, AWM 0.020..0.042

# %% [markdown]
# After training with either method, the gradients of the forward process have turned away from $\nabla\,\mathbb E[R]$. That of Flow-GRPO, whose theory needs no such assumption, has hardly turned. With the window, which leaves out the effect of the later steps, it has turned as well, but not further than NFT's. Plain matching is no longer 0, but several times as long as AWM's gradient: $v_{\text{old}}$ is no longer the mean of $v^*$ of its own samples. Then $\mathbb E[A\,(v_{\text{old}} - v^*) \mid x_t]$ contains, besides the covariance, $\mathbb E[A \mid x_t]$ times the mismatch, which does not depend on rewards. (The published recipes take far smaller steps, one update per iteration at a learning rate of 3e-4. You can measure their mismatch in the same way.)
#
# ## Cost
#
# The cost of a trajectory consists of its sampling steps and its trained pairs. At each pair the loss evaluates *every* network that it uses: the current one with gradient, and without gradient the base model, the old copy or the average. Classifier-free guidance doubles an evaluation. DiffusionNFT and AWM sample and train without guidance, DGPO samples with it, and Flow-GRPO uses it in both.
#
# ### Exercise 9 · evaluations of a trajectory
#
# *Difficulty: easy · kind: formula · importance: optional · time: 5 minutes*
#
# `steps` is the number of sampling steps, `draws` that of trained steps or times, and `networks` that of the networks evaluated at each of them. Guidance is on (True) or off (False) in sampling and in training. Return the number of evaluations per trajectory, in units of an evaluation without guidance.


# %% tags=["exercise"]
def evaluations(steps, draws, networks, guided_sampling, guided_training):
    """Network evaluations of one trajectory, sampling and training."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Two terms: sampling, and training. Guidance doubles a term if it is on in that phase.


# %% tags=["solution"]
def evaluations(steps, draws, networks, guided_sampling, guided_training):
    """Network evaluations of one trajectory, sampling and training."""
    sampling = steps * (2 if guided_sampling else 1)
    training = draws * networks * (2 if guided_training else 1)
    return sampling + training


# %%
lesson.check_cost(evaluations)

# %% [markdown] tags=["explanation"]
# **Why.** Sampling needs one network, the one that samples. At a trained pair all networks see the same $x_t$. The next cell compares the published settings with what the trainer counts (metrics `nfe` and `train_nfe`) in the first three iterations, without guidance.

# %%
# steps, trained pairs, networks, guidance in sampling and in training; settings of the runs
published = {
    "flow-grpo": ((10, 9, 2, True, True), dict(window=":-1", kl_weight=0.01)),
    "diffusion-nft": ((10, 9, 3, False, False), dict(kl_weight=1e-4)),
    "awm": ((14, 6, 3, False, False), dict(kl_weight=1e-3, num_steps=14)),
    "dgpo": ((10, 4, 3, True, False), dict(kl_weight=0.02)),
}
print(f"{'':<15}{'published':>10}{'without guidance':>18}   counted in iterations 1, 2, 3")
for name, (setting, options) in published.items():
    trainer = start(name, groups=2, group_size=4, minibatches=1, **options)
    counted = [trainer.iteration() for _ in range(3)]
    shown = ", ".join(
        f"{(row['nfe'] + row['train_nfe']) / row['trajectories']:.0f}" for row in counted
    )
    print(
        f"{name:<15}{evaluations(*setting):>10}{evaluations(*setting[:3], False, False):>18}  "
        f" {shown}"
    )

# %% [markdown]
# The counts of the first iterations are lower, because a copy that still equals the current weights needs no evaluation of its own. Without guidance the methods differ little per trajectory. The published totals differ because of guidance and the number of trained pairs. Such a table does not tell how many trajectories a method needs. (A trained evaluation *with* gradient also costs a backward pass, about two forward ones; all four methods have one network with gradient.)
#
# ## Training
#
# Do less noisy gradients at the beginning make a faster method? The next cell trains the four methods in this world for about 23,000 evaluations each. All have equal tuning effort (the lesson Side by side): two learning rates times two values of one setting of the method. Seeds 0 and 1 choose the setting, for a short and a long budget, and we report seeds 2 to 5. All sample with Flow-SDE and the window `:5`. Forward-process losses accept any sampler, so this choice lets only the losses differ. (By default each forward-process method has its published solver.)

# %%
OWN = {  # the setting that is tuned in addition to the learning rate, and the iterations
    "flow-grpo": ([dict(clip_range=0.02), dict(clip_range=0.2)], 16),
    "diffusion-nft": ([dict(loss=f"diffusion-nft(beta={beta})") for beta in (1, 0.1)], 9),
    "awm": ([dict(loss=f"awm(average_weight={weight})") for weight in (1, 0.1)], 9),
    "dgpo": (
        [
            dict(loss=f"dgpo(beta_dpo=1.0, sample_from=None, clip={clip})")
            for clip in (0.01, 0.2)
        ],
        11,
    ),
}
RATES, BUDGETS = (1e-2, 2e-2), (8_000, 22_500)


def evaluations_of(run):
    """Network evaluations so far, sampling and training, [evaluation]."""
    return run.sampled + run.trained


def reward_at(run, budget):
    """The reward after that many network evaluations, by linear interpolation."""
    cost = evaluations_of(run)
    i = int(
        torch.searchsorted(cost, torch.tensor(float(budget), dtype=cost.dtype)).clamp(
            1, len(cost) - 1
        )
    )
    part = (budget - cost[i - 1]) / (cost[i] - cost[i - 1])
    return float(run.reward[i - 1] + part * (run.reward[i] - run.reward[i - 1]))


def trained_runs(name, number, seeds):
    """Runs of a method with one of its four choices of own setting and learning rate."""
    options, iterations = OWN[name]
    rate, changes = RATES[number % 2], dict(sampler="flow-sde()", **options[number // 2])
    return [
        learn(name, seed, learning_rate=rate, iterations=iterations, **changes)
        for seed in seeds
    ]


runs, chosen = {}, {}
for name in OWN:
    tuning = [trained_runs(name, number, range(2)) for number in range(4)]
    for budget in BUDGETS:
        rewards = [sum(reward_at(run, budget) for run in pair) / 2 for pair in tuning]
        best = chosen[name, budget] = rewards.index(max(rewards))
        runs[name, best] = runs.get((name, best)) or trained_runs(name, best, range(2, 6))
        ends = " ".join(f"{reward_at(run, budget):.2f}" for run in runs[name, best])
        table = " ".join(f"{each:.2f}" for each in rewards)
        print(
            f"{name:<14} {budget:>6,} evaluations: tuning {table}; seeds 2 to 5 at the best"
            f" {ends}"
        )

# %% [markdown] tags=["expected"]
# flow-grpo       8,000 evaluations: tuning 0.34..0.50 0.40..0.58 0.54..0.74 0.76..0.94; seeds 2 to 5 at the best 0.75..0.96 0.75..0.96 0.75..0.96 0.75..0.96
# flow-grpo      22,500 evaluations: tuning 0.92..0.99 0.92..0.99 0.87..0.99 0.82..0.99; seeds 2 to 5 at the best 0.90..1.00 0.90..1.00 0.90..1.00 0.90..1.00
# diffusion-nft   8,000 evaluations: tuning 0.25..0.36 0.27..0.40 0.30..0.42 0.38..0.54; seeds 2 to 5 at the best 0.38..0.66 0.38..0.66 0.38..0.66 0.38..0.66
# diffusion-nft  22,500 evaluations: tuning 0.56..0.70 0.54..0.68 0.70..0.86 0.72..0.89; seeds 2 to 5 at the best 0.72..0.91 0.72..0.91 0.72..0.91 0.72..0.91
# awm             8,000 evaluations: tuning 0.21..0.28 0.21..0.28 0.30..0.43 0.39..0.54; seeds 2 to 5 at the best 0.34..0.54 0.34..0.54 0.34..0.54 0.34..0.54
# awm            22,500 evaluations: tuning 0.29..0.42 0.26..0.38 0.76..0.90 0.76..0.91; seeds 2 to 5 at the best 0.76..0.93 0.76..0.93 0.76..0.93 0.76..0.93
# dgpo            8,000 evaluations: tuning 0.28..0.40 0.38..0.57 0.28..0.40 0.35..0.52; seeds 2 to 5 at the best 0.42..0.70 0.42..0.70 0.42..0.70 0.42..0.70
# dgpo           22,500 evaluations: tuning 0.74..0.91 0.76..0.93 0.58..0.82 0.66..0.86; seeds 2 to 5 at the best 0.75..0.94 0.75..0.94 0.75..0.94 0.75..0.94

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.3, height=3.2, sharey=True)
for cell, budget in zip(axes, BUDGETS, strict=True):
    for place, (name, shade) in enumerate(SHADES.items()):
        for run in runs[name, chosen[name, budget]]:
            cell.plot(evaluations_of(run) / 1000, run.reward, color=shade, linewidth=1)
        axes[0].text(0.04, 0.9 - 0.08 * place, name, color=shade, transform=axes[0].transAxes)
    cell.axvline(budget / 1000, color=NOISE, linestyle=":", linewidth=1)
    cell.set(
        xlabel="network evaluations in thousands",
        ylim=(0.15, 1.0),
        title=f"Settings tuned for {budget:,} evaluations",
    )
    clean(cell)
axes[0].set_ylabel("held-out reward")
plt.show()

# %% [markdown]
# In this world tuned Flow-GRPO has the highest mean reward at both budgets, with four seeds, although its gradients are noisier before training. (`docs/verdict.md` has the project's comparison with more seeds.) Three findings of this lesson contribute to it. With the window a trajectory costs 15 evaluations, about half as many as with NFT and AWM and their copies, so Flow-GRPO makes more iterations. The window also leaves out the steps that make its gradient noisy. And later in training the gradients of the forward process point away from $\nabla\,\mathbb E[R]$, as measured above, while its penalties and proximal terms limit the steps.
#
# The papers report the opposite, training faster than Flow-GRPO's by factors of 3 to 25 (NFT), 24 (AWM) and about 20 (DGPO). Their models have tens of thousands of latent elements instead of two, a base model that needs guidance, hundreds of iterations, and a Flow-GRPO without a window. So this lesson does not contradict them. It shows that the advantage does not follow from the loss alone.
#
# The choice of settings matters as much as the method. AWM with the published `average_weight=1` (first two columns) hardly moves here, and with the setting that makes Flow-GRPO fastest (left figure), the reward falls again for some seeds.
#
# ## Credit per decision
#
# What are the decisions of a trajectory that Euler or DPM++ has sampled? No transition is drawn, but the initial noise is. So it is the only decision, $D = 1$: the value table `[prompt, member, decision+1]` has two columns, and all rows of a sample have one advantage. This is enough for the three methods. (The trainer refuses a rule such as `StepwiseGain` with such a sampler, since there is only one decision.)
#
# With an SDE, the lessons on Stepwise-Flow-GRPO and TP-GRPO gave every decision its own advantage. A forward-process loss can use these advantages as weights over time: a row at time $t$ gets the advantage of the last decision made at $t$ or before it in sampling. So $A(t)$ is piecewise constant, $A(t) = A_k$ for $t_{k+1} < t \le t_k$, in which $t_k$ is the time of decision $k$. In `flowrl` every credit rule works with every forward loss in this way.
#
# This is a **heuristic**. $x_t$ has new noise, so it is not the state from which decision $k$ started, and the regression does not change decision $k$. With `noise="path"` the states are the visited ones, but the target is still the finished sample. The next cell measures the effect on the gradient before training, with the gains of the lesson on Stepwise-Flow-GRPO as credit.

# %%
gains = StepwiseGain()
setting = settings_of(beginning)["sde"]
sampled = setting.rollout(Groups(18, 12), torch.Generator().manual_seed(0), gains.probe)
record = setting.experience(sampled)
# [prompt, member, decision+1]: 18 prompts, 12 members, 10 columns
values, decisions = record.values, record.decisions
by_decision = gains.assign(values, decisions)
initial = settings_of(beginning)["dpm++"]
initial = initial.experience(
    initial.rollout(Groups(18, 12), torch.Generator().manual_seed(0), NoProbe())
)
print(
    f"SDE: D = {len(decisions)}, values {tuple(values.shape)}; DPM++: D ="
    f" {len(initial.decisions)}, values {tuple(initial.values.shape)}"
)
drawn = NINE.draw(setting.schedule, 18 * 12, torch.Generator().manual_seed(0)).view(18, 12, -1)
weights = by_decision[0, 4, credited(drawn[0, 4], decisions.time)]
print("times of one sample: " + " ".join(f"{time:5.1f}" for time in drawn[0, 4]))
print("weights by gain:     " + " ".join(f"{value:+5.1f}" for value in weights))
print("\nstepwise credit, before training\n" + HEAD)
stepwise = compared(
    beginning, gains, ("Flow-GRPO", "AWM, same states", "AWM, fresh noise"), truth, BATCHES
)

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.0)
final = Uniform().assign(values, decisions)
# the last decision's credit holds until t = 0
edges = torch.cat([decisions.time, torch.zeros(1)]).flip(0)
for member, shade in ((int(final[0, :, 0].argmax()), INK), (4, DATA)):
    axes[0].stairs(
        by_decision[0, member].flip(0), edges, baseline=None, color=shade, linewidth=2
    )
    axes[0].axhline(float(final[0, member, 0]), color=shade, linestyle=":", linewidth=1)
axes[0].set(
    xlabel="training time t (1 = noise)",
    ylabel="advantage A(t)",
    title="Weights of two samples (dotted: uniform credit)",
)
axes[0].invert_xaxis()
names = ("Flow-GRPO", "AWM, same states", "AWM, fresh noise")
for shift, gradients, shade, label in (
    (-0.18, early, NOISE, "uniform"),
    (0.18, stepwise, COLOURS["stepwise-flow-grpo"], "stepwise"),
):
    heights = [alignment(gradients[name], truth).signal_to_noise for name in names]
    axes[1].bar(
        [place + shift for place in range(3)], heights, width=0.34, color=shade, label=label
    )
axes[1].set_xticks(range(3), [name.replace(", ", ",\n") for name in names])
axes[1].set(
    ylabel="signal / noise of a batch", title="Better for transitions, worse for samples"
)
axes[1].legend(frameon=False, loc="upper left")
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# Gains improve Flow-GRPO's gradient, because they remove the luck of the other decisions, which is most of its noise. However, they damage the gradient of the forward process, which contains no such luck: $v^*$ contains the whole sample, and the reward of the whole sample is its natural weight. Most weights of a sample are then near 0, whatever its reward (left figure), and the large ones belong to a state that the regression does not visit. This is one rule in one world before training. Still, it shows that we cannot expect credit by decision to carry over to the forward process.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Why may a forward-process method sample with any solver? **a** Its loss uses finished samples only. **b** All solvers give the same samples. **c** The ratio corrects the difference between solvers.
# 2. NFT's loss is constant over the first updates of an iteration. What follows? **a** The learning rate is too small. **b** The rewards do not reach the loss. **c** Nothing; look at the gradient or at the reward.
# 3. A smaller $\beta_\text{NFT}$ **a** makes the first gradient smaller, **b** moves the inner optimum further away from $v_{\text{old}}$, **c** weakens the KL penalty.
# 4. At a state that leads to bad samples, AWM without a penalty **a** has no minimum, **b** has its minimum at $v_{\text{old}}$, **c** has the same minimum as NFT.
# 5. Before training AWM's gradient has about four times the signal-to-noise ratio of Flow-GRPO's, on the same states. Why does this not make it the faster method here? **a** Its evaluations are not counted correctly. **b** Its direction turns away from $\nabla\,\mathbb E[R]$ during training, and each trajectory costs more evaluations. **c** It cannot use an SDE.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are after the first figure of targets, after exercise 4, in the section on the step length, before exercise 5, and after the training runs, in this order.

# %% tags=["solution"]
quiz = {1: "a", 2: "c", 3: "b", 4: "a", 5: "b"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: new states are computed from finished samples. 2: the value at $v_{\text{old}}$ does not contain the rewards. 3: the optimum is at $\tfrac{2}{\beta_\text{NFT}}\delta$, and the first gradient does not contain $\beta_\text{NFT}$. 4: the curvature is twice the mean advantage. 5: both effects were measured above.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $v^* = \varepsilon - x_0$, $\ell$ | target, matching error | `ForwardBatch.target`; the metric `matching` |
# | $\delta = \operatorname{Cov}(r, v^* \mid x_t)$ | all information of the rewards about $v(x_t)$, while $v_{\text{old}}$ is the mean of $v^*$ | the mean gradient at the first update |
# | $v_\pm = v_{\text{old}} \pm \beta_\text{NFT}\,(v - v_{\text{old}})$, $r$ | NFT's branches, optimality; the step is proportional to $1/\beta_\text{NFT}$ | `losses.DiffusionNFT(beta=...)` |
# | $A\,\nabla\ell$, $\lambda$ | AWM; what stops it | `losses.AWM(kl_weight=..., average_weight=...)` |
# | $\operatorname{sigmoid}(S)\,A_m$, $\sum_m A_m = 0$ | DGPO; complete groups | `losses.DGPO`, `Uniform(clamp=None)` |
# | training times, copies | which $t$; old network and average | `flow.PermutedTimes` ..., `forward.WeightCopy` |
# | solver | any | `samplers.Multistep`, `samplers.ODE`, every SDE |
# | $D = 1$ | without drawn transitions the initial noise is the only decision | `Decisions.step` is -1 |
# | $A(t)$ | credit by decision as a weight over time, a heuristic | any credit rule; `noise="path"` |
#
# ## Symbols
#
# {symbols: $t$; $\varepsilon$; $x_t$; $v$; $z_j$; $\mu$, std; $R$; $A$; $\rho$; $\beta_\text{NFT}$}
#
# ## Further reading
#
# - Zheng et al. 2025, *DiffusionNFT* (arXiv 2509.16117); Xue et al. 2025, *Advantage weighted matching* (arXiv 2509.25050); Luo et al. 2025, *DGPO* (arXiv 2510.08425): the three methods.
# - Kingma and Gao 2023, *Understanding diffusion objectives as the ELBO* (arXiv 2303.00848): when a matching loss is a likelihood bound.
# - Peng et al. 2019, *Advantage-weighted regression* (arXiv 1910.00177): regression with weights from rewards.
# - Wallace et al. 2023, *Diffusion-DPO* (arXiv 2311.12908): preferences between pairs, with matching losses as likelihoods.
# - Lee et al. 2023, *Aligning text-to-image models using human feedback* (arXiv 2302.12192): rewards as weights of the training loss.
#
# On the command line: `flowrl compare --methods flow-grpo diffusion-nft awm dgpo --world mixture`. **Next:** [14 · One action or many?](14_one_action_or_many.ipynb) compares ratios, estimated likelihoods and differences of images.

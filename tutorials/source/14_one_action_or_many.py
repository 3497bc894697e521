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
# # 14 · One action or many?
#
# **After this lesson you can** say what a ratio per step, per chunk and per image does, estimate an image's likelihood, share pairs of time and noise within a group, train from differences of two images, and design a comb of branches.
#
# **Time** 80 minutes, of which the computer needs about one. **You need** the lessons on GRPO and on the forward process, and the lesson on branching for the last two exercises.
#
# What is the action of a flow policy? In Flow-GRPO it is the draw of every step, whose Gaussian likelihood we know exactly. The lesson on the forward process suggests another answer: the finished image is *one* action, whose likelihood we have to estimate. A third answer needs no likelihood: two images from nearly the same noise, and their difference.
# The figure shows the three answers for the same untrained policy; the cross is the target of the prompt.

# %% tags=["hide-input"]
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from flowrl.credit import Uniform
from flowrl.losses import AWM, GSPO, ClippedLoss
from flowrl.methods import METHODS
from flowrl.probes import Comb, NoProbe
from flowrl.rollout import Groups, Rows, TransitionObjective
from flowrl.samplers import ODE, FlowSDE, Windowed
from flowrl.worlds.mixture import WIDTH, ring
from flowrl.bench.gradients import Setting, flat
from flowrl_course import lesson_14 as lesson
from flowrl_course.figures import (
    ACCENT,
    COLOURS,
    DATA,
    INK,
    NOISE,
    clean,
    panels,
    plane,
    target,
)
from flowrl_course.runs import learn, start

torch.set_num_threads(1)
SHADES = {name: COLOURS[name] for name in ("flow-grpo", "v-grpo", "fdfo", "step-nft")}
# share of the noise that the two of a pair have in common
SHARED = METHODS["fdfo"]().shared_noise
# the eight modes; the target of the prompt "towards 0 degrees"
data, centre = ring(), torch.tensor([2.0, 0.0])


def setting_of(trainer, sampler=None):
    """The trainer's present policy, with its sampler or another one."""
    given = (trainer.schedule, trainer.reward, trainer.prompts.prompts)
    return Setting(trainer.policy, sampler or trainer.draw_sampler(), *given)


def rolled(setting, groups, seed, probe=NoProbe()):
    """A rollout, and its record."""
    result = setting.rollout(
        groups, torch.Generator().manual_seed(seed), probe, max_batch=8192
    )
    return result, setting.experience(result)


trainer = start()
SDE = Windowed(FlowSDE(0.7), range(9))  # nine draws; the last of ten steps is deterministic
beginning = setting_of(trainer, SDE)


@torch.no_grad()
def opening():
    """Nine draws; two images and three pairs; pairs of trajectories."""
    number = next(i for i, prompt in enumerate(beginning.prompts) if target(prompt)[0] > 1.9)
    path = rolled(beginning, Groups(18, 8), 8)[0].trajectories
    nodes = path.nodes.view(18, 8, 11, 2)[number]
    member = int(
        (nodes[:, -1] - torch.tensor(target(beginning.prompts[number]))).norm(dim=1).argmin()
    )
    states, steps = nodes[member, :9, :, None, None], torch.arange(9)
    condition = beginning.policy.encode([beginning.prompts[number]] * 9)
    velocity = beginning.policy.velocity(
        states, beginning.schedule.network_timesteps[:9], condition
    )
    drawn = SDE.transition(states, velocity, beginning.schedule, steps)
    pairs = rolled(setting_of(start("fdfo", group_size=2)), Groups(18, 2, SHARED), 3)[0]
    pairs = pairs.trajectories.nodes.view(18, 2, 11, 2)
    figure, (left, middle, right) = panels(3, width=3.4, height=3.9)
    plane(left, "Nine actions:\na Gaussian draw per step", extent=2.6)
    left.plot(*nodes[member].T, "o-", color=DATA, markersize=3, linewidth=1)
    for place, std in zip(drawn.mean.flatten(1), drawn.std, strict=True):
        left.add_patch(plt.Circle(place.tolist(), float(std), color=DATA, alpha=0.12))
    plane(middle, "One action: the image,\nseen through pairs (t, noise)", extent=2.6)
    generator = torch.Generator().manual_seed(5)
    noises, times = torch.randn(3, 2, generator=generator), torch.tensor([0.2, 0.5, 0.8])
    middle.scatter(*noises.T, marker="s", s=30, color=NOISE, zorder=3)
    for image, shade in ((nodes[member, -1], DATA), (nodes[(member + 1) % 8, -1], ACCENT)):
        middle.scatter(*image, s=45, color=shade, zorder=3)
        for noise, time in zip(noises, times, strict=True):
            middle.plot(*torch.stack([image, noise]).T, color=shade, linewidth=0.7, alpha=0.7)
            middle.scatter(*((1 - time) * image + time * noise), color=shade, s=12, zorder=3)
    plane(right, "No likelihood: differences\nof images (five prompts)", extent=2.6)
    for pair in pairs[[0, 1, 4, 7, 11]]:
        for nodes_of, shade in zip(pair, (DATA, ACCENT), strict=True):
            right.plot(*nodes_of.T, "o-", color=shade, markersize=2, linewidth=0.8)
        ends = {"arrowstyle": "-|>", "color": INK, "lw": 2, "shrinkA": 0, "shrinkB": 0}
        right.annotate("", pair[0, -1], pair[1, -1], arrowprops=ends, zorder=4)
    for cell in (left, middle):
        cell.scatter(*target(beginning.prompts[number]), marker="x", s=70, color=INK, zorder=4)
    plt.show()


opening()

# %% [markdown]
# ## One ratio per step, chunk or image
#
# We begin with the Gaussian draws. PPO's ratio $\rho_k = \pi(z_{k+1} \mid z_k)/\pi_{\text{old}}(z_{k+1} \mid z_k)$ says how much more probable a draw is under the present policy than under the one that sampled it. Flow-GRPO clips every $\rho_k$ separately. GSPO (arXiv 2507.18071, for language models) uses one ratio per trajectory, the geometric mean
#
# $$\bar\rho = \exp\Big(\frac1D \sum_{k=0}^{D-1} \log \rho_k\Big),$$
#
# so that either all draws of an image are clipped, or none. Chunk-GRPO (arXiv 2510.21583) uses one ratio per chunk of consecutive steps.
#
# ### Exercise 1 · ratios of chunks
#
# *Difficulty: medium · kind: formula · importance: useful · time: 7 minutes*
#
# `log_ratios` is `[trajectory, step]`, `chunks` are numbers of consecutive steps, such as `(2, 3, 4)`, which sum to the number of steps. Return the ratio that is clipped for each step, `[trajectory, step]`: the geometric mean over the chunk that contains the step.


# %% tags=["exercise"]
def chunk_ratios(log_ratios, chunks):
    """The geometric mean of the ratios of each step's chunk, [trajectory, step]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** `log_ratios.split(chunks, dim=1)` takes a list of sizes. Average each part over its steps, expand it to its former shape, and join the parts.


# %% tags=["solution"]
def chunk_ratios(log_ratios, chunks):
    """The geometric mean of the ratios of each step's chunk, [trajectory, step]."""
    parts = log_ratios.split(list(chunks), dim=1)
    return torch.cat(
        [part.mean(dim=1, keepdim=True).expand_as(part) for part in parts], dim=1
    ).exp()


# %%
lesson.check_chunks(chunk_ratios)

# %% [markdown] tags=["explanation"]
# **Why.** With chunks of one step we get Flow-GRPO's ratios, and with one chunk of all steps that of GSPO. In `flowrl`: `losses.GSPO(chunks=(2, 3, 4))`.

# %% [markdown]
# ### Exercise 2 · ratios before and after an update
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 4 minutes*
#
# The next cell makes four updates on one batch with Flow-GRPO's loss. Before each update it computes the gradients of three losses (a ratio per step, chunk, image) on the same weights, with the same clip range. What do you expect for the gradients before the first update, and for the clipped fraction after it?
#
# - **a** The gradients are equal. Afterwards the ratio per step is clipped most often.
# - **b** The gradients are equal. Afterwards the ratio per image is clipped most often.
# - **c** The gradient with a ratio per image is shorter, since it is a mean over nine steps.

# %% tags=["exercise"]
before_and_after = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Differentiate $\bar\rho$ at $\log\rho_k = 0$, and add up the losses of all nine steps of a trajectory. How large is the spread of a mean of nine noisy numbers, compared with that of one?

# %% tags=["solution"]
before_and_after = "a"

# %%
lesson.check_before_and_after(before_and_after)

# %% [markdown] tags=["explanation"]
# **Why.** At $\rho = 1$ the derivative of the geometric mean gives each of the nine steps one ninth. The ratio appears in the loss of all nine steps, so each step's total is the same as before. After an update the mean over nine noisy log-ratios has a smaller spread than each of them, and exceeds the clip range less often.

# %%
sampled, record = rolled(beginning, Groups(18, 8), 0)
advantages = Uniform().assign(record.values, record.decisions)  # [prompt, member, decision]
sample, column = torch.cartesian_prod(torch.arange(144), torch.arange(9)).unbind(1)
sharing = {
    "step": ClippedLoss(clip_range=0.02),
    "chunk": GSPO(clip_range=0.02, chunks=(2, 3, 4)),
    "image": GSPO(clip_range=0.02),
}
sizes = {"step": (1,) * 9, "chunk": (2, 3, 4), "image": (9,)}
optimizer = torch.optim.Adam(beginning.parameters, lr=1e-2)
credit = record.decisions, advantages, torch.ones_like(advantages)
objective = TransitionObjective(beginning.policy, sharing["step"], sampled, *credit, SDE)
print(
    f"{'after':<12}{'ratio per':<10}{'std of ratios':>14}{'clipped':>9}{'length':>9}"
    f"{'cosine with steps':>19}"
)
shown = []  # the log-ratios after one update, [sample, step]
for update in range(4):
    batch = objective.batch(Rows.of(sample, column))
    squares = [
        (batch.next_node - part.mean).square().flatten(1).mean(1)
        for part in (batch.behaviour, batch.new)
    ]
    logs = (
        ((squares[0] - squares[1]) / (2 * batch.behaviour.std.square())).detach().view(144, 9)
    )
    shown.append(logs)
    results = {name: loss.loss(batch) for name, loss in sharing.items()}
    gradients = {
        name: flat(torch.autograd.grad(result.loss, beginning.parameters, retain_graph=True))
        for name, result in results.items()
    }
    for name, gradient in gradients.items():
        spread = float(chunk_ratios(logs, sizes[name]).std())
        cosine = torch.nn.functional.cosine_similarity(gradient, gradients["step"], dim=0)
        clipped = float(results[name].metrics["clip_fraction"])
        print(
            f"{update} update{'s' * (update != 1):<4} {name:<10}{spread:>14.4f}{clipped:>9.1%}"
            f"{float(gradient.norm()):>9.4f}{float(cosine):>19.2f}"
        )
    optimizer.zero_grad()
    results["step"].loss.backward()
    optimizer.step()

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.0)
one = shown[1][int(shown[1].std(1).argmax())][None]
for name, shade in (("step", NOISE), ("chunk", ACCENT), ("image", DATA)):
    ratios = chunk_ratios(one, sizes[name])[0]
    axes[0].stairs(
        ratios,
        torch.arange(10) - 0.5,
        baseline=None,
        color=shade,
        linewidth=2,
        label=f"per {name}",
    )
    every = chunk_ratios(shown[1], sizes[name]).flatten()
    axes[1].hist(
        every,
        torch.linspace(0.95, 1.05, 41),
        density=True,
        histtype="step",
        color=shade,
        linewidth=1.6,
    )
axes[0].axhspan(0.98, 1.02, color="#eef1f5", zorder=0)
axes[1].axvspan(0.98, 1.02, color="#eef1f5", zorder=0)
axes[0].set(xlabel="step", ylabel="ratio", title="One trajectory after one update")
axes[1].set(
    xlabel="ratio (grey: within the clip range)", ylabel="density", title="All trajectories"
)
axes[0].legend(frameon=False, fontsize=8)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# Before any update all ratios are 1 and the three gradients are *equal*. So sharing the ratio changes no credit and no first update. It changes the clip, from the second update on. The same clip range is wider for a mean over nine log-ratios. After one update the ratio per step is clipped most often, and the ratio per image almost never. The directions of the gradients differ. (A cosine can be negative. The clipped transitions have already moved in the direction of their advantages; the others may have moved the wrong way, and their gradient points back.) If we compare such losses with one clip range for all, we compare clip ranges. GSPO's published ranges, 3e-4 and 4e-4, belong to sequences of hundreds of tokens.
#
# ## The likelihood of an image
#
# A deterministic sampler has no ratios of steps. Then the image is the only action, and we do not know its likelihood. AWM, EPG (arXiv 2602.04663) and V-GRPO (arXiv 2604.23380) replace it by the matching error of the lesson on the forward process,
#
# $$\log p(x_0) \approx -\,\mathbb E_{t, \varepsilon}\big[\,w(t)\,|v(x_t, t) - v^*|^2\,\big], \qquad x_t = (1-t)\,x_0 + t\,\varepsilon,\quad v^* = \varepsilon - x_0 .$$
#
# EPG has $w = 1$. V-GRPO measures the error of the clean estimate, $t^2 |v - v^*|^2$, divided by its own size (`weight="normalised"`). Both insert the difference from the old policy into PPO's ratio, one per image, from a few pairs $(t, \varepsilon)$ that old and new policy share. (In `flowrl` both follow formulas that a third-party port cites, not code of the authors.)
#
# In this world we know the exact answer. Let the old policy be the data, and the new one the data tilted by the reward (the lesson on the forward process). Then $\log p_{\text{new}} - \log p_{\text{old}}$ has a closed form. The next cell estimates it for 200 images, with 1,000 pairs per image and with 4. The weight $(1-t)/t$ in the last line is that of the evidence bound, which is exact if the velocities are exact.


# %%
def estimates(images, weight, count, shared, generator):
    """log p_new - log p_old from `count` stratified pairs per image, [image]."""
    rows = 1 if shared else len(images)
    time = (torch.arange(count) + torch.rand(rows, count, generator=generator)) / count
    time = time.clamp(min=1e-3).expand(len(images), -1).flatten()
    noise = (
        torch.randn(rows, count, 2, generator=generator)
        .expand(len(images), -1, -1)
        .flatten(0, 1)
    )
    clean_points = images.repeat_interleave(count, 0)
    state, aim = (
        (1 - time)[:, None] * clean_points + time[:, None] * noise,
        noise - clean_points,
    )
    old, new = data.velocity(state, time), good.velocity(state, time)
    if weight in ("uniform", "normalised"):
        loss = AWM(weight=weight)
        # 2 elements
        terms = 2 * (loss.log_prob(new, aim, time) - loss.log_prob(old, aim, time))
    else:
        terms = (1 - time) / time * ((old - aim).square() - (new - aim).square()).sum(1)
    return terms.view(-1, count).mean(1)


def correlation(a, b):
    """Of two vectors."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


good, generator = data.tilted(centre, WIDTH), torch.Generator().manual_seed(0)
images, ends = data.sample(200, generator), torch.zeros(200)
exact = good.log_marginal(images, ends) - data.log_marginal(images, ends)
WEIGHTS = {
    "uniform": "EPG, w = 1",
    "normalised": "V-GRPO, normalised",
    "bound": "bound, (1-t)/t",
}
many = {}
print(
    f"{'':<20}{'slope':>6}{'correlation with the exact log-ratio: 1,000 pairs':>52}"
    f"{'4 pairs':>9}{'4, shared':>11}"
)
for weight, name in WEIGHTS.items():
    many[weight] = estimates(images, weight, 1000, True, generator)
    slope = float(torch.cov(torch.stack([many[weight], exact]))[0, 1] / exact.var())
    few = [
        sum(
            correlation(estimates(images, weight, 4, shared, generator), exact)
            for _ in range(40)
        )
        / 40
        for shared in (False, True)
    ]
    print(
        f"{name:<20}{slope:>6.2f}{correlation(many[weight], exact):>52.3f}{few[0]:>9.2f}"
        f"{few[1]:>11.2f}"
    )

# %% tags=["hide-input"]
figure, axes = panels(3, width=3.0, height=2.9)
for cell, (weight, name) in zip(axes, WEIGHTS.items(), strict=True):
    four = estimates(images, weight, 4, True, torch.Generator().manual_seed(2))
    cell.scatter(exact, four, s=7, color=ACCENT, alpha=0.6, label="4 pairs, shared")
    cell.scatter(exact, many[weight], s=7, color=DATA, label="1,000 pairs")
    cell.axline((0, 0), slope=1, color=NOISE, linewidth=1, linestyle=":")
    cell.set(xlabel=r"exact $\log p_{new} - \log p_{old}$", title=name)
    clean(cell)
axes[0].set_ylabel("estimate")
axes[0].legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# The bound recovers the exact log-ratio (slope 1, dotted line), but from four pairs it is the noisiest of the three, because its weight is large at small $t$. The estimates of the methods are not likelihoods: summed over the two elements, EPG's is too steep, and V-GRPO's is curved and too flat by a factor of three. However, they order the images nearly correctly, even with four pairs. For an update this is enough, since advantages only say which images should become more probable. The scale of the log-ratio matters for the clip. So the clip range is a setting of the method, and not a bound on the change of the policy.
#
# ## Pairs shared by a group
#
# In the last column the correlation is higher than in the column before, because all images of this estimate have the same pairs. V-GRPO shares pairs within a group, and stratifies the times: of $K$ times, one is in each of $K$ equal intervals of $[0, 1]$.
#
# ### Exercise 3 · pairs of a group
#
# *Difficulty: medium · kind: code · importance: useful · time: 7 minutes*
#
# Return `times` `[group, member, pair]` and `noise` `[group, member, pair, 2]`. With $K$ = `count`, time number $q = 0, \dots, K-1$ of a group is uniform in $[q/K, (q+1)/K]$; noise is standard normal, independent for each pair. The members of a group have the same pairs, and different groups have independent ones. Draw with `generator`.


# %% tags=["exercise"]
def draw_pairs(groups, members, count, generator):
    """Times [group, member, pair] and noise [group, member, pair, 2]."""
    return ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** Draw with a member axis of length 1, and `expand` it. `torch.arange(count)` numbers the intervals.


# %% tags=["solution"]
def draw_pairs(groups, members, count, generator):
    """Times [group, member, pair] and noise [group, member, pair, 2]."""
    times = (torch.arange(count) + torch.rand(groups, 1, count, generator=generator)) / count
    noise = torch.randn(groups, 1, count, 2, generator=generator)
    return times.expand(-1, members, -1), noise.expand(-1, members, -1, -1)


# %%
lesson.check_pairs(draw_pairs)

# %% [markdown] tags=["explanation"]
# **Why.** Groups of one member have their own pairs: `draw_pairs(groups * members, 1, ...)` is EPG's draw. In `flowrl` a forward-process loss declares both, `times=UniformTimes(4, low=1e-3, shift=1.0, shared=True)` and `noise="group"`. There all groups have the same times, and each group has its own noise.

# %% [markdown]
# What does sharing do to the gradient? Let $h_m(\omega) = \nabla_\theta\,\ell_m$ be the gradient of the error of image $m$ at the pair $\omega = (t, \varepsilon)$. The estimate of a group of $G$ images with $K$ pairs each is $\frac1G \sum_m A_m\, \frac1K \sum_q h_m(\omega_{mq})$. Consider images and advantages as given, so that only the pairs are random. Own and shared pairs give the same mean. How do the variances differ?
#
# ### Exercise 4 · the variance of the estimate
#
# *Difficulty: harder · kind: formula · importance: useful · time: 10 minutes*
#
# `gradients` is `[draw, member, weight]`, $h_m(\omega)$ of every member at the same pairs, one pair per draw; `advantages` is `[member]`. Return two numbers, the variances of $\frac1G \sum_m A_m\,h_m$ with one pair ($K = 1$), summed over the weights: first if each member has an independent pair, then if all have the same. Variances are over the draws, with the mean square (`unbiased=False`).


# %% tags=["exercise"]
def pair_variances(advantages, gradients):
    """Variances of the estimate, summed over weights: own pairs, shared pairs."""
    return ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** Variances of independent terms add up, and a factor $A_m/G$ counts squared. With shared pairs the terms are not independent: compute the sum over the members for each draw first, then its variance.


# %% tags=["solution"]
def pair_variances(advantages, gradients):
    """Variances of the estimate, summed over weights: own pairs, shared pairs."""
    terms = advantages[:, None] * gradients / len(advantages)
    own = terms.var(dim=0, unbiased=False).sum()
    shared = terms.sum(dim=1).var(dim=0, unbiased=False).sum()
    return own, shared


# %%
lesson.check_variances(pair_variances)

# %% [markdown] tags=["explanation"]
# **Why.** Independent terms contribute their variances separately. Shared pairs add covariances between members, which can lower or raise the sum. The next exercise asks which of the two happens.

# %% [markdown]
# ### Exercise 5 · the common part
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 4 minutes*
#
# Split $h_m(\omega) = \bar h(\omega) + u_m(\omega)$, with the mean $\bar h$ over the members of the group. Suppose we subtract $\bar h(\omega)$ from all gradients, and compute both variances again. What changes?
#
# - **a** Both variances fall by the same factor.
# - **b** Only the variance with shared pairs falls.
# - **c** Only the variance with own pairs falls.

# %% tags=["exercise"]
without_common_part = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Compute $\sum_m A_m\,\bar h(\omega)$ for a shared pair $\omega$. What do the advantages of a group sum to?

# %% tags=["solution"]
without_common_part = "c"

# %%
lesson.check_common_part(without_common_part)

# %% [markdown] tags=["explanation"]
# **Why.** With shared pairs $\sum_m A_m\,\bar h(\omega) = \bar h(\omega) \sum_m A_m = 0$, so the common part was never in the estimate. With own pairs each member has another $\bar h(\omega_m)$, and nothing cancels. This is the argument of a baseline, for pairs instead of rewards.

# %% [markdown]
# The next cell measures the four combinations of shared or own pairs and stratified or independent times. Each has 300 estimates for one group of eight images before training. It also removes the common part.

# %%
G, K = 8, 4
base = start("v-grpo")
group = replace(setting_of(base, ODE()), prompts=base.prompts.prompts[:1])
result, known = rolled(group, Groups(1, G), 0)
eight, rewards = result.trajectories.images_latent.flatten(1), known.values[0, :, -1]
weights_of = (rewards - rewards.mean()) / rewards.std()  # the advantages [member]


def errors(times, noise):
    """The matching error of each member, the mean over its pairs, [member]; times [member,
    pair].
    """
    time, noise, clean_points = (
        times.flatten(),
        noise.flatten(0, 1),
        eight.repeat_interleave(times.shape[1], 0),
    )
    state = (1 - time)[:, None] * clean_points + time[:, None] * noise
    condition = group.policy.encode(list(group.prompts) * len(time))
    velocity = group.policy.velocity(state.view(-1, 2, 1, 1), 1000 * time, condition).flatten(
        1
    )
    return (velocity - noise + clean_points).square().mean(1).view(times.shape).mean(1)


def estimate(times, noise):
    """The gradient of the mean of A times the errors, [weight]."""
    return flat(
        torch.autograd.grad((weights_of * errors(times, noise)).mean(), group.parameters)
    )


generator, variances = torch.Generator().manual_seed(1), {}
for stratified in (False, True):
    for shared in (False, True):
        rows = []
        for _ in range(300):
            times, noise = (
                draw_pairs(1, G, K, generator) if shared else draw_pairs(G, 1, K, generator)
            )
            times, noise = times.reshape(G, K), noise.reshape(G, K, 2)
            if not stratified:
                times = torch.rand(1 if shared else G, K, generator=generator).expand(G, K)
            rows.append(estimate(times.clamp(min=1e-3), noise))
        rows = torch.stack(rows)
        variances[shared, stratified] = float(rows.var(0).sum())
        print(
            f"{'shared' if shared else 'own':<7} pairs,"
            f" {'stratified' if stratified else 'independent':<12} times: length of the mean"
            f" {float(rows.mean(0).norm()):.2f}, variance {variances[shared, stratified]:.3f}"
        )
print(
    "sharing and stratifying: variance /"
    f" {variances[False, False] / variances[True, True]:.1f}"
)
single = []  # h_m at 200 pairs, [draw, member, weight]
for _ in range(200):
    times, noise = (part[0] for part in draw_pairs(1, G, 1, generator))
    gradients = [
        flat(torch.autograd.grad(part, group.parameters, retain_graph=True))
        for part in errors(times.clamp(min=1e-3), noise)
    ]
    single.append(torch.stack(gradients))
single = torch.stack(single)
for name, chosen in (
    ("h", single),
    ("h without the common part", single - single.mean(1, keepdim=True)),
):
    own, shared = pair_variances(weights_of, chosen)
    print(
        f"one pair, {name}: variance {float(own):.3f} with own pairs, {float(shared):.3f} with"
        " shared ones"
    )

# %% tags=["hide-input"]
figure, axes = panels(width=5.6, height=2.3)
names = ["own, independent", "own, stratified", "shared, independent", "shared, stratified"]
heights = [
    variances[key] for key in ((False, False), (False, True), (True, False), (True, True))
]
bars = axes.barh(names, heights, color=[NOISE, NOISE, DATA, DATA], height=0.6)
axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=9)
axes.invert_yaxis()
axes.set(
    xlabel="variance of the gradient, summed over weights",
    title="300 estimates of one group, four pairs per image",
)
clean(axes)
axes.grid(False)
plt.show()

# %% [markdown]
# The means agree, and the variances differ. Sharing and stratifying each help, and together they divide the variance by 3.5, at no cost. Without the common part (last line) the variance with shared pairs is unchanged, and that with own pairs falls to less than half. It is then below the shared one, 0.204 against 0.258. So sharing has two effects. It removes the effect of a pair on *all* images, and it adds covariance between the rest. The $u_m$ of a group sum to 0, so they are negatively correlated between members; so are the advantages, and the sum of $A_m A_n \operatorname{Cov}(u_m, u_n)$ over pairs of members is positive. Here the first effect is larger. Only more pairs reduce the rest.
#
# The images themselves are a second source of noise, which sharing and stratifying do not reduce.
#
# ## Differences of two images
#
# Finite-difference flow optimisation (FDFO, arXiv 2603.12893) needs neither draws of steps nor a likelihood. It samples two trajectories from nearly the same noise, so that the images differ by a small $d = x_0^a - x_0^b$ and the rewards by $\Delta R = R_a - R_b$. Over a small $d$ every smooth reward is nearly linear, so
#
# $$\Delta R\; d \approx d\,d^\top \nabla R, \qquad \mathbb E[\Delta R\; d] \approx C_d\,\nabla R,\quad C_d = \mathbb E[d\,d^\top].$$
#
# Thus $\Delta R\; d$ points along the gradient of the reward, multiplied by the covariance of the differences. A direction in which images of this policy do not vary gets no weight. We need no gradient of the reward. Dividing by $\operatorname{mean}(d^2)$, the mean over elements, makes the result independent of the distance between the two images.
#
# How does the velocity learn this? A change of the velocity by $-u$ in all steps changes the image by about $+u$. For member $m$ of the pair, let $\delta_m = x_0^m - \tfrac12 (x_0^a + x_0^b) = \pm d/2$. FDFO pulls the velocity of *every* state of its trajectory towards
#
# $$v^* = v_{\text{old}} - \frac{\delta_m}{\operatorname{mean}(\delta_m^2)},$$
#
# weighted by the advantage $A_m = R_m - \tfrac12 (R_a + R_b) = \pm \Delta R/2$.
#
# ### Exercise 6 · the pull of a pair
#
# *Difficulty: medium · kind: formula · importance: useful · time: 10 minutes*
#
# The loss moves the velocity along $A_m\,(v^* - v_{\text{old}})$. Return the mean of this vector over both members of a pair, `[pair, dim]`, in terms of $d$ and $\Delta R$ as far as possible. `images` is `[pair, 2, dim]`, `rewards` `[pair, 2]`. Do the two members of a pair pull in the same or in opposite directions?


# %% tags=["exercise"]
def pull(images, rewards):
    """The mean of A (v* - v_old) over the members of each pair."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Insert $\delta_m = \pm d/2$ and $A_m = \pm \Delta R/2$ for both members. What is $\operatorname{mean}(\delta_m^2)$ in terms of $d$? The means over elements keep their axis.


# %% tags=["solution"]
def pull(images, rewards):
    """The mean of A (v* - v_old) over the members of each pair."""
    d, change = images[:, 0] - images[:, 1], rewards[:, 0] - rewards[:, 1]
    return -change[:, None] * d / d.square().mean(dim=-1, keepdim=True)


# %%
lesson.check_pull(pull)

# %% [markdown] tags=["explanation"]
# **Why.** For each member, $A_m\,\delta_m = \Delta R\,d/4$, since the two signs cancel, and $\operatorname{mean}(\delta_m^2) = \operatorname{mean}(d^2)/4$. So both members pull along $-\Delta R\; d/\operatorname{mean}(d^2)$: for the worse one advantage and difference have the opposite sign. The velocity points towards noise, so the image moves along $+\Delta R\; d/\operatorname{mean}(d^2)$. If $d$ is small, the target is far away, and the velocity should not reach it. So a bound on the ratio stops the update (`AWM(trust="quadratic", clip=0.03)`). In `flowrl`: `noise="difference"`, which adds 1e-6 to the mean of squares.

# %% [markdown]
# Let us see whether differences recover the gradient. The next cell begins with Gaussian images of a known covariance $C$ and a linear reward, and computes the mean of $A_m\,\delta_m$ over 100,000 pairs, with and without the division. It should be $C\,\nabla R/2$, since $\delta_m = \pm d/2$ and $C_d = 2C$. Then it uses the world itself, with the exact velocity of the data: 64 points of noise and 256 pairs around each. With the derivative $J$ of the image by the noise, an infinitesimal difference must give the direction $J J^\top \nabla R$. (Here only the initial noise differs; FDFO also replaces a little noise at every step.)


# %%
def difference_target(old, images):
    """v*, [..., 2, dim], from the velocities that sampled and the images of both members."""
    difference = images - images.mean(dim=-2, keepdim=True)
    return old - difference / difference.square().mean(dim=-1, keepdim=True)


def ode(noise, steps=20):
    """The image of the exact flow."""
    for i in range(steps):
        noise = noise - data.velocity(noise, torch.full((len(noise),), 1 - i / steps)) / steps
    return noise


def reward(points):
    """The soft reward of the prompt, [...]."""
    return torch.exp(-(points - centre).square().sum(-1) / (2 * WIDTH**2))


def descent(images, rewards, divided=True):
    """The mean of A (v_old - v*) over pairs and members, or without the division by
    mean(delta^2), [..., dim].
    """
    advantages = rewards - rewards.mean(-1, keepdim=True)
    shift = images - images.mean(-2, keepdim=True)
    if divided:
        shift = -difference_target(torch.zeros_like(images), images)
    return (advantages[..., None] * shift).mean((-3, -2))


generator = torch.Generator().manual_seed(4)
g, root = torch.tensor([1.0, 0.5]), torch.tensor([[1.0, 0.0], [0.9, 0.3]])
covariance = root @ root.T
pairs = torch.randn(100_000, 2, 2, generator=generator) @ root.T
found = {
    name: descent(pairs, pairs @ g, divided)
    for name, divided in (("dR d", False), ("dR d / mean(d^2)", True))
}
wanted = covariance @ g / 2
print(f"grad R = ({g[0]:.2f}, {g[1]:.2f}), C grad R / 2 = ({wanted[0]:.2f}, {wanted[1]:.2f})")
for name, direction in found.items():
    print(f"{name:<16} gives ({direction[0]:.2f}, {direction[1]:.2f})")
even = torch.randn(100_000, 2, 2, generator=generator)
direction = descent(even, even @ g)
print(
    f"{'dR d / mean(d^2)':<16} gives ({direction[0]:.2f}, {direction[1]:.2f}) if C is the"
    " identity"
)

origin = torch.randn(64, 2, generator=generator)
jacobian = torch.stack(
    [torch.autograd.functional.jacobian(ode, z[None])[0, :, 0] for z in origin]
)
slope = -(ode(origin) - centre) * reward(ode(origin))[:, None]
through = (jacobian @ jacobian.mT @ slope[..., None])[..., 0]
SHARES, cosines = (0.0, 0.5, 0.9, 0.99, SHARED, 0.999), []
for share in SHARES:
    fresh = torch.randn(64, 256, 2, 2, generator=generator)
    start_noise = math.sqrt(share) * origin[:, None, None] + math.sqrt(1 - share) * fresh
    ends = ode(start_noise.view(-1, 2)).view(64, 256, 2, 2)
    both = [descent(ends, reward(ends), divided) for divided in (False, True)]
    cosines.append(
        [
            float(torch.nn.functional.cosine_similarity(a, b, dim=1).mean())
            for a, b in zip(both, (through, slope), strict=True)
        ]
    )
    length = float((ends[:, :, 0] - ends[:, :, 1]).norm(dim=-1).mean())
    print(
        f"common share {share:.3f}: length of d {length:.2f}, cosine of dR d with J J' grad R"
        f" {cosines[-1][0]:.2f}",
        end=", ",
    )
    print(f"of dR d / mean(d^2) with grad R {cosines[-1][1]:.2f}")

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.2, height=3.2)
cell = axes[0]
for pair in pairs[:60] / 1.2:
    better = int((pair[1] - pair[0]) @ g > 0)
    cell.annotate(
        "",
        pair[better],
        pair[1 - better],
        arrowprops={"arrowstyle": "->", "color": DATA, "lw": 0.7, "alpha": 0.6},
    )
for vector, shade, name in (
    (g, INK, r"$\nabla R$"),
    (covariance @ g, ACCENT, r"$C\,\nabla R$"),
):
    cell.annotate(
        "",
        1.8 * vector / vector.norm(),
        (0, 0),
        arrowprops={"arrowstyle": "-|>", "color": shade, "lw": 2.5},
    )
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    cell.text(
        *(2.2 * vector / vector.norm() + torch.tensor([0.35, -0.2])),
        name,
        color=shade,
        fontsize=11,
        bbox=ground,
    )
plane(cell, "Pairs, from worse to better, linear reward", extent=3.4)
kept = [1 - share for share in SHARES]
for column_of, (name, shade) in enumerate(
    (
        (r"$\Delta R\,d$ with $J J^\top \nabla R$", ACCENT),
        (r"$\Delta R\,d\,/\,$mean$(d^2)$ with $\nabla R$", DATA),
    )
):
    axes[1].plot(kept, [pair[column_of] for pair in cosines], "o-", color=shade, label=name)
axes[1].axvline(1 - SHARED, color=NOISE, linestyle=":", linewidth=1)
axes[1].text(1.15 * (1 - SHARED), 0.78, "FDFO", color=NOISE, fontsize=9, ha="right")
axes[1].set(
    xscale="log",
    xlabel="share of fresh noise (variance)",
    ylabel="mean cosine",
    ylim=(0.62, 1.02),
)
axes[1].set_title("Near pairs approach the derivative")
axes[1].invert_xaxis()
axes[1].legend(frameon=False, fontsize=8, loc="lower center")
clean(axes[1])
plt.show()

# %% [markdown]
# With a linear reward $\Delta R\; d$ gives $C\,\nabla R$, as the formula says. Division by $\operatorname{mean}(d^2)$ removes the size of $C$ but not its shape. It gives the direction of $\nabla R$ only if differences have no preferred direction. In the world, independent images (share 0) give all 64 points the same direction, from bad modes to good ones. As the noises of a pair approach each other, $\Delta R\; d$ approaches the derivative at each point: at FDFO's share the mean cosine is 0.99. With the division the cosine with $\nabla R$ stays near 0.9, because small differences prefer some directions.
#
# For a single pair, $\Delta R\; d$ is one number times one direction. So it measures one of the many components of $\nabla R$, and we have to average over many pairs. Therefore FDFO's groups have the smallest possible size, two.
#
# ## Where to branch
#
# Methods with many actions can choose which actions to compare. A *comb* (the lesson on branching) has an ODE trunk; at step $k$ it draws $b_k$ branches from the trunk's state, and the ODE finishes each of them. TempFlow-GRPO (arXiv 2508.04324) draws six at each of nine steps. RSM (arXiv 2604.17415) draws 6, 6, 8 and 10 at the first four of ten.
#
# ### Exercise 7 · the cost of a comb
#
# *Difficulty: medium · kind: formula · importance: useful · time: 6 minutes*
#
# `branches` are the draws at steps 0, 1, ... of `steps`. Return the network evaluations of one trunk with all its branches. The trunk ends at the last step that branches, whose evaluation the branches of this step share. A branch from step $k$ starts at node $k+1$ and needs one evaluation per remaining step. Do not count guidance.


# %% tags=["exercise"]
def comb_evaluations(branches, steps):
    """Network evaluations of a trunk with branches at its first steps."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The trunk has as many evaluations as steps that branch. After step $k$, counted from 0, `steps - k - 1` steps remain.


# %% tags=["solution"]
def comb_evaluations(branches, steps):
    """Network evaluations of a trunk with branches at its first steps."""
    return len(branches) + sum(count * (steps - k - 1) for k, count in enumerate(branches))


# %%
lesson.check_comb(comb_evaluations)

# %% [markdown] tags=["explanation"]
# **Why.** Siblings start from one state, so its velocity is evaluated once, on the trunk. An early branch is expensive, up to nine evaluations of ten, and a late one costs almost nothing. In `flowrl` the probe is `Comb(branches=(6, 6, 8, 10))`, and the trainer's metric `nfe` counts the same.

# %% [markdown]
# How much information does a branch give for its cost? Siblings differ by one draw only, so the spread of their rewards is the effect of this draw. The next cell prints the costs of both combs, compared with the states that the library's trees evaluate, and measures the spread at each step with 144 trunks before training.

# %%
COMBS = {"RSM": (6, 6, 8, 10), "TempFlow-GRPO": (6,) * 9}
for name, branches in COMBS.items():
    tree = Comb(branches=branches).tree(10, range(9), sum(branches), False, torch.Generator())
    evaluated = int((tree.node < 10).sum())
    price, count = comb_evaluations(branches, 10), sum(branches)
    print(
        f"{name:<14} {count} images, {price} evaluations ({evaluated} in the tree),"
        f" {price / count:.1f} per image",
        end="; ",
    )
    print(f"independent: {10 * count}")
untrained = setting_of(start(), SDE)
_, record = rolled(untrained, Groups(18, 54 * 8), 0, Comb(branches=6))
siblings = record.values[..., -1].view(18 * 8, 9, 6)
effects = siblings.var(-1).mean(0)
print(
    "std of siblings' rewards, steps 0 to 8: "
    + " ".join(f"{value:.2f}" for value in effects.sqrt())
)
print(
    "variance per 100 evaluations:           "
    + " ".join(f"{100 * value / (9 - k):.2f}" for k, value in enumerate(effects))
)
print(
    f"the first four steps hold {float(effects[:4].sum() / effects.sum()):.0%} of the variance"
)

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.4, height=3.0)
cell = axes[0]
for k, count in enumerate(COMBS["RSM"]):
    for branch in range(count):
        height = 1.0 + (branch - (count - 1) / 2) * 0.12
        cell.plot(
            [k, k + 1, 10],
            [-1.6 * k, -1.6 * k - height * 0.8, -1.6 * k - height * 0.8],
            color=DATA,
            linewidth=0.7,
        )
    cell.text(10.2, -1.6 * k - 0.8, str(count), color=DATA, va="center")
cell.plot([0, 1, 2, 3], [0, -1.6, -3.2, -4.8], "o-", color=INK, linewidth=2, markersize=4)
cell.set(
    xlabel="node", yticks=[], title="RSM's comb: 222 evaluations, 30 images", xlim=(-0.3, 11)
)
cell.spines[["left", "right", "top"]].set_visible(False)
cell = axes[1]
cell.bar(range(9), effects.sqrt(), color=ACCENT, width=0.6)
cell.set(
    xlabel="step of the branch",
    ylabel="std of siblings' rewards",
    title="Early branches cost more and differ more",
)
price = cell.twinx()
price.plot(range(9), range(9, 0, -1), "o--", color=INK, markersize=3, linewidth=1)
price.set(ylabel="evaluations of a branch (dots)", ylim=(0, 10))
price.spines["top"].set_visible(False)
clean(cell)
plt.show()

# %% [markdown]
# In this world, before training, the reward is decided early. The first four steps, at which RSM branches, hold most of the variance, also per network evaluation. RSM's images cost more than TempFlow-GRPO's because it leaves out the late branches, which cost little and whose siblings are almost equal. TempFlow-GRPO draws them, but gives them less weight (its weights by noise). With a trained policy, or a reward for fine detail, the spread may be elsewhere. In the lesson What is a step worth? we compute the worth of steps exactly.
#
# ### Exercise 8 · design a comb
#
# *Difficulty: medium · kind: design · importance: useful · time: 6 minutes*
#
# Choose `branches` for 10 steps (9 of them may branch). The comb should
#
# - need at most 150 evaluations and produce at least 20 images;
# - have at least four siblings at every step that branches;
# - branch at steps that hold at least 80% of the measured variance.


# %% tags=["exercise"]
branches = ...  # such as (6, 6, 8, 10)

# %% [markdown] tags=["hint"]
# **Hint.** The cell above prints how much of the variance the first four steps hold. Where is an additional image cheapest among these four?

# %% tags=["solution"]
branches = (4, 4, 5, 7)

# %%
lesson.check_design(branches)

# %% [markdown] tags=["explanation"]
# **Why.** Fewer than four steps hold less than 80% of the variance. Four siblings at each of the first four steps are 16 images for 124 evaluations. The other four images are cheapest at late steps: (4, 4, 4, 8) needs 148 evaluations, (4, 4, 5, 7) needs 149, and a fifth step, (4, 4, 4, 4, 4), needs 145. RSM has the same pattern: more branches at later steps.

# %% [markdown]
# ## Training
#
# The last cell trains with four answers to the question of this lesson: Flow-GRPO (a ratio per step), V-GRPO (a likelihood per image), FDFO (differences) and π-StepNFT (arXiv 2603.02083, published for robots). The last one applies NFT's two branches to the *visited transitions* instead of the noised images. For each method, seeds 0 and 1 compare three learning rates by the mean held-out reward over training, or the last one if that is lower. Seeds 2 to 4 repeat the best. All runs need about 40,000 network evaluations, sampling and training. An iteration samples 96 images in all four.

# %%
FIXED = {
    "flow-grpo": ((0.005, 0.01, 0.02), dict(clip_range=0.06, iterations=28)),
    "v-grpo": ((0.01, 0.02, 0.04), dict(minibatches=1, iterations=30)),
    "fdfo": ((0.01, 0.02, 0.04), dict(group_size=2, groups=48, minibatches=1, iterations=21)),
    "step-nft": ((0.0025, 0.005, 0.01), dict(iterations=28)),
}


def outcome(run):
    """The mean reward over training, or the last one if that is lower."""
    return float(torch.minimum(run.reward.mean(), run.reward[-1]))


runs = {}
for name, (rates, options) in FIXED.items():
    outcomes = [
        sum(outcome(learn(name, seed, learning_rate=rate, **options)) for seed in range(2)) / 2
        for rate in rates
    ]
    best = rates[outcomes.index(max(outcomes))]
    runs[name] = [learn(name, seed, learning_rate=best, **options) for seed in range(2, 5)]
    tuned = " ".join(f"{value:.2f}" for value in outcomes)
    over = " ".join(f"{float(run.reward.mean()):.2f}" for run in runs[name])
    last = " ".join(f"{float(run.reward[-1]):.2f}" for run in runs[name])
    each = (runs[name][0].sampled + runs[name][0].trained)[-1] / options["iterations"] / 96
    print(
        f"{name:<10} {each:.0f} evaluations per image; tuning {tuned}; seeds 2 to 4: mean"
        f" {over}, last {last}"
    )

# %% [markdown] tags=["expected"]
# flow-grpo  15 evaluations per image; tuning 0.64..0.80 0.74..0.87 0.74..0.90; seeds 2 to 4: mean 0.74..0.90 0.74..0.90 0.74..0.90, last 0.80..1.00 0.80..1.00 0.80..1.00
# v-grpo     14 evaluations per image; tuning 0.44..0.60 0.56..0.72 0.20..0.62; seeds 2 to 4: mean 0.56..0.76 0.56..0.76 0.56..0.76, last 0.80..1.00 0.80..1.00 0.80..1.00
# fdfo       20 evaluations per image; tuning 0.22..0.42 0.50..0.68 0.62..0.76; seeds 2 to 4: mean 0.60..0.78 0.60..0.78 0.60..0.78, last 0.80..1.00 0.80..1.00 0.80..1.00
# step-nft   15 evaluations per image; tuning 0.52..0.70 0.62..0.80 0.20..0.62; seeds 2 to 4: mean 0.60..0.80 0.60..0.80 0.60..0.80, last 0.75..1.00 0.75..1.00 0.75..1.00

# %% tags=["hide-input"]
figure, axes = panels(width=6.0, height=3.4)
for place, (name, shade) in enumerate(SHADES.items()):
    for run in runs[name]:
        axes.plot((run.sampled + run.trained) / 1000, run.reward, color=shade, linewidth=1.3)
    axes.text(0.72, 0.36 - 0.075 * place, name, color=shade, transform=axes.transAxes)
axes.set(
    xlabel="network evaluations in thousands, sampling and training",
    ylabel="held-out reward",
    ylim=(0.15, 1.02),
)
axes.set_title("All four learn the task; three seeds each")
clean(axes)
plt.show()

# %% [markdown]
# All four methods learn this task. Here the reward rises first with Flow-GRPO, whose draws have an exact likelihood. This does not rank the methods: three seeds, one world of two dimensions, one tuned setting of many. For two methods the largest rate was the best, so the range of rates was too small. Two facts favour many actions here. In two dimensions the draw of a step says much about the image. And in the runs of this course Flow-GRPO trains with the window `:5`, the steps with the largest effect. So an image costs 15 evaluations, and with FDFO 20. The methods with one action were made for models with tens of thousands of latent elements, guidance, and fast deterministic samplers; this world has two elements and no guidance. At their largest rate, V-GRPO and StepNFT have lower rewards than at half of it, with the same number of evaluations. So the learning rate matters as much as the method.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. You replace the ratio per step by one ratio per image and keep the clip range. What changes in the first update after a rollout? **a** The credit of the steps. **b** The length of the gradient. **c** Nothing.
# 2. EPG's estimates have a slope of 1.6 against the exact log-ratios. Is this a problem? **a** Yes, the gradient points in a wrong direction. **b** The order of images is nearly right; the clip range has to fit the scale. **c** No, since the clip corrects the scale.
# 3. Sharing pairs in a group lowers the variance, because **a** fewer random numbers are drawn, **b** the common effect of a pair cancels with advantages that sum to 0, **c** the images become more similar.
# 4. Why does FDFO need many pairs in high dimensions? **a** One pair measures the reward's change along one direction only. **b** The images of a pair are too similar. **c** The likelihood of a pair is noisy.
# 5. Compared with a late branch, a branch at step 0 of a comb **a** costs the same, since both give one image, **b** costs less, since the trunk is shorter, **c** costs more, since the ODE has more steps left.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are in exercise 2, after the figure of likelihoods, in exercise 5, before the section on branches, and in the explanation of exercise 7, in this order.

# %% tags=["solution"]
quiz = {1: "c", 2: "b", 3: "b", 4: "a", 5: "c"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: all ratios are 1, and the gradients are equal. 2: advantages need the order, the clip needs the scale. 3: it acts as a baseline. 4: $\Delta R\; d$ is one number times one direction. 5: every remaining step is an evaluation.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $\rho_k$; $\bar\rho$ | ratio per step; geometric mean per chunk or image: a wider clip, the same first gradient | `losses.ClippedLoss`; `losses.GSPO(chunks=...)` |
# | $-\mathbb E[w\,\lvert v - v^*\rvert^2]$ | estimated likelihood of an image; its order matters, its scale affects the clip | `losses.AWM(weight=..., ratio="sum_first")`; the methods `epg`, `v-grpo` |
# | $\omega = (t, \varepsilon)$ | pairs; shared by a group and stratified | `UniformTimes(shared=True)`, `noise="group"` |
# | $\sum_m A_m\,\bar h(\omega) = 0$ | the common effect of a pair cancels | advantages that sum to 0 in a group |
# | $\Delta R\; d$, $C_d\,\nabla R$ | finite difference: gradient times the covariance of differences | `noise="difference"`; the method `fdfo` |
# | $v_{\text{old}} - \delta/\operatorname{mean}(\delta^2)$ | target of a difference | `AWM(trust="quadratic")` |
# | $b_k$ | branches at step $k$; an early one costs more, and its siblings differ more | `probes.Comb(branches=(6, 6, 8, 10))`; the method `rsm` |
# | NFT on transitions | preference between two means of a step | `losses.StepNFT`; the method `step-nft` |
#
# ## Symbols
#
# {symbols: $\varepsilon$; $x_t$; $v$; $z_j$; decision $k$; $\rho$; $D$; $R$; $A$; $c$}
#
# ## Further reading
#
# - *V-GRPO* (2026, arXiv 2604.23380) and *EPG* (2026, arXiv 2602.04663): one likelihood per image from matching errors.
# - *Finite-difference flow optimisation* (2026, arXiv 2603.12893): two trajectories, no likelihood.
# - *RSM* (2026, arXiv 2604.17415) and *TempFlow-GRPO* (2025, arXiv 2508.04324): where to branch.
# - *GSPO* (2025, arXiv 2507.18071) and *Chunk-GRPO* (2025, arXiv 2510.21583): one ratio for several draws.
# - *π-StepNFT* (2026, arXiv 2603.02083): NFT's branches on transitions.
# - Spall 1992, *Multivariate stochastic approximation using a simultaneous perturbation gradient approximation* (IEEE Transactions on Automatic Control 37): the gradient from differences along random directions.
#
# On the command line: `flowrl compare --methods flow-grpo v-grpo fdfo step-nft --world mixture`. **Next:** [15 · What is a step worth?](15_what_is_a_step_worth.ipynb) returns to decisions, and computes what each is worth exactly.

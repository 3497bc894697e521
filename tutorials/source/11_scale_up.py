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
# # 11 · Scale up
#
# **After this lesson you can** use SD3.5 or FLUX instead of the small models of the other lessons, describe the effects of LoRA, guidance and precision on the algorithm, find the cause of a run that fails at its start, and compute batch sizes and
# memory before a run.
#
# **Time** 70 minutes, of which the computer needs about one. **You need** the lessons from ODE and SDE to Flow-GRPO, and the lesson on TP-GRPO for its presets.
#
# The method does not change: sampler, credit rule, loss and trainer are the same objects as before. Only the policy changes. The figure shows the memory on one GPU without activations, for the shapes of the real architectures, if all weights are trained, and with a LoRA.

# %% tags=["hide-input"]
import math
import warnings
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import torch

from flowrl import Prompt, Trainer, Updates
from flowrl.flow import log_prob
from flowrl.losses import ClippedLoss
from flowrl.methods import flow_grpo, tp_grpo
from flowrl import PolicyOptions
from flowrl.policies import LORA_TARGETS
from flowrl.run.models.load import load_policy
from flowrl.run.models.memory import ARCHITECTURES
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Usage, rollout, solve
from flowrl.samplers import FlowSDE, Windowed
from flowrl.testing.tiny import TINY, tiny_flux_policy, tiny_sd3, tiny_sd3_policy
from flowrl_course import lesson_11 as lesson
from flowrl_course.figures import (
    ACCENT,
    COLOURS,
    DATA,
    NOISE,
    OTHERS,
    ImageRow,
    clean,
    panels,
    show_images,
)
from flowrl_course.progress import progress

warnings.filterwarnings("ignore")
networks = {name: ARCHITECTURES[name].build("meta") for name in ("sd3.5-medium", "flux.1-dev")}


def attention_layers(network):
    """(out, in) of every linear layer that gets a LoRA: all attention projections."""
    return [
        tuple(m.weight.shape)
        for name, m in network.named_modules()
        if name.endswith(LORA_TARGETS) and hasattr(m, "weight")
    ]


def opening():
    """Gigabytes by use: frozen weights in bfloat16; trained weights, gradient, two moments of
    Adam and average in float32.
    """
    figure, axes = panels(1, width=7.6, height=2.7)
    bars = []
    for name, network in networks.items():
        total = sum(p.numel() for p in network.parameters())
        lora = sum(32 * (out + wide) for out, wide in attention_layers(network))
        bars.append((f"{name}, all weights", [2 * total, 4 * total, 16 * total]))
        bars.append((f"{name}, LoRA rank 32", [2 * total, 4 * lora, 16 * lora]))
    left = [0.0] * len(bars)
    uses = (
        "frozen weights (as reference, or under the LoRA)",
        "trained weights",
        "gradient, Adam, average",
    )
    for k, (use, shade) in enumerate(zip(uses, (NOISE, DATA, ACCENT), strict=True)):
        sizes = [parts[k] / 1e9 for _, parts in bars]
        axes.barh(
            [name for name, _ in bars], sizes, left=left, color=shade, label=use, height=0.6
        )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 3, row, f"{total:.0f} GB", va="center", fontsize=9)
    axes.axvline(80, color="#22252b", linewidth=0.8, linestyle=":")
    axes.text(83, 1.5, "one GPU of 80 GB", fontsize=8, va="center")
    axes.set(
        xlabel="gigabytes, without activations",
        xlim=(0, 310),
        title="Memory with all weights trained, and with a LoRA",
    )
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    clean(axes)
    plt.show()


opening()

# %% [markdown]
# ## A policy is a pipeline with options
#
# `load_policy` loads the folder of a diffusers pipeline (or its name on the Hub). If `MODEL` is empty, this lesson uses a *tiny* pipeline instead: the same classes of diffusers and transformers, with two layers and random weights. Its images are coloured noise, sampled in
# milliseconds on a laptop. However, it has all parts: tokenizers, text encoders, transformer, decoder and scheduler. On a machine with a GPU and the weights, set `MODEL`, and run the same cells.

# %%
MODEL = ""  # for example "stabilityai/stable-diffusion-3.5-medium", or a folder
PROMPTS = [Prompt(text) for text in ("a red fox", "a red car", "a red house", "a red hat")]
STEPS = 8
base = (
    PolicyOptions(
        device="cuda",
        dtype="bfloat16",
        lora_rank=32,
        lora_alpha=64.0,
        gradient_checkpointing=True,
    )
    if MODEL
    else TINY
)


def load(**changes):
    """The policy with some options changed."""
    options = replace(base, **changes)
    return load_policy(MODEL, options) if MODEL else tiny_sd3_policy(options)


policy = load()
print(
    f"options:    {base.size[0]} x {base.size[1]} pixels, {base.dtype}, LoRA of rank"
    f" {base.lora_rank}"
)
print(
    "one latent:",
    policy.latent_shape,
    "  trained:",
    f"{sum(p.numel() for p in policy.trainable().values()):,} numbers",
)
print(
    "condition: ",
    {name: tuple(t.shape) for name, t in policy.encode(PROMPTS).tensors.items()},
    "for",
    len(PROMPTS),
    "prompts",
)
real = ARCHITECTURES["sd3.5-medium"]
embedding = real.text_tokens * real.text_width * 2  # bytes in bfloat16
print(
    f"SD3.5 at full size: {real.text_tokens} tokens of {real.text_width:,} numbers are"
    f" {embedding / 1e6:.1f} MB a prompt, {embedding * 48 * 24 / 1e9:.1f} GB for 48 x 24"
    " samples"
)

# %% [markdown]
# The condition of a prompt is one number, not its embedding. The embedding is large (last line), and copies for every sample of an iteration of Flow-GRPO (48 groups of 24) would be larger still. The policy therefore stores one copy per prompt, and looks it up when it calls the network. It moves the text encoders to
# the GPU only for new prompts.
#
# Sampling works as before:

# %%
noise = torch.randn(4, *policy.latent_shape, generator=torch.Generator().manual_seed(0)).to(
    policy.device
)
latents = solve(policy, policy.schedule(STEPS), policy.encode(PROMPTS), noise, Usage())
show_images(ImageRow(policy.decode(latents).cpu(), [prompt.text for prompt in PROMPTS]))
plt.show()

# %% [markdown]
# ## The grid
#
# Larger images need more noise before they are unrecognisable, because their neighbouring pixels are similar and the noise averages out. The schedulers of the models therefore *shift* the even grid $u_j = 1 - j/T$ towards $t = 1$: they multiply the ratio of noise to data, $u/(1-u)$, by a number. This number, the shift, is 3 for SD3.5, and grows with the number of image tokens for FLUX. `policy.schedule(T)` is the model's own grid.
#
# ### Exercise 1 · the shift
#
# *Difficulty: easy · kind: formula · importance: useful · time: 5 minutes*
#
# Find the shifted time $t$ of a time $u$. Return the shifted times of an even grid, with both ends. Where is the middle of the grid with a shift of 3?


# %% tags=["exercise"]
def shifted(u, shift):
    """The shifted times of an even grid u [node]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Solve $t/(1-t) = \text{shift}\cdot u/(1-u)$ for $t$, and simplify, so that $u = 1$ needs no special case. Check both ends: $t(1) = 1$ and $t(0) = 0$ for every shift.


# %% tags=["solution"]
def shifted(u, shift):
    """The shifted times of an even grid u [node]."""
    return shift * u / (1 + (shift - 1) * u)


# %%
lesson.check_shifted(shifted)

# %% [markdown] tags=["explanation"]
# **Why.** The solution is
#
# $$t = \frac{\text{shift}\cdot u}{1 + (\text{shift}-1)\,u}.$$
#
# It keeps both ends. With a shift of 3 the middle of the grid is at $t = 0.75$.

# %% tags=["hide-input"]
figure, axes = panels(1, width=5.6, height=3.2)
even = torch.linspace(1, 0, 11)
flux = {
    size: tiny_flux_policy(replace(TINY, resolution=size)).schedule(10).times
    for size in (128, 256)
}
curves = {
    "even": (even, NOISE, 0.62),
    "SD3.5, shift 3": (policy.schedule(10).times, DATA, 0.70),
    "FLUX, 1,024 tokens (512 px)": (flux[128], OTHERS[0], 0.78),
    "FLUX, 4,096 tokens (1,024 px)": (flux[256], ACCENT, 0.86),
}
for name, (times, shade, _) in curves.items():
    axes.plot(range(11), times.cpu(), "o-", color=shade, markersize=4, label=name)
axes.set(
    xlabel="node",
    ylabel="time t (1 = noise)",
    xticks=range(11),
    title="Shifted grids have more steps near t = 1",
)
axes.legend(frameon=False, fontsize=8)
clean(axes)
plt.show()
for name, (times, _, _) in curves.items():
    print(
        f"{name:30} last step from t = {float(times[-2]):.2f} to 0; nodes above t = 0.5:"
        f" {int((times > 0.5).sum())} of 11"
    )

# %% [markdown]
# The grid matters for credit. In Flow-GRPO and TP-GRPO the last step is an ODE step, which is not a decision. On FLUX's grid this is a long step. On the grid of SD3.5 it is very short: its scheduler shifts a base grid that ends at its own smallest time instead of 0. So the long step is the one before, which is stochastic. For this reason, always take the grid from the model's scheduler, not from a formula.
#
# ## LoRA: a small number of trained weights
#
# A LoRA (Hu et al. 2021, arXiv 2106.09685) freezes a layer's weights $W$ (out × in) and adds a product of two low-rank matrices,
#
# $$W x + \frac{\alpha}{r} B A x,\qquad A: r \times \text{in},\quad B: \text{out} \times r,\quad B = 0 \text{ at the start}.$$
#
# So the initial policy is exactly the base model. With the adapter disabled, the same network is the reference of the KL penalty, and we need no second copy.
#
# ### Exercise 2 · the number of trained weights
#
# *Difficulty: easy · kind: formula · importance: useful · time: 4 minutes*
#
# `shapes` lists (out, in) of the layers that get a LoRA.


# %% tags=["exercise"]
def lora_parameters(shapes, rank):
    """The number of trained weights."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** A has `rank` rows of length *in*, B has *out* rows of length `rank`. Add up both, over all layers.


# %% tags=["solution"]
def lora_parameters(shapes, rank):
    """The number of trained weights."""
    return sum(rank * (out + wide) for out, wide in shapes)


# %%
lesson.check_lora_parameters(lora_parameters)

# %% [markdown] tags=["explanation"]
# **Why.** A has rank × in numbers, B out × rank. For square layers of width $d$ these are $2 r d$ numbers instead of $d^2$: 4% for $r = 32$, $d = 1536$. In addition, only the attention layers get a LoRA.

# %%
for name, network in networks.items():
    total, layers = sum(p.numel() for p in network.parameters()), attention_layers(network)
    trained = lora_parameters(layers, 32)
    print(
        f"{name:13} {total / 1e9:5.2f} billion weights; LoRA rank 32 on {len(layers)} layers"
        f" trains {trained / 1e6:.1f} million, {trained / total:.1%}"
    )
print(
    "the library counts for our policy:",
    sum(p.numel() for p in policy.trainable().values()),
    end=", ",
)
print(
    "and we:",
    (
        lora_parameters(attention_layers(tiny_sd3().transformer), TINY.lora_rank)
        if not MODEL
        else "see above"
    ),
)

# %% [markdown]
# Each trained number is stored in float32, with a gradient, two moments of Adam and a running average: 20 bytes. The bars of the first figure contain these bytes.
#
# ### Exercise 3 · a file for other programs
#
# *Difficulty: medium · kind: formula · importance: useful · time: 5 minutes*
#
# A LoRA file contains A and B. Some programs ignore $\alpha$ and add $BA$. Return two matrices with which such a program adds the right matrix. ($r$ is A's number of rows.)


# %% tags=["exercise"]
def folded(A, B, alpha):
    """(A', B') with B' A' = (alpha / r) B A."""
    return ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** Which of the two numbers in `A.shape` is the rank? The factor must enter the product $B'A'$ once.


# %% tags=["solution"]
def folded(A, B, alpha):
    """(A', B') with B' A' = (alpha / r) B A."""
    return A, B * (alpha / A.shape[0])


# %%
lesson.check_folded(folded)

# %% [markdown] tags=["explanation"]
# **Why.** The scale may be part of either matrix, but of one only. `policy.save` multiplies B by it. Without the scale, images would look *almost* right, with half (or a quarter) of the learned change, and the error is easy to overlook. To detect it, load the file with plain diffusers and compare images,
# as at the end of this lesson.

# %% [markdown]
# ## Guidance is part of the policy
#
# Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598) evaluates the network twice: with the prompt, and with a negative prompt, which is usually empty. The guided velocity is on the straight line through both. The *guidance scale* $\gamma$ is the position on it: 0 is the negative prompt's velocity, 1 the prompt's, and larger scales extrapolate beyond.
#
# ### Exercise 4 · guidance
#
# *Difficulty: easy · kind: formula · importance: essential · time: 3 minutes*
#
# Return the guided velocity. Is there a scale with which the result does not change if both velocities are swapped?


# %% tags=["exercise"]
def guided(prompt, negative, scale):
    """The guided velocity."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Which vector leads from the negative velocity to the prompt's? Start at the negative velocity and follow it $\gamma$ times. Test the scales 0 and 1.


# %% tags=["solution"]
def guided(prompt, negative, scale):
    """The guided velocity."""
    return negative + scale * (prompt - negative)


# %%
lesson.check_guided(guided)

# %% [markdown] tags=["explanation"]
# **Why.** $v_\text{neg} + \gamma\,(v_\text{prompt} - v_\text{neg})$. Scale 1 is the prompt's own velocity: no guidance. Scale 0 ignores the prompt, and 1/2, the mean of both, treats them alike. For $\gamma > 1$ the negative velocity has a negative weight. Papers differ in the definition of the scale; diffusers and `flowrl` use this one. FLUX.1-dev also has a *distilled* guidance: the scale is an input of the network, which was trained to imitate the effect in one evaluation.

# %% [markdown]
# With guidance the guided velocity moves the sample, so the guided velocity *is the policy*. The ratio compares the current policy with the one that sampled, and should be 1 before the first update.
#
# ### Exercise 5 · guidance in sampling only
#
# *Difficulty: medium · kind: prediction · importance: essential · time: 4 minutes*
#
# Suppose we sample with scale 4.5, and compute the new log-probabilities without guidance, to save evaluations. What do the ratios look like before the first update?
#
# - **a** All are 1, since the weights have not changed.
# - **b** They scatter evenly around 1, since the noise is symmetric.
# - **c** Most are below 1, since samples of one policy are less likely under another.

# %% tags=["exercise"]
ratios_without_guidance = "..."

# %% [markdown] tags=["hint"]
# **Hint.** The mean of the transition depends on the velocity. Each drawn state is close to the mean of the policy that drew it. How likely is it under a Gaussian with another mean?

# %% tags=["solution"]
ratios_without_guidance = "c"

# %%
lesson.check_unguided(ratios_without_guidance)

# %% [markdown] tags=["explanation"]
# **Why.** The two policies have different means and the same standard deviation. The expected log-ratio is minus the KL divergence between them, so it is negative. The next cell samples one group per prompt with scale 4.5, and computes ratios in three ways.

# %%
strong = load(guidance_scale=4.5)
sampler, groups = Windowed(FlowSDE(0.7), range(STEPS - 1)), Groups(len(PROMPTS), 4)
generator = torch.Generator(strong.device).manual_seed(1)


def ratios(sampled, evaluate):
    """exp(new - old log-probability) over all decisions, with the current velocities
    `evaluate(node, time, condition)`.
    """
    schedule, values = sampled.trajectories.schedule, []
    nodes, old = sampled.trajectories.nodes, sampled.trajectories.velocities
    condition = strong.encode(PROMPTS).repeat(groups.members)
    for step in sampled.trajectories.tree.drawn_steps:
        index = torch.full((groups.samples,), step, device=nodes.device)
        with torch.no_grad():
            velocity = evaluate(
                nodes[:, step],
                schedule.network_timesteps[step].expand(groups.samples),
                condition,
            )
        now = log_prob(
            sampler.transition(nodes[:, step], velocity, schedule, index), nodes[:, step + 1]
        )
        then = log_prob(
            sampler.transition(nodes[:, step], old[:, step], schedule, index),
            nodes[:, step + 1],
        )
        values.append((now - then).exp())
    return torch.cat(values)


def unguided(node, time, condition):
    with strong.guided(1.0):
        return strong.velocity(node, time, condition)


def reference(node, time, condition):
    with strong.reference():
        return strong.velocity(node, time, condition)


start = groups.noise(strong.latent_shape, generator)
sampled = rollout(
    strong, sampler, strong.schedule(STEPS), strong.encode(PROMPTS), start, generator, groups
)
for name, evaluate in (
    ("guided, as sampled", strong.velocity),
    ("without guidance", unguided),
    ("base model (LoRA off)", reference),
):
    values = ratios(sampled, evaluate)
    largest = float((values - 1).abs().max())
    size = (
        "below 1e-6"
        if largest < 1e-6
        else (
            f"{largest:.3f}; {float((values < 1).float().mean()):.0%} of the ratios are"
            " below 1"
        )
    )
    print(f"{name:22} largest |ratio - 1| = {size}")

# %% [markdown]
# As sampled, and with the base model (the LoRA is still zero), the ratio is 1. Without guidance it differs from 1 before any update, and most ratios are below 1. With a clip range of $c = 10^{-4}$, a pair with a ratio below $1 - c$ and a negative advantage is clipped. So mostly pairs with positive advantages would be trained. A policy that samples with guidance must therefore be trained with it, although this doubles the cost of training. `guidance_gradient="prompt"` computes the negative branch without a
# gradient, which saves its activations. Stepwise-Flow-GRPO also reports training with scale 1 throughout.
#
# ## Precision
#
# The network computes in bfloat16; latents, transitions and log-probabilities are float32. bfloat16 has 8 significant bits, so its relative error is up to $2^{-8} \approx 0.4\%$. The next cell measures three errors:
#
# - *rounded node*: the next state is rounded to bfloat16 after its log-probability was computed;
# - *bfloat16 transition*: the mean of the transition is computed in bfloat16;
# - *other batch*: the network evaluates batches of another size than during sampling, and may add numbers in another order.

# %%
half = load(dtype="bfloat16")
sampled = rollout(
    half, sampler, half.schedule(STEPS), half.encode(PROMPTS), start, generator, groups
)
paths, schedule = sampled.trajectories, sampled.trajectories.schedule
condition = half.encode(PROMPTS).repeat(groups.members)
differences = {"rounded node": [], "bfloat16 transition": [], "other batch": [], "correct": []}
for step in paths.tree.drawn_steps:
    node, following, velocity = (
        paths.nodes[:, step],
        paths.nodes[:, step + 1],
        paths.velocities[:, step],
    )
    index, time = (
        torch.full((groups.samples,), step, device=node.device),
        schedule.network_timesteps[step].expand(groups.samples),
    )
    gaussian = sampler.transition(node, velocity, schedule, index)
    old = log_prob(gaussian, following)
    differences["rounded node"].append(log_prob(gaussian, following.bfloat16().float()) - old)
    rough = replace(gaussian, mean=gaussian.mean.bfloat16().float())
    differences["bfloat16 transition"].append(log_prob(rough, following) - old)
    with torch.no_grad():
        alone = torch.cat(
            [
                half.velocity(
                    node[i : i + 1], time[:1], condition.take(index[i : i + 1] * 0 + i)
                )
                for i in range(groups.samples)
            ]
        )
        same = half.velocity(node, time, condition)
    differences["other batch"].append(
        log_prob(sampler.transition(node, alone, schedule, index), following) - old
    )
    differences["correct"].append(
        log_prob(sampler.transition(node, same, schedule, index), following) - old
    )
floors = {
    name: float((torch.cat(values).exp() - 1).abs().max())
    for name, values in differences.items()
}
for name, floor in floors.items():
    print(f"{name:20} largest |ratio - 1| = {floor:.1e}")

# %% [markdown] tags=["expected"]
# rounded node         largest |ratio - 1| = 3e-4..3e-3
# bfloat16 transition  largest |ratio - 1| = 3e-4..3e-3
# other batch          largest |ratio - 1| = 0..3e-3
# correct              largest |ratio - 1| = 0..1e-6

# %% tags=["hide-input"]
figure, axes = panels(1, width=6.4, height=2.4)
axes.barh(
    list(floors),
    [max(floor, 1e-8) for floor in floors.values()],
    color=[ACCENT, ACCENT, NOISE, DATA],
    height=0.6,
)
for row, floor in enumerate(floors.values()):
    axes.text(
        max(floor, 1e-8) * 1.3, row, f"{floor:.0e}" if floor else "0", va="center", fontsize=9
    )
for clip, name, side in (
    (1e-5, "TP-GRPO's clip range ", "right"),
    (1e-4, " Flow-GRPO's clip range", "left"),
):
    axes.axvline(clip, color="#22252b", linewidth=0.8, linestyle=":")
    axes.text(clip, 3.5, name, fontsize=8, va="center", ha=side)
axes.set(
    xscale="log",
    xlim=(1e-8, 1),
    xlabel="largest |ratio - 1| before any update",
    ylim=(3.8, -0.6),
)
axes.set_title("Rounding errors and clip ranges")
clean(axes)
plt.show()

# %% [markdown]
# On the machine that built this page all three errors are above the clip ranges of the papers, so rounding alone would clip pairs. (The latents here have 256 elements; the mean over the 65,536 elements of a real latent reduces the error.) `flowrl` avoids the first two errors. The effect of the batch size remains in practice, and
# depends on the device and its kernels. The metric `ratio_noise` measures it in every iteration. If it is close to the clip range, sample and train with batches of one size, or use a larger clip range.
#
# `flowrl` avoids another error as well. For speed, some programs merge the LoRA into bfloat16 weights. $W + BA$ rounded to bfloat16 loses most of a small $BA$, so the sampling policy would differ from the trained one. `policy.frozen()` merges the LoRA only in float32 networks.
#
# ### Exercise 6 · the first iteration of three runs
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 6 minutes*
#
# Three runs of a real model with clip range $10^{-4}$ do not learn. These are metrics of their first iteration, before any update. (`zero_spread_groups` is the fraction of groups whose members all have the same reward.) Which cause explains which log? Answer with the letters.
#
# | | `ratio_noise` | `zero_spread_groups` |
# |---|---|---|
# | 1 | 6e-4 | 2% |
# | 2 | 4e-2 | 3% |
# | 3 | 0 | 96% |
#
# | | cause |
# |---|---|
# | A | guidance in sampling only |
# | B | a reward that nearly no image gets, such as long texts without an error |
# | C | bfloat16, with different batch sizes in sampling and training |

# %% tags=["exercise"]
first_iterations = {1: ..., 2: ..., 3: ...}

# %% [markdown] tags=["hint"]
# **Hint.** Two causes change the ratio. The two printouts above show how much each of them does.

# %% tags=["solution"]
first_iterations = {1: "C", 2: "A", 3: "B"}

# %%
lesson.check_first_iterations(first_iterations)

# %% [markdown] tags=["explanation"]
# **Why.** Rounding changes ratios by less than a thousandth, and another policy by several percent. Both exceed the clip range, so pairs are clipped for a reason that is unrelated to learning. In log 3 ratios are exact, but nearly all advantages are 0. Begin with an easier reward, or with prompts for which it varies.

# %% [markdown]
# ## Batch arithmetic
#
# An iteration samples `groups` groups of `group_size` trajectories. Every process samples whole groups, because an advantage needs its group. The update trains on *pairs* (trajectory, stochastic step). The trainer shuffles the trajectories of all processes together and splits them into `minibatches` parts, one optimizer step each; the steps of a trajectory stay together. In a mini-batch each process
# evaluates the pairs of its own trajectories, `micro_batch` at a time, and the gradients are added up over micro-batches and processes.
#
# ### Exercise 7 · from settings to batches
#
# *Difficulty: medium · kind: formula · importance: essential · time: 8 minutes*
#
# Return three whole numbers: the trajectories of the busiest process; the pairs of the largest mini-batch, over all processes; and the backward passes of the busiest process in this mini-batch. Assume that the pairs are spread evenly over the processes. The settings need not be multiples of each other.


# %% tags=["exercise"]
def arithmetic(groups, group_size, steps, minibatches, micro_batch, processes):
    """Trajectories of a process, pairs of a mini-batch, its backward passes on a process;
    `steps` counts stochastic steps.
    """
    return ..., ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** Three divisions, each rounded up with `math.ceil`: groups by processes; trajectories by mini-batches; pairs of a process by the micro-batch. Which of them counts whole groups, and which whole trajectories?


# %% tags=["solution"]
def arithmetic(groups, group_size, steps, minibatches, micro_batch, processes):
    """Trajectories of a process, pairs of a mini-batch, its backward passes on a process;
    `steps` counts stochastic steps.
    """
    trajectories = math.ceil(groups / processes) * group_size
    pairs = math.ceil(groups * group_size / minibatches) * steps
    return trajectories, pairs, math.ceil(pairs / processes / micro_batch)


# %%
lesson.check_arithmetic(arithmetic)

# %% [markdown] tags=["explanation"]
# **Why.** Each division rounds up: groups to processes, trajectories to mini-batches, pairs to micro-batches. The trainer weights an incomplete micro-batch by its number of pairs, so that the gradient is that of the mean over the mini-batch. Dropping it, or filling it with repeated pairs, would change the gradient.

# %%
for processes in (1, 8, 24):
    trajectories, pairs, passes = arithmetic(48, 24, 9, 2, 8, processes)
    print(
        f"Flow-GRPO's 48 x 24 on {processes:2} GPUs: {trajectories:5} trajectories per GPU,"
        f" mini-batches of {pairs:,} pairs, {passes:3} backward passes per GPU"
    )

# %% [markdown]
# The pairs of a mini-batch depend neither on the number of processes nor on `micro_batch`, which only trades memory for time. If the groups do not divide evenly, some GPUs wait: a rollout of 48 groups takes as long on 32 GPUs as on 24.
#
# ### Exercise 8 · settings for 8 GPUs
#
# *Difficulty: medium · kind: design · importance: useful · time: 8 minutes*
#
# Choose `groups`, `group_size`, `minibatches` and `micro_batch` for 8 GPUs and 9 stochastic steps:
#
# - at least 512 trajectories per iteration, in groups of at least 16;
# - no GPU waits for another one during the rollout;
# - activations fit for at most 4 pairs at a time;
# - at most 40 backward passes per GPU in a mini-batch, and at most 4 mini-batches, so that the samples do not become too old.


# %% tags=["exercise"]
settings = {"groups": ..., "group_size": ..., "minibatches": ..., "micro_batch": ...}

# %% [markdown] tags=["hint"]
# **Hint.** Start with the number of groups that 8 GPUs can share evenly. Then try your function: `arithmetic(groups, group_size, 9, minibatches, micro_batch, 8)`.

# %% tags=["solution"]
settings = {"groups": 32, "group_size": 16, "minibatches": 4, "micro_batch": 4}

# %%
lesson.check_settings(settings)

# %% [markdown] tags=["explanation"]
# **Why.** 32 groups of 16 are 4 groups per GPU. A mini-batch then has 128 trajectories with 1,152 pairs, so 36 backward passes per GPU. With 2 mini-batches they would be 72. The choice of `groups` and `group_size` changes what is learned, and the choice of `micro_batch` only time and memory.

# %% [markdown]
# ### Exercise 9 · memory of the trajectories
#
# *Difficulty: easy · kind: formula · importance: optional · time: 4 minutes*
#
# A rollout stores the states at all nodes of its $T$ steps and the velocity at each step, in float32. How many gigabytes ($10^9$ bytes) are these? `elements` is the size of one latent.


# %% tags=["exercise"]
def trajectory_gigabytes(samples, steps, elements):
    """Gigabytes of stored nodes and velocities."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Count the nodes and the velocities of one trajectory separately. A float32 number has 4 bytes.


# %% tags=["solution"]
def trajectory_gigabytes(samples, steps, elements):
    """Gigabytes of stored nodes and velocities."""
    return samples * (steps + 1 + steps) * elements * 4 / 1e9


# %%
lesson.check_memory(trajectory_gigabytes)

# %% [markdown] tags=["explanation"]
# **Why.** $T$ steps connect $T + 1$ nodes. With the stored velocities, the old policy's Gaussian can be computed without another network evaluation.

# %%
for size in (512, 1024):
    elements = 16 * (size // 8) ** 2
    gigabytes = [trajectory_gigabytes(samples, 10, elements) for samples in (24, 144, 1152)]
    print(
        f"{size:4} px: {elements:,} numbers a latent;",
        ", ".join(
            f"{n} samples {g:.2f} GB" for n, g in zip((24, 144, 1152), gigabytes, strict=True)
        ),
    )

# %% [markdown]
# With a few groups per GPU the trajectories are small compared with the network. These sums do not contain the largest part: activations, which grow with `micro_batch` and decrease with gradient checkpointing (to about those of one layer). To measure them, start with a micro-batch of 1, read
# `torch.cuda.max_memory_allocated()`, and increase the size.

# %% [markdown]
# ## The timeline of an iteration
#
# `flowrl train --plan` counts the evaluations of an iteration before it loads anything. The next cell computes these plans for three methods with the presets for SD3.5-Medium at 512 px (4 groups of 24 on one GPU). It also counts the floating-point operations of one forward pass, one backward pass and one decoded image on the real architectures, without weights.

# %%
from flowrl import preset
from flowrl.run.plan import plan
from torch.utils.flop_counter import FlopCounterMode


def operations(call):
    """Floating-point operations of a call, in units of 10^12."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / 1e12


network, decoder = networks["sd3.5-medium"].requires_grad_(False), real.build_decoder()
latent = torch.empty(1, 16, 64, 64, device="meta")
words = torch.empty(1, real.text_tokens, real.text_width, device="meta")
inputs = dict(
    encoder_hidden_states=words,
    pooled_projections=torch.empty(1, 2048, device="meta"),
    timestep=torch.empty(1, device="meta"),
)
forward = operations(lambda: network(hidden_states=latent, **inputs))
both = operations(
    lambda: (
        network(hidden_states=latent.clone().requires_grad_(), **inputs)
        .sample.sum()
        .backward()
    )
)
decode = operations(lambda: decoder.decode(latent))
print(
    f"one latent, in 10^12 operations: forward {forward:.2f}, backward with frozen weights"
    f" {both - forward:.2f}, decoded image {decode:.2f}"
)
plans = {
    name: plan(preset(f"sd3.5-medium,{name},ocr").apply())
    for name in ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
}
for name, counts in plans.items():
    print(
        f"{name:18} sampling {counts.nfe:5,} evaluations, update {counts.train_nfe:,}"
        f" ({counts.gradient_nfe} with gradient), {counts.reward_calls} rewards"
    )

# %% [markdown]
# The backward pass of a LoRA needs the gradients of the activations, but not those of the frozen weights. It therefore takes about as many operations as a forward pass, instead of twice as many. A decoded image takes about as many as one evaluation.
#
# ### Exercise 10 · forward passes of an iteration
#
# *Difficulty: medium · kind: formula · importance: useful · time: 8 minutes*
#
# Return two numbers in units of one forward pass of one latent: sampling, and update. `nfe` and `train_nfe` count evaluations; with guidance each is `passes` forward passes. `gradient_nfe` of the evaluations in the update take a gradient, each through `branches` of its forward passes (1: the prompt's branch only). A backward pass costs `backward` forward passes, and gradient checkpointing repeats each differentiated forward pass once.


# %% tags=["exercise"]
def iteration_passes(nfe, train_nfe, gradient_nfe, passes, branches, backward):
    """Forward passes of sampling and of the update, with gradient checkpointing."""
    return ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** All evaluations of the update have their forward passes, also those of the base model. A differentiated pass costs `backward + 1` *more*: the backward pass and the repeated forward pass.


# %% tags=["solution"]
def iteration_passes(nfe, train_nfe, gradient_nfe, passes, branches, backward):
    """Forward passes of sampling and of the update, with gradient checkpointing."""
    return nfe * passes, train_nfe * passes + gradient_nfe * branches * (backward + 1)


# %%
lesson.check_iteration(iteration_passes)

# %% [markdown] tags=["explanation"]
# **Why.** The evaluations of the base model (for the KL) have no gradient: forward passes only. With `guidance_gradient="prompt"` the negative branch has none either. Checkpointing stores few activations, and computes the others again in the backward pass.

# %% [markdown]
# To get a timeline from these counts, we need rates, which depend on the machine. The next cell *assumes* three; replace them by your own measurements. The counts are those of the plan.

# %%
# assumed: 10^12 operations per second of the network in bfloat16, of the decoder in float32
RATE, DECODE_RATE = 300.0, 60.0
REWARD = 0.02  # assumed: seconds for the reward of one image
timelines = {}
for name, counts in plans.items():
    branches = 2 if name == "tp-grpo" else 1  # the presets follow the released codes
    sampling, update = iteration_passes(
        counts.nfe,
        counts.train_nfe,
        counts.gradient_nfe,
        counts.passes_per_evaluation,
        branches,
        both / forward - 1,
    )
    images = counts.reward_calls
    timelines[name] = {
        "sampling": sampling * forward / RATE,
        "decoding": images * decode / DECODE_RATE,
        "reward": images * REWARD,
        "update": update * forward / RATE,
    }
    parts = timelines[name]
    total = sum(parts.values())
    shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())
    print(
        f"{name:18} {sampling:6,.0f} forward passes in sampling, {update:5,.0f} in the update;"
        f" time at the assumed rates: {shares}"
    )

# %% tags=["hide-input"]
figure, axes = panels(1, width=8.2, height=2.4)
shades = {"sampling": DATA, "decoding": OTHERS[0], "reward": NOISE, "update": ACCENT}
for row, parts in enumerate(timelines.values()):
    begin = 0.0
    for part, seconds in parts.items():
        axes.barh(
            row,
            seconds,
            left=begin,
            color=shades[part],
            height=0.6,
            label=part if row == 0 else None,
        )
        begin += seconds
axes.set_yticks(range(len(timelines)), list(timelines))
axes.invert_yaxis()
axes.set(
    xlabel="seconds of one GPU at the assumed rates (not measured)",
    title="One iteration: SD3.5-Medium, 512 px, 96 trajectories",
)
axes.legend(frameon=False, fontsize=8, loc="upper right")
clean(axes)
plt.show()

# %% [markdown]
# **Try it.** Plan an iteration of your own. Which of the settings changes the estimates, which the update, and which both?

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("budget", members=24, reference=True)

# %% [markdown]
# The counts show what to optimise, whatever the rates are. Flow-GRPO spends almost three times as many passes on the update as on sampling, so a cheaper update (no KL, fewer trained steps) helps most. With the estimates of the other two methods, sampling needs more passes than the update, and ten times as many images need decoding and a reward. Their iterations become long if the reward model is slow.
# The setting `chunk` divides the rollout into parts. With `overlap_rewards` the rewards of one part are computed during the sampling of the next, if the policy is on a GPU or a server computes the reward.
#
# ## Train, save and load
#
# Finally we train with TP-GRPO and Flow-GRPO, with redness as the reward. With `MODEL` set this is a real (if short) run; the tiny random network shows that all parts work together.

# %%
REDNESS = FunctionReward(
    lambda images, prompts: images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
)
optimizer = partial(
    torch.optim.AdamW, lr=3e-4 if MODEL else 5e-2, betas=(0.9, 0.99), weight_decay=1e-4
)
updates = Updates(minibatches=1, micro_batch=4 if MODEL else 64, ema_decay=0.0)
numbers = {
    "groups": 4,
    "members": 6,
    "steps": STEPS,
    "max_batch": 8 if MODEL else 64,
    "optimizer": optimizer,
    "updates": updates,
}
histories, trained = {}, {}
for make in (flow_grpo, tp_grpo):
    # Flow-SDE with a = 0.7 on all steps but the last
    method = replace(make(), loss=ClippedLoss(clip_range=1e-2))
    trained[method.name] = load()
    trainer = Trainer(trained[method.name], method, REDNESS, PROMPTS, **numbers)
    metrics = [trainer.iteration() for _ in progress(range(10), "iteration")]
    history = histories[method.name] = [row["reward_mean"] for row in metrics]
    first = metrics[0]
    noise_floor = "below 1e-5" if first["ratio_noise"] < 1e-5 else first["ratio_noise"]
    print(
        f"{method.name:10} ratio_noise {noise_floor}, {first['nfe']} network evaluations per"
        f" iteration, redness {history[0]:.3f} -> {history[-1]:.3f}"
    )

# %% [markdown] tags=["expected"]
# flow-grpo  ratio_noise below 1e-5, 192 network evaluations per iteration, redness 0.055 -> 0.057..0.066
# tp-grpo    ratio_noise below 1e-5, 864 network evaluations per iteration, redness 0.055 -> 0.060..0.070

# %% tags=["hide-input"]
figure, axes = panels(1, width=4.8, height=2.8)
for name, history in histories.items():
    axes.plot(range(1, len(history) + 1), history, "o-", color=COLOURS[name], markersize=3)
    axes.annotate(
        name,
        (len(history), history[-1]),
        xytext=(4, 0),
        textcoords="offset points",
        color=COLOURS[name],
        fontsize=9,
    )
axes.set(
    xlabel="iteration",
    ylabel="mean reward (redness)",
    title="The same trainer, another network",
    xlim=(0.5, 13),
    xticks=range(1, 11),
)
clean(axes)
plt.show()

# %% [markdown]
# One seed, ten iterations and an untrained network do not show which method is better, only that both run.
#
# `save` writes the LoRA as a file that plain diffusers loads without `flowrl`. The next cell compares the images of both. If they agree, rank, scale, targets and names are right.

# %%
import tempfile
from pathlib import Path

from diffusers.utils import logging as diffusers_logging

diffusers_logging.set_verbosity_error()
best = trained["tp-grpo"]
with tempfile.TemporaryDirectory() as folder:
    best.save(Path(folder) / "lora")
    print("written:", [path.name for path in (Path(folder) / "lora").iterdir()])
    pipe = (
        type(best.pipe).from_pretrained(MODEL, torch_dtype=best.dtype).to(best.device)
        if MODEL
        else tiny_sd3()
    )
    pipe.load_lora_weights(Path(folder) / "lora")
pipe.set_progress_bar_config(disable=True)
size = dict(
    height=best.options.size[0],
    width=best.options.size[1],
    max_sequence_length=best.options.max_sequence_length or 256,
)
plain = pipe(
    [p.text for p in PROMPTS],
    latents=noise,
    num_inference_steps=STEPS,
    guidance_scale=1.0,
    output_type="pt",
    **size,
).images
ours = best.decode(solve(best, best.schedule(STEPS), best.encode(PROMPTS), noise, Usage()))
before = policy.decode(latents)
print(
    "largest difference between plain diffusers and ours:",
    "below 1e-5" if (plain - ours).abs().max() < 1e-5 else float((plain - ours).abs().max()),
)
print(
    "largest difference between before and after training:"
    f" {float((ours - before).abs().max()):.2f}"
)
show_images(ImageRow(before.cpu(), label="before"), ImageRow(ours.cpu(), label="after"))
plt.show()

# %% [markdown] tags=["expected"]
# written: ['pytorch_lora_weights.safetensors']
# largest difference between plain diffusers and ours: below 1e-5
# largest difference between before and after training: 0.30..0.70
#
# <image>

# %% [markdown]
# (In bfloat16 the two agree only approximately, because the plain pipeline rounds its latents after every step.)
#
# ## On a real GPU
#
# The settings that the papers publish for SD3.5-Medium at 512 px (Flow-GRPO, TP-GRPO; Stepwise-Flow-GRPO leaves some open):
#
# | setting | value | here |
# |---|---|---|
# | steps, training / evaluation | 10 / 40 | `num_steps`, `eval_steps` |
# | groups × group size, mini-batches | 48 × 24, 2 | `groups`, `group_size`, `minibatches` |
# | LoRA | rank 32, alpha 64, all attention | `lora_rank`, `lora_alpha`, `lora_targets` |
# | guidance | 4.5; Stepwise 1.0 and 4.5; FLUX.1-dev 3.5, distilled | `guidance_scale`; `Flux(distilled_guidance=3.5)` |
# | learning rate, weight decay, gradient norm | 3e-4, 1e-4, 1 | `learning_rate`, `weight_decay`, `max_grad_norm` |
# | clip range | 1e-4; TP-GRPO 1e-5 | `clip_range` |
#
# This lesson contains no seconds or gigabytes of a real run, because we measured none for it. `flowrl train --model ... --prompts FILE --reward ...` starts a run. Check four points first:
#
# 1. Do four ODE samples look like images of the model?
# 2. Is `ratio_noise` far below the clip range?
# 3. Is `zero_spread_groups` low, that is, do the members of a group get different rewards?
# 4. Does an easy reward such as redness rise within twenty iterations?
#
# Each check takes minutes, and together they detect most errors that would otherwise cost days.

# %% [markdown]
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. Why does a LoRA need no second network for the KL penalty? **a** The penalty is computed from the LoRA weights. **b** With the adapter disabled, the network is the base model. **c** The base model is the running average.
# 2. You train on four times as many GPUs and keep all settings. What changes in an ideal world without rounding? **a** The time. **b** The gradient, since each GPU has its own groups. **c** The size of a mini-batch.
# 3. `ratio_noise` is 3e-4 and the clip range 1e-4. What happens? **a** Nothing, since the errors average out. **b** The KL penalty grows. **c** Pairs are clipped before any update.
# 4. You halve `micro_batch`. The gradient of a mini-batch **a** stays the same, **b** is half as long, **c** becomes noisier.
# 5. The backward pass of a LoRA takes about as many operations as a forward pass, and not twice as many, because **a** it has few trained weights, so no gradients of activations are needed, **b** the gradients of the frozen weights are not computed, **c** checkpointing halves the work.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are in the sections on LoRA, on batch arithmetic, on precision, again on batch arithmetic, and on the timeline, in this order.

# %% tags=["solution"]
quiz = {1: "b", 2: "a", 3: "c", 4: "a", 5: "b"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: $B = 0$ at the start, and disabling the adapter has the same effect later. 2: groups and mini-batches are defined over all processes. 3: the ratio differs from 1 by more than the clip range. 4: gradients are added up over micro-batches with their numbers of pairs. 5: gradients of activations are needed to reach the first layers.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $t = \text{shift}\cdot u/(1 + (\text{shift}-1)u)$ | shifted grid | `policy.schedule(T)` |
# | $Wx + \frac{\alpha}{r}BAx$ | LoRA; disabled, the network is the reference | `PolicyOptions(lora_rank, lora_alpha)`, `policy.reference()` |
# | $v_\text{neg} + \gamma(v - v_\text{neg})$ | guidance, in sampling and training | `PolicyOptions(guidance_scale=...)`, `policy.guided(scale)` |
# | $\lvert\rho - 1\rvert$ before an update | rounding error; keep it below the clip range | `ratio_noise` in the metrics |
# | pairs | trajectories × stochastic steps | settings `minibatches`, `micro_batch` |
#
# Support for another model family needs one file, as described in `docs/model-families.md`.
#
# ## Symbols
#
# {symbols: $t$; $T$; $v$; $z_j$; step $i$; $\rho$; $A$; $c$; $\beta$; NFE}
#
# ## Further reading
#
# - Esser et al. 2024, *Scaling rectified flow transformers* (arXiv 2403.03206): SD3, and the reason for the shifted grid.
# - Hu et al. 2021, *LoRA* (arXiv 2106.09685); Ho and Salimans 2022, *Classifier-free guidance* (arXiv 2207.12598).
# - Meng et al. 2022, *On distillation of guided diffusion models* (arXiv 2210.03142): guidance as an input of the network, as in FLUX.1-dev.
# - Chen et al. 2016, *Training deep nets with sublinear memory cost* (arXiv 1604.06174): gradient checkpointing.
# - Rajbhandari et al. 2019, *ZeRO* (arXiv 1910.02054): weights, gradients and optimizer states divided over GPUs.
#
# **Next:** [12 · Branching](12_branching.ipynb) measures the worth of a step by splitting the trajectory there.

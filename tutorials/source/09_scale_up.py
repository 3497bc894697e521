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
# # 9 · Scale up
#
# **After this lesson you can** put SD3.5 or FLUX where the small models of the other lessons were, say what LoRA, guidance and precision do to the algorithm and not only to the pictures, and work out batches and
# memory before a run instead of after its crash.
#
# **Time** 50 minutes, of which the computer needs two. **You need** lessons 2 to 4, and 6 for what TP-GRPO is.
#
# Nothing new happens to the method: sampler, credit rule, loss and trainer are the objects you know. What changes is the policy. The picture counts what one GPU has to hold besides the activations, for the real architectures (their
# shapes, without their weights): all weights trained, or a LoRA.

# %% tags=["hide-input"]
import math
import warnings
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from flowrl import RunConfig, Trainer
from flowrl_course import lesson_09 as lesson
from flowrl_course.figures import ACCENT, COLOURS, DATA, NOISE, OTHERS, clean, panels, show_pictures
from flowrl.flow import log_prob
from flowrl.losses import ClippedLoss
from flowrl.methods import flow_grpo, tp_grpo
from flowrl.policies.lora import LORA_TARGETS
from flowrl.policies.architectures import architecture
from flowrl.policies.load import load_policy
from flowrl.policies.pipeline import ModelOptions
from flowrl.testing.tiny import TINY, tiny_flux_policy, tiny_sd3, tiny_sd3_policy
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Usage, integrate, rollout
from flowrl.samplers import AllButLast, FlowSDE
from flowrl.types import Prompt

warnings.filterwarnings("ignore")
networks = {name: architecture(name).build("meta") for name in ("sd3.5-medium", "flux.1-dev")}


def attention_layers(network):
    """(out, in) of every linear layer that gets a LoRA: all attention projections."""
    return [tuple(m.weight.shape) for name, m in network.named_modules() if name.endswith(LORA_TARGETS) and hasattr(m, "weight")]


def opening():
    """Gigabytes by use: bfloat16 where frozen, float32 where trained (weights, gradient, two moments of Adam, average)."""
    figure, axes = panels(1, width=7.6, height=2.7)
    bars = []
    for name, network in networks.items():
        total = sum(p.numel() for p in network.parameters())
        lora = sum(32 * (out + wide) for out, wide in attention_layers(network))
        bars.append((f"{name}, all weights", [2 * total, 4 * total, 16 * total]))
        bars.append((f"{name}, LoRA rank 32", [2 * total, 4 * lora, 16 * lora]))
    left = [0.0] * len(bars)
    uses = ("frozen weights (as reference, or under the LoRA)", "trained weights", "gradient, Adam, average")
    for k, (use, shade) in enumerate(zip(uses, (NOISE, DATA, ACCENT), strict=True)):
        sizes = [parts[k] / 1e9 for _, parts in bars]
        axes.barh([name for name, _ in bars], sizes, left=left, color=shade, label=use, height=0.6)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 3, row, f"{total:.0f} GB", va="center", fontsize=9)
    axes.axvline(80, color="#22252b", linewidth=0.8, linestyle=":")
    axes.text(83, 1.5, "one GPU of 80 GB", fontsize=8, va="center")
    axes.set(xlabel="gigabytes, without activations", xlim=(0, 310), title="A LoRA is what makes it fit")
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    clean(axes)
    plt.show()


opening()

# %% [markdown]
# ## A policy is a pipeline with options
#
# `load_policy` takes the folder of a diffusers pipeline (or its name on the Hub). Here, `MODEL` is empty and we take a *tiny* pipeline instead: the same classes of diffusers and transformers, with two layers and random weights. It draws coloured noise, on a
# laptop, in milliseconds; tokenizers, text encoders, transformer, decoder and scheduler are all there. On a machine with a GPU and the weights, set `MODEL`, and run the same cells.

# %%
MODEL = ""  # for example "stabilityai/stable-diffusion-3.5-medium", or a folder
PROMPTS = [Prompt(text) for text in ("a red fox", "a red car", "a red house", "a red hat")]
STEPS = 8
base = ModelOptions(device="cuda", dtype="bfloat16", gradient_checkpointing=True) if MODEL else TINY


def load(**changes):
    """The policy with some options changed."""
    options = replace(base, **changes)
    return load_policy(MODEL, options) if MODEL else tiny_sd3_policy(options)


policy = load()
print("options:   ", base)
print("one latent:", policy.latent_shape, "  trained:", f"{sum(p.numel() for p in policy.trainable().values()):,} numbers")
print("condition: ", {name: tuple(t.shape) for name, t in policy.encode(PROMPTS).tensors.items()}, "for", len(PROMPTS), "prompts")
real = architecture("sd3.5-medium")
embedding = real.text_tokens * real.text_width * 2  # bytes in bfloat16
print(
    f"SD3.5 at full size: {real.text_tokens} tokens of {real.text_width:,} numbers are {embedding / 1e6:.1f} MB a prompt, {embedding * 48 * 24 / 1e9:.1f} GB for 48 x 24 samples"
)

# %% [markdown]
# The condition of a prompt is one number, not its embedding, which is large (last line), and would be larger still if it were repeated for every sample of an iteration of Flow-GRPO (48 groups of 24). So the policy keeps one copy per prompt, and looks it up when the network is called. The text encoders visit
# the GPU only for prompts they have not seen.
#
# Sampling is what it was:

# %%
noise = torch.randn(4, *policy.latent_shape, generator=torch.Generator().manual_seed(0)).to(policy.device)
latents = integrate(policy, policy.schedule(STEPS), policy.encode(PROMPTS), noise, Usage())
show_pictures(policy.decode(latents).cpu(), [prompt.text for prompt in PROMPTS], columns=4)
plt.show()

# %% [markdown]
# ## The grid
#
# Larger pictures need more noise before nothing is to be seen of them: their neighbouring pixels agree, so that noise averages out. The models' schedulers therefore *shift* the even grid $u_i = 1 - i/T$ towards $t = 1$,
#
# $$t = \frac{s\,u}{1 + (s-1)\,u},$$
#
# with $s = 3$ for SD3.5, and for FLUX with an $s$ that grows with the number of image tokens. `policy.schedule(T)` is the model's own grid.
#
# ### Exercise 1 · the shift *(easy, 3 minutes)*


# %% tags=["exercise"]
def shifted(u, shift):
    """The shifted times of an even grid u [node]."""
    return ...


# %% tags=["solution"]
def shifted(u, shift):
    """The shifted times of an even grid u [node]."""
    return shift * u / (1 + (shift - 1) * u)


# %%
lesson.check_shifted(shifted)

# %% [markdown] tags=["explanation"]
# **Why.** The odds of noise against data, $t/(1-t)$, are multiplied by $s$; both ends stay where they are. With $s = 3$ the middle of the grid is at $t = 0.75$.

# %% tags=["hide-input"]
figure, axes = panels(1, width=5.6, height=3.2)
even = torch.linspace(1, 0, 11)
flux = {size: tiny_flux_policy(replace(TINY, height=size, width=size)).schedule(10).times for size in (128, 256)}
curves = {
    "even": (even, NOISE, 0.62),
    "SD3.5, s = 3": (policy.schedule(10).times, DATA, 0.70),
    "FLUX, 1,024 tokens (512 px)": (flux[128], OTHERS[0], 0.78),
    "FLUX, 4,096 tokens (1,024 px)": (flux[256], ACCENT, 0.86),
}
for name, (times, shade, _) in curves.items():
    axes.plot(range(11), times.cpu(), "o-", color=shade, markersize=4, label=name)
axes.set(xlabel="node", ylabel="time t (1 = noise)", xticks=range(11), title="Most steps are spent in the noise")
axes.legend(frameon=False, fontsize=8)
clean(axes)
plt.show()
for name, (times, _, _) in curves.items():
    print(f"{name:30} last step from t = {float(times[-2]):.2f} to 0; nodes above t = 0.5: {int((times > 0.5).sum())} of 11")

# %% [markdown]
# This matters for credit. Flow-GRPO and TP-GRPO make the last step an ODE step: what happens in it is nobody's decision. On FLUX's grid that is a long step. On SD3.5's it is hardly one: the base grid that its scheduler shifts does not go down to 0 but to
# its own smallest time, so the last step but one is the long one (from 0.28 to 0.01), and it stays random. This is why a grid is taken from the model's scheduler and never from a formula.
#
# ## LoRA: train a little, keep the rest
#
# A LoRA (Hu et al. 2021, arXiv 2106.09685) leaves a layer's weights $W$ (out × in) frozen and adds a product of two thin matrices,
#
# $$W x + \frac{\alpha}{r} B A x,\qquad A: r \times \text{in},\quad B: \text{out} \times r,\quad B = 0 \text{ at the start}.$$
#
# The policy starts as the base model, exactly. The base model stays at hand: with the adapter switched off the same network is the reference of the KL penalty, and costs no second copy.
#
# ### Exercise 2 · how little is it? *(easy, 4 minutes)*
#
# `shapes` lists (out, in) of the layers that get a LoRA.


# %% tags=["exercise"]
def lora_parameters(shapes, rank):
    """How many numbers are trained."""
    return ...


# %% tags=["solution"]
def lora_parameters(shapes, rank):
    """How many numbers are trained."""
    return sum(rank * (out + wide) for out, wide in shapes)


# %%
lesson.check_lora_parameters(lora_parameters)

# %% [markdown] tags=["explanation"]
# **Why.** A has rank × in numbers, B out × rank. For square layers of width $d$ that is $2 r d$ instead of $d^2$: 4% for $r = 32$, $d = 1536$. And there are fewer of them, because only attention gets one.

# %%
for name, network in networks.items():
    total, layers = sum(p.numel() for p in network.parameters()), attention_layers(network)
    trained = lora_parameters(layers, 32)
    print(
        f"{name:13} {total / 1e9:5.2f} billion weights; LoRA rank 32 on {len(layers)} layers trains {trained / 1e6:.1f} million, {trained / total:.1%}"
    )
print("the library counts for our policy:", sum(p.numel() for p in policy.trainable().values()), end=", ")
print("and we:", lora_parameters(attention_layers(tiny_sd3().transformer), TINY.rank) if not MODEL else "see above")

# %% [markdown]
# What is trained is stored in float32, with a gradient, two moments of Adam and a running average: 20 bytes for each number. That is why the opening picture looks as it does.
#
# ### Exercise 3 · a file that others can read *(medium, 5 minutes)*
#
# A LoRA file holds A and B. Not every program that reads one looks for $\alpha$; one that does not adds $BA$. Return two matrices with which it adds the right thing. ($r$ is A's number of rows.)


# %% tags=["exercise"]
def folded(A, B, alpha):
    """(A', B') with B' A' = (alpha / r) B A."""
    return ..., ...


# %% tags=["solution"]
def folded(A, B, alpha):
    """(A', B') with B' A' = (alpha / r) B A."""
    return A, B * (alpha / A.shape[0])


# %%
lesson.check_folded(folded)

# %% [markdown] tags=["explanation"]
# **Why.** The scale may go into either matrix, but into one only. `policy.save` puts it into B. What would happen without it is a picture that looks *almost* right, with half (or a quarter) of what was learned: a mistake that is easily overlooked. The test of it is to load the file with plain diffusers and to compare pictures;
# we do so below.

# %% [markdown]
# ## Guidance is part of the policy
#
# Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598) asks the network twice, with the prompt and with a negative (usually empty) one, and goes beyond the difference:
#
# ### Exercise 4 · guidance *(easy, 3 minutes)*
#
# Return $v_\text{neg} + s\,(v_\text{prompt} - v_\text{neg})$. (Yes, it is that easy. Then say, before you read on, what scale 1 gives and what scale 0.)


# %% tags=["exercise"]
def guided(prompt, negative, scale):
    """The guided velocity."""
    return ...


# %% tags=["solution"]
def guided(prompt, negative, scale):
    """The guided velocity."""
    return negative + scale * (prompt - negative)


# %%
lesson.check_guided(guided)

# %% [markdown] tags=["explanation"]
# **Why.** Scale 1 is the prompt's own velocity: no guidance. Scale 0 ignores the prompt. Papers differ in what they call scale 1; diffusers and `flowrl` mean this one. FLUX.1-dev has in addition a *distilled* guidance: the network is told a scale and was trained to imitate its effect, in one evaluation.

# %% [markdown]
# With guidance the velocity that moves the sample is the guided one, so the guided one *is the policy*. Whoever samples with guidance must train with it: the ratio compares the policy that sampled with the policy now, and before the first update it has to be 1. We sample one group with scale 4.5, and compute
# ratios in three ways.

# %%
strong = load(guidance=4.5)
sampler, groups = AllButLast(FlowSDE(0.7)), Groups(len(PROMPTS), 4)
generator = torch.Generator(strong.device).manual_seed(1)


def ratios(sampled, evaluate):
    """exp(new - old log-probability) over all decisions, for velocities that `evaluate(node, time, condition)` gives now."""
    schedule, values = sampled.trajectories.schedule, []
    nodes, old = sampled.trajectories.nodes, sampled.trajectories.velocities
    condition = strong.encode(PROMPTS).repeat(groups.members)
    for step in schedule.stochastic.nonzero().flatten().tolist():
        index = torch.full((groups.samples,), step, device=nodes.device)
        with torch.no_grad():
            velocity = evaluate(nodes[:, step], schedule.network_timesteps[step].expand(groups.samples), condition)
        now = log_prob(sampler.transition(nodes[:, step], velocity, schedule, index), nodes[:, step + 1])
        then = log_prob(sampler.transition(nodes[:, step], old[:, step], schedule, index), nodes[:, step + 1])
        values.append((now - then).exp())
    return torch.cat(values)


def unguided(node, time, condition):
    with strong.guided(1.0):
        return strong.velocity(node, time, condition)


def reference(node, time, condition):
    with strong.reference():
        return strong.velocity(node, time, condition)


start = groups.noise(strong.latent_shape, generator)
sampled = rollout(strong, sampler, strong.schedule(STEPS), strong.encode(PROMPTS), start, generator, groups)
for name, evaluate in (
    ("guided, as sampled", strong.velocity),
    ("without guidance", unguided),
    ("base model (LoRA off)", reference),
):
    found = ratios(sampled, evaluate)
    largest = float((found - 1).abs().max())
    told = "below 1e-6" if largest < 1e-6 else f"{largest:.3f}; {float((found < 1).float().mean()):.0%} of the ratios are below 1"
    print(f"{name:22} largest |ratio - 1| = {told}")

# %% [markdown]
# As sampled, and with the base model (the LoRA is still zero), the ratio is 1. Without guidance it is not, before anything was learned. Most ratios are then below 1 (samples of one policy are less likely under another), and with a clip range of $10^{-4}$ a pair of ratio below 1 and negative advantage is clipped: the loss would only hear of what went well. Two things soften the cost. `guidance_gradient="prompt"` computes the negative branch without a
# gradient, which saves its activations; and Stepwise-Flow-GRPO also trains with scale 1 throughout, where the question does not arise.
#
# ## Precision
#
# The network computes in bfloat16; everything after it is float32: latents, transitions, log-probabilities. bfloat16 has 8 significant bits, a relative error of up to $2^{-8} \approx 0.4\%$. Look at what happens when one of the three is careless: the *next node* is rounded to bfloat16 after its
# log-probability was taken, or the *transition* is computed in bfloat16, or the *network* has other neighbours in its batch than when it sampled (its sums then may be added up in another order).

# %% tags=["varies"]
half = load(dtype="bfloat16")
sampled = rollout(half, sampler, half.schedule(STEPS), half.encode(PROMPTS), start, generator, groups)
paths, schedule = sampled.trajectories, sampled.trajectories.schedule
condition = half.encode(PROMPTS).repeat(groups.members)
careless = {"rounded node": [], "bfloat16 transition": [], "other batch": [], "as it should be": []}
for step in schedule.stochastic.nonzero().flatten().tolist():
    node, following, velocity = paths.nodes[:, step], paths.nodes[:, step + 1], paths.velocities[:, step]
    index, time = torch.full((groups.samples,), step, device=node.device), schedule.network_timesteps[step].expand(groups.samples)
    gaussian = sampler.transition(node, velocity, schedule, index)
    old = log_prob(gaussian, following)
    careless["rounded node"].append(log_prob(gaussian, following.bfloat16().float()) - old)
    rough = replace(gaussian, mean=gaussian.mean.bfloat16().float())
    careless["bfloat16 transition"].append(log_prob(rough, following) - old)
    with torch.no_grad():
        alone = torch.cat(
            [half.velocity(node[i : i + 1], time[:1], condition.take(index[i : i + 1] * 0 + i)) for i in range(groups.samples)]
        )
        same = half.velocity(node, time, condition)
    careless["other batch"].append(log_prob(sampler.transition(node, alone, schedule, index), following) - old)
    careless["as it should be"].append(log_prob(sampler.transition(node, same, schedule, index), following) - old)
floors = {name: float((torch.cat(values).exp() - 1).abs().max()) for name, values in careless.items()}
for name, floor in floors.items():
    print(f"{name:20} largest |ratio - 1| = {floor:.1e}")

# %% tags=["hide-input", "varies"]
figure, axes = panels(1, width=6.4, height=2.4)
axes.barh(list(floors), [max(floor, 1e-8) for floor in floors.values()], color=[ACCENT, ACCENT, NOISE, DATA], height=0.6)
for row, floor in enumerate(floors.values()):
    axes.text(max(floor, 1e-8) * 1.3, row, f"{floor:.0e}" if floor else "0", va="center", fontsize=9)
for clip, name, side in ((1e-5, "TP-GRPO's clip ", "right"), (1e-4, " Flow-GRPO's clip", "left")):
    axes.axvline(clip, color="#22252b", linewidth=0.8, linestyle=":")
    axes.text(clip, 3.5, name, fontsize=8, va="center", ha=side)
axes.set(xscale="log", xlim=(1e-8, 1), xlabel="largest |ratio - 1| before any update", ylim=(3.8, -0.6))
axes.set_title("Rounding against the clip ranges")
clean(axes)
plt.show()

# %% [markdown]
# On the machine that made this page all three are above the clip ranges of the papers: pairs would be clipped by rounding alone. (Our latents have 256 elements; the mean over the 65,536 of a real one averages more of it out.) The first two are mistakes, and avoided. The batch's effect is the one that stays in practice, and it
# depends on the device and its kernels; with `updates=1`, `ratio_deviation` in the first line of a log measures it. When it comes near the clip, sample and train in batches of one size, or use a larger clip.
#
# One more trap is avoided for you: merging the LoRA into bfloat16 weights for speed. $W + BA$ rounded to bfloat16 loses most of a small $BA$, and the policy that samples would not be the one that is trained. `policy.frozen()` merges in float32 networks only.
#
# ## Batch arithmetic
#
# This is where most questions about public scripts come from. An iteration draws `prompts` groups of `members`. Whole groups are given to processes, because an advantage needs its group. Each process trains on *pairs* (trajectory, stochastic step). Its trajectories are split between `updates` optimiser
# steps; a trajectory's steps stay together. The pairs of an update go through the network `micro_batch` at a time, and their gradients add up.
#
# ### Exercise 5 · from settings to batches *(medium, 8 minutes)*
#
# For the busiest process, return three whole numbers: its trajectories; the pairs of its largest update; the backward passes of that update. No number need be a multiple of another.


# %% tags=["exercise"]
def arithmetic(prompts, members, steps, updates, micro_batch, processes):
    """Trajectories of a process, pairs of an update, backward passes of an update; `steps` are the stochastic ones."""
    return ..., ..., ...


# %% tags=["solution"]
def arithmetic(prompts, members, steps, updates, micro_batch, processes):
    """Trajectories of a process, pairs of an update, backward passes of an update; `steps` are the stochastic ones."""
    trajectories = math.ceil(prompts / processes) * members
    pairs = math.ceil(trajectories / updates) * steps
    return trajectories, pairs, math.ceil(pairs / micro_batch)


# %%
lesson.check_arithmetic(arithmetic)

# %% [markdown] tags=["explanation"]
# **Why.** Three times rounding up: groups to processes, trajectories to updates, pairs to batches. A mean over pairs must weigh an incomplete last batch by its size, which the trainer does; dropping it, or filling it up with repeated pairs, changes the gradient.

# %%
for processes in (1, 8, 24):
    trajectories, pairs, passes = arithmetic(48, 24, 9, 2, 8, processes)
    print(
        f"Flow-GRPO's 48 x 24 on {processes:2} GPUs: {trajectories:5} trajectories, {pairs:5} pairs and {passes:4} backward passes per update"
    )

# %% [markdown]
# The effective batch of an update is pairs × processes; it does not depend on `micro_batch`, which only trades memory for time. Groups that do not divide evenly leave GPUs waiting: 48 prompts on 32 GPUs take as long as on 24.
#
# ### Exercise 6 · what the trajectories weigh *(easy, 4 minutes)*
#
# A rollout stores all nodes of its $T$ steps and the velocity at each step, in float32. How many gigabytes ($10^9$ bytes)? `elements` is the size of one latent.


# %% tags=["exercise"]
def trajectory_gigabytes(samples, steps, elements):
    """Gigabytes of stored nodes and velocities."""
    return ...


# %% tags=["solution"]
def trajectory_gigabytes(samples, steps, elements):
    """Gigabytes of stored nodes and velocities."""
    return samples * (steps + 1 + steps) * elements * 4 / 1e9


# %%
lesson.check_memory(trajectory_gigabytes)

# %% [markdown] tags=["explanation"]
# **Why.** $T$ steps join $T + 1$ nodes. The velocities are stored so that the old policy's Gaussian can be had without asking the network again.

# %%
for size in (512, 1024):
    elements = 16 * (size // 8) ** 2
    gigabytes = [trajectory_gigabytes(samples, 10, elements) for samples in (24, 144, 1152)]
    print(
        f"{size:4} px: {elements:,} numbers a latent;",
        ", ".join(f"{n} samples {g:.2f} GB" for n, g in zip((24, 144, 1152), gigabytes, strict=True)),
    )

# %% [markdown]
# With a few groups per GPU this is small beside the network. What really decides about memory is missing from all our sums: activations, which grow with `micro_batch` and shrink (to about a layer's worth) with gradient checkpointing. They are better measured than computed: start with a micro-batch of 1, read
# `torch.cuda.max_memory_allocated()`, and go up.
#
# ## Train, save, and read it back
#
# Now everything at once: TP-GRPO and Flow-GRPO, rewarded for redness, on our pipeline. With `MODEL` set this is a real (if short) run; here it shows that the machine works: a tiny random network can be made a little redder, too.

# %%
REDNESS = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3)))
settings = RunConfig.of(
    groups=4, group_size=6, num_steps=STEPS, minibatches=1, micro_batch=4 if MODEL else 64, max_batch=8 if MODEL else 64,
    iterations=10, learning_rate=3e-4 if MODEL else 5e-2, ema_decay=0.0, seed=0,
)  # fmt: skip
histories, trained = {}, {}
for make in (flow_grpo, tp_grpo):
    method = make(AllButLast(FlowSDE(0.7)), ClippedLoss(clip_range=1e-2))
    trained[method.name] = load()
    trainer = Trainer(trained[method.name], method, REDNESS, PROMPTS, settings)
    rows = [trainer.iteration() for _ in range(settings.iterations)]
    histories[method.name] = [row["reward_mean"] for row in rows]
    floor = rows[0]["ratio_deviation"]
    print(
        f"{method.name:10} ratio_deviation at first {'below 1e-5' if floor < 1e-5 else floor}, {rows[0]['nfe']} network evaluations an iteration, ",
        end="",
    )
    print(f"redness {rows[0]['reward_mean']:.3f} -> {rows[-1]['reward_mean']:.3f}")

# %% tags=["hide-input"]
figure, axes = panels(1, width=4.8, height=2.8)
for name, history in histories.items():
    axes.plot(range(1, len(history) + 1), history, "o-", color=COLOURS[name], markersize=3)
    axes.annotate(name, (len(history), history[-1]), xytext=(4, 0), textcoords="offset points", color=COLOURS[name], fontsize=9)
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
# One seed, ten iterations and a network without any training: this says nothing about which method is better, only that both run.
#
# A LoRA for others: `save` writes it, plain diffusers reads it, without `flowrl`. If the pictures agree, rank, scale, targets and names were right.

# %%
import tempfile
from pathlib import Path

from diffusers.utils import logging as diffusers_logging

diffusers_logging.set_verbosity_error()
best = trained["tp-grpo"]
with tempfile.TemporaryDirectory() as folder:
    best.save(Path(folder) / "lora")
    print("written:", [path.name for path in (Path(folder) / "lora").iterdir()])
    pipe = type(best.pipe).from_pretrained(MODEL, torch_dtype=best.dtype).to(best.device) if MODEL else tiny_sd3()
    pipe.load_lora_weights(Path(folder) / "lora")
pipe.set_progress_bar_config(disable=True)
size = dict(height=best.options.height, width=best.options.width, max_sequence_length=best.options.text_tokens or 256)
plain = pipe(
    [p.text for p in PROMPTS], latents=noise, num_inference_steps=STEPS, guidance_scale=1.0, output_type="pt", **size
).images
ours = best.decode(integrate(best, best.schedule(STEPS), best.encode(PROMPTS), noise, Usage()))
before = policy.decode(latents)
print(
    "largest difference between plain diffusers and ours:",
    "below 1e-5" if (plain - ours).abs().max() < 1e-5 else float((plain - ours).abs().max()),
)
print(f"largest difference between before and after training: {float((ours - before).abs().max()):.2f}")
show_pictures(torch.cat([before, ours]).cpu(), ["before"] * 4 + ["after"] * 4, columns=4)
plt.show()

# %% [markdown]
# (In bfloat16 the two are only close: the plain pipeline rounds its latents after every step.)
#
# ## On a real GPU
#
# The settings that the papers publish for SD3.5-Medium at 512 px (Flow-GRPO, TP-GRPO; Stepwise-Flow-GRPO leaves some open):
#
# | setting | value | here |
# |---|---|---|
# | steps, training / evaluation | 10 / 40 | `RunConfig.steps`, `eval_steps` |
# | groups × members, updates | 48 × 24, 2 | `prompts`, `members`, `updates` |
# | LoRA | rank 32, alpha 64, all attention | `ModelOptions.rank`, `alpha`, `targets` |
# | guidance | 4.5; Stepwise 1.0 and 4.5; FLUX.1-dev 3.5, distilled | `ModelOptions.guidance`, `Flux(distilled_guidance=3.5)` |
# | learning rate, weight decay, gradient norm | 3e-4, 1e-4, 1 | `lr`, `weight_decay`, `grad_clip` |
# | clip | 1e-4; TP-GRPO 1e-5 | `ClippedLoss(clip=...)` |
#
# No number of seconds or gigabytes of a real run stands in this lesson, because none was measured for it. A run is started by `flowrl train --model ... --prompts FILE --reward ...`. Before you start one: (1) do four ODE pictures look as the model's should? (2) is `ratio_deviation` with `updates=1` far below the clip? (3) is `zero_spread_groups` low, that is, do the members of a group get different
# rewards at all? (4) does a reward that is easy (redness!) rise within twenty iterations? Each takes minutes, and finds most of what goes wrong in days.

# %% [markdown]
# ## To keep
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $t = su/(1 + (s-1)u)$ | shifted grid | `policy.schedule(T)` |
# | $Wx + \frac{\alpha}{r}BAx$ | LoRA; off = the reference | `ModelOptions(rank, alpha)`, `policy.reference()` |
# | $v_\text{neg} + s(v - v_\text{neg})$ | guidance, in sampling and training | `ModelOptions(guidance=s)`, `policy.guided(s)` |
# | $\lvert\rho - 1\rvert$ before an update | noise floor; keep it below the clip | `ratio_deviation` in the metrics |
# | pairs | trajectories × stochastic steps | `RunConfig.updates`, `micro_batch` |
#
# A model that is not there yet is one file: `docs/model-families.md` says how to write it. **Back to** [0 · Tour](00_tour.ipynb).

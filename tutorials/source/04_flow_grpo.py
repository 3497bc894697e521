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
# # 4 · Flow-GRPO on pictures
#
# **After this lesson you can** fine-tune a text-to-image model with Flow-GRPO (arXiv 2505.05470), choose the group size and the steps that are decisions,
# say what training with 10 steps instead of 40 saves, and recognise a collapse while it happens.
#
# **Time** 60 minutes, of which the computer needs two. **You need** lesson 3 (GRPO on a flow: ratio, clip, KL).
#
# The plane of the first lessons had one number to improve. Here a small model draws pictures for words, a rule-based judge scores them, and the one trick of
# lesson 3, *make the better members of a group likelier*, has to find its way through a real diffusion transformer.

# %% tags=["hide-input"]
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from flowrl import evaluate, preset, world
from flowrl.worlds.base import PolicyOptions
from flowrl_course import lesson_04 as lesson
from flowrl_course.figures import ACCENT, COLOURS, DATA, NOISE, clean, panels
from flowrl_course.pictures import draw, gallery, roll, train
from flowrl.samplers import FlowSDE, Window

shapes = world("shapes")
base = shapes.policy(PolicyOptions())
opening_prompts = [
    prompt
    for task, count in (("compositional", 3), ("text", 2), ("preference", 3))
    for prompt in shapes.prompts(task, "heldout")[1 : 1 + count]
]
opening = draw(base, shapes, opening_prompts)
gallery(
    [("base model", opening.images, [f"{value:.2f}" for value in opening.rewards])],
    [prompt.text for prompt in opening_prompts],
    title="It knows every word, and often draws something else (below: the judge's score, 0 to 1)",
)
plt.show()

# %% [markdown]
# ## The world
#
# A picture has 64 × 64 pixels on a lattice of 4 × 4 cells; a cell holds an object, a letter, or nothing. The policy is the transformer class of Stable Diffusion 3
# (`SD3Transformer2DModel` of diffusers) at a small size, and what we train is a LoRA adapter on its attention projections (a small low-rank matrix added to each frozen weight matrix): exactly what Flow-GRPO trains on SD3.5.
# The base model learned from captions that were often careless, so it knows every word and does not always mean it.
#
# We work on the task `preference`, "calm red and blue pattern": the judge likes the colours asked for, mirror symmetry, and the right amount of paint. It scores
# in three forms: `strict` (0 or 1, all three conditions), `graded` (the share of conditions that hold), `soft` (continuous). We train on `soft` and report `strict` too.

# %%
trainable = sum(weight.numel() for weight in base.trainable().values())
everything = sum(weight.numel() for weight in base.network.parameters())
prompts = shapes.prompts("preference", "train")
heldout = sorted({prompt.text for prompt in shapes.prompts("preference", "heldout")})
print(f"{everything:,} weights, {trainable:,} of them in the adapter")
print(f"{len(prompts)} training prompts; held out: {', '.join(heldout)}")
before = evaluate(base, shapes, "preference", "soft", count=96, steps=20)
print("base model on 96 held-out samples:", {form: round(value, 2) for form, value in before.scores.items()})

# %% [markdown]
# ## One group
#
# A *group* is several samples of one prompt. Flow-GRPO's credit is the plainest there is: how good is this picture compared with its group,
#
# $$A^{(k)} = \frac{R^{(k)}_T - \operatorname{mean}_j R^{(j)}_T}{\operatorname{std}_j R^{(j)}_T + 10^{-4}},$$
#
# and every denoising step of the trajectory gets this same number. Nobody asks which step made the picture good; that is the question of lessons 5 and 6.
#
# ### Exercise 1 · uniform credit *(easy, 4 minutes)*
#
# `final` is $R_T$, `[prompt, member]`. Return the advantages `[prompt, member, step]`, the same at each of the `steps` steps. Use the population standard deviation
# (`unbiased=False`) of the group.


# %% tags=["exercise"]
def uniform_advantages(final, steps):
    """Flow-GRPO's credit, [prompt, member, step]."""
    return ...


# %% tags=["solution"]
def uniform_advantages(final, steps):
    """Flow-GRPO's credit, [prompt, member, step]."""
    centred = final - final.mean(dim=1, keepdim=True)
    scores = centred / (final.std(dim=1, keepdim=True, unbiased=False) + 1e-4)
    return scores[:, :, None].repeat(1, 1, steps)


# %%
lesson.check_uniform(uniform_advantages)

# %% [markdown] tags=["explanation"]
# **Why.** The mean runs over the *members* (dimension 1), never over prompts: some prompts are harder than others, and a good picture of a hard prompt must not be
# punished for that. The $10^{-4}$ keeps a group of equal rewards at 0 instead of dividing by zero. In `flowrl` this is `credit.Uniform`; the released code of
# Flow-GRPO takes the mean per prompt but the standard deviation over the whole batch, which is `Uniform(std="batch")`.

# %% [markdown]
# Here is a group of eight. The sampler is Flow-SDE of lesson 2 with $a = 0.7$ on the steps 2 to 6 and the ODE elsewhere (why these, comes next). `flowrl` calls this window `2:5`: from step 2 on, five steps.

# %%
sampler = Window(FlowSDE(0.7), start=2, size=5)
judge = shapes.reward("soft")
group = roll(base, judge, prompts[4:5], members=8, sampler=sampler, seed=1)
final = group.rewards[..., -1]
advantages = uniform_advantages(final, steps=10)
pictures = base.decode(group.result.trajectories.images_latent)
order = final[0].argsort(descending=True)
gallery(
    [("", pictures[order], [f"R {final[0, k]:.2f}   A {advantages[0, k, 0]:+.1f}" for k in order])],
    title=f'One group, "{prompts[4].text}", best first: reward and advantage',
)
plt.show()

# %% [markdown]
# About half of the advantages are positive, however good or bad the group is as a whole: GRPO needs no value network because the group is its own baseline.
#
# ## Which steps are decisions?
#
# A step counts in the loss only where the sampler is random: there the policy is a Gaussian with a log-probability. Flow-GRPO makes every step but the last random. But not
# every step's noise reaches the picture. We can ask: let the members of a group start from the *same* noise, make *one* step random, and look at how much
# the final rewards of the group differ.

# %%
spread = {}
for task in ("preference", "compositional"):
    chosen, rewarded = shapes.prompts(task, "train")[:6], shapes.reward("soft")
    alone = [
        roll(base, rewarded, chosen, members=8, sampler=Window(FlowSDE(0.7), step, 1), shared_noise=True, seed=3)
        for step in range(10)
    ]
    spread[task] = torch.stack([batch.rewards[..., -1].std(dim=1).mean() for batch in alone])
    print(f"{task:<26}" + " ".join(f"{value:.3f}" for value in spread[task]))
stds = [float(batch.result.trajectories.schedule.stds[step]) for step, batch in enumerate(alone)]
print("std of the step's own noise " + " ".join(f"{value:.2f} " for value in stds))

# %% tags=["hide-input"]
figure, axes = panels(width=6.4, height=3.0)
axes.axvspan(1.5, 6.5, color="#eef1f5")
axes.text(4, 0.262, "window 2:5, steps 2 to 6 (what we train)", ha="center", fontsize=8, color=NOISE)
for task, shade, place in (("compositional", ACCENT, (4.1, 0.175)), ("preference", DATA, (0.05, 0.085))):
    axes.plot(range(10), spread[task], "o-", color=shade)
    axes.text(*place, task, color=shade)
axes.set(xlabel="the one step that is random (0 = from pure noise)", ylabel="spread of R within a group", ylim=(0, 0.28))
axes.set_xticks(range(10))
axes.set_title("Early noise decides the picture, late noise nothing that the judge can see", fontsize=10)
clean(axes)
plt.show()

# %% [markdown]
# Noise after step 6 changes the picture so little that its log-probabilities are pure nuisance in the loss; the last step is random in name only (the grid of this model, like that of
# diffusers, ends with 0.001 and 0, so the last step's noise has a standard deviation of 0.0007). The earliest steps do matter, yet this world's
# default window begins at step 2: Flow-SDE's noise near $t = 1$ is very large (std 0.70 and 0.66), and training with it
# was slower in the search that set the defaults (`docs/design.md`). Which steps should be random is a choice like the learning rate, and public code differs on it: all but the last
# (Flow-GRPO), a few (Flow-GRPO-Fast), a window that slides from early to late (MixGRPO).
#
# ## How large a group?
#
# At a fixed number of pictures per iteration you choose between many prompts with small groups and few prompts with large ones. Two things go wrong in small groups. First, a group whose
# members all get the *same* reward says nothing: all advantages are 0, its pictures were drawn in vain. With 0/1 rewards this is common.
#
# ### Exercise 2 · silent groups *(medium, 6 minutes)*
#
# `success` `[prompt]` is the probability that a picture of each prompt gets reward 1 (otherwise 0). What share of groups of `size` members is silent, on average over the prompts?


# %% tags=["exercise"]
def silent_share(success, size):
    """The expected share of groups in which all rewards are equal."""
    return ...


# %% tags=["solution"]
def silent_share(success, size):
    """The expected share of groups in which all rewards are equal."""
    return float((success**size + (1 - success) ** size).mean())


# %%
lesson.check_silent(silent_share)

# %% [markdown] tags=["explanation"]
# **Why.** A group is silent when all members succeed, $p^G$, *or* all fail, $(1-p)^G$. The mean over prompts comes last: prompts that are nearly always right or nearly always wrong
# fall silent far more often than one of average difficulty, so putting the mean $p$ into the formula is too optimistic. Note what follows: as training succeeds, $p \to 1$, and groups fall silent.

# %% [markdown]
# Second, mean and standard deviation of a few members are themselves noisy. Let us draw 48 members each of 12 prompts, cut them into smaller groups, and compare: the share of silent groups against your
# formula, and how well the advantages of small groups agree (correlation) with those that use all 48.

# %%
crowd = roll(base, judge, prompts[:12], members=48, sampler=sampler, seed=3)
strict = (
    shapes.reward("strict").score(
        base.decode(crowd.result.trajectories.images_latent), [p for p in prompts[:12] for _ in range(48)]
    )
).view(12, 48)
soft = crowd.rewards[..., -1]
reference = uniform_advantages(soft, 1)[..., 0]
sizes, silent, faithful = [2, 3, 4, 6, 8, 12, 24], [], []
for size in sizes:
    pieces = strict.view(-1, size)
    silent.append(float((pieces == pieces[:, :1]).all(dim=1).float().mean()))
    small = uniform_advantages(soft.view(-1, size), 1).flatten()
    faithful.append(float(torch.corrcoef(torch.stack([small, reference.flatten()]))[0, 1]))
for size, quiet, agreeing in zip(sizes, silent, faithful, strict=True):
    told = silent_share(strict.mean(dim=1), size)
    print(f"groups of {size:2d}: {quiet:5.1%} silent (formula {told:5.1%}), correlation with the group of 48: {agreeing:.2f}")

# %% tags=["hide-input"]
figure, axes = panels(2, width=3.9, height=2.9)
fine = torch.linspace(2, 24, 60)
axes[0].plot(fine, [silent_share(strict.mean(dim=1), float(size)) for size in fine], color=DATA)
axes[0].plot(sizes, silent, "o", color=ACCENT)
axes[0].text(4.6, 0.2, "formula", color=DATA)
axes[0].text(8.5, 0.06, "measured", color=ACCENT)
axes[0].plot(fine, [silent_share(torch.full((1,), 0.95), float(size)) for size in fine], ":", color=NOISE)
axes[0].text(12, 0.6, "when 95% succeed", color=NOISE)
axes[0].set(xlabel="group size G", ylabel="share of silent groups", title="Small groups fall silent (0/1 rewards)", ylim=(0, 1))
axes[1].plot(sizes, faithful, "o-", color=ACCENT)
axes[1].plot(fine, (1 - 1 / fine).sqrt(), ":", color=NOISE)
axes[1].text(2.2, 0.94, r"$\sqrt{1 - 1/G}$", color=NOISE)
axes[1].set(xlabel="group size G", ylabel="correlation", title="Advantages against those of 48 members", ylim=(0.4, 1.02))
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# The dotted line on the right is what the noise of the group's mean alone would cost; the rest is the noise of its standard deviation, which at $G = 2$ leaves only the sign of a difference. Beyond
# about a dozen members little is gained. Papers use 24; this world's default is 16 prompts × 12 members, and below we use 8 × 12 to save time.
#
# ## Train with 10 steps, draw with 40
#
# Evaluation uses 28 to 40 ODE steps. Training does not have to: Flow-GRPO found that pictures of 10 steps are good enough to *rank* the members of a group. This *denoising reduction* is
# most of what makes online RL on image models affordable.
#
# ### Exercise 3 · what ten steps save *(medium, 6 minutes)*
#
# Count network evaluations (NFE) of one iteration. Sampling costs one evaluation per step. Every stochastic step of every trajectory is then trained on once, and a training evaluation (forward and backward) costs about
# three. `trajectories` are drawn with `steps` steps, `decisions` of them stochastic.


# %% tags=["exercise"]
def iteration_cost(trajectories, steps, decisions):
    """Network evaluations of one iteration, a forward-backward pass counted as 3."""
    return ...


# %% tags=["solution"]
def iteration_cost(trajectories, steps, decisions):
    """Network evaluations of one iteration, a forward-backward pass counted as 3."""
    return trajectories * (steps + 3 * decisions)


# %%
lesson.check_cost(iteration_cost)

# %%
paper = iteration_cost(1, 40, 39) / iteration_cost(1, 10, 9)
window = iteration_cost(1, 40, 5) / iteration_cost(1, 10, 5)
print(
    f"10 instead of 40 steps, all but the last stochastic: {paper:.1f} times cheaper; five stochastic steps in both: {window:.1f} times"
)

# %% [markdown] tags=["explanation"]
# **Why.** The update costs more than the sampling: with nine decisions, 27 of 37 evaluations. If all steps are trained, everything shrinks with the number of steps. If only a fixed window is stochastic, its cost does not
# shrink, and fewer steps save less; but then the window itself is the larger saving (25 instead of 37 evaluations at 10 steps).

# %% [markdown]
# Now we train: 8 iterations of 8 prompts × 12 members, 10 steps. `train` (in `flowrl_course.pictures`) is a loop around `Trainer.iteration`, the same that `flowrl train` runs; it ends with
# the averaged weights and an evaluation on held-out prompts. The reduction asks for a test: does what was learned with 10 steps hold when we draw with 5 or 40?

# %%
settings = preset("default").apply(task="preference", groups=8, group_size=12, iterations=8)
healthy = train(settings, shapes)
print("mean reward of the training samples:", " ".join(f"{value:.2f}" for value in healthy.curve("reward_mean")))
held = {}
for name, policy in (("before", base), ("after", healthy.policy)):
    held[name] = [evaluate(policy, shapes, "preference", "soft", count=96, steps=steps).scores for steps in (5, 10, 40)]
    print(
        f"{name:<7}"
        + "   ".join(
            f"{s:2d} steps: soft {v['soft']:.2f} strict {v['strict']:.2f}" for s, v in zip((5, 10, 40), held[name], strict=True)
        )
    )

# %% tags=["hide-input"]
figure, axes = panels(2, width=3.9, height=2.8)
axes[0].plot(range(1, 9), healthy.curve("reward_mean"), "o-", color=COLOURS["flow-grpo"])
axes[0].set(xlabel="iteration", ylabel="mean reward (soft)", title="Training samples, 10 steps", ylim=(0.6, 1))
for name, shade in (("before", NOISE), ("after", COLOURS["flow-grpo"])):
    values = [scores["strict"] for scores in held[name]]
    axes[1].plot((5, 10, 40), values, "o-", color=shade)
    axes[1].annotate(f"{name} training", (20, values[1]), xytext=(0, -14), textcoords="offset points", color=shade)
axes[1].set(xlabel="ODE steps while evaluating", ylabel="strict success", title="Held-out prompts", ylim=(0, 1))
axes[1].set_xticks((5, 10, 40))
for cell in axes:
    clean(cell)
plt.show()
shown = [shapes.parse(text) for text in heldout]
rows = []
for name, policy in (("before", base), ("after", healthy.policy)):
    drawn = draw(policy, shapes, shown, seed=4)
    rows.append((name, drawn.images[:5], [f"{value:.2f}" for value in drawn.rewards[:5]]))
gallery(rows, heldout[:5], title="Held-out prompts, the same noise before and after 8 iterations")
plt.show()

# %% [markdown]
# The gain carries over to every number of steps, although no training sample had more than 10. With 96 samples a share has a standard error of about 0.05, so read nothing into differences of that size.
#
# ## A collapse, made on purpose
#
# Three brakes kept this run safe: a small learning rate, few updates on the same pictures, and the clip, which stops counting a pair once its probability ratio has moved too far. Take them away: learning rate 0.01
# instead of 0.004, 16 updates instead of 4, and a clip so wide (0.9) that it never holds.
#
# All three keep the policy close to the one that drew the pictures, and for the same reason: the advantages say which way to change *that* policy. One that has already moved far away follows advice that was meant for
# another.
#
# First, what the clip does exactly. The loss of a pair is $\max(-A\,\rho,\; -A\,\mathrm{clip}(\rho, 1-c, 1+c))$ with the ratio $\rho$.
#
# ### Exercise 4 · which pairs still push? *(medium, 6 minutes)*
#
# Given ratios, advantages (no zeros) and $c$, return which pairs have a gradient that is not zero, as booleans. Think before you run: is it all pairs within $1 \pm c$, and only those?


# %% tags=["exercise"]
def pushing(ratio, advantage, clip):
    """Which pairs still change the policy, [pair], bool."""
    return ...


# %% tags=["solution"]
def pushing(ratio, advantage, clip):
    """Which pairs still change the policy, [pair], bool."""
    too_far_up = (advantage > 0) & (ratio > 1 + clip)
    too_far_down = (advantage < 0) & (ratio < 1 - clip)
    return ~(too_far_up | too_far_down)


# %%
lesson.check_pushing(pushing)

# %% [markdown] tags=["explanation"]
# **Why.** The maximum is the *pessimistic* of two losses. A good pair ($A > 0$) whose ratio has already grown beyond $1 + c$ has had its share: its gradient is 0. But a good pair whose ratio *fell* below $1 - c$, because updates for other
# pairs pushed it there, keeps its full gradient, so that the mistake can be mended. So the clip holds on one side only, and it stops pairs from pushing on; it does not pull back what other pairs moved.

# %% [markdown]
# Now the collapse, and two cures that leave learning rate and number of updates as they are: the clip of $2 \times 10^{-3}$ alone, or a penalty on the KL divergence from the base model alone. The table also has
# another KL, `approx_kl`: between the policy while it is updated and the one that drew the iteration's pictures. It says how far one iteration moves.

# %% tags=["varies"]
reckless = replace(settings, iterations=5, updates=16, lr=1e-2, clip=0.9)
runs = {
    "no brakes": train(reckless, shapes),
    "+ clip 0.002": train(replace(reckless, clip=2e-3), shapes),
    "+ KL penalty 1": train(replace(reckless, kl_weight=1.0), shapes),
    "the run above": healthy,
}
print(f"{'held out, 96 samples':<22} {'soft':>6} {'strict':>7}   KL of the new policy from the old one, per iteration")
print(f"{'base model':<22} {held['before'][1]['soft']:6.2f} {held['before'][1]['strict']:7.2f}")
for name, run in runs.items():
    scores, moved = run.evaluation.scores, run.curve("approx_kl")
    print(f"{name:<22} {scores['soft']:6.2f} {scores['strict']:7.2f}   " + " ".join(f"{value:.4f}" for value in moved))
print("training reward without brakes:", " ".join(f"{value:.2f}" for value in runs["no brakes"].curve("reward_mean")))

# %% tags=["hide-input"]
shades = {
    "no brakes": ACCENT,
    "+ clip 0.002": COLOURS["dance-grpo"],
    "+ KL penalty 1": COLOURS["noise-weighted"],
    "the run above": COLOURS["flow-grpo"],
}
figure, axes = panels(3, width=3.4, height=2.9)
for cell, metric, label, title in zip(
    axes,
    ("reward_mean", "approx_kl", "group_std"),
    ("mean reward (soft)", "KL, new policy from old", "std of R in a group"),
    ("What you see last", "What you see first: the policy runs", "Rewards of a group become alike"),
    strict=True,
):
    for name, run in runs.items():
        values = run.curve(metric)
        cell.plot(range(1, len(values) + 1), values, "o-", markersize=3, color=shades[name], label=name)
    cell.set(xlabel="iteration", ylabel=label, title=title)
    clean(cell)
axes[1].set_yscale("log")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
plt.show()
rows = []
for name, run in runs.items():
    drawn = draw(run.policy, shapes, shown, seed=4)
    rows.append((name, drawn.images[2:], [f"{value:.2f}" for value in drawn.rewards[2:]]))
gallery(rows, heldout[2:], size=1.1, title="The same noise after each run")
plt.show()

# %% [markdown]
# Without brakes the policy ends at painting every cell, whatever the prompt says: strict success 0. Look at the order of events. In iteration 2 the training reward was still *rising*, while the KL of the update was already
# about sixty times that of the run with a clip. A reward curve is the last to know. What to watch is how far the policy moves per iteration (`approx_kl`, `ratio_deviation`, `clip_fraction` in the metrics), and pictures.
#
# Both cures prevent the crash with everything else as reckless as before, and they are not equally good here. The clip keeps most of the learning. The KL penalty of weight 1 holds the policy at the base model: no
# crash, and no gain either (strict 0.35, as before training). Try 0.1, and it crashes again. Papers use KL weights of 0.01 to 0.04 on SD3.5 against slow drift and reward hacking over thousands of iterations, which is another disease than
# this one. The best run is the plain one, with small steps from the beginning. All of this is one seed, and a run that collapses multiplies every rounding error, so your numbers of the first row may differ; the collapse is far beyond chance, the order of the two cures might not be.
#
# The right panel has a lesson too: the spread of rewards within a group falls in *every* run, in the good one because its pictures succeed, in the broken one because they fail alike. A falling `group_std` by itself is no alarm.
#
# ## To keep
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $R^{(k)}_T$ | reward of member $k$'s finished picture | `reward_table(...)[..., -1]` |
# | $A = (R_T - \operatorname{mean})/(\operatorname{std} + 10^{-4})$ | uniform credit | `credit.Uniform` |
# | $G$ | group size | `Groups(prompts, members)`, `--group-size` |
# | stochastic steps | the decisions | `samplers.Window`, `--window 2:5` |
# | 10 / 40 | steps in training / evaluation | `--num-steps`, `--eval-steps` |
# | $c$, $\beta$ | clip, KL weight | `ClippedLoss(clip, kl_weight)` |
#
# On the command line: `flowrl train --task preference --out runs/mine`.
#
# **Next:** [5 · Stepwise-Flow-GRPO](05_stepwise_flow_grpo.ipynb) asks which step earned the reward.

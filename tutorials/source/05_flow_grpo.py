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
# # 5 · Flow-GRPO on images
#
# **After this lesson you can** fine-tune a text-to-image model with Flow-GRPO (arXiv 2505.05470), choose the group size and the steps that are decisions,
# compute the saving of training with 10 steps instead of 40, measure the distance from the base model, and detect a collapse early.
#
# **Time** 115 minutes, of which the computer needs about one. **You need** the lesson on GRPO (GRPO on a flow: ratio, clip, KL).
#
# The first lessons used two-dimensional data. In this lesson we train a small text-to-image model, a diffusion transformer, with the method of
# the lesson on GRPO: *make the better members of a group more likely*. The reward comes from a rule-based judge of the images.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import torch

from flowrl import evaluate, preset, world
from flowrl.flow import kl, log_prob
from flowrl.samplers import FlowSDE, Windowed, transition_stds
from flowrl.worlds import PolicyOptions
from flowrl_course import lesson_05 as lesson
from flowrl_course import recorded
from flowrl_course.batches import ode_images, sample_groups
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
from flowrl_course.recorded import measured
from flowrl_course.runs import train

shapes = world("shapes")
base = shapes.policy(PolicyOptions())
judge = shapes.reward("soft")
opening_prompts = [
    prompt
    for task, count in (("compositional", 3), ("text", 2), ("preference", 3))
    for prompt in shapes.prompts(task, "heldout")[1 : 1 + count]
]
opening = ode_images(base, judge, opening_prompts)
show_images(
    ImageRow(opening.images, opening.rewards, "base model"),
    heads=[prompt.text for prompt in opening_prompts],
    title="Samples of the base model, and the judge's rewards (0 to 1)",
)
plt.show()

# %% [markdown]
# ## The world
#
# An image has 64 × 64 pixels on a lattice of 4 × 4 cells; a cell contains an object, a letter, or nothing. The policy is the transformer class of Stable Diffusion 3
# (`SD3Transformer2DModel` of diffusers) at a small size. The trained weights are a LoRA adapter on its attention projections (a low-rank matrix added to each frozen weight matrix), as in Flow-GRPO for SD3.5.
# The base model was trained with captions that were often inaccurate, so it can render every word but does not always follow the prompt.
#
# The task is `preference`, for example "calm red and blue pattern": the judge rewards the requested colours, mirror symmetry, and the right amount of paint. The reward has
# three forms: `strict` (0 or 1, all three conditions), `graded` (the fraction of conditions that hold), `soft` (continuous). Training uses `soft`; the tables also have `strict`.

# %%
trainable = sum(weight.numel() for weight in base.trainable().values())
everything = sum(weight.numel() for weight in base.network.parameters())
prompts = shapes.prompts("preference", "train")
heldout = sorted({prompt.text for prompt in shapes.prompts("preference", "heldout")})
print(f"{everything:,} weights, {trainable:,} of them in the adapter")
print(f"{len(prompts)} training prompts; held out: {', '.join(heldout)}")
before = evaluate(base, shapes, "preference", "soft", count=96, steps=20)
print(
    "base model on 96 held-out samples:",
    {form: round(value, 2) for form, value in before.scores.items()},
)

# %% [markdown]
# ## One group
#
# A *group* is several samples of one prompt. Flow-GRPO's credit is the group advantage of the lesson on GRPO, and every **decision** of the trajectory, that is, every random step, gets the same number. An ODE step is not a decision, because its standard deviation is 0 (the lesson on ODE and SDE). The lessons on Stepwise-Flow-GRPO and TP-GRPO estimate which decision made the image good.


# %%
def uniform_advantages(final, decisions):
    """Flow-GRPO's credit [prompt, member, decision] from rewards [prompt, member]."""
    centred = final - final.mean(dim=1, keepdim=True)
    scores = centred / (final.std(dim=1, keepdim=True, unbiased=False) + 1e-4)
    return scores[:, :, None].repeat(1, 1, decisions)


# %% [markdown]
# In `flowrl` this rule is `credit.Uniform`; the released code of Flow-GRPO takes the mean per prompt but the standard deviation over the whole batch, which is `Uniform(std="batch")`.
#
# ### Exercise 1 · the advantage of a success
#
# *Difficulty: medium · kind: formula · importance: essential · time: 7 minutes*
#
# Many rewards are 0 or 1, such as "the image has the right number of objects". In a group of `members` images, `successes` got 1, at least one and not all. Which advantage does a success get, and which a failure? Return both numbers, from whole numbers, in closed form (neglect the $10^{-4}$). Before you compute: in a group with a single success, is the success or are the failures further from 0?


# %% tags=["exercise"]
def success_and_failure(successes, members):
    """The advantages of an image with reward 1 and of one with reward 0."""
    return ..., ...


# %% [markdown] tags=["hint"]
# **Hint.** Let $p$ be the share of successes. The mean of the rewards is $p$. Their variance is the mean of the squares minus the square of the mean, and $R^2 = R$ for rewards of 0 and 1.


# %% tags=["solution"]
def success_and_failure(successes, members):
    """The advantages of an image with reward 1 and of one with reward 0."""
    p = successes / members
    return ((1 - p) / p) ** 0.5, -((p / (1 - p)) ** 0.5)


# %%
lesson.check_success(success_and_failure)

# %% [markdown] tags=["explanation"]
# **Why.** The standard deviation is $\sqrt{p(1-p)}$, so the advantages are $(1-p)/\sqrt{p(1-p)} = \sqrt{(1-p)/p}$ and $-p/\sqrt{p(1-p)} = -\sqrt{p/(1-p)}$. The rarer result is further from 0: one success among 12 gets 3.3, and each failure -0.3. The squares of a group's advantages always sum to $G$. So a group with one success counts as much as one with six, although its estimate is noisier. Without the division by the standard deviation its weight would be $p(1-p)$.

# %% [markdown]
# The next figure shows a group of eight. The sampler is Flow-SDE of the lesson on ODE and SDE with $a = 0.7$ in steps 2 to 6 and the ODE in the others; the next section gives the reason. In `flowrl` this window is written `2:7`, as a Python slice: the five steps 2 to 6. They are the decisions 0 to 4.

# %%
sampler = Windowed(FlowSDE(0.7), range(2, 7))
group = sample_groups(base, judge, prompts[4:5], members=8, sampler=sampler, seed=1)
final = group.values[..., -1]
# [prompt, member, decision]: 1, 8, 5
advantages = uniform_advantages(final, decisions=len(group.decisions))
images = base.decode(group.rollout.trajectories.images_latent)
order = final[0].argsort(descending=True)
captions = [f"R {final[0, k]:.2f}   A {advantages[0, k, 0]:+.1f}" for k in order]
show_images(
    ImageRow(images[order], captions),
    title=f'One group, "{prompts[4].text}", best first: reward and advantage',
)
plt.show()

# %% [markdown]
# The advantages of every group sum to 0, good or bad: the group is its own baseline, so GRPO needs no value network.
#
# ## Which steps are decisions?
#
# The loss contains only the decisions, the stochastic steps, in which the policy is a Gaussian with a log-probability. With a window, the effect of the weights through the ODE steps before, between and after the decisions is dropped: they move the states, but the gradient treats the states as fixed (the lesson on GRPO). In the 2-D world, the gradient of the decisions alone has about two thirds of the length of the full gradient with the window `2:7`, and nearly its direction (the lesson Why a step may be credited). In Flow-GRPO every step but the last is stochastic. However, the noise of a
# step may have no visible effect on the image. To measure the effect, we let the members of a group start from the *same* noise and make *one* step stochastic. Then we compute the spread of
# the final rewards within the group. Before we run this experiment, predict its result.
#
# ### Exercise 2 · early or late noise
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 3 minutes*
#
# Ten ODE steps are taken, and one of them adds noise. In which case do the rewards of the group differ most?
#
# - **a** the noise is added in step 0 or 1: the remaining steps turn a small difference into another image
# - **b** the noise is added in step 8: no remaining step can remove it from the image
# - **c** the step does not matter, since Flow-SDE preserves the distribution of the images

# %% tags=["exercise"]
strongest_step = "..."

# %% [markdown] tags=["hint"]
# **Hint.** What does the network predict from a state near $t = 1$, and what from a state near $t = 0$? Which of the two states still allows different images?

# %% tags=["solution"]
strongest_step = "a"

# %%
lesson.check_strongest_step(strongest_step)

# %% [markdown] tags=["explanation"]
# **Why.** Near $t = 1$ the state is compatible with many images, so its noise selects one of them. Near $t = 0$ the image is nearly determined: the network treats added noise as noise, and the remaining steps remove most of it. In addition, the noise of a late step is small, as the last printed row shows.

# %% [markdown]
# **Try it.** The same question in the plane: choose the random steps of a group that starts from one noise. If only late steps are random, all members end at the same blob, and the group has nothing to compare.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("one-noise")

# %%
spread = {}
for task in ("preference", "compositional"):
    chosen = shapes.prompts(task, "train")[:6]
    samplers = [Windowed(FlowSDE(0.7), [step]) for step in range(10)]
    alone = [
        sample_groups(base, judge, chosen, 8, sampler, shared_noise=True, seed=3)
        for sampler in samplers
    ]
    spread[task] = torch.stack([batch.values[..., -1].std(dim=1).mean() for batch in alone])
    print(f"{task:<26}" + " ".join(f"{value:.3f}" for value in spread[task]))
stds = transition_stds(FlowSDE(0.7), base.schedule(10)).tolist()
print("std of the step's own noise " + " ".join(f"{value:.3f}" for value in stds))

# %% tags=["hide-input"]
figure, axes = panels(width=6.4, height=3.0)
axes.axvspan(1.5, 6.5, color="#eef1f5")
axes.text(
    4, 0.262, "window 2:7, steps 2 to 6 (trained below)", ha="center", fontsize=8, color=NOISE
)
for task, shade, place in (
    ("compositional", ACCENT, (4.1, 0.175)),
    ("preference", DATA, (0.05, 0.085)),
):
    axes.plot(range(10), spread[task], "o-", color=shade)
    axes.text(*place, task, color=shade)
axes.set(
    xlabel="the one step that is random (0 = from pure noise)",
    ylabel="spread of R within a group",
    ylim=(0, 0.28),
)
axes.set_xticks(range(10))
axes.set_title("Early noise changes the reward, late noise does not", fontsize=10)
clean(axes)
plt.show()

# %% [markdown]
# The earliest steps have the largest effect. Noise after step 6 changes the image so little that these steps mostly add noise to the gradient. The last step is practically deterministic, because the grid of this model, like that of
# diffusers, ends with 0.001 and 0.
#
# Nevertheless, the default window of this world begins at step 2. Flow-SDE's noise near $t = 1$ is very large, as the first two numbers of the last row show. Training with these steps
# was slower in the search for the defaults. The choice of the stochastic steps is a setting like the learning rate, and public code differs: all but the last
# (Flow-GRPO), a few (Flow-GRPO-Fast), a window that slides from early to late steps (MixGRPO).
#
# ## How large a group?
#
# We can divide a fixed number of images per iteration into many small groups or few large ones. Small groups have two disadvantages. First, a group whose
# members all get the *same* reward is silent: all its advantages are 0, so its images add nothing to the gradient. With 0/1 rewards this is common.
#
# ### Exercise 3 · silent groups
#
# *Difficulty: medium · kind: formula · importance: useful · time: 6 minutes*
#
# `success` `[prompt]` is the probability that an image of each prompt gets reward 1 (otherwise 0). What fraction of groups of `size` members is silent, on average over the prompts?


# %% tags=["exercise"]
def silent_share(success, size):
    """The expected fraction of groups in which all rewards are equal."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** All members get the same reward in two cases. Compute the probability of each case for every prompt, add them, and take the mean last.


# %% tags=["solution"]
def silent_share(success, size):
    """The expected fraction of groups in which all rewards are equal."""
    return float((success**size + (1 - success) ** size).mean())


# %%
lesson.check_silent(silent_share)

# %% [markdown] tags=["explanation"]
# **Why.** A group is silent if all members succeed, $p^G$, *or* all fail, $(1-p)^G$. The mean over prompts comes last, because groups of very easy or very hard prompts
# are silent far more often than groups of average difficulty. The formula with the mean $p$ therefore gives too small a number. As training succeeds, $p \to 1$, and more groups become silent.

# %% [markdown]
# Second, mean and standard deviation of a few members are noisy. The next cell samples 48 members for each of 12 prompts and divides them into smaller groups. It compares the fraction of silent groups with your
# formula, and correlates the advantages of small groups with those of all 48.

# %%
crowd = sample_groups(base, judge, prompts[:12], members=48, sampler=sampler, seed=3)
everyone = [prompt for prompt in prompts[:12] for _ in range(48)]
strict = (
    shapes.reward("strict")
    .score(base.decode(crowd.rollout.trajectories.images_latent), everyone)
    .view(12, 48)
)
soft = crowd.values[..., -1]
reference = uniform_advantages(soft, 1)[..., 0]
sizes, silent, faithful = [2, 3, 4, 6, 8, 12, 24], [], []
for size in sizes:
    pieces = strict.view(-1, size)
    silent.append(float((pieces == pieces[:, :1]).all(dim=1).float().mean()))
    small = uniform_advantages(soft.view(-1, size), 1).flatten()
    faithful.append(float(torch.corrcoef(torch.stack([small, reference.flatten()]))[0, 1]))
for size, share, agreeing in zip(sizes, silent, faithful, strict=True):
    formula = silent_share(strict.mean(dim=1), size)
    print(
        f"groups of {size:2d}: {share:5.1%} silent (formula {formula:5.1%}), correlation with"
        f" the group of 48: {agreeing:.2f}"
    )

# %% tags=["hide-input"]
figure, axes = panels(2, width=3.9, height=2.9)
fine = torch.linspace(2, 24, 60)
axes[0].plot(
    fine, [silent_share(strict.mean(dim=1), float(size)) for size in fine], color=DATA
)
axes[0].plot(sizes, silent, "o", color=ACCENT)
axes[0].text(4.6, 0.2, "formula", color=DATA)
axes[0].text(8.5, 0.06, "measured", color=ACCENT)
axes[0].plot(
    fine,
    [silent_share(torch.full((1,), 0.95), float(size)) for size in fine],
    ":",
    color=NOISE,
)
axes[0].text(12, 0.6, "when 95% succeed", color=NOISE)
axes[0].set(
    xlabel="group size G",
    ylabel="fraction of silent groups",
    title="Silent groups with 0/1 rewards",
    ylim=(0, 1),
)
axes[1].plot(sizes, faithful, "o-", color=ACCENT)
axes[1].plot(fine, (1 - 1 / fine).sqrt(), ":", color=NOISE)
axes[1].text(2.2, 0.94, r"$\sqrt{1 - 1/G}$", color=NOISE)
axes[1].set(
    xlabel="group size G",
    ylabel="correlation",
    title="Advantages against those of 48 members",
    ylim=(0.4, 1.02),
)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# The dotted line on the right is the loss of correlation due to the noise of the group's mean alone. The rest is due to the noise of the standard deviation, which at $G = 2$ leaves only the sign of a difference. Beyond
# about a dozen members the gain is small. Papers use 24, while the default of this world is 16 groups of 12. The runs below use 8 groups of 12 to save time.
#
# ## Train with 10 steps, evaluate with 40
#
# Evaluation uses 28 to 40 ODE steps. Training can use fewer, since images of 10 steps are sufficient to *rank* the members of a group. Flow-GRPO calls this *denoising reduction*, and it is
# the largest saving in online RL of image models.
#
# ### Exercise 4 · the saving of ten steps
#
# *Difficulty: medium · kind: formula · importance: useful · time: 6 minutes*
#
# Count the network evaluations (NFE) of one iteration. Sampling costs one evaluation per step. The update then trains once on every stochastic step of every trajectory, and a training evaluation (forward and backward) costs about
# three. `trajectories` are sampled with `steps` steps, `decisions` of them stochastic.


# %% tags=["exercise"]
def iteration_cost(trajectories, steps, decisions):
    """Network evaluations of one iteration, a forward-backward pass counted as 3."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Count for one trajectory: `steps` evaluations for sampling, and 3 for each decision.


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
    f"10 instead of 40 steps, all but the last stochastic: {paper:.1f} times cheaper; five"
    f" stochastic steps in both: {window:.1f} times"
)

# %% [markdown] tags=["explanation"]
# **Why.** The update costs more than the sampling: with nine decisions, 27 of 37 evaluations. If all steps are trained, both costs decrease with the number of steps. If only a fixed window is stochastic, the cost of the update stays the
# same, and fewer steps save less; but then the window itself is the larger saving (25 instead of 37 evaluations at 10 steps).

# %% [markdown]
# ### Exercise 5 · plan an iteration
#
# *Difficulty: medium · kind: design · importance: useful · time: 8 minutes*
#
# Suppose 90% of the images of every prompt succeed, with rewards of 0 or 1, and one iteration may cost at most 2,400 evaluations. Choose `groups`, the `members` of each, the `steps` of sampling and the number of `decisions`, such that
#
# - at most 30% of the groups are silent,
# - there are at least 8 groups, so that the gradient does not depend on a few prompts,
# - there are at least 8 steps and 4 decisions, and the last step follows the ODE.
#
# The functions `silent_share` and `iteration_cost` compute what you need; several plans are right.

# %% tags=["exercise"]
plan = {"groups": ..., "members": ..., "steps": ..., "decisions": ...}

# %% [markdown] tags=["hint"]
# **Hint.** Only `members` decides on the silent groups, so choose it first. The number of groups is then fixed by the second condition, and what remains of the budget limits steps and decisions.

# %% tags=["solution"]
plan = {"groups": 8, "members": 12, "steps": 10, "decisions": 5}

# %%
lesson.check_plan(plan)

# %% [markdown] tags=["explanation"]
# **Why.** With 12 members $0.9^{12} = 28\%$ of the groups are silent; with 11 members it would be 31%. Then 96 trajectories share 2,400 evaluations, 25 each. Ten steps with nine decisions would cost 37 per trajectory, so only a window fits. For example, five decisions fit with ten steps, and four with up to thirteen.

# %% [markdown]
# **Try it.** Change members, steps and random steps, and read from the first bar what Flow-GRPO pays for the rollout and for the update. The other bars belong to the methods of the next two lessons, which add estimates.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("budget")

# %% [markdown]
# The next cell trains for 8 iterations of 8 groups of 12 with 10 steps, the plan of the solution. `train` (in `flowrl_course.runs`) is a loop over `Trainer.iteration`, as in `flowrl train`, followed by
# a held-out evaluation of the averaged weights. To test the denoising reduction, the cell evaluates with 5, 10 and 40 steps.

# %%
settings = preset("default").apply(task="preference", groups=8, group_size=12, iterations=8)
healthy = train(settings)
print(
    "mean reward of the training samples:",
    " ".join(f"{value:.2f}" for value in healthy.curve("reward_mean")),
)
held = {}
for name, policy in (("before", base), ("after", healthy.policy)):
    held[name] = [
        evaluate(policy, shapes, "preference", "soft", count=96, steps=steps).scores
        for steps in (5, 10, 40)
    ]
    print(
        f"{name:<7}"
        + "   ".join(
            f"{s:2d} steps: soft {v['soft']:.2f} strict {v['strict']:.2f}"
            for s, v in zip((5, 10, 40), held[name], strict=True)
        )
    )

# %% [markdown] tags=["expected"]
# mean reward of the training samples: 0.75 0.79 0.80 0.83..0.87 0.85..0.91 0.85..0.91 0.88..0.95 0.88..0.95
# before  5 steps: soft 0.68 strict 0.29   10 steps: soft 0.70 strict 0.35   40 steps: soft 0.71 strict 0.43
# after   5 steps: soft 0.85..0.93 strict 0.58..0.82   10 steps: soft 0.86..0.94 strict 0.62..0.86   40 steps: soft 0.87..0.95 strict 0.69..0.91

# %% tags=["hide-input"]
figure, axes = panels(2, width=3.9, height=2.8)
axes[0].plot(range(1, 9), healthy.curve("reward_mean"), "o-", color=COLOURS["flow-grpo"])
axes[0].set(
    xlabel="iteration",
    ylabel="mean reward (soft)",
    title="Training samples, 10 steps",
    ylim=(0.6, 1),
)
for name, shade in (("before", NOISE), ("after", COLOURS["flow-grpo"])):
    values = [scores["strict"] for scores in held[name]]
    axes[1].plot((5, 10, 40), values, "o-", color=shade)
    axes[1].annotate(
        f"{name} training",
        (20, values[1]),
        xytext=(0, -14),
        textcoords="offset points",
        color=shade,
    )
axes[1].set(
    xlabel="ODE steps while evaluating",
    ylabel="strict success",
    title="Held-out prompts",
    ylim=(0, 1),
)
axes[1].set_xticks((5, 10, 40))
for cell in axes:
    clean(cell)
plt.show()
shown = [shapes.parse(text) for text in heldout]
rows = []
for name, policy in (("before", base), ("after", healthy.policy)):
    drawn = ode_images(policy, judge, shown, seed=4)
    rows.append(ImageRow(drawn.images[:5], drawn.rewards[:5], name))
show_images(
    *rows,
    heads=heldout[:5],
    title="Held-out prompts, the same noise before and after 8 iterations",
)
plt.show()

# %% [markdown]
# The gain holds for every number of steps, although all training samples had 10. However, with 96 samples the standard error of a success rate is about 0.05, so differences of that size are not significant.
#
# ## Distance from the base model
#
# How far has the policy moved from the base model? The lesson on GRPO measured the distance by a KL divergence per step and element. Three questions remain: why the paper's formula looks different,
# whether the KL can be estimated from log-probabilities alone, and what the numbers of single steps say about a whole trajectory.
#
# ### The paper's formula
#
# The lesson on GRPO has the KL of one step with means, $\|\mu - \mu_\text{ref}\|^2/(2\,\mathrm{std}^2)$. The Flow-GRPO paper writes it with velocities. Both policies start the step at the same state $x_t$, and the step is Flow-SDE's of the lesson on ODE and SDE, with $\mathrm{std} = \sigma_t\sqrt\Delta$ and $\sigma_t = a\sqrt{t/(1-t)}$. `flowrl` uses the form with means, because that form holds for every kernel of the lesson on ODE and SDE.
#
# ### Exercise 6 · KL from velocities
#
# *Difficulty: medium · kind: formula · importance: useful · time: 10 minutes*
#
# Derive the KL as a function of the two velocities. `velocity` and `reference_velocity` are `[sample, dim]`; `t`, `s` and `noise_level` are numbers with $s < t < 1$. Return the KL of the step per element, `[sample]`: the *mean* over elements in place of the squared norm.


# %% tags=["exercise"]
def kl_from_velocities(velocity, reference_velocity, t, s, noise_level):
    """KL per element of a Flow-SDE step from t to s, from both velocities: [sample]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The mean of the step is linear in $v$: $\mu = x_t\,(\ldots) - \Delta\,(\ldots)\,v$. Collect both terms with $v$, that of the ODE and that of the score correction. The part with $x_t$ cancels in $\mu - \mu_\text{ref}$. (`** 0.5` takes the root of a number.)


# %% tags=["solution"]
def kl_from_velocities(velocity, reference_velocity, t, s, noise_level):
    """KL per element of a Flow-SDE step from t to s, from both velocities: [sample]."""
    sigma = noise_level * (t / (1 - t)) ** 0.5
    factor = (t - s) / 2 * (sigma * (1 - t) / (2 * t) + 1 / sigma) ** 2
    return factor * (velocity - reference_velocity).square().mean(dim=1)


# %%
lesson.check_kl_from_velocities(kl_from_velocities)

# %% [markdown] tags=["explanation"]
# **Why.** From $\mu = x_t\,(\ldots) - \Delta\big(1 + \frac{\sigma_t^2(1-t)}{2t}\big)v$ follows
#
# $$\mathrm{KL} = \frac{\|\mu - \mu_\text{ref}\|^2}{2\,\mathrm{std}^2} = \frac{\Delta}{2}\Big(\frac{\sigma_t(1-t)}{2t} + \frac1{\sigma_t}\Big)^2\,\|v - v_\text{ref}\|^2 .$$
#
# The check compares your result with `flow.kl` of the two transitions. Two versions of this formula exist in public code. The paper's norm is a sum over elements; the code takes the mean, as for the log-probability. The released code of Flow-GRPO
# also omits the division by $\Delta$ in the form with means, so its KL is this one times $\Delta$ (`ClippedLoss(kl="without_delta")`). The published KL weights belong to that version.

# %% [markdown]
# ### Estimators
#
# For language models the KL of a whole text has no closed form, so their code estimates it from log-probabilities. For a sample of $\pi$, write $\ell = \log\pi - \log\pi_\text{ref}$ and $r = \pi_\text{ref}/\pi = e^{-\ell}$. The common estimators are
#
# $$k_1 = \ell, \qquad k_2 = \tfrac12\ell^2, \qquad k_3 = (r - 1) + \ell$$
#
# (Schulman 2020; GRPO's paper uses $k_3$). $\mathbb E[k_1]$ is the KL by definition. $\mathbb E[r] = \int \pi_\text{ref} = 1$, so $k_3$ has the same expectation.
#
# ### Exercise 7 · three estimators
#
# *Difficulty: medium · kind: prediction · importance: useful · time: 8 minutes*
#
# Which statements are true? The latent has many elements, and $\ell$ is the sum over them.
#
# - **A** $k_1$ of a single sample can be negative.
# - **B** $k_3$ of a single sample can be negative.
# - **C** $k_2$ has the same expectation as $k_1$, for every pair of policies.
# - **D** If the policies are very close, $k_1$ has less noise than $k_3$.
# - **E** If the policies are far apart, $k_3$ can have more noise than $k_1$.
# - **F** With samples held fixed, the gradient of $k_1$ has the gradient of the KL as its mean.

# %% tags=["exercise"]
estimators = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ..., "F": ...}

# %% [markdown] tags=["hint"]
# **Hint.** B: where is $e^{-\ell} - 1 + \ell$ smallest, as a function of $\ell$? C, D: insert a small $\ell$ into all three. E: $r$ is an exponential. F: what is $\mathbb E[\nabla\log\pi]$?

# %% tags=["solution"]
estimators = {"A": True, "B": False, "C": False, "D": False, "E": True, "F": False}

# %%
lesson.check_estimators(estimators)

# %% [markdown] tags=["explanation"]
# **Why.** A, B: $\ell$ has both signs, while $e^{-\ell} \ge 1 - \ell$. C: $k_2$ is the second-order expansion of $k_3$ for small $\ell$, and biased otherwise. D: for small $\ell$, $k_3 \approx \ell^2/2$ is of second order, and $\ell$ of first. E: $r$ is large where $\pi_\text{ref}$ has much more density than $\pi$; such samples are rare and dominate the variance. F: the gradient of $\ell$ at fixed samples is $\nabla\log\pi$, whose mean is 0.

# %% [markdown]
# The next cell compares the estimators with the closed form. For two Gaussians whose means differ by $\delta$ standard deviations in each of $d$ elements, $\ell$ of the whole latent is itself Gaussian, with mean $K = d\delta^2/2$ and variance $2K$.
# With the mean over elements instead of the sum, $\ell$ is divided by $d$.

# %%
d = 128  # elements of a latent of this model
draws = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
exact = [0.01, 0.1, 1.0, 3.0]
bias, scatter = {}, {}


def kl_estimates(log_ratio):
    """The estimators k1, k2 and k3 of every sample."""
    return log_ratio, log_ratio.square() / 2, (-log_ratio).exp() - 1 + log_ratio


for form, elements in (("sum", 1), ("mean", d)):
    for K in exact:
        estimates = kl_estimates((K + (2 * K) ** 0.5 * draws) / elements)
        bias[form, K] = [float(k.mean()) / (K / elements) for k in estimates]
        scatter[form, K] = [float(k.std()) / (K / elements) for k in estimates]
print(
    "estimate / closed form: mean ± std over samples         k1             k2             k3"
)
for (form, K), ratios in bias.items():
    cells = "  ".join(
        f"{m:5.3f} ± {s:5.2f}" for m, s in zip(ratios, scatter[form, K], strict=True)
    )
    print(f"{form + ' over elements,':<20} KL of the latent {K:4.2f}            {cells}")

# %% tags=["hide-input"]
figure, axes = panels(2, width=4.0, height=2.9)
for k, (name, shade) in enumerate((("k1", DATA), ("k2", NOISE), ("k3", ACCENT))):
    axes[0].loglog(
        exact, [scatter["sum", K][k] for K in exact], "o-", color=shade, markersize=4
    )
    axes[0].text(3.5, scatter["sum", 3.0][k], name, color=shade, va="center")
    axes[1].loglog(
        exact, [bias["mean", K][k] for K in exact], "o-", color=shade, markersize=4, label=name
    )
axes[0].set(
    xlabel="KL of the latent",
    ylabel="std / KL",
    title="With the sum: noise of one sample",
    xlim=(0.007, 7),
)
axes[1].set(
    xlabel="KL of the latent",
    ylabel="mean / KL",
    title="With the mean: k2 and k3 are far too small",
)
axes[1].legend(frameon=False, fontsize=8)
for cell in axes:
    clean(cell)
plt.show()

# %% [markdown]
# With the sum over elements and a KL of 0.01, $k_3$ has a tenth of the noise of $k_1$. At 1 this advantage is gone. At 3 the tail of $r$ makes $k_3$ five times as noisy as $k_1$, and $k_2$ is too large by a factor of 2.5.
#
# With the *mean* over elements $k_1$ is still right, but $k_2$ and $k_3$ are too small by a factor of 50 to 130. Both are quadratic in $\ell$ if $\ell$ is small, so they measure its variance. However, the mean of $\ell$ is divided by $d$, whereas its variance is divided by $d^2$.
# An implementation that applies $k_3$ to mean log-probabilities therefore has nearly no penalty.
#
# Flow policies need none of the three. Every step is a Gaussian, and its closed-form KL has no noise at a given state. The closed form also has the right gradient there.
# In contrast, the gradient of $k_1$ as a loss is zero on average, for the reason given in the lesson on GRPO: $\mathbb E[\nabla\log\pi] = 0$.
#
# ### From steps to trajectories
#
# The probability of a trajectory, given its noise $z_0$, is a product over its steps, $\pi(z_1, \ldots, z_T \mid z_0) = \prod_i \pi(z_{i+1} \mid z_i)$. The KL of the path is the expectation of its log-ratio, and follows from the KLs of its steps. The states $z_i$ are those that the *current* policy visits. The loss differentiates each summand at fixed states, although the states depend on the policy as well. Steps without noise contribute nothing. The KL between the distributions of finished images is at most the path KL, because an image is a function of its trajectory.
#
# ### Exercise 8 · path KL
#
# *Difficulty: medium · kind: formula · importance: useful · time: 5 minutes*
#
# `step_kl` `[sample, step]` is the KL per element of every stochastic step of trajectories of the current policy, as exercise 6 computes it. A latent has `elements` elements. Derive the KL of the path from them, and return it: one number, in nats (the unit that belongs to natural logarithms).


# %% tags=["exercise"]
def path_kl(step_kl, elements):
    """KL between the trajectories of two policies, from the KL per element of their steps."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** The logarithm of a product is a sum. Which expectation turns the log-ratio of a step into its KL? Then ask of each axis whether it is a sum or an expectation, and what "per element" divided by.


# %% tags=["solution"]
def path_kl(step_kl, elements):
    """KL between the trajectories of two policies, from the KL per element of their steps."""
    return float(elements * step_kl.sum(dim=1).mean())


# %%
lesson.check_path_kl(path_kl)

# %% [markdown] tags=["explanation"]
# **Why.** Given $z_i$, the expectation of the log-ratio of step $i$ is the KL of this step. So
#
# $$\mathrm{KL}(\text{path}) = \mathbb E_{\pi}\Big[\sum_i \mathrm{KL}\big(\pi(\cdot \mid z_i)\,\|\,\pi_\text{ref}(\cdot \mid z_i)\big)\Big].$$
#
# Sum over steps and elements, because log-probabilities of independent draws add up; mean over samples, because of the expectation. The metric `kl` of `flowrl` is the mean over all three, so the path KL is the metric times steps times elements.
#
# In the loss this scale cancels. The policy term and the KL term both have means over steps and elements in place of sums, so their ratio is that of the sums: a KL weight $\beta$ is the price of one nat of path KL, in units of the advantage (at $\rho = 1$).

# %%
paths = sample_groups(healthy.policy, judge, prompts[:8], members=12, sampler=sampler, seed=5)
nodes, schedule = paths.rollout.trajectories.nodes, paths.rollout.trajectories.schedule
everyone, decisions = paths.condition.repeat(12), range(2, 7)
step_kl, log_ratios, difference = [], [], 0.0
for i in decisions:
    x, index, t, s = (
        nodes[:, i],
        torch.full((96,), i),
        float(schedule.times[i]),
        float(schedule.times[i + 1]),
    )
    with torch.no_grad():
        v, v_base = (
            paths.rollout.trajectories.velocities[:, i],
            base.velocity(x, torch.full((96,), 1000 * t), everyone),
        )
    new, old = (sampler.transition(x, field, schedule, index) for field in (v, v_base))
    step_kl.append(kl_from_velocities(v.flatten(1), v_base.flatten(1), t, s, 0.7))
    difference = max(difference, float((step_kl[-1] - kl(new, old)).abs().max()))
    log_ratios.append(d * (log_prob(new, nodes[:, i + 1]) - log_prob(old, nodes[:, i + 1])))
step_kl, log_ratios = torch.stack(step_kl, dim=1), torch.stack(log_ratios, dim=1)
print(f"largest difference from flow.kl: {difference:.0e}")
print(
    "nats per step:",
    " ".join(
        f"step {i}: {value:.2f}"
        for i, value in zip(decisions, d * step_kl.mean(0), strict=True)
    ),
)
print(
    f"path KL, closed form: {path_kl(step_kl, d):.1f} nats (standard error"
    f" {float(d * step_kl.sum(1).std()) / 96**0.5:.1f})"
)
print(
    f"path KL, k1:          {log_ratios.sum(1).mean():.1f} nats (standard error"
    f" {float(log_ratios.sum(1).std()) / 96**0.5:.1f})"
)

# %% [markdown] tags=["expected"]
# largest difference from flow.kl: 0..1e-5
# nats per step: step 2: 0.10..2.00 step 3: 0.40..5.00 step 4: 0.40..5.00 step 5: 0.20..3.00 step 6: 0.20..3.00
# path KL, closed form: 3.0..11.0 nats (standard error 0.2..1.2)
# path KL, k1:          3.0..11.0 nats (standard error 0.2..1.4)

# %% [markdown]
# After eight iterations a trajectory of the trained policy differs from the base model's by a few nats. Both estimates agree within their errors. Here $k_1$ is about as precise as the closed form, since most of the scatter comes from the differences between trajectories.
#
# ## A deliberate collapse
#
# Three settings kept this run stable: a small learning rate, few mini-batches per iteration, and the clip, which removes a pair from the gradient when its ratio has moved too far. Let us see what happens without them: learning rate 0.01
# instead of 0.004, 16 mini-batches instead of 4, and a clip range so wide (0.9) that it has no effect.
#
# All three settings keep the policy close to the one that sampled the images, because the advantages are valid for *that* policy. If the policy has moved far away, they
# no longer point in a useful direction.
#
# We begin with the exact effect of the clip. The loss of a pair is $\max(-A\,\rho,\; -A\,\mathrm{clip}(\rho, 1-c, 1+c))$ with the ratio $\rho$.
#
# ### Exercise 9 · pairs with a gradient
#
# *Difficulty: medium · kind: code · importance: useful · time: 6 minutes*
#
# Given ratios, advantages (no zeros) and $c$, return which pairs have a non-zero gradient, as booleans. Before you run the check, decide whether these are all pairs within $1 \pm c$, and only those.


# %% tags=["exercise"]
def pushing(ratio, advantage, clip_range):
    """Which pairs still change the policy, [pair], bool."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** Sketch both terms of the maximum as functions of $\rho$ for $A > 0$. The gradient is zero where the clipped term, which is then constant, is the larger one. Repeat for $A < 0$.


# %% tags=["solution"]
def pushing(ratio, advantage, clip_range):
    """Which pairs still change the policy, [pair], bool."""
    too_far_up = (advantage > 0) & (ratio > 1 + clip_range)
    too_far_down = (advantage < 0) & (ratio < 1 - clip_range)
    return ~(too_far_up | too_far_down)


# %%
lesson.check_pushing(pushing)

# %% [markdown] tags=["explanation"]
# **Why.** The maximum is the *pessimistic* of two losses. A good pair ($A > 0$) whose ratio has grown beyond $1 + c$ has gradient 0. However, a good pair whose ratio *fell* below $1 - c$, because updates for other
# pairs moved it, keeps its full gradient, which corrects the error. The clip therefore acts on one side only: it prevents pairs from moving further, and it keeps the gradients that move them back.

# %% [markdown]
# **Try it.** The figure begins with 128 elements, as in this world. Which draws have no gradient with $A = 1$, and which with $A = -1$? Then widen the clip range until all draws have one.

# %% tags=["hide-input"]
from flowrl_course.figures import interactive

interactive("ratio", elements=128, change=0.01, clip=0.002)

# %% [markdown]
# The next cell runs the collapse, and two remedies with the same learning rate and number of mini-batches: a clip range of $2 \times 10^{-3}$ alone, or a penalty on the KL divergence from the base model alone. The table also has
# another KL, `approx_kl`: the divergence of the policy during the update from the one that sampled the iteration's images. It measures the change in one iteration.

# %%
unstable = settings.replace(iterations=5, minibatches=16, learning_rate=1e-2, clip_range=0.9)
runs = {
    "unstable": train(unstable),
    "+ clip 0.002": train(unstable.replace(clip_range=2e-3)),
    "+ KL penalty 1": train(unstable.replace(kl_weight=1.0)),
    "the run above": healthy,
}
print(
    f"{'held out, 96 samples':<22} {'soft':>6} {'strict':>7}   KL of the new policy from the"
    " old one, per iteration"
)
print(
    f"{'base model':<22} {held['before'][1]['soft']:6.2f} {held['before'][1]['strict']:7.2f}"
)
for name, run in runs.items():
    scores, moved = run.evaluation.scores, run.curve("approx_kl")
    print(
        f"{name:<22} {scores['soft']:6.2f} {scores['strict']:7.2f}   "
        + " ".join(f"{value:.4f}" for value in moved)
    )
print(
    "training reward of the unstable run:",
    " ".join(f"{value:.2f}" for value in runs["unstable"].curve("reward_mean")),
)

# %% [markdown] tags=["expected"]
# held out, 96 samples     soft  strict   KL of the new policy from the old one, per iteration
# base model               0.70    0.35
# unstable                 0.30..0.55    0.00..0.10   0.1500..0.1640 0.4000..0.5500 0.2000..1.2000 0.0000..1.2000 0.0000..1.2000
# + clip 0.002             0.78..0.90    0.45..0.75   0.0080 0.0075 0.0045..0.0060 0.0040..0.0090 0.0030..0.0140
# + KL penalty 1           0.68..0.82    0.25..0.50   0.0039 0.0048 0.0070..0.0090 0.0150..0.0350 0.0080..0.0250
# the run above            0.86..0.94    0.62..0.86   0.0009 0.0004 0.0002 0.0002 0.0001..0.0004 0.0001..0.0004 0.0001..0.0004 0.0001..0.0005
# training reward of the unstable run: 0.75 0.77 0.55..0.68 0.35..0.60 0.35..0.60

# %% tags=["hide-input"]
shades = {
    "unstable": ACCENT,
    "+ clip 0.002": OTHERS[0],
    "+ KL penalty 1": OTHERS[3],
    "the run above": COLOURS["flow-grpo"],
}
figure, axes = panels(3, width=3.4, height=2.9)
for cell, metric, label, title in zip(
    axes,
    ("reward_mean", "approx_kl", "group_std"),
    ("mean reward (soft)", "KL, new policy from old", "std of R in a group"),
    ("The reward shows the collapse last", "The KL shows it first", "Spread within a group"),
    strict=True,
):
    for name, run in runs.items():
        values = run.curve(metric)
        cell.plot(
            range(1, len(values) + 1),
            values,
            "o-",
            markersize=3,
            color=shades[name],
            label=name,
        )
    cell.set(xlabel="iteration", ylabel=label, title=title)
    clean(cell)
axes[1].set_yscale("log")
figure.legend(
    *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
)
plt.show()
rows = []
for name, run in runs.items():
    drawn = ode_images(run.policy, judge, shown, seed=4)
    rows.append(ImageRow(drawn.images[2:], drawn.rewards[2:], name))
show_images(*rows, heads=heldout[2:], size=1.1, title="The same noise after each run")
plt.show()

# %% [markdown]
# The unstable policy ends by painting every cell for every prompt, with a strict success near 0. The order of events matters. In iteration 2 the training reward was still *rising*, while the KL of the update was already
# about sixty times that of the run with a clip. So the reward is the last curve to show a collapse. Watch the change of the policy per iteration (`approx_kl`, `ratio_deviation`, `clip_fraction` in the metrics), and look at images.
#
# Both remedies prevent the collapse with all other settings unchanged, but they are not equally good here. The clip keeps most of the gain. The KL penalty of weight 1 keeps the policy close to the base model, so there is no
# collapse, but little gain. Papers use KL weights of 0.01 to 0.04 on SD3.5 against a different problem, slow drift and reward hacking over thousands of iterations.
#
# The best run is the stable one, with small steps from the beginning. All of these are single runs, and a run that collapses amplifies every rounding error, so your numbers for the first three runs may differ. The collapse is far beyond chance; the order of the two remedies may not be.
#
# In the right panel the spread of rewards within a group falls in the stable run, because its images succeed. It also falls in the unstable run, because all of its images fail alike. A falling `group_std` alone is therefore not a sign of a collapse.
#
# ## A run that does not learn
#
# A collapse is easy to see in the metrics. The opposite failure is quieter: the next cell trains with the stable settings, except that one of them is changed. Rewards differ within groups, and the policy changes even more than in the stable run, but the reward does not rise.

# %% tags=["hide-input"]
flat = train(settings.replace(iterations=5, window="7:9"))
for name, run in (("failed run", flat), ("the stable run", healthy)):
    print(name)
    for metric in ("reward_mean", "group_std", "clip_fraction", "approx_kl"):
        print(f"  {metric:<14}" + " ".join(f"{value:8.4f}" for value in run.curve(metric)[:5]))

# %% [markdown] tags=["expected"]
# failed run
#   reward_mean     0.7563 0.7200..0.8000 0.7200..0.8000 0.7200..0.8000 0.7000..0.8000
#   group_std       0.1910 0.1600..0.2200 0.1600..0.2200 0.1600..0.2200 0.1600..0.2200
#   clip_fraction   0.4000..0.6000 0.1500..0.6000 0.1500..0.6000 0.1000..0.6000 0.1000..0.6000
#   approx_kl       0.0060..0.0090 0.0005..0.0080 0.0003..0.0060 0.0001..0.0060 0.0001..0.0060
# the stable run
#   reward_mean     0.7400..0.7600 0.7700..0.8100 0.7800..0.8300 0.8300..0.8700 0.8500..0.9100
#   group_std       0.1200..0.2400 0.1000..0.2400 0.1000..0.2400 0.0600..0.2400 0.0400..0.2400
#   clip_fraction   0.0000..0.8000 0.0000..0.8000 0.0000..0.8000 0.0000..0.8000 0.0000..0.8000
#   approx_kl       0.0009 0.0004 0.0002 0.0001..0.0004 0.0001..0.0004

# %% [markdown]
# ### Exercise 10 · a run that does not learn
#
# *Difficulty: medium · kind: debugging · importance: useful · time: 5 minutes*
#
# Which setting was changed?
#
# - **a** groups of 2 members, so that most groups are silent
# - **b** a learning rate of 0, so that the policy never changes
# - **c** a window of late steps, whose noise has nearly no effect on the image
# - **d** a clip range of $10^{-9}$, so that all pairs lose their gradient

# %% tags=["exercise"]
changed_setting = "..."

# %% [markdown] tags=["hint"]
# **Hint.** Go through the four metrics in turn: do rewards differ within groups, does the policy change, and do enough pairs keep a gradient? What remains must break the connection between what is trained and the reward.

# %% tags=["solution"]
changed_setting = "c"

# %%
lesson.check_changed_setting(changed_setting)

# %% [markdown] tags=["explanation"]
# **Why.** The members start from different noise, so their rewards differ, and the advantages are not 0. However, these differences come from the initial noise and the early ODE steps. The trained decisions are steps 7 and 8 (window `7:9`), whose noise has nearly no effect on the image, as the figure of exercise 2 shows. So the gradient
# correlates rewards with noise that did not cause them, and its expectation is nearly 0. A useful test is to start the group from the same noise and look at `group_std`: here it would be near 0.

# %% [markdown]
# ## The paper's figures, reproduced
#
# The training above is short. The next cells show recorded runs with settings from a search of equal size for every rule: 15 seeds in the 2-D world, and at least 11 seeds with images (`docs/studies.md` has their commands).
#
# Numbers are differences of the mean held-out reward over training, unless a row says otherwise, with 95% intervals over paired seeds. Rows are from the 2-D world unless they say *images*. The published values belong to SD3.5 and other rewards, so only directions can be compared. *Better* and *worse* are differences from 0 that remain after a correction for several questions. *Slight* is an effect below what matters (5% of what can be gained), and *equal* means that larger effects are excluded; 5% are 0.04 in the 2-D world and 0.008 with images. *Undecided* is neither, or not significant after the correction for several questions, although a single interval may exclude 0. The other items of the paper, and what is still to be run, are in `docs/papers/coverage.md`; `docs/verdict.md` compares all methods in later runs with other settings, so its numbers differ.

# %% tags=["hide-input"]
recorded.table(
    (
        "10 - 40 steps, at equal evaluations",
        "as good, over 4 times faster",
        measured("train-short"),
        "better",
    ),
    ("  final reward", "the same", measured("train-short", 1), "worse"),
    (
        "different - same noise in a group",
        "better; curves not at hand",
        measured("different-noise"),
        "undecided",
    ),
    ("KL - none: density at equal reward", "better", measured("kl-quality"), "undecided"),
    ("  reward", "training takes longer", measured("binding-kl"), "equal"),
)

# %% tags=["hide-input"]
panels_of = {
    "10 or 40 steps": ("train-short", "forwards"),
    "Noise in a group": ("different-noise", "updates"),
    "KL": ("kl-quality", "updates"),
}
recorded.curves(panels_of)
recorded.dots(
    {
        "KL: reward": ("kl-frontier-uniform", "area"),
        "KL: density": ("kl-frontier-uniform", "quality"),
    }
)
recorded.dots(
    {
        "Groups of 12 and 6": ("scale-small-groups", "area"),
        "Groups of 12 and 24": ("scale-groups", "area"),
    }
)
recorded.search("uniform")

# %% [markdown]
# Training with 10 steps is much faster per evaluation, as published. Its final reward is lower here, because it makes twice as many updates in this comparison and some of its runs fall again: the settings come from a search with shorter runs. For the same reason the long runs without KL fall, which widens the intervals of the two rows on KL. With stepwise gains larger groups are better, whereas the intervals of uniform credit in groups of 6, 12 and 24 overlap. The last figure has one dot per run of the search for settings. Its upper edge matters, because the other settings of the runs differ, too. In the 2-D world the best runs of all three noise levels are close to each other. On images 0.98 is ahead, but a few runs decide this.
#
# ## Quiz
#
# *Kind: quiz · time: 5 minutes*
#
# 1. All decisions of a trajectory get the same advantage. Is the gradient of a single decision then wrong? **a** Yes, it is biased towards early decisions. **b** Yes, unless the trajectory has only one decision. **c** No, it is right on average, but noisy.
# 2. Every image of a prompt gets reward 1. Without a KL penalty, its group **a** contributes nothing, **b** makes all its images more likely, **c** makes the best of them more likely.
# 3. The window stays `2:7`, and the number of sampling steps grows from 10 to 20. Per trajectory, **a** the costs of sampling and update double, **b** the cost of sampling doubles, **c** the cost of the update doubles.
# 4. The metric `kl` is 0.002 with 5 decisions and 128 elements. The path KL in nats is **a** 0.002, **b** 0.01, **c** 1.28.
# 5. The training reward rises, and `approx_kl` is a hundred times its earlier value. What should you do? **a** Continue, since the reward rises. **b** Lower the learning rate or the clip range. **c** Enlarge the groups.

# %% tags=["exercise"]
quiz = {1: ..., 2: ..., 3: ..., 4: ..., 5: ...}

# %% [markdown] tags=["hint"]
# **Hint.** The answers are in the sections on one group, on group size, on ten steps, on the path KL, and on the collapse, in this order.

# %% tags=["solution"]
quiz = {1: "c", 2: "a", 3: "b", 4: "c", 5: "b"}

# %%
lesson.check_quiz(quiz)

# %% [markdown] tags=["explanation"]
# **Why.** 1: what the other decisions contribute to $R$ does not depend on this decision's noise, so it averages out. 2: $R$ equals the mean of the group, so all advantages are 0. 3: the update trains on the decisions only. 4: $0.002 \cdot 5 \cdot 128$. 5: the advantages belong to the policy that sampled; the reward falls only later.

# %% [markdown]
# ## Summary
#
# | symbol | meaning | in `flowrl` |
# |---|---|---|
# | $R$ | reward of a finished image | the last column of the value table, `score_rollout(...).values[..., -1]` |
# | $A = (R - \operatorname{mean} R)/(\operatorname{std} R + 10^{-4})$ | uniform credit | `credit.Uniform` |
# | $G$ | group size | `Groups(prompts, members)`, `--group-size` |
# | window | the steps that are decisions | `samplers.Windowed`, `--window 2:7` |
# | 10 and 40 | steps in training and in evaluation | `--num-steps`, `--eval-steps` |
# | $\|\mu - \mu_\text{ref}\|^2/(2\,\mathrm{std}^2)$, mean over elements | KL of one step | `flow.kl`, the metric `kl` |
# | $\mathbb E[\sum_i \mathrm{KL}_i]$ | path KL | metric `kl` times steps times elements |
# | $c$, $\beta$ | clip range, KL weight | `ClippedLoss(clip_range, kl_weight)`, `--clip-range`, `--kl-weight` |
#
# On the command line: `flowrl train --task preference --out runs/mine`.
#
# ## Symbols
#
# {symbols: $z_j$; step $i$; decision $k$; window; $p$, $m$, $G$; $R$; $A$; $\rho$; $c$; $\beta$}
#
# ## Further reading
#
# - Liu et al. 2025, *Flow-GRPO* (arXiv 2505.05470): the method of this lesson on SD3.5, with the denoising reduction and the effect of the KL weight.
# - Xue et al. 2025, *DanceGRPO* (arXiv 2505.07818): the same idea, found independently, for image and video models.
# - Li et al. 2025, *MixGRPO* (arXiv 2507.21802): a window of stochastic steps that slides over the trajectory.
# - Schulman 2020, *Approximating KL divergence* (joschu.net/blog/kl-approx.html): the estimators $k_1$, $k_2$, $k_3$.
# - Tang and Munos 2025, *On a few pitfalls in KL divergence gradient estimation for RL* (arXiv 2506.09477): why a good estimator of the KL may be a bad loss.
# - Fan et al. 2023, *DPOK* (arXiv 2305.16381): a KL penalty along the denoising path, as a bound for that of the images.
#
# **Next:** [6 · Stepwise-Flow-GRPO](06_stepwise_flow_grpo.ipynb) computes the credit of each step.

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
# # 0 · Tour
#
# **After this lesson you can** say what GRPO does to an image generator, what the credit question is, and how three papers answer it; and you have run all of it once.
#
# **Time** 15 minutes, of which the computer needs about one. **You need** no prior knowledge; the details come in the lessons that follow.
#
# `flowrl` ships a small text-to-image model that draws on a 4 x 4 lattice. It was trained on every word of its small language, but often draws the wrong number of objects, or puts them in the wrong place. Below are its images before any training,
# with the scores of a verifier that compares each image with its prompt.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import torch

from flowrl import preset, world
from flowrl.credit import StepwiseGain, TurningPoint, Uniform, turning_points
from flowrl.core.experience import Decisions
from flowrl.probes import Completion
from flowrl.rollout import Groups, rollout, score_rollout
from flowrl.samplers import FlowSDE, Windowed
from flowrl.training.build import make_trainer
from flowrl.worlds import PolicyOptions
from flowrl_course import lesson_00 as lesson
from flowrl_course.batches import ode_images
from flowrl_course.figures import ACCENT, COLOURS, ImageRow, clean, panels, pixels, show_images

shapes = world("shapes")
policy = shapes.policy(PolicyOptions())
verifier = shapes.reward("soft")
texts = ["three red circles", "blue square left of green triangle", "red circle and blue square", 'text "K72"']
prompts = [shapes.parse(text) for text in texts]
each_eight_times = [prompt for prompt in prompts for _ in range(8)]


def show(drawn, title):
    """A row of eight images for each prompt."""
    parts = zip(drawn.images.split(8), drawn.rewards.split(8), texts, strict=True)
    show_images(*(ImageRow(images, rewards, text) for images, rewards, text in parts), title=title)
    plt.show()


before = ode_images(policy, verifier, each_eight_times)
show(before, "before training; the number is the score, 1 is the maximum")

# %% [markdown]
# ## Weaknesses of the base model
#
# ### Exercise 1 · find a weakness
#
# *Difficulty: easy · importance: useful · time: 4 minutes*
#
# Write a prompt that the base model often gets wrong. The language has numbers (`two red circles`, up to `five`), pairs (`red circle and blue square`), relations (`red circle left of blue square`, `right of`, `above`, `below`) and texts (`text "K7"`). Colours are red, green, blue and yellow; shapes are circle, square and triangle. The
# check samples 16 images and passes if their mean score is below 0.75.

# %% tags=["exercise"]
my_prompt = "..."


# %% [markdown] tags=["hint"]
# **Hint.** Look at the captions of the images above: which kind of prompt has low scores?

# %% tags=["solution"]
my_prompt = "blue square left of green triangle"

# %%
lesson.check_weakness(my_prompt)

# %% [markdown] tags=["explanation"]
# **Why.** With relations the model draws the right objects but often in the wrong order; large numbers and texts fail often too. Many captions in its training data were inaccurate, as captions from the web are.

# %% [markdown]
# ## What GRPO does
#
# Sample a *group* of images for one prompt, its *members*, with different random numbers. Score them. A small update makes the better images more likely and the worse images less likely. Repeat with other prompts. The score may be any function of
# an image; no example of a good image is needed.
#
# One group, sorted by score:

# %%
prompt = shapes.parse("blue square left of green triangle")
schedule = policy.schedule(10)
groups = Groups(prompts=1, members=12)
noise = groups.noise(policy.latent_shape, torch.Generator().manual_seed(11))
sampler = Windowed(FlowSDE(0.7), range(2, 7))  # steps 2 to 6 are random, the others follow the ODE
result = rollout(
    policy, sampler, schedule, policy.encode([prompt]), noise, torch.Generator().manual_seed(12), groups, Completion()
)
path, scores = result.trajectories, score_rollout(policy, verifier, result, [prompt])
table = scores.total  # [prompt, member, decision+1]: 1 prompt, 12 members, 5 decisions and the finished image
decisions = Decisions.of(path.schedule, path.stds, path.tree, scores.valid)
order = table[0, :, -1].argsort(descending=True)
images = policy.decode(path.images_latent)
show_images(ImageRow(images[order], table[0, order, -1]), title=prompt.text)
plt.show()

# %% [markdown]
# ## The question of credit
#
# An image is made in ten steps and gets one score. Which step caused it? Only a random step can have been made differently. We call the random steps **decisions**: here steps 2 to 6, the decisions 0 to 4. An ODE step has only one possible result and is not a decision.
#
# From the state before each decision, the ODE to the end gives an estimate of the finished image. Below are these estimates for the best member of the group (upper row) and the worst (lower row), then their finished images, and under them the scores.

# %% tags=["hide-input"]
heads = [*(f"before decision {k}\n(step {step})" for k, step in enumerate(decisions.step)), "finished\nimage"]
figure, axes = plt.subplots(4, 6, figsize=(9, 7.4), layout="constrained", height_ratios=[1, 1, 0.1, 1.8])
for row, member in enumerate((int(order[0]), int(order[-1]))):
    latents = [result.estimates[int(step)][member] for step in decisions.step]
    for column, image in enumerate(policy.decode(torch.stack([*latents, path.images_latent[member]]))):
        axes[row, column].imshow(pixels(image), interpolation="nearest")
        axes[row, column].set_title(heads[column] if row == 0 else "", fontsize=8)
        axes[row, column].axis("off")
    axes[row, 0].text(-0.1, 0.5, ("best", "worst")[row], ha="right", va="center", transform=axes[row, 0].transAxes)
for cell in axes[2:].flat:
    cell.remove()
lower = figure.add_subplot(figure.axes[0].get_gridspec()[3, :])
for name, member, shade in (("best", int(order[0]), COLOURS["flow-grpo"]), ("worst", int(order[-1]), ACCENT)):
    lower.plot(range(6), table[0, member], "o-", color=shade, markersize=4)
    lower.text(5.1, float(table[0, member, -1]), name, color=shade, va="center")
print("worst:", " ".join(f"{r:.2f}" for r in table[0, int(order[-1])].tolist()))
lower.set(ylabel="score of the estimate", xlim=(-0.4, 5.5))
lower.set_xticks(range(6), [f"before {k}" for k in range(5)] + ["finished"])
clean(lower)
plt.show()

# %% [markdown]
# Consider the worst member. Its first estimate has the square on the *right*, decision 0 (step 2) corrects this, decision 1 moves the triangle without a loss, and decision 2 turns the triangle red. One score for the finished image contains none of this.
#
# ### Exercise 2 · the decision that mattered
#
# *Difficulty: easy · importance: essential · time: 4 minutes*
#
# `table[0, member]` holds one score more than there are decisions $k = 0, \dots, D - 1$: column $k$ is the score of the estimate before decision $k$, the last column that of the finished image. So decision $k$ leads from column $k$ to column $k + 1$. Write a function that returns the number of the decision at which the score rose most.


# %% tags=["exercise"]
def best_decision(values):
    """The decision with the largest gain; values is [decision+1]."""
    return ...


# %% [markdown] tags=["hint"]
# **Hint.** `values.diff()` has the differences between neighbouring columns, one per decision. Which index has the largest of them?


# %% tags=["solution"]
def best_decision(values):
    """The decision with the largest gain; values is [decision+1]."""
    return int(values.diff().argmax())


# %%
lesson.check_best_decision(best_decision)

# %% [markdown] tags=["explanation"]
# **Why.** The gain of decision $k$ is $R_{k+1} - R_k$; there is one decision fewer than columns. `values.argmax()` is the column with the highest score, which is usually near the end. (The ODE steps after the last decision belong to its gain.)

# %% [markdown]
# ## Three answers
#
# | rule | credit of a decision | paper |
# |---|---|---|
# | **Flow-GRPO** | the same for all decisions: how much better the finished image is than the group's mean | arXiv 2505.05470 |
# | **Stepwise-Flow-GRPO** | the gain of this decision | arXiv 2603.28718 |
# | **TP-GRPO** | the gain; at *turning points*, where a trajectory turns towards its final trend, the whole change from there to the end | arXiv 2602.06422 |
#
# Below are the advantages of the three rules for the same group (blue: make more likely, red: less likely). Rows are the members, the best on top.

# %%
rules = {"flow-grpo": Uniform(), "stepwise-flow-grpo": StepwiseGain(probe=Completion()), "tp-grpo": TurningPoint()}
figure, axes = panels(3, width=4.0, height=3.2)
for cell, (name, rule) in zip(axes, rules.items(), strict=True):
    advantages = rule.assign(table, decisions)[0, order]  # [member, decision], the best member first
    shown = cell.imshow(advantages, cmap="RdBu", vmin=-3, vmax=3, aspect="auto")
    cell.set_title(name, color=COLOURS[name])
    cell.set(xlabel="decision", xticks=range(5), yticks=[0, 11], yticklabels=["best", "worst"])
    for member, decision in turning_points(table)[0, order].nonzero().tolist() if name == "tp-grpo" else []:
        cell.scatter(decision, member, marker="o", facecolor="none", edgecolor="black", s=40)
    print(f"{name:20} worst member, decisions 0 to 4: " + " ".join(f"{a:+.1f}" for a in advantages[-1].tolist()))
figure.colorbar(shown, ax=axes, label="advantage", extend="both")
plt.show()

# %% [markdown]
# Flow-GRPO makes every decision of the worst member less likely, the good one included. The other two rules give decision 0 a positive and decision 2 a negative advantage. TP-GRPO's advantage of decision 1 is negative too: it is a turning point (circles mark turning points) after which the score
# only falls, so its credit is the whole fall. The ODE steps have no credit and no part in the update.
#
# ### Exercise 3 · rules with a negative credit
#
# *Difficulty: easy · importance: essential · time: 3 minutes*
#
# A trajectory ends well above its group's mean, but its third decision lowered the score of its estimate while the third decisions of the other members raised theirs. Which rules make that decision *less* likely? Answer with a set of names
# from `"flow-grpo"`, `"stepwise-flow-grpo"` and `"tp-grpo"`.

# %% tags=["exercise"]
blaming = {...}


# %% [markdown] tags=["hint"]
# **Hint.** For each rule decide which numbers it uses: the final reward only, or the change by the decision. Is a falling decision of a trajectory that ends well a turn towards its trend?

# %% tags=["solution"]
blaming = {"stepwise-flow-grpo", "tp-grpo"}

# %%
lesson.check_blame(blaming)

# %% [markdown] tags=["explanation"]
# **Why.** Flow-GRPO gives every decision of a good trajectory a positive advantage, the bad ones included. Over many samples these errors average out. The step-wise rules use the decision's own change. (A falling decision of a rising trajectory is not a turning point, so its credit under TP-GRPO is its gain
# too.)

# %% [markdown]
# ## Does it matter?
#
# First in a world of two dimensions, where a run takes two seconds: the same model, sample counts and settings for all three rules, and one seed. (The lesson Side by side measures how much results vary between seeds.)

# %%
base = preset("default").apply(world="mixture", iterations=30, window=":-1", learning_rate=3e-3, clip_range=2e-2, seed=1)
curves = {}
for name in rules:
    trainer = make_trainer(base.replace(method=name))
    curves[name] = [trainer.iteration()["reward_mean"] for _ in range(base.iterations)]
    print(
        f"{name:20} training reward {curves[name][0]:.2f} at first, {curves[name][9]:.2f} at iteration 10, {curves[name][-1]:.2f} at iteration 30"
    )

# %% [markdown] tags=["expected"]
# flow-grpo            training reward 0.21 at first, 0.28..0.33 at iteration 10, 0.83..0.93 at iteration 30
# stepwise-flow-grpo   training reward 0.21 at first, 0.55..0.67 at iteration 10, 0.96..1.00 at iteration 30
# tp-grpo              training reward 0.21 at first, 0.43..0.55 at iteration 10, 0.95..1.00 at iteration 30

# %% tags=["hide-input"]
figure, axes = panels(width=5.6, height=3.2)
for name, curve in curves.items():
    axes.plot(range(1, 31), curve, color=COLOURS[name], label=name)
axes.set(xlabel="iteration", ylabel="mean training reward", title="two dimensions, one seed", ylim=(0, 1))
axes.legend(frameon=False)
clean(axes)
plt.show()

# %% [markdown]
# Then with images: ten iterations of Flow-GRPO on compositional prompts (about half a minute). The images after training start from the same noise as those before.

# %%
trainer = make_trainer(preset("default").apply(iterations=10))
for iteration in range(10):
    metrics = trainer.iteration()
    if iteration % 3 == 0:
        print(f"iteration {metrics['iteration']:2d}: mean training score {metrics['reward_mean']:.3f}")
with trainer.averaged():
    after = ode_images(trainer.policy, verifier, each_eight_times)
print(
    f"mean score of the three compositional prompts above: {before.rewards[:24].mean():.2f} before, {after.rewards[:24].mean():.2f} after"
)

# %% [markdown] tags=["expected"]
# iteration  1: mean training score 0.706
# iteration  4: mean training score 0.755
# iteration  7: mean training score 0.77..0.81
# iteration 10: mean training score 0.80..0.87
# mean score of the three compositional prompts above: 0.76 before, 0.82..0.95 after

# %% tags=["hide-input"]
show(after, "after 10 iterations, same noise")

# %% [markdown]
# `flowrl compare` trains with all three rules and several seeds, and writes a report. After a minute of training on images the rules do not differ measurably; the README shows longer runs.
#
# ## To keep
#
# | word | meaning | in `flowrl` |
# |---|---|---|
# | group | samples of one prompt | `Groups` |
# | decision | a random step; ODE steps are not decisions | `Decisions` |
# | value table | scores before every decision, and of the finished image, [prompt, member, decision+1] | `rollout.score_rollout` |
# | credit rule | value table to advantages [prompt, member, decision] | `credit.Uniform`, `StepwiseGain`, `TurningPoint` |
# | settings | everything that a run depends on | `RunConfig`, `preset` |
# | trainer | rollout, rewards, credit, update | `Trainer`, `training.build.make_trainer` |
#
# ## Further reading
#
# - Liu et al. 2025, *Flow-GRPO* (arXiv 2505.05470): the method that this course builds on.
# - Black et al. 2023, *DDPO* (arXiv 2305.13301), and Fan et al. 2023, *DPOK* (arXiv 2305.16381): the first policy gradients for diffusion models.
# - Wallace et al. 2023, *Diffusion-DPO* (arXiv 2311.12908): learning from pairs of images instead of a score.
#
# **Next:** [1 · Flow matching from scratch](01_flow_matching.ipynb).

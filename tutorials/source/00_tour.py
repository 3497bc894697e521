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
# **Time** 15 minutes, of which the computer needs one or two. **You need** nothing but curiosity; the details come in lessons 1 to 9.
#
# `flowrl` ships a small text-to-image model that draws on a 4 x 4 lattice. It knows every word of its little language, but it is careless: it often draws the wrong number of things, or puts them in the wrong place. Here is what it draws before we do anything,
# with the score of a verifier that knows what was asked for.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import torch

from flowrl import RunConfig, Trainer, world
from flowrl.worlds.base import PolicyOptions
from flowrl_course import lesson_00 as lesson
from flowrl_course.figures import ACCENT, COLOURS, NOISE, clean, panels, show_pictures
from flowrl.credit import StepwiseGain, TurningPoint, Uniform, turning_points
from flowrl.rollout import Groups, Usage, integrate, reward_table, rollout, score
from flowrl.samplers import FlowSDE, Window
from flowrl.types import Completion

shapes = world("shapes")
policy = shapes.policy(PolicyOptions())
verifier = shapes.reward("soft")
texts = ["three red circles", "blue square left of green triangle", "red circle and blue square", 'text "K72"']
prompts = [shapes.parse(text) for text in texts]


def draw(policy, prompts, count, steps=20, seed=0):
    """`count` pictures per prompt from the same noise every time, and their scores."""
    everyone = [prompt for prompt in prompts for _ in range(count)]
    noise = torch.randn(len(everyone), *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    images = policy.decode(integrate(policy, policy.schedule(steps), policy.encode(everyone), noise, Usage()))
    return images, score(verifier, images, everyone)


def rows(images, scores, title=""):
    """One row of pictures per prompt, the prompt above it."""
    return show_pictures(images, [f"{s:.2f}" for s in scores.tolist()], columns=8, title=title, labels=texts)


before, before_scores = draw(policy, prompts, 8)
rows(before, before_scores, "before training; the number is the score, 1 is perfect")
plt.show()

# %% [markdown]
# ## What it cannot do
#
# ### Exercise 1 · find its weakness *(easy, 4 minutes)*
#
# Write a prompt that the base model often gets wrong. The language has numbers (`two red circles`, up to `five`), pairs (`red circle and blue square`), relations (`red circle left of blue square`, `right of`, `above`, `below`) and texts (`text "K7"`); colours are red, green, blue and yellow, shapes circle, square and triangle. The
# check draws 16 pictures and wants a mean score below 0.75.

# %% tags=["exercise"]
my_prompt = "..."

# %% tags=["solution"]
my_prompt = "blue square left of green triangle"

# %%
lesson.check_weakness(my_prompt)

# %% [markdown] tags=["explanation"]
# **Why.** With relations it draws the right things but often in the wrong order; large numbers and texts fail often too. It has seen careless captions in training, as models from the web have.

# %% [markdown]
# ## What GRPO does
#
# Sample a *group* of pictures for one prompt, its *members*, from different randomness. Score them. Make the better ones likelier and the worse ones less likely, by a small update. Repeat with other prompts. That is all; the score may be anything that can
# be computed for a picture, and the network is never told how to draw.
#
# One group, sorted by score:

# %%
prompt = shapes.parse("blue square left of green triangle")
schedule = policy.schedule(10)
groups = Groups(prompts=1, members=12)
noise = groups.noise(policy.latent_shape, torch.Generator().manual_seed(11))
sampler = Window(FlowSDE(0.7), start=2, size=5)  # steps 2 to 6 are random, the others follow the ODE
result = rollout(
    policy, sampler, schedule, policy.encode([prompt]), noise, torch.Generator().manual_seed(12), groups, Completion()
)
table = reward_table(policy, verifier, result, [prompt])  # [prompt, member, node]
order = table[0, :, -1].argsort(descending=True)
pictures = policy.decode(result.trajectories.nodes[:, -1])
show_pictures(pictures[order], [f"{s:.2f}" for s in table[0, order, -1].tolist()], columns=12, title=prompt.text)
plt.show()

# %% [markdown]
# ## The question of credit
#
# A picture is made in ten steps, and gets one score. Which step earned it? At any moment the model has a guess of the finished picture. Follow the best and the worst of this group: above, what each would become if no more randomness came (upper row: the best, lower row: the worst); below, the score of that.

# %% tags=["hide-input"]
figure, axes = plt.subplots(4, 11, figsize=(12.5, 6.2), layout="constrained", height_ratios=[1, 1, 0.1, 2.2])
for row, member in enumerate((int(order[0]), int(order[-1]))):
    for node in range(11):
        estimate = result.estimates[node][member : member + 1]
        axes[row, node].imshow(policy.decode(estimate)[0].permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
        axes[row, node].set_title(f"node {node}" if row == 0 else "", fontsize=8)
        axes[row, node].axis("off")
    axes[row, 0].text(-0.1, 0.5, ("best", "worst")[row], ha="right", va="center", transform=axes[row, 0].transAxes)
for cell in axes[2:].flat:
    cell.remove()
lower = figure.add_subplot(figure.axes[0].get_gridspec()[3, :])
for name, member, shade in (("best", int(order[0]), COLOURS["flow-grpo"]), ("worst", int(order[-1]), ACCENT)):
    lower.plot(range(11), table[0, member], "o-", color=shade, markersize=4)
    lower.text(10.15, float(table[0, member, -1]), name, color=shade, va="center")
lower.axvspan(2, 7, color=NOISE, alpha=0.08)
lower.text(4.5, 0.02, "random steps", ha="center", fontsize=8, color=NOISE, transform=lower.get_xaxis_transform())
print("worst:", " ".join(f"{r:.2f}" for r in table[0, int(order[-1])].tolist()))
lower.set(xlabel="node (0 = noise, 10 = picture)", ylabel="score of the guess", xlim=(-0.4, 10.9), xticks=range(11))
clean(lower)
plt.show()

# %% [markdown]
# Look at the worst one: it was on the wrong way at first (the square to the *right*), step 2 put that right, step 3 moved the triangle without harm, and step 4 turned it red. One score for the whole picture cannot say that.
#
# ### Exercise 2 · the step that mattered *(easy, 4 minutes)*
#
# `table[0, member]` holds the scores of the guesses at nodes 0 to 10. Step $i$ leads from node $i$ to node $i+1$. Write a function that returns the number of the step at which the score rose most.


# %% tags=["exercise"]
def best_step(rewards):
    """The step with the largest gain; rewards is [node]."""
    return ...


# %% tags=["solution"]
def best_step(rewards):
    """The step with the largest gain; rewards is [node]."""
    return int(rewards.diff().argmax())


# %%
lesson.check_best_step(best_step)

# %% [markdown] tags=["explanation"]
# **Why.** The gain of step $i$ is $R_{i+1} - R_i$; there is one step fewer than nodes. The highest score is usually at the end, so `rewards.argmax()` answers another question.

# %% [markdown]
# ## Three answers
#
# | rule | pays each step | paper |
# |---|---|---|
# | **Flow-GRPO** | the same: how much better the finished picture is than the group's mean | arXiv 2505.05470 |
# | **Stepwise-Flow-GRPO** | the gain that this step brought | arXiv 2603.28718 |
# | **TP-GRPO** | the gain; but at *turning points*, where a trajectory turns towards its final trend, everything that followed | arXiv 2602.06422 |
#
# The same group, three tables of advantages (blue: make likelier, red: less likely). Rows are the members, best on top.

# %%
rules = {"flow-grpo": Uniform(), "stepwise-flow-grpo": StepwiseGain(probe=Completion()), "tp-grpo": TurningPoint()}
figure, axes = panels(3, width=4.0, height=3.2)
for cell, (name, rule) in zip(axes, rules.items(), strict=True):
    advantages = rule.assign(table, result.trajectories.schedule)[0, order]
    picture = cell.imshow(advantages, cmap="RdBu", vmin=-3, vmax=3, aspect="auto")
    cell.set_title(name, color=COLOURS[name])
    cell.set(xlabel="step", xticks=range(10), yticks=[0, 11], yticklabels=["best", "worst"])
    for member, step in turning_points(table)[0, order].nonzero().tolist() if name == "tp-grpo" else []:
        cell.scatter(step, member, marker="o", facecolor="none", edgecolor="black", s=40)
    print(f"{name:20} worst picture, steps 0 to 9: " + " ".join(f"{a:+.1f}" for a in advantages[-1].tolist()))
figure.colorbar(picture, ax=axes, label="advantage", extend="both")
plt.show()

# %% [markdown]
# Flow-GRPO makes every step of the worst picture less likely, the good one too. The other two praise step 2 and blame step 4. TP-GRPO also blames step 3: it is a turning point (circles mark them), from which the score
# only falls, so it is paid the whole fall. Only steps 2 to 6 are random here; steps without randomness are decided by what came before, bring no gain, and are left out of the update anyway.
#
# ### Exercise 3 · who is blamed? *(easy, 3 minutes)*
#
# A trajectory ends well above its group's mean, but its third step lowered the guess's score while the third steps of the other members raised theirs. Which rules make that step *less* likely? Answer with a set of names
# from `"flow-grpo"`, `"stepwise-flow-grpo"` and `"tp-grpo"`.

# %% tags=["exercise"]
blaming = {...}

# %% tags=["solution"]
blaming = {"stepwise-flow-grpo", "tp-grpo"}

# %%
lesson.check_blame(blaming)

# %% [markdown] tags=["explanation"]
# **Why.** Flow-GRPO pays every step of a good trajectory, also the bad ones; over many samples these errors average out, but that takes samples. The step-wise rules see the loss. (A falling step of a rising trajectory is no turning point, so TP-GRPO pays its gain
# too.)

# %% [markdown]
# ## Does it matter?
#
# First in a world of two dimensions, where a run takes two seconds: the same model, samples and settings for all three rules, one seed. (Lesson 7 says how much one seed is worth.)

# %%
mixture = world("mixture")
base = RunConfig.of(
    world="mixture", task="direction", iterations=30, window="all-but-last", learning_rate=3e-3, clip_range=2e-2, seed=1
)
curves, final = {}, {}
for name in rules:
    config = base if name == "flow-grpo" else RunConfig.of(**{**vars(base), "method": name})
    trainer = Trainer(
        mixture.policy(policy_options(config)),
        make_method(config),
        mixture.reward("soft"),
        mixture.prompts("direction", "train"),
        config,
    )
    curves[name] = [trainer.iteration()["reward_mean"] for _ in range(config.iterations)]
    print(
        f"{name:20} training reward {curves[name][0]:.2f} at first, {curves[name][9]:.2f} at iteration 10, {curves[name][-1]:.2f} at iteration 30"
    )

# %% tags=["hide-input"]
figure, axes = panels(width=5.6, height=3.2)
for name, curve in curves.items():
    axes.plot(range(1, 31), curve, color=COLOURS[name], label=name)
axes.set(xlabel="iteration", ylabel="mean training reward", title="two dimensions, one seed", ylim=(0, 1))
axes.legend(frameon=False)
clean(axes)
plt.show()

# %% [markdown]
# And with pictures: ten iterations of Flow-GRPO on compositional prompts (about half a minute), then the same noise again.

# %%
config = RunConfig.of(iterations=10, seed=0)
trainer = Trainer(policy, make_method(config), verifier, shapes.prompts("compositional", "train"), config)
for iteration in range(10):
    row = trainer.iteration()
    if iteration % 3 == 0:
        print(f"iteration {row['iteration']:2d}: mean training score {row['reward_mean']:.3f}")
with trainer.averaged():
    after, after_scores = draw(policy, prompts, 8)
print(
    f"mean score of the three compositional prompts above: {before_scores[:24].mean():.2f} before, {after_scores[:24].mean():.2f} after"
)

# %% tags=["hide-input"]
rows(after, after_scores, "after 10 iterations, same noise")
plt.show()

# %% [markdown]
# `flowrl compare` does this for all three rules with several seeds and makes a report. In a minute of training the rules cannot be told apart on pictures; the README shows where they can.
#
# ## To keep
#
# | word | meaning | in `flowrl` |
# |---|---|---|
# | group | samples of one prompt | `Groups` |
# | reward table | score of the guess at every node, [prompt, member, node] | `rollout.reward_table` |
# | credit rule | reward table to advantages [prompt, member, step] | `credit.Uniform`, `StepwiseGain`, `TurningPoint` |
# | trainer | rollout, rewards, credit, update | `Trainer` |
#
# **Next:** [1 · Flow matching from scratch](01_flow_matching.ipynb).

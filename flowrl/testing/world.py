"""The promises of a world."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.protocols import FlowPolicy, PolicyOptions, RewardModel, World
from flowrl.core.types import Prompt
from flowrl.parts.registry import check_part
from flowrl.testing import policy, rewards
from flowrl.testing.contract import (
    INAPPLICABLE,
    Contract,
    ContractBroken,
    expect,
    maker,
    same,
    twice,
)

PARTS = ("train", "heldout")
FEW = 4
"""Prompts of a task that policies and rewards are tried on."""


@dataclass(frozen=True)
class Case:
    """A world."""

    world: World

    def policy(self) -> FlowPolicy:
        """A new policy."""
        return self.world.policy(PolicyOptions())

    def few(self, task: str) -> list[Prompt]:
        """The first different prompts of a task."""
        prompts = [prompt for part in PARTS for prompt in self.world.prompts(task, part)]
        return list({prompt.text: prompt for prompt in prompts}.values())[:FEW]

    def samples(self, task: str) -> tuple[torch.Tensor, list[Prompt]]:
        """What the policy decodes from noise, two samples for each of a few prompts."""
        model, prompts = self.policy(), [prompt for prompt in self.few(task) for _ in range(2)]
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((len(prompts), *model.latent_shape), generator=generator)
        return model.decode(noise.to(model.device)), prompts


def has_all_members(case: Case) -> None:
    """It has a name, tasks, forms, the number of elements, and all methods."""
    try:
        check_part("world", case.world)
    except ConfigError as error:
        raise ContractBroken(str(error)) from None
    world: Any = case.world
    expect(isinstance(world.name, str) and world.name, f"name is {world.name!r}, not a text")
    for member in ("tasks", "forms"):
        names = getattr(world, member)
        fits = isinstance(names, tuple | list) and names and len(set(names)) == len(names)
        fits = fits and all(isinstance(name, str) and name for name in names)
        hint = "one name in brackets needs a comma, as in ('direction',)"
        expect(fits, f"{member} is {names!r}, no tuple of different names: {hint}")
    elements = world.elements
    expect(type(elements) is int and elements >= 0, f"elements is {elements!r}, not a count")
    for member in ("defaults", "qualities"):
        value = getattr(world, member, {})
        kind = type(value).__name__
        expect(isinstance(value, Mapping), f"{member} is a {kind}, not a mapping by name")


def gives_prompts(case: Case) -> str | None:
    """Every task has prompts to train on and held-out ones, the same every time."""
    shared = 0
    for task in case.world.tasks:
        texts = dict[str, list[str]]()
        for part in PARTS:
            call = f"prompts({task!r}, {part!r})"
            first, second = twice(lambda task=task, part=part: list(case.world.prompts(task, part)))
            fits = first and all(isinstance(prompt, Prompt) for prompt in first)
            expect(fits, f"{call} has {first[:1]}, not one or more flowrl.Prompt")
            texts[part] = [prompt.text for prompt in first]
            hint = "Shuffle with a generator of its own and a fixed seed."
            again = [prompt.text for prompt in second]
            expect(texts[part] == again, f"a second call of {call} gives another order. {hint}")
        shared += len(set(texts["train"]) & set(texts["heldout"]))
    advice = f"{shared} held-out prompts are trained on: evaluations do not measure generalisation"
    return advice if shared else None


def makes_a_policy(case: Case) -> None:
    """policy gives a policy on the asked device, whose latents have `elements` numbers."""
    model = case.policy()
    kind = type(model).__name__
    expect(isinstance(model, FlowPolicy), f"policy(options) is a {kind}, which lacks members")
    expect(model.device.type == "cpu", f"with options.device 'cpu' it is on {model.device}")
    count, elements = math.prod(model.latent_shape), case.world.elements
    shape = tuple(model.latent_shape)
    what = f"elements is {elements}, but a latent of shape {shape} has {count} numbers"
    expect(elements in (0, count), what)


def makes_equal_policies(case: Case) -> None:
    """Two policies of the same options are equal, to the last bit, and share nothing that is
    trained.
    """
    first, second = (dict(model.trainable()) for model in twice(case.policy))
    expect(list(first) == list(second), "trainable() names other parameters in a second policy")
    for name, parameter in first.items():
        shared = parameter.data_ptr() == second[name].data_ptr()
        expect(not shared, f"a second policy has the same {name}: make networks within policy()")
        hint = "Draw initial values with options.seed."
        same(second[name], parameter, f"in a second policy, {name}", hint)


def parses_its_prompts(case: Case) -> None:
    """parse gives a prompt with the same words, which the rewards score like the prompt of the
    task.
    """
    for task in case.world.tasks:
        images, prompts = case.samples(task)
        parsed = [case.world.parse(prompt.text) for prompt in prompts]
        for prompt, again in zip(prompts, parsed, strict=True):
            kept = isinstance(again, Prompt) and again.text == prompt.text
            expect(kept, f"parse({prompt.text!r}) gave {again!r}")
        for form in case.world.forms:
            model = case.world.reward(form)
            hint = "If the reward reads metadata of prompts(...), parse must fill it, too."
            what = f"by the form {form!r} with parsed prompts, the score"
            same(model.score(images, parsed), model.score(images, prompts), what, hint, 1e-4)


def policy_keeps_its_promises(case: Case) -> str | None:
    """Its policy keeps the promises of a policy (check_policy)."""
    advice = []
    for task in case.world.tasks:
        prompts = case.few(task)
        if len(prompts) > 1:
            advice += kept(policy.contract(case.policy(), prompts), f"on the prompts of {task!r}")
    points = getattr(case.world, "points", False)
    return next((text for text in advice if not (points and "[0, 1]" in text)), None)


def rewards_keep_their_promises(case: Case) -> str | None:
    """Every form's reward keeps the promises of a reward on the policy's samples (check_reward)."""
    advice = [
        text
        for form in case.world.forms
        for task in case.world.tasks
        for text in reward_kept(case, f"reward({form!r})", case.world.reward(form), task)
    ]
    return next(iter(advice), None)


def qualities_keep_their_promises(case: Case) -> str | None:
    """Every quality's reward keeps the promises of a reward on the samples of the tasks that it
    does not refuse (check_reward).
    """
    made, advice = getattr(case.world, "qualities", {}), []
    for name, make in made.items():
        refusals = {}
        for task in case.world.tasks:
            try:
                make().score(*case.samples(task))
            except RewardError as error:
                refusals[task] = str(error)
            else:
                advice += reward_kept(case, f"qualities[{name!r}]()", make(), task)
        every = len(refusals) == len(case.world.tasks)
        expect(not every, f"qualities[{name!r}]() refuses the samples of every task: {refusals}")
    return next(iter(advice), None) if made else INAPPLICABLE


def reward_kept(case: Case, call: str, model: RewardModel, task: str) -> list[str]:
    contract = rewards.reward_model(model, case.samples(task))
    return kept(contract, f"{call} on the prompts of {task!r}")


def kept(contract: Contract, where: str) -> list[str]:
    """The advice of a contract that is kept. Raises `ContractBroken` for a broken promise."""
    findings = contract.findings()
    broken = next((finding.message for finding in findings if finding.mark == "BROKEN"), "")
    expect(not broken, f"{where}: {broken}")
    return [f"{where}: {finding.message}" for finding in findings if finding.mark == "advice"]


BASIC = (has_all_members, gives_prompts, makes_a_policy, makes_equal_policies)
OTHERS = (
    parses_its_prompts,
    policy_keeps_its_promises,
    rewards_keep_their_promises,
    qualities_keep_their_promises,
)


def contract(part: Any, without: Sequence[str] = ()) -> Contract:
    """The contract of a world (`World`), with its policy and its rewards.

    Args:
        part: the world: an object (not copied), a class, or a function that makes it.
        without: names of promises that the part breaks on purpose.
    """
    return Contract("world", BASIC, OTHERS, maker(part, share=True), Case, without)

"""The promises of a world."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.protocols import FlowPolicy, PolicyOptions, RewardModel, World
from flowrl.core.types import Prompt
from flowrl.parts.registry import check_part
from flowrl.testing import policy, reward
from flowrl.testing.findings import (
    INAPPLICABLE,
    Contract,
    ContractBroken,
    Findings,
    expect,
    name_of,
    twice,
)

CONTRACT = Contract("world")
promise = CONTRACT.promise
PARTS = ("train", "heldout")
FEW = 4
"""Prompts of a task that policies and rewards are tried on."""


@dataclass(frozen=True)
class Case:
    """A world, and the options of its policies."""

    world: World
    options: PolicyOptions = PolicyOptions()

    def __repr__(self) -> str:
        return name_of(self.world)

    def policy(self) -> FlowPolicy:
        """A new policy."""
        return self.world.policy(self.options)

    def few(self, task: str) -> list[Prompt]:
        """The first different prompts of a task."""
        different = {
            prompt.text: prompt for part in PARTS for prompt in self.world.prompts(task, part)
        }
        return list(different.values())[:FEW]

    def samples(self, task: str) -> tuple[torch.Tensor, list[Prompt]]:
        """What the policy decodes from noise, two samples for each of a few prompts."""
        model, prompts = self.policy(), [prompt for prompt in self.few(task) for _ in range(2)]
        noise = torch.randn(
            (len(prompts), *model.latent_shape), generator=torch.Generator().manual_seed(0)
        )
        return model.decode(noise.to(model.device)), prompts


def names_of(value: Any) -> list[str]:
    """The names in a sequence of different texts; empty if it is none."""
    fits = isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)
    return list(value) if fits and len(set(value)) == len(value) else []


@promise("it has a name, tasks, forms, the number of elements, and all methods", basic=True)
def has_all_members(case: Case) -> None:
    try:
        check_part("world", case.world)
    except ConfigError as error:
        raise ContractBroken(str(error)) from None
    world: Any = case.world
    expect(isinstance(world.name, str) and world.name != "", f"name is {world.name!r}, not a text")
    for member in ("tasks", "forms"):
        hint = "one name in brackets needs a comma, as in ('direction',)"
        value = getattr(world, member)
        expect(
            bool(names_of(value)),
            f"{member} is {value!r}, not a tuple of one or more different names: {hint}",
        )
    whole = type(world.elements) is int and world.elements >= 0
    expect(
        whole,
        f"elements is {world.elements!r}, not a count of numbers (0: clips stay as published)",
    )
    for member in ("defaults", "qualities"):
        value = getattr(world, member, {})
        expect(
            isinstance(value, Mapping),
            f"{member} is a {type(value).__name__}, not a mapping by name",
        )


@promise("every task has prompts to train on and held-out ones, the same every time", basic=True)
def gives_prompts(case: Case) -> str | None:
    shared = 0
    for task in case.world.tasks:
        found = {}
        for part in PARTS:
            call = f"prompts({task!r}, {part!r})"
            first, second = twice(lambda task=task, part=part: list(case.world.prompts(task, part)))
            expect(len(first) > 0, f"{call} is empty")
            other = [type(prompt).__name__ for prompt in first if not isinstance(prompt, Prompt)]
            expect(not other, f"{call} has a {''.join(other[:1])}, not a flowrl.Prompt")
            texts = [prompt.text for prompt in first]
            hint = (
                "has other prompts, or another order. Shuffle with a generator of its own and a"
                " fixed seed."
            )
            expect(texts == [prompt.text for prompt in second], f"a second call of {call} {hint}")
            found[part] = set(texts)
        shared += len(found["train"] & found["heldout"])
    return (
        f"{shared} held-out prompts are trained on: evaluations then do not measure generalisation"
        if shared
        else None
    )


@promise(
    "policy gives a policy on the asked device, whose latents have `elements` numbers", basic=True
)
def makes_a_policy(case: Case) -> None:
    model = case.policy()
    expect(
        isinstance(model, FlowPolicy),
        f"policy(options) is a {type(model).__name__}, which lacks members of a FlowPolicy",
    )
    expect(
        model.device.type == "cpu",
        f"with options.device 'cpu' the policy is on {model.device}. Use options.device.",
    )
    shape, wanted = tuple(model.latent_shape), case.world.elements
    count = math.prod(shape)
    expect(
        wanted in (0, count),
        f"elements is {wanted}, but a latent of shape {shape} has {count} numbers",
    )


@promise(
    "two policies of the same options are equal, to the last bit, and share nothing that is"
    " trained",
    basic=True,
)
def makes_equal_policies(case: Case) -> None:
    first, second = (dict(model.trainable()) for model in twice(case.policy))
    expect(list(first) == list(second), "trainable() names other parameters in a second policy")
    places = {parameter.data_ptr() for parameter in first.values()}
    shared = [name for name, parameter in second.items() if parameter.data_ptr() in places]
    hint = (
        "Make the network, or a copy of it, within policy(): training one run would change the next"
        " one's start."
    )
    expect(not shared, f"a second policy has the same parameters: {', '.join(shared[:3])}. {hint}")
    other = [name for name in first if not torch.equal(first[name], second[name])]
    hint = (
        "Draw initial values with options.seed, as in torch.random.fork_rng() and"
        " torch.manual_seed(options.seed)."
    )
    expect(not other, f"a second policy has other values of {', '.join(other[:3])}. {hint}")


@promise(
    "parse gives a prompt with the same words, which the rewards score like the prompt of the task"
)
def parses_its_prompts(case: Case) -> None:
    for task in case.world.tasks:
        images, prompts = case.samples(task)
        parsed = [case.world.parse(prompt.text) for prompt in prompts]
        for prompt, again in zip(prompts, parsed, strict=True):
            found = again.text if isinstance(again, Prompt) else type(again).__name__
            expect(
                isinstance(again, Prompt) and again.text == prompt.text,
                f"parse({prompt.text!r}) gave {found!r}",
            )
        for form in case.world.forms:
            model, everyone = case.world.reward(form), range(len(prompts))
            hint = (
                "Does the reward read metadata that only prompts(...) fills? Then parse must fill"
                " it, too."
            )
            got, expected = model.score(images, parsed), model.score(images, prompts)
            reward.close(got, expected, everyone, f"by the form {form!r} with parsed prompts", hint)


@promise("its policy keeps the promises of a policy (check_policy)")
def policy_keeps_its_promises(case: Case) -> str | None:
    advice = []
    for task in case.world.tasks:
        prompts = tuple(case.few(task))
        if len(prompts) > 1:
            model = case.policy()
            found = policy.CONTRACT.findings(
                lambda model=model, prompts=prompts: policy.Case(model, prompts, 1e-4)
            )
            advice.append(_kept(found, f"on the prompts of {task!r}"))
    points = getattr(case.world, "points", False)
    return next((text for text in advice if text and not (points and "[0, 1]" in text)), None)


@promise(
    "every form's reward keeps the promises of a reward on the policy's samples (check_reward)"
)
def rewards_keep_their_promises(case: Case) -> str | None:
    made = {form: case.world.reward(form) for form in case.world.forms}
    found = [
        _reward(case, f"reward({form!r})", made[form], task)
        for form in made
        for task in case.world.tasks
    ]
    return next(filter(None, found), None)


@promise(
    "every quality's reward keeps the promises of a reward on the samples of the tasks that it does"
    " not refuse (check_reward)"
)
def qualities_keep_their_promises(case: Case) -> str | None:
    made, advice = getattr(case.world, "qualities", {}), list[str | None]()
    for name, make in made.items():
        refusals = {task: _refusal(case, make(), task) for task in case.world.tasks}
        expect(
            not all(refusals.values()),
            f"qualities[{name!r}]() refuses the samples of every task: {refusals}",
        )
        advice += [
            _reward(case, f"qualities[{name!r}]()", make(), task)
            for task in refusals
            if not refusals[task]
        ]
    return next(filter(None, advice), None) if made else INAPPLICABLE


def _refusal(case: Case, model: RewardModel, task: str) -> str:
    """Why a reward does not score the samples of a task; "" if it does."""
    try:
        model.score(*case.samples(task))
    except RewardError as error:
        return str(error)
    return ""


def _reward(case: Case, call: str, model: RewardModel, task: str) -> str | None:
    images, prompts = case.samples(task)
    found = reward.CONTRACT.findings(lambda: reward.Case(model, images, tuple(prompts)))
    return _kept(found, f"{call} on the prompts of {task!r}")


def _kept(found: Findings, where: str) -> str | None:
    """The first advice of some findings, or None. Raises `ContractBroken` for a broken promise."""
    broken = next((finding for finding in found if finding.tried and not finding.ok), None)
    expect(broken is None, f"{where}: {broken.message if broken else ''}")
    return next(
        (f"{where}: {finding.message}" for finding in found if finding.mark == "advice"), None
    )

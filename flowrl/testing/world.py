"""The promises of a world."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowrl.core.errors import RewardError
from flowrl.core.policy_options import PolicyOptions
from flowrl.core.protocols import FlowPolicy
from flowrl.core.types import Prompt
from flowrl.run.parts.registry import check_part
from flowrl.testing.contract import Contract, basic, expect, promise, same, twice
from flowrl.testing.policy import PolicyContract
from flowrl.testing.rewards import RewardContract

FEW = 4
"""Prompts of a task that policies and rewards are tried on."""


@dataclass(frozen=True)
class WorldContract(Contract):
    """The contract of a world (`World`), with its policy and its rewards.

    Args:
        part: the world: an object (not copied), a class, or a function that makes it.
        without: names of promises that the part breaks on purpose.
    """

    part: Any
    shared = True

    def policy(self) -> FlowPolicy:
        """A new policy."""
        return self.part.policy(PolicyOptions())

    def few(self, task: str) -> list[Prompt]:
        """The first different prompts of a task."""
        prompts = [*self.part.prompts(task, "train"), *self.part.prompts(task, "heldout")]
        return list({prompt.text: prompt for prompt in prompts}.values())[:FEW]

    def samples(self, task: str) -> tuple[torch.Tensor, list[Prompt]]:
        """What the policy decodes from noise, two samples for each of a few prompts."""
        model, prompts = self.policy(), [prompt for prompt in self.few(task) for _ in range(2)]
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((len(prompts), *model.latent_shape), generator=generator)
        return model.decode(noise.to(model.device)), prompts

    @basic
    def has_all_members(self) -> None:
        """It has a name, tasks, forms, the number of elements, and all methods."""
        check_part("world", self.part)

    @basic
    def gives_prompts(self) -> str | None:
        """Every task has prompts to train on and held-out ones, the same every time.

        Shuffle with a generator of its own and a fixed seed.
        """
        shared = 0
        for task in self.part.tasks:
            texts = []
            for part in ("train", "heldout"):
                first, second = twice(
                    lambda task=task, part=part: [p.text for p in self.part.prompts(task, part)]
                )
                expect(
                    first == second, f"a second call of prompts({task!r}, {part!r}) gives others"
                )
                texts.append(set(first))
            shared += len(texts[0] & texts[1])
        advice = (
            f"{shared} held-out prompts are also training prompts: evaluations do not measure"
            " generalisation"
        )
        return advice if shared else None

    @basic
    def makes_equal_policies(self) -> None:
        """Two policies of the same options are equal, to the last bit, and share nothing that is
        trained.

        Make networks within policy(), and draw their initial values with options.seed.
        """
        first, second = (dict(model.trainable()) for model in twice(self.policy))
        for name, parameter in first.items():
            shared = parameter.data_ptr() == second[name].data_ptr()
            expect(not shared, f"a second policy has the same {name}")
            same(second[name], parameter, f"in a second policy, {name}")

    @promise
    def parses_its_prompts(self) -> None:
        """parse gives a prompt with the same words, which the rewards score like the prompt of the
        task.

        If the reward reads metadata of prompts(...), parse must fill it, too.
        """
        for task in self.part.tasks:
            images, prompts = self.samples(task)
            parsed = [self.part.parse(prompt.text) for prompt in prompts]
            for prompt, again in zip(prompts, parsed, strict=True):
                expect(again.text == prompt.text, f"parse({prompt.text!r}) gave {again!r}")
            for form in self.part.forms:
                model = self.part.reward(form)
                what = f"by the form {form!r} with parsed prompts, the score"
                same(model.score(images, parsed), model.score(images, prompts), what, 1e-4)

    @promise
    def policy_keeps_its_promises(self) -> str | None:
        """Its policy keeps the promises of a policy (check_policy)."""
        advice = []
        without = ("decodes_images",) if getattr(self.part, "points", False) else ()
        for task in self.part.tasks:
            prompts = self.few(task)
            if len(prompts) > 1:
                contract = PolicyContract(self.policy(), prompts, without=without)
                advice += kept(contract, f"on the prompts of {task!r}")
        return next(iter(advice), None)

    @promise
    def rewards_keep_their_promises(self) -> str | None:
        """The reward of every form and quality keeps the promises of a reward on the policy's
        samples (check_reward); that of a quality may refuse the samples of some tasks.
        """
        world, advice = self.part, []
        forms = {f"reward({form!r})": partial(world.reward, form) for form in world.forms}
        made = getattr(world, "qualities", {}).items()
        for call, make in (forms | {f"qualities[{name!r}]()": make for name, make in made}).items():
            refusals = {}
            for task in world.tasks:
                samples = self.samples(task)
                try:
                    make().score(*samples)
                except RewardError as error:
                    refusals[task] = str(error)
                else:
                    contract = RewardContract(make(), samples)
                    advice += kept(contract, f"{call} on the prompts of {task!r}")
            fits = not refusals if call in forms else len(refusals) < len(world.tasks)
            expect(fits, f"{call} refuses the samples of tasks: {refusals}")
        return next(iter(advice), None)


def kept(contract: Contract, where: str) -> list[str]:
    """The advice of a contract that is kept. Raises `ContractBroken` for a broken promise."""
    findings = contract.findings()
    for finding in findings:
        expect(finding.mark != "BROKEN", f"{where}: {finding.message}")
    return [f"{where}: {finding.message}" for finding in findings if finding.mark == "advice"]

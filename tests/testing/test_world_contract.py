"""The contract of worlds: the built-in ones keep it, and every promise is broken by a fault of its
own.
"""

import random
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from flowrl.core.errors import RewardError
from flowrl.core.types import Prompt
from flowrl.testing import check_world, world, world_contract
from flowrl.testing.tiny import TINY, tiny_sd3
from flowrl.worlds import MixtureWorld, ModelWorld, PolicyOptions, ShapesWorld
from flowrl.worlds.mixture import DirectionReward

test_mixture = world_contract(MixtureWorld)
test_shapes = pytest.mark.slow(world_contract(ShapesWorld))


class Faulty(MixtureWorld):
    """The mixture with some members replaced."""

    def __init__(self, **faults: Any) -> None:
        for name, fault in faults.items():
            setattr(self, name, fault)


mixture = MixtureWorld()


def shuffled(task: str, part: str) -> list[Prompt]:
    prompts = mixture.prompts(task, part)
    order = torch.randperm(len(prompts)).tolist()
    return [prompts[place] for place in order]


class ReadsMetadata(DirectionReward):
    """A reward that needs what only the world's prompts have."""

    def score(self, images: torch.Tensor, prompts: Any) -> torch.Tensor:
        return super().score(images, prompts) + torch.tensor(
            [float("part" in prompt.metadata) for prompt in prompts]
        )


def with_part(task: str, part: str) -> list[Prompt]:
    return [Prompt(prompt.text, {"part": part}) for prompt in mixture.prompts(task, part)]


class OverBatch(DirectionReward):
    """A reward that is normalised over the batch."""

    def score(self, images: torch.Tensor, prompts: Any) -> torch.Tensor:
        scores = super().score(images, prompts)
        return scores - scores.mean()


class Refuses:
    def score(self, images: torch.Tensor, prompts: Any) -> torch.Tensor:
        raise RewardError("no colours")


def unseeded(options: PolicyOptions) -> Any:
    policy = mixture.policy(options)
    torch.nn.init.normal_(policy.net[0].weight)  # pyright: ignore[reportAttributeAccessIssue]
    return policy


SHARED = mixture.policy(PolicyOptions())


def shares_its_network(options: PolicyOptions) -> Any:
    policy = mixture.policy(options)
    policy.net = SHARED.net  # pyright: ignore[reportAttributeAccessIssue]
    return policy


def without_reference(options: PolicyOptions) -> Any:
    policy: Any = mixture.policy(options)
    policy.reference = torch.no_grad
    return policy


FAULTS = [
    ("has_all_members", {"tasks": "direction"}, "needs a comma"),
    ("has_all_members", {"forms": ("soft", "soft")}, "different names"),
    ("has_all_members", {"elements": 2.0}, "elements is 2.0"),
    ("has_all_members", {"name": ""}, "name is ''"),
    ("has_all_members", {"qualities": ("density",)}, "qualities is a tuple, not a mapping"),
    ("gives_prompts", {"prompts": lambda task, part: []}, "prompts('direction', 'train') is empty"),
    (
        "gives_prompts",
        {"prompts": lambda task, part: ["towards 0 degrees"]},
        "has a str, not a flowrl.Prompt",
    ),
    ("gives_prompts", {"prompts": shuffled}, "another order. Shuffle with a generator of its own"),
    (
        "gives_prompts",
        {"prompts": lambda task, part: random.sample(mixture.prompts(task, part), 6)},
        "a second call",
    ),
    ("parses_its_prompts", {"parse": lambda text: Prompt(text.upper())}, "parse('towards"),
    ("parses_its_prompts", {"parse": lambda text: None}, "gave 'NoneType'"),
    (
        "parses_its_prompts",
        {"prompts": with_part, "reward": ReadsMetadata},
        "Then parse must fill it, too",
    ),
    (
        "makes_a_policy",
        {"elements": 128},
        "elements is 128, but a latent of shape (2, 1, 1) has 2 numbers",
    ),
    (
        "makes_a_policy",
        {"policy": lambda options: torch.nn.Linear(2, 2)},
        "is a Linear, which lacks members",
    ),
    ("makes_equal_policies", {"policy": unseeded}, "Draw initial values with options.seed"),
    (
        "makes_equal_policies",
        {"policy": shares_its_network},
        "Make the network, or a copy of it, within policy()",
    ),
    (
        "policy_keeps_its_promises",
        {"policy": without_reference},
        "breaks the promise 'has_a_reference'",
    ),
    (
        "rewards_keep_their_promises",
        {"reward": OverBatch},
        "on the prompts of 'direction': OverBatch",
    ),
    (
        "qualities_keep_their_promises",
        {"qualities": {"q": OverBatch}},
        "qualities['q']() on the prompts",
    ),
    (
        "qualities_keep_their_promises",
        {"qualities": {"q": Refuses}},
        "refuses the samples of every task",
    ),
]


@pytest.mark.parametrize(
    ("promise", "faults", "words"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)]
)
def test_a_fault_breaks_its_promise(promise: str, faults: dict[str, Any], words: str) -> None:
    random.seed(3)
    found = check_world(Faulty(**faults))
    assert found.broken[0] == promise, str(found)
    (finding,) = [one for one in found if one.promise == promise]
    assert words in finding.message


def test_every_promise_has_a_fault() -> None:
    assert {promise for promise, _, _ in FAULTS} == {
        promise.name for promise in world.CONTRACT.promises
    }


def test_a_missing_member_is_named() -> None:
    class Half:
        name, tasks, forms = "half", ("a",), ("b",)

        def prompts(self, task: str, part: str) -> list[Prompt]:
            return [Prompt("x")]

    (finding,) = [one for one in check_world(Half()) if one.tried]
    assert "has no `elements`, `parse`, `reward`, `policy`" in finding.message


def test_training_on_held_out_prompts_is_an_advice() -> None:
    found = check_world(Faulty(prompts=lambda task, part: mixture.prompts(task, "train")))
    assert found.ok and "18 held-out prompts are trained on" in str(found)


def test_a_quality_may_refuse_some_tasks() -> None:
    class TwoTasks(MixtureWorld):
        tasks = ("direction", "other")

        def prompts(self, task: str, part: str) -> list[Prompt]:
            return [
                Prompt(prompt.text, {"task": task}) for prompt in mixture.prompts("direction", part)
            ]

    class OneTask(DirectionReward):
        def score(self, images: torch.Tensor, prompts: Any) -> torch.Tensor:
            if prompts[0].metadata["task"] == "other":
                raise RewardError("another task")
            return super().score(images, prompts)

    class WithQuality(TwoTasks):
        qualities = MappingProxyType({"q": OneTask})

    assert check_world(WithQuality()).ok


@pytest.mark.slow
def test_the_world_of_a_model(tmp_path: Path) -> None:
    tiny_sd3().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red fox\na red car\n")
    (tmp_path / "held.txt").write_text("a red hat\n")
    (tmp_path / "r.py").write_text(
        "class Red:\n    def score(self, images, prompts):\n        return images[:, 0].mean((1,"
        " 2))\n"
    )
    files = (str(tmp_path / name) for name in ("model", "prompts.txt", "held.txt", "r.py:Red"))
    found = check_world(ModelWorld(*files, options=TINY))
    assert found.ok, str(found)

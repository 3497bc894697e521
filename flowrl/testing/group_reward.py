"""The promises of a reward that compares the members of a group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import RewardContractError, require
from flowrl.core.protocols import GroupReward, RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards.contract import check_scores, component_methods, marks_invalid
from flowrl.testing.findings import (
    INAPPLICABLE,
    Contract,
    ContractBroken,
    expect,
    name_of,
    same,
    twice,
    unchanged,
)

CONTRACT = Contract("group reward")
promise = CONTRACT.promise

Examples = tuple[Tensor, Sequence[Prompt]]


@dataclass(frozen=True)
class Case:
    """A group reward with test data: images [prompt, member, channel, height, width], or videos
    with a frame axis, and prompts.
    """

    reward: Any
    images: Tensor
    prompts: tuple[Prompt, ...]

    def __repr__(self) -> str:
        return name_of(self.reward)

    @property
    def groups(self) -> list[int]:
        """Indices of the groups."""
        return list(range(len(self.prompts)))

    @property
    def members(self) -> list[int]:
        """Indices of the members of each group."""
        return list(range(self.images.shape[1]))

    def score(
        self, groups: Sequence[int] | None = None, members: Sequence[int] | None = None
    ) -> Tensor:
        """Scores of the chosen groups and members, in this order; None: all."""
        chosen, some = (
            list(self.groups if groups is None else groups),
            list(self.members if members is None else members),
        )
        return self.reward.score_groups(
            self.images[chosen][:, some].clone(), [self.prompts[i] for i in chosen]
        )


def default_examples() -> tuple[Tensor, tuple[Prompt, ...]]:
    """Three groups of five smooth random images, 32x32, and plain prompts."""
    small = torch.rand(15, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(small, size=(32, 32), mode="bilinear").clamp(0, 1)
    return images.unflatten(0, (3, 5)), tuple(Prompt(f"prompt number {i}") for i in range(3))


def examples_of(
    given: Examples | Callable[[], Examples] | None,
) -> tuple[Tensor, tuple[Prompt, ...]]:
    """The given examples (or those made by the given function), else the default ones.

    Raises `ConfigError` unless there are two or more prompts and three or more images for each.
    """
    images, prompts = (given() if callable(given) else given) or default_examples()
    fits = images.ndim in (5, 6) and len(images) == len(prompts) >= 2 and images.shape[1] >= 3
    allowed = (
        "images [prompt, member, channel, height, width] or videos of 2 or more prompts, 3 or more"
        " members, and the prompts"
    )
    require(fits, "examples", f"images {tuple(images.shape)} and {len(prompts)} prompts", allowed)
    return images, tuple(prompts)


def close(got: Tensor, expected: Tensor, what: str, hint: str, tolerance: float = 1e-4) -> None:
    """Raise `ContractBroken` unless scores [prompt, member] are equal up to rounding."""
    what = f"{what}, the score"
    same(
        got.float(),
        expected.float(),
        what,
        hint,
        tolerance,
        lambda at: f" at [prompt, member] = {at}",
        invalid=True,
    )


def checked(
    case: Case, scores: Any, origin: str, groups: int | None = None, members: int | None = None
) -> None:
    """Raise `ContractBroken`, with the message of `check_scores`, unless there is one finite
    number per member.
    """
    prompts = case.prompts[:groups]
    try:
        count = len(case.members) if members is None else members
        check_scores(scores, prompts, origin, marks_invalid(case.reward), count)
    except RewardContractError as error:
        raise ContractBroken(str(error)) from None


@promise(
    "one finite number per member, [prompt, member]; NaN only from a model with `marks_invalid`",
    basic=True,
)
def returns_one_number_per_member(case: Case) -> None:
    expect(
        callable(getattr(case.reward, "score_groups", None)),
        "there is no method score_groups(images, prompts)",
    )
    checked(case, case.score(), "score_groups")


@promise("`evaluation` is a reward of single samples", basic=True)
def names_an_evaluation_reward(case: Case) -> None:
    found = getattr(case.reward, "evaluation", None)
    fits = isinstance(found, RewardModel) and not isinstance(found, GroupReward)
    hint = "Name the reward that evaluations measure."
    expect(fits, f"`evaluation` is {found!r}, which has no method score(images, prompts). {hint}")


@promise("the same images give the same scores", basic=True)
def is_deterministic(case: Case) -> None:
    first, second = twice(case.score)
    close(
        second,
        first,
        "in a second call",
        "Is the model in eval mode, without dropout or random crops?",
        1e-6,
    )


@promise("images are not changed", basic=True)
def leaves_images_alone(case: Case) -> None:
    images = case.images.clone()
    with unchanged({"images [prompt, member, channel, height, width]": images}):
        case.reward.score_groups(images, list(case.prompts))


@promise("a single group gives [1, member]; groups may have any number of members from 2")
def accepts_any_number_of_members(case: Case) -> None:
    for count in range(2, len(case.members) + 1):
        some = case.members[:count]
        checked(case, case.score([0], some), f"for one group of {count}, score_groups", 1, count)
        checked(case, case.score(None, some), f"for groups of {count}, score_groups", None, count)


@promise("permuting the members of a group permutes its scores")
def treats_members_alike(case: Case) -> None:
    count = len(case.members)
    shuffled = (
        torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in (1, 2)
    )
    for order in (case.members[::-1], *shuffled):
        hint = (
            "Does the first of a pair have an advantage? Compare both ways round, or draw no order."
        )
        close(
            case.score(None, order),
            case.score()[:, order],
            f"with the members in the order {order}",
            hint,
        )


@promise("a group's scores do not depend on the other groups, nor on their order")
def treats_groups_separately(case: Case) -> None:
    whole, hint = (
        case.score(),
        "Is something compared or normalised over all groups, or an axis mixed up?",
    )
    for chosen in ([0], case.groups[::-1], case.groups[1:]):
        close(case.score(chosen), whole[chosen], f"in a batch of the groups {chosen}", hint)


@promise("equal images of a prompt get equal scores")
def gives_equal_images_equal_scores(case: Case) -> None:
    for copies in ([0, *case.members[:-1]], [0] * len(case.members)):
        found, hint = (
            case.score(None, copies),
            "Is a tie decided by the place in the group? Let each have half of it.",
        )
        close(found[:, 1], found[:, 0], f"with the members {copies}, of member 1", hint)


@promise(
    "it works under torch.no_grad() and torch.inference_mode(), and its scores never carry a"
    " gradient"
)
def needs_no_gradient(case: Case) -> None:
    whole = case.score()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(
                case.score(), whole, f"under torch.{mode.__name__}()", "Does training mode matter?"
            )
    hint = "Put @torch.no_grad() on `score_groups`: advantages are constants of the policy loss."
    expect(not whole.requires_grad, f"the scores carry a gradient. {hint}")


@promise(
    "a reward with components: `score_groups` equals `total(group_parts(...))`; components are"
    " [prompt, member] and finite"
)
def adds_up_its_parts(case: Case) -> str | None:
    methods = component_methods(case.reward)
    if methods is None:
        return INAPPLICABLE
    parts = methods[0](case.images.clone(), list(case.prompts))
    for name, values in parts.items():
        checked(case, values, f"group_parts, for the component {name!r},")
    close(
        methods[1](parts),
        case.score(),
        "by total(group_parts(...))",
        "Are weights applied twice, or in one only?",
    )


@promise("(advice) a member's score depends on the other members of its group")
def compares_members(case: Case) -> str | None:
    whole = case.score()
    for count in range(2, len(case.members)):
        if not torch.allclose(
            case.score(None, case.members[:count]),
            whole[:, :count],
            rtol=1e-4,
            atol=1e-5,
            equal_nan=True,
        ):
            return None
    return (
        "every member has the same score in smaller groups. A RewardModel is simpler, and can be"
        " served"
    )

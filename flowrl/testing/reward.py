"""The promises of a reward model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import RewardContractError, require
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

CONTRACT = Contract("reward model")
promise = CONTRACT.promise

Examples = tuple[Tensor, Sequence[Prompt]]


@dataclass(frozen=True)
class Case:
    """A reward model with test data: images [sample, channel, height, width], or videos with a
    frame axis, and prompts.
    """

    reward: Any
    images: Tensor
    prompts: tuple[Prompt, ...]

    def __repr__(self) -> str:
        return name_of(self.reward)

    def score(self, index: Sequence[int] | None = None) -> Tensor:
        """Scores of all samples, or of those at `index`."""
        index = range(len(self.prompts)) if index is None else index
        return self.reward.score(self.images[list(index)].clone(), [self.prompts[i] for i in index])


def default_examples() -> tuple[Tensor, tuple[Prompt, ...]]:
    """Eight smooth random images, 32x32, and plain prompts."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(8, 3, 4, 4, generator=generator)
    images = torch.nn.functional.interpolate(small, size=(32, 32), mode="bilinear").clamp(0, 1)
    return images, tuple(Prompt(f"image number {i}") for i in range(8))


def examples_of(
    given: Examples | Callable[[], Examples] | None,
) -> tuple[Tensor, tuple[Prompt, ...]]:
    """The given examples (or those made by the given function), else the default ones.

    Raises `ConfigError` unless there are two or more images [sample, channel, height, width], or
    videos with a frame axis, and as many prompts.
    """
    images, prompts = (given() if callable(given) else given) or default_examples()
    found = f"images {tuple(images.shape)} and {len(prompts)} prompts"
    fits = images.ndim in (4, 5) and len(images) == len(prompts) >= 2
    allowed = (
        "images [sample, channel, height, width] or videos [sample, frame, ...], and as many"
        " prompts, 2 or more"
    )
    require(fits, "examples", found, allowed)
    return images, tuple(prompts)


def close(
    got: Tensor,
    expected: Tensor,
    index: Sequence[int],
    what: str,
    hint: str,
    tolerance: float = 1e-4,
) -> None:
    """Raise `ContractBroken` unless scores are equal up to rounding; `index` are the indices of the
    samples.
    """
    got, expected = got.float().reshape(-1), expected.float().reshape(-1)
    same(
        got,
        expected,
        f"{what}, the score",
        hint,
        tolerance,
        lambda entry: f" of sample {index[entry[0]]}",
        invalid=True,
    )


def keeps_the_score_contract(case: Case, scores: Any, origin: str, hint: str) -> None:
    """Raise `ContractBroken`, with the message of `check_scores`, unless there is one finite number
    per image.
    """
    try:
        check_scores(scores, case.prompts, origin, marks_invalid(case.reward))
    except RewardContractError as error:
        raise ContractBroken(f"{error}. {hint}") from error


@promise(
    "one finite number per image: a tensor [sample]; NaN only from a model with `marks_invalid`",
    basic=True,
)
def returns_one_number_per_image(case: Case) -> None:
    expect(
        callable(getattr(case.reward, "score", None)), "there is no method score(images, prompts)"
    )
    hint = (
        "Give a number for every image, or mark what cannot be judged: NaN, and an attribute"
        " marks_invalid = True."
    )
    keeps_the_score_contract(case, case.score(), "score", hint)


@promise("the same images give the same scores", basic=True)
def is_deterministic(case: Case) -> None:
    (first, second), everyone = twice(case.score), range(len(case.prompts))
    close(
        second,
        first,
        everyone,
        "in a second call",
        "Is the model in eval mode, without dropout or random crops?",
        1e-6,
    )


@promise("images are not changed", basic=True)
def leaves_images_alone(case: Case) -> None:
    images = case.images.clone()
    with unchanged({"images [sample, channel, height, width]": images}):
        case.reward.score(images, list(case.prompts))


@promise("a batch of one image gives one number, [1]")
def scores_a_single_image(case: Case) -> None:
    score = case.score([0])
    found = f"one image gave {tuple(getattr(score, 'shape', ()))}, not (1,)"
    expect(
        isinstance(score, Tensor) and score.shape == (1,),
        f"{found}. squeeze() also drops the sample axis: name the axis.",
    )


@promise("scores follow their images and prompts: permuting the samples permutes the scores")
def keeps_the_order(case: Case) -> None:
    count = len(case.prompts)
    shuffled = (
        torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in (1, 2)
    )
    for order in (list(range(count))[::-1], *shuffled):
        hint = "Are results collected out of order, or sorted for speed and not put back?"
        close(
            case.score(order),
            case.score()[order],
            order,
            f"with the samples in the order {order}",
            hint,
        )


@promise("a sample's score does not depend on the others of its batch, nor on how a batch is split")
def treats_samples_separately(case: Case) -> None:
    whole, count = case.score(), len(case.prompts)
    for size in dict.fromkeys((1, 2, (count + 1) // 2, count - 1)):
        for start in range(0, count, size):
            index = list(range(count))[start : start + size]
            what = f"in a batch of {len(index)}"
            close(
                case.score(index),
                whole[index],
                index,
                what,
                "Is something normalised or padded over the batch?",
            )


@promise(
    "it works under torch.no_grad() and torch.inference_mode(), and its scores never carry a"
    " gradient"
)
def needs_no_gradient(case: Case) -> None:
    whole, everyone = case.score(), range(len(case.prompts))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(
                case.score(),
                whole,
                everyone,
                f"under torch.{mode.__name__}()",
                "Does training mode matter?",
            )
    hint = "Put @torch.no_grad() on `score`: advantages are constants of the policy loss."
    expect(not whole.requires_grad, f"the scores carry a gradient. {hint}")


@promise(
    "a reward with components: `score` equals `total(parts(...))`, and every component is [sample]"
    " and finite"
)
def adds_up_its_parts(case: Case) -> str | None:
    methods = component_methods(case.reward)
    if methods is None:
        return INAPPLICABLE
    parts = methods[0](case.images.clone(), list(case.prompts))
    for name, values in parts.items():
        keeps_the_score_contract(
            case,
            values,
            f"parts, for the component {name!r},",
            "Give every component a number per image.",
        )
    hint = "Are weights applied twice, or in one only?"
    close(methods[1](parts), case.score(), range(len(case.prompts)), "by total(parts(...))", hint)

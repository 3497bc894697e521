"""What every reward model promises."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.testing.findings import Contract, ContractBroken, expect
from flowrl.types import Prompt

CONTRACT = Contract("reward model")
promise = CONTRACT.promise


@dataclass(frozen=True)
class Case:
    """A reward model and the images [sample, channel, height, width] and prompts that it is tried on."""

    reward: Any
    images: Tensor
    prompts: tuple[Prompt, ...]

    def __repr__(self) -> str:
        text = repr(self.reward)
        return type(self.reward).__name__ if text.startswith("<") else text

    def score(self, index: Sequence[int] | None = None) -> Tensor:
        """Scores of all samples, or of those at `index`."""
        index = range(len(self.prompts)) if index is None else index
        return self.reward.score(self.images[list(index)].clone(), [self.prompts[i] for i in index])


def default_examples() -> tuple[Tensor, tuple[Prompt, ...]]:
    """Eight smooth random pictures, 32x32, and plain prompts."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(8, 3, 4, 4, generator=generator)
    images = torch.nn.functional.interpolate(small, size=(32, 32), mode="bilinear").clamp(0, 1)
    return images, tuple(Prompt(f"picture number {i}") for i in range(8))


def close(got: Tensor, expected: Tensor, what: str, hint: str) -> None:
    got, expected = got.detach().float(), expected.detach().float()
    gap = (got - expected).abs()
    if float(gap.max()) > 1e-4 * (1 + float(expected.abs().max())):
        i = int(gap.argmax())
        raise ContractBroken(f"{what}: sample {i} scores {float(got[i]):.5g} instead of {float(expected[i]):.5g}. {hint}")


@promise("one finite number per image: a tensor [sample]")
def returns_one_number_per_image(case: Case) -> None:
    scores = case.score()
    expect(isinstance(scores, Tensor), f"score returned a {type(scores).__name__}, not a torch.Tensor")
    expect(scores.shape == (len(case.prompts),), f"score returned shape {tuple(scores.shape)} for {len(case.prompts)} images")
    expect(bool(torch.isfinite(scores.float()).all()), f"scores are not all finite: {scores.tolist()}")


@promise("scores follow their images: permuting the samples permutes the scores")
def keeps_the_order(case: Case) -> None:
    order = list(range(len(case.prompts)))[::-1]
    close(case.score(order), case.score()[order], "with the samples in reverse order", "Are results collected out of order?")


@promise("a sample's score does not depend on the others of its batch, nor on how a batch is split")
def treats_samples_separately(case: Case) -> None:
    whole = case.score()
    alone = torch.cat([case.score([i]) for i in range(len(case.prompts))])
    close(alone, whole, "scored one by one", "Is something normalised over the batch?")


@promise("the same images give the same scores")
def is_deterministic(case: Case) -> None:
    torch.manual_seed(1)
    first = case.score()
    torch.manual_seed(2)
    expect(torch.equal(case.score(), first), "a second call differs. Is the model in eval mode?")


@promise("images are not changed")
def leaves_images_alone(case: Case) -> None:
    images = case.images.clone()
    case.reward.score(images, list(case.prompts))
    expect(torch.equal(images, case.images), "the images were modified in place")


@promise("it works without gradients and returns none")
def needs_no_gradient(case: Case) -> None:
    with torch.inference_mode():
        scores = case.score()
    expect(not scores.requires_grad, "the scores carry a gradient")
    expect(not case.score().requires_grad, "the scores carry a gradient outside torch.no_grad(). Score under torch.no_grad().")


@promise("the reward can be copied, so that another process can have its own")
def can_be_copied(case: Case) -> None:
    twin = Case(copy.deepcopy(case.reward), case.images, case.prompts)
    close(twin.score(), case.score(), "a copy of the model", "Does it hold state outside itself?")

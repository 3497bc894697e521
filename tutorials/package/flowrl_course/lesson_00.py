"""Checks of the tour."""

from collections.abc import Callable
from typing import Any

import torch

from flowrl import world
from flowrl.core.errors import FlowrlError
from flowrl.worlds import PolicyOptions
from flowrl_course.batches import ode_images
from flowrl_course.checking import answered, check, expect, number, same

METHODS = {"flow-grpo", "stepwise-flow-grpo", "tp-grpo"}


@check("Exercise 1")
def check_weakness(answer: str) -> None:
    """`answer` is a prompt that the base model draws with a mean score below 0.75."""
    expect(
        isinstance(answer, str), f"a prompt is a text in quotes; this is a {type(answer).__name__}"
    )
    expect(answer.strip(" .") != "", "no prompt yet: replace the dots")
    shapes = world("shapes")
    try:
        prompt = shapes.parse(answer)
    except FlowrlError as error:
        expect(False, f"the model's language does not know this prompt: {error}")
        return
    mean = float(
        ode_images(
            shapes.policy(PolicyOptions()), shapes.reward("soft"), [prompt] * 16
        ).rewards.mean()
    )
    hint = "Try a relation between two objects, or a long text"
    expect(mean < 0.75, f"the model is good at this one: mean score {mean:.2f}. {hint}")


@check("Exercise 2")
def check_best_decision(answer: Callable[..., Any]) -> None:
    """`answer(values)` is the decision with the largest gain."""
    values = torch.tensor([0.70, 0.75, 0.40, 0.70, 0.50, 0.90, 0.95, 0.85, 0.88, 0.86, 0.80])
    got = number(answered(answer(values), "best_decision"), "the decision")
    expect(got != 6, "column 6 has the highest score; return the decision with the largest rise")
    expect(
        got != 5,
        "this is the column that the largest rise leads to; decision k leads from column k to"
        " column k + 1",
    )
    expect(
        got != 2,
        "this is the second-largest rise, or the lowest score; look at all differences R[k+1] -"
        " R[k]",
    )
    expect(got != 1, "this is the largest fall: gains are R[k+1] - R[k], not R[k] - R[k+1]")
    expect(
        not same(got, 0.4),
        "this is how much the score rose; return the number of the decision: argmax instead of max",
    )
    expect(got == 4, "this is not the decision with the largest R[k+1] - R[k]")
    late = torch.tensor([0.20, 0.70, 0.72, 0.10, 0.55, 0.60, 0.62, 0.71, 0.70, 0.74, 0.72])
    again = number(answer(late), "the decision")
    expect(
        again != 2,
        "this takes a fall for a rise: a gain is R[k+1] - R[k] with its sign, not its absolute"
        " value",
    )
    expect(again == 0, "the decision with the largest rise is not where the score is highest")


@check("Exercise 3")
def check_blame(answer: set[str]) -> None:
    """`answer` names the rules that make a falling decision of a good trajectory less likely."""
    expect(isinstance(answer, set | list | tuple), "give a set of names, such as {'flow-grpo'}")
    expect(... not in answer, "not answered yet: replace the dots")
    given = {str(name).strip().lower().replace(" ", "-") for name in answer}
    unknown = given - METHODS
    expect(
        not unknown,
        f"no rule is called {', '.join(sorted(unknown))}; the names are"
        f" {', '.join(sorted(METHODS))}",
    )
    expect(
        "flow-grpo" not in given,
        "flow-grpo looks at the finished image only: every decision of a good trajectory is made"
        " likelier",
    )
    expect(
        "stepwise-flow-grpo" in given,
        "stepwise-flow-grpo gives each decision its own gain, and this one is negative",
    )
    expect(
        "tp-grpo" in given,
        "tp-grpo uses increments too; a falling decision of a rising trajectory is not a turning"
        " point",
    )

"""Checks of the tour."""

from collections.abc import Callable
from typing import Any

import torch

from flowrl import world
from flowrl.core.errors import FlowrlError
from flowrl.worlds import PolicyOptions
from flowrl_course.batches import ode_images
from flowrl_course.checking import answered, check, choice, decide, expect, number, quiz, same

METHODS = {"flow-grpo", "stepwise-flow-grpo", "tp-grpo"}


@check("Exercise 1")
def check_weakness(answer: str) -> None:
    """`answer` is a prompt for which the base model's images have a mean reward below 0.75."""
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
    hint = "the model is good at this prompt; try a relation between two objects, or a long text"
    expect(mean < 0.75, f"the mean reward is {mean:.2f}: {hint}")


@check("Exercise 2")
def check_best_decision(answer: Callable[..., Any]) -> None:
    """`answer(values)` is the decision with the largest gain."""
    values = torch.tensor([0.70, 0.75, 0.40, 0.70, 0.50, 0.90, 0.95, 0.85, 0.88, 0.86, 0.80])
    got = number(answered(answer(values), "best_decision"), "the decision")
    expect(
        got != 6,
        "this is the column with the highest value, not the decision with the largest rise",
    )
    expect(
        got != 5,
        "this is the column that the largest rise leads to; decision k leads from column k to"
        " column k + 1",
    )
    expect(
        got != 2,
        "this is the second-largest rise, or the lowest value: compare all gains",
    )
    expect(got != 1, "this is the largest fall: a gain is positive if the value rises")
    expect(
        not same(got, 0.4),
        "this is how much the value rose; return the number of the decision: argmax instead of max",
    )
    expect(
        got == 4, "this is not the decision with the largest gain: list all gains of a short table"
    )
    late = torch.tensor([0.20, 0.68, 0.72, 0.10, 0.65, 0.60, 0.62, 0.71, 0.70, 0.74, 0.72])
    again = number(answer(late), "the decision")
    expect(
        again != 2,
        "this is the largest change of either sign: a fall is a negative gain",
    )
    expect(
        again != 0,
        "a rise counts from the value just before it, also below an earlier value",
    )
    expect(again == 3, "the decision with the largest rise is not where the value is highest")
    low = torch.tensor([0.05, 0.30, 0.20, 0.55, 0.45, 0.90, 0.99, 0.97, 0.98, 0.96, 0.95])
    expect(
        number(answer(low), "the decision") == 4,
        "a gain is a difference, not a share of the value before it or of what is left to 1",
    )


@check("Exercise 3")
def check_praise(answer: set[str]) -> None:
    """`answer` names the rules that give a rising decision of the worst member a positive
    advantage.
    """
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
        "flow-grpo does not use the values: compare the reward of the worst member with the mean",
    )
    expect(
        "stepwise-flow-grpo" in given,
        "one rule uses the gain of each decision: what is the sign of this gain?",
    )
    expect(
        "tp-grpo" in given,
        "tp-grpo uses the gain unless the decision is a turning point: does decision 0 move in the"
        " direction of R - V[0]?",
    )


@check("Exercise 4")
def check_cause(answer: str) -> None:
    """`answer` is the letter of the cause that explains both logs."""
    letter = choice(answer, "abc")
    expect(
        letter != "a",
        "the learning rate has no effect on the advantage: the advantage is 0 in both logs",
    )
    expect(letter == "b", "the images of run 1 are all correct: look for a cause of both logs")


@check("Exercise 5")
def check_slowest(answer: str) -> None:
    """`answer` is the letter of the rule with the lowest reward after ten iterations."""
    reasons = {
        "b": "the gain concerns the decision itself: which rule mixes good and bad decisions?",
        "c": "TP-GRPO uses gains too: which rule mixes good and bad decisions?",
        "d": "errors average out over many samples, and ten iterations are few: think of the"
        " noise of each update",
    }
    decide(answer, "a", reasons)


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "all images in this lesson come from the model itself",
            "c": "the reward is a number from a program; only the model is differentiated",
        },
    ),
    (
        "b",
        {
            "a": "a reward is compared with the group's mean, and 0.7 is below it",
            "c": "an advantage of 0 needs a reward equal to the group's mean",
        },
    ),
    (
        "b",
        {
            "a": "there is one value more than decisions: the finished image",
            "c": "ODE steps are not decisions and have no values of their own",
        },
    ),
    (
        "b",
        {
            "a": "Flow-GRPO uses the finished image, which is good",
            "c": "Flow-GRPO makes all decisions of a good member more likely",
        },
    ),
    (
        "c",
        {
            "a": "another seed may change a difference of 0.01",
            "b": "a small difference in one run does not show that there is none",
        },
    ),
)

"""Checks of the lesson on Stepwise-Flow-GRPO."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.experience import Decisions
from flowrl.credit import StepwiseGain, gains, generalised_gains, reward_to_go
from flowrl_course.checking import answered, check, choice, close, expect, number, quiz, tensor

Answer = Callable[..., Any]


def _values() -> Tensor:
    """2 prompts of different scales, 3 members, 4 decisions; values of both signs rise and fall."""
    steps = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(5))
    return steps.cumsum(-1) * torch.tensor([0.9, 0.3])[:, None, None]


@check("Exercise 1")
def check_gains(answer: Answer) -> None:
    """`answer(values)` are the gains [prompt, member, decision]."""
    values = _values()
    got = answered(answer(values), "step_gains")
    expect(isinstance(got, Tensor), "the result must be a torch.Tensor")
    expect(
        got.shape != values.shape,
        "there are as many entries as columns; a gain lies between two columns, so there is one"
        " less",
    )
    expect(
        got.shape != (1, 3, 5) and got.shape != (2, 2, 5),
        "the difference is taken along another axis; the columns are the last one",
    )
    mistakes = {
        "the sign is wrong: a decision that raises the expected reward must get a positive "
        "gain, V_{k+1} - V_k": -gains(values),
        "this is the reward-to-go R - V_k; a gain compares neighbouring columns": reward_to_go(
            values
        ),
        "this is what was gained since the start, V_{k+1} - V_0; a gain compares "
        "neighbouring columns": (values[..., 1:] - values[..., :1]),
        "these are rewards, not differences": values[..., 1:],
        "the sign is lost: the gain of a decision that lowers the value is negative": gains(
            values
        ).abs(),
        "losses are set to 0: the gain of a decision that lowers the value is negative": gains(
            values
        ).clamp(min=0),
        "the values are sorted first: a gain compares neighbours in the order of decisions": (
            values.sort(-1).values.diff()
        ),
        "this compares with the highest value so far: a gain compares neighbouring columns": (
            values.cummax(-1).values.diff()
        ),
    }
    close(
        tensor(got, (2, 3, 4), "the result"), gains(values), "this is not V_{k+1} - V_k", mistakes
    )


FIGURE_1 = {"g at 0.86": 3, "g at 0.71": 5, "into the dip at 0.86": 2}


@check("Exercise 2")
def check_figure_1(answer: dict[str, Any]) -> None:
    """`answer` maps the paper's labels to steps: g_t leaves the state at t; the step before leads
    into it.
    """
    expect(
        isinstance(answer, dict) and set(answer) == set(FIGURE_1),
        f"give a dict with the keys {', '.join(FIGURE_1)}",
    )
    given = {label: number(value, label) for label, value in answer.items()}
    backwards = all(given[label] == 10 - FIGURE_1[label] for label in ("g at 0.86", "g at 0.71"))
    expect(
        not backwards,
        "these count from the image; our steps count from the noise: step 0 leaves t = 1",
    )
    entered = given["g at 0.86"] == 2 or given["g at 0.71"] == 4
    expect(
        not entered,
        "g at t is the gain of the step that leaves the state at t, not of the step that leads"
        " to it",
    )
    late = given["g at 0.86"] == 4 or given["g at 0.71"] == 6
    expect(not late, "one too large: node 0 is t = 1, and step i leaves node i")
    expect(
        given["g at 0.86"] == 3,
        "g at 0.86: find the node with t = 0.86; the step that leaves it has the same number",
    )
    expect(
        given["g at 0.71"] == 5,
        "g at 0.71: find the node with t = 0.71; the step that leaves it has the same number",
    )
    dip = given["into the dip at 0.86"]
    expect(dip != 3, "step 3 leads out of the dip; the step that leads into node 3 leaves node 2")
    expect(dip == 2, "the step into node j is step j - 1")


def _field(x: Tensor, t: Any) -> Tensor:
    """A velocity that depends on both, so that every slip shows."""
    return torch.sin(x) * (1.0 + 2.0 * float(t) ** 2)


def _euler(
    x: Tensor,
    t: float,
    count: int,
    length: float | None = None,
    still: bool = False,
    ahead: int = 0,
) -> Tensor:
    length = t / count if length is None else length
    v = _field(x, t)
    for k in range(count):
        if k > 0:
            v = _field(x, t if still else t - (k + ahead) * t / count)
        x = x - length * v
    return x


@check("Exercise 3")
def check_substeps(answer: Answer) -> None:
    """`answer(velocity, x, t, v, count)` is the estimate after `count` Euler steps."""
    x, t, count = torch.randn(4, 3, generator=torch.Generator().manual_seed(6)), 0.6, 4
    v, calls = _field(x, t), []

    def velocity(state: Tensor, time: Any) -> Tensor:
        one = torch.as_tensor(time).numel() == 1
        expect(one, "`velocity` takes the time as one number here, not one per sample")
        calls.append(float(time))
        return _field(state, time)

    got = tensor(answer(velocity, x, t, v, count), (4, 3), "the estimate")
    mistakes = {
        "the first velocity is used for every substep: this is the Tweedie estimate; "
        "evaluate `velocity` after each substep": (x - t * v),
        "the velocity is always evaluated at the time t; after k substeps the time is t - k "
        "t / count": _euler(x, t, count, still=True),
        "substeps have the length 1 / count; only the time t remains: t / count": _euler(
            x, t, count, length=1 / count
        ),
        "the sign is wrong: v points towards noise, so subtract it": _backwards(x, t, count),
        "substeps have the length 1 / count, and the times too; only the time t remains: t / "
        "count": _from_one(x, t, count),
        "the velocity is evaluated one substep ahead of its state": _euler(x, t, count, ahead=1),
        "the velocity is evaluated one substep behind its state: after k substeps the time "
        "is t - k t / count": _euler(x, t, count, ahead=-1),
        "one substep is missing: the last one ends at t = 0": _short(x, t, count),
    }
    close(
        got,
        _euler(x, t, count),
        "this is not `count` Euler steps of length t / count from x",
        mistakes,
    )
    expect(
        len(calls) == count - 1,
        f"the estimate is right, but the network was evaluated {len(calls)} times; v at (x, t) is"
        f" given, so {count - 1} suffice",
    )


def _backwards(x: Tensor, t: float, count: int) -> Tensor:
    v = _field(x, t)
    for k in range(count):
        v = _field(x, t - k * t / count) if k > 0 else v
        x = x + t / count * v
    return x


def _from_one(x: Tensor, t: float, count: int) -> Tensor:
    for k in range(count):
        x = x - _field(x, t - k / count) / count
    return x


def _short(x: Tensor, t: float, count: int) -> Tensor:
    for k in range(count - 1):
        x = x - t / count * _field(x, t - k * t / count)
    return x


@check("Exercise 5")
def check_joint(answer: Answer) -> None:
    """`answer(gained)` are jointly normalised advantages."""
    values = _values()
    gained = gains(values)
    got = tensor(answer(gained), (2, 3, 4), "the result")

    def scores(
        dims: tuple[int, ...], std_dims: tuple[int, ...] | None = None, unbiased: bool = False
    ) -> Tensor:
        spread = gained.std(dim=std_dims or dims, keepdim=True, unbiased=unbiased)
        return (gained - gained.mean(dim=dims, keepdim=True)) / (spread + 1e-4)

    mistakes = {
        "every decision is normalised by itself; here mean and std run over members and "
        "decisions together": scores((1,)),
        "every trajectory is normalised by itself: a good one and a bad one then get the "
        "same total, 0": scores((2,)),
        "prompts are mixed: mean and std are those of one group": scores((0, 1, 2)),
        "the standard deviation is unbiased: pass unbiased=False": scores((1, 2), unbiased=True),
        "the mean is taken decision by decision: a joint mean is one number per group": scores(
            (1,), (1, 2)
        ),
        "the mean is missing: subtract it": (
            gained / (gained.std(dim=(1, 2), keepdim=True, unbiased=False) + 1e-4)
        ),
        "the standard deviation is missing": gained - gained.mean(dim=(1, 2), keepdim=True),
    }
    wanted = StepwiseGain(clamp=None).assign(values, Decisions.like(values))
    close(
        got,
        wanted,
        "this is not (g - mean) / (std + 1e-4), both over members and decisions of a group",
        mistakes,
    )


def _from_gains(gained: Tensor) -> Tensor:
    """Rewards that begin at 0 and have these gains."""
    return torch.cat([torch.zeros_like(gained[..., :1]), gained.cumsum(-1)], dim=-1)


@check("Exercise 7")
def check_generalised(answer: Answer) -> None:
    """`answer(gained, lam)` is the discounted sum of the gains from each decision on."""
    values = _values()
    gained = gains(values)
    lam = 0.6
    got = tensor(answer(gained, lam), (2, 3, 4), "the result")
    wanted = generalised_gains(values, lam)
    past = generalised_gains(_from_gains(gained.flip(-1)), lam).flip(-1)
    after = torch.cat([wanted[..., 1:], torch.zeros_like(wanted[..., :1])], dim=-1)
    powers = lam ** torch.arange(4.0)
    mistakes = {
        "the sum runs over the past (j <= 0): a decision gets credit for earlier ones; run "
        "from the last one to the first": (past),
        "the result is in reversed order: flip it back": wanted.flip(-1),
        "the decision's own gain is left out: j starts at 0": after,
        "the decision's own gain is left out: j starts at 0, with lam^0 = 1": lam * after,
        "the first gain is discounted too: lam^0 = 1": lam * wanted,
        "there is no factor 1 - lambda: at lambda = 1 the sum must be R - V_k": (1 - lam) * wanted,
        "gains and reward-to-go are not mixed linearly; every later gain has its own power "
        "of lambda": ((1 - lam) * gained + lam * reward_to_go(values)),
        "lambda is not applied: this is the reward-to-go for every lambda": reward_to_go(values),
        "only the next gain is added; the sum goes on to the end": (
            gained + lam * torch.cat([gained[..., 1:], 0 * gained[..., :1]], -1)
        ),
        "gains are discounted by their position, not by their distance from decision k": (
            (gained * powers).flip(-1).cumsum(-1).flip(-1)
        ),
    }
    close(got, wanted, "this is not the sum over j of lam^j g_{k+j}", mistakes)
    close(
        answer(gained.clone(), 0.0), gained, "with lam = 0 the result must be the gains themselves"
    )
    close(
        answer(gained.clone(), 1.0), reward_to_go(values), "with lam = 1 the result must be R - V_k"
    )


@check("Exercise 8")
def check_worth(answer: Answer) -> None:
    """`answer(weak, strong)` is how many batches of the weak rule are as clear as one of the
    strong.
    """
    for weak, strong in ((0.2, 0.65), (0.5, 0.3)):
        worth = strong / (1 - strong) * (1 - weak) / weak
        mistakes = {
            "this is the ratio of the cosines; a batch's signal-to-noise is cos / (1 - cos)": (
                strong / weak
            ),
            "this is the ratio of the squared cosines; solve cos = q / (q + 1) for q": (
                (strong / weak) ** 2
            ),
            "this is the inverse: how many batches of `weak` are worth one of `strong`": 1 / worth,
            "this compares the noise only; divide signal by noise, cos / (1 - cos)": (
                (1 - weak) / (1 - strong)
            ),
            "q is a ratio of squared lengths already: no root": worth**0.5,
        }
        got = number(answer(weak, strong), "batches_worth")
        close(got, worth, "this is not the ratio of the two cos / (1 - cos)", mistakes)


@check("Exercise 4")
def check_largest_gains(answer: str) -> None:
    """`answer` is the predicted dependence of gains on the decision."""
    letter = choice(answer, "abc")
    expect(letter != "a", "accuracy is not size: how much can the last decision change the image?")
    expect(letter == "b", "the middle is too late: which noise selects among most images?")


@check("Exercise 6")
def check_wrong_line(answer: int) -> None:
    """`answer` is the number of the wrong line."""
    line = int(number(answer, "the line"))
    expect(1 <= line <= 5, "give the number of a line, 1 to 5")
    expect(line != 5, "line 5 is right for a table in the order of time: is it in that order?")
    expect(line == 4, "this line does what it says: follow the order of the columns instead")


CLOSE = 5
"""Substeps whose estimates are close to the whole ODE in the lesson's table."""


@check("Exercise 9")
def check_choice_of_probe(answer: dict[str, Any]) -> None:
    """`answer` has the nodes of five decisions and a probe, within 80 evaluations."""
    expect(
        isinstance(answer, dict) and set(answer) == {"nodes", "probe"},
        "give a dict with nodes and probe",
    )
    nodes, probe = answer["nodes"], answered(answer["probe"], "the probe")
    nodes = [int(number(node, "a node")) for node in nodes]
    expect(
        len(nodes) == 5 and nodes == sorted(set(nodes)) and nodes[0] >= 0 and nodes[-1] < 39,
        "give five different nodes in increasing order, from 0 to 38",
    )
    each = [39 - node if probe == "completion" else number(probe, "probe") - 1 for node in nodes]
    expect(
        40 + sum(each) <= 80,
        f"{40 + sum(each):.0f} evaluations are too many: the five estimates may cost 40 together",
    )
    expect(
        probe == "completion" or probe > 2,
        f"{probe} of {CLOSE} substeps are too few: their estimates are blurred and far from the"
        " whole ODE in the table above",
    )
    expect(
        probe == "completion" or probe >= CLOSE,
        f"the lesson has not measured {probe} substeps: {CLOSE} are close to the whole ODE, and"
        " fit",
    )
    expect(nodes[-1] <= 27, "the last decisions come too late: they have nearly no gain")


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "the finished image has a column, too",
            "c": "the ODE steps are not decisions and have no columns",
        },
    ),
    (
        "a",
        {
            "b": "all have the same sum, but what is the mean gain of the group?",
            "c": "the gains telescope, whatever they are in between",
        },
    ),
    (
        "b",
        {
            "a": "both its values are estimates, so the common error cancels",
            "c": "most gains are differences of two estimates with the same error",
        },
    ),
    (
        "b",
        {
            "a": "subtracting the mean may change signs in both versions; think of the division",
            "c": "differences between members are what remains, at every decision",
        },
    ),
    (
        "c",
        {
            "a": "this is what we know already: it says nothing about cost",
            "b": "an update of rule B may cost twice as much",
        },
    ),
)

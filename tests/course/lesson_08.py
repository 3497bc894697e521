"""Solutions and likely mistakes of lesson 8."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from flowrl_course import lesson_08 as lesson

from flowrl.credit import gains, reward_to_go
from flowrl.probes import NoProbe, Tweedie
from tests.course.cases import Case
from tests.course.rules import centred, joint, one_std, rule, scored, std_after


def in_place(values, mask):
    values -= values.mean(dim=1, keepdim=True)
    return joint(gains(values), mask)


def no_epsilon(values, mask):
    y = centred(gains(values), mask)
    return y / y.square().nanmean((1, 2), keepdim=True).sqrt()


def ranks(final):
    above = (final[:, :, None] > final[:, None]).to(final).sum(-1)
    ties = (final[:, :, None] == final[:, None]).to(final).sum(-1)
    return above + (ties - 1) / 2


def every_decision(y, mask):
    return y[..., None].repeat(1, 1, mask.shape[-1])


def rank_rule(of_final):
    """A rule made of one function of the rewards of the finished samples [prompt, member]."""
    return rule(
        lambda v, mask: scored(every_decision(of_final(v[..., -1]), mask), mask), NoProbe(), False
    )


def raw_ranks(values, mask):
    return every_decision(ranks(values[..., -1]), mask)


def one_argsort(final):
    """Ties handled, the rest sorted once."""
    silent = (final == final[:, :1]).all(1, keepdim=True)
    return torch.where(silent, 0.0, final.argsort(1).to(final))


@dataclass
class OneRuler:
    decay: float = 0.9
    shared_noise: ClassVar[bool] = True
    probe = Tweedie()
    squares: torch.Tensor | None = None

    def measure(self, y):
        return y.square().nanmean()

    def assign(self, values, decisions):
        y = centred(reward_to_go(values), decisions.mask)
        new = self.measure(y)
        self.squares = (
            new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        )
        return (y / (self.squares.sqrt() + 1e-4)).clamp(-5, 5)

    def state_dict(self):
        return {} if self.squares is None else {"squares": self.squares.clone()}

    def load_state_dict(self, state):
        self.squares = state["squares"].clone() if "squares" in state else None


class NoState(OneRuler):
    state_dict = property()


class ForgetsState(OneRuler):
    def state_dict(self):
        return {}


class Swapped(OneRuler):
    decay = 0.1

    def __init__(self):
        super().__init__(0.1)


class Late(OneRuler):
    def assign(self, values, decisions):
        y = centred(reward_to_go(values), decisions.mask)
        new = self.measure(y)
        ruler = new if self.squares is None else self.squares
        self.squares = (
            new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        )
        return (y / (ruler.sqrt() + 1e-4)).clamp(-5, 5)


class ByGroup(OneRuler):
    def measure(self, y):
        return y.square().nanmean((1, 2), keepdim=True)


class FromZero(OneRuler):
    def assign(self, values, decisions):
        self.squares = torch.zeros(()) if self.squares is None else self.squares
        return super().assign(values, decisions)


class WantsMemory(OneRuler):
    def load_state_dict(self, state):
        self.squares = state["squares"]


class Unclamped(OneRuler):
    limit = 10.0

    def assign(self, values, decisions):
        y = centred(reward_to_go(values), decisions.mask)
        new = self.measure(y)
        self.squares = (
            new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        )
        return (y / (self.squares.sqrt() + 1e-4)).clamp(-self.limit, self.limit)


class NoEpsilon(OneRuler):
    def assign(self, values, decisions):
        y = centred(reward_to_go(values), decisions.mask)
        return y / y.square().nanmean().sqrt()


class ByDecision(OneRuler):
    def measure(self, y):
        return y.square().nanmean((0, 1), keepdim=True).nan_to_num()


class NoRoot(OneRuler):
    def assign(self, values, decisions):
        super().assign(values, decisions)
        return (centred(reward_to_go(values), decisions.mask) / (self.squares + 1e-4)).clamp(-5, 5)


class KeepsOldMemory(OneRuler):
    def load_state_dict(self, state):
        self.squares = state.get("squares", self.squares)


class Stubborn(OneRuler):
    def assign(self, values, decisions):
        self.decay = 0.9
        return super().assign(values, decisions)


CASES = [
    Case(
        lesson.check_mended,
        rule(lambda v, m: joint(gains(v), m)),
        [
            (rule(lambda v, m: joint(gains(v), m), probe=Tweedie), "with brackets"),
            (
                rule(lambda v, m: joint(gains(v), m), probe=NoProbe()),
                "scores the finished sample only",
            ),
            (rule(in_place), "works in place"),
            (rule(no_epsilon), "add 1e-4 to it"),
            (rule(lambda v, m: joint(gains(v), None)), "mask=decisions.mask"),
            (rule(lambda v, m: scored(gains(v), m)), "every decision is normalised by itself"),
            (rule(lambda v, m: joint(gains(v), m), shared=False), "shared_noise = True is gone"),
            (..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_to_go,
        rule(lambda v, m: one_std(reward_to_go(v), m)),
        [
            (rule(lambda v, m: one_std(v[..., -1:] - v[..., 1:], m)), "its own gain belongs to it"),
            (rule(lambda v, m: one_std(gains(v), m)), "these are the gains again"),
            (rule(lambda v, m: scored(reward_to_go(v), m)), "inflates late ones"),
            (rule(lambda v, m: joint(reward_to_go(v), m)), "credit for being early"),
            (rule(lambda v, m: std_after(reward_to_go(v), m)), "as zscore does"),
            (rule(lambda v, m: one_std(reward_to_go(v), None)), "mask=decisions.mask"),
        ],
    ),
    Case(
        lesson.check_rank,
        rank_rule(ranks),
        [
            (rank_rule(lambda f: f.argsort(1).argsort(1).to(f)), "share their mean rank"),
            (rule(raw_ranks, NoProbe(), False), "not normalised: take the z-score"),
            (rank_rule(lambda f: ranks(f.reshape(1, -1)).view_as(f)), "each prompt's group"),
            (rank_rule(one_argsort), "argsort of that argsort"),
            (rank_rule(lambda f: -ranks(f)), "lowest rank"),
            (rank_rule(lambda f: f), "take ranks first"),
            (rule(lambda v, m: scored(raw_ranks(v, m), m)), "costs network evaluations"),
        ],
    ),
    Case(
        lesson.check_remembers,
        OneRuler,
        [
            (NoState, "has state_dict and load_state_dict"),
            (ForgetsState, "is the memory in state_dict"),
            (Swapped, "weights of the average are swapped"),
            (Late, "add its own squares first"),
            (ByGroup, "each group has a scale of its own"),
            (FromZero, "starts from 0"),
            (Unclamped, "clamp them to ±5"),
            (NoEpsilon, "add 1e-4 to the root"),
            (ByDecision, "each decision has a scale of its own"),
            (NoRoot, "root of m is missing"),
            (KeepsOldMemory, "must empty the memory"),
            (WantsMemory, "load_state_dict must accept it"),
            (Stubborn, "is 0.9 written into the rule"),
        ],
    ),
]

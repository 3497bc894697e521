"""Solutions and likely mistakes of lesson 8."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from flowrl_course import lesson_08 as lesson

from flowrl.credit import gains, reward_to_go
from flowrl.probes import NoProbe, Tweedie
from tests.course.cases import Case
from tests.course.rules import centred, joint, one_std, rule, scored, std_after


def in_place(rewards):
    rewards -= rewards.mean(dim=1, keepdim=True)
    return joint(gains(rewards))


def no_epsilon(rewards):
    values = gains(rewards)
    return (values - values.mean((1, 2), keepdim=True)) / values.std((1, 2), unbiased=False, keepdim=True)


def ranks(final):
    above = (final[:, :, None] > final[:, None]).to(final).sum(-1)
    ties = (final[:, :, None] == final[:, None]).to(final).sum(-1)
    return above + (ties - 1) / 2


def every_step(values, rewards):
    return values[..., None].repeat(1, 1, rewards.shape[-1] - 1)


def ranks_of_all(rewards):
    final = rewards[..., -1]
    return scored(every_step(ranks(final.reshape(1, -1)).view_as(final), rewards))


def rank_rule(assign_rewards):
    return rule(assign_rewards, NoProbe(), False)


def broken_ties(rewards):
    return scored(every_step(rewards[..., -1].argsort(1).argsort(1).to(rewards), rewards))


def one_argsort(rewards):
    """Ties handled, the rest sorted once."""
    final = rewards[..., -1]
    silent = (final == final[:, :1]).all(1, keepdim=True)
    return scored(every_step(torch.where(silent, 0.0, final.argsort(1).to(final)), rewards))


@dataclass
class OneRuler:
    decay: float = 0.9
    shared_noise: ClassVar[bool] = True
    probe = Tweedie()
    squares: torch.Tensor | None = None

    def measure(self, values):
        return values.square().mean()

    def assign(self, rewards, schedule):
        values = centred(reward_to_go(rewards))
        new = self.measure(values)
        self.squares = new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        return (values / (self.squares.sqrt() + 1e-4)).clamp(-5, 5)

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
    def assign(self, rewards, schedule):
        values = centred(reward_to_go(rewards))
        new = self.measure(values)
        ruler = new if self.squares is None else self.squares
        self.squares = new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        return (values / (ruler.sqrt() + 1e-4)).clamp(-5, 5)


class ByGroup(OneRuler):
    def measure(self, values):
        return values.square().mean((1, 2), keepdim=True)


class FromZero(OneRuler):
    def assign(self, rewards, schedule):
        self.squares = torch.zeros(()) if self.squares is None else self.squares
        return super().assign(rewards, schedule)


class WantsMemory(OneRuler):
    def load_state_dict(self, state):
        self.squares = state["squares"]


class Unclamped(OneRuler):
    limit = 10.0

    def assign(self, rewards, schedule):
        values = centred(reward_to_go(rewards))
        new = self.measure(values)
        self.squares = new if self.squares is None else self.decay * self.squares + (1 - self.decay) * new
        return (values / (self.squares.sqrt() + 1e-4)).clamp(-self.limit, self.limit)


class NoEpsilon(OneRuler):
    def assign(self, rewards, schedule):
        values = centred(reward_to_go(rewards))
        return values / values.square().mean().sqrt()


class ByStep(OneRuler):
    def measure(self, values):
        return values.square().mean((0, 1), keepdim=True)


class NoRoot(OneRuler):
    def assign(self, rewards, schedule):
        super().assign(rewards, schedule)
        return (centred(reward_to_go(rewards)) / (self.squares + 1e-4)).clamp(-5, 5)


class KeepsOldMemory(OneRuler):
    def load_state_dict(self, state):
        self.squares = state.get("squares", self.squares)


class Stubborn(OneRuler):
    def assign(self, rewards, schedule):
        self.decay = 0.9
        return super().assign(rewards, schedule)


CASES = [
    Case(
        lesson.check_mended,
        rule(lambda r: joint(gains(r))),
        [
            (rule(lambda r: joint(gains(r)), probe=Tweedie), "with brackets"),
            (rule(lambda r: joint(gains(r)), probe=NoProbe()), "scores the last node only"),
            (rule(in_place), "works in place"),
            (rule(no_epsilon), "add 1e-4 to it"),
            (rule(lambda r: scored(gains(r))), "every step is normalised by itself"),
            (rule(lambda r: joint(gains(r)), shared=False), "shared_noise = True is gone"),
            (..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_to_go,
        rule(lambda r: one_std(reward_to_go(r))),
        [
            (rule(lambda r: one_std(r[..., -1:] - r[..., 1:])), "its own gain belongs to it"),
            (rule(lambda r: one_std(gains(r))), "these are the gains again"),
            (rule(lambda r: scored(reward_to_go(r))), "inflates late steps"),
            (rule(lambda r: joint(reward_to_go(r))), "credit for being early"),
            (rule(lambda r: std_after(reward_to_go(r))), "as zscore does"),
        ],
    ),
    Case(
        lesson.check_rank,
        rank_rule(lambda r: scored(every_step(ranks(r[..., -1]), r))),
        [
            (rank_rule(broken_ties), "share their mean rank"),
            (rank_rule(lambda r: every_step(ranks(r[..., -1]), r)), "not normalised: take the z-score"),
            (
                rank_rule(lambda r: scored(every_step(ranks(r[..., -1].reshape(1, -1)).view_as(r[..., -1]), r))),
                "each prompt's group",
            ),
            (rank_rule(one_argsort), "argsort of that argsort"),
            (rank_rule(lambda r: scored(every_step(-ranks(r[..., -1]), r))), "lowest rank"),
            (rank_rule(lambda r: scored(every_step(r[..., -1], r))), "take ranks first"),
            (rule(lambda r: scored(every_step(ranks(r[..., -1]), r))), "costs network evaluations"),
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
            (ByStep, "each step has a scale of its own"),
            (NoRoot, "root of m is missing"),
            (KeepsOldMemory, "must empty the memory"),
            (WantsMemory, "load_state_dict must accept it"),
            (Stubborn, "is 0.9 written into the rule"),
        ],
    ),
]

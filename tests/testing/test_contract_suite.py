"""`flowrl.testing` finds what is broken: one injected fault per promise, each named by the promise
that it breaks.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Credit, Decisions
from flowrl.core.forward import WeightCopy
from flowrl.core.types import Gaussian, LossResult, unit_means
from flowrl.credit import (
    StepwiseGain,
    Uniform,
    Weighted,
    branched_tree,
    gains,
    group_deviations,
    group_zscore,
    unit_values,
    zscore,
)
from flowrl.credit.table import centred, masked_std
from flowrl.flow import expand
from flowrl.flow.gaussian import kl, log_prob
from flowrl.losses import DGPO, GSPO, ClippedLoss, DiffusionNFT
from flowrl.probes import Branch, Completion, NoProbe
from flowrl.rewards import WinRate, win_rates
from flowrl.samplers import CPS, FlowSDE, RandomWindow, Windowed
from flowrl.testing import (
    ContractBroken,
    check_credit,
    check_forward_loss,
    check_group_reward,
    check_loss,
    check_reward,
    check_sampler,
    check_window,
    credit,
    credit_contract,
    forward_loss,
    forward_loss_contract,
    group_reward,
    group_reward_contract,
    loss,
    loss_contract,
    reward,
    reward_contract,
    sampler,
    sampler_contract,
    window,
    window_contract,
)

test_a_rule = credit_contract(StepwiseGain())
test_a_sampler = sampler_contract(CPS(0.5))
test_a_window = window_contract(RandomWindow(3))
test_a_loss = loss_contract(ClippedLoss)
test_a_forward_loss = forward_loss_contract(DiffusionNFT())


class Brightness:
    def score(self, images, prompts):
        return images.flatten(1).mean(1)


test_a_reward = reward_contract(Brightness())
test_a_group_reward = group_reward_contract(WinRate(Brightness()))


def faulty_rule(wrong, probe: Any = Completion(), **extra):
    """A rule whose assign is `wrong(values, decisions)`."""

    class Rule:
        def assign(self, values, decisions):
            return wrong(values, decisions)

    for name, value in {"probe": probe, **extra}.items():
        setattr(Rule, name, value)
    return Rule


def record_rule(wrong, probe: Any = Completion(), **extra):
    """A rule with `credit` only, whose result is `wrong(self, experience)`."""

    class Rule:
        credit = wrong

    for name, value in {"probe": probe, **extra}.items():
        setattr(Rule, name, value)
    return Rule


def dense(values, decisions):
    return zscore(gains(values), over=("member",), mask=decisions.mask)


def repeated(values, decisions):
    """The same credit at every decision, without a copy of it."""
    members = decisions.mask.any(-1, keepdim=True)
    return zscore(values[..., -1:], over=("member",), mask=members).expand_as(decisions.mask)


test_a_rule_that_expands = credit_contract(faulty_rule(repeated, NoProbe()))
test_a_rule_of_records = credit_contract(
    record_rule(lambda self, shown: Credit(dense(shown.values, shown.decisions)))
)


def test_an_expanded_view_of_the_table_shares_its_memory() -> None:
    rule = faulty_rule(
        lambda values, decisions: values[..., -1:].expand_as(decisions.mask), NoProbe()
    )
    assert "leaves_its_input_alone" in {
        finding.promise for finding in check_credit(rule()) if not finding.ok
    }


class Remembers:
    """Keeps a baseline that no checkpoint sees."""

    probe = Completion()

    def __init__(self):
        self.mean = 0.0

    def assign(self, values, decisions):
        advantages = dense(values, decisions) * (1.0 + self.mean)
        self.mean = 0.5
        return advantages


class Forgets(Remembers):
    """Says that it has a memory, but leaves it out of its state."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def assign(self, values, decisions):
        self.calls += 1
        return dense(values, decisions) * self.calls

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class ByPlace:
    """Keeps a factor per prompt, but by its place in the table; or `fault`s otherwise."""

    probe = Completion()

    def __init__(self, fault="place"):
        self.fault, self.known = fault, {}

    def credit(self, experience):
        keys = (
            range(len(experience.prompts))
            if self.fault == "place"
            else [prompt.text for prompt in experience.prompts]
        )
        factor = torch.tensor([self.known.get(str(key), 1.0) for key in keys])
        final = experience.values[..., -1].nan_to_num().mean(1)
        self.known |= {
            str(key): 1.0 + value for key, value in zip(keys, final.tolist(), strict=True)
        }
        return Credit(dense(experience.values, experience.decisions) * factor[:, None, None])

    def state_dict(self):
        return (
            {}
            if self.fault == "forgets"
            else {key: torch.tensor(value) for key, value in self.known.items()}
        )

    def load_state_dict(self, state):
        self.known = {key: float(value) for key, value in state.items()}


def in_place(values, decisions):
    values -= values.clone().mean(1, keepdim=True)
    return dense(values, decisions)


def mask_in_place(values, decisions):
    found = dense(values, decisions)
    decisions.mask.logical_not_()
    return found


def tree_rule(wrong, **extra):
    """A tree rule whose advantages of units are `wrong(values [prompt, unit], tree)`."""

    def assign(self, values, decisions):
        tree = branched_tree(decisions, "Rule")
        return tree.decision_table(wrong(unit_values(values, decisions, tree), tree))

    return faulty_rule(None, Branch((2, 2)), assign=assign, **extra)


def fair(values, tree):
    return group_zscore(values, tree.parent)


def by_members(self, values, decisions):
    """Takes the members for those of the probe's own tree, in order."""
    final = values[..., -1].masked_fill(~decisions.mask.any(-1), torch.nan)
    pairs = final[:, : 2 * (values.shape[1] // 2)].unflatten(1, (-1, 2))
    advantages = torch.zeros_like(values[..., 1:])
    advantages[:, : 2 * pairs.shape[1], 0] = (
        (pairs - pairs.nanmean(2, keepdim=True)).flatten(1).nan_to_num()
    )
    return advantages


def as_tree(experience, unit):
    """Credit from the values of units, by `unit(values, tree, log_probs)`."""
    tree = branched_tree(experience.decisions, "Rule")
    values = unit_values(experience.values, experience.decisions, tree)
    log_probs = tree.edge_means(
        experience.log_probs, experience.decisions.drawn & experience.valid[..., None]
    )
    return Credit(tree.decision_table(unit(values, tree, log_probs)))


TREE_RULES = {
    "treats_members_alike": faulty_rule(None, Branch((2, 2)), assign=by_members),
    "treats_prompts_alike": record_rule(
        lambda self, shown: as_tree(
            shown, lambda values, tree, log_probs: fair(values, tree) * log_probs[:1].exp()
        ),
        Branch((2, 2)),
    ),
    "gives_a_silent_group_zero": record_rule(
        lambda self, shown: as_tree(
            shown, lambda values, tree, log_probs: fair(values, tree) + 0.01 * log_probs
        ),
        Branch((2, 2)),
    ),
    "survives_extremes": tree_rule(
        lambda values, tree: (
            fair(values, tree) / group_deviations(values, tree.node).abs().amax(1)[:, None]
        )
    ),
    "leaves_its_input_alone": tree_rule(
        lambda values, tree: fair(values, tree) * (1 + tree.node.sub_(1)) / (1 + tree.node)
    ),
    "leaves_out_masked_members": tree_rule(
        lambda values, tree: fair(values, tree) * (~values.isnan()).float().mean()
    ),
}


def weighing(weights):
    return record_rule(
        lambda self, shown: Credit(dense(shown.values, shown.decisions), weights(shown))
    )


RULES = {
    "declares_a_probe": [
        faulty_rule(dense, probe="completion"),
        faulty_rule(dense, assign=lambda self, rewards, schedule: rewards[..., 1:]),
        faulty_rule(dense, assign=None),
    ],
    "leaves_its_input_alone": [faulty_rule(in_place), faulty_rule(mask_in_place)],
    "returns_advantages_per_decision": [
        faulty_rule(lambda v, d: dense(v, d).transpose(0, 1)),
        faulty_rule(lambda v, d: torch.zeros_like(v)),
        faulty_rule(lambda v, d: dense(v, d).long()),
        faulty_rule(lambda v, d: dense(v, d).tolist()),
        record_rule(lambda self, shown: dense(shown.values, shown.decisions)),
        weighing(lambda shown: 2.0 * shown.decisions.mask),
        weighing(lambda shown: shown.decisions.mask),
        weighing(lambda shown: torch.zeros(shown.decisions.mask.shape)),
    ],
    "reads_only_what_its_probe_fills": [faulty_rule(dense, probe=NoProbe())],
    "is_deterministic": [faulty_rule(lambda v, d: dense(v, d) + 1e-3 * torch.randn(1))],
    "reads_nothing_outside_the_mask": [
        faulty_rule(lambda v, d: zscore(gains(v), over=("member",))),
        faulty_rule(lambda v, d: zscore(gains(v).nan_to_num(), over=("member",))),
        faulty_rule(lambda v, d: dense(v, d) * v[..., :1].nanmean(), reads=StepwiseGain().reads),
    ],
    "leaves_out_masked_members": [
        faulty_rule(lambda v, d: dense(v, d) * d.mask.any(-1).float().mean())
    ],
    "ignores_a_constant": [faulty_rule(lambda v, d: v[..., 1:] - 0.5)],
    "treats_members_alike": [
        faulty_rule(lambda v, d: dense(v, d) * (d.mask.any(-1).cumsum(1) + 1.0)[..., None])
    ],
    "treats_prompts_alike": [
        faulty_rule(lambda v, d: dense(v, d) * torch.arange(1, len(v) + 1)[:, None, None])
    ],
    "gives_a_silent_group_zero": [
        faulty_rule(
            lambda v, d: zscore(gains(v), over=("prompt", "member", "decision"), mask=d.mask)
        ),
        faulty_rule(lambda v, d: dense(v, d) + 0.01),
    ],
    "survives_extremes": [
        faulty_rule(
            lambda v, d: (
                dense(v, d) / masked_std(gains(v), ("member",), d.mask).sub(1e-7).clamp(min=0)
            )
        )
    ],
    "accepts_double_precision": [
        faulty_rule(lambda v, d: dense(v, d) * (2.0 if v.dtype == torch.float64 else 1.0))
    ],
    "keeps_its_memory": [Remembers, Forgets, partial(ByPlace, "forgets")],
    "follows_prompts": [ByPlace],
    "agrees_with_its_assign": [
        record_rule(
            lambda self, shown: Credit(2.0 * dense(shown.values, shown.decisions)),
            assign=lambda self, values, decisions: dense(values, decisions),
        )
    ],
    "credits_components": [
        record_rule(
            lambda self, shown: Credit(
                torch.stack(
                    [
                        dense(t, shown.decisions)
                        for t in (shown.parts or {"": shown.values}).values()
                    ]
                ).squeeze(0)
            )
        ),
        record_rule(
            lambda self, shown: Credit(
                dense(
                    sum(t.mul_(0.5) for t in shown.parts.values()) + shown.values, shown.decisions
                )
            )
        ),
    ],
    "pays_the_better_member": [
        faulty_rule(lambda v, d: -dense(v, d)),
    ],
}
ADVICE = {
    "pays_the_better_member": faulty_rule(lambda v, d: -dense(v, d) - 2.0 * dense(v, d).square()),
}
FIRST = [promise.name for promise in credit.CONTRACT.promises if promise.basic]


@dataclass(frozen=True)
class Altered:
    """FlowSDE with one thing wrong."""

    fault: str

    def transition(self, latent, velocity, schedule, step):
        good = Windowed(FlowSDE(0.7), range(1, 8)).transition(latent, velocity, schedule, step)
        mean, std = good.mean, good.std
        if self.fault == "returns_a_gaussian_per_sample":
            return Gaussian(mean, expand(std, mean))
        if self.fault == "is_finite_at_every_step":
            return Gaussian(mean, torch.where(schedule.times[step + 1] == 0, torch.nan, std))
        if self.fault == "knows_no_tiny_noise":
            return Gaussian(mean, std.clamp(min=1e-8))
        if self.fault == "moves_along_the_path":
            return Gaussian(mean + 0.01 * velocity, std)
        if self.fault == "computes_in_float32":
            return Gaussian((latent - 0.1 * velocity).float() + 0.1 * velocity + mean - latent, std)
        if self.fault == "treats_samples_separately":
            return Gaussian(mean + 0.01 * mean.detach().mean(0), std)
        if self.fault == "has_one_std_per_step":
            return Gaussian(mean, std * (1 + 0.1 * (latent.flatten(1).mean(1) > 0)))
        if self.fault == "is_pure":
            return Gaussian(mean + 1e-3 * torch.randn(1), std)
        if self.fault == "passes_gradient_through_the_mean":
            return Gaussian(mean.detach(), std)
        if self.fault == "makes_decisions":
            return Gaussian(mean, torch.zeros_like(std))
        return good


class FaultyWindow:
    def __init__(self, fault):
        self.fault = fault

    def steps(self, count, generator, iteration=0):
        drawn = None if self.fault == "draws_reproducibly" else generator
        start = int(torch.randint(0, count - 1, (), generator=drawn))
        return [start + 1, start] if self.fault == "returns_steps" else [start, start + 1]


SAMPLERS = {promise.name: [Altered(promise.name)] for promise in sampler.CONTRACT.promises}


class FaultyReward:
    def __init__(self, fault):
        self.fault = fault

    def score(self, images, prompts):
        scores = images.flatten(1).mean(1)
        if self.fault == "returns_one_number_per_image":
            return scores[:, None]
        if self.fault == "keeps_the_order":
            return scores.sort().values
        if self.fault == "treats_samples_separately":
            return scores - scores.mean()
        if self.fault == "is_deterministic":
            return scores + 1e-3 * torch.randn(1)
        if self.fault == "leaves_images_alone":
            images.mul_(0.5)
        if self.fault == "needs_no_gradient":
            return scores * torch.ones(1, requires_grad=True)
        if self.fault == "scores_a_single_image":
            return scores.squeeze()
        return scores

    def parts(self, images, prompts):
        return {"bright": images.flatten(1).mean(1)}

    def total(self, parts):
        return (2.0 if self.fault == "adds_up_its_parts" else 1.0) * parts["bright"]


class FaultyGroupReward:
    evaluation = Brightness()

    def __init__(self, fault):
        self.fault = fault
        if fault == "names_an_evaluation_reward":
            self.evaluation = "brightness"

    def score_groups(self, images, prompts):
        scores = images.flatten(2).mean(2)
        rates = win_rates(scores)
        if self.fault == "returns_one_number_per_member":
            return rates.flatten()
        if self.fault == "is_deterministic":
            return rates + 1e-3 * torch.randn(1)
        if self.fault == "leaves_images_alone":
            images.mul_(0.5)
        if self.fault == "accepts_any_number_of_members":
            return rates if images.shape[1] > 2 else rates / 0
        if self.fault == "treats_members_alike":
            return rates + 0.01 * (scores > scores[:, :1])
        if self.fault == "treats_groups_separately":
            return win_rates(scores.view(1, -1)).view_as(scores)
        if self.fault == "gives_equal_images_equal_scores":
            return scores.argsort(dim=1, stable=True).argsort(dim=1).float()
        if self.fault == "needs_no_gradient":
            return rates * torch.ones(1, requires_grad=True)
        return scores if self.fault == "compares_members" else rates

    def group_parts(self, images, prompts):
        return {"bright": self.score_groups(images.clone(), prompts).detach()}

    def total(self, parts):
        return (2.0 if self.fault == "adds_up_its_parts" else 1.0) * parts["bright"]


@dataclass(frozen=True)
class FaultyLoss:
    fault: str
    needs_reference: bool = False
    trains_zero_advantages: bool = False

    @property
    def unit(self):
        return "pair" if self.fault == "declares_what_it_needs" else "transition"

    def loss(self, batch):
        good = ClippedLoss(clip_range=0.5, kl_weight=0.0).loss(batch)
        counts = (batch.weight > 0) & (batch.behaviour.std > 0)
        weight = torch.where(counts, batch.weight, 0.0)
        ratio = (
            log_prob(batch.new, batch.next_node) - log_prob(batch.behaviour, batch.next_node)
        ).exp()
        terms = -batch.advantages * ratio
        if self.fault == "returns_a_scalar":
            return LossResult(good.loss[None], {})
        if self.fault == "is_pure":
            return replace(good, loss=good.loss * (1 + 1e-3 * torch.randn(())))
        if self.fault == "reports_detached_metrics":
            return LossResult(good.loss, {"ratio": ratio.mean()})
        if self.fault == "starts_at_ratio_one":
            return LossResult(good.loss, {"ratio_mean": 1.1 * ratio.detach().mean()})
        if self.fault == "ignores_rows_of_weight_0":
            return replace(good, loss=(terms * weight).sum() / weight.sum().clamp(min=1e-9))
        if self.fault == "ignores_deterministic_rows":
            distance = (batch.new.mean - batch.behaviour.mean).square().flatten(1).mean(1)
            return replace(
                good,
                loss=good.loss
                + 0.1 * (batch.weight * distance * (batch.behaviour.std == 0)).mean(),
            )
        if self.fault == "survives_weights_of_0":
            return replace(good, loss=good.loss * weight.sum() / weight.sum())
        if self.fault == "starts_as_the_policy_gradient":
            return replace(good, loss=-good.loss)
        if self.fault == "trains_zero_advantages_as_declared":
            distance = (batch.new.mean - batch.behaviour.mean)[counts].square().flatten(1).mean(1)
            return replace(
                good,
                loss=good.loss
                + 1e-2 * (weight[counts] * distance).sum() / weight.sum().clamp(min=1e-9),
            )
        if self.fault == "is_a_weighted_mean":
            return ClippedLoss(clip_range=0.5).loss(replace(batch, weight=counts.float()))
        if self.fault == "does_not_depend_on_order":
            shifted = replace(
                batch, advantages=batch.advantages * torch.linspace(0.5, 1.0, len(weight))
            )
            return ClippedLoss(clip_range=0.5).loss(shifted)
        if self.fault == "adds_up_over_parts":
            return replace(
                good,
                loss=good.loss * (1 + (weight * batch.delta).sum() / weight.sum().clamp(min=1e-9)),
            )
        if self.fault == "does_not_depend_on_resolution":
            return replace(good, loss=good.loss * batch.new.mean[0].numel())
        if self.fault == "differentiates_the_new_policy_only":
            leak = kl(batch.behaviour, Gaussian(batch.next_node, batch.behaviour.std))[counts]
            return replace(good, loss=good.loss + (1e-9 * leak).sum())
        if self.fault == "says_whether_it_needs_the_reference":
            assert batch.reference is not None
        return good


@dataclass(frozen=True)
class FaultyUnits:
    """GSPO with one fault."""

    fault: str
    needs_reference: bool = False
    trains_zero_advantages: bool = False

    @property
    def unit(self):
        return (
            "transition"
            if self.fault == "undeclared unit"
            else "group"
            if self.fault == "other unit"
            else "trajectory"
        )

    @property
    def row_terms(self):
        if self.fault == "no row_terms":
            raise AttributeError("row_terms")
        return (
            GSPO().row_terms
            if self.fault != "row_terms with a gradient"
            else lambda batch: log_prob(batch.new, batch.next_node)
        )

    def loss(self, batch):
        found = GSPO(clip_range=0.02)
        if self.fault == "ignores pooled":
            return found.loss(replace(batch, pooled=None))
        if self.fault == "by place":
            return found.loss(replace(batch, sample=torch.arange(len(batch.sample)) % 4))
        if self.fault == "means without weights":
            terms, units = found.row_terms(batch), batch.units("trajectory")
            pooled = (
                unit_means(terms, units, (batch.weight > 0).float())
                if batch.pooled is None
                else batch.pooled
            )
            return found.loss(replace(batch, pooled=pooled))
        if self.fault == "off policy at once":
            return found.loss(replace(batch, pooled=torch.where(batch.group == 1, 0.1, 0.0)))
        return found.loss(batch)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("ignores pooled", "adds_up_over_parts"),
        ("undeclared unit", "adds_up_over_parts"),
        ("other unit", "adds_up_over_parts"),
        ("row_terms with a gradient", "adds_up_over_parts"),
        ("by place", "does_not_depend_on_order"),
        ("means without weights", "is_a_weighted_mean"),
        ("off policy at once", "starts_as_the_policy_gradient"),
        ("no row_terms", "declares_what_it_needs"),
    ],
)
def test_faults_of_units_are_named(fault: str, name: str) -> None:
    found = check_loss(FaultyUnits(fault))
    assert name in found.broken, str(found)
    assert check_loss(FaultyUnits("")).ok, str(check_loss(FaultyUnits("")))


def test_zero_advantages_declared_for_nothing_are_named() -> None:
    assert check_loss(FaultyLoss("", trains_zero_advantages=True)).broken == [
        "trains_zero_advantages_as_declared"
    ]


class FaultyTimes:
    """Times that leave (0, 1]."""

    def draws(self, schedule):
        return 3

    def draw(self, schedule, samples, generator):
        return torch.rand(samples, 3, generator=generator) - 0.5


class FaultyForwardLoss:
    """DGPO's policy term in a few lines, with one fault; like the others, without a penalty."""

    needs_reference, unit, noise, times = True, "group", "group", DGPO().times

    def __init__(self, fault):
        self.fault = fault
        self.copies = {"average": WeightCopy()} if fault == "needs_what_it_declares" else {}
        if fault == "draws_times":
            self.times = FaultyTimes()
        if fault == "declares_what_it_needs":
            self.noise = "all"

    def row_terms(self, batch):
        with torch.no_grad():
            return self.terms(batch)

    def terms(self, batch):
        return (
            50.0
            * self.advantages(batch)
            * (
                self.error(batch, batch.new)
                - self.error(batch, batch.velocity_of("reference", self))
            )
        )

    def advantages(self, batch):
        return batch.advantages.detach().masked_fill(batch.weight == 0, 0.0)

    def error(self, batch, velocity):
        mask = (batch.weight > 0)[:, None, None]
        if self.fault == "ignores_rows_of_weight_0":
            mask = torch.ones_like(mask)
        target = (
            batch.target
            if self.fault == "differentiates_the_new_network_only"
            else batch.target.detach()
        )
        found = torch.where(mask, velocity - target, 0.0).square().flatten(1)
        return found.sum(1) if self.fault == "does_not_depend_on_resolution" else found.mean(1)

    def loss(self, batch):
        fault, error = self.fault, self.error(batch, batch.new)
        pooled = batch.pooled
        if pooled is None or fault == "adds_up_over_parts":
            pooled = unit_means(self.row_terms(batch), batch.units("group"), batch.weight)
        if fault == "balances_groups":
            pooled = self.row_terms(batch)
        if fault == "does_not_depend_on_order":
            pooled = pooled.roll(4)
        weight = batch.weight if fault != "is_a_weighted_mean" else (batch.weight > 0).float()
        scale = torch.sigmoid(pooled).detach() * self.advantages(batch)
        if fault == "starts_along_the_advantage":
            scale = -scale
        terms = scale * error
        if fault == "does_nothing_without_advantage":
            terms = terms + 1e-3 * error
        if fault == "survives_weights_of_0":
            return LossResult((weight * terms).sum() / weight.sum(), {})
        value = (weight * terms).sum() / weight.sum().clamp(min=1e-9)
        if fault == "returns_a_scalar":
            value = value[None]
        if fault == "is_pure":
            batch.advantages.mul_(0.5)
        return LossResult(
            value,
            {
                "error": error.mean()
                if fault == "reports_detached_metrics"
                else error.mean().detach()
            },
        )


@pytest.mark.parametrize("name", [p.name for p in forward_loss.CONTRACT.promises])
def test_faulty_forward_losses_are_named(name: str) -> None:
    found = check_forward_loss(FaultyForwardLoss(name))
    assert name in found.broken, str(found)
    # parts and repeated rows are at other places, too
    most = 5 if name == "does_not_depend_on_order" else 2
    assert len(found.broken) <= most, str(found)


def test_the_forward_loss_without_a_fault_keeps_every_promise() -> None:
    assert check_forward_loss(FaultyForwardLoss("")).ok, str(
        check_forward_loss(FaultyForwardLoss(""))
    )


def test_every_promise_has_its_fault() -> None:
    assert set(RULES) | set(ADVICE) == {p.name for p in credit.CONTRACT.promises}
    assert set(SAMPLERS) == {p.name for p in sampler.CONTRACT.promises}


@pytest.mark.parametrize("name", [p.name for p in window.CONTRACT.promises])
def test_faulty_windows_are_named(name: str) -> None:
    found = check_window(FaultyWindow(name))
    assert found.broken == [name], str(found)
    assert check_window(FaultyWindow("")).ok


@pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name, rules in RULES.items() for rule in rules]
)
def test_faulty_rules_are_named(name: str, rule: Any) -> None:
    found = check_credit(rule)
    assert name in found.broken, str(found)
    assert len(found.broken) == 1 if name in FIRST else len(found.broken) <= 2, str(found)
    assert f"BROKEN   {name}" in str(found)
    message = next(f.message for f in found if f.promise == name)
    assert f"breaks the promise '{name}'" in message


@pytest.mark.parametrize("name", TREE_RULES)
def test_faulty_tree_rules_are_named(name: str) -> None:
    found = check_credit(TREE_RULES[name])
    assert name in found.broken, str(found)


def test_a_tree_rule_of_ones_own_keeps_all_promises() -> None:
    found = check_credit(tree_rule(fair))
    assert found.ok, str(found)


def test_a_probe_whose_trees_fit_no_table_is_named() -> None:
    found = check_credit(
        faulty_rule(None, Branch({0: 97}), assign=lambda self, values, decisions: values[..., 1:])
    )
    assert "fit no groups of up to 96 members" in str(found)


@pytest.mark.parametrize("name", ADVICE)
def test_odd_rules_get_advice(name: str) -> None:
    found = check_credit(ADVICE[name])
    assert found.ok
    assert f"advice   {name}" in str(found)


def test_a_rule_that_divides_by_the_spread_of_the_final_reward_alone_gets_advice() -> None:
    def scaled(values: torch.Tensor, decisions: Decisions) -> torch.Tensor:
        members = decisions.mask.any(-1, keepdim=True)
        spread = masked_std(values[..., -1:], ("member",), members)
        return centred(gains(values), ("member",), decisions.mask) / (spread + 1e-4)

    found = check_credit(faulty_rule(scaled))
    advice = next(f for f in found if f.promise == "gives_a_silent_group_zero")
    assert (advice.mark, "clamp it" in advice.message) == ("advice", True)


@pytest.mark.parametrize("name", [p.name for p in sampler.CONTRACT.promises])
def test_faulty_samplers_are_named(name: str) -> None:
    found = check_sampler(SAMPLERS[name][0])
    assert name in found.broken, str(found)
    assert len(found.broken) <= 2, str(found)


@pytest.mark.parametrize("name", [p.name for p in reward.CONTRACT.promises])
def test_faulty_rewards_are_named(name: str) -> None:
    found = check_reward(FaultyReward(name))
    assert name in found.broken, str(found)
    assert check_reward(FaultyReward("")).ok


@pytest.mark.parametrize("name", [p.name for p in group_reward.CONTRACT.promises])
def test_faulty_group_rewards_are_named(name: str) -> None:
    found = check_group_reward(FaultyGroupReward(name))
    if name == "compares_members":
        assert found.ok and f"advice   {name}" in str(found)
    else:
        assert name in found.broken, str(found)
        assert len(found.broken) <= 2, str(found)
    assert check_group_reward(FaultyGroupReward("")).ok, str(
        check_group_reward(FaultyGroupReward(""))
    )


@pytest.mark.parametrize("name", [p.name for p in loss.CONTRACT.promises])
def test_faulty_losses_are_named(name: str) -> None:
    found = check_loss(FaultyLoss(name))
    assert name in found.broken, str(found)
    # parts and repeated rows are at other places, too
    most = 5 if name == "does_not_depend_on_order" else 2
    assert len(found.broken) <= most or name in (
        "returns_a_scalar",
        "is_pure",
        "declares_what_it_needs",
    ), str(found)
    assert check_loss(FaultyLoss("")).ok


def test_findings_read_well() -> None:
    found = check_credit(Uniform())
    idle = [finding.promise for finding in found if finding.mark == "n/a"]
    kept = len(credit.CONTRACT.promises) - len(idle)
    assert found.ok
    assert len(found) == kept + len(idle)
    assert idle == ["follows_prompts", "agrees_with_its_assign", "credits_components"]
    assert (
        str(found).splitlines()[0] == f"Uniform(): {kept} of {kept} promises kept; 3 do not apply"
    )
    assert "n/a      follows_prompts\nn/a" in str(found)
    broken = " ".join(
        str(check_credit(faulty_rule(lambda v, d: dense(v, d).transpose(0, 1)))).split()
    )
    assert "BROKEN returns_advantages_per_decision" in broken
    assert "(5, 3, 10), not floating point of shape" in broken
    assert (
        "untried is_deterministic not tried, because 'returns_advantages_per_decision' is broken"
        in broken
    )
    untried = len(credit.CONTRACT.promises) - 3
    assert f": 2 of {untried + 3} promises kept; {untried} were not tried kept" in broken


def test_an_exception_of_the_part_is_told_with_its_promise() -> None:
    def fails(values: Any, decisions: Any) -> Any:
        raise RuntimeError("no such node")

    check = next(p for p in credit.CONTRACT.promises if p.name == "is_deterministic").check
    with pytest.raises(ContractBroken, match=r"'is_deterministic'.*RuntimeError: no such node"):
        check(credit.Case(faulty_rule(fails)()))


def test_promises_can_be_left_out_by_name_only() -> None:
    assert check_credit(ADVICE["pays_the_better_member"], without=("pays_the_better_member",)).ok
    with pytest.raises(ConfigError, match="promises of a credit rule are"):
        check_credit(Uniform(), without=("pays_rent",))
    with pytest.raises(ConfigError, match="decisions"):
        check_credit(Uniform(), decisions=0)
    with pytest.raises(ConfigError, match="examples"):
        check_reward(FaultyReward(""), examples=(torch.rand(3, 3, 8, 8), []))


def test_a_rule_for_four_decisions_is_tried_on_four_decisions() -> None:
    rule = Weighted(weights=(1.8, 1.0, 0.0, 1.3))
    assert check_credit(rule, decisions=4).ok
    assert not check_credit(rule).ok

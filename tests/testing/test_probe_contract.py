"""The contract of probes: the built-in ones keep it, and every promise is broken by a fault that it
is there to find.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from flowrl_bench.probes import SomeMembers

from flowrl.parts.registry import build
from flowrl.probes import (
    Branch,
    Call,
    Comb,
    Completion,
    Continuation,
    Cost,
    Estimate,
    NoProbe,
    Probe,
    Substeps,
    Tweedie,
)
from flowrl.testing import check_credit, check_probe, probe_contract
from flowrl.testing.credit import CONTRACT

test_none = probe_contract(NoProbe())
test_tweedie = probe_contract(Tweedie)
test_substeps = probe_contract(Substeps(3))
test_substeps_by_a_solver = probe_contract(Substeps(3, solver="dpm++", every=2))
test_substeps_of_some_members = probe_contract(SomeMembers(Substeps(2)))
test_unguided_substeps = probe_contract(Substeps(4, guidance="off"), members=2)
test_completion = probe_contract(Completion())
test_cheap_completion = probe_contract(
    SomeMembers(Completion(every=2, solver="unipc"), control="uniform")
)
test_narrow_completion = probe_contract(Completion(dtype="bfloat16"))
test_continuation = probe_contract(Continuation(2))
test_branch = probe_contract(Branch({0: 2, 2: 2}))
test_comb = probe_contract(Comb(2, count=2))


@dataclass(frozen=True)
class Own(Probe):
    """A probe as docs/guides/extend.md writes one: the mean of the one-step estimates of a node and
    of a point near it.
    """

    size: float = 0.1

    def estimate(self, run):
        times, found = run.trajectories.schedule.times, {}
        for node in run.nodes:
            x, v = run.start(node)
            noise = run.rand(len(x) // run.groups, *x.shape[1:]).flatten(0, 1)
            near = x + self.size * (noise - 0.5)
            velocity = run.velocity(near, (1000 * times[node]).expand(len(near)))
            both = torch.stack([x - times[node] * v, near - times[node] * velocity], 1)
            found[node] = Estimate(both.flatten(0, 1), copies=2)
        return found

    def cost(self, shape):
        rows = [shape.rows[node] for node in shape.nodes]
        return Cost([Call(count) for count in rows], 2 * sum(rows))


test_a_probe_of_ones_own = probe_contract(Own())


def test_the_probe_in_the_documentation_keeps_the_contract(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "guides" / "extend.md").read_text()
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if block.startswith("# my_probes.py")
    )
    (tmp_path / "my_probes.py").write_text(code)
    found = check_probe(build("probe", f"{tmp_path / 'my_probes.py'}:TwoSteps(share=0.3)"))
    assert found.ok and len(found) == 8, str(found)


def faulty(**methods):
    """`Own` with a fault."""
    return type("Faulty", (Own,), methods)()


def in_place(self, run):
    run.trajectories.states.add_(1e-3)
    return {}


def not_finite(self, run):
    return {node: Estimate(run.start(node)[0] / 0) for node in run.nodes}


def of_the_last_node(self, run):
    return {6: Estimate(run.final)}


def half(self, run):
    return {node: found for node, found in Own.estimate(self, run).items() if node % 2}


def global_draws(self, run):
    return {
        node: Estimate(run.start(node)[0] + 0.1 * torch.randn_like(run.start(node)[0]))
        for node in run.nodes
    }


def draws_of_its_own(self, run):
    generator = torch.Generator().manual_seed(0)
    starts = {node: run.start(node)[0] for node in run.nodes}
    return {
        node: Estimate(x + 0.3 * torch.randn(x.shape, generator=generator))
        for node, x in starts.items()
    }


def batch_means(self, run):
    return {node: Estimate(run.start(node)[0] - run.start(node)[0].mean(0)) for node in run.nodes}


def weights(self, run):
    parameter = next(iter(run.walk.policy.trainable().values()))
    parameter.data.add_(0.01)
    return Own.estimate(self, run)


FAULTS = [
    ("is_a_probe", Own),
    ("is_a_probe", "tweedie"),
    ("estimates_final_latents", faulty(estimate=in_place)),
    ("estimates_final_latents", faulty(estimate=not_finite)),
    ("estimates_final_latents", faulty(estimate=of_the_last_node)),
    ("fills_what_it_says", faulty(estimate=half)),
    ("fills_what_it_says", faulty(fills=lambda self, steps: range(2))),
    ("leaves_the_rollout_alone", faulty(estimate=weights)),
    ("is_deterministic", faulty(estimate=global_draws)),
    ("does_not_depend_on_chunks", faulty(estimate=draws_of_its_own)),
    ("does_not_depend_on_chunks", faulty(estimate=batch_means)),
    ("costs_what_it_declares", faulty(cost=lambda self, shape: Cost([Call(10)], 10))),
    (
        "costs_what_it_declares",
        faulty(
            cost=lambda self, shape: Cost([Call(shape.rows[node], 0.5) for node in shape.nodes])
        ),
    ),
]


@pytest.mark.parametrize(
    ("promise", "part"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_faults_are_found(promise, part):
    make = (lambda: part) if isinstance(part, type) else part
    assert promise in check_probe(make).broken


def test_rules_may_use_any_probe():
    class Rule:
        probe = Own()

        def assign(self, values, decisions):
            return values[..., 1:] - values[..., :-1]

    assert "declares_a_probe" not in check_credit(Rule()).broken
    assert next(
        promise for promise in CONTRACT.promises if promise.name == "declares_a_probe"
    ).basic

"""The contract of policies: all of ours keep it, and every promise is broken by a fault of its
own.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.core.types import Condition, Schedule
from flowrl.testing import check_policy, policy, policy_contract
from flowrl.testing.tiny import TINY, tiny_flux_policy, tiny_sd3_policy
from flowrl.worlds.base import PolicyOptions, world

DIRECTIONS = ["towards 45 degrees", "towards 90 degrees", "towards 200 degrees"]
SHAPES = ["three red circles", "two blue squares", 'text "K72"']


def mixture():
    return world("mixture").policy(PolicyOptions())


test_mixture = pytest.mark.filterwarnings("ignore::flowrl.testing.ContractAdvice")(
    policy_contract(mixture, DIRECTIONS)
)
test_small_sd3 = policy_contract(lambda: world("shapes").policy(PolicyOptions(lora_rank=4)), SHAPES)
test_sd3 = policy_contract(tiny_sd3_policy)
test_sd3_guided = policy_contract(lambda: tiny_sd3_policy(replace(TINY, guidance_scale=3.0)))
test_sd3_in_bfloat16 = policy_contract(
    lambda: tiny_sd3_policy(replace(TINY, dtype="bfloat16")), tolerance=2e-2
)
test_flux = policy_contract(tiny_flux_policy)
test_flux_as_a_whole = policy_contract(lambda: tiny_flux_policy(replace(TINY, tuning="full")))


class Faulty:
    """The mixture's policy with one member replaced; the others see the replacement only where they
    call it through `self`.
    """

    def __init__(self, **faults):
        self.inner, self.faults = mixture(), faults

    def __getattr__(self, name):
        if name in self.faults:
            fault = self.faults[name]
            return fault if not callable(fault) else lambda *given: fault(self.inner, *given)
        return getattr(self.inner, name)


def stays_in_reference(inner):
    @contextmanager
    def context():
        inner._base_only = True
        with torch.no_grad():
            yield
        inner._base_only = False

    return context()


def rounds_weights(inner):
    @contextmanager
    def context():
        with torch.no_grad():
            yield
            for parameter in inner.net.parameters():
                parameter.copy_(parameter.half().float())

    return context()


def merges_badly(inner):
    @contextmanager
    def context():
        bias = inner.net[-1].bias
        with torch.no_grad():
            bias += 0.1
            yield
            bias -= 0.1

    return context()


def whole_batch(inner, latent, time, condition):
    velocity = inner.velocity(latent, time, condition)
    return velocity - velocity.mean(0, keepdim=True)


FAULTS = {
    "has_all_members": [{"latent_shape": [2, 1, 1]}, {"device": "cpu"}, {"decode": None}],
    "has_a_schedule": [
        {"schedule": lambda p, steps: Schedule(torch.linspace(1, 0, steps + 2))},
        {"schedule": lambda p, steps: Schedule(torch.linspace(1, 0.01, steps + 1))},
        {"schedule": lambda p, steps: Schedule(torch.linspace(0.5, 0, steps + 1))},
    ],
    "encodes_a_row_per_prompt": [
        {"encode": lambda p, prompts: p.encode(prompts[:1])},
        {"encode": lambda p, prompts: p.encode(prompts).tensors},
    ],
    "gives_velocities": [
        {"velocity": lambda p, *given: p.velocity(*given).bfloat16()},
        {"velocity": lambda p, *given: p.velocity(*given).flatten(1)},
        {"velocity": lambda p, *given: p.velocity(*given) / 0},
    ],
    "is_deterministic": [
        {"velocity": lambda p, x, *given: p.velocity(x, *given) + 1e-3 * torch.randn_like(x)}
    ],
    "treats_samples_separately": [
        {"velocity": whole_batch},
        {"velocity": lambda p, x, time, told: p.velocity(x, time[:1].expand(len(x)), told)},
    ],
    "conditions_can_be_rearranged": [
        {
            "encode": lambda p, prompts: Condition(
                {"direction": p.encode(prompts).tensors["direction"] * len(prompts)}
            ),
            "velocity": lambda p, x, time, told: (
                p.velocity(x, time, told) + told.tensors["direction"][:, :, None, None]
            ),
        }
    ],
    "decodes_images": [
        {"decode": lambda p, latent: latent.flatten(1)},
        {"decode": lambda p, x: x * p.net[0].bias.sum()},
    ],
    "names_what_is_trained": [
        {"trainable": lambda p: {}},
        {
            "trainable": lambda p: {
                n: torch.nn.Parameter(q.detach().clone()) for n, q in p.trainable().items()
            }
        },
        {"trainable": lambda p: {n: q.requires_grad_(False) for n, q in p.trainable().items()}},
    ],
    "carries_a_gradient": [{"velocity": lambda p, *given: p.velocity(*given).detach()}],
    "has_a_reference": [
        {"reference": lambda p: torch.no_grad()},
        {"reference": lambda p: nullcontext()},
        {"reference": stays_in_reference},
    ],
    "may_be_frozen": [
        {"frozen": lambda p: nullcontext()},
        {"frozen": rounds_weights},
        {"frozen": merges_badly},
    ],
}


@pytest.mark.parametrize(
    ("promise", "fault"),
    [(name, fault) for name, faults in FAULTS.items() for fault in faults],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_fault_is_found_by_its_promise(promise, fault):
    found = check_policy(Faulty(**fault), DIRECTIONS)
    assert promise in found.broken, found
    basic = [p.name for p in policy.CONTRACT.promises if p.basic]
    assert len(found.broken) == 1 or promise not in basic, found


def test_every_promise_has_a_fault_and_the_faultless_policy_has_none():
    assert set(FAULTS) == {p.name for p in policy.CONTRACT.promises}
    found = check_policy(Faulty(), DIRECTIONS)
    assert found.ok and [f.promise for f in found if f.mark == "advice"] == ["decodes_images"]


def test_checks_put_back_what_they_change():
    part = mixture()
    before = [p.detach().clone() for p in part.trainable().values()]
    check_policy(part, DIRECTIONS)
    assert all(torch.equal(a, b) for a, b in zip(before, part.trainable().values(), strict=True))


def test_prompts_are_checked():
    for prompts in (["one"], ["one", "one"]):
        with pytest.raises(ConfigError, match="two or more different prompts"):
            check_policy(mixture(), prompts)
    with pytest.raises(ConfigError, match="tolerance"):
        check_policy(mixture(), DIRECTIONS, tolerance=0)

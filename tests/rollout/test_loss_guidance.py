"""Sampling with guidance and training without, or with another one: velocities, gradients, recorded
values, cost.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from family_cases import REDNESS
from rollouts import disturbed
from seeded import randn
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Decisions
from flowrl.core.forward import Guidance
from flowrl.core.tree import plain_tree
from flowrl.core.types import Prompt, Trajectories
from flowrl.flow import uniform_schedule
from flowrl.losses import DiffusionNFT
from flowrl.rollout import ForwardObjective, Groups, Rollout, Rows
from flowrl.run.build import build_trainer, make_method
from flowrl.run.config import RunConfig
from flowrl.run.plan import plan
from flowrl.samplers import Multistep
from flowrl.testing.tiny import TINY, tiny_sd3_policy

PROMPTS = [Prompt("three red circles"), Prompt("a dog")]


@dataclass(frozen=True)
class Given:
    """Training times that are given [sample, draw]."""

    times: torch.Tensor

    def draws(self, schedule):
        return self.times.shape[1]

    def draw(self, schedule, samples, generator):
        return self.times


def objective_of(policy, loss, images, groups, condition, **options):
    """A loss of finished latents [sample, *latent] of an ODE of one step, whose only decision is
    the initial noise.
    """
    ends = images.unflatten(0, (groups.prompts, groups.members))
    grid, stds, tree = uniform_schedule(1), torch.zeros(1), plain_tree(groups.members, 1, ())
    states = torch.cat([ends, ends], 1)
    path = Trajectories(states, torch.zeros_like(ends), grid, tree, stds)
    valid, ones = torch.ones(ends.shape[:2], dtype=torch.bool), torch.ones(*ends.shape[:2], 1)
    decisions = Decisions.of(grid, stds, tree, valid)
    given = Rollout(path, groups, condition), decisions, ones, ones
    return ForwardObjective(policy, loss, *given, Multistep(), **options)


@pytest.mark.parametrize(
    ("scale", "guidance", "scales"),
    [
        (4.5, Guidance(), (4.5, 4.5)),
        (1.0, Guidance(reference=4.5), (1.0, 4.5)),
        (4.5, Guidance(1.0, 4.5), (1.0, 4.5)),
        (2.0, Guidance(train=3.0), (3.0, 3.0)),
    ],
)
def test_velocities_have_the_guidance_that_was_chosen(scale, guidance, scales):
    policy = disturbed(tiny_sd3_policy(replace(TINY, guidance_scale=scale)))
    images = randn(4, *policy.latent_shape)
    times, condition = torch.tensor([[0.9, 0.4]]).repeat(4, 1), policy.encode(PROMPTS)
    given = policy, DiffusionNFT(times=Given(times)), images, Groups(2, 2), condition
    sample = torch.arange(4)
    objective = objective_of(*given, guidance=guidance)
    batch = objective.batch(Rows.of(sample, sample % 2))
    # x_t = x_0 + t (eps - x_0)
    state = images + batch.time.view(-1, 1, 1, 1) * batch.target
    inputs = state, 1000 * batch.time, condition.take(sample // 2)
    with policy.guided(scales[0]):
        expected = policy.velocity(*inputs)
    with torch.no_grad(), policy.guided(scales[1]), policy.reference():
        base = policy.velocity(*inputs)
    assert_close(batch.new, expected, atol=1e-5, rtol=1e-4)
    assert_close(batch.reference, base, atol=1e-5, rtol=1e-4)
    weights = [*policy.trainable().values()]
    gradients = (torch.autograd.grad(v.square().sum(), weights) for v in (batch.new, expected))
    assert_close(*gradients, atol=1e-3, rtol=1e-3)
    assert policy.guidance_scale == scale
    changed = (policy.velocity(*inputs) - expected).abs().max() > 1e-3
    assert bool(changed) == (scales[0] != scale)


SETTINGS = {
    "world": "model",
    "task": "prompts",
    "reward_form": "reward",
    "model": "sd3",
    "groups": 2,
    "group_size": 3,
    "num_steps": 5,
    "minibatches": 1,
    "method": "dgpo",
    "sampler": "multistep",
    "kl_weight": 0.02,
    "credit": "uniform(std=batch, clamp=none)",
    "learning_rate": 1e-2,
    "loss": "dgpo(times='steps(count=3, steps=4)', decay=(0, 0.5, 0.5))",
}


@pytest.mark.parametrize(("scale", "train", "train_nfe"), [(1.0, 0.0, 12), (4.5, 1.0, 6)])
def test_metrics_and_plan_count_the_passes_of_the_network(scale, train, train_nfe):
    """Of a sample: 5 velocities of sampling; 3 draws, each current, old and base. Rows of the
    network, counted in its input, are the evaluations times the passes of one.
    """
    guidance = dict(guidance_scale=scale, train_guidance_scale=train)
    config = RunConfig.of(**SETTINGS, **guidance, reference_guidance_scale=4.5)
    policy, planned = tiny_sd3_policy(replace(TINY, guidance_scale=scale)), plan(config)
    trainer, rows = build_trainer(config, policy, make_method(config), REDNESS, PROMPTS), []
    trainer.iteration()  # afterwards the copy lags behind the weights
    policy.transformer.register_forward_pre_hook(
        lambda module, arguments, options: rows.append(len(options["hidden_states"])),
        with_kwargs=True,
    )
    row, counts, passes = trainer.iteration(), (30, 6 * train_nfe), 1 if scale == 1 else 2
    assert (row["nfe"], row["train_nfe"]) == (planned.nfe, planned.train_nfe) == counts
    assert sum(rows) == planned.passes == passes * sum(counts)
    assert row["gradient_nfe"] == planned.gradient_nfe == 18 / passes
    assert planned.rows_per_micro_batch == 18


@pytest.mark.parametrize("name", ["train_guidance_scale", "reference_guidance_scale"])
def test_guidance_without_effect_is_refused(name):
    config = RunConfig.of(**SETTINGS)
    with pytest.raises(ConfigError, match=rf"^{name} = 0.5 is not allowed; allowed: 1 \(off\)"):
        make_method(config.replace(**{name: 0.5}))
    policy_loss = dict(method="flow-grpo", sampler="flow-sde", window=":-1", loss="clipped")
    with pytest.raises(ConfigError, match=f"^{name} = 1.0 is not allowed; allowed: left out"):
        make_method(config.replace(**{name: 1.0}, **policy_loss))
    with pytest.raises(ConfigError, match=name):
        RunConfig.of(world="mixture", **{name: 2.0})

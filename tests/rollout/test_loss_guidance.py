"""Sampling with guidance and training without, or with another one: velocities, gradients, recorded
values, cost.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from parity_recording import below
from recorded_forward import Recorded

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Decisions
from flowrl.core.forward import Guidance, WeightCopy
from flowrl.core.tree import plain_tree
from flowrl.core.types import Prompt, Trajectories
from flowrl.flow import DrawnSteps, uniform_schedule
from flowrl.losses import DGPO, DiffusionNFT
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups
from flowrl.rollout.batches import ForwardBatches
from flowrl.rollout.rollout import Rollout
from flowrl.testing.tiny import TINY, tiny_sd3_policy
from flowrl.training.build import make_method
from flowrl.training.config import RunConfig
from flowrl.training.plan import plan, plan_text
from flowrl.training.trainer import Trainer
from flowrl.worlds.base import PolicyOptions, world

PROMPTS = [Prompt("three red circles"), Prompt("a dog")]
REDNESS = FunctionReward(
    lambda images, prompts: images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
)


def rollout_of(images, groups):
    """Finished trajectories of one step with these latents [sample, *latent]."""
    tree = plain_tree(groups.members, 1, ())
    ends = images.unflatten(0, (groups.prompts, groups.members))
    path = Trajectories(
        torch.cat([ends, ends], 1),
        torch.zeros_like(ends),
        uniform_schedule(1),
        tree,
        torch.zeros(1),
    )
    return Rollout(path, {}, groups)


def batches_of(policy, loss, images, groups, times, condition, advantages=None, **options):
    """The batches of finished latents; the only decision of an ODE is the initial noise."""
    result = rollout_of(images, groups)
    path, valid = result.trajectories, torch.ones(groups.prompts, groups.members, dtype=torch.bool)
    decisions = Decisions.of(path.schedule, path.stds, path.tree, valid)
    ones = torch.ones(groups.samples, 1)
    advantages = ones if advantages is None else advantages
    given = policy, loss, result, condition, advantages, ones, times, decisions, 7
    return ForwardBatches(*given, **options)


def guided_policy(scale):
    policy = tiny_sd3_policy(replace(TINY, guidance_scale=scale))
    for name, parameter in policy.trainable().items():
        torch.nn.init.normal_(
            parameter.data, std=0.2, generator=torch.Generator().manual_seed(len(name))
        )
    return policy


@pytest.mark.parametrize(
    ("own", "guidance", "scales"),
    [
        (4.5, Guidance(), (4.5, 4.5)),
        (1.0, Guidance(reference=4.5), (1.0, 4.5)),
        (4.5, Guidance(1.0, 4.5), (1.0, 4.5)),
        (2.0, Guidance(train=3.0), (3.0, 3.0)),
    ],
)
def test_velocities_have_the_guidance_that_was_chosen(own, guidance, scales):
    policy = guided_policy(own)
    generator, groups = torch.Generator().manual_seed(0), Groups(2, 3)
    images = torch.randn(6, *policy.latent_shape, generator=generator)
    times, condition = torch.tensor([[0.9, 0.4]]).repeat(6, 1), policy.encode(PROMPTS)
    given = policy, DiffusionNFT(), images, groups, times, condition
    sample = torch.arange(6)
    batch = batches_of(*given, guidance=guidance).of(sample, sample % 2)
    assert policy.guidance_scale == own
    # x_t = x_0 + t (eps - x_0)
    state = images + batch.time.view(-1, 1, 1, 1) * batch.target
    inputs = state, 1000 * batch.time, condition.take(sample // 3)
    with policy.guided(scales[0]):
        expected = policy.velocity(*inputs)
    with torch.no_grad(), policy.guided(scales[1]), policy.reference():
        base = policy.velocity(*inputs)
    torch.testing.assert_close(batch.new, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(batch.reference, base, atol=1e-5, rtol=1e-4)
    parameters = list(policy.trainable().values())
    ours, theirs = (
        torch.autograd.grad(v.square().sum(), parameters) for v in (batch.new, expected)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    if scales != (own, own):
        with torch.no_grad(), policy.guided(own):
            other = policy.velocity(*inputs)
        assert not torch.allclose(other, expected if scales[0] != own else base)


class OldWeights:
    """The recorded old weights as a copy."""

    copy, is_current = WeightCopy(), False

    def __init__(self, recorded):
        self.recorded = recorded

    @contextmanager
    def weights(self):
        self.recorded.put("lora_old")
        yield
        self.recorded.put("lora_current")


@pytest.mark.parametrize(
    ("state", "reference", "own"), [("ocr", 0.0, 4.5), ("wocfg_ocr", 4.5, 1.0)]
)
def test_distances_are_those_of_the_released_dgpo(state, reference, own, tmp_path):
    """Its code trains the conditional velocity; kl_cfg is the guidance of the reference, in the
    penalty and in the group's sum. The guidance of sampling has no effect on the loss.
    """
    found = Recorded("dgpo", tmp_path)
    tables = below(found.recording.tensors("update"), state)
    inputs = found.recording.tensors("inputs")
    config = found.recording.meta["states"][state]["config"]
    penalty, clip = config["train"]["beta"], config["clip_range"]
    loss = DGPO(beta_dpo=float(config["train"]["beta_dpo"]), clip=clip, kl_weight=penalty)
    advantages, copies = inputs["advantages"].float().view(8, 1), {"old": OldWeights(found)}
    times = tables.get("time", inputs["times"]).float()
    given = found.policy, loss, inputs["x0"], Groups(2, 4), times, found.condition, advantages
    with found.policy.guided(own):
        batches = batches_of(*given, copies=copies, guidance=Guidance(1.0, reference))
        batches.noise = found.common["group_noise"].float().repeat_interleave(4, 0)[:, :4]
        batch = batches.of(torch.arange(8).repeat_interleave(4), torch.arange(4).repeat(8))
    pairs = {
        "kl": (batch.new, batch.reference),
        "matching": (batch.new, batch.target),
        "matching_old": (batch.old, batch.target),
        "matching_reference": (batch.reference, batch.target),
    }
    for name, (one, other) in pairs.items():
        ours = (one - other).square().flatten(1).mean(1).view(8, 4).detach()
        torch.testing.assert_close(ours, tables[name].float(), atol=1e-6, rtol=2e-5)
    sums = loss.row_terms(batch).view(2, 4, 4).mean(1)
    torch.testing.assert_close(sums, tables["group/sum"].float(), atol=2e-4, rtol=2e-4)


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
    "iterations": 2,
    "learning_rate": 1e-2,
    "loss": "dgpo(times='steps(count=3, steps=4)', decay=(0, 0.5, 0.5))",
}


@pytest.mark.parametrize(
    ("sampled", "chosen", "evaluations"),
    [  # of a sample: 5 velocities of sampling; 3 draws, each current, old and base
        (4.5, {"train_guidance_scale": 1.0}, (5, 4.5)),
        (1.0, {"reference_guidance_scale": 4.5}, (5, 12)),
        (4.5, {"train_guidance_scale": 1.0, "reference_guidance_scale": 4.5}, (5, 6)),
    ],
)
def test_metrics_and_plan_count_the_passes_of_the_network(sampled, chosen, evaluations):
    """Rows of the network, counted in its input, are the evaluations times the passes of one."""
    config = RunConfig.of(**SETTINGS, guidance_scale=sampled, **chosen)
    policy, planned = tiny_sd3_policy(replace(TINY, guidance_scale=sampled)), plan(config)
    trainer, rows = Trainer(policy, make_method(config), REDNESS, PROMPTS, config), []
    trainer.iteration()  # afterwards the copy lags behind the weights
    hook = policy.transformer.register_forward_pre_hook(
        lambda module, arguments, options: rows.append(len(options["hidden_states"])),
        with_kwargs=True,
    )
    row = trainer.iteration()
    hook.remove()
    own, trained = (
        1 if scale == 1 else 2 for scale in (sampled, config.policy.train_guidance_scale or sampled)
    )
    counts = tuple(6 * count for count in evaluations)
    assert (row["nfe"], row["train_nfe"]) == (planned.nfe, planned.train_nfe) == counts
    assert sum(rows) == planned.passes == own * sum(counts)
    assert planned.gradient_nfe == 18 * trained / own
    assert planned.rows_per_micro_batch == 18 * trained
    assert f"= {planned.train_nfe:,} network evaluations" in plan_text(planned, config)


def test_guidance_that_cannot_be_had_is_refused():
    config = RunConfig.of(**SETTINGS)
    for name in ("train_guidance_scale", "reference_guidance_scale"):
        with pytest.raises(ConfigError, match=rf"^{name} = 0.5 is not allowed; allowed: 1 \(off\)"):
            make_method(config.replace(**{name: 0.5}))
        policy_loss = dict(method="flow-grpo", sampler="flow-sde", window=":-1", loss="clipped")
        with pytest.raises(ConfigError, match=f"^{name} = 1.0 is not allowed; allowed: left out"):
            make_method(config.replace(**{name: 1.0}, **policy_loss))
        with pytest.raises(ConfigError, match=name):
            RunConfig.of(world="mixture", task="direction", **{name: 2.0})
    policy = world("mixture").policy(PolicyOptions())
    condition = policy.encode([world("mixture").parse("towards 0 degrees")])
    images, groups = torch.zeros(2, *policy.latent_shape), Groups(1, 2)
    given = policy, DGPO(times=DrawnSteps()), images, groups, torch.ones(2, 1), condition
    with pytest.raises(ConfigError, match=r"guidance of the loss = .* has no guidance"):
        batches_of(*given, guidance=Guidance(train=2.0))

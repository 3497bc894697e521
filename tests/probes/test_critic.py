"""Critics: what they read, what they learn, and that no value depends on the rewards of its own
iteration.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollouts import PROMPTS, rolled
from seeded import seeded
from small_run import BASE, trainer_of
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, ProbeError
from flowrl.core.experience import Decisions
from flowrl.credit import CalibratedGain, example
from flowrl.probes import (
    Critic,
    LatentReward,
    NoProbe,
    ValueProbe,
)
from flowrl.rollout import Groups, rollout
from flowrl.samplers import FlowSDE
from flowrl.testing import TINY, tiny_flux_policy, tiny_qwen_image_policy, tiny_sd3_policy


class Hidden(ValueProbe):
    """The hidden states themselves as features."""

    reads_hidden = True

    def features(self, run):
        paths = run.trajectories.tree.paths[:, run.nodes]
        assert run.hidden is not None
        return run.hidden[:, paths]

    def predict(self, features, estimates):
        return features.sum(-1)


@pytest.mark.parametrize("make", [tiny_sd3_policy, tiny_flux_policy])
@pytest.mark.parametrize("gradient", ["both", "prompt"])
@pytest.mark.parametrize("size", [100, 3])
def test_the_hidden_states_are_those_of_the_prompt_at_every_state(make, gradient, size):
    """Also with guidance, in calls of any size; recomputed without guidance, state by state."""
    policy = make(replace(TINY, guidance_scale=3.0, guidance_gradient=gradient))
    result, _ = rolled(policy, Hidden(), 2, 3, FlowSDE(0.7), True, max_batch=size)
    condition = policy.encode(PROMPTS)
    seen = list[torch.Tensor]()
    hook = policy.hidden_layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    path = result.trajectories
    with torch.no_grad(), policy.guided(1.0):
        for place, node in enumerate(result.nodes):
            timestep = path.schedule.network_timesteps[node].expand(4)
            policy.velocity(path.at(node), timestep, condition.repeat(2))
            expected = seen.pop().float().mean(1).unflatten(0, (2, 2))
            assert_close(result.features[:, :, place], expected, atol=1e-4, rtol=1e-4)
    hook.remove()


class TinyLatentReward(LatentReward):
    """DiNa-LRM's kind at tiny size: the latent's tokens, scaled by the time (FiLM) and attended by
    a query of the prompt.
    """

    def score(self, latents, times, prompts):
        tokens = latents.flatten(2).transpose(1, 2)
        film = torch.linspace(-1, 1, tokens.shape[-1]) * times[:, None, None]
        query = torch.tensor([[[float(len(prompt.text))]] for prompt in prompts])
        weights = (tokens * query).sum(-1, keepdim=True).softmax(1)
        return (weights * tokens * (query + film)).sum((1, 2))


def test_a_latent_reward_scores_every_state_with_its_time_and_prompt():
    """Each score is that of the state alone, also of initial noise that a group shares."""
    policy, model = tiny_sd3_policy(TINY), TinyLatentReward()
    generator, groups = seeded(), Groups(2, 3, True)
    noise, condition = groups.noise(policy.latent_shape, generator), policy.encode(PROMPTS)
    given = policy, FlowSDE(0.7), policy.schedule(3), condition, noise, generator, groups, model
    with pytest.raises(ConfigError, match=r"prompts of the rollout = 0 .* of 2 groups"):
        rollout(*given)
    result = rollout(*given, prompts=PROMPTS)
    path, scores = result.trajectories, result.features[..., 0]
    for (group, member, place), score in np.ndenumerate(scores):
        node = result.nodes[place]
        state = path.states[group, path.tree.paths[member, node], None]
        alone = model.score(state, path.schedule.times[node, None], PROMPTS[group : group + 1])
        assert score == pytest.approx(float(alone), rel=1e-4, abs=1e-6)
    assert result.features.isfinite().all() and scores[:, :, 1:].std() > 0


def test_a_latent_reward_is_given_the_prompts_of_its_chunk():
    tables = []
    for chunk in (0, 1):
        trainer = with_probe(TinyLatentReward(), BASE.replace(chunk=chunk))
        tables.append(trainer.iteration().experience.values)
    assert_close(*tables)


def with_probe(probe, config=BASE):
    """A trainer with calibrated gains of this probe."""
    trainer = trainer_of(config)
    trainer.method = replace(trainer.method, credit=CalibratedGain(probe=probe))
    trainer.collector.probe = probe
    return trainer


def test_no_value_depends_on_the_rewards_of_its_own_iteration():
    """The first iteration has the base's values; the fit after it changes the next ones only."""
    trainers = [
        trainer_of(BASE.replace(credit=f"calibrated-gain(probe={probe!r})"))
        for probe in ("critic", "tweedie")
    ]
    first = [trainer.iteration().experience.values for trainer in trainers]
    assert torch.equal(*first)
    critic = trainers[0].method.credit.probe
    before, run = critic.state_dict()["fits"], trainers[0].iteration().experience
    assert float(before) == 1 and float(critic.state_dict()["fits"]) == 2
    assert run.values[..., :-1].isfinite().all()


def test_a_critic_learns_what_its_features_say():
    """R = x_0 + a base that is wrong by 3 and a sample's own noise: the error falls to the noise."""
    generator = seeded()
    features = torch.randn(16, 12, 5, 3, generator=generator)
    noise = 0.1 * torch.randn(16, 12, generator=generator)
    base = torch.randn(16, 12, 1, generator=generator).expand(-1, -1, 5)
    values = torch.cat([base, (base[..., 0] + 3 + noise)[..., None]], -1)
    values[..., -1] += features[:, :, 0, 0]
    features[..., 0] = features[:, :, :1, 0]
    critic = Critic(learning_rate=1e-2)
    for _ in range(20):
        critic.fit(features, base, example(values, NoProbe(), Decisions.like(values)))
    values[0, 0] = torch.nan  # an invalid sample is left out
    critic.fit(features, base, replace(example(values, NoProbe()), values=values))
    error = (critic.predict(features, base) - values[..., -1:])[1:]
    assert 0.08 < error.square().mean().sqrt() < 0.15


@pytest.mark.parametrize(
    ("make", "reads", "words"),
    [
        (tiny_qwen_image_policy, "hidden", "one with a hidden_layer, which the probe reads"),
        (tiny_sd3_policy, "state", "hidden: this policy's embeddings are not numbers"),
    ],
)
def test_a_policy_that_lacks_what_the_critic_reads_is_refused(make, reads, words):
    with pytest.raises(ConfigError, match=words):
        rolled(make(), Critic(reads=reads), 2, 2)


@pytest.mark.parametrize("fault", ["features", "predict"])
def test_faults_of_a_value_probe_are_named(fault):
    class Faulty(Hidden):
        pass

    setattr(Faulty, fault, lambda self, *given: torch.full((1,), torch.nan))
    with pytest.raises(ProbeError, match=rf"Faulty\.{fault}"):
        with_probe(Faulty()).iteration()

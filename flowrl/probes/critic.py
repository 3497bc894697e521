"""Values of unfinished states from a network: a reward model of noisy latents, or a critic that is
fitted to the final rewards of earlier iterations.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from jaxtyping import Float
from torch import Tensor, nn

from flowrl.core.errors import require
from flowrl.core.experience import CreditTable, Experience, FeatureTable
from flowrl.core.options import Count, checked_options
from flowrl.core.probe import Cost, Estimates, Probing, Shape, ValueProbe
from flowrl.core.types import Prompt
from flowrl.probes.solved import Tweedie

ROWS = 256
"""Rows of a step of the fit."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""The entries of AdamW's state."""


class LatentReward(ValueProbe):
    """V_j = s(z_j, t_j, c): a reward model that scores noisy latents, such as DiNa-LRM (arXiv
    2602.11146). It needs no evaluation of the policy and no decode; what it costs itself is not
    counted. To use one, derive a class with `score`.

    A model that is trained on comparisons at equal t, as DiNa-LRM is, has another scale at every t,
    so that s(z_{j+1}) - s(z_j) is not a gain; `flowrl.credit.CalibratedGain` regresses the final
    reward on s at every decision.
    """

    @abstractmethod
    def score(self, latents: Tensor, times: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """s [row] of noisy latents [row, *latent] at times t in [0, 1] [row], for the prompts of
        the rows; called without gradient, except by `flowrl.losses.RewardAscent`.
        """

    def features(self, run: Probing) -> Float[Tensor, "prompt member node feature"]:
        """The scores, one call per node. Raises `ConfigError` for a rollout without prompts."""
        allowed = f"the prompts of {run.groups} groups"
        require(len(run.prompts) == run.groups, "prompts of the rollout", len(run.prompts), allowed)
        path, tree, columns = run.trajectories, run.trajectories.tree, list[Tensor]()
        for node in run.nodes:
            latents, _ = run.start(node)
            prompts = [prompt for prompt in run.prompts for _ in range(tree.counts[node])]
            times = path.schedule.times[node].float().to(latents.device).expand(len(latents))
            with torch.no_grad():
                scores = self.score(latents, times, prompts).unflatten(0, (run.groups, -1))
            columns.append(scores[:, tree.paths[:, node] - tree.at(node).start])
        return torch.stack(columns, 2)[..., None]

    def predict(self, features: FeatureTable, estimates: CreditTable) -> CreditTable:
        """The scores."""
        return features[..., 0]

    def cost(self, shape: Shape) -> Cost:
        """None of the policy's evaluations, no decode and no reward call."""
        return Cost()


@checked_options
@dataclass
class Critic(ValueProbe):
    """V_j = r(Tweedie estimate) + f(features of the state), or f alone; f is a small network.

    f minimises the mean of (R - V_j)^2 over the valid samples of an iteration and the decisions j,
    with R the final reward: Monte Carlo targets, as for lambda = 1. It is fitted after the credit
    of the iteration is formed, so V_j never depends on the rewards that it is compared with. f is 0
    before the first fit. The fit runs in main memory and gives the same numbers in every process,
    since every process has the features of all. Sources: a head on the policy's last hidden state,
    detached, as in pi_RL (arXiv 2510.25889) for robots; GAE (arXiv 1506.02438).

    Args:
        reads: "state": z_j, the Tweedie estimate, t_j and the prompt's embedding, for policies with
            small latents and embeddings; "hidden": the mean over tokens of the policy's last hidden
            state, which the rollout computes anyway, and t_j.
        base: "tweedie": f corrects the reward of the Tweedie estimate, at the price of a decoded
            and scored image per decision; "zero": f alone, which costs no evaluation, no decode and
            no reward call.
        width: units of the two hidden layers of f.
        learning_rate: AdamW's.
        passes: passes over an iteration's rows, in steps of 256.
        seed: seed of the initial weights and the order of rows.

    Raises:
        ConfigError: a field is out of range.
    """

    reads: Literal["state", "hidden"] = "state"
    base: Literal["tweedie", "zero"] = "tweedie"
    width: Count = 64
    learning_rate: Annotated[float, Gt(0), Le(1)] = 1e-3
    passes: Count = 5
    seed: Annotated[int, Ge(0), Lt(2**62)] = 0
    memory: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def reads_hidden(self) -> bool:
        """Whether the hidden state is recorded."""
        return self.reads == "hidden"

    def estimate(self, run: Probing) -> Estimates:
        """The Tweedie estimates if `base` scores them."""
        return Tweedie().estimate(run) if self.base == "tweedie" else {}

    def cost(self, shape: Shape) -> Cost:
        """A decode and a reward call per state with a base; no evaluation."""
        return Tweedie().cost(shape) if self.base == "tweedie" else Cost()

    def features(self, run: Probing) -> Float[Tensor, "prompt member node feature"]:
        """t_j, and what `reads` says.

        Raises:
            ConfigError: the prompts' embeddings are not floating-point numbers ("state").
        """
        path, tree = run.trajectories, run.trajectories.tree
        embedding = [t.flatten(1) for t in run.condition.tensors.values() if t.is_floating_point()]
        fits = self.reads_hidden or len(embedding) > 0
        require(
            fits, "critic.reads", self.reads, "hidden: this policy's embeddings are not numbers"
        )
        clean = {} if self.reads_hidden else Tweedie().estimate(run)
        columns = []
        for node in run.nodes:
            units = tree.paths[:, node].to(path.states.device)
            time = path.schedule.times[node].float()
            if run.hidden is not None:
                parts = [run.hidden[:, units]]
            else:
                estimate = clean[node].unflatten(0, (run.groups, -1))
                at_node = estimate[:, units - tree.at(node).start]
                prompt = torch.cat(embedding, 1)[:, None].expand(-1, len(units), -1)
                parts = [path.states[:, units].flatten(2), at_node.flatten(2), prompt]
            parts.append(time.expand(*parts[0].shape[:2], 1))
            columns.append(torch.cat(parts, -1))
        return torch.stack(columns, 2)

    def predict(self, features: FeatureTable, estimates: CreditTable) -> CreditTable:
        """The base plus f."""
        base = self._base(estimates)
        if not self.memory:
            return base
        with torch.no_grad():
            return base + self._network()(self._scaled(features)).squeeze(-1)

    def fit(self, features: FeatureTable, estimates: CreditTable, experience: Experience) -> None:
        """AdamW on the mean squared error; its moments continue from the last iteration."""
        errors = experience.values[..., -1:] - self._base(estimates)
        rows = features.isfinite().all(-1) & errors.isfinite()
        inputs, targets = features[rows], errors[rows]
        if not len(inputs):
            return
        if not self.memory:
            # features keep the scale of the first iteration
            scale = inputs.std(0, unbiased=False).clamp(min=1e-3)
            self.memory = {"mean": inputs.mean(0), "scale": scale, "fits": torch.zeros(())}
        network = self._network()
        optimizer = torch.optim.AdamW(network.parameters(), self.learning_rate)
        named = dict(network.named_parameters())
        if self.memory["fits"]:
            for name, parameter in named.items():
                optimizer.state[parameter] = {
                    key: self.memory[f"{key}.{name}"].clone() for key in MOMENTS
                }
        fits = int(self.memory["fits"])
        generator = torch.Generator().manual_seed(self.seed + fits)
        inputs = self._scaled(inputs)
        with torch.enable_grad():
            for _ in range(self.passes):
                for rows in torch.randperm(len(inputs), generator=generator).split(ROWS):
                    optimizer.zero_grad()
                    error = network(inputs[rows]).squeeze(-1) - targets[rows]
                    error.square().mean().backward()
                    optimizer.step()
        self.memory["fits"] = torch.tensor(float(fits + 1))
        for name, parameter in named.items():
            self.memory[f"weight.{name}"] = parameter.detach()
            for key in MOMENTS:
                self.memory[f"{key}.{name}"] = optimizer.state[parameter][key]

    def _scaled(self, features: Tensor) -> Tensor:
        return (features - self.memory["mean"]) / self.memory["scale"]

    def _base(self, estimates: Tensor) -> Tensor:
        return estimates if self.base == "tweedie" else torch.zeros_like(estimates)

    def _network(self) -> nn.Module:
        """f with the weights of the last fit; before the first one 0, from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = nn.Sequential(
                nn.Linear(len(self.memory["mean"]), self.width),
                nn.SiLU(),
                nn.Linear(self.width, self.width),
                nn.SiLU(),
                nn.Linear(self.width, 1),
            )
        nn.init.zeros_(network[-1].weight)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(network[-1].bias)  # pyright: ignore[reportArgumentType]
        if self.memory["fits"]:
            names = dict(network.named_parameters())
            network.load_state_dict({name: self.memory[f"weight.{name}"] for name in names})
        return network

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, moments, the scale of the features, and the number of fits; empty at first."""
        return dict(self.memory)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.memory = {name: tensor.clone() for name, tensor in state.items()}

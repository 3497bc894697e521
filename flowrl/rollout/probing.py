"""A probe's view of a rollout: its estimates and features of unfinished states, and what rules read
of trajectories besides values.
"""

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ProbeError, part_call, require
from flowrl.core.protocols import AnySampler, FlowPolicy, MultistepSolver, extras
from flowrl.core.types import Condition, Gaussian, Paths, Prompt, Trajectories, to_device
from flowrl.flow.gaussian import log_prob
from flowrl.probes import Estimates, Grid, NetworkUse, Probe, Probing, Solver, ValueProbe
from flowrl.rollout.solvers import Solution, advance
from flowrl.rollout.walk import Rollout, Walk


def run_probe(
    probe: Probe,
    walk: Walk,
    noise: Tensor,
    tree: Paths,
    nodes: Sequence[int],
    prompts: Sequence[Prompt],
) -> Rollout:
    """The trajectories of a `walk` from `noise`, and the probe's estimates and features of `nodes`.

    Raises:
        ConfigError: the policy lacks what the probe needs.
        ProbeError: the probe breaks its contract.
    """
    policy, usage, guided = walk.policy, walk.usage, None
    if probe.network.guidance == "off":
        guided = extras(policy, "guided", "guidance_scale")
        fits = guided is not None and guided.guidance_scale != 1
        require(fits, "guidance of the probe", "off", "own: the policy samples without guidance")
    before, values = usage.nfe, probe if isinstance(probe, ValueProbe) else None
    recorder = HiddenStates(policy) if values and values.reads_hidden else None
    path, completed = walk.run(noise, tree, probe.ahead(nodes), recorder)
    last, hidden = path.images_latent, recorder.table if recorder else None
    given = path, last, nodes, completed, walk.condition, prompts, hidden
    run = ProbeRun(*given, walk, probe.network)
    features = run.features(values) if values else None
    with guided.guided(1.0) if guided else nullcontext():
        estimates = run.estimates(probe)
    # every output is an evaluation of the trajectories themselves
    usage.probe_nfe += usage.nfe - before - path.outputs.shape[:2].numel()
    return Rollout(path, walk.groups, walk.condition, estimates, probe, nodes, features)


class HiddenStates:
    """A policy that records its last hidden states, means over tokens, in every call.

    Args:
        policy: the policy, with a `hidden_layer`.

    Raises:
        ConfigError: the policy has none.
    """

    def __init__(self, policy: FlowPolicy) -> None:
        extra = extras(policy, "hidden_layer")
        allowed = "one with a hidden_layer, which the probe reads"
        require(extra is not None, "policy", type(policy).__name__, allowed)
        self.policy, self.layer = policy, extra.hidden_layer
        self.rows, self.kept = list[Tensor](), list[Tensor]()

    def velocity(self, latent: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """The policy's; the states of its last `len(latent)` rows are those of the prompts, since
        guidance evaluates the negative prompt first.
        """
        calls = list[Tensor]()

        def record(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            hidden = inputs[0].float()
            calls.append(hidden.flatten(1, -2).mean(1) if hidden.ndim > 2 else hidden)

        handle = self.layer.register_forward_pre_hook(record)
        try:
            velocity = self.policy.velocity(latent, timestep, condition)
        finally:
            handle.remove()
        self.rows.append(torch.cat(calls)[-len(latent) :])
        return velocity

    def keep(self, count: int, prompts: int) -> None:
        """Keep the first `count` rows since the last call of this method."""
        self.kept.append(torch.cat(self.rows)[:count].unflatten(0, (prompts, -1)))
        self.rows.clear()

    @property
    def table(self) -> Tensor:
        """What was kept [prompt, unit, feature]."""
        return torch.cat(self.kept, 1)


@dataclass(frozen=True)
class ProbeRun(Probing):
    """The input of a probe that calls the network `walk.policy` as `network` says."""

    walk: Walk
    network: NetworkUse

    @cached_property
    def generator(self) -> torch.Generator:
        """The probe's generator, seeded by the state of the trajectories' generator, which does not
        change.
        """
        source = self.walk.generator
        state = source.get_state()  # bytes in main memory, whatever the generator's device
        digest = hashlib.sha256(ctypes.string_at(state.data_ptr(), state.numel())).digest()
        return torch.Generator(source.device).manual_seed(int.from_bytes(digest[:7]))

    def velocity(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """The network, counted."""
        rows, prompts = len(latents), self.groups
        require(rows % prompts == 0, "latents", rows, f"equally many for each of {prompts} prompts")
        return self._velocity(latents, timestep, self.walk.conditions(latents))

    def _velocity(self, latents: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        use, device = self.network, self.walk.policy.device.type
        with torch.autocast(device, torch.bfloat16, enabled=use.dtype == "bfloat16"):
            return self.walk.velocity(latents, timestep, condition, use.share).float()

    def solve(
        self,
        grids: Mapping[int, Grid],
        solver: Solver = "euler",
        members: int | None = None,
    ) -> dict[int, Tensor]:
        """The ends of the ODE, all nodes together."""
        solutions: dict[int, Solution] = {}
        for node, grid in grids.items():
            x, velocity = self.start(node, members)
            solutions[node] = Solution(x, grid, self.walk.conditions(x), solver, velocity)
        advance(list(solutions.values()), self._velocity)
        return {node: solution.x for node, solution in solutions.items()}

    def continued(self, node: int, count: int) -> Tensor:
        """Stochastic continuations."""
        return self.walk.continued(self.trajectories.at(node), node, count, self.generator)

    def rand(self, *shape: int) -> Tensor:
        """Uniform random numbers."""
        return self.walk.groups.rand(shape, self.generator)

    def draw(self, gaussian: Gaussian) -> Tensor:
        """Draws of Gaussians."""
        return self.walk.groups.draw(gaussian, self.generator)

    def features(self, probe: ValueProbe) -> Tensor:
        """The probe's features. Raises `ProbeError` if it returns anything but numbers
        [prompt, member, node, feature].
        """
        name, groups = f"{type(probe).__name__}.features", self.walk.groups
        with part_call(name):
            features: Any = probe.features(self)
        shape = (groups.prompts, groups.members, len(self.nodes))
        fits = isinstance(features, Tensor) and features.is_floating_point() and features.ndim == 4
        if not fits or features.shape[:3] != shape or not bool(features.isfinite().all()):
            given = tuple(features.shape) if fits else type(features).__name__
            allowed = f"finite numbers [prompt, member, node, feature] = {(*shape, '...')}"
            raise ProbeError(f"{name} returned {given}; allowed: {allowed}")
        return features.detach().float().cpu()

    def estimates(self, probe: Probe) -> Estimates:
        """The probe's estimates. Raises `ProbeError` for anything but latents of `nodes`."""
        name, path = f"{type(probe).__name__}.estimate", self.trajectories
        with part_call(name):
            estimates = dict(probe.estimate(self))
        groups, latent = self.walk.groups, path.states.shape[2:]
        for key, latents in estimates.items():
            node = key[1] if isinstance(key, tuple) and len(key) == 2 else key
            counts = (1, groups.members) if key == node else range(1, groups.members + 1)
            shapes = [(groups.prompts * count, *latent) for count in counts]
            shape = tuple(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
            if node not in self.nodes or shape not in shapes:
                allowed = f"latents of {shapes} for the nodes {list(self.nodes)}"
                raise ProbeError(f"{name} returned {shape} for {key!r}; allowed: {allowed}")
        return estimates


def log_probs(sampler: AnySampler, trajectories: Trajectories) -> Tensor:
    """Log-probabilities of the drawn transitions under the policy that drew them.

    Args:
        sampler: the sampler of the rollout.
        trajectories: the trajectories.

    Returns:
        Means over latent elements [prompt, member, decision], in main memory; NaN where nothing was
        drawn.
    """
    path, tree = trajectories, trajectories.tree
    # the decision is the initial noise
    if isinstance(sampler, MultistepSolver) or not tree.drawn_steps:
        return torch.full((len(path.states), tree.members, 1), torch.nan)
    columns = []
    for step in tree.drawn_steps:
        latent, units = path.at(step), to_device(tree.paths[:, step], path.states.device)
        velocity = path.outputs[:, units].flatten(0, 1)
        index = torch.full((len(latent),), step, device=latent.device)
        gaussian = sampler.transition(latent, velocity, path.schedule, index)
        density = log_prob(gaussian, path.at(step + 1)).unflatten(0, (-1, tree.members)).cpu()
        columns.append(density.masked_fill(~tree.decisions[:, step], torch.nan))
    return torch.stack(columns, -1).float()

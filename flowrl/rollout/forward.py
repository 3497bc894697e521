"""The rows of forward-process losses: finished images at drawn times."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.forward import ForwardBatch
from flowrl.core.protocols import ForwardLoss, extras
from flowrl.core.types import expand, to_device
from flowrl.rollout.ascent import Ascent
from flowrl.rollout.batches import Objective, Rows, minibatch_rows
from flowrl.rollout.groups import Groups


def credited(times: Tensor, starts: Tensor) -> Tensor:
    """For each of `times` the last of the descending `starts` that is not below it, or the first
    one if all are below: the step that contains the time, or the decision whose credit a row takes.
    """
    starts = to_device(starts, times.device)
    return ((starts >= times[..., None] - 1e-6).sum(-1) - 1).clamp(min=0)


def training_noise(
    loss: ForwardLoss,
    groups: Groups,
    shape: Sequence[int],
    draws: int,
    seed: int,
    device: torch.device,
) -> Tensor:
    """The noise of every row of `groups` [sample, draw, *latent], shared as the loss declares.

    Every sample or group has its own generator, seeded by its index among all and the iteration's
    `seed`, so its noise does not depend on chunks or processes.
    """
    each = groups.members if loss.noise == "each" else 1
    columns = 1 if loss.noise == "group-all-times" else draws
    generator, noise = torch.Generator(device), []
    for number in range(groups.first * each, (groups.first + groups.prompts) * each):
        generator.manual_seed((seed + number) % 2**63)
        noise.append(torch.randn((columns, *shape), generator=generator, device=device))
    expanded = torch.stack(noise).expand(-1, draws, *shape)
    return expanded.repeat_interleave(groups.members // each, 0)


def finite_difference(images: Tensor, counts: Tensor, members: int) -> Tensor:
    """d / (mean(d^2) + 1e-6) of every finished latent, d its difference from its group's mean.

    Of two members, d is half their difference. A step along it changes the latent by d per unit of
    mean(d^2). Source: FDFO's code (arXiv 2603.12893, commit 740e22f), for pairs.

    Args:
        images: finished latents [sample, *latent], prompt-major.
        counts: the samples that the mean includes [sample].
        members: samples per group.

    Returns:
        The shifts [sample, *latent].
    """
    grouped = images.unflatten(0, (-1, members))
    counted = expand(counts.to(images), images).unflatten(0, (-1, members))
    mean = (counted * grouped).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    difference = (grouped - mean).flatten(0, 1)
    return difference / expand(difference.square().flatten(1).mean(1) + 1e-6, difference)


@dataclass
class ForwardObjective(Objective):
    """A forward-process loss; its rows are finished latents of the rollout at drawn times.

    A row has the advantage of the decision that `credited` assigns to its time, so rules that
    credit decisions weight times. This is a heuristic: unless the loss's `noise` is "path", the
    regressed states are noised images, not those that the decisions reached. A rule with equal
    credit for all decisions gives the papers' losses.
    """

    draws_times: ClassVar[bool] = True

    def begin(self) -> None:
        """Draw the times [sample, draw] of all samples, and a seed of their noise."""
        path, noise, groups = self.rollout.trajectories, self.loss.noise, self.rollout.groups
        generator, samples = self.generator or torch.Generator(), groups.all * groups.members
        self.drawn = self.loss.times.draw(self.schedule or path.schedule, samples, generator)
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        self.times, self.images = self.drawn[self.rollout.samples], path.images_latent
        device, shape = self.images.device, self.images.shape[1:]
        guided = extras(self.policy, "guided", "guidance_scale")
        self.sampled = 1.0 if guided is None else guided.guidance_scale
        self.guided = (lambda scale: nullcontext()) if guided is None else guided.guided
        self.scales = self.guidance.scales(self.sampled)
        self.with_gradient = self.guidance.evaluations(1, False, self.sampled)
        fits = guided is not None or self.scales == (1.0, 1.0)
        require(fits, "guidance of the loss", self.scales, "1: the policy has no guidance")
        steps = credited(self.times, path.schedule.times[:-1])
        if noise in ("path", "difference"):
            require(not path.tree.branched, "noise", noise, "each or group, on branches")
            self.times = path.schedule.times[steps]
            if noise == "difference":
                counts = to_device((self.own_credit[1] > 0).any(-1), device)
                self.shift = finite_difference(self.images, counts, groups.members)
        else:
            draws = self.times.shape[1]
            self.noise = training_noise(self.loss, groups, shape, draws, seed, device)
        self.steps = steps.to(device)
        self.ascent = Ascent(self, self.images) if hasattr(self.loss, "ascends") else None
        self.decided = credited(self.times, self.decisions.time).to(device)

    def rows(self, parts: Sequence[Tensor]) -> list[Rows]:
        """`minibatch_rows` of the drawn times; no row shares its state."""
        decision = credited(self.drawn.cpu(), self.decisions.time)
        weights, tree = (
            self.weights.flatten(0, 1).gather(1, decision),
            self.rollout.trajectories.tree,
        )
        return minibatch_rows(parts, weights, tree, self.loss.unit, share_states=False)

    def networks(self) -> float:
        """Evaluations of a row with the current weights: the current network, the reference, and
        copies with other weights; another guidance than in sampling counts fractions or multiples
        (`Guidance.evaluations`).
        """
        copies = sum(copy.copy.evaluated and not copy.is_current for copy in self.copies.values())
        return self.guidance.evaluations(1 + copies, self.loss.needs_reference, self.sampled)

    def batch(self, rows: Rows) -> ForwardBatch:
        """The velocities of these rows."""
        path, members = self.rollout.trajectories, self.rollout.groups.members
        device, noise = self.images.device, self.loss.noise
        sample, column = self.place(rows.sample, rows.column)
        step, decision = self.steps[sample, column], self.decided[sample, column]
        image = self.images[sample]
        if noise in ("path", "difference"):
            unit = to_device(path.tree.paths, device)[sample % members, step]
            stored = path.states[sample // members, unit]
            if noise == "difference":
                image = path.outputs[sample // members, unit] - self.shift[sample]
        else:
            stored = self.noise[sample, column]
        image, stored, sample, column, decision = map(
            self.on_device, (image, stored, sample, column, decision)
        )
        time = self.times[sample, column]
        spread = expand(time, image)
        if noise == "difference":
            state, target = stored, image
        elif noise == "path":
            state, target = stored, (stored - image) / spread
        else:
            state, target = (1 - spread) * image + spread * stored, stored - image
        inputs = state, 1000.0 * time, self.rollout.condition.take(sample // members)
        copies = {name: copy for name, copy in self.copies.items() if copy.copy.evaluated}
        others: dict[str, Tensor] = {}
        trained, reference = self.scales

        def velocity(scale: float) -> Tensor:
            with self.guided(scale):
                return self.policy.velocity(*inputs)

        with torch.no_grad():  # before the current network: its graph must not have other weights
            for name, copy in copies.items():
                if not copy.is_current:
                    with copy.weights():
                        others[name] = velocity(trained)
            if self.loss.needs_reference:
                with self.base():
                    others["reference"] = velocity(reference)
        new = velocity(trained)
        new = new.view_as(new)  # as in `TransitionObjective.batch`
        others |= {name: new.detach() for name, copy in copies.items() if copy.is_current}
        credit = self.credit(sample, column, decision)
        if self.ascent is not None:
            others |= self.ascent.of(rows, state, time, new)
        return ForwardBatch(time=time, target=target, new=new, **credit, **others)

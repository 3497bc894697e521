"""Two optimizer steps of the trainer against plain torch. This is NOT the released code.

The recordings miss four things. Their weight decay (lr wd = 3e-8) is below the rounding of float32,
their gradients are shorter than the clip, advantages in groups of 4 cannot reach the clamp, and
DiffusionNFT's weights are far above their floor. Here all four change the result: large weights,
gradients beyond the clip, groups of 40 with an outlier, and latents of size 4e-6.

The trainer and the formulas get the same network, noise, rewards and order of samples. The formulas
are in float64, follow the papers (Flow-GRPO, arXiv 2505.05470; DiffusionNFT, 2509.16117, with the
constants of its code; AdamW, 1711.05101), and share no code with flowrl.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from parity_compare import distance, step_differences
from parity_recording import Tensors, below
from parity_replay import ForwardTrainer, ReplayTrainer, peft_name, recorded_trainer
from torch import Tensor, nn

from flowrl.core.types import Condition, Schedule
from flowrl.run.build import make_method
from flowrl.run.config import RunConfig

PROMPTS, MEMBERS, STEPS, DRAWS, SIZE, HIDDEN = 2, 40, 4, 3, 6, 8
RATE, BETAS, DECAY, NOISE, CLIP, BETA, BOUND = 1e-2, (0.9, 0.999), 0.1, 0.7, 5e-3, 0.5, 3.0
CASES = {"grpo": (1.0, 0.02, 0.5), "nft": (1.0, 0.05, 0.5), "nft at the floor": (4e-6, 1e-6, 1e5)}
"""Name -> size of the latents, largest gradient norm, weight of the distance from the reference."""
Loss = Callable[[Tensors, Tensor], Tensor]


def network(weights: Tensors, x: Tensor, t: Tensor) -> Tensor:
    """A velocity, proportional to x if x is small; t [sample] or a number."""
    angle = x.flatten(1) @ weights["first"].T * (1 + t.view(-1, 1)) / (2 * SIZE)
    return (angle.sin() @ weights["second"].T / 2).view_as(x)


def make_policy(weights: Tensors, base: Tensors) -> Any:
    """`FlowPolicy` of `network`, with the weights `base` as its reference."""
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    active = [parameters]

    @contextmanager
    def reference() -> Iterator[None]:
        active.append(base)
        yield
        active.pop()

    return SimpleNamespace(
        latent_shape=(SIZE, 1, 1),
        device=torch.device("cpu"),
        schedule=lambda steps: Schedule(torch.linspace(1, 0, steps + 1)),
        encode=lambda prompts: Condition({"unused": torch.zeros(len(prompts), 1)}),
        velocity=lambda latent, timestep, condition: network(active[-1], latent, timestep / 1000),
        decode=lambda latent: latent,
        trainable=lambda: parameters,
        reference=reference,
        frozen=torch.no_grad,
    )


def make_inputs(size: float) -> dict[str, Tensor]:
    """What trainer and formulas share, float32. The rewards of each group have an outlier."""
    generator, samples, latent = torch.Generator().manual_seed(0), PROMPTS * MEMBERS, (SIZE, 1, 1)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    rewards = normal(PROMPTS, MEMBERS, scale=0.02)
    rewards[[0, 1], [3, 30]] += torch.tensor([1.0, -1.0])
    first, second = normal(HIDDEN, SIZE, scale=4.0), normal(SIZE, HIDDEN, scale=4.0)
    tensors = {"rewards": rewards, "new/first": first, "new/second": second}
    for copy in ("old", "base"):
        tensors[f"{copy}/first"] = first + normal(HIDDEN, SIZE)
        tensors[f"{copy}/second"] = second + normal(SIZE, HIDDEN)
    return tensors | {
        "order": torch.randperm(samples, generator=generator),
        "init_noise": normal(samples, *latent, scale=size),
        "step_noise": normal(samples, STEPS, *latent),
        "finished": normal(samples, *latent, scale=size),
        "noise": normal(samples, DRAWS, *latent, scale=size),
        "times": 0.05 + 0.9 * torch.rand(samples, DRAWS, generator=generator),
    }


def standardised(rewards: Tensor, *axes: int) -> Tensor:
    """Advantages [sample], clamped to 5, with the standard deviation over `axes`."""
    std = rewards.std(axes, correction=0, keepdim=True)
    return ((rewards - rewards.mean(1, keepdim=True)) / (std + 1e-4)).clamp(-5, 5).flatten()


def transition(weights: Tensors, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Mean and std of a transition of Flow-SDE; the last step is an ODE step."""
    t, delta = torch.tensor(1 - step / STEPS).to(x), 1 / STEPS
    velocity = network(weights, x, t)
    if step == STEPS - 1:
        return x - delta * velocity, torch.zeros(())
    sigma2 = NOISE**2 * t / (1 - (t if step else t - delta))
    drift = velocity + sigma2 / (2 * t) * (x + (1 - t) * velocity)
    return x - delta * drift, (sigma2 * delta).sqrt()


def grpo(given: Tensors, kl_weight: float) -> tuple[Tensor, Tensor, Loss]:
    """Advantages, trajectories and loss of Flow-GRPO."""
    behaviour, base, nodes = below(given, "new"), below(given, "base"), [given["init_noise"]]
    for step in range(STEPS):
        mean, std = transition(behaviour, nodes[-1], step)
        nodes.append(mean + std * given["step_noise"][:, step])
    advantages = standardised(given["rewards"], 1)

    def loss(weights: Tensors, rows: Tensor) -> Tensor:
        terms, advantage = [], advantages[rows]
        for step in range(STEPS - 1):
            x, after = nodes[step][rows], nodes[step + 1][rows]
            means = [transition(term, x, step)[0] for term in (weights, behaviour, base)]
            new, old = ((after - mean).square().flatten(1).mean(1) for mean in means[:2])
            variance = transition(weights, x, step)[1] ** 2
            ratio = ((old - new) / (2 * variance)).exp()
            policy = [-advantage * term for term in (ratio, ratio.clamp(1 - CLIP, 1 + CLIP))]
            kl = (means[0] - means[2]).square().flatten(1).mean(1) / (2 * variance)
            terms.append(torch.maximum(*policy) + kl_weight * kl)
        return torch.stack(terms).mean()

    return advantages, torch.stack(nodes, 1), loss


def nft(given: Tensors, kl_weight: float) -> tuple[Tensor, None, Loss]:
    """Advantages and loss of DiffusionNFT."""
    advantages = standardised(given["rewards"], 0, 1)
    scaled = (advantages / BOUND).clamp(-1, 1)

    def loss(weights: Tensors, rows: Tensor) -> Tensor:
        terms, clean, optimality = [], given["finished"][rows], 0.5 + scaled[rows] / 2
        for draw in range(DRAWS):
            t = given["times"][rows, draw].view(-1, 1, 1, 1)
            x = (1 - t) * clean + t * given["noise"][rows, draw]
            three = weights, below(given, "old"), below(given, "base")
            new, old, base = (network(one, x, t) for one in three)
            terms.append(kl_weight * (new - base).square().flatten(1).mean(1))
            for sign, share in ((1, optimality), (-1, 1 - optimality)):
                error = (x - t * (old + sign * BETA * (new - old)) - clean).flatten(1)
                weight = error.detach().abs().mean(1).clamp(min=1e-5)
                terms.append(BOUND / BETA * share * error.square().mean(1) / weight)
        return torch.stack(terms).mean(1).sum() / DRAWS

    return advantages, None, loss


def optimizer_steps(weights: Tensors, loss: Loss, order: Tensor, largest: float) -> list[Tensors]:
    """Two steps of AdamW after the clip of the gradient's norm, in the format of the recordings."""
    steps, moments = [], {name: (0.0, 0.0) for name in weights}
    for number, rows in enumerate(order.chunk(2), 1):
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        gradients = torch.autograd.grad(loss(leaves, rows), list(leaves.values()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        recorded, weights = {"grad_norm": norm}, {}
        for (name, weight), gradient in zip(leaves.items(), gradients, strict=True):
            clipped, (mean, square) = gradient * min(1, largest / (norm + 1e-6)), moments[name]
            mean = BETAS[0] * mean + (1 - BETAS[0]) * clipped
            square = BETAS[1] * square + (1 - BETAS[1]) * clipped**2
            first, second = mean / (1 - BETAS[0] ** number), square / (1 - BETAS[1] ** number)
            decayed, moments[name] = weight.detach() * (1 - RATE * DECAY), (mean, square)
            weights[name] = decayed - RATE * first / (second.sqrt() + 1e-8)
            values = {"grad": gradient, "clipped": clipped, "weights_after": weights[name]}
            recorded |= {f"{kind}/{peft_name(name)}": value for kind, value in values.items()}
        steps.append(recorded)
    return steps


def plain_differences(case: str, changes: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Quantity and difference of a case; `changes` are settings of the trainer only."""
    (size, largest, kl_weight), forward = CASES[case], case != "grpo"
    settings: dict[str, Any] = dict(world="mixture", task="direction", num_steps=STEPS)
    settings |= dict(groups=PROMPTS, group_size=MEMBERS, minibatches=2, micro_batch=48)
    settings |= dict(learning_rate=RATE, betas=BETAS, weight_decay=DECAY, max_grad_norm=largest)
    settings |= dict(window=":-1", noise_level=NOISE, clip_range=CLIP, kl_weight=kl_weight)
    if forward:
        settings |= dict(method="diffusion-nft", sampler="ode", credit="uniform(std=batch)")
        settings["loss"] = f"diffusion-nft(beta={BETA}, advantage_clip={BOUND})"
    config, given = RunConfig.of(**{**settings, **changes}), make_inputs(size)
    policy = make_policy(below(given, "new"), below(given, "base"))
    kind, rewards = ForwardTrainer if forward else ReplayTrainer, given["rewards"][..., None]
    trainer = recorded_trainer(kind, given, policy, make_method(config), rewards, config)
    trainer.give(given["order"], {})
    if isinstance(trainer, ForwardTrainer):
        for name in ("finished", "times", "noise"):
            setattr(trainer, name, given[name])
        new, old = ({peft_name(k): w for k, w in below(given, n).items()} for n in ("new", "old"))
        trainer.resume(new, {"old": old}, 0)
    trainer.iteration()
    exact = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    advantages, nodes, loss = (nft if forward else grpo)(exact, kl_weight)
    yield "advantages", distance(trainer.advantages[:, 0], advantages)
    if nodes is not None:
        yield "latents", distance(trainer.rollout.trajectories.nodes, nodes)
    steps = optimizer_steps(below(exact, "new"), loss, exact["order"], largest)
    yield from step_differences(trainer.optimizer_steps, steps, RATE, least=0.0)

"""Flow-GRPO in one file, built in stages, with PyTorch alone: `nano_flow_grpo.py --seeds 10`.

The model is a flow whose data are eight Gaussians on a circle. A prompt is an angle, and the reward
is closeness to its point on the circle. Mean of 10 seeds, 70 seconds on one core (a seed: 7):

    held-out reward after     0     5    10    20    40   std of the last  lowest since 20
    reinforce              0.19  0.23  0.36  0.83  0.98             0.005             0.67
    reinforce, 4 updates   0.19  0.73  0.79  0.69  0.63             0.297             0.06
    clip                   0.19  0.69  0.98  0.98  0.99             0.004             0.97
    clip, gain             0.19  0.87  0.97  0.98  0.98             0.003             0.97
    clip, turning point    0.19  0.87  0.97  0.98  0.98             0.004             0.97

REINFORCE needs new samples for each update; with ratio and clip, four updates can share them.
Credit per step learns faster at first, but calls the network 50 times per sample instead of 10.
The learning rate falls to 0, because Adam's steps do not shrink with the gradient: at a constant
0.02, "clip" ends at 0.95, std 0.04 (5 seeds). If the estimates are `x - t * v`, without calls, in
place of `ode`, "clip, gain" ends at 0.12 (5 seeds): why?
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Normal


@dataclass
class Settings:
    """The stages differ in the first three."""

    loss: str = "clip"  # or "reinforce"
    credit: str = "uniform"  # or "gain" or "turning point"
    updates: int = 4  # per iteration, each with a part of the samples
    iterations: int = 40
    groups: int = 16  # prompts per iteration
    members: int = 12  # samples per prompt
    decisions: int = 5  # the first of 10 steps, drawn at random; the others follow the ODE
    noise_level: float = 0.7
    clip: float = 0.06
    learning_rate: float = 0.01  # of the first iteration; it falls linearly to 0


STAGES = {
    "reinforce": Settings(loss="reinforce", updates=1),
    "reinforce, 4 updates": Settings(loss="reinforce"),
    "clip": Settings(),
    "clip, gain": Settings(credit="gain"),
    "clip, turning point": Settings(credit="turning point"),
}

# --- the model and the reward: eight Gaussians on a circle; a prompt is an angle ---
STD, TIMES = 0.25, torch.linspace(1, 0, 11)  # of a Gaussian; of the states, noise to data
ANGLES, HELD_OUT = torch.arange(24) * (torch.pi / 12), torch.arange(24) % 4 == 2


def point(angle: Tensor) -> Tensor:
    """The points at these angles on the circle of radius 2 [..., 2]."""
    return 2 * torch.stack([angle.cos(), angle.sin()], -1)


def reward(x: Tensor, angle: Tensor) -> Tensor:
    """exp(-d^2 / 2), d being the distance to the prompt's point [sample]."""
    return (-((x - point(angle)) ** 2).sum(1) / 2).exp()


def pretrained(x: Tensor, t: Tensor) -> Tensor:
    """The exact velocity E[noise - x_0 | x_t = x], a mean over the Gaussians [sample, 2]."""
    means = point(ANGLES[::3])
    gap, variance = x[:, None] - (1 - t) * means, (1 - t) ** 2 * STD**2 + t**2
    posterior = (-(gap**2).sum(-1) / (2 * variance)).softmax(1)[..., None]
    return (posterior * ((t - (1 - t) * STD**2) * gap / variance - means)).sum(1)


class Policy(nn.Module):
    """The pretrained velocity plus a network that is 0 at the start and reads the prompt."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(7, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
        self.net = nn.Sequential(*layers)
        for parameter in layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, t: Tensor, angle: Tensor) -> Tensor:
        """v(x, t, prompt) [sample, 2]; all samples have the same time `t`."""
        time = torch.stack([t, (4 * t).sin(), (4 * t).cos()]).expand(len(x), 3)
        return pretrained(x, t) + self.net(torch.cat([x, time, point(angle) / 2], 1))


# --- sampling: a step of the ODE is made a draw from a Gaussian, which has a probability ---
def transition(x: Tensor, v: Tensor, t: Tensor, s: Tensor, noise_level: float) -> Normal:
    """The next state, at s < t: an Euler step of the SDE with the marginals of the ODE.

    sigma = a sqrt(t / (1 - t)), with s in place of t at t = 1 (arXiv 2505.05470, equations 8, 9).
    """
    sigma = noise_level * (t / (1 - (s if t > 1 - 1e-6 else t))).sqrt()
    half, dt = sigma**2 / (2 * t), t - s
    mean = x * (1 - half * dt) - v * (1 + half * (1 - t)) * dt
    return Normal(mean, sigma * dt.sqrt())


@torch.no_grad()
def ode(policy: Policy, x: Tensor, times: Tensor, angle: Tensor) -> Tensor:
    """The samples at the end of Euler steps along `times`."""
    for t, s in pairwise(times):
        x = x - (t - s) * policy(x, t, angle)
    return x


# --- credit: values [prompt, member, decision + 1] -> advantages [prompt, member, decision] ---
def advantages(values: Tensor, credit: str) -> Tensor:
    """(y - mean) / (std + 1e-4) within a prompt, at most 5 in size."""
    gains, rest = values[..., 1:] - values[..., :-1], values[..., -1:] - values[..., :-1]
    if credit == "uniform":  # Flow-GRPO: the final reward is compared with the group's
        y, axes = values[..., -1:], (1,)
    elif credit == "gain":  # Stepwise-Flow-GRPO (arXiv 2603.28718): what a decision has brought
        y, axes = gains, (1, 2)
    else:  # TP-GRPO (arXiv 2602.06422): all that follows, if the decision turns to the final trend
        along = gains.sign() * rest[..., :1].sign()
        turns = (along > 0) & (gains * (values[..., -1:] - values[..., 1:]) > 0)
        turns[..., 1:] &= along[..., :-1] < 0
        y, axes = torch.where(turns, rest, gains), (1,)
    y = y - y.mean(axes, keepdim=True)
    return (y / ((y**2).mean(axes, keepdim=True).sqrt() + 1e-4)).clamp(-5, 5)


def surrogate(new: Tensor, old: Tensor, advantage: Tensor, args: Settings) -> Tensor:
    """The loss of decisions: its gradient at new = old is that of -advantage * new, REINFORCE's."""
    if args.loss == "reinforce":
        return -advantage * new
    ratio = (new - old).exp()  # corrects for samples of an older policy, within a trust region
    trusted = ratio.clamp(1 - args.clip, 1 + args.clip)
    return -torch.minimum(advantage * ratio, advantage * trusted)


def iteration(policy: Policy, optimizer, prompts: Tensor, args: Settings, generator: Generator):
    """Draw and score `members` samples of each prompt, then update; returns values and losses."""
    angle, steps = prompts.repeat_interleave(args.members), [*pairwise(TIMES)][: args.decisions]
    states, old, values, losses = [torch.randn(len(angle), 2, generator=generator)], [], [], []
    with torch.no_grad():
        for k, (t, s) in enumerate(steps):
            x = states[-1]
            if args.credit != "uniform":  # the reward if the ODE finishes this sample
                values.append(reward(ode(policy, x, TIMES[k:], angle), angle))
            kernel = transition(x, policy(x, t, angle), t, s, args.noise_level)
            states.append(kernel.mean + kernel.stddev * torch.randn(x.shape, generator=generator))
            old.append(kernel.log_prob(states[-1]).mean(1))
    values.append(reward(ode(policy, states[-1], TIMES[args.decisions :], angle), angle))
    table = torch.stack(values, 1).view(len(prompts), args.members, -1)
    credit = advantages(table, args.credit).flatten(0, 1).expand(-1, args.decisions)
    for rows in torch.randperm(len(angle), generator=generator).chunk(args.updates):
        terms = []
        for k, (t, s) in enumerate(steps):
            v = policy(states[k][rows], t, angle[rows])
            kernel = transition(states[k][rows], v, t, s, args.noise_level)
            new = kernel.log_prob(states[k + 1][rows]).mean(1)
            terms.append(surrogate(new, old[k][rows], credit[rows, k], args))
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return table, losses


def evaluate(policy: Policy) -> float:
    """The mean reward of samples of the ODE for held-out prompts, always from the same noise."""
    noise, angle = torch.randn(384, 2, generator=Generator().manual_seed(1)), ANGLES[HELD_OUT]
    samples = ode(policy, noise, torch.linspace(1, 0, 21), angle.repeat(64))
    return reward(samples, angle.repeat(64)).mean().item()


def train(args: Settings, seed: int) -> list[float]:
    """The held-out reward before training and after every iteration."""
    torch.manual_seed(seed)
    policy, generator, prompts = Policy(), Generator().manual_seed(seed), ANGLES[~HELD_OUT]
    optimizer, rewards = torch.optim.Adam(policy.parameters()), [evaluate(policy)]
    for number in range(args.iterations):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / args.iterations)
        chosen = torch.randint(len(prompts), (args.groups,), generator=generator)
        iteration(policy, optimizer, prompts[chosen], args, generator)
        rewards.append(evaluate(policy))
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Flow-GRPO on eight Gaussians, in stages.")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ... (default: 1)")
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)  # several are slower with small tensors
    print("held-out reward after     0     5    10    20    40   std of the last  lowest since 20")
    for name, settings in STAGES.items():
        runs = torch.tensor([train(settings, seed) for seed in seeds])
        row = "  ".join(f"{value:.2f}" for value in runs.mean(0)[[0, 5, 10, 20, 40]])
        spread = f"{runs[:, -1].std(correction=0):.3f}  {runs[:, 20:].min():15.2f}"
        print(f"{name:<22} {row}  {spread:>33}", flush=True)

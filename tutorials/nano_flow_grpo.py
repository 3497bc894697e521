"""Flow-GRPO in one file, to be read from top to bottom: sample, score, credit, update.

    python tutorials/nano_flow_grpo.py                                    # 2-D world, seconds
    python tutorials/nano_flow_grpo.py --credit turning-point             # or stepwise
    python tutorials/nano_flow_grpo.py --world shapes --credit stepwise   # images, minutes
    python tutorials/nano_flow_grpo.py --model path/to/stable-diffusion-3.5-medium \\
        --reward pickscore --prompts prompts.txt --device cuda            # LoRA

Worlds, prompts and rewards come from flowrl; the rest is here. A test compares advantages, losses
and gradients with those of flowrl's trainer.

A flow model turns noise into an image. Its state x_t = (1 - t) x_0 + t noise goes from noise at
t = 1 to the image at t = 0 along dx = v(x, t) dt, in steps from a time t to the next time s < t.
Some steps are drawn at random: these are the decisions, and the policy is their distribution.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Generator

from flowrl import world
from flowrl.core.types import Prompt
from flowrl.run.parts.registry import build
from flowrl.worlds import PolicyOptions


@dataclass
class Settings:
    """Defaults are for points; for images: learning rate 0.004; SD3.5: 3e-4, and clip 1e-4."""

    credit: Literal["uniform", "stepwise", "turning-point"] = "uniform"
    world: Literal["mixture", "shapes"] = "mixture"
    iterations: int = 40
    groups: int = 16  # prompts per iteration
    members: int = 12  # samples per prompt
    steps: int = 10
    decisions: tuple[int, ...] = (0, 1, 2, 3, 4)  # the steps that are drawn
    noise_level: float = 0.7
    clip: float = 0.06  # of the ratio of means over elements; smaller for larger latents
    learning_rate: float = 0.02
    minibatches: int = 4
    batch: int = 256  # samples of a network call in the update
    seed: int = 0
    model: str = ""  # a folder of diffusers instead of a world, with the options below
    reward: str = "jpeg-compressibility"  # a name of `flowrl parts`
    prompts: str = ""  # a file with a prompt per line
    device: str = "cuda"
    guidance: float = 4.5
    resolution: int = 512


# --- the model ---
class WorldModel:
    """A built-in world of flowrl: points in two dimensions, or images of coloured shapes."""

    def __init__(self, name: str):
        self.world, self.device = world(name), "cpu"
        self.policy = self.world.policy(PolicyOptions())
        self.encode, self.decode = self.policy.encode, self.policy.decode
        self.latent_shape = self.policy.latent_shape
        self.parameters = list(self.policy.trainable().values())

    def times(self, steps):
        """The times of the nodes, from 1 to 0 [step + 1]."""
        return self.policy.schedule(steps).times

    def velocity(self, x, t, condition):
        """v(x, t) of every sample; `t` is one time."""
        return self.policy.velocity(x, (1000 * t).expand(len(x)), condition)


class SD3Model:
    """Stable Diffusion 3 or 3.5 from a folder of diffusers, with a LoRA as the trained weights."""

    def __init__(self, args: Settings):
        from diffusers import StableDiffusion3Pipeline
        from peft import LoraConfig

        device, dtype = args.device, torch.float32 if args.device == "cpu" else torch.bfloat16
        pipe = StableDiffusion3Pipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)
        self.device, self.dtype, self.guidance = device, dtype, args.guidance
        self.pipe, self.network, self.vae, self.known = pipe, pipe.transformer, pipe.vae, {}
        self.network.requires_grad_(False)
        layers = r".*attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
        options = {"init_lora_weights": "gaussian", "target_modules": layers}
        self.network.add_adapter(LoraConfig(r=32, lora_alpha=64, **options))
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        for parameter in self.parameters:
            parameter.data = parameter.data.float()  # small updates vanish in bfloat16
        side = args.resolution // self.pipe.vae_scale_factor
        self.latent_shape = (self.network.config.in_channels, side, side)

    def times(self, steps):
        """The times of the nodes on the pipeline's shifted grid [step + 1]."""
        self.pipe.scheduler.set_timesteps(steps)
        return self.pipe.scheduler.sigmas.to(self.device)

    @torch.no_grad()
    def encode(self, prompts):
        """Embeddings of tokens, and pooled ones: those of no text, then those of the prompts."""
        for prompt in prompts:
            if prompt.text not in self.known:
                tokens, empty, pooled, none = self.pipe.encode_prompt(prompt.text, None, None)
                self.known[prompt.text] = empty, none, tokens, pooled
        rows = [self.known[prompt.text] for prompt in prompts]
        empty, none, tokens, pooled = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return torch.cat([empty, tokens]), torch.cat([none, pooled])

    def velocity(self, x, t, condition):
        """The guided velocity, v_empty + guidance (v - v_empty), in float32."""
        latents = x.to(self.dtype).repeat(2, 1, 1, 1)
        timestep = (1000 * t).expand(len(latents))
        with torch.autocast(self.device, self.dtype, enabled=self.device != "cpu"):
            output = self.network(latents, *condition, timestep, return_dict=False)[0]
        empty, prompted = output.float().chunk(2)
        return empty + self.guidance * (prompted - empty)

    def decode(self, x):
        """Images in [0, 1] [sample, 3, height, width]."""
        latents = x / self.vae.config.scaling_factor + self.vae.config.shift_factor
        image = self.vae.decode(latents.to(self.dtype), return_dict=False)[0]
        return (image.float() / 2 + 0.5).clamp(0, 1)


# --- the policy: a step of the sampler is a Gaussian ---
def transition(x, v, t, s, noise_level):
    """Mean and std of the next state, one Euler-Maruyama step of the SDE with the ODE's marginals.

    sigma = a sqrt(t / (1 - t)), and s in place of t where t = 1 (arXiv 2505.05470, equations 8, 9).
    """
    sigma = noise_level * (t / (1 - (s if t > 1 - 1e-6 else t))).sqrt()
    half, dt = sigma**2 / (2 * t), t - s
    mean = x * (1 - half * dt) - v * (1 + half * (1 - t)) * dt
    return mean, sigma * dt.sqrt()


def log_prob(y, mean, std):
    """log N(y; mean, std^2), the mean over the elements of each sample; a constant is left out."""
    return -((y - mean) ** 2).flatten(1).mean(1) / (2 * std**2)


@torch.no_grad()
def ode(model, x, times, condition, first=None):
    """x after Euler steps along `times`; `first` is the first velocity if it is known."""
    for t, s in pairwise(times):
        v = model.velocity(x, t, condition) if first is None else first
        x, first = x - (t - s) * v, None
    return x


# --- rollout: a group of trajectories per prompt ---
@torch.no_grad()
def rollout(model, condition, x, times, args: Settings, generator: Generator):
    """Trajectories from the noise `x`: the states [node], the log-probabilities of the decisions,
    and the critic's estimates of the finished latents at every decision.
    """
    states, old, estimates = [x], [], []
    for step, (t, s) in enumerate(pairwise(times)):
        v = model.velocity(x, t, condition)
        if step in args.decisions:
            if args.credit == "stepwise":  # five Euler steps on an even grid
                grid = t * (1 - torch.arange(6, device=t.device) / 5)
                estimates.append(ode(model, x, grid, condition, v))
            elif args.credit == "turning-point":  # the rest of the sampler's own grid
                estimates.append(ode(model, x, times[step:], condition, v))
            mean, std = transition(x, v, t, s, args.noise_level)
            noise = torch.randn(x.shape, generator=generator).to(x.device)
            x = mean + std * noise
            old.append(log_prob(x, mean, std))
        else:
            x = x - (t - s) * v
        states.append(x)
    return states, old, estimates


# --- credit: values [prompt, member, decision + 1] -> advantages [prompt, member, decision] ---
def normalised(values, axes):
    """(y - mean) / (std + 1e-4) along `axes`, at most 5 in size."""
    centred = values - values.mean(axes, keepdim=True)
    return (centred / ((centred**2).mean(axes, keepdim=True).sqrt() + 1e-4)).clamp(-5, 5)


def uniform(values):
    """Flow-GRPO (arXiv 2505.05470): every decision gets the final reward, compared in its group."""
    return normalised(values[..., -1:], (1,))


def stepwise(values):
    """Stepwise-Flow-GRPO (arXiv 2603.28718): a decision gets the gain that it brought."""
    return normalised(values[..., 1:] - values[..., :-1], (1, 2))


def turning_point(values):
    """TP-GRPO (arXiv 2602.06422): gains, and the whole rest of the reward at turning points.

    A turning point moves towards the final trend, the decision before it did not, and what follows
    has its sign. Of turning points up and down equally many are kept, the largest.
    """
    gains, rest = values[..., 1:] - values[..., :-1], values[..., -1:] - values[..., :-1]
    trend, after = rest[..., :1].sign(), (values[..., -1:] - values[..., 1:]).sign()
    along = gains.sign() * trend
    turns = (along > 0) & (gains.sign() * after > 0)
    turns[..., 1:] &= along[..., :-1] < 0
    up, down = turns & (rest > 0), turns & (rest < 0)
    count = min(int(up.sum()), int(down.sum()))
    if count:
        turns = largest(up, rest, count) | largest(down, -rest, count)
    return normalised(torch.where(turns, rest, gains), (1,))


def largest(mask, size, count):
    """The `count` largest entries of `mask`; of equals the later decision."""
    ranked = torch.where(mask, size, -torch.inf).movedim(-1, 0)
    kept = torch.zeros(ranked.numel(), dtype=torch.bool, device=mask.device)
    kept[ranked.flatten().argsort(stable=True)[-count:]] = True
    return kept.view(ranked.shape).movedim(0, -1)


CREDIT = {"uniform": uniform, "stepwise": stepwise, "turning-point": turning_point}


# --- one iteration ---
def iteration(model, reward, prompts, optimizer, args: Settings, generator: Generator):
    """Sample, score, credit, update; returns numbers for a log."""
    times = model.times(args.steps)
    samples = [prompt for prompt in prompts for _ in range(args.members)]
    condition = model.encode(samples)
    same = args.members if args.credit == "stepwise" else 1  # samples per noise
    x = torch.randn((len(samples) // same, *model.latent_shape), generator=generator)
    x = x.repeat_interleave(same, 0).to(model.device)
    states, old, estimates = rollout(model, condition, x, times, args, generator)
    with torch.no_grad():
        columns = [reward.score(model.decode(z), samples) for z in [*estimates, states[-1]]]
    values = torch.stack(columns, -1).view(len(prompts), args.members, -1)
    advantages = CREDIT[args.credit](values).flatten(0, 1).to(model.device)
    advantages = advantages.expand(-1, len(args.decisions))

    losses, gradients = [], []
    order = torch.randperm(len(samples), generator=generator)
    for part in order.chunk(args.minibatches):
        optimizer.zero_grad()
        losses.append(0.0)
        for number, step in enumerate(args.decisions):
            for rows in part.split(args.batch):
                x, t, s = states[step][rows], times[step], times[step + 1]
                v = model.velocity(x, t, model.encode([samples[i] for i in rows.tolist()]))
                mean, std = transition(x, v, t, s, args.noise_level)
                ratio = (log_prob(states[step + 1][rows], mean, std) - old[number][rows]).exp()
                a = advantages[rows, number]
                term = torch.maximum(-a * ratio, -a * ratio.clamp(1 - args.clip, 1 + args.clip))
                mean_term = term.sum() / (len(part) * len(args.decisions))
                mean_term.backward()
                losses[-1] += float(mean_term.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters, 1.0)
        gradients.append([parameter.grad.clone() for parameter in model.parameters])
        optimizer.step()
    return {"values": values, "advantages": advantages, "losses": losses, "gradients": gradients}


@torch.no_grad()
def evaluate(model, reward, prompts):
    """The mean reward of images of the ODE (20 steps), from the same noise in every call."""
    generator = Generator().manual_seed(1)
    noise = torch.randn((len(prompts), *model.latent_shape), generator=generator).to(model.device)
    latents = ode(model, noise, model.times(20), model.encode(prompts))
    return float(reward.score(model.decode(latents), prompts).mean())


def main(args: Settings):
    """Train, and print the held-out reward."""
    torch.manual_seed(args.seed)
    if args.model:
        lines = Path(args.prompts).read_text().splitlines()
        model, reward = SD3Model(args), build("reward", args.reward, trust=True)
        train = heldout = [Prompt(line) for line in lines if line]
    else:
        torch.set_num_threads(1)  # several threads are slower with small tensors
        model = WorldModel(args.world)
        reward, task = model.world.reward("soft"), model.world.tasks[0]
        train, heldout = (list(model.world.prompts(task, part)) for part in ("train", "heldout"))
    heldout = heldout * max(1, 384 // len(heldout))
    optimizer = torch.optim.AdamW(model.parameters, args.learning_rate, (0.9, 0.99), 1e-8, 1e-4)
    generator, start = Generator().manual_seed(args.seed), time.monotonic()
    print(f"before training: held-out reward {evaluate(model, reward, heldout):.3f}")
    for number in range(1, args.iterations + 1):
        prompts = [train[i] for i in torch.randint(len(train), (args.groups,), generator=generator)]
        result = iteration(model, reward, prompts, optimizer, args, generator)
        text = f"iteration {number}: reward {result['values'][..., -1].mean():.3f}"
        text += f", held out {evaluate(model, reward, heldout):.3f}" if number % 5 == 0 else ""
        print(f"{text}, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))

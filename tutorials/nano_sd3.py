"""Flow-GRPO for Stable Diffusion 3 and 3.5 in one file: a LoRA, trained with a reward of images.

    python tutorials/nano_sd3.py path/to/stable-diffusion-3.5-medium prompts.txt

The method is that of `nano_flow_grpo.py`, which explains it. The first argument is a folder of
diffusers, the second a file with a prompt per line. The result is a LoRA for
`pipe.load_lora_weights("lora")`. Needs diffusers, transformers and PEFT.

No published weights have been trained with this file yet. It is tested with small random ones, as
in this run of 10 seconds, too short to change the reward:

    python -c "from flowrl.testing import tiny_sd3; tiny_sd3().save_pretrained('tiny')"
    echo "a red cat" > prompts.txt
    python tutorials/nano_sd3.py tiny prompts.txt --device cpu --resolution 16 --iterations 3 \\
        --groups 2 --members 4

    iteration 1: reward -0.843, clipped 0%, 1 s
    iteration 2: reward -0.842, clipped 0%, 2 s
    iteration 3: reward -0.838, clipped 0%, 2 s
"""

import argparse
import io
import math
import time
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline  # pyright: ignore[reportPrivateImportUsage]
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from torch import Generator, Tensor, nn
from torch.distributions import Normal


@dataclass
class Settings:
    """Defaults: learning rate, clip, LoRA, guidance and noise are Flow-GRPO's for SD3.5-Medium."""

    model: str  # a folder of diffusers
    prompts: str  # a file with a prompt per line
    out: str = "lora"
    device: str = "cuda"
    iterations: int = 100
    groups: int = 8  # prompts per iteration
    members: int = 12  # images per prompt
    steps: int = 10
    decisions: int = 5  # the first steps, which are drawn at random; the others follow the ODE
    updates: int = 2  # per iteration, each with a part of the images
    batch: int = 4  # images per call of the network
    resolution: int = 512
    guidance: float = 4.5
    noise_level: float = 0.7
    clip: float = 1e-4  # of a ratio of means over the elements of a latent
    learning_rate: float = 3e-4  # of the first iteration; it falls linearly to 0
    rank: int = 32
    seed: int = 0


# --- the reward: replace this function by your own ---
def reward(images: Tensor, prompts: list[str]) -> Tensor:
    """Images in [0, 1] [image, 3, height, width] and their prompts -> [image], higher is better.

    Compressibility: the size as JPEG of quality 95 in kilobytes, negative.
    """
    sizes = []
    for image in (255 * images).round().byte().permute(0, 2, 3, 1).cpu().numpy():
        Image.fromarray(image).save(file := io.BytesIO(), "JPEG", quality=95)
        sizes.append(file.tell() / 1000)
    return -torch.tensor(sizes)


# --- the model ---
class Policy:
    """The pipeline's network with guidance, of which a LoRA is trained."""

    def __init__(self, args: Settings):
        self.dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        pipe: Any = StableDiffusion3Pipeline.from_pretrained(args.model, dtype=self.dtype)
        self.pipe, self.args, self.known = pipe.to(args.device), args, {}
        self.network, self.vae = pipe.transformer, pipe.vae
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False)
        layers = r".*attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
        torch.manual_seed(args.seed)
        self.lora = LoraConfig(
            r=args.rank,
            lora_alpha=2 * args.rank,
            init_lora_weights="gaussian",  # of A; B is 0, so training starts from the model
            target_modules=layers,
        )
        self.network.add_adapter(self.lora)
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        for parameter in self.parameters:
            parameter.data = parameter.data.float()  # small updates vanish in bfloat16
        side = args.resolution // pipe.vae_scale_factor
        self.latent_shape = (self.network.config.in_channels, side, side)

    def times(self) -> Tensor:
        """The times of the states on the scheduler's shifted grid, from 1 to 0 [step + 1]."""
        self.pipe.scheduler.set_timesteps(self.args.steps)
        return self.pipe.scheduler.sigmas.to(self.args.device)

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> list[Tensor]:
        """Embeddings of tokens and pooled ones; those of no text, then those of the prompts."""
        for prompt in prompts:
            if prompt not in self.known:
                tokens, empty, pooled, none = self.pipe.encode_prompt(prompt, None, None)
                self.known[prompt] = empty, tokens, none, pooled
        rows = [self.known[prompt] for prompt in prompts]
        empty, tokens, none, pooled = map(torch.cat, zip(*rows, strict=True))
        return [torch.cat([empty, tokens]), torch.cat([none, pooled])]

    def velocity(self, x: Tensor, t: Tensor, prompts: list[str]) -> Tensor:
        """The guided velocity, v_empty + guidance (v - v_empty), in float32."""
        timestep = (1000 * t).expand(2 * len(x))
        x, (tokens, pooled) = x.to(self.dtype).repeat(2, 1, 1, 1), self.encode(prompts)
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            output = self.network(x, tokens, pooled, timestep, return_dict=False)[0]
        empty, prompted = output.float().chunk(2)
        return empty + self.args.guidance * (prompted - empty)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """Images in [0, 1] [image, 3, height, width]."""
        latents = x / self.vae.config.scaling_factor + self.vae.config.shift_factor
        image = self.vae.decode(latents.to(self.dtype), return_dict=False)[0]
        return (image.float() / 2 + 0.5).clamp(0, 1)

    def save(self, folder: str) -> None:
        """A LoRA for `pipe.load_lora_weights(folder)`."""
        tensors = get_peft_model_state_dict(self.network)
        for name in tensors:  # a file has no alpha, so B gets the factor alpha / rank
            if "lora_B" in name:
                tensors[name] = tensors[name] * self.lora.lora_alpha / self.lora.r
        self.pipe.save_lora_weights(folder, transformer_lora_layers=tensors)


# --- a step of the sampler is a draw from a Gaussian ---
def transition(x: Tensor, v: Tensor, t: Tensor, s: Tensor, noise_level: float) -> Normal:
    """The next state, at s < t: an Euler step of the SDE with the marginals of the ODE.

    sigma = a sqrt(t / (1 - t)), with s in place of t at t = 1 (arXiv 2505.05470, equations 8, 9).
    """
    sigma = noise_level * (t / (1 - (s if t > 1 - 1e-6 else t))).sqrt()
    half, dt = sigma**2 / (2 * t), t - s
    mean = x * (1 - half * dt) - v * (1 + half * (1 - t)) * dt
    return Normal(mean, sigma * dt.sqrt())


def log_prob(kernel: Normal, y: Tensor) -> Tensor:
    """The mean log-density over the elements of each latent [image]."""
    return kernel.log_prob(y).flatten(1).mean(1)


@dataclass
class Batch:
    """Images of one call of the network: what was drawn, and how it was rewarded."""

    prompts: list[str]
    states: list[Tensor]  # [decision + 1], each [image, *latent]
    old: Tensor  # log-probabilities when drawn [image, decision]
    rewards: Tensor  # [image]
    advantages: Tensor  # [image]


@torch.no_grad()
def sample(policy: Policy, x: Tensor, prompts: list[str], generator: Generator) -> Batch:
    """Images from the noise `x`, without advantages."""
    states, old, args, times = [x], [], policy.args, policy.times()
    for step, (t, s) in enumerate(pairwise(times)):
        v = policy.velocity(x, t, prompts)
        if step < args.decisions:
            kernel = transition(x, v, t, s, args.noise_level)
            noise = torch.randn(x.shape, generator=generator).to(x.device)
            x = kernel.mean + kernel.stddev * noise
            states.append(x)
            old.append(log_prob(kernel, x))
        else:
            x = x - (t - s) * v
    rewards = reward(policy.decode(x), prompts).to(x.device)
    return Batch(prompts, states, torch.stack(old, 1), rewards, torch.zeros_like(rewards))


def advantages(rewards: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-4) over the members of each prompt, at most 5 in size.

    [prompt, member] -> [prompt, member]. Credit per step goes here: see `nano_flow_grpo.py`.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, correction=0, keepdim=True) + 1e-4)).clamp(-5, 5)


def rollout(policy: Policy, prompts: list[str], generator: Generator) -> list[Batch]:
    """`members` images of every prompt, in batches."""
    args, batches = policy.args, []
    names = [prompt for prompt in prompts for _ in range(args.members)]
    noise = torch.randn((len(names), *policy.latent_shape), generator=generator)
    for first in range(0, len(names), args.batch):
        rows = slice(first, first + args.batch)
        batches.append(sample(policy, noise[rows].to(args.device), names[rows], generator))
    rewards = torch.cat([batch.rewards for batch in batches]).view(len(prompts), -1)
    for batch, part in zip(batches, advantages(rewards).flatten().split(args.batch), strict=True):
        batch.advantages = part
    return batches


def update(policy: Policy, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> Tensor:
    """`updates` optimizer steps, each with a part of the batches; returns the ratios.

    A batch is the same as when it was drawn. So the ratios before the first step are exactly 1.
    """
    args, times, ratios = policy.args, policy.times(), []
    size = math.ceil(len(batches) / args.updates)
    for first in range(0, len(batches), size):
        part = batches[first : first + size]
        terms = args.decisions * sum(len(batch.prompts) for batch in part)
        optimizer.zero_grad()
        for batch in part:
            for k, (t, s) in enumerate(pairwise(times[: args.decisions + 1])):
                x, y, a = batch.states[k], batch.states[k + 1], batch.advantages
                v = policy.velocity(x, t, batch.prompts)
                new = log_prob(transition(x, v, t, s, args.noise_level), y)
                ratio = (new - batch.old[:, k]).exp()
                trusted = ratio.clamp(1 - args.clip, 1 + args.clip)
                (-torch.minimum(a * ratio, a * trusted).sum() / terms).backward()
                ratios.append(ratio.detach())
        nn.utils.clip_grad_norm_(policy.parameters, 1.0)
        optimizer.step()
    return torch.cat(ratios)


def main(args: Settings) -> None:
    """Train, print a line per iteration, and save the LoRA after each."""
    policy, generator = Policy(args), Generator().manual_seed(args.seed)
    prompts = [line for line in Path(args.prompts).read_text().splitlines() if line]
    optimizer, start = torch.optim.AdamW(policy.parameters, weight_decay=1e-4), time.monotonic()
    for number in range(args.iterations):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / args.iterations)
        chosen = torch.randint(len(prompts), (args.groups,), generator=generator).tolist()
        batches = rollout(policy, [prompts[i] for i in chosen], generator)
        ratios = update(policy, optimizer, batches)
        rewards = torch.cat([batch.rewards for batch in batches])
        clipped = ((ratios - 1).abs() > args.clip).float().mean()
        text = f"iteration {number + 1}: reward {rewards.mean():.3f}, clipped {clipped:.0%}"
        print(f"{text}, {time.monotonic() - start:.0f} s", flush=True)
        policy.save(args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Flow-GRPO for Stable Diffusion 3 and 3.5.")
    parser.add_argument("model", help="a folder of diffusers")
    parser.add_argument("prompts", help="a file with a prompt per line")
    for field in fields(Settings)[2:]:
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    main(Settings(**vars(parser.parse_args())))

"""One group's trajectories at the end of a run, for the report."""

from pathlib import Path

import torch
from safetensors.torch import save

from flowrl.io import write_bytes, write_json
from flowrl.rollout import Groups, Usage, reward_table, rollout
from flowrl.training.trainer import Trainer
from flowrl.types import Completion, Tweedie
from flowrl.worlds.base import World


def show_trajectory(folder: Path, trainer: Trainer, world: World, members: int = 12) -> None:
    """Rewards along the trajectories of one group, and the completions of the one with the largest swings."""
    policy, config = trainer.policy, trainer.config
    prompt = world.prompts(config.environment.task, "heldout")[0]
    generator = torch.Generator(policy.device).manual_seed(7)
    groups = Groups(1, members)
    noise = groups.noise(policy.latent_shape, generator)
    start = generator.get_state()
    tables, estimates = [], None
    sampler = trainer.draw_sampler()
    for probe in (Completion(), Tweedie()):
        generator.set_state(start)
        result = rollout(
            policy,
            sampler,
            trainer.schedule,
            policy.encode([prompt]),
            noise,
            generator,
            groups,
            probe,
            Usage(),
            config.rollout.max_batch,
        )
        tables.append(reward_table(policy, trainer.reward, result, [prompt])[0])
        estimates = estimates or result.estimates
    chosen = int(tables[0].diff(dim=1).abs().sum(1).nan_to_num(-1.0).argmax())
    record = {
        "prompt": prompt.text,
        "chosen": chosen,
        "rewards": tables[0][chosen].tolist(),
        "members": tables[0].tolist(),
        "tweedie": tables[1][chosen].tolist(),
    }
    write_json(folder / "trajectory.json", record)
    assert estimates is not None
    images = torch.cat([policy.decode(estimates[node][chosen : chosen + 1]) for node in sorted(estimates)])
    write_bytes(folder / "trajectory.safetensors", save({"images": images.cpu().contiguous()}))

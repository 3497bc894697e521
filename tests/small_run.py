"""Runs and trainers that take a tenth of a second, and what must not depend on what happens to
them.
"""

import json
import re
import shlex
import socket
from pathlib import Path

import torch

import flowrl
from flowrl.cli.main import main
from flowrl.run.build import (
    build_trainer,
    make_method,
    make_reward,
    make_world,
    policy_options,
)
from flowrl.run.config import preset
from flowrl.run.distributed import Distributed
from flowrl.run.presets import METHOD_SETTINGS
from flowrl.testing.tiny import tiny_sd3
from flowrl.trainer import Trainer

TINY_RUN = preset("tiny").apply(world="mixture")
SMALL = TINY_RUN.replace(
    groups=2,
    group_size=2,
    num_steps=3,
    eval_samples=2,
    eval_steps=1,
    iterations=2,
    checkpoint_every=1,
    minibatches=2,
)
BASE = TINY_RUN.replace(
    groups=3,
    group_size=4,
    num_steps=6,
    iterations=9,
    minibatches=2,
    window=":-1",
    learning_rate=1e-3,
    kl_weight=0.1,
)
TRANSITIONS = {
    "uniform": dict(window="random(size=2)"),
    "stepwise": dict(method="stepwise-flow-grpo"),
    "turning points": dict(method="tp-grpo"),
    "critic": dict(credit="calibrated-gain(probe='critic(reads=hidden)')", window="1:4"),
    "moving average": dict(method="average", credit="moving-average-gain", window="2:5"),
    "value tracker": dict(credit="value-tracker"),
    "win rates": dict(
        method="stepwise-flow-grpo",
        reward="win-rate(reward='flowrl.worlds.mixture:DirectionReward')",
    ),
    "trajectories": dict(loss="gspo", clip_range=0.003),
    "tree": dict(credit="stepwise-gain(probe='branch(children=(1, 2))')"),
    "tree of edges": dict(credit="backed-up(probe='branch(children=(1, 2), weight=edge)')"),
    "comb": dict(credit="sibling-relative(probe='comb(branches=2, count=1, strides=(1, 2))')"),
}
DGPO = "dgpo(beta_dpo=1.0, clip=none, times=steps(count=2, steps=5), {})"
VALUE = "latent_reward='closed_form:ExactValue', times=steps(count=5, steps=5)"
FORWARD = {  # copies that follow late are neither the current weights nor the first
    "nft": dict(method="diffusion-nft", loss="diffusion-nft(decay=(0, 0.2, 0.5))"),
    "ascent": dict(loss=f"ascent({VALUE})", window=":-1"),
    "direct": dict(loss="ascent(kl_weight=0.1)", sampler="ode"),
    "nft, late copy": dict(loss="diffusion-nft(decay=(1, 0.3, 0.6))"),
    "nft, own states": dict(loss="diffusion-nft(noise=path)"),
    "awm": dict(method="awm", loss="awm(decay=(0, 0.1, 0.3), times=stratified(count=3))"),
    "dgpo": dict(loss=DGPO.format("decay=(0, 0.1, 0.3), sample_from=1")),
    "crd": dict(loss="crd(decay=(0, 0.1, 0.3), sampling_decay=(0, 0.2, 0.5))"),
    "dgpo, shared noise": dict(loss=DGPO.format("noise=group-all-times")),
}
WHOLE = {
    name: dict(method=name, **METHOD_SETTINGS["tiny"].get(name, {}))
    for name in ("v-grpo", "epg", "fdfo", "rsm", "step-nft")
}
CASES = TRANSITIONS | FORWARD | WHOLE
"""Settings of `BASE` for all kinds of training."""

TIMES = ("seconds", "seconds_total", "phases")
FILES = (
    "weights.safetensors",
    "samples.safetensors",
    "samples.json",
    "trajectory.json",
    "trajectory.safetensors",
)


def plain(row, without=()):
    """A row of metrics without its times, and without some other entries."""
    row = {name: value for name, value in row.items() if name not in (*TIMES, *without)}
    if row.get("evaluation"):
        row["evaluation"] = plain(row["evaluation"])
    return row


def rows_of(folder, without=()):
    """The rows of the run in `folder`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [plain(json.loads(line), without) for line in lines]


def write_rows(folder, rows):
    """Write the metrics of a run, as `rows_of` reads them."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def numbers(folder):
    """What must not depend on interruptions."""
    return json.dumps(rows_of(folder)), *((folder / name).read_bytes() for name in FILES)


TINY_MODEL = {
    "resolution": 16,
    "max_sequence_length": 24,
    "device": "cpu",
    "dtype": "float32",
}
"""Settings of a tiny pipeline."""
REDNESS = """
class Redness:
    def score(self, images, prompts):
        red, every = images[..., 0, :, :].flatten(1), images.flatten(1)
        return 1.5 * (red.mean(1) - every.mean(1))
"""
MIXTURE = "--preset tiny --world mixture --task direction"
"""Options of the shortest run."""


def flowrl_(line):
    """The exit code of a command line."""
    return main(shlex.split(line))


def error_of(line, capsys):
    """What a command line that ends with exit code 2 writes as its error."""
    assert flowrl_(line) == 2
    return capsys.readouterr().err


def edit(folder, **settings):
    """Edit a run's config.json as its user does."""
    text = (folder / "config.json").read_text()
    for name, value in settings.items():
        text, count = re.subn(rf'("{name}"): [^,\n]+', rf"\1: {json.dumps(value)}", text)
        assert count == 1
    (folder / "config.json").write_text(text)


def words(**options):
    """Options of a command as words: a list repeats its option, True is a flag."""
    command = []
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            command += [f"--{name.replace('_', '-')}", *([] if item is True else [str(item)])]
    return command


def model_files(folder, prompts=("a red fox", "a red car", "a red hat"), pipe=None):
    """A tiny pipeline, its prompts and a reward in `folder`, as settings."""
    (pipe or tiny_sd3()).save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("\n".join(prompts))
    (folder / "reward.py").write_text(REDNESS)
    files = {"model": f"{folder}/model", "prompts": f"{folder}/prompts.txt", **TINY_MODEL}
    return files | {"reward": f"{folder}/reward.py:Redness"}


def trainer_of(config, method=None, reward=None, distributed=Distributed(), kind=Trainer):
    """A trainer of a built-in world, with another method or reward."""
    world = make_world(config)
    return build_trainer(
        config,
        world.policy(policy_options(config)),
        method or make_method(config),
        reward or make_reward(config),
        world.prompts(config.environment.task, "train"),
        distributed,
        kind,
    )


def weights(trainer):
    """A copy of the trained weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.parameters.values()])


def trained(trainer, iterations=2):
    """Metrics without times, and the weights after some iterations."""
    rows = [plain(trainer.iteration()) for _ in range(iterations)]
    return rows, weights(trainer)


def launch_file(name):
    """A shipped config file of Accelerate."""
    return str(Path(flowrl.__file__).parent / "data" / "launch" / f"{name}.yaml")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])

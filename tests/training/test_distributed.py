"""Several processes train what one does, and none waits for another that has gone."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flowrl.launch
from flowrl.distributed import Share, Team, share_of
from flowrl.errors import ConfigError, RewardError, TrainingError
from flowrl.rewards import FunctionReward
from flowrl.sharding import whole
from flowrl.training.build import make_method, make_reward, make_world, policy_options, trained_policy
from flowrl.training.config import load_config, preset
from flowrl.training.evaluation import evaluate
from flowrl.training.run import Run
from flowrl.training.trainer import Trainer
from flowrl.types import Prompt

SETTINGS = dict(group_size=4, minibatches=2, micro_batch=7, iterations=2, kl_weight=0.1, window="random:2", learning_rate=3e-4)
MIXTURE = preset("tiny").apply(world="mixture", task="direction", groups=3, **SETTINGS)
CASES = {
    "uniform": MIXTURE.replace(method="flow-grpo"),
    "stepwise": MIXTURE.replace(method="stepwise-flow-grpo"),
    "turning points": MIXTURE.replace(method="tp-grpo"),
    "moving average": MIXTURE.replace(method="average", credit="moving-average-gain"),
    "batch statistics": MIXTURE.replace(method="global", credit="uniform(std=batch)"),
    "one prompt": MIXTURE.replace(method="tp-grpo", groups=1),
    "continuations": MIXTURE.replace(credit="stepwise-gain(probe='continuation:3')"),
    "chunks": MIXTURE.replace(groups=5, chunk=1, overlap_rewards=True, offload=True),
}
REDNESS = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3)))


def world_trainer(config, team):
    world = make_world(config)
    policy, prompts = world.policy(policy_options(config)), world.prompts(config.environment.task, "train")
    return Trainer(policy, make_method(config), make_reward(config), prompts, config, team)


def pipeline_trainer(config, team):
    from flowrl.testing.tiny import tiny_sd3_policy

    prompts = [Prompt(text) for text in ("three red circles", "a dog", "a small house")]
    return Trainer(tiny_sd3_policy(), make_method(config), REDNESS, prompts, config, team)


def trained(make, config, team):
    """Numbers of two iterations, and the state after them. Not the calls of the network one after the other: that several
    processes make fewer of them is their use."""
    trainer = make(config, team)
    rows = [trainer.iteration() for _ in range(config.iterations)]
    for row in rows:
        row.pop("seconds"), row.pop("phases"), row.pop("calls")
    return rows, {name: tensor.detach().clone() for name, tensor in trainer.state().tensors.items()}


def largest_difference(first, second):
    """Over all numbers and tensors; 1 where something else differs."""
    if isinstance(first, torch.Tensor):
        return float((first.double() - second.double()).abs().max()) if first.numel() else 0.0
    if isinstance(first, dict):
        return max((largest_difference(first[key], second[key]) for key in first | second), default=0.0)
    if isinstance(first, list | tuple):
        assert len(first) == len(second)
        return max(map(largest_difference, first, second), default=0.0)
    return abs(first - second) if isinstance(first, float) else float(first != second)


def compared(team):
    """By case, the largest difference between what this process computes alone and what the team does."""
    torch.manual_seed(team.rank)  # nothing may hang on the global generator
    found = {}
    for name, config in CASES.items():
        found[name] = largest_difference(trained(world_trainer, config, Team()), trained(world_trainer, config, team))
    for name in ("flow-grpo", "tp-grpo"):
        # Adam divides by the gradient's size: where that is near its epsilon of 1e-8, rounding errors of 1e-10 in the gradient
        # are 1% of the step, so the learning rate bounds how close weights can be
        config = preset("tiny").apply(method=name, groups=3, **{**SETTINGS, "learning_rate": 1e-4})
        alone, together = trained(pipeline_trainer, config, Team()), trained(pipeline_trainer, config, team)
        # a group's rewards differ by hundredths here, so advantages have a hundred times the rewards' rounding errors
        sizes = [[row.pop("abs_advantage") for row in rows] for rows, _ in (alone, together)]
        assert largest_difference(*sizes) < 1e-5
        found[f"sd3 {name}"] = largest_difference(alone, together)
    policy, world = make_world(MIXTURE).policy(policy_options(MIXTURE)), make_world(MIXTURE)
    for count in (1, 9):
        alone, together = (
            evaluate(policy, world, "direction", "soft", count, 5, keep=7, reward=world.reward("strict"), team=some)
            for some in (Team(), team)
        )
        for part in ("scores", "images", "image_scores", "custom_reward"):
            found[f"evaluation of {count}: {part}"] = largest_difference(getattr(alone, part), getattr(together, part))
    return found


def divided(team):
    """The same for weights that are divided between the processes; with what was saved, and after a resumption."""
    from flowrl.sharding import is_divided
    from flowrl.testing.tiny import TINY, tiny_sd3_policy

    team = replace(team, sharded=True)
    found = {}
    config = preset("tiny").apply(method="tp-grpo", **{**SETTINGS, "learning_rate": 1e-4, "groups": 1})
    for train in ("lora", "full"):

        def make(config, team, train=train):
            prompts = [Prompt(text) for text in ("three red circles", "a dog", "a small house")]
            policy = tiny_sd3_policy(TINY.replace(tuning=train))
            return Trainer(policy, make_method(config), REDNESS, prompts, config, team)

        trainer = make(config, team)
        assert all(is_divided(parameter) for parameter in trainer.parameters)
        alone, together = trained(make, config, Team()), trained(make, config, team)
        assert largest_difference(alone[0], together[0]) < 1e-5
        found[train] = largest_difference(alone[1], together[1])
        trainer.iteration()
        state = trainer.state()
        again = make(config, team)
        again.restore(state)
        rows = [trainer.iteration(), again.iteration()]
        for row in rows:
            row.pop("seconds"), row.pop("phases")
        found[f"{train} resumed"] = largest_difference(*rows)
        with trainer.averaged(), tempfile.TemporaryDirectory() as folder:
            trainer.policy.save(Path(folder) / "saved")
            options = replace(TINY, adapter=f"{folder}/saved") if train == "lora" else TINY
            plain = tiny_sd3_policy(options)
            if train == "full":
                plain.transformer = type(plain.transformer).from_pretrained(f"{folder}/saved/transformer")
        named = {name: tensor.detach() for name, tensor in plain.transformer.named_parameters()}
        found[f"{train} saved"] = largest_difference(
            {name: whole(mean) for name, mean in zip(trainer.names, trainer.average, strict=True)},
            {name: named[name] for name in trainer.names},
        )
    return found


def failing_reward(team):
    """What each process sees where the reward fails in process 1."""

    def score(images, prompts):
        return torch.full((len(images),), float("nan") if team.rank == 1 else 0.0)

    world = make_world(MIXTURE)
    policy, prompts = world.policy(policy_options(MIXTURE)), world.prompts("direction", "train")
    try:
        Trainer(policy, make_method(MIXTURE), FunctionReward(score), prompts, MIXTURE, team).iteration()
    except (RewardError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing_update(team):
    """What each process sees where a loss of process 1 is not finite."""
    trainer = world_trainer(MIXTURE, team)
    if team.rank == 1:
        trainer.engine.backward = lambda loss: (_ for _ in ()).throw(TrainingError("made up"))
    try:
        trainer.iteration()
    except TrainingError as error:
        return str(error)
    return "nothing"


def everything(team, tell):
    """The long life of two processes: they compare, they fail together, and at the end process 1 leaves by an error."""
    tell("compared", compared(team))
    tell("reward", failing_reward(team))
    tell("update", failing_update(team))
    tell("divided", divided(team))
    tell("any", [team.any(team.rank == 1), team.any(False)])
    if team.rank == 1:
        raise OSError("the disk is full")
    team.gather(lambda: None)


def killed(team, tell):
    """Process 1 goes without a word."""
    team.gather(lambda: None)
    if team.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    team.gather(lambda: None)


def live(work, rank, size, port, folder):
    """The body of process `rank`; what it tells is in `folder`."""
    environment = dict(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    told = {}
    try:
        with Team.join("cpu") as team:
            work(team, told.__setitem__)
    except Exception as error:
        told["end"] = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(told))


def lives(work, folder, size=2, limit=400.0):
    """What each of `size` processes told. Fails where one is still there after `limit` seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=live, args=(work, rank, size, port, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    until = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hanging, f"processes {hanging} hang"
    paths = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes that share all cases: starting one takes seconds."""
    return lives(everything, tmp_path_factory.mktemp("two"))


def test_two_processes_train_what_one_does(two):
    for told in two:
        assert set(CASES) < set(told["compared"])
        assert {name: worst for name, worst in told["compared"].items() if not worst < 1e-6} == {}
        assert told["any"] == [True, False]


def test_divided_weights_train_as_whole_ones_do(two):
    for told in two:
        assert {name: worst for name, worst in told["divided"].items() if not worst < 2e-6} == {}
        assert all(told["divided"][f"{train} resumed"] == 0 for train in ("lora", "full"))


def test_an_error_in_one_process_stops_all_and_names_it(two):
    assert two[1]["reward"].startswith("RewardError: FunctionReward.score returned")
    assert two[0]["reward"].startswith("TrainingError: process 1 of 2 failed: RewardError: FunctionReward.score returned")
    assert two[1]["update"] == "made up"
    assert two[0]["update"] == "process 1 of 2 failed: TrainingError: made up"


def test_a_process_that_leaves_by_an_error_ends_the_others(two):
    assert two[1]["end"] == "OSError: the disk is full"
    assert two[0]["end"].startswith("TrainingError: process 1 of 2 failed: OSError: the disk is full")


def test_a_killed_process_ends_the_others(tmp_path):
    survivor, dead = lives(killed, tmp_path, limit=200)
    assert dead is None
    assert survivor["end"].startswith("TrainingError: process 1 of 2 has died")


def test_accelerate_launch_trains_and_resumes(tmp_path):
    """The shipped config file, two processes on the CPU, to a folder that plain `flowrl` reads."""
    file = Path(flowrl.launch.__file__).parent / "ddp.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "2"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        launcher += ["--main_process_port", str(free.getsockname()[1])]
    train = "-m flowrl train --preset tiny --world mixture --task direction --groups 3 --device cpu --out"
    done = subprocess.run([*launcher, *train.split(), str(tmp_path / "run")], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 processes" in done.stdout and done.stdout.count("Done.") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    Run(load_config(tmp_path / "run" / "config.json"), tmp_path / "alone").execute()
    alone = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    for one, two in zip(alone, rows, strict=True):
        for name in ("reward_mean", "loss", "grad_norm"):
            assert two.get(name) == pytest.approx(one.get(name), abs=1e-5)
        assert (one["evaluation"] is None) == (two["evaluation"] is None)
    trained_policy(tmp_path / "run")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2"])
def test_config_files_are_accelerates(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(Path(flowrl.launch.__file__).parent / f"{name}.yaml"))
    assert config.mixed_precision == "no" and config.num_processes == 8
    assert (config.distributed_type == "FSDP") == (name != "ddp")
    if name != "ddp":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_reshard_after_forward"] == (name == "fsdp2")


@pytest.mark.parametrize(("size", "total"), [(1, 5), (2, 3), (2, 1), (4, 5), (3, 9), (8, 3)])
def test_shares_cover_everything_once(size, total):
    shares = [share_of(rank, size, total) for rank in range(size)]
    assert [i for share in shares for i in share.own] == list(range(total))
    assert len({share.count for share in shares}) == 1
    for share in shares:
        assert share.first >= 0 and share.first + share.count <= total
        assert set(share.own) <= set(range(share.first, share.first + share.count))
        for chunk in (0, 1, 2):
            parts = list(share.chunks(chunk))
            assert [i for first, count in parts for i in range(first, first + count)] == list(
                range(share.first, share.first + share.count)
            )
            assert [i for part in parts for i in share.own_within(*part)] == list(share.own)


def test_one_process_alone_is_a_team():
    team = Team()
    assert team.main and team.gather(lambda: 3) == [3] and not team.any(False)
    assert team.share(5) == Share(0, 5, range(5))
    with pytest.raises(ConfigError), team:
        raise ConfigError("passes through")


def test_with_divided_weights_nobody_waits_for_those_who_compute():
    """The others may stand in a network call, which needs this process too: meeting them elsewhere would never end."""

    def fails():
        raise ValueError("the reward")

    with pytest.raises(ValueError, match="the reward"):
        Team(0, 2, sharded=True).gather(fails)


def test_a_full_gpu_is_no_lost_connection():
    class Blames:
        def blame(self):
            raise AssertionError("nobody is to blame")

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Team(0, 2, liveness=Blames())._together(full)

"""Several processes train what one does, and none waits for another that has gone."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from family_cases import CASES as PIPELINES
from family_cases import fill
from hypothesis import given
from hypothesis import strategies as st
from seeded import randn
from small_run import (
    BASE,
    CASES,
    WHOLE,
    free_port,
    launch_file,
    model_files,
    plain,
    rows_of,
    trainer_of,
    words,
)
from torch.distributed import HashStore

from flowrl.core.errors import ConfigError, FlowrlError, RewardError, TrainingError, part_call
from flowrl.core.experience import Actions
from flowrl.core.sharded import full_tensors, is_sharded
from flowrl.core.types import Prompt
from flowrl.rewards import FunctionReward
from flowrl.run import sizes
from flowrl.run.build import build_trainer, make_method
from flowrl.run.checkpoint import Checkpoints, load_weights, restore_trainer, trainer_state
from flowrl.run.config import load_config, preset
from flowrl.run.distributed import (
    Distributed,
    OtherProcessError,
    processes_here,
)
from flowrl.run.io import write_json
from flowrl.run.job import Run
from flowrl.run.models.load import load_policy
from flowrl.run.watch import Watch
from flowrl.run.workers import launch_rank

PROCESSES = dict(micro_batch=7, iterations=2, learning_rate=3e-4)
MIXTURE = BASE.replace(**PROCESSES, window="random(size=2)")
TOGETHER = {
    "turning points": dict(groups=1),
    "value tracker": dict(chunk=1, overlap_rewards=True, offload=True),
    "win rates": dict(chunk=1),
    "trajectories": dict(loss="gspo(chunks=(1,))", groups=5, chunk=1, micro_batch=2),
    "tree of edges": dict(groups=5, chunk=1),
    "ascent": dict(groups=5, chunk=1),
    **{name: {} for name in ("comb", "nft", "awm", "dgpo", "crd", "direct", *WHOLE)},
}
IMAGES = preset("tiny").apply(
    method="tp-grpo",
    group_size=4,
    minibatches=2,
    kl_weight=0.1,
    window="random(size=2)",
    **{**PROCESSES, "learning_rate": 1e-4},
)
RESUMED = MIXTURE.replace(iterations=3, checkpoint_every=1)
OBSERVED = RESUMED.replace(checkpoint_every=9, save_experience=1)
SCALED = ("abs_advantage", "value_slope", "value_r2")
"""Entries of rows that are divided by the spread of rewards or values."""
NOISE = ("gradient_signal", "gradient_noise")
WITHOUT = ("calls", "evaluation", *NOISE)
"""Entries of rows that depend on the processes."""
REDNESS = FunctionReward(
    lambda images, prompts: images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
)


def world_trainer(config, distributed):
    return trainer_of(config, distributed=distributed)


MODELS = []
"""A folder with the tiny pipelines, and one without the weights of their transformers."""


def write_models(folder):
    """Their tables of positions are not those that the class computes."""
    for family in ("sd3", "flux"):
        pipe = PIPELINES[family].make()
        for table in pipe.transformer.buffers():
            table.mul_(0.9)
        pipe.save_pretrained(folder / "0" / family)
    shutil.copytree(folder / "0", folder / "1")
    for path in folder.glob("1/*/transformer/*.safetensors"):
        path.unlink()
    fill(PIPELINES["flux"].policy()).save(folder / "lora")


def pipeline_trainer(config, distributed, family="sd3", **options):
    """Sharded weights are loaded by process 0 for both: process 1 has no file of them."""
    options, folder = {"dtype": config.policy.dtype, **options}, MODELS[0]
    if distributed.sharded:
        folder = MODELS[distributed.rank]
        options["load_to"] = "cpu" if distributed.is_main else "meta"
    prompts = [Prompt(text) for text in ("three red circles", "a dog", "a small house")]
    policy = load_policy(str(folder / family), replace(PIPELINES[family].options, **options))
    return build_trainer(config, policy, make_method(config), REDNESS, prompts, distributed)


def adapters():
    """A LoRA to start from, and the same one frozen."""
    lora = str(MODELS[0].parent / "lora")
    return dict(adapter=lora, frozen_adapters=f"style={lora}")


def flux_trainer(config, distributed):
    return pipeline_trainer(config, distributed, "flux", **adapters())


def full_trainer(config, distributed):
    return pipeline_trainer(config, distributed, tuning="full")


def trained(make, config, distributed, evaluated=False):
    """Metrics of two iterations without the number of network calls, which processes share; and, in
    the main process, the weights with their copies. `evaluated`: also a velocity of the averaged
    weights after each iteration.
    """
    trainer, rows = make(config, distributed), []
    for _ in range(config.iterations):
        row = plain(trainer.iteration(), ["calls", *NOISE])
        if evaluated:
            with trainer.averaged(), torch.no_grad():
                row["velocity"] = velocity(trainer.policy).tolist()
        rows.append(row)
    state = trainer_state(trainer).tensors
    assert distributed.is_main or not state
    kept = ("weight.", "average.", "copy.")
    return rows, {name: state[name] for name in state if name.startswith(kept)}


def both(distributed, *case):
    """What this process trains alone, and what all train together."""
    results = [trained(*case[:2], some, *case[2:]) for some in (Distributed(), distributed)]
    return results if distributed.is_main else [(rows, {}) for rows, _ in results]


def largest_difference(first, second):
    """Over all numbers (relative above 1) and tensors; 1 where something else differs."""
    if isinstance(first, torch.Tensor):
        return float((first.double() - second.double()).abs().max()) if first.numel() else 0.0
    if isinstance(first, dict):
        return max(
            (largest_difference(first[key], second[key]) for key in first | second), default=0.0
        )
    if isinstance(first, list | tuple):
        assert len(first) == len(second)
        return max(map(largest_difference, first, second), default=0.0)
    if isinstance(first, float):
        return abs(first - second) / max(1.0, abs(first))
    return float(first != second)


def velocity(policy):
    """At one fixed latent and a time step that bfloat16 cannot represent."""
    latent = randn(1, *policy.latent_shape)
    return policy.velocity(latent, torch.tensor([937.25]), policy.encode([Prompt("a dog")]))


def compared(distributed):
    """By case, the largest difference between what this process computes alone and what all compute
    together.
    """
    torch.manual_seed(distributed.rank)  # no number may depend on the global generator
    differences = {}
    for name, changes in TOGETHER.items():
        config = MIXTURE.replace(**{**CASES[name], **changes})
        differences[name] = largest_difference(*both(distributed, world_trainer, config))
    # Adam divides by the gradient's size: where that is near its epsilon of 1e-8, rounding errors
    # of 1e-10 in the gradient are 1% of the step, so the learning rate bounds how close weights can
    # be
    results = both(distributed, pipeline_trainer, IMAGES.replace(groups=3))
    # a group's rewards differ by hundredths here, so advantages and slopes have a hundred times the
    # rewards' rounding errors
    sizes = [[[row.pop(name) for name in SCALED] for row in rows] for rows, _ in results]
    assert largest_difference(*sizes) < 5e-5
    return {**differences, "sd3": largest_difference(*results)}


SHARDED = IMAGES.replace(groups=1)
HIDDEN = SHARDED.replace(credit="calibrated-gain(probe='critic(reads=hidden)')")
COPIED = SHARDED.replace(
    method="diffusion-nft", loss="diffusion-nft(decay=(0, 0.75, 0.75))", window="0:2"
)


def sharded(distributed):
    """The same for sharded weights; with what was saved, and after a resumption."""
    differences = {}
    for reshard, config in ((True, HIDDEN), (False, COPIED)):
        distributed = replace(distributed, sharded=True, reshard_after_forward=reshard)
        make = full_trainer if reshard else flux_trainer
        alone, together = both(distributed, make, config, True)
        assert largest_difference(alone[0], together[0]) < 2e-4
        differences[make.__name__] = largest_difference(alone[1], together[1])
        trainer, again = make(config, distributed), make(config, distributed)
        trainer.iteration()
        states = trainer.optimizer.state.values()
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        assert moments
        assert all(map(is_sharded, [*trainer.parameters.values(), *trainer.average, *moments]))
        restore_trainer(again, trainer_state(trainer))
        rows = [plain(some.iteration()) for some in (trainer, again)]
        differences[f"{make.__name__} resumed"] = largest_difference(*rows)
        with trainer.averaged(), tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "saved"
            trainer.policy.save(saved)
            average = full_tensors(dict(zip(trainer.parameters, trainer.average, strict=True)))
            if not distributed.is_main:
                continue
            if reshard:
                network = type(PIPELINES["sd3"].make().transformer).from_pretrained(
                    saved / "transformer"
                )
            else:
                loaded = PIPELINES["flux"].policy(**{**adapters(), "adapter": str(saved)})
                network = loaded.transformer
        named = {name: tensor.detach() for name, tensor in network.named_parameters()}
        expected = {name: named[name] for name in average}
        differences[f"{make.__name__} saved"] = largest_difference(average, expected)
    return differences


def narrow(distributed):
    """With sharded weights: the precisions in which they are gathered and stored in bfloat16; the steps
    taken, the scale and the number of skipped steps in float16.
    """
    distributed = replace(distributed, sharded=True)
    trainer, gathered = full_trainer(SHARDED.replace(dtype="bfloat16"), distributed), set()
    block = trainer.policy.transformer.transformer_blocks[0]
    block.register_forward_pre_hook(lambda *_: gathered.add(str(next(block.parameters()).dtype)))
    trainer.iteration()
    scaled, steps = full_trainer(SHARDED.replace(dtype="float16"), distributed), []
    scaled.scaler.load_state_dict({**scaled.scaler.state_dict(), "scale": 64.0})
    for bad in (True, False):
        for parameter in scaled.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        largest = max(scaled.parameters.values(), key=lambda parameter: parameter.numel())
        if bad and distributed.rank == 1:  # in the shard of one process only
            largest.grad.to_local().fill_(float("inf"))
        scaled.scaler.clip(scaled.optimizer, 1.0)
        steps.append(scaled.scaler.take(scaled.optimizer))
    shards = {str(t.dtype) for p in trainer.parameters.values() for t in (p, p.grad)}
    return *gathered, *shards, *steps, scaled.scaler.get_scale(), scaled.scaler.skipped


def embedded(distributed, folder):
    """How many of 11 texts this process embeds: together with the other one, in a second run, and
    if it does not see the other's files.
    """
    from flowrl.run.models.prompt_cache import DiskStore
    from flowrl.testing.tiny import tiny_sd3_policy

    counts = []
    for name in ("shared", "shared", f"own-{distributed.rank}"):
        policy, done = tiny_sd3_policy(), []
        embed = policy.prompts.encode
        policy.prompts.encode = lambda texts, add=done.extend, embed=embed: (
            add(texts) or embed(texts)
        )
        policy.prompts.store = DiskStore(lambda: folder / name, 2048)  # noqa: B023
        policy.warm([Prompt(f"number {n}") for n in range(10)], distributed)
        assert len(list((folder / name).iterdir())) == 11
        counts.append(len(done))
    return counts


def failing(distributed, part):
    """The error in each process if the reward or a backward pass fails in process 1."""
    broken = distributed.rank == 1
    value = float("nan") if broken and part == "reward" else 0.0
    reward = FunctionReward(lambda images, prompts: torch.full((len(images),), value))
    trainer = trainer_of(MIXTURE, reward=reward, distributed=distributed)
    if broken and part == "update":
        trainer.scaler.scale = lambda loss: (_ for _ in ()).throw(TrainingError("made up"))
    try:
        trainer.iteration()
    except (RewardError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def found_batches(distributed, peaks=(1.0, 1.0), speed=(1e3, 1e3), fails=False):
    """The size that each process finds on a simulated device: bytes per latent, and the batch of
    half the top speed.
    """

    def measured(trainer, batch, work):
        if fails and distributed.rank == 1 and batch > 3:
            raise torch.OutOfMemoryError
        peak, half = int(batch * peaks[distributed.rank]), speed[distributed.rank]
        return sizes.Measured(0, peak, half + batch)

    trainer = world_trainer(MIXTURE, distributed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "measured", measured)
        patch.setattr(sizes, "room", lambda *given: 24.0)
        return sizes.grow(trainer, MIXTURE, "update", 256)[1]


def everything(distributed, tell, folder):
    """The long life of two processes: they compare, they fail together, and at the end process 1
    leaves by an error.
    """
    tell("compared", compared(distributed))
    for part in ("reward", "update"):
        tell(part, failing(distributed, part))
    devices = ({}, dict(peaks=(1.0, 2.0)), dict(speed=(1e3, 0.0)), dict(fails=True))
    tell("batches", [found_batches(distributed, **device) for device in devices])
    tell("embedded", embedded(distributed, folder / "prompts"))
    tell("sharded", sharded(distributed))
    tell("narrow", narrow(distributed))
    tell("any", [distributed.any(distributed.rank == 1), distributed.any(False)])
    kinds = {"two": distributed, "sharded": replace(distributed, sharded=True)}
    for kind, some in kinds.items():
        paused = Run(RESUMED, folder / f"{kind}-one", stop=lambda: True, distributed=some)
        tell(f"{kind}-one", paused.execute())
        resumed = Run(RESUMED, folder / f"one-{kind}", distributed=some)
        tell(f"one-{kind}", resumed.execute(resume=True))
    tell("observed", observed(distributed, folder / "observed"))
    tell("failed", failed(distributed, folder / "failed"))
    if distributed.rank == 1:
        raise OSError("the disk is full")
    distributed.gather(None)


class Observes:
    """Sums of the tables that processes gather; it keeps one checkpoint and stops the run."""

    fields = ("log_probs", "trajectories")

    def __init__(self):
        self.calls = 0

    def observe(self, record):
        self.calls += 1
        tables = {"log_probs": record.log_probs, "states": record.trajectories.states}
        sums = {name: table.nan_to_num().abs().double().sum() for name, table in tables.items()}
        stop = "enough" if record.iteration == 2 else ""
        return Actions(stop=stop, keep=record.iteration == 1, metrics=sums)


def observed(distributed, folder):
    """Whether the run ended, and the calls of its observer, in this process."""
    observer = Observes()
    ended = Run(OBSERVED, folder, distributed=distributed, observers=(observer,)).execute()
    return ended, observer.calls


FAILS = """
import os
class Fails:
    calls = 0
    def score(self, images, prompts):
        Fails.calls += 1
        assert os.environ["RANK"] == "0" or Fails.calls < 4, "made up"
        return images.flatten(1).mean(1)
"""


def failed(distributed, folder):
    """The error of a run whose reward fails in process 1, in its second or third iteration."""
    config = RESUMED.replace(checkpoint_every=9, reward=f"{folder}.py:Fails", iterations=9)
    try:
        Run(config, folder, distributed=distributed).execute()
    except FlowrlError as error:
        return str(error)


def live(rank, world_size, port, folder):
    """The body of process `rank`; what it reports is in `folder`."""
    MODELS.extend(folder / "models" / number for number in "01")
    environment = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, FLOWRL_TIMEOUT_MINUTES=1)
    environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), rank)
    environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), world_size)
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    reported = {}
    try:
        with Distributed.join() as distributed:
            everything(distributed, reported.__setitem__, folder)
    except Exception as error:
        reported["end"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        write_json(folder / f"{rank}.json", reported)


def lives(folder, world_size=2, limit=400.0):
    """What each of `world_size` processes reported, with its exit code. Fails if one is still there
    after `limit` seconds.
    """
    given, context = (world_size, free_port(), folder), multiprocessing.get_context("spawn")
    processes = [context.Process(target=live, args=(rank, *given)) for rank in range(world_size)]
    for process in processes:
        process.start()
    until = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hanging, f"processes {hanging} hang"
    return [
        {**json.loads((folder / f"{rank}.json").read_text()), "code": process.exitcode}
        for rank, process in enumerate(processes)
    ]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes report that share all cases, because starting one takes seconds."""
    folder = tmp_path_factory.mktemp("two")
    Run(RESUMED, folder / "alone").execute()
    write_models(folder / "models")
    (folder / "failed.py").write_text(FAILS)
    for name in ("one-two", "one-sharded"):
        Run(RESUMED, folder / name, stop=lambda: True).execute()
    reports = lives(folder)
    assert all("one-sharded" in report for report in reports), reports
    for name in ("two-one", "sharded-one"):
        assert Run(RESUMED, folder / name).execute(resume=True)
    return [{**report, "folder": folder} for report in reports]


def above(differences, limit):
    return {name: worst for name, worst in differences.items() if not worst < limit}


@pytest.mark.satellite
def test_two_processes_train_what_one_does(two):
    for report in two:
        assert report["compared"].keys() == {*TOGETHER, "sd3"}
        assert above(report["compared"], 1e-6) == {}
        assert report["any"] == [True, False]


def test_processes_divide_the_prompts(two):
    assert [report["embedded"] for report in two] == [[6, 0, 11], [5, 0, 11]]


def test_sharded_weights_train_as_replicated_ones_do(two):
    for report in two:
        assert above(report["sharded"], 2e-6) == {}
    for name in ("full_trainer", "flux_trainer"):
        assert [report["sharded"][f"{name} resumed"] for report in two] == [0, 0]
        assert f"{name} saved" in two[0]["sharded"]


def test_narrow_sharded_weights_are_gathered_in_their_dtype_and_overflow_together(two):
    """A gradient that overflows in one shard skips the step in all processes."""
    expected = ["torch.bfloat16", "torch.float32", False, True, 32.0, 1]
    assert [report["narrow"] for report in two] == [expected] * 2


@pytest.mark.parametrize("name", ["one-two", "one-sharded", "two-one", "sharded-one"])
def test_a_run_resumes_on_another_number_of_processes(name, two):
    rows = [rows_of(two[0]["folder"] / run, WITHOUT) for run in ("alone", name)]
    assert largest_difference(*rows) < 1e-6
    assert two[0][name] == name.startswith("one")  # the others were paused


def test_observers_see_the_groups_of_all_processes_and_decide_in_the_first(two, tmp_path):
    assert [report["observed"] for report in two] == [[True, 2], [True, 0]]
    together, alone = two[0]["folder"] / "observed", tmp_path / "observed"
    assert Run(OBSERVED, alone, observers=(Observes(),)).execute()
    rows = [rows_of(folder, WITHOUT) for folder in (together, alone)]
    assert rows[0][-1]["stopped"] == "Observes: enough"
    sums = [
        [row.pop(name) for row in run[1:] for name in sorted(row) if "/" in name] for run in rows
    ]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5) and len(sums[0]) == 4
    assert largest_difference(*rows) < 1e-6
    assert Checkpoints(together).names() == ["000001", "000002"]
    table = (together / "experience" / "000001.csv").read_text()
    assert len(table.splitlines()) == 1 + 3 * 4


def test_an_error_in_one_process_stops_all_and_names_it(two):
    assert two[1]["reward"].startswith("RewardContractError: FunctionReward.score returned")
    assert two[1]["update"] == "TrainingError: made up"
    for name in ("reward", "update"):
        other = f"OtherProcessError: process 1 of 2 failed: {two[1][name]}"
        assert two[0][name].startswith(other[:80])
    assert two[1]["end"] == "OSError: the disk is full"
    assert two[0]["end"].startswith("OtherProcessError: process 0 of 2 lost another process")
    assert [report["code"] for report in two] == [1, 1]


def test_the_main_process_keeps_the_last_iteration_if_another_one_fails(two):
    folder = two[0]["folder"] / "failed"
    assert all("AssertionError: made up" in report["failed"] for report in two)
    iteration = rows_of(folder)[-1]["iteration"]
    assert iteration > 0 and Checkpoints(folder).names() == [f"{iteration:06d}"]


def test_all_processes_find_the_sizes_of_the_fullest_and_slowest(two):
    for report in two:
        assert report["batches"] == [16, 8, 16, 2]


WAITS = """
import os, time
from pathlib import Path

class Waits:
    \"\"\"Redness; it waits to be killed once the file LAST exists.\"\"\"

    def score(self, images, prompts):
        if Path(os.environ.get("LAST", "none")).exists():
            Path("waits").touch()
            time.sleep(600)
        return 1.5 * (images[:, 0].mean((1, 2)) - images.mean((1, 2, 3)))
"""
NODES = dict(
    preset="tiny",
    model="model",
    tuning="full",
    prompts="prompts.txt",
    reward="reward.py:Waits",
    groups=3,
    iterations=3,
    micro_batch=2,
    checkpoint_every=1,
    learning_rate=3e-5,
    resolution=16,
    max_sequence_length=24,
    device="cpu",
)


def kill(node):
    """All processes of a node, as a loss of power would."""
    for process in (*psutil.Process(node.pid).children(recursive=True), node):
        process.kill()


@contextmanager
def nodes(folders, launcher, options, **environment):
    """A launcher per folder, whose output is in the file `log`. `environment` is that of the last
    one.
    """
    port, started = free_port(), []
    for number, folder in enumerate(folders):
        more = {"FLOWRL_CACHE": f"{folder}/cache", **environment} if number else {}
        address = ("--node-rank", number, "--rdzv-endpoint", f"127.0.0.1:{port}")
        if "accelerate" in launcher[0]:
            address = "--machine_rank", number, "--main_process_ip", "127.0.0.1"
            address += "--main_process_port", port
        command = ["-m", *launcher, *address, "-m", "flowrl", "train", *options]
        started.append(
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=folder,
                stdout=(folder / "log").open("w"),
                stderr=subprocess.STDOUT,
                env={**os.environ, **more},
            )
        )
    try:
        yield started
    finally:
        for node in started:
            if node.poll() is None:
                kill(node)
            node.wait()


def accelerate(config, processes):
    """Accelerate's launcher with a shipped config file."""
    launcher = ["accelerate.commands.launch", "--config_file", launch_file(config)]
    return [*launcher, "--num_processes", processes]


@pytest.mark.satellite
def test_nodes_train_what_one_process_does_and_resume_on_fewer(tmp_path, monkeypatch):
    """The second node lacks the prompts, the transformer's weights and the run's folder. All its
    processes are killed; the run is resumed by fewer processes, with replicated weights on one node
    and with sharded weights on two.
    """
    first, second = folders = tmp_path / "0", tmp_path / "1"
    model_files(first)
    (first / "reward.py").write_text(WAITS)
    shutil.copytree(first, second)
    for path in (second / "prompts.txt", *second.glob("model/transformer/*.safetensors")):
        path.unlink()
    log, last = first / "log", first / "run" / "checkpoints" / "000002.safetensors"
    hybrid = [*accelerate("hsdp", 4), "--parallelism_config_dp_shard_size", 2]
    options, until = words(**NODES, out="run"), time.monotonic() + 300
    with nodes(folders, hybrid, options, LAST=str(last)) as (survivor, victim):
        while not (second / "waits").exists() and victim.poll() is None:
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.1)
        kill(victim)
        assert survivor.wait(60) and "4 processes" in log.read_text(), log.read_text()[-3000:]
    assert "of 4 lost another process" in log.read_text()
    assert Checkpoints(first / "run").names() == ["000002"]
    shutil.copytree(first / "run", first / "replicated")
    torchrun = ["torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
    starts = {"replicated": ([first], accelerate("ddp", 2)), "run": (folders, torchrun)}
    for name, (places, launcher) in starts.items():
        with nodes(places, launcher, ["--resume", name, "--trust"]) as resumed:
            assert not any(node.wait(300) for node in resumed), log.read_text()[-3000:]
        assert "2 processes" in log.read_text() and log.read_text().count("Done.") == 1
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # for torchrun
    assert not (second / "run").exists()
    monkeypatch.chdir(first)
    Run(load_config(Path("run/config.json"), trust=True), Path("expected")).execute()
    expected = load_weights(Path("expected/weights.safetensors"))
    for name in starts:
        rows = [rows_of(first / folder, WITHOUT) for folder in ("expected", name)]
        assert largest_difference(*rows) < 5e-5
        weights = load_weights(Path(name, "weights.safetensors"))
        assert largest_difference(expected, weights) < 2e-6


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "hsdp"])
def test_config_files_are_accelerates(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config, sharded = load_config_from_file(launch_file(name)), name != "ddp"
    assert (config.mixed_precision, config.distributed_type == "FSDP") == ("no", sharded)
    if sharded:
        options = config.fsdp_config
        assert options["fsdp_version"] == 2
        assert options["fsdp_reshard_after_forward"] == (name != "zero2")


@given(st.integers(1, 8), st.integers(1, 9))
def test_assignments_cover_all_groups_once(world_size, total):
    assignments = [Distributed(0, world_size).assign(total, rank) for rank in range(world_size)]
    assert [i for assigned in assignments for i in assigned.own] == [*range(total)]
    assert len({assigned.count for assigned in assignments}) == 1
    for assigned in assignments:
        groups = range(assigned.first, assigned.first + assigned.count)
        assert {*assigned.own} <= {*groups} <= {*range(total)}
        for chunks in map(assigned.chunks, (0, 1, 2)):
            chunks = [*chunks]
            assert [i for first, count in chunks for i in range(first, first + count)] == [*groups]
            own = [i for chunk in chunks for i in assigned.own_within(*chunk)]
            assert own == [*assigned.own]


def test_with_sharded_weights_an_error_does_not_wait_for_processes_that_compute():
    """The others may be in a network call, which needs this process too: waiting for them elsewhere
    would never end.
    """
    alone = Distributed(0, 2, sharded=True).shared_errors()
    with pytest.raises(ValueError, match="the reward"), alone:
        raise ValueError("the reward")


def test_a_time_out_names_the_slow_part_of_the_other_process(monkeypatch):
    store = HashStore()
    monkeypatch.setattr("flowrl.run.distributed._store", lambda: store)
    monkeypatch.setattr("flowrl.run.watch.SLOW", 0.1)
    time_out = pytest.raises(OtherProcessError, match=r"only slow \(process 1: Mine.score\), raise")
    with Watch(publish=Distributed(1, 2).publish).running(), part_call("Mine.score"):
        time.sleep(0.2)
        with time_out, Distributed(0, 2)._connected():
            raise RuntimeError("Timed out")
    Distributed(1, 2).publish("")
    with pytest.raises(OtherProcessError, match="only slow, raise"), Distributed(0, 2)._connected():
        raise RuntimeError("Timed out")


def test_a_full_gpu_is_no_lost_connection():
    with pytest.raises(torch.OutOfMemoryError), Distributed(0, 2)._connected():
        raise torch.OutOfMemoryError("CUDA out of memory")
    message = (
        r"process 0 of 2 lost another.*FLOWRL_TIMEOUT_MINUTES \(now 10 minutes\).*Connection closed"
    )
    with pytest.raises(OtherProcessError, match=message), Distributed(0, 2)._connected():
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"FLOWRL_TIMEOUT_MINUTES": 0}, "FLOWRL_TIMEOUT_MINUTES"),
        ({"FLOWRL_TIMEOUT_MINUTES": "soon"}, "FLOWRL_TIMEOUT_MINUTES"),
        (dict(ACCELERATE_USE_FSDP="true", PARALLELISM_CONFIG_DP_REPLICATE_SIZE=3), "= '3 x 0'"),
    ],
)
def test_settings_of_the_launcher_are_checked(monkeypatch, settings, message):
    for name, value in {"WORLD_SIZE": 2, **settings}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match=message):
        Distributed.join()


SLURM = dict(
    SLURM_PROCID=19,
    SLURM_LOCALID=1,
    SLURM_NODEID=3,
    SLURM_STEP_NUM_TASKS=22,
    SLURM_STEP_TASKS_PER_NODE="8(x2),2,4",
    SLURM_STEP_NODELIST="gpu[03-04,09],big-1",
    SLURM_JOB_ID=30007,
)
MPI = dict(zip(("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"), (22, 19, 1, 4), strict=True))
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in MPI.items()}


@pytest.mark.parametrize(
    ("settings", "rank", "here"),
    [
        ({}, 0, ()),
        (SLURM, 19, ("1", 4, "gpu03", "15007")),
        ({**SLURM, "MASTER_ADDR": "gpu04-ib"}, 19, ("1", 4, "gpu04-ib", "15007")),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": 1}, 0, ()),
        ({**SLURM, "WORLD_SIZE": 1}, 0, ()),
        ({**SLURM, "WORLD_SIZE": 2, "RANK": 1}, 1, ()),
        ({**MPI, "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}, 19, ("1", 4, "gpu07", "29500")),
        (MPI, None, ()),
    ],
)
def test_variables_of_srun_and_mpirun_become_torchruns(monkeypatch, settings, rank, here):
    launched = {name: str(value) for name, value in settings.items()}
    monkeypatch.setattr(os, "environ", launched)
    if rank is None:
        with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR"):
            launch_rank()
        return
    assert launch_rank() == rank
    if here:
        values = [launched[name] for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
        assert launched["WORLD_SIZE"] == "22"
        assert (values[0], processes_here(), *values[1:]) == here
    else:
        assert launched.keys() == settings.keys()

"""The study of merit: agreement of every row's credit with the true advantage, and its cost in
network evaluations.

A *cell* is a world at a stage of training. All rows of a cell are applied to the same policies and
prompts, and rows whose trajectories have the same structure (their *layout*) to the same
trajectories. A *look* is one seed of all of these.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.protocols import Sampler
from flowrl.io import write_json
from flowrl.methods import Method
from flowrl.parts.prompts import PromptStream
from flowrl.probes import Branching, NoProbe, Probe
from flowrl.reading import read_json
from flowrl.rollout import Groups, Rollout, group_tree, minibatch_rows
from flowrl.samplers import windowed
from flowrl.training.build import make_method, make_trainer, make_world
from flowrl.workers import Worker, run_jobs
from flowrl_bench.gradients import Setting
from flowrl_bench.measurements import reproducible
from flowrl_bench.merit_rows import ROWS, WORLDS, Row
from flowrl_bench.true_advantage import Look, TrueAdvantages, credit_sums, true_advantages

STAGES = ("before", "after")
"""The policy before training, and after the default's iterations with uniform credit."""
SEARCHED = 1000
"""Seeds that are tried until every stochastic step has been drawn once."""
Job = tuple[str, str, int, str]
"""(world, stage, look, layout)."""


@dataclass(frozen=True)
class Size:
    """The size of a look: prompts x `members` trajectories, `continuations` per state for V;
    `looks` of these.
    """

    prompts: int
    members: int
    continuations: int
    looks: int
    max_batch: int = 512


SIZES: dict[str, Size] = {"mixture": Size(18, 12, 48, 2, 4096), "shapes": Size(8, 12, 24, 2)}
QUICK: dict[str, Size] = {"mixture": Size(2, 12, 4, 2), "shapes": Size(2, 12, 2, 2)}


def sizes(quick: bool = False) -> dict[str, Size]:
    """By world."""
    return QUICK if quick else SIZES


def layout_of(method: Method) -> str:
    """The layout of a row, which determines its trajectories: shared or independent noise, and the
    tree if there is one.
    """
    probe = method.credit.probe
    noise = "shared" if method.shared_noise else "independent"
    return f"{noise} {probe}" if isinstance(probe, Branching) else noise


@cache
def layouts(world: str) -> dict[str, list[Row]]:
    """Rows by layout."""
    by_layout: dict[str, list[Row]] = {}
    for row in (row for row in ROWS.values() if row.judged):
        by_layout.setdefault(layout_of(make_method(row.run(world))), []).append(row)
    return by_layout


def trained_policy(world: str, seed: int, folder: Path, quick: bool) -> Setting:
    """The setting of a look after training; the weights are kept in `folder`."""
    run = ROWS["flow-grpo"].run(world, seed=seed)
    trainer, path = (
        make_trainer(run),
        folder / f"{world}-{seed}{'-quick' if quick else ''}.safetensors",
    )
    named = trainer.policy.trainable()
    if path.exists():
        kept = load_file(path)
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(kept[name])
    else:
        for _ in range(1 if quick else run.iterations):
            trainer.iteration()
        part = path.with_suffix(".part")
        save_file(
            {name: parameter.detach().contiguous() for name, parameter in named.items()}, part
        )
        part.replace(path)
    return setting_of(world, seed, trainer.policy, sizes(quick)[world].prompts)


def setting_of(world: str, seed: int, policy: Any, prompts: int) -> Setting:
    """The world's default sampler and reward, and prompts drawn by the seed."""
    run = ROWS["flow-grpo"].run(world, seed=seed)
    place, method = make_world(run), make_method(run)
    chosen = PromptStream(place.prompts(run.environment.task, "train"), seed).take(prompts)
    schedule = policy.schedule(run.rollout.num_steps)
    sampler = windowed(method.sampler, method.window, run.rollout.num_steps, torch.Generator())
    assert isinstance(sampler, Sampler)
    return Setting(policy, sampler, schedule, place.reward(run.environment.reward_form), chosen)


def look_seeds(
    setting: Setting, shared_noise: bool, probe: Probe, size: Size, seed: int
) -> list[int]:
    """The seeds of a look's trajectories: one, or for a tree that changes between iterations, the
    first for every stochastic step at which it branches.
    """
    groups = Groups(len(setting.prompts), size.members, shared_noise)
    stds, first_seeds = setting.stds, dict[tuple[int, ...], int]()
    if getattr(probe, "count", None) != 1 or not isinstance(probe, Branching):
        return [seed]
    for number in range(SEARCHED):
        generator = torch.Generator().manual_seed(seed + 1000 * number)
        groups.noise(setting.policy.latent_shape, generator)
        tree = group_tree(stds, groups, probe, generator)
        first_seeds.setdefault(tuple(tree.drawn_steps), seed + 1000 * number)
        if len(first_seeds) == int((stds > 0).sum()):
            break
    return [first_seeds[steps] for steps in sorted(first_seeds)]


@dataclass(frozen=True)
class Costs:
    """Per trajectory: network evaluations of sampling, probe and update, distinct decisions, and
    processor seconds of sampling, probe, reward and rule.
    """

    sampling: float
    probe: float
    update: float
    decisions: float
    seconds: float

    @property
    def nfe(self) -> float:
        """All network evaluations."""
        return self.sampling + self.probe + self.update


def structure(result: Rollout, needs_reference: bool = False) -> dict[str, float]:
    """The costs that the structure of trajectories determines: evaluations of sampling and update,
    and distinct decisions, per trajectory.
    """
    tree = result.trajectories.tree
    weights = tree.decisions[:, tree.drawn_steps].float()
    (rows,) = minibatch_rows([torch.arange(tree.members)], weights, tree)
    return {
        "sampling": sum(tree.counts[:-1]) / tree.members,
        "update": rows.evaluations * (1 + needs_reference) / tree.members,
        "decisions": int(tree.drawn.sum()) / tree.members,
    }


def measure_layout(job: Job, folder: Path, quick: bool = False) -> dict[str, Any]:
    """All rows of a layout at one look: sums of `credit_sums` [group, step, 9] and costs by row, or
    the reason why a row is not applicable.
    """
    world, stage, seed, layout = job
    size = sizes(quick)[world]
    if stage == "after":
        setting = trained_policy(world, seed, folder, quick)
    else:
        setting = setting_of(
            world, seed, make_trainer(ROWS["flow-grpo"].run(world, seed=seed)).policy, size.prompts
        )
    rows = {row.name: make_method(row.run(world)) for row in layouts(world)[layout]}
    shared, probe = layout.startswith("shared"), next(iter(rows.values())).credit.probe
    tree = probe if isinstance(probe, Branching) else NoProbe()
    looks = [
        Look(setting, size.members, look_seed, size.max_batch)
        for look_seed in look_seeds(setting, shared, tree, size, seed)
    ]
    sampled = [look.trajectories(shared, tree) for look in looks]
    truths = [
        true_advantages(
            setting, result, size.continuations, look.seed + 7, max_batch=size.max_batch
        )
        for look, result in zip(looks, sampled, strict=True)
    ]
    entries, steps = dict[str, Any](), sorted({step for truth in truths for step in truth.steps})
    for name, method in rows.items():
        with reproducible("merit", *job, name):
            entries[name] = _row(method, looks, shared, truths, steps, sampled[0])
    return {"rows": entries, "steps": steps}


def on_steps(sums: Tensor, decided: Sequence[int], steps: Sequence[int]) -> Tensor:
    """`credit_sums` [group, decision, 9] of decisions at the steps `decided` as [group, step, 9]; 0
    at other `steps`.
    """
    by_step = sums.new_zeros(len(sums), len(steps), sums.shape[-1])
    by_step[:, [steps.index(step) for step in decided]] = sums
    return by_step


def _row(
    method: Method,
    looks: list[Look],
    shared: bool,
    truths: list[TrueAdvantages],
    steps: list[int],
    sampled: Rollout,
) -> dict[str, Any]:
    started = time.process_time()
    try:
        credits = [look.credit(method.credit, shared) for look in looks]
    except ConfigError as error:
        if "guidance of the probe" not in str(error):
            raise
        return {"not_applicable": str(error)}
    trajectories = sum(truth.values.shape[:2].numel() for truth in truths)
    seconds = (time.process_time() - started) / trajectories
    fixed = structure(sampled, method.loss.needs_reference)
    nfe = sum(credit.nfe_per_trajectory for credit in credits) / len(credits)
    if isinstance(method.credit.probe, Branching):
        fixed["sampling"] = nfe  # a tree that is drawn differs from look to look
    costs = Costs(**fixed, probe=nfe - fixed["sampling"], seconds=seconds)
    pairs = zip(credits, truths, strict=True)
    sums = [
        on_steps(credit_sums(credit.advantages, truth), truth.steps, steps)
        for credit, truth in pairs
    ]
    return {"sums": torch.cat(sums).tolist(), "costs": asdict(costs)}


def jobs(quick: bool, looks: int = 0, worlds: tuple[str, ...] = WORLDS) -> Iterator[Job]:
    """All jobs; one look of every cell before the next look."""
    chosen = {world: looks or size.looks for world, size in sizes(quick).items()}
    for look in range(max(chosen.values())):
        for world in worlds:
            for stage in STAGES:
                for layout in layouts(world) if look < chosen[world] else ():
                    yield world, stage, look, layout


def job_path(folder: Path, job: Job, quick: bool) -> Path:
    """The file of a job's result."""
    world, stage, look, layout = job
    number = sorted(layouts(world)).index(layout)
    return folder / f"{'quick-' if quick else ''}{world}-{stage}-{look}-{number}.json"


def measure(worker: Worker, job: Job, folder: Path, quick: bool) -> bool:
    """A job of `study`."""
    with reproducible("merit", *job):
        write_json(
            job_path(folder, job, quick), {"job": list(job), **measure_layout(job, folder, quick)}
        )
    return True


def study(
    folder: Path,
    wanted: list[Job],
    workers: int,
    quick: bool,
    progress: Callable[[int, int, str], None],
) -> bool:
    """Compute the missing results in `folder`; False if Ctrl-C paused it."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job in wanted if not job_path(folder, job, quick).exists()]
    count = len(wanted) - len(missing)

    def finished(job: Job, _: bool) -> None:
        nonlocal count
        count += 1
        progress(count, len(wanted), ", ".join(map(str, job)))

    arguments = {job: (job, folder, quick) for job in missing}
    return not missing or run_jobs(
        measure, arguments, workers, finished=finished, describe=lambda job: f"the job {job}"
    )


def read_sums(
    folder: Path, wanted: list[Job], quick: bool
) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """By cell and row: "sums" [group, step, 9] by look, "costs" (means over looks), or
    "not_applicable".
    """
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for job in wanted:
        path = job_path(folder, job, quick)
        if not path.exists():
            continue
        result = read_json(path)
        for name, row in result["rows"].items():
            kept = cells.setdefault(job[:2], {}).setdefault(
                name, {"sums": [], "costs": [], "steps": result["steps"]}
            )
            if "not_applicable" in row:
                kept["not_applicable"] = row["not_applicable"]
            else:
                kept["sums"].append(torch.tensor(row["sums"], dtype=torch.float64))
                kept["costs"].append(row["costs"])
    return cells


def mean_costs(costs: list[Mapping[str, float]]) -> Costs:
    """Over looks."""
    return Costs(
        **{name: math.fsum(cost[name] for cost in costs) / len(costs) for name in costs[0]}
    )


def merit(correlation: float, nfe: float) -> float:
    """rho^2 per network evaluation of a trajectory, including the update; 0 for a negative
    correlation.

    At an equal budget the signal-to-noise ratio of the gradient is proportional to rho sqrt(number
    of batches).
    """
    return max(correlation, 0.0) ** 2 / nfe

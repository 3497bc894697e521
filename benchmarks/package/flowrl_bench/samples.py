"""What the stochastic sampler itself draws, before and after training: quality, and turning points. The 2-D world only.

A run's curve scores ODE samples from the same noise for all runs, which pairs them. What a sampler draws cannot be paired so, and
needs more samples, drawn with noise of every seed's own: else the interval over seeds would hide the error of the sampling.
"""

import hashlib
import inspect
import json
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.credit import turning_points
from flowrl.errors import ConfigError
from flowrl.io import write_json
from flowrl.policies.mixture import MixturePolicy
from flowrl.rollout import Groups, reward_table, rollout
from flowrl.training.build import make_method, make_reward, make_world, policy_options
from flowrl.training.config import RunConfig
from flowrl.training.evaluation import evaluate
from flowrl.training.trainer import Trainer
from flowrl.types import Completion
from flowrl_bench.claims import Claim
from flowrl_bench.evidence import column
from flowrl_bench.lock import held
from flowrl_bench.measure import log_density
from flowrl_bench.records import config_hash, provenance
from flowrl_bench.runner import processes

MEMBERS, DRAWS, FIRST_SEED = 128, 32, 50_000
Lines = Mapping[str, Mapping[str, Any]]


def observe(trainer: Trainer, members: int = MEMBERS) -> dict[str, float]:
    """Of the present policy's stochastic samples, `members` for each of 18 prompts: mean log-density under the data (quality),
    and turning points per trajectory, of ODE completions (points).

    null: the same count after the signs of the increments were drawn anew (mean over 32 draws): a trajectory whose gains have no
    order at all. The noise depends on the run's seed, and on nothing else of the run.
    """
    policy, config = trainer.policy, trainer.config
    if not isinstance(policy, MixturePolicy):
        raise ConfigError(f"samples: only the 2-D world's density is known, not that of {config.environment.world}")
    world = make_world(config)
    prompts = world.prompts(config.environment.task, "train")[:18]
    generator = torch.Generator(policy.device).manual_seed(FIRST_SEED + config.seed)
    groups = Groups(len(prompts), members)
    noise = groups.noise(policy.latent_shape, generator)
    state = trainer.generator.get_state()
    sampler = trainer.draw_sampler()
    trainer.generator.set_state(state)
    result = rollout(
        policy,
        sampler,
        trainer.schedule,
        policy.encode(prompts),
        noise,
        generator,
        groups,
        Completion(),
        max_batch=config.rollout.max_batch,
    )
    table = reward_table(policy, world.reward("soft"), result, prompts)
    increments = table.diff(dim=-1)

    def redrawn() -> torch.Tensor:
        signs = torch.randint(0, 2, increments.shape, generator=generator) * 2 - 1
        return torch.cat([table[..., :1], table[..., :1] + (increments.abs() * signs).cumsum(-1)], -1)

    return {
        "quality": log_density(policy, result.trajectories.images_latent),
        "points": _points(table),
        "null": sum(_points(redrawn()) for _ in range(DRAWS)) / DRAWS,
    }


def _points(table: torch.Tensor) -> float:
    """Turning points per trajectory, by the consistent rule."""
    return float(turning_points(table, True).float().sum(-1).mean())


def look(config: RunConfig) -> dict[str, Any]:
    """Train by `config`, and observe before and after. `final`: the last held-out reward, by which a run is known again."""
    torch.set_num_threads(1)
    world = make_world(config)
    policy = world.policy(policy_options(config))
    trainer = Trainer(policy, make_method(config), make_reward(config), world.prompts(config.environment.task, "train"), config)
    before = observe(trainer)
    while trainer.done < config.iterations:
        trainer.iteration()
    c = config
    with trainer.averaged():
        found = evaluate(
            policy,
            world,
            c.environment.task,
            c.environment.reward_form,
            c.evaluation.eval_samples,
            c.evaluation.eval_steps,
            c.rollout.max_batch,
            solver=c.evaluation.eval_solver,
        )
    return {"final": found.scores["soft"], "before": before, "after": observe(trainer)}


def wanted(claims: Mapping[str, Claim], seeds: Mapping[str, tuple[int, ...]]) -> dict[str, RunConfig]:
    """The runs whose own samples a claim is judged by, by id."""
    found = {}
    for claim in claims.values():
        for arm, _, _, config in claim.configs("mixture", seeds["mixture"]):
            if arm in claim.samples:
                found[config_hash(config)] = config
    return found


def observer() -> str:
    """Hash of how samples are observed here: `observe`, what it calls in this module, and its numbers."""
    sources = [inspect.getsource(part) for part in (observe, _points, look)]
    return hashlib.sha256("\0".join([*sources, f"{MEMBERS} {DRAWS} {FIRST_SEED}"]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Samples:
    """The file of what was observed, by the id of the run; written anew after every run, so that a stop loses little."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        """What is there. Raises `ConfigError` for a file that is something else, or was observed otherwise than today."""
        rows, how = self._rows()
        if rows and how != observer():
            raise ConfigError(
                f"samples: {self.path} was observed by other code ({how or 'it does not say which'}; expected {observer()}): "
                f"delete the file, or measure it again with --look"
            )
        return rows

    def _rows(self) -> tuple[dict[str, dict[str, Any]], str]:
        """What is there, and the hash of what observed it."""
        if not self.path.exists():
            return {}, ""
        try:
            found = json.loads(self.path.read_text())
            return dict(found["rows"]), str(found.get("observer", ""))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"samples: {self.path} does not hold what `flowrl bench claims` writes: {error!r}") from error

    def complete(self, runs: Mapping[str, RunConfig], workers: int, progress: Callable[[int, int], None]) -> None:
        """Look at the runs that are missing; at all of them, where the file was observed by other code."""
        with held(self.path, "samples of flowrl bench claims"):
            rows, how = self._rows()
            rows = rows if how == observer() else {}
            todo = {key: config for key, config in runs.items() if key not in rows}
            if todo:
                self._look(todo, rows, processes(workers, len(todo)), progress)

    def _look(
        self, todo: Mapping[str, RunConfig], rows: dict[str, dict[str, Any]], count: int, progress: Callable[[int, int], None]
    ) -> None:
        how = {"observer": observer(), **provenance()}
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(look, config): key for key, config in todo.items()}
            try:
                for future in as_completed(futures):
                    rows[futures[future]] = future.result()
                    write_json(self.path, {**how, "rows": dict(sorted(rows.items()))})
                    progress(len(rows), len(rows) + sum(not f.done() for f in futures))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def joined(lines: Lines, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Lines, those that were observed with an entry "samples". Raises `ConfigError` where another run was observed than the
    line's: its last held-out reward must be the line's to the last digit."""
    found = dict(lines)
    for key in rows.keys() & lines.keys():
        line, row = lines[key], rows[key]
        if row["final"] != column(line, "soft")[-1]:
            raise ConfigError(
                f"samples: the run {key} that was observed ended with a reward of {row['final']!r}, its line says "
                f"{column(line, 'soft')[-1]!r}: other code or another machine made one of them; delete the file of samples"
            )
        found[key] = {**line, "samples": row}
    return found

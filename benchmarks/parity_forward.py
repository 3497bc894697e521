"""Recorded iterations of the released forward-process codes (DiffusionNFT, AWM, DGPO), replayed by the trainer.

`python benchmarks/parity.py --data DIR` runs this for a folder with nft, awm or dgpo, whose README defines the format. The trainer
gets the recorded weights and copies of them, rewards, order of samples, finished latents, times and noise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from parity_compare import clear_gradients, distance, step_differences
from parity_recording import Recording, Tensors, below
from parity_replay import ReplayTrainer, base_config, recorded_policy, recorded_trainer
from safetensors.torch import load_file
from torch import Tensor

from flowrl.flow import LogitNormalTimes, StratifiedTimes, UniformTimes
from flowrl.forward import ForwardBatch, unit_means
from flowrl.losses import AWM, DGPO, DiffusionNFT
from flowrl.policies import PipelinePolicy
from flowrl.protocols import ForwardLoss, Sampler
from flowrl.rollout import solvers
from flowrl.rollout.collector import Collected
from flowrl.rollout.forward_batch import ForwardBatches
from flowrl.rollout.loss_batch import LossBatches, MicroBatch, Pairs
from flowrl.training.build import make_method
from flowrl.training.config import RunConfig
from flowrl.types import Schedule, Trajectories

Loss = DiffusionNFT | AWM | DGPO
NEGLIGIBLE = 1e-20
"""Weights of penalties below it stand for 0: AWM's code cannot run without penalties."""
AWM_PENALTIES: Mapping[str, Any] = {"Uniform": "uniform", "ELBO": "elbo"}
AWM_WEIGHTS: Mapping[str, Any] = {"Uniform": "uniform", "t": "t", "t**2": "t2", "huber": "huber", "ghuber": "ghuber"}


def nft_loss(config: Mapping[str, Any]) -> DiffusionNFT:
    """The loss that a recorded state of DiffusionNFT means."""
    train = config["train"]
    decay = {1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}[config["decay_type"]]
    return DiffusionNFT(config["beta"], float(train["adv_clip_max"]), train["beta"], mode=train["adv_mode"], decay=decay)


def awm_loss(config: Mapping[str, Any]) -> AWM:
    """The loss that a recorded state of AWM means."""
    train = config["train"]
    kl_weight, average_weight = (0.0 if train[name] < NEGLIGIBLE else float(train[name]) for name in ("beta", "ema_beta"))
    return AWM(
        weight=AWM_WEIGHTS[train["weighting"]], power=train["ghuber_power"], clip=float(train["clip_range"]),
        ratio=train["loss_type"], advantage_clip=float(train["adv_clip_max"]), advantage_scale=float(train["advantage_max"]),
        kl_weight=kl_weight, average_weight=average_weight, kl=AWM_PENALTIES[train["kl_weight"]],
        off_policy=train["off_policy"],
    )  # fmt: skip


def dgpo_loss(config: Mapping[str, Any]) -> DGPO:
    """The loss that a recorded state of DGPO means."""
    train = config["train"]
    return DGPO(
        beta_dpo=float(train["beta_dpo"]), clip=config["clip_range"] if config["clip_dsm"] else None,
        clip_kl=config["clip_kl"], kl_weight=train["beta"], anchor="old" if config["use_ema_ref"] else "reference",
    )  # fmt: skip


def nft_tables(loss: DiffusionNFT, batch: ForwardBatch, row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What DiffusionNFT's code recorded of every row."""
    return {
        "r": loss.optimality(batch.advantages), "positive_loss": row["positive"], "negative_loss": row["negative"],
        "policy_unscaled": row["policy_loss"] / loss.advantage_clip, "old_deviation": row["old_distance"],
    }  # fmt: skip


def awm_tables(loss: AWM, batch: ForwardBatch, row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What AWM's code recorded of every row."""
    old = batch.velocity_of("average" if loss.off_policy else "old", loss)
    new, old = (loss.log_prob(velocity, batch.target, batch.time) for velocity in (batch.new, old))
    return {
        "log_prob": new.detach(), "old_log_prob": old,
        "ratio": row["ratio_mean"], "policy": row["policy_loss"], "scaled_advantage": loss.scaled(batch.advantages),
    }  # fmt: skip


def dgpo_tables(loss: DGPO, batch: ForwardBatch, row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What DGPO's code recorded of every row; sums and weights of a group for each of its rows."""
    assert batch.pooled is not None
    members = int((batch.group == 0).sum()) // len(batch.time[batch.row_sample == 0])
    found = {"group/sum": batch.pooled, "group/weight": row["group_weight"], "group_term": loss.row_terms(batch) / members}
    found["matching"] = row["matching"]
    return found | ({"ratio": row["ratio_mean"], "clipped": row["clip_fraction"]} if loss.clip is not None else {})


@dataclass(frozen=True)
class Code:
    """One released code: flowrl's method, its losses, its tables, the name of its total, its copy of the weights that lags, and
    whether its trajectories can be replayed."""

    name: str
    loss: Callable[[Mapping[str, Any]], Any]
    tables: Callable[..., dict[str, Tensor]]
    total: str
    copy: str
    samples: bool = True


CODES = {
    "nft": Code("diffusion-nft", nft_loss, nft_tables, "micro/total_loss", "old"),
    "awm": Code("awm", awm_loss, awm_tables, "micro/loss", "average", samples=False),
    "dgpo": Code("dgpo", dgpo_loss, dgpo_tables, "micro/loss", "old"),
}
QUANTITIES = {
    "r": "weights of rows", "scaled_advantage": "weights of rows", "log_prob": "matching errors",
    "old_log_prob": "matching errors",
    "matching": "matching errors", "matching_reference": "matching errors", "matching_old": "matching errors",
    "old_deviation": "squared distances", "kl": "squared distances", "ema_kl": "squared distances", "ratio": "ratios of errors",
    "clipped": "clipped pairs", "group/sum": "group sums", "group_term": "group sums", "group/weight": "group weights",
}  # fmt: skip
"""Recorded table -> the quantity whose tolerance it has; "row losses" for the others."""


class KeptBatches(ForwardBatches):
    """Batches with the given `noise` [sample, draw, *latent], which keep their rows."""

    def __init__(self, made: ForwardBatches, noise: Tensor) -> None:
        super().__init__(**{field.name: getattr(made, field.name) for field in fields(made)})
        self.noise, self.kept = noise, list[tuple[Tensor, ForwardBatch]]()

    def of(self, sample: Tensor, draw: Tensor, shared: object = None) -> ForwardBatch:
        """The batch of these rows."""
        batch = super().of(sample, draw, shared)
        self.kept.append((sample * self.times.shape[1] + draw, replace(batch, new=batch.new.detach())))
        return batch

    def rows(self) -> ForwardBatch:
        """All rows as the loss has seen them, sample by sample."""
        order = torch.cat([number for number, _ in self.kept]).argsort(stable=True)
        batches = [replace(batch, pooled=None) for _, batch in self.kept]
        columns = {field.name: [getattr(batch, field.name) for batch in batches] for field in fields(ForwardBatch)}
        whole = {name: torch.cat(column) for name, column in columns.items() if None not in column}
        return ForwardBatch(**whole).rows(order[-self.times.numel() :])


class ForwardTrainer(ReplayTrainer):
    """The trainer with given finished latents, times and noise of the rows. The update has no guidance, whatever sampling has."""

    finished: Tensor
    times: Tensor
    noise: Tensor
    sampled: Trajectories
    batches: KeptBatches

    def draw_times(self, loss: ForwardLoss) -> tuple[Tensor, int]:
        """The given times [sample, draw]."""
        return self.times, 0

    def loss_batches(
        self, sampler: Sampler, collected: Collected, advantages: Tensor, used: Tensor
    ) -> tuple[LossBatches | ForwardBatches, list[Pairs], Tensor]:
        """Puts the given latents at the ends of the trajectories, and the given noise into the batches."""
        self.sampled = path = collected.rollout.trajectories
        states = path.states.clone()
        states[:, path.tree.at(path.schedule.steps)] = self.finished.unflatten(0, (len(states), -1))
        given = replace(collected, rollout=replace(collected.rollout, trajectories=replace(path, states=states)))
        made, pairs, counted = super().loss_batches(sampler, given, advantages, used)
        assert isinstance(made, ForwardBatches)
        self.batches = KeptBatches(made, self.noise)
        return self.batches, pairs, counted

    def minibatches(self, pairs: Sequence[Pairs], collected: Collected) -> Iterator[tuple[list[MicroBatch], int]]:
        """Without guidance."""
        with cast(PipelinePolicy, self.policy).guided(1.0):
            yield from super().minibatches(pairs, collected)


@dataclass(frozen=True)
class ForwardReplay:
    """Replays the states of `recording`. `changes`: settings of the run, or options of the loss, that replace the recorded ones."""

    recording: Recording
    policy: PipelinePolicy
    work: Path
    changes: Mapping[str, Any]

    @cached_property
    def common(self) -> Tensors:
        """Rewards, noise and weights that all methods share."""
        return load_file(self.recording.folder / "common" / "inputs.safetensors")

    @cached_property
    def schedule(self) -> Schedule:
        """The grid of the trajectories. DiffusionNFT's sampler gives the network truncated integers; where only the timesteps are
        recorded, they are the grid."""
        recorded = self.recording.tensors("sampling")
        timesteps = recorded["timesteps"].float()
        if "sigmas" not in recorded or not self.code.samples:
            return Schedule(torch.cat([timesteps / 1000, torch.zeros(1)]), timesteps)
        return Schedule(recorded["sigmas"], timesteps.floor())

    @property
    def code(self) -> "Code":
        """What the recording's code is."""
        return CODES[self.recording.method]

    def loss(self, state: str) -> Loss:
        """The loss of a state."""
        loss = self.code.loss(self.recording.meta["states"][state]["config"])
        return replace(loss, **{name: value for name, value in self.changes.items() if hasattr(loss, name)})

    def run(self, state: str, steps: int = 0) -> ForwardTrainer:
        """The trainer after the iteration of a state, which began after `steps` optimizer steps."""
        meta, inputs = self.recording.meta, self.recording.tensors("inputs")
        tables, loss = below(self.recording.tensors("update"), state), self.loss(state)
        settings, groups = meta["states"][state]["config"], meta["prompts"]
        config = self.config(state).replace(**{name: v for name, v in self.changes.items() if not hasattr(loss, name)})
        rewards = tables.get("rewards", self.common["rewards"])[..., None]
        method = replace(make_method(config), loss=loss)
        trainer = recorded_trainer(ForwardTrainer, self.recording, self.policy, method, rewards, config)
        trainer.schedule = trainer.collector.schedule = self.schedule
        trainer.finished, trainer.times = inputs["x0"], tables.get("time", inputs["times"]).float()
        shared = loss.noise == "group"
        noise = self.common["group_noise"].repeat_interleave(meta["members"], 0) if shared else self.common["noise"]
        trainer.noise = noise[:, : trainer.times.shape[1]].float()
        trainer.give(inputs.get("perm", torch.arange(groups * meta["members"])), {})
        old = below(self.common, "lora_old")
        weights = old if state in ("at_old", "at_ema") else below(self.common, "lora_current")
        trainer.resume(weights, {name: old if name == self.code.copy else weights for name in loss.copies}, steps)
        with self.policy.guided(settings["sample"]["guidance_scale"]), self.reference_guided(settings.get("kl_cfg", 1.0)):
            trainer.iteration()
        return trainer

    def config(self, state: str) -> RunConfig:
        """The recorded settings of a state, with its micro-batches."""
        settings = self.recording.meta["states"][state]
        train, sample = settings["config"]["train"], settings["config"]["sample"]
        draws = self.recording.tensors("inputs")["times"].shape[1]
        return base_config(self.recording, self.work).replace(
            method=self.code.name, sampler="multistep", num_steps=self.schedule.steps,
            credit=f"uniform(std={'batch' if sample['global_std'] else 'group'}, clamp=none)",
            learning_rate=train["learning_rate"], betas=(train["adam_beta1"], train["adam_beta2"]),
            weight_decay=train["adam_weight_decay"], max_grad_norm=train["max_grad_norm"], minibatches=settings["updates"],
            micro_batch=train["batch_size"] * draws,
        )  # fmt: skip

    @contextmanager
    def reference_guided(self, guidance: float) -> Iterator[None]:
        """Within this context the base model has this guidance."""
        plain = self.policy.reference

        @contextmanager
        def reference() -> Iterator[None]:
            with plain(), self.policy.guided(guidance):
                yield

        with patch.object(self.policy, "reference", reference), patch.object(solvers, "NEAREST_TO_NOISE", 1.0):
            yield


def row_values(loss: Loss, batch: ForwardBatch) -> tuple[ForwardBatch, dict[str, Tensor]]:
    """The batch with the means of its units, and the loss and its metrics of every row by itself, [row]."""
    with torch.no_grad():
        if loss.together != "row":
            assert not isinstance(loss, DiffusionNFT)
            batch = replace(batch, pooled=unit_means(loss.row_terms(batch), batch.units(loss.together), batch.mask))
        found: dict[str, list[Tensor]] = {}
        for row in range(len(batch.time)):
            result = loss.loss(batch.rows(slice(row, row + 1)))
            for name, value in {**result.metrics, "loss": result.loss}.items():
                found.setdefault(name, []).append(value.reshape(()))
    return batch, {name: torch.stack(values) for name, values in found.items()}


def squared_distances(loss: Loss, batch: ForwardBatch) -> dict[str, Tensor]:
    """Mean squared distances of the velocities, under the names of their tables."""
    anchor = getattr(batch, getattr(loss, "anchor", "reference"))
    pairs = {
        "kl": (batch.new, batch.reference), "ema_kl": (batch.new, batch.average),
        "matching_reference": (anchor, batch.target), "matching_old": (batch.old, batch.target),
    }  # fmt: skip
    found = {name: (one, other) for name, (one, other) in pairs.items() if one is not None and other is not None}
    return {name: (one.detach() - other).square().flatten(1).mean(1) for name, (one, other) in found.items()}


def table_differences(recording: Recording, recorded: Tensors, loss: Loss, batch: ForwardBatch) -> Iterator[tuple[str, float]]:
    """What a state recorded of its rows, micro-batches and groups: the largest difference of each quantity."""
    code, meta = CODES[recording.method], recording.meta
    samples = meta["prompts"] * meta["members"]
    batch, values = row_values(loss, batch)
    tables: dict[str, Tensor] = code.tables(loss, batch, values)
    tables |= squared_distances(loss, batch)
    found: dict[str, float] = {}
    for name, ours in tables.items():
        if name in recorded:
            ours = ours.view(samples, -1)
            if name.startswith("group/"):
                ours = ours[:: meta["members"]]
            theirs = recorded[name] if recorded[name].ndim == 2 else recorded[name][:, None].expand_as(ours)
            quantity = QUANTITIES.get(name, "row losses")
            found[quantity] = max(found.get(quantity, 0.0), distance(ours, theirs, 1.0 if name == "clipped" else 0.0))
    order = recording.tensors("inputs").get("perm", torch.arange(samples))
    theirs = recorded[code.total]
    micro = values["loss"].view(samples, -1)[order].unflatten(0, (len(theirs), -1)).mean(1)
    size = float(max(values["loss"].abs().max(), theirs.abs().max()))
    found["loss of micro-batches"] = distance(micro if theirs.ndim == 2 else micro.mean(1), theirs, size)
    yield from found.items()


def sampling_differences(recording: Recording, state: str, sampled: Trajectories) -> Iterator[tuple[str, float]]:
    """The trajectories of a state; those of its guidance are recorded."""
    guidance = recording.meta["states"][state]["config"]["sample"]["guidance_scale"]
    recorded, prefix = recording.tensors("sampling"), f"guidance{guidance:g}/" * (recording.method == "dgpo")
    found = []
    if not prefix or guidance > 1:
        found.append(distance(sampled.images_latent, recording.tensors("inputs")["x0"]))
    if f"{prefix}nodes_sample_4" in recorded:
        found.append(distance(sampled.nodes[4], recorded[f"{prefix}nodes_sample_4"]))
    if found:
        yield "latents", max(found)


def copy_differences(replay: ForwardReplay) -> Iterator[tuple[str, str, float]]:
    """The copy of the weights after its decay, in iterations that began after other numbers of optimizer steps. Compared are
    elements with clear gradients, as those of the weights."""
    recording, code = replay.recording, replay.code
    tensors = recording.tensors("update")
    for name, table in ((n, t) for n, t in recording.meta.items() if n.endswith("_after")):
        for tag, settings in table.items():
            state = settings.get("state", "ocr" if recording.method == "dgpo" else "geneval")
            trainer = replay.run(state, settings.get("global_step_after", settings.get("global_step_used", 0) + 1) - 1)
            ours = dict(zip(trainer.weights, trainer.copies.by_name[code.copy].values, strict=True))
            clear = clear_gradients(trainer.optimizer_steps)
            recorded = below(tensors, f"{name}/{tag}").items()
            yield state, "copies of the weights", max(distance(ours[n][clear[n]], t[clear[n]], 1.0) for n, t in recorded)


def time_differences(recording: Recording, schedule: Schedule) -> Iterator[float]:
    """AWM's times from the recorded uniform numbers."""
    recorded = recording.tensors("times")
    kinds = {
        "discrete": StratifiedTimes(first="drawn"), "discrete_wo_init": StratifiedTimes(first="without"),
        "discrete_with_init": StratifiedTimes(first="with"), "uniform": UniformTimes(), "logit_normal": LogitNormalTimes(),
    }  # fmt: skip
    for name, kind in kinds.items():
        for micro, part in enumerate(recorded["perm"].view(2, -1)):
            uniforms = recorded[f"{name}/uniform_draws/{micro}"].float()
            uniforms = uniforms.T if uniforms.ndim == 2 else uniforms[None]
            uniforms = torch.cat([torch.zeros(len(uniforms), kind.count - uniforms.shape[1]), uniforms], dim=1)
            ours = kind.times(uniforms, schedule).expand(len(part), -1)
            yield distance(ours.sort(1).values, recorded[f"{name}/times"][part].sort(1).values)


def replay_forward(
    recording: Recording, work: Path, changes: Mapping[str, Any], updates: Sequence[str]
) -> Iterator[tuple[str, str, float]]:
    """State, quantity and difference of everything that was recorded of a forward-process loss. `changes` are options of the loss,
    or settings of the run, that replace the recorded ones."""
    replay = ForwardReplay(recording, recorded_policy(recording, base_config(recording, work), []), work, changes)
    every, guidances = recording.tensors("update"), set[float]()
    for state, settings in recording.meta["states"].items():
        if updates and state not in updates:
            continue
        recorded, count, config = below(every, state), settings["updates"], settings["config"]
        trainer = replay.run(state)
        if replay.code.samples and (guidance := config["sample"]["guidance_scale"]) not in guidances:
            guidances.add(guidance)
            for quantity, difference in sampling_differences(recording, state, trainer.sampled):
                yield f"trajectory of {state}", quantity, difference
        rows = trainer.batches.rows()
        if config["sample"]["global_std"] and "rewards" not in recorded:
            yield state, "advantages", distance(trainer.advantages[:, 0], recording.tensors("inputs")["advantages"])
        for quantity, difference in table_differences(recording, recorded, replay.loss(state), rows):
            yield state, quantity, difference
        if name := next((name for name in recorded if name.startswith("v_draw0_sample_")), None):
            row = int(name.rpartition("_")[2]) * trainer.times.shape[1]
            yield state, "velocities", distance(rows.new[row], recorded[name])
        recorded_steps = [below(recorded, f"update{i}") for i in range(count)] if count > 1 else [recorded]
        if count > 1:
            recorded_steps[-1] |= {name: t for name, t in recorded.items() if name.startswith("weights_after")}
        for quantity, difference in step_differences(trainer.optimizer_steps, recorded_steps, config["train"]["learning_rate"]):
            yield state, quantity, difference
    if not updates:
        yield from copy_differences(replay)
        if recording.method == "awm":
            yield "times", "training times", max(time_differences(recording, replay.schedule))

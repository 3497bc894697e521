"""Recorded iterations of the released forward-process codes (DiffusionNFT, AWM, DGPO), replayed by
the trainer.

`python benchmarks/parity.py --data DIR` runs this for a folder with nft, awm or dgpo, whose README
defines the format. The trainer gets the recorded weights, copy of the weights, rewards, order of
samples, finished latents, times and noise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from parity_compare import Difference, attempt, clear_gradients, distance, step_differences
from parity_recording import Recording, Tensors, below
from parity_replay import ForwardTrainer, base_config, recorded_policy, recorded_trainer
from safetensors.torch import load_file
from torch import Tensor

from flowrl.core.forward import ForwardBatch
from flowrl.core.types import Schedule, Trajectories, unit_means
from flowrl.flow import LogitNormalTimes, StratifiedTimes, UniformTimes
from flowrl.losses import AWM, DGPO, DiffusionNFT
from flowrl.policies import PipelinePolicy
from flowrl.run.build import make_method
from flowrl.run.config import RunConfig
from flowrl.run.parts.settings import flat
from flowrl.samplers import multistep

Loss = DiffusionNFT | AWM | DGPO
BEGAN = 99
"""Optimizer steps before the recorded iterations: the decay 0.099 between DGPO's two updates shows
it.
"""
NEGLIGIBLE = 1e-20
"""Weights of penalties below it stand for 0: AWM's code cannot run without penalties."""
AWM_PENALTIES: Mapping[str, Any] = {"Uniform": "uniform", "ELBO": "elbo"}
AWM_WEIGHTS: Mapping[str, Any] = {
    "Uniform": "uniform",
    "t": "t",
    "t**2": "t2",
    "huber": "huber",
    "ghuber": "ghuber",
}


def nft_loss(config: Mapping[str, Any]) -> DiffusionNFT:
    """The loss that a recorded state of DiffusionNFT means."""
    train = config["train"]
    decay = {1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}[config["decay_type"]]
    return DiffusionNFT(
        config["beta"],
        float(train["adv_clip_max"]),
        train["beta"],
        mode=train["adv_mode"],
        decay=decay,
    )


def awm_loss(config: Mapping[str, Any]) -> AWM:
    """The loss that a recorded state of AWM means."""
    train = config["train"]
    kl_weight, average_weight = (
        0.0 if train[name] < NEGLIGIBLE else float(train[name]) for name in ("beta", "ema_beta")
    )
    return AWM(
        weight=AWM_WEIGHTS[train["weighting"]],
        power=train["ghuber_power"],
        clip=float(train["clip_range"]),
        ratio=train["loss_type"],
        advantage_clip=float(train["adv_clip_max"]),
        advantage_scale=float(train["advantage_max"]),
        kl_weight=kl_weight,
        average_weight=average_weight,
        kl=AWM_PENALTIES[train["kl_weight"]],
        off_policy=train["off_policy"],
    )


def dgpo_loss(config: Mapping[str, Any]) -> DGPO:
    """The loss that a recorded state of DGPO means."""
    train = config["train"]
    return DGPO(
        beta_dpo=float(train["beta_dpo"]),
        clip=config["clip_range"] if config["clip_dsm"] else None,
        clip_kl=config["clip_kl"],
        kl_weight=train["beta"],
        anchor="old" if config["use_ema_ref"] else "reference",
    )


def nft_tables(
    loss: DiffusionNFT, batch: ForwardBatch, row: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What DiffusionNFT's code recorded of every row."""
    return {
        "r": loss.optimality(batch.advantages),
        "positive_loss": row["positive"],
        "negative_loss": row["negative"],
        "policy_unscaled": row["policy_loss"] / loss.advantage_clip,
        "old_deviation": row["old_distance"],
    }


def awm_tables(loss: AWM, batch: ForwardBatch, row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What AWM's code recorded of every row."""
    old = batch.velocity_of("average" if loss.off_policy else "old", loss)
    new, old = (loss.log_prob(velocity, batch.target, batch.time) for velocity in (batch.new, old))
    return {
        "log_prob": new.detach(),
        "old_log_prob": old,
        "ratio": row["ratio_mean"],
        "policy": row["policy_loss"],
        "scaled_advantage": loss.scaled(batch.advantages),
    }


def dgpo_tables(loss: DGPO, batch: ForwardBatch, row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What DGPO's code recorded of every row; sums and weights of a group for each of its rows."""
    assert batch.pooled is not None
    members = int((batch.group == 0).sum()) // len(batch.time[batch.sample == 0])
    tables = {
        "group/sum": batch.pooled,
        "group/weight": row["group_weight"],
        "group_term": loss.row_terms(batch) / members,
    }
    tables["matching"] = row["matching"]
    return tables | (
        {"ratio": row["ratio_mean"], "clipped": row["clip_fraction"]}
        if loss.clip is not None
        else {}
    )


@dataclass(frozen=True)
class Code:
    """One released code: flowrl's method, its losses, its tables, the name of its total, its copy
    of the weights that lags, and whether its trajectories can be replayed.
    """

    method: str
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
    "r": "weights of rows",
    "scaled_advantage": "weights of rows",
    "log_prob": "matching errors",
    "old_log_prob": "matching errors",
    "matching": "matching errors",
    "matching_reference": "matching errors",
    "matching_old": "matching errors",
    "old_deviation": "squared distances",
    "kl": "squared distances",
    "ema_kl": "squared distances",
    "ratio": "ratios of errors",
    "clipped": "clipped pairs",
    "group/sum": "group sums",
    "group_term": "group sums",
    "group/weight": "group weights",
}
"""Recorded table -> the quantity whose tolerance it has; "row losses" for the others."""


@dataclass(frozen=True)
class ForwardReplay:
    """Replays states of `recording` on its model; `base` are the settings that all states share.
    `changes` are options of the loss, or settings of the run, that replace the recorded ones.
    """

    recording: Recording
    base: RunConfig
    policy: PipelinePolicy
    changes: Mapping[str, Any]

    @cached_property
    def tables(self) -> Tensors:
        """What the states recorded."""
        return self.recording.tensors("update")

    @cached_property
    def inputs(self) -> Tensors:
        """What the states of the method share, and what all methods share."""
        common = load_file(self.recording.folder / "common" / "inputs.safetensors")
        return {**self.recording.tensors("inputs"), **common}

    @property
    def code(self) -> Code:
        """What the recording is of."""
        return CODES[self.recording.method]

    @cached_property
    def schedule(self) -> Schedule:
        """The grid of the trajectories. DiffusionNFT's sampler truncates the network's timesteps to
        integers.
        """
        recorded = self.recording.tensors("sampling")
        timesteps = recorded["timesteps"].float()
        if self.code.samples:
            return Schedule(recorded["sigmas"], timesteps.floor())
        return Schedule(torch.cat([timesteps / 1000, torch.zeros(1)]), timesteps)

    def loss(self, state: str) -> Loss:
        """The loss of a state."""
        loss = self.code.loss(self.recording.meta["states"][state]["config"])
        return replace(
            loss, **{name: value for name, value in self.changes.items() if hasattr(loss, name)}
        )

    def config(self, state: str) -> RunConfig:
        """The settings of a state, with the recorded micro-batches."""
        settings, loss = self.recording.meta["states"][state], self.loss(state)
        train, spread = (
            settings["config"]["train"],
            "batch" if settings["config"]["sample"]["global_std"] else "group",
        )
        return self.base.replace(
            method=self.code.method,
            sampler="multistep",
            num_steps=self.schedule.steps,
            credit=f"uniform(std={spread}, clamp=none)",
            learning_rate=train["learning_rate"],
            betas=(train["adam_beta1"], train["adam_beta2"]),
            weight_decay=train["adam_weight_decay"],
            max_grad_norm=train["max_grad_norm"],
            minibatches=settings["updates"],
            micro_batch=train["batch_size"] * self.inputs["times"].shape[1],
            train_guidance_scale=1.0,
            reference_guidance_scale=settings["config"].get("kl_cfg", 1.0),
        ).replace(
            **{name: value for name, value in self.changes.items() if not hasattr(loss, name)}
        )

    def run(self, state: str, steps: int = BEGAN) -> ForwardTrainer:
        """The trainer after the iteration of a state, which began after `steps` optimizer steps."""
        settings, loss, config = (
            self.recording.meta["states"][state]["config"],
            self.loss(state),
            self.config(state),
        )
        inputs, tables, method = (
            self.inputs,
            below(self.tables, state),
            replace(make_method(config), loss=loss),
        )
        rewards = tables.get("rewards", inputs["rewards"])[..., None]
        if config.rollout.num_steps != self.schedule.steps:
            raise ValueError(f"num_steps differs from the recorded {self.schedule.steps}")
        given = self.recording.inputs
        trainer = recorded_trainer(ForwardTrainer, given, self.policy, method, rewards, config)
        trainer.schedule = trainer.collector.schedule = self.schedule
        trainer.finished, trainer.times = inputs["x0"], tables.get("time", inputs["times"]).float()
        shared = inputs["group_noise"].repeat_interleave(trainer.groups.members, 0)
        noise = shared if self.recording.method == "dgpo" else inputs["noise"]
        trainer.noise = noise[:, : trainer.times.shape[1]].float()
        trainer.give(inputs.get("perm", torch.arange(len(inputs["x0"]))), {})
        old = below(inputs, "lora_old")
        weights = old if state in ("at_old", "at_ema") else below(inputs, "lora_current")
        trainer.resume(
            weights,
            {name: old if name == self.code.copy else weights for name in loss.copies},
            steps,
        )
        with (
            self.policy.guided(settings["sample"]["guidance_scale"]),
            patch.object(multistep, "NEAREST_TO_NOISE", 1.0),
        ):
            trainer.metrics = trainer.iteration()
        return trainer


def row_values(loss: Loss, batch: ForwardBatch) -> tuple[ForwardBatch, dict[str, Tensor]]:
    """The batch with the means of its units, and the loss and its metrics of every row by itself,
    [row].
    """
    with torch.no_grad():
        if loss.unit != "transition":
            assert not isinstance(loss, DiffusionNFT)
            batch = replace(
                batch,
                pooled=unit_means(loss.row_terms(batch), batch.units(loss.unit), batch.weight),
            )
        columns: dict[str, list[Tensor]] = {}
        for row in range(len(batch.time)):
            result = loss.loss(batch.rows(slice(row, row + 1)))
            for name, value in {**result.metrics, "loss": result.loss}.items():
                columns.setdefault(name, []).append(value.reshape(()))
    return batch, {name: torch.stack(values) for name, values in columns.items()}


def squared_distances(loss: Loss, batch: ForwardBatch) -> dict[str, Tensor]:
    """Mean squared distances of the velocities, under the names of their tables."""
    anchor = getattr(batch, getattr(loss, "anchor", "reference"))
    pairs = {
        "kl": (batch.new, batch.reference),
        "ema_kl": (batch.new, batch.average),
        "matching_reference": (anchor, batch.target),
        "matching_old": (batch.old, batch.target),
    }
    known = {
        name: (first, other)
        for name, (first, other) in pairs.items()
        if first is not None and other is not None
    }
    return {
        name: (first.detach() - other).square().flatten(1).mean(1)
        for name, (first, other) in known.items()
    }


def table_differences(
    replay: ForwardReplay, state: str, trainer: ForwardTrainer
) -> Iterator[tuple[str, float]]:
    """What a state recorded of its rows, micro-batches and groups: the largest difference of each
    quantity.
    """
    code, meta, loss, recorded = (
        replay.code,
        replay.recording.meta,
        replay.loss(state),
        below(replay.tables, state),
    )
    samples = meta["prompts"] * meta["members"]
    batch, values = row_values(loss, trainer.made.all_rows())
    tables = code.tables(loss, batch, values) | squared_distances(loss, batch)
    largest: dict[str, float] = {}
    for name, ours in tables.items():
        if name in recorded:
            ours = ours.view(samples, -1)
            if name.startswith("group/"):
                ours = ours[:: meta["members"]]
            theirs = (
                recorded[name]
                if recorded[name].ndim == 2
                else recorded[name][:, None].expand_as(ours)
            )
            quantity = QUANTITIES.get(name, "row losses")
            largest[quantity] = max(
                largest.get(quantity, 0.0),
                distance(ours, theirs, 1.0 if name == "clipped" else 0.0),
            )
    theirs, loss_of_rows = recorded[code.total], values["loss"].view(samples, -1)
    micro = loss_of_rows[trainer.given_order].unflatten(0, (len(theirs), -1)).mean(1)
    size = float(max(loss_of_rows.abs().max(), theirs.abs().max()))
    largest["loss of micro-batches"] = max(
        distance(micro if theirs.ndim == 2 else micro.mean(1), theirs, size),
        distance(torch.tensor(trainer.metrics["loss"]), theirs.mean(), size),
    )
    if (
        name := next((name for name in recorded if name.startswith("v_draw0_sample_")), None)
    ) is not None:
        row = int(name.rpartition("_")[2]) * trainer.times.shape[1]
        largest["velocities"] = distance(batch.new[row], recorded[name])
    if "rewards" not in recorded and meta["states"][state]["config"]["sample"]["global_std"]:
        largest["advantages"] = distance(trainer.advantages[:, 0], replay.inputs["advantages"])
    yield from largest.items()


def sampling_differences(
    replay: ForwardReplay, guidance: float, sampled: Trajectories
) -> Iterator[float]:
    """Trajectories with this guidance: finished latents of all samples (DGPO's are guided), and one
    sample's nodes.
    """
    recorded, several = replay.recording.tensors("sampling"), replay.recording.method == "dgpo"
    if guidance > 1 or not several:
        yield distance(sampled.images_latent, replay.inputs["x0"])
    name = f"guidance{guidance:g}/nodes_sample_4" if several else "nodes_sample_4"
    if name in recorded:
        yield distance(sampled.nodes[4], recorded[name])


def copy_differences(replay: ForwardReplay) -> Iterator[float]:
    """The lagging copy of the weights after iterations that began after several numbers of
    optimizer steps. Elements are compared where weights are.
    """
    method, code = replay.recording.method, replay.code
    for name, table in (
        (name, table) for name, table in replay.recording.meta.items() if name.endswith("_after")
    ):
        for tag, settings in table.items():
            state = settings.get("state", "ocr" if method == "dgpo" else "geneval")
            trainer = replay.run(
                state,
                settings.get("global_step_after", settings.get("global_step_used", 0) + 1) - 1,
            )
            ours = dict(zip(trainer.weights, trainer.copies.by_name[code.copy].values, strict=True))
            clear = clear_gradients(trainer.optimizer_steps)
            for weight, recorded in below(replay.tables, f"{name}/{tag}").items():
                yield distance(ours[weight][clear[weight]], recorded[clear[weight]], 1.0)


def time_differences(recording: Recording, schedule: Schedule) -> Iterator[float]:
    """AWM's times from the recorded uniform numbers."""
    recorded = recording.tensors("times")
    kinds = {
        "discrete_wo_init": StratifiedTimes(),
        "uniform": UniformTimes(),
        "logit_normal": LogitNormalTimes(),
    }
    for name, kind in kinds.items():
        for micro, part in enumerate(recorded["perm"].view(2, -1)):
            uniforms = recorded[f"{name}/uniform_draws/{micro}"].float()
            uniforms = uniforms.T if uniforms.ndim == 2 else uniforms[None]
            ours = kind.times(uniforms, schedule).expand(len(part), -1)
            yield distance(ours.sort(1).values, recorded[f"{name}/times"][part].sort(1).values)


def replay_forward(
    recording: Recording,
    work: Path,
    changes: Mapping[str, Any],
    updates: Sequence[str],
) -> Iterator[Difference]:
    """State, quantity and difference of everything that was recorded of a forward-process loss.
    `changes` are options of the loss, or settings of the run, that replace the recorded ones.
    """
    base, sampled = base_config(recording, work), set[float]()
    settings = {name: value for name, value in changes.items() if name in flat(base)}
    base = base.replace(**settings)
    replay = ForwardReplay(recording, base, recorded_policy(recording, base, []), changes)
    for state in updates or recording.meta["states"]:
        yield from attempt(state, state_differences(replay, state, sampled))
    if not updates:
        yield from attempt("copies", other_differences(replay))


def other_differences(replay: ForwardReplay) -> Iterator[Difference]:
    """What was recorded of no single state."""
    yield "copies", "copies of the weights", max(copy_differences(replay))
    if replay.recording.method == "awm":
        yield "times", "training times", max(time_differences(replay.recording, replay.schedule))


def state_differences(
    replay: ForwardReplay,
    state: str,
    sampled: set[float],
) -> Iterator[Difference]:
    """What a state recorded. `sampled` collects the guidance of the compared trajectories."""
    settings, recorded = replay.recording.meta["states"][state], below(replay.tables, state)
    trainer, guidance = replay.run(state), settings["config"]["sample"]["guidance_scale"]
    if replay.code.samples and guidance not in sampled:
        sampled.add(guidance)
        if differences := list(sampling_differences(replay, guidance, trainer.sampled)):
            yield state, "latents", max(differences)
    for quantity, difference in table_differences(replay, state, trainer):
        yield state, quantity, difference
    steps: list[Tensors] = [recorded]
    if (count := settings["updates"]) > 1:
        steps = [below(recorded, f"update{number}") for number in range(count)]
        last = {name: t for name, t in recorded.items() if name.startswith("weights_after")}
        steps[-1] = {**last, **steps[-1]}
    rate = settings["config"]["train"]["learning_rate"]
    for quantity, difference in step_differences(trainer.optimizer_steps, steps, rate):
        yield state, quantity, difference

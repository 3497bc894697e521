"""Recorded updates of the released forward-process codes (DiffusionNFT, AWM, DGPO), with the losses of flowrl.

`python benchmarks/parity.py --data DIR` runs this for a folder with nft, awm or dgpo, whose README defines the format. Finished
latents, times and noise are the recorded ones; velocities come from the recorded model, and advantages from flowrl's rule.
`losses_of`, `table_differences` and `copy_differences` take the losses and tables of any replay.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from parity_compare import distance, step_differences
from parity_recording import FACTOR, Recording, Tensors, below, pipeline_folder
from parity_replay import OptimizerStep, give_embeddings, peft_name
from safetensors.torch import load_file
from torch import Tensor

from flowrl.credit import Uniform
from flowrl.flow import LogitNormalTimes, StratifiedTimes, UniformTimes, interpolate, velocity_target
from flowrl.forward import ForwardBatch, WeightCopy, unit_means
from flowrl.losses import AWM, DGPO, DiffusionNFT
from flowrl.policies import PipelinePolicy
from flowrl.training.behaviour import Behaviour
from flowrl.training.build import make_policy, make_world
from flowrl.training.config import RunConfig
from flowrl.training.optim import make_optimizer, weights_replaced
from flowrl.types import Condition, Schedule

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
    """One released code: its losses, its tables, the name of its noise, and the names of its penalties and its total."""

    loss: Callable[[Mapping[str, Any]], Any]
    tables: Callable[..., dict[str, Tensor]]
    total: str
    copy: str


CODES = {
    "nft": Code(nft_loss, nft_tables, "micro/total_loss", "old"),
    "awm": Code(awm_loss, awm_tables, "micro/loss", "average"),
    "dgpo": Code(dgpo_loss, dgpo_tables, "micro/loss", "old"),
}
QUANTITIES = {
    "r": "weights of rows", "scaled_advantage": "weights of rows", "log_prob": "matching errors",
    "old_log_prob": "matching errors",
    "matching": "matching errors", "matching_reference": "matching errors", "matching_old": "matching errors",
    "old_deviation": "squared distances", "kl": "squared distances", "ema_kl": "squared distances", "ratio": "ratios of errors",
    "clipped": "clipped pairs", "group/sum": "group sums", "group_term": "group sums", "group/weight": "group weights",
}  # fmt: skip
"""Recorded table -> the quantity whose tolerance it has; "row losses" for the others."""


class Networks:
    """The recorded model with its two sets of LoRA weights."""

    def __init__(self, recording: Recording, work: Path) -> None:
        meta, folder = recording.meta, pipeline_folder(recording, work)
        config = RunConfig.of(
            world="model", task="prompts", reward_form="reward", model=str(folder), adapter=str(folder / "lora.safetensors"),
            prompts=str(folder / "prompts.txt"), reward="recorded", resolution=FACTOR * meta["latent"][-1],
            lora_rank=meta["lora"]["r"], lora_alpha=float(meta["lora"]["lora_alpha"]),
        )  # fmt: skip
        policy, prompts = make_policy(config), make_world(config).prompts("prompts", "train")
        assert isinstance(policy, PipelinePolicy)
        give_embeddings(policy.pipe, recording.inputs, prompts)
        self.policy, self.condition = policy, policy.encode(prompts)
        self.named = {peft_name(name): parameter for name, parameter in policy.trainable().items()}

    def put(self, weights: Tensors) -> None:
        """Let the policy have these weights."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(weights[name])

    def velocity(self, latent: Tensor, time: Tensor, condition: Condition, weights: Tensors | None = None) -> Tensor:
        """The velocity under the present weights, or under `weights`, which take no gradient."""
        if weights is None:
            return self.policy.velocity(latent, 1000.0 * time, condition)
        values = [weights[name] for name in self.named]
        with torch.no_grad(), weights_replaced(self.policy, list(self.named.values()), values):
            return self.policy.velocity(latent, 1000.0 * time, condition)

    def reference(self, latent: Tensor, time: Tensor, condition: Condition, guidance: float = 1.0) -> Tensor:
        """The base model's velocity."""
        with torch.no_grad(), self.policy.reference(), self.policy.guided(guidance):
            return self.policy.velocity(latent, 1000.0 * time, condition)


@dataclass(frozen=True)
class Rows:
    """The recorded (sample, draw) rows of a state: noised images, their condition, and the batch with all velocities."""

    latent: Tensor
    condition: Condition
    batch: ForwardBatch

    @staticmethod
    def of(recording: Recording, state: str, networks: Networks, current: Tensors, old: Tensors) -> "Rows":
        """All rows, sample by sample, with the velocities of the networks; `new` carries the gradient."""
        method, tables = recording.method, below(recording.tensors("update"), state)
        inputs, common = recording.tensors("inputs"), load_file(recording.folder / "common" / "inputs.safetensors")
        config, members = recording.meta["states"][state]["config"], recording.meta["members"]
        times = tables.get("time", inputs["times"]).float()
        sample, draw = (axis.flatten() for axis in torch.meshgrid(*map(torch.arange, times.shape), indexing="ij"))
        group, time, clean = sample // members, times.flatten(), inputs["x0"][sample]
        noise = (common["group_noise"][group, draw] if method == "dgpo" else common["noise"][sample, draw]).float()
        latent, condition = interpolate(clean, noise, time), networks.condition.take(group)
        networks.put(current)
        new = networks.velocity(latent, time, condition)
        copy = networks.velocity(latent, time, condition, old)
        batch = ForwardBatch(
            time, velocity_target(clean, noise), new, recorded_advantages(recording, tables, config).flatten()[sample],
            torch.ones_like(time, dtype=torch.bool), group, sample,
            old=new.detach() if method == "awm" else copy, average=copy if method == "awm" else None,
            reference=networks.reference(latent, time, condition, config.get("kl_cfg", 1.0)),
        )  # fmt: skip
        return Rows(latent, condition, batch)


def recorded_advantages(recording: Recording, tables: Tensors, config: Mapping[str, Any]) -> Tensor:
    """Advantages [prompt, member] of the recorded rewards by the rule that the settings mean."""
    common = load_file(recording.folder / "common" / "inputs.safetensors")
    rewards = tables.get("rewards", common["rewards"])[..., None].repeat(1, 1, 2)
    rule = Uniform(std="batch" if config["sample"]["global_std"] else "group", clamp=None)
    return rule.assign(rewards.float(), None)[..., 0]


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


def update_steps(recording: Recording, networks: Networks, loss: Loss, rows: Rows, updates: int) -> Iterator[OptimizerStep]:
    """The optimizer's steps: one of all rows, or one for each recorded micro-batch with its samples."""
    train = recording.meta["states"]["geneval"]["config"]["train"]
    betas = train["adam_beta1"], train["adam_beta2"]
    weights = networks.named
    optimizer = make_optimizer("adamw", list(weights.values()), train["learning_rate"], betas, train["adam_weight_decay"])
    samples = recording.meta["prompts"] * recording.meta["members"]
    order = recording.tensors("inputs").get("perm", torch.arange(samples))
    copy = Behaviour("old", loss.copies.get("old", WeightCopy()), networks.policy, weights)
    batch = rows.batch
    for step, part in enumerate(order.view(updates, -1)):
        chosen = torch.isin(batch.row_sample, part)
        if step > 0:
            latent, time, condition = rows.latent, batch.time, rows.condition
            batch = replace(batch, new=networks.velocity(latent, time, condition))
            if copy.copy.every == "update":
                copied = dict(zip(weights, copy.values, strict=True))
                batch = replace(batch, old=networks.velocity(latent, time, condition, copied))
        optimizer.zero_grad()
        loss.loss(batch.rows(chosen)).loss.backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in weights.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(list(weights.values()), train["max_grad_norm"]))
        optimizer.step()
        copy.after_update(step + 1)
        yield OptimizerStep(gradients, norm, {name: weight.detach().clone() for name, weight in weights.items()})


def copy_differences(recording: Recording, networks: Networks, old: Tensors) -> float:
    """The largest difference of the copies of the weights after their decay."""
    tensors, code, largest = recording.tensors("update"), CODES[recording.method], 0.0
    for name, table in ((n, t) for n, t in recording.meta.items() if n.endswith("_after")):
        for tag, settings in table.items():
            state = settings.get("state", "ocr" if recording.method == "dgpo" else "geneval")
            after, recorded = below(tensors, f"{state}/weights_after"), below(tensors, f"{name}/{tag}")
            declared = code.loss(recording.meta["states"][state]["config"]).copies[code.copy]
            networks.put({**old, **after})
            copy = Behaviour("old", declared, networks.policy, networks.named)
            copy.values = [old[weight].clone() for weight in networks.named]
            steps = settings.get("global_step_after", settings.get("global_step_used", 0) + 1)
            copy.after_update(steps)
            copy.after_iteration(steps)
            ours = dict(zip(networks.named, copy.values, strict=True))
            largest = max([largest, *(distance(ours[weight], recorded[weight], 1.0) for weight in recorded if weight in after)])
    return largest


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
    """State, quantity and difference of everything that was recorded of a forward-process loss. `changes` are options of the loss
    that replace the recorded ones."""
    code, networks = CODES[recording.method], Networks(recording, work)
    common, every = load_file(recording.folder / "common" / "inputs.safetensors"), recording.tensors("update")
    current, old = below(common, "lora_current"), below(common, "lora_old")
    for state, settings in recording.meta["states"].items():
        if updates and state not in updates:
            continue
        recorded, loss = below(every, state), replace(code.loss(settings["config"]), **changes)
        rows = Rows.of(recording, state, networks, old if state in ("at_old", "at_ema") else current, old)
        if settings["updates"] == 1:
            for quantity, difference in table_differences(recording, recorded, loss, rows.batch):
                yield state, quantity, difference
        if name := next((name for name in recorded if name.startswith("v_draw0_sample_")), None):
            row = int(name.rpartition("_")[2]) * len(rows.batch.time) // (recording.meta["prompts"] * recording.meta["members"])
            yield state, "velocities", distance(rows.batch.new[row].detach(), recorded[name])
        count = settings["updates"]
        recorded_steps = [below(recorded, f"update{i}") for i in range(count)] if count > 1 else [recorded]
        if not below(recorded_steps[0], "grad"):
            continue
        if count > 1:
            recorded_steps[-1] |= {name: t for name, t in recorded.items() if name.startswith("weights_after")}
        steps = list(update_steps(recording, networks, loss, rows, count))
        for quantity, difference in step_differences(steps, recorded_steps, settings["config"]["train"]["learning_rate"]):
            yield state, quantity, difference
    if not updates:
        yield "copies", "copies of the weights", copy_differences(recording, networks, old)
        if recording.method == "awm":
            timesteps = recording.tensors("sampling")["timesteps"].float()
            schedule = Schedule(torch.linspace(1, 0, len(timesteps) + 1), timesteps)
            yield "times", "training times", max(time_differences(recording, schedule))

"""A recorded training iteration, replayed by the trainer with the recorded weights, embeddings,
noise, rewards and order of samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from parity_recording import (
    FACTOR,
    WITHOUT_KL,
    RecordedUpdate,
    Recording,
    Tensors,
    below,
    pipeline_folder,
)
from torch import Tensor

from flowrl import Prompt, Trainer
from flowrl.core.experience import Credit, Experience
from flowrl.core.forward import ForwardBatch
from flowrl.core.processes import Processes
from flowrl.core.protocols import AnySampler, FlowPolicy, PolicyLoss
from flowrl.core.types import Gaussian, LossBatch, LossResult, Schedule, Trajectories, Unit
from flowrl.flow import expand, log_prob, log_prob_without_constants
from flowrl.methods import Method
from flowrl.nonfinite import NonFiniteCheck
from flowrl.policies import PipelinePolicy
from flowrl.rollout import ForwardObjective, Groups, Objective, Rollout, Rows
from flowrl.rollout.metrics import LossMetrics
from flowrl.run.build import build_trainer, make_method, make_policy, make_world
from flowrl.run.checkpoint import restore_trainer, trainer_state
from flowrl.run.config import RunConfig


@dataclass(frozen=True)
class RecordedNoise(Groups):
    """Groups whose noise is given: `initial` [sample, *latent] and `steps` [sample, step, *latent],
    used step by step.
    """

    initial: Tensor = field(kw_only=True)
    steps: Tensor = field(kw_only=True)
    _drawn: Iterator[int] = field(default_factory=count, init=False)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """x_T of every sample, as recorded."""
        return self.initial

    def draw(self, gaussian: Gaussian, generator: torch.Generator) -> Tensor:
        """The mean plus the recorded noise of the next step."""
        first = self.first * self.members
        noise = self.steps[first : first + self.samples, next(self._drawn)]
        return gaussian.mean + expand(gaussian.std, gaussian.mean) * noise


class RecordedReward:
    """Reads scores from a table [prompt, member, decision+1]: the finished images of a prompt come
    first, then by column.
    """

    def __init__(self, table: Tensor, prompts: Sequence[Prompt]) -> None:
        scores = table.roll(1, 2).transpose(1, 2).flatten(1).tolist()
        self.rows = {prompt.text: iter(row) for prompt, row in zip(prompts, scores, strict=True)}

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The next scores of the prompts."""
        return torch.tensor([next(self.rows[prompt.text]) for prompt in prompts])


@dataclass
class PairValues:
    """A loss that keeps what it computes for every (trajectory, decision) pair by itself: `rows`,
    one value per pair and name.
    """

    inner: PolicyLoss
    rows: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def needs_reference(self) -> bool:
        """As `inner` has it."""
        return self.inner.needs_reference

    @property
    def trains_zero_advantages(self) -> bool:
        """As `inner` has it."""
        return self.inner.trains_zero_advantages

    @property
    def unit(self) -> Unit:
        """As `inner` has it."""
        return self.inner.unit

    def loss(self, batch: LossBatch) -> LossResult:
        """`inner`'s result."""
        with torch.no_grad():
            for k in range(len(batch.advantages)):
                pair = batch.rows(slice(k, k + 1))
                result = self.inner.loss(pair)
                released = getattr(self.inner, "log_prob", "exact") == "released_cps"
                density = log_prob_without_constants if released else log_prob
                values = {
                    **result.metrics,
                    "loss": result.loss,
                    "log_prob": density(pair.new, pair.next_node),
                }
                for name, value in values.items():
                    self.rows.setdefault(name, []).append(value.reshape(()))
        return self.inner.loss(batch)


@dataclass(frozen=True)
class OptimizerStep:
    """Gradients before clipping, their norm, the clipped gradients, and the weights afterwards,
    under PEFT's names."""

    gradients: Tensors
    norm: float
    clipped: Tensors
    weights: Tensors


class ReplayTrainer(Trainer):
    """The trainer with a given order of samples and, off policy, given weights for the update;
    keeps the intermediate values.
    """

    rollout: Rollout
    record: Experience
    advantages: Tensor
    given_order: Tensor
    given_weights: Tensors

    def give(self, order: Tensor, weights: Tensors) -> None:
        """Set what is given before `iteration`."""
        self.given_order, self.given_weights = order, weights
        self.optimizer_steps: list[OptimizerStep] = []
        self.pairs: list[Rows] = []

    @property
    def weights(self) -> dict[str, Tensor]:
        """The trained weights under PEFT's names."""
        return {peft_name(name): parameter for name, parameter in self.parameters.items()}

    def resume(self, weights: Tensors, copies: Mapping[str, Tensors], steps: int) -> None:
        """Resume from these weights and copies of the weights after `steps` optimizer steps, as from
        a checkpoint.
        """
        state = trainer_state(self)
        for prefix, tensors in {
            "weight": weights,
            **{f"copy.{name}": copy for name, copy in copies.items()},
        }.items():
            state.tensors.update(
                {f"{prefix}.{name}": tensors[peft_name(name)] for name in self.parameters}
            )
        state.values.update(
            {f"copy.{name}.current": copy is weights for name, copy in copies.items()},
            optimizer_steps=steps,
        )
        restore_trainer(self, state)

    def objective(
        self,
        sampler: AnySampler,
        rollout: Rollout,
        experience: Experience,
        credit: Credit,
        weights: Tensor,
    ) -> Objective:
        """Keeps the trajectories, the record, the advantages [sample, decision] and the pairs. The
        update starts from the given weights, if there are any.
        """
        self.rollout, self.record = rollout, experience
        self.advantages = credit.advantages.flatten(0, 1)
        made = super().objective(sampler, rollout, experience, credit, weights)
        micro_batches = made.micro_batches

        def kept(rows: Rows, size: int, processes: Processes) -> list[Rows]:
            minibatch = micro_batches(rows, size, processes)
            self.pairs += minibatch
            return minibatch

        made.micro_batches = kept
        with torch.no_grad():
            for name, weight in self.given_weights.items():
                self.weights[name].copy_(weight)
        return made

    def draw_order(self) -> Tensor:
        """The given order; samples that it lacks come last."""
        missing = [
            sample for sample in range(self.groups.samples) if sample not in self.given_order
        ]
        return torch.cat([self.given_order, torch.tensor(missing, dtype=torch.int64)])

    def optimizer_step(
        self, minibatch: Sequence[Rows], check: NonFiniteCheck, metrics: LossMetrics
    ) -> None:
        """Keeps the gradients, their norm and the weights."""
        gradients = self.gradients()
        super().optimizer_step(minibatch, check, metrics)
        weights = {name: parameter.detach().clone() for name, parameter in self.weights.items()}
        norm, clipped = metrics.means["grad_norm"], self.gradients()
        self.optimizer_steps.append(OptimizerStep(gradients, norm, clipped, weights))

    def gradients(self) -> Tensors:
        """The current gradients under PEFT's names; 0 if there is none."""
        named = self.weights.items()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


@dataclass(frozen=True)
class GivenTimes:
    """Training times that are given [sample, draw]."""

    times: Tensor

    def draws(self, schedule: Schedule) -> int:
        """Their number per sample."""
        return self.times.shape[1]

    def draw(self, schedule: Schedule, samples: int, generator: torch.Generator) -> Tensor:
        """The times."""
        return self.times


class KeptObjective(ForwardObjective):
    """A loss with given `noise` [sample, draw, *latent], which keeps its rows."""

    def begin(self) -> None:
        """No row is kept so far."""
        super().begin()
        self.kept = list[tuple[Tensor, ForwardBatch]]()

    def batch(self, rows: Rows) -> ForwardBatch:
        """The batch of these rows."""
        batch = super().batch(rows)
        number = rows.sample * self.times.shape[1] + rows.column
        self.kept.append((number, replace(batch, new=batch.new.detach())))
        return batch

    def prepare(self, minibatch: Sequence[Rows]) -> None:
        """Rows of this pass are not kept."""
        size = len(self.kept)
        super().prepare(minibatch)
        del self.kept[size:]

    def all_rows(self) -> ForwardBatch:
        """All rows as the loss has seen them, sample by sample."""
        order = torch.cat([number for number, _ in self.kept]).argsort()
        batches = [replace(batch, pooled=None) for _, batch in self.kept]
        columns = {
            field.name: [getattr(batch, field.name) for batch in batches]
            for field in fields(ForwardBatch)
        }
        tensors = {
            name: torch.cat(column) for name, column in columns.items() if None not in column
        }
        return ForwardBatch(**tensors).rows(order)


class ForwardTrainer(ReplayTrainer):
    """The trainer with given finished latents, times and noise of the rows."""

    finished: Tensor
    times: Tensor
    noise: Tensor
    sampled: Trajectories
    made: KeptObjective
    metrics: Mapping[str, Any]

    def objective(
        self,
        sampler: AnySampler,
        rollout: Rollout,
        experience: Experience,
        credit: Credit,
        weights: Tensor,
    ) -> Objective:
        """Puts the given latents at the ends of the trajectories, and the given times and noise
        into the rows.
        """
        self.sampled = path = rollout.trajectories
        states = path.states.clone()
        states[:, path.tree.at(path.schedule.steps)] = self.finished.unflatten(0, (len(states), -1))
        replaced = replace(rollout, trajectories=replace(path, states=states))
        loss = replace(cast(Any, self.method.loss), times=GivenTimes(self.times))
        self.method, self.objective_type = replace(self.method, loss=loss), KeptObjective
        made = super().objective(sampler, replaced, experience, credit, weights)
        assert isinstance(made, KeptObjective)
        self.made, made.noise = made, self.noise
        return made


Trained = TypeVar("Trained", bound=ReplayTrainer)


def peft_name(name: str) -> str:
    """PEFT's name of a weight of the adapter "default"."""
    return "base_model.model." + name.replace(".default.", ".")


@dataclass(frozen=True)
class Replay:
    """A replayed iteration: the trainer, the values of its pairs, the latents that were decoded, in
    order, and its metrics.
    """

    trainer: ReplayTrainer
    values: PairValues
    decoded: Sequence[Tensor]
    metrics: Mapping[str, Any]

    def table(self, name: str) -> Tensor:
        """`name` of every trained pair, [sample, decision]; NaN for the others, and for all if the
        loss does not compute it.
        """
        trainer = self.trainer
        table = torch.full_like(trainer.advantages, float("nan"))
        sample, column = (
            torch.cat([getattr(micro, axis) for micro in trainer.pairs])
            for axis in ("sample", "column")
        )
        if name in self.values.rows:
            table[sample, column] = torch.stack(self.values.rows[name])
        return table


def replay(
    recording: Recording, update: RecordedUpdate, settings: Mapping[str, Any], work: Path
) -> Replay:
    """One iteration of the trainer with the recorded inputs. `settings` are the method's; `work`
    keeps the model's files.
    """
    config = run_config(recording, update, work).replace(**settings)
    method, decoded = make_method(config), []
    values, policy = PairValues(method.loss), recorded_policy(recording, config, decoded)
    method, noise = replace(method, loss=values), recording.inputs
    trainer = recorded_trainer(ReplayTrainer, noise, policy, method, update.rewards, config)
    trainer.give(update.order, below(update.tables, "weights_before"))
    return Replay(trainer, values, decoded, trainer.iteration())


def recorded_policy(
    recording: Recording, config: RunConfig, decoded: list[Tensor]
) -> PipelinePolicy:
    """The recorded model. It looks up the recorded embeddings, keeps the latents that it decodes,
    and returns black images.
    """
    policy = make_policy(config)
    assert isinstance(policy, PipelinePolicy)
    give_embeddings(policy.pipe, recording.inputs, make_world(config).prompts("prompts", "train"))
    _watch_decoder(policy.pipe.vae, decoded)
    return policy


def recorded_trainer(
    kind: type[Trained],
    noise: Tensors,
    policy: FlowPolicy,
    method: Method,
    rewards: Tensor,
    config: RunConfig,
) -> Trained:
    """A trainer with this noise and `rewards` [prompt, member, decision+1]."""
    groups, members = rewards.shape[:2]
    if (groups, members) != (config.rollout.groups, config.rollout.group_size):
        raise ValueError(f"groups and group_size differ from the recorded {groups} and {members}")
    prompts = make_world(config).prompts(config.environment.task, "train")[:groups]
    reward = RecordedReward(rewards, prompts)
    trainer = build_trainer(config, policy, method, reward, prompts, kind=kind)
    trainer.prompts.order = list(range(len(prompts)))
    recorded = {"initial": noise["init_noise"], "steps": noise["step_noise"]}
    trainer.groups = RecordedNoise(groups, members, **recorded)
    trainer.collector.groups = trainer.groups
    return trainer


def base_config(recording: Recording, work: Path) -> RunConfig:
    """The model, its prompts and groups: one iteration with a given reward."""
    meta, lora, folder = recording.meta, recording.meta["lora"], pipeline_folder(recording, work)
    return RunConfig.of(
        world="model",
        task="prompts",
        reward_form="reward",
        model=str(folder),
        adapter=str(folder / "lora.safetensors"),
        prompts=str(folder / "prompts.txt"),
        reward="recorded",
        resolution=FACTOR * meta["latent"][-1],
        iterations=1,
        groups=meta["prompts"],
        group_size=meta["members"],
        lora_rank=lora["r"],
        lora_alpha=float(lora["lora_alpha"]),
        ema_decay=0.0,
    )


def run_config(recording: Recording, update: RecordedUpdate, work: Path) -> RunConfig:
    """The settings that all methods with trajectories take from the recording in the same way."""
    meta, case = recording.meta, recording.meta["case"]
    training, optimizer = case["config"]["train"], meta["optimizer"]
    return base_config(recording, work).replace(
        num_steps=meta["steps"],
        guidance_scale=case["guidance"],
        lora_targets=tuple(case["target_modules"]),
        noise_level=case["config"]["sample"]["noise_level"],
        clip_range=training["clip_range"],
        kl_weight=0.0 if update.name.endswith(WITHOUT_KL) else training["beta"],
        drop_zero_advantages=True,
        learning_rate=optimizer["lr"],
        betas=tuple(optimizer["betas"]),
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["max_grad_norm"],
        minibatches=len(update.steps),
        micro_batch=24,
    )


def give_embeddings(pipe: Any, inputs: Tensors, prompts: Sequence[Prompt]) -> None:
    """Let the pipeline "embed" prompts by looking them up."""
    names = ("prompt_embeds", "pooled_prompt_embeds")
    embeddings = {
        prompt.text: [inputs[name][i : i + 1] for name in names] for i, prompt in enumerate(prompts)
    }
    embeddings[""] = [inputs[f"negative_{name}"] for name in names]

    def encode_prompt(texts: Sequence[str], *_: Any, **__: Any) -> tuple[Any, None, Any, None]:
        words, pooled = map(torch.cat, zip(*(embeddings[text] for text in texts), strict=True))
        return words, None, pooled, None

    pipe.encode_prompt = encode_prompt


def _watch_decoder(vae: Any, decoded: list[Tensor]) -> None:
    """Let the image decoder return black images and keep the latents that it receives."""

    def decode(latent: Tensor, **_: Any) -> tuple[Tensor]:
        decoded.append(latent)
        return (torch.zeros(len(latent), 3, *(FACTOR * side for side in latent.shape[-2:])),)

    vae.decode = decode

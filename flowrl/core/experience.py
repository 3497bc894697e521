"""The record of one iteration, the decisions that it credits, the credit that a rule gives, and
what observers exchange.

Further axis names:

==========  =====================================================================================
decision    transitions that were drawn (std > 0), in order: the steps at which any trajectory
            of a group was drawn, the same for all groups and processes; D is their number
decision+1  columns of a value table: column k < D is the value of the state that decision k
            starts from, column D the reward of the final image
==========  =====================================================================================
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import require
from flowrl.core.options import checked_options
from flowrl.core.prompt import Prompt
from flowrl.core.tree import Tree
from flowrl.core.types import Condition, Paths, Schedule, Trajectories

ValueTable = Float[Tensor, "prompt member column"]
CreditTable = Float[Tensor, "prompt member decision"]
FeatureTable = Float[Tensor, "prompt member decision feature"]
Mask = Bool[Tensor, "prompt member decision"]
LARGER = ("trajectories", "log_probs", "condition")
"""The fields of an `Experience` that exist on request only."""


@checked
@dataclass(frozen=True)
class Decisions:
    """The axis of credit: the drawn transitions of an iteration.

    If no transition was drawn (deterministic and multistep samplers), the only decision is the draw
    of the initial noise: step -1, time 1, delta 0, std 1.

    Args:
        step: index of the transition on the schedule [decision].
        time: t at its start [decision].
        delta: t at its start minus t at its end [decision].
        std: standard deviation of the transition [decision].
        trained: whether it enters the loss [decision].
        drawn: whether a member's transition was drawn [member, decision]; in a comb each member has
            one drawn transition.
        mask: usable x drawn x trained [prompt, member, decision], where a sample is usable if it
            and another one of its group are valid. Means, standard deviations and
            counts of a rule are over these entries; all others have advantage and weight 0.
        tree: the tree of a branching probe; None for other groups.
    """

    step: Int[Tensor, " decision"]
    time: Float[Tensor, " decision"]
    delta: Float[Tensor, " decision"]
    std: Float[Tensor, " decision"]
    trained: Bool[Tensor, " decision"]
    drawn: Bool[Tensor, "member decision"]
    mask: Mask
    tree: Tree | None = None

    def __len__(self) -> int:
        return len(self.step)

    @staticmethod
    @checked
    def of(
        schedule: Schedule,
        stds: Tensor,
        tree: Paths,
        valid: Bool[Tensor, "prompt member"],
        trained: Sequence[int] | None = None,
    ) -> "Decisions":
        """The decisions of a rollout, in main memory.

        Args:
            schedule: its time grid.
            stds: standard deviations of the sampler's transitions [step].
            tree: the states that the trajectories of a group share.
            valid: the samples that count [prompt, member].
            trained: the steps of the loss; None for all.
        """
        times, drawn = schedule.times.cpu(), tree.decisions
        time, delta, std = times[:-1], times[:-1] - times[1:], stds.cpu()
        step = torch.tensor(tree.drawn_steps, dtype=torch.long)
        if len(step):
            time, delta, std, drawn = time[step], delta[step], std[step], drawn[:, step]
        else:  # the draw of the initial noise
            step, drawn = torch.tensor([-1]), torch.ones(tree.members, 1, dtype=torch.bool)
            time, delta, std = times.new_ones(1), times.new_zeros(1), times.new_ones(1)
        every, mask = torch.ones(len(step), dtype=torch.bool), valid[:, :, None] & drawn
        branched = tree if isinstance(tree, Tree) else None
        decisions = Decisions(step, time, delta, std, every, drawn, mask, branched)
        return decisions if trained is None else decisions.training(trained)

    def training(self, steps: Sequence[int]) -> "Decisions":
        """The same decisions, of which those of `steps` are trained."""
        trained = torch.isin(self.step, torch.as_tensor(steps, dtype=self.step.dtype))
        return replace(self, trained=trained, mask=self.mask & trained)

    @staticmethod
    def like(
        values: ValueTable,
        stds: Sequence[float] | None = None,
        times: Sequence[float] | None = None,
    ) -> "Decisions":
        """Decisions that fit a value table: all drawn, trained and valid, on an even time grid
        unless `times` are given.

        Args:
            values: a value table; only its shape is used.
            stds: standard deviations [decision]; None for 0.7 sqrt(delta).
            times: t at the start of each decision [decision], descending; the last one ends at t =
                0.

        Raises:
            ConfigError: the table has no decision, or a length differs.
        """
        prompts, members, columns = values.shape
        count = columns - 1
        require(count >= 1, "value table", tuple(values.shape), "[prompt, member, decision+1]")
        time = torch.linspace(1, 0, columns)[:-1] if times is None else torch.tensor(list(times))
        delta = time - torch.cat([time[1:], torch.zeros(1)])
        std = 0.7 * delta.sqrt() if stds is None else torch.tensor(list(stds))
        lengths = (len(time), len(std))
        require(lengths == (count, count), "times and stds", lengths, f"{count} decisions")
        mask = torch.ones(prompts, members, count, dtype=torch.bool)
        return Decisions(torch.arange(count), time, delta, std, mask[0, 0], mask[0], mask)

    def to(self, device: torch.device | str) -> "Decisions":
        """The same decisions on `device`; the tree stays in main memory."""
        tensors = {name: table for name, table in vars(self).items() if name != "tree"}
        return replace(self, **{name: table.to(device) for name, table in tensors.items()})


@checked
@dataclass(frozen=True)
class Experience:
    """The record of one iteration, of all groups of all processes.

    The `LARGER` fields are None unless they are requested: by the `Needs` of the rule, by the
    `fields` of an observer, or by `Trainer.recorded`. A rule receives only those that it requests
    itself.

    Args:
        prompts: one prompt per group.
        values: the value table [prompt, member, decision+1]; NaN in columns that no probe
            evaluated, and for invalid samples.
        decisions: the axis of the table.
        valid: False for samples that the reward could not judge [prompt, member].
        parts: a value table for each component of a composite reward.
        trajectories: all states and velocities.
        log_probs: log-probabilities of the transitions under the policy that drew them, mean over
            latent elements [prompt, member, decision]; NaN where no transition was drawn, also for
            the draw of the initial noise (step -1), which is in the mask.
        condition: the prompts' embeddings, one row per prompt.
        features: those of a `ValueProbe` [prompt, member, decision, feature]; NaN in columns that
            were not asked for.
    """

    prompts: Sequence[Prompt]
    values: ValueTable
    decisions: Decisions
    valid: Bool[Tensor, "prompt member"]
    parts: Mapping[str, ValueTable] = field(default_factory=dict)
    trajectories: Trajectories | None = None
    log_probs: CreditTable | None = None
    condition: Condition | None = None
    features: FeatureTable | None = None

    @staticmethod
    def cat(records: Sequence["Experience"]) -> "Experience":
        """The records of consecutive groups as one, without the `LARGER` fields."""
        first = records[0]

        def joined(tables: Iterable[Tensor]) -> Tensor:
            return torch.cat(list(tables))

        return Experience(
            [prompt for record in records for prompt in record.prompts],
            joined(record.values for record in records),
            replace(first.decisions, mask=joined(record.decisions.mask for record in records)),
            joined(record.valid for record in records),
            {name: joined(record.parts[name] for record in records) for name in first.parts},
            features=None
            if first.features is None
            else joined(cast(Tensor, record.features) for record in records),
        )

    def groups(self, rows: Sequence[int]) -> "Experience":
        """The record of the groups `rows`."""
        index = torch.tensor(rows)

        def taken(table: Any) -> Any:
            return None if table is None else table[index.to(table.device)]

        ran, condition = self.trajectories, self.condition
        return replace(
            self,
            prompts=[self.prompts[row] for row in rows],
            values=taken(self.values),
            decisions=replace(self.decisions, mask=taken(self.decisions.mask)),
            valid=taken(self.valid),
            parts={name: taken(table) for name, table in self.parts.items()},
            trajectories=ran and replace(ran, states=taken(ran.states), outputs=taken(ran.outputs)),
            log_probs=taken(self.log_probs),
            condition=condition and condition.take(index),
            features=taken(self.features),
        )

    def only(self, fields: Collection[str]) -> "Experience":
        """The record without those of the `LARGER` fields that `fields` does not contain."""
        return replace(self, **{name: None for name in LARGER if name not in fields})


@checked_options
@dataclass(frozen=True)
class Needs:
    """What a credit rule needs besides the value table and its decisions: its attribute `needs`.

    Args:
        fields: fields of the record (`Experience`) that `assign` reads. If there are any, it is
            called with the record as its third argument; of the `LARGER` fields, the record then
            has those named here.
        columns: a function from a mask of decisions [..., decision] to the mask of the columns
            [..., decision+1] of the table that their credit reads, both Boolean. The probe
            evaluates no others. None: all columns.
        shared_noise: whether the members of a group start from the same noise under the setting
            `credit`; None: as the method has it. A `Method` built in Python has its own.
        parts: the components of the reward that the rule's options name.

    Raises:
        ConfigError: `fields` has another name.
    """

    fields: tuple[
        Literal["prompts", "valid", "parts", "trajectories", "log_probs", "condition"], ...
    ] = ()
    columns: Callable[[Tensor], Tensor] | None = None
    shared_noise: bool | None = None
    parts: tuple[str, ...] = ()


NOTHING = Needs()


def needs_of(rule: object) -> Needs:
    """What a credit rule declares in its attribute `needs`; without it, nothing. Raises
    `ConfigError` if this is something else than a `Needs`.
    """
    needs = getattr(rule, "needs", NOTHING)
    allowed = "a flowrl.core.experience.Needs, such as Needs(shared_noise=True)"
    require(isinstance(needs, Needs), f"{type(rule).__name__}.needs", needs, allowed)
    return needs


@dataclass(frozen=True)
class Credit:
    """Advantages with weights, as a rule returns them.

    Args:
        advantages: [prompt, member, decision].
        weights: the rule's factor of each transition in the loss, in [0, 1] [prompt, member,
            decision]; None for 1. Only ratios matter, because the loss is a weighted mean. A factor
            for the policy term alone, without penalties, multiplies the advantages instead.
    """

    advantages: CreditTable
    weights: CreditTable | None = None


class Record:
    """An iteration as an observer sees it: `iteration`, and the fields that the observer declares
    (`FIELDS`).

    Tensors are in main memory and of all processes. Other fields raise `AttributeError`. For a test
    of an observer:
    ``observer.observe(Record(3, values=..., metrics={"reward_mean": 0.5}))``.

    Args:
        iteration: its number, from 1.
        **fields: fields by name.
    """

    iteration: int
    metrics: Mapping[str, Any]
    """The row of metrics.jsonl, with the evaluation if there was one."""
    history: Sequence[Mapping[str, Any]]
    """The earlier rows; the first is the untrained model's."""
    prompts: Sequence[Prompt]
    """One prompt per group."""
    values: ValueTable
    parts: Mapping[str, ValueTable]
    valid: Bool[Tensor, "prompt member"]
    decisions: Decisions
    advantages: CreditTable
    weights: CreditTable
    """Weight of each transition in the loss (`flowrl.rollout.transition_weights`)."""
    trajectories: Trajectories
    log_probs: CreditTable
    condition: Condition

    def __init__(self, iteration: int, **fields: Any) -> None:
        self.__dict__.update(fields, iteration=iteration)

    def __getattr__(self, name: str) -> Any:
        declared = tuple(field for field in vars(self) if field != "iteration")
        hint = f"; add {name!r}" if name in FIELDS else ""
        raise AttributeError(
            f"the record has no {name}: the observer declares fields = {declared}{hint}"
        )


FIELDS = tuple(name for name in Record.__annotations__ if name != "iteration")
"""The fields of a `Record`."""


@checked_options
@dataclass(frozen=True)
class Actions:
    """What an observer requests after an iteration.

    Args:
        stop: the reason to end the run now, as if this iteration were the last; empty to continue.
        keep: write a checkpoint of this iteration, and never delete it for newer ones.
        best: the iteration with the best weights so far, this or an earlier one: its checkpoint is
            kept until the observer names another. If the observer stops the run, the run's results
            are those of this checkpoint; else they are written to best/, next to those of the last
            iteration.
        warn: text of a warning.
        metrics: numbers for metrics.jsonl and the tracker, which are called OBSERVER/NAME there;
            null if not finite.
    """

    stop: str = ""
    keep: bool = False
    best: int | None = None
    warn: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)

"""Whether a run is alive: a few lines after its first iteration, which say what was trained, and
what makes a run useless without an error.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.core.protocols import extras
from flowrl.core.sharded import is_sharded
from flowrl.core.types import Prompt
from flowrl.policies.prompt_length import cut_prompts
from flowrl.run.config import RunConfig
from flowrl.trainer import Trainer

SHOWN = 2
"""Names and prompts that a line lists."""
FEW = 0.1
"""Share of tensors without a gradient up to which there is no warning: some layers of some models,
such as the text's queries in the last block of SD3, have no effect on the image.
"""
LONGEST = 60
"""Characters of a prompt in a line."""
MOST_PROMPTS = 2000
"""Prompts whose tokens are counted."""
HIDDEN = 0.5
"""Share of the starting weights in the last average above which there is a warning."""
USUAL = 0.05
"""This share with the `ema_decay` that the warning proposes."""


@dataclass(frozen=True)
class Line:
    """A line of the block.

    Args:
        subject: what it is about.
        text: what was found.
        advice: what to do; with it, the line is also a warning.
    """

    subject: str
    text: str
    advice: str = ""

    @property
    def warning(self) -> str:
        """The line as a warning; "" if it is none."""
        return f"{self.subject}: {self.text}{self.advice}" if self.advice else ""


@dataclass(frozen=True)
class Movement:
    """Squared norms of the trained tensors [tensor], in the order of their names, float64.

    Args:
        start: of the tensors before the iteration.
        live: of the changes by the iteration.
        average: of the changes of the averaged tensors; NaN if they were not equal before.
        gradient: of AdamW's running averages of the gradients; of the last gradients without them.
    """

    start: Tensor
    live: Tensor
    average: Tensor
    gradient: Tensor


class ReadMetadata(dict[str, Any]):
    """The metadata of a prompt, which adds the fields that are read to the set `read`; a reader of
    all entries has read every field.
    """

    read: set[str]

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dictionary."""
        self.read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.read.add(cast(str, name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        """As of a dictionary."""
        self.read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        """As of a dictionary."""
        self.read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        """As of a dictionary."""
        self.read.update(super().keys())
        return super().items()

    def __reduce__(self) -> Any:  # another process or a file reads all
        return dict, (dict(self.items()),)


class FirstIteration:
    """Observes one iteration of a trainer, from its construction on; the numbers stay the same.

    Keeps a copy of the trained weights in main memory: in the main process, or if weights are
    sharded of each process's part.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._read, processes = trainer, set[str](), trainer.processes
        self._prompts, self._start = trainer.prompts.prompts, list[Tensor]()
        if processes.is_main or processes.sharded:
            parameters = trainer.parameters.values()
            self._start = [_own(tensor).to("cpu", copy=True) for tensor in parameters]
        pairs = zip(trainer.parameters.values(), trainer.average, strict=True)
        self._equal = all(torch.equal(_own(first), _own(second)) for first, second in pairs)
        trainer.prompts.prompts = [self._recorded(prompt) for prompt in self._prompts]

    def _recorded(self, prompt: Prompt) -> Prompt:
        if type(prompt.metadata) is not dict or not prompt.metadata:
            return prompt
        metadata = ReadMetadata(prompt.metadata)
        metadata.read = self._read
        return replace(prompt, metadata=metadata)

    def ended(self, used: Sequence[Prompt]) -> tuple[Movement, list[str]]:
        """What the iteration has moved, in the main process, and the fields of the `used` prompts
        that nothing has read; none if the prompts were sent to other processes. All processes must
        call this.
        """
        trainer = self._trainer
        trainer.prompts.prompts = self._prompts
        found = [prompt.metadata for prompt in used]
        fields = {name for one in found if isinstance(one, ReadMetadata) for name in dict.keys(one)}
        read = set[str]().union(*trainer.processes.gather(self._read))
        return self._movement(), sorted(fields - read)

    @torch.no_grad()
    def _movement(self) -> Movement:
        trainer, rows = self._trainer, list[Tensor]()
        pairs = zip(trainer.parameters.values(), trainer.average, strict=True)
        for start, (parameter, average) in zip(self._start, pairs, strict=False):
            live, before = _own(parameter), start.to(parameter.device)
            # the last gradient alone is 0 if every ratio of the last step is clipped
            gradient = trainer.optimizer.state[parameter].get("exp_avg", parameter.grad)
            tensors = [before, live - before, _own(average).to(live.device) - before]
            tensors.append(live.new_zeros(1) if gradient is None else _own(gradient))
            rows.append(torch.stack([_square(tensor) for tensor in tensors]))
        table = torch.stack(rows).cpu() if rows else torch.zeros(len(trainer.parameters), 4)
        if trainer.processes.sharded:
            replicas = getattr(trainer.processes, "replicas", 1)
            table = torch.stack(trainer.processes.gather(table)).sum(0) / replicas
        if not self._equal:
            table[:, 2] = torch.nan
        return Movement(*table.unbind(1))


def _own(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return (cast(Any, tensor).to_local() if is_sharded(tensor) else tensor).detach()


def _square(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


def gradient_line(names: Sequence[str], moved: Movement, steps: int) -> Line:
    """Which trained tensors have had a gradient in one of `steps` optimizer steps. In the first
    step those have none that reach the image through weights of 0 only, as the matrix A of a LoRA
    through its B.
    """
    missing = [i for i in range(len(names)) if not moved.gradient[i] > 0]
    zeros = {names[i] for i in range(len(names)) if moved.start[i] == 0 and moved.gradient[i] > 0}
    others = {name for name in zeros if "lora_B" not in name}

    def follows(name: str) -> bool:
        return bool(others) if "lora_A" not in name else name.replace("lora_A", "lora_B") in zeros

    expected = [i for i in missing if steps == 1 and follows(names[i])]
    lost = [names[i] for i in missing if i not in expected]
    text = f"{len(names) - len(missing):,} of {len(names):,} trained tensors"
    if expected:
        text += f"; {len(expected):,} follow when the weights after them are not 0"
    if not lost:
        return Line("gradient", text)
    more = f" and {len(lost) - SHOWN:,} more" if len(lost) > SHOWN else ""
    advice = ". They do not train: look at lora_targets" if len(lost) > FEW * len(names) else ""
    if len(missing) == len(names):
        advice = ". Nothing trains: look at zero_spread_groups and abs_advantage in metrics.jsonl"
    return Line("gradient", f"{text}; none in {', '.join(lost[:SHOWN])}{more}", advice)


def update_line(moved: Movement) -> Line:
    """|theta_1 - theta_0|, the norm of the change over all trained tensors, and relative to
    |theta_0|.
    """
    change, size = float(moved.live.sum().sqrt()), float(moved.start.sum().sqrt())
    if not change > 0:
        advice = ": look at zero_spread_groups, abs_advantage and grad_norm in metrics.jsonl"
        return Line("update", "the weights have not changed", advice)
    relative = f", {change / size:.2g} of their norm" if size else ""
    return Line("update", f"the weights have moved by {change:.3g}{relative}")


def average_line(moved: Movement, decay: float, steps: int) -> Line | None:
    """How far the averaged weights follow; None without an average.

    The average of n optimizer steps with decay d is d^n theta_0 + (1 - d) sum_k d^(n-k) theta_k, so
    the starting weights theta_0 keep the share d^n in it. With n the `steps` of the whole run,
    there is a warning if the share is above `HIDDEN`: the evaluated and saved weights are then
    mostly those of the start. The decay that it proposes has the share `USUAL`.

    Args:
        moved: what the first iteration has moved.
        decay: d, `ema_decay`.
        steps: n.
    """
    if not decay:
        return None
    live, average = (float(part.sum().sqrt()) for part in (moved.live, moved.average))
    share = decay**steps
    text = f"keeps {100 * share:.2g}% of the start at the end (optimizer steps: {steps:,})"
    if live > 0 and math.isfinite(average):
        text = f"has followed {average / live:.1%} of the update; it {text}"
    proposed = int(100 * USUAL ** (1 / steps)) / 100
    advice = (
        ", so evaluations and saved weights hide most of the training: use ema_decay"
        f" {proposed:g} or less, or more iterations"
    )
    return Line("average", text, advice if share > HIDDEN else "")


def ratio_line(row: Mapping[str, Any], clip: float | None) -> Line | None:
    """The rounding of ratios relative to the clip; None for a loss without ratios."""
    noise = row.get("ratio_noise")
    if noise is None or not clip:
        return None
    return Line("ratio", f"its noise is {noise:.2g}, {noise / clip:.2g} of the clip of {clip:g}")


def groups_line(row: Mapping[str, Any]) -> Line:
    """The share of groups whose rewards are equal, so that they do not train."""
    share = row.get("zero_spread_groups", 0.0)
    text = f"{share:.0%} of the groups have equal rewards"
    return Line("rewards", text if share else "no group has equal rewards")


def token_lines(policy: Any, texts: Collection[str]) -> list[Line]:
    """A warning for each length of the text encoders that cuts some of the prompts `texts`, of
    which the first `MOST_PROMPTS` are tried; none for a policy without tokenizers.
    """
    if (known := extras(policy, "pipe", "family", "options")) is None:
        return []
    some, tokens = [*texts][:MOST_PROMPTS], known.options.max_sequence_length
    found = cut_prompts(known.pipe, known.family, some, tokens or known.family.text_tokens)
    advice = ". Their end has no effect: shorten them"
    return [Line("tokens", text, advice) for text in found]


def fields_line(unread: Sequence[str]) -> Line | None:
    """The fields of prompts that nothing has read; None if there are none."""
    if not unread:
        return None
    names = ", ".join(unread)
    return Line("prompts", f"nothing in this iteration has read the fields {names} of the prompts")


def heldout_line(trained: Sequence[Prompt], heldout: Sequence[Prompt], chosen: bool) -> Line:
    """How many held-out prompts are also trained on; a warning if `heldout_prompts` is `chosen`."""
    known, asked = ({prompt.key: prompt.text for prompt in some} for some in (trained, heldout))
    both, count = [text for key, text in asked.items() if key in known], len(asked)
    if not both:
        return Line("held out", f"none of the {count:,} prompts is also trained on")
    example = repr(both[0][:LONGEST])
    which = f"all {count:,}" if len(both) == count else f"{len(both):,} of {count:,}"
    text = f"{which} prompts are also trained on, such as {example}"
    advice = ", so the held-out reward is partly a training reward: choose others"
    return Line("held out", text, advice if chosen else "")


def alive_lines(
    trainer: Trainer,
    config: RunConfig,
    row: Mapping[str, Any],
    moved: Movement,
    unread: Sequence[str],
    heldout: Sequence[Prompt],
) -> list[Line]:
    """The lines after an iteration of `trainer`.

    Args:
        trainer: the trainer.
        config: the run.
        row: the metrics of the iteration.
        moved: what it has moved.
        unread: fields of prompts that it has not read.
        heldout: the prompts of evaluations.
    """
    updates, clip = trainer.updates, getattr(trainer.method.loss, "clip_range", None)
    texts, held = ([p.text for p in part] for part in (trainer.prompts.prompts, heldout))
    found = [
        gradient_line([*trainer.parameters], moved, updates.minibatches),
        update_line(moved),
        average_line(moved, updates.ema_decay, updates.minibatches * config.iterations),
        ratio_line(row, clip),
        groups_line(row),
        *token_lines(trainer.policy, dict.fromkeys([*held, *texts])),
        fields_line(unread),
        heldout_line(trainer.prompts.prompts, heldout, bool(config.environment.heldout_prompts)),
    ]
    return [line for line in found if line is not None]


def block(lines: Sequence[Line]) -> str:
    """The lines below each other; warnings are marked."""
    width = max(len(line.subject) for line in lines)
    rows = [
        f"{'!' if line.warning else ' '} {line.subject:<{width}}  {line.text}" for line in lines
    ]
    return "\n".join(["after the first iteration:", *rows])

"""Base and trained weights: images of the same prompts from the same noise, and score
differences with intervals.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import Count, checked_options
from flowrl.core.protocols import FlowPolicy, RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards import stills
from flowrl.rollout import EVALUATION_SEED, sample_images, score
from flowrl.run.images import references_of
from flowrl.run.io import write_bytes, write_json
from flowrl.run.records import finite
from flowrl.run.report.benchmarks import BenchmarkScore, ScoreTable, benchmark_score, score_tables
from flowrl.run.report.figures import NO_TARGETS, REFERENCE, Row, Targets, sample_figure
from flowrl.run.report.pages import render
from flowrl.run.report.style import png
from flowrl.run.results import decimals
from flowrl.run.statistics import mean

Rewards = Mapping[str, RewardModel]


@dataclass(frozen=True)
class ScoreDifference:
    """Means over prompts of a score before and after training, and of the difference with its 95%
    interval.

    Args:
        base: mean score with the base weights.
        trained: mean score with the trained weights.
        difference: `trained` - `base`.
        low: lower end of the interval; infinite for a single prompt.
        high: upper end of the interval; infinite for a single prompt.
        better: fraction of prompts that score higher with the trained weights.
        prompts: number of compared prompts.
        invalid: number of pairs left out because the reward marked an image invalid.
    """

    base: float
    trained: float
    difference: float
    low: float
    high: float
    better: float
    prompts: int
    invalid: int

    @property
    def digits(self) -> int:
        """Decimals that show the difference and its interval."""
        return decimals(self.difference, self.low, self.high, least=4)


@checked_options
@dataclass(frozen=True)
class SamplingSettings:
    """Settings of sampling for a comparison of weights.

    The noise of an image depends only on `seed`, the prompt's position in the list, `count` and the
    image's number.

    Args:
        steps: number of ODE steps.
        count: images per prompt.
        seed: seed of the noise.
        batch: latents per network call.
        shown: number of prompts of which images are kept.
    """

    steps: Count = 40
    count: Count = 1
    seed: int = EVALUATION_SEED
    batch: Count = 16
    shown: Count = 8


@dataclass(frozen=True)
class ScoredImages:
    """Scores and example images of one set of weights.

    Args:
        scores: scores [prompt, count] by reward.
        shown: the first prompts' first images [shown, 3, height, width]; for videos, `stills`.
    """

    scores: dict[str, Tensor]
    shown: Tensor


def sample_and_score(
    policy: FlowPolicy,
    prompts: Sequence[Prompt],
    rewards: Rewards,
    how: SamplingSettings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ScoredImages:
    """Sample images of all prompts and score each batch by all rewards; `progress` gets the
    finished and the total images.
    """
    require(len(prompts) >= 1, "prompts", len(prompts), "one or more")
    scores: dict[str, list[Tensor]] = {name: [] for name in rewards}
    shown: list[Tensor] = []
    repeated, done = [prompt for prompt in prompts for _ in range(how.count)], 0

    def noise() -> Iterator[Tensor]:
        for number in range(len(repeated)):  # a generator each: the batch size has no effect
            generator = torch.Generator().manual_seed(how.seed * 1_000_003 + number)
            yield torch.randn(policy.latent_shape, generator=generator)

    for batch in sample_images(policy, repeated, noise(), how.steps, max_batch=how.batch):
        for name, reward in rewards.items():
            scores[name].append(score(reward, batch.images, batch.prompts).total.cpu())
        # the first image of each prompt
        firsts = list(range(-done % how.count, len(batch.prompts), how.count))
        shown += stills(batch.images[firsts[: how.shown - len(shown)]]).cpu()
        done += len(batch.prompts)
        progress(done, len(repeated))
        del batch  # before the next one is sampled
    tables = {name: torch.cat(parts).view(-1, how.count) for name, parts in scores.items()}
    return ScoredImages(tables, torch.stack(shown))


def compare_scores(base: Tensor, trained: Tensor) -> ScoreDifference:
    """Paired comparison of scores [prompt, count]: images of one prompt are averaged, prompts are
    the independent units.

    The interval is Student's t for the mean of the prompts' differences. It covers other prompts of
    this kind, not other training seeds. Pairs with an invalid (NaN) score are left out. Raises
    `ConfigError` if no pair is left.
    """
    valid = base.isfinite() & trained.isfinite()
    kept = valid.any(1)
    require(bool(kept.any()), "scores", "NaN", "one or more pairs that the reward judges valid")
    before, after = (
        torch.where(valid, scores.double(), math.nan)[kept].nanmean(1) for scores in (base, trained)
    )
    difference = after - before
    estimate, better = mean(difference.tolist()), float((difference > 0).double().mean())
    return ScoreDifference(
        float(before.mean()),
        float(after.mean()),
        estimate.value,
        estimate.low,
        estimate.high,
        better,
        len(difference),
        int((~valid).sum()),
    )


@dataclass(frozen=True)
class Compared:
    """One set of weights against another.

    Args:
        weights: label of the trained weights.
        against: label of the weights that they are compared with.
        scores: differences by reward; their `base` is the mean of `against`.
    """

    weights: str
    against: str
    scores: dict[str, ScoreDifference]


@dataclass(frozen=True)
class WeightComparison:
    """A finished comparison of base and trained weights.

    Args:
        sides: images and scores by the label of the weights; the first one is "base".
        prompts: texts of the prompts.
        how: settings of sampling.
        facts: further facts about the weights.
        references: the reference images of the prompts of which images are shown; None without.
        tasks: of a benchmark, the task of each prompt, "" if it has none; None without a benchmark.
        sources: the source of each prompt; of several, differences are also those of each.
    """

    sides: dict[str, ScoredImages]
    prompts: tuple[str, ...]
    how: SamplingSettings
    facts: dict[str, Any]
    references: Tensor | None = None
    tasks: Sequence[str] | None = None
    sources: Sequence[str] = ()

    @cached_property
    def compared(self) -> list[Compared]:
        """All trained weights against the base, then the further ones against the first."""
        base, first, *others = self.sides
        pairs = [(name, base) for name in (first, *others)] + [(name, first) for name in others]
        return [
            Compared(name, against, self._differences(against, name)) for name, against in pairs
        ]

    @property
    def names(self) -> dict[str, str]:
        """Short names of the weights by label: without the folder that all share."""
        base, *others = self.sides
        folder = os.path.commonpath([os.path.dirname(name) for name in others])
        return {base: base} | {
            name: os.path.relpath(name, folder) if folder else name for name in others
        }

    @cached_property
    def benchmark(self) -> list[BenchmarkScore]:
        """The scores of a benchmark, those of the base first; none without a benchmark."""
        return [
            benchmark_score(name, reward, scores, self.tasks)
            for name, side in self.sides.items()
            for reward, scores in side.scores.items()
            if self.tasks is not None
        ]

    @property
    def benchmark_tables(self) -> list[ScoreTable]:
        """`benchmark` as in papers."""
        return score_tables(self.benchmark, self.names)

    def _differences(self, before: str, after: str) -> dict[str, ScoreDifference]:
        tables = self.sides[before].scores, self.sides[after].scores
        pairs = {name: (tables[0][name], tables[1][name]) for name in tables[0]}
        every, sources = dict(pairs), sorted({*self.sources})
        for source in sources if len(sources) > 1 else ():
            rows = [one == source for one in self.sources]
            for name, pair in pairs.items():
                label = source if len(pairs) == 1 else f"{source}: {name}"
                every[label] = (pair[0][rows], pair[1][rows])
        return {name: compare_scores(*pair) for name, pair in every.items()}

    @property
    def scores(self) -> dict[str, ScoreDifference]:
        """The first trained weights against the base, by reward."""
        return self.compared[0].scores

    def values(self) -> dict[str, Any]:
        """Plain values for JSON: `facts`, settings, the `scores`, and of several trained weights
        all that is `compared`.
        """
        settings = {"prompts": len(self.prompts), **asdict(self.how)}
        values = {**self.facts, **settings, "scores": asdict(self.compared[0])["scores"]}
        if len(self.compared) > 1:
            values["compared"] = [asdict(pair) for pair in self.compared]
        if self.benchmark:
            values["benchmark_scores"] = [asdict(one) for one in self.benchmark]
        return finite(values)


BASE = "base"
"""The label of the weights before training."""


def compare_weights(
    policy: FlowPolicy,
    weights: Mapping[str, AbstractContextManager[None]],
    prompts: Sequence[Prompt],
    rewards: Rewards,
    how: SamplingSettings,
    facts: dict[str, Any],
    progress: Callable[[str, int, int], None] = lambda weights, done, total: None,
    tasks: Sequence[str] | None = None,
) -> WeightComparison:
    """Sample and score with the weights of `policy`, and again with each of the trained ones.

    Args:
        policy: the policy with the base weights.
        weights: contexts in which `policy` has trained weights, by label
            (`flowrl.run.trained.with_weights`).
        prompts: the prompts.
        rewards: reward models by name.
        how: settings of sampling, the same for all weights.
        facts: facts about the weights, stored in the result.
        progress: called with (label, done, total).
        tasks: of a benchmark, the task of each prompt (`benchmarks.tasks_of`).

    Returns:
        Scores and images of all weights.
    """
    sides: dict[str, ScoredImages] = {}
    for name, context in {BASE: nullcontext(), **weights}.items():
        with context:
            sides[name] = sample_and_score(policy, prompts, rewards, how, partial(progress, name))
    shown = sides[BASE].shown
    references = references_of(prompts[: len(shown)], (shown.shape[-2], shown.shape[-1]))
    texts = tuple(prompt.text for prompt in prompts)
    sources = tuple(prompt.source for prompt in prompts)
    return WeightComparison(sides, texts, how, facts, references, tasks, sources)


def sample_grid(comparison: WeightComparison, targets: Targets) -> Figure:
    """The first prompts' images from all weights with their scores; `targets`: see
    `sample_figure`.
    """
    prompts = comparison.prompts[: len(comparison.sides[BASE].shown)]
    rows = []
    if comparison.references is not None:
        rows.append(Row(REFERENCE, comparison.references, [""] * len(prompts), prompts))
    for name, side in comparison.sides.items():
        label = name.rpartition("/")[2] if len(comparison.sides) > 2 or name == BASE else "trained"
        scores = torch.stack([table[: len(prompts), 0] for table in side.scores.values()], 1)
        captions = [", ".join(f"{score:.3g}" for score in image) for image in scores.tolist()]
        rows.append(Row(label, side.shown, captions, prompts))
    return sample_figure(rows, prompts, targets)


def write_evaluation(
    comparison: WeightComparison, folder: Path, html: bool, targets: Targets = NO_TARGETS
) -> None:
    """Write evaluation.json and grid.png, and report.html with the scores, the images and the
    prompts with the largest changes. A report.html of an earlier evaluation is removed.

    Args:
        comparison: the comparison of weights.
        folder: the folder for the files.
        html: write report.html.
        targets: points that the prompts of a 2-D world ask for.
    """
    image = png(sample_grid(comparison, targets), dpi=120)
    (folder / "report.html").unlink(missing_ok=True)
    write_bytes(folder / "grid.png", image)
    write_json(folder / "evaluation.json", comparison.values())
    if html:
        values = {"found": comparison, "image": image, "changes": largest_changes(comparison)}
        write_bytes(folder / "report.html", render("evaluation.html.j2", **values).encode())


def largest_changes(comparison: WeightComparison, count: int = 5) -> list[tuple[str, str]]:
    """The prompts with the largest gains and losses of the first trained weights by the first
    reward.

    Args:
        comparison: the comparison of weights.
        count: number of prompts with gains, and with losses.

    Returns:
        Pairs (prompt, formatted change).
    """
    name, (base, trained, *_) = next(iter(comparison.scores)), comparison.sides.values()
    base, trained = (side.scores[name].nanmean(1) for side in (base, trained))
    change = (trained - base).nan_to_num(0.0)
    order = change.argsort(descending=True).tolist()
    chosen = dict.fromkeys([*order[:count], *order[-count:]])
    digits = decimals(*(float(change[i]) for i in chosen), least=4)
    return [(comparison.prompts[i], f"{float(change[i]):+.{digits}f}") for i in chosen]

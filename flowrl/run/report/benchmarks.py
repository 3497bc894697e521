"""Published benchmarks: their prompts and rewards, and their tables of scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from flowrl.core.errors import ConfigError, require
from flowrl.core.prompt import Prompt
from flowrl.rewards.geneval_requests import TAGS
from flowrl.run.parts.settings import unknown
from flowrl.run.results import decimals, short
from flowrl.run.statistics import mean_of_means


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark is measured.

    Args:
        published: the prompts that its authors published.
        rewards: the rewards.
        count: images per prompt.
        prompts: the part of a generator's list that replaces the published prompts; "": none does.
        tasks: the tasks, which the prompts name in their metadata "tag". The score is then the mean
            of the tasks' means; without tasks it is the mean over prompts.
    """

    published: str
    rewards: tuple[str, ...]
    count: int = 1
    prompts: str = ""
    tasks: tuple[str, ...] = ()


BENCHMARKS = {
    "geneval": Benchmark(
        "GenEval's evaluation_metadata.jsonl, 553 prompts",
        ("geneval",),
        4,
        "compositional[0:64]",
        TAGS,
    ),
    "ocr": Benchmark(
        "Flow-GRPO's dataset/ocr/test.txt, 1,018 prompts", ("ocr(form=released)",), 1, "text[0:64]"
    ),
    "drawbench": Benchmark(
        "DrawBench, 200 prompts, as text or a table", ("aesthetic", "image-reward", "pickscore")
    ),
}
"""Benchmarks by name. GenEval (arXiv 2310.11513): tasks, images per prompt and the overall score as
in its evaluation/summary_scores.py. OCR accuracy and the scores on DrawBench (arXiv 2205.11487):
tables of Flow-GRPO (arXiv 2505.05470), without its DeQA and UnifiedReward. The generated prompts
are those that the presets' tasks hold out.
"""


def benchmark(name: str, prompts: str) -> Benchmark:
    """A benchmark by name. Raises `ConfigError` for an unknown name, or without `prompts` if it
    needs a file of them.
    """
    if name not in BENCHMARKS:
        raise ConfigError(unknown(name, BENCHMARKS, "benchmark"))
    chosen = BENCHMARKS[name]
    file = f"a file with {chosen.published} (docs/guides/rewards.md, Prompts)"
    require(bool(prompts or chosen.prompts), "prompts", prompts, file)
    return chosen


def prompts_note(name: str, prompts: str) -> str:
    """Where the prompts of the benchmark `name` are from, and what that means for its scores."""
    chosen = BENCHMARKS[name]
    if prompts != chosen.prompts:
        return prompts
    other = f"published scores are on other ones ({chosen.published}) and cannot be compared"
    return f"{prompts}, generated prompts; {other}"


def tasks_of(name: str, prompts: Sequence[Prompt]) -> list[str] | None:
    """The task of each prompt of the benchmark `name`, "" if it has no tasks; None without a name.
    Raises `ConfigError` for a prompt of no task, or if a task has no prompt.
    """
    if not name:
        return None
    chosen = BENCHMARKS[name]
    if not chosen.tasks:
        return [""] * len(prompts)
    found = [prompt.metadata.get("tag", "") for prompt in prompts]
    for prompt, tag in zip(prompts, found, strict=True):
        known = f"one of {', '.join(chosen.tasks)}"
        require(tag in chosen.tasks, f"tag of the prompt {prompt.text!r:.60}", tag, known)
    lacking = [task for task in chosen.tasks if task not in found]
    need = f"one or more of every task; of {', '.join(lacking)} there is none"
    require(not lacking, "prompts", f"{len(prompts)} prompts", need)
    return found


@dataclass(frozen=True)
class BenchmarkScore:
    """The score of one set of weights by one reward, with its 95% interval over prompts.

    Args:
        weights: label of the weights.
        reward: spec of the reward.
        tasks: mean score by task.
        score: mean over tasks, or over prompts.
        low: lower end of the interval; infinite for a task with a single prompt.
        high: upper end of the interval.
    """

    weights: str
    reward: str
    tasks: dict[str, float]
    score: float
    low: float
    high: float


def benchmark_score(
    weights: str, reward: str, scores: Tensor, tasks: Sequence[str]
) -> BenchmarkScore:
    """The score of images [prompt, count] whose prompts are of these `tasks`, without images that
    the reward marked invalid (NaN). Raises `ConfigError` if no image of a task is left.
    """
    means = scores.double().nanmean(1)
    valid = means.isfinite().tolist()
    values: dict[str, list[float]] = {task: [] for task in tasks}
    for task, value, kept in zip(tasks, means.tolist(), valid, strict=True):
        values[task] += [value] * kept
    empty = [task for task, some in values.items() if not some]
    need = f"one or more images of every task ({', '.join(empty)}) that {short(reward)} can judge"
    require(not empty, "scores", "NaN", need)
    overall = mean_of_means(list(values.values()))
    by_task = {task: sum(some) / len(some) for task, some in values.items() if task}
    return BenchmarkScore(weights, reward, by_task, overall.value, overall.low, overall.high)


@dataclass(frozen=True)
class ScoreTable:
    """A table of scores as text: the `title`, the `header`, and a row per weights."""

    title: str
    header: list[str]
    rows: list[list[str]]


def score_tables(found: Sequence[BenchmarkScore], names: Mapping[str, str]) -> list[ScoreTable]:
    """The scores as in papers, a row per weights: with tasks a table per reward, a column per task
    and the overall score; without them one table with a column per reward.

    Args:
        found: the scores, those of the base first.
        names: the weights' names in the table, by their labels.
    """
    rewards = [*dict.fromkeys(one.reward for one in found)]
    tasks = [task for one in found[:1] for task in one.tasks]
    tables = list[ScoreTable]()
    for specs in [[spec] for spec in rewards] if tasks else [rewards]:
        header, rows = ["weights"], {label: [name] for label, name in names.items()}
        for spec in specs:
            scores = [one for one in found if one.reward == spec]
            digits = decimals(*(one.score - scores[0].score for one in scores))
            header += [*(task.replace("_", " ") for task in tasks)]
            header.append("overall [95%]" if tasks else f"{short(spec)} [95%]")
            for one in scores:
                rows[one.weights] += [f"{one.tasks[task]:.{digits}f}" for task in tasks]
                rows[one.weights].append(_with_interval(one, digits))
        tables.append(ScoreTable(short(specs[0]) if tasks else "", header, [*rows.values()]))
    return tables


def _with_interval(one: BenchmarkScore, digits: int) -> str:
    known = math.isfinite(one.low)
    interval = f"{one.low:.{digits}f}, {one.high:.{digits}f}" if known else "one prompt"
    return f"{one.score:.{digits}f} [{interval}]"

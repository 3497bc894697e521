"""`flowrl bench claims`, `flowrl bench rule` and `flowrl bench microscope`."""

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from flowrl.errors import require


@dataclass(frozen=True)
class Claims:
    """Test the papers' claims: make the runs that are missing in the results file, judge, and write the page.

    Example: flowrl bench claims --quick --workers 2
    """

    quick: bool = False
    """The 2-D world with three seeds and some of the open questions (others by --only): runs of the full suite, in the same
    file."""
    world: str = "all"
    """mixture (two dimensions), shapes (images, headline claims only) or all."""
    only: tuple[str, ...] = ()
    """Claims by id; default all."""
    out: Path = Path("runs/claims/claims.jsonl")
    """The results file: one line per run. Runs that it holds are not made again."""
    page: Path | None = None
    """Folder of the page claims.md, claims.html and their figures; default beside the results."""
    workers: int = 0
    """Runs at a time; 0 = one per core. Every run uses one thread, so the numbers do not depend on this."""
    minutes: float = math.inf
    """Start no more runs after so many minutes; the next call goes on."""
    judge: bool = False
    """Make no runs: judge what the file holds (also if older code made it) and write the page."""
    look: bool = False
    """With --judge: what the claims about samplers lack (FILE-samples.json) is measured by today's code; a run that then ends
    otherwise than its line says is refused."""
    redo: str = ""
    """Make the run with this id again from its line in `out` (that of a rule of your own, too), compare every number but seconds,
    and stop."""
    list: bool = False
    """Print the claims and their rules, and stop."""

    def main(self) -> int:
        """Run, judge, write."""
        from flowrl_bench.catalogue import CLAIMS
        from flowrl_bench.claims import QUICK_SEEDS, SEEDS
        from flowrl_bench.claims_page import claims_page
        from flowrl_bench.costs import kept_memory
        from flowrl_bench.records import Ledger
        from flowrl_bench.runner import Suite, needed, quick
        from flowrl_bench.samples import Samples, joined, wanted
        from flowrl_bench.tables import judge_all

        require(self.world in ("all", "mixture", "shapes"), "world", self.world, "mixture, shapes or all")
        for name in self.only:
            require(name in CLAIMS, "only", name, f"one of {', '.join(CLAIMS)}")
        offered = CLAIMS if self.only or not self.quick else quick(CLAIMS)
        chosen = {key: claim for key, claim in offered.items() if not self.only or key in self.only}
        if self.list:
            print("\n".join(f"{c.id}: {c.says} ({c.rule.words()})" for c in chosen.values()))
            return 0
        ledger = Ledger(self.out)
        if self.redo:
            return _redo(self.redo, ledger)
        seeds = {"mixture": QUICK_SEEDS, "shapes": ()} if self.quick else SEEDS
        runs = needed(chosen, "mixture" if self.quick else self.world, seeds)
        suite = Suite(runs, ledger, needed(CLAIMS, "all", SEEDS))
        finished = self.judge or _execute(suite, self.workers, self.minutes)
        lines = ledger.read(suite.allowed, any_code=self.judge)
        memory = kept_memory(
            self.out.with_name(f"{self.out.stem}-memory.json"),
            measure=finished and not (self.quick or self.only or self.judge),
            code=next(iter(lines.values()))["code"] if lines else "",
        )
        samples = Samples(self.out.with_name(f"{self.out.stem}-samples.json"))
        if finished and (self.look or not self.judge):
            looked = wanted(chosen, seeds)
            samples.complete({key: looked[key] for key in looked.keys() & lines.keys()}, self.workers, _counter("samples"))
        lines = joined(lines, samples.read())
        judged = judge_all(CLAIMS, lines)
        written = claims_page(judged, lines, self.out, memory).write(self.page or self.out.parent, "claims", "claims")
        for one in judged:
            if one.claim.id in chosen:
                print(f"{one.claim.id} ({one.world}, {one.seeds} seeds): {one.label}")
        print(f"Wrote {', '.join(map(str, written))}")
        return 0 if finished else 130


@dataclass(frozen=True)
class Rule:
    """Put a credit rule of your own through claims, microscope and cost, and write a page that ranks it.

    Example: flowrl bench rule my_rules.py:MyRule
    """

    rule: tyro.conf.Positional[str]
    """path/to/file.py:Class, NAME or NAME(option=value)."""
    seeds: int = 5
    """Seeds of every run."""
    out: Path | None = None
    """Folder for the results and the page; default runs/rule-NAME."""
    workers: int = 0
    """Runs at a time; 0 = one per core."""
    minutes: float = math.inf
    """Start no more runs after so many minutes; the next call goes on."""

    def main(self) -> int:
        """Run, judge, rank, write."""
        from flowrl_bench.rule import bench_rule

        require(self.seeds >= 2, "seeds", self.seeds, "2 or more: an interval needs a spread")
        finished = bench_rule(
            self.rule,
            self.seeds,
            self.out,
            lambda suite: _execute(suite, self.workers, self.minutes),
            _counter("microscope"),
            self.workers,
        )
        return 0 if finished else 130


@dataclass(frozen=True)
class Microscope:
    """How close is each rule's credit to the true advantage of the step? Two-dimensional world, under two minutes on 2 cores.

    Example: flowrl bench microscope --rules my_rules.py:MyRule
    """

    rules: tuple[str, ...] = ()
    """Rules to add to the built-in ones: path/to/file.py:Class, NAME or NAME(option=value)."""
    iterations: tuple[int, ...] = (0, 10, 40)
    """Stages of training by Flow-GRPO at which to look."""
    noise: tuple[float, ...] = (0.1, 0.3)
    """Standard deviations of the noise on the rewards that the rules see, tried at the middle stage (0 always is)."""
    reward_form: str = "soft"
    """strict (0/1), graded or soft (continuous); only the last has a gradient to compare with."""
    continuations: int = 96
    """Stochastic continuations per node that estimate the true value."""
    looks: int = 1
    """Groups per prompt."""
    batches: int = 20
    """Policy gradients per rule, 3 or more."""
    seed: int = 0
    out: Path = Path("runs/microscope")
    """The results file, NAME.json; or a folder, for microscope.json."""
    page: Path | None = None
    """Folder of the page microscope.md, microscope.html and their figures; default beside the results."""
    workers: int = 0
    """Processes; 0 = one per core. The numbers do not depend on it."""

    def main(self) -> int:
        """Look, draw, write."""
        from flowrl.io import write_json
        from flowrl_bench.inspection import RULES, MicroscopeConfig, inspect
        from flowrl_bench.microscope_page import microscope_document
        from flowrl_bench.records import code_hash, provenance
        from flowrl_bench.rule_names import named_rules

        stages = tuple(sorted(set(self.iterations)))
        require(len(stages) >= 1, "iterations", self.iterations, "one or more stages")
        config = MicroscopeConfig(
            run=MicroscopeConfig().run.replace(reward_form=self.reward_form),
            rules={**RULES, **named_rules(self.rules, RULES)},
            iterations=stages,
            noises=tuple(dict.fromkeys((0.0, *self.noise))),
            noise_at=stages[len(stages) // 2],
            continuations=self.continuations,
            looks=self.looks,
            batches=self.batches,
            seed=self.seed,
        )
        started, before = time.monotonic(), sum(os.times()[:4])
        rows = inspect(config, self.workers, _counter("microscope"))
        seconds, computing = time.monotonic() - started, sum(os.times()[:4]) - before
        command = shlex.join(["flowrl", *sys.argv[1:]])
        made = {"command": command, "code": code_hash(), **provenance(), "seed": self.seed, "seeds": config.seeds()}
        made |= {"seconds": seconds, "cpu_seconds": computing}
        results = self.out if self.out.suffix == ".json" else self.out / "microscope.json"
        write_json(results, {**made, "config": config.as_dict(), "rows": rows})
        page = microscope_document(rows, config.noise_at, made)
        written = [results, *page.write(self.page or results.parent, "microscope", "microscope")]
        print(f"{seconds:.0f} s; wrote {', '.join(map(str, written))}")
        return 0


@dataclass(frozen=True)
class Bench:
    """Benchmarks: the papers' claims tested, a rule of your own ranked, and a microscope for credit."""

    which: tyro.conf.OmitSubcommandPrefixes[Claims | Rule | Microscope]

    def main(self) -> int:
        """Run the chosen one."""
        return self.which.main()


def _redo(key: str, ledger: Any) -> int:
    from flowrl_bench.runner import redo

    found = redo(key, ledger)
    if found.same:
        print(f"{key}: the same to the last digit")
        return 0
    print(f"{key}: differs in {len(found.differing)} numbers (first: {found.differing[0]}), by at most {found.largest:.3g}")
    return 1


def _execute(suite: Any, workers: int, minutes: float) -> bool:
    """Run a suite with one line of progress per run, and say how to go on where it was paused."""
    from flowrl_bench.runner import processes
    from flowrl_bench.time_left import Pace, words

    lines = suite.ledger.read(suite.allowed)
    done = suite.runs.keys() & lines.keys()
    pace = Pace(suite.runs, processes(workers, max(1, len(suite.runs) - len(done))))
    for key in done:
        pace.finished(lines[key], now=False)
    ahead = f"about {words(pace.left(0.0))}; " if len(done) < len(suite.runs) else ""
    print(
        f"{len(suite.runs) - len(done)} of {len(suite.runs)} runs to make in {suite.ledger.path}; {ahead}Ctrl-C pauses",
        flush=True,
    )
    started = time.monotonic()

    def progress(finished: int, total: int, line: Mapping[str, Any]) -> None:
        pace.finished(line)
        run, left = line["config"], words(pace.left(time.monotonic() - started))
        print(f"{finished}/{total} {run['world']} {run['method']} seed {run['seed']}; about {left} left", flush=True)

    finished = suite.execute(workers, progress, minutes)
    if not finished:
        print(f"Paused; nothing that had finished is lost. Go on with: {shlex.join(['flowrl', *sys.argv[1:]])}")
    return finished


def _counter(what: str) -> Callable[[int, int], None]:
    def count(done: int, total: int) -> None:
        if sys.stdout.isatty():
            print(f"\r{what}: {done}/{total} jobs", end="\n" if done == total else "", flush=True)
        elif done == total or done % 10 == 0:
            print(f"{what}: {done}/{total} jobs", flush=True)

    return count

"""Kill `flowrl train` and `flowrl compare` again and again, resume them, and compare with
uninterrupted runs.

    python benchmarks/kills.py [--kills 100] [--seed 0] [--minutes 30] [--out FILE]

The real commands run in sessions of their own. A signal goes to the command alone or to its whole
process group, as from a terminal. It is timed to hit a phase (an evaluation, writing a checkpoint,
writing results, drawing the report) or any moment between start and end. After each kill the exit
code must be a documented one, every process gone, every lock free, nothing written without the
lock, and every checkpoint and run complete. Then the work is resumed and killed again; in the end
its weights and metrics must be those of the undisturbed run, bit for bit. Needs Linux. Writes a
table and a JSON file next to it; exit code 1 if anything failed.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from kills_subject import DAMAGE, PHASES, SIGNALS, Kill, Killed, Subject, numbers, runs_of

TEXT = """# Kills

{kills} kills of the real commands; {unfinished} left a temporary file behind, and {failed} had a problem: an orphan, a lock that
stayed, a write without the lock, a damaged file, an exit code that is not documented, or other numbers.

After the last kill of a run, {damaged} folders were damaged: a link to the undisturbed run's checkpoints or files, or a pipe in
place of the settings, metrics or weights. Each must be refused by name within two minutes, with no file changed anywhere.

`torchrun` is `flowrl train` on two processes with gloo, with 3 prompts on one and 2 on the other; signals go to the launcher,
whose exit code is its own, or to all three (group); SIGKILL to the process goes to one of the two.

Exit code 130 is a pause, 0 a command that was completed before it saw the signal, -N death by signal N (SIGHUP 1, SIGINT 2,
SIGKILL 9, SIGTERM 15). The slowest end is from the signal to the end of the last process. The last column counts kills whose
run ended with the weights and metrics of the undisturbed one, bit for bit.

Command: `python benchmarks/kills.py --kills {planned} --seed {seed}`.

{table}
"""


def planned(kills: int, seed: int) -> dict[str, list[Kill]]:
    """A fifth of the kills for compare, a tenth for train on two processes, and the rest for train;
    phases alternate within a run, each signal goes to each target equally often.
    """
    plan, fifth, tenth = {}, kills // 5, kills // 10
    counts = {"torchrun": tenth, "compare": fifth, "train": kills - tenth - fifth}
    for command, count in counts.items():
        pairs = [(name, target) for name in SIGNALS for target in ("process", "group")]
        random.Random(f"{seed} {command}").shuffle(pairs)
        # The pair shifts by one after each round of phases, so that every phase meets every signal
        # and target.
        plan[command] = [
            Kill(command, PHASES[command][number % 4], *pairs[(number + number // 8) % 8])
            for number in range(count)
        ]
    return plan


def tried(
    kills: dict[str, list[Kill]], folder: Path, seed: int, per_run: int = 4, minutes: float = 30.0
) -> list[Killed]:
    """Kill as planned, `per_run` times before a run may end: two trainings at a time, or one
    comparison or training on two processes.
    """
    deadline, outcomes = time.monotonic() + 60 * minutes, list[Killed]()
    for command, pending in kills.items():
        if not pending:
            continue
        reference, start, count = (
            Subject(command, folder / f"{command}-whole", random.Random(seed)),
            time.monotonic(),
            0,
        )
        if problems := reference.completed():
            raise RuntimeError(f"{command} fails undisturbed: {problems}")
        seconds = time.monotonic() - start
        with ThreadPoolExecutor(2 if command == "train" else 1) as pool:
            while pending and time.monotonic() < deadline:
                futures, batches = (
                    [],
                    [pending[first : first + per_run] for first in range(0, len(pending), per_run)],
                )
                for number, batch in enumerate(batches, count):
                    draw = random.Random(f"{seed} {command} {number}")
                    subject = Subject(command, folder / f"{command}-{number}", draw, seconds)
                    futures.append(pool.submit(killed, subject, reference, batch, deadline))
                results = [future.result() for future in futures]
                outcomes += [result for batch in results for result in batch]
                count += len(batches)
                # A command that ended before its phase gives no kill: it is tried in a new run.
                pending = [
                    kill
                    for batch, done in zip(batches, results, strict=True)
                    for kill in missed(batch, done)
                ]
    return outcomes


def missed(batch: list[Kill], done: list[Killed]) -> list[Kill]:
    """The kills of `batch` that are not `done`."""
    return [kill for kill in batch if all(result.kill != kill for result in done)]


def killed(
    subject: Subject, reference: Subject, batch: list[Kill], deadline: float
) -> list[Killed]:
    """Kill `subject` as in `batch`, resume it to its end, and compare it with `reference`; nothing
    after the `deadline`.
    """
    if time.monotonic() > deadline:
        return []
    results = [result for kill in batch if (result := subject.kill(kill))]
    problems, damage = list[str](), DAMAGE[subject.draw.randrange(len(DAMAGE))]
    if results and any(
        (run / "config.json").exists() for run in runs_of(subject.command, subject.out)
    ):
        problems += subject.refuses(*damage, reference.out)
        results[-1].damage = " ".join(damage)
    problems += subject.completed()
    resumed_runs, reference_runs = (
        runs_of(each.command, each.out) for each in (subject, reference)
    )
    same = not problems and len(resumed_runs) == len(reference_runs)
    for resumed, undisturbed in zip(resumed_runs, reference_runs, strict=False):
        same = (
            same
            and (resumed.name == undisturbed.name or subject.command != "compare")
            and numbers(resumed) == numbers(undisturbed)
        )
    for result in results:
        result.resumed_the_same = same
    if results:
        results[-1].problems += problems
    print(
        f"{subject.out.name}: {len(results)} kills,"
        f" {'the same' if same else f'DIFFERENT {problems}'}",
        flush=True,
    )
    return results


def table(outcomes: list[Killed]) -> list[str]:
    """A row per command, signal and target, and a row per command and phase."""
    rows = [
        "| command | signal or phase | sent to | kills | exit codes | with problems | slowest end"
        " (s) | the same |"
    ]
    rows.append("| --- | --- | --- | ---: | --- | ---: | ---: | ---: |")
    for key in ("signal", "phase"):
        groups = defaultdict[tuple[str, ...], list[Killed]](list)
        for result in outcomes:
            kill = result.kill
            columns = (kill.signal, kill.target) if key == "signal" else (kill.phase, "either")
            groups[kill.command, *columns].append(result)
        for names, results in sorted(groups.items()):
            codes = ", ".join(
                f"{code}: {n}"
                for code, n in Counter(result.code for result in results).most_common()
            )
            wrong, slowest = (
                sum(bool(result.problems) for result in results),
                max(result.seconds for result in results),
            )
            same = sum(result.resumed_the_same for result in results)
            rows.append(
                f"| {' | '.join(names)} | {len(results)} | {codes} | {wrong} | {slowest:.1f} |"
                f" {same} |"
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="no run is started later than this"
    )
    parser.add_argument(
        "--only", nargs="*", choices=PHASES, help="kill these only, and keep the others' results"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kills.md")
    options = parser.parse_args()
    # children inherit ignored signals
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    plan, path = planned(options.kills, options.seed), options.out.with_suffix(".json")
    chosen = {name: kills for name, kills in plan.items() if name in (options.only or plan)}
    previous = json.loads(path.read_text()) if chosen.keys() != plan.keys() else []
    previous = [Killed(**{**row, "kill": Kill(**row["kill"])}) for row in previous]
    with tempfile.TemporaryDirectory(prefix="flowrl-kills-") as folder:
        outcomes = [result for result in previous if result.kill.command not in chosen]
        outcomes += tried(
            chosen,
            Path(folder),
            options.seed,
            minutes=options.minutes,
        )
    failed = [result for result in outcomes if result.problems or not result.resumed_the_same]
    counts = {
        "kills": len(outcomes),
        "unfinished": sum(result.unfinished > 0 for result in outcomes),
        "failed": len(failed),
        "damaged": sum(bool(result.damage) for result in outcomes),
    }
    rows = "\n".join(table(outcomes))
    options.out.write_text(
        TEXT.format(**counts, planned=options.kills, seed=options.seed, table=rows)
    )
    path.write_text(json.dumps([asdict(result) for result in outcomes], indent=1) + "\n")
    print(rows, *(json.dumps(asdict(result)) for result in failed), sep="\n")
    return int(bool(failed) or not outcomes)


if __name__ == "__main__":
    sys.exit(main())

"""A run that takes a tenth of a second, and what must not depend on what happens to it."""

import json

from flowrl.training.config import preset

SMALL = preset("tiny").apply(
    world="mixture",
    groups=2,
    group_size=2,
    num_steps=3,
    eval_samples=2,
    eval_steps=1,
    iterations=2,
    checkpoint_every=1,
    minibatches=2,
)


def numbers(folder):
    """What must not depend on interruptions."""
    rows = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = {
            k: v
            for k, v in json.loads(line).items()
            if k not in ("seconds", "seconds_total", "phases")
        }
        if row["evaluation"]:
            row["evaluation"].pop("seconds")
        rows.append(row)
    files = (
        "weights.safetensors",
        "samples.safetensors",
        "samples.json",
        "trajectory.json",
        "trajectory.safetensors",
    )
    return json.dumps(rows), *((folder / name).read_bytes() for name in files)


def words(**options):
    """Options of a command as words: a list repeats its option, True is a flag."""
    found = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            found += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    return found

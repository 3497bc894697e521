"""What a result is bound to: the code's digest, the golden run, the settings, and the user's own
files.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_lines import SMALL, small_run
from flowrl_bench.digest import (
    PACKAGES,
    config_id,
    definitions,
    golden_run,
    imported,
    same_golden,
)
from flowrl_bench.results_file import ResultsFile

from flowrl.methods import METHODS

MINE = "from flowrl.credit import Uniform\n\n\nclass Mine(Uniform):\n    pass\n"
CODE = '''"""A module."""

import math

from flowrl.core.types import Prompt
from flowrl.core.errors import require as check

__all__ = ["Shape", "area"]
LIMIT = 3
"""The most."""


class Shape:
    """A shape."""

    size: float = 1.0
    """In metres."""

    def area(self) -> float:
        """Squared."""
        from flowrl.text import short

        check(self.size < LIMIT, "size", self.size, "less")
        return math.pi * self.size**2  # of a circle


def area(prompt: Prompt) -> float:
    return Shape().area()
'''


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def digest_of(*sources: str) -> frozenset[str]:
    return frozenset().union(*map(definitions, sources))


class TestDefinitions:
    """The digest is a set of top-level definitions, so two modules can be compared with one."""

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ('"""A module."""', '"""Another text."""'),
            ('        """Squared."""\n', ""),
            ('"""The most."""\n', ""),
            ("  # of a circle", ""),
            ("    return Shape().area()", "    return (\n        Shape().area()\n    )"),
            ("from flowrl.core.types import Prompt", "from flowrl.other.place import Prompt"),
            ("from flowrl.text import short", "from flowrl.words import short"),
            ('__all__ = ["Shape", "area"]\n', ""),
        ],
    )
    def test_docstrings_comments_formatting_and_module_names_do_not_count(
        self, before: str, after: str
    ) -> None:
        assert before in CODE
        assert definitions(CODE.replace(before, after)) == definitions(CODE)

    def test_a_definition_may_move_to_another_module(self) -> None:
        head, body = CODE.rsplit("def area(", 1)
        moved = (
            "from flowrl.other import Shape\nfrom flowrl.core.types import Prompt\n\n\ndef area("
            + body
        )
        assert digest_of(head, moved) == digest_of(moved, head) == definitions(CODE)

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("LIMIT = 3", "LIMIT = 4"),
            ("self.size**2", "self.size**3"),
            ("size: float = 1.0", "size: float = 2.0"),
            ("size: float", "size: int"),
            ("import math", "import cmath as math"),
            ("require as check", "warn as check"),
            ('"less"', '"fewer"'),
            ("class Shape:", "@final\nclass Shape:"),
            ("def area(prompt: Prompt)", "def area(prompt: Prompt, scale=1)"),
        ],
    )
    def test_code_counts(self, before: str, after: str) -> None:
        assert before in CODE
        assert definitions(CODE.replace(before, after)) != definitions(CODE)


EXECUTED = """
import json, sys
from flowrl_bench.claims import make_run
from flowrl.methods import METHODS
from flowrl_bench.digest import PACKAGES
from flowrl_bench.results_file import ResultsFile
from flowrl_bench.measurements import measure

seen, importing = set(), 0
roots = tuple(map(str, PACKAGES.values()))

def watch(frame, event, argument):
    global importing
    code = frame.f_code
    if code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib"):
        importing += (event == "call") - (event == "return")
    elif event == "call" and not importing and code.co_filename.startswith(roots):
        seen.add(code.co_filename)

small = json.loads(sys.argv[1])
runs = [
    make_run("mixture", "direction", 0, small),
    make_run("mixture", "direction", 0, {**small, "method": "tp-grpo", "reward_noise": 0.1, "window": "random(size=2)"}),
    make_run("mixture", "direction", 0, {**small, "credit": "flowrl_bench.negative_controls:FreshNoiseFault", "sampler": "cps"}),
    *(make_run("shapes", task, 0, {**small, "method": "stepwise-flow-grpo"}) for task in ("compositional", "text", "preference")),
]
sys.setprofile(watch)
for config in runs:
    assert measure(config) is not None
sys.setprofile(None)
print(json.dumps(sorted(seen)))
"""


@pytest.mark.slow
def test_every_file_that_a_run_executes_is_in_the_digest() -> None:
    """One tiny run of each world and task under the interpreter's own profiler."""
    found = subprocess.run(
        [sys.executable, "-c", EXECUTED, json.dumps(SMALL)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]
    executed = {Path(name) for name in json.loads(found.stdout.splitlines()[-1])}
    assert {"trainer.py", "mixture.py", "measurements.py", "negative_controls.py"} <= {
        path.name for path in executed
    }
    assert len(executed) > 40
    assert (
        executed - {PACKAGES["flowrl_bench"] / name for name in ("arms.py", "claims.py")}
        <= imported()
    )


def test_golden_runs_agree_up_to_rounding() -> None:
    numbers = golden_run()
    assert len(numbers) == 3 * len(METHODS) and same_golden(numbers, numbers)
    assert same_golden(numbers, [value + 5e-5 for value in numbers])
    assert not same_golden(numbers, [*numbers[:-1], numbers[-1] + 1e-2])
    assert not same_golden(numbers, numbers[:-1])


class TestIds:
    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.syspath_prepend(str(tmp_path))
        path = tmp_path / f"mine_{tmp_path.name}.py"
        path.write_text(MINE)
        yield path
        sys.modules.pop(path.stem, None)

    @pytest.mark.parametrize(
        "spec",
        [
            "{path}:Mine",
            "{stem}:Mine",
            "flowrl_bench.negative_controls:FreshNoiseFault(rule='{path}:Mine')",
            "flowrl_bench.negative_controls:FreshNoiseFault(rule='{stem}:Mine')",
        ],
    )
    def test_files_of_rules_are_part_of_the_id(self, module: Path, spec: str) -> None:
        config = small_run(credit=spec.format(path=module, stem=module.stem))
        before = config_id(config)
        module.write_text(MINE + "\n    # another rule\n")
        after = config_id(config)
        assert before != after
        module.write_text(MINE)
        assert config_id(config) == before

    @pytest.mark.parametrize(
        ("name", "text", "count"),
        [
            ("claims-default-settings", "FreshNoiseFault", 10),
            ("claims-default-settings", '"seed": 0', 20),
            ("claims", '"tempflow-grpo"', 15),
        ],
    )
    def test_published_runs_keep_their_ids(self, name: str, text: str, count: int) -> None:
        """Built-in parts add nothing to an id, nor does a part of the project that is in the code's
        digest; a method whose credit has changed since is read with its earlier credit.
        """
        results = ResultsFile(RESULTS / f"{name}.jsonl")
        lines = [line for line in results.unchecked() if text in json.dumps(line)]
        assert len(lines) >= count
        assert all(config_id(results.settings(line)) == line["id"] for line in lines)

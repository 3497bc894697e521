"""What a result is bound to: the golden run, the settings, and the user's own files."""

import sys

import pytest
from bench_lines import small_run
from flowrl_bench.digest import config_id, golden_run, same_golden

from flowrl.methods import METHODS

MINE = "from flowrl.credit import Uniform\n\n\nclass Mine(Uniform):\n    pass\n"


def test_golden_runs_agree_up_to_rounding():
    numbers = golden_run()
    assert len(numbers) == 3 * len(METHODS) and same_golden(numbers, numbers)
    assert same_golden(numbers, [value + 5e-5 for value in numbers])
    assert not same_golden(numbers, [*numbers[:-1], numbers[-1] + 1e-2])
    assert same_golden(numbers, numbers[:-3])  # from before the last method was added
    assert not same_golden(numbers, numbers[:-1])


@pytest.fixture
def module(tmp_path, monkeypatch):
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
        "weighted(weights=noise, rule='{path}:Mine')",
        "weighted(weights=noise, rule='{stem}:Mine')",
    ],
)
def test_files_of_rules_are_part_of_the_id(module, spec):
    config = small_run(credit=spec.format(path=module, stem=module.stem))
    before = config_id(config)
    module.write_text(MINE + "\n    # another rule\n")
    after = config_id(config)
    assert before != after
    module.write_text(MINE)
    assert config_id(config) == before

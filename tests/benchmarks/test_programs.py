"""The programs of benchmarks/: the names that they import, the numbers on the pages about papers,
golden runs, and translated clips and KL weights.
"""

import math
from pathlib import Path

import documented
import golden
import pytest
import torch
from loading import import_names
from safetensors.torch import save_file
from seeded import seeded
from small_run import write_rows
from translation import (
    WAN_ELEMENTS,
    exact_clip,
    exact_kl_weight,
    flux_grid,
    qwen_grid,
    sd3_grid,
    steps_of,
)

from flowrl.methods import METHODS
from flowrl.run.config import preset
from flowrl.samplers import CPS, FlowSDE

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
OURS = ("flowrl", *(path.stem for path in PROGRAMS.glob("*.py")))


@pytest.mark.parametrize("script", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.name)
def test_a_program_imports_names_that_exist(script):
    import_names(script.read_text(), *OURS)


# The numbers on the pages about papers


def test_every_method_with_a_page_has_a_command_and_a_result():
    methods = documented.papers()
    assert set(methods.values()) == set(METHODS) - {"noise-weighted", "value-grpo"}
    for page, method in methods.items():
        assert page.stem == method
        assert len(documented.SENTENCE.findall(page.read_text())) == 1, page


def test_pages_state_the_settings_of_their_commands():
    comments = documented.settings()
    for page, method in documented.papers().items():
        assert documented.SETTINGS.findall(page.read_text()) == [comments[method]], page


# Golden runs: the comparison finds every difference, and no other

RANDOM = seeded().get_state()
ROWS = [
    {"iteration": 0, "loss": 0.5, "seconds": 1.0},
    {"iteration": 1, "loss": math.nan, "evaluation": {"reward": 0.25}},
]
TENSORS = {"weight.a": torch.tensor([1.0, 2.0, math.nan]), "generator": RANDOM}


@pytest.fixture
def compared(tmp_path):
    """The verdict on the usual content and on content with changes."""

    def write(name, rows=ROWS, tensors=TENSORS, file="weights"):
        folder = tmp_path / name
        folder.mkdir()
        write_rows(folder, rows)
        save_file(tensors, folder / f"{file}.safetensors")
        (folder / "finished").touch()
        return folder

    return lambda **changes: golden.verdict(write("old"), write("new", **changes))


def weight(*values, **options):
    return {"tensors": {**TENSORS, "weight.a": torch.tensor(values, **options)}}


CLOCK = {"seconds": 9.0, "phases": {"rollout": 3.0}, "warnings": [{"text": "Slow"}]}
KEY = "weights.safetensors:weight.a"


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({}, []),
        ({"rows": [{**ROWS[0], **CLOCK}, ROWS[1]]}, []),
        ({"rows": [{**ROWS[0], "loss": 0.5 + 2**-53}, ROWS[1]]}, ["metrics.jsonl:0/loss: 0.5 ->"]),
        (weight(1.0, 2.5, math.nan), [f"{KEY}: 1 of 3 elements, by at most 5.0e-01"]),
        (weight(1.0, math.nan, 3.0), [f"{KEY}: 2 of 3 elements"]),
        (weight(1.0, 2.0, math.nan, dtype=torch.float64), [f"{KEY}: torch.float32 (3,) ->"]),
        (weight(1.0, 2.0), [f"{KEY}: torch.float32 (3,) -> torch.float32 (2,)"]),
        ({"rows": ROWS[:1]}, ["metrics.jsonl:1/"] * 3),
        ({"rows": [*ROWS, {"new": 1}]}, ["metrics.jsonl:2/new: only in the working tree"]),
        ({"file": "other"}, ["weights.safetensors"] * 2 + ["other.safetensors"] * 2),
    ],
)
def test_every_difference_is_found_and_no_other(compared, changes, differing):
    word, differences = compared(**changes)
    assert word == ("DIFFERENT" if differing else "equal, 7 values")
    assert len(differences) == len(differing)
    for text, start in zip(sorted(differences), sorted(differing), strict=True):
        assert text.startswith(start)


def test_a_failed_run_or_nothing_to_compare_is_no_success(tmp_path):
    assert golden.verdict(tmp_path, tmp_path)[0] == "FAILED"
    (tmp_path / "finished").touch()
    assert golden.verdict(tmp_path, tmp_path)[0] == "FAILED"


def test_every_method_runs_in_both_worlds():
    assert {
        f"{world}-{name}" for world in ("mixture", "shapes") for name in METHODS
    } <= golden.CASES.keys()


# Translated clips and KL weights

FLOW = steps_of(FlowSDE(0.7), sd3_grid())
GRIDS = sd3_grid(), flux_grid(), sd3_grid(20), qwen_grid()
CPS_SD3, CPS_FLUX, CPS_WAN, CPS_QWEN = (steps_of(CPS(0.7), grid) for grid in GRIDS)
FLOW_KL = {
    published: exact_kl_weight(FLOW, published, range(9), range(9), released=True)
    for published in (0.04, 0.01)
}


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        *[
            (f"sd3.5-medium,{method},{task}", "kl_weight", FLOW_KL[published])
            for task, published in (("ocr", 0.04), ("geneval", 0.04), ("pickscore", 0.01))
            for method in ("flow-grpo", "stepwise-flow-grpo")
        ],
        *[
            (f"{model},tp-grpo,ocr", "kl_weight", exact_kl_weight(steps, 1e-4, *ranges, False))
            for model, steps, ranges in (
                ("sd3.5-medium", CPS_SD3, (range(9), range(8))),
                ("qwen-image", CPS_QWEN, (range(9), range(8))),
                ("wan2.1-t2v-1.3b", CPS_WAN, (range(19), range(18))),
            )
        ],
        ("flux.1-dev,tp-grpo,ocr", "kl_weight", 1e-4),
        ("sd3.5-medium,tp-grpo,ocr", "clip_range", exact_clip(CPS_SD3, 1e-5, range(8))),
        ("flux.1-dev,tp-grpo,ocr", "clip_range", exact_clip(CPS_FLUX, 1e-5, range(5))),
        ("qwen-image,tp-grpo,ocr", "clip_range", exact_clip(CPS_QWEN, 1e-5, range(8))),
        (
            "wan2.1-t2v-1.3b,tp-grpo,ocr",
            "clip_range",
            exact_clip(CPS_WAN, 1e-5, range(18), elements=WAN_ELEMENTS),
        ),
    ],
)
def test_the_preset_has_these_numbers(name, setting, expected):
    """To two digits, as the script prints them."""
    assert preset(f"{name},exact").changes[setting] == float(f"{expected:.2g}")

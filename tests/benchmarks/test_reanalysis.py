"""The published comparison agrees with an analysis that shares no code with it, and its inputs are
what the pages say.
"""

import gzip
import json
import math
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reanalysis
from reanalysis_page import Row
from reanalysis_robustness import cheaper, sign_flip
from reanalysis_statistics import Run, bonett_price, holm, log_ratio, read_lines, t_test
from scipy import stats

RESULTS = reanalysis.ROOT / "benchmarks/results"
DOCS = reanalysis.ROOT / "docs"


def differing(results: Path, docs: Path = DOCS) -> list[Row]:
    return [row for row in reanalysis.all_rows(results, docs) if not row.agrees]


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    for name in ("claims.jsonl", "claims-default-settings.jsonl"):
        (tmp_path / name).write_bytes(gzip.decompress((RESULTS / f"{name}.gz").read_bytes()))
    return tmp_path / "claims.jsonl"


def test_the_published_pages_agree_with_the_second_analysis() -> None:
    rows = reanalysis.all_rows(RESULTS / "claims.jsonl", DOCS)
    assert [row for row in rows if not row.agrees] == []
    places = {row.place for row in rows}
    assert {
        "lead-turning-points",
        "random-points",
        "stepwise-updates",
        "main comparison, 2-D world",
        "default settings",
    } <= places


def test_a_changed_learning_curve_is_found(copies: Path) -> None:
    lines = [json.loads(line) for line in copies.read_text().splitlines()]
    changed = next(
        line for line in lines if line["config"]["algorithm"]["credit"] == "moving-average-gain"
    )
    changed["curve"][5][7] -= 0.3
    copies.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = differing(copies)
    assert found
    assert all(
        "moving average" in row.what
        for row in found
        if row.place.startswith(("main comparison", "spread"))
    )
    assert any(
        row.place == "lead-gains-over-a-moving-average" and "over training" in row.what
        for row in found
    )


def test_a_changed_number_of_the_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    shutil.copy(DOCS / "claims.md", tmp_path)
    details = (DOCS / "claims/details.md").read_text()
    number = re.search(
        r"\| stepwise gains minus uniform: mean reward over training \| ([-+]\d\.\d{3})", details
    )
    assert number
    edited = (
        f"{details[: number.start(1)]}{float(number[1]) + 0.001:+.3f}{details[number.end(1) :]}"
    )
    (tmp_path / "claims/details.md").write_text(edited)
    assert [row.what for row in differing(RESULTS / "claims.jsonl", tmp_path)] == [
        "stepwise gains minus uniform: mean reward over training"
    ]


def test_statistics_against_closed_forms() -> None:
    # 4 x 0.01, 3 x 0.03, at least that, 0.5
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    values = np.array([0.1, 0.3, 0.2, 0.6])
    known = stats.ttest_1samp(values, 0.2)
    found = t_test(values, 0.2)
    assert found.p == pytest.approx(known.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval()))
    first, second = np.zeros(15, bool), np.arange(15) < 3
    rates = bonett_price(first, second)  # (1 - 4) / 17, standard error sqrt((5/17 - 9/289) / 17)
    assert rates.mean == pytest.approx(-0.2)
    assert (rates.low + rates.high) / 2 == pytest.approx(-3 / 17)
    assert rates.high - rates.low == pytest.approx(
        2 * 1.959964 * math.sqrt((5 / 17 - 9 / 289) / 17)
    )


def test_an_arm_that_needs_twice_the_budget_has_the_ratio_two() -> None:
    def run(budget: float) -> Run:
        curve = np.zeros((21, 10))
        curve[:, 0] = budget * np.arange(21)
        curve[:, 7] = np.linspace(0.2, 0.9, 21)
        return Run("mixture", (0, "direction"), {}, curve)

    assert log_ratio(run(2.0), run(1.0), "updates") == pytest.approx(math.log(2))


def test_robustness() -> None:
    assert sign_flip(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)  # all signs equal
    assert sign_flip(np.array([1.0, -1.0])) == pytest.approx(1.0)
    curve = np.zeros((2, 10))
    curve[1, :3] = 1, 45.0 * 24, 5.0 * 24
    run = Run("mixture", (0, "direction"), {"iterations": 1, "groups": 2, "group_size": 12}, curve)
    assert cheaper(run).budgets("NFE")[-1] == pytest.approx((45 - 16 + 5) * 24)


def lines_of(name: str) -> list[dict[str, Any]]:
    return read_lines(RESULTS / name)


def test_no_result_has_a_seed_of_the_search() -> None:
    used = {
        line["seed"]
        for line in lines_of("claims.jsonl") + lines_of("claims-default-settings.jsonl")
    }
    assert not used & {line["seed"] for line in lines_of("tuning.jsonl")}


def test_all_arms_of_a_seed_ran_on_one_kind_of_processor() -> None:
    kinds = defaultdict(set)
    for line in lines_of("claims.jsonl"):
        kinds[line["config"]["environment"]["world"], line["seed"]].add(line["hardware"])
    assert {seed: found for seed, found in kinds.items() if len(found) > 1} == {}


def test_network_evaluations_follow_from_the_settings() -> None:
    """Per trajectory of 10 steps, 5 of them stochastic; the first evaluation of an estimate is the
    sampler's own.
    """
    checked = 0
    for line in lines_of("claims.jsonl"):
        config, totals = line["config"], line["totals"]
        algorithm, members = config["algorithm"], config["rollout"]["group_size"]
        if (
            config["environment"]["world"] != "mixture"
            or config["rollout"]["num_steps"] != 10
            or algorithm["window"] != "0:5"
        ):
            continue
        nodes = 9 + 1 / members  # the first node is shared
        sampled = {
            "flow-grpo": 10,
            "noise-weighted": 10,
            "random": 10,
            "stepwise-flow-grpo": nodes + 4 * nodes,  # 5 substeps from every node
            "moving-average-gain": nodes + 4 * nodes,
            "stepwise-gain(probe=tweedie)": nodes,
            "tp-grpo": 10 + 9 + 8 + 7 + 6 + 5,  # the ODE from the node before every stochastic step
            "dense-grpo": 10 + 9 + 8 + 7 + 6 + 5,
            "turning-point-variant(where=random)": 10 + 9 + 8 + 7 + 6 + 5,
            "turning-point-variant(where='none')": 10 + 9 + 8 + 7 + 6 + 5,
        }.get(algorithm["credit"] or algorithm["method"])
        if sampled is None or algorithm["initial_noise"] != "auto":
            continue
        trajectories = config["iterations"] * config["rollout"]["groups"] * members
        trained = trajectories * 5 * (2 if algorithm["kl_weight"] else 1)
        assert totals["trajectories"] == trajectories
        assert totals["nfe"] == pytest.approx(sampled * trajectories)
        soft = (
            config["environment"]["reward_form"] == "soft"
        )  # steps with advantage 0 are not trained: many with rewards of 0 and 1
        assert 0.6 * soft * trained <= totals["train_nfe"] <= trained
        assert [line["curve"][-1][column] for column in (1, 2)] == [
            totals["nfe"],
            totals["train_nfe"],
        ]
        checked += 1
    assert checked > 150

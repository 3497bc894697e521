"""The catalogue: rules use arms that exist, arms are different runs, and runs are shared between
claims.
"""

import pytest
from bench_lines import arms_of
from flowrl_bench.arms import ARMS, TASKS
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.claims import SEEDS
from flowrl_bench.digest import config_id
from flowrl_bench.leads import LEADS, UNIFORM

from flowrl.training.build import make_method


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_rules_speak_of_arms_that_exist(claim):
    assert arms_of(claim.rule) <= set(claim.arms)
    assert claim.asks or claim.id == "self-test" or "arXiv" in claim.source
    for world in claim.worlds:
        for _, _, _, config in claim.configs(world, (0,)):
            make_method(config)


def test_arms_of_a_claim_are_different_runs():
    for claim in CLAIMS.values():
        hashes = [config_id(config) for _, _, _, config in claim.configs("mixture", (0,))]
        assert len(set(hashes)) == len(hashes), claim.id


def test_the_main_comparison_has_every_arm_in_each_of_its_worlds():
    assert len(LEADS) == len(ARMS) - 1
    for claim, arm in zip(
        LEADS, (arm for name, arm in ARMS.items() if name != UNIFORM), strict=True
    ):
        assert {UNIFORM, arm.name} <= set(claim.arms) and set(claim.worlds) == set(arm.worlds)


def test_seeds_are_those_that_no_search_has_used():
    assert set(SEEDS) == set(TASKS) and min(min(seeds) for seeds in SEEDS.values()) >= 100

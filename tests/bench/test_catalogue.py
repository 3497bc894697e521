"""The catalogue: rules use arms that exist, arms are different runs, and each question has one
answer.
"""

import pytest
from flowrl_bench.arms import ARMS, TASKS
from flowrl_bench.calibration import FAMILY
from flowrl_bench.catalogue import CLAIMS, PRIMARY
from flowrl_bench.claims import SEEDS, SELF_TEST, make_run
from flowrl_bench.digest import config_id
from flowrl_bench.leads import LARGER, LEADS, UNIFORM
from flowrl_compare.comparison import planned_cost

from flowrl.training.build import make_method
from flowrl.training.plan import plan


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_rules_speak_of_arms_that_exist(claim):
    assert {arm for rule in claim.rules for arm in rule.arms} <= set(claim.arms)
    assert claim.asks or claim.source == SELF_TEST or "arXiv" in claim.source
    assert claim.asks != bool(claim.expects)
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


@pytest.mark.parametrize("world", PRIMARY)
def test_updates_of_larger_groups_cost_as_much_as_those_of_turning_points(world):
    runs = [
        make_run(world, TASKS[world][0], 0, {"arm": name}) for name in (LARGER, "turning points")
    ]
    larger, points = (planned_cost(plan(run), run) for run in runs)
    assert larger / points == pytest.approx(1, abs=0.5 / runs[0].rollout.group_size)


def test_seeds_are_those_that_no_search_has_used():
    assert set(SEEDS) == set(TASKS) and min(min(seeds) for seeds in SEEDS.values()) >= 100


@pytest.mark.parametrize("world", PRIMARY)
def test_primary_families_are_small_and_ask_each_pair_once(world):
    """At most 20 outcomes, the number of the calibration; a pair of arms has one primary
    measure per budget, and no question repeats another with the arms exchanged.
    """
    chosen = [CLAIMS[key] for key in PRIMARY[world]]
    assert all(world in claim.worlds for claim in chosen)
    outcomes = {claim.outcome(world, claim.primary) for claim in chosen}
    assert len(outcomes) <= FAMILY
    assert len({(outcome[1], frozenset(outcome[2:])) for outcome in outcomes}) == len(outcomes)

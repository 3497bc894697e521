"""The catalogue: rules use arms that exist, arms are different runs, and published runs keep their ids."""

import json
from pathlib import Path

import pytest
from bench_lines import arms_of
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.claims import SEEDS, Claim
from flowrl_bench.digest import config_id
from flowrl_bench.post_hoc import CAVEATS, POST_HOC
from flowrl_bench.suite import needed

from flowrl.training.build import make_method


class TestCatalogue:
    @pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
    def test_rules_speak_of_arms_that_exist(self, claim: Claim) -> None:
        assert arms_of(claim.rule) <= set(claim.arms)
        assert claim.asks or claim.id == "self-test" or "arXiv" in claim.source
        for world in claim.worlds:
            for _, _, _, config in claim.configs(world, (0,)):
                make_method(config)

    def test_arms_of_a_claim_are_different_runs(self) -> None:
        for claim in CLAIMS.values():
            hashes = [config_id(config) for _, _, _, config in claim.configs("mixture", (0,))]
            assert len(set(hashes)) == len(hashes), claim.id

    def test_shared_runs_are_made_once(self) -> None:
        two = {key: CLAIMS[key] for key in ("stepwise-updates", "stepwise-cost")}
        assert len(needed(two, "mixture", {"mixture": (0, 1), "shapes": ()})) == 4
        assert len(needed(two, "all", {"mixture": (0,), "shapes": (0,)})) == 2 + 2 * 3

    def test_the_published_file_has_exactly_the_runs_that_the_claims_need(self) -> None:
        with open(Path(__file__).parents[2] / "benchmarks" / "results" / "claims.jsonl") as file:
            found = [json.loads(text)["id"] for text in file]
        assert len(found) == len(set(found)) and set(found) == set(needed(CLAIMS, "all", SEEDS))


class TestPostHoc:
    def test_they_need_no_runs_of_their_own(self) -> None:
        seeds = {"mixture": (0, 1), "shapes": (0,)}
        for world in seeds:
            assert set(needed(POST_HOC, world, seeds)) <= set(needed(CLAIMS, world, seeds))

    def test_names(self) -> None:
        assert not set(POST_HOC) & set(CLAIMS)
        assert set(CAVEATS) <= set(CLAIMS)
        assert all(claim.asks for claim in POST_HOC.values())

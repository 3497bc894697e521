"""What the first comparison of a user says, against the same comparison with more seeds."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from flowrl_compare.statistics import mean

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "first-comparison.json"


@pytest.mark.parametrize("world", ["mixture", "shapes"])
def test_no_decided_lead_of_three_seeds_is_reversed_by_all(world):
    """A lead is decided if its 95% interval excludes 0."""
    runs = json.loads(RESULTS.read_text())[world]["final"]
    for first, second in combinations(runs, 2):
        seeds = sorted(runs[first].keys() & runs[second].keys(), key=int)
        differences = np.array([runs[second][seed] - runs[first][seed] for seed in seeds])
        few, overall = mean(differences[:3]), mean(differences)
        decided = all(lead.low > 0 or lead.high < 0 for lead in (few, overall))
        assert not decided or few.value * overall.value > 0, (first, second, differences)

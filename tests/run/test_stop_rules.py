"""Rules that stop a run (hacking, plateau), the best weights next to the last, and exit codes."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import error_of, flowrl_, model_files, rows_of, words

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.experience import Record
from flowrl.run.checkpoint import LORA_FILE, load_tensors, load_weights
from flowrl.run.monitors import Limits, hacking, sacrificed
from flowrl.run.saved import find_weights
from flowrl.run.statistics import evaluation_noise, flat, hacked
from flowrl.run.stop_rules import (
    EXIT_CODES,
    STOPPED,
    KeepBest,
    StopOnHacking,
    StopOnPlateau,
    exit_code,
)

RISING = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
FALLING = [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]


def evaluated(trained, heldout, spread=1.0, **others):
    """Rows with these evaluations."""
    return [
        {
            "iteration": i,
            "evaluation": {
                "reward": a,
                "proxy": a,
                "heldout": {"held": b},
                "spread": {"reward": spread, "proxy": spread, "held": spread},
            }
            | {name: values[i] for name, values in others.items()},
        }
        for i, (a, b) in enumerate(zip(trained, heldout, strict=True))
    ]


def actions(rule, rows):
    *history, last = rows
    return rule.observe(Record(last["iteration"], metrics=last, history=history))


@pytest.mark.parametrize(
    ("trained", "heldout", "found"),
    [
        (RISING, FALLING, True),
        (RISING, [0, 3, 2, 1, 0, -1], True),  # first it rose
        (RISING, RISING, False),
        (FALLING, FALLING, False),  # a collapse
        (RISING, [0, -1, -2, -3, -0.1, -4], False),  # not in three evaluations in a row
        (RISING[:3], FALLING[:3], False),  # too few
        ([0, 0.1, 0.2, 0.25, 0.25, 0.25], FALLING, False),  # by chance
        (RISING, [0, -0.1, -0.2, -0.2, -0.2, -0.25], False),  # by chance
    ],
)
def test_hacking_is_a_fall_of_a_heldout_reward_at_a_rise_of_the_trained_one(
    trained, heldout, found
):
    rows = evaluated(trained, heldout)  # noise: 0.31 with 192 samples and a spread of 1
    assert evaluation_noise(1.0, 192) == pytest.approx(0.306, abs=1e-3)
    text = hacking(rows, Limits(samples=192))
    assert bool(text) == found
    assert ("held-out held fell from" in text) == found
    stop = actions(StopOnHacking(heldout=("held",)), rows).stop
    assert bool(stop) == found and (not found or stop in text)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=8),
    st.floats(0.01, 100),
    st.floats(-100, 100),
    st.integers(1, 3),
)
def test_units_do_not_matter(points, scale, shift, evaluations):
    trained, held = ([round(p[i], 2) for p in points] for i in (0, 1))
    noise = [0.505] * len(points)

    def found(a, b, c, d):
        first, second = [c * x + d for x in trained], [a * x + b for x in held]
        noises = [c * x for x in noise], [a * x for x in noise]
        return hacked(first, second, *noises, evaluations=evaluations)

    assert found(1, 0, 1, 0) == found(scale, shift, 1, 0) == found(1, 0, scale, shift)


def test_errors_of_the_reward_are_hacking_too():
    """The reward without its bias falls while the biased one rises."""
    rows = evaluated(FALLING, [0.0] * 6)
    for row, value in zip(rows, RISING, strict=True):
        row["evaluation"]["proxy"] = value
        del row["evaluation"]["heldout"]
    assert sacrificed(rows, 192).startswith("the reward without its errors fell from 0.")
    assert not sacrificed(evaluated(RISING, RISING), 192)
    old = [{"iteration": 0, "evaluation": {"reward": 0.1}}]  # of an earlier version
    assert not sacrificed(old, 192) and not sacrificed([], 192)


def test_a_failed_measurement_is_left_out():
    rows = evaluated([*RISING, 6.0], [*FALLING[:4], None, *FALLING[4:]])
    assert sacrificed(rows, 192)


@pytest.mark.parametrize(
    ("rewards", "stops"),
    [
        ([0, 1, 2, 3, 3, 3, 3], True),
        ([0, 1, 2, 3, 3.05, 3, 3], True),  # by less than 2% of the gain
        ([0, 1, 2, 3, 3.07, 3, 3], False),
        ([0, 1, 2, 3, 3, 3], False),  # two evaluations
        ([0, -1, -2, -3], True),  # never above the start
        ([0, 1], False),
    ],
)
def test_a_plateau_is_no_gain_for_several_evaluations(rewards, stops):
    assert flat(rewards, 3, 0.02) == stops
    found = actions(StopOnPlateau(evaluations=3), evaluated(rewards, rewards))
    assert bool(found.stop) == stops
    assert found.best == max(range(1, len(rewards)), key=rewards.__getitem__)


def test_the_best_is_that_of_the_chosen_score():
    rows = evaluated([0, 1, 2, 3], [0, 5, 4, 3], strict=[9, 0, 2, 1])
    scores = ("reward", "strict", "held")
    best = {name: actions(KeepBest(name, scores), rows).best for name in scores}
    assert best == {"reward": 3, "strict": 2, "held": 1}  # the untrained model has no checkpoint
    with pytest.raises(
        ConfigError, match=r"score = 'other' .* allowed: one of reward, strict, held"
    ):
        KeepBest("other", scores)
    with pytest.raises(ConfigError, match=r"with heldout_rewards, or as .*\(images=true\)"):
        StopOnHacking()


def test_exit_codes_name_the_rule():
    assert exit_code("") == 0 and exit_code("budget: 3 seconds") == EXIT_CODES["budget"]
    assert exit_code("stop-on-hacking#2: text") == EXIT_CODES["stop-on-hacking"]
    assert exit_code("MyRule: text") == STOPPED
    assert len({*EXIT_CODES.values(), STOPPED, 0, 1, 2, 130}) == len(EXIT_CODES) + 5


OPTIONS = "--preset tiny --world mixture --eval-every 1 --eval-samples 32 --checkpoint-every 1"


def test_the_best_weights_are_next_to_the_last(tmp_path, capsys):
    """In files of their own, through a resume, and gone when the last ones are the best."""
    out = tmp_path / "run"
    rates = "--learning-rate 0.05 --keep-best strict"  # it falls at once
    assert flowrl_(f"train {OPTIONS} {rates} --iterations 3 --out {out}") == 0
    rewards = {r["iteration"]: r["evaluation"]["strict"] for r in rows_of(out)[1:]}
    best = max(rewards, key=rewards.__getitem__)
    assert best != 3 and json.loads((out / "done.json").read_text())["best"] == best
    assert f"best has the weights of iteration {best}" in capsys.readouterr().out

    def equal(weights, iteration):
        kept = load_tensors(out / "checkpoints" / f"{iteration:06d}.safetensors", "average.")
        found = load_weights(weights)
        assert found.keys() == kept.keys()
        return all(torch.equal(kept[name], tensor) for name, tensor in found.items())

    assert equal(out / "best" / "weights.safetensors", best)
    assert equal(out / "weights.safetensors", 3)
    assert find_weights(f"{out}@best").checkpoint == f"{best:06d}"
    assert flowrl_(f"train --resume {out} --iterations 4") == 0
    assert equal(out / "best" / "weights.safetensors", best)
    assert flowrl_(f"train --resume {out} --iterations 6 --stop-on budget(nfe=1)") == 13
    assert f"{out}/best has the weights" in capsys.readouterr().out
    options = f"{OPTIONS} --keep-best reward --iterations 1"
    assert flowrl_(f"train {options} --out {tmp_path / 'last'}") == 0
    assert not (tmp_path / "last" / "best").exists()


def test_stop_on_is_short_for_observers(tmp_path, capsys):
    out, rules = tmp_path / "run", "--stop-on collapse(drop=0.4) budget(nfe=1) --keep-best reward"
    assert flowrl_(f"train {OPTIONS} --iterations 2 {rules} --out {out}") == 13
    written = json.loads((out / "config.json").read_text())["logging"]["observe"]
    short = ["stop-on-collapse(drop=0.4)", "budget(nfe=1)", "keep-best(score='reward')"]
    assert written == short
    text = error_of(f"train {OPTIONS} --stop-on overfitting --out {tmp_path}/no", capsys)
    assert "stop_on = 'overfitting'" in text and "collapse, hacking, plateau, budget" in text
    more = "--from last --iterations 3 --stop-on budget(nfe=100000)"
    assert flowrl_(f"train --resume {out} {more}") == 0  # in place of the other budget
    assert len(rows_of(out)) == 4


@pytest.mark.slow
def test_a_biased_reward_is_found(tmp_path):
    """The reward counts brightness; the density of points under the true distribution falls."""
    out = tmp_path / "run"
    options = "--world mixture --reward-bias 3 --heldout-rewards density --eval-every 2"
    code = flowrl_(f"train {options} --iterations 60 --stop-on hacking --out {out}")
    assert code == EXIT_CODES["stop-on-hacking"]
    rows = rows_of(out)
    exported = json.loads((out / "done.json").read_text())["exported"]
    density = [r["evaluation"]["heldout"]["density"] for r in rows if r["evaluation"]]
    assert find_weights(f"{out}@best").checkpoint == f"{exported:06d}"
    kept = rows[exported]["evaluation"]["heldout"]["density"]
    assert kept == max(density[1:]) and density[-1] < kept - 1
    assert rows[-1]["evaluation"]["proxy"] > rows[exported]["evaluation"]["proxy"] + 1


FIRST = """
from flowrl.core.experience import Actions


class First:
    fields = ()

    def observe(self, record):
        return Actions(best=1)
"""


@pytest.mark.slow
def test_the_best_lora_of_a_model_has_a_card(tmp_path):
    (tmp_path / "first.py").write_text(FIRST)
    given = dict(iterations=2, eval_every=1, observe=f"{tmp_path}/first.py:First")
    settings, out = {**model_files(tmp_path), **given}, tmp_path / "run"
    assert main(["train", *words(**settings), "--out", str(out)]) == 0
    assert json.loads((out / "done.json").read_text())["best"] == 1
    first = out / "checkpoints" / "000001" / LORA_FILE
    assert (out / "best" / "lora" / LORA_FILE).read_bytes() == first.read_bytes()
    assert "checkpoint 000001" in (out / "best" / "lora" / "README.md").read_text()
    assert "best/ has iteration 1" in (out / "lora" / "README.md").read_text()

"""The plan of a run: its arithmetic by hand, and against what runs record."""

import pytest
from small_run import TINY_RUN, flowrl_

from flowrl.core.errors import ConfigError
from flowrl.run.config import RunConfig, preset
from flowrl.run.job import Run
from flowrl.run.plan import plan, scored_by
from flowrl.run.records import load_run

MIXTURE = TINY_RUN.replace(iterations=1, groups=3, group_size=4, num_steps=5, window=":-1")


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "tp-grpo", "initial_noise": "shared", "window": "1:4"},
        {"method": "stepwise-flow-grpo", "sampler": "ddim-sde", "window": ":"},
        {"credit": "stepwise-gain(probe='continuation:2')", "kl_weight": 0.1},
        {"credit": "stepwise-gain(probe=some-members(probe=substeps(count=3,solver=dpm++)))"},
        {"credit": "stepwise-gain(probe='branch(children={1:2,3:2})')"},
        {"method": "dense-grpo", "sampler": "cps", "window": ":", "minibatches": 5},
        {"window": ":", "trained_steps": ":-1", "kl_weight": 0.1},
        {"window": "random(size=3)", "trained_steps": "random(fraction=0.7)"},
        {"loss": "gspo", "micro_batch": 2},
        {"loss": "gspo(kl_weight=0.1)", "micro_batch": 5},
    ],
    ids=str,
)
def test_a_run_records_what_the_plan_counts(changes, tmp_path):
    config = MIXTURE.replace(**changes)
    assert Run(config, tmp_path / "run").execute()
    row, counts = load_run(tmp_path / "run").rows[1], dict(vars(plan(config)))
    counts["calls"] = counts["sequential_calls"]
    names = ("trajectories", "calls", "reward_calls")
    for name in (*names, "nfe", "probe_nfe", "train_nfe", "gradient_nfe"):
        value = counts[name]
        # the plan cannot know which advantages are 0
        fewer = name in ("train_nfe", "gradient_nfe") and row["zero_rows"] > 0
        assert row[name] < value if fewer else row[name] == value, name
    # alone among its siblings a step gains nothing
    assert (row["zero_rows"] > 0) == ("branch(" in (config.algorithm.credit or ""))


def test_the_arithmetic_of_the_published_batch():
    """Flow-GRPO for SD3.5-Medium: 48 groups of 24, 10 steps, 9 of them trained, two updates,
    guidance, KL, 32 processes.
    """
    sizes = {"micro_batch": 4, "max_batch": 16, "gradient_checkpointing": True}
    config = preset("sd3.5-medium,flow-grpo,geneval").apply(groups=48, **sizes)
    counts = plan(config, 32)
    assert (counts.trajectories, counts.rows, counts.updates) == (1152, 1152 * 9, 2)
    assert (counts.groups_per_process, counts.evaluations_per_update_and_process) == (2, 216)
    assert (counts.micro_batches_per_update, counts.rows_per_micro_batch) == (54, 4)
    assert (counts.nfe, counts.train_nfe, counts.reward_calls) == (11520, 2 * 10368, 1152)
    assert counts.passes == 2 * (11520 + 2 * 10368)
    # checkpointing counts 3 more; of the two passes only the one with the prompt has a gradient
    assert counts.forwards == counts.passes + 3 * 10368


def test_the_passes_of_the_published_dgpo():
    """Samples with guidance, 2 x 10 passes; 4 times without, of the current, the old and the base
    network: 32. With the guidance on the reference instead, 10 and 4 x (1 + 1 + 2): 26.
    Micro-batches below a group take a second pass: 12, 16 more.
    """
    published = preset("sd3.5-medium,dgpo,ocr")
    other = {"guidance_scale": 1.0, "reference_guidance_scale": 4.5}
    assert plan(published.apply(micro_batch=64)).passes == 64 * 32
    assert plan(published.apply(micro_batch=64, **other)).passes == 64 * 26
    assert plan(published.apply()).passes == 64 * (32 + 12)
    assert plan(published.apply(**other)).passes == 64 * (26 + 16)


@pytest.mark.parametrize(
    ("groups", "processes", "each"), [(4, 1, 4), (4, 3, 2), (5, 2, 3), (4, 8, 1)]
)
def test_groups_are_not_split(groups, processes, each):
    counts = plan(preset("sd3.5-medium,flow-grpo,ocr").apply(groups=groups), processes)
    # the batch does not grow with the processes
    assert counts.groups_per_process == each and counts.trajectories == 24 * groups


def test_train_prints_it_and_trains_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    options = "--preset sd3.5-medium,tp-grpo,ocr --model of/unknown-architecture --processes 2"
    assert flowrl_(f"train {options} --plan --out {out}") == 0
    shown = capsys.readouterr().out
    counts = "5,280 network evaluations", "216 states per process", "19,200 forward equivalents"
    assert all(words in shown for words in counts) and not out.exists()
    with pytest.raises(ConfigError, match="processes = 0"):
        plan(RunConfig(), 0)


def test_the_plan_counts_every_reward_by_its_share(tmp_path):
    """A name that is also a key counts once, and an image is scored by the reward of its source."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text('a "sign"\n')
    both = "weighted-sum(models={'ocr': ocr, 'hpsv3': 'clipped(reward=hpsv3, high=9)'})"
    run = preset("sd3.5-medium,flow-grpo,ocr").apply(reward=both)
    assert scored_by(run) == {"ocr": 1, "hpsv3": 1}
    prompts = [f"{tmp_path}/a.txt @ {both}", f"{tmp_path}/b.txt @ image-reward weight=3"]
    run = preset("sd3.5-medium,flow-grpo").apply(prompts=prompts)
    assert scored_by(run) == {"ocr": 0.25, "hpsv3": 0.25, "image-reward": 0.75}
    assert scored_by(preset("tiny").apply(world="mixture")) == {}

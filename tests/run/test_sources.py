"""Several sources of prompts: how they are written, drawn, scored, credited, evaluated and
resumed.
"""

import json
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_run import BASE, flowrl_, model_files, rows_of, words

from flowrl import Prompt
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.experience import Decisions, Experience
from flowrl.credit import GDPO, Uniform, ValueTracker, credit_of
from flowrl.methods import METHODS
from flowrl.rewards import FunctionReward, WinRate
from flowrl.rewards.combine import BySource, by_source
from flowrl.rollout.groups import PromptStream
from flowrl.rollout.metrics import source_metrics
from flowrl.run.build import make_method, make_world, policy_options, prompts_to_embed
from flowrl.run.config import RunConfig
from flowrl.run.evaluation import HeldoutMetrics, evaluate, make_heldout_metrics
from flowrl.run.parts.prompt_sources import Source, source_of, sources_of
from flowrl.run.parts.prompts import in_turns, prompt_lines, read_prompts, with_shares
from flowrl.run.parts.registry import build
from flowrl.run.parts.settings import read_values
from flowrl.run.reads import unread
from flowrl.run.started import differences, plain_settings

MODEL = dict(world="model", model="x", task="prompts", reward_form="reward")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a.txt", Source("a.txt")),
        ("a b.txt @ ocr", Source("a b.txt", "ocr")),
        ("me@home.txt weight=.5", Source("me@home.txt", "", 0.5)),
        (
            "hf(name=a/b, split=x) @ weighted-sum(models={'a': 'ocr'}, weights={'a': 10}) weight=2",
            Source(
                "hf(name=a/b, split=x)", "weighted-sum(models={'a': 'ocr'}, weights={'a': 10})", 2
            ),
        ),
        (
            "text[0:9] @ my.py:Reward(x='weight=3')",
            Source("text[0:9]", "my.py:Reward(x='weight=3')"),
        ),
    ],
)
def test_a_source_as_text(text, source):
    assert source_of(text) == source == source_of(f"  {text} ")


@pytest.mark.parametrize(
    "text", ["", " @ ocr", "a @", "a @ weight=2", "a @ ocr weight=0", "a weight=nan", "a weight="]
)
def test_a_wrong_source_is_one_error(text):
    with pytest.raises(ConfigError, match=r"prompts = .* PLACE @ REWARD weight=NUMBER"):
        source_of(text)


def test_no_source_in_a_run_of_an_earlier_version():
    """Its config.json has texts."""
    values = RunConfig().as_dict()
    values["environment"] |= {"prompts": "", "heldout_prompts": ""}
    assert RunConfig.from_dict(values) == RunConfig()
    values["environment"]["prompts"] = "a.txt"
    assert read_values(values, RunConfig)["prompts"] == ("a.txt",)


def test_names_rewards_and_shares():
    """Short names that differ; one reward for all, or a reward that asks for the source."""
    both = sources_of(["a/ocr.txt @ ocr", "b/ocr.txt weight=2", "text[0:4]"], [], "pickscore")
    assert [s.name for s in both.train] == ["a/ocr.txt", "b/ocr.txt", "text[0:4]"]
    assert [s.weight for s in both.train] == [1, 2, 1]
    spec = "by-source(models={'ocr': 'jpeg-compressibility', 'x': 'jpeg-incompressibility'},"
    assert both.reward.startswith("by-source(models={'ocr': 'ocr', 'pickscore': 'pickscore'}, ")
    assert isinstance(build("reward", spec + " sources={'a': 'x', 'b': 'ocr'})"), BySource)
    same = sources_of(["a.txt", "b.txt @ ocr"], ["c.txt"], "ocr")
    assert same.reward == "ocr" and [s.name for s in (*same.train, *same.heldout)] == [*"abc"]
    one = sources_of(["a.txt @ ocr weight=3"], [], "")
    assert one.reward == "ocr" and one.train[0].name == ""
    apart = sources_of(["a.txt @ ocr"], ["h.txt @ pickscore"], "")
    assert apart.train[0].name == "a" and "'h': 'pickscore'" in apart.reward
    assert sources_of([], [], "ocr").reward == "ocr"
    for prompts, held, message in (
        (["a @ ocr", "b"], [], "'b' is not allowed.*--reward"),
        (["a @ ocr", "a @ ocr weight=2"], [], "'a' is not allowed.*each place once"),
        (["a @ ocr", "b @ ocr"], ["c"], "heldout_prompts = 'c'"),
        (["a @ ocr", "b @ ocr"], ["a @ pickscore"], "reward of a = 'pickscore'.*ocr"),
    ):
        with pytest.raises(ConfigError, match=message):
            sources_of(prompts, held, "")


def prompts_of(*counts, weights=None):
    """So many prompts of the sources a, b, ..., with the sources' weights."""
    sources = [
        Source(n, name=n, weight=w) for n, w in zip("abc", weights or (1, 1, 1), strict=False)
    ]
    found = [
        Prompt(f"{n} {i}", source=n) for n, c in zip("abc", counts, strict=False) for i in range(c)
    ]
    return with_shares(found, sources)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.2, 5)), min_size=2, max_size=3),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_every_iteration_has_the_shares_of_the_sources(given_, groups, seed):
    """In all the groups so far, up to 1 per pass and source."""
    counts, weights = zip(*given_, strict=True)
    prompts = prompts_of(*counts, weights=weights)
    stream, drawn, total = PromptStream(prompts, seed), Counter(), 0
    for _ in range(8):
        drawn.update(prompt.source for prompt in stream.take(groups))
        total += groups
        passes = -(-total // len(prompts))
        for name, weight in zip("abc", weights, strict=False):
            assert abs(drawn[name] - total * weight / sum(weights)) <= 1 + passes + 1e-6


def test_prompts_of_a_source_are_drawn_equally_often():
    stream = PromptStream(prompts_of(3, 12, weights=(1, 1)), 4)
    counts = Counter(prompt.text for prompt in stream.take(15 * 40))
    small = [count for text, count in counts.items() if text.startswith("a")]
    large = [count for text, count in counts.items() if text.startswith("b")]
    assert sum(small) == pytest.approx(300, abs=40) and len(large) == 12
    assert max(small) - min(small) < 25 and max(large) - min(large) < 25


def test_held_out_prompts_take_turns():
    ordered = [prompt.source for prompt in in_turns(prompts_of(6, 6, weights=(1, 2)))]
    assert ordered[:6] == ["b", "a", "b", "b", "a", "b"] and sorted(ordered) == [*"aaaaaabbbbbb"]
    held = in_turns(prompts_of(3, 5))
    assert in_turns(with_shares(held, [Source("", name=n) for n in "ab"])) == held


def test_stored_prompts_keep_source_and_share(tmp_path):
    prompts = prompts_of(3, 4, weights=(1, 2.7))
    (tmp_path / "p.jsonl").write_bytes(prompt_lines(prompts))
    assert read_prompts(tmp_path / "p.jsonl") == prompts


def records(prompts, scale=(1.0, 1.0), members=4):
    """A record whose rewards of the sources a and b have these scales."""
    values = torch.rand(len(prompts), members, 4, generator=torch.Generator().manual_seed(0))
    factor = torch.tensor([scale["ab".index(prompt.source)] for prompt in prompts])
    values = values * factor[:, None, None]
    decisions = Decisions.like(values)
    valid = torch.ones(len(prompts), members, dtype=torch.bool)
    return Experience(prompts, values, decisions, valid, {"x": values, "y": values.flip(1)})


RULES = [Uniform(), Uniform(std="batch"), GDPO(Uniform()), ValueTracker(std="batch")]
RULES += [METHODS[name]().credit for name in ("stepwise-flow-grpo", "tp-grpo", "dense-grpo")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_credit_is_that_of_each_source_alone(rule):
    """Whatever the scale of the other: its statistics over the batch are a source's own."""
    prompts = [Prompt(str(i), source=name) for i, name in enumerate("abbaab")]
    fresh = lambda: replace(rule)  # noqa: E731
    whole = credit_of(fresh(), records(prompts))
    other = credit_of(fresh(), records(prompts, (1.0, 1000.0)))
    for name in "ab":
        rows = [row for row, prompt in enumerate(prompts) if prompt.source == name]
        alone = credit_of(fresh(), records(prompts).groups(rows))
        assert torch.equal(whole.advantages[rows], alone.advantages)
        assert torch.equal(whole.weights[rows], alone.weights)
    rows = [0, 3, 4]
    assert torch.equal(whole.advantages[rows], other.advantages[rows])
    one = [replace(prompt, source="") for prompt in prompts]
    mixed = credit_of(fresh(), replace(records(prompts, (1.0, 1000.0)), prompts=one))
    if rule == Uniform(std="batch"):  # what would happen without sources
        assert mixed.advantages[rows].abs().max() < 0.1 * other.advantages[rows].abs().max()


def test_a_prompt_of_two_sources_is_remembered_twice():
    rule, values = ValueTracker(decay=1.0), torch.rand(2, 4, 4)
    prompts = [Prompt("fox", source=name) for name in "ab"]
    valid = torch.ones(2, 4, dtype=torch.bool)
    credit_of(rule, Experience(prompts, values, Decisions.like(values), valid))
    assert len(rule.memory) == 2


def test_metrics_by_source():
    prompts = [Prompt(str(i), source=name) for i, name in enumerate("abb")]
    record = records(prompts)
    record.values[2] = 0.5
    row = source_metrics(record)
    means = record.values[..., -1].mean(1)
    assert row["sources"] == pytest.approx({"a": float(means[0]), "b": float(means[1:].mean())})
    assert row["zero_spread_sources"] == {"a": 0.0, "b": 0.5}
    assert source_metrics(record.groups([1, 2])) == {}


BRIGHT = FunctionReward(lambda images, prompts: images.flatten(1).mean(1))
DARK = FunctionReward(lambda images, prompts: -images.flatten(1).mean(1))


def test_each_prompt_is_scored_by_the_reward_of_its_source():
    images, prompts = torch.rand(5, 3, 4, 4), [Prompt("x", source=name) for name in "abaab"]
    reward = by_source({"up": BRIGHT, "down": DARK}, {"a": "up", "b": "down"})
    sign = torch.tensor([1.0, -1, 1, 1, -1])
    assert torch.equal(reward.score(images, prompts), sign * images.flatten(1).mean(1))
    with pytest.raises(RewardError, match="'fox' is of the source 'c'; allowed: a, b"):
        reward.score(images[:1], [Prompt("fox", source="c")])
    with pytest.raises(ConfigError, match="the name of one of the models up"):
        by_source({"up": BRIGHT}, {"a": "down"})
    groups = torch.rand(3, 4, 3, 2, 2)
    compared = by_source({"a": WinRate(BRIGHT), "b": DARK})
    some = [Prompt("x", source=name) for name in "bab"]
    scores = compared.score_groups(groups, some)
    assert torch.equal(scores[1:2], WinRate(BRIGHT).score_groups(groups[1:2], some[1:2]))
    assert torch.equal(scores[0], -groups[0].flatten(1).mean(1))
    alone = compared.evaluation.score(groups[1], [some[1]] * 4)
    assert torch.equal(alone, groups[1].flatten(1).mean(1))


def files(tmp_path):
    for name, count in (("signs", 40), ("things", 20)):
        lines = "".join(f"{name} {number}\n" for number in range(count))
        (tmp_path / f"{name}.txt").write_text(lines)
    return (
        f"{tmp_path}/signs.txt @ jpeg-incompressibility",
        f"{tmp_path}/things.txt @ jpeg-compressibility weight=3",
    )


def test_a_model_of_several_sources(tmp_path):
    """Each holds its own prompts out, and the shares stay."""
    config = RunConfig.of(**MODEL, prompts=files(tmp_path))
    world = make_world(config)
    for part, counts in (("train", (32, 12)), ("heldout", (8, 8))):
        prompts, share = world.prompts("prompts", part), Counter()
        for prompt in prompts:
            share[prompt.source] += prompt.weight
        found = Counter(prompt.source for prompt in prompts)
        assert found == dict(zip(("signs", "things"), counts, strict=True))
        assert share == pytest.approx({"signs": 1, "things": 3})
    before = world.prompts("prompts", "heldout")
    world.hold_out(before)
    assert world.prompts("prompts", "heldout") == before
    with pytest.raises(ConfigError, match="one or more of each source"):
        world.hold_out([prompt for prompt in world._every if prompt.source == "signs"])
    with pytest.raises(ConfigError, match=r"prompts = '.*signs.txt, .*--start-from"):
        world.hold_out([Prompt("held out when the run had one source")])
    assert unread(config.replace(reward="ocr"), ["reward"]) == ["reward"]
    other = config.replace(prompts=(*config.environment.prompts[:1], "b.txt"), reward="ocr")
    assert unread(other, ["reward"]) == []
    with pytest.raises(ConfigError, match="memory by prompt: there are several sources"):
        make_method(config.replace(credit="moving-average-gain"))
    make_method(config.replace(credit="value-tracker"))


def test_a_text_is_a_list_of_one():
    config = RunConfig.of(**MODEL, prompts="a.txt", heldout_prompts="", reward="ocr")
    assert config.environment.prompts == ("a.txt",) and config.environment.heldout_prompts == ()
    assert RunConfig.from_dict(config.as_dict()) == config
    now = plain_settings(config)
    assert differences(Path("x"), {**now, "prompts": "a.txt", "heldout_prompts": ""}, now) == {}


@pytest.mark.satellite
def test_two_sources_train_and_resume_exactly(tmp_path, capsys):
    """On tiny SD3: the resumed run equals the one in one go, and shows both sources."""
    options = model_files(tmp_path)
    del options["reward"], options["prompts"]
    options |= dict(groups=4, group_size=2, num_steps=2, eval_samples=4, eval_steps=1)
    options |= dict(minibatches=1, tracker="none", checkpoint_every=1, iterations=3)
    sources = shlex.join(["--prompts", *files(tmp_path)])
    given_ = ["train", *words(**options), sources]
    assert flowrl_(" ".join([*given_, f"--out {tmp_path}/whole"])) == 0
    assert "things" in capsys.readouterr().out
    short_ = " ".join([*given_, f"--out {tmp_path}/parts"]).replace(
        "--iterations 3", "--iterations 1"
    )
    assert flowrl_(short_) == 0
    assert flowrl_(f"train --resume {tmp_path}/parts --iterations 3") == 0
    parts, whole = rows_of(tmp_path / "parts"), rows_of(tmp_path / "whole")
    assert [row["sources"] for row in parts[1:]] == [row["sources"] for row in whole[1:]]
    assert {*whole[-1]["evaluation"]["sources"]} == {"signs", "things"}
    found = whole[-1]["evaluation"]
    mixed = (found["sources"]["signs"] + 3 * found["sources"]["things"]) / 4
    assert found["reward"] == pytest.approx(mixed, abs=1e-6)
    assert flowrl_(f"evaluate --weights {tmp_path}/parts") == 0
    scores = json.loads((tmp_path / "parts/evaluation/evaluation.json").read_text())["scores"]
    assert [*scores][1:] == ["signs", "things"]
    assert [scores[name]["prompts"] for name in scores] == [16, 8, 8]
    stored = [json.loads(line) for line in (tmp_path / "parts/prompts.jsonl").open()]
    assert {line["prompt_source"] for line in stored} == {"signs", "things"}


def test_a_held_out_reward_on_prompts_of_its_own(tmp_path):
    """Only it is measured there; of the others, nothing changes."""
    (tmp_path / "own.txt").write_text("own 1\nown 2\n")
    text = f"{tmp_path}/own.txt @ jpeg-compressibility"
    config = RunConfig.of(**MODEL, prompts=files(tmp_path)[0], heldout_rewards=[text])
    world = make_world(config)
    metrics = make_heldout_metrics(config, world)
    assert [prompt.text for prompt in metrics.own[text]] == ["own 1", "own 2"]
    stream = PromptStream(world.prompts("prompts", "train"), 0)
    assert {"own 1", "own 2"} <= {prompt.text for prompt in prompts_to_embed(config, world, stream)}
    for wrong, message in (("a @ ocr weight=2", "without a weight"), ("a @", "PLACE @ REWARD")):
        with pytest.raises(ConfigError, match=message):
            make_world(config.replace(heldout_rewards=[wrong]))
    with pytest.raises(ConfigError, match="prompts of its own are for a model"):
        make_heldout_metrics(BASE.replace(heldout_rewards=["a.txt @ soft"]), make_world(BASE))
    seen, world = [], make_world(BASE)
    policy = world.policy(policy_options(BASE))

    def count(images, prompts):
        seen.append([prompt.text for prompt in prompts])
        return torch.full((len(images),), 2.0)

    own = world.prompts(BASE.environment.task, "train")[:1]
    given_ = policy, world, BASE.environment.task, BASE.environment.reward_form, 3, 1
    metrics = HeldoutMetrics({"x": FunctionReward(count)}, own={"x": own})
    found = evaluate(*given_, heldout_metrics=metrics)
    assert seen == [[own[0].text] * 3] and found.row["heldout"] == {"x": 2.0}
    assert found.row["reward"] == evaluate(*given_).row["reward"]

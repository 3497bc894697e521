"""Presets: the papers' settings by value, every combination run at tiny size, files of one's own
and what is wrong with them; a method's name means the same in Python, in settings, in presets and
in comparisons.
"""

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from loading import ROOT
from PIL import Image
from small_run import TINY_MODEL, error_of, flowrl_
from tiny_rewards import tiny_clip, tiny_detector

from flowrl.cli.options import base_of
from flowrl.compare.comparison import CompareConfig
from flowrl.core.errors import ConfigError
from flowrl.methods import METHODS, with_options
from flowrl.run.build import first_trained_steps, make_method, make_world, run_method
from flowrl.run.config import RunConfig, load_config, preset
from flowrl.run.evaluation import write_trajectory
from flowrl.run.io import write_json
from flowrl.run.parts.settings import grouped, read_settings, settings_text
from flowrl.run.plan import plan, plan_text
from flowrl.run.presets import (
    METHOD_SETTINGS,
    OWN_WINDOWS,
    WORLD_DEFAULTS,
    combinations,
    combine,
    published,
    published_values,
    shipped,
)
from flowrl.run.reading import load_document
from flowrl.run.records import load_run
from flowrl.run.worlds import world as named_world
from flowrl.samplers import CPS, FixedWindow
from flowrl.testing.tiny import (
    tiny_flux,
    tiny_flux2_klein,
    tiny_flux_kontext,
    tiny_qwen_image,
    tiny_sana,
    tiny_sd3,
    tiny_wan,
    tiny_z_image,
)

SD3, FLUX, QWEN, WAN = "sd3.5-medium", "flux.1-dev", "qwen-image", "wan2.1-t2v-1.3b"
KLEIN, Z, QWEN21, SANA = "flux.2-klein-4b", "z-image", "qwen-image-2.1", "sana-1.6b"
WAN22, KONTEXT, QWEN_EDIT = "wan2.2-t2v-a14b", "flux.1-kontext-dev", "qwen-image-edit"
NAMES, FORMS = combinations(), ("", ",exact")
FLAVOURS = [name + form for name in NAMES for form in FORMS]
TASKS = {}
for name in NAMES:
    TASKS.setdefault(name.rpartition(",")[0], []).append(name)
RUN = [
    tasks[(i + i // 15 + bool(form)) % len(tasks)] + form
    for i, tasks in enumerate(TASKS.values())
    for form in FORMS
]
"""Every method with every model in both forms, with one task each, in turn."""
SNAPSHOT = Path(__file__).with_name("presets.json")
"""The reviewed settings of every combination, as a hash, and how many equal the published ones."""


@cache
def combined(name):
    """The settings of a preset, and each beside the published one."""
    made = combine(name, RunConfig)
    return made.settings, published(made)


def summary(name):
    """The first digits of a hash of a preset's settings, and the number of published values."""
    values, rows = combined(name)
    text = json.dumps(values, sort_keys=True, default=list)
    return [hashlib.sha256(text.encode()).hexdigest()[:8], sum(row.same for row in rows)]


def test_settings_of_all_combinations_are_the_reviewed_ones():
    """After a deliberate change of a preset, review `flowrl presets NAME` and write the new ones:
    SNAPSHOT.write_text(json.dumps({name: summary(name) for name in FLAVOURS}, indent=0)).
    """
    assert json.loads(SNAPSHOT.read_text()) == {name: summary(name) for name in FLAVOURS}


@pytest.mark.satellite
@pytest.mark.parametrize("name", RUN)
def test_a_combination_can_be_planned_and_every_difference_has_a_reason(name):
    _, rows = combined(name)
    assert all(bool(row.why) != row.same and (row.where or not row.same) for row in rows)
    config = preset(name).apply()
    counts, forward = plan(config), make_method(config).objective.draws_times
    assert "optimizer steps" in plan_text(counts, config)
    assert forward == METHODS[config.algorithm.method]().objective.draws_times
    # a comb trains one of the steps
    assert forward or 0 < counts.trained_steps <= len(first_trained_steps(config))


@pytest.mark.parametrize("model", [SD3, FLUX, KLEIN, Z, QWEN, WAN, QWEN21, SANA, WAN22])
def test_the_record_is_a_preset(model):
    """The newest one, in place of a method, with the settings of its entry and a reason for each."""
    newest = max(shipped()["records"])
    made = combine(f"{model},record,pickscore", RunConfig)
    assert made.settings == combine(f"{model},{newest},pickscore", RunConfig).settings
    assert all(row.why for row in published(made) if not row.same)
    config = preset(f"{model},record,pickscore").apply()
    entry = load_document(ROOT / f"benchmarks/records/arms/{ENTRIES[newest]}.yaml")[0]["arms"]
    (arm,) = entry.values()
    same = ("method", "loss", "minibatches", "lr_schedule", "final_learning_rate")
    assert all(config.flat()[name] == arm[name] for name in same)
    assert plan(config).trained_steps == 3
    with pytest.raises(ConfigError, match=f"one of methods: tp-grpo or records: {newest}"):
        combine(f"{model},tp-grpo,record", RunConfig)
    with pytest.raises(ConfigError, match="method = 'tp-grpo' is not allowed"):
        base_of(["--preset", f"{model},record,pickscore", "--method", "tp-grpo"])


ENTRIES = {"record-2026-11-29": "nft-averaged"}
"""The file of each record's entry."""


def test_published_values_have_a_source_and_are_used():
    """Every value, place and reason of published.yaml shows in some combination."""
    document = published_values()
    names = {name for kind, files in shipped().items() for name in files if kind != "records"}
    document = {**document, "entries": [e for e in document["entries"] if "record" not in e["for"]]}
    seen = [row for name in FLAVOURS for row in combined(name)[1]]
    places, reasons = {row.where for row in seen}, {(row.setting, row.why) for row in seen}
    for entry in document["entries"]:
        assert set(filter(None, entry["for"].split(","))) <= names
        assert "values" not in entry or entry["source"] in document["sources"]
        for setting, (_, place) in entry.get("values", {}).items():
            assert not place or f"{entry['source']}: {place}" in places, (entry["for"], setting)
        assert entry.get("why", {}).items() <= reasons, entry["for"]


def test_the_precision_of_a_preset_is_for_gpus(monkeypatch):
    """Without a device: CUDA in the preset's precision, or float32."""
    assert preset(f"{SD3},flow-grpo,ocr").apply().policy.dtype == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in (name for name in NAMES if ",flow-grpo," in name):
        policy = preset(name).apply().policy
        expected = "float16" if SD3 in name else "bfloat16"
        assert (policy.device, policy.dtype) == ("cuda", expected)
    assert preset(f"{SD3},flow-grpo,ocr").apply().optim.loss_scale > 0


@pytest.mark.parametrize(("task", "tags"), [("geneval", 6), ("ocr", 1), ("pickscore", 1)])
def test_held_out_prompts_are_not_trained_on(task, tags):
    config = preset(f"{SD3},flow-grpo,{task}").apply()
    prompts = make_world(config).prompts
    train, heldout = ({p.text for p in prompts("prompts", part)} for part in ("train", "heldout"))
    assert len(heldout) == config.evaluation.eval_samples == 64
    assert len(train) >= 2000 and not train & heldout
    assert len({p.metadata["tag"] for p in prompts("prompts", "heldout")}) == tags


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Tiny pipelines and reward networks on disk: what replaces the downloads."""
    root = tmp_path_factory.mktemp("tiny")
    tiny_sd3().save_pretrained(root / SD3)
    tiny_flux().save_pretrained(root / FLUX)
    tiny_qwen_image().save_pretrained(root / QWEN)
    tiny_wan().save_pretrained(root / WAN)
    tiny_flux2_klein().save_pretrained(root / KLEIN)
    tiny_z_image().save_pretrained(root / Z)
    tiny_wan(boundary=0.5).save_pretrained(root / WAN22)
    tiny_sana().save_pretrained(root / SANA)
    tiny_flux_kontext().save_pretrained(root / KONTEXT)
    clip, detector = tiny_clip(root / "clip"), tiny_detector(root / "detector")
    (root / "length.py").write_text(
        "class Score:\n    def score(self, images, prompts):\n        return"
        " images.flatten(1).mean(1) + len(prompts[0].text)\n"
    )
    edits = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    for number, image in enumerate(edits):
        image.save(root / f"{number}.png")
        (root / f"{number}.txt").write_text("make it green")
    rewards = {
        "edits": "jpeg-incompressibility",
        "pickscore": f"pickscore(model='{clip}', tokenizer='{clip}')",
        "geneval": f"geneval(form=partial, model='{detector}', clip='{clip}')",
        "ocr": "ocr(side=32, threads=1)",
    }
    return root, rewards


OBJECTS = (
    '{"prompt": "a cat and a dog", "include": [{"class": "cat", "count": 1}, {"class": "dog",'
    ' "count": 1}]}\n'
)
SMALL = TINY_MODEL | dict(iterations=1, groups=1, eval_samples=1, eval_steps=2, lora_rank=2)
LEAVES = {
    "branch-grpo": 16,
    "tempflow-grpo": 54,
    "granular-grpo": 36,
    "tree-grpo": 27,
    "rsm": 30,
}
"""The smallest group that a method's tree fits."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_every_preset_runs_at_tiny_size(name, tiny, tmp_path, monkeypatch):
    """Networks, sizes and counts are small; steps, sampler, window, loss, rule, prompts and kind of
    reward are the preset's.
    """
    model, method, task, *_ = name.split(",")
    if task == "ocr":
        pytest.importorskip("rapidocr")
    root, rewards = tiny
    if not (root / model).exists():
        pytest.skip("its processor needs torchvision")
    monkeypatch.setattr(write_trajectory, "__defaults__", (2,))  # of twelve trajectories
    changes = SMALL | {"model": str(root / model), "reward": rewards[task], "tracker": "none"}
    changes["group_size"] = size = LEAVES.get(method, 2)
    if task == "edits":
        changes["prompts"] = str(root)
        module = "diffusers.pipelines.flux.pipeline_flux_kontext"
        monkeypatch.setattr(f"{module}.PREFERRED_KONTEXT_RESOLUTIONS", [(16, 16)])
    if model in (WAN, WAN22):
        reward = f"frame-mean(reward={rewards[task]!r}, frames=2)"
        changes |= {"width": 16, "num_frames": 5, "reward": reward}
    if task == "geneval":  # the tiny detector knows four classes
        (tmp_path / "objects.jsonl").write_text(OBJECTS)
        changes |= dict.fromkeys(("prompts", "heldout_prompts"), str(tmp_path / "objects.jsonl"))
    (tmp_path / "small.yaml").write_text(settings_text(grouped(RunConfig, changes)))
    out = tmp_path / "run"
    assert flowrl_(f"train --preset {name},{tmp_path}/small.yaml --out {out}") == 0
    run, config = load_run(out), load_config(out / "config.yaml")
    row = run.rows[1]
    assert run.finished and row["trajectories"] == size
    assert row["grad_norm"] >= 0 if row["train_nfe"] else row["dropped"] == size
    kept = preset(name).changes
    assert all(config.typed()[key] == value for key, value in kept.items() if key not in changes)
    assert (out / "lora" / "pytorch_lora_weights.safetensors").exists()
    assert config == load_config(out / "config.json")


@pytest.mark.parametrize(
    ("words", "heldout"),
    [
        ("", "images[0:64]"),
        (" --prompts p.txt", ""),
        (" --prompts p.txt --heldout-prompts h.txt", ""),  # the option comes on top
        (",prompts.yaml", ""),
        (",heldout.yaml --prompts p.txt", "h.txt"),
        (",prompts.yaml,heldout.yaml", "h.txt"),
    ],
)
def test_prompts_of_the_user_are_not_evaluated_on_those_of_a_task(
    words, heldout, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.yaml").write_text("environment: {prompts: p.txt}")
    (tmp_path / "heldout.yaml").write_text("environment: {heldout_prompts: h.txt}")
    base = base_of(f"--preset {SD3},flow-grpo,pickscore{words}".split())
    assert base.environment.heldout_prompts == tuple(filter(None, [heldout]))


def test_a_preset_is_shown_beside_what_is_published(tmp_path, capsys):
    """Our value, the published one, the place in the source, the reason."""
    (tmp_path / "mine.yaml").write_text("optim: {learning_rate: 1e-5}\n")
    assert flowrl_(f"presets {SD3},tp-grpo,ocr,{tmp_path}/mine.yaml") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "clip_range 1e-05 1e-05 same [TurningPoint-GRPO: config/my_grpo.py, " in shown
    assert "groups 4 48 differs: 4 fit on one GPU" in shown and "mine.yaml" in shown


def test_later_files_and_options_overrule_earlier_ones(tmp_path):
    (tmp_path / "mine.yaml").write_text("optim: {learning_rate: 1e-5}\nrollout:\n  num_steps: 12\n")
    config = preset(f"{tmp_path / 'mine.yaml'},ocr,flow-grpo,{SD3}").apply(num_steps=14)
    assert (config.optim.learning_rate, config.rollout.num_steps) == (1e-5, 14)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "rollout:\n  num_steps: 10\n  gropus: 4\n",
            "line 3: unknown setting 'gropus' (did you mean 'groups'?); allowed: chunk",
        ),
        ("settings:\n  seed: 1\n  groups: 4\n", "line 3: groups belongs below 'rollout:'"),
        ("settings: {}\nwith:\n  ocr:\n    optim: {lr: 3}\n", "line 4: unknown setting 'lr'"),
        ("rollout:\n  num_steps: ten\n", "line 2: num_steps = 'ten' is not allowed"),
        ("evaluation: {heldout_rewards: [3]}\n", "allowed: a list of texts"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(text, words, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    error = error_of(f"train --preset {path} --out {tmp_path}/run", capsys)
    assert words in error and error.count("\n") == 1 and not (tmp_path / "run").exists()
    assert str(path) in error


def test_values_survive_yaml(tmp_path):
    """Numbers to the last bit, texts that look like something else, and quotation marks."""
    values = {
        "learning_rate": 0.1 + 0.2,
        "window": "0:9",
        "reward": "ocr(side=32, language='no')",
        "task": "null",
        "adapter": "1e5",
        "model": "a: b # c",
        "heldout_rewards": ("ocr", "clipscore(weight=1.0)"),
    }
    path = tmp_path / "x.yaml"
    path.write_text(settings_text(grouped(RunConfig, values), "a comment\nof two lines"))
    assert read_settings(path, RunConfig).settings == values
    path.write_text("optim: {learning_rate: 1e-4}\npolicy:\n  adapter: 12\n  model:\n")
    read = read_settings(path, RunConfig).settings
    assert read == {"learning_rate": 1e-4, "adapter": "12", "model": ""}


def test_a_run_folder_of_another_format_is_one_line(tmp_path, capsys):
    path = tmp_path / "config.json"
    write_json(path, {"format": "flowrl-run-2", **RunConfig().as_dict()})
    for option in (f"--resume {tmp_path}", f"--config {path}"):
        error = error_of(f"train {option}", capsys)
        assert f"{path}: format = 'flowrl-run-2' is not allowed" in error
        assert "'flowrl-run-8'" in error and error.count("\n") == 1
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        load_run(tmp_path)
    write_json(path, {"format": "flowrl-run-8", **RunConfig(seed=3).as_dict()})
    assert load_config(path) == RunConfig(seed=3)


@pytest.mark.parametrize("lost", ["optim", "seed", "clip_range"])
def test_written_settings_are_complete_and_a_users_own_need_not_be(lost, tmp_path):
    values = RunConfig(seed=3).as_dict()
    for group in (values, values["algorithm"]):
        group.pop(lost, None)
    path = tmp_path / "config.json"
    write_json(path, values)
    load_config(path)
    write_json(path, {"format": "flowrl-run-8", **values})
    name = "optimizer, learning_rate, lr_schedule and others" if lost == "optim" else lost
    with pytest.raises(ConfigError, match=f"{path} is damaged: {name} missing"):
        load_config(path)
    compared = CompareConfig(RunConfig(), {"a": {}}, (0,)).as_dict()
    with pytest.raises(ConfigError, match=f"damaged: {name} missing"):
        CompareConfig.from_dict({**compared, "run": values})


# Methods by name

NUMBERS = {"clip_range": 0.01, "kl_weight": 0.0}
WORLDS_AND_METHODS = [(world, name) for world in WORLD_DEFAULTS for name in METHODS]


@pytest.mark.parametrize("name", METHODS)
def test_settings_without_further_words_are_the_method(name):
    method, known = run_method(RunConfig.of(method=name)), METHODS[name]()
    assert replace(method, loss=known.loss) == known
    assert with_options(method.loss, **NUMBERS) == with_options(known.loss, **NUMBERS)


@pytest.mark.parametrize(("world", "name"), WORLDS_AND_METHODS)
def test_worlds_change_no_part_but_the_listed_window_and_the_clip(world, name):
    """With published settings not even the window."""
    method = METHODS[name]()
    start, stop = map(int, WORLD_DEFAULTS[world]["window"].split(":"))
    windows = {True: method.window, False: FixedWindow(start, stop)}
    if name in OWN_WINDOWS:
        windows[False] = method.window
    for as_published, window in windows.items():
        used = run_method(preset("default").apply(world=world, method=name, published=as_published))
        assert replace(used, loss=method.loss, window=method.window) == method
        assert type(used.loss) is type(method.loss) and used.window == window
        if as_published and hasattr(method.loss, "clip_range"):
            expected = method.loss.clip_range * (65_536 / named_world(world).elements) ** 0.5
            assert used.loss.clip_range == pytest.approx(expected)


def test_changes_for_a_method_belong_to_methods():
    assert {name for table in METHOD_SETTINGS.values() for name in table} <= set(METHODS)


def test_a_setting_replaces_a_part_of_the_method():
    parts = dict(sampler="cps", noise_level=0.4, window="1:4", loss="gspo", clip_range=0.02)
    config = RunConfig.of(method="dance-grpo", **parts)
    method = run_method(config)
    assert method.sampler == CPS(0.4) and method.window == FixedWindow(1, 4)
    assert method.loss.clip_range == 0.02 and method.shared_noise
    assert not run_method(config.replace(initial_noise="independent")).shared_noise
    assert run_method(RunConfig.of(method="dance-grpo", noise_level=0.5)).sampler.noise_level == 0.5
    with pytest.raises(ConfigError, match="a forward-process loss with awm"):
        run_method(RunConfig.of(method="awm", loss="clipped"))


def test_the_plan_shows_which_parts_are_the_methods(capsys):
    for options, shown in (
        ("--method tempflow-grpo --kl-weight 0.1", "sampler flow-sde(noise_level=0.7) [method]"),
        ("--settings published", "window :-1 [method]"),
    ):
        assert flowrl_(f"train --world mixture {options} --plan") == 0
        assert shown in " ".join(capsys.readouterr().out.split())

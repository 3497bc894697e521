"""Weights by what a user types: runs in any state, their checkpoints, and weights of other
programs; in every command that takes them.
"""

import json
import shlex
import shutil
import subprocess
import sys
from functools import cache

import pytest
import torch
from family_cases import CASES, velocity
from safetensors.torch import load_file, save_file
from small_run import MIXTURE, SMALL, error_of, flowrl_, model_files, words
from torch.testing import assert_close

from flowrl.cli.main import main
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.policy_options import PolicyOptions
from flowrl.run.checkpoint import Checkpoints, without_prefix
from flowrl.run.config import preset
from flowrl.run.io import folder_lock
from flowrl.run.job import Run
from flowrl.run.models.load import load_policy
from flowrl.run.models.lora_files import read_lora
from flowrl.run.saved import find_weights, run_folder
from flowrl.run.trained import base_policy, settings_of, trained_policy, with_weights

COPIES = ("killed", "running")
STATES = ("running", "paused", "killed", "finished", "checkpoint", "best", "last", "live")


def states_of(config, root):
    """The folder of a run that has ended after three iterations, and what a user types for each
    state of it; copies of the folder are the states after two iterations.
    """
    folder, done = root / "finished", []

    def watch(state):
        done.append(state.get("iteration"))
        if state.get("phase") == "rollout" and 2 in done and not (root / "killed").exists():
            for name in COPIES:
                shutil.copytree(folder, root / name)

    run = Run(config, folder, watch, lambda: 2 in done, trial=False)
    assert not run.execute()
    shutil.copytree(folder, root / "paused")
    assert Run(config, folder, watch, trial=False).execute(resume=True)
    texts = {state: str(root / state) for state in ("paused", "finished", *COPIES)}
    texts |= {name: f"{folder}@{name}" for name in ("best", "last")}
    return texts | {"checkpoint": f"{folder}@2", "live": f"{folder}@2"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    config = SMALL.replace(iterations=3, keep_checkpoints=9, eval_every=1)
    return states_of(config, root)


def newest(text):
    run = find_weights(text)
    return Checkpoints(run.path).load(run.checkpoint or Checkpoints(run.path).newest)


@pytest.mark.parametrize("state", STATES)
def test_a_run_in_any_state_has_weights(mixture, state):
    text, live = mixture[state], state == "live"
    saved = find_weights(text, live)
    tensors, checkpoint = saved.tensors(), newest(text)
    if state != "best":
        assert checkpoint.values["done"] == (3 if state in ("finished", "last") else 2)
    expected = without_prefix("weight." if live else "average.", checkpoint.tensors)
    assert_close(tensors, expected, atol=0, rtol=0)
    policy, _ = trained_policy(text, live=live)
    assert_close({n: p.detach() for n, p in policy.trainable().items()}, expected)
    config = settings_of([saved])
    base = base_policy(config)
    before = {name: p.detach().clone() for name, p in base.trainable().items()}
    with with_weights(base, saved):
        assert_close({n: p.detach() for n, p in base.trainable().items()}, expected)
    assert_close({n: p.detach() for n, p in base.trainable().items()}, before, atol=0, rtol=0)


@pytest.mark.parametrize("state", STATES)
def test_a_run_in_any_state_has_a_page(mixture, state, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert flowrl_(f"report {mixture[state]} --out {out}") == 0
    page, table = out.read_text(), out.with_suffix(".csv").read_text().splitlines()
    run = run_folder(mixture[state])
    assert "<script" not in page and 'http-equiv="refresh"' not in page
    done = 3 if run.name == "finished" else 2
    ended = "finished" if done == 3 else "not running: paused, or killed"
    assert f"<dd>{ended}</dd>" in page and f"<dd>{done} of 3</dd>" in page
    assert f"flowrl train --resume {run}" in page
    assert len(table) == 2 + done and table[0].startswith("run,iteration,evaluation/reward")
    capsys.readouterr()
    assert flowrl_(f"report {mixture[state]} --out {out}") == 0  # its own page is replaced
    out.write_text("mine")
    assert "out = " in error_of(f"report {mixture[state]} --out {out}", capsys)


def test_runs_side_by_side_share_a_page(mixture, tmp_path, capsys):
    texts = f"{mixture['finished']} {mixture['paused']}@best"
    assert flowrl_(f"report {texts} --out {tmp_path}/both.html") == 0
    table = (tmp_path / "both.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table[1:]] == ["finished"] * 4 + ["paused"] * 3
    assert "nowhere is no run; allowed" in error_of("report nowhere", capsys)


def test_best_is_the_best_evaluated_checkpoint_that_is_kept(mixture, tmp_path):
    run = shutil.copytree(mixture["finished"], tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = {row["iteration"]: row["evaluation"]["reward"] for row in rows}
    for gone in (None, *sorted((1, 2, 3), key=lambda i: -rewards[i])[:2]):
        if gone:
            Checkpoints(run).path(f"{gone:06d}").unlink()
            del rewards[gone]
        best = max((i for i in rewards if i), key=lambda i: rewards[i])
        assert find_weights(f"{run}@best").checkpoint == f"{best:06d}"


def test_the_live_weights_of_a_run_that_exported_its_best_are_those(mixture, tmp_path):
    run = shutil.copytree(mixture["finished"], tmp_path / "run")
    done = json.loads((run / "done.json").read_text())
    (run / "done.json").write_text(json.dumps(done | {"exported": 1}))
    assert find_weights(run, live=True).checkpoint == "000001"
    assert find_weights(run).checkpoint == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{0}@7",
            "no checkpoint '000007' in .*; allowed: best, last or one of 000001, 000002, 000",
        ),
        ("{0}@beste", "no checkpoint 'beste'"),
        ("{0}/checkpoints", "holds 000001.safetensors, 000002"),
        ("{0}/metrics.jsonl", r"holds no weights \(a file that is not in safetensors format\)"),
        ("nowhere", "nowhere does not exist; allowed: the folder of a run"),
        ("nowhere@best", "nowhere@best does not exist"),
        ("own/name", "own/name .* downloads are off: set HF_HUB_OFFLINE=0"),
        ("own/name/mine.safetensors", "not among the downloaded weights"),
        ("{1}/new", "has no checkpoint yet"),
        ("{1}/new@best", "has no checkpoint yet"),
        ("{1}/empty", r"holds no weights \(empty\)"),
        ("{1}/arms", r"is a comparison; allowed: one of its runs, such as .*arms/runs/a"),
    ],
)
def test_what_is_no_weights_is_said_before_anything_is_loaded(mixture, tmp_path, text, message):
    run = mixture["finished"]
    (tmp_path / "new").mkdir()
    (tmp_path / "empty").mkdir()
    shutil.copy(f"{run}/config.json", tmp_path / "new")
    shutil.copytree(run, tmp_path / "arms" / "runs" / "a")
    (tmp_path / "arms" / "config.json").write_text('{"arms": {}}')
    with pytest.raises(CheckpointError, match=f"^weights: .*{message}"):
        find_weights(text.format(run, tmp_path))


def test_a_run_without_a_checkpoint_is_continued_unless_it_is_running(mixture, tmp_path):
    shutil.copy(f"{mixture['finished']}/config.json", tmp_path)
    command = f"; continue it with: flowrl train --resume {tmp_path}"
    for _ in range(2):  # before and after
        with pytest.raises(CheckpointError, match=f"no checkpoint yet.*{command}$"):
            find_weights(tmp_path)
        with (
            folder_lock(tmp_path),
            pytest.raises(CheckpointError, match=r"no checkpoint yet.*when it pauses$"),
        ):
            find_weights(tmp_path)


@pytest.mark.parametrize(
    ("text", "files", "other"),
    [
        ("@last", ("checkpoints/000003",), "000002"),
        ("@3", ("checkpoints/000003", "checkpoints/000002"), "000001"),
        ("", ("weights",), "000003"),
        ("@1", ("checkpoints/000001",), ""),
    ],
)
def test_damaged_weights_name_complete_ones(mixture, tmp_path, capsys, text, files, other):
    run = shutil.copytree(mixture["finished"], tmp_path / "run")
    for file in (run / f"{name}.safetensors" for name in files):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    error = error_of(f"evaluate --weights {run}{text} --out {tmp_path}/new", capsys)
    assert f"{run}/{files[0]}.safetensors: it does not match its own hash" in error
    assert error.count("\n") == 1
    if not other:
        assert "is complete" not in error
        return
    assert error.endswith(f" Checkpoint {other} is complete: {run}@{other}\n")
    assert flowrl_(f"evaluate --weights {run}@{other} --out {tmp_path}/new") == 0


def test_a_resume_does_not_call_a_damaged_checkpoint_kept(mixture, tmp_path, capsys):
    run = shutil.copytree(mixture["paused"], tmp_path / "run")
    path = run / "checkpoints" / "000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert flowrl_(f"train --resume {run}") == 2
    shown = capsys.readouterr()
    assert "kept" not in shown.out
    assert f"with: flowrl train --resume {run} --from 000001" in shown.err


@pytest.mark.parametrize("whole", [True, False], ids=["file", "folder"])
def test_a_pickled_lora_says_how_to_convert_it(tmp_path, whole):
    """The command works, also for one in a training state and with shared memory."""
    folder, both = tmp_path / "it's mine", torch.arange(8.0).reshape(2, 4)
    folder.mkdir()
    tensors = {"a.lora_A.weight": both[0], "b.lora_A.weight": both.T}
    torch.save({"state_dict": tensors, "epoch": 3}, folder / "l.ckpt")
    with pytest.raises(CheckpointError) as caught:
        find_weights(folder / "l.ckpt" if whole else folder)
    text, _, command = str(caught.value).partition("; convert it: ")
    assert (
        text
        == f"weights: {folder}/l.ckpt is a pickle, which can contain code; allowed: safetensors"
    )
    python, *rest = shlex.split(command)
    subprocess.run([python.replace("python", sys.executable), *rest], check=True)
    saved = find_weights(folder)
    assert saved.path == folder / "l.safetensors"
    assert_close(load_file(saved.path), tensors, atol=0, rtol=0)


def test_runs_of_other_worlds_and_shapes_are_refused(mixture, tmp_path, capsys):
    assert flowrl_(f"train --preset tiny --out {tmp_path}/shapes --iterations 1") == 0
    run = mixture["finished"]
    error = error_of(f"evaluate --weights {run} {tmp_path}/shapes", capsys)
    assert f"{tmp_path}/shapes is of another base model (shapes) than {run} (mixture)" in error
    assert flowrl_(f"train --preset tiny --out {tmp_path}/two --iterations 1 --lora-rank 2") == 0
    error = error_of(f"evaluate --weights {tmp_path}/shapes {tmp_path}/two", capsys)
    assert f"{tmp_path}/two does not match the policy: " in error and error.count("\n") == 1


def test_checkpoints_are_compared_in_pairs(mixture, tmp_path, capsys):
    """Each against the base, then the others against the first."""
    run = mixture["finished"]
    texts = f"{run}@1 {run}@2 {run}"
    assert flowrl_(f"evaluate --weights {texts} --out {tmp_path}/out --html") == 0
    shown = capsys.readouterr().out
    values = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    names = [f"{run}@000001", f"{run}@000002", run]
    pairs = [(pair["weights"], pair["against"]) for pair in values["compared"]]
    assert pairs == [(name, "base") for name in names] + [(name, names[0]) for name in names[1:]]
    heads = [line for line in shown.splitlines() if "minus finished@000001 [95%]" in line]
    assert [line.split()[0] for line in heads] == list(values["scores"])
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith(("base", "finished"))]
    labels = ["base", "finished@000001", "finished@000002", "finished"]
    assert rows == labels * len(heads)
    for form in values["scores"]:
        first, second, _, between, _ = (pair["scores"][form] for pair in values["compared"])
        assert values["scores"][form] == first and between["base"] == first["trained"]
        assert between["difference"] == pytest.approx(second["difference"] - first["difference"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<h3>") == 5
    assert flowrl_(f"compare --weights {texts} --out {tmp_path}/same") == 0
    same = json.loads((tmp_path / "same" / "evaluation.json").read_text())
    assert same["compared"] == values["compared"]
    assert "seeds = " in error_of(f"compare --weights {run} --seeds 3", capsys)


def test_the_reference_is_a_run_in_any_state(mixture, tmp_path, capsys):
    line = f"train {MIXTURE} --kl-weight 0.1 --out {tmp_path}/run --reference"
    assert flowrl_(f"{line} {mixture['paused']}") == 0
    assert "no checkpoint '000009'" in error_of(f"{line} {mixture['paused']}@9", capsys)


# ----- A diffusers model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return model_files(tmp_path_factory.mktemp("model"))


SIZE = {"sd3": {}, "flux": {}, "qwen-image": {}, "wan": {"num_frames": 5}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function: the settings of a tiny model of a family, and what a user types for each state
    of a run of it.
    """

    @cache
    def made(family):
        files = model_files(tmp_path_factory.mktemp(family), pipe=CASES[family].make())
        settings = {"learning_rate": 0.1, "groups": 1, "lora_rank": 3, "lora_alpha": 5.0}
        settings |= {"iterations": 3, "keep_checkpoints": 9, "eval_every": 1, **SIZE[family]}
        settings |= {"checkpoint_every": 1, "tracker": "none", "guidance_scale": 2.0}
        config = preset("tiny").apply(**files, **settings)
        return files, states_of(config, tmp_path_factory.mktemp("runs"))

    return made


def scored(text, files, out, *more):
    """The difference of an evaluation, by the run's reward."""
    line = words(reward=files["reward"], num_steps=2, out=out, trust=True)
    assert main(["evaluate", "--weights", text, *line, *more]) == 0
    values = json.loads((out / "evaluation.json").read_text())
    return next(iter(values["scores"].values()))["difference"]


CELLS = [("sd3", state) for state in STATES]
CELLS += [
    (family, state) for family in ("flux", "qwen-image", "wan") for state in ("paused", "best")
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "state"), CELLS)
def test_every_command_takes_every_state(runs, tmp_path, family, state):
    """evaluate, sample, export, report, compare and --adapter: the weights of the run's policy."""
    files, texts = runs(family)
    text, live = texts[state], state == "live"
    flag = ["--live"] if live else []
    saved = find_weights(text, live)
    difference = scored(text, files, tmp_path / "out", *flag)
    exported = saved.path / "checkpoints" / (saved.checkpoint or Checkpoints(saved.path).newest)
    base = words(**{name: files[name] for name in ("model", "prompts", "resolution", "dtype")})
    base += words(max_sequence_length=24, guidance_scale=2, **SIZE[family])
    if not live:  # the LoRA beside the checkpoint, as a LoRA of any program
        again = scored(str(exported), files, tmp_path / "again", *base)
        assert again == pytest.approx(difference, abs=2e-7) and abs(difference) > 1e-5
    png = tmp_path / "x.png"
    assert main(["sample", "--weights", text, *flag, *words(out=png, trust=True, count=1)]) == 0
    assert png.stat().st_size > 1000
    policy, _ = trained_policy(text, trust=True, live=live)
    own = {name: p.detach() for name, p in policy.trainable().items()}
    assert main(["export", text, *flag, "--out", str(tmp_path / "lora")]) == 0
    written = read_lora(tmp_path / "lora" / "pytorch_lora_weights.safetensors", type(policy.pipe))
    assert_close(dict(written.tensors), policy.adapters.tensors(), atol=0, rtol=0)
    assert main(["report", text, "--out", str(tmp_path / "page.html")]) == 0
    if not live:
        compared = [text, str(tmp_path / "lora"), "--trust", "--out", str(tmp_path / "compared")]
        assert main(["compare", "--weights", *compared]) == 0
        values = json.loads((tmp_path / "compared" / "evaluation.json").read_text())
        (equal,) = values["compared"][-1]["scores"].values()
        assert abs(equal["difference"]) < 1e-6
        given = {"lora_rank": 4, "resolution": 16, "max_sequence_length": 24, **SIZE[family]}
        other = load_policy(files["model"], PolicyOptions(adapter=text, **given))
        products = [products_of(one) for one in (policy, other)]
        assert_close(*products, atol=1e-6, rtol=1e-5)
        if state in ("paused", "best"):  # a new run of another method and rank
            line = words(**files, adapter=text, out=tmp_path / "new", preset="tiny", lora_rank=5)
            line += words(**SIZE[family])
            assert main(["train", *line, "--method", "tp-grpo", "--tracker", "none"]) == 0
    assert_close(own, dict(saved.tensors()), atol=0, rtol=0)


def products_of(policy):
    """B A of every layer with the adapter's scale."""
    tensors = policy.adapters.tensors()
    ends = ".lora_A.weight"
    layers = [name.removesuffix(ends) for name in tensors if name.endswith(ends)]
    return {x: tensors[f"{x}.lora_B.weight"] @ tensors[f"{x}{ends}"] for x in layers}


@pytest.mark.slow
def test_the_lora_of_a_checkpoint_comes_and_goes_with_it(runs, tmp_path):
    """Other programs watch the folder; the last one equals lora/ of the run."""
    files, texts = runs("sd3")
    folder = find_weights(texts["finished"]).path
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    numbers = [f"00000{i}" for i in (1, 2, 3)]
    assert names == sorted([*numbers, *(f"{name}.safetensors" for name in numbers)])
    file = "pytorch_lora_weights.safetensors"
    last, final = (load_file(folder / x / file) for x in ("checkpoints/000003", "lora"))
    assert_close(last, final, atol=0, rtol=0)
    options = words(**files, preset="tiny", iterations=3, checkpoint_every=1, tracker="none")
    assert main(["train", *options, *words(out=tmp_path / "one", lora_rank=3)]) == 0
    names = sorted(path.name for path in (tmp_path / "one" / "checkpoints").iterdir())
    assert names == ["000003", "000003.safetensors"]


def test_adapters_that_do_not_fit_are_named(files, tmp_path, capsys):
    policy = load_policy(files["model"], PolicyOptions(resolution=16, max_sequence_length=24))
    policy.save(tmp_path / "mine")
    file = tmp_path / "mine" / "pytorch_lora_weights.safetensors"
    dora = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file({**dora, "transformer.x.dora_scale": torch.ones(2)}, tmp_path / "dora.safetensors")
    line = words(**files, preset="tiny", tracker="none", out=tmp_path / "run")
    for more, message in (
        ({"adapter": tmp_path / "mine", "lora_rank": 4}, "its rank is 8, lora_rank is 4; allowed"),
        ({"adapter": tmp_path / "dora.safetensors"}, "holds transformer.x.dora_scale; allowed"),
        ({"adapter": f"{tmp_path}/mine@best"}, "mine@best does not exist"),
        ({"frozen_adapters": f"a={file}:0.5,a={file}"}, "names that differ"),
    ):
        assert main(["train", *line, *words(**more)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.splitlines()[-1].startswith("flowrl: error: ")


def test_a_frozen_adapter_has_a_weight(files, tmp_path):
    given = {"resolution": 16, "max_sequence_length": 24, "lora_rank": 2, "lora_alpha": 3.0}
    options = PolicyOptions(**given)
    policy = load_policy(files["model"], options)
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    policy.save(tmp_path / "mine")
    full = products_of(policy)
    half = load_policy(
        files["model"], PolicyOptions(**given, frozen_adapters=f"a={tmp_path}/mine:0.5")
    )
    layer = next(iter(full))
    module = half.transformer.get_submodule(layer)
    assert_close(module.get_delta_weight("a"), 0.5 * full[layer], atol=1e-6, rtol=1e-5)


def test_settings_of_needs_a_model_without_a_run(tmp_path):
    save_file({"x.lora_A.weight": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match=r"model = '' .*the base model of these weights: --model"):
        settings_of([find_weights(tmp_path / "x.safetensors")])


@pytest.mark.slow
def test_full_weights_are_compared_and_started_from(files, tmp_path):
    """Of a run of full fine-tuning, of its folder full/, of a kept checkpoint."""
    settings = {"tuning": "full", "learning_rate": 0.01, "groups": 1, "tracker": "none"}
    config = preset("tiny").apply(**files, **settings, keep_checkpoints=2, checkpoint_every=1)
    assert Run(config, tmp_path / "run", trial=False).execute()
    run, options = tmp_path / "run", {"resolution": 16, "max_sequence_length": 24}
    assert not (run / "checkpoints" / "000002").exists()  # gigabytes of a large model
    policy, _ = trained_policy(run, trust=True)
    expected = {name: p.detach() for name, p in policy.trainable().items()}
    base = words(**{name: files[name] for name in ("model", "prompts", "resolution", "dtype")})
    base += words(max_sequence_length=24)
    differences = [
        scored(str(run), files, tmp_path / "a"),
        scored(f"{run}@last", files, tmp_path / "b"),
        scored(str(run / "full"), files, tmp_path / "c", *base),
    ]
    assert differences == pytest.approx(differences[:1] * 3, abs=2e-6) and differences[0] != 0
    for text in (str(run), str(run / "full"), f"{run}@2"):
        for more in ({"tuning": "full"}, {"tuning": "lora"}, {"fixed": True}):
            started = load_policy(files["model"], PolicyOptions(adapter=text, **options, **more))
            found = dict(started.transformer.named_parameters())
            found = {name.replace(".base_layer.", "."): p.detach() for name, p in found.items()}
            assert_close({name: found[name] for name in expected}, expected, atol=1e-6, rtol=0)
    # a LoRA on top of other weights than the model's
    config = config.replace(tuning="lora", adapter=str(run), learning_rate=0.1)
    assert Run(config, tmp_path / "on", trial=False).execute()
    own, _ = trained_policy(tmp_path / "on", trust=True)
    saved = find_weights(tmp_path / "on")
    on_top = base_policy(settings_of([saved], trust=True))
    with with_weights(on_top, saved):
        assert_close(velocity(on_top), velocity(own).detach(), atol=5e-6, rtol=0)
    line = words(**files, frozen_adapters=run, out=tmp_path / "new", preset="tiny")
    assert main(["train", *line, "--tracker", "none"]) == 2

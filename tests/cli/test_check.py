"""`flowrl train --check`, and that training begins with the same checks, before any weights are
read.
"""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from small_run import flowrl_

from flowrl.core.errors import RewardContractError
from flowrl.core.types import Prompt
from flowrl.rewards import WeightedSum, WinRate
from flowrl.rewards.contract import refusal
from flowrl.rewards.geneval import GenEval
from flowrl.rewards.ocr import OCR
from flowrl.run.parts.prompts import prompt_places, read_prompts
from flowrl.testing.tiny import tiny_flux, tiny_flux_policy, tiny_sd3, tiny_sd3_policy

BASE = {
    "model": "sd3",
    "prompts": "prompts.txt",
    "reward": "jpeg-compressibility",
    "resolution": "16",
    "groups": "2",
    "group-size": "2",
    "num-steps": "4",
    "iterations": "1",
    "eval-samples": "2",
    "lora-rank": "4",
    "tracker": "none",
    "out": "new",
}


@pytest.fixture(autouse=True)
def whole_lines(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tiny models, LoRAs and prompts."""
    folder = tmp_path_factory.mktemp("made")
    tiny_sd3().save_pretrained(folder / "sd3")
    tiny_flux().save_pretrained(folder / "flux")
    tiny_sd3_policy().save(folder / "lora")
    tiny_flux_policy().save(folder / "other")
    (folder / "prompts.txt").write_text('# two signs\na sign "HELLO"\n\na dog\na sign "B"\n')
    lines = [{"prompt": "a dog"}, {"prompt": "a cat", "include": [{"class": "lion"}]}]
    (folder / "objects.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "signs.txt").write_text('a sign "HELLO"\n')
    (folder / "counted.py").write_text(
        "import torch\n"
        "class Counted:\n"
        "    def score(self, images, prompts):\n"
        "        return torch.zeros(len(prompts))\n"
        "    def refuses(self, prompt):\n"
        "        return '' if 'sign' in prompt.text else 'no sign in it'\n"
        "class Loud:\n"
        "    def __init__(self):\n"
        "        raise AssertionError('built')\n"
        "    def score(self, images, prompts):\n"
        "        return torch.zeros(len(prompts))\n"
    )
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("{}\n{}\n{}\n")
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A copy of `made` as the current folder, in which nothing reads weights of a model."""
    folder = shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(folder)

    def read(*arguments, **options):
        raise AssertionError("weights are read")

    monkeypatch.setattr("flowrl.run.models.load._load", read)
    monkeypatch.setattr("diffusers.models.modeling_utils.load_state_dict", read)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", read)
    return folder


def line(*more, **changes):
    given = BASE | {name.replace("_", "-"): value for name, value in changes.items()}
    return " ".join(["train", *(f"--{name} {value}" for name, value in given.items()), *more])


def remove_shard(folder):
    (folder / "sd3" / "vae" / "diffusion_pytorch_model.safetensors").unlink()


def remove_weight(folder):
    path = folder / "sd3" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors.pop("proj_out.bias")
    save_file(tensors, path)


def small_disk(monkeypatch):
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr("flowrl.run.checks.shutil.disk_usage", lambda place: usage)


def no_compiler(monkeypatch):
    monkeypatch.setattr("flowrl.run.checks.shutil.which", lambda name: None)


WRONG = {
    "settings": ({"heldout_rewards": "nope"}, r"unknown reward 'nope'"),
    "device": ({"device": "cuda:99"}, r"device = 'cuda:99' is not allowed"),
    "reward's device": ({"reward_device": "cuda:98"}, r"device = 'cuda:98' is not allowed"),
    "packages: int8": ({"quantize": "int8"}, r"with the package torchao: pip install torchao"),
    "packages: nf4": ({"quantize": "nf4"}, r"package bitsandbytes: pip install bitsandbytes"),
    "packages: optimizer": ({"optimizer": "adamw-8bit"}, r"needs the package bitsandbytes"),
    "packages: tracker": ({"tracker": "trackio"}, r"tracker = 'trackio' .*pip install trackio"),
    "model: part": (
        {},
        r"no weights of its vae; expected .*is the download complete",
        remove_shard,
    ),
    "model: weight": ({}, r"1 of \d+ weights of the transformer .*proj_out\.bias", remove_weight),
    "model: none": ({"model": "nowhere/x/y"}, r"'nowhere/x/y' does not exist"),
    "model: file": ({"model": "lora/pytorch_lora_weights.safetensors"}, "--original FOLDER"),
    "network: size": ({"resolution": "68"}, r"height = 68 .* a multiple of 4, at most 64"),
    "network: frames": ({"num_frames": "6"}, r"num_frames = 6 .*makes images"),
    "network: layers": ({"lora_targets": "typo"}, r"lora_targets = \('typo',\)"),
    "network: kernels": ({"attention_backend": "flash"}, r"attention_backend = 'flash' .* one of"),
    "network: no adapter": ({"adapter": "nowhere"}, r"adapter: nowhere does not exist"),
    "network: other adapter": ({"adapter": "other"}, r"adapter: .*other"),
    "network: frozen": ({"frozen_adapters": "x=nowhere"}, r"frozen_adapters: nowhere does not"),
    "reward: line": (
        {"reward": "ocr"},
        r"^prompts: .* 1 of 3 prompts: line 4: ocr: the prompt 'a dog' has no text",
    ),
    "reward: held-out": (
        {"reward": "ocr", "prompts": "signs.txt", "heldout_prompts": "prompts.txt"},
        r"^heldout_prompts: .* 1 of 3 prompts: line 4: ocr",
    ),
    "reward: objects": (
        {"reward": "geneval", "prompts": "objects.jsonl"},
        r"2 of 2 prompts: line 1: geneval: .*; line 2: geneval: the detector has no class 'lion'",
    ),
    "reward: generated": (
        {"reward": "geneval", "prompts": "text[0:9]"},
        r"9 of 9 prompts: number 1: .*; number 3: .* and 6 more",
    ),
    "reward: own": ({"reward": "counted.py:Counted"}, r"1 of 3 prompts: line 4: no sign in it"),
    "out": ({"out": "run"}, r"out = 'run' .* --resume"),
}
"""Options, the message, and a change of the files."""


@pytest.mark.parametrize("entry", WRONG.values(), ids=WRONG)
def test_a_wrong_part_is_found_by_check_and_by_train(entry, here, capsys):
    changes, message, *change = entry
    for work in change:
        work(here)
    assert flowrl_(line("--check", **changes)) == 2
    printed = capsys.readouterr().out
    (found,) = (row for row in printed.splitlines() if " error: " in row)
    text = found.partition(" error: ")[2]
    assert re.search(message, text), text
    assert flowrl_(line(**changes)) == 2
    assert capsys.readouterr().err == f"flowrl: error: {text}\n"
    assert not (here / "new").exists()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (small_disk, {}, r"out: new needs about 0\.00 GB .*keep_checkpoints"),
        (no_compiler, {"compile": "True"}, r"compile = True .* a C\+\+ compiler"),
    ],
)
def test_a_poor_machine_is_found(change, options, message, here, capsys, monkeypatch):
    change(monkeypatch)
    assert flowrl_(line("--check", **options)) in (1, 2)
    assert re.search(f"error: {message}", capsys.readouterr().out)


def test_a_package_of_the_reward_is_found_to_be_missing(here, capsys, monkeypatch):
    monkeypatch.setattr("flowrl.rewards.contract.find_spec", lambda name: None)
    for reward in ("ocr", "weighted-sum(models={text:ocr})"):
        assert flowrl_(line("--check", prompts="signs.txt", reward=f"'{reward}'")) == 2
        assert "needs the package rapidocr: pip install rapidocr" in capsys.readouterr().out


def test_all_errors_are_listed(here, capsys):
    wrong = {"resolution": "68", "tracker": "trackio", "reward": "ocr", "device": "cuda:99"}
    assert flowrl_(line("--check", **wrong, out="run")) == 2
    rows = [row for row in capsys.readouterr().out.splitlines() if " error: " in row]
    assert [row.split()[0] for row in rows] == ["device", "packages", "reward", "network", "out"]


RIGHT = {
    "SD3": {},
    "FLUX": {"model": "flux"},
    "full": {"tuning": "full", "lora_rank": "32"},
    "adapter": {"adapter": "lora", "lora_alpha": "8"},
    "frozen adapter": {"frozen_adapters": "style=lora"},
    "signs": {"prompts": "signs.txt", "reward": "ocr", "dtype": "bfloat16"},
    "an own reward that is not asked": {"reward": "counted.py:Loud"},
}


@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_a_right_run_passes_without_a_trace(changes, here, capsys):
    assert flowrl_(line("--check", **changes)) == 0
    rows = [row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines()]
    subjects = ["settings", "device", "packages", "reward", "model", "network", "prompts", "disk"]
    assert [subject for subject, _ in rows] == [*subjects, "out"]
    assert not (here / "new").exists()


def test_prompts_that_are_cut_are_counted(here, capsys):
    (here / "long.txt").write_text("a dog\n" + "a very long sign " * 9 + "\n")
    assert flowrl_(line("--check", prompts="long.txt")) == 0
    printed = capsys.readouterr().out
    assert "text_encoder, text_encoder_2: 1 of 2 prompts are cut at 40 tokens" in printed


def test_a_heldout_reward_that_will_be_left_out_is_no_error(here, capsys):
    assert flowrl_(line("--check", heldout_rewards="ocr")) == 0
    assert (
        "ocr cannot score 1 of 3 held-out prompts and will be left out" in capsys.readouterr().out
    )


def test_a_model_that_is_not_downloaded_yet_is_no_error(here, capsys, monkeypatch):
    assert flowrl_(line("--check", model="owner/model")) == 2
    assert "hf download owner/model" in capsys.readouterr().out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert flowrl_(line("--check", model="owner/model")) == 0
    printed = capsys.readouterr().out
    assert "owner/model is not downloaded yet, so its parts are not checked" in printed
    assert "\nnetwork" not in printed


def test_a_built_in_world_is_checked_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flowrl_("train --world mixture --check") == 0
    rows = [row.split()[0] for row in capsys.readouterr().out.splitlines()]
    assert rows == ["settings", "device", "packages", "out"]
    assert flowrl_("train --world mixture --check --plan") == 2
    assert [*tmp_path.iterdir()] == []


def test_a_run_is_checked_again_when_it_is_resumed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flowrl_("train --preset tiny --world mixture --iterations 1 --out run") == 0
    assert flowrl_("train --resume run --check") == 0
    rows = [row.split()[0] for row in capsys.readouterr().out.splitlines()[-3:]]
    assert rows == ["settings", "device", "packages"]


# ----- What a reward says of a prompt


def test_a_reward_says_what_it_refuses():
    sign, dog = Prompt('a sign "A"'), Prompt("a dog", {"include": [{"class": "dog"}]})
    lion = Prompt("a lion", {"include": [{"class": "lion"}]})
    assert OCR().refuses(sign) == "" and "no text to render" in OCR().refuses(dog)
    assert OCR().refuses(Prompt("x", {"text": "A"})) == ""
    assert GenEval().refuses(dog) == "" and "no class 'lion'" in GenEval().refuses(lion)
    assert GenEval(model="another").refuses(lion) == ""
    assert "is not a request" in GenEval().refuses(sign)
    both = WeightedSum({"text": OCR(), "objects": GenEval()})
    assert refusal(both, sign).startswith("geneval") and refusal(both, dog).startswith("ocr")
    assert refusal(WinRate(OCR()), dog).startswith("ocr") and refusal(object(), dog) == ""
    with pytest.raises(RewardContractError, match="refuses returned a bool"):
        refusal(SimpleNamespace(refuses=lambda prompt: True), dog)


@pytest.mark.parametrize("name", ["prompts.txt", "objects.jsonl"])
def test_places_belong_to_prompts(name, made):
    source, rows = made / name, (made / name).read_text().split("\n")
    prompts, places = read_prompts(source), prompt_places(source)
    assert len(prompts) == len(places) > 1
    for prompt, place in zip(prompts, places, strict=True):
        assert prompt.text in rows[int(place.removeprefix("line ")) - 1]

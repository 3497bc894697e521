"""`flowrl export`: weights of runs and LoRAs as files for other programs, and their cards."""

import json
import re
import shutil
from importlib import import_module
from typing import Any

import pytest
import torch
import yaml
from family_cases import CASES, fill, noise_of, saved
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_run import MIXTURE, error_of, flowrl_, model_files, words
from torch.testing import assert_close

from flowrl.cli.main import main
from flowrl.core.errors import CheckpointError
from flowrl.core.types import Prompt
from flowrl.rollout import initial_noise, sample_images
from flowrl.run.build import make_policy
from flowrl.run.config import load_config
from flowrl.run.export import check_lora, lora_file, made_file, notes, run_lora
from flowrl.run.io import write_json
from flowrl.run.models.lora_files import Lora, lora_of_run, read_lora
from flowrl.run.models.lora_formats import LAYERS
from flowrl.run.models.merged import write_merged
from flowrl.run.saved import find_weights
from flowrl.run.verify import largest_difference
from flowrl.testing.tiny import tiny_sd3

FORMATS = ("diffusers", "comfyui", "kohya")
ALPHA = 64
SD3 = "StableDiffusion3Pipeline"
USUAL = "pytorch_lora_weights.safetensors"
CARD = """---
license: other
license_name: demo-community
base_model: someone/demo-medium
---
# Demo
"""


def header(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def exported(out, *arguments, **options):
    """The only LoRA file that a command writes."""
    assert main(["export", *map(str, arguments), *words(**options, out=out)]) == 0
    (file,) = [out] if out.is_file() else out.glob("*.safetensors")
    return file


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A short run of tiny SD3 with two checkpoints, whose base model has a card."""
    root = tmp_path_factory.mktemp("exported")
    settings = {"preset": "tiny", "lora_rank": 2, "learning_rate": 0.3, "ema_decay": 0.5}
    settings |= {
        "lora_alpha": ALPHA,
        "groups": 1,
        "iterations": 2,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
    }
    settings |= {"guidance_scale": 2, "negative_prompt": "dull", "tracker": "none"}
    files = model_files(root)
    (root / "model" / "README.md").write_text(CARD)
    assert main(["train", *words(**files, **settings, out=root / "run")]) == 0
    return root


@pytest.fixture
def run(root, tmp_path):
    """A copy of the run, as if it had been killed after its last checkpoint."""
    copy = shutil.copytree(root / "run", tmp_path / "killed")
    for name in ("done.json", "weights.safetensors"):
        (copy / name).unlink()
    shutil.rmtree(copy / "lora")
    return copy


def policy_of(run, tensors):
    policy: Any = make_policy(load_config(run / "config.json", trust=True))
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            parameter.copy_(tensors[name])
    return policy


def trained(run, name="", live=False):
    text = f"{run}@{name}" if name else run
    return lora_of_run(find_weights(text, live).tensors(), scale=ALPHA / 2)


def test_a_run_in_any_state_is_exported_for_all_programs(root, run, tmp_path, capsys):
    kind = import_module("diffusers").StableDiffusion3Pipeline
    for weights, lora in (
        (root / "run", trained(root / "run")),
        (run, trained(run)),
        (f"{run}@000001", trained(run, "000001")),
    ):
        for form in FORMATS:
            file = exported(tmp_path / form, weights, format=form)
            found = read_lora(file, kind)
            effective = {n for n in lora.ranks if lora.tensors[f"{n}.lora_B.weight"].any()}
            assert len(effective) > 10 and effective <= found.ranks.keys()
            for name in found.tensors:
                assert torch.equal(found.tensors[name], lora.tensors[name])
    exported(tmp_path / "a.safetensors", run)
    assert f"Wrote {tmp_path}/a.safetensors, from {run}@000002\n" in capsys.readouterr().out
    live = exported(tmp_path / "a.safetensors", run, live=True, dtype="bfloat16")
    shown = capsys.readouterr().out
    assert f"Replaced {tmp_path}/a.safetensors, from {run}@000002 (live)\n" in shown
    assert {t.dtype for t in load_file(live).values()} == {torch.bfloat16}
    expected = trained(run, live=True).named
    assert all(torch.equal(t, expected[n].bfloat16()) for n, t in load_file(live).items())
    assert header(live)["flowrl.weights"] == "live"


def test_the_end_of_a_run_writes_the_same_file(root, tmp_path):
    lora = root / "run" / "lora" / USUAL
    written = exported(tmp_path / "again", root / "run")
    assert written.name == USUAL and written.read_bytes() == lora.read_bytes()
    tensors = find_weights(root / "run").tensors()
    config = load_config(root / "run" / "config.json", trust=True)
    policy = policy_of(root / "run", tensors)
    policy.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / USUAL)
    found = load_file(lora)
    assert saved.keys() == found.keys() and all(torch.equal(saved[n], found[n]) for n in saved)
    assert run_lora(config, root / "run", tensors, 2) == lora.read_bytes()
    beside = root / "run" / "checkpoints" / "000002" / USUAL
    assert beside.read_bytes() == lora.read_bytes()


def test_the_header_says_how_to_sample(root, tmp_path):
    file = exported(tmp_path / "k", f"{root}/run@1", format="kohya")
    facts = header(file)
    expected = {
        "base_model": "someone/demo-medium",
        "base_model_license": "demo-community",
        "reward": "reward.py:Redness",
        "iteration": "1",
        "weights": "average",
        "resolution": "16x16",
        "guidance_scale": "2",
        "negative_prompt": "dull",
        "solver": "euler",
        "steps": "4",
        "prompt_tokens": "24",
        "train_sampler": "flow-sde(noise_level=0.7)",
    }
    assert {name: facts[f"flowrl.{name}"] for name in expected} == expected
    assert facts["modelspec.architecture"] == "stable-diffusion-3/lora"
    assert facts["modelspec.license"] == "demo-community"
    assert (facts["ss_network_module"], facts["ss_network_dim"]) == ("networks.lora_sd3", "2")
    assert str(root) not in json.dumps(facts) and made_file(file.read_bytes())
    assert json.loads((tmp_path / "k" / "export.json").read_text())["flowrl.iteration"] == "1"


def test_the_card_beside_an_export_says_which_weights(root, run, tmp_path):
    exported(tmp_path / "first", f"{run}@best")
    text = (tmp_path / "first" / "README.md").read_text()
    values = yaml.safe_load(text.split("---\n")[1])
    assert values["base_model"] == "someone/demo-medium"
    assert (values["license"], values["license_name"]) == ("other", "demo-community")
    for line in (
        "| steps | 4 (training: 4) |",
        "| classifier-free guidance | 2, in training and in evaluation |",
        "| negative prompt | `dull` |",
        "| prompt length | at most 24 tokens |",
        "| size | 16 x 16 pixels |",
        "the highest held-out reward among the kept checkpoints |",
        "--model someone/demo-medium --prompts FILE --reward reward.py:Redness --num-steps 4",
        "| `reward.py:Redness` | 0.0",
    ):
        assert line in text, line
    exported(tmp_path / "own", run, live=True, base_model="me/other", format="kohya")
    text = (tmp_path / "own" / "README.md").read_text()
    assert "base_model: me/other" in text and "not averaged, of iteration 2" in text
    assert "The run has not evaluated these weights." in text
    use = text.split("## Use\n\n")[1]
    assert "```python" not in text and use.startswith("The file `own.safetensors` has the names of")
    assert "diffusers does not load these names" in use


def test_a_lora_of_another_program_is_converted(root, tmp_path, capsys):
    lora = trained(root / "run").times(3.0)
    named = {
        name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): tensor
        for name, tensor in lora.named.items()
    }
    save_file(named, tmp_path / "theirs.safetensors")
    given = {"model": root / "model", "format": "diffusers"}
    file = exported(tmp_path / "mine.safetensors", tmp_path / "theirs.safetensors", **given)
    found = load_file(file)
    assert all(torch.equal(found[name], tensor) for name, tensor in lora.named.items())
    zero = lora.times(0.0)
    (tmp_path / "zero.safetensors").write_bytes(lora_file(zero, "diffusers", SD3))
    huge = lora.times(1e38)
    (tmp_path / "huge.safetensors").write_bytes(lora_file(huge, "diffusers", SD3))
    line = f"export {tmp_path}/huge.safetensors --model {root}/model --dtype float16"
    assert "values that are not finite" in error_of(
        f"{line} --out {tmp_path}/b.safetensors", capsys
    )
    assert not (tmp_path / "b.safetensors").exists()
    exported(tmp_path / "nothing", tmp_path / "zero.safetensors", model=root / "model")
    assert "Warning: B = 0 in all 15 layers: the LoRA changes nothing" in capsys.readouterr().out
    assert not (tmp_path / "nothing" / "README.md").exists()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("layer", "a", "b"),
    [
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", "lora_down", "lora_up"),
        ("diffusion_model.joint_blocks.0.x_block.attn.qkv", "lora_A", "lora_B"),
    ],
)
def test_a_dense_fused_layer_is_converted(layer, a, b, form, root, tmp_path):
    """Of other programs, whose q, k and v share the matrix A; with alpha 4 and rank 8."""
    width = load_file(next((root / "model" / "transformer").glob("*.safetensors")))[
        "transformer_blocks.0.attn.to_q.weight"
    ].shape[0]
    down, up = torch.randn(8, width), torch.randn(3 * width, 8)
    named = {f"{layer}.{a}.weight": down, f"{layer}.{b}.weight": up}
    save_file(named | {f"{layer}.alpha": torch.tensor(4.0)}, tmp_path / "theirs.safetensors")
    file = exported(
        tmp_path / "out", tmp_path / "theirs.safetensors", model=root / "model", format=form
    )
    found = read_lora(file, import_module("diffusers").StableDiffusion3Pipeline).tensors
    for part, rows in zip("qkv", up.split(width), strict=True):
        name = f"transformer_blocks.0.attn.to_{part}"
        product = found[f"{name}.lora_B.weight"] @ found[f"{name}.lora_A.weight"]
        assert_close(product, rows @ down * 4 / 8)


@pytest.mark.parametrize("name", CASES)
def test_merged_weights_give_the_image_of_the_adapter(name, tmp_path):
    case = CASES[name]
    policy = fill(case.policy())
    base = case.make()
    saved(case, tmp_path / "base")
    lora = lora_of_run(policy.trainable(), policy.adapters.scale)
    kind = type(base)
    form = "kohya" if kind.__name__ in LAYERS else "diffusers"
    (tmp_path / "k.safetensors").write_bytes(lora_file(lora, form, kind.__name__))
    lora = read_lora(tmp_path / "k.safetensors", kind)
    (tmp_path / "merged").mkdir()
    write_merged(tmp_path / "merged", tmp_path / "base", [lora])
    noise = noise_of(policy)
    merged = case.picture(kind.from_pretrained(tmp_path / "merged"), noise)
    pipe = case.make()
    pipe.load_lora_weights(lora.named)
    assert_close(merged, case.picture(pipe, noise), atol=5e-6, rtol=0)
    assert (merged - case.picture(case.make(), noise)).abs().max() > 1e-3
    for part in ("vae", "scheduler"):
        for path in (tmp_path / "base" / part).iterdir():
            assert (tmp_path / "merged" / part / path.name).read_bytes() == path.read_bytes()


def test_merging_rounds_once_and_refuses_other_models(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weight, up = (torch.randn(6, size, generator=generator) for size in (4, 2))
    down = torch.randn(2, 4, generator=generator)
    (tmp_path / "base" / "transformer").mkdir(parents=True)
    write_json(tmp_path / "base" / "model_index.json", {"transformer": ["diffusers", "X"]})
    stored = weight.bfloat16()
    save_file(
        {"a.weight": stored, "a.bias": stored[0].clone()},
        tmp_path / "base" / "transformer" / "model.safetensors",
    )
    lora = Lora({"a.lora_A.weight": down, "a.lora_B.weight": up})
    (tmp_path / "out").mkdir()
    for loras, weights, dtype, expected in (
        ([lora], {}, None, (stored.float() + up @ down).bfloat16()),
        ([lora, lora], {}, None, (stored.float() + up @ down + up @ down).bfloat16()),
        ([lora], {}, torch.float32, stored.float() + up @ down),
        ([], {"a.weight": weight}, None, stored),
        ([lora], {"a.weight": weight}, torch.float32, weight + up @ down),
    ):
        write_merged(tmp_path / "out", tmp_path / "base", loras, weights, dtype)
        found = load_file(tmp_path / "out" / "transformer" / "model.safetensors")
        assert torch.equal(found["a.weight"], expected)
        assert torch.equal(found["a.bias"], stored[0].to(found["a.bias"].dtype))
    other = Lora({"b.lora_A.weight": down, "b.lora_B.weight": up})
    with pytest.raises(
        CheckpointError, match=r"another model than .*: b.weight of \[6, 4\] is not there"
    ):
        write_merged(tmp_path / "out", tmp_path / "base", [other])
    narrow = Lora({"a.lora_A.weight": down[:, :3], "a.lora_B.weight": up})
    with pytest.raises(CheckpointError, match=r"a.weight of \[6, 3\] is \[6, 4\] there"):
        write_merged(tmp_path / "out", tmp_path / "base", [narrow])
    for weights, message in (
        ({"c.weight": weight}, "1 trained weights are not in"),
        ({"a.weight": weight[:3]}, r"a.weight is \[3, 4\], \[6, 4\] in the base"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_merged(tmp_path / "out", tmp_path / "base", weights=weights)


def test_layers_without_effect_are_named():
    last, first = "transformer_blocks.1.attn.add_q_proj", "transformer_blocks.0.attn.add_q_proj"
    ones = {
        f"{layer}.lora_{x}.weight": torch.ones(2, 2)
        for layer in (last, first, *(f"transformer_blocks.{n}.attn.to_q" for n in range(5)))
        for x in "AB"
    }
    expected = f"B = 0, no change, in {last} (as expected: the image does not depend on the output)"
    flux = "FluxPipeline"
    for pipeline, idle, lines in (
        (SD3, [], []),
        (SD3, [last], [expected]),
        (SD3, [last, first], [expected, f"Warning: B = 0, no change, in {first}"]),
        (flux, [last], [f"Warning: B = 0, no change, in {last}"]),
    ):
        zero = {f"{layer}.lora_B.weight": torch.zeros(2, 2) for layer in idle}
        lora = Lora({n: t for n, t in (ones | zero).items() if n.split(".")[1] in "01"})
        assert notes(lora, pipeline) == lines
    zero = {name: torch.zeros(2, 2) for name in ones if name.endswith("to_q.lora_B.weight")}
    (line,) = notes(Lora(ones | zero), flux)
    assert line.endswith("transformer_blocks.2.attn.to_q and 2 more")


def test_a_written_file_must_have_every_layer(root, tmp_path):
    lora, kind = trained(root / "run"), import_module("diffusers").StableDiffusion3Pipeline
    file = tmp_path / "a.safetensors"
    for form in FORMATS:
        file.write_bytes(lora_file(lora, form, SD3))
        check_lora(file, lora, kind)
    named = {n: t for n, t in lora.named.items() if ".1.attn.to_v." not in n}
    save_file(named, file)
    with pytest.raises(CheckpointError, match=r"no matrices of 1 layers, such as .*1\.attn\.to_v"):
        check_lora(file, lora, kind)


def test_errors_name_what_was_found_before_anything_is_loaded(root, run, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run / "config.json", empty)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "novel.txt").write_text("Call me Ishmael.")
    (tmp_path / "mine.safetensors").write_bytes(b"of somebody else")
    lora, out = root / "run" / "lora", f"--out {tmp_path}/out"
    assert flowrl_(f"train {MIXTURE} --iterations 1 --out {tmp_path}/points") == 0
    CASES["flux"].make().save_pretrained(tmp_path / "flux")
    exported(tmp_path / "v1.0", f"{run}@best", format="kohya")
    assert f"and its card, README.md, from {run}@00000" in capsys.readouterr().out
    edited = shutil.copytree(run, tmp_path / "edited")
    config = load_config(run / "config.json", trust=True)
    write_json(edited / "config.json", config.replace(lora_rank=1).as_dict())
    for line, message in (
        (f"{edited} {out}", "has matrices of rank 2, but lora_rank is 1 in"),
        (f"{tmp_path}/none {out}", "none does not exist; allowed: the folder of a run"),
        (f"{empty} {out}", "has no checkpoint yet"),
        (f"{run}@7 {out}", "no checkpoint '000007'"),
        (f"{lora} {out}", "model = '' is not allowed; allowed: the base model of the weights"),
        (f"{lora} --model {tmp_path} {out}", "no readable model_index.json"),
        (
            f"{lora} --model {tmp_path}/flux --format kohya {out}",
            "they belong to another model than",
        ),
        (f"{tmp_path}/points {out}", "is a run of the built-in world mixture"),
        (f"{run} --out {tmp_path}/foreign", "this one contains other files"),
        (f"{run} --out {tmp_path}/mine.safetensors", "a new file, or one that this"),
        (f"{run} --out {tmp_path}/a.safetensors --format merged", "the name of a folder"),
        (f"{run} {out} --verify", "--trust"),
        (f"{run} --out {tmp_path}/a.ckpt", f"out = '{tmp_path}/a.ckpt' is not allowed; allowed"),
        (f"{run} --out {tmp_path}/v1.0", "v1.0' is not allowed; allowed: a new folder: this one"),
        (f"{run} {out} --push me/mine", "HF_HUB_OFFLINE = '1' is not allowed; allowed: 0"),
        (f"{lora} --model {root}/model {out} --verify", "only for the weights of a run"),
    ):
        assert message in error_of(f"export {line}", capsys), line
        assert not (tmp_path / "out").exists(), line
    assert (tmp_path / "foreign" / "novel.txt").exists()


def test_uploads_happen_only_when_typed(root, tmp_path, monkeypatch, capsys):
    calls = []

    class Hub:
        def create_repo(self, name, **options):
            calls.append((name, options))
            return f"https://hub.example/{name}"

        def upload_folder(self, repo_id, folder_path, ignore_patterns):
            files = sorted(path.name for path in folder_path.iterdir() if path.is_file())
            calls.append((repo_id, files, ignore_patterns))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    exported(tmp_path / "a", root / "run")
    assert calls == []
    exported(tmp_path / "b", root / "run", push="me/mine")
    created, (name, files, ignored) = calls
    assert created == ("me/mine", {"exist_ok": True}) and name == "me/mine"
    assert {"README.md", USUAL, "config.yaml"} <= {*files} and ignored == [".lock*"]
    assert "Uploaded to https://hub.example/me/mine" in capsys.readouterr().out

    def refuse(self, name, **options):
        raise OSError("401: log in first")

    monkeypatch.setattr(Hub, "create_repo", refuse)
    line = f"export {root}/run --out {tmp_path}/c --push me/mine"
    error = error_of(line, capsys)
    assert "is complete, but the upload to me/mine failed (OSError: 401: log in first)" in error
    assert (tmp_path / "c" / USUAL).exists()


def draws(run, name):
    """The first sample of an evaluation with the policy of a run."""
    policy = policy_of(run, find_weights(f"{run}@{name}").tensors())
    count = load_config(run / "config.json", trust=True).evaluation.eval_samples
    text = (run / "samples" / "prompts.txt").read_text().splitlines()[0]
    noise = initial_noise(policy, count)[:1]
    (batch,) = sample_images(policy, [Prompt(text)], noise, 4)
    return batch.images[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["diffusers", "comfyui", "merged"])
def test_the_snippet_of_the_card_draws_the_first_sample_of_the_run(root, run, tmp_path, form):
    """Executed as it is, but for the device and the names of folders of other machines."""
    out = tmp_path / "out"
    arguments = words(format=form, out=out, verify=True, trust=True)
    assert main(["export", f"{run}@000002", *arguments]) == 0
    found = executed(out, root / "model", "someone/demo-medium")
    assert_close(found, draws(run, "000002"), atol=5e-6, rtol=0)
    assert (found - draws(run, "000001")).abs().max() > 1e-3


@pytest.mark.slow
def test_verify_says_which_program_loaded_the_file(root, tmp_path, capsys):
    for form, dtype, how in (
        ("diffusers", "float32", "loaded by diffusers"),
        ("comfyui", "bfloat16", "loaded by diffusers"),
        ("kohya", "float32", "read by flowrl; diffusers does not load this format"),
        ("merged", "bfloat16", "loaded by diffusers"),
    ):
        out = tmp_path / form
        options = words(format=form, dtype=dtype, out=out, verify=True, trust=True)
        assert main(["export", f"{root}/run", *options]) == 0
        line = re.search(
            r"Verified: .* by at most (.*) \(the file was (.*)\)", capsys.readouterr().out
        )
        assert line is not None and line[2] == how, form
        assert (float(line[1]) > 1e-4) == (dtype == "bfloat16"), form
    empty = tmp_path / "empty.safetensors"
    save_file({"nothing": torch.zeros(2, 2)}, empty)
    config = load_config(root / "run" / "config.json", trust=True)
    for form in ("diffusers", "kohya"):
        with pytest.raises(CheckpointError, match=r"empty.safetensors"):
            largest_difference(find_weights(root / "run"), config, empty, form)


def executed(out, model, name):
    """The image of the snippet in a card."""
    code = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code = code.replace('"cuda"', '"cpu"').replace("THIS_FOLDER", str(out))
    code = re.sub(r"\)\.(images|frames)\[0\]", r', output_type="pt").\1[0]', code)
    names = {}
    exec(code.replace(f'"{name}"', f'"{model}"'), names)
    return names["video" if "video" in names else "image"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "flux2-klein", "z-image", "qwen-image", "wan", "wan-2.2"])
def test_the_snippet_of_other_families_draws_the_first_sample(name, tmp_path, capsys):
    case = CASES[name]
    settings = {"preset": "tiny", "lora_rank": 2, "learning_rate": 0.3, "groups": 1}
    settings |= {"iterations": 1, "checkpoint_every": 1, "ema_decay": 0, "tracker": "none"}
    settings |= {"guidance_scale": 1.5, "num_frames": case.options.num_frames}
    files = model_files(tmp_path, pipe=case.make())
    files["max_sequence_length"] = case.options.max_sequence_length
    assert main(["train", *words(**files, **settings, out=tmp_path / "run")]) == 0
    named = case.family.pipeline in LAYERS
    for form in ("comfyui" if named else "diffusers", "merged"):
        out = tmp_path / form
        assert main(["export", f"{tmp_path}/run", *words(format=form, out=out)]) == 0
        found = executed(out, tmp_path / "model", "model")
        assert_close(found, draws(tmp_path / "run", "000001"), atol=2e-5, rtol=0)
    hows = dict.fromkeys(("comfyui", "kohya") if named else (), "loaded by diffusers")
    if name.startswith("wan"):
        hows["kohya"] = "read by flowrl; diffusers"
    if name == "flux":  # diffusers' converter has the width of the real model built in
        del hows["kohya"]
    for form, how in hows.items():
        options = words(format=form, out=tmp_path / f"{form}-checked", verify=True, trust=True)
        assert main(["export", f"{tmp_path}/run", *options]) == 0
        assert f"(the file was {how}" in capsys.readouterr().out, form


@pytest.mark.slow
def test_full_weights_become_a_pipeline_that_trains(tmp_path, capsys):
    settings = {"preset": "tiny", "tuning": "full", "groups": 1, "iterations": 1}
    settings |= {"tracker": "none", "learning_rate": 1e-2}
    files = model_files(tmp_path)
    assert main(["train", *words(**files, **settings, out=tmp_path / "run")]) == 0
    arguments = words(format="merged", out=tmp_path / "merged", verify=True, trust=True)
    assert main(["export", str(tmp_path / "run"), *arguments]) == 0
    files["model"] = str(tmp_path / "merged")
    assert main(["train", *words(**files, **settings, out=tmp_path / "next")]) == 0
    error = error_of(f"export {tmp_path}/run --out {tmp_path}/x", capsys)
    assert "all weights of a transformer, and not a LoRA; allowed: --format merged" in error


@pytest.mark.slow
def test_a_run_on_top_of_other_weights_says_so_and_merges_them(root, tmp_path, capsys):
    tiny_sd3(seed=5).transformer.save_pretrained(tmp_path / "start" / "transformer")
    settings = {"preset": "tiny", "lora_rank": 2, "groups": 1, "iterations": 1}
    settings |= {"tracker": "none", "learning_rate": 0.3, "ema_decay": 0}
    settings |= {"adapter": tmp_path / "start"}
    settings |= {"frozen_adapters": f"style={root}/run/lora:0.5"}
    files = model_files(tmp_path)
    assert main(["train", *words(**files, **settings, out=tmp_path / "run")]) == 0
    for form in ("kohya", "merged"):
        capsys.readouterr()
        arguments = words(format=form, out=tmp_path / form, verify=True, trust=True)
        assert main(["export", f"{tmp_path}/run", *arguments]) == 0
        shown = capsys.readouterr().out
        assert "Verified: an image of the run and of the file differ by at most" in shown
        for text in (f"style={root}/run/lora:0.5", str(tmp_path / "start")):
            warning = f"Warning: the run was trained on top of {text}, which is not in the file"
            assert (warning in shown) == (form == "kohya")
    text = (tmp_path / "kohya" / "README.md").read_text()
    assert "| further LoRAs | `style=lora:0.5`" in text
    # a file that does not belong to the run is found out
    other = load_file(tmp_path / "kohya" / "kohya.safetensors")
    save_file({n: t * 2 if "up" in n else t for n, t in other.items()}, tmp_path / "o.safetensors")
    config = load_config(tmp_path / "run" / "config.json", trust=True)
    saved = find_weights(tmp_path / "run")
    with pytest.raises(CheckpointError, match="gives another image than the run: a pixel differs"):
        largest_difference(saved, config, tmp_path / "o.safetensors", "kohya")

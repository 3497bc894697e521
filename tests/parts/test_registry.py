"""Parts by name: built-in, from a file, from an installed plug-in package."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from small_run import MIXTURE, flowrl_

from flowrl.cli.main import load_command
from flowrl.core.errors import ConfigError
from flowrl.credit import GDPO, StepwiseGain, Uniform
from flowrl.flow import UniformTimes
from flowrl.losses import ClippedLoss
from flowrl.probes import Completion, NoProbe, Substeps
from flowrl.run.config import RunConfig
from flowrl.run.models.hub import family_of
from flowrl.run.parts.registry import (
    KINDS,
    available,
    build,
    check_part,
    options_of,
    shadowed,
    summary_of,
)
from flowrl.run.parts.settings import owners
from flowrl.run.parts.specs import Spec, parse_spec
from flowrl.run.parts.trust import code_of
from flowrl.samplers import CPS, FlowSDE

COMPARE = f"compare {MIXTURE} --seeds 0 --methods flow-grpo --workers 1 --out "

PLUGIN = '''
import torch
from flowrl.probes import NoProbe


class LastDecisions:
    """All credit to the last two decisions."""

    probe = NoProbe()

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def assign(self, values, decisions):
        final = values[..., -1] - values[..., -1].mean(1, keepdim=True)
        advantages = torch.zeros_like(values[..., 1:])
        advantages[..., -2:] = self.scale * final[..., None]
        return advantages


class Brightness:
    """Mean of the pixels."""

    def score(self, images, prompts):
        return images.flatten(1).mean(1)
'''


@pytest.fixture
def plugin_folder(tmp_path):
    """A folder with an installed package that has entry points of two kinds."""
    site, points = tmp_path / "site", "last-decisions = {0}:LastDecisions\nbroken = {0}:Missing\n"
    points += "[flowrl.rewards]\nbrightness = {0}:Brightness"
    declared(site, "sample-plugin", "flowrl.credit", points.format("sample_plugin"))
    (site / "sample_plugin.py").write_text(PLUGIN)
    return site


def declared(site, package, group, points):
    """A folder for the path of imports with the metadata of an installed package that declares
    these entry points.
    """
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
    return site


@pytest.mark.satellite
def test_an_installed_plugin_is_found_by_name_on_the_command_line(plugin_folder, tmp_path):
    out = tmp_path / "run"
    script = f"""
import sys
sys.path[:0] = [{str(plugin_folder)!r}, {str(Path(__file__).parents[1])!r}]
from small_run import MIXTURE, flowrl_
assert flowrl_("parts --kind credit") == 0
assert flowrl_("explain 'last-decisions(scale=2)' --out {tmp_path}/x.png") == 0
parts = "--credit 'last-decisions(scale=0.5)' --reward brightness --window 0:3"
assert flowrl_(f"train {{MIXTURE}} {{parts}} --out {out}") == 0
assert flowrl_(f"train {{MIXTURE}} --credit broken") == 2
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "last-decisions  [sample-plugin]: All credit to the last two decisions." in done.stdout
    assert "scale=1.0" in done.stdout
    assert "loading its plug-in sample-plugin (sample_plugin:Missing) failed" in done.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["algorithm"]["method"] == "last-decisions(scale=0.5)"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 2
    assert rows[0]["evaluation"]["reward"] != rows[0]["evaluation"]["soft"]


def test_options_reach_the_part():
    assert build("credit", "gdpo(rule='stepwise-gain(lam=0.5)')") == GDPO(StepwiseGain(lam=0.5))
    assert build("sampler", "cps", noise_level=0.3) == CPS(0.3)
    assert build("sampler", "flow-sde(noise_level=0.5)", noise_level=0.3) == FlowSDE(0.5)
    loss = build("loss", "clipped(kl=without_delta)", clip_range=1e-5, kl_weight=0.1)
    assert loss == ClippedLoss(1e-5, kl_weight=0.1, kl="without_delta")


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("credit", "turning-pont", "unknown credit rule 'turning-pont'.*mean 'turning-point'"),
        ("credit", "uniform(std=open('x'))", "cannot be read"),
        ("credit", "stepwise-gain(probe=all)", "unknown probe 'all'; allowed: branch, .*, or path"),
        ("loss", "awm(times=even)", "unknown distribution of training times 'even'; allowed: l"),
        ("loss", "awm(times='uniform(lo=0.1)')", "times: uniform has no option lo; allowed: count"),
    ],
)
def test_what_is_wrong_is_named(kind, spec, words):
    with pytest.raises(ConfigError, match=words):
        build(kind, spec)


def test_a_part_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    imports = "from flowrl.core.protocols import RewardModel\nfrom flowrl.samplers import CPS\n"
    file.write_text(
        f"{imports}\n\ndef fails() -> RewardModel:\n    raise RuntimeError('no such model')\n"
    )
    with pytest.raises(
        ConfigError, match="CPS is not a credit rule; it needs an attribute `probe`"
    ):
        build("credit", f"{file}:CPS")
    assert build("sampler", f"{file}:CPS(noise_level=0.2)") == CPS(0.2)
    with pytest.raises(ConfigError, match="RuntimeError: no such model"):
        build("reward", f"{file}:fails")


def test_every_built_in_part_can_be_listed_and_built():
    for kind in KINDS:
        for name, origin in available(kind).items():
            if origin == "flowrl":
                assert summary_of(kind, name)
                if inspect.Parameter.empty in options_of(kind, name).values():
                    with pytest.raises(ConfigError, match=f"{name} needs "):
                        build(kind, name)
                else:
                    build(kind, name, noise_level=0.5, seconds=60.0, heldout=("a",))
                options_of(kind, name)


PROBE = """
from dataclasses import dataclass

from flowrl.probes import Probe


@dataclass(frozen=True)
class Last(Probe):
    nodes: int = 2

    def estimate(self, run):
        return {}
"""


def test_probes_as_parts(tmp_path):
    """Options in an inner spec, a bare word that ends in ++, and a class in a file."""
    file = tmp_path / "my.py"
    file.write_text(PROBE)
    rule = build("credit", "gdpo(rule=\"stepwise-gain(probe='completion(solver=dpm++ )')\")")
    assert rule.probe == Completion(solver="dpm++")
    assert build("credit", "stepwise-gain(probe='substeps:3')").probe == Substeps(3)
    assert build("credit", "stepwise-gain(probe=none)").probe == NoProbe()
    spec = f"stepwise-gain(probe='{file}:Last(nodes=4)')"
    assert build("credit", spec).probe.nodes == 4


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("substeps(solvr=heun)", "substeps has no option solvr; allowed: .*solver"),
        ("substeps(solver=rk4)", r"Substeps.solver = 'rk4' .*one of euler, heun, dpm\+\+, unipc"),
        ("substeps(count=4, solver=heun)", "Substeps.count = 4 .*odd with solver heun"),
        ("substeps(count=2.5)", "Substeps.count = 2.5 is not allowed; allowed: a whole number"),
        ("completion(dtype=float8)", "Completion.dtype = 'float8' .*one of own, bfloat16"),
        ("tweedie(every=2)", "tweedie has no option every; allowed: none"),
        ("os:system", "os:system is not a probe; it needs a class derived from flowrl.probes"),
        ("substeps(solver=dpm++", r"expected .* at its end"),
    ],
)
def test_bad_probes_are_named(spec, words):
    with pytest.raises(ConfigError, match=words):
        build("credit", f"stepwise-gain(probe='{spec}')")


def test_training_times_by_spec():
    loss = build("loss", "awm(times='uniform(low=0.1, shared=true)')")
    assert loss.times == UniformTimes(low=0.1, shared=True)
    times = KINDS["times"].built_in
    made = {type(build("loss", f"diffusion-nft(times={name})").times) for name in times}
    assert made == set(map(resolve_name, times.values()))


def test_a_spec_is_a_name_with_options():
    spec = parse_spec(" weighted-sum(models={'pick': 'pickscore', 'text': 'ocr(side=64)'}) ")
    assert (spec.name, spec.file) == ("weighted-sum", None)
    assert spec.nested() == [("reward", "pickscore"), ("reward", "ocr(side=64)")]
    mine = parse_spec("some/rules.py:Mine(scale=2, rule=uniform)")
    assert (mine.file, mine.nested()) == (Path("some/rules.py"), [("credit", "uniform")])
    assert parse_spec("uniform") == Spec("uniform", {})


def test_the_list_of_parts_names_options_of_train(capsys):
    assert flowrl_("parts") == 0
    named = re.findall(r"^\S+ \(--([\w-]+)\)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(named) == len(KINDS) + 1  # and the methods
    for option in named:
        assert option.replace("-", "_") in owners(RunConfig)


@pytest.mark.parametrize(
    ("group", "name", "use"),
    [
        ("flowrl.commands", "twice", load_command),
        ("flowrl.rewards", "twice", lambda name: build("reward", name)),
        ("flowrl.credit", "twice", lambda name: build("credit", name)),
        ("flowrl.families", "TwicePipeline", family_of),
    ],
)
def test_a_name_of_two_packages_is_one_error_that_names_both(
    group, name, use, tmp_path, monkeypatch
):
    for package in ("one", "other"):
        site = declared(tmp_path / package, package, group, f"{name} = {package}:Thing")
        monkeypatch.syspath_prepend(str(site))
    with pytest.raises(
        ConfigError, match=rf"'{name}' is offered by several .*: one, other; remove"
    ):
        use(name)


def test_parts_within_parts_need_no_quotes():
    rule = build("credit", "weighted(rule=sibling-relative(probe=comb(branches=6)))")
    assert rule.rule.probe.branches == 6
    text = "weighted-sum(models={pick: pickscore, text: ocr(side=64)}, weights={text: .5})"
    models = {"pick": "pickscore", "text": "ocr(side=64)"}
    assert parse_spec(text).options == {"models": models, "weights": {"text": 0.5}}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("weighted(rule=uniform(std=none)", "expected ',' or ')' at its end"),
        (
            "uniform(**{'std': 1})",
            "expected option=value at character 9, before \"**{'std': 1})\"",
        ),
        ("uniform(std none)", "expected option=value at character 9, before 'std none)'"),
        ("uniform(std=none))", "expected the end of the text at character 18, before ')'"),
        ("uniform(std=2*3)", "expected ',' or ')' at character 14, before '*3)'"),
        ("uniform(std=" + "(" * 60, "expected at most 50 levels of brackets at character 63"),
    ],
)
def test_errors_name_the_place(text, place):
    with pytest.raises(ConfigError, match=re.escape(f"credit = {text!r} cannot be read: {place}")):
        parse_spec(text, "credit")


RULE_WITH_NEIGHBOUR = """
import helpers
from tools.scale import SCALE
from flowrl.credit import Uniform

class Mine(Uniform):
    name = f"{helpers.NAME} {SCALE}"
"""


def two_folders(tmp_path):
    """Two folders with files of the same names."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        for path, text in (
            ("my_rules.py", RULE_WITH_NEIGHBOUR),
            ("helpers.py", f"NAME = {folder.name!r}"),
            ("random.py", "raise SystemExit('not that of the standard library')"),
            ("tools/__init__.py", ""),
            ("tools/scale.py", f"SCALE = {folder.name.upper()!r}"),
        ):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    return folders


def test_a_file_imports_its_neighbours_and_those_of_no_other(tmp_path, monkeypatch):
    """From any working directory, and twice; another folder's of the same name are refused."""
    first, second = two_folders(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("helpers", "tools", "tools.scale"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(first)
    rules = [type(build("credit", f"{folder}/my_rules.py:Mine")) for folder in (first, Path())]
    assert [rule.name for rule in rules] == ["a A", "a A"]
    with pytest.raises(ConfigError, match=r"b/my_rules\.py imports .* that .*a/.* has already"):
        build("credit", f"{second}/my_rules.py:Mine")
    for name in ("helpers", "tools", "tools.scale"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert type(build("credit", f"{second}/my_rules.py:Mine")).name == "b B"
    for name in ("helpers", "tools", "tools.scale"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.satellite
def test_a_plugin_with_the_name_of_a_built_in_part_is_reported(tmp_path, monkeypatch, capsys):
    points = "uniform = one:Thing"
    monkeypatch.syspath_prepend(str(declared(tmp_path / "one", "one", "flowrl.credit", points)))
    line = "Warning: one offers a credit rule 'uniform' (one:Thing), which is never used by this"
    for command in ("parts", f"train {MIXTURE} --out {tmp_path}/run", f"{COMPARE}{tmp_path}/out"):
        assert flowrl_(command) == 0
        assert capsys.readouterr().out.count(line) == 1
    monkeypatch.undo()
    assert shadowed() == []


def test_the_family_of_a_model_counts_as_code_of_the_user(tmp_path, monkeypatch):
    declared(tmp_path, "demo", "flowrl.families", "DemoPipeline = demo_family:Demo")
    file = tmp_path / "demo_family.py"
    file.write_text("from flowrl.policies import Family\n\n\nclass Demo(Family):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, hashed in (("DemoPipeline", ["model: DemoPipeline"]), ("FluxPipeline", [])):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        assert list(code_of({"model": str(tmp_path), "credit": "pruned(rule=uniform)"})) == hashed
    assert code_of({}) == code_of({"model": "somebody/on-the-hub"}) == {}


@pytest.mark.parametrize("member", ["reads", "reads_fields", "shared_noise"])
def test_what_a_rule_needs_is_declared_in_one_place(member):
    rule = type("Rule", (Uniform,), {member: ("log_probs",)})()
    with pytest.raises(ConfigError, match=rf"Rule\.{member} = .*declared in the rule's `needs`"):
        check_part("credit", rule)

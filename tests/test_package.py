"""The package as a whole: what importing costs, the typed doors, static promises."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest
import yaml
from loading import ROOT, load

import flowrl
from flowrl.compare.paper import bibliography

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code, **environment):
    """The words that a program prints."""
    command, env = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_version_and_the_address_are_written_once():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "flowrl/__init__.py"
    address = PROJECT["project"]["urls"]["Repository"]
    assert citation["version"] == flowrl.__version__
    assert f"{{Version {flowrl.__version__}}}" in bibliography()["flowrl"]
    assert citation["repository-code"] == address
    assert f"({address})" in (ROOT / "README.md").read_text()


def test_the_citation_has_the_papers_of_all_methods():
    """`python .ci/citation.py` writes them."""
    script = load(".ci/citation.py")
    assert script.CITATION.read_text(encoding="utf-8") == script.citation()


def test_containers_get_every_package_and_install_known_extras():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    project = PROJECT["project"]
    needed = {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    needed |= {*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert not {path for path in needed if not any((path + "/").startswith(f"{s}/") for s in sent)}
    assert all((ROOT / path).exists() for path in sent)

    dockerfile = (ROOT / "Dockerfile").read_text()
    workspace = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    extras = re.findall(r"^ARG EXTRAS=(.+)$", dockerfile, re.MULTILINE)
    extras += re.findall(r"\[(.+)\]", workspace["postCreateCommand"])
    assert len(extras) == 2
    assert {*",".join(extras).split(",")} <= {*project["optional-dependencies"]}
    assert f" AS {workspace['build']['target']}\n" in dockerfile


def test_the_lowest_versions_are_the_lower_bounds():
    """constraints-lowest.txt, which `nox -s lowest` installs; of torch only one version has a CPU
    build everywhere.
    """
    project = PROJECT["project"]
    bounds = sum(project["optional-dependencies"].values(), project["dependencies"])
    lines = (ROOT / "constraints-lowest.txt").read_text().split("\n")
    lowest = {tuple(line.split("==")) for line in lines if "==" in line}
    missing = {tuple(bound.split(">=")) for bound in bounds if ">=" in bound} - lowest
    assert missing == {("torch", "2.11")}


@pytest.mark.satellite
def test_the_switch_turns_the_checks_off():
    code = "import torch; from flowrl.core.types import Gaussian\n"
    code += "print(type(Gaussian(torch.zeros(2, 3), torch.zeros(5))).__name__)"
    assert python(code, FLOWRL_TYPECHECK="0") == ["Gaussian"]
    with pytest.raises(subprocess.CalledProcessError):
        python(code, FLOWRL_TYPECHECK="1")


ROOMS = ("flow", "samplers", "credit", "losses", "rewards", "policies", "worlds", "rollout")


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_exist(room):
    module = import_module(f"flowrl.{room}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_names_of_a_room_do_not_load_heavy_packages():
    code = f"import sys, {', '.join(f'flowrl.{room}' for room in ROOMS)}"
    code += "; print(*sys.modules)"
    heavy = {"diffusers", "transformers", "peft", "matplotlib", "datasets", "scipy"}
    assert not heavy & set(python(code))


@pytest.mark.satellite
def test_the_extra_docs_suffices_for_the_reference():
    """It documents the modules that need other extras, too."""
    extras = PROJECT["project"]["optional-dependencies"]
    names = {"trackers": "tensorboard", "datasets": "datasets", "cluster": "distributed"}
    names |= {"rewards": "rapidocr", "server": "fastapi", "remote": "httpx"}
    absent = [name for extra, name in names.items() if extra not in extras["docs"][0]]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import reference_pages as r"
    code += "; [r.modules_of(name) for name in r.PAGES]; print('built')"
    assert python(code, PYTHONPATH=os.pathsep.join([str(ROOT / "docs"), *sys.path])) == ["built"]

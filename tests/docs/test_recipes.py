"""The recipes in docs/recipes, with fakes of what each is about: a package that needs an environment
of its own, or SLURM.
"""

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from flowrl_testing import check_reward
from loading import ROOT
from PIL import Image

from flowrl.core.types import Prompt
from flowrl.parts.registry import build

RECIPE = ROOT / "docs" / "recipes" / "image_reward.py"


class FakeNetwork:
    """`score(prompt, image)` as the package has it: one text, one Pillow picture, one Python
    float.
    """

    def score(self, prompt, image):
        assert isinstance(prompt, str) and isinstance(image, Image.Image) and image.mode == "RGB"
        assert not torch.is_grad_enabled()
        return (
            len(prompt)
            + float(torch.tensor(list(image.tobytes()), dtype=torch.float32).mean()) / 255
        )


@pytest.fixture
def package(monkeypatch):
    """The package's door `load(name, device=...)`; remembers how it was called."""
    calls = []
    fake = ModuleType("ImageReward")
    fake.load = lambda name, device: (calls.append((name, device)), FakeNetwork())[1]
    monkeypatch.setitem(sys.modules, "ImageReward", fake)
    return calls


def test_image_reward_keeps_the_contract(package):
    reward = build("reward", f"{RECIPE}:ImageRewardScore", trust=True, device="cpu")
    findings = check_reward(reward)
    assert findings.ok, findings
    images = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
    assert reward.score(images, [Prompt("ab"), Prompt("a")]).tolist() == pytest.approx([2.0, 2.0])
    assert reward.score(images, [Prompt("a"), Prompt("abcd")]).tolist() == pytest.approx([1.0, 5.0])
    assert package == [("ImageReward-v1.0", "cpu")], "loaded once, at the first score"


@pytest.mark.parametrize(("code", "started"), [(0, False), (130, True), (1, True)])
def test_the_slurm_script_starts_or_resumes_and_queues_a_paused_run_again(code, started, tmp_path):
    script = ROOT / "docs" / "recipes" / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    for name in ("srun", "scontrol"):
        status = code if name == "srun" else 0
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@"\nexit {status}\n')
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "runs" / "ocr"
    if started:
        run.mkdir(parents=True)
        (run / "config.json").touch()
    given = dict(SUBMIT_DIR=tmp_path, JOB_ID=7, JOB_USER="me", CPUS_PER_TASK=12)
    slurm = {f"SLURM_{name}": str(value) for name, value in given.items()}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script], env=slurm | path, capture_output=True, text=True)
    assert done.returncode == code and not done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("srun --kill-on-bad-exit=1 python -m flowrl train ")
    assert first.endswith(f"train --resume {run}" if started else f" --out {run}")
    assert rest == (["scontrol requeue 7"] if code == 130 else [])

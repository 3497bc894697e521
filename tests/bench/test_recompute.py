"""The recomputation of changed rules: exact tables pass, and a fault in a changed or an unchanged
rule is reported.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recompute.py"


def folder_of(root: Path, run: str, fault: float) -> Path:
    """One iteration of both sides: 6 steps, of which 1 to 3 are drawn; the credit is that of joint
    gains.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 4, 7, generator=generator)
    gains = values[..., [1, 2, 3, -1]].diff(dim=-1)
    apart = gains - gains.mean((1, 2), keepdim=True)
    joint = apart / (gains.std((1, 2), correction=0, keepdim=True) + 1e-4)
    drawn = torch.zeros(4, 6, dtype=torch.bool)
    drawn[:, 1:4] = True
    weights = torch.zeros(2, 4, 6).masked_fill(drawn, 1.0)
    wide = torch.zeros(2, 4, 6)
    wide[..., 1:4] = joint
    valid, std = torch.ones(2, 4, dtype=torch.bool), drawn[0].float()
    tables = {
        "values": values,
        "drawn": drawn,
        "valid": valid,
        "std": std,
        "weights": weights,
        "advantages": wide,
    }
    joint = joint.clone()
    joint[1, 2, 0] += fault
    current = {"advantages": joint, "weights": weights[..., 1:4].contiguous()}
    for side, found in (("reference", tables), ("current", current)):
        place = root / side / "rules-mixture" / "tables" / run
        place.mkdir(parents=True)
        save_file(found, place / "000001.safetensors")
    return root


@pytest.mark.parametrize("run", ["stepwise-flow-grpo", "an-unchanged-rule"])
@pytest.mark.parametrize("fault", [0.0, 1e-5])
def test_a_fault_is_reported(tmp_path: Path, run: str, fault: float) -> None:
    command = [sys.executable, str(SCRIPT), str(folder_of(tmp_path, run, fault))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run in done.stdout and done.returncode == int(fault > 0), done.stderr


def test_a_folder_without_tables_is_an_error(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=False).returncode == 1

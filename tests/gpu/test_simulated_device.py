"""Without a GPU: no operation of a rollout or a loss mixes devices, on a device that PyTorch only simulates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_device import CASES

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def outcomes():
    places = [str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    command = [sys.executable, str(HERE / "simulated_device.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_rollouts_and_losses_stay_on_their_device(outcomes, case):
    assert outcomes[case] == "ok"


@pytest.mark.parametrize("fault", ["constant on the CPU", "copy to the CPU", "index on the CPU"])
def test_a_second_device_is_noticed(outcomes, fault):
    assert "cpu and simulated" in outcomes[fault] or "simulated:0 and cpu" in outcomes[fault]

"""The weights of a finished run: any change of the file is one message."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import SMALL, error_of

from flowrl.core.errors import CheckpointError
from flowrl.training.build import trained_policy
from flowrl.training.checkpoint import load_weights, save_weights
from flowrl.training.run import Run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    Run(SMALL, folder).execute()
    return folder


CHANGES = {
    "no hash": lambda path: save_file(load_file(path), path),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "empty": lambda path: path.write_bytes(b""),
    "another run's": lambda path: save_weights(
        path, {name: tensor[:1] for name, tensor in load_file(path).items()}
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_weights_are_one_message(kind, finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    CHANGES[kind](run / "weights.safetensors")
    with pytest.raises(CheckpointError):
        trained_policy(run)
    error = error_of(f"sample --prompts 0 --weights {run} --out {tmp_path}/new.png", capsys)
    assert f"{run}/weights.safetensors" in error and error.count("\n") == 1
    assert not (tmp_path / "new.png").exists()


def test_every_flipped_bit_is_found(tmp_path):
    """Also the same bytes under another shape or type."""
    path = tmp_path / "weights.safetensors"
    tensors = {"a": torch.arange(4.0).view(2, 2), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_weights(path, tensors)
    assert torch.equal(load_weights(path)["a"], tensors["a"])
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    changed = [content.replace(b"[2,2]", b"[4,1]"), content.replace(b'"BF16"', b'"F16" ')]
    for bit in range(8 * header, 8 * len(content)):
        data = bytearray(content)
        data[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(data))
    for data in changed:
        assert data != content
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="does not match its own hash"):
            load_weights(path)

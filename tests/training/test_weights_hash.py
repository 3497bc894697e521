"""The weights of a finished run: any change of the file is one message, from `sample` and from
`evaluate`.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.cli.main import main
from flowrl.core.errors import CheckpointError
from flowrl.training.build import trained_policy
from flowrl.training.checkpoint import load_weights, save_weights


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert (
        main(
            [
                "train",
                "--preset",
                "tiny",
                "--world",
                "mixture",
                "--task",
                "direction",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    return out


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * place), len(data) - 1)] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, change) -> None:
    """As a tool would that keeps the metadata."""
    import json

    data = path.read_bytes()
    card = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path, card)


CHANGES = {
    "first bit of the data": lambda path: flip(path, 0.5),
    "last byte": lambda path: flip(path, 1.0),
    "one number": lambda path: rewrite(path, lambda tensor: tensor + 1e-6),
    "type": lambda path: rewrite(path, lambda tensor: tensor.double()),
    "broadcast": lambda path: rewrite(path, lambda tensor: tensor.flatten()[:1]),
    "transposed": lambda path: rewrite(
        path, lambda tensor: tensor.flatten().flip(0).view(tensor.shape)
    ),
    "no hash": lambda path: save_file(load_file(path), path),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "empty": lambda path: path.write_bytes(b""),
    "another run's": lambda path: save_weights(
        path, {name: tensor[:1] for name, tensor in load_file(path).items()}
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_weights_are_one_message(kind: str, finished: Path, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    CHANGES[kind](run / "weights.safetensors")
    for command in (["sample", "--prompts", "0"], ["evaluate", "--limit", "1", "--num-steps", "2"]):
        assert main([*command, "--weights", str(run), "--out", str(tmp_path / "new.png")]) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith(f"flowrl: error: weights: {run}/weights.safetensors ")
            and error.count("\n") == 1
        )
    with pytest.raises(CheckpointError):
        trained_policy(run)
    assert not (tmp_path / "new.png").exists()


def test_every_flipped_byte_is_found(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(
        path, {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    )
    whole, length = path.read_bytes(), int.from_bytes(path.read_bytes()[:8], "little")
    assert torch.equal(load_weights(path)["a"], torch.arange(6.0).view(2, 3))
    for place in range(8 + length, len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            with pytest.raises(CheckpointError, match="does not match its own hash"):
                load_weights(path)

"""The recipes in docs/recipes, with a fake of the package that each is about; the real one needs an
environment of its own.
"""

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

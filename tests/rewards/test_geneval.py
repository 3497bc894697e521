"""GenEval: verdicts by hand, the detector and the colour classifier on the real transformers
classes (tiny, random).
"""

import pytest
import torch
from seeded import rand
from tiny_rewards import tiny_clip, tiny_detector

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import Prompt
from flowrl.rewards.clip import ClipNetwork
from flowrl.rewards.geneval import (
    TEMPLATES,
    Detection,
    _crop,
    box_of,
    load_detector,
    object_colours,
    of_class,
    partial_score,
    relations,
    strict_score,
)
from flowrl.rewards.geneval_requests import COLOURS, request_of
from flowrl.run.parts.registry import build
from flowrl.testing import check_reward

LEFT, RIGHT, TOP, BOTTOM = (0, 40, 20, 60), (70, 40, 90, 60), (40, 0, 60, 20), (40, 80, 60, 99)
MASK = torch.ones(1, 1, dtype=torch.bool)
DOG, RED_DOG = {"class": "dog"}, {"class": "dog", "color": "red"}
CAT, CAT_RIGHT = (
    {"class": "cat", "count": 1},
    {"class": "cat", "count": 1, "position": ["right of", 0]},
)
TWO_DOGS = {"class": "dog", "count": 2}


@pytest.mark.parametrize(
    ("include", "dogs", "cats", "strict", "partial", "released"),
    [
        ([TWO_DOGS], [], [], 0, 0, 0),
        ([TWO_DOGS], [LEFT, TOP], [], 1, 1, 1),
        ([TWO_DOGS], [LEFT, TOP, RIGHT], [], 0, 1 / 2, 1 / 2),  # three dogs are excluded
        ([TWO_DOGS], [LEFT] * 7, [], 0, 0, -1.5),
        ([DOG], [LEFT, TOP], [], 1, 0, 0),  # more than requested is right for strict
        ([RED_DOG], [LEFT], [], 1, 1, 1),
        ([RED_DOG], [TOP], [], 0, 1 / 2, 1 / 2),
        ([RED_DOG], [LEFT, TOP], [], 1, 0, 0),
        ([DOG, CAT_RIGHT], [LEFT], [RIGHT], 1, 1, 1),
        # the server adds a 0 and a 1: (1 + 1 + 0 + 1) / 4
        ([DOG, CAT_RIGHT], [RIGHT], [LEFT], 0, 2 / 3, 3 / 4),
        ([DOG, CAT_RIGHT], [LEFT], [], 0, 1 / 3, 1 / 3),
        # the server does not look at the position of a dog with a wrong colour
        ([CAT, RED_DOG | {"position": ["above", 0]}], [TOP], [BOTTOM], 0, 2 / 4, 2 / 3),
    ],
)
def test_scores_by_hand(include, dogs, cats, strict, partial, released):
    """Objects on the left are red, others white."""
    request = request_of({"include": include, "exclude": [{"class": "dog", "count": 3}]})
    boxes = {"dog": dogs, "cat": cats}
    detections = {name: [Detection(name, 0.9, box, MASK) for box in boxes[name]] for name in boxes}

    def colours(objects, name):
        return ["red" if item.box == LEFT else "white" for item in objects]

    scores = [
        strict_score(request, detections, colours),
        *(partial_score(request, detections, colours, flag) for flag in (False, True)),
    ]
    assert scores == [strict, pytest.approx(partial), pytest.approx(released)]


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        (LEFT, RIGHT, {"left of"}),
        (TOP, BOTTOM, {"above"}),
        ((0, 0, 10, 10), (50, 50, 60, 60), {"left of", "above"}),
        ((0, 0, 100, 10), (15, 0, 115, 10), set()),  # 15 apart, 0.1 x 200 are needed
        ((0, 0, 10, 10), (6, 3, 16, 13), {"left of"}),  # (6 - 2, 3 - 2) / |(6, 3)| = (0.60, 0.15)
        ((0, 0, 10, 10), (4, 4, 14, 14), set()),  # (4 - 2) / |(4, 4)| = 0.35
    ],
)
def test_relations_by_hand(a, b, names):
    opposite = {"left of": "right of", "above": "below"}
    assert relations(a, b) == names and relations(b, a) == {opposite[name] for name in names}


def test_objects_of_a_class():
    objects = [
        Detection(name, score, LEFT, MASK)
        for name, score in [("cat", 0.9), *[("dog", 0.8)] * 17, ("dog", 0.3)]
    ]
    assert [item.score for item in of_class(objects, "dog", 0.3)] == [0.8] * 16
    assert of_class(objects[-2:], "dog", 0.3) == objects[-2:-1]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return str(tiny_detector(tmp_path_factory.mktemp("detector")))


def images(count=3):
    small = rand(count, 3, 5, 5, seed=4)
    return torch.nn.functional.interpolate(small, size=(60, 80), mode="bilinear")


def test_detector(detector):
    network = load_detector(detector, batch=2)
    assert network.names == ["person", "cat", "dog", "computer mouse"]
    per_image = network.find(images(), 0.0)
    assert len(per_image) == 3 and all(per_image)
    for objects in per_image:
        scores = [item.score for item in objects]
        assert scores == sorted(scores, reverse=True)
        for item in objects:
            assert item.mask.shape == (60, 80) and item.box == box_of(item.mask)
    assert network.find(images(), 0.999999) == [[], [], []]


def test_colours_are_those_of_the_masked_object_on_grey(clip):
    """Equal to the features of the crop by hand; the box around the mask ends behind its last
    pixel.
    """
    network, image = ClipNetwork(clip), images(1)[0]
    mask = torch.zeros(60, 80, dtype=torch.bool)
    mask[10:30, 20:50], mask[10, 20] = True, False
    box = box_of(mask)
    assert box == (20.0, 10.0, 50.0, 30.0)
    templates = [[t.format(colour=c, name="dog") for t in TEMPLATES] for c in COLOURS]
    means = torch.stack([network.texts(texts).mean(0) for texts in templates])
    crop = image[:, 10:30, 20:50].clone()
    crop[:, 0, 0] = 0.6
    classes = means / means.norm(dim=1, keepdim=True)
    best = COLOURS[int((classes @ network.images(crop[None])[0]).argmax())]
    assert object_colours(network, image, [Detection("dog", 0.9, box, mask)], "dog") == [best]
    everything = Detection("dog", 0.9, (0.0, 0.0, 80.0, 60.0), mask)
    on_grey = _crop(torch.where(mask, image, 0.1), everything)
    assert torch.equal(on_grey, torch.where(mask, image, 0.6))
    assert object_colours(network, image, [], "dog") == []


def prompts():
    requests = (
        [TWO_DOGS],
        [CAT, RED_DOG | {"position": ["above", 0]}],
        [{"class": "computer mouse"}],
    )
    return [Prompt("x", {"tag": "counting", "include": request}) for request in requests]


@pytest.mark.parametrize("form", ["strict", "partial", "released"])
def test_keeps_the_contract(form, detector, clip):
    spec = (
        f"geneval(form={form}, model='{detector}', clip='{clip}', threshold=0.1,"
        " counting_threshold=0.12)"
    )
    report = check_reward(build("reward", spec), (images(), prompts()))
    assert report.ok, report


def test_counting_has_a_threshold_of_its_own(detector, clip):
    spec = f"geneval(model='{detector}', clip='{clip}', threshold=0.01, counting_threshold=0.999)"
    tags = ("single_object", "counting")
    asked = [Prompt("a cat", {"tag": tag, "include": [CAT]}) for tag in tags]
    scores = build("reward", spec).score(images(1).expand(2, -1, -1, -1), asked)
    assert scores.tolist() == [1.0, 0.0]


def test_a_wrong_clip_shows_before_a_coloured_object_is_found(detector):
    spec = f"geneval(model='{detector}', clip='/no/such/folder', threshold=0.999)"
    with pytest.raises(ConfigError, match="'/no/such/folder' cannot be loaded"):
        build("reward", spec).score(images(1), prompts()[1:2])


def test_prompts_without_a_request_are_refused(detector, clip):
    reward = build("reward", f"geneval(model='{detector}', clip='{clip}')")
    zebra = {"include": [{"class": "zebra"}]}
    for metadata, problem in (
        ({}, "is not a request in GenEval's format"),
        (zebra, "no class 'zebra'"),
    ):
        with pytest.raises(RewardError, match=problem):
            reward.score(images(1), [Prompt("x", metadata)])

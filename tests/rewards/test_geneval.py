"""GenEval: verdicts by hand, the detector and the colour classifier on the real transformers classes (tiny, random)."""

import pytest
import torch
from tiny_rewards import tiny_clip, tiny_detector

from flowrl.errors import ConfigError, RewardError
from flowrl.prompts.geneval import COLOURS, request_of
from flowrl.registry import build
from flowrl.rewards.clip import load_encoder
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
    released_score,
    strict_score,
)
from flowrl.testing import check_reward
from flowrl.types import Prompt

LEFT, RIGHT, TOP = (0, 40, 20, 60), (70, 40, 90, 60), (40, 0, 60, 20)


def things(name, *boxes):
    return [Detection(name, 0.99 - 0.01 * i, box) for i, box in enumerate(boxes)]


def verdicts(metadata, found, colours=None):
    def of(objects, name):
        return [(colours or {}).get(thing.box, "white") for thing in objects]

    request = request_of(metadata)
    return strict_score(request, found, of), partial_score(request, found, of), released_score(request, found, of)


@pytest.mark.parametrize(
    ("number", "strict", "partial", "released"),
    [(0, 0, 0, 0), (1, 0, 0.5, 0.5), (2, 1, 1, 1), (3, 0, 0.5, 0.5), (4, 0, 0, 0), (7, 0, 0, -1.5)],
)
def test_counting(number, strict, partial, released):
    metadata = {"include": [{"class": "dog", "count": 2}], "exclude": [{"class": "dog", "count": 3}]}
    assert verdicts(metadata, {"dog": things("dog", *[(i, 0, i + 1, 1) for i in range(number)])}) == (strict, partial, released)


def test_more_than_asked_for_is_right_for_strict_where_nothing_is_excluded():
    """One dog is requested: two or three are right, worth nothing, and, in the released form, worth less than none."""
    request = {"include": [{"class": "dog", "count": 1}]}
    assert verdicts(request, {"dog": things("dog", LEFT, RIGHT)}) == (1, 0, 0)
    assert verdicts(request, {"dog": things("dog", LEFT, RIGHT, TOP)}) == (1, 0, -1)


@pytest.mark.parametrize(
    ("found", "colours", "strict", "partial"),
    [
        ({"dog": [LEFT]}, {LEFT: "red"}, 1, 1),
        ({"dog": [LEFT]}, {LEFT: "blue"}, 0, 0.5),
        ({"dog": [LEFT, RIGHT]}, {LEFT: "red", RIGHT: "blue"}, 1, 0),
        ({"dog": [LEFT, RIGHT]}, {LEFT: "blue", RIGHT: "red"}, 0, 0),
        ({}, {}, 0, 0),
    ],
)
def test_colours(found, colours, strict, partial):
    """The partial and the released form agree as long as the number is at most twice the requested one."""
    found = {name: things(name, *boxes) for name, boxes in found.items()}
    assert verdicts({"include": [{"class": "dog", "count": 1, "color": "red"}]}, found, colours) == (strict, partial, partial)


@pytest.mark.parametrize(
    ("dog", "cat", "strict", "partial", "released"),
    [
        ([LEFT], [RIGHT], 1, 1, 1),
        ([RIGHT], [LEFT], 0, 2 / 3, 3 / 4),
        ([LEFT], [], 0, 1 / 3, 1 / 3),
        ([], [RIGHT], 0, 1 / 3, 1 / 3),
        ([(40, 80, 60, 99)], [TOP], 0, 2 / 3, 3 / 4),
    ],
)
def test_positions(dog, cat, strict, partial, released):
    """In the released form a wrong position adds a 0 and a 1: (1 + 1 + 0 + 1) / 4."""
    include = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}]
    found = {"dog": things("dog", *dog), "cat": things("cat", *cat)}
    assert verdicts({"include": include}, found) == (strict, pytest.approx(partial), pytest.approx(released))


def test_a_position_is_not_looked_at_in_the_released_form_if_the_colour_is_wrong():
    clause = {"class": "dog", "count": 1, "color": "red", "position": ["left of", 0]}
    found = {"dog": things("dog", LEFT), "cat": things("cat", RIGHT)}
    scores = verdicts({"include": [{"class": "cat", "count": 1}, clause]}, found, {LEFT: "blue"})
    assert scores == (0, pytest.approx(2 / 4), pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        (LEFT, RIGHT, {"left of"}),
        (RIGHT, LEFT, {"right of"}),
        (TOP, (40, 80, 60, 99), {"above"}),
        ((40, 80, 60, 99), TOP, {"below"}),
        ((0, 0, 10, 10), (50, 50, 60, 60), {"left of", "above"}),
        ((0, 0, 10, 10), (1, 1, 11, 11), set()),
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),
        ((0, 0, 100, 10), (15, 0, 115, 10), set()),  # 15 apart, 0.1 x 200 are needed
        ((0, 0, 10, 10), (6, 3, 16, 13), {"left of"}),  # (6 - 2, 3 - 2) / |(6, 3)| = (0.60, 0.15)
    ],
)
def test_relations_by_hand(a, b, names):
    assert relations(a, b) == names


def test_box_of_a_mask():
    mask = torch.zeros(6, 8, dtype=torch.bool)
    mask[2, 3] = mask[4, 6] = True
    assert box_of(mask) == (3.0, 2.0, 7.0, 5.0)


def test_objects_of_a_class():
    found = [Detection("dog", s, LEFT) for s in (0.9, 0.5, 0.3)] + [Detection("cat", 0.8, LEFT)]
    assert [thing.score for thing in of_class(found, "dog", 0.3, 16)] == [0.9, 0.5]
    assert len(of_class(found, "dog", 0.0, 1)) == 1


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module", params=[True, False], ids=["mask2former", "rt-detr"])
def detector(request, tmp_path_factory):
    return str(tiny_detector(tmp_path_factory.mktemp("detector"), masks=request.param))


def pictures(count=3):
    small = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(4))
    return torch.nn.functional.interpolate(small, size=(60, 80), mode="bilinear")


def test_detector(detector):
    network = load_detector(detector, batch=2)
    assert network.names == ("person", "cat", "dog", "computer mouse")
    found = network.find(pictures(), 0.0)
    assert len(found) == 3 and all(len(objects) > 0 for objects in found)
    for objects in found:
        assert [thing.score for thing in objects] == sorted((thing.score for thing in objects), reverse=True)
        for thing in objects:
            assert thing.name in network.names and 0 <= thing.score <= 1
            if thing.mask is not None:
                assert thing.mask.shape == (60, 80) and thing.box == box_of(thing.mask)
    assert any(thing.mask is not None for objects in found for thing in objects) == ("mask2former" in str(type(network.model)))
    assert network.find(pictures(), 0.999999) == [[], [], []]


def test_colours_follow_the_text_features(clip):
    encoder, image = load_encoder(clip), pictures(1)[0]
    mask = torch.zeros(60, 80, dtype=torch.bool)
    mask[10:30, 20:50] = True
    inside = Detection("dog", 0.9, (20.0, 10.0, 50.0, 30.0), mask)
    classes = []
    for colour in COLOURS:
        mean = torch.stack([encoder.texts([t.format(colour=colour, name="dog")])[0] for t in TEMPLATES]).mean(0)
        classes.append(mean / mean.norm())
    crop = image[:, 10:30, 20:50]
    best = COLOURS[int((torch.stack(classes) @ encoder.images(crop[None])[0]).argmax())]
    assert object_colours(encoder, image, [inside], "dog") == [best]
    assert object_colours(encoder, image, [], "dog") == []


def test_what_is_outside_the_mask_does_not_count():
    image = pictures(1)[0]
    mask = torch.zeros(60, 80, dtype=torch.bool)
    mask[:, 40:] = True
    thing = Detection("dog", 0.9, (0.0, 0.0, 80.0, 60.0), mask)
    other = image.clone()
    other[:, :, :40] = 0.1
    assert torch.equal(_crop(image, thing), _crop(other, thing))
    assert float(_crop(image, thing)[0, 0, 0]) == pytest.approx(0.6)


def prompts():
    include = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "color": "red", "position": ["above", 0]}]
    return [
        Prompt("two dogs", {"tag": "counting", "include": [{"class": "dog", "count": 2}]}),
        Prompt("a red dog above a cat", {"tag": "", "include": include}),
        Prompt("a mouse", {"tag": "single_object", "include": [{"class": "computer mouse", "count": 1}]}),
    ]


@pytest.mark.parametrize("form", ["strict", "partial", "released"])
def test_keeps_the_contract(form, detector, clip):
    spec = f"geneval(form={form}, model='{detector}', clip='{clip}', threshold=0.1, counting_threshold=0.12)"
    reward = build("reward", spec)
    found = check_reward(reward, (pictures(), prompts()))
    assert found.ok, found


def test_a_wrong_clip_shows_before_a_coloured_object_is_found(detector):
    reward = build("reward", f"geneval(model='{detector}', clip='/no/such/folder', threshold=0.999)")
    with pytest.raises(ConfigError, match="'/no/such/folder' is no folder with a model"):
        reward.score(pictures(1), prompts()[1:2])
    assert reward.score(pictures(1), prompts()[2:]).tolist() == [0.0]


def test_prompts_without_a_request_are_refused(detector):
    reward = build("reward", f"geneval(model='{detector}')")
    for metadata, told in [
        ({}, "has no request"),
        ({"include": [{"class": "zebra", "count": 1}]}, "the detector has no class 'zebra'; allowed: person, cat"),
        ({"include": [{"class": "dog", "count": -1}]}, '"count" = -1 is not allowed'),
    ]:
        with pytest.raises(RewardError, match=told):
            reward.score(pictures(1), [Prompt("x", metadata)])
    with pytest.raises(ConfigError, match="form = 'loose' is not allowed; allowed: one of strict, partial, released"):
        build("reward", "geneval(form=loose)")

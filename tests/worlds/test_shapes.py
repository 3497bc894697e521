"""The shapes world: its language, its verifier, its decoder and its base model."""

import random

import pytest
import torch
from seeded import seeded

from flowrl.core.errors import CheckpointError, ConfigError, RewardError
from flowrl.core.types import Prompt
from flowrl.run.worlds import check_hash, world
from flowrl.worlds.built_in import PolicyOptions, weights_path
from flowrl.worlds.pretrain_pairs import draw_layout, render, requests_by_kind
from flowrl.worlds.render import split_cells
from flowrl.worlds.scene import (
    CELLS,
    TASKS,
    Request,
    all_requests,
    glyph_class,
    object_class,
    parse,
    split,
)
from flowrl.worlds.verifier import ShapesReward, looks, read

KINDS, FORMS = sorted(requests_by_kind()), ("strict", "graded", "soft")


def drawings(kind, count=50):
    """Requests of one kind with pictures drawn for them."""
    rng, generator = random.Random(0), seeded()
    requests = [rng.choice(requests_by_kind()[kind]) for _ in range(count)]
    layouts = torch.tensor([draw_layout(request, rng) for request in requests])
    return [r.prompt() for r in requests], layouts, render(layouts, generator)


@pytest.mark.parametrize("kind", KINDS)
def test_verifier_is_right_about_renderings_and_reconstructions(kind, shapes_policy):
    prompts, layouts, images = drawings(kind)
    assert ShapesReward("strict").score(images, prompts).mean() >= 0.99
    assert (read(images).classes == layouts).float().mean() >= 0.9999
    auto = shapes_policy.network.autoencoder
    with torch.no_grad():
        cells = auto.encode_cells(split_cells(images).flatten(0, 1)).view(-1, 4, 4, 8)
        again = auto.decode(cells.permute(0, 3, 1, 2))
    assert ShapesReward("strict").score(again, prompts).mean() >= 0.97


def picture(objects):
    """The image of objects as in "0 red circle, 9 blue square", with the number of the cell."""
    layout = [0] * CELLS
    for cell, *named in filter(None, map(str.split, objects.split(", "))):
        layout[int(cell)] = object_class(*named)
    return render(torch.tensor([layout]))


@pytest.mark.parametrize(
    ("text", "objects", "graded"),
    [
        ("two red circles", "0 red circle, 9 red circle", 1),
        ("two red circles", "0 red circle", 1 / 2),
        ("two red circles", "0 red circle, 1 red circle, 2 red circle", 2 / 3),
        ("two red circles", "0 red square, 1 blue circle", 0),
        ("red circle left of blue square", "0 red circle, 7 blue square", 1),
        ("red circle left of blue square", "3 red circle, 4 blue square", 1 / 2),
        ("red circle above blue square", "3 red circle, 4 blue square", 1),
        ("red circle above blue square", "3 red circle, 0 blue square", 1 / 2),
        ("red circle and blue square", "3 red circle, 0 blue square, 5 green square", 2 / 3),
    ],
)
def test_scores_worked_out_by_hand(text, objects, graded):
    image, prompts = picture(objects), [Prompt(text)]
    strict, partial, soft = (float(ShapesReward(form).score(image, prompts)) for form in FORMS)
    assert strict == (graded == 1) and partial == pytest.approx(graded)
    assert soft == pytest.approx(0.85 * graded + 0.15, abs=0.05)


def test_preference_parts_move_with_what_they_measure():
    request = parse("calm red pattern")
    mirrored = "0 red circle, 3 red circle, 8 red circle, 11 red circle"
    lopsided = "0 red circle, 1 red circle, 8 red circle, 9 red circle"
    balanced, one_sided, blue, empty = (
        {name: float(score) for name, score in looks(picture(objects), [request]).items()}
        for objects in (mirrored, lopsided, mirrored.replace("red", "blue"), "")
    )
    assert balanced["balance"] > 0.95 and one_sided["balance"] < 0.1
    assert balanced["palette"] > 0.95 and blue["palette"] < 0.1
    assert balanced["mood"] > 0.8 and empty["mood"] < 0.05
    assert empty["balance"] == empty["palette"] == 0


@pytest.mark.parametrize("task", TASKS)
def test_train_and_heldout_prompts_do_not_overlap_in_words_or_meaning(task):
    train, heldout = split(task).values()
    assert {*train, *heldout} == set(all_requests(task))
    for key in (Request.words, lambda request: request.meaning):
        assert not set(map(key, train)) & set(map(key, heldout))
    assert {r.kind for r in train} == {r.kind for r in heldout}


def test_both_orders_of_a_pair_are_one_meaning():
    for first, second in (
        ("red circle and blue square", "blue square and red circle"),
        ("red circle left of blue square", "blue square right of red circle"),
    ):
        assert parse(first).meaning == parse(second).meaning


def test_every_kind_of_request_counts_alike():
    for requests in split("compositional").values():
        for length in (3, 30, len(requests)):
            kinds = [r.kind for r in requests[:length]]
            assert {kinds.count(kind) for kind in set(kinds)} == {length // 3}


def test_every_prompt_is_read_back_as_what_it_asks_and_others_are_refused():
    for task in TASKS:
        for request in all_requests(task):
            assert parse(request.words()) == request
    for text in ("", "a dog", "red circle and red circle", "calm pattern", 'text "Q"'):
        with pytest.raises(ConfigError, match="prompt"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "graded"),
    [("AC", 1), ("A", 1 / 2), ("CA", 0), ("AC5", 2 / 3), ("A?C", 2 / 3), ("?", 0)],
)
def test_text_is_scored_by_its_edit_distance(text, graded):
    """An object is read as '?'; small letters may be typed."""
    red = object_class("red", "circle")
    cells = [red if glyph == "?" else glyph_class(glyph) for glyph in text]
    image = render(torch.tensor([cells + [0] * (CELLS - len(cells))]))
    prompts = [Prompt('text "ac"')]
    assert float(ShapesReward("strict").score(image, prompts)) == (graded == 1)
    assert ShapesReward("graded").score(image, prompts) == pytest.approx(graded)


def test_images_of_another_size_are_refused():
    with pytest.raises(RewardError, match="64"):
        ShapesReward().score(torch.zeros(1, 3, 32, 32), [Prompt("two red circles")])


@pytest.mark.slow
def test_base_model_is_undecided_on_every_task(shapes_policy):
    """Strict success on held-out prompts by 20 ODE steps lies in 25%..65%, within the error of 256
    samples (2.6 std = 8%).
    """
    from flowrl.run.evaluation import evaluate

    with shapes_policy.reference():
        for task in TASKS:
            strict = evaluate(shapes_policy, world("shapes"), task, "soft", 256, 20).scores[
                "strict"
            ]
            assert 0.25 - 0.08 < strict < 0.65, task


def test_damaged_or_missing_weights_are_refused(tmp_path):
    copy, data = tmp_path / "shapes.safetensors", bytearray(weights_path().read_bytes())
    with pytest.raises(CheckpointError, match="one of them is missing"):
        check_hash(copy)
    data[-1] ^= 1
    copy.write_bytes(data)
    copy.with_suffix(".json").write_text(weights_path().with_suffix(".json").read_text())
    with pytest.raises(CheckpointError, match="or damaged, or they do not match"):
        world("shapes").policy(PolicyOptions(base_weights=str(copy)))

"""The world of edits: pictures, prompts, verifier and base model."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl import PolicyOptions
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.prompt import Prompt
from flowrl.rollout import initial_noise, sample_images
from flowrl.worlds import EditsWorld, edits
from flowrl.worlds.pretrain_pairs import render
from flowrl.worlds.scene import COLOURS, OBJECTS, SHAPES, object_class

WORLD = EditsWorld()
HELDOUT = WORLD.prompts("recolour", "heldout")


def drawn(layouts):
    return render(torch.tensor(layouts), torch.Generator().manual_seed(3))


def scores(layouts, prompts):
    images = drawn(layouts)
    return {form: edits.EditReward(form).score(images, prompts) for form in WORLD.forms}


@given(st.sampled_from(edits.EDITS), st.integers(0, 2**16))
def test_an_edit_changes_one_cell_of_the_only_such_shape(edit, seed):
    made = edits.draw_edit(*edit, random.Random(seed))
    shapes = [OBJECTS[kind - 1][1] for kind in made.before if kind]
    assert shapes.count(edit[0]) == 1 and 2 <= len(shapes) <= 3
    changed = [cell for cell in range(16) if made.before[cell] != made.after[cell]]
    assert changed == [made.cell]
    assert OBJECTS[made.after[made.cell] - 1] == (edit[2], edit[0])


def test_prompts_are_the_same_in_every_run_and_held_out_ones_are_others():
    train = WORLD.prompts("recolour", "train")
    assert (len(train), len(HELDOUT)) == (108, 36)
    edits.split.cache_clear()
    again = WORLD.prompts("recolour", "train")
    assert [prompt.key for prompt in again] == [prompt.key for prompt in train]

    def meaning(prompt):
        edit = edits.edit_of(prompt)
        return edit.before[edit.cell], edit.colour

    assert not {*map(meaning, train)} & {*map(meaning, HELDOUT)}
    assert {edits.shape_and_colour(prompt.text)[0] for prompt in HELDOUT} == {*SHAPES}


def test_scores_of_every_kind_of_result():
    """Done; unchanged; another colour; done, but another object is gone, moved, or recoloured, or
    there is one more.
    """
    prompt = next(p for p in HELDOUT if sum(map(bool, edits.edit_of(p).before)) == 3)
    edit = edits.edit_of(prompt)
    other = next(c for c, kind in enumerate(edit.before) if kind and c != edit.cell)
    free = [cell for cell, kind in enumerate(edit.before) if not kind]

    def changed(cells, **new):
        return [new.get(f"c{cell}", kind) for cell, kind in enumerate(cells)]

    wrong = next(
        c for c in COLOURS if c not in (edit.colour, OBJECTS[edit.before[edit.cell] - 1][0])
    )
    colour = next(c for c in COLOURS if c != OBJECTS[edit.before[other] - 1][0])
    own = OBJECTS[edit.before[other] - 1][1]
    after = edit.after
    results = {
        "done": (after, 1.0),
        "unchanged": (edit.before, 0.5),
        "colour": (changed(after, **{f"c{edit.cell}": object_class(wrong, edit.shape)}), 0.5),
        "gone": (changed(after, **{f"c{other}": 0}), 0.75),
        "moved": (changed(after, **{f"c{other}": 0, f"c{free[0]}": after[other]}), 0.75),
        "recoloured": (changed(after, **{f"c{other}": object_class(colour, own)}), 0.75),
        "more": (changed(after, **{f"c{free[0]}": after[other]}), 0.5 + 0.5 * 2 / 3),
        "empty": ([0] * 16, 0.0),
    }
    made = scores([list(cells) for cells, _ in results.values()], [prompt] * len(results))
    expected = torch.tensor([score for _, score in results.values()])
    torch.testing.assert_close(made["graded"], expected)
    assert torch.equal(made["strict"], (expected == 1).float())
    assert (made["soft"] - 0.85 * expected - 0.15).abs().max() < 0.06


def test_an_edit_is_read_from_words_and_picture():
    """As a reward server gets it, without the world's own metadata."""
    bare = [replace(prompt, metadata={}) for prompt in HELDOUT]
    assert [edits.edit_of(p) for p in bare] == [edits.edit_of(p) for p in HELDOUT]
    with pytest.raises(RewardError, match="has 0 such shapes"):
        edits.edit_of(Prompt("make the circle blue"))
    for text in ("make the circle purple", "make the hexagon red", "blue circle"):
        with pytest.raises(ConfigError, match="make the SHAPE COLOUR"):
            WORLD.parse(text)
    assert WORLD.parse("Make the circle blue") == WORLD.parse("make the circle blue")
    with pytest.raises(RewardError, match="EditReward needs"):
        edits.EditReward().score(torch.zeros(2, 3, 32, 32), HELDOUT[:2])


def test_the_base_model_knows_edits_and_leaves_room():
    """Measured: 0.60 of 72 samples with 20 steps; the limits are 4 standard deviations away."""
    policy = WORLD.policy(PolicyOptions())
    noise = initial_noise(policy, len(HELDOUT), 0)
    (batch,) = sample_images(policy, HELDOUT, noise, 20, max_batch=64)
    strict = edits.EditReward("strict").score(batch.images, list(batch.prompts))
    assert 0.27 < float(strict.mean()) < 0.93
    with pytest.raises(ConfigError, match=r"images of the prompt .* = 0 .*allowed: 1"):
        policy.encode([Prompt("make the circle blue")])


def test_without_a_reference_the_network_is_that_of_text_to_image():
    """Its further channels are 0; in float64."""
    network = WORLD.policy(PolicyOptions()).network.double()
    latent, time = torch.randn(2, 8, 4, 4).double(), torch.tensor([900.0, 200.0]).double()
    words = network.words(torch.tensor([edits.tokenise("make the circle blue")] * 2)).detach()
    plain = network.velocity(latent, time, words)
    zeros = network.velocity(latent, time, words, torch.zeros_like(latent))
    torch.testing.assert_close(plain, zeros, atol=1e-12, rtol=0)
    other = network.velocity(latent, time, words, torch.randn_like(latent))
    assert (other - plain).abs().max() > 0.1

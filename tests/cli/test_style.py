"""Colours of methods under colour blindness, and panels that have the same axes."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

from flowrl.cli.figures import PHASES
from flowrl.cli.report import VERDICTS, verdict
from flowrl.cli.style import COLOURS, INK, MARKERS, OTHERS, PALE, SOFT, colour, marker, multiples
from flowrl.training.results import Mean

VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
"""Linear RGB as dichromats see it: Machado, Oliveira and Fernandes (2009), severity 1."""
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
LEAST = 7.5
"""Smallest distance of two methods' colours, in hundredths of OKLab, where about 2 are noticed side
by side (Ottosson, 2020).
"""


def linear(shade: str) -> np.ndarray:
    values = np.array([int(shade[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def seen(shade: str, vision: str) -> np.ndarray:
    return 100 * TO_LAB @ np.cbrt(TO_LMS @ np.clip(VISION[vision] @ linear(shade), 0, 1))


@pytest.mark.parametrize("vision", VISION)
def test_methods_differ_under_colour_blindness(vision):
    shades = {**COLOURS, **{f"other {i}": shade for i, shade in enumerate(OTHERS)}}
    distances = {
        (a, b): float(np.linalg.norm(seen(shades[a], vision) - seen(shades[b], vision)))
        for a, b in itertools.combinations(shades, 2)
    }
    assert min(distances.values()) > LEAST, min(distances, key=lambda pair: distances[pair])


def test_the_distance_finds_colours_that_are_confused():
    """Red and green of equal lightness, and the brown beside vermilion that methods once had."""
    assert np.linalg.norm(seen("#A07000", "deuteranopia") - seen("#7F8000", "deuteranopia")) < LEAST
    assert np.linalg.norm(seen("#D55E00", "protanopia") - seen("#8C6D1F", "protanopia")) < LEAST
    assert np.linalg.norm(seen("#FF0000", "normal") - seen("#00FF00", "normal")) > 40


def test_what_is_no_method_is_grey():
    for shade in (INK, SOFT, PALE, *PHASES.values()):
        a, b = seen(shade, "normal")[1:]
        assert np.hypot(a, b) < 2.5, shade
    assert not set(PHASES.values()) & {*COLOURS.values(), *OTHERS}


def test_eight_methods_have_markers_and_colours_of_their_own():
    names = ["flow-grpo", "stepwise-flow-grpo", "tp-grpo", "dance-grpo", "a", "b", "c", "d"]
    assert (
        len({marker(name, names) for name in names})
        == len({colour(name, names) for name in names})
        == len(MARKERS)
        == 8
    )


@pytest.mark.parametrize(
    ("lead", "symbol"),
    [
        ((0.1, 0.05), "▲"),
        ((-0.1, 0.05), "▼"),
        ((0.1, 0.2), "○"),
        ((0.1, float("nan")), ""),
        ((0.0, 0.0), ""),
    ],
)
def test_a_verdict_is_that_of_the_interval(lead, symbol):
    assert verdict(Mean(*lead)) == symbol and (not symbol or symbol in VERDICTS)


@pytest.mark.parametrize("count", [1, 5, 8])
def test_panels_show_every_method_and_share_their_axes(count):
    names, drawn = [f"rule {i}" for i in range(count)], []

    def draw(axes, name, own):
        drawn.append((name, own))
        axes.plot([0, 1 + names.index(name)], [0, names.index(name)], color="k" if own else PALE)

    panels = multiples(Figure(), names, draw)
    assert [axes.get_title() for axes in panels] == names
    assert (
        len({(axes.get_xlim(), axes.get_ylim()) for axes in panels}) == 1
        and len(drawn) == count * count
    )
    assert [name for name, own in drawn if own] == names
    # the panel's own method is on top
    assert all(axes.lines[-1].get_color() == "k" for axes in panels)

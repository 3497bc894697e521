"""The page "First look": its numbers are the library's, and its figures work in a browser."""

import itertools
import json
import re
import shutil
import subprocess
from typing import Literal

import numpy as np
import pytest
import torch
from browser import WIDTHS, chromium, needs_browser, result_of
from loading import ROOT
from PIL import Image
from seeded import rand, seeded

from flowrl.bench.exact import ValueGrid, exact_advantages
from flowrl.bench.explain import EXAMPLE, explain, parse_rewards
from flowrl.bench.gradients import Setting
from flowrl.core.types import Prompt
from flowrl.credit import StepwiseGain, TurningPoint, Uniform, gains, reward_to_go, turning_points
from flowrl.flow.mixture import GaussianMixture
from flowrl.probes import Completion
from flowrl.rollout import Groups
from flowrl.run.worlds import world
from flowrl.samplers import FlowSDE, Windowed
from flowrl.worlds import mixture
from flowrl.worlds.built_in import PolicyOptions
from flowrl.worlds.mixture import DirectionReward

PAGE = ROOT / "docs" / "_static" / "first-look"
STEPS, NOISE_LEVEL, MEMBERS = 10, 0.7, 8


# Numbers, in node

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node, to compute the page's numbers")


def in_node(inputs, folder):
    """What the page computes from `inputs`."""
    (folder / "inputs.json").write_text(json.dumps(inputs))
    checker = ROOT / "tests" / "docs" / "first_look.js"
    command = [str(NODE), str(checker), str(PAGE / "credit.js"), str(folder / "inputs.json")]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def same(page, library, atol):
    page = torch.tensor(page, dtype=torch.float64)
    torch.testing.assert_close(page, library.double(), atol=atol, rtol=0)


def rules(lam: float, consistent: bool, balance: Literal["aggregate", "trend", "none"]):
    """The library's rule behind each choice of the page; the values are given."""
    turning = TurningPoint(consistent, None if balance == "none" else balance)
    stepwise = StepwiseGain(probe=Completion())
    return {
        "flow-grpo": Uniform(),
        "gains": stepwise,
        "lambda": StepwiseGain(lam=lam, probe=Completion()),
        "tp": turning,
    }


def cases():
    """Tables with options. Values are multiples of 0.1 in half of the tables, so that differences
    of zero, equal rewards and ties in balancing occur.
    """
    options = [
        {"lambda": lam, "consistent": consistent, "balance": balance}
        for lam, consistent, balance in itertools.product(
            (0.0, 0.5, 1.0), (True, False), ("aggregate", "trend", "none")
        )
    ]
    for seed, option in enumerate(options * 2):
        values = rand(1, 2 + seed % 7, 2 + seed % 9, seed=seed, dtype=torch.float64)
        yield (values * 10).round() / 10 if seed % 2 else values, option
    yield parse_rewards(EXAMPLE).values.double(), options[0]
    yield torch.full((1, 3, 5), 0.3, dtype=torch.float64), options[0]


@needs_node
def test_rules_have_the_librarys_numbers(tmp_path):
    inputs = [{"values": values[0].tolist(), "options": option} for values, option in cases()]
    results = in_node({"tables": inputs}, tmp_path)["tables"]
    for (values, option), page in zip(cases(), results, strict=True):
        same(page["gains"], gains(values)[0], 1e-12)
        same(page["longTerm"], reward_to_go(values)[0], 1e-12)
        for name in ("plain", "consistent"):
            assert page[name] == turning_points(values, name == "consistent")[0].tolist()
        library = rules(option["lambda"], option["consistent"], option["balance"])
        assert page["selected"] == library["tp"].selected(values)[0].tolist()
        for name, rule in library.items():
            shown = explain(rule, values)
            same(page["advantages"][name], shown.advantages[0], 1e-9)


PROMPTS = [Prompt(f"towards {degrees} degrees", {"angle": degrees}) for degrees in (45, 100)]


@pytest.fixture(scope="module")
def setting():
    """The page's sampler: Flow-SDE on all steps but the last."""
    policy = world("mixture").policy(PolicyOptions())
    sampler = Windowed(FlowSDE(NOISE_LEVEL), range(STEPS - 1))
    return Setting(policy, sampler, policy.schedule(STEPS), DirectionReward("soft"), PROMPTS)


@pytest.fixture(scope="module")
def rollout(setting):
    """A group per prompt, whose members start from the same noise."""
    return setting.rollout(Groups(len(PROMPTS), MEMBERS, True), seeded(3), Completion())


@pytest.fixture(scope="module")
def page_groups(setting, rollout, tmp_path_factory):
    """The page's numbers for these groups, from the noise of their steps."""
    path = rollout.trajectories
    states, velocities = path.nodes.double(), path.velocities
    noise = [
        (states[:, i + 1] - gaussian.mean) / gaussian.std[0]
        for i, gaussian in enumerate(transitions(setting, path.nodes, velocities))
    ]
    tables = [by_group(table) for table in (states, torch.stack(noise, 1))]
    inputs = [
        {
            "degrees": int(prompt.metadata["angle"]),
            "start": tables[0][group, 0, 0].tolist(),
            "states": tables[0][group].tolist(),
            "noise": tables[1][group].tolist(),
        }
        for group, prompt in enumerate(PROMPTS)
    ]
    return in_node({"groups": inputs}, tmp_path_factory.mktemp("page"))["groups"]


def by_group(table):
    """Rows of samples as [prompt, member, step, 2]."""
    return table.reshape(len(PROMPTS), MEMBERS, table.shape[1], 2)


def transitions(setting, states, velocities):
    """The library's Gaussian of each random step."""
    for i in range(STEPS - 1):
        steps = torch.full((len(states),), i)
        yield setting.sampler.transition(states[:, i], velocities[:, i], setting.schedule, steps)


# The library's paths are float32. Their rounding errors grow along a path, so a whole path agrees
# less closely than a single step from the same state.


@needs_node
def test_velocities_and_steps_are_the_librarys(setting, rollout, page_groups):
    path, ring = rollout.trajectories, mixture.ring()
    angles = torch.arange(8, dtype=torch.float64) * (torch.pi / 4)
    means = mixture.RADIUS * torch.stack([angles.cos(), angles.sin()], 1)
    torch.testing.assert_close(means.float(), ring.means)
    ring = GaussianMixture(means, ring.std, ring.weights.double())
    x, times = path.nodes[:, :-1].double(), 1 - torch.arange(STEPS, dtype=torch.float64) / STEPS
    velocities = ring.velocity(x.reshape(-1, 2), times.repeat(len(x))).view(len(x), -1, 2)
    gaussians = [*transitions(setting, path.nodes, path.velocities)]
    means = torch.stack([each.mean for each in gaussians], 1)
    for group, page in enumerate(page_groups):
        same(page["velocities"], by_group(velocities)[group], 1e-9)
        same(page["means"], by_group(means)[group], 1e-6)
        same(page["stds"], torch.stack([each.std[0] for each in gaussians]), 1e-6)


@needs_node
def test_paths_from_the_same_noise_are_the_librarys(rollout, page_groups):
    for group, page in enumerate(page_groups):
        same(page["paths"], by_group(rollout.trajectories.nodes)[group], 1e-5)


@needs_node
def test_values_are_the_librarys(setting, rollout, page_groups):
    completed = setting.experience(rollout).values
    exact = exact_advantages(setting, rollout)[0].state_values
    for group, page in enumerate(page_groups):
        same(page["completed"], completed[group], 1e-6)
        same(page["exact"], exact[group], 1e-6)
        same(page["ownCompleted"], completed[group], 1e-5)
        same(page["ownExact"], exact[group], 1e-5)


def test_the_grid_of_exact_values_is_fine_enough(setting, rollout):
    """The page says that its grid's error is below 0.01."""
    coarse, fine = (
        exact_advantages(setting, rollout, grid=grid)[0].state_values
        for grid in (ValueGrid(), ValueGrid(113))
    )
    assert (coarse - fine).abs().max() < 0.005


@needs_node
def test_the_text_says_what_the_first_group_does(tmp_path):
    """The list "What to try" names member 2, its steps 1 and 2, and the curves of exact values."""
    first = in_node({}, tmp_path)["first"]
    assert first["values"][1] < 0.05 and first["values"][2] == pytest.approx(0.9, abs=0.05)
    assert first["values"][-1] < 0.05 and first["selected"][2]
    assert max(first["uniform"]) < 0 < first["gains"][1]
    estimated, exact = first["swings"]
    assert estimated > 1.5 * exact


def test_the_text_says_what_bending_the_curves_does():
    """The second list "What to try", with the library."""
    values, rule = parse_rewards(EXAMPLE).values, TurningPoint()
    unbalanced = TurningPoint(balance=None).selected(values)
    assert rule.selected(values).nonzero()[:, 1:].tolist() == [[0, 2], [1, 2]]
    assert unbalanced.nonzero()[:, 1:].tolist() == [[0, 2], [1, 2], [2, 0]]
    raised, lowered, equal = values.clone(), values.clone(), values.clone()
    raised[0, 1, 4], lowered[0, 2, 4], equal[..., 4] = 0.55, 0.51, 0.6
    assert not turning_points(raised, False)[0, 1, 2]
    assert turning_points(values)[0, 2, 0] and not turning_points(lowered)[0, 2, 0]
    assert (explain(Uniform(), equal).advantages == 0).all()
    assert (explain(StepwiseGain(probe=Completion()), equal).advantages != 0).any()


def test_the_page_needs_no_network():
    for file in PAGE.iterdir():
        assert set(re.findall(r"https?://[^\"' )]+", file.read_text())) <= {
            "http://www.w3.org/2000/svg"  # a name, which no browser loads
        }


# Figures, in a browser

ADDRESS = f"{(PAGE / 'index.html').as_uri()}#rule=tp&member=2"


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_figures_work_in_a_browser(width, tmp_path):
    script = (ROOT / "tests" / "docs" / "first_look_browser.js").read_text()
    result = result_of(tmp_path, ADDRESS, width, script)
    assert result["moved"] and result["overflow"] <= 0
    assert result["smallest"] >= 40
    assert len(result["colours"]) == 5 and all(map(len, result["colours"].values()))
    assert len({tuple(colours) for colours in result["colours"].values()}) == 5
    assert len(set(result["colours"]["flow-grpo"])) == 1 < len(set(result["colours"]["gains"]))
    assert result["labels"] == len(set(result["labelled"])) == 8
    # the library's advantages of the example, of which the last is bent next
    values = parse_rewards(EXAMPLE).values
    same(result["example"], explain(TurningPoint(), values).advantages[0], 0.0051)
    assert result["key"] == pytest.approx(0.65) and result["key_focus"] == "0,4"
    assert result["leaked"] == 0
    assert result["dragged"] == pytest.approx(0.2, abs=0.02)
    values[0, 0, 4], values[0, 1, 2] = result["key"], result["dragged"]
    same(result["bent"], explain(TurningPoint(), values).advantages[0], 0.0051)


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_figures_are_drawn(width, tmp_path):
    """The picture of the page, with all steps shown at once for readers who prefer less motion."""
    picture = tmp_path / "page.png"
    options = (f"--screenshot={picture}", "--force-prefers-reduced-motion")
    chromium(tmp_path, ADDRESS, width, "", *options)
    pixels = torch.tensor(np.asarray(Image.open(picture).convert("RGB"))).int()[:, :width]
    blue = (pixels[..., 2] - pixels[..., 0] > 60).sum()
    orange = (pixels[..., 0] - pixels[..., 2] > 60).sum()
    assert blue > 1000 and orange > 1000

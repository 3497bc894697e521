"""The interactive figures of the course: their numbers are the library's or closed forms, every
figure has a picture and a cell in its lessons, and all work in a browser.
"""

import itertools
import json
import math
import re
import shutil
import subprocess

import nbformat
import pytest
import torch
from browser import WIDTHS, needs_browser, result_of
from flowrl_course.figures import interactive
from loading import ROOT

from flowrl import preset
from flowrl.bench.exact import Exact
from flowrl.bench.explain import explain
from flowrl.bench.gradients import RawCredit, Setting, pathwise_gradients, policy_gradients
from flowrl.core.types import Gaussian, Prompt, Schedule
from flowrl.credit import DenseGain, StepwiseGain, TurningPoint, Uniform
from flowrl.flow import log_prob, uniform_schedule
from flowrl.flow.mixture import GaussianMixture
from flowrl.losses.terms import surrogate
from flowrl.probes import Completion, Substeps
from flowrl.rollout import Groups
from flowrl.run.plan import plan
from flowrl.run.statistics import mean as t_mean
from flowrl.run.worlds import world
from flowrl.samplers import ODE, FlowSDE, Windowed
from flowrl.worlds.built_in import PolicyOptions
from flowrl.worlds.mixture import DirectionReward

PAGE = ROOT / "docs" / "_static" / "figures"
INDEX = (PAGE / "index.html").read_text()
NAMES = re.findall(r'data-figure="(.*?)"', INDEX)
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node, to compute the figures' numbers")


def in_node(name, inputs, folder):
    """What a figure computes from `inputs`."""
    (folder / "inputs.json").write_text(json.dumps({name: inputs}))
    checker = ROOT / "tests" / "docs" / "figures.js"
    command = [str(NODE), str(checker), str(PAGE), str(folder / "inputs.json")]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(made.stdout)[name]


def same(page, library, atol=1e-6):
    page = torch.tensor(page, dtype=torch.float64)
    torch.testing.assert_close(page, library.double(), atol=atol, rtol=0)


# marginals


@needs_node
def test_marginals_have_the_librarys_steps_and_densities(tmp_path):
    means = torch.tensor([[-2.0], [0.0], [2.0]], dtype=torch.float64)
    weights = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
    times = torch.linspace(0.98, 0, 101, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(100, generator=generator, dtype=torch.float64)
    points, level = torch.stack([x, times[:-1]], 1), 0.7
    inputs = {"points": points.tolist(), "noiseLevel": level, "levels": [0, 0.4, 1]}
    page = in_node("marginals", inputs, tmp_path)
    same(page["times"], times)
    mixture = GaussianMixture(means, 0.25, weights)
    velocity = mixture.velocity(x[:, None], times[:-1])
    same(page["velocities"], velocity[:, 0], 1e-9)
    same(page["densities"], mixture.log_marginal(x[:, None], times[:-1]).exp(), 1e-7)
    grid, steps = Schedule(times.float()), torch.arange(100)
    for shown, sampler in zip(page["steps"], (FlowSDE(level), ODE()), strict=True):
        library = sampler.transition(x[:, None].float(), velocity.float(), grid, steps)
        same([each["mean"] for each in shown], library.mean[:, 0], 3e-6)
    noise = FlowSDE(level).transition(x[:, None].float(), velocity.float(), grid, steps).std
    for shown in page["steps"]:
        same([each["std"] for each in shown], noise, 1e-6)
    # what the text says
    right, wrong = page["wrong"]
    assert max(right) < 0.06 and right[0] == wrong[0] and wrong[2] > wrong[1] > right[1] + 0.03


# one noise, many ends


@needs_node
def test_paths_with_some_random_steps_are_the_librarys(tmp_path):
    generator = torch.Generator().manual_seed(1)
    masks = torch.rand(20, 10, generator=generator) < 0.5
    masks[0], masks[:, 2] = True, True
    noise = torch.randn(20, 10, 2, generator=generator, dtype=torch.float64)
    start = [0.4, -1.1]
    inputs = {"start": start, "noise": noise.tolist(), "masks": masks.tolist()}
    page = in_node("one-noise", inputs, tmp_path)
    paths, grid = torch.tensor(page["paths"], dtype=torch.float64), uniform_schedule(10)
    same(page["paths"][3][0], torch.tensor(start))
    ring = GaussianMixture.ring()
    for path, mask, draws in zip(paths, masks, noise, strict=True):
        sampler, x = Windowed(FlowSDE(0.7), mask.nonzero().flatten().tolist()), path[:-1].float()
        velocity, steps = ring.velocity(x, grid.times[:-1]), torch.arange(10)
        library = sampler.transition(x, velocity, grid, steps)
        same(path[1:].tolist(), library.mean + library.std[:, None] * draws, 5e-6)
    # what the text says: early steps lead to other blobs, late ones do not
    assert min(page["alone"][:2]) > 0.5 and max(page["alone"][6:]) < 0.05 and page["reached"] == 8


# is it chance?


@needs_node
def test_intervals_and_their_errors_are_students(tmp_path):
    from scipy import stats

    generator = torch.Generator().manual_seed(2)
    differences = [torch.randn(n, generator=generator).tolist() for n in range(2, 21)]
    cases = [(n, d, bar) for n in (2, 3, 6, 20) for d in (0.0, 1.0) for bar in ("t", "sd", "se")]
    page = in_node("chance", {"differences": differences, "cases": cases}, tmp_path)
    same(page["quantiles"], torch.tensor([stats.t.ppf(0.975, d) for d in range(1, 20)]), 1e-8)
    for shown, each in zip(page["intervals"], differences, strict=True):
        library = t_mean(each)
        same(
            [shown[key] for key in ("value", "low", "high")],
            torch.tensor([library.value, library.low, library.high], dtype=torch.float64),
        )
    reach = {"t": lambda n: stats.t.ppf(0.975, n - 1), "sd": lambda n: n**0.5, "se": lambda n: 1.0}
    for (n, d, bar), shown in zip(cases, page["shares"], strict=True):
        limit, shift = reach[bar](n), d * n**0.5
        covers = stats.t.cdf(limit, n - 1) - stats.t.cdf(-limit, n - 1)
        found = stats.nct.sf(limit, n - 1, shift) + stats.nct.cdf(-limit, n - 1, shift)
        # four standard deviations of a share of 4,000
        assert shown["covers"] == pytest.approx(
            covers, abs=4 * (covers * (1 - covers) / 4000) ** 0.5 + 1e-3
        )
        assert shown["found"] == pytest.approx(
            found, abs=4 * (found * (1 - found) / 4000) ** 0.5 + 1e-3
        )


# ratio and clip


@needs_node
def test_ratios_and_their_clip_are_the_librarys(tmp_path):
    from scipy import stats

    noise, library = [], []
    for k, (elements, delta) in enumerate(itertools.product((1, 8, 300), (1e-2, 0.3))):
        draws = torch.randn(
            1, elements, generator=torch.Generator().manual_seed(k), dtype=torch.float64
        )
        old, new = (
            Gaussian(m * torch.ones_like(draws), torch.ones(1, dtype=torch.float64))
            for m in (0.0, delta)
        )
        log = float(log_prob(new, draws) - log_prob(old, draws))
        for kind, times in (("mean", 1), ("sum", elements)):
            noise.append([float(draws.mean()), elements, delta, kind])
            library.append(log * times)
    cases = [
        (d, delta, c, kind)
        for d in (1, 64, 65536)
        for delta in (1e-3, 0.05)
        for c in (1e-4, 0.2)
        for kind in ("mean", "sum")
    ]
    ratios = [(r, a, c) for r in (0.5, 0.95, 1.0, 1.05, 2.0) for a in (1, -1) for c in (1e-4, 0.1)]
    page = in_node("ratio", {"noise": noise, "cases": cases, "ratios": ratios}, tmp_path)
    for shown, value in zip(page["logs"], library, strict=True):
        assert shown == pytest.approx(value, rel=1e-4, abs=1e-6)
    r, a, c = torch.tensor(ratios, dtype=torch.float64).unbind(1)
    same(
        page["surrogates"],
        torch.stack([surrogate(r[k : k + 1], a[k : k + 1], float(c[k]))[0] for k in range(len(r))]),
    )
    for (elements, delta, clip, kind), shown, own in zip(
        cases, page["moments"], page["beyond"], strict=True
    ):
        times = elements if kind == "sum" else 1
        assert shown["mean"] == pytest.approx(-times * delta**2 / 2)
        assert shown["std"] == pytest.approx(times * delta / elements**0.5)
        normal = stats.norm(shown["mean"], shown["std"])
        same(
            [own["above"], own["below"]],
            torch.tensor([normal.sf(math.log1p(clip)), normal.cdf(math.log1p(-clip))]),
        )


# the policy gradient by hand


@needs_node
def test_gradients_are_the_librarys(tmp_path):
    target, std, members = torch.tensor([1.2, 0.7], dtype=torch.float64), 0.5, 6
    draws = std * torch.randn(
        5, members, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    rules = {
        "none": RawCredit(baseline=False),
        "others": RawCredit(),
        "grpo": Uniform(),
        "group": Uniform(std=None),
    }
    cases = [(offset, name, size) for offset in (0.0, 5.0) for name in rules for size in (4, 16)]
    page = in_node("gradient", {"groups": draws.tolist(), "cases": cases}, tmp_path)
    # grad E exp(-|x - target|^2 / 2) in the mean, by differentiation of the closed form
    mean = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    wide = 1 + std**2
    expected = torch.exp(-(mean - target).square().sum() / (2 * wide)) / wide
    (truth,) = torch.autograd.grad(expected, mean)
    same(page["truth"], truth[0], 1e-12)
    data = GaussianMixture(torch.zeros(1, 2), std, torch.ones(1))
    assert data.expected_bump(target.float(), 1.0) == pytest.approx(expected.item())
    rewards = torch.exp(-(draws - target).square().sum(-1) / 2)
    for (offset, name, size), shown, quality in zip(
        cases, page["estimates"], page["quality"], strict=True
    ):
        values = torch.stack([torch.zeros_like(rewards), rewards + offset], -1)
        credit = explain(rules[name], values).advantages[..., 0]
        policy = mean.expand(5 * members, 2)
        logs = 2 * log_prob(Gaussian(policy, torch.full((5 * members,), std)), draws.view(-1, 2))
        own = [
            torch.autograd.grad(
                (credit.flatten() * logs).view(5, members).mean(1)[k], mean, retain_graph=True
            )[0][0]
            for k in range(5)
        ]
        same(shown, torch.stack(own), 2e-5 if name == "grpo" else 1e-5)
        bias = {"none": 1.0, "others": 1.0, "group": 1 - 1 / size}.get(name)
        if bias is not None:
            error = 4 * quality["spread"] / 2000**0.5
            assert quality["along"] == pytest.approx(bias, abs=error)
    # what the text says: an offset widens the cloud only without a baseline, and groups narrow it
    spread = {case: quality["spread"] for case, quality in zip(cases, page["quality"], strict=True)}
    assert spread[5.0, "none", 4] > 3 * spread[0.0, "none", 4]
    assert spread[5.0, "group", 4] == pytest.approx(spread[0.0, "group", 4])
    assert spread[0.0, "group", 16] < 0.6 * spread[0.0, "group", 4]


# the budget of an iteration


@needs_node
def test_budgets_are_those_of_the_plan(tmp_path):
    settings = [
        (2, 10, 0, 9, False),
        (3, 10, 2, 5, True),
        (5, 7, 3, 1, False),
        (2, 20, 4, 15, True),
    ]
    cases = [
        (
            method,
            {
                "groups": 3,
                "members": m,
                "steps": steps,
                "first": first,
                "count": count,
                "substeps": 5,
                "reference": kl,
            },
        )
        for method in ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
        for m, steps, first, count, kl in settings
    ]
    page = in_node("budget", {"cases": cases}, tmp_path)
    for (method, own), shown in zip(cases, page, strict=True):
        window = f"{own['first']}:{own['first'] + own['count']}"
        config = preset("default").apply(
            method=method,
            groups=3,
            group_size=own["members"],
            num_steps=own["steps"],
            window=window,
            kl_weight=0.04 if own["reference"] else 0.0,
            minibatches=1,
        )
        library = plan(config)
        assert shown == {
            "sampling": library.nfe - library.probe_nfe,
            "probes": library.probe_nfe,
            "update": library.train_nfe,
            "gradients": library.gradient_nfe,
            "images": library.reward_calls,
            "forwards": library.forwards,
        }, (method, own)


# the ladder of estimates


@needs_node
def test_estimates_are_the_librarys(tmp_path):
    step, grid = 3, uniform_schedule(10)
    page = in_node("estimates", {"step": step}, tmp_path)
    means, scores, states = (
        torch.tensor(page[key], dtype=torch.float64) for key in ("means", "scores", "states")
    )
    assert sorted(page["scores"]) == pytest.approx([0] * 2 + [1 / 3] * 5 + [2 / 3] * 4 + [1])
    data = GaussianMixture(means, page["std"], torch.full((12,), 1 / 12, dtype=torch.float64))
    times = 1 - torch.arange(10, dtype=torch.float64) / 10
    same(page["velocities"], data.velocity(states[:-1], times), 1e-9)
    for rung in page["rungs"]:
        probe = Completion() if rung["count"] == "completion" else Substeps(rung["count"])
        own, x, t = probe.grid(grid, step), states[step], times[step]
        for length in own.lengths.double():
            x, t = x - length * data.velocity(x[None], t[None])[0], t - length
        assert rung["cost"] == len(own.lengths) - 1  # the rollout has the first velocity
        same(rung["image"], x, 1e-6)
        if rung["count"] == 1:
            same(rung["image"], data.clean_and_noise(states[step][None], times[step][None])[0][0])
    near = torch.exp(-(states[-1] - means).square().mean(1) / (2 * page["width"] ** 2))
    assert page["reward"] == pytest.approx(float(scores @ near))
    # what the text says: more steps help early, and none of them is exact
    for errors in page["errors"][1:6]:
        assert errors[3] < 0.8 * errors[0] and min(errors) > 0.1


# noise and bias of a credit


@pytest.fixture(scope="module")
def constant():
    """The 2-D world, in which only a constant that is added to the velocity is trained."""
    policy = world("mixture").policy(PolicyOptions())
    policy.trainable = lambda: {"constant": policy.net[-1].bias}
    prompts = [Prompt("towards 70 degrees", {"angle": 70})]
    sampler = Windowed(FlowSDE(0.7), range(9))
    return Setting(policy, sampler, policy.schedule(10), DirectionReward("soft"), prompts)


def credits():
    """As published, and not divided by a standard deviation, with the probes of the values."""
    completed, exact = Completion(), Exact()
    gain = RawCredit(0.0, completed)
    yield "flow-grpo", Uniform(), RawCredit()
    yield "gains", StepwiseGain(probe=completed), gain
    yield "dense", DenseGain(probe=completed), gain
    yield "tp", TurningPoint(), None
    yield "exact", StepwiseGain(probe=exact), RawCredit(0.0, exact)


@needs_node
def test_gradients_of_batches_are_the_librarys(constant, tmp_path):
    path = constant.rollout(
        Groups(1, 12), torch.Generator().manual_seed(4), Completion()
    ).trajectories
    nodes, steps = path.nodes.flatten(2).double(), torch.arange(9)
    noise = []
    for k in steps:
        step = torch.full((12,), int(k))
        gaussian = constant.sampler.transition(
            path.nodes[:, k], path.velocities[:, k], constant.schedule, step
        )
        noise.append((path.nodes[:, k + 1] - gaussian.mean).flatten(1) / gaussian.std[:, None])
    inputs = {"starts": nodes[:, 0].tolist(), "noise": torch.stack(noise, 1).tolist()}
    page = in_node("cloud", inputs, tmp_path)
    for name, *rules in credits():
        for shown, rule in zip(page["given"][name], rules, strict=True):
            if rule is not None:
                library = policy_gradients(constant, rule, batches=1, members=12, seed=4)[0]
                same(shown, library, 2e-4)  # float32 paths
    # the recorded means, against 300 other groups
    for name, kinds in page["drawn"].items():
        for recorded, own in zip(page["recorded"][name], kinds, strict=True):
            steps_of = torch.tensor(own)
            error = steps_of.std(0) / 300**0.5 * 1.1
            assert ((steps_of.mean(0) - torch.tensor(recorded)).abs() < 4.5 * error).all(), name
    exact = sum(page["recorded"]["exact"][1])
    truth = pathwise_gradients(constant, batches=4, repeats=2048, decisions_only=True)
    direction = torch.tensor(page["direction"])
    assert float(truth.mean(0) @ direction) == pytest.approx(exact, rel=0.03)
    assert torch.cosine_similarity(truth.mean(0), direction, dim=0) > 0.999
    # what the text says
    shares = {
        name: torch.tensor(kinds[0]) / sum(kinds[0]) for name, kinds in page["recorded"].items()
    }
    right = torch.tensor(page["recorded"]["exact"][1]) / exact
    assert (shares["flow-grpo"] - right).abs().max() < 0.01
    assert shares["tp"][8] > 3 * right[8] and shares["gains"][0] > 1.6 * right[0]


# pictures, the notebook, the browser


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_has_a_picture_and_cells_in_its_lessons(name):
    assert 0 < (PAGE / f"{name}.png").stat().st_size < 26_000
    output = interactive(name)._repr_mimebundle_()
    assert len(output["text/html"]) < 60_000 and "<section" in output["text/html"]
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg", "", interactive(name).page())
    (section,) = re.findall(
        rf'<section class="fl-figure" id="{name}">.*?</section>', INDEX, re.DOTALL
    )
    lessons = re.findall(r"<em>(.*?)</em>", section.split("</p>")[0])
    sources = [path.read_text() for path in (ROOT / "tutorials" / "source").glob("*.py")]
    using = [
        re.search(r"^# # \d+ · (.*)$", text, re.M)[1]
        for text in sources
        if f'interactive("{name}"' in text
    ]
    assert lessons and sorted(using) == sorted(lessons)


def test_stored_figures_are_the_present_ones():
    """Otherwise run `python tutorials/figure_pictures.py --notebooks`."""
    for path in sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            shown = re.search(r"^interactive\(.*\)$", cell.source, re.MULTILINE)
            for output in cell.get("outputs", []) if shown else []:
                present = eval(shown[0], {"interactive": interactive})
                assert output.data == present._repr_mimebundle_(), path.name


def test_an_unknown_figure_is_refused():
    with pytest.raises(ValueError, match="marginals"):
        interactive("nothing")


SCRIPT = (ROOT / "tests" / "docs" / "figures_browser.js").read_text()


def works(result):
    """Every control redraws its figure, is large enough for a finger, and nothing overflows."""
    assert result["overflow"] <= 0
    assert result["smallest"] >= 40
    assert sum(result["controls"].values()) > 0
    for name, same_as_before in result["unchanged"].items():
        assert not same_as_before, (name, same_as_before)
    assert not result["broken"]
    assert not result["overlapping"]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_figures_work_in_a_browser(width, tmp_path):
    result = result_of(tmp_path, (PAGE / "index.html").as_uri(), width, SCRIPT)
    works(result)
    assert list(result["controls"]) == NAMES


@pytest.mark.slow
@needs_browser
def test_a_figure_works_in_a_notebook(tmp_path):
    output = tmp_path / "output.html"
    figure = interactive("ratio", elements=128, change=0.01, clip=0.002)
    html = figure._repr_mimebundle_()["text/html"]
    output.write_text(f'<body data-jp-theme-light="false">{html}</body>')
    script = SCRIPT.replace('["page"]', '["page", "iframe"]')
    result = result_of(tmp_path, output.as_uri(), 700, script)
    works(result)
    assert result["theme"] == "dark" and result["picture"] == "none"
    assert result["first"]["ratio"] == ["128", "0.01", "0.002"]

"""Solutions and likely mistakes of lesson 9."""

import torch
from flowrl_course import lesson_09 as lesson

from flowrl.credit import gains
from tests.course.cases import Case
from tests.course.rules import centred, one_std, rule


def state_value(
    latents, node, steps, go, score, count, first=0, last=0, mixed=False, mean_first=False
):
    copies = latents.repeat(count, 1, 1) if mixed else latents.repeat_interleave(count, dim=0)
    for step in range(node + first, steps + last):
        copies = go(copies, step)
    if mean_first:
        return score(copies.view(len(latents), count, -1).mean(1))
    return score(copies).view(len(latents), count).mean(1)


def from_start(latents, node, steps, go, score, count):
    return state_value(latents, 0, steps, go, score, count)


def too_early(latents, node, steps, go, score, count):
    copies = latents.repeat_interleave(count, dim=0)
    for step in range(steps - node):
        copies = go(copies, step)
    return score(copies).view(len(latents), count).mean(1)


def single(latents, node, steps, go, score, count):
    return state_value(latents, node, steps, go, score, 1)


def calibrated(values, mask, centre=True, upside_down=False, over=(0, 1), late=False):
    members = mask.any(-1, keepdim=True).expand_as(values)
    y = centred(values, members)
    used = y if centre else values.masked_fill(~members, torch.nan)
    below = used[..., -1:].square().expand_as(used) if upside_down else used.square()
    slopes = (used * used[..., -1:]).nanmean(over, keepdim=True) / (
        below.nanmean(over, keepdim=True) + 1e-8
    )
    return one_std(slopes[..., 1:] * gains(y) if late else gains(slopes * y), mask)


def mean_reward(cost, reward, budget, divide=True, cut=True, end=True):
    last = int((cost < budget).sum())
    part = (budget - cost[last - 1]) / (cost[last] - cost[last - 1])
    at_end = reward[last - 1] + part * (reward[last] - reward[last - 1])
    x, y = (
        torch.cat([cost[:last], torch.tensor([budget]).to(cost)]),
        torch.cat([reward[:last], at_end[None]]),
    )
    if not end:
        x, y = x[:-1], y[:-1]
    if not cut:
        x, y = cost, reward
    return float(torch.trapezoid(y, x)) / (budget if divide else 1)


def rectangles(cost, reward, budget):
    return (
        float((reward[:-1] * (cost[1:].clamp(max=budget) - cost[:-1]).clamp(min=0)).sum()) / budget
    )


def verdict(found, adjusted, smallest=0.02, order="size", whole=True, both=True):
    inside = -smallest < found.low and found.high < smallest
    if not whole:
        inside = abs(found.value) < smallest
    if not both:
        inside = found.high < smallest and found.value > 0
    if order == "size" and inside:
        return "no difference that matters"
    if adjusted < 0.05:
        return "better" if found.value > 0 else "worse"
    return "no difference that matters" if inside else "undecided"


def by_interval(found, adjusted, smallest=0.02):
    if -smallest < found.low and found.high < smallest:
        return "no difference that matters"
    if found.low > 0 or found.high < 0:
        return "better" if found.value > 0 else "worse"
    return "undecided"


def rate(
    judge, spread, seeds, effect, draws, generator, scale=None, count=False, words=("better",)
):
    scale = spread if scale is None else scale(spread, seeds)
    found = [judge(effect + scale * torch.randn(seeds, generator=generator)) for _ in range(draws)]
    better = sum(word in words for word in found)
    return better if count else better / draws


def same_noise(judge, spread, seeds, effect, draws, generator):
    once = effect + spread * torch.randn(seeds, generator=generator)
    return [judge(once) for _ in range(draws)].count("better") / draws


CASES = [
    Case(
        lesson.check_state_value,
        state_value,
        [
            (lambda *a: state_value(*a, first=1), "the first step is missing"),
            (lambda *a: state_value(*a, last=-1), "the last step, T - 1, is missing"),
            (lambda *a: state_value(*a, mixed=True), "repeat_interleave"),
            (lambda *a: state_value(*a, mean_first=True), "average the rewards"),
            (from_start, "all steps from 0"),
            (too_early, "the steps 1, 2, 3 follow; you made 0, 1, 2"),
            (single, "only one continuation"),
        ],
    ),
    Case(
        lesson.check_mean_reward,
        mean_reward,
        [
            (lambda *a: mean_reward(*a, divide=False), "divide it by the budget"),
            (lambda *a: mean_reward(*a, cut=False), "beyond the budget is included"),
            (lambda *a: mean_reward(*a, end=False), "to the budget is missing"),
            (
                lambda cost, reward, budget: float(reward[cost <= budget].mean()),
                "not evenly spaced",
            ),
            (rectangles, "torch.trapezoid"),
            (
                lambda cost, reward, budget: float(torch.trapezoid(reward, cost) / cost[-1]),
                "divided by the last cost",
            ),
        ],
    ),
    Case(
        lesson.check_verdict,
        verdict,
        [
            (lambda *a: verdict(*a, order="significance"), "the p-value is read first"),
            (lambda *a: verdict(*a, whole=False), "this one is wide"),
            (lambda *a: verdict(*a, both=False), "the p-value is read first"),
            (by_interval, "the corrected p-value is not below 0.05"),
            (
                lambda found, adjusted, smallest=0.02: verdict(found, adjusted),
                "is the 0.02 written into the function",
            ),
            (lambda *a: "equal", "is not one of the four strings"),
        ],
    ),
    Case(
        lesson.check_rate,
        rate,
        [
            (lambda *a: rate(*a, count=True), "divide it by `draws`"),
            (same_noise, "draw inside the loop"),
            (
                lambda *a: rate(*a, scale=lambda spread, seeds: spread / seeds**0.5),
                "each difference has the whole spread",
            ),
            (lambda *a: rate(*a, scale=lambda spread, seeds: spread**2), "the spread is squared"),
            (
                lambda j, spread, seeds, effect, *a: rate(j, spread, seeds, 0.0, *a),
                "the effect is missing",
            ),
            (lambda *a: rate(*a, words=("better", "worse")), 'count "better" alone'),
        ],
    ),
    Case(
        lesson.check_calibrated,
        rule(calibrated),
        [
            (rule(lambda v, m: calibrated(v, m, centre=False)), "easy and hard prompts"),
            (rule(lambda v, m: calibrated(v, m, upside_down=True)), "inverted"),
            (rule(lambda v, m: calibrated(v, m, over=(1,))), "every group has its own slope"),
            (rule(lambda v, m: calibrated(v, m, late=True)), "calibrate both values first"),
            (rule(lambda v, m: calibrated(v, m | True)), "outside the mask"),
        ],
    ),
]

"""Solutions and likely mistakes of lesson 11."""

import torch
from flowrl_course import lesson_11 as lesson

from tests.course.cases import Case


def zscores(values, group, unbiased=False, loo=False, centre=None, divide=True):
    found = torch.zeros_like(values)
    for name in group.unique():
        chosen = values[:, group == name]
        deviations = chosen - chosen.mean(1, keepdim=True)
        if loo and chosen.shape[1] > 1:
            deviations = deviations * chosen.shape[1] / (chosen.shape[1] - 1)
        if centre is not None:
            deviations = chosen - centre[:, group == name]
        squares = (chosen - chosen.mean(1, keepdim=True)).square().sum(1, keepdim=True)
        spread = (squares / (chosen.shape[1] - unbiased)).sqrt() + 1e-4
        found[:, group == name] = deviations / spread if divide else deviations
    return found


def families(parent):
    return torch.where(parent < 0, len(parent) + torch.arange(len(parent)), parent)


def siblings(values, parent, **options):
    return zscores(values, families(parent), **options)


def depth(values, parent):
    node = torch.zeros_like(parent)
    for unit, above in enumerate(parent.tolist()):
        node[unit] = node[above] + 1 if above >= 0 else 0
    return zscores(values, node)


def from_parent(values, parent):
    centre = torch.where(parent < 0, values, values[:, parent.clamp(min=0)])
    return siblings(values, parent, centre=centre)


def shrinkage(k, leave_one_out=False, use=True, kind="slope"):
    generator = torch.Generator().manual_seed(0)
    worth, noise = torch.randn(2, 100_000, k, generator=generator)
    estimate = worth + noise
    difference = estimate - estimate.mean(1, keepdim=True)
    if leave_one_out and use:
        difference = difference * k / (k - 1)
    inner = (difference * worth).mean()
    if kind == "correlation":
        return inner / (difference.square().mean() * worth.square().mean()).sqrt()
    return inner / worth.square().mean()


def counts(roots, children, steps):
    found = [roots]
    for step in range(steps):
        found.append(found[-1] * children.get(step, 1))
    return found


def edges(n):
    return torch.tensor(n[1:], dtype=torch.float)


CASES = [
    Case(
        lesson.check_values,
        lambda r, p: (r @ p) / p.sum(0),
        [
            (lambda r, p: r @ p, "these are sums"),
            (lambda r, p: (r @ p) / len(p), "the number of all leaves"),
            (lambda r, p: r.mean(1, keepdim=True).expand(-1, p.shape[1]), "the mean of all leaves"),
            (lambda r, p: r[:, p.argmax(0)], "its first leaf"),
            (lambda r, p: r, "shape"),
        ],
    ),
    Case(
        lesson.check_siblings,
        siblings,
        [
            (lambda v, parent: zscores(v, parent), "roots are compared"),
            (lambda v, parent: siblings(v, parent, unbiased=True), "NaN"),
            (lambda v, parent: siblings(v, parent, unbiased=True).nan_to_num(), "is the sample's"),
            (
                lambda v, parent: zscores(v, torch.zeros_like(parent)),
                "all states are compared with each other",
            ),
            (depth, "a depth rule"),
            (
                lambda v, parent: siblings(v, parent, divide=False),
                "division by the standard deviation is missing",
            ),
            (from_parent, "V(parent) is subtracted"),
            (lambda v, parent: siblings(v, parent, loo=True), "of the other siblings"),
        ],
    ),
    Case(
        lesson.check_shrinkage,
        shrinkage,
        [
            (lambda k, loo: 1 / k, "the share that is lost"),
            (lambda k, loo: shrinkage(k, True), "does not contain the draw itself"),
            (lambda k, loo: shrinkage(k, loo, kind="correlation"), "this is the correlation"),
            (lambda k, loo: k / (k - 1), "the other way around"),
            (lambda k, loo: shrinkage(k, loo, use=False), "`leave_one_out` changes nothing"),
        ],
    ),
    Case(
        lesson.check_shares,
        lambda n: edges(n) / sum(n[1:]),
        [
            (edges, "divide by their sum"),
            (lambda n: edges(n) / sum(n), "contains n_0"),
            (lambda n: torch.tensor(n[:-1]) / sum(n[:-1]), "the states it starts from"),
            (lambda n: torch.full((len(n) - 1,), 1 / (len(n) - 1)), "with leaf weights"),
            (lambda n: (1 / edges(n)) / (1 / edges(n)).sum(), "would make all decisions equal"),
        ],
    ),
    Case(
        lesson.check_evaluations,
        lambda roots, children, steps: sum(counts(roots, children, steps)[:-1]),
        [
            (
                lambda roots, children, steps: sum(counts(roots, children, steps)),
                "is the number of states",
            ),
            (
                lambda roots, children, steps: sum(counts(roots, children, steps)[1:]),
                "is the number of edges",
            ),
            (
                lambda roots, children, steps: steps * counts(roots, children, steps)[-1],
                "as many independent trajectories",
            ),
            (lambda roots, children, steps: sum(counts(1, children, steps)[:-1]), "for one root"),
            (lambda roots, children, steps: 0, "you get 0"),
        ],
    ),
]

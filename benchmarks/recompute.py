"""Recompute changed rules from the reference's tables: python benchmarks/recompute.py DIR, kept by
`golden.py --keep DIR`.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def z(y, axes, mask):  # population std over `mask` [prompt, member, decision]
    count = mask.sum(axes, keepdim=True).clamp(min=1)

    def mean(x):
        return torch.where(mask, x, 0.0).sum(axes, keepdim=True) / count

    return ((y - mean(y)) / (mean((y - mean(y)).square()).sqrt() + 1e-4)).clamp(-5, 5)


def siblings(v, mask, t):  # a comb: draws of one state are compared; weighted by noise
    start = t["tree.parent"][t["tree.paths"][:, [step + 1 for step in t["steps"]]]]
    same = (start[:, None] == start[None])[None] & mask[:, None]
    return (
        z(v[:, None, :, -1:].expand_as(same), 2, same).diagonal(dim1=1, dim2=2).mT
        * t["std"]
        / t["std"].mean()
    )


def turning(v, mask, t):  # consistent, balanced over the batch, decision by decision
    gain, ahead, trend = v.diff(dim=-1), v[..., -1:] - v[..., 1:], (v[..., -1:] - v[..., :1]).sign()
    before = torch.cat([-torch.ones_like(trend), (gain * trend)[..., :-1]], -1)
    turns, size = (before < 0) & (gain * trend > 0) & (gain * ahead > 0) & mask, gain + ahead
    signs = [turns & (sign * size > 0) for sign in (1, -1)]
    if (count := min(int(one.sum()) for one in signs)) > 0:  # the largest of each sign
        turns = (
            sum(one & (size.abs() >= size.abs()[one].topk(count).values[-1]) for one in signs) > 0
        )
    return z(torch.where(turns, size, gain), 1, mask)


def random(v, mask, t):  # the first table of seed 0, by the ranks of the rewards
    draws = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    return draws.gather(
        1, v[..., -1:].argsort(dim=1, stable=True).argsort(dim=1).expand(mask.shape)
    )


RULES = {"tempflow-grpo": siblings, "turning-later": turning, "random-credit": random}
RULES["invalid"] = lambda v, mask, t: z(v[..., -1:].expand(mask.shape), 1, mask)
RULES["noise-weighted"] = lambda v, mask, t: (
    RULES["invalid"](v, mask, t) * t["std"] / t["std"].mean()
)
RULES["flux-stepwise"] = joint = lambda v, mask, t: z(v.diff(dim=-1), (1, 2), mask)
RULES |= {"stepwise-flow-grpo": joint, "stepwise-bfloat16": joint}
RULES["moving-whole"] = RULES["moving-paused"] = lambda v, mask, t: z(
    v.diff(dim=-1) - v.diff(dim=-1).mean((0, 1)), (1, 2), mask
)


# the largest, at trained decisions; rules that are not in RULES did not change
def difference(run, old, new):
    steps = old["drawn"].any(0).nonzero().flatten().tolist()
    mask = (
        old["drawn"][:, steps] & (old["valid"] & (old["valid"].sum(1, keepdim=True) > 1))[..., None]
    )
    given, tables = (
        (old["values"][..., [*steps, -1]].double(), mask),
        {**old, "steps": steps, "std": old["std"][steps]},
    )
    found = RULES[run](*given, tables) if run in RULES else old["advantages"][..., steps]
    counted = (new["weights"] > 0) & (torch.tensor(run in RULES) | (old["weights"][..., steps] > 0))
    return float((found - new["advantages"])[counted].abs().max())


if __name__ == "__main__":
    folder, differences = Path(sys.argv[1]), {}
    for path in sorted(folder.glob("reference/*/tables/*/000001.safetensors")):
        case, run, other = (
            path.parts[-4],
            path.parts[-2],
            folder / "current" / path.relative_to(folder / "reference"),
        )
        if case.startswith("rules-") or run in RULES:
            differences[path] = difference(run, load_file(path), load_file(other))
            print(f"{case:<17}{run:<20}{differences[path]:.1e}")
    sys.exit(max(differences.values(), default=1.0) > 1e-6)

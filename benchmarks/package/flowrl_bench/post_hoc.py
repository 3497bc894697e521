"""Questions that were asked after the data had been seen, and what to mind when reading a verdict. No verdict rests on them."""

from flowrl_bench.catalogue import GAINS, IMAGE_TASKS, NONE, POINTS, UNIFORM
from flowrl_bench.claims import Claim
from flowrl_bench.verdicts import Answer

_QUESTIONS = (
    Claim(
        "lead-without-kl",
        "By how much do gains and turning points lead over uniform credit without KL, at the default clip?",
        NONE,
        "-",
        {"uniform": UNIFORM, "stepwise": GAINS, "turning points": POINTS},
        Answer(("stepwise", "turning points"), "uniform"),
        tasks=IMAGE_TASKS,
        asks=True,
    ),
    Claim(
        "kl-strength",
        "Does the KL of `tp-explores` change what is learned at all?",
        NONE,
        "-",
        {
            "uniform": UNIFORM,
            "uniform, KL": {**UNIFORM, "kl_weight": 0.01},
        },
        Answer(("uniform, KL",), "uniform"),
        asks=True,
    ),
    Claim(
        "true-limit",
        "How far are the rules from being paid true advantages?",
        NONE,
        "-",
        {
            "true advantages": {"credit": "stepwise-gain(probe='continuation:8')"},
            "uniform": UNIFORM,
            "stepwise": GAINS,
            "turning points": POINTS,
        },
        Answer(("uniform", "stepwise", "turning points"), "true advantages"),
        asks=True,
    ),
    *(
        Claim(
            f"reward-forms-{name}",
            f"What does {words} gain when it learns from a graded reward (0, a half, 1) or the soft one instead of 0 or 1?",
            NONE,
            "-",
            {
                "0 or 1": {**arm, "reward_form": "strict"},
                "graded": {**arm, "reward_form": "graded"},
                "soft": {**arm, "reward_form": "soft"},
            },
            Answer(("graded", "soft"), "0 or 1"),
            asks=True,
        )
        for name, words, arm in (
            ("uniform", "uniform credit", UNIFORM),
            ("stepwise", "stepwise credit", GAINS),
            ("points", "turning-point credit", POINTS),
        )
    ),
    *(
        Claim(
            f"clip-wide-{name}",
            f"What does a clip 10 times as wide (0.02) do to {words}?",
            NONE,
            "-",
            {"clip 0.002": arm, "clip 0.02": {**arm, "clip": 2e-2}},
            Answer(("clip 0.02",), "clip 0.002"),
            tasks=("compositional",),
            asks=True,
        )
        for name, words, arm in (
            ("uniform", "uniform credit", UNIFORM),
            ("stepwise", "stepwise credit", GAINS),
            ("points", "turning-point credit", POINTS),
        )
    ),
)

LATER: dict[str, Claim] = {claim.id: claim for claim in _QUESTIONS}
"""They need no runs of their own."""

_CLIP = (
    "How far uniform credit is behind depends on the clip: `clip-uniform`, `clip-lead-10` and `clip-wide-uniform` have one ten "
    "times as wide, and the table *What a level costs* shows both."
)
NOTES: dict[str, str] = {
    "stepwise-updates": _CLIP,
    "stepwise-cost": _CLIP,
    "tp-updates": _CLIP,
    "tp-beats-uniform": f"{_CLIP} The image world's tasks are pooled; each stands alone under *Every rule and comparison*.",
    "tp-explores": "This is a test only if the KL changes what is learned: `kl-strength`.",
    "ddim-sde": "Two questions in one: the quality of the sampler's own samples, and what the rules learn with it.",
    "train-short": "Final rewards after as many updates. Where they are low, neither arm is done, and this is about speed.",
    "kl-quality": "If quality does not fall without KL, there is nothing to keep: compare with the level before training.",
    "equal-nfe": _CLIP,
    "equal-seconds": _CLIP,
    "reward-noise": _CLIP,
    "reward-bias": f"{_CLIP} In the 2-D world, the brightness of a point is the mean of its two coordinates.",
    "reward-strict": _CLIP,
    "reward-graded": _CLIP,
    "scale-steps": _CLIP,
    "scale-groups": _CLIP,
    "kl-scaling": "Without the length the same weight is a weaker KL. A higher reward does not make the formula right.",
    "cps-scaling": "A rescaled log-probability changes how far an update goes before the clip stops it. A higher reward does not "
    "make the formula right.",
    "point-density": "The rule looks at the trained policy; levels before training stand under *Every rule and comparison*.",
}
"""By claim: what its rule alone does not say."""

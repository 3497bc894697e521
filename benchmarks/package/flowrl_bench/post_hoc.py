"""Questions and caveats written after the results were known, and changes of the rules. No verdict depends on them."""

from flowrl_bench.claims import GAINS, METHODS, POINTS, TASKS, UNIFORM, Claim, gains, question
from flowrl_bench.verdicts import each

_RULES = (
    ("uniform", "uniform credit", UNIFORM),
    ("stepwise", "stepwise credit", GAINS),
    ("points", "turning-point credit", POINTS),
)

_QUESTIONS = (
    question(
        "lead-without-kl",
        "By how much do gains and turning points lead over uniform credit without KL, at the default clip range?",
        METHODS,
        each(("stepwise", "turning points"), "uniform"),
        tasks=TASKS["shapes"],
    ),
    question(
        "kl-strength",
        "Does the KL of `tp-explores` change what is learned at all?",
        {"uniform": UNIFORM, "uniform, KL": {**UNIFORM, "kl_weight": 0.01}},
        each(("uniform, KL",), "uniform"),
    ),
    question(
        "true-limit",
        "How far are the rules from credit by true advantages?",
        {"true advantages": gains("probe='continuation:8'"), **METHODS},
        each(("uniform", "stepwise", "turning points"), "true advantages"),
    ),
    *(
        question(
            f"reward-forms-{name}",
            f"What does {words} gain if it learns from a graded reward (0, 0.5, 1) or the soft one instead of 0 or 1?",
            {
                "0 or 1": {**arm, "reward_form": "strict"},
                "graded": {**arm, "reward_form": "graded"},
                "soft": {**arm, "reward_form": "soft"},
            },
            each(("graded", "soft"), "0 or 1"),
        )
        for name, words, arm in _RULES
    ),
    *(
        question(
            f"clip-wide-{name}",
            f"What does a clip range 10 times as wide (0.02) do to {words}?",
            {"clip 0.002": arm, "clip 0.02": {**arm, "clip_range": 2e-2}},
            each(("clip 0.02",), "clip 0.002"),
            tasks=("compositional",),
        )
        for name, words, arm in _RULES
    ),
)

POST_HOC: dict[str, Claim] = {claim.id: claim for claim in _QUESTIONS}
"""Questions by id; they need no runs of their own."""

_CLIP = (
    "The deficit of uniform credit depends on the clip range: `clip-uniform`, `clip-lead-10` and `clip-wide-uniform` have one "
    "ten times as wide, and the table *Cost of a reward level* shows both."
)
CAVEATS: dict[str, str] = {
    "stepwise-updates": _CLIP,
    "stepwise-cost": _CLIP,
    "tp-updates": _CLIP,
    "tp-beats-uniform": f"{_CLIP} The tasks of the image world are pooled; *All rules and comparisons* has each task alone.",
    "tp-explores": "This is a test only if the KL changes what is learned: see `kl-strength`.",
    "ddim-sde": "These are two questions: the quality of the sampler's own samples, and what the rules learn with the sampler.",
    "train-short": "Final rewards after equally many updates. If they are low, neither arm has converged, and the claim is about "
    "speed.",
    "kl-quality": "If quality does not fall without KL, there is nothing to preserve: compare with the level before training.",
    "equal-nfe": _CLIP,
    "equal-seconds": _CLIP,
    "reward-noise": _CLIP,
    "reward-bias": f"{_CLIP} In the 2-D world, the brightness of a point is the mean of its two coordinates.",
    "reward-strict": _CLIP,
    "reward-graded": _CLIP,
    "scale-steps": _CLIP,
    "scale-groups": _CLIP,
    "kl-scaling": "Without the length, the same weight is a weaker KL. A higher reward does not make the formula right.",
    "cps-scaling": "A rescaled log-probability changes how far an update goes before the clip stops it. A higher reward does not "
    "make the formula right.",
    "point-density": "The rule uses samples of the trained policy; *All rules and comparisons* has the levels before training.",
}
"""By claim: what its verdict alone does not say."""

EARLIER_RULES: dict[str, str] = {
    "a8ce9300faab300f": "the earlier rules of docs/verdicts.md",
    "30b7bbf788fe4b92": "without the questions about the clip range, which were added before their own runs were made, and with "
    "the differences of the next, and the earlier rules of docs/verdicts.md",
    "80b0d79a4ad3f108": "quality and turning points of the sampler's own samples came from 144 samples with the same noise for "
    "every seed, so that intervals left out the sampling error; with 2,304 samples and separate noise per seed, the quality of "
    "the DDIM-inspired SDE changed its sign. The interval of a budget ratio took the baseline's final reward as known; now that "
    "reward is resampled too, which widened these intervals. No claim's verdict changed; one part of one became undecided. Two "
    "questions were worded in a way that did not fit their rules. Otherwise as the first",
}
"""By the digest of earlier claims and rules: how they differed from today's. Every line holds the digest it was made under."""

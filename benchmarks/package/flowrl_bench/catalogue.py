"""All claims: those of the three papers, and the self-test; which of them have verdicts. Written
before the runs.
"""

from flowrl_bench.arms import ARMS, TASKS
from flowrl_bench.claims import (
    BINDING_KL,
    DEFAULTS,
    EQUAL_EVALUATIONS,
    GAINS,
    LONG_WINDOW,
    POINTS,
    SELF_TEST,
    UNIFORM,
    Arm,
    Claim,
    gains,
    points,
    question,
)
from flowrl_bench.leads import LARGER, LEADS
from flowrl_bench.open_questions import QUESTIONS
from flowrl_bench.verdicts import ALIKE, BETTER, WORSE, Compare, Interaction, Level, each

FLOW = "Flow-GRPO, arXiv 2505.05470"
STEPWISE = "Stepwise-Flow-GRPO, arXiv 2603.28718"
TURNING = "TP-GRPO, arXiv 2602.06422"

_STEPWISE_CLAIMS = (
    Claim(
        "stepwise-updates",
        "Credit by stepwise gains learns faster than uniform credit per update.",
        STEPWISE,
        "GenEval .87 against .72 at 400 GPU-hours",
        {"uniform": UNIFORM, "stepwise": GAINS},
        Compare("stepwise", "uniform"),
        (Compare("stepwise", "uniform", "updates"),),
        expects=BETTER,
        tasks=TASKS["shapes"],
    ),
    Claim(
        "stepwise-cost",
        "It also needs fewer network evaluations and less wall-clock time.",
        STEPWISE,
        "better in 3 of 4 settings per hour; an iteration costs 1.8 to 2.4 times as much",
        {"uniform": UNIFORM, "stepwise": GAINS},
        Compare("stepwise", "uniform", "reward at equal forwards"),
        tuple(
            Compare("stepwise", "uniform", measure)
            for measure in ("forwards", "reward at equal world seconds", "world seconds")
        ),
        expects=BETTER,
        tasks=TASKS["shapes"],
    ),
    Claim(
        "joint-normalisation",
        "Normalising gains jointly over members and steps beats normalising each step separately.",
        STEPWISE,
        "an ablation's curves",
        {"joint": GAINS, "per step": gains("normalise=step")},
        Compare("joint", "per step"),
        expects=BETTER,
    ),
    Claim(
        "substeps",
        "The number of substeps T' that estimate the image hardly matters.",
        STEPWISE,
        "curves for T' = 1 to 10 coincide",
        {
            "T'=5": GAINS,
            "T'=1": gains("probe=tweedie"),
            "T'=2": gains("probe='substeps:2'"),
            "T'=8": gains("probe='substeps:8'"),
        },
        Compare("T'=1", "T'=5"),
        each(("T'=2", "T'=8"), "T'=5"),
        expects=ALIKE,
    ),
    Claim(
        "ddim-sde",
        "The DDIM-inspired SDE gives cleaner samples than Flow-SDE and improves both rules.",
        STEPWISE,
        "curves with and without it",
        {
            "uniform, Flow-SDE": {**UNIFORM, **LONG_WINDOW},
            "uniform, DDIM-SDE": {**UNIFORM, **LONG_WINDOW, "sampler": "ddim-sde"},
            "stepwise, Flow-SDE": {**GAINS, **LONG_WINDOW},
            "stepwise, DDIM-SDE": {**GAINS, **LONG_WINDOW, "sampler": "ddim-sde"},
        },
        Compare("stepwise, DDIM-SDE", "stepwise, Flow-SDE"),
        (
            Compare("uniform, DDIM-SDE", "uniform, Flow-SDE"),
            Compare("uniform, DDIM-SDE", "uniform, Flow-SDE", "sampler quality"),
        ),
        expects=BETTER,
        samples=("uniform, Flow-SDE", "uniform, DDIM-SDE"),
    ),
    Claim(
        "early-gains",
        "Gains are largest at the early steps.",
        STEPWISE,
        "mean |g| .031 at the first step, .0006 at the last",
        {"stepwise": {**GAINS, **LONG_WINDOW}},
        Level("stepwise", "early gains"),
        expects="above 0",
    ),
    Claim(
        "plain-gains",
        "Plain gains match or beat gains over a moving average, and generalised gains.",
        STEPWISE,
        "an ablation's curves",
        {
            "plain": GAINS,
            "moving average": {**GAINS, "credit": "moving-average-gain"},
            "lambda 0.5": gains("lam=0.5"),
            "lambda 0.9, gamma 0.9": gains("lam=0.9, gamma=0.9"),
        },
        Compare("plain", "moving average"),
        tuple(Compare("plain", other) for other in ("lambda 0.5", "lambda 0.9, gamma 0.9")),
        expects=f"not {WORSE}",
    ),
)

_TURNING_POINT_CLAIMS = (
    Claim(
        "tp-beats-uniform",
        "TP-GRPO beats uniform credit on all tasks. Without KL it reaches in 700 updates the reward"
        " for which uniform credit needs 2300.",
        TURNING,
        "GenEval .9725 and .9714 against .9673; OCR .9651 and .9718 against .9579; PickScore 24.67"
        " and 24.73 against 24.02; 700 / 2300 updates = 0.30",
        {"uniform": UNIFORM, "turning points": POINTS},
        Compare("turning points", "uniform"),
        (Compare("turning points", "uniform", "updates"),),
        expects=BETTER,
        tasks=TASKS["shapes"],
    ),
    Claim(
        "tp-constraint",
        "TP-GRPO also beats uniform credit without the consistency constraint.",
        TURNING,
        "GenEval .9714 against .9673",
        {"uniform": UNIFORM, "no constraint": points("consistent=False")},
        Compare("no constraint", "uniform"),
        expects=BETTER,
    ),
    Claim(
        "tp-explores",
        "Without KL, TP-GRPO's lead over uniform credit is larger: it explores better.",
        TURNING,
        "curves without KL",
        {
            "uniform": UNIFORM,
            "turning points": POINTS,
            "uniform, KL": {**UNIFORM, "kl_weight": BINDING_KL},
            "turning points, KL": {**POINTS, "kl_weight": BINDING_KL},
        },
        Interaction("turning points", "uniform", "turning points, KL", "uniform, KL"),
        expects=BETTER,
    ),
    Claim(
        "tp-window",
        "A window of 8 of 10 stochastic steps is better than all of them, and a window of 4 is"
        " worse.",
        TURNING,
        "an ablation's curves",
        {
            "all but last": {**POINTS, **LONG_WINDOW},
            "first 8": {**POINTS, "window": "0:8"},
            "first 4": {**POINTS, "window": "0:4"},
        },
        Compare("first 8", "all but last"),
        (Compare("all but last", "first 4"),),
        expects=BETTER,
    ),
    Claim(
        "tp-noise",
        "A noise level of 0.7 is best.",
        TURNING,
        "0.7 best of 0.4 to 1.0",
        {f"noise {a:g}": {**POINTS, "noise_level": a} for a in (0.7, 0.4, 0.55, 0.85, 1.0)},
        Compare("noise 0.7", "noise 1"),
        tuple(Compare("noise 0.7", f"noise {a:g}") for a in (0.4, 0.55, 0.85)),
        expects=BETTER,
    ),
)

_STABLE: Arm = {**UNIFORM, "clip_range": 0.02, "noise_level": 0.7, "iterations": 80}
"""Uniform credit with a clip at which groups of 24 last 80 updates: 0 of 6 runs collapsed (seeds
9800 to 9805; 1 of 6 at 0.06). At the tuned clip, 0.18, 12 of 15 did.
"""

_FLOW_CLAIMS = (
    Claim(
        "train-short",
        "Training with 10 denoising steps and evaluating with 40 is as good as training with 40, at"
        " equal network evaluations.",
        FLOW,
        "the same final reward, more than four times as fast",
        {
            "10 steps": {**UNIFORM, "num_steps": 10, "iterations": 80},
            "40 steps": {**UNIFORM, "num_steps": 40},
        },
        Compare("10 steps", "40 steps", "reward at equal forwards"),
        (Compare("10 steps", "40 steps", "final"),),
        expects=BETTER,
        base={**LONG_WINDOW, "eval_steps": 40},
    ),
    Claim(
        "different-noise",
        "Groups whose members start from different noise learn better than groups that share it.",
        FLOW,
        "an ablation's curves",
        {
            "different": {**UNIFORM, "initial_noise": "independent"},
            "same": {**UNIFORM, "initial_noise": "shared"},
        },
        Compare("different", "same"),
        expects=BETTER,
    ),
    Claim(
        "small-groups",
        "Groups of 6 and 12 collapse, groups of 24 do not.",
        FLOW,
        "the reward of groups of 6 and 12 falls again, that of 24 does not",
        {f"groups of {g}": {**_STABLE, "group_size": g} for g in (6, 12, 24)},
        Compare("groups of 24", "groups of 6", "collapse"),
        (Compare("groups of 24", "groups of 12", "collapse"),),
        expects=BETTER,
    ),
    Claim(
        "kl-quality",
        "KL to the base model keeps held-out quality at equal reward.",
        FLOW,
        "image quality and diversity are preserved, but training takes longer",
        {
            "KL": {**UNIFORM, "kl_weight": BINDING_KL, "iterations": 80},
            "no KL": {**UNIFORM, "iterations": 80},
        },
        Compare("KL", "no KL", "quality at equal reward"),
        expects=BETTER,
    ),
)

# the runs are those of version 0.1; `flowrl bench headroom --methods` has these controls at tuned
# settings, in a task with headroom
_SELF_TESTS = (
    Claim(
        "self-test",
        "Does the suite detect a known lead? Credit by true advantages must lead.",
        SELF_TEST,
        "-",
        {"true advantages": {"arm": "true advantages"}, "uniform": UNIFORM},
        Compare("true advantages", "uniform"),
        expects=BETTER,
        base=DEFAULTS,
    ),
    Claim(
        "self-test-random",
        "Does the suite detect a known loss? Random credit must trail.",
        SELF_TEST,
        "-",
        {"random": {"arm": "random credit"}, "uniform": UNIFORM},
        Compare("random", "uniform"),
        expects=WORSE,
        base=DEFAULTS,
    ),
)

CLAIMS: dict[str, Claim] = {
    c.id: c
    for c in (
        *_STEPWISE_CLAIMS,
        *_TURNING_POINT_CLAIMS,
        *_FLOW_CLAIMS,
        *LEADS,
        *QUESTIONS,
        *_SELF_TESTS,
    )
}
"""All claims and questions by id."""

PRIMARY: dict[str, tuple[str, ...]] = {
    "mixture": (
        *(
            f"lead-{name}"
            for name in (
                "stepwise-gains",
                "turning-points",
                "increments-alone",
                "noise-weighted",
                "branch-grpo",
                "tree-grpo",
                "tempflow-grpo",
                "granular-grpo",
                "diffusion-nft",
            )
        ),
        "stepwise-updates",
        "stepwise-cost",
        "joint-normalisation",
        "substeps",
        "ddim-sde",
        "tp-beats-uniform",
        "tp-window",
        "random-points",
        "train-short",
        "different-noise",
        "small-groups",
        "kl-quality",
    ),
    "shapes": (
        *(
            f"lead-{name}"
            for name in (
                "stepwise-gains",
                "turning-points",
                "increments-alone",
                "branch-grpo",
                "diffusion-nft",
            )
        ),
        "stepwise-updates",
        "stepwise-cost",
        "tp-beats-uniform",
        "random-points",
    ),
}
"""The claims and questions whose primary outcome has a verdict, by world: one family of Holm's
correction each, of at most 20 different outcomes. Everything else is secondary.
"""

_OTHERS = tuple(name for name in ARMS if name not in ("uniform", LARGER))
RETIRED: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        Claim(
            "small-groups-earlier",
            "The runs of an earlier form of small-groups: 13 of 15 groups of 12 collapsed, and 12"
            " of 15 groups of 24, so that they could not tell the sizes apart.",
            FLOW,
            "-",
            {f"groups of {g}": {**UNIFORM, "group_size": g, "iterations": 80} for g in (6, 12, 24)},
            Compare("groups of 24", "groups of 6", "collapse"),
        ),
        question(
            "larger-groups-earlier",
            "The runs of an earlier form of larger groups: 40 members in the 2-D world, and 36 on"
            " images, so that an update had as many network evaluations as one of turning points"
            " (on images an eighth more), when an evaluation with a gradient counted as one. In"
            " forward equivalents such an update costs 1.4 times as much as one of turning points.",
            {name: {"arm": name} for name in ("uniform", EQUAL_EVALUATIONS, *_OTHERS)},
            *(
                Compare(EQUAL_EVALUATIONS, "uniform", measure)
                for measure in ("reward at equal forwards", "area", "collapse")
            ),
            *each(_OTHERS, EQUAL_EVALUATIONS, "reward at equal forwards"),
            tasks=TASKS["shapes"],
        ),
    )
}
"""Claims that are no longer made. Their runs are in the results; their comparisons have no
verdict.
"""

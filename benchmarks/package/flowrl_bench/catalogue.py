"""All claims: those of the three papers, and the self-test. Written before the runs."""

from flowrl_bench.arms import TASKS
from flowrl_bench.claims import (
    BINDING_KL,
    DEFAULTS,
    GAINS,
    LONG_WINDOW,
    POINTS,
    UNIFORM,
    Claim,
    gains,
    points,
)
from flowrl_bench.leads import LEADS
from flowrl_bench.open_questions import QUESTIONS
from flowrl_bench.verdicts import ALIKE, BETTER, NO_WORSE, Compare, Interaction, Level, Parts, each

FLOW = "Flow-GRPO, arXiv 2505.05470"
STEPWISE = "Stepwise-Flow-GRPO, arXiv 2603.28718"
TURNING = "TP-GRPO, arXiv 2602.06422"

_STEPWISE_CLAIMS = (
    Claim(
        "stepwise-updates",
        "Credit by stepwise gains reaches the same rewards as uniform credit in fewer updates.",
        STEPWISE,
        "GenEval .87 against .72 at 400 GPU-hours",
        {"uniform": UNIFORM, "stepwise": GAINS},
        Compare("stepwise", "uniform", "updates", BETTER),
        tasks=TASKS["shapes"],
    ),
    Claim(
        "stepwise-cost",
        "It also needs less wall-clock time and fewer network evaluations.",
        STEPWISE,
        "better in 3 of 4 settings per hour; an iteration costs 1.8 to 2.4 times as much",
        {"uniform": UNIFORM, "stepwise": GAINS},
        Parts(
            (
                Compare("stepwise", "uniform", "seconds", BETTER),
                Compare("stepwise", "uniform", "forwards", BETTER),
            )
        ),
        tasks=TASKS["shapes"],
    ),
    Claim(
        "joint-normalisation",
        "Normalising gains jointly over members and steps beats normalising each step separately.",
        STEPWISE,
        "an ablation's curves",
        {"joint": GAINS, "per step": gains("normalise=step")},
        Compare("joint", "per step", expects=BETTER),
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
        each(("T'=1", "T'=2", "T'=8"), "T'=5", expects=ALIKE),
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
        Parts(
            (
                Compare("uniform, DDIM-SDE", "uniform, Flow-SDE", "sampler quality", BETTER),
                Compare("uniform, DDIM-SDE", "uniform, Flow-SDE", expects=BETTER),
                Compare("stepwise, DDIM-SDE", "stepwise, Flow-SDE", expects=BETTER),
            )
        ),
        samples=("uniform, Flow-SDE", "uniform, DDIM-SDE"),
    ),
    Claim(
        "early-gains",
        "Gains are largest at the early steps.",
        STEPWISE,
        "mean |g| .031 at the first step, .0006 at the last",
        {"stepwise": {**GAINS, **LONG_WINDOW}},
        Level("stepwise", "early gains"),
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
        Parts(
            tuple(
                Compare("plain", other, expects=NO_WORSE)
                for other in ("moving average", "lambda 0.5", "lambda 0.9, gamma 0.9")
            )
        ),
    ),
)

_TURNING_POINT_CLAIMS = (
    Claim(
        "tp-beats-uniform",
        "TP-GRPO beats uniform credit, with and without the consistency constraint, on all tasks.",
        TURNING,
        "GenEval .9725 and .9714 against .9673; OCR .9651 and .9718 against .9579; PickScore 24.67"
        " and 24.73 against 24.02",
        {"uniform": UNIFORM, "turning points": POINTS, "no constraint": points("consistent=False")},
        each(("turning points", "no constraint"), "uniform", expects=BETTER),
    ),
    Claim(
        "tp-updates",
        "Without KL, TP-GRPO reaches in 700 updates the reward for which uniform credit needs"
        " 2300.",
        TURNING,
        "700 / 2300 = 0.30",
        {"uniform": UNIFORM, "turning points": POINTS},
        Compare("turning points", "uniform", "updates", BETTER, at_most=0.304),
        tasks=TASKS["shapes"],
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
        Parts(
            (
                Compare("first 8", "all but last", expects=BETTER),
                Compare("all but last", "first 4", expects=BETTER),
            )
        ),
    ),
    Claim(
        "tp-noise",
        "A noise level of 0.7 is best.",
        TURNING,
        "0.7 best of 0.4 to 1.0",
        {f"noise {a:g}": {**POINTS, "noise_level": a} for a in (0.7, 0.4, 0.55, 0.85, 1.0)},
        Parts(
            tuple(
                Compare("noise 0.7", f"noise {a:g}", expects=BETTER) for a in (0.4, 0.55, 0.85, 1.0)
            )
        ),
    ),
)

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
        Parts(
            (
                Compare("10 steps", "40 steps", "reward at equal forwards", BETTER),
                Compare("10 steps", "40 steps", "final", NO_WORSE),
            )
        ),
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
        Compare("different", "same", expects=BETTER),
    ),
    Claim(
        "small-groups",
        "Groups of 6 and 12 collapse, groups of 24 do not.",
        FLOW,
        "the reward of groups of 6 and 12 falls again, that of 24 does not",
        {f"groups of {g}": {**UNIFORM, "group_size": g, "iterations": 80} for g in (6, 12, 24)},
        Parts(
            tuple(Compare("groups of 24", f"groups of {g}", "collapse", BETTER) for g in (6, 12))
        ),
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
        Compare("KL", "no KL", "quality at equal reward", BETTER),
    ),
)

_SELF_TEST = Claim(
    "self-test",
    "Does the suite detect known differences? Credit by true advantages must lead, random credit"
    " must trail.",
    "self-test",
    "-",
    {
        "true advantages": {"arm": "true advantages"},
        "uniform": UNIFORM,
        "random": {"arm": "random credit"},
    },
    Parts(
        (
            Compare("true advantages", "uniform", expects=BETTER),
            Compare("uniform", "random", expects=BETTER),
        )
    ),
    base=DEFAULTS,  # at tuned settings uniform credit is too near to the ceiling
)

CLAIMS: dict[str, Claim] = {
    c.id: c
    for c in (
        *_STEPWISE_CLAIMS,
        *_TURNING_POINT_CLAIMS,
        *_FLOW_CLAIMS,
        *LEADS,
        *QUESTIONS,
        _SELF_TEST,
    )
}
"""All claims and questions by id."""

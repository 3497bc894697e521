"""Open questions, which no paper answers. Written before their runs."""

from flowrl_bench.arms import TASKS
from flowrl_bench.claims import (
    BINDING_KL,
    DEFAULTS,
    GAINS,
    KL_WEIGHTS,
    LONG_WINDOW,
    METHODS,
    POINTS,
    UNIFORM,
    Claim,
    gains,
    points,
    question,
    variant,
)
from flowrl_bench.verdicts import Compare, Interaction, Level, each

_ONE_STEP = gains("probe=tweedie")

_CREDIT = (
    question(
        "increments-alone",
        "Do incremental rewards alone achieve what turning points do?",
        {"turning points": POINTS, "increments alone": {"arm": "increments alone"}},
        *each(("increments alone",), "turning points"),
        tasks=TASKS["shapes"],
    ),
    question(
        "random-points",
        "Does the position of a turning point matter, or only that some steps get the reward that"
        " follows?",
        {"turning points": POINTS, "random steps": {"arm": "turning points at random steps"}},
        *each(("random steps",), "turning points"),
        tasks=TASKS["shapes"],
    ),
    question(
        "balancing",
        "What does balancing the signs of the turning points do?",
        {"balanced": POINTS, "not balanced": points("balance=none")},
        *each(("not balanced",), "balanced"),
    ),
    question(
        "fresh-noise-fault",
        "What does the public release's fresh noise for the pure-ODE reward cost?",
        {
            "right": POINTS,
            "fresh noise": {**POINTS, "credit": "flowrl_bench.negative_controls:FreshNoiseFault"},
        },
        *each(("fresh noise",), "right"),
    ),
    question(
        "tp-normalisation",
        "Does joint normalisation help turning points too?",
        {"per step": POINTS, "joint": points("normalise=joint")},
        *each(("joint",), "per step"),
    ),
    question(
        "lambda",
        "Which lambda between gains (0) and reward-to-go (1) is best?",
        {
            "lambda 0": GAINS,
            **{f"lambda {lam:g}": gains(f"lam={lam}") for lam in (0.25, 0.5, 0.75, 1.0)},
        },
        *each(("lambda 1", "lambda 0.25", "lambda 0.5", "lambda 0.75"), "lambda 0"),
    ),
    question(
        "shared-noise-gains",
        "Do stepwise gains need groups that start from the same noise?",
        {"shared": GAINS, "independent": {**GAINS, "initial_noise": "independent"}},
        *each(("independent",), "shared"),
    ),
    question(
        "point-criteria",
        "Do stricter turning points (large ones, clear ones) do better?",
        {
            "turning points": POINTS,
            "at least 0.1": variant("min_size=0.1"),
            "clear swings": variant("confidence=1.0"),
        },
        *each(("at least 0.1", "clear swings"), "turning points"),
    ),
    question(
        "point-density",
        "Are there more turning points than random signs would give?",
        {"turning points": {**POINTS, **LONG_WINDOW}},
        Level("turning points", "turning points over null"),
        samples=("turning points",),
    ),
)

_ESTIMATES = (
    question(
        "estimates",
        "At equal network evaluations, which estimate of unfinished images is best: one step, 5"
        " substeps or the whole ODE?",
        {"5 substeps": GAINS, "one step": _ONE_STEP, "whole ODE": gains("probe=completion")},
        *each(("one step", "whole ODE"), "5 substeps", "reward at equal forwards"),
    ),
    question(
        "true-limit",
        "How far are the rules from credit by true advantages?",
        {"true advantages": {"arm": "true advantages"}, **METHODS},
        *each(("uniform", "stepwise", "turning points"), "true advantages"),
    ),
    question(
        "tuning",
        "What does a rule lose at the world's default learning rate, clip and noise level?",
        {**METHODS, **{f"{rule}, defaults": {**arm, **DEFAULTS} for rule, arm in METHODS.items()}},
        *(Compare(f"{rule}, defaults", rule) for rule in METHODS),
    ),
    question(
        "narrower-clip",
        "Does uniform credit do better with the clip that came second in its search (0.06 instead"
        " of 0.18)?",
        {
            "uniform": UNIFORM,
            "clip 0.06": {**UNIFORM, "clip_range": 0.06, "noise_level": 0.7},
            "stepwise": GAINS,
            "turning points": POINTS,
        },
        *each(("clip 0.06",), "uniform"),
        Compare("clip 0.06", "uniform", "collapse"),
        *each(("stepwise", "turning points"), "clip 0.06"),
        *each(("stepwise", "turning points"), "clip 0.06", "reward at equal forwards"),
    ),
    question(
        "slower-forward",
        "Does diffusion-nft do better with the learning rate that came second in its search (0.004"
        " instead of 0.008)?",
        {
            "uniform": UNIFORM,
            "diffusion-nft": {"arm": "diffusion-nft"},
            "rate 0.004": {"arm": "diffusion-nft", "learning_rate": 0.004},
        },
        *each(("rate 0.004",), "diffusion-nft"),
        Compare("rate 0.004", "diffusion-nft", "collapse"),
        *each(("rate 0.004",), "uniform"),
        *each(("rate 0.004",), "uniform", "reward at equal forwards"),
        tasks=TASKS["shapes"],
        in_2d=False,
    ),
)

_REWARDS = tuple(
    question(
        f"reward-{name}",
        f"Which rules beat uniform credit with a reward {words}?",
        {"uniform": UNIFORM, "stepwise": GAINS, "one step": _ONE_STEP, "turning points": POINTS},
        *each(("stepwise", "one step", "turning points"), "uniform"),
        base=changes,
    )
    for name, words, changes in (
        ("noise", "that has noise of 0.3 on every score", {"reward_noise": 0.3}),
        ("bias", "that also prefers bright images", {"reward_bias": 0.3}),
        ("strict", "of 0 or 1", {"reward_form": "strict"}),
        ("graded", "of 0, 0.5 or 1", {"reward_form": "graded"}),
    )
)


def _scale(name: str, words: str, setting: str, label: str, value: int) -> Claim:
    """Whether the lead over uniform credit is larger with the default of `setting` than with
    `value`.
    """
    return question(
        f"scale-{name}",
        f"Is the lead of stepwise credit larger {words}?",
        {
            **METHODS,
            **{
                f"{rule}, {label} {value}": {**arm, setting: value} for rule, arm in METHODS.items()
            },
        },
        *(
            Interaction(rule, "uniform", f"{rule}, {label} {value}", f"uniform, {label} {value}")
            for rule in ("stepwise", "turning points")
        ),
        base=LONG_WINDOW if setting == "num_steps" else {},
    )


_SCALES = (
    _scale("steps", "with 10 denoising steps than with 40", "num_steps", "T =", 40),
    _scale("groups", "in groups of 12 than in groups of 24", "group_size", "G =", 24),
    _scale("small-groups", "in groups of 12 than in groups of 6", "group_size", "G =", 6),
)

_LOSS = (
    question(
        "kl-scaling",
        "Does it matter that public code omits the step's length from the KL?",
        {
            "exact KL": UNIFORM,
            "without the length": {**UNIFORM, "loss": "clipped(kl=without_delta)"},
        },
        *each(("without the length",), "exact KL"),
        base={"kl_weight": BINDING_KL},
    ),
    question(
        "cps-scaling",
        "Does it matter that public code omits the variance from CPS's log-probability?",
        {"density": UNIFORM, "as released": {**UNIFORM, "loss": "clipped(log_prob=released_cps)"}},
        *each(("as released",), "density"),
        base={"sampler": "cps", **LONG_WINDOW},
    ),
    question(
        "binding-kl",
        "What does the KL of `tp-explores` and `kl-quality` cost in reward?",
        {"uniform": UNIFORM, "uniform, KL": {**UNIFORM, "kl_weight": BINDING_KL}},
        *each(("uniform, KL",), "uniform"),
    ),
    *(
        question(
            f"kl-frontier-{name}",
            f"How close to the data does the KL keep samples under {words}?",
            {
                "no KL": arm,
                **{f"KL {weight:g}": {**arm, "kl_weight": weight} for weight in KL_WEIGHTS},
            },
            *each(tuple(f"KL {weight:g}" for weight in KL_WEIGHTS), "no KL", "quality"),
        )
        for name, words, arm in (
            ("uniform", "uniform credit", UNIFORM),
            ("stepwise", "stepwise gains", GAINS),
            ("points", "turning points", POINTS),
        )
    ),
)

QUESTIONS: tuple[Claim, ...] = (*_CREDIT, *_ESTIMATES, *_REWARDS, *_SCALES, *_LOSS)

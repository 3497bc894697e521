"""Open questions, which no paper answers. Written before their runs."""

from flowrl_bench.claims import GAINS, LONG_WINDOW, METHODS, POINTS, UNIFORM, Claim, gains, question
from flowrl_bench.verdicts import Interaction, Level, Parts, each

_ONE_STEP = gains("probe=tweedie")

_CREDIT = (
    question(
        "increments-alone",
        "Do incremental rewards alone achieve what turning points do?",
        {"turning points": POINTS, "increments alone": {"credit": "turning-point(where='none')"}},
        each(("increments alone",), "turning points"),
    ),
    question(
        "random-points",
        "Does the position of a turning point matter, or only that some steps get the reward that follows?",
        {"turning points": POINTS, "random steps": {"credit": "turning-point(where=random)"}},
        each(("random steps",), "turning points"),
    ),
    question(
        "balancing",
        "What does balancing the signs of the turning points do?",
        {"balanced": POINTS, "not balanced": {"credit": "turning-point(balance=none)"}},
        each(("not balanced",), "balanced"),
    ),
    question(
        "fresh-noise-fault",
        "What does the public release's fresh noise for the pure-ODE reward cost?",
        {"right": POINTS, "fresh noise": {"credit": "flowrl_bench.negative_controls:FreshNoiseFault"}},
        each(("fresh noise",), "right"),
    ),
    question(
        "tp-normalisation",
        "Does joint normalisation help turning points too?",
        {"per step": POINTS, "joint": {"credit": "turning-point(normalise=joint)"}},
        each(("joint",), "per step"),
    ),
    question(
        "lambda",
        "Which lambda between gains (0) and reward-to-go (1) is best?",
        {"lambda 0": GAINS, **{f"lambda {lam:g}": gains(f"lam={lam}") for lam in (0.25, 0.5, 0.75, 1.0)}},
        each(("lambda 1", "lambda 0.25", "lambda 0.5", "lambda 0.75"), "lambda 0"),
        tasks=("compositional",),
    ),
    question(
        "shared-noise-gains",
        "Do stepwise gains need groups that start from the same noise?",
        {"shared": GAINS, "independent": {**GAINS, "initial_noise": "independent"}},
        each(("independent",), "shared"),
    ),
    question(
        "point-criteria",
        "Do stricter turning points (large ones, clear ones) do better?",
        {
            "turning points": POINTS,
            "at least 0.1": {"credit": "turning-point(min_size=0.1)"},
            "clear swings": {"credit": "turning-point(confidence=1.0)"},
        },
        each(("at least 0.1", "clear swings"), "turning points"),
    ),
    question(
        "point-density",
        "Are there more turning points than random signs would give?",
        {"turning points": {**POINTS, **LONG_WINDOW}},
        Level("turning points", "turning points over null"),
        samples=("turning points",),
    ),
)

_BUDGETS = tuple(
    question(
        f"equal-{budget}",
        f"At equal {words}, which estimate of unfinished images is best: none, one step, 5 substeps, or the whole ODE?",
        {
            "uniform": UNIFORM,
            "one step": _ONE_STEP,
            "5 substeps": GAINS,
            "completion": gains("probe=completion"),
            "turning points": POINTS,
        },
        each(("one step", "5 substeps", "completion", "turning points"), "uniform", f"reward at equal {budget}"),
    )
    for budget, words in (("nfe", "network evaluations"), ("seconds", "wall-clock time"))
)

_REWARDS = tuple(
    question(
        f"reward-{name}",
        f"Which rules beat uniform credit with a reward {words}?",
        {"uniform": UNIFORM, "stepwise": GAINS, "one step": _ONE_STEP, "turning points": POINTS},
        each(("stepwise", "one step", "turning points"), "uniform"),
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
    """Whether the lead over uniform credit is larger with the default of `setting` than with `value`."""
    return question(
        f"scale-{name}",
        f"Is the lead of stepwise credit larger {words}?",
        {**METHODS, **{f"{rule}, {label} {value}": {**arm, setting: value} for rule, arm in METHODS.items()}},
        Parts(
            tuple(
                Interaction(rule, "uniform", f"{rule}, {label} {value}", f"uniform, {label} {value}")
                for rule in ("stepwise", "turning points")
            )
        ),
        base=LONG_WINDOW if setting == "num_steps" else {},
    )


_SCALES = (
    _scale("steps", "with 10 denoising steps than with 20", "num_steps", "T =", 20),
    _scale("groups", "in groups of 12 than in groups of 24", "group_size", "G =", 24),
)

_LOSS = (
    question(
        "kl-scaling",
        "Does it matter that public code omits the step's length from the KL?",
        {"exact KL": UNIFORM, "without the length": {**UNIFORM, "loss": "clipped(kl=without_delta)"}},
        each(("without the length",), "exact KL"),
        base={"kl_weight": 0.04},
    ),
    question(
        "cps-scaling",
        "Does it matter that public code omits the variance from CPS's log-probability?",
        {"density": UNIFORM, "as released": {**UNIFORM, "loss": "clipped(log_prob=released_cps)"}},
        each(("as released",), "density"),
        base={"sampler": "cps", **LONG_WINDOW},
    ),
    question(
        "clip-uniform",
        "What does a clip range 10 or 100 times as wide (0.02, 0.2) do to uniform credit?",
        {"clip 0.002": UNIFORM, **{f"clip {clip:g}": {**UNIFORM, "clip_range": clip} for clip in (2e-2, 2e-1)}},
        each(("clip 0.02", "clip 0.2"), "clip 0.002"),
    ),
    *(
        question(
            f"clip-lead-{factor}",
            f"Do gains and turning points still lead if all rules have a clip range {factor} times as wide ({clip:g})?",
            METHODS,
            each(("stepwise", "turning points"), "uniform"),
            base={"clip_range": clip},
            tasks=tasks,
        )
        for factor, clip, tasks in ((10, 2e-2, ("compositional",)), (100, 2e-1, ()))
    ),
    question(
        "clip-own",
        "Do gains and turning points at the narrow clip range lead over uniform credit at one 10 times as wide?",
        {"stepwise": GAINS, "turning points": POINTS, "uniform, clip 0.02": {**UNIFORM, "clip_range": 2e-2}},
        each(("stepwise", "turning points"), "uniform, clip 0.02"),
        tasks=("compositional",),
    ),
)

QUESTIONS: tuple[Claim, ...] = (*_CREDIT, *_BUDGETS, *_REWARDS, *_SCALES, *_LOSS)

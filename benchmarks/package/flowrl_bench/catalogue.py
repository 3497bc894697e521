"""The claims of the three papers, and the questions that nobody has answered. Written before the runs."""

from flowrl_bench.claims import Claim
from flowrl_bench.verdicts import Above, Alike, All, Answer, Beats, Best, Needs, NoWorse, WidensBy

FLOW = "Flow-GRPO, arXiv 2505.05470"
STEPWISE = "Stepwise-Flow-GRPO, arXiv 2603.28718"
TURNING = "TP-GRPO, arXiv 2602.06422"
NONE = "no paper reports it"

UNIFORM = {"method": "flow-grpo"}
GAINS = {"method": "stepwise-flow-grpo"}
POINTS = {"method": "tp-grpo"}
PLAIN_POINTS = {"credit": "turning-point(consistent=False)"}
INCREMENTS = {"credit": "turning-point(where='none')"}
IMAGE_TASKS = ("compositional", "text", "preference")
LONG_WINDOW = {"window": "all-but-last"}


def _gains(options: str) -> dict[str, str]:
    return {"credit": f"stepwise-gain({options})"}


_STEPWISE_CLAIMS = (
    Claim(
        "stepwise-updates",
        "Paying every step its gain reaches the final reward of uniform credit in fewer updates.",
        STEPWISE,
        "GenEval .87 against .72 at 400 GPU-hours",
        {"uniform": UNIFORM, "stepwise": GAINS},
        Needs("stepwise", "uniform", "updates"),
        tasks=IMAGE_TASKS,
    ),
    Claim(
        "stepwise-cost",
        "It also needs less wall-clock, and fewer network evaluations.",
        STEPWISE,
        "better in 3 of 4 settings per hour; an iteration costs 1.8 to 2.4 times as much",
        {"uniform": UNIFORM, "stepwise": GAINS},
        All((Needs("stepwise", "uniform", "seconds"), Needs("stepwise", "uniform", "nfe"))),
        tasks=IMAGE_TASKS,
    ),
    Claim(
        "joint-normalisation",
        "Normalising gains over members and steps together beats normalising every step by itself.",
        STEPWISE,
        "an ablation's curves",
        {"joint": GAINS, "per step": _gains("normalise=step")},
        Beats("joint", "per step"),
        tasks=("compositional",),
    ),
    Claim(
        "substeps",
        "How many substeps T' estimate the image hardly matters.",
        STEPWISE,
        "T' = 1 to 10 lie together",
        {
            "T'=5": GAINS,
            "T'=1": _gains("probe=tweedie"),
            "T'=2": _gains("probe='substeps:2'"),
            "T'=8": _gains("probe='substeps:8'"),
        },
        Alike(("T'=5", "T'=1", "T'=2", "T'=8")),
    ),
    Claim(
        "ddim-sde",
        "The DDIM-inspired SDE gives cleaner samples than Flow-SDE, and helps both rules.",
        STEPWISE,
        "curves with and without it",
        {
            "uniform, Flow-SDE": {**UNIFORM, **LONG_WINDOW},
            "uniform, DDIM-SDE": {**UNIFORM, **LONG_WINDOW, "sampler": "ddim-sde"},
            "stepwise, Flow-SDE": {**GAINS, **LONG_WINDOW},
            "stepwise, DDIM-SDE": {**GAINS, **LONG_WINDOW, "sampler": "ddim-sde"},
        },
        All(
            (
                Beats("uniform, DDIM-SDE", "uniform, Flow-SDE", "sampler quality"),
                Beats("uniform, DDIM-SDE", "uniform, Flow-SDE"),
                Beats("stepwise, DDIM-SDE", "stepwise, Flow-SDE"),
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
        Above("stepwise", "early gains"),
    ),
    Claim(
        "plain-gains",
        "Plain gains match or beat gains against a moving average, and generalised ones.",
        STEPWISE,
        "an ablation's curves",
        {
            "plain": GAINS,
            "moving average": {"credit": "moving-average-gain"},
            "lambda 0.5": _gains("lam=0.5"),
            "lambda 0.9, gamma 0.9": _gains("lam=0.9, gamma=0.9"),
        },
        All((NoWorse("plain", "moving average"), NoWorse("plain", "lambda 0.5"), NoWorse("plain", "lambda 0.9, gamma 0.9"))),
    ),
)

_TURNING_POINT_CLAIMS = (
    Claim(
        "tp-beats-uniform",
        "TP-GRPO beats uniform credit, with and without the consistency constraint, on all tasks.",
        TURNING,
        "GenEval .9725 and .9714 against .9673; OCR .9651 and .9718 against .9579; PickScore 24.67 and 24.73 against 24.02",
        {"uniform": UNIFORM, "turning points": POINTS, "no constraint": PLAIN_POINTS},
        All((Beats("turning points", "uniform"), Beats("no constraint", "uniform"))),
        base={"kl_weight": 4e-4},
        tasks=IMAGE_TASKS,
    ),
    Claim(
        "tp-updates",
        "TP-GRPO needs 700 updates for what takes uniform credit 2300, without KL.",
        TURNING,
        "700 / 2300 = 0.30",
        {"uniform": UNIFORM, "turning points": POINTS},
        Needs("turning points", "uniform", "updates", at_most=0.304),
        tasks=IMAGE_TASKS,
    ),
    Claim(
        "tp-explores",
        "Without KL, TP-GRPO's lead over uniform credit is larger: it explores better.",
        TURNING,
        "curves without KL",
        {
            "uniform": UNIFORM,
            "turning points": POINTS,
            "uniform, KL": {**UNIFORM, "kl_weight": 0.01},
            "turning points, KL": {**POINTS, "kl_weight": 0.01},
        },
        WidensBy("turning points", "uniform", "turning points, KL", "uniform, KL"),
    ),
    Claim(
        "tp-window",
        "A window of 8 of 10 stochastic steps helps against all of them, one of 4 hurts.",
        TURNING,
        "an ablation's curves",
        {
            "all but last": {**POINTS, **LONG_WINDOW},
            "first 8": {**POINTS, "window": "0:8"},
            "first 4": {**POINTS, "window": "0:4"},
        },
        All((Beats("first 8", "all but last"), Beats("all but last", "first 4"))),
    ),
    Claim(
        "tp-noise",
        "A noise level of 0.7 is best.",
        TURNING,
        "0.7 best of 0.4 to 1.0",
        {f"noise {a:g}": {**POINTS, "noise_level": a} for a in (0.7, 0.4, 0.55, 0.85, 1.0)},
        Best("noise 0.7", ("noise 0.4", "noise 0.55", "noise 0.85", "noise 1")),
    ),
)

_FLOW_CLAIMS = (
    Claim(
        "train-short",
        "Training with 10 denoising steps and evaluating with 40 loses nothing against training with 40.",
        FLOW,
        "the same final reward, more than four times as fast",
        {"10 steps": {**UNIFORM, "steps": 10}, "40 steps": {**UNIFORM, "steps": 40}},
        NoWorse("10 steps", "40 steps", "final"),
        base={**LONG_WINDOW, "eval_steps": 40},
    ),
    Claim(
        "different-noise",
        "Members of a group that start from different noise learn better than from the same.",
        FLOW,
        "an ablation's curves",
        {"different": {**UNIFORM, "initial_noise": "independent"}, "same": {**UNIFORM, "initial_noise": "shared"}},
        Beats("different", "same"),
    ),
    Claim(
        "small-groups",
        "Small groups collapse: the reward is lost again.",
        FLOW,
        "groups of 6 and 12 collapse, 24 do not",
        {f"groups of {g}": {**UNIFORM, "members": g, "iterations": 80} for g in (2, 4, 24)},
        All((Beats("groups of 24", "groups of 2", "drop", 0.03), Beats("groups of 24", "groups of 4", "drop", 0.03))),
    ),
    Claim(
        "kl-quality",
        "KL to the base model keeps held-out quality at equal reward.",
        FLOW,
        "image quality and diversity kept, at the price of longer training",
        {"KL": {**UNIFORM, "kl_weight": 0.04, "iterations": 80}, "no KL": {**UNIFORM, "iterations": 80}},
        Beats("KL", "no KL", "quality at equal reward", 0.05),
    ),
)

_QUESTIONS = (
    Claim(
        "increments-alone",
        "Do incremental rewards alone do what turning points do?",
        NONE,
        "-",
        {"turning points": POINTS, "increments alone": INCREMENTS},
        Answer(("increments alone",), "turning points"),
        asks=True,
    ),
    Claim(
        "random-points",
        "Does the place of a turning point matter, or only that some steps are paid what follows?",
        NONE,
        "-",
        {"turning points": POINTS, "random steps": {"credit": "turning-point(where=random)"}},
        Answer(("random steps",), "turning points"),
        asks=True,
    ),
    Claim(
        "balancing",
        "What does balancing the turning points' signs do?",
        NONE,
        "-",
        {"balanced": POINTS, "not balanced": {"credit": "turning-point(balance=none)"}},
        Answer(("not balanced",), "balanced"),
        asks=True,
    ),
    Claim(
        "fresh-noise-fault",
        "What does the public release's fresh noise for the pure-ODE reward cost?",
        NONE,
        "-",
        {"right": POINTS, "fresh noise": {"credit": "flowrl_bench.negative_controls:FreshNoiseFault"}},
        Answer(("fresh noise",), "right"),
        asks=True,
    ),
    Claim(
        "tp-normalisation",
        "Would joint normalisation help turning points too?",
        NONE,
        "-",
        {"per step": POINTS, "joint": {"credit": "turning-point(normalise=joint)"}},
        Answer(("joint",), "per step"),
        asks=True,
    ),
    Claim(
        "lambda",
        "Which lambda between gains (0) and reward-to-go (1) is best?",
        NONE,
        "-",
        {"lambda 0": GAINS, **{f"lambda {lam:g}": _gains(f"lam={lam}") for lam in (0.25, 0.5, 0.75, 1.0)}},
        Answer(("lambda 1", "lambda 0.25", "lambda 0.5", "lambda 0.75"), "lambda 0"),
        tasks=("compositional",),
        asks=True,
    ),
    Claim(
        "shared-noise-gains",
        "Do stepwise gains need the group to start from one noise?",
        NONE,
        "-",
        {"shared": GAINS, "independent": {**GAINS, "initial_noise": "independent"}},
        Answer(("independent",), "shared"),
        asks=True,
    ),
    *(
        Claim(
            f"equal-{what}",
            f"At equal {words}, which estimate of unfinished images pays: none, one step, 5 substeps, or the whole ODE?",
            NONE,
            "-",
            {
                "uniform": UNIFORM,
                "one step": _gains("probe=tweedie"),
                "5 substeps": GAINS,
                "completion": _gains("probe=completion"),
                "turning points": POINTS,
            },
            Answer(("one step", "5 substeps", "completion", "turning points"), "uniform", f"reward at equal {what}"),
            asks=True,
        )
        for what, words in (("nfe", "network evaluations"), ("seconds", "wall-clock"))
    ),
    *(
        Claim(
            f"reward-{name}",
            f"Which rules stand a reward {words}?",
            NONE,
            "-",
            {"uniform": UNIFORM, "stepwise": GAINS, "one step": _gains("probe=tweedie"), "turning points": POINTS},
            Answer(("stepwise", "one step", "turning points"), "uniform"),
            base=changes,
            asks=True,
        )
        for name, words, changes in (
            ("noise", "with noise of 0.3 on every score", {"reward_noise": 0.3}),
            ("bias", "that also likes bright pictures", {"reward_bias": 0.3}),
            ("strict", "of 0 or 1", {"reward_form": "strict"}),
            ("graded", "of 0, a half or 1", {"reward_form": "graded"}),
        )
    ),
    *(
        Claim(
            f"scale-{name}",
            f"Is the lead of stepwise credit larger {words}?",
            NONE,
            "-",
            {
                "uniform": UNIFORM,
                "stepwise": GAINS,
                "turning points": POINTS,
                **{
                    f"{rule}, {word} {value}": {**arm, option: value}
                    for value in values
                    for rule, arm in (("uniform", UNIFORM), ("stepwise", GAINS), ("turning points", POINTS))
                },
            },
            All(
                tuple(
                    WidensBy(rule, "uniform", f"{rule}, {word} {value}", f"uniform, {word} {value}")
                    for value in values
                    for rule in ("stepwise", "turning points")
                )
            ),
            base=LONG_WINDOW if option == "steps" else {},
            asks=True,
        )
        for name, words, option, word, values in (
            ("steps", "with 10 denoising steps than with 20", "steps", "T =", (20,)),
            ("groups", "in groups of 12 than in groups of 24", "members", "G =", (24,)),
        )
    ),
    Claim(
        "point-criteria",
        "Do stricter turning points (large ones, clear ones) do better?",
        NONE,
        "-",
        {
            "turning points": POINTS,
            "at least 0.1": {"credit": "turning-point(min_size=0.1)"},
            "clear swings": {"credit": "turning-point(confidence=1.0)"},
        },
        Answer(("at least 0.1", "clear swings"), "turning points"),
        asks=True,
    ),
    Claim(
        "kl-scaling",
        "Does it matter that public code leaves the step's length out of the KL?",
        NONE,
        "-",
        {"exact KL": UNIFORM, "without the length": {**UNIFORM, "loss": "clipped(kl=without_delta)"}},
        Answer(("without the length",), "exact KL"),
        base={"kl_weight": 0.04},
        asks=True,
    ),
    Claim(
        "cps-scaling",
        "Does it matter that public code leaves the variance out of CPS's log-probability?",
        NONE,
        "-",
        {"density": UNIFORM, "as released": {**UNIFORM, "loss": "clipped(log_prob=released_cps)"}},
        Answer(("as released",), "density"),
        base={"sampler": "cps", **LONG_WINDOW},
        asks=True,
    ),
    Claim(
        "clip-uniform",
        "What does a clip 10 or 100 times as wide (0.02, 0.2) do to uniform credit?",
        NONE,
        "-",
        {"clip 0.002": UNIFORM, "clip 0.02": {**UNIFORM, "clip": 2e-2}, "clip 0.2": {**UNIFORM, "clip": 2e-1}},
        Answer(("clip 0.02", "clip 0.2"), "clip 0.002"),
        asks=True,
    ),
    *(
        Claim(
            f"clip-lead-{name}",
            f"Do gains and turning points still lead where all have a clip {name} times as wide ({clip:g})?",
            NONE,
            "-",
            {"uniform": UNIFORM, "stepwise": GAINS, "turning points": POINTS},
            Answer(("stepwise", "turning points"), "uniform"),
            base={"clip_range": clip},
            tasks=("compositional",) if name == "10" else (),
            asks=True,
        )
        for name, clip in (("10", 2e-2), ("100", 2e-1))
    ),
    Claim(
        "clip-own",
        "Do gains and turning points at the narrow clip lead over uniform credit at the clip 10 times as wide?",
        NONE,
        "-",
        {"stepwise": GAINS, "turning points": POINTS, "uniform, clip 0.02": {**UNIFORM, "clip": 2e-2}},
        Answer(("stepwise", "turning points"), "uniform, clip 0.02"),
        tasks=("compositional",),
        asks=True,
    ),
    Claim(
        "point-density",
        "Are there more turning points than signs drawn at random would give?",
        NONE,
        "-",
        {"turning points": {**POINTS, **LONG_WINDOW}},
        Above("turning points", "turning points over null"),
        asks=True,
        samples=("turning points",),
    ),
    Claim(
        "planted",
        "Does this suite see what is known? True advantages must lead, random credit must fail.",
        "self-test",
        "-",
        {"true advantages": _gains("probe='continuation:8'"), "uniform": UNIFORM, "random": {"credit": "random"}},
        All((Beats("true advantages", "uniform"), Beats("uniform", "random"))),
    ),
)

CLAIMS: dict[str, Claim] = {c.id: c for c in (*_STEPWISE_CLAIMS, *_TURNING_POINT_CLAIMS, *_FLOW_CLAIMS, *_QUESTIONS)}
"""All of them by id."""

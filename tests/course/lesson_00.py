"""Solutions and likely mistakes of lesson 0."""

from flowrl_course import lesson_00 as lesson

from tests.course.cases import Case

CASES = [
    Case(
        lesson.check_weakness,
        "blue square left of green triangle",
        [
            ("...", "no prompt yet"),
            ("a cat on a mat", "does not know this prompt"),
            ("red circle and blue square", "good at this one"),
        ],
    ),
    Case(
        lesson.check_best_decision,
        lambda values: int(values.diff().argmax()),
        [
            (lambda r: int(r.argmax()), "highest score"),
            (lambda r: int(r.diff().argmin()), "largest fall"),
            (lambda r: int(r.diff().argmax()) + 1, "column that the largest rise leads to"),
            (lambda r: int(r.diff().abs().argmax()), "absolute value"),
            (lambda r: r.diff().max(), "argmax instead of max"),
            (lambda r: ..., "replace the dots"),
            (lambda r: 4, "not where the score is highest"),
        ],
    ),
    Case(
        lesson.check_blame,
        {"stepwise-flow-grpo", "tp-grpo"},
        [
            ({"flow-grpo", "tp-grpo"}, "looks at the finished image only"),
            ({"tp-grpo"}, "gives each decision its own gain"),
            ({"stepwise-flow-grpo"}, "uses increments too"),
            ({"grpo"}, "no rule is called"),
        ],
    ),
]

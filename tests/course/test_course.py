"""The checks of the course accept the lessons' solutions, refuse the starting cells and name likely
mistakes; lessons have the promised parts.
"""

import ast
import importlib
import json
import re
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import yaml
from flowrl_course import checking
from flowrl_course.checking import Unsolved
from loading import ROOT, import_names

from flowrl.flow import GaussianMixture

SOURCES = {
    f"lesson_{path.name[:2]}": path
    for path in sorted((ROOT / "tutorials" / "source").glob("[0-9][0-9]_*.py"))
}
WRONG_ANSWERS = yaml.safe_load((ROOT / "tests/course/wrong_answers.yaml").read_text())
CHECKS = [
    (name, check)
    for name, source in SOURCES.items()
    for check in re.findall(r"^lesson\.(check_\w+)\(", source.read_text(), re.MULTILINE)
]


def cells(source):
    """The tags and the text of each cell."""
    parts = re.split(r"^# %%(.*)\n", source.read_text(), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


@cache
def exercises(lesson, role="solution"):
    """The answer cell of each check, and the variables before it: the lesson's imports and
    definitions, its cells with the tag `setup`, and its answers so far. Nothing else of the lesson
    is executed.
    """
    variables = {"__name__": lesson, "ring": GaussianMixture.ring()}
    answer, result = "", {}
    for tags, text in cells(SOURCES[lesson]):
        if f'"{role}"' in tags:
            answer += text
        elif call := re.match(r"lesson\.(check_\w+)(\(.*\))\n", text):
            result[call[1]] = SimpleNamespace(
                answer=answer, call=call[0], variables=dict(variables)
            )
            exec(answer, variables)
            answer = ""
        elif '"setup"' in tags:
            exec(text, variables)
        elif not tags.strip() or "hide" in tags:
            definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
            code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
            for node in ast.parse(code).body:
                needs = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                if isinstance(node, definitions) and not needs & {"STEPS", "look", "truths"}:
                    exec(compile(ast.Module([node], []), lesson, "exec"), variables)
    return result


def verdict(lesson, check, find="", replace="", role="solution"):
    """The check's verdict on the lesson's answer, with one text replaced."""
    exercise = exercises(lesson, role)[check]
    assert find in exercise.answer, (check, find)
    variables = dict(exercise.variables)
    exec(exercise.answer.replace(find, replace) if find else exercise.answer, variables)
    return eval(exercise.call, variables)


def own_checks(lesson):
    """The checks that a module of the course defines."""
    module = importlib.import_module(f"flowrl_course.{lesson}")
    return {
        name
        for name, value in vars(module).items()
        if name.startswith("check_") and value.__module__ == module.__name__
    }


BEGUN = {
    *("lesson_01.check_interpolate", "lesson_01.check_train", "lesson_01.check_euler"),
    *("lesson_03.check_group_advantage", "lesson_04.check_repaired"),
    *("lesson_08.check_summary", "lesson_09.check_mended"),
}
"""Exercises whose starting cells have an answer to be continued or mended."""


@pytest.mark.parametrize(("lesson", "check"), CHECKS)
def test_the_solution_passes_and_the_starting_cell_does_not(lesson, check, monkeypatch):
    """Every hint in a table of the check is shown for the value that the table gives; without a
    known mistake the check still refuses, with a message that is not the answer's formula.
    """
    shown = {}
    close = checking.close

    def hint(*given):
        try:
            return close(*given)
        except Unsolved as error:
            return str(error)

    def watched(got, wanted, otherwise, mistakes=None, tolerance=1e-4):
        for message, value in (mistakes or {}).items():
            problem = hint(value, wanted, otherwise, mistakes, tolerance)
            shown[message] = shown.get(message, False) or problem == message
        assert len(re.findall(r" [-+*/] |\^|sqrt|sigmoid|<-", otherwise)) < 2, otherwise
        close(got, wanted, otherwise, mistakes, tolerance)

    for name in (lesson, "rule_checks"):
        module = importlib.import_module(f"flowrl_course.{name}")
        monkeypatch.setattr(module, "close", watched, raising=False)
    assert verdict(lesson, check).passed
    assert [message for message, reached in shown.items() if not reached] == []
    unanswered = verdict(lesson, check, role="exercise")
    assert not unanswered.passed and unanswered.open == (f"{lesson}.{check}" not in BEGUN)


@pytest.mark.parametrize(
    ("lesson", "check", "find", "replace", "message"),
    [
        pytest.param(lesson, check, *wrong, id=f"{check}: {wrong[2]}")
        for lesson, checks in WRONG_ANSWERS.items()
        for check, answers in checks.items()
        for wrong in answers
    ],
)
def test_likely_mistakes_are_named(lesson, check, find, replace, message):
    problem = verdict(lesson, check, find, replace).problem
    assert message in str(problem), "a wrong answer is accepted"


SLOPE_AND_R2 = "(together / values).clamp(max=1), together.square() / (values * rewards)"


@pytest.mark.parametrize(
    ("lesson", "check", "find", "replace"),
    [
        (
            "lesson_03",
            "check_clipped_loss",
            "torch.maximum(\n        -advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range)\n    ).mean()",
            "-(advantage * torch.where(advantage > 0, ratio.clamp(max=1 + clip_range), ratio.clamp(min=1 - clip_range))).mean()",
        ),
        (
            "lesson_03",
            "check_group_advantage",
            "rewards.std(dim=1, correction=0, keepdim=True)",
            "centred.square().mean(-1, keepdim=True).sqrt()",
        ),
        (
            "lesson_03",
            "check_kl",
            "return (mean - reference_mean).square().mean(dim=1) / (2 * std**2)",
            "p, q = (torch.distributions.Normal(m, std[:, None]) for m in (mean, reference_mean))\n    return torch.distributions.kl_divergence(p, q).mean(1)",
        ),
        ("lesson_03", "check_diagnosis", '1: "B"', '1: "b) "'),
        ("lesson_03", "check_credit", "repeat(1,", "expand(-1,"),
        ("lesson_03", "check_credit", "view(-1, MEMBERS)", "unflatten(0, (PROMPTS, -1))"),
        (
            "lesson_03",
            "check_rollout",
            "[torch.randn(len(direction), 2, generator=generator)]",
            "[torch.randn(2, len(direction), generator=generator).T]",
        ),
        (
            "lesson_03",
            "check_update",
            "torch.cartesian_prod(torch.arange(len(direction)), torch.arange(STEPS - 1))",
            "torch.cartesian_prod(torch.arange(STEPS - 1), torch.arange(len(direction))).flip(1)",
        ),
        (
            "lesson_03",
            "check_update",
            "torch.randperm(len(every), generator=generator)",
            "torch.rand(len(every), generator=generator).argsort()",
        ),
        (
            "lesson_03",
            "check_update",
            "        loss.backward()\n        optimizer.step()",
            "        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()",
        ),
        (
            "lesson_04",
            "check_lambda",
            "return torch.stack(credit, dim=1)",
            "n = values.shape[1]; w = lambda i, k: lam ** (i - 1) * (1 - lam if i < n - 1 - k else 1)\n"
            "    return torch.stack([sum(w(i, k) * (values[:, k + i] - values[:, k]) for i in range(1, n - k)) for k in range(n - 1)], 1)",
        ),
        (
            "lesson_04",
            "check_repaired",
            "credit.mean(dim=0, keepdim=True)",
            "(credit.sum(dim=0) - credit) / (len(credit) - 1)",
        ),
        (
            "lesson_05",
            "check_success",
            "return ((1 - p) / p) ** 0.5, -((p / (1 - p)) ** 0.5)",
            "rewards = torch.tensor([[1.0] * successes + [0.0] * (members - successes)])\n"
            "    return uniform_advantages(rewards, 1)[0, [0, -1], 0]",
        ),
        (
            "lesson_06",
            "check_choice_of_probe",
            '{"nodes": [4, 8, 12, 16, 20], "probe": 5}',
            '{"probe": 9, "nodes": [0, 1, 2, 3, 4]}',
        ),
        (
            "lesson_07",
            "check_random_marks",
            "early.gather(-1, order)",
            "order.argsort(-1) < early.sum(-1, keepdim=True)",
        ),
        (
            "lesson_08",
            "check_summary",
            "median(math.inf if math.isnan(cost) else cost for cost in costs.tolist())",
            "float(costs.nan_to_num(math.inf).quantile(0.5))",
        ),
        (
            "lesson_06",
            "check_values",
            "return torch.cat([final[..., None] - later, final[..., None]], dim=-1)",
            "table = [final]\n    for gain in gained.unbind(-1)[::-1]:\n        table.insert(0, table[0] - gain)\n    return torch.stack(table, -1)",
        ),
        (
            "lesson_14",
            "check_pull",
            "return -change[:, None] * d / d.square().mean(dim=-1, keepdim=True)",
            "delta = images - images.mean(1, keepdim=True)\n"
            "    target = -delta / delta.square().mean(-1, keepdim=True)\n"
            "    return ((rewards - rewards.mean(1, keepdim=True))[..., None] * target).mean(1)",
        ),
        (
            "lesson_12",
            "check_parent",
            "return (values * leaves).sum(dim=-1) / leaves.sum()",
            "return values @ (leaves / leaves.sum())",
        ),
        (
            "lesson_06",
            "check_credit_error",
            "return (1 + sum(weight**2 for weight in weights)) ** 0.5",
            "errors = torch.eye(remaining + 1, dtype=torch.float64)[:-1]\n"
            "    return float((errors.diff(dim=1) @ torch.tensor([lam**j for j in range(remaining)], dtype=torch.float64)).norm())",
        ),
        (
            "lesson_02",
            "check_blobs",
            '"Flow-SDE, all steps random": "wider"',
            '"Flow-SDE, all steps random": "Wider "',
        ),
        (
            "lesson_04",
            "check_improvement",
            "return (step * advantages).sum(dim=1).mean(), (path * advantages).sum(dim=1).mean()",
            "return torch.einsum('rsk,sk->r', torch.stack([step, path]), advantages) / len(step)",
        ),
        (
            "lesson_05",
            "check_plan",
            '{"groups": 8, "members": 12,',
            '{"members": 12, "groups": 8,',
        ),
        ("lesson_08", "check_claims", '"A": "supported"', '"A": "Supported"'),
        ("lesson_10", "check_plan", '"seeds": 20', '"seeds": 18'),
        ("lesson_10", "check_quiz", 'quiz = {1: "b", 2: "a"', 'quiz = {2: "a", 1: "b"'),
        (
            "lesson_11",
            "check_arithmetic",
            "return trajectories, pairs, math.ceil(pairs / processes / micro_batch)",
            "return torch.tensor([trajectories, pairs, -(-pairs // (processes * micro_batch))])",
        ),
        ("lesson_11", "check_first_iterations", '1: "C", 2: "A"', '2: "A", 1: "C"'),
        ("lesson_14", "check_variances", "return own, shared", "return torch.stack([own, shared])"),
        (
            "lesson_15",
            "check_calibrate",
            f"return {SLOPE_AND_R2}",
            f"return torch.stack([{SLOPE_AND_R2}])",
        ),
        ("lesson_15", "check_causes", '1: "B", 2: "C"', '2: "C", 1: "B"'),
    ],
    ids=lambda text: text[:12],
)
def test_other_right_answers_are_accepted(lesson, check, find, replace):
    assert verdict(lesson, check, find, replace).passed


@pytest.mark.parametrize("lesson", SOURCES)
def test_lessons_have_their_parts(lesson):
    """Symbols, a quiz, and exercises, three or more of which ask for a design, a prediction or the
    cause of an error; each with its starting cell, hint, explanation, check and likely mistakes;
    and no import of a name that is gone.
    """
    text, own = SOURCES[lesson].read_text(), own_checks(lesson)
    numbers = re.findall(r"^# ### Exercise (\d+) · ", text, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    kinds = re.findall(
        r"\*Difficulty: (?:easy|medium|harder|project) · kind: (\w+) · importance: "
        r"(?:essential|useful|optional) · time: \d+ minutes\*",
        text,
    )
    assert len(kinds) == len(numbers) and set(kinds) <= {
        "formula",
        "code",
        "design",
        "prediction",
        "debugging",
    }
    assert sum(kind in ("design", "prediction", "debugging") for kind in kinds) >= 3
    assert "{symbols: " in text and "check_quiz" in own
    count = len(numbers) + 1
    assert {text.count(f'tags=["{tag}"]') for tag in ("exercise", "hint", "explanation")} == {count}
    assert {check for name, check in CHECKS if name == lesson} == own and len(own) >= count
    assert set(WRONG_ANSWERS[lesson]) == own - {"check_quiz"}
    import_names(text, "flowrl")  # a lesson is executed rarely


@pytest.mark.parametrize("lesson", SOURCES)
def test_code_lines_fit_the_width_of_a_notebook(lesson):
    """The formatter leaves long texts and comments as they are."""
    code = [text for tags, text in cells(SOURCES[lesson]) if "[markdown]" not in tags]
    assert [line for text in code for line in text.splitlines() if len(line) > 95] == []


@pytest.mark.parametrize("lesson", SOURCES)
def test_a_quiz_has_five_questions_with_a_reason_against_every_wrong_answer(lesson):
    """The right answers are those of the lesson; the first failure names the questions only."""
    exercise, check = exercises(lesson)["check_quiz"], lesson_check(lesson, "check_quiz")
    right = eval(exercise.answer.removeprefix("quiz = "))
    assert list(right) == [1, 2, 3, 4, 5] and check(right).passed
    assert check(dict(reversed(right.items()))).passed
    for number, letter in right.items():
        question = re.search(
            rf"^# {number}\. .*", SOURCES[lesson].read_text().rpartition("# ## Quiz")[2], re.M
        )
        assert question
        offered = re.findall(r"\*\*([a-e])\*\*", question[0])
        assert len(offered) >= 3 and offered == sorted(set(offered)) and letter in offered
        for other in set(offered) - {letter}:
            verdict = check({**right, number: other})
            assert str(verdict.problem).startswith(f"{number}. "), (number, other)
            assert f"not yet right: question {number}. Run the check again" in repr(verdict)


def lesson_check(lesson, name):
    return getattr(importlib.import_module(f"flowrl_course.{lesson}"), name)


def test_the_text_on_the_controls_has_the_numbers_above_it():
    """Lesson 8: the text quotes both differences, and says undecided if the interval contains 0."""
    notebook = json.loads((ROOT / "tutorials/08_side_by_side.ipynb").read_text())
    cells = notebook["cells"]
    (at,) = (
        n for n, cell in enumerate(cells) if "Both intervals contain 0" in "".join(cell["source"])
    )
    text, printed = "".join(cells[at]["source"]), "".join(cells[at - 2]["outputs"][0]["text"])
    against = {
        name: (float(mean), float(half))
        for name, mean, half in re.findall(r"minus (.*?) +after .*?: (\S+) ± ([\d.]+)", printed)
    }
    mean, half = against["other steps"]
    assert f"{mean:+.3f} ± {half:.3f}, so with six seeds it is undecided" in text
    assert all(abs(against[name][0]) < against[name][1] for name in ("other steps", "none"))
    assert abs(against["none"][0]) + against["none"][1] < 0.1
    assert f"the lead over Flow-GRPO is {against['Flow-GRPO'][0]:.2f}" in text


def test_a_failed_check_shows_symptom_then_cause_then_remedy(monkeypatch):
    """The notebook continues with the solution, and a repeated check judges the student's last
    answer.
    """
    monkeypatch.setattr(checking, "_met", Counter())  # other tests met the same problem
    answer = "def interpolate(clean, noise, time):\n    t = time[:, None]\n    return "
    notebook = {"__name__": "__main__"}
    exec("import torch\nfrom flowrl_course import lesson_01 as lesson", notebook)
    exec(answer + "(1 - t) * noise + t * clean", notebook)
    call = exercises("lesson_01")["check_interpolate"].call
    first, second, third, fourth = (repr(eval(call, notebook)) for _ in range(4))
    assert re.search(r"\d+ of \d+ values are wrong; at \[\d, \d\] you have .* instead of", first)
    assert "swapped" in second and "swapped" not in first and "check again" not in third
    assert third == fourth and "the notebook uses the solution" in third
    exec(answer + "t * noise + (1 - t) * clean", notebook)
    assert eval(call, notebook).passed


def test_the_solutions_letter_is_no_answer():
    notebook = {"__name__": "__main__"}
    exec(
        'from flowrl_course import lesson_03 as lesson\nclipped_with_one_minibatch = "c"', notebook
    )
    call = exercises("lesson_03")["check_one_minibatch"].call
    for _ in range(3):
        assert not eval(call, notebook).passed
    assert notebook["clipped_with_one_minibatch"] == "a"
    exec('clipped_with_one_minibatch = "A) "', notebook)
    assert eval(call, notebook).passed


def test_a_failed_check_raises_where_lessons_are_built(monkeypatch):
    monkeypatch.setenv("FLOWRL_COURSE", "strict")
    with pytest.raises(Unsolved, match=r"Exercise 1: .*swapped"):
        verdict(
            "lesson_01",
            "check_interpolate",
            "return (1 - t) * clean + t * noise",
            "return (1 - t) * noise + t * clean",
        )


def test_an_answer_may_not_change_its_input():
    """The check refuses a right result that was written over the argument."""
    problem = verdict(
        "lesson_06",
        "check_values",
        "    later =",
        "    gained *= 1\n    later =",
    ).problem
    assert "changes a tensor that it was given" in str(problem)


@pytest.mark.parametrize("check", ["check_rollout", "check_credit", "check_update"])
def test_the_loop_is_checked_with_fixed_weights_of_the_network(check):
    """A student who returns to an exercise after training has other weights."""
    cell = exercises("lesson_03")[check]
    variables = dict(cell.variables)
    net = variables["net"]
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        for value in net.parameters():
            value.add_(5 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
    exec(cell.answer, variables)
    exec(cell.call, variables)
    net.load_state_dict(kept)

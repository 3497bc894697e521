"""Questions about images that are scored by the probability of the answer's first token, and the
rewards made of them: Soft-TIFA and a preference between two images.

A judge (`judge` at an endpoint, `local-judge` in this process) gives the probability of every first
token. The tokens of an answer are those whose text, without white space around it and regardless of
case, is the whole answer; a number from 0 to 20 is also accepted as digits or as a word. Thus
"Yes", "yes" and " yes" count for yes, and "4" and "four" for 4. P(answer) is the sum over these
tokens. Tokens are counted, not spellings, so none counts twice and the probabilities of all answers
add up to at most 1. A token that is only the beginning of an answer ("ten" of "tennis", "1" of
"10") does not count for it, and answers that begin with each other are refused.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, RewardError, require
from flowrl.core.options import allowed, checked_options
from flowrl.core.protocols import RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards.geneval_requests import phrases
from flowrl.rewards.images import Images, to_pillow

NUMBERS = phrases("""
    zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen,
    fourteen, fifteen, sixteen, seventeen, eighteen, nineteen, twenty
""")
BLANKS = " \t\r\n\u0120\u2581"
"""White space, and the marks that stand for a space in the vocabularies of tokenizers."""
YES_NO = {"yes": 1.0, "no": 0.0}
FIRST_SECOND = ("first", "second")
QUESTION = """A picture was made for this caption: [{prompt}]
Does it show all of the caption: the objects, their numbers, attributes and relations? Answer yes \
or no."""
EDIT_QUESTION = """The last picture was made from the one before by this instruction: [{prompt}]
Was all of it done, and nothing else changed? Answer yes or no."""
PAIR_QUESTION = """Two pictures were made for this caption: [{prompt}]
Which one is better, by its agreement with the caption and its quality? Answer first or second."""
PAIR_EDIT_QUESTION = """The last two pictures were made from the one before by this instruction: \
[{prompt}]
Which one is better, by what was done, what was left unchanged, and its quality? Answer first or \
second."""


class UnusableAnswer(RewardError):
    """An answer that gives no score."""


@dataclass(frozen=True)
class Question:
    """A question about pictures with a closed or an open set of answers.

    Args:
        prompt: the prompt of the pictures, for messages.
        pictures: the pictures, in the order in which the judge sees them, before the text.
        text: the question.
        answers: the answers of which the probability is asked; none for an answer in words.
        closed: whether the answers are all that make sense. The answer is then unusable if their
            total probability is below the judge's `mass`.
    """

    prompt: Prompt
    pictures: tuple[Image, ...]
    text: str
    answers: tuple[str, ...] = ()
    closed: bool = True


@runtime_checkable
class AsksQuestions(Protocol):
    """A judge that gives the probabilities of answers."""

    def ask(self, questions: Sequence[Question]) -> list[dict[str, float]]:
        """P(answer) of each answer, for every question, in order; NaN for all answers if the judge
        marks invalid samples and its answer was unusable.

        Raises:
            RewardError: there is no usable answer.
        """
        ...


def folded(text: str) -> str:
    """A token or an answer without white space around it, in lower case."""
    return text.strip(BLANKS).casefold()


def spellings(answer: str) -> set[str]:
    """The folded texts that are accepted for an answer: itself, and the other form of a number from
    0 to 20.
    """
    text = folded(answer)
    if text in NUMBERS:
        return {text, str(NUMBERS.index(text))}
    is_number = text.isascii() and text.isdecimal() and int(text) < len(NUMBERS)
    return {text, NUMBERS[int(text)]} if is_number else {text}


def answer_probabilities(
    tokens: Iterable[tuple[str, float]], answers: Sequence[str]
) -> dict[str, float]:
    """P(answer) = sum of p(t) over the first tokens t whose text is the answer, in [0, 1].

    Args:
        tokens: text and probability of different first tokens; others count as 0.
        answers: the answers, which `check_answers` accepts.

    Returns:
        The probability of each answer, not normalised.
    """
    places = {spelling: answer for answer in answers for spelling in spellings(answer)}
    found = dict.fromkeys(answers, 0.0)
    for text, probability in tokens:
        if answer := places.get(folded(text)):
            found[answer] += probability
    return {answer: min(total, 1.0) for answer, total in found.items()}


def usable(found: Mapping[str, float], question: Question, mass: float) -> dict[str, float]:
    """The probabilities of the answers, unless they are numbers that are not finite, or the
    question is closed and their sum is below `mass`: then raises `UnusableAnswer`.
    """
    total = sum(found.values())
    if not math.isfinite(total) or (question.closed and total < mass):
        raise UnusableAnswer(
            f"the answers {', '.join(question.answers)} have a probability of {total:.3g} together;"
            f" allowed: {mass:g} or more"
        )
    return dict(found)


def check_answers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Answers and their values, as a user gives them.

    Args:
        values: the value by answer; a key may be a whole number.

    Returns:
        The value by answer.

    Raises:
        ConfigError: there are fewer than two answers, a value is not a finite number, an answer is
            not one word, or an answer begins with another one, so that the first token does not
            tell them apart.
    """
    fits = len(values) > 1 and all(allowed(value, float) for value in values.values())
    require(fits, "answers", dict(values), "numbers by answer, for two answers or more")
    for answer in values:
        word = type(answer) is int or (isinstance(answer, str) and len(answer.split()) == 1)
        require(word, "answers", answer, "answers of one word")
    for one, other in permutations(map(str, values), 2):
        pairs = ((a, b) for a in spellings(one) for b in spellings(other))
        distinct = not any(a.startswith(b) for a, b in pairs)
        require(distinct, "answers", (one, other), "answers of which none begins with another")
    return {str(answer): float(value) for answer, value in values.items()}


def check_question(question: str, values: Mapping[str, float]) -> None:
    """Raise `ConfigError` if a judge's `question` ("": the default) does not fit its answers."""
    if question:
        require("{prompt}" in question, "question", question, "a text with {prompt} in it")
    else:
        default = {folded(answer) for answer in values} == {*YES_NO}
        require(
            default, "question", question, "a text with {prompt}, for other answers than yes, no"
        )


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with {NAME} replaced by the values; other braces are kept."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], template)


def references(prompt: Prompt) -> tuple[Image, ...]:
    """The images to which a prompt refers."""
    return tuple(image.pillow() for image in prompt.images)


def image_questions(
    images: Images,
    prompts: Sequence[Prompt],
    plain: str,
    edit: str,
    answers: tuple[str, ...] = (),
    values: Mapping[str, str] = MappingProxyType({}),
) -> list[Question]:
    """A question about every image: `plain`, or `edit` for a prompt with reference images, which
    are shown before the image, with {prompt} and `values` filled in.
    """
    return [
        Question(
            prompt,
            (*references(prompt), image),
            filled(edit if prompt.images else plain, {"prompt": prompt.text, **values}),
            answers,
        )
        for image, prompt in zip(to_pillow(images), prompts, strict=True)
    ]


def expected_values(
    judge: AsksQuestions,
    values: Mapping[str, float],
    question: str,
    images: Images,
    prompts: Sequence[Prompt],
) -> Float[Tensor, " sample"]:
    """sum_a v_a P(a) / sum_a P(a) over the answers a with values v_a; NaN for invalid samples.

    Args:
        judge: the judge.
        values: value by answer.
        question: text of the question with {prompt}; "" for the default, which asks about the edit
            if a prompt has reference images.
        images: the images.
        prompts: one prompt per image.
    """
    defaults = question or QUESTION, question or EDIT_QUESTION
    asked = image_questions(images, prompts, *defaults, tuple(values))
    rows = torch.tensor([list(found.values()) for found in judge.ask(asked)], dtype=torch.float64)
    weights = torch.tensor(list(values.values()), dtype=torch.float64)
    return (rows @ weights / rows.sum(1)).float()


def require_judge(reward: object) -> AsksQuestions:
    """Return a judge that answers questions; raise `ConfigError` for another reward."""
    if not isinstance(reward, AsksQuestions):
        kind = type(reward).__name__
        require(False, "reward", kind, "judge(url=..., model=...) or local-judge(model=...)")
        raise AssertionError
    return reward


@checked_options
@dataclass(frozen=True)
class SoftTIFA:
    """The mean over a prompt's questions of P(correct answer), in [0, 1]; GenEval 2's score.

    The questions are the entry "vqa_list" of the prompt's metadata, pairs of question and answer as
    in ``["How many cows are in the image?", "three"]``; the lines of the benchmark's file
    geneval2_data.jsonl have it. The answer is yes, no, or a number from 0 to 20. Each pair is a
    question to the judge, followed by " Answer in one word.".

    The arithmetic mean is dense, so it suits training; the geometric mean, the benchmark's
    headline, is 0 if one P is 0. P is the total probability of the accepted tokens, not normalised.
    A yes or no question is unusable if yes and no together have less than the judge's `mass`; a
    number has no such limit ("many" is a wrong answer). At an endpoint, tokens that are not among
    its 20 most probable ones count as 0.

    Differences from the public code: it sums over spellings, so that two with the same first token
    count it twice, and a spelling of several tokens counts by its first (" 4" by the space, "10" by
    "1", in tokenizers of single digits). Here only tokens that are the whole answer count, once.
    Source: GenEval 2 (arXiv 2512.16853), whose judge is Qwen3-VL-8B-Instruct. Its data and code are
    CC BY-NC 4.0 and are not part of flowrl.

    Args:
        reward: the judge that is asked, `judge` or `local-judge`; its own question is not used.
        mean: "arithmetic" (AM) or "geometric" (GM).

    Raises:
        ConfigError: `reward` is no judge. `score` raises `RewardError` for a prompt without
            questions.
    """

    reward: RewardModel
    mean: Literal["arithmetic", "geometric"] = "arithmetic"

    def __post_init__(self) -> None:
        require_judge(self.reward)

    def refuses(self, prompt: Prompt) -> str:
        """Why `score` raises an error for `prompt`; "" if it does not."""
        try:
            _atoms(prompt)
        except ConfigError as error:
            return f"soft-tifa: the prompt {prompt.text!r} {error}; write the prompts as JSON lines"
        return ""

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [0, 1]; NaN where a sample is marked invalid."""
        for prompt in prompts:
            if reason := self.refuses(prompt):
                raise RewardError(reason)
        atoms = [_atoms(prompt) for prompt in prompts]
        asked = [
            replace(shown, text=f"{text} Answer in one word.", answers=answers, closed=closed)
            for shown, questions in zip(
                image_questions(images, prompts, "", ""), atoms, strict=True
            )
            for text, answers, closed in questions
        ]
        found = [next(iter(row.values())) for row in require_judge(self.reward).ask(asked)]
        return torch.stack(
            [
                soft_tifa(scores, self.mean)
                for scores in torch.tensor(found).split([len(questions) for questions in atoms])
            ]
        )


def soft_tifa(scores: Float[Tensor, " atom"], mean: str) -> Float[Tensor, ""]:
    """The arithmetic mean of scores, or the "geometric" mean exp(mean log s), 0 if one is 0."""
    return scores.log().mean().exp() if mean == "geometric" else scores.mean()


def _atoms(prompt: Prompt) -> list[tuple[str, tuple[str, ...], bool]]:
    """Question, answers (the correct one first) and whether they are closed, for every pair of a
    prompt. Raises `ConfigError` for a prompt without pairs.
    """
    pairs = prompt.metadata.get("vqa_list")
    form = 'a list of ["QUESTION", "ANSWER"], the answers yes, no or a number from 0 to 20'
    require(isinstance(pairs, list | tuple) and len(pairs) > 0, "vqa_list", pairs, form)
    atoms: list[tuple[str, tuple[str, ...], bool]] = []
    for pair in pairs or ():
        texts = isinstance(pair, list | tuple) and [type(item) for item in pair] == [str, str]
        require(texts, "vqa_list", pair, form)
        question, answer = pair[0], folded(pair[1])
        if answer in YES_NO:
            atoms.append((question, (answer, *(YES_NO.keys() - {answer})), True))
        else:
            require(len(spellings(answer)) == 2, "vqa_list", pair, form)
            atoms.append((question, (answer,), False))
    return atoms


@checked_options
@dataclass(frozen=True)
class Preference:
    """R_i = 1/(M-1) sum_{j != i} p_ij over the M samples of a prompt, p_ij the probability by which
    a judge prefers sample i to sample j; in [0, 1], with mean 1/2.

    p_ij = 1/2 [P(first | i, j) + 1 - P(first | j, i)], P normalised among the answers first and
    second. Both orders are asked, since judges prefer a place; hence p_ij + p_ji = 1 exactly, and
    equal images have 1/2. This costs M (M - 1) questions of two pictures per group: 56 for M = 8,
    552 for M = 24. If an answer of a pair is unusable and the judge marks invalid samples, the pair
    is left out.

    Evaluations measure `reward` itself, the judge's score of a single image, because the mean of
    preferences is always 1/2.

    Source: Pref-GRPO (arXiv 2508.20751), which counts wins by the answer in words instead of
    probabilities. `score_groups` raises `RewardError` for groups of one sample.

    Args:
        reward: the judge that is asked, `judge` or `local-judge`.
        question: the question with {prompt}, to be answered by first or second; "" for the default,
            which asks about the edit if a prompt has reference images, sent before the two.

    Raises:
        ConfigError: `reward` is no judge, or `question` has no {prompt}.
    """

    reward: RewardModel
    question: str = ""

    def __post_init__(self) -> None:
        require_judge(self.reward)
        fits = not self.question or "{prompt}" in self.question
        require(fits, "question", self.question, "a text with {prompt} in it")

    @property
    def evaluation(self) -> RewardModel:
        """The judge's score of single samples."""
        return self.reward

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Mean preferences [prompt, member]."""
        groups, members = images.shape[:2]
        if members < 2:
            raise RewardError("preference: groups have one sample; allowed: 2 or more")
        pairs = list(permutations(range(members), 2))
        asked: list[Question] = []
        for group, prompt in zip(images, prompts, strict=True):
            pictures, before = to_pillow(group), references(prompt)
            text = self.question or (PAIR_EDIT_QUESTION if prompt.images else PAIR_QUESTION)
            text = filled(text, {"prompt": prompt.text})
            asked += [
                Question(prompt, (*before, pictures[i], pictures[j]), text, FIRST_SECOND)
                for i, j in pairs
            ]
        rows = require_judge(self.reward).ask(asked)
        first = torch.tensor([row["first"] / sum(row.values()) for row in rows])
        table = torch.full((groups, members, members), torch.nan)
        table[:, [i for i, _ in pairs], [j for _, j in pairs]] = first.view(groups, -1)
        return mean_preferences(table)


def mean_preferences(
    first: Float[Tensor, "prompt member member"],
) -> Float[Tensor, "prompt member"]:
    """The mean over j != i of (f_ij + 1 - f_ji) / 2, f_ij the probability that the first of i and j
    is better. NaN marks pairs that are left out; a sample without a pair has NaN.
    """
    preferences = (first + 1 - first.transpose(1, 2)) / 2
    others = ~torch.eye(first.shape[1], dtype=torch.bool, device=first.device)
    return preferences.where(others, torch.nan).nanmean(2)

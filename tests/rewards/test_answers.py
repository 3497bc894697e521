"""Answers by the probability of their first token: conventions, Soft-TIFA and preferences by hand,
and a judge of transformers' own classes, tiny and random.
"""

import math
import shutil
from importlib.util import find_spec

import pytest
import torch
from seeded import rand
from tiny_rewards import QWEN_IMAGE, WORDS, tiny_judge, tiny_qwen

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.prompt import Prompt, ReferenceImage
from flowrl.rewards.answers import (
    Preference,
    SoftTIFA,
    answer_probabilities,
    check_answers,
    mean_preferences,
)
from flowrl.rewards.images import JPEGIncompressibility
from flowrl.rewards.local_judge import LocalJudge, load_judge
from flowrl.run.parts.registry import build
from flowrl.testing import check_group_reward, check_reward

COWS = Prompt(
    "four white bicycles",
    {
        "vqa_list": [
            ["How many bicycles are in the image?", "four"],
            ["Are the bicycles white?", "Yes"],
            ["Are there any bicycles in the image?", "Yes"],
        ],
        "atom_count": 3,
        "skills": ["count", "attribute", "object"],
    },
)


class Oracle:
    """A judge that answers by the table `by` of probabilities for a question's text, or by the red
    of the last two pictures.
    """

    def __init__(self, by=None, bias=0.0):
        self.by, self.bias, self.asked = by, bias, []

    def ask(self, questions):
        self.asked += questions
        if self.by:
            return [self.by(question) for question in questions]
        rows = []
        for question in questions:
            one, two = (picture.getpixel((0, 0))[0] / 255 for picture in question.pictures[-2:])
            first = 1 / (1 + math.exp(two - one - self.bias))
            rows.append({"first": 0.6 * first, "second": 0.6 * (1 - first)})
        return rows

    def score(self, images, prompts):
        return images.flatten(1).mean(1)


def test_tokens_that_count():
    tokens = {"Yes": 0.4, " yes": 0.1, "\u2581YES": 0.05, "y": 0.2, "yesterday": 0.1, "No": 0.05}
    found = answer_probabilities(tokens.items(), ("yes", "no"))
    assert found == pytest.approx({"yes": 0.55, "no": 0.05})
    counts = {"4": 0.3, " four": 0.2, "Four": 0.1, " ": 0.3, "14": 0.1}
    assert answer_probabilities(counts.items(), ("four",)) == pytest.approx({"four": 0.6})
    assert answer_probabilities(counts.items(), ("4",)) == pytest.approx({"4": 0.6})
    # the first token of "tennis" in some vocabularies, and of "10" where digits are single
    assert answer_probabilities([("ten", 0.9)], ("tennis",)) == {"tennis": 0.0}
    assert answer_probabilities([("1", 0.9)], ("ten",)) == {"ten": 0.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ten": 1, "tennis": 0}, "none begins with another"),
        ({1: 0, 10: 1}, "none begins with another"),
        ({"four": 0, "4": 1}, "none begins with another"),
        ({"yes": 1, "Yes": 0}, "none begins with another"),
        ({"yes": 1}, "two answers or more"),
        ({"yes": 1, "no": math.inf}, "numbers by answer"),
        ({"yes": 1, "not sure": 0}, "one word"),
        ({True: 1, False: 0}, "one word"),
    ],
)
def test_answers_that_a_first_token_does_not_tell_apart(values, message):
    with pytest.raises(ConfigError, match=message):
        check_answers(values)


def atoms(question):
    chances = {"How": 0.25, "Are the": 0.81, "Are there": 0.9}
    right = next(p for begin, p in chances.items() if question.text.startswith(begin + " "))
    first, *others = question.answers
    return {first: right} | dict.fromkeys(others, 0.05)


def test_soft_tifa_by_hand():
    judge = Oracle(atoms)
    images = rand(2, 3, 4, 4)
    mean = SoftTIFA(judge).score(images, [COWS] * 2)
    assert mean.tolist() == pytest.approx([(0.25 + 0.81 + 0.9) / 3] * 2)
    geometric = SoftTIFA(judge, "geometric").score(images, [COWS] * 2)
    assert geometric.tolist() == pytest.approx([(0.25 * 0.81 * 0.9) ** (1 / 3)] * 2)
    asked = judge.asked[:3]
    assert asked[0].text == "How many bicycles are in the image? Answer in one word."
    assert [q.answers for q in asked] == [("four",), ("yes", "no"), ("yes", "no")]
    assert [q.closed for q in asked] == [False, True, True]
    zero = Oracle(lambda q: dict.fromkeys(q.answers, 0.0))
    assert SoftTIFA(zero, "geometric").score(images, [COWS] * 2).tolist() == [0, 0]
    lost = Oracle(lambda q: dict.fromkeys(q.answers, math.nan if "white" in q.text else 0.5))
    assert SoftTIFA(lost).score(images, [COWS] * 2).isnan().all()


@pytest.mark.parametrize(
    "pairs",
    [None, [], "yes", [["Is it?"]], [["Is it?", 4]], [["What?", "a dog"]], [["How?", "21"]]],
)
def test_prompts_without_questions_are_refused(pairs):
    prompt = Prompt("a dog", {} if pairs is None else {"vqa_list": pairs})
    reward = SoftTIFA(Oracle(atoms))
    assert reward.refuses(COWS) == "" and "'a dog' vqa_list" in reward.refuses(prompt)
    with pytest.raises(RewardError, match="soft-tifa: the prompt 'a dog' vqa_list"):
        reward.score(rand(1, 3, 4, 4), [prompt])


def test_only_judges_can_be_asked():
    for part in (SoftTIFA, Preference):
        with pytest.raises(
            ConfigError, match=r"JPEGIncompressibility.* is not allowed.*local-judge"
        ):
            part(JPEGIncompressibility())


def test_preferences_by_hand():
    """The bias towards the first picture cancels exactly up to the shape of the sigmoid."""
    red = torch.tensor([[0.0, 0.2, 1.0]])
    images = red[..., None, None, None].expand(1, 3, 3, 4, 4)
    judge = Oracle(bias=0.7)
    rates = Preference(judge).score_groups(images, [Prompt("x")])

    def first(a, b):
        return 1 / (1 + math.exp(b - a - 0.7))

    def prefers(a, b):
        return (first(a, b) + 1 - first(b, a)) / 2

    hand = [(prefers(0, 0.2) + prefers(0, 1)) / 2, (prefers(0.2, 0) + prefers(0.2, 1)) / 2]
    hand += [(prefers(1, 0) + prefers(1, 0.2)) / 2]
    assert rates[0].tolist() == pytest.approx(hand, abs=1e-6)
    assert rates.mean().item() == pytest.approx(0.5) and len(judge.asked) == 3 * 2
    equal = Preference(judge).score_groups(torch.zeros(1, 2, 3, 4, 4), [Prompt("x")])
    assert equal.tolist() == [[0.5, 0.5]]
    assert Preference(judge).evaluation is judge
    with pytest.raises(RewardError, match="one sample"):
        Preference(judge).score_groups(images[:, :1], [Prompt("x")])


def test_pairs_without_an_answer_are_left_out():
    table = torch.full((1, 3, 3), 0.5)
    table[0, 0, 1], table[0, 1, 0], table[0, 0, 2] = 1.0, 0.0, math.nan
    assert mean_preferences(table).tolist() == [[1.0, 0.25, 0.5]]
    table[:] = math.nan
    assert mean_preferences(table).isnan().all()


def test_a_preference_keeps_the_contract():
    assert check_group_reward(Preference(Oracle(bias=0.3))).ok


def test_edits_are_asked_with_their_reference():
    grey = ReferenceImage.of_pixels(torch.full((3, 6, 6), 0.5))
    judge = Oracle()
    prompt = Prompt("make it red", images=(grey,))
    Preference(judge).score_groups(rand(1, 2, 3, 4, 4), [prompt])
    assert len(judge.asked[0].pictures) == 3
    assert judge.asked[0].text.startswith("The last two pictures were made")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_judge(tmp_path_factory.mktemp("judge")))


PROMPTS = [Prompt("one"), Prompt("a b c d e f g h"), Prompt("two yes no")]


def by_hand(folder, image, text):
    """Softmax of the last position's logits by transformers alone."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    inputs = AutoProcessor.from_pretrained(folder)(
        text=f"<s> <image> {text} answer ",
        images=[pixels],
        return_tensors="pt",
        add_special_tokens=False,
    )
    with torch.no_grad():
        return model(**inputs).logits[0, -1].softmax(0)


@pytest.mark.satellite
def test_a_local_judge_is_the_softmax_of_the_first_token(folder):
    images, question = rand(3, 3, 40, 40), "yes no {prompt} ?"
    words = WORDS.split()
    judge = LocalJudge(folder, question, mass=0.0, dtype="float32")
    rows = []
    for image, prompt in zip(images, PROMPTS, strict=True):
        row = by_hand(folder, image, f"yes no {prompt.text} ?")
        yes = row[words.index("yes")] + row[words.index("Yes")]
        rows.append(yes / (yes + row[words.index("no")]))
    scores = judge.score(images, PROMPTS)
    torch.testing.assert_close(scores, torch.stack(rows), atol=1e-5, rtol=0)
    assert scores.std() > 0.01
    single = LocalJudge(folder, question, mass=0.0, dtype="float32", batch=1)
    torch.testing.assert_close(single.score(images, PROMPTS), scores, atol=1e-5, rtol=0)
    assert LocalJudge(folder, question, mass=0.0).score(images, PROMPTS).dtype == torch.float32
    assert check_reward(judge).ok


@pytest.mark.satellite
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL"])
def test_the_classes_of_unified_reward_are_local_judges(name, tmp_path, monkeypatch):
    """UnifiedReward's checkpoints named qwen and 2.0-qwen3vl, tiny and random: softmax of the
    logits by transformers alone, image by image. Without torchvision, which the processor of videos
    needs, the processor is not loaded from the folder.
    """
    import transformers

    processor, words = tiny_qwen(tmp_path, name), WORDS.split()
    if find_spec("torchvision") is None:
        load = lambda *_, **__: processor  # noqa: E731
        monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", load)
    network = getattr(transformers, f"{name}ForConditionalGeneration").from_pretrained(tmp_path)
    images, rows = rand(3, 3, 40, 40), []
    for image, prompt in zip(images, PROMPTS, strict=True):
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        text = f"<s> {QWEN_IMAGE} yes no {prompt.text} ? answer "
        inputs = processor(text=[text], images=[pixels], return_tensors="pt")
        with torch.no_grad():
            row = network(**inputs).logits[0, -1].softmax(0)
        yes = row[words.index("yes")] + row[words.index("Yes")]
        rows.append(yes / (yes + row[words.index("no")]))
    judge = LocalJudge(str(tmp_path), "yes no {prompt} ?", mass=0.0, dtype="float32")
    scores = judge.score(images, PROMPTS)
    torch.testing.assert_close(scores, torch.stack(rows), atol=1e-5, rtol=0)
    assert scores.std() > 0.01 and type(judge.load().network) is type(network)


@pytest.mark.satellite
def test_a_local_judge_grades_and_compares(folder):
    image = rand(1, 3, 40, 40)
    row, words = by_hand(folder, image[0], "how one ?"), WORDS.split()
    pairs = ("one", "1"), ("two", "2"), ("three", "3")
    spelled = [row[words.index(word)] + row[words.index(digit)] for word, digit in pairs]
    expected = (0.5 * spelled[1] + spelled[2]) / sum(spelled)
    judge = build(
        "reward",
        f"local-judge(model='{folder}', question='how {{prompt}} ?', answers={{1: 0, 2: 0.5, 3: 1}},"
        " mass=0.0, dtype=float32)",
    )
    assert judge.score(image, [Prompt("one")]).item() == pytest.approx(float(expected), abs=1e-5)
    pair = build("reward", f"preference(reward=local-judge(model='{folder}', mass=0.0))")
    rates = pair.score_groups(rand(2, 3, 3, 40, 40), [Prompt("one"), Prompt("two")])
    assert rates.shape == (2, 3)
    torch.testing.assert_close(rates.mean(1), torch.full((2,), 0.5))
    tifa = build("reward", f"soft-tifa(reward=local-judge(model='{folder}', mass=0.0))")
    assert 0 < tifa.score(image, [COWS]).item() < 1


@pytest.mark.satellite
def test_a_local_judge_does_not_think(folder, tmp_path):
    """Its template is told so; a template that begins to think all the same is refused."""
    image, prompts = rand(1, 3, 40, 40), [Prompt("one")]
    plain = LocalJudge(folder, mass=0.0).score(image, prompts)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    template = tmp_path / "chat_template.jinja"
    told = "{% if enable_thinking is not false %} <think>{% endif %}"
    template.write_text(template.read_text() + told)
    assert LocalJudge(str(tmp_path), mass=0.0).score(image, prompts).equal(plain)
    load_judge.cache_clear()
    template.write_text(template.read_text() + " <think> ")
    with pytest.raises(
        ConfigError, match=r"thinking model = .*allowed: a model that answers at once"
    ):
        LocalJudge(str(tmp_path)).load()


@pytest.mark.satellite
def test_answers_that_a_local_judge_cannot_give(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"'maybe' is not allowed.*one token"):
        LocalJudge(folder, "{prompt}", {"yes": 1, "maybe": 0}).load()
    with pytest.raises(ConfigError, match="for other answers than yes, no"):
        LocalJudge(folder, answers={"first": 1, "second": 0})
    one = rand(1, 3, 40, 40), [Prompt("one")]
    with pytest.raises(RewardError, match=r"local-judge: no score for the prompt 'one'.*1 or more"):
        LocalJudge(folder, mass=1.0).score(*one)
    marked = LocalJudge(folder, mass=1.0, mark_invalid=True)
    assert marked.marks_invalid and marked.score(*one).isnan().all()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        LocalJudge(str(tmp_path)).load()

"""The judge: a real HTTP server on loopback plays the model, well and badly."""

import base64
import contextlib
import io
import json
import math
import pickle
import statistics
import time
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from reward_serving import raw, scripted
from small_run import model_files, rows_of, words

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.prompt import Prompt, ReferenceImage
from flowrl.run.parts.registry import build
from flowrl.serving.judge import Judge, parse_score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Good.\nFinal Score: 4", 4.0),
        ("**Final Score:** 3.5", 3.5),
        ("Final Score: 2. Again: Final Score: 2", 2.0),
        ("Final Score: 4, since 3 objects are right", 4.0),
        ("Final Score: 4 out of 5", 4.0),
        ("<think>Final Score: 1-5, I was told.</think> Final Score: 4", 4.0),
        ("Perhaps Final Score: 2?</think> Final Score: 4", 4.0),
    ],
)
def test_scores_that_are_read(answer, score):
    assert parse_score(answer, 1, 5) == score


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("a lovely picture, 5 out of 5", 'has 0 different "Final Score: X"'),
        ("Final Score: 4 or rather Final Score: 2", "has 2 different"),
        ("Final Score: 6", "not from 1 to 5"),
        ("Final Score: -3", "not from 1 to 5"),
        ("Final Score: 4/10", "not from 1 to 5"),
        ("Final Score: 3,5", "has 0"),
        ("<think>Perhaps Final Score: 2", "has 0"),
        ("Final Score: 1-5", "has 0"),
    ],
)
def test_garbage_is_refused(answer, message):
    with pytest.raises(RewardError, match=message):
        parse_score(answer, 1, 5)


@pytest.fixture
def serve():
    """Starts models that answer with `plan(call number, picture)`: the text of a reply, or what
    `scripted` sends.
    """
    with contextlib.ExitStack() as stack:

        def start(plan):
            seen = []

            def step(request):
                body = json.loads(request.body)
                head, _, data = body["messages"][0]["content"][0]["image_url"]["url"].partition(",")
                assert head == "data:image/png;base64" and request.path == "/v1/chat/completions"
                seen.append((body, request.headers.get("authorization")))
                answer = plan(len(seen), Image.open(io.BytesIO(base64.b64decode(data))))
                if isinstance(answer, str):
                    answer = json.dumps({"choices": [{"message": {"content": answer}}]})
                return answer

            url, _ = stack.enter_context(scripted(step))
            return SimpleNamespace(url=f"{url}/v1", seen=seen)

        yield start


def red(number, image):
    """1 to 5 by how red the picture is."""
    return f"It is so. Final Score: {1 + 4 * image.getpixel((0, 0))[0] / 255:.3f}"


def shades(count=8):
    return torch.linspace(0, 1, count).view(-1, 1, 1, 1).expand(-1, 3, 6, 6).contiguous()


ONE = shades(1), [Prompt("x")]


def after(serve, fault):
    """A model whose first answer is `fault`."""
    return serve(lambda n, i: fault if n == 1 else red(n, i))


def judge(server, **options):
    return Judge(server.url, "some-model", **{"pause": 0.0, "timeout": 5.0, **options})


def test_scores_come_back_in_order(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    server = serve(lambda n, i: (time.sleep(0.002 * (n % 5)), red(n, i))[1])
    prompts = [Prompt(f"picture {i} {{prompt}} {{low:g}}") for i in range(8)]
    reward = build("reward", f"judge(url='{server.url}', model=some-model, pause=0.0)")
    expected = (1 + 4 * (shades()[:, 0, 0, 0] * 255).round() / 255) / 5
    torch.testing.assert_close(reward.score(shades(), prompts), expected, atol=1e-3, rtol=0)
    for body, authorisation in server.seen:
        assert (body["model"], body["temperature"]) == ("some-model", 0)
        assert authorisation == "Bearer secret-key"
    asked = {body["messages"][0]["content"][1]["text"].split("\n")[0] for body, _ in server.seen}
    assert asked == {f"A picture was made for this caption: [{p.text}]" for p in prompts}
    assert b"secret" not in pickle.dumps(reward)
    again = pickle.loads(pickle.dumps(reward))  # in another process, with connections of its own
    assert again.score(shades(1), prompts[:1]).tolist() == pytest.approx([0.2])


def test_an_edit_is_judged_with_its_reference(serve):
    """Sent before the picture, and with another question unless one was given."""
    server, grey = serve(red), ReferenceImage.of_pixels(torch.full((3, 6, 6), 0.5))
    prompt = Prompt("make it red", images=(grey,))
    for options, begins in (
        ({}, "The last picture was made from the one before by this instruction: [make it red]"),
        ({"question": "Look: {prompt}"}, "Look: make it red"),
    ):
        judge(server, **options).score(shades(1), [prompt])
        *pictures, text = server.seen[-1][0]["messages"][0]["content"]
        assert len(pictures) == 2 and text["text"].startswith(begins)
        sent = base64.b64decode(pictures[0]["image_url"]["url"].partition(",")[2])
        assert Image.open(io.BytesIO(sent)).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize(
    "fault",
    [
        raw(429, b"{}"),
        raw(200, b"not json"),
        raw(200, b'{"choices": []}'),
        raw(200, b'{"choices": [{"message": {"content": null}}]}'),
        "no score at all",
        1.5,
    ],
    ids=["429", "no-json", "empty", "null", "garbage", "slow"],
)
def test_a_fault_that_passes(serve, fault):
    server = after(serve, fault)
    scores = judge(server, timeout=1.0, workers=1).score(*ONE)
    assert scores.tolist() == pytest.approx([0.2])
    assert len(server.seen) == 2


@pytest.mark.parametrize(("timeout", "pause"), [(5.0, 1.0), (0.9, 0.9)])
def test_an_endpoint_may_ask_for_time(serve, timeout, pause):
    """For `timeout` seconds at most."""
    server = after(serve, raw(429, b"{}", Retry_After=1))
    start = time.monotonic()
    judge(server, workers=1, timeout=timeout).score(*ONE)
    assert len(server.seen) == 2 and time.monotonic() - start >= pause


def test_giving_up_says_why(serve):
    server = serve(lambda n, i: raw(503, b""))
    message = r"no score for the prompt 'a fox' after 3 attempts at http.*: HTTP error 503"
    with pytest.raises(RewardError, match=message):
        judge(server, attempts=3).score(shades(1), [Prompt("a fox")])
    assert len(server.seen) == 3
    unreachable = Judge("http://127.0.0.1:9/v1", "m", pause=0.0, mark_invalid=True)
    with pytest.raises(RewardError, match="after 4 attempts"):
        unreachable.score(*ONE)


@pytest.mark.parametrize("status", [307, 401])
def test_a_redirect_is_not_followed(serve, monkeypatch, status):
    """No second attempt, and the other host gets neither the image nor the key."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    other = serve(red)
    server = serve(lambda n, i: raw(status, Location=f"{other.url}/chat/completions"))
    with pytest.raises(RewardError, match=f"HTTP status {status}") as caught:
        judge(server).score(*ONE)
    assert not other.seen and len(server.seen) == 1 and "secret" not in str(caught.value)


def test_refused_answers_can_be_marked_invalid(serve):
    server = serve(lambda n, i: "I like it" if i.getpixel((0, 0))[0] > 250 else red(n, i))
    scores = judge(server, attempts=2, mark_invalid=True).score(shades(4), [Prompt("x")] * 4)
    assert scores.isnan().tolist() == [False, False, False, True]
    assert judge(server, mark_invalid=True).marks_invalid and not judge(server).marks_invalid
    with pytest.raises(RewardError, match="I like it"):
        judge(server, attempts=2).score(shades(4), [Prompt("x")] * 4)


YES_NO = {"yes": 1.0, "no": 0.0}


def first_token(*tokens):
    """A reply with these tokens and probabilities."""
    top = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in tokens]
    content = [{**top[0], "top_logprobs": top}]
    choice = {"message": {"content": tokens[0][0]}, "logprobs": {"content": content}}
    return raw(200, json.dumps({"choices": [choice]}).encode())


def yes_if_red(number, image):
    chance = 0.1 + 0.6 * image.getpixel((0, 0))[0] / 255
    return first_token(("Yes", chance), (" yes", 0.1), ("No", 0.8 - chance), ("Maybe", 0.1))


def test_the_probability_of_yes(serve):
    """Normalised among the answers: every shade has a score of its own."""
    server = serve(yes_if_red)
    spec = f"judge(url='{server.url}', model=m, answers={{yes: 1, no: 0}}, pause=0.0)"
    scores = build("reward", spec).score(shades(), [Prompt(f"a {{prompt}} {i}") for i in range(8)])
    reds = (shades()[:, 0, 0, 0] * 255).round() / 255
    torch.testing.assert_close(scores, (0.2 + 0.6 * reds) / 0.9, atol=1e-6, rtol=0)
    body, _ = server.seen[0]
    wanted = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20, "temperature": 0}
    assert wanted.items() <= body.items()
    asked = {body["messages"][0]["content"][1]["text"].split("\n")[0] for body, _ in server.seen}
    assert asked == {f"A picture was made for this caption: [a {{prompt}} {i}]" for i in range(8)}


def test_grades_are_expected_values(serve):
    reply = first_token(("4", 0.5), ("Five", 0.2), (" 3", 0.1), ("4", 0.5), ("**", 0.2))
    server = serve(lambda n, i: reply)  # the chosen token is listed again
    grades = {n: n / 5 for n in range(1, 6)}
    reward = judge(server, question="Rate {prompt} by a number from 1 to 5.", answers=grades)
    assert reward.score(*ONE).tolist() == pytest.approx([(2.0 + 1.0 + 0.3) / 5 / 0.8])


@pytest.mark.parametrize(
    "fault",
    [
        raw(429, b"{}"),
        raw(503, b""),
        raw(200, b'{"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": 1}]}]}}]}'),
        first_token(("I", 0.7), ("Yes", math.nan)),
        first_token(("I", 0.7), ("Yes", 0.2)),
        0.4,
    ],
    ids=["429", "503", "malformed", "nan", "refusal", "slow"],
)
def test_a_fault_before_a_first_token(serve, fault):
    server = serve(lambda n, i: fault if n == 1 else yes_if_red(n, i))
    scores = judge(server, answers=YES_NO, timeout=0.3, workers=1).score(*ONE)
    assert scores.tolist() == pytest.approx([0.2 / 0.9]) and len(server.seen) == 2


def test_refusals_are_errors_or_invalid(serve):
    server = serve(lambda n, i: first_token(("I", 0.7), ("Yes", 0.2), ("no", 0.05)))
    message = "yes, no have a probability of 0.25 together; allowed: 0.5 or more"
    with pytest.raises(RewardError, match=message):
        judge(server, answers=YES_NO, attempts=2).score(*ONE)
    assert judge(server, answers=YES_NO, mark_invalid=True).score(*ONE).isnan().all()
    assert judge(server, answers=YES_NO, mass=0.2).score(*ONE).tolist() == pytest.approx([0.8])


@pytest.mark.parametrize(
    "reply", ["{}", '{"logprobs": null}', '{"logprobs": {"content": [{"top_logprobs": []}]}}']
)
def test_a_server_without_log_probabilities(serve, reply):
    """One attempt: another one would not help."""
    choice = {"message": {"content": "Yes"}, **json.loads(reply)}
    server = serve(lambda n, i: raw(200, json.dumps({"choices": [choice]}).encode()))
    with pytest.raises(RewardError, match="sent no log-probabilities"):
        judge(server, answers=YES_NO, mark_invalid=True).score(*ONE)
    assert len(server.seen) == 1


def thinking(tokens, content=None, **message):
    """A reply of these tokens, each certain or with its own probabilities (a dictionary)."""
    sent = []
    for token in tokens:
        chances = token if isinstance(token, dict) else {token: 1.0}
        top = [{"token": text, "logprob": math.log(p)} for text, p in chances.items()]
        sent.append({**top[0], "top_logprobs": top})
    choice = {"message": {"content": content, **message}, "logprobs": {"content": sent}}
    return raw(200, json.dumps({"choices": [choice]}).encode())


ANSWER = {"Yes": 0.6, "no": 0.2}
THOUGHTS = ["Yes", ", a", " fox", ".", "\n"]


@pytest.mark.parametrize(
    "reply",
    [
        thinking(["<think>", *THOUGHTS, "</think>", "\n\n", ANSWER, "<|im_end|>"], "Yes"),
        thinking([*THOUGHTS, "</", "think", ">\n", ANSWER, "."], "Yes.", reasoning="Yes, a fox."),
        thinking([ANSWER], "Yes", reasoning_content="Yes, a fox."),
        thinking(["<begin>", *THOUGHTS, "<end>", ANSWER], " Yes", reasoning="Yes, a fox."),
        thinking([ANSWER], "Yes", reasoning=None),
        thinking([ANSWER, ", it does"], "Yes, it does"),
    ],
    ids=["in the answer", "apart", "apart, answer only", "other marks", "none", "long answer"],
)
def test_the_answer_after_thoughts(serve, reply):
    """The first token of the thoughts is another answer with certainty."""
    server = serve(lambda n, i: reply)
    reward = build(
        "reward",
        f"judge(url='{server.url}', model=m, answers={{yes: 1, no: 0}}, pause=0.0,"
        " request={max_tokens: 2048, top_logprobs: 5, temperature: none, reasoning_effort: 'none'})",
    )
    assert reward.score(*ONE).tolist() == pytest.approx([0.75])
    body = server.seen[0][0]
    assert (body["max_tokens"], body["top_logprobs"]) == (2048, 5)
    assert "temperature" not in body and body["reasoning_effort"] == "none"


@pytest.mark.parametrize(
    "reply",
    [
        thinking(["<think>"], "<think>"),
        thinking([{"Yes": 1.0}], None, reasoning_content="Yes"),
        thinking([{"Yes": 1.0}], "", reasoning="Yes"),
    ],
)
def test_thoughts_are_not_an_answer(serve, reply):
    """One attempt: another one would not help. Thoughts that were allowed and do not end are
    unusable.
    """
    server = serve(lambda n, i: reply)
    with pytest.raises(RewardError, match=r"thinks before it answers.*enable_thinking: false"):
        judge(server, answers=YES_NO, mark_invalid=True).score(*ONE)
    assert len(server.seen) == 1
    allowed = {"answers": YES_NO, "request": {"max_tokens": 64}}
    with pytest.raises(RewardError, match="thoughts did not end"):
        judge(server, **allowed).score(*ONE)
    assert len(server.seen) == 5
    assert judge(server, mark_invalid=True, **allowed).score(*ONE).isnan().all()


def test_a_rejected_request_says_how_to_change_it(serve, monkeypatch):
    """Such as one for more log-probabilities than the endpoint allows."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")

    def limited(number, image):
        if server.seen[-1][0]["top_logprobs"] > 5:
            return raw(400, b'{"error": "top_logprobs must be at most 5 (secret-key)"}')
        return first_token(("Yes", 0.6), ("no", 0.2))

    server = serve(limited)
    message = r"HTTP status 400: .*at most 5.*request=\{top_logprobs: 5\}"
    with pytest.raises(RewardError, match=message) as caught:
        judge(server, answers=YES_NO, mark_invalid=True).score(*ONE)
    assert len(server.seen) == 1 and "secret" not in str(caught.value)
    fewer = judge(server, answers=YES_NO, request={"top_logprobs": 5})
    assert fewer.score(*ONE).tolist() == pytest.approx([0.75])
    with pytest.raises(ConfigError, match="fields other than model, messages"):
        judge(server, request={"model": "another"})


def test_options_of_the_other_kind_of_answer_are_refused(serve):
    server = serve(red)
    with pytest.raises(ConfigError, match="low, high, tokens"):
        judge(server, answers=YES_NO, high=10.0)
    with pytest.raises(ConfigError, match="for other answers than yes, no"):
        judge(server, answers={"1": 0.0, "2": 1.0})
    with pytest.raises(ConfigError, match="begins with another"):
        judge(server, answers={"ten": 0.0, "tennis": 1.0}, question="{prompt}")


def test_an_endpoint_answers_about_atoms_and_pairs(serve):
    """A group of 3 costs 6 requests with two pictures each; its pictures are compared by red."""

    def plan(number, image):
        body, _ = server.seen[-1]
        *pictures, text = body["messages"][0]["content"]
        if len(pictures) == 1:
            right = ("three", 0.3), ("3", 0.2), (" ", 0.4)
            return first_token(*(right if text["text"].startswith("How") else [("Yes", 0.9)]))
        data = pictures[1]["image_url"]["url"].partition(",")[2]
        other = Image.open(io.BytesIO(base64.b64decode(data)))
        first = 0.6 if image.getpixel((0, 0))[0] >= other.getpixel((0, 0))[0] else 0.3
        return first_token(("First", first), ("second", 0.9 - first))

    server = serve(plan)
    inner = f"judge(url='{server.url}', model=m, pause=0.0, workers=1)"
    pairs = build("reward", f"preference(reward={inner})")
    rates = pairs.score_groups(shades(3)[None], [Prompt("x")])
    assert len(server.seen) == 6
    assert rates[0].tolist() == pytest.approx([1 / 3, 1 / 2, 2 / 3])
    vqa = [["How many cows are in the image?", "three"], ["Are there any cows?", "Yes"]]
    for mean, wanted in (("arithmetic", 0.7), ("geometric", 0.45**0.5)):
        tifa = build("reward", f"soft-tifa(reward={inner}, mean={mean})")
        scores = tifa.score(shades(1), [Prompt("three cows", {"vqa_list": vqa})])
        assert scores.tolist() == pytest.approx([wanted])
    assert server.seen[-1][0]["messages"][0]["content"][-1]["text"].endswith("in one word.")


VQA = {
    "three red cows": [["How many cows are there?", "three"], ["Are the cows red?", "Yes"]],
    "a blue dog": [["Is there a cow?", "no"], ["How many dogs are there?", "1"]],
}


@pytest.mark.satellite
@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
def test_a_run_with_questions(serve, tmp_path, mean):
    """Soft-TIFA trains a tiny SD3, with the other mean held out. The first evaluation of two images
    is computed by hand from what the judge said.
    """
    said = {}

    def answer(number, image):
        text = server.seen[number - 1][0]["messages"][0]["content"][-1]["text"]
        grey = image.convert("L").tobytes()
        shade = sum(grey) / len(grey) / 255
        right = 0.1 + 0.8 * shade if text.startswith("How") else 0.9 - 0.5 * shade
        [word] = [a for pairs in VQA.values() for q, a in pairs if text.startswith(q)]
        if number <= 8:
            said.setdefault(image.tobytes(), {})[text] = right
        return first_token((f" {word}", right), ("yes" if word == "no" else "No", 0.95 - right))

    server = serve(answer)
    inner = f"reward=judge(url='{server.url}', model=m, pause=0.0, workers=1)"
    specs = {name: f"soft-tifa({inner}, mean={name})" for name in ("arithmetic", "geometric")}
    lines = (json.dumps({"prompt": text, "vqa_list": pairs}) for text, pairs in VQA.items())
    files = model_files(tmp_path) | {"prompts": f"{tmp_path}/vqa.jsonl", "reward": specs.pop(mean)}
    (tmp_path / "vqa.jsonl").write_text("\n".join(lines))
    sizes = dict(groups=2, group_size=3, num_steps=3, iterations=2, eval_samples=2, eval_steps=2)
    options = words(**files, **sizes, heldout_rewards=list(specs.values()), out=tmp_path / "run")
    assert main(["train", *options]) == 0
    first, *trained = rows_of(tmp_path / "run")
    means = {
        "arithmetic": statistics.mean(statistics.mean(found.values()) for found in said.values()),
        "geometric": statistics.mean(math.prod(found.values()) ** 0.5 for found in said.values()),
    }
    assert [len(found) for found in said.values()] == [2, 2]
    assert first["evaluation"]["reward"] == pytest.approx(means.pop(mean), abs=1e-5)
    assert [*first["evaluation"]["heldout"].values()] == pytest.approx([*means.values()], abs=1e-5)
    assert [row["zero_spread_groups"] for row in trained] == [0, 0]
    assert all(0 < row["reward_mean"] < 1 and row["gradient_nfe"] for row in trained)

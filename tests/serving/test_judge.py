"""The judge: a real HTTP server on loopback plays the model, well and badly."""

import base64
import io
import json
import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import Prompt
from flowrl.parts.registry import build
from flowrl.serving.judge import MAX_BYTES, Judge, parse_score
from flowrl.testing import check_reward


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Good.\nFinal Score: 4", 4.0),
        ("**Final Score:** 3.5", 3.5),
        ("final score: 5/5", 5.0),
        ("Final Score: 2. Again: Final Score: 2", 2.0),
        ("Final Score: 1.", 1.0),
        ("Final Score: 4, since 3 objects are right", 4.0),
        ("Final Score: 4 out of 5", 4.0),
        ("<think>Final Score: 1-5, I was told.</think> Final Score: 4", 4.0),
    ],
)
def test_scores_that_are_read(answer, score):
    assert parse_score(answer, 1, 5) == score


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("", 'has no "Final Score: X"'),
        ("a lovely picture, 5 out of 5", 'has no "Final Score: X"'),
        ("Final Score: five", "has no"),
        ("Final Score: 4 or rather Final Score: 2", "more than one"),
        ("Final Score: 6", "not from 1 to 5"),
        ("Final Score: 0", "not from 1 to 5"),
        ("Final Score: -3", "not from 1 to 5"),
        ("Final Score: 45", "not from 1 to 5"),
        ("Final Score: 4/10", "not from 1 to 5"),
        ("Final Score: nan", "has no"),
        ("Final Score: 1.2.3", "has no"),
        ("Final Score: 3,5", "has no"),
        ("Final Score: 1-5", "has no"),
        ("Final Score: 1 to 5", "has no"),
        ("Final Score: 4%", "has no"),
        ("Final Score: 4 out of 10", "not from 1 to 5"),
    ],
)
def test_garbage_is_refused(answer, told):
    with pytest.raises(RewardError, match=told):
        parse_score(answer, 1, 5)


class Model(ThreadingHTTPServer):
    """Answers with what `plan` gives for (call number, question, picture): text, (status, bytes),
    or seconds to sleep.
    """

    daemon_threads = True

    def __init__(self, plan):
        super().__init__(("127.0.0.1", 0), Answer)
        self.plan, self.seen, self.lock = plan, [], threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        picture, question = body["messages"][0]["content"]
        head, _, data = picture["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64" and self.path == "/v1/chat/completions"
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        with self.server.lock:
            self.server.seen.append((body, self.headers.get("Authorization")))
            number = len(self.server.seen)
        said = self.server.plan(number, question["text"], image)
        if isinstance(said, float):
            time.sleep(said)
            said = "Final Score: 1"
        if isinstance(said, str):
            said = (200, json.dumps({"choices": [{"message": {"content": said}}]}).encode())
        self.send_response(said[0])
        self.send_header("Content-Length", str(len(said[1]) + (50 if said[0] == 299 else 0)))
        if said[0] == 429:
            self.send_header("Retry-After", "1")
        if said[0] in (301, 302, 307, 308):
            self.send_header("Location", said[1].decode())
        self.end_headers()
        self.wfile.write(said[1])

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(plan):
        servers.append(Model(plan))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def red(number, question, image):
    """1 to 5 by how red the picture is."""
    return f"It is so. Final Score: {1 + 4 * image.getpixel((0, 0))[0] / 255:.3f}"


def shades(count=8):
    return torch.linspace(0, 1, count).view(-1, 1, 1, 1).expand(-1, 3, 6, 6).contiguous()


def judge(server, **options):
    return Judge(server.url, "some-model", **{"pause": 0.0, "timeout": 5.0, **options})


def test_scores_come_back_in_order(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    server = serve(lambda n, q, i: (time.sleep(0.002 * (n % 5)), red(n, q, i))[1])
    prompts = [Prompt(f"picture {i} {{prompt}} {{low:g}}") for i in range(8)]
    scores = judge(server).score(shades(), prompts)
    assert torch.allclose(
        scores, (1 + 4 * (shades()[:, 0, 0, 0] * 255).round() / 255) / 5, atol=1e-3
    )
    body, authorisation = server.seen[0]
    assert (
        body["model"] == "some-model"
        and body["temperature"] == 0
        and authorisation == "Bearer secret-key"
    )
    asked = {body["messages"][0]["content"][1]["text"].split("\n")[0] for body, _ in server.seen}
    assert asked == {f"A picture was made for this caption: [{p.text}]" for p in prompts}


def test_keeps_the_contract(serve):
    reward = build("reward", f"judge(url='{serve(red).url}', model=tiny)")
    assert check_reward(reward, (shades(4), [Prompt("x")] * 4)).ok


@pytest.mark.parametrize(
    "fault",
    [
        (500, b"oops"),
        (429, b"{}"),
        (200, b"not json"),
        (200, b"{}"),
        (200, b'{"choices": []}'),
        (200, b'{"choices": [{"message": {"content": null}}]}'),
        (299, b'{"choices": [{"mess'),
        "no score at all",
        0.6,
    ],
    ids=["500", "429", "no-json", "no-choices", "empty", "null", "truncated", "garbage", "slow"],
)
def test_a_fault_that_passes(serve, fault):
    server = serve(lambda n, q, i: fault if n == 1 else red(n, q, i))
    assert judge(server, timeout=0.3, workers=1).score(
        shades(1), [Prompt("x")]
    ).tolist() == pytest.approx([0.2])
    assert len(server.seen) == 2


def test_an_endpoint_may_ask_for_time(serve):
    server = serve(lambda n, q, i: (429, b"{}") if n == 1 else red(n, q, i))
    start = time.monotonic()
    judge(server, workers=1).score(shades(1), [Prompt("x")])
    assert len(server.seen) == 2 and time.monotonic() - start >= 1.0
    server.seen.clear()
    start = time.monotonic()
    judge(server, workers=1, timeout=0.9).score(shades(1), [Prompt("x")])
    assert time.monotonic() - start >= 0.9


def test_giving_up_says_why(serve):
    server = serve(lambda n, q, i: (503, b""))
    with pytest.raises(
        RewardError,
        match=r"no score for the prompt 'a fox' after 3 attempts at http.*: HTTP error 503",
    ):
        judge(server, attempts=3).score(shades(1), [Prompt("a fox")])
    assert len(server.seen) == 3
    with pytest.raises(RewardError, match="after 4 attempts"):
        Judge("http://127.0.0.1:9/v1", "m", pause=0.0, mark_invalid=True).score(
            shades(1), [Prompt("x")]
        )


def test_what_cannot_pass_is_not_tried_again(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    server = serve(lambda n, q, i: (401, b"who are you?"))
    with pytest.raises(RewardError, match="HTTP error 401") as caught:
        judge(server).score(shades(1), [Prompt("x")])
    assert len(server.seen) == 1 and "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(serve, monkeypatch, status):
    """The other host gets neither the image nor the key."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    other = serve(red)
    server = serve(lambda n, q, i: (status, f"{other.url}/chat/completions".encode()))
    with pytest.raises(
        RewardError, match=rf"redirects to {other.url}/chat/completions; redirects are not followed"
    ) as caught:
        judge(server).score(shades(1), [Prompt("x")])
    assert not other.seen and len(server.seen) == 1 and "secret" not in str(caught.value)


def test_a_copy_in_another_process_opens_its_own_connections(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    first = judge(serve(red))
    assert first.score(shades(1), [Prompt("x")]).tolist() == pytest.approx([0.2])
    assert b"secret" not in pickle.dumps(first)
    assert pickle.loads(pickle.dumps(first)).score(
        shades(1), [Prompt("x")]
    ).tolist() == pytest.approx([0.2])


def test_an_endless_answer_is_refused(serve):
    server = serve(lambda n, q, i: (200, b" " * (MAX_BYTES + 1)))
    with pytest.raises(RewardError, match=f"larger than {MAX_BYTES} bytes"):
        judge(server).score(shades(1), [Prompt("x")])


def test_refused_answers_can_be_marked_invalid(serve):
    server = serve(lambda n, q, i: "I like it" if i.getpixel((0, 0))[0] > 250 else red(n, q, i))
    scores = judge(server, attempts=2, mark_invalid=True).score(shades(4), [Prompt("x")] * 4)
    assert scores.isnan().tolist() == [False, False, False, True]
    assert judge(server, mark_invalid=True).marks_invalid and not judge(server).marks_invalid
    with pytest.raises(RewardError, match="I like it"):
        judge(server, attempts=2).score(shades(4), [Prompt("x")] * 4)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"judge\.url = 'file:///etc/passwd' is not allowed"):
        Judge("file:///etc/passwd", "m")
    with pytest.raises(ConfigError, match=r"judge\.url"):
        Judge("http://user:word@x/v1", "m")
    with pytest.raises(
        ConfigError, match=r"question = 'good\?' is not allowed; allowed: a text with {prompt}"
    ):
        Judge("http://x", "m", question="good?")
    with pytest.raises(ConfigError, match="judge needs url"):
        build("reward", "judge")

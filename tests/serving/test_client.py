"""A client and servers that fail: faults that pass are waited out, faults that stay are one clear
error.
"""

import contextlib
import json
import socket
import sys
import threading
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_serving import numbered, raw, scripted

from flowrl import Prompt
from flowrl.core.errors import ConfigError, RewardError
from flowrl.serving.client import RemoteReward, RemoteSum
from flowrl.serving.connections import PACKAGES
from flowrl.serving.judge import Judge


def answering(**fields):
    """A server's answer with these fields, as JSON text."""
    text = "".join(f', "{name}": {value}' for name, value in fields.items())
    return lambda request: f'{{"request": "{request.headers["x-request-id"]}"{text}}}'


def scores(text):
    return answering(scores=text)


def marked(text, marks, **more):
    return answering(scores=text, invalid=marks, **more)


GOOD = scores("[1.0, 2.0]")
BUSY = b'{"error": {"code": "busy", "message": "later", "retry": true}}'
PASSING = [
    raw(500, b"<html>oops</html>"),
    raw(503, BUSY, Retry_After=0),
    raw(502, b"\xff\xfe"),
    raw(429, b'{"error": []}', Retry_After="soon"),
    b"",  # closed without an answer
    b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",  # truncated
    b"\x00\x01garbage\r\n\r\n",
    raw(200, b"[1.0, 2.0]"),
    raw(200, b'{"request": "another", "scores": [1.0, 2.0]}'),
    raw(200, b"[" * 50_000),
    0.6,  # no answer in time
]
TWO = torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: repr(fault)[:30])
def test_faults_that_pass_are_waited_out(fault):
    with scripted(fault, GOOD) as (url, counts):
        remote = RemoteReward(url, timeout=0.4, backoff=0.01, deadline=60)
        assert remote.score(*TWO).tolist() == [1.0, 2.0]
        assert len(counts) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (scores("[1.0]"), r"\(scores\) returned shape \(1,\) for 2 images"),
        (scores("{}"), "sent {} as scores: .*array"),
        (scores("[1e999, 1.0]"), "sent inf as scores.0: .*finite"),
        (scores("[1e300, 1.0]"), "1 of 2 values that are not finite, the first at sample 0"),
        (scores("[1.0, null]"), "sent null in scores for sample 1 of 2 without an invalid mark"),
        (scores('[1.0, "2.0"]'), "sent '2.0' as scores.1: .*number"),
        (marked("[1.0, NaN]", "[false, true]"), "sent nan as scores.1: .*finite"),
        (marked("[1.0, null]", "[false, false]"), "for sample 1 of 2 without an invalid mark"),
        (marked("[1.0, 2.0]", "[false, true]"), "marks sample 1 of 2 invalid, yet sends a score"),
        (marked("[1.0, null]", "[true]"), "sent 1 invalid marks for 2 images"),
        (marked("[1.0, null]", "[0, 1]"), "sent 0 as invalid.0: .*boolean"),
        (" " * 100_000, "response is larger than"),
        (raw(401), "401.*token"),
        (raw(404, b"not here"), "refuses: status 404"),
        (raw(307, Location="http://127.0.0.1:1/"), "refuses: status 307"),
        (raw(500, BUSY.replace(b"busy", b"broken").replace(b"true", b"false")), "broken: later"),
    ],
)
def test_faults_that_stay_are_one_error_at_once(fault, message):
    with scripted(fault) as (url, counts), pytest.raises(RewardError, match=message):
        RemoteReward(url, backoff=0.01).score(*TWO)
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("components", "weights", "message"),
    [
        ("{}", "{}", "sends no components"),
        ("[1]", "{}", r"sent \[1\] as parts: .*object"),
        ('{"a": [1.0]}', '{"a": 1}', r"\(component 'a'\) returned shape \(1,\) for 2 images"),
        ('{"a": [1.0, null]}', '{"a": 1}', "sent null in component 'a' for sample 1"),
        ('{"a": [1.0, NaN]}', '{"a": 1}', "sent nan as parts.a.1: .*finite"),
        ('{"a": [1.0, 2.0]}', '{"b": 1}', "as the weights of the components a"),
        ('{"a": [1.0, 2.0]}', '{"a": NaN}', "sent nan as weights.a: .*finite"),
    ],
)
def test_components_that_are_garbage(components, weights, message):
    answer = marked("[1.0, 2.0]", "[false, false]", parts=components, weights=weights)
    with scripted(answer) as (url, counts), pytest.raises(RewardError, match=message):
        RemoteSum(url, backoff=0.01).parts(*TWO)
    assert len(counts) == 1


def test_an_answer_that_trickles_ends_with_the_time_limit():
    def trickle():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
            for _ in range(200):
                connection.sendall(b" ")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=trickle, daemon=True).start()
        url, began = f"http://127.0.0.1:{listener.getsockname()[1]}", time.monotonic()
        with pytest.raises(RewardError, match="too slowly"):
            RemoteReward(url, timeout=0.5, retries=0).score(*TWO)
        assert time.monotonic() - began < 3


NESTED = st.recursive(
    st.floats() | st.none() | st.booleans() | st.text(max_size=3), lambda x: st.lists(x, max_size=3)
)
MARKS = st.lists(st.booleans(), min_size=2, max_size=2) | NESTED


@settings(max_examples=80)
@given(
    st.binary(max_size=60)
    | st.tuples(NESTED | st.lists(st.floats(0, 1) | st.none(), min_size=2, max_size=2), MARKS)
)
def test_no_answer_crashes_the_client(answer_server, content):
    """Whatever a server answers: two numbers, NaN only where a typed mark says so, or a
    `RewardError`.
    """
    url, answers = answer_server
    answers.append(content)
    with contextlib.suppress(RewardError):
        values = RemoteReward(url, retries=0).score(*TWO)
        marks = [False] * 2 if isinstance(content, bytes) or content[1] is None else content[1]
        assert values.shape == (2,) and values.isnan().tolist() == marks
        assert not values.isinf().any()
    with contextlib.suppress(RewardError):
        RemoteSum(url, retries=0).parts(*TWO)


@pytest.fixture(scope="module")
def answer_server():
    answers = []

    def step(request):
        content = answers[-1]
        if isinstance(content, bytes):
            return raw(200, content)
        values, marks = content
        name = request.headers["x-request-id"]
        return json.dumps(
            {"request": name, "scores": values, "invalid": marks, "parts": {"a": values}}
        )

    with scripted(step) as (url, _):
        yield url, answers


def test_giving_up_is_one_error_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(
        RewardError, match=r"no scores in \d+ attempts over . seconds.*resume the run"
    ):
        RemoteReward(url, batch=4, deadline=1.0, backoff=0.05).score(*numbered(range(40)))
    assert time.monotonic() - began < 4
    with pytest.raises(RewardError, match="in 3 attempts"):
        RemoteReward(url, retries=2, backoff=0.01).score(*TWO)


def test_a_requested_pause_is_kept():
    """Retry-After is a lower bound: longer than the backoff it replaces it, shorter it changes
    nothing.
    """
    with scripted(raw(503, BUSY, Retry_After=1), GOOD) as (url, counts):
        began = time.monotonic()
        RemoteReward(url, backoff=0.001).score(*TWO)
        assert 1.0 <= time.monotonic() - began < 4
    assert len(counts) == 2
    with scripted(raw(503, BUSY, Retry_After=0), GOOD) as (url, _):
        began = time.monotonic()
        RemoteReward(url, backoff=0.6).score(*TWO)
        assert time.monotonic() - began >= 0.3, "the backoff less a random half"


def test_a_requested_pause_beyond_the_deadline_ends_the_call_at_once():
    with scripted(raw(503, BUSY, Retry_After=30)) as (url, counts):
        began = time.monotonic()
        with pytest.raises(
            RewardError, match=r"in 1 attempts .*due 30 seconds later.*status 503, busy: later"
        ):
            RemoteReward(url, deadline=5.0).score(*TWO)
        assert time.monotonic() - began < 2 and len(counts) == 1


def test_pauses_double_up_to_a_limit_and_leave_the_global_random_numbers_alone():
    import random

    import tenacity

    from flowrl.serving.client import MAX_BACKOFF, _Call

    call = _Call(RemoteReward("http://127.0.0.1:1", backoff=0.5), deadline=0.0, with_parts=False)
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    before = random.getstate()
    for attempt in (1, 2, 3, 5, 6, 7, 40, 5000):
        state.attempt_number = attempt
        longest = min(0.5 * 2 ** min(attempt - 1, 100), MAX_BACKOFF)
        pauses = [call._pause(state) for _ in range(50)]
        assert longest / 2 <= min(pauses) and max(pauses) <= longest and len(set(pauses)) > 40
    assert random.getstate() == before


def test_a_failed_request_ends_the_pauses_of_the_others():
    """One request of a call is refused for good while another waits for its next attempt."""
    refusal = raw(422, b'{"error": {"code": "reward_refused", "message": "no", "retry": false}}')
    with scripted(raw(503, BUSY, Retry_After=20), refusal) as (url, counts):
        began = time.monotonic()
        with pytest.raises(RewardError, match="reward_refused"):
            RemoteReward(url, batch=1, concurrency=2).score(
                torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2
            )
        time.sleep(0.2)
        names = [thread.name for thread in threading.enumerate()]
        assert time.monotonic() - began < 3 and "flowrl-remote" not in names
    assert len(counts) == 2


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_one_clear_error(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for name, make in (("remote", RemoteReward), ("judge", partial(Judge, model="m"))):
        with pytest.raises(ConfigError, match=rf"{name} needs {package}; .*\[remote\]"):
            make("http://localhost:1")

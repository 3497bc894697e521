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
from reward_serving import Function, echo, numbered, raw, scripted, served

from flowrl import Prompt
from flowrl.core.errors import ConfigError, RewardError
from flowrl.serving.client import RemoteReward, RemoteSum
from flowrl.serving.connections import PACKAGES
from flowrl.serving.judge import Judge


def answer(scores="[1.0, 2.0]", invalid="[false, false]", **more):
    """A server's answer with these fields, as JSON text."""
    fields = {"scores": scores, "invalid": invalid, **more}
    text = "".join(f', "{name}": {value}' for name, value in fields.items())
    return lambda request: f'{{"request": "{request.headers["x-request-id"]}"{text}}}'


BUSY = b'{"error": {"code": "busy", "message": "later", "retry": true}}'
TWO = torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2
MARKED = "[false, true]"


@pytest.mark.parametrize(
    "fault",
    [
        raw(503, BUSY, Retry_After=0),
        raw(429, b'{"error": []}', Retry_After="soon"),
        b"",  # closed without an answer
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",  # truncated
        raw(200, b"[1.0, 2.0]"),
        raw(200, b'{"request": "another", "scores": [1.0, 2.0], "invalid": [false, false]}'),
        0.6,  # no answer in time
    ],
    ids=lambda fault: repr(fault)[:30],
)
def test_faults_that_pass_are_waited_out(fault):
    with scripted(fault, answer()) as (url, counts):
        remote = RemoteReward(url, timeout=0.4, backoff=0.01, deadline=5)
        assert remote.score(*TWO).tolist() == [1.0, 2.0]
        assert len(counts) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (answer("[1.0]"), r"\(scores\) returned shape \(1,\) for 2 images"),
        (answer("[1e300, 1.0]"), "1 of 2 values that are not finite, the first at sample 0"),
        (answer("[1.0, null]"), "sent null in scores without an invalid mark"),
        (answer('[1.0, "2.0"]'), "sent '2.0' as scores.1: .*number"),
        (answer(invalid=MARKED), "a score for a sample that it marks invalid"),
        (answer("[1.0, null]", "[true]"), "sent 1 invalid marks for 2 images"),
        (" " * 100_000, "response is larger than"),
        (raw(401), "401.*token"),
        (raw(307, Location="http://127.0.0.1:1/"), "rejected the request: status 307"),
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
        ("{}", "{}", "remote-sum needs a weighted-sum there"),
        ('{"a": [1.0]}', '{"a": 1}', r"\(component 'a'\) returned shape \(1,\) for 2 images"),
        ('{"a": [1.0, null]}', '{"a": 1}', "sent null in component 'a'"),
        ('{"a": [1.0, 2.0]}', '{"b": 1}', "sent components .* and weights"),
    ],
)
def test_components_that_are_garbage(components, weights, message):
    fault = answer(parts=components, weights=weights)
    with scripted(fault) as (url, _), pytest.raises(RewardError, match=message):
        RemoteSum(url, retries=0).parts(*TWO)


def test_weights_that_change_are_an_error():
    """A server that was started again with others would change the reward in the middle of a
    run.
    """
    first, other = (answer(parts='{"a": [1, 2]}', weights=f'{{"a": {w}}}') for w in (1.0, 2.0))
    with scripted(first, first, other) as (url, _):
        remote = RemoteSum(url)
        for _ in range(2):
            assert remote.total(remote.parts(*TWO)).tolist() == [1.0, 2.0]
        with pytest.raises(RewardError, match=r"were {'a': 1.0} and are now {'a': 2.0}"):
            remote.parts(*TWO)


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
        with pytest.raises(RewardError, match="too slow"):
            RemoteReward(url, timeout=0.5, retries=0).score(*TWO)
        assert time.monotonic() - began < 3


VALUES = st.recursive(
    st.floats() | st.none() | st.booleans() | st.text(max_size=3), lambda x: st.lists(x, max_size=3)
)


@settings(max_examples=80)
@given(
    st.binary(max_size=60)
    | st.tuples(
        VALUES | st.lists(st.floats(0, 1) | st.none(), min_size=2, max_size=2),
        VALUES | st.lists(st.booleans(), min_size=2, max_size=2),
    )
)
def test_no_answer_crashes_the_client(answer_server, content):
    """Whatever a server answers: two numbers, NaN exactly where a typed mark says so, or a
    `RewardError`.
    """
    url, answers = answer_server
    answers.append(content)
    with contextlib.suppress(RewardError):
        scores = RemoteReward(url, retries=0).score(*TWO)
        assert scores.isnan().tolist() == content[1] and not scores.isinf().any()
    with contextlib.suppress(RewardError):
        RemoteSum(url, retries=0).parts(*TWO)


@pytest.fixture(scope="module")
def answer_server():
    answers = []

    def step(request):
        content = answers[-1]
        if isinstance(content, bytes):
            return raw(200, content)
        scores, marks = map(json.dumps, content)
        return answer(scores, marks, parts=f'{{"a": {scores}}}', weights='{"a": 1.0}')(request)

    with scripted(step) as (url, _):
        yield url, answers


def test_giving_up_is_one_error_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    message = r"no scores in \d+ attempts over . seconds.*resume the run"
    with pytest.raises(RewardError, match=message):
        RemoteReward(url, batch=4, deadline=1.0, backoff=0.05).score(*numbered(range(40)))
    assert time.monotonic() - began < 4
    with pytest.raises(RewardError, match="in 3 attempts"):
        RemoteReward(url, retries=2, backoff=0.01).score(*TWO)


@pytest.mark.parametrize(("requested", "backoff", "pause"), [(1, 0.001, 1.0), (0, 0.6, 0.6)])
def test_a_requested_pause_is_kept(requested, backoff, pause):
    """Retry-After is a lower bound: a shorter one does not replace the client's own backoff."""
    with scripted(raw(503, BUSY, Retry_After=requested), answer()) as (url, counts):
        began = time.monotonic()
        RemoteReward(url, backoff=backoff).score(*TWO)
        assert pause <= time.monotonic() - began < 4 and len(counts) == 2


def test_a_requested_pause_beyond_the_deadline_ends_the_call_at_once():
    with scripted(raw(503, BUSY, Retry_After=30)) as (url, counts):
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"in 1 attempts .*status 503, busy: later"):
            RemoteReward(url, deadline=5.0).score(*TWO)
        assert time.monotonic() - began < 2 and len(counts) == 1


def test_a_failed_request_ends_the_pauses_of_the_others():
    """One request of a call is refused for good while another waits for its next attempt."""
    refusal = raw(422, b'{"error": {"code": "reward_refused", "message": "no", "retry": false}}')
    with scripted(raw(503, BUSY, Retry_After=20), refusal) as (url, counts):
        began = time.monotonic()
        with pytest.raises(RewardError, match="reward_refused"):
            RemoteReward(url, batch=1, concurrency=2).score(*TWO)
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


def test_requests_are_shared_by_the_servers_that_answer(monkeypatch):
    """A server that fails gets one request of each that runs at the time, then none."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    first, second, numbers = Function(echo), Function(echo), list(range(20))
    with scripted(b"") as (dead, lost), served(first) as (one, _), served(second) as (two, _):
        remote = RemoteReward(f"{dead}, {one} {two}", batch=1, concurrency=4, backoff=5)
        began = time.monotonic()
        assert remote.score(*numbered(numbers)).tolist() == numbers
        assert len(lost) <= remote._requests == 2 and time.monotonic() - began < 4
    assert first.sizes and second.sizes and len(first.sizes + second.sizes) == 20
    with pytest.raises(ConfigError, match=r"remote.url = 'ftp:b'"):
        RemoteReward(f"{one} ftp:b")

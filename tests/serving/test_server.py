"""The reward server and its client: order, limits, tokens, and every way in which either side can
fail.
"""

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial

import pytest
import server_requests as fuzzing
import torch
from reward_serving import (
    REWARD,
    TOKEN,
    Function,
    connected,
    echo,
    get,
    marking,
    numbered,
    post,
    raw_request,
    refused,
    served,
    unsure,
)
from safetensors.torch import save
from seeded import rand
from server_requests import png

from flowrl import Prompt
from flowrl.core.errors import ConfigError, RewardError
from flowrl.rewards import WeightedSum
from flowrl.run.parts.registry import build
from flowrl.serving import Listener, ServerLimits, ServerSettings, serve
from flowrl.serving.client import RemoteReward, RemoteSum
from flowrl.serving.wire_format import (
    TransientError,
    WireFormatError,
    decode_prompts,
    decode_safetensors,
    encode_request,
)
from flowrl.worlds import edits


@pytest.mark.parametrize("form", ["safetensors", "png", "uint8"])
def test_scores_equal_those_in_process(form):
    """Of images in 8 bits, if the form has no more."""
    images, prompts = rand(20, 3, 8, 8), [Prompt("p")] * 20
    seen = images if form == "safetensors" else (images * 255).round() / 255
    with served(Function()) as (url, _):
        remote = build("reward", f"remote(url='{url}', batch=7, images={form})")
        for given, expected in ((images, seen), (images[:, :1], seen[:, :1])):
            assert torch.equal(remote.score(given, prompts), Function().score(expected, prompts))
        assert remote.score(images[:0], []).shape == (0,)


@dataclass(frozen=True)
class Request:
    words: tuple[str, ...] = ("two", "rot & grün", '\u2603 "quoted"\n')
    number: int = 2**62


def test_prompts_arrive_whole():
    seen = []
    remember = Function(lambda images, prompts: (seen.extend(prompts), torch.zeros(1))[1])
    image, sent = torch.zeros(1, 3, 2, 2), {"request": Request(), "x": [1.5, None, True]}
    with served(remember) as (url, _):
        RemoteReward(url).score(image, [Prompt("snöw\u2603\x01", sent)])
        with pytest.raises(RewardError, match="metadata of prompt 'p' cannot be sent"):
            RemoteReward(url).score(image, [Prompt("p", {"a": (0.0, float("nan"))})])
    words = {"words": list(Request.words), "number": 2**62}
    assert seen == [Prompt("snöw\u2603\x01", {"request": words, "x": [1.5, None, True]})]


def test_reference_images_arrive_once_each():
    """The server scores an edit of the built-in world as the process does, by words and picture."""
    prompts = [prompt for prompt in edits.split("recolour")["heldout"][:3] for _ in range(4)]
    images, sent = rand(12, 3, 64, 64), []
    parts = encode_request(images, prompts, "uint8")
    assert [name for name, _ in parts].count("reference") == 3
    remember = Function(
        lambda images, given: (sent.extend(given), edits.EditReward().score(images, given))[1]
    )
    with served(remember) as (url, _):
        scores = RemoteReward(url, batch=12).score(images, prompts)
    torch.testing.assert_close(scores, edits.EditReward().score(images, prompts))
    assert [prompt.key for prompt in sent] == [prompt.key for prompt in prompts]


@contextlib.contextmanager
def underway(*functions):
    """Calls all functions at once, each in a thread, and waits for them at the end."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def together(functions):
    with underway(*functions):
        pass


def test_concurrent_clients_lose_and_swap_nothing():
    """Eight clients, two image sizes, one pool each; every score encodes its sample."""
    reward, wrong = Function(echo), []

    def client(number):
        remote = RemoteReward(url, batch=3, concurrency=2)
        for turn in range(8):
            numbers = [number * 1000 + turn * 20 + i for i in range(1 + (number + turn) % 9)]
            size = 2 + 2 * (number % 2)
            images = torch.cat([fuzzing.numbered_image(n, 2, size) for n in numbers])
            scores = remote.score(images, [Prompt("p", {"sample": n}) for n in numbers])
            wrong.extend(n for n, s in zip(numbers, scores.tolist(), strict=True) if n != s)

    with served(reward, ServerSettings(max_batch=16)) as (url, state):
        together(partial(client, number) for number in range(8))
        assert state.memory.used == 0
    total = sum(1 + (number + turn) % 9 for number in range(8) for turn in range(8))
    assert wrong == [] and sum(reward.sizes) == total
    assert max(reward.sizes) <= 16
    assert len(reward.sizes) < total / 3, "requests did not share calls"


def test_without_merging_every_request_has_calls_of_its_own():
    reward = Function(echo)
    with served(reward, ServerSettings(merge=False, max_batch=4)) as (url, _):
        together([partial(RemoteReward(url, batch=6).score, *numbered(range(6)))] * 4)
    assert reward.sizes == [4, 2] * 4


def test_an_error_reaches_only_the_request_that_causes_it(caplog):
    """A prompt that the reward refuses shares a call with others."""

    def picky(images, prompts):
        if any("sample" not in prompt.metadata for prompt in prompts):
            raise RewardError("a prompt has no number")
        return echo(images, prompts)

    reward, outcomes = Function(picky), {}

    def client(number):
        images, prompts = numbered([number])
        prompts = [Prompt("bad")] if number == 2 else prompts
        try:
            outcomes[number] = RemoteReward(url).score(images, prompts).tolist()
        except RewardError as error:
            outcomes[number] = str(error)

    with served(reward, ServerSettings(wait=0.5)) as (url, _):
        together(partial(client, number) for number in range(4))
    assert max(reward.sizes) > 1
    assert "reward_refused" in outcomes.pop(2) and "a prompt has no number" in caplog.text
    assert outcomes == {0: [0.0], 1: [1.0], 3: [3.0]}


def test_marks_travel_beside_the_scores():
    wanted = [float("nan") if n % 3 == 0 else float(n) for n in range(10)]
    with served(marking(unsure)) as (url, _):
        remote = RemoteReward(url, batch=4)
        scores = remote.score(*numbered(range(10))).tolist()
        assert remote.marks_invalid and scores == pytest.approx(wanted, nan_ok=True)
        body = post(url, fuzzing.good([2, 3])).json()
        assert (body["scores"], body["invalid"]) == ([2.0, None], [False, True])
        assert "flowrl_reward_invalid_total 5.0\n" in get(url, "/metrics").text


def test_components_of_a_weighted_sum_travel():
    """Components and total have the bits that they have in process; a sample that one component
    marks is marked.
    """
    parts = {"a": Function(), "b": build("reward", "jpeg-compressibility")}
    local = WeightedSum(parts, {"b": -0.3})
    images = rand(9, 3, 16, 16)
    prompts = [Prompt("p")] * 9
    with served(local) as (url, _):
        remote = build("reward", f"remote-sum(url='{url}', batch=4)")
        parts, wanted = remote.parts(images, prompts), local.parts(images, prompts)
        assert list(parts) == ["a", "b"]
        assert all(torch.equal(parts[name], wanted[name]) for name in parts)
        assert torch.equal(remote.total(parts), local.score(images, prompts))
    with served(WeightedSum({"a": Function(echo), "b": marking(unsure)})) as (url, _):
        parts = RemoteSum(url).parts(*numbered([1, 3]))
        assert parts["a"].tolist() == [1.0, 3.0] and parts["b"].isnan().tolist() == [False, True]
    with served(Function()) as (url, _), pytest.raises(RewardError, match="no_parts: this reward"):
        RemoteSum(url).parts(images, prompts)


PATHS = ("/v1/info", "/metrics", "/openapi.json", "/other")


def test_token(tmp_path, monkeypatch):
    monkeypatch.delenv("FLOWRL_REWARD_TOKEN", raising=False)
    (tmp_path / "token").write_text(" my-word \n")
    images, prompts = numbered([5])
    settings = ServerSettings(token="my-word")
    with served(Function(echo), settings) as (url, _):
        for given in ("", "Bearer", "Basic my-word", "Bearer my-word2", "bearer\tmy-word"):
            answer = post(url, fuzzing.good([5]), Authorization=given)
            refused(answer, 401, "wrong_token")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in PATHS:
            refused(get(url, path), 401, "wrong_token")
        assert get(url, "/health").json() == {"status": "ok"}
        with pytest.raises(RewardError, match=r"401, wrong_token.*set FLOWRL_REWARD_TOKEN"):
            RemoteReward(url, deadline=5.0).score(images, prompts)
        remote = RemoteReward(url, token_file=str(tmp_path / "token"))
        assert remote.score(images, prompts).tolist() == [5.0]
        monkeypatch.setenv("FLOWRL_REWARD_TOKEN", "my-word")
        assert RemoteReward(url).score(images, prompts).tolist() == [5.0]
        with pytest.raises(ConfigError, match="token_file"):
            RemoteReward(url, token_file=str(tmp_path / "missing")).score(images, prompts)
    assert "my-word" not in repr(remote) + repr(settings)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https(tmp_path):
    with served(Function(echo), None, *certificate(tmp_path)) as (url, _):
        url = url.replace("http", "https")
        remote = RemoteReward(url, certificate=str(tmp_path / "cert"), retries=0)
        assert remote.score(*numbered([5])).tolist() == [5.0]
        with pytest.raises(RewardError, match=r"is not trusted .*certificate verify failed"):
            RemoteReward(url).score(*numbered([5]))
        with pytest.raises(ConfigError, match=r"remote\.certificate"):
            RemoteReward(url, certificate=str(tmp_path / "missing")).score(*numbered([5]))


@pytest.mark.parametrize(
    ("settings", "accepted", "rejected"),
    [
        (
            {},
            "127.0.0.1:80 LOCALHOST:1 [::1]:8000 [::1] 127.3.2.1:8000",
            [
                "",
                *[
                    "127.0.0.1.attacker.example",
                    "192.168.0.1",
                    "me@localhost",
                    "localhost:x",
                    "[::1",
                ],
            ],
        ),
        (
            {"any_host": True, "names": ("GPU.example.org",)},
            "192.168.0.1:80 gpu.example.org:80 reward [fe80::1]:80",
            ["attacker.example"],
        ),
        ({"token": "x"}, "any.example", []),
    ],
    ids=["loopback", "any host", "token"],
)
def test_without_a_token_only_the_loopback_is_served(settings, accepted, rejected):
    """By name: a web page whose name was rebound to 127.0.0.1 is refused."""
    with served(Function(), ServerSettings(**settings)) as (url, _):
        for host in accepted.split():
            answer = post(url, fuzzing.good([1]), Host=host, Authorization="Bearer x")
            assert answer.status_code == 200, host
        for host, path in itertools.product(rejected, ("/v1/score", *PATHS)):
            refused(post(url, replace(fuzzing.good([1]), path=path), Host=host), 421, "wrong_host")


def test_an_address_open_to_all_needs_a_token():
    with (
        socket.create_server(("0.0.0.0", 0)) as open_to_all,
        pytest.raises(ConfigError, match="token"),
    ):
        serve(Function(), ServerSettings(), Listener(open_to_all, "0.0.0.0"))


def test_web_pages_are_refused_without_a_token():
    """A form or a fetch of any page can post to the loopback; browsers say so in headers that pages
    cannot set.
    """
    fine, reward = fuzzing.good([1]), Function()
    pages = [{"Origin": origin} for origin in ("https://attacker.example", "null", "http://[")]
    pages += [{"Sec-Fetch-Site": site} for site in ("cross-site", "same-site", "unheard-of")]
    with served(reward, ServerSettings(any_host=True)) as (url, _):
        for headers in pages:
            for attempt in (fine, *(replace(fine, method="GET", path=path) for path in PATHS)):
                refused(post(url, attempt, **headers), 403, "web_page")
        assert reward.sizes == []
        for headers in ({"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}):
            assert post(url, fine, **headers, Origin=url).status_code == 200
    with served(reward, ServerSettings(token="x")) as (url, _):
        assert post(url, fine, Authorization="Bearer x", **pages[0]).status_code == 200


@pytest.mark.parametrize("order", [1, -1])
def test_a_request_with_two_lengths_is_refused(order, module_server):
    """A proxy in front might see another end of the body, and take its rest for a second
    request.
    """
    lengths = [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"][::order]
    head = b"Host: localhost\r\n" + b"".join(lengths) + b"\r\n"
    second = b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(module_server) as connection:
        connection.sendall(b"POST /v1/score HTTP/1.1\r\n" + head + b"0\r\n\r\n" + second)
        received = b"".join(iter(lambda: connection.recv(4096), b""))
    assert received.startswith(b"HTTP/1.1 400") and b"two_lengths" in received, received
    assert received.count(b"HTTP/1.1") == 1, "the rest of the body was served"


def images_of(count, *images):
    """A request with `count` prompts and these images."""
    return fuzzing.posted([("prompts", fuzzing.listed(range(1, count + 1))), *images])


def test_sizes_are_limited():
    limits = ServerLimits(
        body_bytes=200_000, samples=3, pixels=10_000, prompts_bytes=2000, memory_bytes=300_000
    )
    reward, fine = Function(), fuzzing.good([1])
    large_body = fuzzing.posted([("prompts", b"[]"), ("safetensors", b"x" * 300_000)])
    with served(reward, ServerSettings(limits=limits)) as (url, state):
        for attempt, code in (
            (large_body, "body_too_large"),
            (replace(large_body, body=iter([large_body.body])), "body_too_large"),  # chunked
            (fuzzing.good([1, 2, 3, 4]), "too_many_samples"),
            (fuzzing.posted([("prompts", b" " * 3000)]), "part_too_large"),
            (images_of(1, ("png", png(101, 100))), "too_many_pixels"),
            (images_of(1, *[("png", png(9, 9))] * 4), "too_many_parts"),
            (images_of(3, *[("png", png(100, 100))] * 3), "too_much_memory"),
        ):
            refused(post(url, attempt), 413, code)
        assert reward.sizes == []
        assert post(url, fine).json()["scores"] == [1 / 2**24]
        assert state.memory.used == 0
        state.memory.reserve(299_900)
        assert refused(post(url, fine), 503, "busy")
        state.memory.release(299_900)
        with pytest.raises(RewardError, match=r"413, too_many_samples.*lower remote's batch"):
            RemoteReward(url).score(torch.zeros(4, 3, 2, 2), [Prompt("p")] * 4)


SMALL, ONE = ("png", png(2, 2)), torch.zeros(1, 3, 2, 2)


class Attack:
    """Unpickling it would end the process."""

    def __reduce__(self):
        return (os._exit, (1,))


@pytest.mark.parametrize(
    ("attempt", "code"),
    [
        (fuzzing.posted([]), "no_prompts"),
        (images_of(0), "no_images"),
        *[
            (fuzzing.posted([("prompts", text), SMALL]), "bad_prompts")
            for text in (
                b"{",
                b'[{"text": 1}]',
                b'[{"text": "p", "meta": {}}]',
                b'[{"text": "p", "text": "q"}]',
                b'[{"text": "p", "metadata": {"a": NaN}}]',
            )
        ],
        (images_of(2, SMALL), "wrong_count"),
        *[
            (images_of(1, ("png", data)), "bad_images")
            for data in (png(2, 2)[:-20], png(2, 2, "RGBA"))
        ],
        (images_of(1, ("png", b"GIF89a")), "bad_images: png 0 cannot be read: it is not a PNG"),
        (images_of(2, SMALL, ("png", png(2, 3))), "bad_images"),
        *[
            (images_of(1, ("safetensors", save({"images": images}))), "bad_images")
            for images in (ONE[0], torch.full_like(ONE, torch.nan), ONE.long())
        ],
        (images_of(1, ("safetensors", save({"other": ONE}))), "bad_safetensors"),
        (images_of(1, ("safetensors", pickle.dumps(Attack()))), "bad_safetensors"),
        (images_of(1, SMALL, ("safetensors", save({"images": ONE}))), "no_images"),
        (images_of(1, SMALL, ("reference", b"no image")), "bad_references"),
        (
            fuzzing.posted([("prompts", b'[{"text": "p", "images": ["abc"]}]'), SMALL]),
            "bad_references: no part 'reference' has the SHA-256 abc",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(attempt, code, module_server):
    code, _, message = code.partition(": ")
    assert message in refused(post(module_server, attempt), 422, code)


@pytest.fixture(scope="module")
def module_server():
    with served(Function(lambda images, prompts: torch.zeros(len(prompts)))) as (url, _):
        yield url


def held(release, entered=None):
    """A reward that computes only after `release` is set."""

    def score(images, prompts):
        if entered is not None:
            entered.set()
        release.wait(20)
        return echo(images, prompts)

    return Function(score)


def test_time_is_limited():
    limits = ServerLimits(header_seconds=0.3, body_seconds=0.4, score_seconds=0.3)
    release, fine = threading.Event(), fuzzing.good([1])
    with served(held(release), ServerSettings(limits=limits)) as (url, state):
        for opening in SILENT:
            with connected(url) as slow:
                slow.sendall(opening)
                if opening == SILENT[-1]:
                    assert slow.recv(4096).startswith(b"HTTP/1.1 200")
                    slow.sendall(b"GET /hea")
                wait_until(lambda: not is_open(slow))
        with connected(url) as slow:
            slow.sendall(raw_request(fine)[:-20])
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        refused(post(url, fine), 504, "slow_reward")
        time.sleep(0.1)
        assert get(url, "/health").json() == {"status": "stuck"}
        release.set()
        time.sleep(0.2)
        assert post(url, fine).json()["scores"] == [1.0]
        assert state.memory.used == 0


def is_open(connection):
    """Whether the other side has not closed the connection; responses are read."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


SILENT = (
    b"",
    b"POST /v1/score HTTP/1.1\r\nHost: localh",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
)


def test_silent_connections_do_not_keep_others_out(capfd):
    """Many connections that are silent before, within or after a request: the limit counts for all,
    and a request underway is never given up.
    """
    release, entered, outcomes = threading.Event(), threading.Event(), []
    settings = ServerSettings(limits=ServerLimits(connections=10))
    with served(held(release, entered), settings) as (url, _), contextlib.ExitStack() as stack:
        remote = RemoteReward(url, retries=0)
        stack.enter_context(underway(lambda: outcomes.extend(remote.score(*numbered([1])))))
        assert entered.wait(10)
        silent = [stack.enter_context(connected(url)) for _ in range(60)]
        for number, connection in enumerate(silent):
            connection.sendall(SILENT[number % len(SILENT)])
        began = time.monotonic()
        assert get(url, "/health").json() == {"status": "ok"} and time.monotonic() - began < 5
        wait_until(lambda: sum(map(is_open, silent)) < 10)
        release.set()
    assert outcomes == [1.0]
    assert capfd.readouterr().err == ""


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "the server never reached this state"
        time.sleep(0.01)


def certificate(folder):
    """Paths of a certificate for 127.0.0.1 and of its key."""
    words = (
        "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=here -addext"
        " subjectAltName=IP:127.0.0.1 -keyout key -out cert"
    )
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
    return folder / "cert", folder / "key"


def test_requests_at_one_time_are_limited_and_health_is_not():
    release, settings = threading.Event(), ServerSettings(limits=ServerLimits(connections=2))
    with served(held(release), settings) as (url, state):
        with underway(*(partial(post, url, fuzzing.good([n])) for n in range(2))):
            wait_until(lambda: state.memory.used >= 2 * 64)
            time.sleep(0.3)
            answer = post(url, fuzzing.good([3]))
            refused(answer, 503, "busy")
            assert answer.json()["error"]["retry"] and get(url, "/health").status_code == 200
            release.set()
        assert post(url, fuzzing.good([3])).status_code == 200


def test_bodies_that_are_no_http_end_quietly(capsys):
    """The application must not try to answer a connection that is over."""
    head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    form = head.replace(b"Host", b"Content-Type: multipart/form-data; boundary=x\r\nHost")
    bodies = (head + b"zz\r\n", form + b"zz\r\n", form + b"3\r\n--x\r\nnonsense\r\n")
    with served(Function()) as (url, state):
        for data in (*bodies, head + b"0\r\n\r\n\x00\r\n\r\n"):
            with connected(url) as connection:
                connection.sendall(data)
                assert connection.recv(4096).startswith(b"HTTP/1.1 4")
        assert post(url, fuzzing.good([1])).status_code == 200
        assert state.memory.used == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_queue_refuses_and_clients_that_leave_are_not_scored():
    release, entered, outcomes = threading.Event(), threading.Event(), []
    reward, limits = held(release, entered), ServerLimits(queue=2)
    with served(reward, ServerSettings(merge=False, limits=limits)) as (url, state):
        with underway(lambda: outcomes.append(post(url, fuzzing.good([1])))):
            assert entered.wait(10)
            with connected(url) as leaver:
                leaver.sendall(raw_request(fuzzing.good([7, 8])))
                wait_until(lambda: state.batcher.waiting == 2)
                answer = post(url, fuzzing.good([2]))
                refused(answer, 503, "busy")
                assert answer.headers["Retry-After"] == "1"
            time.sleep(0.3)
            release.set()
        assert post(url, fuzzing.good([3])).json()["scores"] == [3.0]
    assert reward.sizes == [1, 1], "a request that nobody waits for was scored"


def raising(error):
    def score(images, prompts):
        raise error

    return Function(score)


def caused(error, cause):
    error.__cause__ = cause
    return error


SECRET = "/srv/secret/weights.bin of key sk-123"


@pytest.mark.parametrize(
    ("function", "code", "logged"),
    [
        (lambda images, _: images[:, 0, 0, 0] * torch.nan, "reward_broken", "2 of 2 values"),
        (lambda images, _: torch.zeros(3), "reward_broken", r"returned shape \(3,\) for 2 images"),
        (lambda images, prompts: sys.exit(SECRET), "reward_failed", SECRET),
        (raising(KeyboardInterrupt(SECRET)).score, "reward_failed", SECRET),
        (raising(RewardError(SECRET)).score, "reward_refused", SECRET),
    ],
)
def test_a_broken_reward_is_one_clear_error(function, code, logged, caplog):
    """The client gets a class of error and an id, the log the reason; the same request is not sent
    again.
    """
    with served(Function(function)) as (url, state):
        answer = post(url, fuzzing.good([1, 2]), **{"X-Request-Id": "request-7"})
        message = refused(answer, 422 if code == "reward_refused" else 500, code)
        assert not answer.json()["error"]["retry"]
        assert "for the reason, see request request-7 in the server's log" in message
        assert "secret" not in answer.text and len(answer.content) < 250
        assert re.search(f"request request-7: .*{logged}", caplog.text, re.DOTALL)
        with pytest.raises(RewardError, match=rf"{code}: .*see request \w+ in") as error:
            RemoteReward(url, backoff=0.01).score(*numbered([1, 2]))
        assert str(error.value).split()[-5] in caplog.text
        assert state.health() == "ok"


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (ValueError("a side of 7 pixels"), False),
        (FileNotFoundError("weights"), False),
        (caused(ConfigError("no folder with a model"), OSError("offline")), False),
        (RewardError("no such class"), False),
        (ConnectionResetError("database"), True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (caused(RewardError("judge: no answer"), TransientError("no response")), True),
        (own_cause := RuntimeError("again"), False),
    ],
    ids=repr,
)
def test_only_failures_that_may_pass_are_to_be_retried(error, retry):
    own_cause.__cause__ = own_cause
    with served(raising(error)) as (url, _):
        assert post(url, fuzzing.good([1])).json()["error"]["retry"] is retry


def test_fuzzed_requests_do_no_harm(tmp_path):
    """Good and damaged requests, drawn by Hypothesis."""
    (tmp_path / "echo.py").write_text(REWARD)
    reward = build("reward", f"{tmp_path / 'echo.py'}:Echo")
    with served(reward, ServerSettings(token=TOKEN)) as (url, state):
        seen = fuzzing.fuzz(url, TOKEN, 200)
        wait_until(lambda: state.memory.used == 0)  # the last connection may still be closing
        assert state.health() == "ok"
    assert sum(seen.values()) == 200 and not any(status >= 500 for status in seen)
    assert {0, 200} <= set(seen) and sum(status >= 400 for status in seen) >= 3, seen


def test_state_and_description():
    with served(Function(), ServerSettings(name="echo<script>", max_batch=2)) as (url, _):
        RemoteReward(url).score(torch.zeros(5, 3, 2, 2), [Prompt("p")] * 5)
        info, text = get(url, "/v1/info").json(), get(url, "/metrics").text
        document = get(url, "/openapi.json").text
        refused(get(url, "/v2/score"), 404, "no_such_endpoint")
        refused(get(url, "/v1/score"), 405, "no_such_endpoint")
    assert info["reward"] == "echo<script>" and "flowrl_reward_samples_total 5.0\n" in text
    assert "/v1/score" in document and "echo" not in document, "the description names the reward"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'[{"text": "a", "metadata": {"a": 1e999}}]', "bad_prompts"),
        (b'[{"text": ""}, {"text": ""}, {"text": ""}]', "too_many_samples"),
        (b"[" + b'{"text": ""},' * 500_000 + b'{"text": ""}]', "too_many_samples"),
        (b"[" + b'"",' * 1_900_000 + b'""]', "too_many_samples"),
    ],
    ids=["infinite", "more", "many", "texts"],
)
def test_prompts_are_strict_json_and_counted_before_they_are_read(data, code):
    decode_prompts(b"[]", 2)  # the first call builds the reader
    start = time.process_time()
    with pytest.raises(WireFormatError) as raised:
        decode_prompts(data, 2)
    assert raised.value.code == code and time.process_time() - start < 0.1


def test_a_header_of_many_tensors_is_not_read():
    names = {f"t{i}": {} for i in range(300_000)}
    header = json.dumps(names).encode()
    start = time.process_time()
    with pytest.raises(WireFormatError, match="header has"):
        decode_safetensors(len(header).to_bytes(8, "little") + header)
    assert time.process_time() - start < 0.1

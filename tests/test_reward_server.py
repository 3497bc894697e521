"""The reward server and its client: order, limits, tokens, and every way in which either side can fail."""

import contextlib
import importlib.util
import io
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from flowrl import Prompt
from flowrl.errors import ConfigError, RewardError
from flowrl.protocols import CompositeReward
from flowrl.registry import build
from flowrl.rewards import FunctionReward, WeightedSum
from flowrl.rewards.remote import RemoteReward, RemoteSum
from flowrl.rewards.server import Limits, Listener, Settings
from flowrl.rewards.server.serve import is_loopback, make_server, serve

spec = importlib.util.spec_from_file_location("reward_server", Path(__file__).parents[1] / "benchmarks" / "reward_server.py")
assert spec is not None and spec.loader is not None
bench = importlib.util.module_from_spec(spec)
sys.modules["reward_server"] = bench
spec.loader.exec_module(bench)


@dataclass
class Function:
    """A reward from a function; counts its calls and the pictures in each."""

    function: object = None

    def __post_init__(self):
        self.sizes = []

    def score(self, images, prompts):
        self.sizes.append(len(images))
        assert len(images) == len(prompts)
        return images.flatten(1).amax(1) if self.function is None else self.function(images, prompts)


def echo(images, prompts):
    """The number in the picture, if the prompt names the same one, else -1."""
    found = (images.flatten(1).amax(1) * 2**24).round()
    return torch.where(found == torch.tensor([float(p.metadata["sample"]) for p in prompts]), found, -1.0)


@contextlib.contextmanager
def served(reward, settings=None, certificate=None, key=None):
    """A server in a thread; gives its address and its state."""
    listener = Listener.open("127.0.0.1", 0)
    server = make_server(reward, settings or Settings(), certificate, key)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener.socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield listener.url(), server.config.app.state.server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def numbered(numbers):
    return torch.cat([bench.picture(n) for n in numbers]), [Prompt("p", {"sample": n}) for n in numbers]


def post(url, attempt, **options):
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        return client.request(attempt.method, attempt.path, content=attempt.body, headers={**attempt.headers, **options})


def refused(answer, status, code):
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert set(error) == {"code", "message", "retry"}
    return error["message"]


# --- scores come back, exactly and in order -------------------------------------------------------------------------


def test_scores_equal_those_in_process():
    images = torch.rand(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    prompts = [Prompt(f"prompt {n}") for n in range(50)]
    with served(Function()) as (url, _):
        assert torch.equal(RemoteReward(url, batch=7).score(images, prompts), Function().score(images, prompts))
        rounded = (images * 255).round() / 255
        assert torch.equal(RemoteReward(url, batch=7, images="png").score(images, prompts), Function().score(rounded, prompts))
        grey = RemoteReward(url, images="png").score(images[:, :1], prompts)
        assert torch.equal(grey, rounded[:, 0].flatten(1).amax(1))
        assert RemoteReward(url).score(images[:0], []).shape == (0,)


def test_a_reward_by_name():
    """JPEG sees 8 bits, so that even PNG changes nothing."""
    reward = build("reward", "jpeg-compressibility")
    images, prompts = torch.rand(9, 3, 32, 32, generator=torch.Generator().manual_seed(0)) ** 3, [Prompt("p")] * 9
    with served(reward) as (url, _):
        for kind in ("safetensors", "png"):
            assert torch.equal(build("reward", f"remote(url='{url}', batch=4, images={kind})").score(images, prompts),
                               reward.score(images, prompts))  # fmt: skip


def test_pictures_that_cannot_be_sent():
    with pytest.raises(RewardError, match="not finite"):
        RemoteReward("http://127.0.0.1:1").score(torch.full((1, 3, 2, 2), torch.nan), [Prompt("p")])
    with pytest.raises(RewardError, match="1 or 3 channels, got 4"):
        RemoteReward("http://127.0.0.1:1", images="png").score(torch.zeros(1, 4, 2, 2), [Prompt("p")])
    with pytest.raises(RewardError, match="as many of each"):
        RemoteReward("http://127.0.0.1:1").score(torch.zeros(2, 3, 2, 2), [Prompt("p")])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
def test_other_precisions_are_read(dtype):
    images = (torch.rand(2, 3, 4, 4) * (255 if dtype == torch.uint8 else 1)).to(dtype)
    wanted = images.float().flatten(1).amax(1) / (255 if dtype == torch.uint8 else 1)
    with served(Function()) as (url, _):
        answer = post(url, bench.posted([("prompts", bench.listed([0, 1])), ("safetensors", save({"images": images}))]))
    assert answer.json()["scores"] == wanted.tolist()


def test_prompts_arrive_whole():
    @dataclass(frozen=True)
    class Request:
        words: tuple[str, ...] = ("two", "rot & grün", '\u2603 "quoted"\n')
        number: int = 2**70

    seen = []
    with served(Function(lambda images, prompts: (seen.extend(prompts), torch.zeros(len(prompts)))[1])) as (url, _):
        RemoteReward(url).score(torch.zeros(1, 3, 2, 2), [Prompt("snöw\u2603\0", {"request": Request(), "x": [1.5, None, True]})])
        with pytest.raises(RewardError, match=r"metadata\['a'\]\[1\] of prompt 'p' is nan .*cannot be sent"):
            RemoteReward(url).score(torch.zeros(1, 3, 2, 2), [Prompt("p", {"a": (0.0, float("nan"))})])
        with pytest.raises(RewardError, match="Tensor"):
            RemoteReward(url).score(torch.zeros(1, 3, 2, 2), [Prompt("p", {"a": torch.zeros(1)})])
    words = {"words": ["two", "rot & grün", '\u2603 "quoted"\n'], "number": 2**70}
    assert seen == [Prompt("snöw\u2603\0", {"request": words, "x": [1.5, None, True]})]


def test_concurrent_clients_lose_and_swap_nothing():
    """Twelve clients, two picture sizes, one pool each; every score encodes its sample."""
    reward = Function(echo)
    with served(reward, Settings(max_batch=16)) as (url, state):
        wrong, done = [], []

        def work(client):
            remote = RemoteReward(url, batch=3, concurrency=2)
            for turn in range(12):
                numbers = [client * 1000 + turn * 20 + i for i in range(1 + (client + turn) % 9)]
                images = torch.cat([bench.picture(n, 2, 2 + 2 * (client % 2)) for n in numbers])
                scores = remote.score(images, [Prompt("p", {"sample": n}) for n in numbers])
                wrong.extend(n for n, s in zip(numbers, scores.tolist(), strict=True) if n != s)
                done.extend(numbers)

        threads = [threading.Thread(target=work, args=(client,)) for client in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert state.memory.used == 0
    assert wrong == []
    assert len(done) == sum(reward.sizes)
    assert max(reward.sizes) <= 16 and len(reward.sizes) < len(done) / 3, "requests did not share calls"


def test_without_merging_every_request_has_calls_of_its_own():
    reward = Function(echo)
    with served(reward, Settings(merge=False, max_batch=4)) as (url, _):
        threads = [threading.Thread(target=RemoteReward(url, batch=6).score, args=numbered(range(6))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert reward.sizes == [4, 2] * 4


def test_an_error_reaches_only_the_request_that_causes_it():
    """A prompt that the reward refuses shares a call with others."""

    def picky(images, prompts):
        if any("sample" not in prompt.metadata for prompt in prompts):
            raise RewardError("a prompt has no number")
        return echo(images, prompts)

    reward, outcomes = Function(picky), {}
    with served(reward, Settings(wait=0.5)) as (url, _):

        def work(client):
            images, prompts = numbered([client])
            try:
                outcomes[client] = RemoteReward(url).score(images, [Prompt("bad")] if client == 2 else prompts).tolist()
            except RewardError as error:
                outcomes[client] = str(error)

        threads = [threading.Thread(target=work, args=(client,)) for client in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(reward.sizes) > 1
    assert "a prompt has no number" in outcomes.pop(2)
    assert outcomes == {0: [0.0], 1: [1.0], 3: [3.0]}


def unsure(images, prompts):
    """Cannot judge pictures whose number is a multiple of three."""
    found = echo(images, prompts)
    return torch.where(found % 3 == 0, torch.nan, found)


def marking(function):
    return FunctionReward(function, marks_invalid=True)


def test_marks_travel_beside_the_scores():
    wanted = [float("nan") if n % 3 == 0 else float(n) for n in range(10)]
    with served(marking(unsure)) as (url, _):
        remote = RemoteReward(url, batch=4)
        assert remote.marks_invalid and remote.score(*numbered(range(10))).tolist() == pytest.approx(wanted, nan_ok=True)
        body = post(url, bench.good([2, 3])).json()
        assert (body["scores"], body["invalid"]) == ([2.0, None], [False, True])
        assert "flowrl_reward_invalid_total 5\n" in httpx.get(url + "/metrics", trust_env=False).text
    with served(Function(echo)) as (url, _):
        assert post(url, bench.good([2, 3])).json()["invalid"] == [False, False]
    with served(Function(unsure)) as (url, _):
        refused(post(url, bench.good([2, 3])), 500, "reward_broken")
    with served(marking(lambda images, prompts: torch.full((2,), torch.inf))) as (url, _):
        refused(post(url, bench.good([2, 3])), 500, "reward_broken")


def test_components_of_a_weighted_sum_travel():
    """Parts and total have the bits that they have in process; a sample that one component marks is marked."""
    plain = WeightedSum({"a": Function(), "b": build("reward", "jpeg-compressibility")}, {"b": -0.3})
    images, prompts = torch.rand(9, 3, 16, 16, generator=torch.Generator().manual_seed(0)), [Prompt("p")] * 9
    with served(plain) as (url, _):
        remote = build("reward", f"remote-sum(url='{url}', batch=4)")
        assert isinstance(remote, CompositeReward) and not isinstance(RemoteReward(url), CompositeReward)
        with pytest.raises(RewardError, match="components a; the server has none yet"):
            remote.total({"a": torch.zeros(1)})
        parts, wanted = remote.parts(images, prompts), plain.parts(images, prompts)
        assert list(parts) == ["a", "b"] and all(torch.equal(parts[name], wanted[name]) for name in parts)
        assert torch.equal(remote.total(parts), plain.score(images, prompts))
        assert torch.equal(remote.score(images, prompts), plain.score(images, prompts))
        assert httpx.get(url + "/v1/info", trust_env=False).json()["components"] == {"a": 1.0, "b": -0.3}
        assert set(post(url, bench.good([1])).json()) == {"request", "scores", "invalid"}
    with served(WeightedSum({"a": Function(echo), "b": marking(unsure)})) as (url, _):
        parts = RemoteSum(url).parts(*numbered([1, 3]))
        assert parts["a"].tolist() == [1.0, 3.0] and parts["b"].isnan().tolist() == [False, True]
        assert RemoteSum(url).score(*numbered([1, 3])).isnan().tolist() == [False, True]
    with served(Function()) as (url, _):
        with pytest.raises(RewardError, match="no_parts: this reward has no components"):
            RemoteSum(url).parts(images, prompts)
        for words in ("parts=maybe", "parts="):
            refused(post(url, replace(bench.good([1]), path=f"/v1/score?{words}")), 422, "bad_query")


def test_weights_that_change_are_an_error():
    """A server that was started again with others would change the reward in the middle of a run."""
    images, prompts = numbered([1, 2])

    def answer(weight):
        return lambda name: json.dumps(
            {"request": name, "scores": [1.0, 2.0], "invalid": [False] * 2, "parts": {"a": [1, 2]}, "weights": {"a": weight}}
        )

    with scripted(answer(1.0), answer(1.0), answer(2.0)) as (url, _):
        remote = RemoteSum(url)
        for _ in range(2):
            assert remote.total(remote.parts(images, prompts)).tolist() == [1.0, 2.0]
        with pytest.raises(RewardError, match=r"the weights at .* were {'a': 1.0}, and are {'a': 2.0} now"):
            remote.parts(images, prompts)


def test_connections_are_reused():
    opened = []
    with served(Function()) as (url, _):
        remote = RemoteReward(url, batch=1, concurrency=3)
        for _ in range(5):
            remote.score(torch.zeros(6, 3, 2, 2), [Prompt("p")] * 6)
            pool = remote._connections.client()._transport._pool
            opened.append({id(connection) for connection in pool.connections})
        assert len(set().union(*opened)) <= 3
        remote.close()
        assert remote.score(torch.ones(1, 3, 2, 2), [Prompt("p")]).tolist() == [1.0]
        again = pickle.loads(pickle.dumps(remote))
        assert again == remote and again.score(torch.ones(1, 3, 2, 2), [Prompt("p")]).tolist() == [1.0]


# --- who may ask ----------------------------------------------------------------------------------------------------


def test_token(tmp_path, monkeypatch):
    monkeypatch.delenv("FLOWRL_REWARD_TOKEN", raising=False)
    (tmp_path / "token").write_text(" gehéim \n")
    images, prompts = numbered([5])
    with served(Function(), Settings(token="gehéim")) as (url, _):
        fine = bench.good([5])
        for given_token in ("", "Bearer", "Bearer x", "Basic geheim", "Bearer geheim2", "bearer\tgeheim"):
            answer = post(url, fine, Authorization=given_token)
            refused(answer, 401, "wrong_token")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/v1/info", "/metrics"):
            refused(httpx.get(url + path, trust_env=False), 401, "wrong_token")
        assert httpx.get(url + "/health", trust_env=False).json() == {"status": "ok"}
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"401, wrong_token.*set FLOWRL_REWARD_TOKEN or token_file"):
            RemoteReward(url).score(images, prompts)
        assert time.monotonic() - began < 5, "a wrong token must not be tried again"


def test_token_from_file_or_environment(tmp_path, monkeypatch):
    images, prompts = numbered([5])
    (tmp_path / "token").write_text(" secret \n")
    with served(Function(echo), Settings(token="secret")) as (url, _):
        remote = RemoteReward(url, token_file=str(tmp_path / "token"))
        assert remote.score(images, prompts).tolist() == [5.0]
        assert "secret" not in repr(remote)
        monkeypatch.setenv("FLOWRL_REWARD_TOKEN", "secret")
        assert RemoteReward(url).score(images, prompts).tolist() == [5.0]
        with pytest.raises(ConfigError, match="token_file"):
            RemoteReward(url, token_file=str(tmp_path / "missing")).score(images, prompts)
    assert "secret" not in repr(Settings(token="secret"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https(tmp_path):
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=here -addext subjectAltName=IP:127.0.0.1 -keyout key -out cert"
    subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    with served(Function(echo), Settings(token="x" * 20), tmp_path / "cert", tmp_path / "key") as (url, _):
        url = url.replace("http", "https")
        (tmp_path / "token").write_text("x" * 20)
        remote = RemoteReward(url, token_file=str(tmp_path / "token"), certificate=str(tmp_path / "cert"), retries=0)
        assert remote.score(*numbered([5])).tolist() == [5.0]
        remote.close()
        with pytest.raises(RewardError, match="certificate verify failed"):
            RemoteReward(url, token_file=str(tmp_path / "token"), retries=0).score(*numbered([5]))
        with pytest.raises(ConfigError, match=r"remote\.certificate"):
            RemoteReward(url, certificate=str(tmp_path / "missing")).score(*numbered([5]))


def test_tokens_are_compared_in_constant_time(monkeypatch):
    import hmac

    from flowrl.rewards.server import access

    compared, real = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append((a, b)), real(a, b))[1])
    access.TokenCheck("right").check(b"Bearer right", b"")
    with pytest.raises(access.Refusal):
        access.TokenCheck("right").check(b"Bearer wrong and much longer", b"")
    assert len(compared) == 2 and all(len(a) == len(b) == 32 for a, b in compared)


def test_without_a_token_only_the_loopback_is_served():
    """By address, and by name: a web page whose name was rebound to 127.0.0.1 is refused."""
    with served(Function()) as (url, _):
        for host in ("127.0.0.1:80", "localhost", "LOCALHOST:1", "[::1]:8000", "[::1]"):
            assert post(url, bench.good([1]), Host=host).status_code == 200, host
        for host in ("attacker.example", "attacker.example:80", "127.0.0.1.attacker.example", "localhost.evil:1", "192.168.0.1"):
            refused(post(url, bench.good([1]), Host=host), 421, "wrong_host")
    with socket.create_server(("0.0.0.0", 0)) as open_to_all, pytest.raises(ConfigError, match="token"):
        serve(Function(), Settings(), Listener(open_to_all, "0.0.0.0"))
    assert [is_loopback(host) for host in ("127.3.2.1", "::1", "localhost", "0.0.0.0", "", "example.org")] == [True] * 3 + [
        False
    ] * 3


# --- limits ---------------------------------------------------------------------------------------------------------


def png(width, height, mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG", **options)
    return file.getvalue()


def test_sizes_are_limited():
    limits = Limits(body_bytes=200_000, samples=3, pixels=10_000, prompts_bytes=2000, memory_bytes=300_000)
    reward = Function()
    with served(reward, Settings(limits=limits)) as (url, state):
        fine = bench.good([1])
        big = b"x" * 300_000
        refused(post(url, bench.posted([("prompts", b"[]"), ("safetensors", big)])), 413, "body_too_large")
        with httpx.Client(base_url=url, trust_env=False) as client:
            body = bench.posted([("prompts", b"[]"), ("safetensors", big)]).body
            chunked = client.post("/v1/score", content=iter([body[:150], body[150:]]), headers=fine.headers)
            refused(chunked, 413, "body_too_large")
        refused(post(url, bench.good([1, 2, 3, 4])), 413, "too_many_samples")
        refused(post(url, bench.posted([("prompts", b" " * 3000)])), 413, "part_too_large")
        one = ("prompts", bench.listed([1]))
        refused(post(url, bench.posted([one, ("png", png(101, 100))])), 413, "too_many_pixels")
        refused(post(url, bench.posted([one, *[("png", png(9, 9))] * 4])), 413, "too_many_parts")
        large = [("prompts", bench.listed([1, 2, 3])), *[("png", png(100, 100))] * 3]
        refused(post(url, bench.posted(large)), 413, "too_much_memory")
        assert reward.sizes == []
        assert post(url, fine).json()["scores"] == [1 / 2**24]
        assert state.memory.used == 0
        state.memory.take(299_900)
        assert refused(post(url, fine), 503, "busy")
        state.memory.give(299_900)
        with pytest.raises(RewardError, match=r"413, too_many_samples.*lower remote's batch"):
            RemoteReward(url).score(torch.zeros(4, 3, 2, 2), [Prompt("p")] * 4)


def test_a_small_file_that_decodes_to_a_large_picture_is_refused_before_decoding():
    bomb = png(4200, 4200, "L")
    assert len(bomb) < 600_000
    with served(Function()) as (url, _):
        began = time.monotonic()
        refused(post(url, bench.posted([("prompts", bench.listed([1])), ("png", bomb)])), 413, "too_many_pixels")
        assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([], 422, "no_prompts"),
        ([("prompts", b"[]")], 422, "no_images"),
        ([("prompts", b"{")], 422, "no_images"),
        ([("prompts", b"{"), ("png", png(2, 2))], 422, "bad_prompts"),
        ([("prompts", b'[{"text": 1}]'), ("png", png(2, 2))], 422, "bad_prompts"),
        ([("prompts", b'[{"text": "p", "meta": {}}]'), ("png", png(2, 2))], 422, "bad_prompts"),
        ([("prompts", b'[{"text": "p"}]' * 2), ("png", png(2, 2))], 422, "bad_prompts"),
        ([("prompts", b'[{"text": "\xff"}]'), ("png", png(2, 2))], 422, "bad_prompts"),
        ([("prompts", bench.listed([1, 2])), ("png", png(2, 2))], 422, "wrong_count"),
        ([("prompts", bench.listed([1])), ("png", png(2, 2)[:-20])], 422, "bad_images"),
        ([("prompts", bench.listed([1])), ("png", b"GIF89a")], 422, "bad_images"),
        ([("prompts", bench.listed([1])), ("png", png(2, 2, "RGBA"))], 422, "bad_images"),
        ([("prompts", bench.listed([1])), ("png", png(2, 2, "I;16"))], 422, "bad_images"),
        ([("prompts", bench.listed([1, 2])), ("png", png(2, 2)), ("png", png(2, 3))], 422, "bad_images"),
        ([("prompts", bench.listed([1])), ("safetensors", save({"images": torch.zeros(3, 4, 4)}))], 422, "bad_images"),
        (
            [("prompts", bench.listed([1])), ("safetensors", save({"images": torch.full((1, 3, 2, 2), torch.nan)}))],
            422,
            "bad_images",
        ),
        ([("prompts", bench.listed([1])), ("safetensors", save({"images": torch.zeros(1, 3, 2, 2).long()}))], 422, "bad_images"),
        ([("prompts", bench.listed([1])), ("safetensors", save({"other": torch.zeros(1, 3, 2, 2)}))], 422, "bad_safetensors"),
        (
            [("prompts", bench.listed([1])), ("png", png(2, 2)), ("safetensors", save({"images": torch.zeros(1)}))],
            422,
            "no_images",
        ),
        ([("pickle", b"")], 400, "unknown_part"),
    ],
)
def test_what_cannot_be_read_is_refused(parts, status, code, module_server):
    refused(post(module_server[0], bench.posted(parts)), status, code)


@pytest.fixture(scope="module")
def module_server():
    with served(Function(lambda images, prompts: torch.zeros(len(prompts)))) as found:
        yield found


def test_nothing_is_unpickled(module_server, tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    torch_file = io.BytesIO()
    torch.save({"images": Attack()}, torch_file)
    for data in (pickle.dumps(Attack()), torch_file.getvalue()):
        for name in ("safetensors", "png"):
            answer = post(module_server[0], bench.posted([("prompts", bench.listed([1])), (name, data)]))
            assert answer.status_code == 422
    assert not (tmp_path / "owned").exists()


def test_time_is_limited():
    limits = Limits(header_seconds=0.3, body_seconds=0.4, score_seconds=0.3)
    release = threading.Event()
    with served(Function(lambda images, prompts: (release.wait(20), echo(images, prompts))[1]), Settings(limits=limits)) as (
        url,
        state,
    ):
        port = int(url.rpartition(":")[2])
        first = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        for opening in (b"", b"POST /v1/score HTTP/1.1\r\nHost: localh", first):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as slow:
                slow.sendall(opening)
                if opening == first:
                    assert slow.recv(4096).startswith(b"HTTP/1.1 200")
                    slow.sendall(b"GET /hea")
                began = time.monotonic()
                while slow.recv(4096):
                    pass
                assert time.monotonic() - began < 3, f"{opening!r} was left open"
        fine = bench.good([1])
        head = f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: {fine.headers['Content-Type']}\r\n"
        head += "Content-Length: 900\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=5) as slow:
            slow.sendall(head.encode() + fine.body[:100])
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        refused(post(url, fine), 504, "slow_reward")
        time.sleep(0.1)
        assert httpx.get(url + "/health", trust_env=False).json() == {"status": "stuck"}
        release.set()
        time.sleep(0.2)
        assert post(url, fine).json()["scores"] == [1.0]
        assert state.memory.used == 0


def test_bodies_that_are_no_http_end_quietly(capsys):
    """The application must not try to answer a connection that is over."""
    head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    form = head.replace(b"Host", b"Content-Type: multipart/form-data; boundary=x\r\nHost")
    with served(Function()) as (url, state):
        for data in (head + b"zz\r\n", form + b"zz\r\n", form + b"3\r\n--x\r\nnonsense\r\n", head + b"0\r\n\r\n\x00\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5) as connection:
                connection.sendall(data)
                assert connection.recv(4096).startswith(b"HTTP/1.1 4")
        assert post(url, bench.good([1])).status_code == 200
        assert state.memory.used == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_queue_refuses_and_clients_that_leave_are_not_scored():
    release, entered = threading.Event(), threading.Event()
    reward = Function(lambda images, prompts: (entered.set(), release.wait(20), echo(images, prompts))[2])
    with served(reward, Settings(merge=False, limits=Limits(queue=2))) as (url, state):
        outcomes = []
        first = threading.Thread(target=lambda: outcomes.append(post(url, bench.good([1])).status_code))
        first.start()
        assert entered.wait(10)
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as leaver:
            fine = bench.good([7, 8])
            head = f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: {fine.headers['Content-Type']}\r\n"
            leaver.sendall(f"{head}Content-Length: {len(fine.body)}\r\n\r\n".encode() + fine.body)
            while state.batcher.waiting < 2:
                time.sleep(0.01)
            answer = post(url, bench.good([2]))
            refused(answer, 503, "busy")
            assert answer.headers["Retry-After"] == "1"
        time.sleep(0.3)
        release.set()
        first.join()
        assert post(url, bench.good([3])).json()["scores"] == [3.0]
    assert outcomes == [200]
    assert reward.sizes == [1, 1], "a request that nobody waits for was scored"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda images, prompts: torch.full((len(prompts),), torch.nan), "2 of 2 values that are not finite"),
        (lambda images, prompts: torch.zeros(len(prompts) + 1), r"returned shape \(3,\); allowed: \(2,\)"),
        (lambda images, prompts: torch.zeros(len(prompts), 1), r"returned shape \(2, 1\)"),
        (lambda images, prompts: [0.0] * len(prompts), "returned a list"),
        (lambda images, prompts: sys.exit("over"), "in 2 attempts.*SystemExit: over"),
        (lambda images, prompts: prompts[0].metadata["missing"], "in 2 attempts.*KeyError: 'missing'"),
    ],
)
def test_a_broken_reward_is_one_clear_error(function, message):
    with served(Function(function)) as (url, state):
        with pytest.raises(RewardError, match=message):
            RemoteReward(url, retries=1, backoff=0.01).score(*numbered([1, 2]))
        assert state.health() == "ok"


# --- a client and servers that fail ---------------------------------------------------------------------------------


@contextlib.contextmanager
def scripted(*script):
    """A server that answers its requests by `script` in turn: bytes to send, then the connection is closed; or a function of the
    request's id and the number of pictures that gives the scores as JSON text. Its last entry serves all further requests."""
    counts = []

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            while len(body) < int(headers[b"content-length"]):
                body += connection.recv(65536)
            number = len(counts)
            counts.append(number)
            step = script[min(number, len(script) - 1)]
            name = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id"))[14:].decode()
            if callable(step):
                text = step(name)
                step = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode()
            if isinstance(step, float):
                time.sleep(step)
                return
            connection.sendall(step)

    def listen():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", counts
        listener.shutdown(socket.SHUT_RDWR)


def scores(text):
    return lambda name: f'{{"request": "{name}", "scores": {text}}}'


def marked(text, marks, **more):
    extra = "".join(f', "{name}": {value}' for name, value in more.items())
    return lambda name: f'{{"request": "{name}", "scores": {text}, "invalid": {marks}{extra}}}'


def raw(status, body=b"", **headers):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{lines}\r\n".encode() + body


GOOD = scores("[1.0, 2.0]")
PASSING = [
    raw(500),
    raw(500, b"<html>oops</html>"),
    raw(503, b'{"error": {"code": "busy", "message": "later", "retry": true}}', Retry_After=0),
    raw(502, b"\xff\xfe"),
    raw(429, b'{"error": []}', Retry_After="soon"),
    raw(500, b'{"error": ' + b"[" * 50_000),
    b"",  # closed without an answer
    b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",  # truncated
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"\x00\x01garbage\r\n\r\n",
    raw(200, b""),
    raw(200, b"{"),
    raw(200, b"[1.0, 2.0]"),
    raw(200, b'{"request": "another", "scores": [1.0, 2.0]}'),
    raw(200, b'{"scores": [1.0, 2.0]}'),
    raw(200, b"[" * 50_000),
    0.6,  # no answer in time
]


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: repr(fault)[:30])
def test_faults_that_pass_are_waited_out(fault):
    with scripted(fault, fault, GOOD) as (url, counts):
        remote = RemoteReward(url, timeout=0.4, backoff=0.01, deadline=60)
        assert remote.score(torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2).tolist() == [1.0, 2.0]
        assert len(counts) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (scores("[1.0]"), "sent 1 scores for 2 pictures"),
        (scores("[1.0, 2.0, 3.0]"), "sent 3 scores for 2 pictures"),
        (scores("{}"), "sent a dict of scores"),
        (scores("[1.0, NaN]"), "sent nan as score 1 of 2; scores must be finite"),
        (scores("[1e999, 1.0]"), "sent inf as score 0"),
        (scores("[1e300, 1.0]"), "sent 1e\\+300 as score 0"),
        (scores(f"[1.0, {10**400}]"), "as score 1"),
        (scores("[1.0, null]"), "sent None as score 1"),
        (scores('[1.0, "2.0"]'), "sent '2.0' as score 1"),
        (scores("[1.0, true]"), "sent True as score 1"),
        (marked("[1.0, NaN]", "[false, true]"), "sent nan as score 1 of 2; scores must be finite, or marked invalid"),
        (marked("[1.0, null]", "[false, false]"), "sent None as score 1 of 2"),
        (marked("[1.0, 2.0]", "[false, true]"), "marks sample 1 of 2 invalid, yet sends a score"),
        (marked("[1.0, null]", "[true]"), r"sent \[True\] as invalid marks for 2 pictures"),
        (marked("[1.0, null]", "[0, 1]"), r"sent \[0, 1\] as invalid marks"),
        (marked("[1.0, null]", '"NaN"'), "sent 'NaN' as invalid marks"),
        (lambda name: " " * 100_000, "answer is larger than"),
        (raw(401), "401.*token"),
        (raw(404, b"not here"), "refuses: status 404"),
        (raw(307, Location="http://127.0.0.1:1/"), "refuses: status 307"),
        (
            raw(422, b'{"error": {"code": "reward_refused", "message": "no quoted text", "retry": false}}'),
            "reward_refused: no quoted",
        ),
        (raw(500, b'{"error": {"code": "reward_broken", "message": "not finite", "retry": false}}'), "reward_broken: not finite"),
    ],
)
def test_faults_that_stay_are_one_error_at_once(fault, message):
    with scripted(fault) as (url, counts), pytest.raises(RewardError, match=message):
        RemoteReward(url, backoff=0.01).score(torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2)
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "sends no components"),
        ({"parts": "{}", "weights": "{}"}, "sends no components"),
        ({"parts": "[1]", "weights": "{}"}, "sends no components"),
        ({"parts": '{"a": [1.0]}', "weights": '{"a": 1}'}, "sent 1 'a' components for 2 pictures"),
        ({"parts": '{"a": [1.0, null]}', "weights": '{"a": 1}'}, "sent None as 'a' component 1"),
        ({"parts": '{"a": [1.0, NaN]}', "weights": '{"a": 1}'}, "sent nan as 'a' component 1"),
        ({"parts": '{"a": [1.0, 2.0]}', "weights": '{"b": 1}'}, "as the weights of the components a"),
        ({"parts": '{"a": [1.0, 2.0]}', "weights": '{"a": NaN}'}, "as the weights of the components a"),
        ({"parts": '{"a": [1.0, 2.0]}'}, "sent None as the weights"),
        ({"parts": f'{{"{"a" * 90_000}": [1.0, 2.0]}}'}, "answer is larger than"),
    ],
)
def test_components_that_are_garbage(more, message):
    with scripted(marked("[1.0, 2.0]", "[false, false]", **more)) as (url, counts), pytest.raises(RewardError, match=message):
        RemoteSum(url, backoff=0.01).parts(torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2)
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
        began = time.monotonic()
        with pytest.raises(RewardError, match="too slowly"):
            RemoteReward(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5, retries=0).score(*numbered([1]))
        assert time.monotonic() - began < 3


NESTED = st.recursive(st.floats() | st.none() | st.booleans() | st.text(max_size=3), lambda x: st.lists(x, max_size=3))
MARKS = st.lists(st.booleans(), min_size=2, max_size=2) | NESTED


@settings(max_examples=150)
@given(st.binary(max_size=60) | st.tuples(NESTED | st.lists(st.floats(0, 1) | st.none(), min_size=2, max_size=2), MARKS))
def test_no_answer_crashes_the_client(answer_server, content):
    """Whatever a server answers: two numbers, NaN only where a typed mark says so, or a `RewardError`."""
    url, answers = answer_server
    answers.append(content)
    with contextlib.suppress(RewardError):
        found = RemoteReward(url, retries=0).score(torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2)
        marks = [False] * 2 if isinstance(content, bytes) or content[1] is None else content[1]
        assert found.shape == (2,) and found.isnan().tolist() == marks and not found.isinf().any()
    with contextlib.suppress(RewardError):
        RemoteSum(url, retries=0).parts(torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2)


@pytest.fixture(scope="module")
def answer_server():
    answers = []

    def step(name):
        content = answers[-1]
        if isinstance(content, bytes):
            return content.decode("latin-1")
        return json.dumps({"request": name, "scores": content[0], "invalid": content[1], "parts": {"a": content[0]}})

    with scripted(step) as (url, _):
        yield url, answers


def test_giving_up_is_one_error_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    images, prompts = numbered(range(40))
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"gave no scores in \d+ attempts over . seconds.*ConnectError.*resume the run"):
        RemoteReward(url, batch=4, deadline=1.0, backoff=0.05).score(images, prompts)
    assert time.monotonic() - began < 4
    with pytest.raises(RewardError, match="in 3 attempts"):
        RemoteReward(url, retries=2, backoff=0.01).score(images[:1], prompts[:1])


@pytest.mark.parametrize(
    "options",
    [
        {"url": "localhost:8000"}, {"url": "ftp://x"}, {"url": "http://user:word@x"}, {"images": "jpeg"}, {"batch": 0},
        {"concurrency": 0}, {"timeout": 0.0}, {"deadline": float("inf")}, {"retries": -1}, {"backoff": -1.0},
    ],
)  # fmt: skip
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=f"remote.{next(iter(options))}"):
        RemoteReward(**{"url": "http://localhost:1", **options})


# --- the command, and runs ------------------------------------------------------------------------------------------


def test_a_server_killed_in_mid_request_and_restarted(tmp_path):
    """SIGKILL while the reward computes; the same call ends with the right scores once the server is back."""
    server = bench.Server(tmp_path, seconds=60.0).start()
    results = []
    remote = RemoteReward(server.url, batch=2, token_file=str(tmp_path / "token"), backoff=0.05)
    client = threading.Thread(target=lambda: results.append(remote.score(*numbered(range(7)))))
    client.start()
    while server.metrics()["flowrl_reward_memory_bytes"] == 0:
        time.sleep(0.02)
    server.end(signal.SIGKILL)
    server.seconds = 0.0
    server.start()
    client.join(60)
    server.end()
    assert [found.tolist() for found in results] == [[float(n) for n in range(7)]]


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    from flowrl.cli import main

    (tmp_path / "reward.py").write_text(bench.REWARD)
    reward = f"{tmp_path / 'reward.py'}:Echo"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, message in (
            ([reward, "--port", port], "cannot listen at 127.0.0.1"),
            (["no-such-reward"], "unknown reward 'no-such-reward'"),
            ([reward, "--port", "99999"], "port = 99999"),
            ([reward, "--token-file", str(tmp_path / "missing")], "token_file"),
            ([reward, "--tls-key", "key.pem"], "tls_key"),
            ([reward, "--max-samples", "0"], "samples = 0"),
        ):
            assert main(["serve-reward", *words]) == 2
            assert message in capsys.readouterr().err


def test_the_command_makes_a_token_where_others_can_connect(tmp_path):
    (tmp_path / "reward.py").write_text(bench.REWARD)
    words = ["serve-reward", f"{tmp_path / 'reward.py'}:Echo", "--port", "0", "--host", "0.0.0.0"]
    environment = {name: value for name, value in os.environ.items() if name != "FLOWRL_REWARD_TOKEN"}
    command = [sys.executable, "-m", "flowrl", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        token = process.stdout.readline().strip().partition("FLOWRL_REWARD_TOKEN=")[2]
        line = process.stdout.readline()
        url = f"http://127.0.0.1:{line.partition('0.0.0.0:')[2].partition(' ')[0]}"
        assert len(token) >= 40 and "a token is required" in line and token not in line
        refused(post(url, bench.good([1])), 401, "wrong_token")
        assert post(url, bench.good([1]), Authorization=f"Bearer {token}").json()["scores"] == [1.0]
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM)


def weights(folder):
    return (folder / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("world", "reward"),
    [("mixture", "flowrl.worlds.mixture:DirectionReward"), ("shapes", "flowrl.worlds.shapes.verifier:ShapesReward")],
)
def test_training_through_a_server_gives_the_same_numbers(world, reward, tmp_path):
    """In one piece; and, where it is quick, with the server gone in the middle and the run resumed when it is back."""
    from flowrl.training.config import preset
    from flowrl.training.run import Run

    task = "direction" if world == "mixture" else "compositional"

    def config(reward):
        return preset("tiny").apply(world=world, task=task, iterations=3, checkpoint_every=1, reward=reward)

    Run(config(reward), tmp_path / "local").execute()
    counted = Function(build("reward", reward).score)
    with served(counted, Settings(merge=False)) as (url, _):
        remote = config(f"remote(url='{url}', batch=512, retries=0)")
        Run(remote, tmp_path / "remote").execute()
    middle = len(counted.sizes) // 2
    assert middle > 3
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")
    if world == "shapes":
        return
    calls = iter(range(10**6))

    def dying(images, prompts):
        if next(calls) == middle:
            raise RuntimeError("the card is on fire")
        return counted.function(images, prompts)

    with served(Function(dying), Settings(merge=False)) as (url, _):
        broken = Run(config(f"remote(url='{url}', batch=512, retries=0)"), tmp_path / "broken")
        with pytest.raises(RewardError, match=r"the card is on fire.*resume the run"):
            broken.execute()
        assert (tmp_path / "broken" / "checkpoint").exists() and not (tmp_path / "broken" / "done.json").exists()
        assert broken.execute(resume=True)
    assert weights(tmp_path / "broken") == weights(tmp_path / "local")


def test_marks_and_components_in_a_run_through_a_server(tmp_path):
    """The same metrics, counts of invalid samples and components as in process, and the same weights."""
    from flowrl.training.config import preset
    from flowrl.training.trainer import Trainer

    def dark(images, prompts):
        values = images.flatten(1).mean(1)
        return torch.where(values < -0.8, torch.nan, values)

    def rows(reward):
        config = preset("tiny").apply(world="mixture", prompts=3, members=5, iterations=3)
        world = config.make_world()
        policy, prompts = world.policy(config.policy_options()), world.prompts("direction", "train")
        trainer = Trainer(policy, config.make_method(), reward, prompts, config)
        found = [trainer.iteration() for _ in range(3)]
        return [{k: v for k, v in row.items() if k not in ("seconds", "phases")} for row in found]

    own = build("reward", "flowrl.worlds.mixture:DirectionReward")
    local = WeightedSum({"task": own, "dark": marking(dark)}, {"dark": 0.5})
    with served(local, Settings(merge=False)) as (url, _):
        assert rows(RemoteSum(url, batch=512)) == (wanted := rows(local))
    assert sum(row["invalid"] for row in wanted) > 0 and set(wanted[0]["parts"]) == {"task", "dark"}


# --- the rest -------------------------------------------------------------------------------------------------------


def test_fuzzed_requests_do_no_harm(tmp_path):
    """The generator of benchmarks/reward_server.py, which sends 10,000."""
    (tmp_path / "echo.py").write_text(bench.REWARD)
    with served(build("reward", f"{tmp_path / 'echo.py'}:Echo"), Settings(token=bench.TOKEN)) as (url, state):
        seen = bench.fuzz(url, bench.TOKEN, 300)
        assert state.memory.used == 0 and state.health() == "ok"
    assert sum(seen.values()) == 300 and not any(status >= 500 for status in seen)
    assert {0, 200, 400, 413, 415, 422} <= set(seen), seen


def test_state_and_description():
    with served(Function(), Settings(name="echo", max_batch=2)) as (url, _):
        RemoteReward(url).score(torch.zeros(5, 3, 2, 2), [Prompt("p")] * 5)
        with httpx.Client(base_url=url, trust_env=False) as client:
            info = client.get("/v1/info").json()
            text = client.get("/metrics").text
            page = client.get("/docs")
            document = client.get("/openapi.json").json()
            refused(client.get("/v2/score"), 404, "no_such_endpoint")
            refused(client.get("/v1/score"), 405, "no_such_endpoint")
    assert info["reward"] == "echo" and info["limits"]["samples"] == 1024
    for line in ('requests_total{status="200"} 1', "samples_total 5", 'batch_samples_bucket{le="1"} 1', "batch_samples_count 3"):
        assert f"flowrl_reward_{line}\n" in text, text
    assert "POST /v1/score" in page.text and "ScoreAnswer" in page.text
    assert "<script" not in page.text and "http" not in page.text.replace("URL/v1", "").lower().replace("x-http", "")
    score = document["paths"]["/v1/score"]["post"]
    assert "multipart/form-data" in score["requestBody"]["content"] and set(score["responses"]) >= {"200", "401", "413", "504"}


def test_limits_are_checked():
    with pytest.raises(ConfigError, match=r"Limits\.samples = 0"):
        Limits(samples=0)
    with pytest.raises(ConfigError, match=r"Limits\.score_seconds"):
        Limits(score_seconds=float("inf"))
    with pytest.raises(ConfigError, match="max_batch"):
        Settings(max_batch=0)

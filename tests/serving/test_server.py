"""The reward server and its client: order, limits, tokens, and every way in which either side can
fail.
"""

import contextlib
import io
import json
import pickle
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import server_fuzz as fuzzing
import torch
from PIL import Image
from reward_serving import (
    Function,
    echo,
    marking,
    numbered,
    post,
    refused,
    scripted,
    served,
    unsure,
)
from safetensors.torch import save
from server_load import REWARD, TOKEN
from starlette.datastructures import Headers

from flowrl import Prompt
from flowrl.core.errors import ConfigError, RewardError
from flowrl.parts.registry import build
from flowrl.rewards import WeightedSum, component_methods
from flowrl.serving import Listener, ServerLimits, ServerSettings, serve
from flowrl.serving.client import RemoteReward, RemoteSum
from flowrl.serving.gate import AccessCheck, is_loopback
from flowrl.serving.request import RequestError
from flowrl.serving.wire_format import TransientError

# --- scores come back, exactly and in order
# -------------------------------------------------------------------------


def test_scores_equal_those_in_process():
    images = torch.rand(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    prompts = [Prompt(f"prompt {n}") for n in range(50)]
    with served(Function()) as (url, _):
        assert torch.equal(
            RemoteReward(url, batch=7).score(images, prompts), Function().score(images, prompts)
        )
        rounded = (images * 255).round() / 255
        assert torch.equal(
            RemoteReward(url, batch=7, images="png").score(images, prompts),
            Function().score(rounded, prompts),
        )
        grey = RemoteReward(url, images="png").score(images[:, :1], prompts)
        assert torch.equal(grey, rounded[:, 0].flatten(1).amax(1))
        assert RemoteReward(url).score(images[:0], []).shape == (0,)


def test_a_reward_by_name():
    """JPEG sees 8 bits, so that even PNG changes nothing."""
    reward = build("reward", "jpeg-compressibility")
    images, prompts = (
        torch.rand(9, 3, 32, 32, generator=torch.Generator().manual_seed(0)) ** 3,
        [Prompt("p")] * 9,
    )
    with served(reward) as (url, _):
        for kind in ("safetensors", "png"):
            assert torch.equal(
                build("reward", f"remote(url='{url}', batch=4, images={kind})").score(
                    images, prompts
                ),
                reward.score(images, prompts),
            )


def test_images_that_cannot_be_sent():
    with pytest.raises(RewardError, match="not finite"):
        RemoteReward("http://127.0.0.1:1").score(torch.full((1, 3, 2, 2), torch.nan), [Prompt("p")])
    with pytest.raises(RewardError, match="1 or 3 channels, got 4"):
        RemoteReward("http://127.0.0.1:1", images="png").score(
            torch.zeros(1, 4, 2, 2), [Prompt("p")]
        )
    with pytest.raises(RewardError, match="as many images as prompts"):
        RemoteReward("http://127.0.0.1:1").score(torch.zeros(2, 3, 2, 2), [Prompt("p")])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
def test_other_precisions_are_read(dtype):
    images = (torch.rand(2, 3, 4, 4) * (255 if dtype == torch.uint8 else 1)).to(dtype)
    wanted = images.float().flatten(1).amax(1) / (255 if dtype == torch.uint8 else 1)
    with served(Function()) as (url, _):
        answer = post(
            url,
            fuzzing.posted(
                [("prompts", fuzzing.listed([0, 1])), ("safetensors", save({"images": images}))]
            ),
        )
    assert answer.json()["scores"] == wanted.tolist()


def test_prompts_arrive_whole():
    @dataclass(frozen=True)
    class Request:
        words: tuple[str, ...] = ("two", "rot & grün", '\u2603 "quoted"\n')
        number: int = 2**70

    seen = []
    with served(
        Function(lambda images, prompts: (seen.extend(prompts), torch.zeros(len(prompts)))[1])
    ) as (url, _):
        RemoteReward(url).score(
            torch.zeros(1, 3, 2, 2),
            [Prompt("snöw\u2603\0", {"request": Request(), "x": [1.5, None, True]})],
        )
        with pytest.raises(
            RewardError, match=r"metadata\['a'\]\[1\] of prompt 'p' is nan .*cannot be sent"
        ):
            RemoteReward(url).score(
                torch.zeros(1, 3, 2, 2), [Prompt("p", {"a": (0.0, float("nan"))})]
            )
        with pytest.raises(RewardError, match="Tensor"):
            RemoteReward(url).score(torch.zeros(1, 3, 2, 2), [Prompt("p", {"a": torch.zeros(1)})])
    words = {"words": ["two", "rot & grün", '\u2603 "quoted"\n'], "number": 2**70}
    assert seen == [Prompt("snöw\u2603\0", {"request": words, "x": [1.5, None, True]})]


def test_concurrent_clients_lose_and_swap_nothing():
    """Twelve clients, two image sizes, one pool each; every score encodes its sample."""
    reward = Function(echo)
    with served(reward, ServerSettings(max_batch=16)) as (url, state):
        wrong, done = [], []

        def work(client):
            remote = RemoteReward(url, batch=3, concurrency=2)
            for turn in range(12):
                numbers = [client * 1000 + turn * 20 + i for i in range(1 + (client + turn) % 9)]
                images = torch.cat(
                    [fuzzing.numbered_image(n, 2, 2 + 2 * (client % 2)) for n in numbers]
                )
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
    assert max(reward.sizes) <= 16 and len(reward.sizes) < len(done) / 3, (
        "requests did not share calls"
    )


def test_without_merging_every_request_has_calls_of_its_own():
    reward = Function(echo)
    with served(reward, ServerSettings(merge=False, max_batch=4)) as (url, _):
        threads = [
            threading.Thread(target=RemoteReward(url, batch=6).score, args=numbered(range(6)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert reward.sizes == [4, 2] * 4


def test_an_error_reaches_only_the_request_that_causes_it(caplog):
    """A prompt that the reward refuses shares a call with others."""

    def picky(images, prompts):
        if any("sample" not in prompt.metadata for prompt in prompts):
            raise RewardError("a prompt has no number")
        return echo(images, prompts)

    reward, outcomes = Function(picky), {}
    with served(reward, ServerSettings(wait=0.5)) as (url, _):

        def work(client):
            images, prompts = numbered([client])
            try:
                outcomes[client] = (
                    RemoteReward(url)
                    .score(images, [Prompt("bad")] if client == 2 else prompts)
                    .tolist()
                )
            except RewardError as error:
                outcomes[client] = str(error)

        threads = [threading.Thread(target=work, args=(client,)) for client in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(reward.sizes) > 1
    assert "reward_refused" in outcomes.pop(2) and "a prompt has no number" in caplog.text
    assert outcomes == {0: [0.0], 1: [1.0], 3: [3.0]}


def test_marks_travel_beside_the_scores():
    wanted = [float("nan") if n % 3 == 0 else float(n) for n in range(10)]
    with served(marking(unsure)) as (url, _):
        remote = RemoteReward(url, batch=4)
        assert remote.marks_invalid and remote.score(
            *numbered(range(10))
        ).tolist() == pytest.approx(wanted, nan_ok=True)
        body = post(url, fuzzing.good([2, 3])).json()
        assert (body["scores"], body["invalid"]) == ([2.0, None], [False, True])
        assert (
            "flowrl_reward_invalid_total 5.0\n" in httpx.get(url + "/metrics", trust_env=False).text
        )
    with served(Function(echo)) as (url, _):
        assert post(url, fuzzing.good([2, 3])).json()["invalid"] == [False, False]
    with served(Function(unsure)) as (url, _):
        refused(post(url, fuzzing.good([2, 3])), 500, "reward_broken")
    with served(marking(lambda images, prompts: torch.full((2,), torch.inf))) as (url, _):
        refused(post(url, fuzzing.good([2, 3])), 500, "reward_broken")


def test_components_of_a_weighted_sum_travel():
    """Parts and total have the bits that they have in process; a sample that one component marks is
    marked.
    """
    plain = WeightedSum(
        {"a": Function(), "b": build("reward", "jpeg-compressibility")}, {"b": -0.3}
    )
    images, prompts = (
        torch.rand(9, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
        [Prompt("p")] * 9,
    )
    with served(plain) as (url, _):
        remote = build("reward", f"remote-sum(url='{url}', batch=4)")
        assert component_methods(remote) and not component_methods(RemoteReward(url))
        with pytest.raises(RewardError, match="components a; the server has none yet"):
            remote.total({"a": torch.zeros(1)})
        parts, wanted = remote.parts(images, prompts), plain.parts(images, prompts)
        assert list(parts) == ["a", "b"] and all(
            torch.equal(parts[name], wanted[name]) for name in parts
        )
        assert torch.equal(remote.total(parts), plain.score(images, prompts))
        assert torch.equal(remote.score(images, prompts), plain.score(images, prompts))
        assert httpx.get(url + "/v1/info", trust_env=False).json()["components"] == {
            "a": 1.0,
            "b": -0.3,
        }
        assert set(post(url, fuzzing.good([1])).json()) == {"request", "scores", "invalid"}
    with served(WeightedSum({"a": Function(echo), "b": marking(unsure)})) as (url, _):
        parts = RemoteSum(url).parts(*numbered([1, 3]))
        assert parts["a"].tolist() == [1.0, 3.0] and parts["b"].isnan().tolist() == [False, True]
        assert RemoteSum(url).score(*numbered([1, 3])).isnan().tolist() == [False, True]
    with served(Function()) as (url, _):
        with pytest.raises(
            RewardError,
            match=r"no_parts: this reward has no components.*remote instead of remote-sum",
        ):
            RemoteSum(url).parts(images, prompts)
        for words in ("parts=maybe", "parts="):
            refused(
                post(url, replace(fuzzing.good([1]), path=f"/v1/score?{words}")), 422, "bad_query"
            )


def test_weights_that_change_are_an_error():
    """A server that was started again with others would change the reward in the middle of a
    run.
    """
    images, prompts = numbered([1, 2])

    def answer(weight):
        return lambda name: json.dumps(
            {
                "request": name,
                "scores": [1.0, 2.0],
                "invalid": [False] * 2,
                "parts": {"a": [1, 2]},
                "weights": {"a": weight},
            }
        )

    with scripted(answer(1.0), answer(1.0), answer(2.0)) as (url, _):
        remote = RemoteSum(url)
        for _ in range(2):
            assert remote.total(remote.parts(images, prompts)).tolist() == [1.0, 2.0]
        with pytest.raises(
            RewardError, match=r"the weights at .* were {'a': 1.0}, and are {'a': 2.0} now"
        ):
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
        assert again == remote and again.score(torch.ones(1, 3, 2, 2), [Prompt("p")]).tolist() == [
            1.0
        ]


# --- who may ask
# --------------------------------------------------------------------------------------------------


def test_token(tmp_path, monkeypatch):
    monkeypatch.delenv("FLOWRL_REWARD_TOKEN", raising=False)
    (tmp_path / "token").write_text(" gehéim \n")
    images, prompts = numbered([5])
    with served(Function(), ServerSettings(token="gehéim")) as (url, _):
        fine = fuzzing.good([5])
        for given_token in (
            "",
            "Bearer",
            "Bearer x",
            "Basic geheim",
            "Bearer geheim2",
            "bearer\tgeheim",
        ):
            answer = post(url, fine, Authorization=given_token)
            refused(answer, 401, "wrong_token")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/v1/info", "/metrics", "/docs", "/openapi.json", "/other"):
            refused(httpx.get(url + path, trust_env=False), 401, "wrong_token")
        assert httpx.get(url + "/health", trust_env=False).json() == {"status": "ok"}
        began = time.monotonic()
        with pytest.raises(
            RewardError, match=r"401, wrong_token.*set FLOWRL_REWARD_TOKEN or token_file"
        ):
            RemoteReward(url).score(images, prompts)
        assert time.monotonic() - began < 5, "a wrong token must not be tried again"


def test_token_from_file_or_environment(tmp_path, monkeypatch):
    images, prompts = numbered([5])
    (tmp_path / "token").write_text(" secret \n")
    with served(Function(echo), ServerSettings(token="secret")) as (url, _):
        remote = RemoteReward(url, token_file=str(tmp_path / "token"))
        assert remote.score(images, prompts).tolist() == [5.0]
        assert "secret" not in repr(remote)
        monkeypatch.setenv("FLOWRL_REWARD_TOKEN", "secret")
        assert RemoteReward(url).score(images, prompts).tolist() == [5.0]
        with pytest.raises(ConfigError, match="token_file"):
            RemoteReward(url, token_file=str(tmp_path / "missing")).score(images, prompts)
    assert "secret" not in repr(ServerSettings(token="secret"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https(tmp_path):
    with served(Function(echo), ServerSettings(token="x" * 20), *certificate(tmp_path)) as (url, _):
        url = url.replace("http", "https")
        (tmp_path / "token").write_text("x" * 20)
        remote = RemoteReward(
            url, token_file=str(tmp_path / "token"), certificate=str(tmp_path / "cert"), retries=0
        )
        assert remote.score(*numbered([5])).tolist() == [5.0]
        # at once
        with pytest.raises(
            RewardError, match=r"is not trusted .*certificate verify failed.*certificate='ca.pem'"
        ):
            RemoteReward(url, token_file=str(tmp_path / "token")).score(*numbered([5]))
        with pytest.raises(ConfigError, match=r"remote\.certificate"):
            RemoteReward(url, certificate=str(tmp_path / "missing")).score(*numbered([5]))
        began = time.monotonic()
    assert time.monotonic() - began < 10, "a server that ends waits for an idle client"
    remote.close()


def test_tokens_are_compared_in_constant_time(monkeypatch):
    import hmac

    def check(header):
        AccessCheck(ServerSettings(token="right")).check(Headers({"Authorization": header}))

    compared, real = [], hmac.compare_digest
    monkeypatch.setattr(
        hmac, "compare_digest", lambda a, b: (compared.append((a, b)), real(a, b))[1]
    )
    check("Bearer right")
    with pytest.raises(RequestError):
        check("Bearer wrong and much longer")
    assert len(compared) == 2 and all(len(a) == len(b) == 32 for a, b in compared)


def test_without_a_token_only_the_loopback_is_served():
    """By address, and by name: a web page whose name was rebound to 127.0.0.1 is refused."""
    with served(Function()) as (url, _):
        for host in (
            "127.0.0.1:80",
            "localhost",
            "LOCALHOST:1",
            "[::1]:8000",
            "[::1]",
            "127.3.2.1:8000",
        ):
            assert post(url, fuzzing.good([1]), Host=host).status_code == 200, host
        for host in (
            "attacker.example",
            "attacker.example:80",
            "127.0.0.1.attacker.example",
            "localhost.evil:1",
            "192.168.0.1",
        ):
            for path in ("/v1/score", "/v1/info", "/metrics", "/docs", "/openapi.json", "/other"):
                refused(
                    post(url, replace(fuzzing.good([1]), path=path), Host=host), 421, "wrong_host"
                )
        for host in (
            "localhost/x",
            "me@localhost",
            "localhost:x",
            "[::1",
            "",
            "localhost localhost",
        ):
            refused(post(url, fuzzing.good([1]), Host=host), 421, "wrong_host")
    with served(Function(), ServerSettings(any_host=True, names=("GPU.example.org",))) as (url, _):
        for host in (
            "192.168.0.1:80",
            "gpu.example.org:80",
            "reward",
            "[fe80::1]:80",
            socket.gethostname(),
        ):
            assert post(url, fuzzing.good([1]), Host=host).status_code == 200, host
        refused(post(url, fuzzing.good([1]), Host="attacker.example"), 421, "wrong_host")
    with served(Function(), ServerSettings(token="x")) as (url, _):
        assert (
            post(url, fuzzing.good([1]), Host="any.example", Authorization="Bearer x").status_code
            == 200
        )
    with (
        socket.create_server(("0.0.0.0", 0)) as open_to_all,
        pytest.raises(ConfigError, match="token"),
    ):
        serve(Function(), ServerSettings(), Listener(open_to_all, "0.0.0.0"))
    assert [
        is_loopback(host)
        for host in ("127.3.2.1", "::1", "localhost", "0.0.0.0", "", "example.org")
    ] == [True] * 3 + [False] * 3


def test_web_pages_are_refused_without_a_token():
    """A form or a fetch of any page can post to the loopback; browsers say so in headers that pages
    cannot set.
    """
    fine, reward = fuzzing.good([1]), Function()
    with served(reward) as (url, _):
        pages = [
            {"Origin": origin}
            for origin in (
                "https://attacker.example",
                "null",
                "http://localhost:1",
                "x",
                "http://[",
            )
        ]
        pages += [{"Sec-Fetch-Site": site} for site in ("cross-site", "same-site", "unheard-of")]
        for headers in pages:
            refused(post(url, fine, **headers), 403, "web_page")
            for path in ("/v1/info", "/metrics", "/docs", "/openapi.json", "/other"):
                refused(httpx.get(url + path, headers=headers, trust_env=False), 403, "web_page")
        refused(post(url, replace(fine, method="OPTIONS"), Origin="null"), 403, "web_page")
        assert reward.sizes == []
        for headers in (
            {"Origin": url},
            {"Sec-Fetch-Site": "none"},
            {"Sec-Fetch-Site": "same-origin"},
        ):
            assert post(url, fine, **headers).status_code == 200
    with served(Function(), ServerSettings(any_host=True)) as (url, _):
        refused(post(url, fine, Origin="https://attacker.example"), 403, "web_page")
    with served(Function(), ServerSettings(token="x")) as (url, _):
        assert (
            post(url, fine, Origin="https://page.example", Authorization="Bearer x").status_code
            == 200
        )


def test_a_request_with_two_lengths_is_refused(module_server):
    """A proxy in front might see another end of the body, and take its rest for a second
    request.
    """
    second = b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for path in ("/v1/score", "/health"):
        for body in (b"5\r\nhello\r\n0\r\n\r\n" + second, b"0\r\n\r\n" + second, b""):
            head = (
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length:"
                " 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            address = ("127.0.0.1", int(module_server[0].rpartition(":")[2]))
            with socket.create_connection(address, timeout=5) as connection:
                connection.sendall(head.encode() + body)
                received = b"".join(iter(lambda: connection.recv(4096), b""))
            assert received.startswith(b"HTTP/1.1 400") and b"two_lengths" in received, received
            assert received.count(b"HTTP/1.1") == 1, "the rest of the body was served"


# --- limits
# --------------------------------------------------------------------------------------------------


def png(width, height, mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG", **options)
    return file.getvalue()


def test_sizes_are_limited():
    limits = ServerLimits(
        body_bytes=200_000, samples=3, pixels=10_000, prompts_bytes=2000, memory_bytes=300_000
    )
    reward = Function()
    with served(reward, ServerSettings(limits=limits)) as (url, state):
        fine = fuzzing.good([1])
        big = b"x" * 300_000
        refused(
            post(url, fuzzing.posted([("prompts", b"[]"), ("safetensors", big)])),
            413,
            "body_too_large",
        )
        with httpx.Client(base_url=url, trust_env=False) as client:
            body = fuzzing.posted([("prompts", b"[]"), ("safetensors", big)]).body
            chunked = client.post(
                "/v1/score", content=iter([body[:150], body[150:]]), headers=fine.headers
            )
            refused(chunked, 413, "body_too_large")
        refused(post(url, fuzzing.good([1, 2, 3, 4])), 413, "too_many_samples")
        refused(post(url, fuzzing.posted([("prompts", b" " * 3000)])), 413, "part_too_large")
        one = ("prompts", fuzzing.listed([1]))
        refused(post(url, fuzzing.posted([one, ("png", png(101, 100))])), 413, "too_many_pixels")
        refused(post(url, fuzzing.posted([one, *[("png", png(9, 9))] * 4])), 413, "too_many_parts")
        large = [("prompts", fuzzing.listed([1, 2, 3])), *[("png", png(100, 100))] * 3]
        refused(post(url, fuzzing.posted(large)), 413, "too_much_memory")
        assert reward.sizes == []
        assert post(url, fine).json()["scores"] == [1 / 2**24]
        assert state.memory.used == 0
        state.memory.reserve(299_900)
        assert refused(post(url, fine), 503, "busy")
        state.memory.release(299_900)
        with pytest.raises(RewardError, match=r"413, too_many_samples.*lower remote's batch"):
            RemoteReward(url).score(torch.zeros(4, 3, 2, 2), [Prompt("p")] * 4)


def test_a_small_file_that_decodes_to_a_large_image_is_refused_before_decoding():
    bomb = png(4200, 4200, "L")
    assert len(bomb) < 600_000
    with served(Function()) as (url, _):
        began = time.monotonic()
        refused(
            post(url, fuzzing.posted([("prompts", fuzzing.listed([1])), ("png", bomb)])),
            413,
            "too_many_pixels",
        )
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
        ([("prompts", fuzzing.listed([1, 2])), ("png", png(2, 2))], 422, "wrong_count"),
        ([("prompts", fuzzing.listed([1])), ("png", png(2, 2)[:-20])], 422, "bad_images"),
        ([("prompts", fuzzing.listed([1])), ("png", b"GIF89a")], 422, "bad_images"),
        ([("prompts", fuzzing.listed([1])), ("png", png(2, 2, "RGBA"))], 422, "bad_images"),
        ([("prompts", fuzzing.listed([1])), ("png", png(2, 2, "I;16"))], 422, "bad_images"),
        (
            [("prompts", fuzzing.listed([1, 2])), ("png", png(2, 2)), ("png", png(2, 3))],
            422,
            "bad_images",
        ),
        (
            [
                ("prompts", fuzzing.listed([1])),
                ("safetensors", save({"images": torch.zeros(3, 4, 4)})),
            ],
            422,
            "bad_images",
        ),
        (
            [
                ("prompts", fuzzing.listed([1])),
                ("safetensors", save({"images": torch.full((1, 3, 2, 2), torch.nan)})),
            ],
            422,
            "bad_images",
        ),
        (
            [
                ("prompts", fuzzing.listed([1])),
                ("safetensors", save({"images": torch.zeros(1, 3, 2, 2).long()})),
            ],
            422,
            "bad_images",
        ),
        (
            [
                ("prompts", fuzzing.listed([1])),
                ("safetensors", save({"other": torch.zeros(1, 3, 2, 2)})),
            ],
            422,
            "bad_safetensors",
        ),
        (
            [
                ("prompts", fuzzing.listed([1])),
                ("png", png(2, 2)),
                ("safetensors", save({"images": torch.zeros(1)})),
            ],
            422,
            "no_images",
        ),
        ([("pickle", b"")], 400, "unknown_part"),
    ],
)
def test_what_cannot_be_read_is_refused(parts, status, code, module_server):
    refused(post(module_server[0], fuzzing.posted(parts)), status, code)


@pytest.fixture(scope="module")
def module_server():
    with served(Function(lambda images, prompts: torch.zeros(len(prompts)))) as found:
        yield found


def test_what_is_no_png_is_told_so(module_server):
    answer = post(
        module_server[0], fuzzing.posted([("prompts", b'[{"text": "a"}]'), ("png", b"GIF89a")])
    )
    assert b"png 0 cannot be read: it is no PNG" in answer.content


def test_nothing_is_unpickled(module_server, tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    torch_file = io.BytesIO()
    torch.save({"images": Attack()}, torch_file)
    for data in (pickle.dumps(Attack()), torch_file.getvalue()):
        for name in ("safetensors", "png"):
            answer = post(
                module_server[0], fuzzing.posted([("prompts", fuzzing.listed([1])), (name, data)])
            )
            assert answer.status_code == 422
    assert not (tmp_path / "owned").exists()


def test_time_is_limited():
    limits = ServerLimits(header_seconds=0.3, body_seconds=0.4, score_seconds=0.3)
    release = threading.Event()
    with served(
        Function(lambda images, prompts: (release.wait(20), echo(images, prompts))[1]),
        ServerSettings(limits=limits),
    ) as (
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
        fine = fuzzing.good([1])
        head = (
            "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
            f" {fine.headers['Content-Type']}\r\n"
        )
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


def test_silent_connections_do_not_keep_others_out():
    """Many more connections than allowed, silent before, within or after a request; a request
    underway is never given up.
    """
    release, entered = threading.Event(), threading.Event()
    reward = Function(
        lambda images, prompts: (entered.set(), release.wait(20), echo(images, prompts))[2]
    )
    openings = (
        b"",
        b"POST /v1/score HTTP/1.1\r\nHost: localh",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    )
    with (
        served(reward, ServerSettings(limits=ServerLimits(connections=10))) as (url, _),
        contextlib.ExitStack() as stack,
    ):
        outcomes, connections = [], []
        first = threading.Thread(
            target=lambda: outcomes.append(post(url, fuzzing.good([1])).json()["scores"])
        )
        first.start()
        assert entered.wait(10)
        for number in range(60):
            silent = stack.enter_context(
                socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5)
            )
            silent.sendall(openings[number % 3])
            connections.append(silent)
        began = time.monotonic()
        assert httpx.get(url + "/health", trust_env=False).json() == {"status": "ok"}
        assert time.monotonic() - began < 5
        assert httpx.get(url + "/v1/info", trust_env=False).status_code == 200
        assert sum(map(is_open, connections)) < 10
        release.set()
        first.join()
    assert outcomes == [[1.0]]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
@pytest.mark.parametrize("limits", [ServerLimits(connections=10), ServerLimits(header_seconds=0.5)])
def test_handshakes_that_never_end_do_not_keep_others_out(limits, tmp_path, capfd):
    """Many connections to a server with TLS that are silent, amid the handshake, or no TLS at all:
    its limits count for all.
    """
    files = certificate(tmp_path)
    hello = handshake()
    openings = (b"", hello[: len(hello) // 2], hello, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with (
        served(Function(echo), ServerSettings(limits=limits), *files) as (url, _),
        contextlib.ExitStack() as stack,
    ):
        connections = []
        for number in range(60):
            silent = stack.enter_context(
                socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5)
            )
            silent.sendall(openings[number % 4])
            connections.append(silent)
        began = time.monotonic()
        with httpx.Client(
            verify=ssl.create_default_context(cafile=files[0]), trust_env=False
        ) as client:
            for _ in range(2):
                assert client.get(url.replace("http", "https") + "/health").json() == {
                    "status": "ok"
                }
        assert time.monotonic() - began < 5
        end = time.monotonic() + 10
        while sum(map(is_open, connections)) >= 10 and time.monotonic() < end:
            time.sleep(0.05)
        assert sum(map(is_open, connections)) < 10
    assert capfd.readouterr().err == ""


def certificate(folder):
    """Paths of a certificate for 127.0.0.1 and of its key."""
    words = (
        "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=here -addext"
        " subjectAltName=IP:127.0.0.1 -keyout key -out cert"
    )
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
    return folder / "cert", folder / "key"


def handshake():
    """The first message of a TLS client."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(
            ssl.MemoryBIO(), sent, server_hostname="localhost"
        ).do_handshake()
    return sent.read()


def test_requests_at_one_time_are_limited_and_health_is_not():
    release = threading.Event()
    reward = Function(lambda images, prompts: (release.wait(20), echo(images, prompts))[1])
    with served(reward, ServerSettings(limits=ServerLimits(connections=2))) as (url, state):
        waiting = [threading.Thread(target=post, args=(url, fuzzing.good([n]))) for n in range(2)]
        for thread in waiting:
            thread.start()
        end = time.monotonic() + 10
        while state.memory.used < 2 * 64 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        answer = post(url, fuzzing.good([3]))
        refused(answer, 503, "busy")
        assert (
            answer.json()["error"]["retry"]
            and httpx.get(url + "/health", trust_env=False).status_code == 200
        )
        release.set()
        for thread in waiting:
            thread.join()
        assert post(url, fuzzing.good([3])).status_code == 200


def test_bodies_that_are_no_http_end_quietly(capsys):
    """The application must not try to answer a connection that is over."""
    head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    form = head.replace(b"Host", b"Content-Type: multipart/form-data; boundary=x\r\nHost")
    with served(Function()) as (url, state):
        for data in (
            head + b"zz\r\n",
            form + b"zz\r\n",
            form + b"3\r\n--x\r\nnonsense\r\n",
            head + b"0\r\n\r\n\x00\r\n\r\n",
        ):
            with socket.create_connection(
                ("127.0.0.1", int(url.rpartition(":")[2])), timeout=5
            ) as connection:
                connection.sendall(data)
                assert connection.recv(4096).startswith(b"HTTP/1.1 4")
        assert post(url, fuzzing.good([1])).status_code == 200
        assert state.memory.used == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_queue_refuses_and_clients_that_leave_are_not_scored():
    release, entered = threading.Event(), threading.Event()
    reward = Function(
        lambda images, prompts: (entered.set(), release.wait(20), echo(images, prompts))[2]
    )
    with served(reward, ServerSettings(merge=False, limits=ServerLimits(queue=2))) as (url, state):
        outcomes = []
        first = threading.Thread(
            target=lambda: outcomes.append(post(url, fuzzing.good([1])).status_code)
        )
        first.start()
        assert entered.wait(10)
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as leaver:
            fine = fuzzing.good([7, 8])
            head = (
                "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
                f" {fine.headers['Content-Type']}\r\n"
            )
            leaver.sendall(f"{head}Content-Length: {len(fine.body)}\r\n\r\n".encode() + fine.body)
            while state.batcher.waiting < 2:
                time.sleep(0.01)
            answer = post(url, fuzzing.good([2]))
            refused(answer, 503, "busy")
            assert answer.headers["Retry-After"] == "1"
        time.sleep(0.3)
        release.set()
        first.join()
        assert post(url, fuzzing.good([3])).json()["scores"] == [3.0]
    assert outcomes == [200]
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
        (
            lambda images, prompts: torch.full((len(prompts),), torch.nan),
            "reward_broken",
            "2 of 2 values that are not finite",
        ),
        (
            lambda images, prompts: torch.zeros(len(prompts) + 1),
            "reward_broken",
            r"returned shape \(3,\) for 2 images",
        ),
        (
            lambda images, prompts: torch.zeros(len(prompts), 1),
            "reward_broken",
            r"returned shape \(2, 1\)",
        ),
        (lambda images, prompts: [0.0] * len(prompts), "reward_broken", "returned a list"),
        (lambda images, prompts: sys.exit(SECRET), "reward_failed", SECRET),
        (lambda images, prompts: prompts[0].metadata[SECRET], "reward_failed", SECRET),
        (raising(RewardError(SECRET)).score, "reward_refused", SECRET),
        (raising(ConfigError(SECRET)).score, "reward_refused", SECRET),
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
        assert "the server's log has the reason under request request-7" in message
        assert "secret" not in answer.text and len(answer.content) < 250
        assert re.search(f"request request-7: .*{logged}", caplog.text, re.DOTALL)
        caplog.clear()
        with pytest.raises(
            RewardError, match=rf"refuses: status \d+, {code}: .*under request (\w+)"
        ) as error:
            RemoteReward(url, backoff=0.01).score(*numbered([1, 2]))
        assert str(error.value).rpartition(" ")[2] in caplog.text
        assert state.health() == "ok"


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (ValueError("a side of 7 pixels"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (AssertionError(), False),
        (FileNotFoundError("weights"), False),
        (caused(ConfigError("no folder with a model"), OSError("offline")), False),
        (RewardError("no such class"), False),
        (ConnectionResetError("database"), True),
        (TimeoutError(), True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            caused(
                RewardError("judge: no answer"), TransientError("no response within 60 seconds")
            ),
            True,
        ),
        (caused(RuntimeError("lookup failed"), BrokenPipeError()), True),
        (own_cause := RuntimeError("again"), False),
    ],
    ids=repr,
)
def test_only_failures_that_may_pass_are_to_be_retried(error, retry):
    own_cause.__cause__ = own_cause
    with served(raising(error)) as (url, _):
        assert post(url, fuzzing.good([1])).json()["error"]["retry"] is retry


# --- the rest
# --------------------------------------------------------------------------------------------------


def test_fuzzed_requests_do_no_harm(tmp_path):
    """The generator of benchmarks/reward_server.py, which sends 10,000."""
    (tmp_path / "echo.py").write_text(REWARD)
    with served(build("reward", f"{tmp_path / 'echo.py'}:Echo"), ServerSettings(token=TOKEN)) as (
        url,
        state,
    ):
        seen = fuzzing.fuzz(url, TOKEN, 300)
        end = time.monotonic() + 10
        # the last connection may still be closing
        while state.memory.used and time.monotonic() < end:
            time.sleep(0.01)
        assert state.memory.used == 0 and state.health() == "ok"
    assert sum(seen.values()) == 300 and not any(status >= 500 for status in seen)
    # Hypothesis also draws constants of whatever modules are loaded
    refusals = {status for status in seen if status >= 400}
    assert {0, 200} <= set(seen) and len(refusals) >= 3, seen


def test_state_and_description():
    with served(Function(), ServerSettings(name="echo<script>", max_batch=2)) as (url, _):
        RemoteReward(url).score(torch.zeros(5, 3, 2, 2), [Prompt("p")] * 5)
        with httpx.Client(base_url=url, trust_env=False) as client:
            info = client.get("/v1/info").json()
            text = client.get("/metrics").text
            page = client.get("/docs")
            document = client.get("/openapi.json").json()
            refused(client.get("/v2/score"), 404, "no_such_endpoint")
            refused(client.get("/v1/score"), 405, "no_such_endpoint")
    assert info["reward"] == "echo<script>" and info["limits"]["samples"] == 1024
    for line in (
        'requests_total{status="200"} 1.0',
        "samples_total 5.0",
        'batch_samples_bucket{le="1.0"} 1.0',
        "batch_samples_count 3.0",
    ):
        assert f"flowrl_reward_{line}\n" in text, text
    assert "echo" not in page.text and "echo" not in json.dumps(document), (
        "the description names the reward"
    )
    assert "POST /v1/score" in page.text and "ScoreResponse" in page.text
    assert "<script" not in page.text and "http" not in page.text.replace(
        "URL/v1", ""
    ).lower().replace("x-http", "")
    score = document["paths"]["/v1/score"]["post"]
    assert "multipart/form-data" in score["requestBody"]["content"] and set(score["responses"]) >= {
        "200",
        "401",
        "413",
        "504",
    }


def test_limits_are_checked():
    with pytest.raises(ConfigError, match=r"ServerLimits\.samples = 0"):
        ServerLimits(samples=0)
    with pytest.raises(ConfigError, match=r"ServerLimits\.score_seconds"):
        ServerLimits(score_seconds=float("inf"))
    with pytest.raises(ConfigError, match="max_batch"):
        ServerSettings(max_batch=0)

"""The command `flowrl serve-reward`, and runs whose reward is behind a server."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import server_fuzz as fuzzing
import torch
from reward_serving import Function, marking, numbered, post, refused, served
from server_load import REWARD, Server

from flowrl.core.errors import RewardError
from flowrl.parts.registry import build
from flowrl.rewards import WeightedSum
from flowrl.serving import ServerSettings
from flowrl.serving.client import RemoteReward, RemoteSum
from flowrl.training.build import make_method, make_world, policy_options


@pytest.mark.slow
def test_a_server_killed_in_mid_request_and_restarted(tmp_path):
    """SIGKILL while the reward computes; the same call ends with the right scores once the server
    is back.
    """
    server = Server(tmp_path, seconds=60.0).start()
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


def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    from flowrl.cli.main import main

    # nothing may get so far
    monkeypatch.setattr("flowrl.serving.uvicorn_server.serve", lambda *_: None)

    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"{tmp_path / 'reward.py'}:Echo"
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    score = print\n    def load(self): raise OSError('no card')\n"
    )
    tls, broken = (
        ["--tls-certificate", str(tmp_path / "empty"), "--tls-key"],
        f"{tmp_path / 'broken.py'}:Broken",
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, message in (
            ([reward, "--port", port], "cannot listen at 127.0.0.1"),
            (
                [reward, "--port", port, "--host", "no-such-host.invalid"],
                "host, port: cannot listen at no-such-host.invalid",
            ),
            ([reward, "--port", port, "--host", "a" * 300], "host, port: cannot listen"),
            ([reward, "--host", ""], "host = ''"),
            (["no-such-reward", "--port", "0"], "unknown reward 'no-such-reward'"),
            ([reward, "--port", "99999"], "port = 99999"),
            ([reward, "--port", "-1"], "port = -1"),
            ([reward, "--token-file", str(tmp_path / "missing")], "token_file: "),
            ([reward, "--token-file", str(tmp_path)], "token_file: "),
            ([reward, "--token-file", str(tmp_path / "empty")], "token_file = "),
            ([reward, "--no-token", "--token-file", "x"], "token_file = 'x'"),
            ([reward, "--tls-key", "key.pem"], "tls_key = 'key.pem'"),
            ([reward, *tls, str(tmp_path / "missing")], "tls_certificate, tls_key: "),
            ([reward, *tls, str(tmp_path / "empty")], "tls_certificate, tls_key: "),
            ([reward, "--max-samples", "-1"], "max_samples = -1 is"),
            ([reward, "--max-body", "0"], "max_body = 0 is"),
            ([reward, "--max-memory", "-5"], "max_memory = -5 is"),
            ([reward, "--max-batch", "0"], "max_batch = 0 is"),
            ([reward, "--score-seconds", "nan"], "score_seconds = nan is"),
            ([reward, "--wait", "inf"], "wait = inf is"),
            (["pickscore(model='no-such-folder')", "--port", "0"], "no-such-folder"),
            (
                ["clipped(reward='clipscore(model=\"no-such-folder\")', high=1.0)", "--port", "0"],
                "no-such-folder",
            ),
            (
                ["weighted-sum(models={'a': 'hpsv2.1(model=\"no-such-folder\")'})", "--port", "0"],
                "no-such-folder",
            ),
            (["geneval(clip='no-such-folder')", "--port", "0"], "no-such-folder"),
            ([broken, "--port", "0"], "Broken.load() failed: OSError: no card"),
        ):
            assert main(["serve-reward", *words]) == 2, words
            written = capsys.readouterr()
            assert message in written.err and written.err.count("\n") == 1 and written.out == "", (
                words,
                written,
            )


def test_without_the_extra_the_command_has_help_and_one_clear_error():
    code = """
import sys
for name in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
    sys.modules[name] = None
from flowrl.cli.main import main
try:
    main(["serve-reward", "--help"])
except SystemExit as end:
    assert not end.code
sys.exit(main(["serve-reward", "jpeg-compressibility"]))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (
        found.returncode == 2
        and "pip install -e '.[server]'" in found.stderr
        and "--max-batch" in found.stdout
    ), found


def test_the_command_makes_a_token_where_others_can_connect(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    words = [
        "serve-reward",
        f"{tmp_path / 'reward.py'}:Echo(seconds=0.0)",
        "--port",
        "0",
        "--host",
        "0.0.0.0",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "FLOWRL_REWARD_TOKEN"
    }
    command = [sys.executable, "-m", "flowrl", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        token = process.stdout.readline().strip().partition("FLOWRL_REWARD_TOKEN=")[2]
        line = process.stdout.readline()
        url = f"http://127.0.0.1:{line.partition('0.0.0.0:')[2].partition(' ')[0]}"
        assert len(token) >= 40 and "a token is required" in line and token not in line
        refused(post(url, fuzzing.good([1])), 401, "wrong_token")
        assert post(url, fuzzing.good([1]), Authorization=f"Bearer {token}").json()["scores"] == [
            1.0
        ]
        headers = {"Authorization": f"Bearer {token}"}
        info = httpx.get(f"{url}/v1/info", headers=headers, trust_env=False)
        assert info.json()["reward"] == "Echo" and str(tmp_path) not in info.text, (
            "the options and paths of the reward leak"
        )
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM)


def weights(folder):
    return (folder / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("world", "reward"),
    [
        ("mixture", "flowrl.worlds.mixture:DirectionReward"),
        ("shapes", "flowrl.worlds.verifier:ShapesReward"),
    ],
)
def test_training_through_a_server_gives_the_same_numbers(world, reward, tmp_path):
    """In one piece; and, where it is quick, with the server gone in the middle and the run resumed
    when it is back.
    """
    from flowrl.training.config import preset
    from flowrl.training.run import Run

    task = "direction" if world == "mixture" else "compositional"

    def config(reward):
        return preset("tiny").apply(
            world=world, task=task, iterations=3, checkpoint_every=1, reward=reward
        )

    Run(config(reward), tmp_path / "local").execute()
    counted = Function(build("reward", reward).score)
    with served(counted, ServerSettings(merge=False)) as (url, _):
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
            raise ConnectionError("the card is on fire")
        return counted.function(images, prompts)

    with served(Function(dying), ServerSettings(merge=False)) as (url, _):
        broken = Run(config(f"remote(url='{url}', batch=512, retries=0)"), tmp_path / "broken")
        with pytest.raises(RewardError, match=r"reward_failed: .*ConnectionError.*resume the run"):
            broken.execute()
        assert (tmp_path / "broken" / "checkpoints").exists() and not (
            tmp_path / "broken" / "done.json"
        ).exists()
        assert broken.execute(resume=True)
    assert weights(tmp_path / "broken") == weights(tmp_path / "local")


def test_marks_and_components_in_a_run_through_a_server(tmp_path):
    """The same metrics, counts of invalid samples and components as in process, and the same
    weights.
    """
    from flowrl.training.config import preset
    from flowrl.training.trainer import Trainer

    def dark(images, prompts):
        values = images.flatten(1).mean(1)
        return torch.where(values < -0.8, torch.nan, values)

    def rows(reward):
        config = preset("tiny").apply(world="mixture", groups=3, group_size=5, iterations=3)
        world = make_world(config)
        policy, prompts = world.policy(policy_options(config)), world.prompts("direction", "train")
        trainer = Trainer(policy, make_method(config), reward, prompts, config)
        found = [trainer.iteration() for _ in range(3)]
        return [{k: v for k, v in row.items() if k not in ("seconds", "phases")} for row in found]

    own = build("reward", "flowrl.worlds.mixture:DirectionReward")
    local = WeightedSum({"task": own, "dark": marking(dark)}, {"dark": 0.5})
    with served(local, ServerSettings(merge=False)) as (url, _):
        assert rows(RemoteSum(url, batch=512)) == (wanted := rows(local))
    assert sum(row["invalid"] for row in wanted) > 0 and set(wanted[0]["parts"]) == {"task", "dark"}

"""The command `flowrl serve-reward`, and runs whose reward is behind a server."""

import signal
import socket
import subprocess
import sys

import httpx
import pytest
import server_fuzz as fuzzing
from reward_serving import Function, post, refused, served
from server_load import REWARD
from small_run import TINY_RUN, error_of, flowrl_

from flowrl.core.errors import RewardError
from flowrl.parts.registry import build
from flowrl.serving import ServerSettings
from flowrl.training.run import Run


def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    # nothing may get so far
    monkeypatch.setattr("flowrl.serving.uvicorn_server.serve", lambda *_: None)
    broken = "class Broken:\n    score = print\n    def load(self): raise OSError('no card')\n"
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "broken.py").write_text(broken)
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    reward, absent = f"{tmp_path / 'reward.py'}:Echo", "pickscore(model='no-such-folder')"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for command, message in (
            (f"{reward} --port {taken.getsockname()[1]}", "cannot listen at 127.0.0.1"),
            (f"{reward} --port 99999", "port = 99999"),
            (f"{reward} --token-file {tmp_path}", "token_file: "),
            (f"{reward} --token-file {empty}", "token_file = "),
            (f"{reward} --no-token --token-file x", "token_file = 'x'"),
            (f"{reward} --tls-key key.pem", "tls_certificate, tls_key = ['key.pem']"),
            (f"{reward} --tls-certificate {empty} --tls-key {empty}", "tls_certificate, tls_key: "),
            (f"{reward} --score-seconds nan", "score_seconds = nan is"),
            (f'"{absent}"', "no-such-folder"),
            (f'"weighted-sum(models={{a: {absent}}})"', "no-such-folder"),
            (f"{tmp_path / 'broken.py'}:Broken", "Broken.load() failed: OSError: no card"),
        ):
            port = "" if "--port" in command else "--port 0"
            assert flowrl_(f"serve-reward {command} {port}") == 2, command
            written = capsys.readouterr()
            assert message in written.err and written.err.count("\n") == 1, (command, written)
            assert written.out == ""


def test_without_the_extra_the_command_has_help_and_one_clear_error(monkeypatch, capsys):
    for name in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("flowrl.serving")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit, match="0"):
        flowrl_("serve-reward --help")
    assert "--max-batch" in capsys.readouterr().out
    assert "pip install -e '.[server]'" in error_of("serve-reward jpeg-compressibility", capsys)


def test_the_command_makes_a_token_where_others_can_connect(tmp_path, monkeypatch):
    monkeypatch.delenv("FLOWRL_REWARD_TOKEN", raising=False)
    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"{tmp_path / 'reward.py'}:Echo(seconds=0.0)"
    command = [sys.executable, "-m", "flowrl", "serve-reward", reward]
    command += ["--port", "0", "--host", "0.0.0.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        token = process.stdout.readline().strip().partition("FLOWRL_REWARD_TOKEN=")[2]
        line = process.stdout.readline()
        url = f"http://127.0.0.1:{line.partition('0.0.0.0:')[2].partition(' ')[0]}"
        assert len(token) >= 40 and "a token is required" in line and token not in line
        refused(post(url, fuzzing.good([1])), 401, "wrong_token")
        headers = {"Authorization": f"Bearer {token}"}
        assert post(url, fuzzing.good([1]), **headers).json()["scores"] == [1.0]
        info = httpx.get(f"{url}/v1/info", headers=headers, trust_env=False)
        assert info.json()["reward"] == "Echo"
        assert str(tmp_path) not in info.text, "the options and paths of the reward leak"
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM)


def weights(folder):
    return (folder / "weights.safetensors").read_bytes()


def test_training_through_a_server_gives_the_same_numbers(tmp_path):
    """In one piece, and with the server gone in the middle and the run resumed when it is back."""
    reward = "flowrl.worlds.mixture:DirectionReward"
    tiny = TINY_RUN.replace(iterations=3, checkpoint_every=1)

    def remote(url):
        return tiny.replace(reward=f"remote(url='{url}', batch=512, retries=0)")

    Run(tiny.replace(reward=reward), tmp_path / "local").execute()
    counted = Function(build("reward", reward, trust=True).score)
    with served(counted, ServerSettings(merge=False)) as (url, _):
        Run(remote(url), tmp_path / "remote").execute()
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")
    calls, middle = iter(range(10**6)), len(counted.sizes) // 2
    assert middle > 3

    def dying(images, prompts):
        if next(calls) == middle:
            raise ConnectionError("the card is on fire")
        return counted.function(images, prompts)

    with served(Function(dying), ServerSettings(merge=False)) as (url, _):
        broken = Run(remote(url), tmp_path / "broken")
        with pytest.raises(RewardError, match=r"reward_failed: .*ConnectionError.*resume the run"):
            broken.execute()
        assert not (tmp_path / "broken" / "done.json").exists()
        assert broken.execute(resume=True)
    assert weights(tmp_path / "broken") == weights(tmp_path / "local")

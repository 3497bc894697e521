"""The command `flowrl serve-reward`, and runs whose reward is behind a server."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import server_requests as fuzzing
from reward_serving import REWARD, post, refused
from small_run import error_of, flowrl_


def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    # nothing may get so far
    monkeypatch.setattr("flowrl.serving.uvicorn_server.serve", lambda *_: None)
    broken = "class Broken:\n    score = print\n    def load(self): raise OSError('no card')\n"
    monkeypatch.chdir(tmp_path)
    for name, content in (("reward.py", REWARD), ("broken.py", broken), ("empty", " \n")):
        Path(name).write_text(content)
    reward, absent = "reward.py:Echo", "pickscore(model='no-such-folder')"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for command, message in (
            (f"{reward} --port {taken.getsockname()[1]}", "cannot listen at 127.0.0.1"),
            (f"{reward} --port 99999", "port = 99999"),
            (f"{reward} --token-file .", "token_file: "),
            (f"{reward} --token-file empty", "token_file = "),
            (f"{reward} --no-token --token-file x", "token_file = 'x'"),
            (f"{reward} --tls-key key.pem", "tls_certificate, tls_key = ['key.pem']"),
            (f"{reward} --tls-certificate empty --tls-key empty", "tls_certificate, tls_key: "),
            (f"{reward} --score-seconds nan", "score_seconds = nan is"),
            (f'"{absent}"', "no-such-folder"),
            (f'"weighted-sum(models={{a: {absent}}})"', "no-such-folder"),
            ("broken.py:Broken", "Broken.load() failed: OSError: no card"),
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
    line = f"serve-reward {tmp_path}/reward.py:Echo(seconds=0.0) --port 0 --host 0.0.0.0"
    command = [sys.executable, "-m", "flowrl", *line.split()]
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

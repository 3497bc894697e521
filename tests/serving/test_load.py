"""The reward server under 200 clients, also while it is killed and restarted."""

import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from reward_serving import REWARD, TOKEN, numbered

from flowrl.serving.client import RemoteReward

pytestmark = pytest.mark.slow


class Server:
    """`flowrl serve-reward` in a process of its own; a restarted server has the same port."""

    def __init__(self, folder):
        self.folder, self.port = folder, 0
        (folder / "echo.py").write_text(REWARD)
        (folder / "token").write_text(TOKEN)

    def start(self):
        """Start it and wait until it listens."""
        words = ["serve-reward", f"{self.folder}/echo.py:Echo", "--port", str(self.port)]
        words += ["--token-file", f"{self.folder}/token"]
        command = [sys.executable, "-m", "flowrl", *words]
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        assert "http://" in line, f"the server did not start: {line!r}"
        self.port = int(line.partition("http://127.0.0.1:")[2].partition(" ")[0])

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.process.wait(60)


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    server.start()
    yield server
    server.end()


@pytest.mark.parametrize("kill_every", [0.0, 5.0])
def test_200_clients_get_their_own_scores(server, kill_every):
    """A score encodes its sample and client: none is lost, repeated or swapped, also if the server
    is killed and restarted.
    """
    ends, scored, errors = time.monotonic() + 12.0, [], []

    def client(number):
        chance, count = random.Random(number), 0
        options = dict(token_file=f"{server.folder}/token", backoff=0.2)
        reward = RemoteReward(f"http://127.0.0.1:{server.port}", **options)
        try:
            while time.monotonic() < ends:
                size = chance.randint(1, 8)
                numbers = [(number * 2**16 + count + i) % 2**24 for i in range(size)]
                count += size
                scored.append(reward.score(*numbered(numbers)).tolist() == numbers)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    while kill_every and time.monotonic() + kill_every < ends:
        time.sleep(kill_every)
        server.end(signal.SIGKILL)
        server.start()
    for thread in threads:
        thread.join()
    assert errors == [] and all(scored) and len(scored) > 200

"""The reward server under 200 clients, kills, and requests that are made to cost work."""

import pytest
from server_load import Server, abuse, load

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path).start()
    yield server
    server.end()


@pytest.mark.parametrize("kill_every", [0.0, 5.0])
def test_200_clients_get_their_own_scores(server, kill_every):
    """A score encodes its sample and client: none is lost, repeated or swapped, also if the server
    is killed and restarted.
    """
    record = load(server, clients=200, seconds=12.0, kill_every=kill_every)
    assert record["wrong"] == record["failed"] == 0 and record["samples"] > 500
    assert (record["kills"] > 0) == (kill_every > 0)


def test_refusals_cost_little_processor_time(server):
    """Hundreds of thousands of prompts or tensors, wrong JSON, two lengths: each is refused."""
    assert len(abuse(server, repeats=3)) == 8

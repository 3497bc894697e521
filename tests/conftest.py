"""Deterministic, single-threaded tests; small worlds shared by the test files."""

import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

CACHE = TemporaryDirectory(prefix="flowrl-cache-", ignore_cleanup_errors=True)
"""Of all tests and of the commands that they start."""
os.environ["FLOWRL_CACHE"] = CACHE.name
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would the commands that the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("flowrl", derandomize=True, deadline=None)
settings.load_profile("flowrl")


SATELLITES = (
    *("bench", "benchmarks", "compare", "course", "docs", "reward_models", "robustness"),
    "serving",
)
"""Folders with the tests of what imports the library, which a change of the library rarely breaks;
and the table of bad inputs, which needs all packages.
"""


def pytest_collection_modifyitems(config, items):
    """Mark the tests of `SATELLITES`, and leave out those that need more GPUs than there are: the
    marker `gpu` asks for one, `gpu(2)` for two.
    """
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in SATELLITES:
            item.add_marker("satellite")
    available = torch.cuda.device_count()
    needed = [
        (mark.args or (1,))[0] if (mark := item.get_closest_marker("gpu")) else 0 for item in items
    ]
    config.hook.pytest_deselected(
        items=[item for item, count in zip(items, needed, strict=True) if count > available]
    )
    items[:] = [item for item, count in zip(items, needed, strict=True) if count <= available]


@pytest.fixture
def hangup():
    """SIGHUP stops the commands of a test, also if the tests run under nohup.

    The handler protects this process; child processes start with the default action.
    """
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def shapes_policy():
    """The shipped base model with a fresh adapter."""
    from flowrl.run.worlds import world
    from flowrl.worlds.built_in import PolicyOptions

    return world("shapes").policy(PolicyOptions(lora_rank=4))


@pytest.fixture
def mixture_policy():
    """The 2-D policy at its exact start."""
    from flowrl.run.worlds import world
    from flowrl.worlds.built_in import PolicyOptions

    return world("mixture").policy(PolicyOptions())

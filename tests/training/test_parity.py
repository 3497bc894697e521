"""The trainer reproduces recorded iterations of the published code."""

import parity
import pytest

FORWARD = parity.DATA.parent / "golden_forward"
DUAL, PLAIN = "dual_g4.5", "plain_g1"


@pytest.mark.parametrize("case", [DUAL, PLAIN])
@pytest.mark.parametrize("method", ["fg", "tp"])
def test_the_trainer_reproduces_the_published_iteration(method, case):
    rows = list(parity.parity(methods=[method], cases=[case]))
    assert [row for row in rows if not row.passed] == []
    states = {row.state for row in rows if not row.state.startswith("credit")}
    updates = {"on_policy", "on_policy_beta0", "off_policy", "off_policy_beta0", "two_updates"}
    assert states == {"trajectory", *updates} | (
        {"zero_group"} if (method, case) == ("fg", DUAL) else set()
    )
    missing = {"fg": {"completions", "process rewards"}, "tp": set()}[method]
    missing |= {"means", "completions"} if case == PLAIN else set()
    expected = set(parity.TOLERANCES) - missing - ONLY_FORWARD - CLIPPED
    assert {row.quantity for row in rows} == expected


SHARED = {"weights / learning rate", "gradients", "gradient norm"}
COMMON = {"advantages", "copies of the weights", "loss of micro-batches", "squared distances"}
ERRORS = {"matching errors", "ratios of errors"}
MEASURED = {
    "nft": {"latents", "weights of rows", "row losses", "velocities"},
    "awm": {"weights of rows", "row losses", *ERRORS, "training times"},
    "dgpo": {"latents", *ERRORS, "clipped pairs", "group sums", "group weights"},
}
ONLY_FORWARD = COMMON | set().union(*MEASURED.values())
ONLY_FORWARD -= {"advantages", "latents", "clipped pairs"}
CLIPPED = {"clipped gradients"}


@pytest.mark.parametrize("method", MEASURED)
def test_the_trainer_reproduces_the_released_forward_processes(method):
    """With one and with two updates, and with copies of the weights that lag."""
    rows = list(parity.parity(FORWARD, methods=[method]))
    assert [row for row in rows if not row.passed] == []
    assert {"two_updates", "two_updates_ocr"} & {
        row.state for row in rows if row.quantity == "gradients"
    }
    assert {row.quantity for row in rows if row.compared} == SHARED | COMMON | MEASURED[method]


def test_the_trainer_agrees_with_formulas_in_plain_torch():
    rows = list(parity.plain())
    assert [row for row in rows if not row.passed] == []
    assert {row.state for row in rows} == {"grpo", "nft", "nft at the floor"}
    assert {row.quantity for row in rows} == SHARED | CLIPPED | {"advantages", "latents"}


def test_a_replay_stores_no_embeddings(tmp_path, monkeypatch):
    """Other recordings have other embeddings of the same prompts."""
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path))
    rows = list(parity.parity(methods=["fg"], cases=[PLAIN], updates=["on_policy"]))
    assert rows and all(row.passed for row in rows)
    assert list(tmp_path.iterdir()) == []

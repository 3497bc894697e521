"""The trainer reproduces recorded iterations of the published code."""

import parity
import parity_compare
import parity_forward
import parity_plain
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


@pytest.mark.satellite
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


@pytest.mark.slow
def test_a_relative_error_of_a_thousandth_fails_in_every_quantity(monkeypatch):
    """Except in sums that cancel: mean losses, and TP-GRPO's policy losses of micro-batches."""

    def wrong(ours, recorded, scale=0.0, distance=parity_compare.distance):
        return distance(1.001 * ours, recorded, scale)

    for module in (parity, parity_compare, parity_forward, parity_plain):
        monkeypatch.setattr(module, "distance", wrong)
    cases = (("fg", parity.DATA, DUAL), ("tp", parity.DATA, DUAL), ("dgpo", FORWARD, "dual"))
    cases += ("awm", FORWARD, "dual"), ("nft", FORWARD, "dual")
    rows = [r for m, data, case in cases for r in parity.parity(data, methods=[m], cases=[case])]
    rows += parity.plain()
    failed = {(row.method, row.quantity) for row in rows if not row.passed}
    compared = {(row.method, row.quantity) for row in rows}
    cancelling = {one for one in compared if one[1] in ("mean loss", "clipped pairs")}
    assert compared - cancelling - {("tp", "policy loss / advantage")} <= failed
    assert all(row.tolerance < 1e-3 for row in rows)

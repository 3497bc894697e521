"""The trainer reproduces recorded iterations of the published code, and a wrong setting shows in
the quantity it belongs to.
"""

import parity
import pytest

FORWARD = parity.DATA.parent / "golden_forward"
DUAL, PLAIN = "dual_g4.5", "plain_g1"


def failed(**choice):
    rows = list(parity.parity(**choice))
    assert rows
    return {row.quantity for row in rows if not row.passed}


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


ROWS = {"row losses", "loss of micro-batches"}


@pytest.mark.parametrize(
    ("method", "state"),
    [("nft", "two_updates_ocr"), ("awm", "off_policy_sum_first"), ("dgpo", "two_updates")],
)
def test_the_split_of_the_work_changes_no_forward_process(method, state):
    """Micro-batches of 3 spread the members of a group, and the times of a sample, which then take
    a pass of their own. DGPO's sums are 100 times differences of errors, whose last bits depend on
    the network's batches.
    """
    split = {"micro_batch": 3, "max_batch": 3, "chunk": 1, "offload": True}
    assert failed(data=FORWARD, methods=[method], updates=[state], **split) <= (
        {"group sums"} if method == "dgpo" else set()
    )


GRADIENTS = {"gradients", "gradient norm"}
FAULTS = {
    "another anchor": ("dgpo", "", "ocr", {"anchor": "old"}, {"group sums", "gradients"}),
    "an Euler sampler": ("nft", "", "geneval", {"sampler": "ode"}, {"latents"}),
    "exact CPS density": ("tp", PLAIN, "off_policy_beta0", {"loss": "clipped"}, {"ratios"}),
    "a wider clip": ("tp", PLAIN, "off_policy_beta0", {"clip_range": 2e-5}, {"clipped pairs"}),
    "no guidance": ("tp", DUAL, "on_policy", {"guidance_scale": 1.0}, {"velocities (RMS)"}),
}


@pytest.mark.parametrize(
    ("method", "case", "update", "settings", "expected"), FAULTS.values(), ids=FAULTS
)
def test_another_setting_fails(method, case, update, settings, expected):
    recorded = {"cases": [case]} if case else {"data": FORWARD}
    wrong = failed(methods=[method], updates=[update], **recorded, **settings)
    assert expected <= wrong


def test_the_trainer_agrees_with_formulas_in_plain_torch():
    rows = list(parity.plain())
    assert [row for row in rows if not row.passed] == []
    assert {row.state for row in rows} == {"grpo", "nft", "nft at the floor"}
    assert {row.quantity for row in rows} == SHARED | CLIPPED | {"advantages", "latents"}

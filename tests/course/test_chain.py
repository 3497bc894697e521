"""The chain in one dimension on which the course shows the bias of TP-GRPO's choice of credit."""

import pytest
import torch
from flowrl_course.chain import walk

from flowrl.credit import gains, process_rewards, reward_to_go, turning_points

VALUES, SCORES = walk(200_000, seed=1)
TABLE = VALUES[:, None]
CREDITS = {
    "R": VALUES[:, -1:].expand(-1, 5),
    "to go": reward_to_go(TABLE)[:, 0],
    "gain": gains(TABLE)[:, 0],
    "turning points": process_rewards(TABLE, turning_points(TABLE))[:, 0],
}


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        ("R", [0.236] * 5),
        ("to go", [0.236] * 5),
        ("gain", [0.236] * 5),
        ("turning points", [0.315, 0.285, 0.271, 0.260, 0.236]),
    ],
)
def test_only_a_choice_by_later_draws_changes_the_expected_gradient(credit, expected):
    """E[psi_k A_k] of every decision. Golden values: two million paths; four standard errors here."""
    samples = SCORES * CREDITS[credit]
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - torch.tensor(expected)).abs() < 4 * error + 1e-3).all()


def test_the_added_credit_is_half_of_the_luck_in_the_direction_of_the_gain():
    """E[1[g F > 0] F | z_1] = sign(g) E|F| / 2 at decision 0, because E[F | z_1] = 0."""
    gain, luck = CREDITS["gain"][:, 0], VALUES[:, -1] - VALUES[:, 1]
    added = (CREDITS["turning points"][:, 0] - gain) * gain.sign()
    assert float(added.mean()) == pytest.approx(float(luck.abs().mean()) / 2, rel=0.02)

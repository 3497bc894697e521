"""All kinds of training, and what may change no number of them: the split of the work, a state that
is restored, and probes that no rule reads. `test_distributed` adds several processes. Copies of the
weights.
"""

import json

import pytest
import torch
from small_run import BASE, CASES, MIXTURE, flowrl_, plain, rows_of, trained, trainer_of

from flowrl.core.errors import ConfigError
from flowrl.core.forward import Decay, WeightCopy
from flowrl.run.checkpoint import restore_trainer, trainer_state
from flowrl.weights import Behaviour

IN_CHUNKS = dict(micro_batch=7, max_batch=5, chunk=1, offload=True, overlap_rewards=True)
SPLITS = (dict(micro_batch=3), IN_CHUNKS)
SPLIT = {"calls", "train_nfe", "gradient_signal", "gradient_noise"}
"""What depends on the split: network calls, as means over trajectories take a pass of their own, and
what a comparison of micro-batches says.
"""


@pytest.mark.parametrize("case", CASES)
def test_the_split_of_the_work_changes_nothing(case):
    """Neither micro-batches that divide nothing, nor chunks, nor small network calls."""
    config = BASE.replace(**CASES[case])
    expected_rows, expected = trained(trainer_of(config.replace(micro_batch=1000)))
    assert all(row["grad_norm"] > 0 for row in expected_rows)
    for split in SPLITS:
        rows, result = trained(trainer_of(config.replace(**split)))
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-3)
        for row, other in zip(rows, expected_rows, strict=True):
            assert row.keys() ^ other.keys() <= SPLIT
            assert sum(row["step_shares"]) == pytest.approx(1)
            for name in row.keys() - SPLIT:
                assert row[name] == pytest.approx(other[name], rel=2e-3, abs=1e-4, nan_ok=True)


def state_of(trainer):
    """All that a checkpoint has: tensors as bytes, and plain values."""
    state = trainer_state(trainer)
    tensors = {name: tensor.numpy().tobytes() for name, tensor in state.tensors.items()}
    return tensors, json.dumps(state.values)


FLOAT16 = dict(world="shapes", task="text", dtype="float16", num_steps=2, groups=1)


@pytest.mark.parametrize("case", [*CASES, "float16"])
def test_a_state_is_a_snapshot_of_all_that_the_next_iteration_needs(case):
    """This trainer and a new one repeat an iteration to the bit; the state stays as taken."""
    config = BASE.replace(**CASES.get(case, FLOAT16))
    trainer = trainer_of(config)
    trainer.iteration()
    state, taken = trainer_state(trainer), state_of(trainer)
    row, after = plain(trainer.iteration()), state_of(trainer)
    for other in (trainer, trainer_of(config)):
        restore_trainer(other, state)
        assert state_of(other) == taken
        assert plain(other.iteration()) == row and state_of(other) == after
    if trainer.copies.by_name:
        with pytest.raises(ConfigError, match="another run, loss or model"):
            restore_trainer(trainer, trainer_state(trainer_of(BASE)))


def test_later_updates_do_not_change_a_state():
    trainer = trainer_of(BASE.replace(method="diffusion-nft"))
    trainer.iteration()
    moments = [value for values in trainer.optimizer.state.values() for value in values.values()]
    copies = trainer.copies.by_name["old"].values
    used = {
        t.data_ptr() for t in (*trainer.parameters.values(), *trainer.average, *copies, *moments)
    }
    assert used.isdisjoint(tensor.data_ptr() for tensor in trainer_state(trainer).tensors.values())


@pytest.mark.parametrize(
    "probe",
    [
        "substeps(count=3, solver=unipc, every=2)",
        "some-members(probe=substeps(count=2))",
        "completion(together=False)",
        "continuation(count=2)",
    ],
)
def test_a_probe_that_no_rule_reads_changes_no_bit(probe):
    """Random steps and mini-batches are drawn after the rollout."""
    config = BASE.replace(trained_steps="random(fraction=0.5)", chunk=1)
    results = [
        trained(trainer_of(config.replace(credit=credit)))[1]
        for credit in ("uniform", f"uniform(probe='{probe}')")
    ]
    assert torch.equal(*results)


# Copies of the weights


@pytest.mark.parametrize(
    ("begin", "expected"), [(None, [False] * 3), (0, [True] * 3), (200, [False, True, True])]
)
def test_when_a_copy_samples(mixture_policy, begin, expected):
    copy = Behaviour(WeightCopy(sample_from=begin), mixture_policy, mixture_policy.trainable())
    assert [copy.samples(steps) for steps in (199, 200, 201)] == expected


@pytest.mark.parametrize(
    "bad", [dict(start=-1), dict(rate=-0.1), dict(cap=1.0), dict(rate=float("inf"))]
)
def test_decays_out_of_range_are_named(bad):
    with pytest.raises(ConfigError, match=rf"Decay.{next(iter(bad))} = .* is not allowed"):
        Decay(**bad)


def test_a_finished_run_can_teach(tmp_path):
    """The student's divergence from the teacher falls; without a loss that reads it, a reference is
    refused.
    """
    common = f"train {MIXTURE} --iterations 8 --groups 8 --out {tmp_path}/"
    reference = f" --reference {tmp_path}/teacher"
    assert flowrl_(f"{common}teacher --learning-rate 0.01") == 0
    student = f"{common}student --loss distillation --learning-rate 0.003"
    assert flowrl_(student + reference) == 0
    kl = [row["kl"] for row in rows_of(tmp_path / "student") if "kl" in row]
    assert 0 < kl[-1] < kl[0] / 2
    assert flowrl_(f"{common}refused{reference}") == 2

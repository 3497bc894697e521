"""What costs time, counted instead of timed: network calls, rows, synchronisations and
compilations.
"""

import pytest
import torch
import torch._dynamo.utils
from device_cases import PROMPTS, SMALL, model_trainer
from host_sync import HostSyncs

from flowrl.policies import pipeline

GROUPS, MEMBERS, STEPS = (SMALL[name] for name in ("groups", "group_size", "num_steps"))
SAMPLES = GROUPS * MEMBERS


def trainer(method, **changes):
    """Of a tiny pipeline of SD3's classes; two mini-batches per iteration."""
    made = model_trainer("sd3", "cpu", **{"method": method, "kl_weight": 0.1, **changes})
    made.policy.warm(PROMPTS)
    return made


def evaluations(trained):
    """Rows of every network call of an iteration: (while sampling and probing, with gradients, of
    the reference).
    """
    rows, velocity = {"sampling": [], "update": [], "reference": []}, trained.policy.velocity
    state = {"updating": False}

    def counted(latents, *given):
        without = "reference" if state["updating"] else "sampling"
        rows["update" if torch.is_grad_enabled() else without].append(len(latents))
        return velocity(latents, *given)

    trained.policy.velocity = counted
    trained.on_phase = lambda phase: state.update(updating=phase == "update")
    row = trained.iteration()
    assert row["calls"] == len(rows["sampling"]) and row["nfe"] == sum(rows["sampling"])
    assert row["gradient_nfe"] == sum(rows["update"]) == row["train_nfe"] - sum(rows["reference"])
    starts = GROUPS if trained.groups.shared_noise else SAMPLES
    assert row["nfe"] - row["probe_nfe"] == starts + SAMPLES * (STEPS - 1)
    assert row["decodes"] == row["reward_calls"] >= SAMPLES
    return rows


@pytest.mark.parametrize(
    ("method", "kl_weight", "sampling"),
    [
        ("flow-grpo", 0.0, [SAMPLES] * STEPS),
        # one noise per group, then estimates of the 3 nodes from which decisions start, the first
        # of them one per group
        (
            "stepwise-flow-grpo",
            0.1,
            [GROUPS, *[SAMPLES] * (STEPS - 1), *[2 * SAMPLES + GROUPS] * STEPS],
        ),
        # completions run along with the later steps
        ("tp-grpo", 0.1, [SAMPLES, 2 * SAMPLES, 3 * SAMPLES, 4 * SAMPLES]),
    ],
)
def test_network_calls_and_rows_of_an_iteration(method, kl_weight, sampling):
    """Every (trajectory, decision) is evaluated once for the policy and, if there is a KL, once for
    the reference.
    """
    # 2 mini-batches of 3 samples x 3 steps
    rows, pairs = evaluations(trainer(method, kl_weight=kl_weight)), [5, 4, 5, 4]
    assert rows == {"sampling": sampling, "update": pairs, "reference": pairs if kl_weight else []}


SYNCHRONISATIONS = {"flow-grpo": 111, "stepwise-flow-grpo": 116, "tp-grpo": 118}
"""Of an iteration of two mini-batches, as counted when this was written; fewer are welcome.
Operations on credit and rows, which are in main memory, count as well.
"""


@pytest.mark.satellite
@pytest.mark.parametrize("method", SYNCHRONISATIONS)
def test_synchronisations_grow_with_neither_steps_nor_micro_batches(method):
    def count(**changes):
        trained = trainer(method, **changes)
        trained.iteration()
        with HostSyncs() as syncs:
            trained.iteration()
        return syncs.count

    usual = count()
    assert usual <= SYNCHRONISATIONS[method] and count(micro_batch=2) == usual
    assert count(num_steps=2 * STEPS) <= usual + 2  # lists of indices, once per probe
    # rows, metrics and the gradient's norm of a mini-batch
    assert count(minibatches=4) <= usual + 2 * 20


@pytest.mark.satellite
def test_nothing_is_compiled_after_the_first_iteration(monkeypatch):
    """Rollout, probing and update of blocks that are compiled, with batches of other sizes in every
    phase.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(pipeline, "COMPILER", "eager")
    trained, graphs = trainer("tp-grpo", options=dict(compile=True)), []
    for _ in range(3):
        trained.iteration()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # two kinds of blocks: one size, any size, and any size with gradients
    assert graphs == [6, 6, 6]

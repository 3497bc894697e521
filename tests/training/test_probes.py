"""A probe is no part of the policy gradient: training with it, but without its credit, is training
without it, bit for bit.
"""

import pytest
import torch

from flowrl.training.build import make_trainer
from flowrl.training.config import preset


def weights(credit: str, world: str = "mixture") -> list[torch.Tensor]:
    """The trained weights after two iterations of two updates each; random steps and mini-batches
    are drawn after the rollout.
    """
    config = preset("tiny").apply(
        world=world,
        method="flow-grpo",
        credit=credit,
        iterations=2,
        groups=2,
        group_size=4,
        num_steps=4,
        minibatches=2,
        window=":",
        trained_steps="random(fraction=0.5)",
        kl_weight=0.1,
        chunk=1,
    )
    trainer = make_trainer(config)
    for _ in range(2):
        trainer.iteration()
    return [*trainer.parameters, *trainer.average]


@pytest.mark.parametrize(
    "probe",
    [
        "substeps(count=3)",
        "substeps(count=3, solver=unipc, every=2)",
        "substeps(count=3, dtype=bfloat16)",
        "some-members(probe=substeps(count=2))",
        "completion(together=False)",
        "some-members(probe=completion(solver=dpm++), control=uniform)",
        "continuation(count=2)",
    ],
)
def test_training_is_the_same_bit_for_bit(probe):
    plain, probed = weights("uniform"), weights(f"uniform(probe='{probe}')")
    assert all(torch.equal(first, second) for first, second in zip(plain, probed, strict=True))

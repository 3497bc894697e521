"""`tutorials/nano_flow_grpo.py` computes what the trainer computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl import preset
from flowrl.core.types import Prompt
from flowrl.run.build import make_trainer
from flowrl.run.parts.registry import build
from flowrl.testing.tiny import TINY, tiny_sd3, tiny_sd3_policy

TUTORIALS = Path(__file__).parents[2] / "tutorials"
METHODS = {"uniform": "flow-grpo", "stepwise": "stepwise-flow-grpo", "turning-point": "tp-grpo"}


@pytest.mark.parametrize("credit", METHODS)
def test_two_iterations_are_those_of_the_trainer(credit, monkeypatch, request):
    monkeypatch.syspath_prepend(str(TUTORIALS))
    import nano_flow_grpo as nano

    sizes = {"groups": 3, "members": 4, "minibatches": 2, "batch": 5}
    # little noise: gradients large enough to be clipped
    args = nano.Settings(credit=credit, noise_level=0.1, clip=0.01, **sizes)
    run = preset("default").apply(
        world="mixture",
        method=METHODS[credit],
        groups=args.groups,
        group_size=args.members,
        minibatches=args.minibatches,
        clip_range=args.clip,
        noise_level=args.noise_level,
    )
    trainer, model = make_trainer(run), nano.WorldModel("mixture")
    # the library computes in float32: in this test "float32" is float64
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    for parameter in (*trainer.parameters.values(), *model.parameters):
        parameter.data = parameter.data.double()
    model.times = lambda steps: trainer.schedule.times.double()  # the grid has float32's rounding
    trainer.average = [average.double() for average in trainer.average]
    request.addfinalizer(lambda single=torch.get_default_dtype(): torch.set_default_dtype(single))
    torch.set_default_dtype(torch.float64)
    gradients, step = list[list[Tensor]](), trainer.optimizer.step

    def record(*arguments):
        gradients.append([parameter.grad.clone() for parameter in trainer.parameters.values()])
        return step(*arguments)

    trainer.optimizer.step = record
    reward = model.world.reward("soft")
    optimizer = torch.optim.AdamW(
        model.parameters, run.optim.learning_rate, (0.9, 0.99), 1e-8, 1e-4
    )
    for _ in range(2):
        prompts = trainer.prompts.upcoming(args.groups)
        generator = torch.Generator().manual_seed(0)
        generator.set_state(trainer.generator.get_state())
        for own, parameter in zip(model.parameters, trainer.parameters.values(), strict=True):
            own.data.copy_(parameter.data)
        result = nano.iteration(model, reward, prompts, optimizer, args, generator)
        gradients.clear()
        row = trainer.iteration()
        assert torch.equal(generator.get_state(), trainer.generator.get_state())
        advantages = row.credit.advantages.flatten(0, 1)
        torch.testing.assert_close(result["advantages"], advantages, atol=1e-6, rtol=1e-6)
        loss = sum(result["losses"]) / len(result["losses"])
        assert loss == pytest.approx(row["policy_loss"], abs=1e-6)
        for own, others in zip(result["gradients"], gradients, strict=True):
            torch.testing.assert_close(own, others, atol=1e-6, rtol=1e-6)


def test_sd3_has_the_velocity_and_images_of_the_pipeline(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TUTORIALS))
    import nano_flow_grpo as nano

    tiny_sd3().save_pretrained(tmp_path)
    sizes = {"groups": 2, "members": 3, "minibatches": 2, "decisions": (0, 1)}
    args = nano.Settings(model=str(tmp_path), device="cpu", resolution=16, steps=3, **sizes)
    model = nano.SD3Model(args)
    options = replace(TINY, guidance_scale=args.guidance, max_sequence_length=256, lora_rank=32)
    policy, prompts = tiny_sd3_policy(options), [Prompt("a red cat"), Prompt("two dogs")]
    assert len(model.parameters) == len(policy.trainable())
    x, t = torch.randn(2, *policy.latent_shape), policy.schedule(3).times[1]
    torch.testing.assert_close(model.times(3), policy.schedule(3).times)
    velocity = policy.velocity(x, (1000 * t).expand(2), policy.encode(prompts))
    with torch.no_grad():
        close = {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(model.velocity(x, t, model.encode(prompts)), velocity, **close)
        torch.testing.assert_close(model.decode(x), policy.decode(x))
    optimizer = torch.optim.AdamW(model.parameters, 1e-3)
    reward = build("reward", "jpeg-compressibility")
    before = [parameter.detach().clone() for parameter in model.parameters]
    generator = torch.Generator().manual_seed(0)
    nano.iteration(model, reward, prompts, optimizer, args, generator)
    assert any(not torch.equal(b, p) for b, p in zip(before, model.parameters, strict=True))

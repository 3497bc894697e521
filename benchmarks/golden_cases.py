"""The commands of `golden.py`: all methods in both worlds, and what they leave out."""

from pathlib import Path

from flowrl_testing.tiny import tiny_flux, tiny_sd3

from flowrl.methods import METHODS

POINTS = "--preset tiny --world mixture --ema-decay 0.8 --minibatches 2 --checkpoint-every 2"
IMAGES = "--preset tiny --world shapes --ema-decay 0.8 --minibatches 2 --checkpoint-every 2"
MODEL = (
    "--preset tiny --world model --prompts ../prompts.txt --reward jpeg-compressibility"
    " --resolution 16 --max-sequence-length 24 --lora-rank 2 --num-steps 4"
)
VARIANTS = {
    "clipped-kl": "--kl-weight 0.05 --micro-batch 3",
    "released-clipped": "--loss clipped(kl=without_delta,log_prob=released_cps) --kl-weight 0.1",
    "grpo-guard": "--loss grpo-guard --kl-weight 0.02",
    "flow-dppo": "--loss flow-dppo(bound=1e-5) --micro-batch 1 --final-learning-rate 0.1",
    "gspo": "--loss gspo --micro-batch 2",
    "policy-gradient": "--loss policy-gradient --minibatches 1 --max-grad-norm 0.01",
    "random-steps": "--sampler dance-sde --noise-level 0.3 --trained-steps random(fraction=0.6)",
    "untrained-step": "--window : --trained-steps :-1",
    "sliding": "--sampler cps --window sliding(size=2,stride=1,every=1) --max-batch 5",
    "chunks": "--sampler ddim-sde --window : --chunk 1 --overlap-rewards true",
    "offload": "--window random(size=2) --offload --eval-solver heun --reward-noise 0.1",
    "equal-rewards": "--reward-form strict --groups 8 --drop-zero-advantages",
    "batch-std": "--credit uniform(std=batch,clamp=1) --weight-decay 0.1 --eval-solver unipc",
    "nft-path": "--method diffusion-nft --sampler ode --loss diffusion-nft(noise=path)",
    "awm-sum": "--method awm --loss awm(ratio=sum_first,kl=elbo,times=stratified(count=2))",
    "dgpo-old": "--loss dgpo(anchor=old,times=steps(count=2,steps=3)) --kl-weight 0.05",
    "turning-trend": (
        "--method tp-grpo"
        " --credit turning-point(consistent=false,balance=trend,balance_scope=prompt,clamp=none)"
    ),
    "reward-to-go": "--credit stepwise-gain(lam=0.9,gamma=0.95,probe=tweedie) --chunk 3",
    "moving-average": "--credit moving-average-gain --window random(size=2)",
    "edges": "--credit depth-relative(probe=branch(children=(1,3),weight=edge,mean=child))",
    "value-tracker": "--credit value-tracker --groups 6 --iterations 3",
    "win-rate": "--reward win-rate(reward=jpeg-compressibility) --world shapes",
    "bfloat16": "--world shapes --dtype bfloat16",
    "overflow": "--world shapes --dtype float16 --loss-scale 16777216 --minibatches 3",
    "text": "--world shapes --task text --reward-form graded --diversity pixels",
}
MODELS = {
    "sd3": "--model ../sd3 --kl-weight 0.05 --micro-batch 3",
    "sd3-full": "--model ../sd3 --tuning full --learning-rate 0.001 --max-batch 3",
    "sd3-guided": "--model ../sd3 --method tp-grpo --guidance-scale 2",
    "sd3-nft": "--model ../sd3 --method diffusion-nft --guidance-scale 2 --train-guidance-scale 1",
    "flux": "--model ../flux --method stepwise-flow-grpo --kl-weight 0.05 --decode-batch 2",
}
OWN = {"fdfo": " --minibatches 1"}
"""Options of a method whose bound is too tight for several updates in two dimensions."""
CASES = {
    **{f"mixture-{name}": f"{POINTS} --method {name}{OWN.get(name, '')}" for name in METHODS},
    **{f"shapes-{name}": f"{IMAGES} --method {name}" for name in METHODS},
    **{f"variant-{name}": f"{POINTS} {options}" for name, options in VARIANTS.items()},
    **{f"model-{name}": f"{MODEL} {options}" for name, options in MODELS.items()},
}
"""The options of `flowrl train` by case; a later option replaces an earlier one."""


def make_inputs(folder: Path) -> None:
    """Prompts and tiny random pipelines, which both sides read."""
    (folder / "prompts.txt").write_text("a red fox\na red car\na red hat\n")
    tiny_sd3().save_pretrained(folder / "sd3")
    tiny_flux().save_pretrained(folder / "flux")

"""The kinds of parts, their built-in classes and their protocols; `flowrl.run.parts.registry`
builds them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name


@dataclass(frozen=True)
class Kind:
    """A kind of part. Makers and protocols are written ``module:name`` and imported at their first
    use.

    Args:
        noun: name of the kind in messages.
        group: entry-point group of plug-ins.
        built_in: built-in makers by name.
        protocols: protocols, one of which a part must satisfy.
        needs: description of the protocols in messages.
        acts: whether parts of this kind may start processes or open connections. A file that is not
            trusted may then name flowrl's own only, not those of other packages.
    """

    noun: str
    group: str
    built_in: Mapping[str, str]
    protocols: tuple[str, ...]
    needs: str
    acts: bool = False

    def protocol_types(self) -> tuple[type, ...]:
        """The protocols themselves."""
        return tuple(map(resolve_name, self.protocols))


KINDS: dict[str, Kind] = {
    "credit": Kind(
        "credit rule",
        "flowrl.credit",
        {
            "uniform": "flowrl.credit.uniform:Uniform",
            "value-tracker": "flowrl.credit.memory:ValueTracker",
            "weighted": "flowrl.credit.wrappers:Weighted",
            "stepwise-gain": "flowrl.credit.stepwise:StepwiseGain",
            "dense-gain": "flowrl.credit.stepwise:DenseGain",
            "calibrated-gain": "flowrl.credit.calibrated:CalibratedGain",
            "moving-average-gain": "flowrl.credit.memory:MovingAverageGain",
            "turning-point": "flowrl.credit.turning_point:TurningPoint",
            "sibling-relative": "flowrl.credit.trees:SiblingRelative",
            "depth-relative": "flowrl.credit.trees:DepthRelative",
            "backed-up": "flowrl.credit.trees:BackedUp",
            "gdpo": "flowrl.credit.wrappers:GDPO",
            "pruned": "flowrl.bench.rules:Pruned",
            "random": "flowrl.bench.rules:RandomCredit",
            "turning-point-variant": "flowrl.bench.rules:TurningPointVariant",
            "even-gain": "flowrl.bench.rules:EvenGain",
        },
        ("flowrl.core.protocols:CreditAssigner",),
        "an attribute `probe` and a method `assign(values, decisions)`",
    ),
    "probe": Kind(
        "probe",
        "flowrl.probes",
        {
            "none": "flowrl.core.probe:NoProbe",
            "tweedie": "flowrl.probes.solved:Tweedie",
            "substeps": "flowrl.probes.solved:Substeps",
            "completion": "flowrl.probes.solved:Completion",
            "continuation": "flowrl.probes.solved:Continuation",
            "critic": "flowrl.probes.critic:Critic",
            "branch": "flowrl.probes.branching:Branch",
            "comb": "flowrl.probes.branching:Comb",
            "exact": "flowrl.bench.exact:Exact",
            "some-members": "flowrl.bench.probes:SomeMembers",
        },
        ("flowrl.probes:Probe",),
        "a class derived from flowrl.probes.Probe, with a method `estimate(run)`",
    ),
    "sampler": Kind(
        "sampler",
        "flowrl.samplers",
        {
            "flow-sde": "flowrl.samplers.kernels:FlowSDE",
            "dance-sde": "flowrl.samplers.kernels:DanceSDE",
            "cps": "flowrl.samplers.kernels:CPS",
            "ddim-sde": "flowrl.samplers.kernels:DDIMSDE",
            "exponential-sde": "flowrl.samplers.kernels:ExponentialSDE",
            "ode": "flowrl.samplers.kernels:ODE",
            "multistep": "flowrl.samplers.multistep:Multistep",
        },
        ("flowrl.core.protocols:Sampler", "flowrl.core.protocols:MultistepSolver"),
        "a method `transition(latent, velocity, schedule, step)`, or `grid(schedule)` and"
        " `solution(schedule, draw)`",
    ),
    "window": Kind(
        "window",
        "flowrl.windows",
        {
            "fixed": "flowrl.samplers.windows:FixedWindow",
            "random": "flowrl.samplers.windows:RandomWindow",
            "sliding": "flowrl.samplers.windows:SlidingWindow",
        },
        ("flowrl.core.protocols:Window",),
        "a method `steps(count, generator, iteration)`",
    ),
    "loss": Kind(
        "loss",
        "flowrl.losses",
        {
            "ascent": "flowrl.losses.forward:RewardAscent",
            "awm": "flowrl.losses.forward:AWM",
            "clipped": "flowrl.losses.policy:ClippedLoss",
            "crd": "flowrl.losses.forward:CRD",
            "dgpo": "flowrl.losses.forward:DGPO",
            "diffusion-nft": "flowrl.losses.forward:DiffusionNFT",
            "gspo": "flowrl.losses.policy:GSPO",
            "grpo-guard": "flowrl.losses.policy:GRPOGuard",
            "kl-penalty": "flowrl.losses.policy:KLPenalty",
            "flow-dppo": "flowrl.losses.policy:FlowDPPO",
            "rsm": "flowrl.losses.policy:RSM",
            "step-nft": "flowrl.losses.policy:StepNFT",
            "distillation": "flowrl.losses.policy:Distillation",
            "policy-gradient": "flowrl.losses.policy:PolicyGradientLoss",
        },
        ("flowrl.core.protocols:PolicyLoss", "flowrl.core.protocols:ForwardLoss"),
        "attributes `needs_reference`, `unit` and `trains_zero_advantages` and a method"
        " `loss(batch)`",
    ),
    "reward": Kind(
        "reward",
        "flowrl.rewards",
        {
            "aesthetic": "flowrl.rewards.clip:Aesthetic",
            "by-source": "flowrl.rewards.combine:by_source",
            "clipped": "flowrl.rewards.combine:Clipped",
            "clipscore": "flowrl.rewards.clip:CLIPScore",
            "frame-mean": "flowrl.rewards.combine:FrameMean",
            "geneval": "flowrl.rewards.geneval:GenEval",
            "group-sum": "flowrl.rewards.combine:GroupSum",
            "hpsv2.1": "flowrl.rewards.clip:HPSv21",
            "hpsv3": "flowrl.rewards.hpsv3:HPSv3",
            "image-reward": "flowrl.rewards.image_reward:ImageReward",
            "jpeg-compressibility": "flowrl.rewards.images:JPEGCompressibility",
            "jpeg-incompressibility": "flowrl.rewards.images:JPEGIncompressibility",
            "judge": "flowrl.serving.judge:Judge",
            "local-judge": "flowrl.rewards.local_judge:LocalJudge",
            "motion": "flowrl.rewards.images:Motion",
            "ocr": "flowrl.rewards.ocr:OCR",
            "pickscore": "flowrl.rewards.clip:PickScore",
            "preference": "flowrl.rewards.answers:Preference",
            "remote": "flowrl.serving.client:RemoteReward",
            "remote-sum": "flowrl.serving.client:RemoteSum",
            "soft-tifa": "flowrl.rewards.answers:SoftTIFA",
            "weighted-sum": "flowrl.rewards.combine:WeightedSum",
            "win-rate": "flowrl.rewards.combine:WinRate",
        },
        ("flowrl.core.protocols:RewardModel", "flowrl.core.protocols:GroupReward"),
        "a method `score(images, prompts)`, or `score_groups(images, prompts)` and an attribute"
        " `evaluation`",
    ),
    "features": Kind(
        "feature space",
        "flowrl.features",
        {
            "pixels": "flowrl.rewards.diversity:PixelFeatures",
            "latents": "flowrl.rewards.diversity:LatentFeatures",
            "clip": "flowrl.rewards.clip:ClipFeatures",
        },
        ("collections.abc:Callable",),
        "a method `__call__(images)` that returns [sample, feature]",
    ),
    "observer": Kind(
        "observer",
        "flowrl.observers",
        {
            "budget": "flowrl.run.stop_rules:Budget",
            "keep-best": "flowrl.run.stop_rules:KeepBest",
            "stop-on-collapse": "flowrl.run.stop_rules:StopOnCollapse",
            "stop-on-hacking": "flowrl.run.stop_rules:StopOnHacking",
            "stop-on-plateau": "flowrl.run.stop_rules:StopOnPlateau",
        },
        ("flowrl.core.protocols:Observer",),
        "an attribute `fields` and a method `observe(record)`",
        acts=True,
    ),
    "times": Kind(
        "distribution of training times",
        "flowrl.times",
        {
            "permuted": "flowrl.flow.times:PermutedTimes",
            "stratified": "flowrl.flow.times:StratifiedTimes",
            "uniform": "flowrl.flow.times:UniformTimes",
            "logit-normal": "flowrl.flow.times:LogitNormalTimes",
            "steps": "flowrl.flow.times:DrawnSteps",
            "late-steps": "flowrl.flow.times:LateSteps",
        },
        ("flowrl.core.forward:TimeDraw",),
        "methods `draws(schedule)` and `draw(schedule, samples, generator)`",
    ),
    "world": Kind(
        "world",
        "flowrl.worlds",
        {
            "shapes": "flowrl.worlds.built_in:ShapesWorld",
            "edits": "flowrl.worlds.built_in:EditsWorld",
            "mixture": "flowrl.worlds.built_in:MixtureWorld",
            "points": "flowrl.worlds.points:Points",
        },
        ("flowrl.core.protocols:World",),
        "attributes `name`, `tasks`, `forms` and `elements` and methods `prompts(task, part)`,"
        " `parse(text)`, `reward(form)` and `policy(options)`",
        acts=True,
    ),
}

TRIAL = "flowrl.testing.trial"
"""The module that tries the user's parts before a run."""

"""The papers as compositions of a sampler, a credit rule and a loss, and compositions by name."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flowrl.core.errors import CreditError
from flowrl.core.experience import Credit, Decisions, Experience, needs_of
from flowrl.core.protocols import AnySampler, CreditAssigner, ForwardLoss, PolicyLoss, Window
from flowrl.credit import (
    BackedUp,
    CalibratedGain,
    DenseGain,
    DepthRelative,
    SiblingRelative,
    StepwiseGain,
    TurningPoint,
    Uniform,
    Weighted,
    credit_of,
    example,
)
from flowrl.flow import PermutedTimes, UniformTimes, uniform_schedule
from flowrl.losses import AWM, DGPO, RSM, ClippedLoss, DiffusionNFT, StepNFT
from flowrl.probes import Branch, Comb
from flowrl.rollout import ForwardObjective, Groups, Objective, TransitionObjective, group_tree
from flowrl.samplers import CPS, ODE, DanceSDE, FixedWindow, FlowSDE, Multistep, RandomWindow

Loss = PolicyLoss | ForwardLoss
Part = TypeVar("Part")


@dataclass(frozen=True)
class Method:
    """A method: how trajectories are sampled, how steps are credited (`credit`), and what is
    minimised (`loss`). The defaults are Flow-GRPO's.

    The kernel `sampler` is used on the steps of `window`, and the ODE on the others; a multistep
    solver ignores `window`. `name` is its label in tables. `shared_noise` is the share of the
    variance of z_0 that the members of a group have in common; True: the same z_0. The loss has the
    published clip, which belongs to latents of `elements` numbers, since the log-probability is a
    mean over them. A `Trainer` uses the loss as it is: for other latents see `for_elements`.
    """

    name: str
    sampler: AnySampler = FlowSDE(0.7)
    window: Window = FixedWindow(stop=-1)
    credit: CreditAssigner = field(default_factory=Uniform)
    loss: Loss = ClippedLoss()
    shared_noise: float = False
    elements: int = 65_536

    @cached_property
    def objective(self) -> type[Objective]:
        """`objective_of` the loss."""
        return objective_of(self.loss)

    def clip_for(self, elements: int) -> float:
        """c sqrt(`self.elements` / `elements`): the published clip in a space of `elements`
        numbers, whose mean log-ratio has a standard deviation larger by this factor. 0 if the loss
        has no clip.
        """
        return getattr(self.loss, "clip_range", 0.0) * math.sqrt(self.elements / elements)

    def for_elements(self, elements: int) -> "Method":
        """The method for latents of `elements` numbers, with the clip `clip_for` them."""
        clip = self.clip_for(elements)
        loss = with_options(self.loss, clip_range=clip) if clip else self.loss
        return replace(self, loss=loss, elements=elements)


def objective_of(loss: Loss) -> type[Objective]:
    """The kind of rows that a loss reads: finished images at drawn times if it declares `times`
    (`ForwardLoss`), otherwise transitions.
    """
    return ForwardObjective if isinstance(loss, ForwardLoss) else TransitionObjective


METHODS: dict[str, Callable[[], Method]] = {}
"""The methods by name, all published but value-grpo; a call makes a new one, since a rule may have
memory.
"""


def _published(compose: Callable[[], Method]) -> Callable[[], Method]:
    """List `compose` in `METHODS`."""
    METHODS[compose().name] = compose
    return compose


@_published
def flow_grpo() -> Method:
    """Flow-GRPO (arXiv 2505.05470): uniform credit, independent noise, Flow-SDE a = 0.7 on all
    steps but the last.
    """
    return Method("flow-grpo")


@_published
def stepwise_flow_grpo() -> Method:
    """Stepwise-Flow-GRPO (arXiv 2603.28718): gains of 5-substep estimates, normalised jointly;
    shared noise in a group.
    """
    return Method("stepwise-flow-grpo", credit=StepwiseGain(), shared_noise=True)


@_published
def tp_grpo() -> Method:
    """TP-GRPO (arXiv 2602.06422): increments of ODE completions, aggregated at consistent turning
    points.
    """
    return Method("tp-grpo", credit=TurningPoint(), loss=ClippedLoss(clip_range=1e-5))


@_published
def dance_grpo() -> Method:
    """DanceGRPO (arXiv 2505.07818): uniform credit, constant noise, shared initial noise."""
    return Method("dance-grpo", DanceSDE(0.3), shared_noise=True)


@_published
def tempflow_weights() -> Method:
    """Uniform credit weighted by each step's noise (TempFlow-GRPO's noise-aware weighting)."""
    return Method("noise-weighted", credit=Weighted("noise"))


@_published
def dense_grpo() -> Method:
    """DenseGRPO's credit (arXiv 2601.20218): gains of ODE completions, normalised over the members
    step by step. Its second half, a noise level per step that is set before training, is not here.
    """
    return Method("dense-grpo", credit=DenseGain())


@_published
def branch_grpo() -> Method:
    """BranchGRPO (arXiv 2509.06040): trees from one z_0 per prompt, values compared within tree and
    node; Dance-SDE on all steps.

    Two children at the third and the fifth stochastic step, and group size / 4 at the first: 12
    leaves by splits in 3, 2 and 2. Published: splits in two at steps 0, 3, 6 and 9 of 20, 16
    leaves, edges weighted equally, children of a split drawn with 4 times the noise that their
    log-probability assumes. Here a decision counts once per leaf, and the noise is the sampler's.
    """
    credit = DepthRelative("tree", "sample", probe=Branch((1, 1, 2, 1, 2)))
    loss = ClippedLoss(clip_range=1e-3)
    return Method("branch-grpo", DanceSDE(0.3), FixedWindow(), credit, loss, shared_noise=True)


@_published
def tempflow_grpo() -> Method:
    """TempFlow-GRPO (arXiv 2508.04324): 6 draws at each step of an ODE trunk, finished by the ODE,
    compared per seed.

    The loss is weighted by the noise of the step.

    A seed has 6 images for every decision: 54 on the published 9 of 10 steps, 4 seeds per prompt.
    Source: its released code (Shredded-Pork/TempFlow-GRPO, e66824e).
    """
    credit = Weighted("noise", rule=SiblingRelative(probe=Comb(branches=6)))
    return Method("tempflow-grpo", credit=credit)


@_published
def granular_grpo() -> Method:
    """Granular-GRPO (arXiv 2510.01982): draws at a step of a trunk, finished with strides 1, 2 and
    3; the Z of each are summed.

    One trunk per prompt, a third of the group size in draws (12: 4), at a step drawn every
    iteration among the stochastic ones, by default the first half of 10. Published: 12 draws at
    each step of the first half of 16, which takes groups of 12 x 3 x 8. The summed advantages are
    up to three times as large as those of one stride.
    """
    return Method(
        "granular-grpo",
        window=FixedWindow(0, 5),
        credit=SiblingRelative(probe=Comb(branches=1, count=1, strides=(1, 2, 3))),
        shared_noise=True,
    )


@_published
def tree_grpo() -> Method:
    """TreeGRPO (arXiv 2512.08153): leaf advantages backed up a tree from one z_0 that branches at
    the first stochastic steps.

    Two children at the second and the third stochastic step, and group size / 4 at the first (12:
    3); by default these are a window of 3 steps whose start is drawn every iteration from a
    truncated geometric distribution, r = 0.5. Published: three children at each, 27 leaves. With a
    longer window the steps after the third are decisions, too; published trees have none.
    """
    return Method(
        "tree-grpo",
        window=RandomWindow(3, geometric=0.5),
        credit=BackedUp(probe=Branch((1, 2, 2))),
        shared_noise=True,
    )


def _forward_process(name: str, sampler: AnySampler, loss: Loss) -> Method:
    return Method(name, sampler, FixedWindow(), Uniform(std="batch", clamp=None), loss)


@_published
def diffusion_nft() -> Method:
    """DiffusionNFT (arXiv 2509.16117): the forward process, two mixtures of old and new velocity;
    DPM-Solver++.

    The loss has the options published for most rewards (beta 1, an old network whose d grows by
    0.001 per step).
    """
    return _forward_process("diffusion-nft", Multistep(), DiffusionNFT(kl_weight=0.0))


@_published
def awm() -> Method:
    """AWM (arXiv 2509.25050): the forward process, matching weighted by advantages; SA-Solver with
    noise 0.4.

    The loss has the options published for GenEval, without their KL weight.
    """
    return _forward_process("awm", Multistep("sa", tau=0.4), AWM(kl_weight=0.0))


@_published
def dgpo() -> Method:
    """DGPO (arXiv 2510.08425): the forward process, the good half of a group preferred to the bad
    half; DPM-Solver++.

    The loss has the published options, except for beta_dpo 1 instead of 100, which fits errors in
    two dimensions, and samples of the current weights throughout. Mixture world, 40 iterations,
    held-out reward from 0.220: 0.88 to 0.92 with learning rate 2e-2 (seeds 0 to 2; with clip 0.2:
    0.41 to 0.80), 0.26 with beta_dpo 100 (1e-2, no clip, seed 0).
    """
    loss = DGPO(beta_dpo=1.0, sample_from=None, kl_weight=0.0)
    return _forward_process("dgpo", Multistep(), loss)


@_published
def value_grpo() -> Method:
    """Calibrated gains of Tweedie estimates, with Flow-GRPO's sampler and loss: no network
    evaluation more than Flow-GRPO. Not a published method.
    """
    return Method("value-grpo", credit=CalibratedGain())


def _whole_image(name: str, sampler: AnySampler, credit: Uniform, **options: Any) -> Method:
    """Methods that train one ratio per image, or per visited state, without penalties."""
    loss = AWM(advantage_scale=5.0, kl_weight=0.0, average_weight=0.0, **options)
    return Method(name, sampler, FixedWindow(), credit, loss)


@_published
def v_grpo() -> Method:
    """V-GRPO (arXiv 2604.23380): one surrogate likelihood per image, of 4 pairs of time and noise
    that a group shares; DPM-Solver++.

    Sources: the abstract, and formulas and constants as a third-party port cites them.
    """
    times = UniformTimes(4, low=1e-3, shift=1.0, shared=True)
    credit = Uniform(clamp=3.0, limit="tanh")
    loss = dict(weight="normalised", ratio="sum_first", times=times, noise="group")
    return _whole_image("v-grpo", Multistep(), credit, **loss)


@_published
def epg() -> Method:
    """EPG (arXiv 2602.04663): the likelihood of an image is its matching error; rewards minus the
    group's mean; ODE sampling.

    Sources: the abstract, and formulas as a third-party port cites them. Unknown: the number of
    times per image (here 4, stratified).
    """
    times = UniformTimes(4, low=1e-3, shift=1.0)
    credit = Uniform(std=None, clamp=None)
    return _whole_image("epg", ODE(), credit, weight="uniform", ratio="sum_first", times=times)


@_published
def fdfo() -> Method:
    """FDFO (arXiv 2603.12893): finite differences of whole trajectories that start from nearly the
    same noise; a velocity is pulled along the difference of the images.

    The churn of every node is CPS with cos(eta pi / 2) = 1 / (1 + gamma), gamma = e^0.0025 - 1; the
    initial noise is churned, too, which is no decision. Published in pairs (`group_size` 2); with
    more members the difference is from the group's mean. Source: its code
    (NVlabs/finite-difference-flow-optimization, 740e22f).
    """
    kept = math.exp(-0.0025)  # of a node's noise; the rest is fresh
    eta = 2.0 / math.pi * math.acos(kept)
    credit, times = Uniform(std=None, clamp=None), PermutedTimes(1.0)
    options = dict(weight="uniform", clip=0.03, trust="quadratic", times=times, noise="difference")
    return replace(_whole_image("fdfo", CPS(eta), credit, **options), shared_noise=kept**2)


@_published
def rsm() -> Method:
    """RSM (arXiv 2604.17415): branches at the first steps of an ODE trunk, 6, 6, 8 and 10, compared
    per seed; all steps weigh the same.

    Source: its code (jaylee2000/rsm, e8be3df), recipe lowsnr2 with loss fair_clip2.
    """
    comb = Comb(branches=(6, 6, 8, 10), weight="step")
    return Method("rsm", credit=SiblingRelative(probe=comb), loss=RSM(fair=True))


@_published
def step_nft() -> Method:
    """pi-StepNFT (arXiv 2603.02083): DiffusionNFT's preference on the visited transitions of
    Flow-SDE; published for robots.

    Source: RLinf's code (commit a3816b5), defaults.
    """
    return Method("step-nft", loss=StepNFT())


def try_credit(
    method: Method, stds: Tensor, members: int, trained: Tensor | None = None
) -> tuple[Experience, Credit]:
    """Apply a method's rule to a random record of two prompts, to find errors before a run starts.

    A rule that reads states or conditions is not applied; its credit is 0.

    Args:
        method: the method; a copy of its rule is used, so that its memory does not change.
        stds: standard deviations of the sampler's transitions [step].
        members: members per group.
        trained: the steps of the loss; None for all.

    Returns:
        The record and the credit.

    Raises:
        ConfigError: the number of members does not fit the rule's probe.
        CreditError: the rule breaks its contract.
        PartError: a rule of the user raises an exception.
    """
    rule, generator = copy.deepcopy(method.credit), torch.Generator().manual_seed(0)
    groups = Groups(2, members, method.shared_noise)
    tree = group_tree(stds, groups, rule.probe, generator)
    valid = torch.ones(2, members, dtype=torch.bool)
    steps = None if trained is None else trained.tolist()
    decisions = Decisions.of(uniform_schedule(len(stds)), stds, tree, valid, steps)
    values = torch.rand(2, members, len(decisions) + 1, generator=generator)
    experience = example(values, rule.probe, decisions)
    needs = needs_of(rule)
    experience = replace(experience, parts=dict.fromkeys(needs.parts, experience.values))
    if {"trajectories", "condition"} & set(needs.fields):
        return experience, Credit(torch.zeros(decisions.mask.shape))
    return experience, credit_of(rule, experience)


def check_one_advantage(loss: Loss, rule: CreditAssigner, advantages: Tensor, mask: Tensor) -> None:
    """Raise `CreditError` if the `loss` needs one advantage per trajectory, and those of `rule`
    ([prompt, member, decision]) differ between the trained decisions of `mask`.
    """
    if not getattr(loss, "one_advantage", False) or not bool(mask.any()):
        return
    highest = advantages.masked_fill(~mask, -torch.inf).amax(-1)
    lowest = advantages.masked_fill(~mask, torch.inf).amin(-1)
    if bool((highest - lowest > 1e-6 * advantages[mask].abs().amax()).any()):
        raise CreditError(
            f"{type(loss).__name__} needs one advantage per trajectory, but the advantages"
            f" of {type(rule).__name__} differ between decisions; allowed: a rule that credits all"
            " decisions equally, such as uniform"
        )


def with_options(part: Part, **options: Any) -> Part:
    """`part` with other values of those `options` that it has as a data class."""
    names = {item.name for item in fields(part)} if is_dataclass(part) else set()
    chosen = {name: value for name, value in options.items() if name in names}
    return cast(Part, replace(cast(Any, part), **chosen)) if chosen else part

"""The papers as compositions of a sampler, a credit rule and a loss, and compositions by name."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from flowrl.core.errors import (
    ConfigError,
    CreditError,
    FlowrlError,
    PartError,
    part_errors,
    require,
)
from flowrl.core.experience import Credit, Decisions, Experience
from flowrl.core.protocols import AnySampler, CreditRule, ForwardLoss, PolicyLoss, Window
from flowrl.core.types import Prompt
from flowrl.credit import (
    BackedUp,
    DenseGain,
    DepthRelative,
    SiblingRelative,
    StepwiseGain,
    TurningPoint,
    Uniform,
    Weighted,
    credit_of,
)
from flowrl.flow import uniform_schedule
from flowrl.losses import AWM, DGPO, ClippedLoss, DiffusionNFT
from flowrl.parts.registry import build
from flowrl.probes import Branch, Comb
from flowrl.rollout import Groups, group_tree
from flowrl.samplers import DanceSDE, FixedWindow, FlowSDE, Multistep, RandomWindow

Loss = PolicyLoss | ForwardLoss
T = TypeVar("T", bound=Callable[..., Any])
Part = TypeVar("Part")
SECTIONS = """

Args:
    sampler: replaces the method's kernel.
    loss: replaces the method's loss.
    window: replaces the method's stochastic steps.

Returns:
    The method.

Raises:
    ConfigError: `loss` is a policy loss, and the method requires a forward-process loss.
"""


@dataclass(frozen=True)
class Method:
    """A method: how trajectories are sampled, how steps are credited (`credit`), and what is
    minimised (`loss`).

    The kernel `sampler` is used on the steps of `window`, and the ODE on the others; a multistep
    solver ignores `window`. `name` is its label in tables. With `shared_noise` the members of a
    group start from the same x_T. `source` cites the paper. The loss has the published clip, which
    belongs to latents of `elements` numbers: the log-probability is a mean over them.
    """

    name: str
    sampler: AnySampler
    window: Window
    credit: CreditRule
    loss: Loss
    shared_noise: bool = False
    source: str = ""
    elements: int = 65_536

    def clip_for(self, elements: int) -> float:
        """c sqrt(`self.elements` / `elements`): the published clip in a space of `elements`
        numbers, whose mean log-ratio has a standard deviation larger by this factor. 0 if the loss
        has no clip.
        """
        return getattr(self.loss, "clip_range", 0.0) * math.sqrt(self.elements / elements)


def _composition(function: T) -> T:
    """`function` with the sections that all methods' docstrings share."""
    function.__doc__ = inspect.cleandoc(function.__doc__ or "") + SECTIONS
    return function


@_composition
def flow_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """Flow-GRPO (arXiv 2505.05470): uniform credit, independent noise, Flow-SDE a = 0.7 on all
    steps but the last.
    """
    sampler, window = sampler or FlowSDE(0.7), window or FixedWindow(stop=-1)
    return Method(
        "flow-grpo", sampler, window, Uniform(), loss or ClippedLoss(), source="arXiv 2505.05470"
    )


@_composition
def stepwise_flow_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """Stepwise-Flow-GRPO (arXiv 2603.28718): gains of 5-substep estimates, normalised jointly;
    shared noise in a group.
    """
    base = flow_grpo(sampler, loss, window)
    return replace(
        base,
        name="stepwise-flow-grpo",
        credit=StepwiseGain(),
        shared_noise=True,
        source="arXiv 2603.28718",
    )


@_composition
def tp_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """TP-GRPO (arXiv 2602.06422): increments of ODE completions, aggregated at consistent turning
    points.
    """
    base = flow_grpo(sampler, loss or ClippedLoss(clip_range=1e-5), window)
    return replace(base, name="tp-grpo", credit=TurningPoint(), source="arXiv 2602.06422")


@_composition
def dance_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """DanceGRPO (arXiv 2505.07818): uniform credit, constant noise, shared initial noise."""
    base = flow_grpo(sampler or DanceSDE(0.3), loss, window)
    return replace(base, name="dance-grpo", shared_noise=True, source="arXiv 2505.07818")


@_composition
def dense_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """DenseGRPO (arXiv 2601.20218): gains of ODE completions, normalised over the members step by
    step.
    """
    return replace(
        flow_grpo(sampler, loss, window),
        name="dense-grpo",
        credit=DenseGain(),
        source="arXiv 2601.20218",
    )


@_composition
def tempflow_weights(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """Uniform credit weighted by each step's noise (TempFlow-GRPO's noise-aware weighting)."""
    base = flow_grpo(sampler, loss, window)
    return replace(
        base, name="noise-weighted", credit=Weighted("noise"), source="TempFlow-GRPO, ICLR 2026"
    )


@_composition
def branch_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """BranchGRPO (arXiv 2509.06040): trees from one x_T per prompt, values compared within tree and
    node; Dance-SDE on all steps.

    Two children at the third and the fifth stochastic step, and group size / 4 at the first: 12
    leaves by splits in 3, 2 and 2. Published: splits in two at steps 0, 3, 6 and 9 of 20, 16
    leaves, edges weighted equally, children of a split drawn with 4 times the noise that their
    log-probability assumes. Here a decision counts once per leaf, and the noise is the sampler's.
    """
    credit = DepthRelative("tree", "sample", probe=Branch((1, 1, 2, 1, 2)))
    loss = loss or ClippedLoss(clip_range=1e-3)
    base = flow_grpo(sampler or DanceSDE(0.3), loss, window or FixedWindow())
    return replace(
        base, name="branch-grpo", credit=credit, shared_noise=True, source="arXiv 2509.06040"
    )


@_composition
def tempflow_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """TempFlow-GRPO (arXiv 2508.04324): 6 draws at each step of an ODE trunk, finished by the ODE,
    compared per seed.

    The loss is weighted by the noise of the step.

    A seed has 6 images for every decision: 54 on the published 9 of 10 steps, 4 seeds per prompt.
    Source: its released code (Shredded-Pork/TempFlow-GRPO, e66824e).
    """
    credit = Weighted("noise", rule=SiblingRelative(probe=Comb(branches=6)))
    return replace(
        flow_grpo(sampler, loss, window),
        name="tempflow-grpo",
        credit=credit,
        source="arXiv 2508.04324",
    )


@_composition
def granular_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """Granular-GRPO (arXiv 2510.01982): draws at a step of a trunk, finished with strides 1, 2 and
    3; the Z of each are summed.

    One trunk per prompt, a third of the group size in draws (12: 4), at a step drawn every
    iteration among the stochastic ones, by default the first half of 10. Published: 12 draws at
    each step of the first half of 16, which takes groups of 12 x 3 x 8. The summed advantages are
    up to three times as large as those of one stride.
    """
    credit = SiblingRelative(probe=Comb(branches=1, count=1, strides=(1, 2, 3)))
    base = flow_grpo(sampler, loss, window or FixedWindow(0, 5))
    return replace(
        base, name="granular-grpo", credit=credit, shared_noise=True, source="arXiv 2510.01982"
    )


@_composition
def tree_grpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """TreeGRPO (arXiv 2512.08153): leaf advantages backed up a tree from one x_T that branches at
    the first stochastic steps.

    Two children at the second and the third stochastic step, and group size / 4 at the first (12:
    3); by default these are a window of 3 steps whose start is drawn every iteration from a
    truncated geometric distribution, r = 0.5. Published: three children at each, 27 leaves. With a
    longer window the steps after the third are decisions, too; published trees have none.
    """
    credit = BackedUp(probe=Branch((1, 2, 2)))
    base = flow_grpo(sampler, loss, window or RandomWindow(3, geometric=0.5))
    return replace(
        base, name="tree-grpo", credit=credit, shared_noise=True, source="arXiv 2512.08153"
    )


def _forward_process(
    name: str, sampler: AnySampler, loss: Loss, window: Window | None, source: str
) -> Method:
    allowed = f"a forward-process loss, such as {name}, the method's own"
    require(isinstance(loss, ForwardLoss), f"loss of {name}", type(loss).__name__, allowed)
    credit = Uniform(std="batch", clamp=None)
    return Method(name, sampler, window or FixedWindow(), credit, loss, source=source)


@_composition
def diffusion_nft(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """DiffusionNFT (arXiv 2509.16117): the forward process, two mixtures of old and new velocity;
    DPM-Solver++.

    The loss has the options published for most rewards (beta 1, an old network whose d grows by
    0.001 per step).
    """
    sampler, loss = sampler or Multistep(), loss or DiffusionNFT(kl_weight=0.0)
    return _forward_process("diffusion-nft", sampler, loss, window, "arXiv 2509.16117")


@_composition
def awm(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """AWM (arXiv 2509.25050): the forward process, matching weighted by advantages; SA-Solver with
    noise 0.4.

    The loss has the options published for GenEval, without their KL weight.
    """
    sampler, loss = sampler or Multistep("sa", tau=0.4), loss or AWM(kl_weight=0.0)
    return _forward_process("awm", sampler, loss, window, "arXiv 2509.25050")


@_composition
def dgpo(
    sampler: AnySampler | None = None, loss: Loss | None = None, window: Window | None = None
) -> Method:
    """DGPO (arXiv 2510.08425): the forward process, the good half of a group preferred to the bad
    half; DPM-Solver++.

    The loss has the published options, except for beta_dpo 1 instead of 100, which fits errors in
    two dimensions, and samples of the current weights throughout. Mixture world, 40 iterations,
    held-out reward from 0.220: 0.88 to 0.92 with learning rate 2e-2 (seeds 0 to 2; with clip 0.2:
    0.41 to 0.80), 0.26 with beta_dpo 100 (1e-2, no clip, seed 0).
    """
    sampler, loss = (
        sampler or Multistep(),
        loss or DGPO(beta_dpo=1.0, sample_from=None, kl_weight=0.0),
    )
    return _forward_process("dgpo", sampler, loss, window, "arXiv 2510.08425")


METHODS: dict[str, Callable[..., Method]] = {
    "flow-grpo": flow_grpo,
    "stepwise-flow-grpo": stepwise_flow_grpo,
    "tp-grpo": tp_grpo,
    "dance-grpo": dance_grpo,
    "noise-weighted": tempflow_weights,
    "dense-grpo": dense_grpo,
    "branch-grpo": branch_grpo,
    "tempflow-grpo": tempflow_grpo,
    "granular-grpo": granular_grpo,
    "tree-grpo": tree_grpo,
    "diffusion-nft": diffusion_nft,
    "awm": awm,
    "dgpo": dgpo,
}


@dataclass(frozen=True)
class Trial:
    """A rule's credit for a random record.

    Args:
        experience: the record.
        credit: the rule's credit.
    """

    experience: Experience
    credit: Credit


def try_credit(
    method: Method,
    stds: torch.Tensor,
    members: int,
    trained: Sequence[int] | torch.Tensor | None = None,
) -> Trial:
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
        CreditError: the rule fails or breaks its contract.
    """
    rule, generator = copy.deepcopy(method.credit), torch.Generator().manual_seed(0)
    prompts = [Prompt(f"prompt {number}") for number in range(2)]
    tree = group_tree(
        stds, Groups(len(prompts), members, method.shared_noise), rule.probe, generator
    )
    valid, steps = torch.ones(len(prompts), members, dtype=torch.bool), None
    if trained is not None:
        steps = torch.as_tensor(trained).tolist()
    decisions = Decisions.of(uniform_schedule(len(stds)), stds, tree, valid, steps)
    values = torch.rand(*decisions.mask.shape[:2], len(decisions) + 1, generator=generator)
    filled = [*rule.probe.fills(len(decisions)), -1]
    seen = torch.full_like(values, torch.nan)
    seen[..., filled] = values[..., filled]
    if tree.branched:
        seen = tree.value_table(tree.values(values[..., -1]))
    names = getattr(rule, "weights", None)
    parts = dict.fromkeys(names, seen) if isinstance(names, Mapping) else {}
    log_probs = torch.randn(decisions.mask.shape, generator=generator)
    log_probs = log_probs.masked_fill(~decisions.drawn, torch.nan)
    experience = Experience(prompts, seen, decisions, valid, parts, log_probs=log_probs)
    if {"trajectories", "condition"} & set(getattr(rule, "reads_fields", ())):
        return Trial(experience, Credit(torch.zeros(decisions.mask.shape)))
    shape, name = tuple(seen.shape), type(rule).__name__
    try:
        with part_errors():  # names the file and the line of a rule of the user's own
            return Trial(experience, credit_of(rule, experience))
    except PartError as error:
        raise CreditError(f"{error}; it was tried on a table of {shape}") from error
    except FlowrlError:
        raise
    except Exception as error:
        raise CreditError(
            f"{name} failed on a table of {shape}: {type(error).__name__}: {error}"
        ) from error


def check_one_advantage(
    loss: Loss, rule: CreditRule, advantages: torch.Tensor, mask: torch.Tensor
) -> None:
    """Check the credit for a loss that needs one advantage per trajectory.

    Args:
        loss: the loss; any other loss passes.
        rule: the credit rule, for the message.
        advantages: advantages [prompt, member, decision].
        mask: the trained decisions [prompt, member, decision].

    Raises:
        CreditError: the advantages of a trajectory differ between trained decisions.
    """
    if not getattr(loss, "one_advantage", False) or not bool(mask.any()):
        return
    highest = advantages.masked_fill(~mask, -torch.inf).amax(-1)
    spread = (highest - advantages.masked_fill(~mask, torch.inf).amin(-1))[mask.any(-1)]
    if bool((spread > 1e-6 * advantages[mask].abs().amax()).any()):
        most = f"by up to {float(spread.max()):.3g} between the trained decisions of a trajectory"
        raise CreditError(
            f"{type(loss).__name__} needs one advantage per trajectory, but those of"
            f" {type(rule).__name__} differ {most}: use a rule that credits all decisions equally,"
            " such as uniform, or another loss"
        )


def named_method(name: str, credit: str = "") -> Method:
    """A method by name, as published, optionally with another credit rule.

    With `credit`, the rule's attribute `shared_noise`, if there is one, replaces the method's.

    Args:
        name: name of the method; with `credit`, a further name is a label of Flow-GRPO with this
            rule.
        credit: spec of a credit rule (see `flowrl.parts.specs`).

    Returns:
        The method.

    Raises:
        ConfigError: the name is unknown, or `credit` is not allowed.
    """
    known = f"{', '.join(METHODS)}, or a credit rule by name or file with --credit"
    if name not in METHODS and not credit:
        raise ConfigError(f"unknown method {name!r}; allowed: {known}")
    method = METHODS.get(name, flow_grpo)()
    if not credit:
        return method
    rule = build("credit", credit)
    shared = bool(getattr(rule, "shared_noise", method.shared_noise))
    return replace(method, name=name or credit, credit=rule, shared_noise=shared, source=credit)


def with_options(part: Part, **options: Any) -> Part:
    """The `part` with other values of those `options` that it has; it must be a data class to have
    any.
    """
    known: Any = part
    names = {item.name for item in fields(known)} if is_dataclass(part) else set()
    chosen = {name: value for name, value in options.items() if name in names}
    changed: Any = replace(known, **chosen) if chosen else part
    return changed

"""The papers as compositions of a sampler, a credit rule and a loss, and compositions by name."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from flowrl.credit import (
    BackedUp,
    DenseGain,
    DepthRelative,
    SiblingRelative,
    StepwiseGain,
    TurningPoint,
    Uniform,
    Weighted,
    check_advantages,
    example,
)
from flowrl.errors import ConfigError, CreditError, FlowrlError, PartError, part_errors, require
from flowrl.losses import ClippedLoss
from flowrl.probes import Branch, Comb
from flowrl.protocols import CreditAssigner, ForwardLoss, OneAdvantage, PartsCreditAssigner, PolicyLoss, RandomSampler, Sampler
from flowrl.registry import build
from flowrl.samplers import AllButLast, DanceSDE, FlowSDE, Multistep, RandomWindow, SlidingWindow, Window
from flowrl.types import Schedule

Loss = PolicyLoss | ForwardLoss
T = TypeVar("T", bound=Callable[..., Any])
SECTIONS = """

Args:
    sampler: replaces the method's sampler.
    loss: replaces the method's loss.

Returns:
    The method.

Raises:
    ConfigError: `loss` is a policy loss, and the method requires a forward-process loss.
"""


@dataclass(frozen=True)
class Method:
    """A method: how trajectories are sampled (`sampler`), how steps are credited (`credit`), and what is minimised (`loss`).

    `name` is its label in tables. With `shared_noise` the members of a group start from the same x_T. `source` cites the paper.
    """

    name: str
    sampler: Sampler | RandomSampler
    credit: CreditAssigner
    loss: Loss
    shared_noise: bool = False
    source: str = ""


def _composition(function: T) -> T:
    """`function` with the sections that all methods' docstrings share."""
    function.__doc__ = inspect.cleandoc(function.__doc__ or "") + SECTIONS
    return function


@_composition
def flow_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """Flow-GRPO (arXiv 2505.05470): uniform credit, independent noise, Flow-SDE a = 0.7 on all steps but the last."""
    return Method("flow-grpo", sampler or AllButLast(FlowSDE(0.7)), Uniform(), loss or ClippedLoss(), source="arXiv 2505.05470")


@_composition
def stepwise_flow_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """Stepwise-Flow-GRPO (arXiv 2603.28718): gains of 5-substep estimates, normalised jointly; shared noise in a group."""
    base = flow_grpo(sampler, loss)
    return replace(base, name="stepwise-flow-grpo", credit=StepwiseGain(), shared_noise=True, source="arXiv 2603.28718")


@_composition
def tp_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """TP-GRPO (arXiv 2602.06422): increments of ODE completions, aggregated at consistent turning points."""
    base = flow_grpo(sampler, loss or ClippedLoss(clip_range=1e-5))
    return replace(base, name="tp-grpo", credit=TurningPoint(), source="arXiv 2602.06422")


@_composition
def dance_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """DanceGRPO (arXiv 2505.07818): uniform credit, constant noise, shared initial noise."""
    base = flow_grpo(sampler or AllButLast(DanceSDE(0.3)), loss)
    return replace(base, name="dance-grpo", shared_noise=True, source="arXiv 2505.07818")


@_composition
def dense_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """DenseGRPO (arXiv 2601.20218): gains of ODE completions, normalised over the members step by step."""
    return replace(flow_grpo(sampler, loss), name="dense-grpo", credit=DenseGain(), source="arXiv 2601.20218")


@_composition
def tempflow_weights(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """Uniform credit weighted by each step's noise (TempFlow-GRPO's noise-aware weighting)."""
    base = flow_grpo(sampler, loss)
    return replace(base, name="noise-weighted", credit=Weighted("noise"), source="TempFlow-GRPO, ICLR 2026")


@_composition
def branch_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """BranchGRPO (arXiv 2509.06040): trees from one x_T per prompt, values compared within tree and node; Dance-SDE on all steps.

    Two children at the third and the fifth stochastic step, and group size / 4 at the first: 12 leaves by splits in 3, 2 and 2.
    Published: splits in two at steps 0, 3, 6 and 9 of 20, 16 leaves, edges weighted equally, children of a split drawn with 4
    times the noise that their log-probability assumes. Here a decision counts once per leaf, and the noise is the sampler's.
    """
    credit = DepthRelative("tree", "sample", probe=Branch((1, 1, 2, 1, 2)))
    base = flow_grpo(sampler or DanceSDE(0.3), loss)
    return replace(base, name="branch-grpo", credit=credit, shared_noise=True, source="arXiv 2509.06040")


@_composition
def tempflow_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """TempFlow-GRPO (arXiv 2508.04324): 6 draws at a step of an ODE trunk, finished by the ODE, compared per seed; noise weights.

    The step is drawn every iteration, the same for all groups; the paper does not specify which steps an iteration uses. Groups
    of 12 have 2 seeds of 6 draws, groups of 24 the published 4 seeds.
    """
    credit = Weighted("noise", rule=SiblingRelative(probe=Comb(branches=6, count=1)))
    return replace(flow_grpo(sampler, loss), name="tempflow-grpo", credit=credit, source="arXiv 2508.04324")


@_composition
def granular_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """Granular-GRPO (arXiv 2510.01982): draws at a step of a trunk, finished with strides 1, 2 and 3; the Z of each are summed.

    One trunk per prompt, a third of the group size in draws (12: 4), at a step drawn every iteration among the stochastic
    ones, by default the first half of 10. Published: 12 draws at each step of the first half of 16, which takes groups of
    12 x 3 x 8. The summed advantages are up to three times as large as those of one stride.
    """
    credit = SiblingRelative(probe=Comb(branches=1, count=1, strides=(1, 2, 3)))
    base = flow_grpo(sampler or Window(FlowSDE(0.7), 0, 5), loss)
    return replace(base, name="granular-grpo", credit=credit, shared_noise=True, source="arXiv 2510.01982")


@_composition
def tree_grpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """TreeGRPO (arXiv 2512.08153): leaf advantages backed up a tree from one x_T that branches at the first stochastic steps.

    Two children at the second and the third stochastic step, and group size / 4 at the first (12: 3); by default these are a
    window of 3 steps whose start is drawn every iteration from a truncated geometric distribution, r = 0.5. Published: three
    children at each, 27 leaves. With a longer window the steps after the third are decisions, too; published trees have none.
    """
    credit = BackedUp(probe=Branch((1, 2, 2)))
    base = flow_grpo(sampler or RandomWindow(FlowSDE(0.7), 3, geometric=0.5), loss)
    return replace(base, name="tree-grpo", credit=credit, shared_noise=True, source="arXiv 2512.08153")


OWN_LOSSES = {
    "diffusion-nft": "diffusion-nft",
    "awm": "awm",
    "dgpo": "dgpo(beta_dpo=1.0, sample_from=None)",
}
"""Default losses of the forward-process methods; the KL weight is that of the run."""
OWN_SAMPLERS = {"diffusion-nft": "multistep", "awm": "multistep(solver=sa, tau=0.4)", "dgpo": "multistep"}
"""Their published samplers, which replace the plain "flow-sde"; "flow-sde()" is Flow-SDE."""


def method_loss(method: str, spec: str, **defaults: Any) -> Loss:
    """The loss of a method.

    For a method of `OWN_LOSSES` the plain spec "clipped" stands for the method's published loss.

    Args:
        method: name of the method.
        spec: spec of the loss.
        **defaults: options of the loss, unless `spec` sets them (see `build`).

    Returns:
        The loss.

    Raises:
        ConfigError: `spec` is not allowed, or is a policy loss for a forward-process method.
    """
    own = OWN_LOSSES.get(method)
    loss: Loss = build("loss", own if own and spec == "clipped" else spec, **defaults)
    allowed = f"a forward-process loss with {method}, as in {own}; clipped, the default, is {method}'s own"
    require(own is None or isinstance(loss, ForwardLoss), "loss", spec, allowed)
    return loss


def _forward_process(name: str, sampler: Sampler | RandomSampler | None, loss: Loss | None, source: str) -> Method:
    loss = method_loss(name, "clipped", kl_weight=0.0) if loss is None else loss
    require(isinstance(loss, ForwardLoss), f"loss of {name}", type(loss).__name__, "a forward-process loss")
    own = build("sampler", OWN_SAMPLERS[name], noise_level=0.0)
    return Method(name, sampler or own, Uniform(std="batch", clamp=None), loss, source=source)


@_composition
def diffusion_nft(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """DiffusionNFT (arXiv 2509.16117): the forward process, two mixtures of old and new velocity; DPM-Solver++.

    The loss has the options published for most rewards (beta 1, an old network whose d grows by 0.001 per step).
    """
    return _forward_process("diffusion-nft", sampler, loss, "arXiv 2509.16117")


@_composition
def awm(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """AWM (arXiv 2509.25050): the forward process, matching weighted by advantages; SA-Solver with noise 0.4.

    The loss has the options published for GenEval, without their KL weight.
    """
    return _forward_process("awm", sampler, loss, "arXiv 2509.25050")


@_composition
def dgpo(sampler: Sampler | RandomSampler | None = None, loss: Loss | None = None) -> Method:
    """DGPO (arXiv 2510.08425): the forward process, the good half of a group preferred to the bad half; DPM-Solver++.

    The loss has the published options, except for beta_dpo 1 instead of 100, which fits errors in two dimensions, and samples of
    the current weights throughout. Mixture world, 40 iterations, held-out reward from 0.220: 0.88 to 0.92 with learning rate 2e-2
    (seeds 0 to 2; with clip 0.2: 0.41 to 0.80), 0.26 with beta_dpo 100 (1e-2, no clip, seed 0).
    """
    return _forward_process("dgpo", sampler, loss, "arXiv 2510.08425")


METHODS: dict[str, Callable[..., Method]] = {
    "flow-grpo": flow_grpo, "stepwise-flow-grpo": stepwise_flow_grpo, "tp-grpo": tp_grpo, "dance-grpo": dance_grpo,
    "noise-weighted": tempflow_weights, "dense-grpo": dense_grpo, "branch-grpo": branch_grpo, "tempflow-grpo": tempflow_grpo,
    "granular-grpo": granular_grpo, "tree-grpo": tree_grpo, "diffusion-nft": diffusion_nft, "awm": awm, "dgpo": dgpo,
}  # fmt: skip
WINDOWS = (
    "all, all-but-last, START:SIZE (fixed), random:SIZE[:END][:RATIO] (drawn every iteration, among the first END steps, starts "
    "with chances proportional to RATIO^start, which has a decimal point and is in (0, 1)) or sliding:SIZE[:STRIDE[:EVERY]]"
)


def make_sampler(kernel: str, noise_level: float, window: str = "all-but-last", method: str = "") -> Sampler | RandomSampler:
    """The sampler of a method, stochastic on the steps of `window`.

    For a method of `OWN_SAMPLERS` the plain spec "flow-sde" stands for the method's published sampler.

    Args:
        kernel: spec of the kernel.
        noise_level: noise level of the kernel, unless `kernel` sets it.
        window: the stochastic steps (see `WINDOWS`).
        method: name of the method.

    Returns:
        The sampler.

    Raises:
        ConfigError: `kernel` or `window` is not allowed.
    """
    kernel = OWN_SAMPLERS.get(method, kernel) if kernel == "flow-sde" else kernel
    base = build("sampler", kernel, noise_level=noise_level)
    if isinstance(base, RandomSampler | Multistep):
        return base
    if window == "all":
        return base
    if window == "all-but-last":
        return AllButLast(base)
    kind, *numbers = window.split(":")
    try:
        if kind == "random":
            size, *more = numbers
            (high,) = [int(number) for number in more if "." not in number] or (None,)
            (geometric,) = [float(number) for number in more if "." in number] or (None,)
            return RandomWindow(base, int(size), high=high, geometric=geometric)
        if kind == "sliding":
            size, stride, every = (*map(int, numbers), *(1, 1)[len(numbers) - 1 :])
            return SlidingWindow(base, size, stride, every)
        start, size = map(int, (kind, *numbers))
        return Window(base, start, size)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"window = {window!r} is not allowed; allowed: {WINDOWS}") from error


def try_credit(rule: CreditAssigner, schedule: Schedule, members: int) -> torch.Tensor:
    """Apply a rule to a random table, to find errors before a run starts.

    Args:
        rule: the credit rule; a copy is used, so that its memory does not change.
        schedule: the schedule of the run, with standard deviations.
        members: members per group.

    Returns:
        The rule's advantages for the table.

    Raises:
        CreditError: the rule fails or breaks its contract.
    """
    generator = torch.Generator().manual_seed(0)
    tried = example(torch.rand(2, members, schedule.steps + 1, generator=generator), schedule, rule.probe)
    name, table = type(rule).__name__, tried.rewards
    rule = copy.deepcopy(rule)  # a rule with memory must not remember the trial table
    try:
        with part_errors():  # names the file and the line of a rule of the user's own
            advantages = _tried(rule, table, tried.schedule)
    except PartError as error:
        raise CreditError(f"{error}; it was tried on a table of {tuple(table.shape)}") from error
    except FlowrlError:
        raise
    except Exception as error:
        raise CreditError(f"{name}.assign failed on a table of {tuple(table.shape)}: {type(error).__name__}: {error}") from error
    return check_advantages(advantages, table, name)


def check_one_advantage(loss: Loss, rule: CreditAssigner, advantages: torch.Tensor, steps: torch.Tensor | Sequence[int]) -> None:
    """Check the credit for a loss that needs one advantage per trajectory.

    Args:
        loss: the loss; any other loss passes.
        rule: the credit rule, for the message.
        advantages: advantages [sample, step], in main memory.
        steps: the trained steps.

    Raises:
        CreditError: the advantages of a trajectory differ between trained steps.
    """
    if not isinstance(loss, OneAdvantage) or len(advantages) == 0:
        return
    trained = advantages[:, torch.as_tensor(steps, device=advantages.device)]
    spread = trained.amax(1) - trained.amin(1)
    if bool((spread > 1e-6 * trained.abs().amax()).any()):
        most = f"by up to {float(spread.max()):.3g} between the trained steps of a trajectory"
        raise CreditError(
            f"{type(loss).__name__} needs one advantage per trajectory, but those of {type(rule).__name__} differ {most}: "
            "use a rule that credits all steps equally, such as uniform, or another loss"
        )


def _tried(rule: CreditAssigner, table: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """The rule's advantages for `table`; a rule that weights components by name gets components with these names."""
    names = getattr(rule, "weights", None)
    if isinstance(rule, PartsCreditAssigner) and isinstance(names, Mapping) and names:
        return rule.assign_parts(dict.fromkeys(names, table), schedule)
    return rule.assign(table, schedule)


def named_method(
    name: str,
    sampler: Sampler | RandomSampler | None = None,
    loss: Loss | None = None,
    credit: str = "",
    shared_noise: bool | None = None,
) -> Method:
    """A method by name, with another sampler or loss if they are given.

    With `credit`, groups share their noise if the rule has the attribute `shared_noise = True`.

    Args:
        name: name of the method; with `credit`, only the label in tables.
        sampler: replaces the method's sampler.
        loss: replaces the method's loss.
        credit: spec of a credit rule for Flow-GRPO in place of a named method (see `flowrl.specs`).
        shared_noise: whether groups share their initial noise; None for the choice of the rule or the method.

    Returns:
        The method.

    Raises:
        ConfigError: the name is unknown, or `credit` is not allowed.
    """
    if credit:
        rule = build("credit", credit)
        shared = bool(getattr(rule, "shared_noise", False))
        method = replace(flow_grpo(sampler, loss), name=name or credit, credit=rule, shared_noise=shared, source=credit)
    elif name in METHODS:
        method = METHODS[name](sampler, loss)
    else:
        raise ConfigError(
            f"unknown method {name!r}; allowed: {', '.join(METHODS)}, or a credit rule by name or file with --credit"
        )
    return method if shared_noise is None else replace(method, shared_noise=shared_noise)

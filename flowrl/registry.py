"""Parts by name: built-in ones, those of installed plug-ins, and classes in a file of the user's own.

A part is written as ``NAME``, ``path/to/file.py:Class`` or ``package.module:Class``; options as in ``NAME(option=value)``.
Values are Python literals, or bare words (``balance=trend``). Options called ``probe`` take ``none``, ``tweedie``,
``substeps:N``, ``completion`` or ``continuation:N``; options that hold another part (``rule``, ``sampler``, ``reward``) take its
name, and ``models`` a dictionary of rewards, as in ``weighted-sum(models={'pick': 'pickscore', 'text': 'ocr'})``.

A package adds parts by entry points in the groups ``flowrl.credit``, ``flowrl.samplers``, ``flowrl.rewards``,
``flowrl.losses`` and ``flowrl.features``, each pointing at a class (or a function) that builds the part from keyword options.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from flowrl.credit import GDPO, MovingAverageGain, RandomCredit, StepwiseGain, TurningPoint, Uniform, Weighted
from flowrl.errors import ConfigError, FlowrlError
from flowrl.losses import ClippedLoss, FlowDPPO, GRPOGuard, PolicyGradientLoss
from flowrl.protocols import CreditAssigner, Features, PolicyLoss, RandomSampler, RewardModel, Sampler
from flowrl.rewards import (
    OCR,
    Aesthetic,
    Clipped,
    CLIPScore,
    GenEval,
    HPSv21,
    JPEGCompressibility,
    JPEGIncompressibility,
    Judge,
    PickScore,
    WeightedSum,
)
from flowrl.rewards.diversity import ClipFeatures, LatentFeatures, PixelFeatures
from flowrl.samplers import CPS, DDIMSDE, ODE, DanceSDE, FlowSDE
from flowrl.types import Completion, Continuation, NoProbe, Probe, Substeps, Tweedie

Maker = Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """A kind of part: name and noun, entry-point group, built-in makers, and the protocols one of which a part must satisfy."""

    name: str
    noun: str
    group: str
    built_in: Mapping[str, Maker]
    protocols: tuple[type, ...]
    needs: str


KINDS: dict[str, Kind] = {
    "credit": Kind(
        "credit",
        "credit rule",
        "flowrl.credit",
        {
            "uniform": Uniform,
            "weighted": Weighted,
            "stepwise-gain": StepwiseGain,
            "dense-gain": partial(StepwiseGain, normalise="step", probe=Completion()),
            "moving-average-gain": MovingAverageGain,
            "turning-point": TurningPoint,
            "gdpo": GDPO,
            "random": RandomCredit,
        },
        (CreditAssigner,),
        "an attribute `probe` and a method `assign(rewards, schedule)`",
    ),
    "sampler": Kind(
        "sampler",
        "sampler",
        "flowrl.samplers",
        {"flow-sde": FlowSDE, "dance-sde": DanceSDE, "cps": CPS, "ddim-sde": DDIMSDE, "ode": ODE},
        (Sampler, RandomSampler),
        "a method `transition(latent, velocity, schedule, step)` or `draw(schedule, generator, iteration)`",
    ),
    "loss": Kind(
        "loss",
        "loss",
        "flowrl.losses",
        {"clipped": ClippedLoss, "grpo-guard": GRPOGuard, "flow-dppo": FlowDPPO, "policy-gradient": PolicyGradientLoss},
        (PolicyLoss,),
        "an attribute `needs_reference` and a method `loss(batch)`",
    ),
    "reward": Kind(
        "reward",
        "reward",
        "flowrl.rewards",
        {
            "aesthetic": Aesthetic,
            "clipped": Clipped,
            "clipscore": CLIPScore,
            "geneval": GenEval,
            "hpsv2.1": HPSv21,
            "jpeg-compressibility": JPEGCompressibility,
            "jpeg-incompressibility": JPEGIncompressibility,
            "judge": Judge,
            "ocr": OCR,
            "pickscore": PickScore,
            "weighted-sum": WeightedSum,
        },
        (RewardModel,),
        "a method `score(images, prompts)`",
    ),
    "features": Kind(
        "features",
        "feature space",
        "flowrl.features",
        {"pixels": PixelFeatures, "latents": LatentFeatures, "clip": ClipFeatures},
        (Features,),
        "a method `__call__(images)` that gives [sample, feature]",
    ),
}


NESTED_KINDS = {"rule": "credit", "sampler": "sampler", "reward": "reward", "models": "reward"}
"""Options that hold another part, and its kind; `models` holds a dictionary of parts."""


def build(kind: str, spec: str, **defaults: Any) -> Any:
    """The part of `kind` (credit, sampler, loss, reward or features) that `spec` describes.

    `defaults` are options used where the spec does not set them and the part has them. Raises `ConfigError` that names what is
    wrong and what is allowed: an unknown name, a missing file, an option that does not exist, an object of another kind.
    """
    entry = KINDS[kind]
    head, options = parse_spec(kind, spec)
    maker = find_maker(kind, head)
    parameters = _parameters(maker)
    _require_options(kind, head, options, parameters)
    chosen = {name: value for name, value in defaults.items() if parameters is not None and name in parameters}
    chosen |= {name: _convert(name, value, defaults) for name, value in options.items()}
    needed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [n for n, p in (parameters or {}).items() if p.default is p.empty and p.kind in needed and n not in chosen]
    if missing:
        raise ConfigError(f"{kind}: {head} needs {', '.join(missing)}, as in {head}({missing[0]}=...)")
    try:
        part = maker(**chosen)
    except FlowrlError:
        raise
    except Exception as error:
        raise ConfigError(f"{kind}: building {spec} failed: {type(error).__name__}: {error}") from error
    if not isinstance(part, entry.protocols):
        raise ConfigError(f"{kind}: {head} is no {entry.noun}; it needs {entry.needs}")
    return part


def available(kind: str) -> dict[str, str]:
    """Names of `kind` that `build` understands, each with its source: "flowrl", or the package whose plug-in it is."""
    entry = KINDS[kind]
    found = {name: "flowrl" for name in entry.built_in}
    for point in entry_points(group=entry.group):
        found.setdefault(point.name, _package(point))
    return found


def options_of(kind: str, name: str) -> dict[str, Any]:
    """The options of a part and their defaults (`inspect.Parameter.empty` where there is none)."""
    parameters = _parameters(_by_name(KINDS[kind], name))
    return {} if parameters is None else {n: p.default for n, p in parameters.items()}


def summary_of(kind: str, name: str) -> str:
    """The first line of a part's documentation."""
    maker = _by_name(KINDS[kind], name)
    target = maker.func if isinstance(maker, partial) else maker
    return (inspect.getdoc(target) or "").partition("\n")[0]


def parse_probe(words: str) -> Probe:
    """ "none", "tweedie", "substeps:N", "completion" or "continuation:N" as a probe."""
    name, _, count = words.partition(":")
    if name == "substeps" and count.isdigit():
        return Substeps(int(count))
    if name == "continuation" and count.isdigit():
        return Continuation(int(count))
    known: dict[str, Probe] = {"none": NoProbe(), "tweedie": Tweedie(), "completion": Completion()}
    if words not in known:
        raise ConfigError(f"probe = {words!r} is not allowed: none, tweedie, substeps:N, completion or continuation:N")
    return known[words]


def find_maker(kind: str, head: str) -> Maker:
    """The class or function behind a spec's first part: a name, path/to/file.py:Class or package.module:Class.

    Raises `ConfigError` if there is none.
    """
    if _is_file(head):
        return _from_file(kind, head)
    return _from_module(kind, head) if ":" in head else _by_name(KINDS[kind], head)


def parse_spec(kind: str, spec: str) -> tuple[str, dict[str, Any]]:
    """The name or path:class of a spec, and its options. Raises `ConfigError` if it cannot be read."""
    match = re.fullmatch(r"([^()]+)(?:\((.*)\))?", spec.strip(), flags=re.DOTALL)
    if match is None:
        raise ConfigError(f"{kind} = {spec!r} is not allowed: write NAME, NAME(option=value, ...) or path/to/file.py:Class")
    head, inside = match.group(1).strip(), match.group(2) or ""
    try:
        call = ast.parse(f"part({inside})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ConfigError(f"{kind} = {spec!r}: options need names, as in {head}(option=value)")
        return head, {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{kind} = {spec!r} cannot be read: {error}; write {head}(option=value, ...)") from error


def _literal(node: ast.expr) -> Any:
    """A Python literal, or a bare word (with hyphens or a colon's number left to quotes) as a string."""
    if isinstance(node, ast.Name):
        return {"none": None, "true": True, "false": False}.get(node.id, node.id)
    return ast.literal_eval(node)


def _convert(name: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    """Words of the options that hold a probe or another part; rewards within a reward have its defaults."""
    if name == "probe":
        return parse_probe("none" if value is None else str(value))
    kind = NESTED_KINDS.get(name)
    if kind is None:
        return value
    inherited = defaults if kind == "reward" else {}
    if isinstance(value, dict):
        return {key: build(kind, spec, **inherited) if isinstance(spec, str) else spec for key, spec in value.items()}
    return build(kind, value, **inherited) if isinstance(value, str) else value


def _is_file(head: str) -> bool:
    return head.rpartition(":")[0].endswith(".py")


def _from_file(kind: str, spec: str) -> Maker:
    """The class behind "path/to/file.py:Class"."""
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise ConfigError(f"{kind}: the file {path} does not exist")
    module_spec = importlib.util.spec_from_file_location(f"flowrl_user_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{kind}: {path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{kind}: importing {path} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        names = ", ".join(sorted(n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__))
        raise ConfigError(f"{kind}: {path} has no class {name!r}; it defines {names or 'no classes'}")
    return getattr(module, name)


def _from_module(kind: str, spec: str) -> Maker:
    """The class behind "package.module:Class"."""
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{kind}: the module {module_name!r} cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{kind}: the module {module_name} has no class {name!r}")
    return getattr(module, name)


def _by_name(entry: Kind, name: str) -> Maker:
    """A built-in maker, else the plug-in of that name. Two packages with one name are refused rather than guessed."""
    if name in entry.built_in:
        return entry.built_in[name]
    points = list(entry_points(group=entry.group, name=name))
    if not points:
        known = sorted(available(entry.name))
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown {entry.noun} {name!r}; allowed: {', '.join(known)}, or path/to/file.py:Class{hint}")
    if len({point.value for point in points}) > 1:
        owners = ", ".join(sorted(_package(point) for point in points))
        raise ConfigError(f"{entry.name} {name!r} is offered by several installed packages: {owners}; remove all but one")
    try:
        return points[0].load()
    except Exception as error:
        raise ConfigError(
            f"{entry.name} {name!r}: its plug-in {_package(points[0])} ({points[0].value}) cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _parameters(maker: Maker) -> dict[str, inspect.Parameter] | None:
    """The maker's keyword parameters; None where it takes any (or cannot be inspected)."""
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return dict(parameters)


def _require_options(
    kind: str, head: str, options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter] | None
) -> None:
    unknown = sorted(set(options) - set(parameters)) if parameters is not None else []
    if unknown and parameters is not None:
        allowed = ", ".join(parameters) or "none"
        raise ConfigError(f"{kind}: {head} has no option {', '.join(unknown)}; allowed: {allowed}")

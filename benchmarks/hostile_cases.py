"""The bad inputs of `hostile.py`: values generated from the schema of the settings and from the
options of all parts.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt

from flowrl.cli.main import load_command, main
from flowrl.core.errors import FlowrlError
from flowrl.parts.registry import KINDS, available, build, find_maker, options_of
from flowrl.parts.settings import fields_of, groups_of, owners
from flowrl.parts.specs import parse_spec
from flowrl.rewards import JPEGCompressibility
from flowrl.training.config import RunConfig

for _name in (
    *("flowrl.serving.command", "flowrl.worlds.mixture"),
    *("flowrl_compare.comparison", "flowrl_compare.report", "flowrl_compare.statistics"),
    *(f"flowrl_bench.{name}" for name in ("command", "explain_command", "pretrain")),
    *("flowrl_bench.claims_page", "flowrl_bench.rule_bench"),
):
    # before the processes fork, so that a case takes a fraction of a second
    import_module(_name)

Values = list[tuple[str, Any]]


def _nothing(root: Path) -> None:
    """No preparation."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One bad input: its class, a label, the words of which the message must contain one, and how
    it is tried.
    """

    family: str
    label: str
    named: tuple[str, ...]
    run: Callable[[Path], int]
    prepare: Callable[[Path], None] = _nothing
    begins: bool = False
    """The fault may show after the work has begun: exit code 1, and files, are allowed."""


def make_sandbox(root: Path) -> None:
    """The folder that a case starts in: prompts, a foreign folder, and a file where a folder is
    expected.
    """
    root.mkdir()
    (root / "prompts.txt").write_text("three red circles\nblue square left of green triangle\n")
    (root / "mine.txt").write_text("a file of the user's own\n")
    (root / "foreign").mkdir()
    (root / "foreign" / "thesis.tex").write_text("years of work\n")


def command(
    family: str, words: str | list[str], *named: str, prepare: Callable[[Path], None] = _nothing
) -> Case:
    """A command line that must be refused."""
    arguments = shlex.split(words) if isinstance(words, str) else words
    label = "flowrl " + shlex.join(argument[:60] for argument in arguments)
    return Case(family, label, named, lambda root: main(arguments), prepare)


def python(family: str, label: str, call: Callable[[], Any], *named: str) -> Case:
    """A call that must raise a `FlowrlError`; anything else is printed as a traceback, or accepted."""

    def run(root: Path) -> int:
        try:
            call()
        except FlowrlError as error:
            print(f"flowrl: error: {error}")
            return 2
        return 0

    return Case(family, label, named, run)


def bad_values(kind: Any, bounds: list[Any]) -> Values:
    """Invalid values of a setting of this type: texts for the command line, values for Python and
    files.
    """
    values: Values = []
    if kind is int:
        values = [(text, text) for text in ("x", "", "1.5", "nan", "1e-3", "½")] + [
            ("4.5", 4.5),
            ("inf", float("inf")),
        ]
        values += [("10000000000000000000000000", 10**25), ("-1000000000000", -(10**12))]
    elif kind is float:
        values = [(text, text) for text in ("x", "", "1,5", "1e-3e", "½")]
        values += [("nan", float("nan")), ("inf", float("inf")), ("-inf", -float("inf"))]
    elif kind is bool:
        values = [("yes!", "yes"), ("2", 2), ("", "")]
    elif get_origin(kind) is Literal:
        values = [
            (text, text) for text in ("nope", "", str(get_args(kind)[0]).upper() + "!", "☃")
        ] + [("1", 1)]
    for bound in bounds:
        limit = next(getattr(bound, key) for key in ("ge", "gt", "le", "lt") if hasattr(bound, key))
        beyond = {Ge: -1, Gt: 0, Le: 1, Lt: 0}[type(bound)]
        values.append((repr(kind(limit + beyond)), kind(limit + beyond)))
    return values


SPECS = (
    "nope",
    "nope(",
    "nope)",
    "uniform(a)+(b)",
    "uniform(std=)",
    "uniform(std=nope)",
    "uniform(std=1)",
    "uniform(clamp=nan)",
    "uniform(clamp=2,clamp=3)",
    "uniform(batch)",
    "uniform(**{})",
    "uniform(*[])",
    "uniform(std=__import__('os'))",
    "no.py:Rule",
    "mine.txt:Rule",
    "foreign:Rule",
    ":",
    "a:",
    ":b",
    "()",
    " ",
    "uniform" * 4000,
    "[red]uniform[/red]",
    "\x00",
    "☃",
    "uniform(std='" + "x" * 3000 + "')",
    "uniform(probe=substeps:0)",
    "uniform(probe=substeps:-1)",
    "stepwise-gain(probe=none)",
)
TEXTS: dict[str, tuple[str, ...]] = {
    "credit": SPECS,
    "method": ("nope", " ", "☃", "flow-grpo,tp-grpo", "FLOW-GRPO!", "\x00"),
    "loss": (
        "nope",
        "clipped(clip_range=-1)",
        "clipped(clip_range=nan)",
        "clipped(kl=no)",
        "clipped(kl=1)",
        "clipped(",
        " ",
        "clipped(kl_weight='x')",
        "clipped(log_prob=None)",
        "uniform",
        "flow-sde",
        "no.py:Loss",
        "clipped(x=1)",
    ),
    "sampler": (
        "nope",
        "ode",
        "flow-sde(noise_level=-1)",
        "flow-sde(noise_level=nan)",
        "flow-sde(noise_level='a')",
        "cps(x=1)",
        " ",
        "no.py:Sampler",
        "uniform",
        "flow-sde(",
        "☃",
    ),
    "window": (
        "nope",
        "0:0",
        "-1:2",
        "9:9",
        "random(size=0)",
        "random(size=99)",
        "sliding(size=0)",
        "sliding(size=2,stride=0)",
        "1",
        "all",
        "a:b",
        " ",
        "2:5:7:9",
        "random:",
        "0:1000000000000000000000",
        "1.5:2",
        "nan:1",
        "random:3",
        "random()",
        "no.py:Window",
    ),
    "trained_steps": (
        "nope",
        "0:0",
        "9:9",
        "random(fraction=0)",
        "random(fraction=2)",
        "random(fraction=nan)",
        "all",
        " ",
        "random(fraction=-1)",
        "random:0.5",
        "random()",
    ),
    "task": ("nope", " ", "☃", "COMPOSITIONAL!"),
    "reward_form": ("nope", " ", "☃"),
    "reward": (
        "nope",
        "ocr(confidence=nan)",
        "ocr(confidence='x')",
        "clipped",
        "clipped(reward=nope)",
        "weighted-sum",
        " ",
        "☃",
        "weighted-sum(models=3)",
        "weighted-sum(models={'a':'nope'})",
        "no.py:Reward",
        "jpeg-compressibility(quality=-1)",
        "jpeg-compressibility(quality='x')",
        "remote(url='nonsense')",
        "remote(url='')",
        "remote(url=3)",
        "uniform",
    ),
    "prompts": ("prompts.txt", "nope.txt", "foreign"),
    "heldout_prompts": ("prompts.txt", "nope.txt", "foreign"),
    "base_weights": ("nope.safetensors", "mine.txt", "foreign", "\x00"),
    "device": ("nope", "cuda:99", "meta", "mps", "cuda:-1", "cuda:x", " ", "☃", "xpu"),
    "adapter": ("nope", "mine.txt"),
    "frozen_adapters": ("nope", "mine.txt", ",,"),
    "diversity": ("nope", "pixels(x=1)", "no.py:F", " ", "☃", "pixels("),
    "heldout_rewards": ("nope", "no.py:R", "ocr(x=1)", " ", "☃"),
    "lora_targets": ("nope", " "),
}
"""Invalid texts for the text settings, on the built-in worlds."""


KNOWN_AS = {"diversity": ("feature",), "heldout_rewards": ("reward",), "credit": ("probe",)}
"""What else a message may call a setting."""


def _options(text: str) -> list[str]:
    """The options in a spec: a message may name them as PART.OPTION."""
    return [f"{word} = " for word in re.findall(r"(\w+)=", text)]


def fields() -> Iterator[tuple[str, str, Any, list[Any]]]:
    """Group, name, type and bounds of every setting of a run."""
    for group, kind in {"": RunConfig, **groups_of(RunConfig)}.items():
        for item in fields_of(kind):
            if item.name not in groups_of(RunConfig):
                info = cast(Any, kind).__pydantic_fields__[item.name]
                yield (
                    group,
                    item.name,
                    info.annotation,
                    [b for b in info.metadata if isinstance(b, Ge | Gt | Le | Lt)],
                )


def setting_cases() -> Iterator[Case]:
    """Every setting with every bad value: as an option, in YAML, in JSON and in Python."""
    refused = {"method", "credit", "seed"} | set(load_command_settings("train")) - set(
        load_command_settings("compare")
    )
    for group, name, kind, bounds in fields():
        option = "--" + name.replace("_", "-")
        values = bad_values(kind, bounds)
        texts = [(text, text) for text in TEXTS.get(name, ())]
        for text, _ in [*values, *texts]:
            if kind is not bool:
                yield command(
                    "train: option",
                    ["train", "--out", "new", f"{option}={text}"],
                    name,
                    *KNOWN_AS.get(name, ()),
                    *_options(text),
                )
        for text, _ in [*values[:3], *texts[:4]]:
            if kind is not bool and name not in refused:
                yield command(
                    "compare: option",
                    ["compare", "--out", "new", f"{option}={text}"],
                    name,
                    *KNOWN_AS.get(name, ()),
                    *_options(text),
                )
        for _, value in values:
            yield python(
                "Python: setting", f"RunConfig.of({name}={value!r:.40})", _of(name, value), name
            )
            yield _from_file("YAML: setting", "mine.yaml", group, name, value)
            yield _from_file("JSON: setting", "mine.json", group, name, value)
        for value in (
            None,
            *([] if get_origin(kind) is tuple else [[]]),
            {},
            [[1]],
            b"x",
            object,
            3j,
        ):
            yield python(
                "Python: setting", f"RunConfig.of({name}={value!r:.40})", _of(name, value), name
            )
    for name in ("nope", "lr", "members", "", "☃", "__class__"):
        yield python("Python: setting", f"RunConfig.of({name}=1)", _of(name, 1), name)


def load_command_settings(name: str) -> list[str]:
    """The settings that a command has as options."""
    run = next(item for item in dataclasses.fields(load_command(name)) if item.name == "run")
    kind = run.default_factory
    names = []
    for item in dataclasses.fields(cast(Any, kind)):
        inside = getattr(item.type, "__origin__", item.type)
        names += (
            [inner.name for inner in dataclasses.fields(inside)]
            if dataclasses.is_dataclass(inside)
            else [item.name]
        )
    return names


def _of(name: str, value: Any) -> Callable[[], Any]:
    return lambda: RunConfig.of(**{name: value})


def _from_file(family: str, file: str, group: str, name: str, value: Any) -> Case:
    """Training from a settings file with one bad value."""
    content: Any = {group: {name: value}} if group else {name: value}

    def prepare(root: Path) -> None:
        text = (
            json.dumps(content)
            if file.endswith(".json")
            else yaml.safe_dump(content, allow_unicode=True)
        )
        (root / file).write_text(text)

    option = "--config" if file.endswith(".json") else "--preset"
    words = ["train", "--out", "new", option, file]
    return Case(family, f"{name}: {value!r:.40}", (name, file), lambda root: main(words), prepare)


def part_cases() -> Iterator[Case]:
    """Every option of every built-in part with values of other types, in a spec and in Python."""
    for kind in KINDS:
        for name in (name for name, origin in available(kind).items() if origin == "flowrl"):
            options = options_of(kind, name)
            for option, default in options.items():
                for value in _bad_for(option, default):
                    spec = f"{name}({option}={value!r})"
                    yield python(
                        f"parts: {kind} by spec", spec[:90], _build(kind, spec), option, name
                    )
                    yield python(
                        f"parts: {kind} in Python",
                        spec[:90],
                        _make(kind, name, option, value),
                        option,
                        name,
                    )
            for spec in (
                f"{name}(nope=1)",
                f"{name}(",
                f"{name})",
                f"{name}(1)",
                f"{name}(a)(b)",
                f"{name}(class=1)",
            ):
                yield python(f"parts: {kind} by spec", spec, _build(kind, spec), name)
        for spec in (
            "",
            " ",
            "nope",
            "a:b:c",
            "os:system",
            "json:dumps",
            "no.py:X",
            "(",
            ")",
            "\n",
            "☃(a=1)",
        ):
            yield python(
                f"parts: {kind} by spec",
                repr(spec),
                _build(kind, spec),
                kind.rstrip("s"),
                spec or kind,
            )


def _bad_for(option: str, default: Any) -> list[Any]:
    """Values of other types, and invalid numbers."""
    if isinstance(default, bool):
        return ["yes", 2, "", [1], {"a": 1}]
    if isinstance(default, int):
        return (
            ["x", "", 1.5, [1], {"a": 1}, True]
            if option != "seed"
            else ["x", "", 1.5, [1], 2**64, -1]
        )
    if isinstance(default, float):
        return ["x", "", [1.0], {"a": 1}, True]
    if isinstance(default, str):
        return [1.5, [1], {"a": 1}, True] if option == "frames" else [1, 1.5, [1], {"a": 1}, True]
    return []


def _build(kind: str, spec: str) -> Callable[[], Any]:
    return lambda: build(kind, spec, trust=True)


NEEDED: dict[tuple[str, str], dict[str, Any]] = {
    ("reward", "judge"): {"url": "http://localhost:1/v1", "model": "m"},
    ("reward", "remote"): {"url": "http://localhost:1"},
    ("reward", "remote-sum"): {"url": "http://localhost:1"},
    ("reward", "frame-mean"): {"reward": JPEGCompressibility()},
    ("reward", "clipped"): {"reward": JPEGCompressibility()},
    ("reward", "weighted-sum"): {"models": {"a": JPEGCompressibility()}},
}
"""Options without which a part cannot be built."""


def _make(kind: str, name: str, option: str, value: Any) -> Callable[[], Any]:
    return lambda: find_maker(kind, parse_spec(name, kind), trust=True)(
        **{**NEEDED.get((kind, name), {}), option: value}
    )


def command_cases() -> Iterator[Case]:
    """Options of the other commands, unknown commands and options, and contradictions."""
    family = "command line"
    for words, named in (
        ("nope", "nope"),
        ("trian", "trian"),
        ("--nope", "nope"),
        ("train --nope 1", "nope"),
        ("train extra", "extra"),
        ("train --seed", "seed"),
        ("train --preset nope", "nope"),
        ("train --preset tiny,tiny,nope", "nope"),
        ("train --preset sd3.5-medium,flux.1-dev", "models"),
        ("train --world nope", "world"),
        ("train --world", "world"),
        ("train --out new --world model", "world"),
        ("train --out new --model nope", "prompts"),
        ("train --out new --from 000001", "from"),
        ("train --out new --processes 2", "processes"),
        ("train --resume nope", "nope"),
        ("train --resume foreign", "foreign"),
        ("train --config nope.json", "nope.json"),
        ("train --config foreign", "foreign"),
        ("train --config mine.txt", "mine.txt"),
        ("train --preset mine.yaml", "mine.yaml"),
        ("train --resume a --config b", "config"),
        ("train --out new --seed 1 --seed x", "seed"),
        ("train --out new --world mixture --prompts prompts.txt", "prompts"),
        ("train --out new --world mixture --guidance-scale 4", "guidance"),
        ("train --out new --adapter x", "adapter"),
        ("train --out new --resolution 64", "resolution"),
        ("compare --methods nope", "nope"),
        ("compare --methods", "methods"),
        ("compare --seeds x", "seeds"),
        ("compare --seeds", "seeds"),
        ("compare --seeds -1", "seed"),
        ("compare --seeds 0 0", "seed"),
        ("compare --seeds 18446744073709551616", "seed"),
        ("compare --methods tp-grpo tp-grpo", "tp-grpo"),
        ("compare --workers -1", "workers"),
        ("compare --workers 1.5", "workers"),
        ("compare --workers 100000000", "workers"),
        ("compare --credit nope", "nope"),
        ("compare --credit no.py:X", "no.py"),
        ("compare --credit uniform uniform", "uniform"),
        ("compare --preset nope", "nope"),
        ("compare --resume nope", "nope"),
        ("compare --resume foreign", "foreign"),
        ("compare --config foreign", "foreign"),
        ("compare --config nope.json", "nope.json"),
        ("compare --world model", "world"),
        ("evaluate", "weights"),
        ("evaluate --weights nope", "nope"),
        ("evaluate --weights foreign", "foreign"),
        ("evaluate --weights mine.txt", "mine.txt"),
        ("evaluate --weights foreign --model nope", "prompts"),
        ("evaluate --weights foreign --model nope --prompts prompts.txt", "reward"),
        ("evaluate --weights foreign --model nope --prompts prompts.txt --reward nope", "nope"),
        (
            "evaluate --weights foreign --model nope --prompts nope.txt --reward jpeg-compressibility",
            "nope.txt",
        ),
        ("sample --weights nope", "nope"),
        ("sample --weights foreign", "foreign"),
        ("sample --count 0", "count"),
        ("sample --count -1", "count"),
        ("sample --count x", "count"),
        ("sample --num-steps 0", "num_steps"),
        ("sample --num-steps -1", "num_steps"),
        ("sample --seed -1", "seed"),
        ("sample --seed 18446744073709551616", "seed"),
        ("sample --world nope", "world"),
        ("sample --prompts", "prompts"),
        ("sample --prompts ''", "prompt"),
        ("sample --prompts nonsense", "nonsense"),
        ("sample --out mine.txt", "out"),
        ("sample --out foreign", "foreign"),
        ("sample --out mine.txt/x.png", "mine.txt"),
        ("sample --count 1000000000000", "count"),
        ("sample --out x.nope", "x.nope"),
        ("explain nope", "nope"),
        ("explain --rewards nope.csv", "nope.csv"),
        ("explain --rewards mine.txt", "mine.txt"),
        ("explain --rewards foreign", "foreign"),
        ("explain --noise-level nan", "noise_level"),
        ("explain --noise-level -1", "noise"),
        ("explain --sampler nope", "nope"),
        ("explain --out foreign", "foreign"),
        ("explain --out mine.txt/x.png", "mine.txt"),
        ("explain --out mine.txt", "mine.txt"),
        ("explain ''", "credit"),
        ("parts nope", "nope"),
        ("parts --kind nope", "nope"),
        ("presets nope", "nope"),
        ("presets a,b,c,d", "a"),
        ("presets sd3.5-medium,sd3.5-medium", "sd3.5-medium"),
        ("prompts", "compositional"),
        ("prompts nope", "nope"),
        ("prompts text --count 0", "count"),
        ("prompts text --count -5", "count"),
        ("prompts text --count x", "count"),
        ("prompts text --count 100000000000", "count"),
        ("prompts text --seed -1", "seed"),
        ("prompts text --seed 18446744073709551616", "seed"),
        ("prompts text --file mine.txt", "mine.txt"),
        ("prompts text --file foreign", "foreign"),
        ("prompts text --file mine.txt/x.jsonl", "mine.txt"),
        ("prompts check --file nope.jsonl", "nope.jsonl"),
        ("prompts check --file foreign", "foreign"),
        ("serve-reward", "reward"),
        ("serve-reward nope", "nope"),
        ("serve-reward jpeg-compressibility --port -1", "port"),
        ("serve-reward jpeg-compressibility --port 99999", "port"),
        ("serve-reward jpeg-compressibility --max-batch 0", "max_batch"),
        ("serve-reward jpeg-compressibility --wait nan", "wait"),
        ("serve-reward jpeg-compressibility --wait -1", "wait"),
        ("serve-reward jpeg-compressibility --host nope.invalid", "nope.invalid"),
        ("serve-reward jpeg-compressibility --max-body 0", "max_body"),
        ("serve-reward jpeg-compressibility --max-samples -1", "max"),
        ("serve-reward jpeg-compressibility --token-file nope", "nope"),
        ("serve-reward jpeg-compressibility --tls-certificate nope", "tls"),
        ("serve-reward jpeg-compressibility --score-seconds nan", "score_seconds"),
        ("serve-reward pickscore", "pickscore"),
        ("pretrain --updates 0", "updates"),
        ("pretrain --updates x", "updates"),
        ("pretrain --seed -1", "seed"),
        ("pretrain --threads 0", "threads"),
        ("pretrain --out foreign", "foreign"),
        ("pretrain --out mine.txt/x.safetensors", "mine.txt"),
        ("bench", "claims"),
        ("bench nope", "nope"),
        ("bench claims --only nope", "nope"),
        ("bench claims --world nope", "world"),
        ("bench claims --workers -1", "workers"),
        ("bench claims --minutes nan", "minutes"),
        ("bench claims --minutes -1", "minutes"),
        ("bench rule", "rule"),
        ("bench rule nope", "nope"),
        ("bench rule no.py:X", "no.py"),
        ("bench microscope --rules nope", "nope"),
        ("bench microscope --out mine.txt/x", "mine.txt"),
        ("bench microscope --rules no.py:X", "no.py"),
        ("env extra", "extra"),
    ):
        yield command(family, words, named)
    for name in ("compare", "train"):
        for out in (
            "",
            "mine.txt",
            "foreign",
            "foreign/thesis.tex/x",
            "/proc/x",
            "x" * 300,
            "\x00",
            "mine.txt/x",
        ):
            yield command(
                "outputs", [name, "--preset", "tiny", f"--out={out}"], "out", out or "out"
            )


def file_cases() -> Iterator[Case]:
    """Broken or hostile files: settings, prompts, tables of rewards."""
    settings: dict[str, tuple[str, str]] = {
        "empty": ("", "empty"),
        "text": ("hello", "groups"),
        "list": ("- 1\n- 2\n", "groups"),
        "tab": ("a:\n\t- b", "mine.yaml"),
        "unclosed": ("rollout: {groups: 4", "mine.yaml"),
        "twice": ("seed: 1\nseed: 2\n", "seed"),
        "tag": ("seed: !!python/object:os.system x", "mine.yaml"),
        "alias": (
            "a: &a [x, x, x]\n"
            + "".join(
                f"{chr(98 + k)}: &{chr(98 + k)} [*{chr(97 + k)}, *{chr(97 + k)}]\n"
                for k in range(20)
            ),
            "mine.yaml",
        ),
        "deep": ("{a: " * 3000 + "1" + "}" * 3000, "mine.yaml"),
        "binary": ("\x80\x81", "mine.yaml"),
        "nul": ("seed: \x00", "mine.yaml"),
        "flat": ("learning_rate: 1e-3\n", "learning_rate"),
        "unknown": ("rollout: {nope: 1}", "nope"),
        "null": ("rollout: null", "rollout"),
        "merge": ("rollout:\n  <<: {groups: 4}\n  nope: 1\n", "nope"),
        "self": ("&a [*a]", "mine.yaml"),
        "number key": ("1: 2", "1"),
        "module": ("algorithm: {credit: 'os:system'}", "credit"),
        "code": ("algorithm: {credit: 'no.py:X'}", "credit"),
    }
    for label, (text, named) in settings.items():
        for suffix in ("yaml", "json"):
            name = f"mine.{suffix}"
            option = "--preset" if suffix == "yaml" else "--config"
            words = ["train", "--out", "new", option, name]
            prepare = _write(name, text)
            yield Case(
                "files: settings",
                f"{label} as {suffix}",
                (named, name),
                lambda root, w=words: main(w),
                prepare,
            )
    for label, text in {
        "empty": "",
        "blank": "\n\n\n",
        "latin-1": "caf\xe9",
        "binary": "\x80\x00\xff",
        "bad json": "{",
        "list": "[1]\n",
        "number": "3\n",
        "no prompt": '{"text": "a"}\n',
        "number prompt": '{"prompt": 3}\n',
        "empty prompt": '{"prompt": ""}\n',
        "deep": "[" * 100000,
        "bad metadata": '{"prompt": "a", "tag": "counting", "include": 3}\n',
    }.items():
        words = ["prompts", "check", "--file", "p.jsonl"]
        yield Case(
            "files: prompts",
            label,
            ("p.jsonl",),
            lambda root, w=words: main(w),
            _write("p.jsonl", text),
        )
    for label, text in {
        "empty": "",
        "header": "a,b\n",
        "words": "x,y,z\n1,2,a\n",
        "ragged": "0,1\n1,2,3\n",
        "nan": "0,nan,1\n1,2,3\n",
        "one": "1\n",
        "one line": "1,2,3\n",
        "inf": "0,inf\n1,2\n",
        "latin-1": "\xe9,1\n2,3\n",
        "binary": "\x80\x00\n",
        "huge": "1" * 200_000 + ",1\n",
        "huge number": "1e999,1\n2,3\n",
        "semicolons": "1;2;3\n4;5;6\n",
        "member twice": "prompt,member,n0,n1\n0,0,1,2\n0,0,1,2\n",
    }.items():
        words = ["explain", "--rewards", "t.csv", "--out", "t.png"]
        yield Case(
            "files: reward tables",
            label,
            ("t.csv", "rewards"),
            lambda root, w=words: main(w),
            _write("t.csv", text),
        )


def _write(name: str, text: str) -> Callable[[Path], None]:
    def prepare(root: Path) -> None:
        (root / name).write_bytes(
            text.encode("latin-1") if all(ord(letter) < 256 for letter in text) else text.encode()
        )

    return prepare


def all_cases() -> list[Case]:
    """Every case; settings first."""
    names = owners(RunConfig)
    assert set(TEXTS) <= set(names), f"settings that no longer exist: {set(TEXTS) - set(names)}"
    return [*setting_cases(), *part_cases(), *command_cases(), *file_cases()]

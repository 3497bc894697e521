"""Examples in README and the documentation: commands parse, Python compiles, settings are valid,
references have a target.
"""

import ast
import importlib
import re
import shlex
import sys

import pytest
from loading import ROOT, load

from flowrl.cli.main import load_command, run_command
from flowrl.core.errors import ConfigError
from flowrl.run.config import RunConfig
from flowrl.run.parts.registry import build
from flowrl.run.parts.settings import read_arms, read_settings

MADE = {"_build", "course", "api", "studies.md"}
"""Folders of pages that are made, and the page about another commit."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if not MADE & set(path.parts)),
]
IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def flowrl_commands(page):
    """The arguments of every `flowrl` or `-m flowrl` in a page's bash blocks, and of every code
    span with options.
    """
    spans = re.findall(r"`(flowrl[ \n][a-z][^`]* --[^`]*)`", prose(page))
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    for line in [*lines, *(" ".join(span.split()) for span in spans)]:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        command = []
        for word in [*lexer, ";"]:
            if word not in ("&&", "|", ";", ">"):
                command.append(word)
                continue
            for start in (
                i
                for i, name in enumerate(command)
                if name == "flowrl" and (i == 0 or command[i - 1] == "-m")
            ):
                yield [
                    word
                    for i, word in enumerate(command)
                    if i > start and (word != "..." or command[i - 1][:2] == "--")
                ]
            command = []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_parse(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for text in blocks(page, "python"):  # the help of a world of the page is that world's
        if file := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / file[1]).write_text(text)
    for arguments in flowrl_commands(page):
        for file in arguments:
            if file.endswith((".yaml", ".json")):
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).write_text("seed: 1\n")
        monkeypatch.setattr(load_command(arguments[0]), "main", lambda self: 0)
        try:
            code = run_command(arguments)
        except SystemExit as stopped:
            code = stopped.code
        except ConfigError as error:  # the command is right, and its run is not here
            code = not str(error).endswith("; allowed: a folder that contains config.json")
        assert code == 0, f"flowrl {shlex.join(arguments)}: {capsys.readouterr().err}"


def prose(page):
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_options_exist(reference):
    known = set(re.findall(r"--[a-z][a-z-]*", reference.all_commands()))
    spans = {span for page in PAGES for span in re.findall(r"`(--[^`]*)`", prose(page))}
    assert spans
    for span in spans:
        assert set(re.findall(r"(?:^| )(--[\w-]+)", span)) <= known, span


@pytest.mark.parametrize("kind", ["credit", "loss", "sampler", "reward"])
def test_parts_build(kind):
    specs = {
        spec
        for page in PAGES
        for spec in re.findall(rf"--{kind} ([a-z][\w.-]+(?![\w./:])|\"[^\"]+\")", page.read_text())
    }
    specs = {spec.strip('"') for spec in specs if ".py" not in spec}
    assert specs
    for spec in specs:
        build(kind, spec)


ROOMS = [path.name for path in (ROOT / "flowrl").iterdir() if path.is_dir()]
NAMED = re.compile(
    r"(?<![\w./-])(?:(?:flowrl|packages|benchmarks|tutorials|tests|docs|\.ci)/[\w./*-]*\w"
    rf"|(?:{'|'.join(ROOMS)})/\w+\.py(?!:))"
)
"""Paths from the root, or of a module from `flowrl`."""


def code(page):
    """The code blocks and the code spans of a page."""
    made = [text for language in ("bash", "text") for text in blocks(page, language)]
    return "\n".join([*made, *re.findall(r"`([^`\n]+)`", prose(page))])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_paths_exist(page):
    """An archive counts for its file without .xz, which commands read from it."""
    for name in NAMED.findall(code(page)):
        found = any(any(ROOT.glob(path)) for path in (name, f"{name}.xz", f"flowrl/{name}"))
        assert found or "/NN_" in name or "_NN." in name or "_build" in name, name


def test_paths_in_lessons_and_code_exist():
    named = re.compile(
        r"\b(?:benchmarks|docs|tests|tutorials|packages)/[\w/-]+\.(?:py|md|csv|jsonl?)\b"
    )
    for folder in ("flowrl", "packages", "benchmarks", "tutorials"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in named.findall(file.read_text()):
                found = any((ROOT / path).exists() for path in (name, f"{name}.xz"))
                assert found or "/NN_" in name, (file, name)


def test_named_tests_exist():
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    defined = {name for text in files.values() for name in re.findall(r"def (test_\w+)", text)}
    named = {(page, name) for page in PAGES for name in re.findall(r"\btest_\w+", code(page))}
    assert len(named) > 10
    for page, name in named:
        assert name in defined or f"{name}.py" in files or name.startswith("test_my_"), (page, name)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_compiles_and_imports_public_names(page, public):
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "flowrl":
                assert {f"{node.module}.{alias.name}" for alias in node.names} <= public


def test_the_readers_path_prints_what_the_design_page_shows(capsys):
    page, names = ROOT / "docs" / "design.md", {}
    for text in blocks(page, "python"):
        capsys.readouterr()
        exec(text, names)
    printed = capsys.readouterr().out.splitlines()
    shown = blocks(page, "text")[1].splitlines()
    assert len(printed) == len(shown) == 7
    for lines in zip(printed, shown, strict=True):
        mine, page = ([float(x) for x in re.findall(r"-?[\d.]+", line)] for line in lines)
        assert mine == pytest.approx(page, abs=0.02)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_settings_are_valid(page, tmp_path):
    for text in blocks(page, "yaml"):
        (tmp_path / "settings.yaml").write_text(text)
        read = read_arms if text.startswith("arms:") else read_settings
        read(tmp_path / "settings.yaml", RunConfig)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_have_targets(name):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose(ROOT / name)):
        assert (ROOT / target).exists(), target


@pytest.fixture(scope="module")
def reference():
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("reference_pages")
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def public(reference):
    """The public modules, and the full names of what they export."""
    modules = [
        importlib.import_module("flowrl"),
        *(module for name in reference.PAGES for module in reference.modules_of(name)),
    ]
    names = {
        f"{module.__name__}.{name}" for module in modules for name in reference.public_names(module)
    }
    return names | {module.__name__ for module in modules}


def test_every_room_has_a_page(reference):
    assert not reference.unlisted(), "docs/reference_pages.py: PAGES lists every module of flowrl"


def test_references_name_public_things(public):
    named = {
        name for page in PAGES for name in re.findall(r"\{py:\w+\}`([\w.]+)`", page.read_text())
    }
    assert named and not named - public, "Sphinx itself does not report such a name"


@pytest.fixture(scope="module")
def readme():
    """The script with which CI runs the blocks of README.md."""
    return load(".ci/readme.py")


def test_all_blocks_run_but_marked_ones(readme):
    readme_blocks = readme.blocks((ROOT / "README.md").read_text())
    assert sum(bool(block.commands) for block in readme_blocks) == len(readme_blocks) - sum(
        block.marker == "skip" for block in readme_blocks
    )
    tests = '-m pytest -n 2 -m "not slow and not satellite"'
    assert any(command.endswith(tests) for block in readme_blocks for command in block.commands)


def test_markers(readme):
    bash = "```bash\na b  # why\nc \\\n  d\n```\n"
    python = "```python\n# my.py\nx = 1\n```\n"
    text = (
        f"{bash}<!-- ci: skip: needs weights -->\n{bash}\n<!-- ci: add --seeds 0: fast"
        f" -->\n{bash}{python}"
    )
    plain, skipped, reduced, file = readme.blocks(text)
    assert plain.commands == ["a b", "c    d"] and skipped.commands == []
    assert reduced.commands == ["a b", "c    d --seeds 0"] and reduced.reason == "fast"
    assert len(file.commands) == 1 and file.commands[0].startswith("cat > my.py")
    assert "needs weights" in readme.describe([plain, skipped])

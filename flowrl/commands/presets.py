"""`flowrl presets`."""

from dataclasses import dataclass

import tyro

from flowrl.settings import grouped, settings_text
from flowrl.training.config import PRESETS, RunConfig
from flowrl.training.presets import Combined, combinations, combine, shipped


@dataclass(frozen=True)
class Presets:
    """List the presets, or print one as YAML that `flowrl train --config` and `--preset` take.

    Examples: flowrl presets

    flowrl presets sd3.5-medium,tp-grpo,ocr > mine.yaml
    """

    name: tyro.conf.Positional[str] = ""
    """A preset: one name, or a model, a method and a task separated by commas. Left out: list all."""

    def main(self) -> int:
        """Print."""
        print(preset_text(combine(self.name, PRESETS, RunConfig)) if self.name else listing())
        return 0


def listing() -> str:
    """All presets with what is known of their cost."""
    lines = ["For the built-in worlds: " + ", ".join(PRESETS), ""]
    for kind, files in shipped().items():
        lines.append(f"{kind}:")
        for name in files:
            about = combine(name, PRESETS, RunConfig).pieces[0].about
            lines.append(f"  {name}: {about['summary']}")
            lines += [f"      {key.replace('_', ' ')}: {text}" for key, text in about.items() if key not in ("summary", "notes")]
            lines += [f"      note: {text}" for text in about.get("notes", ())]
    lines += ["", "A model, a method and a task combine (flowrl train --preset NAME):"]
    lines += [f"  {name}" for name in combinations()]
    return "\n".join([*lines, "", "flowrl presets NAME prints all settings of one; --preset takes your own .yaml file too."])


def preset_text(found: Combined) -> str:
    """YAML with a comment at every setting that says which piece it comes from, and what the pieces say of themselves above."""
    lines = []
    for piece in found.pieces:
        lines += [f"# {piece.name}: {piece.about.get('summary', piece.origin)}"]
        lines += [f"#   {key.replace('_', ' ')}: {text}" for key, text in piece.about.items() if key not in ("summary", "notes")]
        lines += [f"#   note: {text}" for text in piece.about.get("notes", ())]
    text = settings_text(grouped(RunConfig, found.settings)).splitlines()
    width = max(map(len, text))
    for line in text:
        origin = found.origins.get(line.strip().partition(":")[0], "")
        lines.append(f"{line:{width}s}  # {origin}" if origin else line)
    return "\n".join(lines)

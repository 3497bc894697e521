"""`flowrl parts`."""

import inspect
from dataclasses import dataclass
from typing import Any

from flowrl.errors import FlowrlError, require
from flowrl.registry import KINDS, available, options_of, summary_of

OPTIONS = {"features": "diversity", "probe": "credit"}
"""Kinds of parts whose option of `flowrl train` has another name; a probe is an option of a credit rule."""


@dataclass(frozen=True)
class Parts:
    """List the credit rules, probes, samplers, losses, rewards and features that can be named; plug-ins too."""

    kind: str = ""
    """credit, probe, sampler, loss, reward, features or all: these parts with their options. Left out: all, a line per part."""

    def main(self) -> int:
        """Print one line per part, and below it its options if a kind is chosen."""
        require(self.kind in ("", "all", *KINDS), "kind", self.kind, f"one of {', '.join(KINDS)}, all")
        for kind in (self.kind,) if self.kind in KINDS else KINDS:
            print(f"{kind} (--{OPTIONS.get(kind, kind)})")
            for name, origin in sorted(available(kind).items()):
                title = f"  {name}{'' if origin == 'flowrl' else f'  [{origin}]'}"
                try:
                    summary, choices = summary_of(kind, name), options_of(kind, name) if self.kind else {}
                except FlowrlError as error:
                    print(f"{title}: unusable, {error}")
                    continue
                print(f"{title}: {summary}")
                if choices:
                    print(f"      {', '.join(f'{n}={_shown(v)}' for n, v in choices.items())}")
            if not available(kind):
                print("  none by name: a task brings its own, and a plug-in or path/to/file.py:Class replaces it")
        if not self.kind:
            print("\nWith options: flowrl parts --kind KIND, or --kind all")
        return 0


def _shown(value: Any) -> str:
    return "..." if value is inspect.Parameter.empty else repr(value)

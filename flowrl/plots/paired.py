"""Base and trained weights side by side: a picture, and a page around it."""

import base64
import html
import io
import textwrap
from pathlib import Path

from matplotlib.figure import Figure

from flowrl.diagnostics.paired import Comparison
from flowrl.io import write_bytes
from flowrl.plots.report import STYLE

PAIRS = 2
"""Prompts beside each other."""


def comparison_figure(found: Comparison) -> Figure:
    """The first prompts' pictures, base on the left of trained, with their scores; points of the 2-D world as two scatters."""
    base, trained = found.base.shown, found.trained.shown
    if base.shape[-1] == 1:
        figure = Figure(figsize=(6.6, 3.4), layout="constrained")
        for axes, points, name in zip(figure.subplots(1, 2), (base, trained), ("base", "trained"), strict=True):
            axes.scatter(points[:, 0, 0, 0], points[:, 1, 0, 0], s=12)
            axes.set(title=name, xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
        return figure
    rows = -(-len(base) // PAIRS)
    figure = Figure(figsize=(3.7 * PAIRS, 2.5 * rows), layout="constrained")
    parts = figure.subfigures(rows, PAIRS, squeeze=False).flatten()
    for i, part in enumerate(parts[: len(base)]):
        part.suptitle(textwrap.fill(found.prompts[i], 52, max_lines=2, placeholder=" ..."), fontsize=8.5)
        for axes, side, name in zip(part.subplots(1, 2), (found.base, found.trained), ("base", "trained"), strict=True):
            axes.imshow(side.shown[i].permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
            told = ", ".join(f"{float(scores[i, 0]):.3g}" for scores in side.scores.values())
            axes.set_xlabel(f"{name}: {told}", fontsize=8)
            axes.set(xticks=[], yticks=[])
    return figure


def _png(found: Comparison) -> bytes:
    buffer = io.BytesIO()
    comparison_figure(found).savefig(buffer, format="png", dpi=120, facecolor="white")
    return buffer.getvalue()


def save_comparison(found: Comparison, path: Path) -> None:
    """Write `comparison_figure` as a PNG."""
    write_bytes(path, _png(found))


def write_comparison_page(found: Comparison, path: Path) -> None:
    """A self-contained page: the table, the pictures, and the prompts that gained and lost most by the first reward."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{s.base:.4f}</td><td>{s.trained:.4f}</td><td>{s.difference:+.4f}</td>"
        f"<td>{s.low:+.4f} to {s.high:+.4f}</td><td>{s.better:.0%}</td><td>{s.invalid}</td></tr>"
        for name, s in found.scores.items()
    )
    facts = "".join(
        f"<div><span>{html.escape(key)}</span><span>{html.escape(str(value))}</span></div>"
        for key, value in found.facts.items()
        if key != "command" and value is not None
    )
    how, image = found.how, base64.b64encode(_png(found)).decode()
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Base and trained weights</title><style>{STYLE}</style><main><h1>Base and trained weights</h1>
<p class="lead">{len(found.prompts)} prompts, {how.count} pictures each from the same noise (seed {how.seed}),
{how.steps} ODE steps.</p>
<section><h2>Scores</h2><div class="scroll"><table><tr><th>score</th><th>base</th><th>trained</th><th>difference</th>
<th>95% interval</th><th>prompts that gained</th><th>invalid</th></tr>{rows}</table></div>
<p class="note">Pictures of one prompt are averaged; the interval is Student's t over prompts. It says how far other prompts of
this kind would differ, not how another training run would end.</p></section>
<section><h2>Pictures</h2><div class="scroll"><figure><img alt="Base and trained pictures of the first prompts, side by side"
src="data:image/png;base64,{image}"></figure></div></section>
<section><h2>Which prompts changed</h2>{_changes(found)}</section>
<section><h2>Settings</h2><div class="settings">{facts}</div>
<p><code>{html.escape(str(found.facts.get("command", "")))}</code></p>
</section></main></html>"""
    write_bytes(path, page.encode())


def _changes(found: Comparison, count: int = 5) -> str:
    """The prompts with the largest gains and losses by the first reward."""
    name = next(iter(found.scores))
    change = (found.trained.scores[name].nanmean(1) - found.base.scores[name].nanmean(1)).nan_to_num(0.0)
    order = change.argsort(descending=True).tolist()
    chosen = list(dict.fromkeys([*order[:count], *order[-count:]]))
    lines = "".join(f"<tr><td>{html.escape(found.prompts[i])}</td><td>{float(change[i]):+.4f}</td></tr>" for i in chosen)
    return f'<div class="scroll"><table><tr><th>prompt</th><th>{html.escape(name)}</th></tr>{lines}</table></div>'

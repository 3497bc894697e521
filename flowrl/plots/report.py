"""report.html: one self-contained page with everything a comparison found."""

import base64
import html
import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flowrl.io import write_bytes, write_json
from flowrl.plots.figures import curves, phases, samples, trajectory
from flowrl.plots.hacking import proxy_and_heldout
from flowrl.plots.style import colour
from flowrl.training.results import Comparison, MethodSummary, as_text, load_comparison, summarise, summary_values, table_rows

PAPERS = {
    "flow-grpo": ("Flow-GRPO", "Liu et al. 2025", "2505.05470", "credits every step alike with the final reward"),
    "stepwise-flow-grpo": ("Stepwise-Flow-GRPO", "Savani et al. 2026", "2603.28718", "pays each step the gain it brought"),
    "tp-grpo": ("TP-GRPO", "Tong et al. 2026", "2602.06422", "pays gains, and the long-term effect at turning points"),
    "dance-grpo": ("DanceGRPO", "Xue et al. 2025", "2505.07818", "uniform credit, constant noise, shared initial noise"),
}

STYLE = """
:root{--bg:#f5f6f8;--card:#fff;--ink:#1d2127;--soft:#5b6270;--line:#dfe2e8;--accent:#0b63a5}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--card:#1e2229;--ink:#e9ecf1;--soft:#a3abb8;--line:#343a45;--accent:#7cc0f4}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",sans-serif}main{max-width:1120px;margin:0 auto;padding:28px 18px 60px}h1{font-size:1.9rem;line-height:1.2;margin:.2em 0}
h2{font-size:1.2rem;margin:0 0 .5em}p{margin:.4em 0 .8em}.lead{font-size:1.08rem;color:var(--soft);max-width:70ch}
section{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:20px 22px;margin:18px 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{text-align:right;padding:7px 10px;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:bottom}
th{color:var(--soft);font-weight:600;white-space:pre-line}th:first-child,td:first-child{text-align:left}
td:first-child{color:var(--soft)}.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em}
figure{margin:0;background:#fff;border-radius:10px;padding:8px}figure img{display:block;width:100%;min-width:640px}
.settings{display:grid;grid-template-columns:repeat(auto-fill,minmax(210px,1fr));gap:2px 22px;font-size:.9rem}
.settings div{display:flex;justify-content:space-between;border-bottom:1px dotted var(--line);padding:3px 0}
.settings span:first-child{color:var(--soft)}code{background:var(--bg);padding:.15em .4em;border-radius:5px;overflow-wrap:anywhere}
.note{color:var(--soft);font-size:.92rem;max-width:80ch}li{margin:.25em 0}
"""


def write_report(folder: Path) -> Path:
    """Draw the figures of the comparison in `folder` (PNG), summary.json, table.txt and report.html; returns the page's path."""
    comparison = load_comparison(folder)
    summaries = summarise(comparison)
    drawn: dict[str, Figure | None] = {}
    if summaries:
        drawn = {
            "curves": curves(comparison),
            "strict": curves(comparison, "strict"),
            "samples": samples(comparison),
            "trajectory": trajectory(comparison),
            "phases": phases(comparison),
            "proxy": proxy_and_heldout({m: comparison.of(m) for m in comparison.methods}),
        }
    pictures = {}
    for name, figure in drawn.items():
        if figure is not None:
            pictures[name] = _png(figure)
            write_bytes(folder / f"{name}.png", pictures[name])
    write_json(folder / "summary.json", summary_values(summaries))
    write_bytes(folder / "table.txt", as_text(summaries).encode())
    write_bytes(folder / "report.html", _page(comparison, summaries, pictures).encode())
    return folder / "report.html"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    return buffer.getvalue()


def _figure(pictures: dict[str, bytes], name: str, alt: str) -> str:
    if name not in pictures:
        return '<p class="note">Not there yet: no run has finished.</p>'
    data = base64.b64encode(pictures[name]).decode()
    return f'<div class="scroll"><figure><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></figure></div>'


def headline(comparison: Comparison, summaries: list[MethodSummary]) -> str:
    """One sentence on the result, computed from the table."""
    if not summaries:
        return "No run has been evaluated yet."
    base = next((s for s in summaries if s.method == comparison.baseline), summaries[0])
    parts = [f"{base.method} takes the held-out reward from {base.base.mean:.3f} to {base.final.text()}"]
    for other in summaries:
        if other is base:
            continue
        gap = other.final.mean - base.final.mean
        noise = max(base.final.std, other.final.std)
        verdict = "no more than the spread over seeds" if not abs(gap) > noise else "more than the spread over seeds"
        parts.append(f"{other.method} ends {abs(gap):.3f} {'above' if gap >= 0 else 'below'} it ({verdict})")
    return "; ".join(parts) + f". {base.seeds} seed{'s' if base.seeds != 1 else ''}."


def _table(comparison: Comparison, summaries: list[MethodSummary]) -> str:
    head = "".join(
        f'<th><span class="dot" style="background:{colour(s.method, comparison.config["methods"])}"></span>{html.escape(s.method)}</th>'
        for s in summaries
    )
    body = ""
    for name, cell in table_rows(summaries):
        body += f"<tr><td>{html.escape(name)}</td>" + "".join(f"<td>{html.escape(cell(s))}</td>" for s in summaries) + "</tr>"
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _proxy(pictures: dict[str, bytes]) -> str:
    """The section on held-out rewards, where some were scored."""
    if "proxy" not in pictures:
        return ""
    return f"""<section><h2>Proxy and held-out rewards</h2>{_figure(pictures, "proxy", "The proxy against held-out rewards over time")}
<p class="note">The proxy is the reward that training maximises, here on held-out prompts; nobody trains on the others. Above: over
iterations. Below: held-out against proxy, from the untrained model (hollow) to the last evaluation (full). A curve that goes right
and down is a reward being hacked: from there on the policy learns what only the proxy likes.</p></section>
"""


def _settings(values: dict[str, Any]) -> str:
    rows = (
        f"<div><span>{html.escape(k)}</span><span>{html.escape(str(v))}</span></div>"
        for k, v in values.items()
        if v not in ("", [], ())
    )
    return f'<div class="settings">{"".join(rows)}</div>'


def _papers(methods: list[str]) -> str:
    items = []
    for name in methods:
        if name in PAPERS:
            title, authors, number, idea = PAPERS[name]
            items.append(f"<li><b>{title}</b> ({authors}, arXiv {number}) {idea}.</li>")
        else:
            items.append(f"<li><b>{html.escape(name)}</b>: a rule or composition of your own.</li>")
    return f"<ul>{''.join(items)}</ul>"


def _page(comparison: Comparison, summaries: list[MethodSummary], pictures: dict[str, bytes]) -> str:
    config = comparison.config
    run = {name: value for group in config["run"].values() if isinstance(group, dict) for name, value in group.items()}
    unfinished = sum(not r.finished for r in comparison.runs) + (
        len(config["methods"]) * len(config["seeds"]) - len(comparison.runs)
    )
    versions = ", ".join(f"{k} {v}" for k, v in config.get("versions", {}).items())
    shown = {k: v for k, v in run.items() if k not in ("method", "credit", "seed")}
    pause = f'<p class="note">{unfinished} runs have not finished; figures show what is there.</p>' if unfinished else ""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>flowrl: {html.escape(run["task"])}</title><style>{STYLE}</style></head><body><main>
<h1>Which denoising steps earned the reward?</h1>
<p class="lead">{html.escape(", ".join(config["methods"]))} on the {html.escape(run["world"])} world, task
{html.escape(run["task"])}, {html.escape(run["reward_form"])} reward. {html.escape(headline(comparison, summaries))}</p>{pause}
<section><h2>Results</h2>{_table(comparison, summaries)}
<p class="note">Mean ± sample standard deviation over seeds, on held-out prompts (ODE, {run["eval_steps"]} steps, averaged weights, the
same noise for all). “To baseline”: when the mean curve first reaches the final reward of {html.escape(comparison.baseline)}. NFE counts
network evaluations while sampling and scoring, not those of the update. A difference smaller than the spread means nothing.</p></section>
<section><h2>Learning curves</h2>{_figure(pictures, "curves", "Held-out reward against iterations, NFE and seconds")}
<p class="note">Thin lines are seeds, thick ones their mean. The same, as strict success (everything asked for, nothing else):</p>
{_figure(pictures, "strict", "Strict success against iterations, NFE and seconds")}</section>
{_proxy(pictures)}<section><h2>Before and after</h2>{_figure(pictures, "samples", "Samples before and after training")}
<p class="note">The same prompts and noise in every row, first seed; the number is the {html.escape(run["reward_form"])} reward.</p></section>
<section><h2>Along one trajectory</h2>{_figure(pictures, "trajectory", "Rewards along one trajectory")}
<p class="note">R at a node estimates the final reward as of that state: by the remaining ODE steps (solid; TP-GRPO) or by the one-step
estimate x - t v (dotted). The gain of a step is the difference of its two nodes; Stepwise-Flow-GRPO pays it. A turning point (ring) is
a step that turns against the trend before it and with the whole; there TP-GRPO pays all that follows. The trajectory shown is the one
with the largest swings in its group.</p></section>
<section><h2>What an iteration costs</h2>{_figure(pictures, "phases", "Seconds per iteration by phase")}</section>
<section><h2>Methods</h2>{_papers(config["methods"])}</section>
<section><h2>Settings</h2>{_settings(shown)}<p class="note">Seeds {html.escape(", ".join(map(str, config["seeds"])))}; preset
{html.escape(str(config.get("preset", "")))}; {html.escape(versions)}; {html.escape(str(config.get("hardware", "")))}.</p>
<p>Made by <code>{html.escape(str(config.get("command", "")))}</code>; repeat it with <code>flowrl compare --config config.json</code>
from this folder's config.json.</p></section>
</main></body></html>
"""

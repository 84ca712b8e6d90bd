"""One HTML file that holds the whole report: no script, no request, its own style and pictures.

A content security policy forbids the browser to load anything, so that the page stays as it was written
wherever it is opened. Colours are variables with values for light, dark and paper; the column is as wide
as is read with ease, and tables scroll within it on a phone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qtool.reporting import sections, variants
from qtool.reporting.chosen import chosen_markdown
from qtool.reporting.contracts import contract_markdown
from qtool.reporting.gather import Run, gather, plain
from qtool.reporting.markdown import escaped
from qtool.reporting.markup import Markup, el
from qtool.reporting.tables import markdown
from qtool.system.files import atomic_path, require_writable
from qtool.system.json_files import write_json
from qtool.version import __version__

STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --ink: #1c1e21; --quiet: #5c636b; --rule: #dcdfe3; --box: #f2f3f1;
  --fp32: #4f6480; --half: #0b7d74; --int8: #c2541b; --other: #8a4f9e; --accent: #c2541b; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171a; --ink: #e6e7e8; --quiet: #9aa3ad; --rule: #33383e;
  --box: #1e2125; --fp32: #93a9c6; --half: #41c2b5; --int8: #f28b4b; --other: #c792d8; --accent: #f28b4b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .8rem; padding-top: .8rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .5rem 0; max-width: 44rem; }
.quiet, figcaption, header p { color: var(--quiet); font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: .6rem 0; }
.tile { background: var(--box); border-radius: .5rem; padding: .7rem .9rem; }
.tile strong { display: block; font-size: 1.55rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--quiet); font-size: .85rem; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 60%; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { text-align: right; } th { text-align: left; font-weight: 500; } thead th { color: var(--quiet); }
thead th + th { text-align: right; } tbody th { position: sticky; left: 0; background: var(--paper); }
.figures td { white-space: nowrap; }
.gates td, .gates thead th + th { text-align: left; }
figure { margin: 1rem 0 1.6rem; max-width: 38rem; } svg { width: 100%; height: auto; display: block; }
.notes { color: var(--quiet); font-size: .9rem; padding-left: 1.1rem; margin: .5rem 0; max-width: 44rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: 0 1.6rem;
  margin: .4rem 0; }
dl div { display: flex; gap: .8rem; justify-content: space-between; border-bottom: 1px solid var(--rule);
  padding: .2rem 0; font-size: .85rem; }
dt { color: var(--quiet); } dd { margin: 0; text-align: right; overflow-wrap: anywhere; min-width: 0; }
svg text { font: 12px system-ui, sans-serif; fill: var(--quiet); } svg .name, svg .layer { fill: var(--ink); }
svg .name { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; }
svg .layer { font-size: 11px; } .grid { stroke: var(--rule); stroke-width: 1; }
.mark { fill: currentColor; fill-opacity: .82; stroke: var(--paper); stroke-width: 1.2; }
.whisker { stroke: currentColor; stroke-width: 1.6; } .line { fill: none; stroke: currentColor; stroke-width: 1.6; }
.limit { stroke: var(--accent); stroke-width: 1.4; }
.median { stroke: var(--ink); stroke-width: 1.6; } .front { fill: none; stroke: var(--quiet); stroke-dasharray: 3 3; }
.s-fp32 { color: var(--fp32); } .s-fp16, .s-bf16 { color: var(--half); } .s-int8 { color: var(--int8); }
.s-other { color: var(--other); }
.failed { color: var(--accent); font-weight: 600; }
@media (max-width: 40rem) { table { font-size: .78rem; width: 100%; } th, td { padding: .3rem .3rem; }
  .figures td { white-space: normal; } }
@media print { :root { color-scheme: light; --paper: #fff; --ink: #000; --quiet: #444; --rule: #bbb; --box: #fff;
  --fp32: #4f6480; --half: #0b7d74; --int8: #c2541b; --other: #8a4f9e; }
  body { font-size: 10.5pt; } main { padding: 0; max-width: none; } .tile { border: 1px solid var(--rule); }
  .scroll { overflow: visible; } table { font-size: 8.5pt; } figure, tr, .tile, dl div { break-inside: avoid; }
  h2, h3 { break-after: avoid; } figure { max-width: 12cm; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(run: Run, out: Path | None = None) -> dict[str, Path]:
    """Writes ``report.html``, ``report.md`` and ``report.json``, and gives their paths.

    ``out`` is the folder they go to, by default the run's own. A report on an unfinished run says what is missing.
    """
    folder = out or run.path
    require_writable(folder)
    texts = {"html": (folder / "report.html", page(run)), "markdown": (folder / "report.md", summary(run))}
    for target, text in texts.values():
        with atomic_path(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    write_json(folder / "report.json", plain(run))
    return {name: target for name, (target, _) in texts.items()} | {"json": folder / "report.json"}


def report(path: Path, out: Path | None = None) -> dict[str, Any]:
    """Writes the report, and gives plain values: its ``files``, the outcome of every contract by folder, the ``notes``.

    Those say what is not there, and what was changed since.
    """
    run = gather(path)
    files = {name: str(target) for name, target in write_report(run, out).items()}
    contracts = {place.name: place.contract for place in run.contracted}
    return {"files": files, "contracts": contracts, "notes": run.told}


def page(run: Run) -> str:
    """The report as one HTML document."""
    title = sections.title_of(run)
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("title", f"{title} – qtool report"),
        el("style", Markup(STYLE)),
    )
    heading = el("header", el("h1", title), el("p", _subtitle(run)))
    document = el("html", head, el("body", el("main", heading, *_sections(run))), lang="en")
    unbroken = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", document)
    return f"<!doctype html>\n{unbroken}\n"


def _subtitle(run: Run) -> str:
    every = [result for place in (run, *run.variants) for result in place.results.values()]
    latest = max((result.get("created", "") for result in every), default="")
    return ", ".join(part for part in (run.name, latest[:10], f"qtool {__version__}") if part)


def _sections(run: Run) -> list[Markup]:
    """The sections that have something to show, in reading order."""
    wanted: list[tuple[str, list[Markup | None]]] = [
        ("Verdict", list(sections.verdict(run))),
        ("Missing or changed", [sections.missing(run)]),
        ("Against an earlier benchmark", list(sections.regressions(run))),
        ("Accuracy, time and size", [variants.frontier(run)]),
        ("Figures", list(sections.figures_table(run))),
        ("Latency", list(sections.latencies(run))),
        ("Contract", list(sections.contracts(run))),
        ("Error by layer", list(sections.layers(run))),
        ("Coverage and gates", list(sections.coverage(run))),
        ("Training", list(sections.trainings(run))),
        ("Provenance", list(sections.provenance(run))),
    ]
    return [sections.section(title, *parts) for title, parts in wanted if any(parts)]


def summary(run: Run) -> str:
    """The report as Markdown: verdicts and tables, for a pull request."""
    parts = [f"## {escaped(sections.title_of(run))}\n"]
    for place in run.measured:
        assert place.benchmark is not None
        parts.append((f"### {escaped(place.name)}\n\n" if place is not run else "") + markdown(place.benchmark))
    for place in run.contracted:
        assert place.contract is not None
        title = f"### {escaped(place.name)}: contract\n\n" if place is not run else "### Contract\n\n"
        parts.append(title + contract_markdown(place.contract))
    trained = run.get("train")
    if memory := trained.get("memory"):
        parts.append(f"### Training memory\n\n{chosen_markdown(memory, trained['history'].get('halvings', 0))}")
    told = [f"- {escaped(text)}" for text in run.told]
    return "\n".join([*parts, *(["Missing or changed:\n", *told] if told else [])]).rstrip() + "\n"

"""The sections of the HTML report, each made from the results and left out where there is nothing to show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.reporting import charts
from qtool.reporting.chosen import chosen_rows, chosen_sentence
from qtool.reporting.contracts import advice, contract_sentence, contract_table, gate_verdict, tradeoffs
from qtool.reporting.gather import Run
from qtool.reporting.markup import Markup, el, figure
from qtool.reporting.numbers import SHARES, UNKNOWN, decibels, percent, score, times
from qtool.reporting.summary import caveats, compared, verdicts
from qtool.reporting.tables import rows, unsettled
from qtool.units import many


def section(title: str, *parts: object) -> Markup:
    """A titled section."""
    return el("section", el("h2", title), *parts)


def grid(header: list[str], body: list[list[object]], cls: str = "") -> Markup:
    """A table in a box that scrolls sideways where the page is narrow."""
    head = el("tr", [el("th", cell, scope="col") for cell in header])
    lines = [el("tr", el("th", first, scope="row"), [el("td", cell) for cell in rest]) for first, *rest in body]
    table = el("table", el("thead", head), el("tbody", lines), cls=cls or None)
    return el("div", table, cls="scroll", tabindex=0)


def verdict(run: Run) -> Iterator[Markup]:
    """The figures that matter, large, and the sentence that says them with their doubt."""
    for place in run.measured:
        assert place.benchmark is not None
        told = verdicts(place.benchmark)
        name = "int8" if "int8" in told else next(reversed(told), None)
        if name is None:
            continue
        title = place.name if place is not run else None
        tiles = [_tile(*pair) for pair in _headline(place.benchmark["variants"][name])]
        yield el(
            "div", el("h3", title) if title else None, el("div", tiles, cls="tiles"), el("p", told[name]), cls="verdict"
        )


def _tile(value: str, label: str) -> Markup:
    return el("div", el("strong", value), el("span", label), cls="tile")


def _headline(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    accuracy, timed = entry.get("accuracy") or {}, entry["latency"][0]
    ratio = entry["size_ratio"]
    tiles = [
        (times(ratio), "larger") if ratio > 1 else (times(1 / ratio), "smaller"),
        (times(timed["speedup"]), f"the speed, batch {timed['batch_size']}"),
    ]
    if accuracy.get("agreement") is not None:
        tiles.append((percent(accuracy["agreement"]), "agreement"))
    if accuracy.get("top1_drop") is not None:
        gained = accuracy["top1_drop"] < 0
        tiles.append((f"{abs(accuracy['top1_drop']) * 100:.2f}", f"points of top-1 {'gained' if gained else 'lost'}"))
    if (name := accuracy.get("metric")) in accuracy.get("metrics", ()):
        told, wanted = (score(str(name), accuracy[key][name]) for key in ("metrics", "metrics_reference"))
        tiles.append((told, f"{name}, {wanted} before"))
    elif accuracy.get("top1_drop") is None and accuracy.get("sqnr_db") is not None:
        tiles.append((f"{decibels(accuracy['sqnr_db'])} dB", "SQNR"))
    return tiles


MEASURED = (
    "Each file ran in a process of its own, in rounds of random order. A speed-up compares the fastest twentieth of "
    "the runs, or 20 of them: a quiet machine. The typical one compares the middle of all, with whatever else ran."
)


def figures_table(run: Run) -> Iterator[Markup]:
    """Every figure of every variant, and what a reader has to know about them."""
    for place in run.measured:
        result = place.benchmark
        assert result is not None
        header = ["", *result["variants"]]
        body: list[list[object]] = [[row.label, *row.cells] for row in rows(result)]
        foot = [el("li", text) for text in (unsettled(result), *caveats(result)) if text]
        threads = many(result["threads"], "thread")
        told = f"{result['provider']}, {threads}, {result['cpu']['name']}. {MEASURED}"
        title = el("h3", place.name) if place is not run else None
        notes = el("ul", foot, cls="notes") if foot else None
        yield el("div", title, el("p", told, cls="quiet"), grid(header, body, "figures"), notes)


def latencies(run: Run) -> Iterator[Markup]:
    """The distribution of every run's time, one picture for each batch size."""
    for place in run.measured:
        assert place.benchmark is not None
        variants = place.benchmark["variants"]
        for index, timed in enumerate(next(iter(variants.values()))["latency"]):
            quantiles = {name: entry["latency"][index].get("latency_quantiles_ms") for name, entry in variants.items()}
            if not all(quantiles.values()):
                continue
            where = f"{place.name}, " if place is not run else ""
            runs = sum(entry["latency"][index]["num_runs"] for entry in variants.values())
            caption = (
                f"{where}batch size {timed['batch_size']}, {runs:,} runs: the line holds 98 % of them, the box half."
            )
            yield figure(charts.distributions({n: q for n, q in quantiles.items() if q}), caption)


def layers(run: Run) -> Iterator[Markup]:
    """Error by layer, where the quantization measured it: the worst first."""
    for place in run.quantized:
        yield from _harmful(place.get("quantize").get("sensitivity") or [], place.name)


def _harmful(units: list[Mapping[str, Any]], title: str) -> Iterator[Markup]:
    found = [unit for unit in units if unit.get("sqnr_db") not in (None, math.inf, -math.inf)]  # which have no bar
    if found:
        worst = sorted(((unit["name"], unit["sqnr_db"]) for unit in found), key=lambda pair: pair[1])
        more = f" (the worst 30 of {len(worst)})" if len(worst) > 30 else ""
        how = ", estimated to second order" if found[0].get("measured") == "second-order" else ""
        told = f"{title}: SQNR of the output with only this layer quantized{how}{more}; shorter is worse."
        yield figure(charts.bars(worst, "SQNR, dB"), told)


def contracts(run: Run) -> Iterator[Markup]:
    """What was promised, what keeps it, and every candidate that was judged; where nothing does, what stood in the way.

    That is the frontier of what was lost against size and time, and the units that hurt.
    """
    for place in run.contracted:
        outcome = place.contract
        assert outcome is not None
        title = el("h3", place.name) if place is not run else None
        told = el("p", contract_sentence(outcome), cls=None if outcome["met"] else "failed")
        yield el("div", title, told, el("p", advice(outcome)) if not outcome["met"] else None)
        if not outcome["met"]:
            yield from (figure(picture, caption) for picture, caption in tradeoffs(outcome))
            yield from _harmful(outcome["harmful"], "Units that hurt, each quantized alone")
        yield grid(*contract_table(outcome))
        yield from (el("p", note) for note in outcome.get("notes", ()))


def coverage(run: Run) -> Iterator[Markup]:
    """What runs in integers, what stays in float for which reason, and what the gates found."""
    for place in run.quantized:
        plan = place.get("export").get("plan") or place.get("quantize").get("plan")
        title = el("h3", place.name) if place is not run else None
        metrics = place.get("export").get("metrics", {})
        parts = [_plan(plan) if plan else None, _gates(metrics.get("gates")), _tuning(metrics.get("tuning"))]
        if any(parts):
            yield el("div", title, *parts)


def _plan(plan: Mapping[str, Any]) -> Markup:
    units = plan["units"]
    kinds = Counter(unit["kind"] for unit in units)
    integer = Counter(unit["kind"] for unit in units if unit["integer"])
    told = f"{integer.total()} of {len(units)} units are integer for {plan['target']}."
    table = grid(["kind", "integer", "of"], [[kind, integer[kind], count] for kind, count in kinds.most_common()])
    stored = _reasons("Multiplied as stored:", [unit for unit in units if unit.get("block")])
    left = _reasons("Left in float:", [unit for unit in units if not unit["integer"] and not unit.get("block")])
    notes = el("ul", [el("li", note) for note in plan.get("notes", [])]) if plan.get("notes") else None
    return el("div", el("p", told), table, stored, left, notes)


def _reasons(title: str, units: list[Any]) -> Markup | None:
    listed = [el("li", f"{unit['name']} ({unit['kind']}): {unit['reason']}") for unit in units]
    return el("div", el("p", title), el("ul", listed)) if listed else None


def _gates(gates: Any) -> Markup | None:
    """The export's gates: a list of what each expected and found."""
    if not isinstance(gates, list) or not gates:
        return None
    body: list[list[object]] = [
        [
            gate["name"],
            el("span", gate_verdict(gate), cls="failed" if gate.get("passed") is False else ""),
            gate["found"],
        ]
        for gate in gates
    ]
    return el("div", el("p", "Gates of the export:"), grid(["gate", "", "found"], body, "gates"))


def _tuning(tuning: Any) -> Markup | None:
    """What was measured group by group, and where each runs since."""
    if not isinstance(tuning, Mapping):
        return None
    told = el("p", f"Tuning: {tuning['verdict']}.")
    body: list[list[object]] = [
        [group["name"], "float" if group["in_float"] else "integer", times(group["speedup"]), group["reason"]]
        for group in tuning["groups"]
    ]
    return el("div", told, grid(["group", "runs in", "in float", "why"], body, "gates") if body else None)


def trainings(run: Run) -> Iterator[Markup]:
    """How the training went, and after it the QAT of each variant."""
    result = run.get("train")
    if (trained := _training(result, result.get("metrics", {}))) is not None:
        yield trained
    for place in run.quantized:
        if (tuned := _training(place.get("quantize"), {})) is not None:
            yield el("h3", "QAT" if place is run else f"{place.name}: QAT")
            yield tuned


def _training(result: Mapping[str, Any], tested: Mapping[str, Any]) -> Markup | None:
    """The loss step by step, the validation metric by epoch, and what the training took."""
    history = result.get("history") or {}
    losses = history.get("losses") or []
    if all(loss is None for loss in losses):
        return None
    epochs = history.get("epochs") or []
    metric = _deciding(result, epochs)
    scores: dict[int, float] = {}
    if metric:
        ends = history.get("ends") or []
        if len(ends) < len(epochs):  # an earlier version did not tell
            ends = [round(len(losses) * (i + 1) / len(epochs)) for i in range(len(epochs))]
        scores = {end: epoch[metric] for end, epoch in zip(ends, epochs, strict=True) if epoch.get(metric) is not None}
    name = (metric or "").removeprefix("validation_")
    marks = f"; the marks are the validation's {name} after each epoch" if scores else ""
    caption = f"The line falling is the training loss{marks}."
    picture = figure(charts.curve(losses, scores, name), caption)
    return el("div", picture, _training_facts(tested, history), *_chosen(result, history))


def _deciding(result: Mapping[str, Any], epochs: list[Mapping[str, Any]]) -> str | None:
    """What an epoch calls the metric that decides; of an earlier version's, which did not tell, the first."""
    known = list(epochs[0]) if epochs else []
    told = [f"validation_{result['metric']}"] if "metric" in result else [k for k in known if "loss" not in k]
    return next((name for name in told if name in known and name.startswith("validation_")), None)


def _chosen(result: Mapping[str, Any], history: Mapping[str, Any]) -> Iterator[Markup]:
    """What was chosen for the memory that there was, and what else was predicted."""
    if memory := result.get("memory"):
        head, body = chosen_rows(memory)
        yield el("p", f"Memory: {chosen_sentence(memory, history.get('halvings', 0))}.")
        yield grid(head, [list(row) for row in body])


def _training_facts(tested: Mapping[str, Any], history: Mapping[str, Any]) -> Markup:
    """Numbers beside the curve: test metrics, time, memory, steps skipped."""
    facts = {f"test {key}": _fact(key, value) for key, value in tested.items()}
    known = {"seconds", "skipped_steps", "best_epoch", "stopped_early"}
    facts |= {
        key.replace("_", " "): _fact(key, value)
        for key, value in history.items()
        if value is not None and (key in known or key.endswith(("_mib", "_per_s", "_s")))
    }
    return definitions(facts)


def _fact(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if float(value).is_integer() and key not in SHARES else score(key, value)


def definitions(facts: Mapping[str, object]) -> Markup:
    """Names and values, two columns where there is room."""
    return el("dl", [el("div", el("dt", key), el("dd", value)) for key, value in facts.items()])


def provenance(run: Run) -> Iterator[Markup]:
    """What made these files: options, inputs by hash, packages, machine."""
    for place in (run, *run.variants):
        for stage, result in place.results.items():
            if place is not run and stage == "train":
                continue
            title = stage if place is run else f"{place.name}: {stage}"
            inputs = {f"input {key}": _short(value) for key, value in result.get("inputs", {}).items()}
            outputs = {
                f"file {entry['file']}": f"{_short(entry['sha256'])}, {entry['size_bytes']:,} bytes"
                for entry in result.get("outputs", {}).values()
            }
            options = {key: _plain(value) for key, value in result.get("config", {}).items()}
            split = (result.get("source") or {}).get("split")
            said = {"data": split} if split else {}
            facts = {"made": result.get("created", UNKNOWN), **said, **inputs, **outputs, **options}
            yield el("div", el("h3", title), definitions(facts))
    yield from _machine(run)


def _machine(run: Run) -> Iterator[Markup]:
    every = [result for place in (run, *run.variants) for result in place.results.values()]
    environment = next((r["environment"] for r in reversed(every) if r.get("environment")), None)
    if environment:
        cpu = environment.get("cpu", {})
        facts = {
            "cpu": f"{cpu.get('name', UNKNOWN)}, {cpu.get('cores', UNKNOWN)} cores",
            "cpu features": _plain(cpu.get("features", [])),
            "platform": environment.get("platform", UNKNOWN),
            "python": environment.get("python", UNKNOWN),
            **environment.get("packages", {}),
        }
        yield el("div", el("h3", "machine and packages"), definitions(facts))


def _short(value: object) -> str:
    text = str(value)
    hexadecimal = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return f"sha256 {text[:16]}…" if hexadecimal else text


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {_plain(item)}" for key, item in value.items()) or UNKNOWN
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or UNKNOWN
    return UNKNOWN if value is None else str(value)


def missing(run: Run) -> Markup | None:
    """What is not there, so that nobody takes this for the whole."""
    return el("ul", [el("li", text) for text in run.told], cls="notes") if run.told else None


def regressions(run: Run) -> Iterator[Markup]:
    """What became worse than in the benchmark that this one was compared with."""
    for place in run.measured:
        assert place.benchmark is not None
        if found := compared(place.benchmark):
            told, *lines = found
            notes = el("ul", [el("li", line) for line in lines], cls="notes") if lines else None
            yield el("div", el("p", f"{told[0].upper()}{told[1:]}."), notes)


def title_of(run: Run) -> str:
    """Model and data, as far as they are known."""
    for place in (run, *run.variants):
        for result in (*place.results.values(), place.refused or {}):
            source = result.get("source") or {}
            if source.get("model"):
                return f"{source['model']} on {source['data']}" if source.get("data") else str(source["model"])
    return run.name

"""Each table of the pages, as Markdown, made from one or two files in results/.

Every table ends in a line that names the command, the versions and the machine behind it.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.allocation import ratios
from experiments.helpers import peer_tables, summary
from experiments.helpers.compare import VARIANTS as COMPARED
from experiments.helpers.markdown import markdown_table
from experiments.helpers.paper import paper_rates, paper_score
from experiments.helpers.recipes import MODELS
from experiments.helpers.subjects import label
from experiments.scores import HEAD as SCORES_HEAD
from experiments.scores import score_rows

_LABELS = {
    "stock": "stock PyG",
    "checkpoint": "torch's checkpoint, each conv",
    "lossless": "`lossless`",
    "L1": "`L1`",
    "lossless+blocks": "`lossless`, blocks",
    "L1+blocks": "`L1`, blocks",
    "CB1": "`CB1`",
    "CB2": "`CB2`",
}

_SUBJECTS = {
    "gat": "GAT, arxiv_graph",
    "gcn-edge_index": "GCN on `edge_index`, arxiv_graph",
    "gatv2": "GATv2, flickr_graph",
    "transformer": "TransformerConv, flickr_graph",
}

_LAYERS = {
    "gat": "GAT",
    "gcn-edge_index": "GCN",
    "gatv2": "GATv2",
    "transformer": "TransformerConv",
}

_PAPER_DATASETS = ("flickr", "reddit", "yelp", "ogbn-arxiv")


def tables(results: Path) -> dict[str, Callable[[], str]]:
    """Return what makes each table, by name."""
    found: dict[str, Callable[[], str]] = {
        f"memory-{model}": functools.partial(_memory, results, model) for model in _SUBJECTS
    }
    makers: tuple[tuple[str, Callable[[Path], str]], ...] = (
        ("headline", _headline),
        ("memory-cb2", _memory_cb2),
        ("overhead", _overhead),
        ("overhead-of-default", _overhead_of_default),
        ("saved", _saved),
        ("largest-graph", _largest_graph),
        ("depth-and-width", _depth_and_width),
        ("scores", _scores),
        ("gcnii-amazon", _gcnii_amazon),
        ("gradient-variance", _gradient_variance),
        ("allocation", _allocation),
        ("gradient-error", _gradient_error),
        ("bias", _bias),
        ("agreement", _agreement),
    )
    found |= {name: functools.partial(make, results) for name, make in makers}
    for kind, make in (("peers", peer_tables.peers), ("generality", peer_tables.generality)):
        for name in peer_tables.names(results, kind):
            path = results / kind / f"{name}.json"
            found[f"{kind}-{name}"] = functools.partial(_with_source, path, make)
    return found | {"paper-scores": _paper_scores, "paper-rates": _paper_rates}


def _with_source(path: Path, make: Callable[[Any], str]) -> str:
    found = _read(path)
    return f"{make(found)}\n\n{_source(found)}"


def _headline(results: Path) -> str:
    memory, compressed = _headline_costs(results)
    study = _read(results / "scores.json")["arxiv_graph-gat"]
    variants = memory["variants"]
    stock = variants["stock"]

    def score(variant: str) -> str:
        return summary.percent([run["test_score"] for run in study["runs"][variant]])

    def row(label: str, variant: str, accuracy: str) -> tuple[str, ...]:
        peak, _, time, _ = _cost(variants[variant], stock)
        return (label, peak, time, accuracy)

    table = markdown_table(
        ("", "peak memory", "time a step", "test accuracy, %"),
        [
            row("stock PyG", "stock", score("fp32")),
            row("torch's checkpoint, each conv", "checkpoint", "as stock"),
            row("**gact_graph**, `bits=4`", compressed, score("adaptive-4")),
        ],
    )
    runs = len(study["runs"]["fp32"])
    return "\n\n".join(
        (
            table,
            _source(memory, "Peak and time"),
            _source(
                study,
                f"Accuracy of {'one run' if runs == 1 else f'{runs} runs'} of "
                f"{study['config']['epochs']} epochs",
            ),
        )
    )


def _headline_costs(results: Path) -> tuple[Any, str]:
    """The measurements, and what they call 4 bits: of all peers, where these were timed."""
    path = results / "peers" / "gat.json"
    if path.exists() and peer_tables.is_timed(
        found := _read(path), ("stock", "checkpoint", "L1-4+blocks")
    ):
        return found, "L1-4+blocks"
    return _read(results / "memory" / "gat.json"), "L1+blocks"


def _memory(results: Path, model: str) -> str:
    found = _read(results / "memory" / f"{model}.json")
    stock = found["variants"]["stock"]
    rows = [
        (_LABELS[name], *_cost(variant, stock), _megabytes(variant["saved_bytes"]))
        for name, variant in found["variants"].items()
    ]
    head = ("", "peak", "less than stock", "s/step", "of stock's", "held for backward")
    return f"{markdown_table(head, rows)}\n\n{_source(found)}"


def _memory_cb2(results: Path) -> str:
    files = {model: _read(results / "memory-cb2" / f"{model}.json") for model in _SUBJECTS}
    rows = []
    for model, found in files.items():
        stock, cb2 = found["variants"]["stock"], found["variants"]["CB2"]
        peak, less, time, ratio = _cost(cb2, stock)
        saved = _megabytes(cb2["saved_bytes"])
        rows.append((_SUBJECTS[model], *_cost(stock, stock)[::2], peak, less, time, ratio, saved))
    head = ("", "stock peak", "stock s/step", "`CB2` peak", "less", "s/step", "of stock's")
    return f"{markdown_table((*head, 'held for backward'), rows)}\n\n{_sources(files.values())}"


def _saved(results: Path) -> str:
    files = {model: _read(results / "memory" / f"{model}.json") for model in _SUBJECTS}
    rows = []
    for model, found in files.items():
        cells = [_megabytes(found["variants"]["lossless"]["raw_bytes"])]
        for name in ("lossless", "L1"):
            variant = found["variants"][name]
            times = variant["raw_bytes"] / variant["saved_bytes"]
            cells.append(f"{_megabytes(variant['saved_bytes'])} ({times:.1f}x less)")
        rows.append((_SUBJECTS[model], *cells))
    head = ("", "stock", "`lossless`", "`L1`, 4 bit")
    return f"{markdown_table(head, rows)}\n\n{_sources(files.values())}"


def _largest_graph(results: Path) -> str:
    found = _read(results / "scaling" / "gat-graph.json")
    largest = found["largest"]["graph"]
    stock = largest["stock"]
    speed = stock["edges"] / stock["step_seconds"]
    rows = []
    for name in (name for name in _LABELS if name in largest):
        row = largest[name]
        rows.append(
            (
                _LABELS[name],
                f"{row['nodes']:,}",
                f"{row['edges']:,}",
                f"{row['edges'] / stock['edges']:.1f}x",
                f"{row['step_seconds']:.1f}",
                f"{row['edges'] / row['step_seconds'] / speed:.2f}x",
            )
        )
    head = ("", "nodes", "edges", "of stock's", "s/step", "edges a second, of stock's")
    return f"{markdown_table(head, rows)}\n\n{_source(found)}"


def _depth_and_width(results: Path) -> str:
    found = _read(results / "scaling" / "gcn.json")
    depth, width = found["largest"]["depth"], found["largest"]["width"]
    rows = []
    for name in depth:
        cells = []
        for kind in (depth, width):
            row, stock = kind[name], kind["stock"]
            speed = row["largest"] / row["step_seconds"]
            cells += [
                f"{row['largest']:,} ({row['largest'] / stock['largest']:.1f}x)",
                f"{speed / (stock['largest'] / stock['step_seconds']):.2f}x",
            ]
        rows.append((_LABELS[name], *cells))
    head = ("", "layers of 256", "layers a second", "channels of 3 layers", "channels a second")
    return f"{markdown_table(head, rows)}\n\n{_source(found)}"


def _scores(results: Path) -> str:
    scores = _read(results / "scores.json")
    table = markdown_table(SCORES_HEAD, score_rows(scores))
    return f"{table}\n\n{_furthest(scores)}\n\n{_sources(scores.values())}"


def _furthest(scores: Mapping[str, Any]) -> str:
    """Say how far below fp32 the worst mean of each width lies."""
    said = []
    for variant in COMPARED:
        if not variant.adaptive:
            continue
        below = {
            name: statistics.fmean(run["test_score"] for run in study["runs"]["fp32"])
            - statistics.fmean(run["test_score"] for run in study["runs"][variant.name])
            for name, study in scores.items()
        }
        worst = max(below, key=lambda name: below[name])
        graph, _, model = worst.rpartition("-")
        said.append(
            f"{100 * below[worst]:.2f} points at {variant.bits} bits ({model.upper()} on {graph})"
        )
    return f"The mean that lies furthest below fp32's: {', '.join(said)}."


def _gcnii_amazon(results: Path) -> str:
    found = _read(results / "gcnii_amazon.json")
    rows = [
        (
            name,
            str(len(entry["runs"])),
            summary.percent([run["test_score"] for run in entry["runs"]]),
            summary.factor([run["rate"] for run in entry["runs"]]),
        )
        for name, entry in found.items()
    ]
    table = markdown_table(("", "seeds", "test accuracy, %", "rate"), rows)
    return f"{table}\n\n{_sources(found.values())}"


def _gradient_variance(results: Path) -> str:
    files = [_read(path) for path in sorted((results / "sensitivity").glob("*.json"))]
    rows = []
    for found in files:
        adaptive, uniform, double = (entry["variance"] for entry in found["variance"])
        rows.append(
            (
                f"{found['model'].upper()}, {summary.dataset_name(found['dataset'])}",
                f"{adaptive:.2g}",
                f"{uniform:.2g}",
                f"{adaptive / uniform:.2f}",
                f"{double:.2g}",
                f"{found['least_variance']:.2g}",
            )
        )
    head = ("", "adaptive 4 bit", "uniform 4 bit", "ratio", "uniform 8 bit", "bound for any 4 bits")
    return f"{markdown_table(head, rows)}\n\n{_sources(files)}"


def _allocation(results: Path) -> str:
    files = [_read(path) for path in sorted((results / "allocation").glob("*.json"))]
    rows = []
    for found in files:
        for row in found["rows"]:
            over_sweep, over_uniform = ratios(row["points"], "variance")
            apart = [p["library"]["variance"] / p["algorithm 1"]["variance"] for p in row["points"]]
            rows.append(
                (
                    _LAYERS[row["model"]],
                    _LABELS[row["way"]],
                    str(row["bits"]),
                    f"{over_sweep:.2f}",
                    f"{min(apart):.2f} to {max(apart):.2f}",
                    f"{over_uniform:.2f}",
                )
            )
    head = ("", "", "bits", "over Algorithm 1's", "from point to point", "over uniform bits")
    return f"{markdown_table(head, rows)}\n\n{_sources(files)}"


def _gradient_error(results: Path) -> str:
    now, before = (
        {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
        for folder in (results / "gradient_error", results / "gradient_error" / "0.6.0")
    )
    rows = []
    for model, found in now.items():
        for bits in (4, 2):
            fixed, adaptive = (_error_row(found, bits, way) for way in (False, True))
            old = [_error_row(before.get(model), bits, way) for way in (False, True)]
            shown = [_error(fixed, "first"), *(_error(r, "last") for r in (fixed, adaptive, *old))]
            rows.append((model, str(bits), *shown))
    head = ("", "bits", "first step", "fixed", "adaptive", "fixed, 0.6.0", "adaptive, 0.6.0")
    return f"{markdown_table(head, rows)}\n\n{_sources([*now.values(), *before.values()])}"


def _error_row(found: Any, bits: int, adaptive: bool) -> Any:
    rows = found["rows"] if found is not None else ()
    return next((r for r in rows if r["bits"] == bits and r["adaptive"] == adaptive), None)


def _error(row: Mapping[str, Any] | None, step: str) -> str:
    if row is None or row.get(step) is None:
        return "not run"
    return f"{row[step]:.3f} ± {row[f'{step}_standard_error']:.3f}"


def _overhead(results: Path) -> str:
    found = _read(results / "overhead.json")
    rows = [
        (
            _LAYERS[model],
            row,
            f"{timing['edges']:,.0f}",
            f"{timing['median_seconds']['fp32']:.2f} s",
            *(f"{timing['ratio'][level]:.2f}x" for level in found["levels"]),
        )
        for model, timings in found["models"].items()
        for row, timing in timings.items()
    ]
    levels = [label(level, found["bits"]) for level in found["levels"]]
    head = ("", "", "edges", "stock PyG", *levels)
    return f"{markdown_table(head, rows)}\n\n{_sources([found])}"


def _overhead_of_default(results: Path) -> str:
    found = _read(results / "overhead.json")
    rows = [
        (_LAYERS[model], *(f"{timing['ratio']['L1']:.2f}" for timing in timings.values()))
        for model, timings in found["models"].items()
    ]
    head = ("time over stock", *next(iter(found["models"].values())))
    return f"{markdown_table(head, rows)}\n\n{_sources([found])}"


def _bias(results: Path) -> str:
    files = [_read(path) for path in sorted((results / "bias").glob("*.json"))]
    shown: dict[tuple[str, str], dict[int, str]] = {}
    for found in files:
        highest = max(0.0, found["bias_squared"] + 2 * found["bias_squared_error"]) ** 0.5
        row = shown.setdefault((found["model"], found["norm"] or "none"), {})
        row[found["bits"]] = f"{found['bias']:.2%} (below {highest:.2%})"
    rows = [(*key, *(row.get(b, "not run") for b in (4, 2))) for key, row in shown.items()]
    return f"{markdown_table(('', 'norm', '4 bits', '2 bits'), rows)}\n\n{_sources(files)}"


def _agreement(results: Path) -> str:
    found = _read(results / "variance" / "digits.json")
    rows = [
        (
            f"`{slot['slot']}`",
            str(slot["bits"]),
            f"{slot['predicted']:.3g}",
            f"{slot['true']:.3g}",
            f"{slot['predicted'] / slot['true']:.2f}",
        )
        for slot in found["slots"]
    ]
    rows.append(
        (
            "all together",
            "",
            f"{found['sum_of_single']:.3g} (sum)",
            f"{found['together']:.3g}",
            f"{found['sum_of_single'] / found['together']:.2f}",
        )
    )
    head = ("slot", "bits", "by sensitivity", "over the draws", "ratio")
    return f"{markdown_table(head, rows)}\n\n{_source(found)}"


def _paper_scores() -> str:
    rows = [
        (
            model.upper(),
            *(
                " / ".join(
                    f"{paper_score(model, dataset, variant):.2f}"
                    for variant in ("fp32", "adaptive-4", "adaptive-2")
                )
                for dataset in _PAPER_DATASETS
            ),
        )
        for model in MODELS
    ]
    return markdown_table(("fp32 / 4 bit / 2 bit", *_PAPER_DATASETS), rows)


def _paper_rates() -> str:
    widths = [variant for variant in COMPARED if variant.adaptive]
    rows = []
    for model in MODELS:
        ranges = [paper_rates(model, variant.name) for variant in widths]
        rows.append((model.upper(), *(f"{r[0]} to {r[1]}x" if r else "-" for r in ranges)))
    return markdown_table(("", *(variant.label for variant in widths)), rows)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _cost(variant: Mapping[str, Any], stock: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Peak, how many times less than stock's, seconds a step, and their ratio to stock's."""
    return (
        _megabytes(variant["peak_bytes"]),
        f"{stock['peak_bytes'] / variant['peak_bytes']:.1f}x",
        f"{variant['step_seconds']:.1f} s",
        f"{variant['step_seconds'] / stock['step_seconds']:.2f}x",
    )


def _megabytes(size: int | None) -> str:
    return "not counted" if size is None else f"{size / 1e6:,.0f} MB"


def _source(found: Mapping[str, Any], what: str = "") -> str:
    """Name the command, the versions and the machine of one file's numbers."""
    said = f"`{found['command']}`; {_circumstances(found)}."
    return f"<small>{what}: {said}</small>" if what else f"<small>{said}</small>"


def _sources(files: Iterable[Mapping[str, Any]]) -> str:
    """Name every command, grouped by versions and machine."""
    commands: dict[str, dict[str, None]] = {}
    for found in files:
        commands.setdefault(_circumstances(found), {})[f"`{found['command']}`"] = None
    return "\n\n".join(
        f"<small>{'<br>'.join(group)}<br>{circumstances}.</small>"
        for circumstances, group in commands.items()
    )


def _circumstances(found: Mapping[str, Any]) -> str:
    versions = found["versions"]
    threads = found["threads"] if "threads" in found else found.get("config", {}).get("threads")
    parts = [
        f"gact_graph {versions['gact_graph']}",
        f"torch {versions['torch'].partition('+')[0]}",
        f"PyG {versions['torch_geometric']}",
        found["machine"],
    ]
    if threads:
        parts.append("1 thread" if threads == 1 else f"{threads} threads")
    return ", ".join(parts)

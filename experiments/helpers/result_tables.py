"""Each table of the pages, as Markdown, made from one or several files in results/.

Every table ends in a caption that names the command, the commit, the versions and the machine.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments import (
    allocation,
    compiled,
    kernels,
    memory,
    overhead,
    plans,
    scale,
    scaling,
    step_time,
    time_to_accuracy,
)
from experiments.allocators import by_allocator
from experiments.examples import by_example
from experiments.forces import COSTS, PHYSICS, by_way
from experiments.generality import by_width
from experiments.gradient_error import error_of
from experiments.helpers import codes, comparison, summary
from experiments.helpers.errors import ResultsError
from experiments.helpers.gradients import bias_of
from experiments.helpers.network_model import BANDWIDTH, LATENCY
from experiments.helpers.paper import (
    COMPRESSED,
    DATASETS,
    SCORED,
    paper_rates,
    paper_score,
    scores_by_seed,
    table3,
    to_fp32,
)
from experiments.helpers.recipes import MODELS
from experiments.helpers.strategies import LABELS, STRATEGIES
from experiments.helpers.subjects import LAYERS
from experiments.helpers.tables import Column, Row, Table, cell, table
from experiments.helpers.values import parse_memory
from experiments.partition import counted, grown, measured

Page = Callable[[], str]
Files = list[dict[str, Any]]

_COMMIT = re.compile(r", commit ([0-9a-f]{7,40}(?:\+changes)?)[,.]")

_COMMITS: Column = ("commit", "{commit}")

_ARXIV, _FLICKR = "arxiv_graph", "flickr_graph"

_NETWORKS = {
    "gat": f"GAT, {_ARXIV}",
    "gcn": f"GCN on `edge_index`, {_ARXIV}",
    "gatv2": f"GATv2, {_FLICKR}",
    "transformer": f"TransformerConv, {_FLICKR}",
    "gcnii": f"GCNII on a sparse matrix, {_ARXIV}",
    "sage": f"GraphSAGE, {_ARXIV}",
    "pna": f"PNA, {_FLICKR}",
}

_COMPARED = ("stock-jemalloc", "dgl-jemalloc", "lossless+blocks", "L1-4+blocks")

_OF_FORCES = ("stock", "dgl", "lossless", "L1-4")
"""The same strategies in ``experiments.forces``."""

_HEADLINE = {
    "stock": "stock PyG",
    "stock-jemalloc": LABELS["stock-jemalloc"],
    "compiled": LABELS["compiled"],
    "dgl": LABELS["dgl"],
    "dgl-jemalloc": LABELS["dgl-jemalloc"],
    "lossless+blocks": '**gact_graph**, `level="lossless", blocks="auto"`',
    "L1-4+blocks": "**gact_graph**, `bits=4`",
}

_LEVELS = (
    *("stock", "stock-jemalloc", "checkpoint", "lossless", "lossless+blocks"),
    *("L1-4+blocks", "L1-2+blocks", "CB2"),
)


def tables(results: Path) -> dict[str, Page]:
    """Return a function for each table, by name."""
    pages: dict[str, Page] = {}

    def add(name: str, make: Callable[[Any], str | Table], *globs: str) -> None:
        """Add a table of a file, or of a list of files for a wildcard or several patterns."""
        several = "*" in globs[0] or len(globs) > 1
        paths = [path for glob in globs for path in sorted(results.glob(glob))]
        pages[name] = functools.partial(_page, make, paths, several)

    add("headline", _headline, "peers/gat.json")
    pages["headline-accuracy"] = functools.partial(_headline_accuracy, results)
    add("networks", _networks, *(f"peers/{model}.json" for model in _NETWORKS), "forces.json")
    of_one_thread = (f"peers_one_thread/{model}.json" for model in _NETWORKS)
    add("networks-one-thread", _networks, *of_one_thread)
    add("levels", _levels, "peers/gat.json")
    add("overhead", overhead.by_graph, "overhead.json")
    add("overhead-jemalloc", overhead.by_graph, "overhead_jemalloc.json")
    add("overhead-of-default", _overhead_of_default, "overhead.json")
    add("examples", by_example, "examples.json")
    add("busy", step_time.by_level, "busy.json")
    add("busy-passive", step_time.by_level, "busy_passive.json")
    add("compiled", compiled.by_network, "compiled.json")
    add("allocators", lambda content: by_allocator(content["medians"]), "allocators.json")
    add("gpu-quantizer", lambda content: kernels.quantizer(content["jobs"]), "gpu_kernels.json")
    add("largest-graph", scaling.by_memory, "scaling/gat-*.json")
    add("table3", _table3, "table3/*.json")
    add("scores", _scores, "table2/*.json")
    add("rates", _rates, "table2/*.json")
    add("gradient-variance", _gradient_variance, "sensitivity/*.json")
    add("allocation", lambda files: allocation.by_way(_rows(files)), "allocation/*.json")
    add("gradient-error", _gradient_error, "gradient_error/*.json")
    add("bias-activations", _bias_by_activation, "activations/*.json")
    add("agreement", _agreement, "variance/digits.json")
    add("forces", lambda content: by_way(COSTS, content["models"]), "forces.json")
    add("forces-physics", lambda content: by_way(PHYSICS, content["models"]), "forces.json")
    add("plans", lambda content: _plan_peaks([content]), "plans.json")
    add("plan-peaks", _plan_peaks, "plan_peaks/*.json")
    add("scale", scale.needs, "scale/scale.json")
    add("scale-checks", scale.checks, "scale/checks.json")
    add("partition-grown", grown, "weak/*.json")
    add("codes-peers", codes.peers, "codes/*.json")
    kinds: dict[str, Callable[[Any], str | Table]] = {
        "peers": _peers,
        "gpu": _peers,
        "timeline": lambda content: memory.alive(content["variants"]),
        "generality": lambda content: by_width(content["runs"]),
        "partition": _partition,
        "time_to_accuracy": time_to_accuracy.by_way,
    }
    for kind, make in kinds.items():
        for path in sorted((results / kind).glob("*.json")):
            add(f"{kind}-{path.stem}", make, f"{kind}/{path.name}")
    return pages | {"paper-scores": _paper_scores, "paper-rates": _paper_rates}


def _page(make: Callable[[Any], str | Table], paths: Iterable[Path], several: bool) -> str:
    """Return a table with its caption."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    made = make(files if several else files[0])
    text = made.markdown() if isinstance(made, Table) else made
    if "command" in files[0]:
        return f"{text}\n\n{sources(files)}"
    # Files of several results, each with its own origin, by name.
    return f"{text}\n\n{sources(_studies(files) if several else files[0].values())}"


def check_commits(name: str, text: str) -> None:
    """Check that the numbers of a table stem from one commit, or that each row names its own.

    Raises:
        ResultsError: If the captions name several commits and the column ``commit`` does not.
    """
    commits = set(_COMMIT.findall(text))
    if len(commits) < 2:
        return
    head, _, *rows = (line for line in text.splitlines() if line.startswith("|"))
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    shown: set[str] = set()
    if "commit" in columns:
        place = columns.index("commit")
        for row in rows:
            shown |= {*row.strip("|").split("|")[place].replace(",", " ").split()}
    if shown != commits:
        raise ResultsError(
            f"Expected the numbers of table {name} to stem from one commit, or each row to name "
            f"its own in a column commit (got {', '.join(sorted(commits))})"
        )


def sources(files: Iterable[Row]) -> str:
    """Return a caption with every command, grouped by commit, versions and machine."""
    commands: dict[str, dict[str, None]] = {}
    for content in files:
        variables = content.get("environment", {}).items()
        words = [f"{name}={shlex.quote(value)}" for name, value in variables]
        command = " ".join([*words, content["command"]])
        commands.setdefault(_circumstances(content), {})[f"`{command}`"] = None
    captions = []
    for circumstances, group in commands.items():
        about = f"{'; ' if len(commands) == len(group) == 1 else '<br>'}{circumstances}"
        captions.append(f"<small>{'<br>'.join(group)}{about}.</small>")
    return "\n\n".join(captions)


def _circumstances(content: Row) -> str:
    versions = content["versions"]
    threads = content.get("threads") or content.get("config", {}).get("threads")
    parts = [
        f"gact_graph {versions['gact_graph']}",
        f"commit {content['commit']}",
        f"torch {versions['torch'].partition('+')[0]}",
        f"PyG {versions['torch_geometric']}",
        content["machine"],
    ]
    if threads:
        parts.append("1 thread" if threads == 1 else f"{threads} threads")
    return ", ".join(parts)


def _headline(content: Row) -> Table:
    variants = content["variants"]
    spec = (
        ("", "{label}"),
        ("peak memory", "{peak_bytes:MB} MB"),
        ("time per step", "{step_seconds:.1f} s"),
    )
    shown = {name: text for name, text in _HEADLINE.items() if name in variants}
    return table(spec, ({"label": text, **variants[name]} for name, text in shown.items()))


def _headline_accuracy(results: Path) -> str:
    files = [json.loads(path.read_text("utf-8")) for path in (results / "table2").glob("*.json")]
    study = next(s for s in _studies(files) if (s["graph"], s["model"]) == (_ARXIV, "gat"))
    stock, compressed = (
        summary.percent([run["test_score"] for run in study["runs"][variant]])
        for variant in ("fp32", "adaptive-4")
    )
    runs = len(study["runs"]["fp32"])
    text = (
        f"Test accuracy after {study['config']['epochs']} epochs, "
        f"{'one run' if runs == 1 else f'{runs} runs'} each: {stock} % with stock PyG, "
        f"{compressed} % with gact_graph's `bits=4`."
    )
    return f"{text}\n\n{sources([study])}"


def _networks(files: Files) -> Table:
    """Return peaks and times of the files of ``experiments.peers`` and ``experiments.forces``."""
    rows = []
    for content in files:
        if "models" in content:
            model, variants, names = "SchNet, molecules", content["models"]["schnet"], _OF_FORCES
        else:
            model, variants, names = _NETWORKS[content["model"]], content["variants"], _COMPARED
        row = {"model": model, "commit": content["commit"]}
        rows.append(row | {s: variants.get(n) for s, n in zip(_COMPARED, names, strict=True)})
    spec = [(STRATEGIES[name].label, _figures_of(name)) for name in _COMPARED]
    return table([("", "{model}"), *spec, _COMMITS], rows)


def _figures_of(name: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        figures = row[name]
        return cell("{peak_bytes:MB} MB, {step_seconds:.2f} s", figures) if figures else ""

    return shown


def _levels(content: Row) -> Table:
    """Return peaks and times, and their ratios to the smaller of stock PyG's, jemalloc or not."""
    variants = content["variants"]
    shown = {name: variants[name] for name in _LEVELS if name in variants}
    stock = [row for name, row in shown.items() if name.startswith("stock")]
    peak, seconds = (min(row[key] for row in stock) for key in ("peak_bytes", "step_seconds"))
    spec: tuple[Column, ...] = (
        ("", "{label}"),
        ("peak", "{peak_bytes:MB} MB"),
        ("reduction", lambda row: f"{peak / row['peak_bytes']:.1f}x"),
        ("s/step", "{step_seconds:.1f} s"),
        ("relative to stock", lambda row: f"{row['step_seconds'] / seconds:.2f}x"),
        ("saved for backward", "{saved_bytes:MB} MB"),
    )
    return table(spec, ({"label": STRATEGIES[n].label, **row} for n, row in shown.items()))


def _overhead_of_default(content: Row) -> Table:
    models = content["models"]
    rows = [
        (LAYERS[model], *(f"{timing['ratio']['L1']:.2f}" for timing in timings.values()))
        for model, timings in models.items()
    ]
    return Table(("relative to stock", *next(iter(models.values()))), rows)


def _peers(content: Row) -> str:
    variants = comparison.medians_in(content)
    text = " ".join(comparison.remarks(variants))
    return f"{comparison.peers(variants).markdown()}\n\n{text}"


def _partition(content: Row) -> str:
    about_runs = (
        "Peak and sent bytes are the maximum over the processes. Dropout is off, so that losses "
        "can be compared. *Exchanges* is the share of the CPU time that exchanges take. The last "
        f"column is the relative difference of the loss after {content['steps']} steps to the loss "
        "of one process."
    )
    about_counts = (
        "For more parts, the bytes are computed from the parts and the bytes per row in the runs "
        "above. The times are modeled, not measured: the process with most bytes sends at "
        f"{BANDWIDTH * 8e-9:.0f} Gbit/s, each exchange takes {LATENCY * 1e6:.0f} µs more, and the "
        "computation takes the time of one process at `lossless` times the fraction of edges in "
        "the largest part."
    )
    runs, counts = measured(content).markdown(), counted(content).markdown()
    return "\n\n".join((runs, about_runs, counts, about_counts))


def _plan_peaks(files: Files) -> str:
    """Return the plans of all files, one file for each graph, with the commits if they differ."""
    found = [row | {"commit": content["commit"]} for content in files for row in content["plans"]]
    more = [_COMMITS] if len({row["commit"] for row in found}) > 1 else []
    return f"{plans.rows(found, *more).markdown()}\n\n{plans.verdict(found)}"


def _studies(files: Files) -> list[dict[str, Any]]:
    """Return the studies of ``experiments.paper table2``, by graph and model."""
    studies = [study for content in files for study in content.values()]
    return sorted(studies, key=lambda study: (study["graph"], MODELS.index(study["model"])))


def _rows(files: Files) -> Files:
    return [row for content in files for row in content["rows"]]


def _table3(files: Files) -> Table:
    """Return the searches of all files, by model and memory."""

    def place(row: Row) -> tuple[int, int]:
        return MODELS.index(row["model"]), parse_memory(row["memory"])

    return table3(sorted(_rows(files), key=place))


def _scores(files: Files) -> str:
    """Return scores in fp32, and the differences of compressed runs to fp32 with the same seeds."""
    spec: tuple[Column, ...] = (
        ("graph", "{graph}"),
        ("model", lambda study: study["model"].upper()),
        ("seeds", lambda study: str(len(scores_by_seed(study)["fp32"]))),
        ("fp32", lambda study: summary.percent([*scores_by_seed(study)["fp32"].values()])),
        *((v.label, functools.partial(to_fp32, variant=v)) for v in COMPRESSED),
        _COMMITS,
    )
    studies = _studies(files)
    # The largest drop of each width, of studies with several seeds.
    several = [study for study in studies if len(scores_by_seed(study)["fp32"]) > 1]
    drops = []
    for variant in COMPRESSED:
        below = []
        for study in several:
            scores = scores_by_seed(study)
            below.append(-summary.paired_difference(scores[variant.name], scores["fp32"])[0])
        drop = max(below)
        worst = several[below.index(drop)]
        where = f"{worst['model'].upper()} on {worst['graph']}"
        drops.append(f"{summary.points(drop):.2f} points with {variant.label} ({where})")
    text = f"Largest drop below fp32 among the rows with several seeds: {', '.join(drops)}."
    return f"{table(spec, studies).markdown()}\n\n{text}"


def _rates(files: Files) -> Table:
    """Return raw over stored bytes of each model, from the smallest to the largest over graphs."""
    rows = []
    for model in MODELS:
        mine = [study for study in _studies(files) if study["model"] == model]
        ranges = []
        for variant in COMPRESSED:
            runs = (study["runs"][variant.name] for study in mine)
            means = sorted(statistics.fmean(run["rate"] for run in each) for each in runs)
            ranges.append(f"{means[0]:.1f} to {means[-1]:.1f}x")
        commits = dict.fromkeys(study["commit"] for study in mine)
        rows.append((model.upper(), *ranges, ", ".join(commits)))
    return Table(("", *(variant.label for variant in COMPRESSED), "commit"), rows)


def _paper_scores() -> str:
    """Return the paper's Table 2."""

    def cell(model: str, dataset: str) -> str:
        return " / ".join(f"{paper_score(model, dataset, variant):.2f}" for variant in SCORED)

    rows = [(model.upper(), *(cell(model, name) for name in DATASETS)) for model in MODELS]
    return Table(("fp32 / 4 bit / 2 bit", *DATASETS), rows).markdown()


def _paper_rates() -> str:
    adaptive = [variant for variant in COMPRESSED if variant.adaptive]
    rows = []
    for model in MODELS:
        ranges = (paper_rates(model, variant.name) or () for variant in adaptive)
        rows.append((model.upper(), *("{} to {}x".format(*low_high) for low_high in ranges)))
    return Table(("", *(variant.label for variant in adaptive)), rows).markdown()


def _gradient_variance(files: Files) -> Table:
    rows = []
    for content in files:
        adaptive, uniform, double = (entry["variance"] for entry in content["variance"])
        taken, given = (entry["quantized_bytes"] for entry in content["variance"][:2])
        subject = f"{content['model'].upper()}, {summary.dataset_name(content['dataset'])}"
        rows.append(
            {
                **{"subject": subject, "adaptive": adaptive, "uniform": uniform, "double": double},
                **{"ratio": adaptive / uniform, "bound": content["least_variance"]},
                **{"taken": taken, "given": given},
            }
        )
    spec = (
        ("", "{subject}"),
        ("adaptive 4 bit", "{adaptive:.2g}"),
        ("uniform 4 bit", "{uniform:.2g}"),
        ("ratio", "{ratio:.2f}"),
        ("MB, adaptive and uniform", "{taken:1MB}, {given:1MB}"),
        ("uniform 8 bit", "{double:.2g}"),
        ("bound for 4 bits", "{bound:.2g}"),
    )
    return table(spec, rows)


def _gradient_error(files: Files) -> Table:
    """Return the error of the gradient of each model."""
    rows = []
    for content in files:
        by_key = {(row["bits"], row["adaptive"]): row for row in content["rows"]}
        for bits in (4, 2):
            if fixed := by_key.get((bits, False)):
                both = {"fixed": fixed, "adaptive": by_key.get((bits, True))}
                rows.append({**fixed, **both, "commit": content["commit"]})
    rows.sort(key=lambda row: row["model"])
    spec = (
        ("", "{model}"),
        ("bits", "{bits}"),
        ("first step", lambda row: error_of("first")(row["fixed"])),
        ("fixed", lambda row: error_of("last")(row["fixed"])),
        ("adaptive", lambda row: error_of("last")(row["adaptive"])),
        _COMMITS,
    )
    return table(spec, rows)


def _bias_by_activation(files: Files) -> Table:
    shown: dict[tuple[str, str], dict[str, str]] = {}
    for content in files:
        for row in content["rows"]:
            key = (content["model"].removeprefix("pyg-").upper(), row["norm"] or "none")
            shown.setdefault(key, {"commit": content["commit"]})[row["act"]] = bias_of(row)
    commit, *acts = next(iter(shown.values()))
    columns = (*acts, commit)
    rows = [(*key, *(row[column] for column in columns)) for key, row in shown.items()]
    return Table(("", "norm", *columns), rows)


def _agreement(content: Row) -> Table:
    slots = [slot for slot in content["singles"][0]["slots"] if slot["predicted"]]
    rows = [slot | {"slot": f"`{slot['slot']}`", "note": ""} for slot in slots]
    total = {"slot": "all together", "bits": None, "true": content["rows"][0]["variance"]}
    total |= {"predicted": sum(slot["predicted"] for slot in slots), "note": " (sum)"}
    spec = (
        ("slot", "{slot}"),
        ("bits", "{bits:}"),
        ("by sensitivity", "{predicted:.3g}{note}"),
        ("over the draws", "{true:.3g}"),
        ("ratio", lambda row: f"{row['predicted'] / row['true']:.2f}" if row["true"] else ""),
    )
    return table(spec, [*rows, total])

"""The callback for Lightning's Trainer."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import GraphNet, equal, graph, one_thread  # noqa: F401
from torch import nn

import gact_graph

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
X, EDGES = graph()
LABELS = torch.arange(len(X)) % 5


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, on workers, cores and its own imports
        warnings.filterwarnings("error", module="gact_graph")
        yield


def compression(**options: Any) -> Any:
    pytest.importorskip("lightning")
    from gact_graph.lightning import Compression

    return Compression(**({"min_bytes": 0} | options))


def make(package: str = PACKAGES[0], late: bool = False) -> Any:
    base = importlib.import_module(package).LightningModule

    class Module(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            if not late:
                self.make_layers()

        def make_layers(self) -> None:
            torch.manual_seed(0)
            self.gnn = GraphNet(dropout=0.0)
            self.head = nn.Linear(5, 5)

        def configure_model(self) -> None:
            if not hasattr(self, "gnn"):
                self.make_layers()

        def training_step(self, batch: Any, index: int) -> Any:
            return F.cross_entropy(self.head(self.gnn(X, EDGES)), LABELS)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(
    model: Any, callbacks: list[Any], folder: Path, package: str = PACKAGES[0], **options: Any
) -> Any:
    epochs = options.pop("max_epochs", 1)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = importlib.import_module(package).Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **({"logger": False} | options),
    )
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=1)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("package", PACKAGES)
def test_wraps_logs_and_unwraps(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package.partition(".")[0])
    model, callback = make(package), compression(bits=4)
    trainer = fit(model, [callback], tmp_path, package)
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    assert logged["gact_graph/rate"] == pytest.approx(
        logged["gact_graph/raw_mb"] / logged["gact_graph/stored_mb"], rel=1e-5
    )
    assert logged["gact_graph/rate"] > 2
    assert 0 <= logged["gact_graph/gradient_error"] < 1
    assert logged["gact_graph/peak_mb"] > 10
    assert len(logged) == 5
    assert callback.report.rate == pytest.approx(logged["gact_graph/rate"], rel=1e-5)
    with pytest.raises(ValueError, match="Expected a wrapped model"):
        gact_graph.report(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_scalars_reach_a_logger(package: str, tmp_path: Path) -> None:
    """Any logger: TensorBoard's and that of Weights & Biases have the same interface."""
    pytest.importorskip(package.partition(".")[0])
    base = importlib.import_module(f"{package}.loggers").Logger
    seen: list[dict[str, float]] = []

    class Recorder(base):  # type: ignore[misc, valid-type]
        name, version = "recorder", 0

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            seen.append(metrics)

    fit(make(package), [compression(bits=4)], tmp_path, package, logger=Recorder())
    names = {"raw_mb", "stored_mb", "rate", "peak_mb", "gradient_error"}
    assert names <= {key.removeprefix("gact_graph/") for key in seen[-1]}
    assert len(seen) == 4  # one for each step
    assert all(row["gact_graph/rate"] > 2 for row in seen)


def test_exact_levels_train_as_stock(tmp_path: Path) -> None:
    stock, model = make(), make()
    fit(stock, [], tmp_path)
    callback = compression(level="lossless")
    fit(model, [callback], tmp_path)
    assert callback.report.rate > 1.2
    assert equal([*model.parameters()], [*stock.parameters()])


def test_a_run_that_is_resumed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    model, callback = make(), compression(bits=3, adapt_interval=3)
    trainer = fit(model, [callback], tmp_path, max_epochs=2)
    file = tmp_path / "last.ckpt"
    trainer.save_checkpoint(file)
    outcomes = []
    for resumes in (True, False):
        second = make() if resumes else model
        again = compression(bits=3, adapt_interval=3) if resumes else callback
        fit(second, [again], tmp_path, max_epochs=4, ckpt_path=file)
        bits = {row.slot: row.bits for row in again.report.contexts}
        outcomes.append((bits, [p.detach().clone() for p in second.parameters()]))
    assert outcomes[0][0] == outcomes[1][0]
    assert equal(outcomes[0][1], outcomes[1][1])
    state = torch.load(file, weights_only=True)["callbacks"]["Compression"]
    assert state["forwards"] > 0
    fresh = make()
    fit(fresh, [compression(bits=3, adapt_interval=3, seed=1)], tmp_path, max_epochs=4)
    assert not equal(outcomes[0][1], [*fresh.parameters()])


def test_layers_that_configure_model_makes(tmp_path: Path) -> None:
    model, callback = make(late=True), compression(bits=4)
    fit(model, [callback], tmp_path)
    assert callback.report.rate > 2
    assert any(row.slot.startswith("gnn/") for row in callback.report.contexts)


def test_after_an_exception_the_next_fit_goes_on(tmp_path: Path) -> None:
    model, callback = make(), compression(bits=4)
    step = type(model).training_step

    def fails(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise KeyError("of the user")
        return step(model, batch, batch_idx)

    model.training_step = fails
    with pytest.raises(KeyError, match="of the user"):
        fit(model, [callback], tmp_path)
    del model.training_step
    with pytest.raises(ValueError, match="Expected a wrapped model"):
        gact_graph.report(model)
    fit(model, [compression(bits=4)], tmp_path)
    fit(model, [callback], tmp_path)
    assert callback.report.rate > 2
    with pytest.raises(ValueError, match="Expected a wrapped model"):
        gact_graph.report(model)


def test_another_module_has_bits_of_its_own(tmp_path: Path) -> None:
    first, second, callback = make(), make(), compression(bits=4)
    second.another = nn.Linear(2, 2)
    forwards = []
    for model in (first, second, second):
        fit(model, [callback], tmp_path)
        forwards.append(callback.state_dict()["forwards"])
    assert forwards == [forwards[0], forwards[0], 2 * forwards[0]]
    assert copy.deepcopy(callback).state_dict() == callback.state_dict()


def test_validation_alone_wraps_nothing(tmp_path: Path) -> None:
    model, callback = make(), compression(bits=4)
    callback.setup(None, model, "validate")
    callback.teardown(None, model, "validate")
    assert callback.report.empty and callback.state_dict() == {}


def test_options_that_wrap_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"^wrap\(\) got an unexpected keyword argument 'bitz'"):
        compression(bitz=4)


def test_without_lightning_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "gact_graph.lightning", raising=False)
    with pytest.raises(
        ImportError, match=r"Expected Lightning \(got none\): pip install lightning"
    ):
        importlib.import_module("gact_graph.lightning")


def test_the_older_package_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("pytorch_lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "gact_graph.lightning", raising=False)
    try:
        found = importlib.import_module("gact_graph.lightning")
        assert issubclass(found.Compression, package.Callback)
    finally:
        sys.modules.pop("gact_graph.lightning", None)


@pytest.mark.parametrize("method", ["setup", "configure_model"])
def test_layers_that_appear_after_the_setup_of_callbacks(method: str, tmp_path: Path) -> None:
    base = type(make(late=True))

    class Late(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Linear(32, 32)

        def setup(self, stage: str) -> None:
            if method == "setup":
                self.make_layers()

    callback = compression(bits=4)
    fit(Late(), [callback], tmp_path)
    assert any(row.slot.startswith("gnn") for row in callback.report.contexts)

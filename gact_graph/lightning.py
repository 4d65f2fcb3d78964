"""A callback for the Trainer of Lightning, in either of its packages."""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

import gact_graph
from gact_graph.api.report import Report

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


_BASES = ("lightning.", "pytorch_lightning.")
"""The prefixes of the modules of Lightning."""


def _callback() -> Any:
    """Return Lightning's Callback, from an imported package if possible, else an installed one."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("Expected Lightning (got none): pip install lightning")


if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
else:
    _Callback = _callback()


def _may_make_layers(module: nn.Module) -> bool:
    """Return whether a module has methods that run after the setup of callbacks, and before
    ``on_fit_start``."""
    methods = (getattr(type(module), name) for name in ("setup", "configure_model"))
    return not all(method.__module__.startswith(_BASES) for method in methods)


class Compression(_Callback):
    """Wraps a ``LightningModule`` with ``gact_graph.wrap`` while the Trainer fits it.

    Use it as ``Trainer(callbacks=[Compression(bits=4)])``. Checkpoints of the Trainer contain
    ``gact_graph.state_dict``, so a resumed run continues with the same bits and the same noise.

    The callback logs ``gact_graph/raw_mb`` (bytes that stock autograd would hold for backward, in
    10^6), ``gact_graph/stored_mb`` (bytes that are held), their ratio ``gact_graph/rate``,
    ``gact_graph/peak_mb`` (peak memory of the process, or of CUDA's allocator, so far) and, after
    the first measurement, ``gact_graph/gradient_error`` (error relative to the length of the
    gradient). They reach the loggers of the Trainer, such as TensorBoard and Weights & Biases.

    Args:
        bits: The option of ``gact_graph.wrap``.
        options: Other options of ``gact_graph.wrap``, by name.

    Attributes:
        report: The report of the last training step, also after the module was unwrapped.

    Raises:
        TypeError: ``gact_graph.wrap`` has no such option. A wrong value raises an error when the
            Trainer sets up the module.
    """

    def __init__(self, bits: float | None = None, **options: Any) -> None:
        try:
            inspect.signature(gact_graph.wrap).bind(None, bits, **options)
        except TypeError as error:  # names no function
            raise TypeError(f"wrap() {error}") from None
        super().__init__()
        self.report: Report = Report(empty=True)
        self._options = {"bits": bits, **options}
        self._module: nn.Module | None = None
        self._state: dict[str, Any] = {}
        self._owner: weakref.ref[nn.Module] | None = None  # whose state this is; None if loaded

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # Before on_fit_start, where other callbacks may train, unless layers are missing.
        if stage == "fit" and not _may_make_layers(pl_module):
            self._wrap(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._module is None:
            self._wrap(pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.report = report = gact_graph.report(pl_module)
        if not report.contexts:
            return
        scalars = {
            "raw_mb": report.raw_bytes / 1e6,
            "stored_mb": report.stored_bytes / 1e6,
            "rate": report.rate,
            "peak_mb": None if report.peak_bytes is None else report.peak_bytes / 1e6,
            "gradient_error": report.gradient_error,
        }
        known = {
            f"gact_graph/{name}": value for name, value in scalars.items() if value is not None
        }
        pl_module.log_dict(known, on_step=True, on_epoch=False, batch_size=1)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._unwrap()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._unwrap()  # Lightning skips teardown

    def state_dict(self) -> dict[str, Any]:
        """Return the state for Lightning's checkpoint."""
        if self._module is not None:
            self._state = gact_graph.state_dict(self._module)
            self._owner = weakref.ref(self._module)
        return self._state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of Lightning's checkpoint, now or when the module is set up."""
        self._state, self._owner = dict(state_dict), None
        if self._module is not None and self._state:
            gact_graph.load_state_dict(self._module, self._state)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_owner": None}

    def _wrap(self, module: nn.Module) -> None:
        if self._module is not module:
            self._module = gact_graph.wrap(module, **self._options)
        if self._owner is not None and self._owner() is not module:
            self._state, self._owner = {}, None  # of another module
        if self._state:
            gact_graph.load_state_dict(module, self._state)

    def _unwrap(self) -> None:
        if self._module is not None:
            self.state_dict()  # for later checkpoints
            gact_graph.unwrap(self._module)
            self._module = None

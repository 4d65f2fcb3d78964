"""Each fault of ``make mutants`` still fits the code that it changes, and names tests that exist.

``make mutants`` itself takes an hour; a change that moves the text of a fault fails here at once.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = load_faults().FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_fault_fits_the_code(fault):
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.old != fault.new
    for name in fault.tests:
        assert (ROOT / "tests" / name).exists()

"""Random programs of tensor operations, stock beside every level."""

from __future__ import annotations

import pytest
from beside import check, how_many, ways
from hypothesis import given
from programs import Program, programs


@pytest.mark.long
@how_many(300)
@given(programs())
def test_programs(program: Program) -> None:
    check(program.source, ways(program.blocks))


@pytest.mark.long
@how_many(100)
@given(programs(behind=True))
def test_programs_that_edit_behind_autograd(program: Program) -> None:
    check(program.source, ways(program.blocks))

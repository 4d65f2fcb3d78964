"""Random stacks of message passing layers, stock beside every level."""

from __future__ import annotations

import pytest
from beside import check, how_many, second_ways, ways
from hypothesis import given
from stacks import ELSEWHERE, STATES, Stack, stacks


@pytest.mark.long
@how_many(15)
@given(stacks(second=True))
def test_second_derivatives(stack: Stack) -> None:
    check(stack.source, second_ways(stack.blocks))


@pytest.mark.long
@how_many(80)
@given(stacks())
def test_stacks(stack: Stack) -> None:
    check(stack.source, ways(stack.blocks))


@how_many(4)
@given(stacks(STATES))
def test_stacks_whose_messages_change_their_state(stack: Stack) -> None:
    check(stack.source, ways(stack.blocks))


@how_many(5)
@given(stacks(ELSEWHERE))
def test_stacks_whose_messages_look_at_other_destinations(stack: Stack) -> None:
    check(stack.source, ways(stack.blocks))

"""Recording and restoring random states and autocast."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy
import torch
from fresh import run

from gact_graph.support.run_state import RunState


def test_random_numbers_come_again_and_go_on_from_here():
    run_state = RunState({"cpu"})
    first, others = torch.rand(5), (random.random(), numpy.random.rand())
    here = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[2]
    with suppress(KeyError), run_state.restored():
        assert torch.equal(torch.rand(5), first)
        assert (random.random(), numpy.random.rand()) == others
        torch.rand(1), random.random(), numpy.random.rand()  # further than they were outside
        raise KeyError
    assert torch.equal(torch.get_rng_state(), here[0])
    assert (random.getstate(), numpy.random.get_state()[2]) == here[1:]
    run_state.restore_random_state()
    assert torch.equal(torch.rand(5), first)


def test_autocast_and_gradients_are_as_they_were():
    x = torch.ones(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        run_state = RunState({"cpu"})
    with torch.no_grad(), run_state.restored():
        assert (x @ x).dtype == torch.bfloat16
        assert torch.is_grad_enabled()
    assert (x @ x).dtype == torch.float32


_THREADS = """
import gc, threading, time
from gact_graph.support.run_state import random_states, set_random_states

def read():
    for _ in range(200):
        random_states()

def write():
    while reading.is_alive():
        set_random_states(state)

state = random_states()
gc.callbacks.append(lambda phase, info: time.sleep(1e-4))  # lets another thread run
gc.set_threshold(1)
reading, writing = threading.Thread(target=read), threading.Thread(target=write)
reading.start(), writing.start()
reading.join(), writing.join()
"""


def test_threads_that_read_and_restore_random_states_do_not_wait_for_each_other() -> None:
    """A collection of garbage while torch holds the generator hands over to another thread."""
    run(_THREADS)

"""What the code of a module reaches: the user's own code is followed, that of libraries is not."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest
from torch import nn

from gact_graph.support.reach import Reach

CODE = """
calls = [0]

def act(x):
    calls[0] += 1
    return x
"""


def module_in(monkeypatch, folder):
    """A module of Python's whose file lies in a folder."""
    name = f"acts{abs(hash(folder))}"  # no two alike: whether a name is a library's is remembered
    module = types.ModuleType(name)
    module.__file__ = str(pathlib.Path(folder) / f"{name}.py")
    exec(compile(CODE, module.__file__, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)


@pytest.mark.parametrize(
    ("folder", "followed"),
    [
        ("/home/user/project", True),
        ("/opt/venv/lib/python3.11/site-packages", False),  # another environment: a .pth file
        ("/usr/lib/python3/dist-packages", False),  # Debian's
    ],
)
def test_what_is_installed_anywhere_is_a_library(monkeypatch, folder, followed):
    net = Net(module_in(monkeypatch, folder).act)
    watch = Reach([net]).watch()
    net(1)
    found = watch.undo()
    assert (found is not None) == followed, found
    assert net.act.__globals__["calls"] == [0 if followed else 1]

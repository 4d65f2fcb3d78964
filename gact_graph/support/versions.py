"""The versions of PyTorch and PyG that the library runs with."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
import torch_geometric


class Package(NamedTuple):
    """A package that the library runs with.

    Args:
        name: The name of the package for pip.
        found: The installed version.
        oldest: The oldest version that is accepted.
        newest: The newest version that was tested. Later ones are accepted.
    """

    name: str
    found: str
    oldest: str
    newest: str

    def check(self) -> None:
        """Raise an ImportError for a version that is too old."""
        if _number(self.found) < _number(self.oldest):
            raise ImportError(
                f"Expected {self.name} {self.oldest} or newer (got {self.found}): "
                f"pip install '{self.name}>={self.oldest}'"
            )

    def described(self) -> str:
        """Return the installed version, with a remark if it is newer than those tested."""
        if _number(self.found) <= _number(self.newest):
            return self.found
        return f"{self.found}, not tested: the newest tested is {self.newest}"


def torch_here() -> Package:
    return Package("torch", torch.__version__, "2.10", "2.15")


def pyg_here() -> Package:
    return Package("torch-geometric", torch_geometric.__version__, "2.6", "2.8")


def check_versions() -> None:
    """Refuse versions of PyTorch and PyG that the library does not run with.

    Raises:
        ImportError: A version is too old, or has changed what the library needs of it.
    """
    here = torch_here()
    for package in (here, pyg_here()):
        package.check()
    try:
        from gact_graph.support import torch_private  # noqa: F401
    except (AttributeError, ImportError) as error:
        raise ImportError(
            f"Expected torch {here.oldest} to {here.newest} (got {here.found}: {error}): "
            f"pip install 'torch=={here.newest}.*'"
        ) from None


def _number(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))

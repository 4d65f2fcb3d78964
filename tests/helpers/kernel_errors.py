"""The kinds of errors that operators of the library raise in Python.

Up to 2.14, PyTorch passes the kinds of errors of the stable ABI on. Later versions raise a
RuntimeError with the same words in place of each.
"""

from __future__ import annotations

import torch

_ANY = () if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15) else (RuntimeError,)

VALUE_ERROR = (ValueError, *_ANY)


def of_kernels(error: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the kinds that an error of a kernel may have."""
    return error, *_ANY

"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """``TORCH_EXTENSIONS_DIR``, or a folder of the user's cache. It need not exist yet."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "gact_graph")
    return Path(root).expanduser()

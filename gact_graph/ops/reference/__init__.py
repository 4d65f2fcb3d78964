"""The operators in pure torch, which run without kernels, and with which tests compare kernels.

Importing this package declares every operator.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

"""What all tests share."""

from dataclasses import replace

from defaults import DEFAULTS

import gact_graph
from gact_graph.capture.config import LEVELS

# Steps of tests are small, and would be left alone. Tests of that name min_bytes themselves.
gact_graph.wrap.__kwdefaults__.update(DEFAULTS | {"min_bytes": 0})

# Most tests look at what layers save as PyG has them. Those of blocks name blocks, or CB2.
for name in ("L1", "L2", "CB1"):
    LEVELS[name] = replace(LEVELS[name], blocks=False)

"""The options of ``wrap`` as a user has them, before conftest changes one for the tests."""

import gact_graph

DEFAULTS = dict(gact_graph.wrap.__kwdefaults__)

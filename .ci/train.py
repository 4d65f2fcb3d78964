"""Trains a PyG model for a few steps with the installed wheel, and prints where the memory went.

The arguments name libraries that the wheel must have for this version of torch. With the allocator
among them, nothing is compiled, and nothing is written to the cache.
"""

import importlib.util
import statistics
import sys
import time
import warnings

import torch

warnings.simplefilter("error")
# PyG scripts a class while it is imported, and torch has deprecated that.
warnings.filterwarnings("ignore", r".*torch\.jit\.script.*")
# PyG 2.7 imports a package of its own that it has deprecated.
warnings.filterwarnings("ignore", r".*torch_geometric\.distributed.*", DeprecationWarning)

from torch_geometric.nn import GAT  # noqa: E402

import gact_graph  # noqa: E402
from gact_graph.info import facts  # noqa: E402
from gact_graph.ops.kernels import cache  # noqa: E402

for name in ("datasets", "experiments"):
    assert importlib.util.find_spec(name) is None, f"{name} is in the wheel"
assert "site-packages" in gact_graph.__file__, gact_graph.__file__

torch.manual_seed(0)
x = torch.randn(2000, 32)
edge_index = torch.randint(2000, (2, 16000))
y = (x[:, 0] > 0).long()
model = gact_graph.wrap(GAT(32, 64, num_layers=2, out_channels=2, heads=4), bits=4, min_bytes=0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses, seconds = [], []
for _ in range(10):
    begun = time.perf_counter()
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x, edge_index), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    seconds.append(time.perf_counter() - begun)
report = gact_graph.report(model)
print(report)
assert losses[-1] < losses[0], losses
assert report.stored_bytes < report.raw_bytes
for library in sys.argv[1:]:
    assert facts()[library].startswith("prebuilt: "), facts()[library]
assert cache.folder() is not None
assert "CPU allocator" not in sys.argv or not cache.folder().exists()
later = statistics.median(seconds[1:])
print(f"the first step took {seconds[0]:.2f} s, a later one {later:.2f} s")
print(f"trained from the wheel: loss {losses[0]:.3f} -> {losses[-1]:.3f}")

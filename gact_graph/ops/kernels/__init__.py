"""Kernels: libraries of a wheel, compilation at first use, the cache on disk, and launches.

- ``prebuilt``: the libraries of a wheel. ``library``: builds for the CPU, by ``compiler`` from the
  files that ``sources`` finds. ``nvrtc``: builds for CUDA, and launches.
- ``cache``, ``once``: builds are kept on disk, and made once for all threads.
- ``notices``: warnings where there is no kernel or no cache.
"""

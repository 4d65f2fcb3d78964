"""Compilation of kernels at first use: compilers, the cache on disk, and warnings on failure."""

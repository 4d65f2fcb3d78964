"""Kernels are compiled at first use and kept on disk: compilers, the cache, and the fallback."""

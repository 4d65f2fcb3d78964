"""The operators in pure torch, which run without kernels, and with which tests compare kernels."""

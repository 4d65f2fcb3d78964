"""The operators in pure torch: the oracle of the kernels, and what serves where none can be had."""

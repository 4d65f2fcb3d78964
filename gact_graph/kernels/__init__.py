"""The backends of the quantizer: a pure-torch oracle and compiled kernels that agree with it."""

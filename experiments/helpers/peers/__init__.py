"""Peers of the library: other ways to train in less memory.

Schemes of other papers are written here on top of the library's codecs and kernels, from the
formulas of these papers. The library's own ways are its levels, which are not here.
"""

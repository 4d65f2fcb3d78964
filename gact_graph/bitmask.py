"""Temporary stand-in; being replaced."""

import torch


def pack_bits(x, test="nonzero", threshold=0.0):
    m = x != 0 if test == "nonzero" else (x > threshold if test == "above" else ~(x <= threshold))
    m = m.reshape(-1)
    n = m.numel()
    m = torch.cat([m, m.new_zeros(-n % 64)]).view(-1, 64).long()
    return (m << torch.arange(64)).sum(1)


def pack_pair(x, low, high):
    ok = ((x == low) | (x == high)).all()
    return pack_bits(x == high), bool(ok)


def unpack_bits(words, shape, low, high, dtype):
    n = 1
    for s in shape:
        n *= s
    m = ((words[:, None] >> torch.arange(64)) & 1).view(-1)[:n].bool().view(shape)
    out = torch.full(shape, low, dtype=dtype)
    out[m] = high
    return out

"""500 damaged files: each is a graph or refused in one line, never a traceback, never a flood."""

from __future__ import annotations

import io
import random
import resource
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import DatasetError, Graph, load
from datasets.npz import KEYS

pytestmark = pytest.mark.long

FILES = 500
NODES = 12
Members = list[tuple[str, bytes]]

DTYPES = ("<f4", ">f8", "<f2", "<i8", ">i2", "|u1", "<u8", "|b1", "<c8", "<U3", "|S4", "<M8[s]")
SHAPES = ((), (0,), (1,), (NODES,), (2, NODES), (NODES, 0), (1, 1), (2, 2, 3))
VALUES = (0, 1, -1, NODES, 2**31, 2**62, 2**63 - 1, -(2**63), np.nan, np.inf, -np.inf, 1e300)


def good(rng: random.Random) -> dict[str, np.ndarray]:
    x = np.arange(NODES * 3, dtype=np.float32).reshape(NODES, 3)
    arrays = {
        "edge_index": np.array([np.arange(NODES), np.roll(np.arange(NODES), 1)]),
        "y": np.arange(NODES) % 3,
        "train_idx": np.arange(6),
        "val_idx": np.arange(6, 9),
        "test_idx": np.arange(9, 12),
    }
    if rng.random() < 0.5:
        return arrays | {"x": x}
    return arrays | {
        "x_data": x.ravel(),
        "x_indices": np.tile(np.arange(3), NODES),
        "x_indptr": np.arange(NODES + 1) * 3,
        "x_shape": np.array([NODES, 3]),
    }


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def other_dtype(rng: random.Random, array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(rng.choice(DTYPES))


def other_shape(rng: random.Random, array: np.ndarray) -> np.ndarray:
    return np.resize(array, rng.choice(SHAPES))


def other_value(rng: random.Random, array: np.ndarray) -> np.ndarray:
    changed, value = array.copy(), rng.choice(VALUES)
    if array.dtype.kind == "i" and not isinstance(value, int):
        changed = changed.astype(np.float64)
    with np.errstate(over="ignore"):
        changed.flat[rng.randrange(changed.size)] = value
    return changed


def objects(rng: random.Random, array: np.ndarray) -> np.ndarray:
    return array.astype(object)


def damage_array(rng: random.Random, members: Members) -> Members:
    """Another dtype, shape or value in one array, as numpy would write it."""
    place = rng.randrange(len(members))
    name, content = members[place]
    change = rng.choice((other_dtype, other_shape, other_value, objects))
    array = np.load(io.BytesIO(content), allow_pickle=False)
    members[place] = (name, npy(change(rng, array)))
    return members


def damage_header(rng: random.Random, members: Members) -> Members:
    """Other words in the header of one array, whose bytes stay."""
    place = rng.randrange(len(members))
    name, content = members[place]
    swaps = (
        (b"False", b"True "),
        (b"(12", b"(99"),
        (b"(2, 12", b"(-2,12"),
        (b"<", b">"),
        (b"8", b"9"),
        (b"<f4", b"|O8"),
        (b"'shape'", b"'shade'"),
        (b"(12,)", b"10**9"),
        (b"(", b"["),
        (b"\x93NUMPY\x01", rng.choice((b"\x93NUMPY\x02", b"\x93NUMPY\x09", b"\x93NUMPX\x01"))),
    )
    members[place] = (name, content.replace(*rng.choice(swaps), 1))
    return members


def damage_members(rng: random.Random, members: Members) -> Members:
    """Arrays lost, doubled, with another's content or name, or without any content."""
    a, b = rng.randrange(len(members)), rng.randrange(len(members))
    kind = rng.randrange(6)
    if kind == 0:
        del members[a]
    elif kind == 1:
        members.append((members[a][0], members[b][1]))
    elif kind == 2:
        members[a] = (members[a][0], members[b][1])
    elif kind == 3:
        members[a] = (rng.choice(KEYS) + ".npy", members[a][1])
    elif kind == 4:
        members[a] = (members[a][0], rng.randbytes(rng.choice((0, 1, 9, 200))))
    else:
        members.append((rng.choice(("\udce4".encode("utf8", "replace").decode(), "../y.npy")), b""))
    return members


def bomb(rng: random.Random, members: Members) -> Members:
    """A header that declares far more than a file of a few kB can hold."""
    place = rng.randrange(len(members))
    name, _ = members[place]
    numbers = rng.choice((10**9, 10**15, 2**62, 10**30))
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({numbers}, 7)}}\n".encode()
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    members[place] = (name, start + bytes(rng.choice((0, 8, 2_000_000))))
    return members


def keep(rng: random.Random, members: Members) -> Members:
    return members


def flip(rng: random.Random, content: bytearray) -> bytearray:
    for _ in range(rng.choice((1, 1, 8, 100))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def cut(rng: random.Random, content: bytearray) -> bytearray:
    return content[: rng.randrange(len(content))]


def splice(rng: random.Random, content: bytearray) -> bytearray:
    a, b = (rng.randrange(len(content)) for _ in range(2))
    content[a:a] = content[b : b + rng.randrange(200)]
    return content


def large_number(rng: random.Random, content: bytearray) -> bytearray:
    """The archive's own sizes and offsets are four bytes each."""
    place = rng.randrange(len(content))
    content[place : place + 4] = rng.choice((b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4)))
    return content


ARRAYS = (damage_array, damage_array, damage_header, damage_members, bomb, keep)
BYTES: tuple[Callable[[random.Random, bytearray], bytearray], ...] = (
    *(flip, cut, splice, large_number),
)


def write_damaged(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    members = [(f"{key}.npy", npy(array)) for key, array in good(rng).items()]
    change = rng.choice(ARRAYS)
    members = change(rng, members)
    buffer = io.BytesIO()
    packing = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(buffer, "w", packing) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, content in members:
            archive.writestr(name, content)
    content = bytearray(buffer.getvalue())
    if change is keep or rng.random() < 0.3:
        content = rng.choice(BYTES)(rng, content)
    path.write_bytes(content)


def outcome(path: Path) -> str:
    """``"graph"``, or the message; every other exception comes through."""
    try:
        graph = load(str(path))
    except DatasetError as error:
        return str(error)
    assert isinstance(graph, Graph)
    assert torch.isfinite(graph.x).all()
    assert graph.num_classes >= 1
    for ids in (graph.edge_index, graph.train_idx, graph.val_idx, graph.test_idx):
        assert ids.numel() == 0 or 0 <= int(ids.min()) <= int(ids.max()) < graph.num_nodes
    return "graph"


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: dict[str, int] = {"graph": 0, "refused": 0}
    for seed in range(FILES):
        write_damaged(path, seed)
        try:
            text = outcome(path)
        except BaseException as error:
            raise AssertionError(f"damage of seed {seed} ended in {error!r}") from error
        found["graph" if text == "graph" else "refused"] += 1
        if text != "graph":
            assert text.startswith(f"{path}: Expected "), (seed, text)
            assert "\n" not in text and len(text) < 600, (seed, text)
    # Neither all of one kind: the damage must be of use.
    assert found["graph"] >= 20 and found["refused"] >= 250, found
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000, f"{grown} kB more than before"

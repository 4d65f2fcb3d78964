"""The loader of graphs from ``.npz`` files, for each way to store features, targets and splits."""

import io
import os
import re
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import DatasetError, load
from datasets.split import random_split

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / os.environ.get("GACT_GRAPH_DATA", "../shared/data")

PARTS = {
    "edge_index": np.array([[0, 1, 2], [1, 2, 3]], dtype=np.int32),
    "y": np.array([0, 2, 1, 0], dtype=np.uint8),
}
DENSE = {**PARTS, "x": np.arange(8, dtype=np.float16).reshape(4, 2)}
SPLIT = {"train_idx": np.array([3, 0]), "val_idx": np.array([1]), "test_idx": np.array([2])}
CSR = {
    **PARTS,
    "x_data": np.array([1, 2, 3], dtype=np.uint8),
    "x_indices": np.array([0, 2, 1], dtype=np.uint16),
    "x_indptr": np.array([0, 2, 2, 3, 3], dtype=np.int32),
    "x_shape": np.array([4, 3]),
}


@pytest.fixture
def write(tmp_path):
    def write_npz(arrays):
        path = tmp_path / "tiny.npz"
        np.savez_compressed(path, **arrays)
        return str(path)

    return write_npz


def refused(path, words):
    with pytest.raises(DatasetError, match=re.escape(words)) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: Expected ")
    assert "\n" not in str(caught.value)


def test_dense_features(write):
    graph = load(write({**DENSE, **SPLIT}))
    assert (graph.name, graph.num_classes, graph.multi_label) == ("tiny", 3, False)
    assert graph.x.dtype == torch.float32 and graph.x.tolist() == DENSE["x"].tolist()
    assert graph.edge_index.dtype == torch.int64
    assert graph.edge_index.tolist() == PARTS["edge_index"].tolist()
    assert graph.y.dtype == torch.int64 and graph.y.tolist() == [0, 2, 1, 0]
    assert [graph.train_idx.tolist(), graph.val_idx.tolist(), graph.test_idx.tolist()] == [
        [3, 0],
        [1],
        [2],
    ]


def test_csr_features(write):
    assert load(write(CSR)).x.tolist() == [[1, 0, 2], [0, 0, 0], [0, 3, 0], [0, 0, 0]]


def test_csr_entries_of_one_place_add_up(write):
    graph = load(write({**CSR, "x_indices": np.array([2, 2, 1])}))
    assert graph.x.tolist() == [[0, 0, 3], [0, 0, 0], [0, 3, 0], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32])
def test_multi_label_targets(write, dtype):
    labels = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    graph = load(write({**DENSE, "y": labels.astype(dtype)}))
    assert graph.multi_label and graph.num_classes == 3
    assert graph.y.dtype == torch.float32 and graph.y.tolist() == labels.tolist()


def test_absent_split_is_the_seeded_one(write):
    graph = load(write(DENSE))
    expected = random_split(4)
    for part, wanted in zip(
        (graph.train_idx, graph.val_idx, graph.test_idx), expected, strict=True
    ):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edge_index": None}, "Expected the key edge_index (got only x, y)"),
        ({"y": None}, "Expected the key y (got only edge_index, x)"),
        ({"x": None}, "Expected the key x, or x_data, x_indices, x_indptr, x_shape (got only"),
        ({"edge_index": np.array([[0, 4], [1, 2]])}, "node ids from 0 to 3 in edge_index (got 4)"),
        (
            {"edge_index": np.array([[0, -1], [1, 2]])},
            "node ids from 0 to 3 in edge_index (got -1)",
        ),
        ({"edge_index": np.zeros((3, 2), int)}, "edge_index to be [2, E] int64 (got [3, 2] int64)"),
        ({"edge_index": np.zeros((2, 2))}, "Expected integers in edge_index (got float64)"),
        ({"x": np.ones(4)}, "Expected x to be [N, F] float32 (got [4] float32)"),
        ({"x": np.full((4, 2), np.nan)}, "Expected finite values in x (got NaN or Inf"),
        ({"x": np.full((4, 2), 1e300)}, "Expected finite values in x (got NaN or Inf"),
        ({"x": np.full((4, 2), "a")}, "Expected real numbers in x (got <U1)"),
        (
            {"x": np.full((4, 2), None)},
            "Expected a plain, whole array in x (got Python objects, which only",
        ),
        ({"x": np.ones((5, 2))}, "Expected y of shape [5], one row for each row of x (got [4]"),
        ({"y": np.array([0.0, 1.0, 1.0, 0.0])}, "Expected integers in y (got float64)"),
        ({"y": np.array([0, 1, -1, 0])}, "in y (got -1)"),
        ({"y": np.array([0, 1, 2**62, 0])}, "class ids in y that count the classes from 0 (got 46"),
        ({"y": np.array([0, 2**64 - 1], np.uint64)}, "Expected integers below 2^63 in y (got 184"),
        ({"y": np.zeros((4, 0))}, "Expected y to have at least one class (got [4, 0] float32)"),
        ({"y": np.array(1)}, "Expected y to be [N] int64 class ids"),
        ({"x": np.array(1.0)}, "Expected x to be [N, F] float32 (got [] float32)"),
        ({**SPLIT, "val_idx": np.array([0, 3])}, "(got the same 2 nodes in both)"),
        (
            {**SPLIT, "test_idx": np.array([2, 3])},
            "Expected train_idx and test_idx to have no node",
        ),
        ({**SPLIT, "test_idx": np.array([1])}, "Expected val_idx and test_idx to have no node"),
        ({**SPLIT, "test_idx": np.array([2, 2])}, "each node once in test_idx (got node 2 twice)"),
        ({**SPLIT, "test_idx": np.array(2)}, "Expected test_idx to be a list of int64 node ids"),
        ({"y": np.zeros((4, 2)) + 2}, "Expected only 0 and 1 in the [N, C] targets y (got values"),
        ({"y": np.zeros((4, 2, 2), int)}, "Expected y to be [N] int64 class ids or [N, C] float32"),
        ({"y": np.array([], int)}, "Expected y of shape [4]"),
        ({"train_idx": np.array([0])}, "or none for a random split (got only train_idx)"),
        ({**SPLIT, "val_idx": np.array([4])}, "Expected node ids from 0 to 3 in val_idx (got 4)"),
        ({**SPLIT, "test_idx": np.array([True])}, "Expected integers in test_idx (got bool)"),
        ({**SPLIT, "train_idx": np.array([], int)}, "at least one node in train_idx (got none)"),
    ],
)
def test_refusals(write, changes, words):
    arrays = {key: value for key, value in {**DENSE, **changes}.items() if value is not None}
    refused(write(arrays), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_shape": None}, "Expected the key x_shape (got only"),
        (
            {"x_shape": np.array([4])},
            "Expected x_shape to be two positive counts, N and F (got [4])",
        ),
        ({"x_shape": np.array([4, 0])}, "Expected x_shape to be two positive counts"),
        ({"x_shape": np.array([], int)}, "Expected x_shape to be two positive counts"),
        ({"x_shape": np.array([5, 3])}, "Expected 6 entries in x_indptr"),
        (
            {"x_shape": np.array([4, 2])},
            "columns from 0 to 1 in x_indices, by x_shape (got 0 to 2)",
        ),
        ({"x_indices": np.array([0, -1, 1])}, "in x_indices, by x_shape (got -1 to 1)"),
        ({"x_indices": np.array([0, 1])}, "lists of one length (got [3] and [2])"),
        ({"x_indices": np.array([0.0, 1, 1])}, "Expected integers in x_indices (got float64)"),
        ({"x_data": np.ones((3, 1))}, "lists of one length (got [3, 1] and [3])"),
        ({"x_data": np.array([1, np.inf, 3])}, "Expected finite values in x (got NaN or Inf"),
        (
            {"x_indptr": np.array([0, 2, 1, 3, 3])},
            "rise from 0 to 3, the length of x_data (got 0 to",
        ),
        (
            {"x_indptr": np.array([0, 2**63 - 1, -2, 1, 3])},
            "rise from 0 to 3, the length of x_data",
        ),
        (
            {"x_shape": np.array([4, 10**15])},
            "Expected x of 4 x 1000000000000000 numbers, by x_shape, to fit into the ",
        ),
        ({"x_shape": np.array([2**62, 2**62])}, "Expected 4611686018427387905 entries in x_indptr"),
        ({"x_shape": np.zeros(10**5, int)}, "(got the shape [100000])"),
        ({"x_indptr": np.array([1, 2, 2, 3, 3])}, "Expected x_indptr to rise from 0 to 3"),
        ({"x_indptr": np.array([0, 2, 2, 3, 4])}, "Expected x_indptr to rise from 0 to 3"),
    ],
)
def test_csr_refusals(write, changes, words):
    arrays = {key: value for key, value in {**CSR, **changes}.items() if value is not None}
    refused(write(arrays), words)


def test_missing_file(tmp_path):
    refused(f"{tmp_path}/nowhere.npz", "Expected an .npz file there (got FileNotFoundError: ")


def test_folder_in_place_of_the_file(tmp_path):
    (tmp_path / "folder.npz").mkdir()
    refused(f"{tmp_path}/folder.npz", "Expected an .npz file there (got IsADirectoryError: ")


def test_file_that_is_no_archive(tmp_path):
    path = tmp_path / "text.npz"
    path.write_text("not an archive")
    refused(str(path), "Expected a readable .npz file of named arrays (got ")


def test_single_array(tmp_path):
    path = tmp_path / "array.npz"
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    refused(str(path), "a readable .npz file of named arrays (got a single array)")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_file_cut_short(write, keep):
    path = Path(write(DENSE))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep if keep >= 1 else keep * len(whole))])
    refused(str(path), "Expected a readable .npz file of named arrays (got ")


def test_flipped_bytes(write):
    path = Path(write({**DENSE, "x": np.random.default_rng(0).random((4, 200))}))
    content = bytearray(path.read_bytes())
    middle = content.index(b"x.npy") + 400
    content[middle : middle + 40] = bytes(40)
    path.write_bytes(content)
    refused(str(path), "Expected a plain, whole array in x (got ")


class TestFilesMadeToHarm:
    """Written byte by byte: numpy itself would not write them."""

    @staticmethod
    def npy(header, data=b"", version=b"\x01\x00"):
        text = header.encode("latin1") + b"\n"
        return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + data

    @pytest.fixture
    def write_members(self, tmp_path):
        def write(changes, compression=zipfile.ZIP_DEFLATED):
            path = tmp_path / "tiny.npz"
            with zipfile.ZipFile(path, "w", compression) as archive, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a name that is there twice
                for key, array in DENSE.items():
                    if key not in changes:
                        buffer = io.BytesIO()
                        np.save(buffer, array)
                        archive.writestr(f"{key}.npy", buffer.getvalue())
                for key, contents in changes.items():
                    for content in contents:
                        archive.writestr(f"{key}.npy", content)
            return str(path)

        return write

    def test_as_written_here_it_loads(self, write_members):
        assert load(write_members({})).num_nodes == 4

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "a plain, whole array in x (got ValueError"),
            (b"no header at all", "a plain, whole array in x (got ValueError"),
            (b"\x93NUMPY\x09\x00", "an npy header of version 9.0"),
            (b"\x93NUMPY\x03\x00" + bytes(80), "an npy header of version 3.0"),
            (
                "{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}",
                "got 66 bytes where its header declares 82",
            ),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2)}", "the shape [-1, 2]"),
            ("{'descr': '|O', 'fortran_order': False, 'shape': (0,)}", "Python objects"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (10**9,)}", "ValueError"),
            (
                "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 2)}",
                "where its header declares 8000000000",
            ),
            ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (0, 2)}", "real numbers"),
            ("{'descr': '<V0', 'fortran_order': False, 'shape': (4, 2)}", "real numbers"),
            ("[" * 5000, "a plain, whole array in x (got "),
        ],
        ids=range(12),
    )
    def test_headers(self, write_members, content, words):
        member = content if isinstance(content, bytes) else self.npy(content)
        refused(write_members({"x": [member]}), words)

    def test_array_that_is_there_twice(self, write_members):
        one = self.npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4,)}", bytes(4))
        refused(write_members({"y": [one, one]}), "Expected one array y (got 2 of that name)")

    def test_compression_that_numpy_does_not_write(self, write_members):
        path = write_members({}, zipfile.ZIP_LZMA)
        refused(path, "(got a compression that numpy does not write)")

    def test_a_bomb_is_not_unpacked(self, write_members, monkeypatch):
        monkeypatch.setattr("datasets.memory.available_bytes", lambda: 10**6)
        header = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 1000000)}"
        path = write_members({"x": [self.npy(header, bytes(16_000_000))]})
        assert os.path.getsize(path) < 20_000
        tracemalloc.start()
        refused(path, "Expected its arrays to fit into the 1.0 MB of memory that are free")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        tracemalloc.stop()

    def test_a_member_that_is_longer_than_it_says(self, write_members):
        header = "{'descr': '|u1', 'fortran_order': False, 'shape': (4,)}"
        path = Path(write_members({"y": [self.npy(header, bytes(4_000_000))]}))
        content = path.read_bytes()
        true, told = (len(self.npy(header)) + n for n in (4_000_000, 4))
        assert content.count(true.to_bytes(4, "little")) == 2
        changed = content.replace(true.to_bytes(4, "little"), told.to_bytes(4, "little"))
        path.write_bytes(changed)
        refused(str(path), "Expected a plain, whole array in y (got BadZipFile: Bad CRC-32")

    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.npz")
        refused(f"{tmp_path}/pipe.npz", "Expected an .npz file there (got a pipe or a device)")

    def test_a_name_that_no_file_can_have(self):
        refused("a\0b.npz", "Expected an .npz file there (got ValueError: embedded null byte)")


def test_unread_keys_may_hold_anything(write):
    assert load(write({**DENSE, "note": np.array([None])})).num_nodes == 4


@pytest.mark.parametrize(
    ("stem", "counts", "split"),
    [
        ("cora", (2_708, 10_556, 1_433, 7), (140, 500, 1_000)),
        ("citeseer", (3_327, 9_104, 3_703, 6), (120, 500, 1_000)),
        ("amazon_computers", (13_752, 491_722, 767, 10), (8_251, 2_750, 2_751)),
        ("coauthor_cs", (18_333, 163_788, 6_805, 15), (10_999, 3_666, 3_668)),
        ("arxiv_graph", (169_343, 1_166_243, 128, 40), (90_941, 29_799, 48_603)),
        ("flickr_graph", (89_250, 899_756, 64, 7), (44_625, 22_312, 22_313)),
    ],
)
def test_real_graphs(stem, counts, split):
    path = SHARED / f"{stem}.npz"
    if not path.is_file():
        pytest.skip(f"no {path}; set GACT_GRAPH_DATA to the folder that holds it")
    graph = load(str(path))
    assert graph.name == stem
    assert (graph.num_nodes, graph.num_edges, graph.x.size(1), graph.num_classes) == counts
    assert (len(graph.train_idx), len(graph.val_idx), len(graph.test_idx)) == split

"""The cache, with downloads that are faked by the classes' own `download` methods."""

import re
import shutil
import socket
import warnings

import numpy as np
import pytest
import torch
from datasets_raw import cut_network, files_below, write_saint

from datasets import DatasetError, load
from datasets.cache import NETWORK_TIMEOUT, load_cached

pyg = pytest.importorskip("torch_geometric.datasets")


def play_download(monkeypatch, play):
    monkeypatch.setattr(pyg.Flickr, "download", lambda self: play(self))


def test_download_is_kept_and_done_once(tmp_path, monkeypatch):
    source = tmp_path / "source"
    write_saint(source, multi_label=False)
    downloads = []

    def play(dataset):
        downloads.append(dataset.raw_dir)
        shutil.copytree(source / "raw", dataset.raw_dir, dirs_exist_ok=True)

    play_download(monkeypatch, play)
    root = tmp_path / "new" / "root"
    first, second = load("flickr", root), load("flickr", str(root))
    assert len(downloads) == 1
    assert torch.equal(first.x, second.x)
    assert files_below(root / "Flickr/raw") == files_below(source / "raw")
    assert [path.name for path in root.iterdir()] == ["Flickr"]


@pytest.mark.parametrize(
    ("stop", "seen"),
    [
        (OSError("connection lost"), DatasetError),
        (SystemExit(-1), DatasetError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("there", [[], ["feats.npy"], ["feats.npy", "role.json"]])
def test_broken_download_leaves_the_cache_as_it_was(tmp_path, monkeypatch, stop, seen, there):
    raw = tmp_path / "Flickr/raw"
    if there:
        raw.mkdir(parents=True)
        for file in there:
            (raw / file).write_bytes(b"put here by the user")
    before = files_below(tmp_path)

    def play(dataset):
        with open(f"{dataset.raw_dir}/feats.npy", "wb") as file:
            file.write(b"half")
        raise stop

    play_download(monkeypatch, play)
    with pytest.raises(seen):
        load("flickr", tmp_path)
    assert files_below(tmp_path) == before
    assert bool(list(tmp_path.iterdir())) == bool(there)


def test_download_never_overwrites(tmp_path, monkeypatch):
    source, home = tmp_path / "source", tmp_path / "Flickr"
    write_saint(source, multi_label=False)
    write_saint(home, multi_label=False)
    own = np.load(home / "raw/feats.npy") * 2
    np.save(home / "raw/feats.npy", own)
    (home / "raw/role.json").unlink()
    play_download(
        monkeypatch,
        lambda dataset: shutil.copytree(source / "raw", dataset.raw_dir, dirs_exist_ok=True),
    )
    load("flickr", tmp_path)
    assert np.array_equal(np.load(home / "raw/feats.npy"), own)
    assert (home / "raw/role.json").read_bytes() == (source / "raw/role.json").read_bytes()


def test_files_of_a_linked_folder_are_made_on_its_disk(tmp_path):
    disk, home = tmp_path / "disk", tmp_path / "home"
    (disk / "folder").mkdir(parents=True)
    home.symlink_to(disk / "folder")
    stages = []

    def read(staged_home):
        stages.append(staged_home.parent.parent)
        staged_home.mkdir()
        (staged_home / "raw").touch()

    load_cached("name", home, ["raw"], "processed", read)
    assert stages == [disk.resolve()]
    assert files_below(home) == files_below(disk / "folder") != {}


def test_only_the_missing_files_are_named(tmp_path, monkeypatch):
    cut_network(monkeypatch)
    write_saint(tmp_path / "Flickr", multi_label=False)
    (tmp_path / "Flickr/raw/role.json").unlink()
    with pytest.raises(DatasetError, match=r"\(got no raw/role\.json\), and downloading failed"):
        load("flickr", tmp_path)


@pytest.mark.parametrize("folder_is_there", [False, True])
def test_interrupted_processing_leaves_no_half_cache(tmp_path, monkeypatch, folder_is_there):
    home = tmp_path / "Flickr"
    write_saint(home, multi_label=False)
    if folder_is_there:
        (home / "processed").mkdir()
    before = files_below(tmp_path)

    def half_save(data_list, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pyg.Flickr, "save", staticmethod(half_save))
        with pytest.raises(KeyboardInterrupt):
            load("flickr", tmp_path)
    assert files_below(tmp_path) == before
    assert load("flickr", tmp_path).num_nodes == 5


def test_broken_raw_file_and_broken_cache_say_what_to_do(tmp_path):
    home = tmp_path / "Flickr"
    write_saint(home, multi_label=False)
    feats = (home / "raw/feats.npy").read_bytes()
    (home / "raw/feats.npy").write_bytes(feats[:100])
    with pytest.raises(
        DatasetError, match=r"whole raw files of flickr in .*; replace them, or use"
    ):
        load("flickr", tmp_path)
    (home / "raw/feats.npy").write_bytes(feats)
    load("flickr", tmp_path)
    cache = home / "processed/data.pt"
    cache.write_bytes(b"half")
    way_out = re.escape(f"delete {cache} to have it made again, or use FILE.npz")
    with pytest.raises(DatasetError, match=way_out):
        load("flickr", tmp_path)
    cache.unlink()
    assert load("flickr", tmp_path).num_nodes == 5


def test_cache_that_needs_unpickling_is_refused(tmp_path):
    home = tmp_path / "Flickr"
    write_saint(home, multi_label=False)
    load("flickr", tmp_path)
    torch.save((tmp_path, None), home / "processed/data.pt")
    with pytest.raises(DatasetError, match=r"readable cache of flickr .*Weights only load failed"):
        load("flickr", tmp_path)


def test_surroundings_are_as_before(tmp_path, capsys):
    inside = []

    def read(home):
        print("chatter")
        inside.append(socket.getdefaulttimeout())
        raise OSError("nothing there")

    before = list(warnings.filters)
    with pytest.raises(DatasetError, match="nothing there"):
        load_cached("name", tmp_path / "home", ["raw"], "processed/data.pt", read)
    assert inside == [NETWORK_TIMEOUT]
    assert socket.getdefaulttimeout() is None
    assert warnings.filters == before
    assert capsys.readouterr().out == ""

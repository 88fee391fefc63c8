from __future__ import annotations

import gzip
import mmap
import struct
import sys

import numpy as np
import pytest

from mpiring.errors import ArgumentError
from mpiring.nn.data import MAX_CLASSES, load

RANDOM = np.random.default_rng(0)
IMAGES = {"train": RANDOM.integers(0, 256, (12, 4, 3), np.uint8),
          "t10k": RANDOM.integers(0, 256, (5, 4, 3), np.uint8)}  # fmt: skip
LABELS = {"train": np.arange(12, dtype=np.uint8) % 4, "t10k": np.arange(5, dtype=np.uint8)}


def idx(array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_idx(folder, prefix="", suffix="", dot=False, test="t10k"):
    folder.mkdir(exist_ok=True)
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", IMAGES[part]), ("labels-idx1", LABELS[part])):
            name = f"{prefix}{test if part == 't10k' else part}-{kind}-ubyte{suffix}"
            if dot:
                name = name.replace("-idx", ".idx")
            content = gzip.compress(idx(array)) if suffix else idx(array)
            (folder / name).write_bytes(content)
    return folder


def npz_arrays(**changed):
    arrays = {
        "x_train": np.arange(24.0).reshape(6, 2, 2), "y_train": np.arange(6) % 3,
        "x_test": np.arange(8.0).reshape(2, 2, 2), "y_test": np.array([0, 2]),
    }  # fmt: skip
    return {**arrays, **changed}


def write_npz(folder, arrays):
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def test_digits_are_split_by_class_and_standardised():
    data = load("digits")
    assert (data.name, data.classes, data.features) == ("digits", 10, 64)
    assert (len(data.y_train), len(data.y_test)) == (1442, 355)
    whole = np.bincount(data.y_train) + np.bincount(data.y_test)
    assert (np.bincount(data.y_test) == whole // 5).all()
    from sklearn.datasets import load_digits

    pixels, _ = load_digits(return_X_y=True)
    split = np.concatenate([data.x_train, data.x_test])
    assert sorted(map(bytes, split)) == sorted(map(bytes, pixels.astype(np.uint8)))
    x, y = data.train_batch(slice(None), "float64")
    assert x.shape == (1442, 64) and y.dtype == np.int64
    assert abs(x.mean()) < 1e-12 and x.std() == pytest.approx(1)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ArgumentError, match=r"pip install 'mpiring\[train\]'"):
        load("digits")


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"suffix": ".gz"},
        {"dot": True},
        {"prefix": "emnist-letters-", "test": "test", "suffix": ".gz"},
    ],
)
def test_idx_files_as_they_are_shipped(tmp_path, layout):
    data = load(write_idx(tmp_path / "mnist", **layout))
    assert data.name == layout.get("prefix", "mnist-").rstrip("-")
    assert (data.classes, data.features) == (5, 12)
    assert (data.x_train == IMAGES["train"].reshape(12, 12)).all()
    assert (data.x_test == IMAGES["t10k"].reshape(5, 12)).all()
    assert (data.y_train == LABELS["train"]).all() and (data.y_test == LABELS["t10k"]).all()
    assert data.y_train.dtype == np.int64


def test_an_uncompressed_file_is_mapped_not_read(tmp_path):
    base = load(write_idx(tmp_path / "mnist")).x_train
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap)


def test_one_of_several_splits_is_chosen_by_name(tmp_path):
    write_idx(tmp_path, "emnist-letters-")
    write_idx(tmp_path, "emnist-digits-", ".gz")
    with pytest.raises(ArgumentError, match=r"several sets; .*emnist-digits, .*emnist-letters"):
        load(tmp_path)
    assert load(tmp_path / "emnist-digits").name == "emnist-digits"
    with pytest.raises(ArgumentError, match="emnist-bymerge' given; allowed are 'digits'"):
        load(tmp_path / "emnist-bymerge")


def test_a_split_in_the_current_folder(tmp_path, monkeypatch):
    write_idx(tmp_path, "emnist-letters-", test="test")
    monkeypatch.chdir(tmp_path)
    assert load("emnist-letters").name == "emnist-letters"
    (tmp_path / "emnist-letters-test-labels-idx1-ubyte").unlink()
    with pytest.raises(ArgumentError, match="lacks emnist-letters-test-labels-idx1-ubyte;"):
        load("emnist-letters")


def test_standardising_keeps_the_precision_that_is_stored(tmp_path):
    x = np.arange(24.0).reshape(6, 4)
    small = load(write_npz(tmp_path, npz_arrays(x_train=x, x_test=x[:2])))
    large = load(write_npz(tmp_path, npz_arrays(x_train=x + 1e9, x_test=x[:2])))
    np.testing.assert_allclose(
        large.train_batch(slice(None))[0], small.train_batch(slice(None))[0], atol=1e-6
    )


def test_batches_are_standardised_by_the_training_samples(tmp_path):
    data = load(write_idx(tmp_path / "mnist"))
    train, test = (IMAGES[part].reshape(-1, 12) / 1.0 for part in ("train", "t10k"))
    which = np.array([7, 0, 7])
    x, y = data.train_batch(which)
    assert x.dtype == np.float32 and y.tolist() == [3, 0, 3]
    np.testing.assert_allclose(x, (train[which] - train.mean()) / train.std(), atol=1e-6)
    x, y = data.test_batch(slice(1, 3), "float64")
    assert x.dtype == np.float64 and y.tolist() == [1, 2]
    np.testing.assert_allclose(x, (test[1:3] - train.mean()) / train.std(), atol=1e-12)
    assert data.train_batch(which, "float16")[0].dtype == np.float16
    assert data.train_batch(which[:0])[0].shape == (0, 12)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "uint8", "bool"])
def test_npz_of_any_real_dtype(tmp_path, dtype):
    arrays = npz_arrays(x_train=npz_arrays()["x_train"].astype(dtype))
    data = load(write_npz(tmp_path, arrays))
    assert (data.name, data.classes, data.features) == ("data", 3, 4)
    assert (data.x_train == arrays["x_train"].reshape(6, 4)).all()
    assert data.y_test.tolist() == [0, 2]


def test_constant_samples_are_not_divided_by_zero(tmp_path):
    data = load(write_npz(tmp_path, npz_arrays(x_train=np.full((6, 2, 2), 5.0))))
    assert not data.train_batch(slice(None))[0].any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_train": np.array([["a", "b"]] * 6)}, "x_train has dtype <U1; allowed are real"),
        ({"x_train": np.ones((6, 4), complex)}, "x_train has dtype complex128"),
        ({"x_train": np.array([[None] * 4] * 6)}, "cannot be read as a .npz file of numbers"),
        ({"x_test": np.ones((2, 5))}, r"samples of shape \(2, 2\), .*x_test of \(5,\)"),
        ({"x_train": np.ones((5, 2, 2))}, r"x_train has shape \(5, 2, 2\) and .* \(6,\)"),
        ({"x_train": np.ones(6)}, r"x_train has shape \(6,\)"),
        ({"x_train": np.ones((0, 2, 2)), "y_train": np.ones(0, int)}, "x_train is empty"),
        ({"y_test": np.ones(0, int)}, "y_test is empty"),
        ({"y_train": np.array([0, 1, 2, -1, 0, 1])}, "y_train holds labels from -1 to 2; allowed"),
        ({"y_test": np.array([0, MAX_CLASSES])}, f"y_test holds labels from 0 to {MAX_CLASSES}"),
        ({"y_train": np.arange(6) / 2}, "y_train has dtype float64; allowed are integers"),
        ({"y_train": np.eye(6, dtype=int)}, r"y_train has shape \(6, 6\)"),
        ({"x_test": np.array([[[0, np.nan], [0, 0]]] * 2)}, "x_test holds inf or nan"),
    ],
)  # fmt: skip
def test_npz_that_does_not_fit(tmp_path, changed, message):
    with pytest.raises(ArgumentError, match=message):
        load(write_npz(tmp_path, npz_arrays(**changed)))


def test_npz_without_all_arrays(tmp_path):
    arrays = npz_arrays()
    del arrays["x_test"], arrays["y_test"]
    with pytest.raises(ArgumentError, match="lacks x_test, y_test; it holds x_train, y_train"):
        load(write_npz(tmp_path, arrays))


@pytest.mark.parametrize("content", [b"", b"no archive", "cut", "plain array"])
def test_npz_that_is_none(tmp_path, content):
    path = write_npz(tmp_path, npz_arrays())
    if content == "cut":
        content = path.read_bytes()[:-40]
    if content == "plain array":
        with open(path, "wb") as file:
            np.save(file, np.ones(3))
    else:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"data\.npz cannot be read as a \.npz file"):
        load(path)


@pytest.mark.parametrize("name", ["mnist", "no/such/folder", "folder/data.csv", "none.npz"])
def test_what_does_not_exist(tmp_path, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"data: .*(allowed are 'digits'|cannot be read)"):
        load(name)


def test_folder_without_all_files(tmp_path):
    with pytest.raises(ArgumentError, match=r"no IDX files in .*allowed are 'digits', a folder"):
        load(tmp_path)
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte").unlink()
    with pytest.raises(
        ArgumentError, match="lacks train-images-idx3-ubyte, t10k-labels-idx1-ubyte; allowed"
    ):
        load(tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with the bytes of no content; allowed is 00 00 08 03"),
        (b"PK\3\4 something else", "starts with the bytes 50 4b 03 04; allowed is 00 00 08 03"),
        (idx(LABELS["train"]), "starts with the bytes 00 00 08 01; allowed is 00 00 08 03"),
        (idx(IMAGES["train"])[:9], "holds 9 bytes; its header of 16 bytes is cut short"),
        (idx(IMAGES["train"])[:-1], r"holds 159 bytes; .* promises \[12, 4, 3\] .* 160 bytes"),
        (idx(IMAGES["train"]) + b"x", r"holds 161 bytes; .* promises \[12, 4, 3\] .* 160 bytes"),
        (idx(IMAGES["train"][:0]), "train-images-idx3-ubyte.* is empty"),
        (idx(IMAGES["train"][:5]), r"has shape \(5, 4, 3\) and .*train-labels.* has shape \(12,\)"),
        (idx(IMAGES["train"][:, :2]), r"samples of shape \(2, 3\), .*t10k-images.* of \(4, 3\)"),
    ],
)
def test_broken_idx_files_are_named(tmp_path, suffix, content, message):
    write_idx(tmp_path, suffix=suffix)
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(ArgumentError, match="train-images-idx3-ubyte") as caught:
        load(tmp_path)
    assert caught.match(message)


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_damaged_compression(tmp_path, damage):
    write_idx(tmp_path, suffix=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[-20:]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    else:
        content = b"nothing compressed"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        load(tmp_path)

"""Images for the demo: Fashion-MNIST from a folder or its public download, else scikit-learn's digits."""

from __future__ import annotations

import gzip
import os
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bandmf._types import FloatArray

_DOWNLOAD = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


@dataclass(frozen=True)
class Images:
    """Gray images in [0, 1], shape (count, height, width), and their labels, for training and for testing."""

    name: str
    train: FloatArray
    train_labels: npt.NDArray[np.int64]
    test: FloatArray
    test_labels: npt.NDArray[np.int64]


def hold_out(images: Images, every: int = 6) -> tuple[Images, Images]:
    """The images to tune on, and those to report on. Both train on the same; one judges on every sixth of the
    training images, which nothing trains on, the other on the test images.
    """
    kept = np.arange(len(images.train)) % every != 0
    train = {"train": images.train[kept], "train_labels": images.train_labels[kept]}
    validation = {"test": images.train[~kept], "test_labels": images.train_labels[~kept]}
    return replace(images, **train, **validation), replace(images, **train)


def load(name: str = "auto", folder: str | Path | None = None, download: bool = True) -> Images:
    """The data set called `name`: "fashion-mnist", "digits", or "auto" for the first that can be had."""
    if name not in ("auto", "fashion-mnist", "digits"):
        raise ValueError(f"name={name!r}: must be 'auto', 'fashion-mnist' or 'digits'")
    if folder is not None:
        if name == "digits":
            raise ValueError("folder: is for Fashion-MNIST; the digits come with scikit-learn")
        return fashion_mnist(Path(folder))
    if name != "digits" and download:
        try:
            return fashion_mnist(_downloaded())
        except (OSError, urllib.error.URLError) as error:
            if name == "fashion-mnist":
                raise OSError(f"Fashion-MNIST cannot be downloaded ({error}); give its folder") from None
    return digits()


def fashion_mnist(folder: Path) -> Images:
    """Fashion-MNIST (60,000 + 10,000 images of 28 x 28) from its four published gzip files."""
    parts = [_read_idx(folder / file) for split in ("train", "test") for file in _FILES[split]]
    images = [part.astype(np.float32) / 255 for part in parts[::2]]
    labels = [part.astype(np.int64) for part in parts[1::2]]
    return Images("Fashion-MNIST", images[0], labels[0], images[1], labels[1])


def digits() -> Images:
    """The 1,797 handwritten digits of 8 x 8 that ship with scikit-learn; every sixth is for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = (data.images / 16).astype(np.float32), data.target.astype(np.int64)
    held_out = np.arange(len(labels)) % 6 == 0
    return Images("digits", images[~held_out], labels[~held_out], images[held_out], labels[held_out])


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """One file in the IDX format: two zero bytes, the type, the number of dimensions, sizes, then bytes."""
    try:
        with gzip.open(path, "rb") as file:
            content = file.read()
    except gzip.BadGzipFile:
        raise ValueError(f"path={str(path)!r}: not a gzip file of Fashion-MNIST") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"path={str(path)!r}: not an IDX file of bytes")
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape.astype(int))


def _downloaded() -> Path:
    """The folder with the four files, fetched on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "bandmf" / "fashion-mnist"
    for file in (name for split in _FILES.values() for name in split):
        target = folder / file
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(f"{_DOWNLOAD}/{file}", timeout=10) as reply:
                content = reply.read()
            partial = target.with_suffix(".partial")
            partial.write_bytes(content)
            partial.replace(target)
    return folder

"""Images for the demo: Fashion-MNIST from a folder or its public download, else scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bandmf._types import FloatArray
from bandmf.demo import download as downloads
from bandmf.demo.download import File, Tell

NAMES = ("auto", "fashion-mnist", "digits")
_ADDRESS = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
# Images and labels to train on, then to test on: name, bytes and SHA-256 of the published files.
_PUBLISHED = (
    ("train-images-idx3-ubyte.gz", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    ("train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    ("t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    ("t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
_FILES = tuple(File(name, f"{_ADDRESS}/{name}", size, digest) for name, size, digest in _PUBLISHED)


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


def load(
    name: str = "auto",
    folder: str | Path | None = None,
    download: bool = True,
    *,
    announce: Tell = downloads.to_stderr,
    progress: Tell | None = None,
) -> Images:
    """The data set called `name`: "fashion-mnist", "digits", or "auto" for the first that can be had.

    Fashion-MNIST comes from `folder`, else from the cache, into which it is downloaded once. A download is announced
    before it begins, and so is that the digits take its place.
    """
    if name not in NAMES:
        raise ValueError(f"name={name!r}: must be 'auto', 'fashion-mnist' or 'digits'")
    if folder is not None:
        if name == "digits":
            raise ValueError(
                f"folder={str(folder)!r}: is for Fashion-MNIST; the digits come with scikit-learn, leave it out"
            )
        return fashion_mnist(Path(folder))
    if name != "digits" and download:
        try:
            return fashion_mnist(downloads.fetched("Fashion-MNIST", "fashion-mnist", _FILES, announce, progress))
        except OSError as error:
            if name == "fashion-mnist":
                raise OSError(f"{error}; give the folder with its four files (--data), or take the digits") from None
            announce(f"{error}; taking scikit-learn's digits instead")
    return digits()


def fashion_mnist(folder: Path) -> Images:
    """Fashion-MNIST (60,000 + 10,000 images of 28 x 28) from its four published gzip files."""
    if absent := [file.name for file in _FILES if not (folder / file.name).is_file()]:
        raise ValueError(
            f"folder={str(folder)!r}: has no {absent[0]}; must be a folder with the four files of Fashion-MNIST"
        )
    parts = [_read_idx(folder / file.name) for file in _FILES]
    images = [part.astype(np.float32) / 255 for part in parts[::2]]
    labels = [part.astype(np.int64) for part in parts[1::2]]
    for some, theirs, file in zip(images, labels, _FILES[::2], strict=True):
        if some.ndim != 3 or theirs.shape != some.shape[:1]:
            raise ValueError(
                f"path={str(folder / file.name)!r}: has images of shape {some.shape}, but there are labels of shape "
                f"{theirs.shape}; download both again"
            )
    return Images("Fashion-MNIST", images[0], labels[0], images[1], labels[1])


def digits() -> Images:
    """The 1,797 handwritten digits of 8 x 8 that ship with scikit-learn; every sixth is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ValueError(
            "scikit-learn is missing: the digits come with it; pip install 'bandmf[examples]', or give the folder of "
            "Fashion-MNIST"
        ) from None

    data = load_digits()
    images, labels = (data.images / 16).astype(np.float32), data.target.astype(np.int64)
    held_out = np.arange(len(labels)) % 6 == 0
    return Images("digits", images[~held_out], labels[~held_out], images[held_out], labels[held_out])


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """One file in the IDX format: two zero bytes, the type, the number of dimensions, sizes, then bytes."""
    try:
        with gzip.open(path, "rb") as file:
            content = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(
            f"path={str(path)!r}: not a gzip file of Fashion-MNIST, or damaged; download it again"
        ) from None
    begin = 4 + 4 * content[3] if len(content) > 3 else 4
    if len(content) < begin or content[:3] != b"\0\0\x08":
        raise ValueError(f"path={str(path)!r}: not an IDX file of bytes; download it again")
    shape = tuple(int(length) for length in np.frombuffer(content[4:begin], ">u4"))
    if math.prod(shape) != len(content) - begin:
        raise ValueError(f"path={str(path)!r}: not as long as its header says; download it again")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)

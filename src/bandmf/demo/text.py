"""Text for the demo, as numbered characters: tiny Shakespeare from a folder or its public download.

`topics` is a text that needs neither: the help topics that ship with Python.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bandmf.demo import download

Characters = npt.NDArray[np.int64]

FILE = "tinyshakespeare.txt"
PUBLISHED = download.File(
    FILE,
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    1_115_394,
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
_HELD_OUT = 20  # one part in so many is for validation, and one for testing


@dataclass(frozen=True)
class Text:
    """A text cut into three, each a row of character numbers; `alphabet[k]` is character k."""

    name: str
    alphabet: str
    train: Characters
    validation: Characters
    test: Characters

    @staticmethod
    def of(name: str, content: str) -> Text:
        """The first 90 percent are for training, then 5 percent for validation and 5 for testing.

        >>> text = Text.of("abc", "abc" * 20)
        >>> text.alphabet, len(text.train), text.test
        ('abc', 54, array([0, 1, 2]))
        """
        alphabet = "".join(sorted(set(content)))
        number = {character: k for k, character in enumerate(alphabet)}
        numbers = np.array([number[character] for character in content], dtype=np.int64)
        held_out = len(numbers) // _HELD_OUT
        parts = np.split(numbers, [len(numbers) - 2 * held_out, len(numbers) - held_out])
        return Text(name, alphabet, *parts)


def load(name: str = "tiny Shakespeare", folder: str | Path | None = None) -> Text:
    """The text called `name`: "tiny Shakespeare" (from `folder`, if given) or "topics"."""
    if name not in ("tiny Shakespeare", "topics"):
        raise ValueError(f"name={name!r}: must be 'tiny Shakespeare' or 'topics'")
    return topics() if name == "topics" else tiny_shakespeare(folder)


def tiny_shakespeare(folder: str | Path | None = None) -> Text:
    """Tiny Shakespeare (1.1 million characters, 65 different ones), its content checked."""
    path = (_downloaded() if folder is None else Path(folder)) / FILE
    if not path.is_file():
        raise ValueError(f"folder={str(folder)!r}: has no {FILE}; must be a folder with this file")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != PUBLISHED.sha256:
        raise ValueError(f"path={str(path)!r}: not tiny Shakespeare as published (SHA-256 {found})")
    return Text.of("tiny Shakespeare", content.decode())


def topics(characters: int = 100_000) -> Text:
    """The first so many characters of the help topics that ship with Python, without rare ones."""
    from pydoc_data.topics import topics as content

    whole = "\n".join(content.values())[:characters]
    return Text.of("topics", "".join(c for c in whole if c.isascii()))


def _downloaded() -> Path:
    """The folder with the text, fetched on first use."""
    try:
        return download.fetched("tiny Shakespeare", "text", [PUBLISHED])
    except OSError as error:
        raise OSError(f"{error}; give its folder, with {FILE} in it") from None

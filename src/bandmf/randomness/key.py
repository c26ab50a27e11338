"""The secret that all randomness of a run comes from.

Guarantees: 256 bits from the operating system unless given; never printed, logged or pickled; written only
by `save`, to a new file that its owner alone can read; different purposes get unrelated keys.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from pathlib import Path

from bandmf._files import create_secret

SIZE = 32
_HEADER = "bandmf-key-1"
_RUN_ID = re.compile("[0-9a-f]{32,128}")


class Key:
    """A 256-bit key. `Key()` asks the operating system for a fresh one.

    >>> key = Key(bytes(32))
    >>> key
    Key(fingerprint='1a9e83744d277f2f')
    >>> key.derive("noise") == key.derive("sampling")
    False
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is None:
            secret = os.urandom(SIZE)
        if not isinstance(secret, bytes) or len(secret) != SIZE:
            # The value is left out on purpose: an error message must not show key material.
            raise ValueError(f"secret: must be {SIZE} bytes; leave it out to draw a fresh key")
        self._secret = secret

    @property
    def secret(self) -> bytes:
        """The 32 bytes themselves: handle with care."""
        return self._secret

    @property
    def fingerprint(self) -> str:
        """Tells keys apart without revealing them: what checkpoints and logs may hold."""
        return self.derive("fingerprint")._secret[:8].hex()

    def derive(self, purpose: str) -> Key:
        """The key for one purpose ("noise", "partition", "sampling"): HKDF-Expand of RFC 5869, SHA-256."""
        if not isinstance(purpose, str) or not purpose:
            raise ValueError(f"purpose={purpose!r}: must be a non-empty string, such as 'noise'")
        info = b"bandmf/1/" + purpose.encode()
        return Key(hmac.new(self._secret, info + b"\x01", hashlib.sha256).digest())

    def for_run(self, run_id: str) -> Key:
        """The key of one run, from which its noise, batches, digests and encryption derive.

        Run ids are random, so a key that is used for two runs repeats nothing.

        >>> Key(bytes(32)).for_run("00" * 16) == Key(bytes(32)).for_run("01" * 16)
        False
        """
        if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"run_id={run_id!r}: must be at least 32 hexadecimal digits")
        return self.derive(f"run/{run_id}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner can read; an existing file is never replaced."""
        try:
            create_secret(path, f"{_HEADER} {self._secret.hex()}\n".encode())
        except FileExistsError:
            raise FileExistsError(
                f"path={os.fspath(path)!r}: exists already, and a key is never overwritten; "
                "load it or choose another path"
            ) from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Key:
        """Read a key that `save` wrote; refuses a file that others can read."""
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if os.name == "posix" and mode & 0o077:
            raise PermissionError(
                f"path={os.fspath(path)!r}: mode {mode:04o} lets others read the key; chmod 600 it, or draw a new key"
            )
        try:
            header, digits = Path(path).read_bytes().decode("ascii").split()
            if header != _HEADER:
                raise ValueError
            return Key(bytes.fromhex(digits))
        except ValueError:
            raise ValueError(f"path={os.fspath(path)!r}: must be a file written by Key.save") from None

    def __repr__(self) -> str:
        return f"Key(fingerprint={self.fingerprint!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> str:
        raise TypeError("a Key is never pickled, so that no checkpoint holds it by accident; use Key.save(path)")

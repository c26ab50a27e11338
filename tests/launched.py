"""One process of several: `launched.py FOLDER SCRIPT` runs a script and leaves its weights in FOLDER, by rank.

What the operating system would draw at random is fixed, so that two launches draw the same key; if Training refuses,
what it says is left there instead.
"""

from __future__ import annotations

import os
import runpy
import secrets
import sys
from pathlib import Path

import torch

from training import weights


def fixed(size: int = 32) -> bytes:
    return bytes(range(size))


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    # In this process alone, which ends with the script; the script leaves it to us to end it.
    os.urandom = secrets.token_bytes = fixed
    leave, os._exit = os._exit, lambda code: None
    torch.manual_seed(0 if os.environ["RANK"] == "0" else 1)
    try:
        model = runpy.run_path(script, run_name="__main__")["model"]
    except ValueError as refusal:
        (folder / f"refused-{os.environ['RANK']}").write_text(str(refusal))
    else:
        torch.save(weights(model), folder / f"weights-{os.environ['RANK']}.pt")
    leave(0)


if __name__ == "__main__":
    main()

"""The plan as a file for the browser."""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from bandmf.planning import Plan


class Download(NamedTuple):
    """A file for the browser."""

    name: str
    contents: bytes


def plan_file(made: Plan) -> Download:
    """What `Plan.save` writes; with a strategy beside it, both in one archive."""
    with tempfile.TemporaryDirectory() as folder:
        path = made.save(Path(folder) / "plan.json")
        files = sorted(Path(folder).iterdir())
        if files == [path]:
            return Download(path.name, path.read_bytes())
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
            for each in files:
                out.write(each, each.name)
    return Download("plan.zip", archive.getvalue())

"""Links out of docs/ (../examples/ddp.py, ../CHANGELOG.md) lead to copies of these files on the site.

On the repository's own pages such links are right as they stand, and they stay so: only the site rewrites them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"\]\(\.\./(?!\.\.)([\w./-]+)((?:#[\w-]*)?)\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add what the pages link to outside of docs/ as plain files, under source/."""
    for page in filter(_on_top, files.documentation_pages()):
        for path, _anchor in OUTSIDE.findall(page.content_string):
            source = ROOT / path
            if not source.is_file():
                raise ValueError(f"{page.src_uri}: links to ../{path}, which is no file")
            if files.get_file_from_path(copy_of(path)) is None:
                files.append(File.generated(config, copy_of(path), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have links out of docs/ point to the copies."""
    if not _on_top(page.file):
        return markdown
    return OUTSIDE.sub(lambda link: f"]({copy_of(link[1])})", markdown)


def copy_of(path: str) -> str:
    """Where the copy of a file is, as text that any browser shows."""
    return f"source/{path}.txt"


def _on_top(page: File) -> bool:
    """Whether ../ leads out of docs/ from this page."""
    return "/" not in page.src_uri

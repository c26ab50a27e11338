"""The messages of the package, read from its source: what a page quotes must be among them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import bandmf

SOURCE = Path(bandmf.__file__).parent
HOLE = "…"  # what is filled in at run time


@cache
def messages() -> tuple[str, ...]:
    """Every text of the package but docstrings, and every sentence that `_check.fail` makes of its arguments."""
    found = []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "fail"
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "_check"
            ):
                name, _value, requirement, *remedy = (text(each) for each in node.args)
                found.append(f"{name}={HOLE}: {'; '.join([requirement, *remedy])}")
            elif isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in described:
                found.append(text(node))
    return tuple(found)


def text(node: ast.expr) -> str:
    """What an expression says, with holes for what is not written there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    return HOLE


def says(quote: str) -> bool:
    """Whether some message has this text: its pieces between holes, in this order."""
    return any(_in_order(quote.split(HOLE), message) for message in messages())


def _in_order(pieces: list[str], message: str) -> bool:
    place = 0
    for piece in pieces:
        place = message.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True

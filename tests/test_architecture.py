"""The architecture is what the tree shows: imports go one way, files are short, the public names are one table."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

import bandmf

SOURCE = Path(bandmf.__file__).parent

# The architecture's list, top to bottom. A new file takes its place here. `__init__` is `bandmf` itself: it
# re-exports what is above it, so only what is below may import from it.
ORDER = [
    *("_types", "_check", "_text", "_extras", "_files", "_cache", "_interrupts"),
    *("streaming", "band_columns"),
    "workloads",
    "participation",
    "strategies",
    "sensitivities",
    "error",
    "optimize",
    "randomness",
    "native",
    "noise",
    "accounting",
    "sampling",
    "planning",
    "ledger",
    "torch.noise",
    "torch.clipping",
    "torch.losses",
    "torch.training",
    "torch.huggingface",
    "torch",
    *("jax.tracing", "jax.random_keys"),
    "jax.noise",
    "jax.clipping",
    "jax.training",
    "jax",
    "demo",
    "__init__",
    "plots",
    "paper",
    "web",
    "cli",
    "__main__",
]
OPTIONAL = {
    *("torch", "triton", "transformers", "accelerate", "jax", "optax", "orbax", "jax_triton", "jax_privacy"),
    *("joblib", "dask", "matplotlib", "streamlit", "altair"),
}
NEED_OPTIONAL = {"native", "torch", "jax", "demo", "plots", "paper", "web", "cli", "planning.sweep"}
LONGEST_FILE, LARGEST_FOLDER = 400, 14  # lines; files, __init__ among them


def sources():
    return [path for kind in ("*.py", "*.c", "*.h") for path in SOURCE.rglob(kind)]


def source_files():
    """{dotted module: text} of the whole package."""
    return {_dotted(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}


def _dotted(path):
    parts = ("bandmf", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(text, at_run_time):
    """(module, name or None) of every import of a file; without what only type checkers see, if at run time."""
    tree = ast.parse(text)
    found = []
    for node in ast.walk(_AtRunTime().visit(tree) if at_run_time else tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written out in full, not relative"
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
    return found


def imported(text, modules, at_run_time=False):
    """What a file imports: modules of bandmf by their own name, others as they are written."""
    return {
        longer if (longer := f"{module}.{name}") in modules else module for module, name in imports(text, at_run_time)
    }


class _AtRunTime(ast.NodeTransformer):
    """Leaves out `if TYPE_CHECKING:`, which is never executed."""

    def visit_If(self, node):
        unseen = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if unseen else self.generic_visit(node)


def layer(module):
    """The entry of ORDER that a module of bandmf belongs to."""
    parts = module.split(".")[1:]
    room = ".".join(parts[:2])
    return room if room in ORDER else parts[0] if parts else "__init__"


def violations(files):
    """One sentence for each import that goes against the list."""
    known = {module: text for module, text in files.items() if layer(module) in ORDER}
    found = [f"{module} has no place in the architecture's list" for module in sorted(set(files) - set(known))]
    graph = {module: imported(text, files) for module, text in known.items()}
    for module, targets in graph.items():
        above = ORDER[: ORDER.index(layer(module)) + 1]
        for target in sorted(targets):
            outside = target.split(".")[0]
            if outside == "bandmf" and layer(target) not in above and layer(module) != "__init__":
                found.append(f"{module} imports {target}, which is below it")
            names = {layer(module).split(".")[0], module.removeprefix("bandmf.")}
            if outside in OPTIONAL and not names & NEED_OPTIONAL:
                found.append(f"{module} imports {target}, which belongs to an extra")
    return found + circles(known)


def circles(files):
    """One sentence for each import that is part of a circle when the program runs."""
    graph = {module: imported(text, files, at_run_time=True) for module, text in files.items()}
    needs = {module: reachable(module, graph) for module in graph}
    return [
        f"{module} imports {target}, which imports it in a circle"
        for module, targets in graph.items()
        for target in sorted(targets)
        if module in needs.get(target, ())
    ]


def reachable(module, graph):
    """Everything that importing a module imports in the end, itself included."""
    seen, waiting = set(), [module]
    while waiting:
        if (here := waiting.pop()) not in seen:
            seen.add(here)
            waiting.extend(graph.get(here, ()))
    return seen


def test_a_file_imports_only_from_files_above_it():
    assert violations(source_files()) == []


@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        ("bandmf.streaming", "from bandmf.workloads import prefix", "below"),
        ("bandmf.error", "from bandmf import optimize", "below"),
        ("bandmf.strategies.toeplitz", "from bandmf.error.toeplitz import ToeplitzError", "below"),
        ("bandmf.torch.noise.engine", "from bandmf.torch.training.step import Stepper", "below"),
        ("bandmf.error", "from bandmf import rmse", "below"),
        ("bandmf.strategies.base", "def f():\n    import bandmf.noise.engine", "below"),
        ("bandmf.strategies.base", "from bandmf.strategies.banded import Banded", "circle"),
        ("bandmf.torch.training.step", "from bandmf.torch.huggingface import heads", "below"),
        ("bandmf.error", "def f():\n    import torch.nn", "extra"),
        ("bandmf.planning.planner", "from joblib import Parallel", "extra"),
        ("bandmf.ledger", "import orbax.checkpoint", "extra"),
        ("bandmf.utils", "import numpy", "no place"),
    ],
)
def test_a_planted_import_against_the_direction_is_caught(module, line, complaint):
    files = source_files()
    before = violations(files)
    files[module] = files.get(module, "") + "\n" + line
    planted = [sentence for sentence in violations(files) if sentence not in before]
    assert any(complaint in sentence and module in sentence for sentence in planted)


def test_no_file_is_long_and_no_folder_crowded():
    long = {path.name: lines for path in sources() if (lines := len(path.read_text().splitlines())) > LONGEST_FILE}
    crowded = {
        folder.name: count
        for folder in {path.parent for path in SOURCE.rglob("*.py")}
        if (count := len(list(folder.glob("*.py")))) > LARGEST_FOLDER
    }
    assert (long, crowded) == ({}, {})


def test_the_order_in_the_documents_is_the_one_that_is_enforced():
    rooms = [
        room for room in ORDER if (path := SOURCE / room.replace(".", "/")).is_dir() or path.with_suffix(".py").exists()
    ]
    for page in ("docs/architecture.md", "CONTRIBUTING.md"):
        text = (SOURCE.parents[1] / page).read_text()
        listed = re.search(r"<!-- order -->\n(.*?)<!-- end -->", text, re.DOTALL)
        assert listed, page
        named = re.findall(r"`([\w.]+)`", listed.group(1))
        assert named == [room for room in rooms if room != "__init__"], page


def undescribed(files):
    """Files whose first line does not say what they hold: {name: text} -> names."""
    first = {
        name: ast.get_docstring(ast.parse(text)) if name.endswith(".py") else text.removeprefix("/*").strip()
        for name, text in files.items()
    }
    comments = {name for name, text in files.items() if not name.endswith(".py") and not text.startswith("/*")}
    return sorted({name for name, words in first.items() if not words} | comments)


def test_the_first_line_of_every_file_says_what_it_holds():
    files = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sources()}
    assert undescribed(files) == []
    files |= {"planted.py": "import os", "planted.c": "#include <stdint.h>"}
    assert undescribed(files) == ["planted.c", "planted.py"]


def test_the_page_on_architecture_names_every_folder_and_no_other():
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    table = re.search(r"## Rooms\n(.*?)\n## ", text, re.DOTALL).group(1)
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    assert sorted(listed) == sorted({path.parent.relative_to(SOURCE).as_posix() for path in sources()})


def test_the_public_names_are_one_table():
    block = re.search(r"if TYPE_CHECKING:\n(.*?)\n\n", Path(bandmf.__file__).read_text(), re.DOTALL).group(1)
    for_type_checkers = {
        alias.name for node in ast.walk(ast.parse(dedent(block))) for alias in getattr(node, "names", ())
    }
    assert for_type_checkers == set(bandmf.__all__) - {"torch", "jax"}  # these would be loaded with their extras
    assert set(dir(bandmf)) == {*bandmf.__all__, "__version__"}
    assert all(getattr(bandmf, name) is not None for name in bandmf.__all__)


def test_importing_bandmf_loads_neither_torch_nor_jax_nor_matplotlib():
    program = f"import bandmf, sys; print(*sorted({OPTIONAL!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == []


@pytest.fixture(scope="module")
def found_in_torch():
    """{name: whether it can be called}, each by a process of its own that has imported bandmf.torch and no more."""
    program = (
        "import os, bandmf.torch\n"
        f"for name in {NAMED!r}:\n"
        "    if os.fork() == 0:\n"
        "        print(name, callable(eval('bandmf.torch.' + name)), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return dict(line.split() for line in result.stdout.splitlines())


NAMED = ["clipping.rule", "losses.classification", "check", "verify", "rows", "Training"]


@pytest.mark.parametrize("name", NAMED)
def test_what_messages_and_pages_name_is_there_without_another_import(name, found_in_torch):
    assert found_in_torch[name] == "True"


def test_the_core_computes_without_torch_jax_or_matplotlib():
    program = (
        "import sys; from bandmf import optimize, error, sensitivities, participation\n"
        "solution = optimize.banded(9, 3)\n"
        "sensitivities.sensitivity(solution.strategy, participation.MinSeparation(2, 3))\n"
        f"print(*sorted({OPTIONAL!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == []

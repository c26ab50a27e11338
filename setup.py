"""The native library: optional C code behind the noise engines. Everything else is in pyproject.toml.

A plain shared library that is loaded by ctypes, so one wheel serves every Python. Where it cannot be built, the
installation goes on without it, and the engines take their slower paths.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "src" / "bandmf" / "native"))
from sources import FOLDER, digest

HERE = Path(__file__).parent
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]
WIDTHS = {"4": [], "8": ["-mavx2", "-mfma"]}
WIDTHS["16"] = [*WIDTHS["8"], "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"]


class BuildLibrary(build_ext):
    """Compiles kernel.c once for each vector width, and links one library."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        macros = [("BANDMF_DIGEST", f'"{digest()}"'), *([("BANDMF_X86", "1")] if x86 else [])]
        objects = []
        for source in ext.sources:
            once = {"1": []} if Path(source).name != "kernel.c" else WIDTHS if x86 else {"4": []}
            for width, flags in once.items():
                folder = str(Path(self.build_temp) / f"width{width}")
                define = [*macros, ("WIDTH", width)]
                objects += self.compiler.compile(
                    [source], output_dir=folder, macros=define, extra_postargs=[*FLAGS, *flags], depends=ext.depends
                )
        path = self.get_ext_fullpath(ext.name)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, path, extra_postargs=["-pthread"], target_lang="c")


class AnyPython(bdist_wheel):
    """The library knows no Python: the wheel is for any, on this kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


folder = FOLDER.resolve().relative_to(HERE.resolve())
setup(
    ext_modules=[
        Extension(
            "bandmf.native.noise",
            sources=sorted(str(folder / path.name) for path in FOLDER.glob("*.c")),
            depends=sorted(str(folder / path.name) for path in FOLDER.glob("*.h")),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
)

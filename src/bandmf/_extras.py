"""Which extra of bandmf a package comes with: the one table for messages about what is not installed."""

from __future__ import annotations

_EXTRAS = {
    "torch": ("torch",),
    "huggingface": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "jax": ("jax", "jaxlib", "optax", "orbax"),
    "jax-cuda": ("jax_triton",),
    "web": ("streamlit", "altair"),
    "cluster": ("joblib", "dask", "distributed"),
    "examples": ("sklearn", "peft", "datasets", "flax"),
}
EXTRA_OF = {package: extra for extra, packages in _EXTRAS.items() for package in packages}


def package_of(error: ModuleNotFoundError) -> str:
    """The package that could not be imported, whichever part of it was asked for."""
    return (error.name or "").partition(".")[0]


def explain(what: str, error: ModuleNotFoundError) -> None:
    """Raise an error that says what to install, if a package of an extra is missing."""
    if (how := remedy(package_of(error))) is not None:
        raise ImportError(f"{what} needs {error.name}, which is not installed: {how}") from error


def remedy(package: str) -> str | None:
    """What to type for a package that is missing; None for one that belongs to no extra.

    >>> remedy("transformers"), remedy("numpy")
    ("pip install 'bandmf[huggingface]'", None)
    """
    extra = EXTRA_OF.get(package)
    return None if extra is None else f"pip install 'bandmf[{extra}]'"

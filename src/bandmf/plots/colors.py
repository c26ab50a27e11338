"""One color for each mechanism, in every picture: the only table of them."""

from __future__ import annotations

# Okabe and Ito's colors, told apart by every kind of color vision: for what is no mechanism.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GRAY = "#777777"
CHOSEN = "#D55E00"  # a plan
TOO_LARGE = "#9AA5AB"  # what does not fit
ON_BOTH = "#7B8494"  # text on white and on black

BANDMF = "BandMF"
MECHANISMS = {
    BANDMF: "#0072B2",
    "BandMF, unamplified": "#56B4E9",
    "BandMF in bins": "#1B3A6B",
    "DP-SGD": "#222222",
    "Independent noise, unamplified": "#999999",
    "BLT": "#E58A4E",
    "BLT in bins": "#D55E00",
    "Banded inverse in bins": "#B3446C",
    "BISR (banded inverse)": "#C98BA8",
    "Banded square root": "#009E73",
    "Banded square root, unamplified": "#7CC7AE",
    "FHU (square root)": "#6B8E23",
    "LTI": "#B0A030",
    "Tree aggregation": "#E69F00",
    "Stamping": "#8E6BB0",
    "Dense MF": "#7A5C3E",
    # Programs: what is ours is blue.
    "bandmf": "#0072B2",
    "bandmf, NumPy": "#56B4E9",
    "bandmf, JAX": "#1B3A6B",
    "bandmf, torch operations": "#7FA8C9",
    "bandmf, NumPy operations": "#9CC3DE",
    "bandmf, JAX operations": "#5F7BA6",
    "independent noise": GRAY,
    "torch, roll": "#A89F91",
    "jax_privacy": "#CC79A7",
    "Opacus ghost": "#B9B9B9",
    "Opacus hooks": "#D9D9D9",
}
# Other names of the same mechanisms.
_ALSO = {"Amplified BandMF": BANDMF, "Unamplified BandMF": "BandMF, unamplified", "FHU": "FHU (square root)"}


def color(name: str) -> str:
    """The color of a mechanism; what follows its name in brackets does not count.

    >>> color("BandMF (cyclic Poisson)") == color("Amplified BandMF") == MECHANISMS["BandMF"]
    True
    """
    return MECHANISMS[canonical(name)]


def canonical(name: str) -> str:
    """The name that a mechanism has in the table."""
    for known in (name, name.partition(" (")[0]):
        if (found := _ALSO.get(known, known)) in MECHANISMS:
            return found
    raise ValueError(f"name={name!r}: is not in the table of colors; add it to bandmf.plots.colors")


def bold(name: str) -> bool:
    """Whether this is what a picture is about: BandMF, or this program."""
    return canonical(name) in (BANDMF, "bandmf")

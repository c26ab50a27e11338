"""Numbers as people read them: the one place where tables, pictures, notebooks and the page take them from."""

from __future__ import annotations


def number(value: object, digits: int = 6) -> str:
    """A value for people.

    >>> number(16384), number(1e-06), number(0.83456789, 3), number(True), number(250000.0)
    ('16,384', '1e-6', '0.835', 'yes', '250,000')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:,.{digits}g}"
    return text.replace("e-0", "e-").replace("e+0", "e+").replace("e+", "e")


def counted(count: int, thing: str) -> str:
    """A number with what it counts.

    >>> counted(1, "band"), counted(1024, "band")
    ('1 band', '1,024 bands')
    """
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def spoken(value: float) -> str:
    """A count as one would say it.

    >>> spoken(938), spoken(60_000), spoken(1.25e9)
    ('938', '60,000', '1.25 billion')
    """
    for least, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= least:
            return f"{value / least:.4g} {name}"
    return number(round(value)) if value >= 100 else number(float(value), 3)


def short(value: float) -> str:
    """For the ticks of an axis, where long numbers would run into each other.

    >>> [short(value) for value in (0.001, 1.5, 16, 4096, 1e7, 1e9)]
    ['0.001', '1.5', '16', '4,096', '10M', '1,000M']
    """
    return f"{value / 1e6:,.0f}M" if value >= 1e6 else number(value)


def readable_bytes(count: float) -> str:
    """A number of bytes.

    >>> readable_bytes(8e9), readable_bytes(1500), readable_bytes(0)
    ('8 GB', '1.5 kB', 'none')
    """
    if count == 0:
        return "none"
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

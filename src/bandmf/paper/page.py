"""Verdicts from the CSV files of a run, and the page that shows them beside the pictures."""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bandmf.paper import NAMES, experiment
from bandmf.paper import table as tables
from bandmf.paper.experiment import Claim, Experiment, Outcome, Verdict

_RUN, _TITLE = "run.json", "# The paper, reproduced"
_PACKAGES = ("numpy", "scipy", "dp-accounting")
_COUNTED: dict[Outcome, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "holds with a remark": ("holds with a remark", "hold with a remark"),
    "does not hold": ("does not hold", "do not hold"),
    "not judged": ("is not judged", "are not judged"),
}


@dataclass(frozen=True)
class Judged:
    """A claim with what the numbers of a run say of it."""

    experiment: Experiment
    claim: Claim
    verdict: Verdict


def judge(folder: Path) -> list[Judged]:
    """The verdicts on every claim whose experiment has a CSV in the folder, in the paper's order."""
    found = []
    for name in NAMES:
        path = folder / f"{name}.csv"
        if path.exists():
            one, table = experiment(name), tables.read(path)
            found += [Judged(one, claim, claim.judge(table)) for claim in one.claims]
    return found


def count(judged: list[Judged]) -> str:
    """How many claims hold, in a sentence.

    >>> count(judge(Path("nowhere")))
    '0 claims'
    """
    outcomes = Counter(each.verdict.outcome for each in judged)
    parts = [
        f"{outcomes[outcome]} {words[outcomes[outcome] > 1]}"
        for outcome, words in _COUNTED.items()
        if outcomes[outcome]
    ]
    of = f": {', '.join(parts)}" if parts else ""
    return f"{len(judged)} claim{'s' * (len(judged) != 1)}{of}"


def note_run(folder: Path, seconds: dict[str, float | None], quick: bool) -> None:
    """Keep when and where each experiment was computed; `seconds` is None where its points were cached."""
    path = folder / _RUN
    known = json.loads(path.read_text()) if path.exists() else {}
    for name, each in seconds.items():
        before = known.get(name, {})
        if each is None and before.get("quick") == quick:
            continue
        known[name] = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {package: version(package) for package in _PACKAGES},
            "quick": quick,
            "seconds": None if each is None else round(each, 1),
        }
    path.write_text(json.dumps({name: known[name] for name in NAMES if name in known}, indent=1) + "\n")


def check(folder: Path) -> None:
    """Fail, before anything is computed, if the page would replace a file that is none of ours."""
    path = page_of(folder)
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(_TITLE):
        raise ValueError(f"out={str(folder)!r}: {path.name} beside it is another page; choose another folder")


def page_of(folder: Path) -> Path:
    """FOLDER.md, beside the folder."""
    if not folder.name:
        raise ValueError(f"out={str(folder)!r}: must be a folder with a name, for the page beside it")
    return folder.with_name(f"{folder.name}.md")


def write(folder: Path) -> Path:
    """The page on the files of a folder."""
    path = page_of(folder)
    path.write_text(text(folder), encoding="utf-8")
    return path


def text(folder: Path) -> str:
    """The words of the page."""
    judged, made = judge(folder), json.loads((folder / _RUN).read_text())
    own = [each for each in judged if not each.claim.of_the_paper]
    paper = [each for each in judged if each.claim.of_the_paper]
    beyond = f" Beyond the paper, {count(own)}." if own else ""
    opening = (
        f"**In the paper, {count(paper)}.**{beyond} Each verdict comes from the CSV file named above it and nothing "
        "else; rows measured on a GPU were recorded, with their date. Claims are in our words; what was found is "
        f"shown, shortened, where a claim does not simply hold. {_made(list(made.values()))}"
    )
    lines = [_TITLE, "", *_wrapped(opening)]
    for name in dict.fromkeys(each.experiment.name for each in judged):
        lines += _section(folder, [each for each in judged if each.experiment.name == name], made.get(name, {}))
    return "\n".join(lines) + "\n"


def _made(runs: list[dict[str, Any]]) -> str:
    """When, where and how fast."""
    dates = sorted({run["date"] for run in runs})
    machines = sorted({run["machine"] for run in runs})
    versions = sorted({f"{name} {number}" for run in runs for name, number in run["versions"].items()})
    minutes = sum(run["seconds"] or 0 for run in runs) / 60
    small = sum(run["quick"] for run in runs)
    sizes = f", {small} of them at small sizes (`--quick`)" if small else ""
    return (
        f"Computed by `bandmf reproduce` on {' and '.join(dates)}: {len(runs)} experiments{sizes}, "
        f"{minutes:.0f} minutes in all ({'; '.join(machines)}; {', '.join(versions)})."
    )


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, 120, break_long_words=False, break_on_hyphens=False)


def _section(folder: Path, judged: list[Judged], made: dict[str, Any]) -> list[str]:
    one = judged[0].experiment
    took = f" {made['seconds']:.0f} s." if made.get("seconds") is not None else ""
    note = f" {one.note.partition('. ')[0].rstrip('.')}." if one.note else ""
    place = one.place[:1].upper() + one.place[1:]
    lines = ["", f"## {one.title}", ""]
    lines += _wrapped(f"{place}. [{one.name}.csv]({folder.name}/{one.name}.csv).{took}{note}")
    lines += ["", f"![{one.name}]({folder.name}/{one.name}.png)", ""]
    lines += ["| claim | verdict |", "| --- | --- |"]
    return lines + [f"| {_cell(each.claim.statement)} | {_cell(_said(each.verdict))} |" for each in judged]


def _said(verdict: Verdict) -> str:
    """The verdict; unless the claim simply holds, with the number and the remark on one line."""
    if verdict.outcome == "holds":
        return verdict.outcome
    remark = "" if verdict.outcome == "not judged" else _brief(verdict.remark or "")
    found = "; ".join(part for part in (_brief(verdict.number), remark) if part)
    return f"**{verdict.outcome}**: {found}"


def _brief(words: str, most: int = 15) -> str:
    """The first clause, without long brackets, cut at a comma if it is a long list.

    >>> _brief("at epsilon 8 it grows (16; 24), by 4 percent; the rest is in the file")
    'at epsilon 8 it grows (16; 24), by 4 percent'
    >>> _brief("BLT 1.3x at 10, BLT 1.4x at 20, BLT 1.5x at 40", most=8)
    'BLT 1.3x at 10, BLT 1.4x at 20, …'
    >>> _brief("at neither (more than 5%; with up to 64 bands (of 1,024 steps) the lines line up)")
    'at neither'
    """
    short = re.sub(r" \((?:[^()]|\([^()]*\))*\)", lambda found: found[0] if len(found[0].split()) < 9 else "", words)
    clause = re.split(r"(?:; |\. )(?![^(]*\))", short)[0]
    parts = re.split(r", (?!b=|\d+(?:,| and) )(?![^(]*\))", clause)
    kept = 1
    while kept < len(parts) and len(" ".join(parts[: kept + 1]).split()) <= most:
        kept += 1
    return ", ".join(parts[:kept]) + (", …" if kept < len(parts) else "")


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")

"""Verdicts from the CSV files of a run, and the page that shows them beside the pictures."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from bandmf.paper import NAMES, experiment
from bandmf.paper import table as tables
from bandmf.paper.experiment import Claim, Experiment, Outcome, Verdict

_RUN = "run.json"
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


def note_run(folder: Path, seconds: dict[str, float], quick: bool) -> None:
    """Keep when and where the numbers were computed; earlier times of other experiments remain."""
    path = folder / _RUN
    before = json.loads(path.read_text()) if path.exists() else {}
    entry = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {name: version(name) for name in _PACKAGES},
        "quick": quick,
        "seconds": {**before.get("seconds", {}), **{name: round(each, 1) for name, each in seconds.items()}},
    }
    path.write_text(json.dumps(entry, indent=1) + "\n")


def write(folder: Path) -> Path:
    """FOLDER.md, beside the folder."""
    path = folder.with_name(f"{folder.name}.md")
    path.write_text(text(folder), encoding="utf-8")
    return path


def text(folder: Path) -> str:
    """The page on the files of a folder."""
    judged, made = judge(folder), json.loads((folder / _RUN).read_text())
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    sizes = "`bandmf reproduce all --quick`, at small sizes" if made["quick"] else "`bandmf reproduce all`"
    own = [each for each in judged if not each.claim.of_the_paper]
    paper = [each for each in judged if each.claim.of_the_paper]
    beyond = f" Findings beyond it: {count(own)}." if own else ""
    lines = [
        "# The paper, reproduced",
        "",
        f"**Of the paper, {count(paper)}.**{beyond} Each number comes from the CSV under its picture, each verdict",
        f"from that CSV alone. Computed on {made['date']} by {sizes}, {_minutes(made['seconds'])} in all",
        f"({made['machine']}; {versions}). What was measured on a GPU is recorded, with its date in the CSV.",
        "The claims are in our words.",
        "",
        "| claim | place | verdict | our number |",
        "| --- | --- | --- | --- |",
    ]
    for each in judged:
        statement, verdict = _cell(each.claim.statement), each.verdict
        lines.append(
            f"| {statement} | {_cell(each.claim.place)} | {_mark(verdict)} | {_cell(verdict.number)} |"
        )
    for name in dict.fromkeys(each.experiment.name for each in judged):
        lines += _section(folder, [each for each in judged if each.experiment.name == name], made["seconds"])
    return "\n".join(lines) + "\n"


def _section(folder: Path, judged: list[Judged], seconds: dict[str, float]) -> list[str]:
    one = judged[0].experiment
    took = f", {seconds[one.name]:.0f} s" if one.name in seconds else ""
    files = f"[CSV]({folder.name}/{one.name}.csv), `bandmf reproduce {one.name}`{took}"
    lines = ["", f"## {one.title}", "", f"{one.place}. {files}.", ""]
    lines += [f"![{one.title}]({folder.name}/{one.name}.png)", ""]
    for each in judged:
        remark = f" {_sentence(each.verdict.remark)}" if each.verdict.remark else ""
        number = f" {_sentence(each.verdict.number)}" if each.verdict.number else ""
        lines.append(f"- {each.claim.statement} **{each.verdict.outcome.capitalize()}.**{number}{remark}")
    return lines


def _minutes(seconds: dict[str, float]) -> str:
    return f"{sum(seconds.values()) / 60:.0f} minutes"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:].rstrip(".") + "."


def _mark(verdict: Verdict) -> str:
    return verdict.outcome if verdict.outcome == "holds" else f"**{verdict.outcome}**"


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")

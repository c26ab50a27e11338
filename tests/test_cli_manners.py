"""The manners of the command line: quick, quiet, right for any width, and a sentence for whatever goes wrong."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import warnings

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import bandmf
from bandmf import _extras, cli
from bandmf._files import write_whole
from bandmf.cli import app, commands, failures, outputs, show
from bandmf.demo import datasets, download
from bandmf.paper.run import _unheard_interrupts
from bandmf.planning.compare import Comparison
from pages import ROOT

BUDGET = "--epsilon 8 --delta 1e-6 --examples 6000 --batch-size 60 --steps 200"
EVERY = [*commands.COMMANDS, *(f"bench {name}" for name in commands.BENCHMARKS)]


def run(line: str, capsys) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `bandmf LINE`."""
    status = cli.run(shlex.split(line))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def started(program: str, *arguments: str, **options) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, "-c", program, *arguments], text=True, **pipes)


# --- quick and quiet ----------------------------------------------------------------------------------


def test_the_version_is_shown_without_loading_numpy():
    program = "import runpy, sys; sys.argv[1:] = ['--version']\ntry:\n    runpy.run_module('bandmf', alter_sys=True)\n"
    program += "finally:\n    print(*{'numpy', 'matplotlib', 'torch', 'bandmf.cli.plan'} & set(sys.modules))"
    process = started(program)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.split("\n"), err) == (0, [f"bandmf {bandmf.__version__}", "", ""], "")


def test_the_entry_point_imports_nothing_but_itself():
    process = started("import bandmf.cli, sys; print(*{'typer', 'rich', 'numpy'} & set(sys.modules))")
    assert process.communicate(timeout=60)[0].strip() == ""


def test_ctrl_c_during_imports_is_quiet():
    process = started("print('ready', flush=True); from bandmf.cli import main; main()", "plan", *BUDGET.split())
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.15)  # in the middle of a second of imports
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # the same for a shell
    assert (out, err) == ("", "")


def test_ctrl_c_during_work_is_quiet(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("bandmf.cli.plan.make_plan", interrupted)
    monkeypatch.setattr(sys, "argv", ["bandmf", "plan", *BUDGET.split()])
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    process = started("from bandmf.cli import main; main()", "--help", stdout=write)
    os.close(write)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 1


def test_nothing_but_json_is_written_where_nobody_watches(capsys):
    status, out, err = run(f"plan {BUDGET} --bands 4 --json", capsys)
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["steps"] == 200
    assert found["memory"] is None  # plain numbers and null, no words


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    def broken(**_):
        raise KeyError("oops")

    monkeypatch.setattr("bandmf.cli.plan.make_plan", broken)
    with pytest.raises(KeyError):
        cli.run(["plan", *BUDGET.split()])


# --- help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("command", ["", "bench", *EVERY])
def test_help_has_an_example_and_cuts_nothing_off(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
    result = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="bandmf")
    assert result.exit_code == 0
    assert f"Example: bandmf {command}".strip() in " ".join(result.output.split())
    assert "…" not in result.output
    assert "..." not in re.sub(r"\[(ARGS|NAME)\S*", "", result.output).replace("[NAME...|all]", "")


def test_the_summary_of_every_command_is_shown_in_full(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    shown = " ".join(run("--help", capsys)[1].split())
    assert all(entry.summary in shown for entry in commands.COMMANDS.values())


# --- tables for any width -----------------------------------------------------------------------------


def narrow(columns: int, monkeypatch) -> None:
    monkeypatch.setattr(show, "console", Console(width=columns, highlight=False))


def complaints(shown: str, columns: int, numbers: list[str]) -> list[str]:
    """What is wrong with a table."""
    found = ["cut off"] if "…" in shown else []
    found += ["too wide"] if any(len(line) > columns for line in shown.splitlines()) else []
    return found + [number for number in numbers if not re.search(rf"(?<!\S){re.escape(number)}(?=[\s,])", shown)]


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_tables_fit_any_width_and_break_no_word(columns, monkeypatch, capsys):
    narrow(columns, monkeypatch)
    _, plan, _ = run(f"plan {BUDGET} --bands 4 --parameters 4000000 --memory 1GB", capsys)
    assert complaints(plan, columns, ["6,000", "1e-6", "48 MB", "add-remove", "cyclic-poisson"]) == []
    rows = [Comparison("Banded square root, unamplified", 6.1564, 1.0, False, 1.1936, 131072, 131086)]
    rows += [Comparison("DP-SGD", 16.991, 2.75989, True, 0.8705, 1, 0)]
    monkeypatch.setattr("bandmf.cli.compare.compare", lambda **_: rows)
    _, table, _ = run("compare --steps 32 --epochs 2 --epsilon 4 --delta 1e-6", capsys)
    sigmas = [f"{row.noise_multiplier:.4f}" for row in rows]
    assert complaints(table, columns, [*sigmas, "1.000x", "2.760x", "16.991", "131,072", "131,086"]) == []
    assert all(row.mechanism in table for row in rows)
    _, properties, _ = run("compare --mechanisms", capsys)
    assert complaints(properties, columns, []) == []
    monkeypatch.setattr("bandmf.paper.NAMES", ("example", "operator_costs", "against_steps_and_epochs"))
    _, listed, _ = run("reproduce", capsys)
    assert complaints(listed, columns, ["against_steps_and_epochs"]) == []


def test_a_table_that_is_squeezed_would_be_noticed(monkeypatch, capsys):
    narrow(40, monkeypatch)
    table = Table("mechanism", "RMSE", "ratio", "sigma", "bands", "vectors", "sampled", box=None)
    table.add_row("Banded square root, unamplified", "6.1564", "1.440x", "1.1936", "32", "39", "no")
    show.console.print(table)
    assert {"cut off", "6.1564"} <= set(complaints(capsys.readouterr().out, 40, ["6.1564"]))


# --- files are checked first --------------------------------------------------------------------------

WRITERS = [
    (f"plan {BUDGET}", "plot", "p.png"),
    (f"plan {BUDGET}", "save", "p.json"),
    ("compare --steps 64 --epochs 2 --delta 1e-6", "plot", "p.png"),
    ("compare --steps 64 --epochs 2 --delta 1e-6", "plot-map", "p.png"),
    ("compare --steps 64 --epochs 2 --delta 1e-6", "plot-memory", "p.png"),
    ("optimize --steps 64", "plot", "p.png"),
    ("optimize --steps 64", "save", "p.npz"),
    ("train --dataset digits", "plot", "p.png"),
    ("bench noise", "plot", "p.png"),
]
WORK = [
    *("bandmf.cli.plan.make_plan", "bandmf.cli.compare.compare", "bandmf.cli.optimize._solve"),
    *("bandmf.cli.train._load", "bandmf.cli.bench._measure", "bandmf.cli.reproduce.run"),
]


@pytest.fixture
def no_work(monkeypatch):
    def began(*_, **__):
        raise AssertionError("the work began")

    for name in WORK:
        monkeypatch.setattr(name, began)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "option", "file"), WRITERS)
def test_a_file_that_cannot_be_written_is_refused_before_work_begins(
    command, option, file, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / file).mkdir(parents=True)
    for path, reason in (
        (f"nowhere/{file}", "there is no folder 'nowhere'; make it first"),
        (f"folder/{file}", "is a folder; give the name of a file"),
    ):
        status, out, err = run(f"{command} --{option} {path}", capsys)
        assert (status, out, err) == (2, "", f"bandmf: --{option}='{path}': {reason}\n")
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)
    status, _, err = run(f"{command} --{option} {file}", capsys)
    assert (status, err) == (2, f"bandmf: --{option}='{file}': nothing may be written to '.'; give another folder\n")
    if option != "save":
        monkeypatch.undo()
        assert run(f"{command} --{option} picture.txt", capsys)[2].endswith("must end in .png or .svg or .pdf\n")


def test_the_work_would_have_begun_otherwise(no_work, tmp_path):
    for command, option, file in WRITERS:
        with pytest.raises(AssertionError, match="the work began"):
            cli.run(shlex.split(f"{command} --{option} {tmp_path / file}"))


@pytest.mark.usefixtures("no_work")
def test_folders_and_doubled_names_are_refused_as_well(tmp_path, capsys):
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        status, _, err = run(f"reproduce example --out {tmp_path / out}", capsys)
        assert (status, "is a file; give a folder" in err) == (2, True)
    both = tmp_path / "both.png"
    assert "is the file of --plot as well" in run(f"plan {BUDGET} --plot {both} --save {both}", capsys)[2]


# --- a sentence for every nonsense --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("nonsense", "no such command 'nonsense'; see bandmf --help"),
        ("--bogus", "no such option: --bogus; see bandmf --help"),
        ("bench", "missing command; see bandmf bench --help"),
        ("plan", "missing option '--delta'; see bandmf plan --help"),
        (f"plan {BUDGET} extra", "see bandmf plan --help"),
        (f"plan {BUDGET} --epsilon abc", "epsilon='abc': "),
        (f"plan {BUDGET} --steps=many", "steps='many': "),
        (f"plan {BUDGET} --epsilon nan", "epsilon=nan: must be a finite number in [0.001, 200]"),
        (f"plan {BUDGET} --delta 2", "delta=2.0: must be a finite number in (0, 1)"),
        (f"plan {BUDGET} --batch-size 60000", "--batch-size=60000.0: must be a finite number in (0, 6000]"),
        (f"plan {BUDGET} --examples 0", "examples=0: must be a whole number"),
        (f"plan {BUDGET} --bands 500", "bands=500: must be a whole number between 1 and examples / batch_size = 100"),
        (f"plan {BUDGET} --bands 50 --parameters 1000 --memory 8kB", "bands=50: memory holds the noise of at most 3"),
        (f"plan {BUDGET} --memory lots --parameters 9", "memory='lots': must be bytes"),
        (f"plan {BUDGET} --sampling dice", "sampling='dice': must be one of"),
        (f"plan {BUDGET} --explain --json", "--explain, --json: give at most one"),
        ("compare --steps 10", "--steps, --epochs, --delta: all three are needed"),
        ("compare --steps 10 --epochs 20 --delta 1e-6", "epochs=20: must be a whole number between 1 and --steps=10"),
        ("optimize --steps -5", "steps=-5: must be a whole number at least 1"),
        ("optimize --steps 9 --family best", "family='best': "),
        ("optimize --steps 9 --load nowhere.npz", "--load='nowhere.npz': no such file or directory"),
        ("optimize --steps 9 --load=/", "--load='/': is a directory"),
        ("optimize --steps 3000000 --plot x.png", "steps=3000000: per-step errors are drawn for at most 2,000,000"),
        ("train --dataset cifar", "dataset='cifar': must be one of"),
        ("train --data nowhere", "data='nowhere': has no train-images-idx3-ubyte.gz"),
        ("train --dataset digits --clip-norm nan", "--clip-norm=nan: must be a finite number"),
        ("train --dataset digits --seeds 0", "seeds=0: must be a whole number at least 1"),
        ("reproduce nothing", "name='nothing': "),
        ("reproduce example --jobs 0", "jobs=0: must be -1 or at least 1"),
        ("bench noise --bands x", "bands='x': must be whole numbers"),
        ("bench noise --device tpu", "device='tpu': must be one of"),
    ],
)
def test_nonsense_gets_one_sentence_and_status_2(line, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(line, capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("bandmf: ")
    assert sentence in err


def test_fewer_steps_than_the_usual_bands_are_no_error(capsys):
    assert json.loads(run("optimize --steps 9 --json", capsys)[1])["bands"] == 9


def test_a_column_that_is_cut_says_so(capsys):
    found = json.loads(run("optimize --steps 64 --bands 16 --json", capsys)[1])
    assert (len(found["first_column"]), found["first_column_left_out"]) == (8, 8)
    whole = json.loads(run("optimize --steps 64 --bands 8 --json", capsys)[1])
    assert (len(whole["first_column"]), whole["first_column_left_out"]) == (8, 0)
    assert ", ..." in run("optimize --steps 64 --bands 16", capsys)[1]
    assert ", ..." not in run("optimize --steps 64 --bands 8", capsys)[1]


def test_a_file_that_may_not_be_read_gets_a_sentence(monkeypatch, capsys):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("bandmf.strategies.load", forbidden)
    err = run("optimize --steps 9 --load secret.npz", capsys)[2]
    assert err == "bandmf: --load='secret.npz': permission denied; give another file or folder\n"


def test_missing_packages_and_devices_get_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device='cuda': torch sees no GPU here" in run("bench noise --device cuda", capsys)[2]
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    status, _, err = run("train --dataset digits", capsys)
    assert (status, "scikit-learn is missing" in err, "pip install 'bandmf[examples]'" in err) == (2, True, True)


def test_a_missing_package_is_named_with_the_extra_that_has_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    other = {"sklearn": "scikit-learn", "orbax": "orbax-checkpoint", "jax_triton": "jax-triton", "jaxlib": "jax"}
    other |= {"altair": "streamlit", "distributed": "dask"}  # these come with those
    for package, extra in _extras.EXTRA_OF.items():
        required = {re.match(r"[\w-]+", line).group() for line in extras[extra]}
        assert other.get(package, package) in required, package
        error = ModuleNotFoundError(f"No module named '{package}.part'", name=f"{package}.part")
        assert failures.sentence(error) == f"{package} is missing: this needs it; {_extras.remedy(package)}"
    assert failures.sentence(ModuleNotFoundError(name="bandmf.nowhere")) is None


def test_every_extra_that_a_message_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra for path in (ROOT / "src").rglob("*.py") for extra in re.findall(r"bandmf\[([a-z-]+)\]", path.read_text())
    }
    assert "huggingface" in named
    assert named <= set(extras)


def test_too_little_memory_gets_a_sentence(monkeypatch, capsys):
    def greedy(**_):
        raise MemoryError("Unable to allocate 75. GiB")

    monkeypatch.setattr("bandmf.cli.plan.make_plan", greedy)
    status, _, err = run(f"plan {BUDGET}", capsys)
    assert (status, "Unable to allocate 75. GiB" in err, "fewer steps" in err) == (2, True, True)


# --- downloads ----------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Two files that can be fetched; requests are counted."""
    contents = {"a.gz": b"a" * 1000, "b.gz": b"b" * 10}
    asked = []

    def answer(address, timeout):
        asked.append(address)
        return io.BytesIO(contents[address.rpartition("/")[2]])

    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("urllib.request.urlopen", answer)
    files = [
        download.File(name, f"https://example.org/set/{name}", len(content), hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    ]
    return files, contents, asked


def test_a_download_announces_itself_is_checked_and_kept(server, tmp_path):
    files, contents, asked = server
    said: list[str] = []
    folder = download.fetched("The set", "set", files, said.append)
    assert said == [f"Downloading The set (0.0 MB) from https://example.org/set to {tmp_path / 'cache' / 'set'}"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
    download.fetched("The set", "set", files, said.append)
    assert (len(said), len(asked)) == (1, 2)


def test_a_download_that_was_changed_is_refused_and_not_kept(server, tmp_path):
    files, contents, _ = server
    contents["b.gz"] = b"B" * 10
    with pytest.raises(OSError, match=r"b\.gz is not the file that was published: its SHA-256 is"):
        download.fetched("The set", "set", files, lambda text: None)
    assert [path.name for path in (tmp_path / "cache" / "set").iterdir()] == ["a.gz"]


def test_published_files_come_by_https_with_a_checksum():
    assert all(file.address.startswith("https://") and len(file.sha256) == 64 for file in datasets._FILES)


def test_without_a_network_there_is_a_sentence_and_auto_takes_the_digits(tmp_path, monkeypatch, capsys):
    def unreachable(address, timeout):
        raise urllib.error.URLError(OSError(-2, "Name or service not known"))

    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    said: list[str] = []
    assert datasets.load(announce=said.append).name == "digits"
    assert said[0].startswith("Downloading Fashion-MNIST (30.9 MB) from https://")
    assert said[1].endswith("Name or service not known); taking scikit-learn's digits instead")
    status, _, err = run("train --dataset fashion-mnist", capsys)
    assert status == 2
    assert "Fashion-MNIST cannot be downloaded" in err
    assert "(--data)" in err


def test_damaged_files_of_fashion_mnist_get_a_sentence(tmp_path):
    import gzip

    for file in datasets._FILES:
        (tmp_path / file.name).write_bytes(gzip.compress(b"\0\0\x08\1\0\0\0\2ab"))
    first = tmp_path / datasets._FILES[0].name
    for content, reason in (
        (gzip.compress(b"x" * 1000)[:-9], "damaged"),
        (b"no gzip", "not a gzip file"),
        (gzip.compress(b"\0\0\x08\3\0\0"), "not an IDX file"),
        (gzip.compress(b"\0\0\x08\1\0\0\0\3ab"), "not as long as its header says"),
        (gzip.compress(b"\0\0\x08\1\0\0\0\2ab"), "has images of shape"),
    ):
        first.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            datasets.fashion_mnist(tmp_path)


# --- words of the command line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("plan --epsilon 4 --delta 1e-6 --batch-size 10 --steps 10", "--examples: must be given; only plans with"),
        (f"plan {BUDGET} --memory 1GB", "--memory: needs --parameters, the number of trainable parameters"),
        (f"plan {BUDGET} --device tpu", "--device='tpu': must be one of 'cpu', 'cuda'"),
        (f"plan {BUDGET} --noise-multiplier 1", "--epsilon, --noise-multiplier: give exactly one"),
        (f"plan {BUDGET} --batch-size 60000", "--batch-size=60000.0: must be a finite number in (0, 6000]"),
    ],
)
def test_errors_name_options_as_they_are_typed(line, sentence, capsys):
    status, _, err = run(line, capsys)
    assert status == 2
    assert err.startswith("bandmf: ")
    assert sentence in err


@pytest.mark.parametrize("wrong", ["--epsilon 0", "--seeds 0", "--delta 2", "--epochs 0", "--batch-size -1"])
def test_train_checks_its_numbers_before_it_loads_anything(wrong, monkeypatch, capsys):
    monkeypatch.setattr("bandmf.demo.datasets.load", lambda *_, **__: pytest.fail("loaded"))
    status, out, err = run(f"train {wrong}", capsys)
    assert (status, out) == (2, "")
    assert err.startswith(f"bandmf: {wrong.split()[0]}=")


def test_a_warning_is_one_line(capsys):
    line = "plan --epsilon 8 --delta 0.01 --examples 1000 --batch-size 50 --steps 20 --bands 1"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        status, _, err = run(line, capsys)
    assert status == 0
    assert err.startswith("bandmf: warning: delta=0.01: should be below")
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_written_has_the_name_that_was_given(tmp_path):
    for path in (tmp_path / "nowhere" / "x.json", tmp_path):  # it fails to be made, and to take its name
        with pytest.raises((FileNotFoundError, IsADirectoryError)) as error:
            write_whole(path, b"contents")
        assert error.value.filename == str(path)


def test_nothing_draws_unless_a_picture_is_wanted(tmp_path):
    program = "import sys; from bandmf import cli; sys.argv[0] = 'bandmf'\nfor line in sys.argv[1:]:\n"
    program += "    assert cli.run(line.split()) == 0\nprint('matplotlib' in sys.modules)"
    saved = tmp_path / "c.npz"
    process = started(
        program,
        f"plan {BUDGET} --bands 1 --save {tmp_path / 'plan.json'}",
        f"optimize --steps 20 --bands 2 --save {saved}",
        f"optimize --steps 20 --load {saved}",
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err, out.split()[-1]) == (0, "", "False")


def test_ctrl_c_leaves_workers_deaf_and_this_process_listening(tmp_path):
    heard = signal.getsignal(signal.SIGINT)
    with _unheard_interrupts():
        child = started("import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)")
    assert child.communicate(timeout=60)[0] == "True\n"
    assert signal.getsignal(signal.SIGINT) is heard is not signal.SIG_IGN

"""The command `bandmf`. It reads options, calls the library and shows the result; it decides nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bandmf.cli.commands import app as app

READER_GONE, INPUT_ERROR, INTERRUPTED = 1, 2, 130  # the last as shells have it: 128 and the signal


def main() -> None:
    """Run the command line: bad input is one clear line and exit status 2, Ctrl-C no line and 130."""
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one while Python ends would be loud
        status = INTERRUPTED
    except BrokenPipeError:  # as in `bandmf compare ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
        status = READER_GONE
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """The exit status of the command with these arguments."""
    # Imports take a second, and Ctrl-C during that second must be as quiet as later.
    from bandmf.cli import failures
    from bandmf.cli.commands import invoke, options

    with failures.short_warnings():
        try:
            return invoke(list(arguments) or ["--help"])
        except failures.EXPECTED as error:
            if (sentence := failures.sentence(error, arguments)) is None:
                raise
            sentence = failures.with_files(failures.with_options(sentence, options(arguments)), arguments)
            print(f"bandmf: {sentence}", file=sys.stderr)
            return INPUT_ERROR


def __getattr__(name: str) -> Any:
    if name == "app":
        from bandmf.cli.commands import app

        return app
    raise AttributeError(f"module 'bandmf.cli' has no attribute {name!r}")

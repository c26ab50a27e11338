"""Starting the page: on this machine only, without telemetry, until Ctrl-C."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

from bandmf import _check
from bandmf.plots.colors import MECHANISMS

ADDRESS = "127.0.0.1"
FIRST_PORT = 8501
_PAGE = Path(__file__).with_name("page.py")
_PATIENCE = 60.0  # seconds until the page must answer
_OPTIONS = {
    "server.address": ADDRESS,
    "server.headless": "true",  # it asks for no e-mail address, and the browser is opened here
    "server.fileWatcherType": "none",
    "browser.gatherUsageStats": "false",
    "browser.serverAddress": ADDRESS,
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",
    "global.developmentMode": "false",
    "logger.level": "error",
    "logger.hideWelcomeMessage": "true",
    "theme.light.primaryColor": MECHANISMS["BandMF"],
    "theme.dark.primaryColor": MECHANISMS["BandMF, unamplified"],
}


def serve(port: int | None, browser: bool, tell: Callable[[str], None]) -> None:
    """Run the page until it is interrupted; `tell` is given its address once it answers."""
    if importlib.util.find_spec("streamlit") is None:
        raise ValueError("streamlit: is not installed, and the page needs it; pip install 'bandmf[web]'")
    port = free_port(port)
    process = subprocess.Popen(command(port), stdout=subprocess.DEVNULL)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends the page
    try:
        _wait(process, port)
        address = f"http://{ADDRESS}:{port}"
        tell(address)
        if browser:
            webbrowser.open(address)
        process.wait()
    except KeyboardInterrupt:  # this is how it ends
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(process)


def command(port: int) -> list[str]:
    """What starts the page."""
    options = [f"--{name}={value}" for name, value in {**_OPTIONS, "server.port": str(port)}.items()]
    return [sys.executable, "-m", "streamlit", "run", str(_PAGE), *options]


def free_port(port: int | None) -> int:
    """The port that was asked for, if nobody has it; else the first free one."""
    if port is not None:
        port = _check.whole("port", port, 1, 65535)
        if not _is_free(port):
            raise _check.fail("port", port, "is in use or not permitted", "give another --port, or none")
        return port
    for candidate in range(FIRST_PORT, FIRST_PORT + 100):
        if _is_free(candidate):
            return candidate
    raise _check.fail("port", None, "all from 8501 to 8600 are in use", "give another --port")


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            attempt.bind((ADDRESS, port))
        except OSError:
            return False
    return True


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    """Until the page answers."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise OSError(f"the page ended with status {process.returncode} before it answered")
        with socket.socket() as attempt:
            attempt.settimeout(1)
            if attempt.connect_ex((ADDRESS, port)) == 0:
                return
        time.sleep(0.1)
    raise OSError(f"the page did not answer within {_PATIENCE:g} seconds")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The page goes with the command, in any case."""
    process.terminate()
    try:
        process.wait(timeout=3)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()

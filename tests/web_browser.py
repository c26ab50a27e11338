"""The page of `bandmf web` in a real browser. As a program: `python tests/web_browser.py docs/images/web.png`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Served:
    """`bandmf web`, in a process group of its own as in a terminal."""

    def __init__(self) -> None:
        program = "from bandmf.cli import main; main()"
        # A shell that runs this in the background may have switched Ctrl-C off; a terminal has not.
        program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {program}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "web", "--no-browser"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.match(r"(http://127\.0\.0\.1:(\d+)) ", self.line)
        assert found, self.line + (self.process.communicate(timeout=10)[1] if self.process.poll() else "")
        self.address, self.port = found[1], int(found[2])

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C: everyone in the group gets the signal. Returns the exit status, and all that was said."""
        os.killpg(self.process.pid, signal.SIGINT)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out + err

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def served() -> Iterator[Served]:
    """The page, until the block ends."""
    here = Served()
    try:
        yield here
    finally:
        here.end()


@contextmanager
def browser(height: int = 1000) -> Iterator[Any]:
    """A page of Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1360, "height": height}, accept_downloads=True)
        page.set_default_timeout(60_000)
        yield page
        chromium.close()


def settled(page: Any) -> None:
    """Wait until the script of the page has run to its end: it is marked while it runs."""
    page.wait_for_timeout(300)  # a change takes a moment to arrive
    page.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for(timeout=60_000)


def enter(page: Any, label: str, value: str) -> None:
    """Type into an input, and wait for the answer."""
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    field.press("Enter")
    settled(page)


def slide(page: Any, name: str, key: str, value: str) -> None:
    """Press an arrow key until the slider shows this value."""
    slider = page.get_by_role("slider", name=name)
    for _ in range(100):
        if slider.get_attribute("aria-valuetext") == value:
            return settled(page)
        slider.press(key)
        page.wait_for_timeout(100)
    raise AssertionError(f"{name} is at {slider.get_attribute('aria-valuetext')}, not at {value}")


def screenshot(path: Path) -> None:
    """The page as it opens, with memory for less noise than is best."""
    with served() as here, browser(height=1790) as page:
        page.goto(here.address)
        settled(page)
        enter(page, "Memory for noise on each device", "1 GB")
        page.mouse.click(700, 60)  # away from the input
        time.sleep(1)  # charts fade in
        page.screenshot(path=path)


if __name__ == "__main__":
    screenshot(Path(sys.argv[1]))

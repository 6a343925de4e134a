"""A real Chromium without a window, for tests that click what a user clicks: Debian's package, driven by Playwright."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.system import debian

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: Chromium, and fonts for what it draws.
PACKAGES = ("chromium", "fonts-dejavu-core")


def why_no_browser() -> str | None:
    """Why no browser can be had here, or None when one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if shutil.which("chromium") else debian.why_no_packages(root=True)


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser, installed where there is none, and ended with all that it opened."""
    from playwright.sync_api import sync_playwright

    if not shutil.which("chromium"):
        debian.install(PACKAGES)
    with sync_playwright() as playwright:
        # Root has no sandbox in a container.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()

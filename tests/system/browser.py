"""A real Chromium without a window, for tests that click what a user clicks: Debian's package, driven by Playwright."""

import importlib.util
import shutil

from tests.system import debian

#: Chromium, and fonts for what it draws.
PACKAGES = ("chromium", "fonts-dejavu-core")


def why_no_browser() -> str | None:
    """Why no browser can be had here, or None when one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if shutil.which("chromium") else debian.why_no_packages(root=True)

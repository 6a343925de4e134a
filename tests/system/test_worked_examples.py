"""The pictures of docs/how-to/worked-examples.md, from a real browser. `WORKED_PICTURES=DIR` writes them there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.system.jobs import cli
from tests.traces.conftest import captures

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["captures"]

pytestmark = [pytest.mark.system, pytest.mark.needs("browser")]

_DOCS = Path(__file__).parents[2] / "docs" / "how-to"

#: The capture of each picture, the part of the page, and what is clicked before.
_PICTURES = {
    "worked-data-budget": ("plant_data", "#budget", None),
    "worked-data-timeline": ("plant_data", "#timeline", None),
    "worked-straggler-budget": ("plant_straggler", "#budget", None),
    "worked-straggler-finding": ("plant_straggler", "#finding-3", None),
    "worked-hosts-activity": ("tp2_dp2", "#budget", "by activity"),
    "worked-hosts-waits": ("tp2_dp2", "#waits", None),
}


@pytest.mark.parametrize("capture", sorted({capture for capture, _, _ in _PICTURES.values()}))
def test_the_parts_of_the_page_that_the_docs_show(chromium: Browser, captures: Path, tmp_path: Path, capture: str) -> None:
    page_file = tmp_path / "report.html"
    environment = os.environ | {"BRIDGE_PROFILING_CACHE": str(tmp_path / "cache")}
    cli("report", captures / "kineto" / capture, "-o", page_file, env=environment)
    folder = Path(os.environ.get("WORKED_PICTURES", tmp_path))
    context = chromium.new_context(viewport={"width": 1366, "height": 768}, color_scheme="light")
    try:
        page = context.new_page()
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=120_000)
        for name, (of, part, click) in _PICTURES.items():
            if of != capture:
                continue
            shown = page.locator(part)
            if click:
                shown.locator("button", has_text=click).click()
                page.wait_for_timeout(300)
            assert shown.locator("svg.main-svg").count() >= 1
            shown.screenshot(path=folder / f"{name}.png")
    finally:
        context.close()


def test_the_docs_show_every_picture_and_no_other() -> None:
    shown = re.findall(r"\(pictures/([\w-]+)\.png\)", (_DOCS / "worked-examples.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(_PICTURES)
    assert all((_DOCS / "pictures" / f"{name}.png").stat().st_size < 120_000 for name in shown)

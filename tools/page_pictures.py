#!/usr/bin/env python3
"""Makes the pictures in docs/pictures: a page in a real Chromium, part by part.

    python tools/page_pictures.py CAPTURES [--only worked] [--output docs/pictures]

CAPTURES is the folder of the real captures, which has `kineto` and `memory` in it. Needs Playwright and Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_profiling.run import Run  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

_LAPTOP = {"width": 1366, "height": 768}

#: Pictures show no directory of the machine that made them.
_SHORT_PATHS = r"""document.querySelectorAll(".python code").forEach(
    (line) => { line.textContent = line.textContent.replace(/'[^']*\/(?=[^'/]*')/, "'"); }
)"""

#: The worked examples: the capture, the part of its page, and what is clicked before.
_WORKED = {
    "worked-data-timeline": ("plant_data", "#timeline", None),
    "worked-hosts-activity": ("tp2_dp2", "#budget", "by activity"),
}

#: The sections with a picture, besides the top of the page.
_SECTIONS = ("budget", "waits", "findings", "timeline", "memory")


def _made(captures: Path, name: str, folder: Path, *, memory: bool = False) -> Path:
    """The page of a capture, with its memory snapshot if asked for."""
    run = folder / name
    run.mkdir(parents=True)
    for file in (captures / "kineto" / name).glob("*"):
        (run / file.name).symlink_to(file)
    if memory:
        (run / "snapshot_0.pickle.xz").symlink_to(captures / "memory" / name / "snapshot_0.pickle.xz")
    with Run(run, parquet=folder / "tables") as opened:
        return opened.report(folder / "report.html")


def _shown(context: BrowserContext, path: Path) -> Page:
    page = context.new_page()
    page.goto(path.as_uri())
    _drawn(page)
    return page


def _drawn(page: Page) -> None:
    page.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
    page.evaluate("drawAll()")
    page.evaluate(_SHORT_PATHS)


def _sections(page: Page, output: Path) -> None:
    page.screenshot(path=output / "page-top.png")
    for section in _SECTIONS:
        # Of the findings the first, of the rest a screen: pictures are to be looked at, and lie in a repository.
        box = page.locator(f"#{section}" if section != "findings" else "#finding-1").bounding_box()
        assert box is not None
        clip = {**box, "height": min(box["height"], _LAPTOP["height"])}
        page.screenshot(path=output / f"page-{section}.png", clip=clip, full_page=True)


def _worked(page: Page, capture: str, output: Path) -> None:
    for name, (of, part, click) in _WORKED.items():
        if of == capture:
            shown = page.locator(part)
            if click:
                shown.locator("button", has_text=click).click()
                page.wait_for_timeout(300)
            assert shown.locator("svg.main-svg").count() >= 1, name
            shown.screenshot(path=output / f"{name}.png")


def main() -> int:
    """Write the pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", choices=("sections", "worked"))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        # Root has no sandbox in a container.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def show(name: str, place: str, memory: bool = False) -> Page:
            context = browser.new_context(viewport=_LAPTOP, color_scheme="light")
            return _shown(context, _made(options.captures, name, Path(folder, place), memory=memory))

        if options.only != "worked":
            _sections(show("tp2_dp2", "sections", memory=True), options.output)
        for capture in dict.fromkeys(capture for capture, _, _ in _WORKED.values()) if options.only != "sections" else ():
            _worked(show(capture, capture), capture, options.output)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

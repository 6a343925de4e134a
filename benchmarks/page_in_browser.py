"""The page in a real browser: size, time to its first table and until it is drawn, zooming the timeline, sorting a table.

    python benchmarks/page_in_browser.py PAGE... [--rounds 5] [--rows 10000]

PAGE is a file of `bridge-profiling report`; `report_page.py CAPTURES --ranks 8,64,1024 --keep DIR` makes those of many ranks.
Needs Playwright and Chromium. Each round opens the page anew in a browser of its own. Times are the browser's, in milliseconds
from the begin of the navigation, or from the input to the frame that shows its result, medians of the rounds, and those of the
main thread's processor time. The table that is sorted is the longest of a copy of the page, its rows repeated up to --rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize


_LAPTOP: ViewportSize = {"width": 1366, "height": 768}

#: Notes when the first table is on the screen, and when what is near it is drawn.
_WATCH = """
const seen = (window.seen = {});
const look = () => {
  const table = document.querySelector("main table");
  if (!table || !table.getBoundingClientRect().height) return requestAnimationFrame(look);
  requestAnimationFrame(() => setTimeout(() => { seen.table = performance.now(); }));
};
requestAnimationFrame(look);
new MutationObserver(() => { if (document.documentElement.dataset.ready) seen.ready ||= performance.now(); }).observe(
  document, { subtree: true, attributeFilter: ["data-ready"] });
"""

#: From before an action to after the frame that shows its result.
_TIMED = """
async (times) => {
  const act = %s;
  const took = [];
  for (let turn = 0; turn < times; turn++) {
    await new Promise((resume) => requestAnimationFrame(() => setTimeout(resume, 20)));
    const began = performance.now();
    await act(turn);
    await new Promise((resume) => requestAnimationFrame(() => setTimeout(resume)));
    took.push(performance.now() - began);
  }
  return took;
}
"""
_ZOOM = """(turn) => {
  document.getElementById(turn % 4 < 2 ? "timeline-in" : "timeline-out").click();
}"""
_SORT = """(turn) => {
  const heading = window.longest.tHead.rows[0].cells[turn % 2 ? 0 : window.longest.tHead.rows[0].cells.length - 1];
  (heading.querySelector("button") || heading).click();
}"""
_FIND = """
() => {
  const count = (table) => (typeof rowsOf === "function" ? rowsOf(table) : table.tBodies[0].rows).length;
  const [longest] = [...document.querySelectorAll("table.sortable")].sort((one, other) => count(other) - count(one));
  longest.closest("details")?.setAttribute("open", "");
  longest.scrollIntoView();
  window.longest = longest;
  return count(longest);
}
"""


def lengthened(text: str, rows: int) -> str:
    """A page whose longest sortable table has this many rows."""
    bodies = re.findall(r'<table class="sortable".*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    longest = max(bodies, key=lambda body: body.count("<tr"))
    own = re.findall(r"<tr.*?</tr>", longest, re.DOTALL)
    return text.replace(longest, "\n".join((own * -(-rows // len(own)))[:rows]))


class Thread:
    """The processor time of a page's main thread, in milliseconds: what a busy machine does not change."""

    def __init__(self, page: Page) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent(self) -> float:
        """Since the page was made."""
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return next(1e3 * each["value"] for each in metrics if each["name"] == "TaskDuration")

    def around(self, act: Callable[[], list[float]]) -> tuple[float, float]:
        """The median of the times that something returns, and the processor time of each."""
        before = self.spent()
        times = act()
        return median(times), (self.spent() - before) / len(times)


def opened(browser: Browser, page_file: Path) -> dict[str, tuple[float, float]]:
    """What one opening of a page takes: milliseconds until it is seen, and those of the main thread."""
    context = browser.new_context(viewport=_LAPTOP)
    page = context.new_page()
    thread = Thread(page)
    page.add_init_script(_WATCH)
    page.goto(page_file.resolve().as_uri(), wait_until="commit")
    page.wait_for_selector("html[data-ready]", state="attached", timeout=180_000)
    page.wait_for_timeout(200)
    seen = page.evaluate("window.seen")
    found = {"first table": (seen["table"], seen["table"]), "ready": (seen["ready"], thread.spent())}
    if page.locator("#timeline-in").count():
        page.locator("#figure-timeline").scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        found["zoom"] = thread.around(lambda: page.evaluate(_TIMED % _ZOOM, 8))
    context.close()
    return found


def sorted_rows(browser: Browser, page_file: Path, rows: int) -> dict[str, tuple[float, float]]:
    """What sorting a table of many rows takes, in a copy of a page."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as copy:
        copy.write(lengthened(page_file.read_text(encoding="utf-8"), rows))
        copy.flush()
        page = browser.new_page(viewport=_LAPTOP)
        thread = Thread(page)
        page.goto(Path(copy.name).as_uri())
        page.wait_for_selector("html[data-ready]", state="attached", timeout=180_000)
        assert page.evaluate(_FIND) == rows
        page.wait_for_timeout(500)
        found = thread.around(lambda: page.evaluate(_TIMED % _SORT, 8))
        page.close()
    return {"sort": found}


def main() -> None:
    """Print a line for each page."""
    from playwright.sync_api import sync_playwright  # not needed to lengthen a page

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or sys.exit("there is no chromium")
    columns = ("first table", "ready", "zoom", "sort")
    print(f"{'page':24} {'size':>8} " + " ".join(f"{name:>22}" for name in columns))
    measured = {}
    with sync_playwright() as playwright:
        for path in options.pages:
            rounds = []
            for _ in range(options.rounds):
                arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
                browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
                rounds.append(opened(browser, path) | sorted_rows(browser, path, options.rows))
                browser.close()
            found = {name: [median(each[name][side] for each in rounds) for side in (0, 1)] for name in rounds[0]}
            measured[path.name] = {"bytes": path.stat().st_size, **found}
            cells = [f"{found[name][0]:>6.0f} ms, CPU {found[name][1]:>5.0f} ms" if name in found else "" for name in columns]
            print(
                f"{path.name:24} {path.stat().st_size / 1e6:>5.1f} MB " + " ".join(f"{cell:>22}" for cell in cells), flush=True
            )
    print(json.dumps(measured))


if __name__ == "__main__":
    main()

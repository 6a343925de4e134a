"""The page in a real browser: size, time to its first table and to its last figure, zooming the timeline, sorting a table.

    python benchmarks/page_in_browser.py PAGE... [--rounds 5] [--rows 10000]

PAGE is a file of `bridge-profiling report`; `report_page.py CAPTURES --ranks 8,64,1024 --keep DIR` makes those of many ranks. Needs
Playwright and Chromium. Each round opens the page anew in a browser of its own. Times are the browser's, in milliseconds from
the begin of the navigation, or from the input to the frame that shows its result, medians of the rounds. The table that is
sorted is the page's longest, its rows repeated up to --rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser, Page, sync_playwright

#: Notes when the first table is on the screen, and when everything is drawn.
_WATCH = """
const seen = (window.seen = {});
const look = () => {
  const table = document.querySelector("main table");
  const shown = table && table.getBoundingClientRect().height > 0;
  if (shown && !seen.table) requestAnimationFrame(() => setTimeout(() => { seen.table = performance.now(); }));
  if (document.documentElement.dataset.ready && !seen.ready) seen.ready = performance.now();
  if (!seen.table || !seen.ready) requestAnimationFrame(look);
};
requestAnimationFrame(look);
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
_LENGTHEN = """
(rows) => {
  const tables = [...document.querySelectorAll("table.sortable")];
  const longest = tables.sort((one, other) => other.tBodies[0].rows.length - one.tBodies[0].rows.length)[0];
  const own = [...longest.tBodies[0].rows];
  while (longest.tBodies[0].rows.length < rows)
    longest.tBodies[0].append(...own.slice(0, rows - longest.tBodies[0].rows.length).map((row) => row.cloneNode(true)));
  longest.closest("details")?.setAttribute("open", "");
  longest.scrollIntoView();
  window.longest = longest;
  return longest.tBodies[0].rows.length;
}
"""


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


def opened(browser: Browser, page_file: Path, rows: int) -> dict[str, tuple[float, float]]:
    """What one opening of a page takes: milliseconds until it is seen, and those of the main thread."""
    context = browser.new_context(viewport={"width": 1366, "height": 768})
    page = context.new_page()
    thread = Thread(page)
    page.add_init_script(_WATCH)
    page.goto(page_file.resolve().as_uri(), wait_until="commit")
    page.wait_for_selector("html[data-ready]", state="attached", timeout=180_000)
    page.wait_for_timeout(200)
    seen = page.evaluate("window.seen")
    found = {"first table": (seen["table"], seen["table"]), "all drawn": (seen["ready"], thread.spent())}
    if page.locator("#timeline-in").count():
        page.locator("#figure-timeline").scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        found["zoom"] = thread.around(lambda: page.evaluate(_TIMED % _ZOOM, 8))
    page.evaluate(_LENGTHEN, rows)
    page.wait_for_timeout(500)
    found["sort"] = thread.around(lambda: page.evaluate(_TIMED % _SORT, 8))
    context.close()
    return found


def main() -> None:
    """Print a line for each page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or sys.exit("there is no chromium")
    columns = ("first table", "all drawn", "zoom", "sort")
    print(f"{'page':24} {'size':>8} " + " ".join(f"{name:>22}" for name in columns))
    measured = {}
    with sync_playwright() as playwright:
        for path in options.pages:
            rounds = []
            for _ in range(options.rounds):
                arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
                browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
                rounds.append(opened(browser, path, options.rows))
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

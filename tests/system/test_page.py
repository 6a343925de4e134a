"""The page in a real browser: what a user clicks, types and prints. tools/page_pictures.py makes pictures of it."""

import json
import os
import re
import shutil

import pytest

from tests.compare.compared_runs import WrittenRun
from tests.planted.cases import CASES
from tests.system.jobs import cli

pytestmark = [pytest.mark.system, pytest.mark.needs("browser")]

#: A laptop's screen.
_LAPTOP = {"width": 1366, "height": 768}

_SECTIONS = "verdict budget scorecard phases iterations waits findings work flame communication timeline memory quality raw"

_HOSTILE = (
    '<a href="http://evil.example/track">more</a><b>b</b><br><sub>s</sub><span style="fill:red">s</span>&lt;i&gt; %{x} $x^2$'
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u2028</script>"
    "<image href='file:///etc/passwd'/><svg onload=\"document.title='taken'\">"
)


def _report(run, page):
    """Make the page of a run as a user does."""
    cli("report", run, "-o", page, env=os.environ | {"BRIDGE_PROFILING_CACHE": str(page.parent / "cache")})
    return page


@pytest.fixture(scope="module")
def real_page(tmp_path_factory):
    """The page of four ranks and a memory snapshot."""
    folder = tmp_path_factory.mktemp("real")
    run = shutil.copytree(CASES["slow_link_4"].folder, folder / "run")
    (run / "memory" / "iter-5-7").mkdir(parents=True)
    (snapshot,) = CASES["memory_leak_2"].folder.rglob("rank-0.pickle.xz")
    shutil.copy(snapshot, run / "memory" / "iter-5-7")
    return _report(run, folder / "report.html")


@pytest.fixture(scope="module")
def series_page(tmp_path_factory):
    """The page of twenty runs in order, of which one is slower."""
    folder = tmp_path_factory.mktemp("series")
    runs = [folder / f"nightly-{night:02}" for night in range(20)]
    for night, run in enumerate(runs):
        WrittenRun(iterations=3, host_us=400.0 if night == 12 else 100.0, seed=night).write(run)
    cli("compare", *runs, "-o", folder / "series.html")
    return folder / "series.html"


@pytest.fixture
def context(chromium):
    """A browser without a past, whose every request to a network is refused and remembered."""
    opened = chromium.new_context(viewport=_LAPTOP, color_scheme="light")
    yield opened
    opened.close()


@pytest.fixture
def show(context):
    """Opens a page, and waits until it has drawn everything. Its errors and requests are in `page.errors`, `page.requests`."""

    def show(path, width=_LAPTOP["width"], draw=True):
        page = context.new_page()
        page.set_viewport_size({**_LAPTOP, "width": width})
        page.errors, page.requests = [], []
        # A policy's violation is an error of no script, and a message that a script can catch.
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (event) => console.error('violated', event.violatedDirective))"
        )
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda said: page.errors.append(said.text) if said.type == "error" else None)

        def refuse(route):
            page.requests.append(route.request.url)
            route.abort()

        page.route(lambda url: url.startswith(("http", "ws")), refuse)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
        assert page.get_attribute("html", "data-ready") == "yes"
        if draw:
            page.evaluate("drawAll()")
        return page

    return show


@pytest.fixture
def page(real_page, show):
    """The page of the real run, drawn."""
    return show(real_page)


def _rows(page, table, column):
    cells = page.locator(f"#table-{table} tbody tr:not([hidden]) td:nth-child({column + 1})")
    return cells.all_inner_texts()


def _numbers(texts):
    return [float(text.replace(",", "").rstrip(" %")) for text in texts]


def test_every_section_is_drawn_without_a_network(page, real_page):
    assert page.requests == []
    assert page.errors == []
    assert page.locator("main > section").evaluate_all("all => all.map((each) => each.id)") == _SECTIONS.split()
    drawn = page.locator(".figure")
    assert drawn.count() >= 8
    for place in range(drawn.count()):
        assert drawn.nth(place).locator("svg.main-svg").count() >= 1, drawn.nth(place).get_attribute("id")
    # Plotly draws none, and says nothing, if boxes do not add up.
    assert page.locator("#figure-flame .slice").count() > 40
    assert real_page.stat().st_size < 5_000_000


@pytest.mark.parametrize("width", [_LAPTOP["width"], 420])
@pytest.mark.parametrize("made", ["real_page", "series_page"])
def test_labels_do_not_overlap_and_nothing_sticks_out(made, request, show, width):
    page = show(request.getfixturevalue(made), width)
    assert page.errors == []
    sticking_out = page.evaluate(
        """() => [...document.querySelectorAll("main *, header *")].filter((each) => !each.closest(".scroll, .hidden"))
            .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
            .map((each) => each.tagName + " " + each.textContent.slice(0, 40))"""
    )
    assert sticking_out == []
    overlapping = page.evaluate(
        """() => [...document.querySelectorAll(".figure")].flatMap((figure) =>
            [".ytick text", ".xtick text", ".legendtext"].flatMap((kind) => {
                const box = (each) => [each.textContent, each.getBoundingClientRect()];
                const boxes = [...figure.querySelectorAll(kind)].map(box);
                return boxes.flatMap(([one, a], place) => boxes.slice(place + 1)
                    .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1)
                    .filter(([, b]) => a.top < b.bottom - 2 && b.top < a.bottom - 2)
                    .map(([other]) => `${figure.id}: ${one} | ${other}`));
            }))"""
    )
    assert overlapping == []


def lengthened(text, rows):
    """A page whose longest sortable table has this many rows."""
    bodies = re.findall(r'<table class="sortable".*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    longest = max(bodies, key=lambda body: body.count("<tr"))
    own = re.findall(r"<tr.*?</tr>", longest, re.DOTALL)
    return text.replace(longest, "\n".join((own * -(-rows // len(own)))[:rows]))


def test_what_is_not_looked_at_is_not_drawn_and_a_long_table_is_sorted_and_filtered_as_a_whole(real_page, show, tmp_path):
    long = tmp_path / "long.html"
    long.write_text(lengthened(real_page.read_text(encoding="utf-8"), 1000), encoding="utf-8")
    page = show(long, draw=False)
    assert page.locator("#figure-timeline svg").count() == 0
    page.locator("#figure-timeline").scroll_into_view_if_needed()
    page.wait_for_selector("#figure-timeline svg.main-svg", state="attached")
    rows = page.locator("#table-operators tbody tr")
    assert rows.count() == 150
    page.locator("#table-operators th button", has_text="count").click()
    highest = _numbers(_rows(page, "operators", 0))
    assert highest == sorted(highest, reverse=True)
    assert highest.count(highest[0]) >= 1000 // 190, "each row is there some times"
    page.locator("#table-operators").evaluate("table => table.parentElement.scrollTo(0, 1e6)")
    rows.nth(200).wait_for(state="attached")
    page.locator('[data-filter="operators"]').fill("mm aten::m")
    shown = rows.all_text_contents()
    assert shown
    assert all("aten::mm" in text for text in shown)
    assert page.locator("#count-operators").inner_text() == f"{rows.count()} rows"


def test_the_keyboard_alone_reaches_and_sorts(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the verdict"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#verdict"
    heading = page.locator("#table-operators th", has_text="count")
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.parentElement === document.querySelector('#table-operators th')"):
            break
    else:
        pytest.fail("two hundred Tabs do not reach the operators")
    # What has the focus shows it.
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    counts = _numbers(_rows(page, "operators", 0))
    assert counts == sorted(counts, reverse=True)


def test_a_row_leads_to_its_longest_bar_and_a_bar_back_to_its_row(page):
    row = page.locator("#table-kernels tbody tr").first
    name = row.locator("td.name span").text_content().strip()
    row.locator(".show-bar").press("Enter")
    first, last = page.evaluate("document.getElementById('figure-timeline').layout.xaxis.range")
    shown = page.evaluate(
        """([name, first, last]) => document.getElementById('figure-timeline').data.some((trace) =>
        trace.customdata.some((code, place) =>
            pageData.timeline.names[code] === name && trace.x[place] >= first && trace.x[place] <= last))""",
        [name, first, last],
    )
    assert shown
    assert last - first < 200
    # Back, with the keyboard, and also where the row is filtered out.
    back = page.locator("#timeline-chosen button")
    assert page.evaluate("document.activeElement === document.querySelector('#timeline-chosen button')")
    page.locator('[data-filter="kernels"]').fill("no such kernel")
    back.press("Enter")
    assert row.is_visible()
    assert page.evaluate("document.activeElement.classList.contains('chosen')")


def test_an_event_of_a_finding_is_shown_in_the_timeline_and_the_budget_adds_up_either_way(page):
    button = page.locator(".to-timeline").first
    rank, start = button.get_attribute("data-rank"), float(button.get_attribute("data-start"))
    button.click()
    assert page.input_value("#timeline-rank") == rank
    assert all("rank" not in text for text in page.locator("#figure-timeline .ytick text").all_text_contents())
    first, last = page.evaluate("document.getElementById('figure-timeline').layout.xaxis.range")
    assert first <= start <= last
    assert last - first < 300
    total = """() => { const sums = {}; for (const trace of document.getElementById('figure-budget').data)
        trace.y.forEach((rank, place) => { sums[rank] = (sums[rank] || 0) + trace.x[place]; }); return sums; }"""
    by_cause = page.evaluate(total)
    assert len(by_cause) == 4
    page.locator('.switch[data-for="budget"] button', has_text="by activity").click()
    assert page.evaluate(total) == pytest.approx(by_cause, rel=2e-3)


def test_it_prints_on_white_without_controls_and_within_the_paper(page):
    page.locator("#theme").click()
    page.set_viewport_size({"width": 688, "height": 1000})  # A4 less its margins
    page.emulate_media(media="print")
    page.wait_for_selector('html[data-theme="light"]', state="attached")
    page.wait_for_timeout(500)  # for the figures, which are drawn anew
    for control in ("nav", "#theme", ".filters", ".switch"):
        assert not page.locator(control).first.is_visible()
    assert page.locator("#verdict").is_visible()
    wide = page.locator("svg.main-svg").evaluate_all(
        "all => Math.max(...all.map((each) => each.getBoundingClientRect().right))"
    )
    assert wide <= 690


def test_hostile_names_stay_text(show, tmp_path):
    """Kernels, annotations, operators and groups are called what an attacker would call them."""
    run = tmp_path / "run"
    shutil.copytree(CASES["slow_link_4"].folder, run)
    for file in run.glob("torch/*/rank-*"):
        trace = json.loads(file.read_bytes())
        for event in trace["traceEvents"]:
            if "Process Group Description" in event.get("args", {}):
                event["args"]["Process Group Description"] += _HOSTILE
            elif event.get("cat") in ("cpu_op", "kernel", "user_annotation") and not re.match(
                "ProfilerStep|nccl", event["name"]
            ):
                event["name"] = _HOSTILE
        file.write_text(json.dumps(trace))
    page = show(_report(run, tmp_path / "report.html"))
    assert any('<a href="http' in name for name in _rows(page, "kernels", 7))
    assert any('<a href="http' in text for text in page.locator("#figure-communication .ytick text").all_text_contents())
    # Also where a script writes them: hover over every bar of the figures and every box of the flame graph.
    for figure in page.locator(".figure").all():
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        for step in range(0, 100, 4):
            page.mouse.move(box["x"] + box["width"] * step / 100, box["y"] + box["height"] / 2)
    page.wait_for_timeout(200)
    drawn = page.locator(".figure").evaluate_all(
        """all => all.flatMap((each) => [...each.querySelectorAll("a, image, script, img, tspan[style]")])
            .filter((each) => !each.classList.contains("line") && !each.outerHTML.includes("data:image/png"))
            .filter((each) => !each.closest(".modebar"))
            .map((each) => each.outerHTML)"""
    )
    assert drawn == []
    assert (page.errors, page.requests, page.locator("img").count()) == ([], [], 0)
    assert "taken" not in page.title()


def test_a_trace_goes_to_perfetto_only_when_clicked(page, context, tmp_path):
    answering = """<script>addEventListener("message", (event) => {
        if (event.data === "PING") event.source.postMessage("PONG", "*");
        else document.title = event.data.perfetto.title + " " + event.data.perfetto.buffer.byteLength;
    });</script>"""
    asked = []

    def perfetto(route):
        asked.append(route.request.url)
        route.fulfill(body=answering, content_type="text/html")

    context.route("https://ui.perfetto.dev/**", perfetto)
    trace = tmp_path / "rank-0.json.gz"
    trace.write_bytes(b"x" * 1234)
    assert page.locator("#perfetto-open").is_disabled()
    page.set_input_files("#perfetto-file", trace)
    assert asked == []
    with context.expect_page() as opened:
        page.locator("#perfetto-open").click()
    opened.value.wait_for_function("document.title.includes('1234')")
    assert opened.value.title() == "rank-0.json.gz 1234"
    assert len(asked) == 1
    assert page.locator("#perfetto-said").inner_text() == "rank-0.json.gz is open in Perfetto."

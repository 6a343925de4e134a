"""The table of speeds: the page in the documentation is that of the stored table."""

import json

from benchmarks.table import PAGE, ROWS, STORED, Measured, lines, page


def test_the_page_shows_the_stored_table_and_a_new_one_names_the_ratios_of_the_last_release():
    stored = json.loads(STORED.read_text())
    rows = {id: Measured(**row) for id, row in stored["rows"].items()}
    assert (list(rows), PAGE.read_text()) == (list(ROWS), page(rows, stored["machine"]))
    shown = zip(rows.items(), [*lines(rows, stored)][2:], strict=True)
    assert all(f"| {row.ratio:.2f} | {ROWS[id].floor} |" in line for (id, row), line in shown)

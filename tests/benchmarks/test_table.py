"""The tables of speeds: the page in the documentation is that of the stored ones."""

from benchmarks import table
from benchmarks.speed_page import PAGE, STORED, STORED_GPU, Table, page


def test_the_page_shows_the_stored_tables_and_a_new_one_names_the_ratios_of_the_last_release():
    stored, gpu = Table.read(STORED), Table.read(STORED_GPU)
    assert (list(stored.lines), PAGE.read_text()) == (list(table.ROWS), page(stored, gpu))
    shown = zip(stored.lines.values(), [*stored.markdown(stored)][2:], strict=True)
    assert all(f"| {row.found.ratio:.2f} | {row.floor} |" in line for row, line in shown)

"""The tables of speeds: the page in the documentation is that of the stored ones."""

from benchmarks import gpu_table, table
from benchmarks.speed_page import PAGE, STORED, STORED_GPU, Table, page


def test_the_page_shows_the_stored_tables_and_a_new_one_names_the_ratios_of_the_last_release():
    stored, gpu = Table.read(STORED), Table.read(STORED_GPU)
    assert (list(stored.lines), PAGE.read_text()) == (list(table.ROWS), page(stored, gpu))
    shown = zip(stored.lines.values(), [*stored.markdown(stored)][2:], strict=True)
    assert all(f"| {row.found.ratio:.2f} | {row.floor} |" in line for row, line in shown)


def test_a_gpu_row_that_was_not_measured_says_why():
    rows = [
        {
            "case": "edges-torch",
            "what": "stop: hook / torch.profiler and export",
            "milliseconds": {"hook": 30.0, "exported": 90.0},
            "ratio": {"median": 0.33, "low": 0.3, "high": 0.4, "pairs": 9},
        }
    ]
    record = {"rows": rows, "left_out": {"inside-nsys": "no nsys on PATH"}, "failed": {"inside-torch": "died\n…"}, "facts": {}}
    record["machine"] = {"cores": 16, "python": "3.12.3"}
    shown = [*gpu_table.table_of(record).markdown()][2:]
    parts = {name: line.split(" | ")[1] for name, line in zip(gpu_table.ROWS, shown, strict=True)}
    assert {parts["nsys"], parts["inside"]} == {"not measured: no nsys on PATH", "not measured: died"}
    assert "| 30 ms | 90 ms | 0.33 (0.30 to 0.40) |" in shown[3]

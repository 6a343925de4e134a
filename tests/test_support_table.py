"""docs/reference/support.md shows what is tested: tools/support_table.py writes its tables."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "support_table.py"


def test_the_page_is_current_and_every_file_that_it_rests_on_exists():
    script = runpy.run_path(str(SCRIPT))
    assert script["missing"]() == []
    assert script["PAGE"].read_text() == script["page"](), "type: python tools/support_table.py"

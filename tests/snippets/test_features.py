"""The table of the guides' features names tests and pages that exist."""

from tools.feature_table import PAGE, features, page


def test_every_feature_has_a_test_or_a_page_and_the_table_is_current():
    assert [row.evidence for row in features() if not row.file.is_file()] == []
    assert PAGE.read_text(encoding="utf-8") == page()

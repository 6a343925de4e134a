"""Numbers in words: a unit always, and no more digits than matter."""

from pathlib import Path
from string import Formatter

from bridge_profiling.facts.words import is_format, written
from bridge_profiling.findings import ORDER
from bridge_profiling.report import words
from bridge_profiling.report.findings_view import Pictures


def test_memory_counts_in_powers_of_two_and_messages_in_powers_of_ten():
    assert (words.memory(5 * 2**30), written("size", 1_068_089_344)) == ("5.00 GiB", "1.07 GB")


def test_evidence_is_written_with_the_unit_in_its_name():
    assert (words.label("waiting_ns"), words.value("waiting_ns", 1_500_000)) == ("waits for others", "1.5 ms")
    assert words.value("waiting_ns", {0: 1_500_000, "3": 25_000_000}) == "rank 0: 1.5 ms, rank 3: 25 ms"
    assert words.label("idle_ns") == "idle"
    assert words.value("idle_ns", {"host_sync": {1: 2_000_000}}) == "host sync: rank 1: 2 ms"


def test_sentences_name_formats_that_exist_and_every_sentence_is_said():
    sentences = words.resource("sentences")
    source = "\n".join(path.read_text() for path in Path(words.__file__).parent.glob("*.py"))
    for name, template in sentences.items():
        if name == "outcomes":
            continue
        assert any(f'"{begin}' in source for begin in (f'{name}"', *_beginnings(name))), name
        specs = {spec for _, field, spec, _ in Formatter().parse(template) if field is not None and spec}
        assert {spec for spec in specs if not is_format(spec)} <= {",", ".0%", ".3g"}, name


def _beginnings(name):
    """A name whose end is a value, as f-strings have it: `compared_{verdict}`."""
    return [name[: place + 1] + "{" for place, letter in enumerate(name) if letter in "_ "]


def test_findings_that_exist_have_pictures_that_can_be_drawn():
    pictures = words.resource("text")["pictures"]
    assert set(pictures) <= set(ORDER)
    assert all(hasattr(Pictures, f"_{method}") for method, *_ in pictures.values())

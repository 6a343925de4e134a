"""What is typed keeps its text in a text field, and is refused as a number in a notation that YAML alone reads so."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.settings.overrides import apply_overrides


@dataclass
class Section:
    text: str = ""
    optional: str | None = None
    either: int | str = 0
    whole: int = 0
    real: float = 0.0
    flag: bool = False
    word: Literal["a", "no", "010"] = "a"
    texts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Config:
    s: Section = field(default_factory=Section)


def given(override: str) -> Any:
    config = Config()
    apply_overrides(config, [override])
    return getattr(config.s, override.partition("=")[0].removeprefix("s.").partition(".")[0])


CHANGED = [
    "a #b", "&x y", "|", ">", "|\n a\n b", "a\nb", "a\n\nb", "!!int 3", "!x y", "!!str 010", "*a", "%q{RANK}", "@x", "`x`",
    "[a", "{a", "'a", "'a' #b", '"a" b', "#a", "null #x", "true #x", "12 #x", "a: b: c", "<<", "=", "\x00", "\ud800",
    "a\x85b", "---", "...",
]  # fmt: skip
OTHER_NUMBERS = ["010", "0o10", "0x1f", "0b11", "1:1", "1:30:00", "-010", "+0x1", "1__0", "1:1.5", "9" * 5000]


@pytest.mark.parametrize(
    "text", [*CHANGED, *OTHER_NUMBERS, "2020-01-01", "1e3", ".5", "1_000", "no", "12", "a#b", "a:b", "x=y"]
)
def test_a_text_field_keeps_the_text(text):
    for name in ("text", "optional"):
        assert given(f"s.{name}={text}") == text
    assert given(f"s.pairs.key={text}") == {"key": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a #b'", "a #b"), ('"a\\tb"', "a\tb"), ("'a\nb'", "a\nb"), ('"a\nb"', "a\nb"), ("'it''s'", "it's"), ("'010'", "010"),
        ("${oc.env:NAME_OF_A_TEST}", "x #y"),
    ],
)  # fmt: skip
def test_quotes_and_variables_are_read(text, value, monkeypatch):
    monkeypatch.setenv("NAME_OF_A_TEST", "x #y")
    assert given(f"s.text={text}") == value


@pytest.mark.parametrize("name", ["whole", "real", "flag", "numbers", "counts.key"])
@pytest.mark.parametrize("text", [*CHANGED, *OTHER_NUMBERS, "1e400", "{}", "１２"])
def test_a_number_in_another_notation_is_refused_with_one_short_error(name, text):
    for typed in (text, f"[{text}]") if name == "numbers" else (text,):
        with pytest.raises(ProfilingConfigError) as refused:
            given(f"s.{name}={typed}")
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("text", ["010", "1:1", "12 #x", "a #b", "[a"])
def test_a_field_for_either_takes_no_guess(text):
    with pytest.raises(ProfilingConfigError):
        given(f"s.either={text}")
    assert given(f"s.either='{text}'") == text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("s.whole=-7", -7), ("s.whole=+7", 7), ("s.whole=1_000", 1000), ("s.whole='12'", 12),
        ("s.real=1.", 1.0), ("s.real=.5", 0.5), ("s.flag=no", False), ("s.flag=1", True),
        ("s.word=no", "no"), ("s.word=010", "010"), ("s.numbers=[1,-2]", [1, -2]),
        ("s.texts=[007,a,no,1e3,'x y']", ["007", "a", "no", "1e3", "x y"]),
        ("s.pairs={a: 010, b: no}", {"a": "010", "b": "no"}),
    ],
)  # fmt: skip
def test_what_everyone_reads_alike_is_accepted(override, value):
    assert given(override) == value


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000 + "]" * 3000, "{a: " * 3000 + "}" * 3000, "[" * 40 + "]" * 40, "[&a [x,x],*a,*a]",
        "{<<: {a: b}}", "{? [a] : b}", "[" + "9" * 5000 + "]", "[!!int 3]", "[a\nb]", "${" * 2000 + "}" * 2000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["whole", "numbers", "counts", "texts.x"])
def test_what_grows_beyond_all_bounds_is_one_error(text, name):
    with pytest.raises(ProfilingConfigError) as refused:
        given(f"s.{name}={text}")
    assert len(str(refused.value)) < 1000

"""`section.field=value` and YAML files over any tree of dataclasses: what is accepted, what is refused and how."""

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

from bridge_profiling import FaultToleranceConfig, ProfilingConfig, ProfilingConfigError
from bridge_profiling.settings.overrides import apply_overrides, apply_yaml, format_override, load_yaml, parse_override, unquote


class Color(enum.Enum):
    red = 1
    blue = "b"


@dataclass
class Train:
    iterations: int = 1
    rate: float = 0.1
    on: bool = False
    name: str = "x"
    note: str | None = None
    folder: Path = Path("/")
    style: Literal["linear", "cosine"] = "linear"
    color: Color = Color.red
    function: Callable | None = None
    shape: tuple[int, int] = (1, 2)
    sizes: Optional[list[int]] = None  # noqa: UP045  # megatron-core's configs are written so
    frequency: Union[int, list[int]] = 1  # noqa: UP007
    decay: float | str = "cosine"
    labels: dict[str, int] = field(default_factory=dict)
    nested: dict[str, dict[str, int]] | None = None
    anything: Any = None
    either: int | str = 0
    word: Literal["a", "no", "010"] = "a"
    texts: list[str] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)
    derived: int = field(init=False, default=0)


@dataclass
class Config:
    train: Train = field(default_factory=Train)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    ft: FaultToleranceConfig | None = None


def overridden(*overrides):
    config = Config()
    apply_overrides(config, overrides)
    return config


def given(override: str) -> Any:
    """The field of `train` that an override sets."""
    return getattr(overridden(override).train, override.partition("=")[0].split(".")[1])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.iterations=5", 5), ("train.iterations=-7", -7), ("train.iterations=+7", 7), ("train.iterations=1_000", 1000),
        ("train.iterations='12'", 12),
        ("train.rate=3", 3.0), ("train.rate=1.", 1.0), ("train.rate=.5", 0.5),
        ("train.on=true", True), ("train.on=no", False), ("train.on=1", True),
        ("train.name='null'", "null"), ("train.name=12:30", "12:30"), ("train.name=", ""), ("train.note=null", None),
        ("train.name='a #b'", "a #b"), ('train.name="a\\tb"', "a\tb"), ("train.name='a\nb'", "a\nb"),
        ('train.name="a\nb"', "a\nb"), ("train.name='it''s'", "it's"), ("train.name='010'", "010"),
        ("train.name=${oc.env:NAME_OF_A_TEST}", "x #y"),
        ("train.folder=/a/b", Path("/a/b")),
        ("train.style=cosine", "cosine"), ("train.word=no", "no"), ("train.word=010", "010"),
        ("train.color=blue", Color.blue), ("train.color=Color.blue", Color.blue), ("train.color=b", Color.blue),
        ("train.shape=[3,4]", (3, 4)), ("train.sizes=[1,-2]", [1, -2]), ("train.frequency=[0,1]", [0, 1]),
        ("train.decay=0.5", 0.5),
        ("train.texts=[007,a,no,1e3,'x y']", ["007", "a", "no", "1e3", "x y"]),
        ("train.pairs={a: 010, b: no}", {"a": "010", "b": "no"}),
        ("train.labels={a: 1, b: 2}", {"a": 1, "b": 2}), ("train.nested.a.b=1", {"a": {"b": 1}}),
        (f"train.anything={'[' * 32}{']' * 32}", functools.reduce(lambda inner, _: [inner], range(31), [])),
    ],
)  # fmt: skip
def test_a_value_takes_the_type_its_field_declares(override, value, monkeypatch):
    monkeypatch.setenv("NAME_OF_A_TEST", "x #y")
    got = given(override)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argument", "key", "value", "prefix"),
    [
        ("'++train.rate = 1e-3'", "train.rate", 0.001, "++"),
        ("+train.note=a=b", "train.note", "a=b", "+"),
        ("train.name=${oc.env:UNSET_HERE}/x", "train.name", "${oc.env:UNSET_HERE}/x", ""),
    ],
)
def test_an_override_is_parsed_without_a_configuration(argument, key, value, prefix):
    override = parse_override(argument)
    assert (override.key, override.value, override.prefix) == (key, value, prefix)


@pytest.mark.parametrize("argument", ["", "--recipe", "gpt_tiny", "=3", "--config=a.yaml", "~train.name"])
def test_other_arguments_are_not_overrides(argument):
    assert parse_override(argument) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "null"), (0.5, "0.5"), ([0, 1], "[0,1]"), (["a", "--b=c,d"], '[a,"--b=c,d"]'), ("all", "all")],
)
def test_a_formatted_override_is_read_back(value, text):
    override = format_override("train.anything", value)
    assert override == f"train.anything={text}"
    assert overridden(override).train.anything == value


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.iterations=5", "train.iterations=7", "", "''"], {"train": {"iterations": 7}}),
        (["train.labels={a: 1}", "train.labels.b=2"], {"train": {"labels": {"a": 1, "b": 2}}}),
        (["ft.enable_ft_package=true"], {"ft": {"enable_ft_package": True}}),
        (["ft.enable_ft_package=true", "ft=null"], {"ft": None}),
        (["profiling={use_pytorch_profiler: true}"], {"profiling": {"use_pytorch_profiler": True}}),
        (["profiling.output_dir=${oc.env:SCRATCH}/run"], {"profiling": {"output_dir": "/scratch/run"}}),
        # Quotes that a launcher left around an argument are taken off.
        (["'profiling.profile_ranks=[0,1]'"], {"profiling": {"profile_ranks": [0, 1]}}),
    ],
)
def test_settings_are_made_merged_and_replaced_in_order(overrides, expected, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    config, default = Config(), Config()
    section = config.train
    apply_overrides(config, overrides)
    assert config.train is section
    sections = {"train": Train, "profiling": ProfilingConfig, "ft": FaultToleranceConfig}
    for name, fields in expected.items():
        setattr(default, name, fields and sections[name](**fields))
    assert config == default


def test_shell_quoted_quotes_come_back_as_they_were():
    assert unquote("'train.note='\"'\"'a b'\"'\"''") == "train.note='a b'"
    assert unquote("train.note='a b'") == "train.note='a b'"
    assert unquote("'unbalanced") == "'unbalanced"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("profiling.profile_step_strt=1", "profiling has no field 'profile_step_strt'.*Type profiling.profile_step_start=1"),
        ("profilling.profile_step_start=1", "Type profiling.profile_step_start=1"),
        ("style=cosine", "Type train.style=cosine"),
        ("profiling.iterations=1", "Type train.iterations=1"),
        ("train.zzz=1", "Fields of train: iterations, rate"),
        ("train.derived=1", "train has no field 'derived'"),
        ("train.iterations.x=1", "it is a value.*not a section"),
        ("train.iterations=1e3", "expected int.*Type for example train.iterations=1000"),
        ("train.iterations=true", "expected int, got true .bool"),
        ("train.iterations=null", "expected int, got null"),
        ("train.name=null", "expected str, got null"),
        ("train.style=cosin", "one of linear, cosine.*Type for example train.style=cosine"),
        ("train.function=print", "cannot be set by an override.*Python code"),
        ("train.shape=[3]", "tuple.int, int.*train.shape=.10,10"),
        ("train.sizes=[a]", "list.int. or null"),
        ("train.labels.a=x", "train.labels.a=x has the wrong type; expected int"),
        ("profiling.profile_ranks=0", r"expected list\[int\] or str, got 0 .*profile_ranks=\[0\]"),
        ("profiling.profile_ranks=[0,", "cannot be parsed"),
        (f"train.sizes={'[' * 33}{']' * 33}", "nested more than 32 deep"),
        ("train=null", "train is a section, and cannot be null"),
        ("train.name=${nothing}", "cannot be resolved"),
        ("profiling", "is not of the form name=value"),
        ("+train.iterations=1", "adds a setting.*Leave the . out: train.iterations=1"),
        ("~train.iterations", "removes a setting"),
    ],
)
def test_what_cannot_be_set_is_refused_with_what_to_type_instead(override, message):
    with pytest.raises(ProfilingConfigError, match=message) as caught:
        overridden(override)
    assert "\n" not in str(caught.value)


def test_one_wrong_setting_leaves_all_of_them_undone():
    config = Config()
    with pytest.raises(ProfilingConfigError):
        apply_overrides(config, ["train.iterations=5", "ft.enable_ft_package=true", "train.labels.a=1", "train.rate=x"])
    assert config == Config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "train:\n  iterations: 5\n  rate: 1e-3\n  sizes: [1, 2]\nft:\n  enable_ft_package: true\n",
            Config(Train(iterations=5, rate=0.001, sizes=[1, 2]), ft=FaultToleranceConfig(enable_ft_package=True)),
        ),
        ("# nothing yet\n", Config()),
        ("train: [", "is not valid YAML.*line"),
        ("- train\n", "holds a list"),
        ("5\n", "cannot be read; it holds a single value"),
        ("a: 1\na: 2\n", "is not valid YAML.*duplicate"),
        ("train:\n  iterations: many\n", "run.yaml: train.iterations=many.*expected int"),
        (b"\xff\xfe\x00train", r"run\.yaml"),
    ],
)
def test_a_yaml_file_applies_like_overrides_or_is_refused_and_named(tmp_path, text, expected):
    file, config = tmp_path / "run.yaml", Config()
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    if isinstance(expected, Config):
        apply_yaml(config, file)
        assert config == expected
        return
    with pytest.raises(ProfilingConfigError, match=expected):
        apply_yaml(config, file)
    assert config == Config()


def test_a_path_without_a_yaml_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, message in (("no.yaml", f"no.yaml does not exist; the working directory is {tmp_path}"), (".", "cannot be read")):
        with pytest.raises(ProfilingConfigError, match=message):
            load_yaml(path)


# -- text that YAML alone reads as something else ------------------------------------------------------------------------

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
    for name in ("name", "note"):
        assert given(f"train.{name}={text}") == text
    assert given(f"train.pairs.key={text}") == {"key": text}


@pytest.mark.parametrize("name", ["iterations", "rate", "on", "sizes", "labels.key"])
@pytest.mark.parametrize("text", [*CHANGED, *OTHER_NUMBERS, "1e400", "{}", "１２"])
def test_a_number_in_another_notation_is_refused_with_one_short_error(name, text):
    for typed in (text, f"[{text}]") if name == "sizes" else (text,):
        with pytest.raises(ProfilingConfigError) as refused:
            given(f"train.{name}={typed}")
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("text", ["010", "1:1", "12 #x", "a #b", "[a"])
def test_a_field_for_either_takes_no_guess(text):
    with pytest.raises(ProfilingConfigError):
        given(f"train.either={text}")
    assert given(f"train.either='{text}'") == text


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000 + "]" * 3000, "{a: " * 3000 + "}" * 3000, "[" * 40 + "]" * 40, "[&a [x,x],*a,*a]",
        "{<<: {a: b}}", "{? [a] : b}", "[" + "9" * 5000 + "]", "[!!int 3]", "[a\nb]", "${" * 2000 + "}" * 2000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["iterations", "sizes", "labels", "texts.x"])
def test_what_grows_beyond_all_bounds_is_one_error(text, name):
    with pytest.raises(ProfilingConfigError) as refused:
        given(f"train.{name}={text}")
    assert len(str(refused.value)) < 1000

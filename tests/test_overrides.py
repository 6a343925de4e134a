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


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("train.iterations=5", "iterations", 5),
        ("train.rate=3", "rate", 3.0),
        ("train.on=true", "on", True),
        ("train.name='null'", "name", "null"),
        ("train.name=12:30", "name", "12:30"),
        ("train.name=", "name", ""),
        ("train.note=null", "note", None),
        ("train.folder=/a/b", "folder", Path("/a/b")),
        ("train.style=cosine", "style", "cosine"),
        ("train.color=blue", "color", Color.blue),
        ("train.color=Color.blue", "color", Color.blue),
        ("train.color=b", "color", Color.blue),
        ("train.shape=[3,4]", "shape", (3, 4)),
        ("train.sizes=[1,2]", "sizes", [1, 2]),
        ("train.frequency=[0,1]", "frequency", [0, 1]),
        ("train.decay=0.5", "decay", 0.5),
        ("train.labels={a: 1, b: 2}", "labels", {"a": 1, "b": 2}),
        ("train.nested.a.b=1", "nested", {"a": {"b": 1}}),
        (f"train.anything={'[' * 32}{']' * 32}", "anything", functools.reduce(lambda inner, _: [inner], range(31), [])),
    ],
)
def test_a_value_takes_the_type_its_field_declares(override, name, value):
    got = getattr(overridden(override).train, name)
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

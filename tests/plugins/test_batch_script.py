"""Values written into a batch script come out of a shell as they went in, whatever NeMo-Run replaces between.

tests/hostile/test_quoting.py runs whole scripts.
"""

import shlex

import pytest

from bridge_profiling.plugins.batch_script import arrives_unchanged, exports, names_another_path

VALUES = [
    "",
    "two  words ",
    "it's",
    "'",
    "''nemo_run",
    '{"a": [1, "b\'c"], "$ref": "#/x"}',
    "$HOME `id` $(id) \\ * ~ ! | & ; # %j ${head_node_ip_var} $$",
    "one\ntwo\n",
    "/home/me/nemo_run/data:/nemo_runs:x/nemo_run",
    "it's in '/home/me/nemo_run'",
    "/nemo_run2",
    "ünï/nemo_run",
]

UNQUOTED = ["/a/b:c@d%+,=-_1", "/nemo_run/code:/x", ""]


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        *((value, value) for value in VALUES),
        ("/nemo_run", "/jobs/1"),
        ("/nemo_run/code:/nemo_run/x y", "/jobs/1/code:/jobs/1/x y"),
        ('{"dir": "/nemo_run/a", "data": "/home/nemo_run/b"}', '{"dir": "/jobs/1/a", "data": "/home/nemo_run/b"}'),
    ],
)
def test_in_a_shell_only_the_placeholder_itself_changes(value, arrives):
    """It becomes the job's directory, by NeMo-Run's replacement; names keep their case."""
    (line,) = exports({"Name": value})
    assert shlex.split(line.replace("/nemo_run", "/jobs/1")) == ["export", f"Name={arrives}"]


def test_quotes_are_for_values_that_would_not_arrive_without():
    assert all(arrives_unchanged("A", value) for value in UNQUOTED)
    assert not any(arrives_unchanged("A", value) for value in VALUES if value)


def test_only_a_path_of_its_own_is_the_placeholder():
    assert not any(map(names_another_path, ("/nemo_run", "/nemo_run/x", "--dir=/nemo_run/x", "a:/nemo_run:b")))
    assert all(map(names_another_path, ("/a/nemo_run", "/nemo_run2", "/nemo_run.bak", "a/nemo_run/b", "/nemo_run:/b/nemo_run")))

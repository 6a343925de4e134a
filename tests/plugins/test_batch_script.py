"""Values written into a batch script come out of a real shell as they went in, whatever NeMo-Run replaces between."""

import subprocess

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


def _in_the_job(lines: list[str], job_dir: str = "/jobs/1") -> dict[str, str]:
    """The environment after these lines of a script in which NeMo-Run replaced its placeholder, as it does."""
    script = "\n".join([*lines, "env -0"]).replace("/nemo_run", job_dir)
    out = subprocess.run(["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True).stdout
    return dict(entry.split("=", 1) for entry in out.decode().split("\0") if entry)


@pytest.mark.integration
def test_in_a_shell_only_the_placeholder_itself_changes():
    """Values arrive as they are, and names in their case; the placeholder becomes the job's directory."""
    placeholders = {
        "/nemo_run": "/jobs/1",
        "/nemo_run/code:/nemo_run/x y": "/jobs/1/code:/jobs/1/x y",
        '{"dir": "/nemo_run/a", "data": "/home/nemo_run/b"}': '{"dir": "/jobs/1/a", "data": "/home/nemo_run/b"}',
    }
    expected = {value: value for value in VALUES} | placeholders
    names = {f"Name_{index}": value for index, value in enumerate(expected)}
    lines = exports(names)
    # What arrives unquoted is left to NeMo-Run.
    unquoted = {f"unquoted_{index}": value for index, value in enumerate(UNQUOTED)}
    seen = _in_the_job([*lines, *(f"export {name}={value}" for name, value in unquoted.items())])
    assert {name: seen[name] for name in names} == {name: expected[value] for name, value in names.items()}
    placed = {name: value.replace("/nemo_run", "/jobs/1") for name, value in unquoted.items()}
    assert {name: seen[name] for name in unquoted} == placed


def test_quotes_are_for_values_that_would_not_arrive_without():
    assert all(arrives_unchanged("A", value) for value in UNQUOTED)
    assert not any(arrives_unchanged("A", value) for value in VALUES if value)


def test_only_a_path_of_its_own_is_the_placeholder():
    assert not any(map(names_another_path, ("/nemo_run", "/nemo_run/x", "--dir=/nemo_run/x", "a:/nemo_run:b")))
    assert all(map(names_another_path, ("/a/nemo_run", "/nemo_run2", "/nemo_run.bak", "a/nemo_run/b", "/nemo_run:/b/nemo_run")))

"""Lines of a job's log that are left out where it is shown, and all that look like them and are not."""

import sys

import pytest

from launch.shown_log import without_the_profilers_own_lines

MARK = "USDT:2026-11-23 09:03:51 1990:1990 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
NO_DRIVER = "ERROR:2026-11-23 09:03:51 1990:1990 DeviceProperties.cpp:56] gpuGetDeviceCount failed with code 35\n"
GREEN = "\x1b[32mprofile/0\x1b[0m "


@pytest.mark.parametrize("prefix", ["", "profile/0 ", GREEN, f"{GREEN}[default1]:", "[default0]:"])
@pytest.mark.parametrize("line", [MARK, MARK.replace("start", "stop"), NO_DRIVER])
def test_a_line_of_the_profilers_own_is_left_out(capsys, prefix, line):
    with without_the_profilers_own_lines():
        print(prefix + line, end="", file=sys.stdout)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "line",
    [
        "profile/0 [default0]:iteration  4/12 | loss 4.418626\n",
        "profile/0 [default0]:loss 4.4" + MARK,
        MARK.rstrip() + " loss 4.4\n",
        MARK + "loss 4.4\n",
        "\n",
        NO_DRIVER.replace("35", "2"),
        "profile/0 [default0]:ERROR:2026-11-23 09:03:51 1:1 output_json.cpp:468] Failed to open the trace file\n",
        "what USDT: profiler_start means\n",
    ],
)
def test_every_other_line_is_shown(capsys, line):
    with without_the_profilers_own_lines():
        print(line, end="")
        assert sys.stdout.isatty() is False
    print("and after", end="")
    assert capsys.readouterr().out == line + "and after"

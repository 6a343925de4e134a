"""Lines of a job's log that are left out where it is shown, and all that look like them and are not."""

import sys

from launch.shown_log import without_the_profilers_own_lines

MARK = "USDT:2026-11-23 09:03:51 1990:1990 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
NO_DRIVER = "ERROR:2026-11-23 09:03:51 1990:1990 DeviceProperties.cpp:56] gpuGetDeviceCount failed with code 35\n"
STOPPED = MARK.replace("start", "stop")


HIDDEN = (MARK, "profile/0 " + NO_DRIVER, "\x1b[32mprofile/0\x1b[0m [default1]:" + STOPPED)
SHOWN = (
    NO_DRIVER.replace("35", "2"),
    "profile/0 [default0]:ERROR:2026-11-23 09:03:51 1:1 output_json.cpp:468] Failed to open the trace file\n",
)


def test_lines_of_the_profilers_own_are_left_out_and_no_others(capsys):
    with without_the_profilers_own_lines():
        for line in (*HIDDEN, *SHOWN):
            print(line, end="")
        assert sys.stdout.isatty() is False
    print("and after", end="")
    assert capsys.readouterr().out == "".join(SHOWN) + "and after"

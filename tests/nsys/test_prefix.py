"""The script around NeMo-Run's nsys: the application runs once, in whatever way nsys fails."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from bridge_profiling.common.processes import find_by_argument
from bridge_profiling.nsys.channel import REFUSED_VARIABLE
from bridge_profiling.nsys.command import prefix_command
from tests.system.jobs import wait_until

#: Knows `--output`; otherwise it does at each start what the next line of the file `plan` says.
NSYS = """\
#!/bin/bash
case $* in *--help*) echo "  --output=<file>"; exit 0 ;; esac
number=$(wc -l < "$PLACE/started")
echo start >> "$PLACE/started"
behaviour=$(sed -n "$((number + 1))p" "$PLACE/plan")
while [ "$1" != bash ] && [ "$1" != "$PYTHON" ]; do shift; done
case $behaviour in
  works) "$@" & trap 'kill -TERM $!' TERM; wait $!; wait $!; exit $? ;;
  lost) exit 1 ;;
  late) { sleep 0.8; "$@"; } & exit 1 ;;
  hangs) sleep 60 & trap 'kill $!; exit 143' TERM; wait ;;
  leaves)
    (exec -a "$PLACE" "$PYTHON" -c 'import time; time.sleep(60)' --start-agent --session-name "profile-$$") &
    until grep -qs start-agent /proc/$!/cmdline; do sleep 0.05; done
    exit 1 ;;
  dies) "$@" & while [ ! -s "$PLACE/ran" ]; do sleep 0.05; done; exit 0 ;;
esac
"""

#: Says with which variable it ran and that it ended, after a signal that it has been told of.
APPLICATION = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
with open("ran", "a") as file:
    print(os.environ.get("{REFUSED_VARIABLE}"), *sys.argv[1:], file=file)
time.sleep(int(sys.argv[1]))
open("ended", "a").close()
sys.exit(5)
"""


pytestmark = pytest.mark.integration


@pytest.fixture
def prefixed(tmp_path):
    """Starts an application of so many seconds under an nsys that behaves as planned, start by start."""
    (tmp_path / "nsys").write_text(NSYS)
    (tmp_path / "nsys").chmod(0o755)
    (tmp_path / "application.py").write_text(APPLICATION)
    (tmp_path / "started").touch()

    def start(*plan: str, seconds: int = 0, **more: str) -> subprocess.Popen:
        (tmp_path / "plan").write_text("\n".join(plan))
        command = ["bash", *prefix_command(["profile", "--output", "reports/mine"], gpu_metrics="")]
        command += [sys.executable, "application.py", str(seconds), "a  b", ""]
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PLACE": str(tmp_path), "PYTHON": sys.executable}
        environ |= {"TMPDIR": str(tmp_path)} | more
        return subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.parametrize(
    ("plan", "code", "starts", "reason", "said"),
    [
        (["works"], 5, 1, "None", []),
        (["lost", "lost", "works"], 5, 3, "None", ["start 1 of 3", "start 2 of 3"]),
        (["lost"] * 3, 5, 3, "nsys ended 3 times before the application ran, with code 1", ["runs without nsys"]),
        (["late", "works"], 5, 2, "None", ["start 1 of 3"]),
        # What the application ended with is lost with its nsys.
        (["dies"], 1, 1, "None", ["goes on without it"]),
    ],
    ids=["works", "lost twice", "always lost", "starts the application late", "lost in the middle"],
)
def test_the_application_runs_once_whatever_becomes_of_its_nsys(prefixed, tmp_path, plan, code, starts, reason, said):
    process = prefixed(*plan, seconds=1)
    heard = process.communicate(timeout=60)[1]
    assert process.returncode == code, heard
    assert (tmp_path / "ended").exists(), "the job ended before its application"
    assert (tmp_path / "started").read_text().count("start") == starts
    assert (tmp_path / "ran").read_text() == f"{reason} 1 a  b\n"
    for part in said:
        assert part in heard
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.parametrize(("plan", "code"), [("works", 9), ("dies", 1)])
def test_sigterm_reaches_the_application_with_or_without_its_nsys(prefixed, tmp_path, plan, code):
    process = prefixed(plan, seconds=30)
    wait_until(lambda: (tmp_path / "ran").exists(), 20)
    if plan == "dies":
        assert "goes on without it" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == code
    assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize(("plan", "starts"), [(["leaves", "works"], 2), (["leaves"] * 3, 3)])
def test_an_agent_that_nsys_leaves_is_ended(prefixed, tmp_path, plan, starts):
    assert prefixed(*plan).wait(timeout=60) == 5
    assert len((tmp_path / "started").read_text().splitlines()) == starts
    assert not list(find_by_argument(str(tmp_path)))


def test_an_nsys_that_was_told_to_end_before_the_application_ran_is_not_started_again(prefixed, tmp_path):
    process = prefixed("hangs", "works")
    wait_until((tmp_path / "started").read_text, 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert not (tmp_path / "ran").exists()
    assert not list(tmp_path.glob("tmp.*"))


def test_a_job_that_is_told_to_end_while_another_starts_its_nsys_starts_none(prefixed, tmp_path):
    place = tmp_path / f"bridge_profiling-{os.getuid()}"
    place.mkdir(mode=0o700)
    with open(place / "nsys.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = prefixed("works")
        wait_until(lambda: any(tmp_path.glob("tmp.*/1")), 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143
    assert not (tmp_path / "started").read_text()


def test_without_a_temporary_directory_nsys_is_started_once(prefixed, tmp_path):
    process = prefixed("works", TMPDIR="/nowhere")
    assert process.wait(timeout=20) == 5
    assert (tmp_path / "ran").read_text() == "None 0 a  b\n"

"""The client: what it requests from a job, and what it says about one that does not respond."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.capture.control.client import find_requests, trigger
from bridge_profiling.capture.control.protocol import RequestDirectory, parse_request
from bridge_profiling.processes import pid_space
from tests.capture.conftest import raising
from tests.capture.control.conftest import STATUS, requested

#: A process id that the system gives to no process.
NO_PROCESS = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1


def published(root, **status):
    directory = RequestDirectory(root)
    directory.write("progress.json", replace(STATUS, **status))
    return directory


def pending_id(directory):
    text = directory.pending()
    return None if text is None else parse_request(text).id


def test_a_directory_without_a_job_is_refused(tmp_path):
    with pytest.raises(ProfilingConfigError, match=r"no job listens in .*Name the output directory"):
        find_requests(tmp_path)
    with pytest.raises(ProfilingConfigError, match="does not exist"):
        find_requests(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("runs", "age", "message"),
    [
        (False, 0, f"the job was killed: its rank 0, process {NO_PROCESS}, is not running"),
        (True, 300, "does not respond: its last status is 300 s old"),
        (True, 0, r"did not read the request .*withdrawn"),
    ],
)
def test_a_job_that_was_killed_is_distinguished_from_one_that_does_not_respond(tmp_path, runs, age, message):
    directory = published(tmp_path, pid=os.getpid() if runs else NO_PROCESS, pid_space=pid_space())
    os.utime(directory.path / "progress.json", (time.time() - age,) * 2)
    with pytest.raises(ProfilingConfigError, match=message):
        trigger(directory, requested(), wait=0.1)
    assert [path.name for path in directory.path.iterdir()] == ["progress.json"]


def test_a_request_never_replaces_another(tmp_path):
    """This process id means nothing where processes are counted anew, as in a container that has its machine's name."""
    directory = published(tmp_path, host=os.uname().nodename, pid=NO_PROCESS, pid_space="another")
    first = trigger(directory, requested(), wait=0)
    assert first.accepted is None
    with pytest.raises(ProfilingConfigError, match="another request is open: the job has not read it yet"):
        trigger(directory, requested(), wait=0)
    assert pending_id(directory) == first.request.id


@pytest.mark.parametrize(("taken", "said"), [(False, "is withdrawn"), (True, "the job already has the request")])
def test_ctrl_c_says_what_happens_to_the_request(tmp_path, monkeypatch, taken, said):
    directory = published(tmp_path)

    def interrupt(self, id_):
        if taken:
            directory.take()
            directory.submit(requested(id="anothers"))
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestDirectory, "refusal", interrupt)
    with pytest.raises(KeyboardInterrupt, match=said):
        trigger(directory, requested())
    assert pending_id(directory) == ("anothers" if taken else None)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(RequestDirectory, "submit", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(ProfilingConfigError, match=r"cannot be written; .*Trigger as the user who runs the job"):
        trigger(published(tmp_path), requested(), wait=0)

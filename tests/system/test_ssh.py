"""Captures come from another machine through a real SSH server, with NeMo-Run's own tunnel: the server is this machine's."""

import getpass
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.compare.compared_runs import WrittenRun
from tests.ports import free_port
from tests.system import debian
from tests.system.jobs import ROOT, cli, wait_until

run = pytest.importorskip("nemo_run")

from bridge_profiling.plugins import PyTorchProfilerPlugin  # noqa: E402
from tests.batch_scripts import batch_script  # noqa: E402

pytestmark = [pytest.mark.system, pytest.mark.needs("ssh")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The port of an SSH server on the loopback interface, and a key that opens it; both are gone afterwards."""
    debian.install({"sshd": "openssh-server", "ssh-keygen": "openssh-client"})
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_text((folder / "key.pub").read_text())
    port = free_port()
    Path("/run/sshd").mkdir(exist_ok=True)  # what a service's start would make
    options = f"""
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
PasswordAuthentication no
UsePAM no
Subsystem sftp internal-sftp
"""
    (folder / "sshd_config").write_text(options)
    process = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", str(folder / "sshd_config")])
    command = ["ssh-keyscan", "-p", str(port), "127.0.0.1"]
    wait_until(lambda: process.poll() is not None or subprocess.run(command, capture_output=True).stdout, 60)
    yield port, folder / "key"
    process.terminate()
    assert process.wait(timeout=60) == 0


def test_an_experiments_captures_come_through_its_tunnel(server, tmp_path):
    port, key = server
    far, home = tmp_path / "far", tmp_path / "home"
    environment = os.environ | {"NEMORUN_HOME": str(home), "PYTHONPATH": str(ROOT)}
    tunnel = run.SSHTunnel(host="127.0.0.1", user=getpass.getuser(), port=port, identity=str(key), job_dir=str(far))
    executor = run.SlurmExecutor(account="team", tunnel=tunnel)
    plugins = [PyTorchProfilerPlugin(profile_step_start=10, profile_step_end=13)]
    batch_script(home, executor, run.Script("train.py", entrypoint="python"), plugins)
    (experiment,) = (home / "experiments" / "golden").iterdir()
    captures = far / "golden" / experiment.name / "train" / "profiles"
    WrittenRun(iterations=3, ranks=2, unprofiled_ms=[5.0, 5.1, 5.2]).write(captures)
    (captures / "checkpoint.pt").write_bytes(b"0" * 100_000)

    def analyze() -> dict:
        return json.loads(cli("analyze", experiment.name, "--json", "--fetch", cwd=tmp_path, env=environment).stdout)

    found = analyze()
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert [row["iteration"] for row in found["ranks"][0]["iterations"]] == [10, 11, 12]
    here = experiment / "train" / "profiles"
    traces = sorted(here.rglob("*.pt.trace.json.gz"))
    assert [path.name for path in traces] == ["rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz"]
    assert not list(here.rglob("*.pt"))
    written = [path.stat().st_ino for path in traces]
    assert analyze() == found
    assert [path.stat().st_ino for path in traces] == written, "what is here was copied again"

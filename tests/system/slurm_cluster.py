"""A real Slurm on one machine: two virtual nodes on the loopback interface, with accounting.

Everything it writes lies in one temporary directory; a Slurm that the machine may already be part of is neither read nor
changed, because SLURM_CONF and the sockets point elsewhere. Installs nothing; never signals a process it did not start.
"""

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.common.processes import environment_of, find_by_variable
from tests.ports import free_ports
from tests.system.jobs import end_tree, ended_well, wait_until

PACKAGES = ("slurm-wlm", "munge", "slurmdbd", "mariadb-server")

#: Cores that each virtual node claims to have; jobs of these tests wait for each other on two real ones.
_CPUS = 8
_TIMEOUT_S = 60


@dataclass
class SlurmCluster:
    """A running cluster.

    Attributes:
        directory: its state, its logs and `slurm.conf`.
        account: an account that jobs may be submitted under.
        partition: the partition that holds both nodes.
        nodes: the nodes' names.
    """

    directory: Path
    account: str = "dev"
    partition: str = "batch"
    nodes: tuple[str, ...] = ("n1", "n2")

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach this cluster, over its other environment."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands against this cluster, which must succeed; its standard output, stripped."""
        return ended_well(command, env=os.environ | self.environment, timeout=60).stdout.strip()

    def job_ids(self) -> list[str]:
        """Jobs that wait or run, oldest first."""
        return self.run("squeue", "--noheader", "--format=%i", "--sort=i").split()

    def state(self, job_id: str) -> str:
        """A job's state in the accounting, without what follows it: COMPLETED, CANCELLED, TIMEOUT, …"""
        rows = self.run("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", "--jobs", job_id)
        return rows.split()[0] if rows else ""

    def logs(self, lines: int = 30) -> str:
        """The last lines of every server's log."""
        logs = sorted((self.directory / "log").iterdir())
        tails = [[f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-lines:]] for log in logs]
        return "\n".join(line for tail in tails for line in tail)


@contextlib.contextmanager
def started() -> Iterator[SlurmCluster]:
    """Start the servers, wait until both nodes take jobs, and stop them however the block is left."""
    # Not in the checkout's own temporary directory: a socket's path may have 107 characters.
    cluster = SlurmCluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, cluster.directory, ignore_errors=True)
        _start(cluster, stack)
        stack.callback(_end_jobs, cluster)
        yield cluster


def _start(cluster: SlurmCluster, stack: contextlib.ExitStack) -> None:
    directory = cluster.directory
    directory.chmod(0o755)  # munged wants its socket's directory to be open to all
    for name in ("log", "controller", "database", *(f"spool/{node}" for node in cluster.nodes)):
        (directory / name).mkdir(parents=True)
    _write_configuration(cluster)

    serve = functools.partial(_serve, cluster, stack)
    munge_socket, database_socket = f"--socket={directory}/munge.socket", f"--socket={directory}/database.socket"
    # --force: it runs as root and in a directory for temporary files, which it would rather not.
    munged = ["munged", "--foreground", "--force", "--num-threads=4", munge_socket]
    files = {"key-file": "munge.key", "seed-file": "munge.seed", "pid-file": "munged.pid", "log-file": "log/munged.log"}
    munged += [f"--{option}={directory}/{name}" for option, name in files.items()]
    serve("munged", munged, ready=["munge", "--no-input", munge_socket])
    as_root = ["--no-defaults", "--user=root"]
    data = [*as_root, f"--datadir={directory}/database"]
    ended_well(["mariadb-install-db", *data, "--skip-test-db", "--auth-root-authentication-method=normal"])
    client = ["mariadb", *as_root, database_socket]
    server = ["mariadbd", *data, database_socket, "--skip-networking", "--innodb-buffer-pool-size=64M"]
    serve("mariadbd", [*server, f"--pid-file={directory}/mariadbd.pid"], ready=[*client, "--execute=select 1"])
    ended_well([*client, "--execute=create database slurm_acct_db"])
    socket_of_database = {"MYSQL_UNIX_PORT": f"{directory}/database.socket"}
    serve("slurmdbd", ["slurmdbd", "-D"], ready=["sacctmgr", "--noheader", "show", "cluster"], environment=socket_of_database)
    account = cluster.account
    for what in ("cluster tests", f"account {account} Cluster=tests", f"user root Account={account}"):
        cluster.run("sacctmgr", "--immediate", "add", *what.split())
    serve("slurmctld", ["slurmctld", "-D"], ready=["scontrol", "ping"])
    for node in cluster.nodes:
        serve(f"slurmd-{node}", ["slurmd", "-D", "-N", node])
    idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
    wait_until(lambda: set(cluster.run(*idle).split()) == set(cluster.nodes), _TIMEOUT_S, cluster.logs)


def _serve(
    cluster: SlurmCluster,
    stack: contextlib.ExitStack,
    name: str,
    command: Sequence[str],
    ready: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> None:
    """Start a server in the foreground with its output in a log, to be stopped with the stack; wait until it answers."""
    variables = os.environ | cluster.environment | (environment or {})
    with open(cluster.directory / "log" / f"{name}.out", "wb") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        # Ctrl-C is for the tests; the servers are stopped in their order afterwards.
        process = subprocess.Popen(command, env=variables, start_new_session=True, **streams)
    stack.callback(_stop, process)

    def answers() -> bool:
        assert process.poll() is None, f"{name} ended with {process.returncode}: {cluster.logs()}"
        return not ready or subprocess.run(ready, env=variables, capture_output=True).returncode == 0

    wait_until(answers, _TIMEOUT_S, cluster.logs)


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    end_tree(process)


def _write_configuration(cluster: SlurmCluster) -> None:
    directory, host = cluster.directory, socket.gethostname().partition(".")[0]
    controller_port, accounting_port, *node_ports = free_ports(2 + len(cluster.nodes))
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    common = f"AuthType=auth/munge\nAuthInfo=socket={directory / 'munge.socket'}\nSlurmUser=root\n"
    accounting = directory / "slurmdbd.conf"
    accounting.write_text(
        f"""{common}
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={accounting_port}
StorageType=accounting_storage/mysql
StorageUser=root
PidFile={directory}/slurmdbd.pid
"""
    )
    accounting.chmod(0o600)  # slurmdbd refuses one that others may read
    nodes = "\n".join(
        # One address for both: what tells them apart is the port.
        f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} RealMemory=8000 State=UNKNOWN"
        for node, port in zip(cluster.nodes, node_ports, strict=True)
    )
    # proctrack/linuxproc and task/none: a container has no cgroups of its own. config_overrides: take the nodes' sizes for
    # true, whatever the machine has. KillWait: with ten times as much to do as there are processors, 30 s are too few to write
    # in. What AccountingStoragePass calls a password is, for munge, its socket.
    (directory / "slurm.conf").write_text(
        f"""{common}
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
StateSaveLocation={directory}/controller
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
PlugStackConfig={directory}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1
ReturnToService=2
KillWait=120
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting_port}
AccountingStoragePass={directory}/munge.socket
{nodes}
PartitionName={cluster.partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
    (directory / "plugstack.conf").touch()


def _end_jobs(cluster: SlurmCluster) -> None:
    """No process of a job may outlive the cluster, whatever a test left behind."""
    for options in (["--signal=KILL", "--full"], []) if (jobs := cluster.job_ids()) else ():
        # One that has ended by now is an error to it.
        subprocess.run(["scancel", *options, *jobs], env=os.environ | cluster.environment, capture_output=True)
    wait_until(lambda: not cluster.job_ids(), _TIMEOUT_S, cluster.logs)
    # With cgroups, Slurm also ends what has left the process tree of its job, as an agent of nsys does.
    for pid in find_by_variable("SLURM_CONF", cluster.environment["SLURM_CONF"]):
        if "SLURM_JOB_ID" in environment_of(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

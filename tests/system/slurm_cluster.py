"""A real Slurm on one machine: two virtual nodes on the loopback interface, with accounting.

Everything it writes lies in one temporary directory; a Slurm that the machine may already be part of is neither read nor
changed, because SLURM_CONF and the sockets point elsewhere. Installs nothing; never signals a process it did not start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports
from tests.system.jobs import end_tree

PACKAGES = ("slurm-wlm", "munge", "slurmdbd", "mariadb-server")

#: Cores that each virtual node claims to have; jobs of these tests wait for each other on two real ones.
_CPUS = 8
_TIMEOUT_S = 60


class SlurmError(RuntimeError):
    """A server that did not start, or a command of Slurm's that failed."""


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
        """Run one of Slurm's commands against this cluster; its standard output, stripped.

        Raises:
            SlurmError: it failed; holds what it printed.
        """
        done = subprocess.run(command, env=os.environ | self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise SlurmError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

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
    """Start the servers, wait until both nodes take jobs, and stop them however the block is left.

    Raises:
        SlurmError: a server did not come up; holds the servers' logs.
    """
    # Not in the checkout's own temporary directory: a socket's path may have 107 characters.
    cluster = SlurmCluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, cluster.directory, ignore_errors=True)
        try:
            _start(cluster, stack)
        except SlurmError as error:
            raise SlurmError(f"{error}\n{cluster.logs()}") from None
        stack.callback(_end_jobs, cluster)
        yield cluster


def _start(cluster: SlurmCluster, stack: contextlib.ExitStack) -> None:
    directory = cluster.directory
    directory.chmod(0o755)  # munged wants its socket's directory to be open to all
    for name in ("log", "controller", "database", *(f"spool/{node}" for node in cluster.nodes)):
        (directory / name).mkdir(parents=True)
    _write_configuration(cluster)

    serve = functools.partial(_serve, cluster, stack)
    munge_socket, database_socket = directory / "munge.socket", directory / "database.socket"
    serve(
        "munged",
        # --force: it runs as root and in a directory for temporary files, which it would rather not.
        ["munged", "--foreground", "--force", "--num-threads=4"],
        {"key-file": directory / "munge.key", "seed-file": directory / "munge.seed", "socket": munge_socket}
        | {"pid-file": directory / "munged.pid", "log-file": directory / "log" / "munged.log"},
        ready=["munge", "--no-input", f"--socket={munge_socket}"],
    )
    data = f"--datadir={directory / 'database'}"
    as_root = ["--no-defaults", "--user=root"]
    _succeed(["mariadb-install-db", *as_root, data, "--skip-test-db", "--auth-root-authentication-method=normal"])
    client = ["mariadb", *as_root, f"--socket={database_socket}"]
    serve(
        "mariadbd",
        ["mariadbd", *as_root, data, "--skip-networking", "--innodb-buffer-pool-size=64M"],
        {"socket": database_socket, "pid-file": directory / "mariadbd.pid"},
        ready=[*client, "--execute=select 1"],
    )
    _succeed([*client, "--execute=create database slurm_acct_db"])
    serve(
        "slurmdbd",
        ["slurmdbd", "-D"],
        environment={"MYSQL_UNIX_PORT": str(database_socket)},
        ready=["sacctmgr", "--noheader", "show", "cluster"],
    )
    account = cluster.account
    for what in ("cluster tests", f"account {account} Cluster=tests", f"user root Account={account}"):
        cluster.run("sacctmgr", "--immediate", "add", *what.split())
    serve("slurmctld", ["slurmctld", "-D"], ready=["scontrol", "ping"])
    for node in cluster.nodes:
        serve(f"slurmd-{node}", ["slurmd", "-D", "-N", node])
    _wait("both nodes to be idle", lambda: _busy_nodes(cluster))


def _serve(
    cluster: SlurmCluster,
    stack: contextlib.ExitStack,
    name: str,
    command: Sequence[str],
    options: Mapping[str, object] | None = None,
    *,
    ready: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start a server in the foreground with its output in a log, to be stopped with the stack; wait until it answers."""
    with open(cluster.directory / "log" / f"{name}.out", "wb") as log:
        process = subprocess.Popen(
            [*command, *(f"--{option}={value}" for option, value in (options or {}).items())],
            env=os.environ | cluster.environment | dict(environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the tests; the servers are stopped in their order afterwards.
            start_new_session=True,
        )
    stack.callback(_stop, process)
    if ready:
        _wait(f"{name} to answer", lambda: _answer(ready, cluster.environment), process)


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
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
PidFile={directory}/slurmdbd.pid
"""
    )
    accounting.chmod(0o600)  # slurmdbd refuses one that others may read
    nodes = "\n".join(
        # One address for both: what tells them apart is the port.
        f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} RealMemory=8000 State=UNKNOWN"
        for node, port in zip(cluster.nodes, node_ports, strict=True)
    )
    (directory / "slurm.conf").write_text(
        f"""{common}
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdUser=root
StateSaveLocation={directory}/controller
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
PlugStackConfig={directory}/plugstack.conf
# No cgroups and no root of its own: what a container has.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Take the sizes below for true, whatever the machine has.
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1
ReturnToService=2
# On a machine with ten times as much to do as it has processors, 30 s are too few to write in.
KillWait=120
MpiDefault=none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting_port}
# What this calls a password is, for munge, its socket.
AccountingStoragePass={directory}/munge.socket
{nodes}
PartitionName={cluster.partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
    (directory / "plugstack.conf").touch()


def _busy_nodes(cluster: SlurmCluster) -> str | None:
    idle = set(cluster.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())
    return None if idle == set(cluster.nodes) else cluster.run("sinfo", "--Node", "--long")


def _end_jobs(cluster: SlurmCluster) -> None:
    """No process of a job may outlive the cluster, whatever a test left behind."""
    jobs = cluster.job_ids()
    if jobs:
        cluster.run("scancel", "--signal=KILL", "--full", *jobs)
        cluster.run("scancel", *jobs)
        _wait("the jobs to end", lambda: " ".join(cluster.job_ids()) or None)


def _wait(what: str, trouble: Callable[[], str | None], process: subprocess.Popen | None = None) -> None:
    """Wait until there is no trouble any more; the last one is part of the error."""
    end = time.monotonic() + _TIMEOUT_S
    while (last := trouble()) is not None:
        if process is not None and process.poll() is not None:
            raise SlurmError(f"waited for {what}, and it ended with {process.returncode}")
        if time.monotonic() > end:
            raise SlurmError(f"waited {_TIMEOUT_S} s for {what}: {last}")
        time.sleep(0.1)


def _answer(command: Sequence[str], environment: dict[str, str] | None = None) -> str | None:
    """What a command that fails says, or None when it succeeds."""
    done = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True)
    return f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}" if done.returncode else None


def _succeed(command: Sequence[str]) -> None:
    if failure := _answer(command):
        raise SlurmError(failure)

"""A real Slurm on one machine: two virtual nodes on the loopback interface, with accounting.

All it writes is in one temporary directory. A Slurm that the machine may already be part of is neither read nor changed,
because SLURM_CONF and the sockets point elsewhere. It ends the processes that have this SLURM_CONF, and no others.
"""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bridge_profiling.common.processes import find_by_variable
from tests.ports import free_ports
from tests.system.jobs import ended_well, wait_until

PROGRAMS = {"srun": "slurm-wlm", "slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}

#: An account that jobs may be submitted under, and the partition that holds both nodes.
ACCOUNT, PARTITION = "dev", "batch"

_NODES = ("n1", "n2")
_TIMEOUT_S = 60


class SlurmCluster:
    """A cluster in this directory."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._log = directory, directory / "servers.log"
        #: Variables with which a process reaches it.
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._variables = os.environ | self.environment | {"MYSQL_UNIX_PORT": f"{directory}/database.socket"}

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands, which must succeed; its standard output, stripped."""
        return ended_well(command, env=self._variables, timeout=_TIMEOUT_S).stdout.strip()

    def job_ids(self) -> list[str]:
        """Jobs that wait or run, oldest first."""
        return self.run("squeue", "--noheader", "--format=%i", "--sort=i").split()

    def state(self, job_id: str) -> str:
        """A job's state in the accounting, without what follows it: COMPLETED, CANCELLED, TIMEOUT, …"""
        return self.run("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", "--jobs", job_id).split()[0]

    def start(self) -> None:
        """Start the servers, and wait until both nodes take jobs."""
        self._write_configuration()
        data = ["--no-defaults", "--user=root", f"--datadir={self._directory}/database"]
        self.run("mariadb-install-db", *data, "--skip-test-db", "--auth-root-authentication-method=normal")
        socket_of_database = f"--socket={self._variables['MYSQL_UNIX_PORT']}"
        client = ("mariadb", "--no-defaults", socket_of_database)
        memory = ("--skip-networking", "--innodb-buffer-pool-size=64M", f"--pid-file={self._directory}/mariadbd.pid")
        self._serve(["mariadbd", *data, socket_of_database, *memory], (*client, "--execute=select 1"))
        self.run(*client, "--execute=create database slurm_acct_db")
        self._serve(["slurmdbd", "-D"], ("sacctmgr", "--noheader", "show", "cluster"))
        for what in ("cluster tests", f"account {ACCOUNT} Cluster=tests", f"user root Account={ACCOUNT}"):
            self.run("sacctmgr", "--immediate", "add", *what.split())
        self._serve(["slurmctld", "-D"], ("scontrol", "ping"))
        for node in _NODES:
            self._serve(["slurmd", "-D", "-N", node], ("scontrol", "show", "node", node))
        idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        wait_until(lambda: set(self.run(*idle).split()) == set(_NODES), _TIMEOUT_S, self._log.read_text)

    def _serve(self, command: list[str], ready: tuple[str, ...]) -> None:
        """Start a server in the foreground and wait until a command succeeds."""
        with self._log.open("ab") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            # Ctrl-C is for the tests; the servers are ended afterwards.
            process = subprocess.Popen(command, env=self._variables, start_new_session=True, **streams)

        def answers() -> bool:
            assert process.poll() is None, f"{command} ended with {process.returncode}: {self._log.read_text()}"
            return subprocess.run(ready, env=self._variables, capture_output=True).returncode == 0

        wait_until(answers, _TIMEOUT_S, self._log.read_text)

    def _write_configuration(self) -> None:
        directory, host = self._directory, socket.gethostname().partition(".")[0]
        controller_port, accounting_port, *node_ports = free_ports(2 + len(_NODES))
        common = "AuthType=auth/none\nSlurmUser=root\n"
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
            # One address for both, and a port for each.
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=8000 State=UNKNOWN"
            for node, port in zip(_NODES, node_ports, strict=True)
        )
        # proctrack/linuxproc and task/none: a container has no cgroups of its own. config_overrides: the nodes have these
        # sizes, whatever the machine has. KillWait: with ten times as much to do as there are processors, 30 s are too few
        # to write in.
        (directory / "slurm.conf").write_text(
            f"""{common}
CredType=cred/none
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
StateSaveLocation={directory}/controller
SlurmdSpoolDir={directory}/%n
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
{nodes}
PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )
        (directory / "plugstack.conf").touch()


@contextlib.contextmanager
def started() -> Iterator[SlurmCluster]:
    """A running cluster, with its two nodes n1 and n2."""
    # Not in the checkout's own temporary directory: a socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        cluster = SlurmCluster(Path(directory))
        try:
            cluster.start()
            yield cluster
        finally:
            # Servers, jobs, and what has left the process tree of its job, as an agent of nsys does.
            for pid in find_by_variable("SLURM_CONF", cluster.environment["SLURM_CONF"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

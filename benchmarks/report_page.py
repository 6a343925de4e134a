"""`bridge-profiling report` on many ranks: seconds, processor seconds, and the page's size.

    python benchmarks/report_page.py CAPTURES [--ranks 4,64] [--work DIR] [--copies 1] [--keep DIR] [--ray 2,3]

CAPTURES is a folder of real Kineto captures of one run, as kineto/pp2_dp2, whose ranks are 13 MB of JSON each. They are written
again under the requested number of ranks, a block at a time with groups of its own, so that ranks still match. Each
report is made from files that were just written, so nothing is cached. --copies repeats each rank in time.

--ray reads the same ranks on a local Ray cluster of so many CPUs as well. The cluster's first report, of four ranks, is not
counted, because it starts Ray's workers.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from scaled_captures import scaled

from bridge_profiling.traces.cache import FOLDER

_LISTS = re.compile(rb'("ranks": \[|"Process Group Ranks": "\[)([\d, ]*)(\])')
_RANK = re.compile(rb'("(?:Src|Dst) Rank": )(\d+)')
_SELF = re.compile(rb'("distributedInfo": \{"backend": "nccl", "rank": )(\d+)(, "world_size": )\d+')


def renumbered(trace: bytes, block: int, world: int) -> bytes:
    """A rank's trace under a later rank number, with its groups.

    Args:
        trace: the JSON of a Kineto trace.
        block: added to every rank.
        world: ranks of the job.
    """

    def moved(found: re.Match[bytes]) -> bytes:
        members = [b"%d" % (int(each) + block) for each in found[2].split(b",") if each.strip()]
        return found[1] + b", ".join(members) + found[3]

    trace = _LISTS.sub(moved, trace)
    trace = _RANK.sub(lambda found: found[1] + b"%d" % (int(found[2]) + block), trace)
    return _SELF.sub(lambda found: found[1] + b"%d" % (int(found[2]) + block) + found[3] + b"%d" % world, trace)


def write_ranks(captures: Path, folder: Path, count: int, copies: int) -> int:
    """Write the requested number of ranks, and return the bytes of their JSON."""
    sources = sorted(captures.glob("rank-*.json.gz"))
    traces = [scaled(gzip.decompress(path.read_bytes()), copies) for path in sources]
    written = 0
    for rank in range(count):
        block = rank - rank % len(traces)
        trace = renumbered(traces[rank % len(traces)], block, count)
        (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(trace, compresslevel=1))
        written += len(trace)
    return written


class RayCluster:
    """A Ray cluster on this machine, of so many CPUs.

    Attributes:
        options: of `report`, to use it.
        environment: the same. Ray's server listens on every address, so it takes a token of this run only. Its workers have the
            priority of our own processes, instead of Ray's low one, with which a loaded machine would leave them no time.
    """

    options = ("--engine", "ray", "--ray-address", "127.0.0.1:6399")

    def __init__(self, cpus: int) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self.environment = os.environ | token | {"RAY_worker_niceness": "0"}
        # Its own: the next `ray.init` of anybody else must not find this cluster. Short, since sockets are in it.
        self._folder = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
        self._command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-cpus", str(cpus)]
        self._command += ["--include-dashboard=false", "--node-ip-address", "127.0.0.1", "--port", "6399"]
        self._command += ["--temp-dir", self._folder.name]

    def __enter__(self) -> RayCluster:
        subprocess.run(self._command, check=True, capture_output=True, env=self.environment)
        return self

    def __exit__(self, *_: object) -> None:
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=20)
        self._folder.cleanup()

    def worked(self) -> float:
        """Processor seconds of the cluster's processes that run now."""
        seconds = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:2])
        return seconds

    @staticmethod
    def _processes() -> list[psutil.Process]:
        """Ray's servers, whose commands name the port, and the workers that they started."""
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if "/ray/" in command and "6399" in command:
                    found |= {process, *process.children(recursive=True)}
        return list(found)


def report(folder: Path, page: Path, cluster: RayCluster | None = None) -> str:
    """Make a report of captures that no cache holds, and say how long that took."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)

    def worked() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime + (cluster.worked() if cluster else 0)

    before, begin = worked(), time.perf_counter()
    command = [sys.executable, "-m", "bridge_profiling.cli", "report", str(folder), "-o", str(page)]
    options, environment = (cluster.options, cluster.environment) if cluster else ((), None)
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL, env=environment)
    seconds, used = time.perf_counter() - begin, worked() - before
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return f"{seconds:>8.1f} {used:>8.1f} {peak:>15.0f} MB {page.stat().st_size / 1e6:>4.1f} MB"


def main() -> None:
    """Print a line for each number of ranks and engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("captures", type=Path)
    parser.add_argument("--ranks", default="4,64")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the pages")
    parser.add_argument("--ray", default="", metavar="CPUS", help="numbers of CPUs of Ray clusters: 2,3")
    options = parser.parse_args()
    head = f"{'seconds':>8} {'of CPUs':>8} {'peak of a process':>18} {'page':>7}"
    print(f"{'ranks':>6} {'JSON':>9} {'compressed':>11} {'engine':>10} {head}")
    for count in (int(each) for each in options.ranks.split(",")):
        with tempfile.TemporaryDirectory(dir=options.work) as temporary:
            folder, warm_up = Path(temporary) / "captures", Path(temporary) / "warm_up"
            folder.mkdir()
            warm_up.mkdir()
            written = write_ranks(options.captures, folder, count, options.copies)
            packed = sum(path.stat().st_size for path in folder.iterdir())
            page = Path(temporary) / "report.html" if options.keep is None else options.keep / f"{count}.html"
            sizes = f"{count:>6} {written / 1e6:>6.0f} MB {packed / 1e6:>8.0f} MB"
            print(f"{sizes} {'processes':>10} {report(folder, page)}", flush=True)
            for cpus in (int(each) for each in options.ray.split(",") if each):
                with RayCluster(cpus) as cluster:
                    write_ranks(options.captures, warm_up, 4, 1)
                    report(warm_up, page, cluster)
                    print(f"{sizes} {f'Ray, {cpus}':>10} {report(folder, page, cluster)}", flush=True)


if __name__ == "__main__":
    main()

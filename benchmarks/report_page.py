"""`bridge-profiling report` on many ranks: seconds, CPU seconds, and the page's size.

    python benchmarks/report_page.py CAPTURES [--ranks 4,64] [--work DIR] [--copies 1] [--keep DIR]

CAPTURES is a folder of real Kineto captures of one run, as kineto/pp2_dp2, whose ranks are 13 MB of JSON each. They are written
again under the requested number of ranks, a block at a time with groups of its own, so that ranks still match. Each
report is made from files that were just written, so nothing is cached. --copies repeats each rank in time.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from large_files import measured
from scaled_captures import scaled

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


def report(folder: Path, page: Path) -> str:
    """Make a report of captures that no cache holds, and say how long that took."""
    with tempfile.TemporaryDirectory() as cache:
        used = measured([sys.executable, "-m", "bridge_profiling.cli", "report", str(folder), "-o", str(page)], Path(cache))
    return f"{used.wall_s:>8.1f} {used.cpu_s:>8.1f} {used.peak_mb:>15.0f} MB {page.stat().st_size / 1e6:>4.1f} MB"


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("captures", type=Path)
    parser.add_argument("--ranks", default="4,64")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the pages")
    options = parser.parse_args()
    print(f"{'ranks':>6} {'JSON':>9} {'compressed':>11} {'seconds':>8} {'of CPUs':>8} {'peak of a process':>18} {'page':>7}")
    for count in (int(each) for each in options.ranks.split(",")):
        with tempfile.TemporaryDirectory(dir=options.work) as temporary:
            folder = Path(temporary) / "captures"
            folder.mkdir()
            written = write_ranks(options.captures, folder, count, options.copies)
            packed = sum(path.stat().st_size for path in folder.iterdir())
            page = Path(temporary) / "report.html" if options.keep is None else options.keep / f"{count}.html"
            sizes = f"{count:>6} {written / 1e6:>6.0f} MB {packed / 1e6:>8.0f} MB"
            print(f"{sizes} {report(folder, page)}", flush=True)


if __name__ == "__main__":
    main()

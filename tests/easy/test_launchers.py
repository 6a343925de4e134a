"""An unchanged script under every launcher that a plain script may have: real processes, several at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.easy.scripts import HEAD, bridge_profiling, manifest, python, ranges
from tests.ports import free_port
from tests.system.jobs import end_tree, environment, wait_until

pytestmark = pytest.mark.system

PLAIN_LOOP = str(Path(__file__).parents[2] / "docs" / "examples" / "plain_loop.py")


def test_torchrun_may_start_the_ranks_itself(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    ours = python(tmp_path, *torchrun, "-m", "bridge_profiling.cli", "run", "--steps", "3:6", PLAIN_LOOP)
    assert ours.returncode == 0, ours.stderr
    assert [manifest(tmp_path / "profiles", rank)["status"] for rank in (0, 1)] == ["complete"] * 2


def test_a_script_that_starts_its_ranks_itself_runs_and_is_told_what_to_type(tmp_path: Path) -> None:
    lines = f'{HEAD}if __name__ == "__main__":\n    torch.multiprocessing.spawn(rank, nprocs=2)\n'
    (tmp_path / "train.py").write_text(f'def rank(number):\n    train(8)\n    print("rank done")\n{lines}')
    done = bridge_profiling(tmp_path, "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank done") == 2
    assert "no optimizer stepped in this process" in done.stderr
    assert "Then let --nproc start them" in done.stderr
    assert not list(tmp_path.glob("profiles/torch/*/*"))


def test_a_rank_that_fails_ends_the_others_and_both_leave_what_they_captured(tmp_path: Path) -> None:
    text = Path(PLAIN_LOOP).read_text().replace("    optimizer.zero_grad()\n", "    fail(step)\n    optimizer.zero_grad()\n")
    fail = "def fail(step):\n    if step == 5 and os.environ['RANK'] == '1':\n        raise OSError('no more data')\n"
    (tmp_path / "train.py").write_text(text.replace("import torch\n", f"import torch\n{fail}", 1))
    done = bridge_profiling(tmp_path, "run", "--nproc", "2", "--steps", "3:8", "train.py")
    assert done.returncode == 1
    for rank in (0, 1):
        written = manifest(tmp_path / "profiles", rank, "iter-3-8")
        assert (written["status"], written["captured"]["iterations"]) == ("partial", [3, 4])
    assert "no more data" in written["reason"]


def test_sigterm_inside_the_window_leaves_what_was_captured(tmp_path: Path) -> None:
    loop = "train(6)\npathlib.Path('inside').touch()\nwhile True:\n    train(1)\n    time.sleep(0.05)\n"
    (tmp_path / "train.py").write_text(f"import pathlib, time\n{HEAD}{loop}")
    command = [sys.executable, "-m", "bridge_profiling.cli", "run", "--steps", "3:900", "train.py"]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=stderr, start_new_session=True)
    try:
        wait_until(lambda: (tmp_path / "inside").exists() or process.poll() is not None)
        # As `timeout` and Slurm do: to each process, so that the script gets it twice, the second time from its launcher.
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=240) == 143
    finally:
        end_tree(process)
    written = manifest(tmp_path / "profiles", folder="iter-3-900")
    assert written["status"] == "partial"
    assert written["captured"]["iterations"][:3] == [3, 4, 5]
    assert "the process exited (code" in written["reason"]
    assert "ProfilerStep#5" in ranges(tmp_path / "profiles", folder="iter-3-900")
    assert "partial" in (tmp_path / "stderr").read_text()

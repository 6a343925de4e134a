"""An unchanged script under every launcher that a plain script may have: real processes, several at a time."""

from pathlib import Path

import pytest

from tests.easy.scripts import HEAD, bridge_profiling, manifest, python
from tests.ports import free_port

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

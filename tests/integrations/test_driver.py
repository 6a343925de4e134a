"""Which rank a process is, and what its launch is called."""

from __future__ import annotations

import os
from pathlib import Path

from bridge_profiling.capture.files import choose_attempt
from bridge_profiling.config import Window
from bridge_profiling.integrations.driver import name_launch
from bridge_profiling.launch_env import LAUNCH_VARIABLE
from tests.forked_ranks import run_ranks


def test_ranks_of_one_launch_agree_and_launches_differ(tmp_path: Path) -> None:
    """Also when rank 1 asks long before rank 0, and rank 0 never waits for it: nothing is collective."""
    for _ in range(2):
        ended = run_ranks(_choose, folder=tmp_path, ranks=2)
        assert ended.exit_codes == [0, 0], ended.stderr
    names = [(tmp_path / f"{launch}.names").read_text().split() for launch in (0, 1)]
    assert [len(set(each)) for each in names] == [1, 1]
    assert names[0][0] != names[1][0]
    assert [sorted((tmp_path / f"{launch}.attempts").read_text().split()) for launch in (0, 1)] == [["0", "0"], ["1", "1"]]


def test_a_slurm_step_has_its_name_already() -> None:
    told = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}
    name_launch(told)
    assert LAUNCH_VARIABLE not in told


def _choose() -> None:
    import torch

    rank = int(os.environ["RANK"])
    if rank == 0:
        # Not before rank 1 has chosen: with a collective, this would wait for ever.
        torch.distributed.recv(torch.zeros(1), src=1)
    name_launch()
    attempt, _ = choose_attempt(Path("out"), Window(3, 6), rank)
    manifest = Path(f"out/manifest/iter-3-6{f'.{attempt}' if attempt else ''}/rank-{rank}.json")
    manifest.write_text("{}")
    launch = len(list(Path().glob("*.meeting"))) - 1
    for name, told in (("names", os.environ[LAUNCH_VARIABLE]), ("attempts", attempt)):
        with Path(f"{launch}.{name}").open("a") as file:
            file.write(f"{told}\n")
    if rank == 1:
        torch.distributed.send(torch.zeros(1), dst=0)
    torch.distributed.barrier()

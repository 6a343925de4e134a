"""The driver of all integrations: its copies, its failures, its hook, and the name of a launch."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest

from bridge_profiling.capture.files import choose_attempt
from bridge_profiling.config import Window
from bridge_profiling.integrations.driver import ProfilingDriver, config_from, name_launch
from bridge_profiling.launch_env import LAUNCH_VARIABLE
from tests.forked_ranks import run_ranks
from tests.integrations.captured import Captured


@pytest.fixture
def driver(tmp_path: Path) -> ProfilingDriver:
    window = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5}
    return ProfilingDriver(config_from("Test", window), tmp_path)


def test_a_failure_of_an_adapter_is_logged_and_an_iteration_that_is_open_at_the_end_does_not_count(
    driver: ProfilingDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert driver.open(watch=lambda phases: phases.function(None, "missing", "forward"))
    assert "AttributeError" in caplog.text
    copied = copy.deepcopy(driver)
    assert (copied.config, copied.hook) == (driver.config, None)
    for iteration in range(5):
        driver.begin_iteration(iteration)
    driver.close()
    manifest = Captured(tmp_path, "iter-3-5").manifest()
    assert (manifest["captured"]["iterations"], manifest["interrupted"]) == ([3], [4])


def test_a_training_that_starts_again_in_the_process_is_another_attempt(driver: ProfilingDriver, tmp_path: Path) -> None:
    for _ in range(2):
        assert driver.open()
        for iteration in range(5):
            driver.begin_iteration(iteration)
    driver.close()
    first, second = (Captured(tmp_path, folder).manifest() for folder in ("iter-3-5", "iter-3-5.1"))
    assert (first["captured"]["iterations"], first["interrupted"], second["captured"]["iterations"]) == ([3], [4], [3])
    assert "the training was started again in the same process" in first["reason"]


@pytest.mark.integration
def test_ranks_of_one_launch_agree_and_launches_differ(tmp_path: Path) -> None:
    """Also when rank 1 asks long before rank 0, and rank 0 never waits for it: nothing is collective."""
    for _ in range(2):
        run_ranks(_choose, folder=tmp_path, ranks=2, check=True)
    names = [(tmp_path / f"{launch}.names").read_text().split() for launch in (0, 1)]
    assert [len(set(each)) for each in names] == [1, 1]
    assert names[0][0] != names[1][0]
    assert [sorted((tmp_path / f"{launch}.attempts").read_text().split()) for launch in (0, 1)] == [["0", "0"], ["1", "1"]]


def test_a_slurm_step_has_its_name_already() -> None:
    given = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}
    name_launch(given)
    assert LAUNCH_VARIABLE not in given


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
    for name, chosen in (("names", os.environ[LAUNCH_VARIABLE]), ("attempts", attempt)):
        with Path(f"{launch}.{name}").open("a") as file:
            file.write(f"{chosen}\n")
    if rank == 1:
        torch.distributed.send(torch.zeros(1), dst=0)
    torch.distributed.barrier()

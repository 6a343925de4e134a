"""The driver of all integrations: its copies, its failures, its hook, and the name of a launch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from bridge_profiling.integrations.driver import ProfilingDriver, config_from, name_launch
from bridge_profiling.launch_env import LAUNCH_VARIABLE
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


def test_a_slurm_step_has_its_name_already() -> None:
    given = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}
    name_launch(given)
    assert LAUNCH_VARIABLE not in given

"""Real captures of Megatron-Core on H200s with known causes: the right finding, on the right ranks, and no false one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Confidence, Finding

Find = Callable[[str], list[Finding]]


@pytest.fixture(scope="module")
def find(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Findings of a capture by its folder's name; each is read once."""

    @functools.cache
    def found(name: str) -> list[Finding]:
        with Run(captures / name, parquet=tmp_path_factory.mktemp("parquet")) as run:
            findings = run.findings()
            absent = max(row["non_compute_us"] for row in run.idle_gaps().to_pylist())
        bounds = [finding.recoverable_us_per_iteration or 0.0 for finding in findings]
        assert sum(bounds) <= absent
        assert all(bound >= 0 for bound in bounds)
        return findings

    return found


def _by_id(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}


def test_planted_data_loading_comes_first_with_what_it_costs_on_all_ranks(find: Find) -> None:
    first = find("kineto/plant_data")[0]
    assert first.id == "data_loading"
    assert first.ranks == [0, 1, 2, 3]
    assert first.recoverable_us_per_iteration == pytest.approx(121_000, rel=0.02)
    assert {event.name for event in first.events} == {"dataloader"}


def test_late_hosts_are_found_and_the_run_is_not_called_communication_bound(find: Find) -> None:
    found = _by_id(find("kineto/tp2_dp2"))
    assert found["host_launch_bound"].ranks == [1, 3]
    assert not {"exposed_communication", "low_overlap"} & set(found)
    assert all(not {0, 2} & set(found[name].ranks) for name in ("host_launch_bound", "low_device_busy"))


def test_nsys_captures_are_judged_by_their_own_evidence(find: Find) -> None:
    found = _by_id(find("nsys/tp2_dp2"))
    # In these two iterations the hosts of ranks 0 and 2 launch late; in the Kineto capture of another run those of 1 and 3.
    assert found["host_launch_bound"].ranks == [0, 2]
    assert "data_loading" not in found


def test_the_wait_for_the_device_after_each_exchange_between_stages_is_found(find: Find) -> None:
    found = _by_id(find("kineto/pp2_dp2"))["host_sync"]
    assert found.ranks == [0, 1, 2, 3]
    assert any("cudaDeviceSynchronize" in event.name for event in found.events)
    assert "batch_p2p_sync" in found.action


@pytest.mark.parametrize(
    "name", ["kineto/tp2_dp2", "kineto/tp2_dp2_overlap", "kineto/pp2_dp2", "kineto/plant_straggler", "nsys/tp2_dp2"]
)
def test_nothing_that_was_not_planted_is_found(find: Find, name: str) -> None:
    assert not {"data_loading", "pageable_copy", "checkpoint_stall", "copy_bound", "small_kernels"} & set(_by_id(find(name)))


def test_without_manifests_all_that_is_said_of_hosts_is_of_low_confidence(find: Find) -> None:
    for finding in find("kineto/tp2_dp2"):
        if finding.id in ("host_launch_bound", "straggler_host", "low_device_busy"):
            assert finding.confidence is Confidence.low
            assert "profiler" in finding.confidence_reason

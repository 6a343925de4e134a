"""Kineto and nsys, each in a run of its own of the same deterministic training, saw the same work on the device."""

from __future__ import annotations

import json

import pytest

from bridge_profiling.analysis.attribution.device import device_work
from tests.planted.cases import CASES
from tests.planted.conftest import TablesOf
from tests.planted.witness import COMPUTE_TOLERANCE, differences, kernel

#: Cases captured by nsys, and the same iterations captured by Kineto.
PAIRS = [
    (case.same_iterations_as, case.name)
    for case in CASES.values()
    if case.same_iterations_as is not None and case.folder.is_dir()
]

pairs = pytest.mark.parametrize(("kineto", "nsys"), PAIRS)


def losses(name: str) -> dict[int, str]:
    """The loss of each iteration, as a hexadecimal float."""
    lines = (CASES[name].folder / "losses.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["iteration"]: record["hex"] for record in map(json.loads, lines)}


@pairs
def test_both_runs_computed_the_same_to_the_last_bit(kineto: str, nsys: str):
    assert len(losses(kineto)) >= CASES[kineto].window[1]
    assert losses(kineto) == losses(nsys)


@pairs
def test_both_saw_the_same_kernels_copies_and_messages_on_every_rank(kineto: str, nsys: str, tables_of: TablesOf):
    one, other = tables_of(kineto), tables_of(nsys)
    assert sorted(one) == sorted(other) == CASES[kineto].captured
    for rank in one:
        assert one[rank].iterations["iteration"].to_pylist() == other[rank].iterations["iteration"].to_pylist()
        assert list(differences(one[rank], other[rank])) == [], f"rank {rank}"
        # Nothing else ran on these GPUs: what the window took as a whole says as much.
        computed = [device_work(tables.device_events).compute.total_ns for tables in (one[rank], other[rank])]
        assert computed[0] == pytest.approx(computed[1], rel=COMPUTE_TOLERANCE), f"rank {rank}"


def test_the_witnesses_also_agree_on_runs_with_a_cause(tables_of: TablesOf):
    """The plants of these change nothing on the device but what is counted, and nsys saw as many iterations of each."""
    for name in ("clean_2", "straggler_compute_2", "host_sync_2"):
        one, other = tables_of(name), tables_of(f"{name}_nsys")
        for rank in one:
            for found in differences(one[rank], other[rank]):
                # One window is an iteration longer.
                assert name == "clean_2", f"rank {rank}: {found}"
                assert " of (7, " in found or found.startswith("compute time"), f"rank {rank}: {found}"


def test_witnesses_of_different_work_do_not_agree(tables_of: TablesOf):
    """Rank 1 of this case computes matrix products that rank 0 does not."""
    one, other = tables_of("straggler_compute_2")[0], tables_of("straggler_compute_2_nsys")[1]
    found = list(differences(one, other))
    assert any(text.startswith("kernels: 0 in one, 12 in the other of (5, ") for text in found)
    assert any(text.startswith("compute time") for text in found)


def test_demanglers_of_both_profilers_are_understood():
    gnu = "void at::native::k<4, (anonymous namespace)::F<float>, std::array<char*, 1ul> >(int, at::native::F<float> const&)"
    edg = "void at::native::k<(int)4, <unnamed>::F<float>, std::array<char *, (unsigned long)1>>(int, const T2 &)"
    assert kernel(gnu) == kernel(edg) == "at::native::k<4,{anonymous}::F<float>,std::array<char*,1>>"
    assert kernel(gnu.replace("F<float>", "F<double>", 1)) != kernel(gnu)


def test_lambdas_of_one_function_stay_apart():
    gnu = "void k<f(int)::{lambda()#3}::operator()() const::{lambda(float)#1}>(T)"
    edg = "void k<f(int)::[lambda() (instance 3)]::operator ()() const::[lambda(float) (instance 1)]>(T1)"
    assert kernel(gnu) == kernel(edg)
    assert kernel(gnu.replace("#3", "#4")) != kernel(gnu)

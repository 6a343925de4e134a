"""The checklist: yes, no or unknown, from the rank that does worst."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from bridge_profiling.findings.scorecard import CHECKS, scorecard
from bridge_profiling.traces.types import RankInfo

NAMES = {
    "breakdown": ("busy_ns", "least_busy_ns"),
    "attribution": ("duration_ns", "idle_ns", "data_loading_ns", "communication_ns"),
    "iterations": ("duration_ns", "overlapped_communication_ns"),
    "device_roles": ("role", "device_ns"),
    "kernels_by_rank": ("kind", "name", "group", "total_ns"),
    "launch_statistics": ("kernel_count", "graph_kernel_count"),
    "operators": ("name", "device_total_ns"),
    "memory": ("device", "peak_bytes", "peak_reserved_bytes"),
    "host_iterations": ("duration_ns", "data_loading_ns"),
}


def _answers(**tables):
    """Tables of rows, each a rank and the values of `NAMES`."""
    made = {}
    for table, names in NAMES.items():
        rows = [{"source": "kineto", **dict(zip(("rank", *names), row, strict=True))} for row in tables.get(table, ())]
        empty = {"rank": [], "source": pa.array([], pa.string())} | {name: pa.array([], pa.float64()) for name in names}
        made[table] = pa.Table.from_pylist(rows) if rows else pa.table(empty)
    infos = [RankInfo(rank=rank, rank_source="trace", source="kineto", files=[], device_bytes={0: 1000}) for rank in (0, 1)]
    facts = SimpleNamespace(source="kineto", infos=infos, **made)
    return {row["check"]: (row["answer"], row["value"], row["rank"]) for row in scorecard(facts).to_pylist()}


def _kernel(name, total_ns, group="elementwise"):
    return (0, "compute", name, group, total_ns)


@pytest.mark.parametrize(
    ("check", "tables", "expected"),
    [
        ("device_busy", {"attribution": [(0, 100, 10, 0, 0), (1, 100, 30, 0, 0)]}, ("no", 0.7, 1)),
        ("data_loading", {"attribution": [(0, 100, 10, 0, 0), (1, 100, 10, 5, 0)]}, ("yes", 0.05, 1)),
        ("memory_headroom", {"memory": [(0, 0, 500, 950), (1, 0, 500, None)]}, ("no", 0.05, 0)),
        ("mixed_precision", {"device_roles": [(0, "reduced", 90), (1, "tf32", 10)]}, ("yes", 0.9, None)),
        (
            "fused_attention",
            {"device_roles": [(0, "attention_other", 30)], "kernels_by_rank": [_kernel("flash_fwd", 10)]},
            ("no", 0.25, None),
        ),
        ("fused_optimizer", {"kernels_by_rank": [_kernel("multi_tensor", 10, "optimizer")]}, ("yes", 1.0, None)),
        ("compiled_or_graphed", {"kernels_by_rank": [_kernel("x", 9)], "launch_statistics": [(0, 10, 8)]}, ("yes", 0.8, None)),
        ("compiled_or_graphed", {"kernels_by_rank": [_kernel("triton_poi_0", 1), _kernel("x", 19)]}, ("no", 0.05, None)),
        (
            "compiled_or_graphed",
            {
                "kernels_by_rank": [_kernel("gemm", 20)],
                "operators": [(0, "Torch-Compiled Region: 0/0", 15), (0, "aten::mm", 20)],
            },
            ("yes", 0.75, None),
        ),
        (
            "overlapped_communication",
            {"attribution": [(0, 100, 0, 0, 30), (1, 100, 0, 0, 0.5)], "iterations": [(0, 100, 10), (1, 100, 10)]},
            ("no", 0.25, 0),
        ),
        (
            "gradient_accumulation",
            {
                "attribution": [(0, 100, 0, 0, 30), (1, 100, 0, 0, 10)],
                "iterations": [(0, 100, 10), (1, 100, 10)],
                "kernels_by_rank": [_kernel("multi_tensor", 6, "optimizer")],
                "device_roles": [(1, "optimizer_sweep", 4)],
            },
            ("no", 0.25, None),
        ),
        (
            "gradient_accumulation",
            {"iterations": [(0, 100, 0)], "kernels_by_rank": [_kernel("multi_tensor", 6, "optimizer")]},
            ("yes", 0.06, None),
        ),
    ],
)
def test_each_answer_has_the_number_of_the_worst_rank(check, tables, expected):
    answer, value, rank = _answers(**tables)[check]
    assert (answer, pytest.approx(value), rank) == expected


def test_what_is_not_recorded_is_unknown_and_hosts_alone_answer_for_data_loading():
    assert _answers() == dict.fromkeys(CHECKS, ("unknown", None, None))
    assert _answers(host_iterations=[(0, 100, 5), (1, 100, 50)]) == {"data_loading": ("no", 0.5, 1)}

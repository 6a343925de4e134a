"""What integrations measured, as tables of the page."""

import json
from types import SimpleNamespace

import pytest

from bridge_profiling.report.measurements import phase_memory, training_facts
from bridge_profiling.report.tables import view
from bridge_profiling.run import Run
from tests.report.known import manifest
from tests.traces.kineto_files import complete, write_capture

_MB = 2**20
_MEMORY = {"phase": ["forward", "backward", "forward"], "before_bytes": [_MB, 5 * _MB, 3 * _MB]}
_MEMORY |= {"after_bytes": [5 * _MB, _MB, 7 * _MB], "peak_bytes": [6 * _MB, 9 * _MB, 8 * _MB]}
_FRAMEWORK = {"phase_memory": {"device": "cuda", "iteration": [4, 4, 5], **_MEMORY}}


def test_memory_by_phase():
    measured, other, unavailable = (manifest(rank, [100, 100], [90]) for rank in range(3))
    measured.manifest.framework = _FRAMEWORK
    other.manifest.framework = {"phase_memory": {"phase": "forward"}}
    unavailable.manifest.framework = {"phase_memory": "this rank has no CUDA device"}
    table = view("phase-memory", phase_memory([measured, other, unavailable]))
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["0", "forward", "2", "2.0 MiB", "6.0 MiB", "8.0 MiB"],
        ["0", "backward", "1", "5.0 MiB", "1.0 MiB", "9.0 MiB"],
    ]


def test_it_is_on_the_page(tmp_path):
    write_capture(tmp_path, [complete("user_annotation", "ProfilerStep#4", 4000, 900)], range(4, 6), framework=_FRAMEWORK)
    with Run(tmp_path) as run:
        assert len(json.loads(run.to_json())["measured"]["phase_memory"]) == 2
        assert "memory allocated by phase" in run.report(tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "shown"), [("ddp", "parameters"), ("recipe", "parameters of rank 1"), ("megatron-bridge", "parameters of rank 1")]
)
def test_a_part_of_a_model_is_shown_as_that_of_its_rank(name, shown):
    measured = manifest(1, [100, 100], [90])
    measured.manifest.framework = {"name": name, "parameters": 1234, "trainable_parameters": 1234, "batch_size": 4}
    assert training_facts(SimpleNamespace(manifests=[measured])) == [(shown, "1,234"), ("batch of a rank", "4")]

"""Whether the output directory can be written, is seen by all nodes, and has room."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from bridge_profiling.doctor.checks import Machine
from bridge_profiling.doctor.profiling import check_output_dir
from bridge_profiling.doctor.trace_size import estimate

TORCH = ("profiling.use_pytorch_profiler=true", "train.train_iters=50")
#: As /proc/mounts is laid out: the later of two mounts on one point is seen, and a space is written \040.
MOUNTS = """/dev/vda / ext4 rw,relatime 0 0
server:/export {place}/nfs nfs4 rw,relatime,vers=4.2 0 0
10.0.0.1@o2ib:/fs {place}/lustre lustre rw,flock 0 0
tmpfs {place}/shm tmpfs rw,size=1k 0 0
overlay {place}/over overlay rw,lowerdir=/a 0 0
some {place}/odd oddfs rw 0 0
a {place}/two\\040words ext4 rw 0 0
b {place}/two\\040words gpfs rw 0 0
"""


def by_check(verdicts):
    return {verdict.check: verdict for verdict in verdicts}


@pytest.mark.parametrize(
    ("folder", "nodes", "status", "told"),
    [
        ("nfs", 2, "ok", "on nfs4, a network file system"),
        ("lustre", None, "ok", "on lustre"),
        ("two words", 2, "ok", "on gpfs"),
        ("shm", 2, "fails", "no other machine sees it"),
        ("over", 2, "fails", "lost with the job or container"),
        ("shm", None, "warning", "no other machine sees it"),
        ("disk", 2, "warning", "only if it is exported"),
        ("odd", 2, "unknown", "on oddfs"),
        ("nfs", 1, None, ""),
        ("shm", 1, "warning", "lost with the container or the machine"),
    ],
)
def test_the_file_system_tells_who_sees_it(tmp_path, machine, request_for, folder, nodes, status, told):
    place = tmp_path / folder
    place.mkdir()
    here = machine(files={"/proc/mounts": MOUNTS.format(place=tmp_path)})
    verdicts = by_check(check_output_dir(request_for(*TORCH, nodes=nodes, output_dir=place), here))
    found = verdicts.get("shared by the nodes", verdicts.get("lasting"))
    if status is None:
        assert found is None
        return
    assert (found.status, told in found.found) == (status, True), found


def test_a_directory_still_to_be_made_is_looked_for_above(tmp_path, machine, request_for):
    verdict = next(check_output_dir(request_for(*TORCH, output_dir=tmp_path / "a" / "b"), machine()))
    assert verdict.status == "ok"
    assert f"will be created in {tmp_path}" in verdict.found
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_its_place_fails(tmp_path, machine, request_for):
    (tmp_path / "profiles").write_text("")
    (verdict,) = check_output_dir(request_for(*TORCH, output_dir=tmp_path / "profiles"), machine())
    assert (verdict.status, "Not a directory" in verdict.found) == ("fails", True)


@pytest.mark.needs("mount")
def test_a_read_only_place_fails(tmp_path, request_for):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], check=True)
    try:
        (verdict,) = check_output_dir(request_for(*TORCH, output_dir=tmp_path), Machine())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert (verdict.status, "Read-only file system" in verdict.found) == ("fails", True)


@pytest.mark.needs("mount")
def test_a_disk_too_small_fails(tmp_path, request_for):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    try:
        verdicts = by_check(check_output_dir(request_for(*TORCH, output_dir=tmp_path, nodes=1), Machine()))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert verdicts["free space"].status == "fails"
    assert verdicts["lasting"].status == "warning"


def test_little_room_is_a_warning_and_much_is_ok(tmp_path, machine, request_for):
    request = request_for(*TORCH, output_dir=tmp_path, nodes=1)
    needed = estimate(request).peak
    for free, status in ((needed * 2, "warning"), (needed * 100, "ok"), (needed // 100, "fails")):
        assert by_check(check_output_dir(request, machine(free=free)))["free space"].status == status


def test_the_environment_says_where_when_the_settings_do_not(tmp_path, machine, request_for):
    named = {"BRIDGE_PROFILING_DIR": str(tmp_path / "named")}
    (tmp_path / "set").mkdir()
    first = next(check_output_dir(request_for(*TORCH), machine(environ=named)))
    assert f"{tmp_path}/named can be written" in first.found
    second = next(check_output_dir(request_for(*TORCH, f"profiling.output_dir={tmp_path}/set"), machine(environ=named)))
    assert f"{tmp_path}/set can be written" in second.found


def test_a_job_elsewhere_decides_for_itself(machine, request_for):
    (verdict,) = check_output_dir(request_for(*TORCH, elsewhere="other machines"), machine())
    assert verdict.status == "unknown"


MODEL = ("model.num_layers=12", "train.micro_batch_size=2", "train.global_batch_size=8")
PROFILED = "profiling.use_pytorch_profiler=true"
CAPTURES = json.loads((Path(__file__).parents[2] / "benchmarks" / "trace_sizes.json").read_text())


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: f"{capture['what']} {capture['options']}")
def test_no_estimate_is_farther_off_than_said_from_what_was_measured_on_h200s(request_for, capture):
    arguments = f"{capture['settings']} {capture['options']}".split()
    size = estimate(request_for(*arguments, world_size=capture["world_size"]))
    assert (size.uncertainty, size.caveat) == (2, "")
    for kind, measured in capture["bytes"].items():
        assert measured / 2 < size.files[kind] < measured * 2


def test_what_is_kept_is_every_file_but_the_json_that_is_compressed(request_for):
    options = ("profiling.pytorch_profiler_collect_chakra=true", "profiling.record_memory_history=true")
    size = estimate(request_for(*MODEL, PROFILED, *options, world_size=1))
    assert set(size.files) == {"torch", "torch_raw", "chakra", "memory"}
    assert size.peak == pytest.approx(sum(size.files.values()), abs=4)
    assert size.kept == pytest.approx(size.peak - size.files["torch_raw"], abs=4)


def test_pipeline_and_data_parallel_ranks_share_the_model(request_for):
    split = ("model.pipeline_model_parallel_size=2", "model.tensor_model_parallel_size=1")
    whole = estimate(request_for(*MODEL, PROFILED, world_size=1)).kept
    replica = estimate(request_for(*MODEL, PROFILED, world_size=2)).kept
    stage = estimate(request_for(*MODEL, *split, PROFILED, world_size=4)).kept
    # Half of the micro-batches, and then half of the layers as well; what an iteration costs by itself stays.
    assert whole / 2 < replica < whole * 0.6
    assert replica / 2 < stage < replica * 0.7


@pytest.mark.parametrize(
    "more",
    [
        "model.position_embedding_type=rope",
        "model.gated_linear_unit=true",
        "model.qk_layernorm=true",
        "model.recompute_granularity=full",
        "profiling.profile_step_end=13",
        "profiling.record_shapes=true",
    ],
)
def test_what_has_more_operators_or_says_more_of_them_is_larger(request_for, more):
    plain = estimate(request_for(*MODEL, PROFILED, world_size=1))
    assert estimate(request_for(*MODEL, PROFILED, more, world_size=1)).kept > 1.1 * plain.kept


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("model.num_moe_experts=8", "experts"),
        ("model.transformer_impl=transformer_engine", "Transformer Engine"),
        ("model.torch_compile=true", "compiled"),
        ("model.cuda_graph_impl=local", "CUDA graphs"),
    ],
)
def test_what_was_never_measured_is_said(request_for, more, told):
    size = estimate(request_for(*MODEL, PROFILED, more, world_size=1))
    assert (size.uncertainty, told in size.caveat) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "world_size", "told"),
    [
        (["model.num_layers=12"], 1, "8 micro-batches"),
        (MODEL[1:], 1, "12 layers"),
        (MODEL, None, "8 micro-batches"),
        ([], None, "12 layers and 8 micro-batches"),
    ],
)
def test_a_model_of_unknown_size_is_unknown_and_says_what_to_type(tmp_path, machine, request_for, arguments, world_size, told):
    request = request_for(PROFILED, *arguments, world_size=world_size, output_dir=tmp_path, nodes=1)
    verdict = by_check(check_output_dir(request, machine()))["trace size"]
    assert (verdict.status, told in verdict.found, "factor of 30" in verdict.found) == ("unknown", True, True)
    assert "model.num_layers" in verdict.instead


def test_a_model_that_is_known_has_a_size(tmp_path, machine, request_for):
    request = request_for(*MODEL, PROFILED, world_size=1, output_dir=tmp_path, nodes=1)
    verdict = by_check(check_output_dir(request, machine()))["trace size"]
    assert (verdict.status, "factor of 2" in verdict.found) == ("ok", True)


def test_nothing_is_left_in_the_directory(tmp_path, request_for):
    list(check_output_dir(request_for(*TORCH, output_dir=tmp_path), Machine(environ=dict(os.environ))))
    assert list(tmp_path.iterdir()) == []

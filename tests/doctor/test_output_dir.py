"""Whether the output directory can be written, is seen by all nodes, and has room."""

from __future__ import annotations

import os
import subprocess

import pytest

from bridge_profiling.doctor.machine import Machine
from bridge_profiling.doctor.output_dir import check_output_dir
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
        ("over", 2, "fails", "goes with the job or container"),
        ("shm", None, "warning", "no other machine sees it"),
        ("disk", 2, "warning", "only if it is exported"),
        ("odd", 2, "unknown", "on oddfs"),
        ("nfs", 1, None, ""),
        ("shm", 1, "warning", "goes with the container or the machine"),
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
    assert f"will be made in {tmp_path}" in verdict.found
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_its_place_fails(tmp_path, machine, request_for):
    (tmp_path / "profiles").write_text("")
    (verdict,) = check_output_dir(request_for(*TORCH, output_dir=tmp_path / "profiles"), machine())
    assert (verdict.status, "it is no directory" in verdict.found) == ("fails", True)


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


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        (["profiling.use_pytorch_profiler=true"], 2_520_817),
        (["profiling.use_pytorch_profiler=true", "profiling.record_shapes=true"], 3_492_039),
        (["profiling.use_pytorch_profiler=true", "profiling.pytorch_profiler_collect_callstack=true"], 9_930_545),
        (["profiling.use_pytorch_profiler=true", "profiling.pytorch_profiler_profile_memory=true"], 2_917_249),
        (["profiling.use_pytorch_profiler=true", "profiling.pytorch_profiler_collect_chakra=true"], 53_167_849),
        (["profiling.use_pytorch_profiler=true", "model.num_layers=24"], 4_743_178),
        (["profiling.use_pytorch_profiler=true", "train.global_batch_size=16"], 4_826_238),
        (["profiling.use_nsys_profiler=true"], 877_304),
        (["profiling.use_nsys_profiler=true", "profiling.nsys_export_sqlite=true"], 877_304 + 2_064_384),
        (["profiling.use_nsys_profiler=true", "profiling.record_shapes=true"], 2_716_330),
        (["profiling.record_memory_history=true"], 6_833_778),
    ],
)
def test_estimates_hold_what_was_measured_on_an_h200(request_for, arguments, measured):
    window = ["profiling.profile_step_start=4", "profiling.profile_step_end=6"]
    size = estimate(request_for(*MODEL, *window, *arguments, world_size=1))
    assert size.assumed == ""
    assert measured / size.uncertainty < size.kept < measured * size.uncertainty


def test_pipeline_and_data_parallel_ranks_share_the_model(request_for):
    split = ("model.pipeline_model_parallel_size=2", "model.tensor_model_parallel_size=2")
    whole = estimate(request_for(*MODEL, "profiling.use_pytorch_profiler=true", world_size=1))
    stage = estimate(request_for(*MODEL, *split, "profiling.use_pytorch_profiler=true", world_size=8))
    assert stage.kept == whole.kept // 4  # half of the layers, half of the micro-batches


def test_nothing_is_left_in_the_directory(tmp_path, request_for):
    list(check_output_dir(request_for(*TORCH, output_dir=tmp_path), Machine(environ=dict(os.environ))))
    assert list(tmp_path.iterdir()) == []

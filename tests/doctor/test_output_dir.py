"""Whether the output directory can be written, is seen by all nodes, and has room."""

import json
from pathlib import Path

import pytest

from bridge_profiling.doctor.profiling import check_output_dir
from bridge_profiling.doctor.trace_size import estimate
from tests.doctor.conftest import FakeMachine, request_for

PROFILED = "profiling.use_pytorch_profiler=true"
TORCH = (PROFILED, "train.train_iters=50")
MODEL = ("model.num_layers=12", "train.micro_batch_size=2", "train.global_batch_size=8")
#: As /proc/mounts is laid out: the later of two mounts on one point is seen, and a space is written \040.
MOUNTS = """/dev/vda / ext4 rw,relatime 0 0
server:/export {place}/nfs nfs4 rw,relatime,vers=4.2 0 0
tmpfs {place}/shm tmpfs rw,size=1k 0 0
overlay {place}/over overlay rw,lowerdir=/a 0 0
a {place}/two\\040words ext4 rw 0 0
b {place}/two\\040words gpfs rw 0 0
"""


@pytest.fixture
def verdicts(tmp_path):
    """Verdicts by check on a run whose output directory is below the test's own, on a machine with these fields."""

    def check(*arguments, place="", fields=None, **request):
        request = request_for(*arguments, output_dir=tmp_path / place, **request)
        return {verdict.check: verdict for verdict in check_output_dir(request, FakeMachine(**fields or {}))}

    return check


@pytest.mark.parametrize(
    ("folder", "nodes", "status", "said"),
    [
        ("nfs", 2, "ok", "on nfs4, a network file system"),
        ("two words", 2, "ok", "on gpfs"),
        ("shm", 2, "fails", "no other machine sees it"),
        ("over", 2, "fails", "lost with the job or container"),
        ("disk", 2, "warning", "only if it is exported"),
        ("nfs", 1, None, ""),
        ("shm", 1, "warning", "lost with the container or the machine"),
    ],
)
def test_the_file_system_decides_who_sees_it(tmp_path, verdicts, folder, nodes, status, said):
    (tmp_path / folder).mkdir()
    mounts = {"/proc/mounts": MOUNTS.format(place=tmp_path)}
    found = verdicts(*TORCH, place=folder, nodes=nodes, fields={"recorded": mounts})
    shared = found.get("lasting" if nodes == 1 else "shared by the nodes")
    assert (shared and shared.status, said in (shared.found if shared else "")) == (status, True), shared


def test_a_file_in_its_place_fails(tmp_path, verdicts):
    (tmp_path / "profiles").write_text("")
    verdict = verdicts(*TORCH, place="profiles")["output directory"]
    assert (verdict.status, "Not a directory" in verdict.found) == ("fails", True)


@pytest.mark.parametrize("profiler", [PROFILED, "profiling.use_nsys_profiler=true"])
def test_little_room_is_a_warning_and_much_is_ok(verdicts, profiler):
    """In the output directory, and in the directory where nsys collects, which is checked last."""
    arguments = (*MODEL, profiler, "profiling.profile_ranks=[0,1]")
    needed = 2 * estimate(request_for(*arguments, world_size=2)).peak
    for free, status in ((needed * 3, "ok"), (needed * 1.9, "warning"), (needed * 0.6, "warning"), (needed * 0.4, "fails")):
        found = verdicts(*arguments, world_size=2, nodes=1, fields={"free": free})
        assert found["free space"].status == status
        assert ("nsys" in found["free space"].found) == (profiler != PROFILED)
        assert (found["trace size"].status, "factor of 2" in found["trace size"].found) == ("ok", True)


def test_the_environment_says_where_when_the_settings_do_not(tmp_path):
    here = FakeMachine(environ={"BRIDGE_PROFILING_DIR": str(tmp_path / "named")})
    (tmp_path / "set").mkdir()
    for arguments, place in (((), "named"), ((f"profiling.output_dir={tmp_path}/set",), "set")):
        assert f"{tmp_path}/{place} can be written" in next(check_output_dir(request_for(*TORCH, *arguments), here)).found
    (elsewhere,) = check_output_dir(request_for(*TORCH, elsewhere="other machines"), here)
    assert elsewhere.status == "unknown"


CAPTURES = json.loads(Path(__file__).with_name("trace_sizes.json").read_text())


def test_no_estimate_is_farther_off_than_said_from_what_was_measured_on_h200s():
    assert len(CAPTURES) > 50
    for capture in CAPTURES:
        arguments = f"{capture['settings']} {capture['options']}".split()
        size = estimate(request_for(*arguments, world_size=capture["world_size"]))
        assert (size.uncertainty, size.caveat) == (2, "")
        for kind, measured in capture["bytes"].items():
            assert measured / 2 < size.files[kind] < measured * 2, capture


@pytest.mark.parametrize(
    ("arguments", "world_size", "uncertainty", "said"),
    [
        ((*MODEL, "model.num_moe_experts=8"), 1, 4, "experts"),
        ((*MODEL, "model.transformer_impl=transformer_engine"), 1, 4, "Transformer Engine"),
        (MODEL[:1], 1, 30, "assuming 8 micro-batches,"),
        (MODEL[1:], 1, 30, "assuming 12 layers,"),
    ],
)
def test_features_never_measured_and_models_of_unknown_size_are_named(verdicts, arguments, world_size, uncertainty, said):
    verdict = verdicts(PROFILED, *arguments, world_size=world_size, nodes=1)["trace size"]
    assert (f"within a factor of {uncertainty}, " in verdict.found, said in verdict.found) == (True, True)
    unknown = uncertainty == 30
    assert (verdict.status, "model.num_layers" in verdict.instead) == ("unknown" if unknown else "ok", unknown)

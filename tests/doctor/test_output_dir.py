"""Whether the output directory can be written and is seen by all nodes."""

import pytest

from bridge_profiling.doctor.profiling import check_output_dir
from tests.doctor.conftest import FakeMachine, request_for

TORCH = ("profiling.use_pytorch_profiler=true", "train.train_iters=50")
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


def test_the_environment_says_where_when_the_settings_do_not(tmp_path):
    here = FakeMachine(environ={"BRIDGE_PROFILING_DIR": str(tmp_path / "named")})
    (tmp_path / "set").mkdir()
    for arguments, place in (((), "named"), ((f"profiling.output_dir={tmp_path}/set",), "set")):
        assert f"{tmp_path}/{place} can be written" in next(check_output_dir(request_for(*TORCH, *arguments), here)).found
    (elsewhere,) = check_output_dir(request_for(*TORCH, elsewhere="other machines"), here)
    assert elsewhere.status == "unknown"

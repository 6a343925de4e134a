"""Trainings that end inside their window, on real GPUs: the error is the training's own, and what was captured is there."""

import pytest

from tests.gpu.kernels import ended_by_sigterm, kernels_of

pytestmark = [pytest.mark.needs("cuda", "megatron", "nemo_run", "nsys_on_path"), pytest.mark.timeout(900)]

two_gpus = pytest.mark.needs("gpus2")
PLANTED = "ValueError: planted: the training broke"

STRUCK = ["failing-torch", "one-fails-torch", "one-fails-nsys"]
TERMINATED = ["terminated-torch", "terminated-nsys"]
ALONE = ["terminated-alone-torch", "terminated-alone-nsys"]


def check_capture(job, rank):
    """A rank's capture of a training that was cut is `partial`, and can be read: whole iterations and their kernels."""
    manifest = job.manifests[rank]
    assert manifest["status"] == "partial", manifest["reason"]
    captured = manifest["captured"]["iterations"]
    assert captured == list(range(job.spec.window[0], captured[-1] + 1))
    (source,) = job.spec.sources
    tables = job.tables(rank, source)
    # nsys' own range of an iteration that was cut is in its report; the manifest's notes say that it is no whole one.
    marked = [
        iteration for iteration in tables["iterations"]["iteration"].to_pylist() if iteration not in manifest["interrupted"]
    ]
    assert marked == captured
    kernels = kernels_of(tables)
    assert all(kernels[iteration] == kernels[captured[0]] for iteration in captured[1:])
    assert sum(kernels[captured[0]].values()) > 100


@two_gpus
@pytest.mark.parametrize("job", STRUCK, indirect=True)
def test_an_exception_is_the_jobs_own_nothing_hangs_and_what_was_captured_before_it_is_there(job):
    assert job.returncode == 1, job.tail
    assert PLANTED in job.output
    for rank in job.spec.selected if job.name == "failing-torch" else (1,):
        check_capture(job, rank)
        assert job.manifests[rank]["captured"]["iterations"] == [8, 9]
        assert "ValueError: planted" in job.manifests[rank]["reason"]
        assert job.name != "failing-torch" or job.manifests[rank]["interrupted"] == [10]


@pytest.mark.parametrize("job", [*(pytest.param(name, marks=two_gpus) for name in TERMINATED), *ALONE], indirect=True)
def test_sigterm_to_the_launcher_or_the_rank_leaves_what_each_rank_captured_that_could_react(job):
    """A rank that is started without a launcher ends with the exit code of the signal."""
    assert job.returncode == 143 if job.spec.direct else job.returncode not in (None, 0), job.tail
    for rank in ended_by_sigterm(job):
        check_capture(job, rank)

"""A running job of two ranks, profiled on request twice; every other request is refused, and training is unchanged."""

import io
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.cli import main
from tests.capture.conftest import Run
from tests.forked_ranks import run_ranks
from tests.system.jobs import wait_until

pytestmark = pytest.mark.integration


def train(folder: Path) -> None:
    """Until FOLDER/stop is there, on two connected ranks; writes FOLDER/losses-RANK.json."""
    rank, state, losses, stop = dist.get_rank(), torch.zeros(8), [], torch.zeros(1)
    # Ten polls a second, so that a request is carried out within half a second.
    config = ProfilingConfig(on_demand_seconds=0.1)
    with ProfilingHook(config, rank=rank, world_size=2, output_dir=folder / "profiles") as hook:
        while not stop:
            with hook.iteration(len(losses)):
                gradients = torch.full((8,), float(len(losses) + rank))
                dist.all_reduce(gradients)
                state = torch.sin(state + gradients)
                losses.append(state.sum().item().hex())
                time.sleep(0.02)
            stop = torch.tensor(float((folder / "stop").exists()))
            dist.all_reduce(stop)
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))


def type_trigger(folder: Path, *words: object) -> tuple[int, str, str]:
    """Type `bridge-profiling trigger …`: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["bridge-profiling", "trigger", str(folder), *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code or 0, out.getvalue(), err.getvalue()


def test_a_running_job_is_profiled_on_request_twice_every_other_request_is_refused_and_training_is_unchanged(tmp_path):
    run = Run(tmp_path / "profiles")
    job = ThreadPoolExecutor(1).submit(run_ranks, train, tmp_path, folder=tmp_path, ranks=2)
    try:
        wait_until(lambda: (status := run.requests.status()) and status.completed >= 20)

        # Refused by the client, and by the job: nothing is changed by any of these.
        refused = {"iteration 1 is past": type_trigger(tmp_path, "--start", 1)}
        refused["--ranks some is not a list of ranks"] = type_trigger(tmp_path, "--ranks", "some")
        (run.requests.path / "by-hand").write_text('{"iterations": 3, "sta')
        os.rename(run.requests.path / "by-hand", run.requests.path / "request.json")
        wait_until(run.refusals)

        # The first capture begins far enough away for another to be asked for meanwhile.
        start = run.requests.status().iteration + 75
        first = type_trigger(tmp_path, "--iterations", 3, "--start", start, "--ranks", 1, "--reason", "slow", "--json")
        refused["overlap another request's window"] = type_trigger(tmp_path, "--start", start + 1)
        wait_until(lambda: run.requests.status().iteration > start + 3 and not run.requests.status().open)

        # The second, until it is written: where it may begin is left to the job.
        recorded = ["--record-shapes", "--with-stack", "--set", "pytorch_profiler_profile_memory=true"]
        code, printed, _ = type_trigger(tmp_path, "--iterations", 1, "--ranks", "all", *recorded, "--wait")
        assert code == 0, printed
    finally:
        (tmp_path / "stop").touch()
        ended = job.result()
    refused["the job has ended: training ended after iteration"] = type_trigger(tmp_path)

    # The rank asked for is profiled in the iterations asked for.
    assert (first[0], first[2]) == (0, "")
    answer, folder = json.loads(first[1]), f"iter-{start}-{start + 3}"
    assert (answer["silent"], {rank: one["status"] for rank, one in answer["answers"].items()}) == ([], {"1": "armed"})
    assert Path(answer["manifests"]).name == folder
    assert run.outcome(folder, 1) == ("complete", [start, start + 1, start + 2])
    assert [path.name for path in (run.root / "torch" / folder).iterdir()] == ["rank-1.pt.trace.json.gz"]
    trigger = run.manifest(folder, 1)["trigger"]
    assert (trigger["kind"], trigger["reason"], trigger["requested_at"][-6:]) == ("request", "slow", "+00:00")

    # With --wait the command ends when all is written, and prints where.
    place = Path(printed.splitlines()[-2].removeprefix("captured 2 ranks: "))
    for rank in (0, 1):
        assert "[memory]" in {event["name"] for event in run.trace(place.name, rank)}, "the setting is the request's"
        config = run.manifest(place.name, rank)["config"]
        assert (config["record_shapes"], config["pytorch_profiler_collect_callstack"]) == (True, True)

    # There are no other captures, and training is unchanged.
    assert ended.exit_codes == [0, 0], ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("Unterminated string") == 1, "each refusal is logged once"
    assert len(run.folders()) == len(list((run.root / "torch").iterdir())) == 2
    assert sorted(path.name for path in run.requests.path.iterdir()) == [
        "accepted",
        "answers",
        "done",
        "progress.json",
        "refused",
        "withdrawn",
    ]
    assert not [*(run.requests.path / "answers").iterdir(), *(run.requests.path / "accepted").iterdir()]
    losses = [json.loads((tmp_path / f"losses-{rank}.json").read_text()) for rank in (0, 1)]
    state = torch.zeros(8)
    alone = [(state := torch.sin(state + (2.0 * each + 1))).sum().item().hex() for each in range(len(losses[0]))]
    assert losses == [alone, alone]

    for reason, (code, out, err) in refused.items():
        assert (code, out) == (2, "")
        assert reason in err
    assert any("the request cannot be read; Unterminated string" in reason for reason in run.refusals())

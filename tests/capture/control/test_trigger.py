"""A running job of two ranks, profiled on request twice; every other request is refused, and training is unchanged."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bridge_profiling.capture.control.protocol import JobStatus, RequestDirectory
from bridge_profiling.cli import main
from tests.capture.conftest import iterations_in

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("triggered_training.py")

#: Ten polls a second, so that a request is carried out within half a second.
SETTINGS = {"on_demand_seconds": 0.1}


def launch(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(SCRIPT), str(folder), json.dumps(SETTINGS)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "BRIDGE_PROFILING"))}
    with (folder / "output").open("w") as output:
        environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def trained_alone(count: int) -> list[list[str]]:
    """The losses of both ranks, of the same training in this process and without a hook."""
    models = []
    for _ in (0, 1):
        torch.manual_seed(0)
        models.append(torch.nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    losses: list[list[str]] = [[], []]
    for iteration in range(count):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss = model(torch.full((4, 8), float(iteration % 7 + rank))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            losses[rank].append(loss.item().hex())
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            total = parameters[0].grad + parameters[1].grad
            for parameter in parameters:
                parameter.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
    return losses


def until(condition, seconds=240.0):
    """What a condition gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
    return found


class Job:
    """The running job, what was typed at it, and what became of that."""

    def __init__(self, folder: Path, capture) -> None:
        self.folder, self.profiles = folder, folder / "profiles"
        self.requests = RequestDirectory(self.profiles)
        self._capture = capture
        self.process = launch(folder)

    @property
    def status(self) -> JobStatus | None:
        return self.requests.status()

    def is_free(self) -> bool:
        return self.status is not None and self.status.open is None

    def type(self, *words: object) -> tuple[int, str, str]:
        """Type `bridge-profiling trigger …`: exit code, standard output, standard error."""
        arguments, code = sys.argv, 0
        sys.argv = ["bridge-profiling", "trigger", str(self.folder), *map(str, words)]
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
        finally:
            sys.argv = arguments
        said = self._capture.readouterr()
        return code, said.out, said.err

    def drop(self, content: str | bytes, name: str = "by-hand") -> str:
        """Put a request there by hand; the reason for which it is refused."""
        refused = self.requests.path / "refused"
        before = set(refused.glob("*.json"))
        (self.requests.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        os.rename(self.requests.path / name, self.requests.path / "request.json")
        [new] = until(lambda: set(refused.glob("*.json")) - before)
        return json.loads(new.read_text())["refused"]

    def trace(self, folder: str, rank: int) -> list[int]:
        with gzip.open(self.profiles / "torch" / folder / f"rank-{rank}.pt.trace.json.gz", "rt") as file:
            return iterations_in(json.load(file))

    def manifest(self, folder: str, rank: int) -> dict:
        return json.loads((self.profiles / "manifest" / folder / f"rank-{rank}.json").read_text())


def refusal(typed: tuple[int, str, str]) -> str:
    code, out, err = typed
    assert (code, out) == (2, "")
    return err


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Everything typed at one running job, in order; each test checks one part."""
    folder = tmp_path_factory.mktemp("job")

    class Reader:
        """Captures what `main` prints, in a fixture that outlives a test."""

        def __init__(self) -> None:
            import contextlib
            import io

            self._out, self._err = io.StringIO(), io.StringIO()
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(contextlib.redirect_stdout(self._out))
            self._stack.enter_context(contextlib.redirect_stderr(self._err))

        def readouterr(self):
            said = type("Said", (), {"out": self._out.getvalue(), "err": self._err.getvalue()})
            for text in (self._out, self._err):
                text.seek(0)
                text.truncate()
            return said

        def close(self) -> None:
            self._stack.close()

    reader = Reader()
    job = Job(folder, reader)
    typed: dict[str, object] = {"job": job}
    try:
        until(lambda: job.status and job.status.completed >= 20)

        # Refused: nothing is changed by any of these.
        typed["past"] = refusal(job.type("--start", 1))
        typed["wrong rank"] = refusal(job.type("--ranks", "0,2"))
        typed["no rank"] = refusal(job.type("--ranks", "some"))
        typed["both"] = refusal(job.type("--profiler", "torch", "--profiler", "nsys"))
        typed["nsys"] = refusal(job.type("--profiler", "nsys"))
        typed["memory"] = refusal(job.type("--profiler", "memory"))
        typed["none"] = refusal(job.type("--iterations", 0))
        typed["unknown"] = refusal(job.type("--profiler", "vtune"))
        typed["half-written"] = job.drop('{"iterations": 3, "sta')
        typed["not text"] = job.drop(b"\xff\xfe\x00")
        typed["by hand, past"] = job.drop('{"iterations": 2, "start": 0}')
        typed["by hand, wrong rank"] = job.drop('{"iterations": 2, "ranks": [7]}')
        typed["by hand, unknown key"] = job.drop('{"iterations": 2, "starts": 9}')
        typed["by hand, not a number"] = job.drop('{"iterations": "two"}')
        typed["by hand, slow"] = job.drop('{"iterations": 2, "kind": "slow_iteration"}')

        # The first capture: where it may begin is left to the job.
        typed["first"] = job.type("--iterations", 2, "--ranks", "all", "--reason", "it feels slow", "--json")
        until(job.is_free)

        # The second: far enough away for others to be refused meanwhile.
        start = job.status.iteration + 75
        typed["second"] = job.type("--iterations", 3, "--start", start, "--ranks", 1)
        typed["start"] = start
        typed["open"] = refusal(job.type("--iterations", 1))
        typed["by hand, open"] = job.drop('{"iterations": 1}')
        until(lambda: job.status.iteration > start + 3 and job.is_free())

        (folder / "stop").touch()
        typed["exit"] = job.process.wait(timeout=240)
        typed["output"] = (folder / "output").read_text()
        typed["ended"] = refusal(job.type())
    finally:
        reader.close()
        job.process.kill()
    return typed


def test_the_job_is_profiled_on_both_ranks_in_the_accepted_iterations(story):
    code, out, err = story["first"]
    assert (code, err) == (0, "")
    accepted = json.loads(out)
    assert (accepted["silent"], {one["status"] for one in accepted["answers"].values()}) == ([], {"armed"})
    start = accepted["accepted"]["start"]
    folder = f"iter-{start}-{start + 2}"
    assert Path(accepted["manifests"]).name == folder
    for rank in (0, 1):
        assert story["job"].trace(folder, rank) == [start, start + 1]
        manifest = story["job"].manifest(folder, rank)
        assert (manifest["status"], manifest["captured"]["iterations"]) == ("complete", [start, start + 1])
        assert manifest["trigger"]["kind"] == "request"
        assert manifest["trigger"]["reason"] == "it feels slow"
        assert manifest["trigger"]["requested_at"].endswith("+00:00")


def test_it_is_profiled_a_second_time_on_the_given_rank_and_iterations(story):
    code, out, _ = story["second"]
    start = story["start"]
    assert code == 0, out
    assert f"accepted: iterations {start} to {start + 2} of rank 1 with torch" in out
    assert out.splitlines()[-1].endswith(f"/torch/iter-{start}-{start + 3}")
    assert story["job"].trace(f"iter-{start}-{start + 3}", 1) == [start, start + 1, start + 2]
    assert not (story["job"].profiles / "torch" / f"iter-{start}-{start + 3}" / "rank-0.pt.trace.json.gz").exists()


def test_there_are_no_other_captures_and_nothing_is_left_open(story):
    profiles = story["job"].profiles
    assert len(list((profiles / "manifest").iterdir())) == len(list((profiles / "torch").iterdir())) == 2
    assert sorted(path.name for path in (profiles / "on-demand").iterdir()) == ["answers", "done", "progress.json", "refused"]
    assert not list((profiles / "on-demand" / "answers").iterdir())
    done = [json.loads(path.read_text()) for path in (profiles / "on-demand" / "done").iterdir()]
    assert sorted(sorted(one["answers"]) for one in done) == [["0", "1"], ["1"]]


def test_training_is_unchanged(story):
    assert story["exit"] == 0, story["output"]
    assert "Traceback" not in story["output"]
    asked = [json.loads((story["job"].folder / f"losses-{rank}.json").read_text()) for rank in (0, 1)]
    assert asked == trained_alone(len(asked[0]))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("past", ["iteration 1 is past", "the job is at iteration", "Type --start"]),
        ("wrong rank", ["--ranks names 2, but the job has 2 ranks", "from 0 to 1", "--ranks=all"]),
        ("no rank", ["--ranks some is not a list of ranks"]),
        ("both", ["both need CUPTI"]),
        ("nsys", ["nsys cannot start in this job", "launched without it", "--profiler torch"]),
        ("memory", ["records CUDA allocations"]),
        ("none", ["iterations=0 is not a number from 1 to 1000", "--iterations 3"]),
        ("unknown", ["profilers=['vtune'] cannot start on demand", "torch, memory, nsys"]),
        ("open", ["another request is open: iterations", "Try again after iteration"]),
        ("ended", ["the job has ended: training ended after iteration"]),
        (
            "half-written",
            ["the request cannot be read", '{"iterations": 3'],
        ),
        ("not text", ["not a regular text file"]),
        ("by hand, past", ["iteration 0 is past"]),
        ("by hand, wrong rank", ["--ranks names 7, but the job has 2 ranks"]),
        ("by hand, unknown key", ["the request has unknown keys ['starts']", "its keys are iterations, start"]),
        ("by hand, not a number", ["request.iterations is 'two', not of type int"]),
        ("by hand, slow", ["the job makes no more captures of slow iterations"]),
        ("by hand, open", ["another request is open"]),
    ],
)
def test_every_other_request_is_refused_with_the_reason(story, request_, said):
    for part in said:
        assert part in story[request_]


def test_the_job_logs_each_refusal_once(story):
    assert story["output"].count("Unterminated string") == 1, story["output"]

"""Small real trainings under the real torch profiler, and readers of what they leave."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.control.directory import RequestDirectory
from bridge_profiling.capture.control.messages import CaptureRequest
from tests.frameworks.captured import iterations_in, read_trace


class Run:
    """Trains a small model under a hook, and reads back what the hook wrote."""

    def __init__(self, root: Path) -> None:
        self.root, self.requests = root, RequestDirectory(root)
        self.losses: list[str] = []

    def config(self, start: int = 4, end: int = 6, **settings: object) -> ProfilingConfig:
        return ProfilingConfig(profile_step_start=start, profile_step_end=end, **{"use_pytorch_profiler": True, **settings})

    def train(
        self,
        config: ProfilingConfig | None,
        iterations: Iterable[int],
        *,
        on_iteration: Callable[[int], object] = lambda iteration: None,
        between: Callable[[int, ProfilingHook], object] = lambda iteration, hook: None,
        until: Callable[[], object] | None = None,
        rank: int = 0,
        **hook: object,
    ) -> ProfilingHook:
        """Call `on_iteration` in each iteration and `between` after it; stop when `until` returns something true."""
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        deadline = time.monotonic() + 240
        with ProfilingHook(config, rank=rank, output_dir=self.root, **hook) as opened:
            for iteration in iterations:
                with opened.iteration(iteration):
                    with opened.range("forward-backward"):
                        loss = model(torch.full((4, 8), float(iteration % 7))).square().mean()
                        optimizer.zero_grad()
                        loss.backward()
                    on_iteration(iteration)
                    with opened.range("optimizer"):
                        optimizer.step()
                    self.losses.append(loss.item().hex())
                between(iteration, opened)
                if until is not None and until():
                    break
                assert time.monotonic() < deadline, "it never happened"
        return opened

    def listen(self, iterations: Iterable[int], on_iteration=lambda iteration: None, *, config=None, **how) -> ProfilingHook:
        """Train with a poll for requests every 30 ms, by default without a window."""
        config = config or self.config(use_pytorch_profiler=False, on_demand_seconds=0.03)

        def slowly(iteration: int) -> None:
            time.sleep(0.004)
            on_iteration(iteration)

        return self.train(config, iterations, on_iteration=slowly, **how)

    def request(self, **request: object) -> None:
        """Request a capture from inside an iteration: training does not run past its start before it is answered."""
        asked = CaptureRequest(**{"iterations": 2, **request})
        assert self.requests.submit(asked)
        while not (self.requests.answers(asked.id) or self.requests.refusal(asked.id)):
            time.sleep(0.002)

    def trace(self, folder: str, rank: int = 0) -> list[dict]:
        """The events of a trace."""
        return read_trace(self.root / "torch" / folder / f"rank-{rank}.pt.trace.json.gz")["traceEvents"]

    def manifest(self, folder: str, rank: int = 0) -> dict:
        return json.loads((self.root / "manifest" / folder / f"rank-{rank}.json").read_text())

    def outcome(self, folder: str, rank: int = 0) -> tuple[str, list[int] | None]:
        """The status of a capture, and the iterations in its trace (None without a trace), which the manifest lists too."""
        manifest = self.manifest(folder, rank)
        try:
            found = iterations_in(self.trace(folder, rank))
        except (FileNotFoundError, NotADirectoryError):
            found = None
        captured = manifest["captured"] or {"first": None, "last": None, "iterations": []}
        first, last = (found[0], found[-1]) if found else (None, None)
        assert captured == {"first": first, "last": last, "iterations": found or []}
        return manifest["status"], found

    def folders(self) -> list[str]:
        """The windows with a manifest, the earliest first."""
        names = [path.name for path in (self.root / "manifest").glob("*")]
        return sorted(names, key=lambda name: int(name.split("-")[1]))

    def refusals(self) -> list[str]:
        return [json.loads(path.read_text())["refused"] for path in (self.requests.path / "refused").glob("*.json")]

    def done(self) -> list[dict]:
        """The captures on demand that are over."""
        return [json.loads(path.read_text()) for path in (self.requests.path / "done").glob("*.json")]


def at(wanted: int, action: Callable[[], object]) -> Callable[[int], None]:
    """What to call in every iteration: the action in this one."""

    def on_iteration(iteration: int) -> None:
        if iteration == wanted:
            action()

    return on_iteration


def raising(error: BaseException) -> Callable[..., None]:
    """A function that raises this error, whatever it is called with."""

    def fail(*arguments: object, **options: object) -> None:
        raise error

    return fail


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "profiles")

"""One rank of one group: measures every case against its baseline without a profiler, then captures them.

Baseline and case take turns, so that changes of the machine affect both. All of that comes before the first profiler of the
process starts.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from bridge_profiling.integrations.ddp_fsdp import Profiling
from tools.injected_captures.everyday.more_plants import MORE_PLANTS
from tools.injected_captures.everyday.plants import PLANTS, Plant
from tools.injected_captures.everyday.setting import BEFORE, Case, Group, Recorder
from tools.injected_captures.everyday.table import GROUPS, small
from tools.injected_captures.everyday.third_plants import THIRD_PLANTS
from tools.injected_captures.everyday.training import Training

#: Iterations before anything is measured.
WARM_UP = 4

#: Iterations of a measured block: a multiple of 3, for what happens in every third one. And turns of baseline and case.
BLOCK, TURNS = 9, 3

#: Iterations after the window.
AFTER = 2

#: Seconds that one case may take, to be measured or to be captured.
CASE_SECONDS = 90

#: Bytes that a ballast leaves free. What trainings need has been allocated before.
LEFT_FREE = 4 << 30

_CUPTI_CALLS = 20


class Worker:
    """A rank of a group.

    Args:
        group: what is trained.
        rank: of this process.
        device: of this process.
        output: folder of the group's captures.
    """

    def __init__(self, group: Group, rank: int, device: torch.device, output: Path) -> None:
        self.group, self.rank, self.device, self.output = group, rank, device, output
        self.trainings: dict[str | None, Training] = {}
        self.measured: dict[str, Any] = {}

    def run(self) -> None:
        """Measure everything, then capture everything; a case that fails leaves the others alone."""
        self._guarded("baseline", lambda: self._build(None))
        for case in self.group.cases:
            self._guarded(case.name, lambda case=case: self._build(case))
        if self.group.setting.ballast and self.device.type == "cuda":
            self.ballast = torch.empty(torch.cuda.mem_get_info()[0] - LEFT_FREE, dtype=torch.uint8, device=self.device)
        for case in self.group.cases:
            if case.name in self.trainings:
                self._guarded(case.name, lambda case=case: self._measure(case))
        for recorder in ("hook", "torch.profiler") if self.group.both_recorders else (self.group.recorder,):
            name = f"{self.group.name}_{recorder.replace('.', '_')}"
            self._guarded(name, lambda name=name, recorder=recorder: self._capture(name, None, recorder, self.group.record))
        for case in self.group.cases:
            if case.name in self.trainings:
                record = self.group.record | case.record
                self._guarded(
                    case.name,
                    lambda case=case, record=record: self._capture(case.name, case.name, self.group.recorder, record),
                )

    def _guarded(self, name: str, step: Callable[[], None]) -> None:
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        started = time.perf_counter()
        try:
            step()
        except Exception:
            traceback.print_exc()
            print(f"{self.group.name} rank {self.rank}: {name} FAILED", flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
        seconds = time.perf_counter() - started
        if self.rank == 0:
            print(f"{self.group.name}: {name} {seconds:.1f} s", flush=True)

    def _build(self, case: Case | None) -> None:
        setting = self.group.setting if case is None else replace(self.group.setting, **case.change)
        ranks = () if case is None else case.ranks
        kind = Plant if case is None or case.plant is None else (PLANTS | MORE_PLANTS | THIRD_PLANTS)[case.plant]
        plant = kind(ranks=ranks, rank=self.rank, **({} if case is None else case.numbers))
        training = Training(setting, plant, self.rank, self.device)
        training.choose_precision()
        training.run(WARM_UP)
        training.wait()
        self.trainings[None if case is None else case.name] = training

    def _measure(self, case: Case) -> None:
        """Let the baseline and the case take turns, a block each."""
        blocks: dict[str, list[float]] = {"baseline": [], "injected": []}
        each: dict[str, list[list[float]]] = {"baseline": [], "injected": []}
        turns, block = (TURNS, BLOCK) if self.device.type == "cuda" else (1, 1)
        for _ in range(turns):
            for kind, training in (("baseline", self.trainings[case.over]), ("injected", self.trainings[case.name])):
                with _under_way(training):
                    started = time.perf_counter()
                    each[kind].append([round(ms, 3) for ms in training.run(block)])
                    training.wait()
                    blocks[kind].append((time.perf_counter() - started) * 1e3 / block)
        self.measured[case.name] = {"blocks_ms": blocks, "host_iterations_ms": each}
        path = self.output / f"measured-rank-{self.rank}.json"
        path.write_text(json.dumps(self.measured, indent=1) + "\n", encoding="utf-8")
        if self.rank == 0:
            means = "  ".join(f"{kind} {' '.join(f'{ms:.1f}' for ms in found)}" for kind, found in blocks.items())
            print(f"{self.group.name}: {case.name}: {means}", flush=True)

    def _capture(self, name: str, training: str | None, recorder: Recorder, record: dict[str, Any]) -> None:
        folder = self.output / name
        folder.mkdir(parents=True, exist_ok=True)
        with _under_way(self.trainings[training]) as chosen:
            (self._with_hook if recorder == "hook" else self._with_torch)(chosen, folder, record)
            chosen.wait()
        if self.device.type == "cuda":
            # Kineto detaches CUPTI at a CUDA call after one of its own threads is ready for it.
            for _ in range(_CUPTI_CALLS):
                torch.cuda.synchronize(self.device)
                time.sleep(0.01)

    def _with_hook(self, training: Training, folder: Path, record: dict[str, Any]) -> None:
        first = BEFORE["hook"]
        settings = {
            "use_pytorch_profiler": True,
            "profile_step_start": first,
            "profile_step_end": first + self.group.iterations,
            "profile_ranks": "all",
            "on_demand": False,
            "record_shapes": record.get("record_shapes", False),
            "pytorch_profiler_collect_callstack": record.get("with_stack", False),
            "pytorch_profiler_profile_memory": record.get("profile_memory", False),
        }
        micro_batches = training.setting.micro_batches
        with Profiling(training.model, training.optimizer, output_dir=folder, **settings) as profiling:
            batches = training.batches(first + self.group.iterations + AFTER)
            for place, batch in enumerate(profiling.steps(batches, micro_batches=micro_batches)):
                training.micro_batch(batch, *divmod(place, micro_batches))

    def _with_torch(self, training: Training, folder: Path, record: dict[str, Any]) -> None:
        def save(finished: profile) -> None:
            finished.export_chrome_trace(str(folder / f"rank-{self.rank}.pt.trace.json"))

        warm_up, before, micro_batches = 2, BEFORE["torch.profiler"], training.setting.micro_batches
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        plan = schedule(wait=before - warm_up, warmup=warm_up, active=self.group.iterations, repeat=1)
        with profile(activities=activities, schedule=plan, on_trace_ready=save, **record) as profiler:
            for place, batch in enumerate(training.batches(before + self.group.iterations + AFTER)):
                iteration, number = divmod(place, micro_batches)
                training.micro_batch(batch, iteration, number)
                if number == micro_batches - 1:
                    profiler.step()


@contextmanager
def _under_way(training: Training) -> Iterator[Training]:
    """The training's plant and precision while it runs, and devices that are done at both ends."""
    training.choose_precision()
    training.plant.enter()
    training.load_ahead()
    training.wait()
    try:
        yield training
    finally:
        training.plant.leave()


def main() -> None:
    """Run a rank of a group: load everything, wait for a line on standard input, and end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", required=True, choices=GROUPS)
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--gpu", type=int, help="number of its GPU; none for a CPU and small sizes")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    group, rank, gpu = GROUPS[options.group], options.rank, options.gpu
    if gpu is None:
        group = small(group)
    if group.setting.compiled:
        importlib.import_module("torch._inductor.compile_fx")
        # Trainings of one process share what is compiled of their blocks.
        torch._dynamo.config.recompile_limit = 64
    if not sys.stdin.readline():
        return
    ranks = group.setting.ranks
    os.chdir(options.output)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port), "TEARDOWN_CUPTI": "1",
    }  # fmt: skip
    code = 0
    try:
        device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(device)
        if ranks > 1:
            dist.init_process_group("gloo" if gpu is None else "nccl", device_id=None if gpu is None else device)
        Worker(group, rank, device, options.output).run()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A pending teardown of CUPTI can hold up an ordinary exit.
    os._exit(code)


if __name__ == "__main__":
    main()

"""The command that profiles one kernel of a run with Nsight Compute, on one rank, in a steady iteration.

Launches are skipped by number, not by NVTX range: ranges are a thread's own, and torch launches the backward pass from another
thread than the one that marks iterations. Options: https://docs.nvidia.com/nsight-compute/NsightComputeCli/. Runs nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge_profiling.analysis.ncu_filter import kernel_filter
from bridge_profiling.manifest import RankCapture
from bridge_profiling.traces.types import RankInfo

#: Iterations before the one that is profiled: they allocate, compile and tune.
_WARMUP = 3

#: Launches that are profiled at the most. Each is replayed some forty times.
_MOST_LAUNCHES = 4

_UNKNOWN_COMMAND = "<your command>"
_UNKNOWN_LAUNCHER = "<your launcher, as srun or torchrun --no-python>"

#: Settings by which a capture of this run was made: two profilers cannot have the device's counters at once.
_PROFILERS = ("use_pytorch_profiler", "use_nsys_profiler")

#: What `bridge-profiling run` puts before a script, with its options.
_RUN = ["-m", "bridge_profiling.easy.start"]

#: How processes are started that cannot be started again so: their parent told them what to do.
_STARTED_BY_A_PARENT = ("multiprocessing.spawn", "multiprocessing.forkserver", "ray/_private/workers/")

#: What DeepSpeed's launcher gives each rank, every one another.
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")


@dataclass(frozen=True)
class NcuCommand:
    """What to type.

    Args:
        command: for a shell.
        notes: sentences: what to fill in, and what else it needs.
    """

    command: str
    notes: list[str]


def ncu_command(
    kernel: str,
    info: RankInfo,
    counts: Mapping[str, int],
    *,
    iterations: int,
    manifest: RankCapture | None,
    hosts: int | None,
) -> NcuCommand:
    """The command for a kernel of a rank.

    Args:
        kernel: its name, as the trace has it.
        info: about the rank's trace.
        counts: how often each kernel ran on that rank, in the capture.
        iterations: captured on that rank; 0 where none is marked.
        manifest: the rank's; None for captures that are not ours.
        hosts: on how many hosts the job ran; None when unknown.
    """
    chosen = kernel_filter(kernel, [name for name in counts if name != kernel])
    matched = counts[kernel] + sum(counts[name] for name in chosen.also)
    launches = max(round(matched / iterations), 1) if iterations else 0
    options = [
        "ncu", "--set", "full", *chosen.options,
        *(["--launch-skip", str(_WARMUP * launches)] if launches else []),
        "--launch-count", str(min(launches or 1, _MOST_LAUNCHES)),
        "--target-processes", "all", "-o", f"ncu-rank-{info.rank}",
    ]  # fmt: skip
    command, notes, any_launcher = _training(manifest)
    world_size = info.world_size or 1
    if world_size > 1:
        hosts = hosts if any_launcher else None
        text = _one_of_many(options, info.rank, world_size, hosts, command)
        notes.append(
            f"only rank {info.rank} runs under ncu; the others wait for it in their next collective while it replays the kernel"
        )
        if hosts != 1:
            notes.append("start it as the training was started, with this shell line in place of the training's command")
    else:
        text = f"{shlex.join(options)} {command}"
    if chosen.also:
        notes.append(f"the name also fits {len(chosen.also)} other kernels of the capture, which no name tells apart")
    if not launches:
        notes.append("no iteration is marked, so the first launch is profiled: --launch-skip leaves out the warm-up")
    return NcuCommand(text, notes)


def _one_of_many(options: Sequence[str], rank: int, world_size: int, hosts: int | None, command: str) -> str:
    """A launcher's command in which one rank starts ncu, and the others what they always start."""
    # Both torchrun's variable and srun's: the same line works under either.
    chosen = f'if [ "${{RANK:-$SLURM_PROCID}}" = {rank} ]; then exec {" ".join(map(_inside, options))} "$@"; fi; exec "$@"'
    launcher = f"torchrun --nproc-per-node {world_size} --no-python" if hosts == 1 else _UNKNOWN_LAUNCHER
    return f"{launcher} sh -c {shlex.quote(chosen)} sh {command}"


def _inside(text: str) -> str:
    """Quoted for a script that is itself quoted with single quotes: with double ones, where nothing in the text minds."""
    if shlex.quote(text) == text:
        return text
    return f'"{text}"' if not re.search(r'["$`\\!]', text) else shlex.quote(text)


def _training(manifest: RankCapture | None) -> tuple[str, list[str], bool]:
    """The command that trains, with its own profilers off; what is to be said about it; whether any launcher may start it."""
    command = _command(manifest.manifest.command if manifest is not None else [])
    if manifest is None or command is None:
        return (
            _UNKNOWN_COMMAND,
            [
                "the capture does not say with which command it was made: put that in, with its own profiler switched off (two "
                "profilers cannot have the device's counters at once)"
            ],
            True,
        )
    script = _without_run(command)
    if script is not None:
        return shlex.join(script), [], True
    same = [part for part in command if not _LOCAL_RANK.fullmatch(part)]
    on = [name for name in _PROFILERS if manifest.manifest.config.get(name)]
    if any(part.endswith("launch/pretrain.py") for part in command):
        return shlex.join([*same, *(f"profiling.{name}=false" for name in on)]), [], True
    notes = ["switch that run's own profiler off: two profilers cannot have the device's counters at once"]
    if same != command:
        notes.append("the launcher, as deepspeed --no_python, adds each rank's own --local_rank")
    return shlex.join(same), notes, same == command


def _command(found: list[str]) -> list[str] | None:
    """A manifest's command; None where it has none that a shell could start."""
    if not found:
        return None
    return None if any(mark in part for part in found[1:3] for mark in _STARTED_BY_A_PARENT) else found


def _without_run(command: list[str]) -> list[str] | None:
    """The script that `bridge-profiling run` has profiled, as it runs without; None for any other command."""
    place = next((place for place in range(len(command)) if command[place : place + 2] == _RUN), None)
    if place is None:
        return None
    left = command[place + 2 :]
    module: list[str] = []
    while left and left[0].startswith("-"):
        module = ["-m"] if left[0] == "-m" else module
        left = left[2 if left[0].startswith("--") and "=" not in left[0] else 1 :]
    return [*command[:place], *module, *left] if left else None

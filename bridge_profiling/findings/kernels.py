"""One kernel that takes a large share of a rank's compute, and the command that profiles it with Nsight Compute.

The command profiles one rank in a steady iteration.

Options: https://docs.nvidia.com/nsight-compute/NsightComputeCli/. Launches are skipped by number, not by NVTX range: ranges
belong to a thread, and torch launches the backward pass from another thread than the one that marks iterations.

By default, ncu compares `--kernel-name` with the function's own name, without return type, namespaces, template arguments and
parameters. When several instances of one template ran, it must compare the whole name (`--kernel-name-base demangled`), and it
spells that differently from torch's profiler: `(int)4` for `4`, `<unnamed>` for `(anonymous namespace)`, `T1` for parameter
types, `[lambda(int) (instance 1)]` for `{lambda(int)#1}`. So the expression has only words of the template arguments, in order,
with anything between them: for each other kernel of its name, one that it lacks.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bridge_profiling.common.printable import shell_word
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import Evidence
from bridge_profiling.findings.types import Confidence, Event, Thresholds
from bridge_profiling.manifest import RankCapture
from bridge_profiling.settings.recording import FLAGS, option
from bridge_profiling.traces.types import RankInfo


def dominant_kernel(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """A finding for each kernel that exceeds the threshold's share of any rank's compute."""
    compute_ns: dict[int, float] = defaultdict(float)
    kernels: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    counts: dict[int, dict[str, int]] = defaultdict(dict)
    for row in grids.facts.kernels_by_rank.to_pylist():
        counts[row["rank"]][row["name"]] = row["count"]
        if row["kind"] == "compute":
            compute_ns[row["rank"]] += row["total_ns"]
            kernels[row["name"]][row["rank"]] = row
    chosen = []
    for name, rows in kernels.items():
        shares = {rank: row["total_ns"] / compute_ns[rank] for rank, row in rows.items() if compute_ns[rank]}
        if max(shares.values(), default=0.0) > thresholds.dominant_kernel:
            chosen.append((shares, name, rows))
    chosen.sort(key=lambda each: (-max(each[0].values()), each[1]))
    infos, hosts = grids.facts.infos, {info.host for info in grids.facts.infos}
    # The hosts of ranks without a capture are unknown.
    complete = None not in hosts and all(info.world_size == len(infos) for info in infos)
    sure, reason = grids.confidence()
    for shares, name, rows in chosen:
        ranks = sorted(rank for rank, share in shares.items() if share > thresholds.dominant_kernel)
        worst = max(ranks, key=lambda rank: shares[rank])
        row = rows[worst]
        ncu = ncu_command(
            name,
            next(info for info in infos if info.rank == worst),
            counts[worst],
            iterations=grids.captured_iterations[worst],
            manifest=next((manifest for manifest in grids.facts.manifests if manifest.rank == worst), None),
            hosts=len(hosts) if complete else None,
        )
        yield Evidence(
            ranks=ranks,
            measures={
                "kernel": name,
                "share_of_compute": {str(rank): round(shares[rank], 4) for rank in ranks},
                **{column: row[column] for column in ("count", "mean_ns", "max_ns")},
                "ncu_command": ncu.command,
                "ncu_notes": ncu.notes,
            },
            advice=["default", "runs"],
            values={"name": name[:80]},
            sure=(sure if sure is Confidence.high else Confidence.medium, reason),
            events=[Event(rank, name, duration_ns=rows[rank]["total_ns"], count=rows[rank]["count"]) for rank in ranks[:5]],
        )


#: Iterations before the profiled one, which allocate, compile and tune.
_WARMUP = 3

#: The most launches to profile: each is replayed about forty times.
_MOST_LAUNCHES = 4

#: Settings of this project's own profilers: only one profiler can use the device's counters.
_PROFILERS = ("use_pytorch_profiler", "use_nsys_profiler")

#: Options of `bridge-profiling run` without a value.
_RUN_FLAGS = frozenset(map(option, FLAGS))

#: What `bridge-profiling run` puts before a script, with its options.
_RUN = ["-m", "bridge_profiling.frameworks.start"]

#: Processes that cannot be started from their command, because a parent passed them their work.
_STARTED_BY_A_PARENT = ("multiprocessing.spawn", "multiprocessing.forkserver", "ray/_private/workers/")

_LAUNCHER = "<your launcher: srun or torchrun --no-python>"

#: The option that DeepSpeed's launcher gives each rank.
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")

#: Characters that end a name; spelled out, because ncu's dialect of regular expressions is not documented.
_END = "[^A-Za-z0-9_]"

#: Words that ncu spells differently, omits, or adds as the type of a number.
_OTHERWISE = frozenset(
    ["bool", "char", "const", "false", "int", "lambda", "long", "operator", "short", "signed", "true", "unsigned", "void"]
)

#: Operators that look like brackets of template arguments.
_OPERATORS = re.compile(r"operator\s*(?:->\*?|<=>|<<=?|>>=?|<=|>=|<|>)")

#: Names and numbers; `FillFunctor<int` is one, because ncu writes types before numbers, too.
_WORD = re.compile(r"\b[A-Za-z_]\w*<(?:bool|char|short|int|long)\b|\b[A-Za-z_]\w*|\b\d+")

#: Parameters or a cast, other brackets, and what a lambda takes, which tells instances apart.
_PARAMETERS = re.compile(r"\([^()]*\)")
_BRACKETS = re.compile(r"<[^<>]*>|\[[^][]*\]|\{[^{}]*\}")
_OF_LAMBDA = re.compile(r"lambda\(([^()]*)\)")

_MANGLED = re.compile(r"_Z\w+")


class NcuCommand(NamedTuple):
    """A command for a shell, and sentences about what to fill in and what else it needs."""

    command: str
    notes: list[str]


class KernelFilter(NamedTuple):
    """Options of ncu that select a kernel, and other kernels of the capture that they also select."""

    options: list[str]
    also: list[str]


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
        counts: executions of each kernel in the rank's capture.
        iterations: captured on the rank; 0 when none is marked.
        hosts: number of hosts of the job; None when unknown.
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
        # The variables of torchrun and of srun, so that the same line works with either.
        start = f'exec {" ".join(map(_inside, options))} "$@"'
        script = shell_word(f'if [ "${{RANK:-$SLURM_PROCID}}" = {info.rank} ]; then {start}; fi; exec "$@"')
        torchrun = hosts == 1 and any_launcher
        launcher = f"torchrun --nproc-per-node {world_size} --no-python" if torchrun else _LAUNCHER
        text = f"{launcher} sh -c {script} sh {command}"
        notes.append(f"Only rank {info.rank} runs under ncu; the others wait in their next collective during the replays.")
        if not torchrun:
            notes.append("Start it as you start the training, with this shell line instead of the training command.")
    else:
        text = f"{_joined(options)} {command}"
    if chosen.also:
        notes.append(f"The filter also matches {len(chosen.also)} other kernels of the capture: their names are too similar.")
    if not launches:
        notes.append("No iteration is marked, so the first launch is profiled; add --launch-skip to skip the warm-up.")
    return NcuCommand(text, notes)


def _joined(words: Sequence[str]) -> str:
    return " ".join(map(shell_word, words))


def _inside(text: str) -> str:
    """Quoted for a script in single quotes: with double quotes where the text allows it."""
    if shlex.quote(text) == text:
        return text
    return f'"{text}"' if not re.search(r'["$`\\!]', text) else shlex.quote(text)


def _training(manifest: RankCapture | None) -> tuple[str, list[str], bool]:
    """The training command with its own profilers off, notes about it, and whether any launcher can start it."""
    command = manifest.manifest.command if manifest is not None else []
    if manifest is None or not command or any(mark in part for part in command[1:3] for mark in _STARTED_BY_A_PARENT):
        note = "The capture does not record its command: fill it in, and turn its own profiler off."
        return "<your command>", [note], True
    script = _without_run(command)
    if script is not None:
        return _joined(script), [], True
    same = [part for part in command if not _LOCAL_RANK.fullmatch(part)]
    on = [name for name in _PROFILERS if manifest.manifest.config.get(name)]
    if any(part.endswith("launch/pretrain.py") for part in command):
        return _joined([*same, *(f"profiling.{name}=false" for name in on)]), [], True
    notes = ["Turn the run's own profiler off: only one profiler can use the device."]
    if same != command:
        notes.append("The launcher (deepspeed --no_python) adds each rank's own --local_rank.")
    return _joined(same), notes, same == command


def _without_run(command: list[str]) -> list[str] | None:
    """The script that `bridge-profiling run` profiled, without `bridge-profiling run`; None for other commands."""
    place = next((place for place in range(len(command)) if command[place : place + 2] == _RUN), None)
    if place is None:
        return None
    left = command[place + 2 :]
    module: list[str] = []
    while left and left[0].startswith("-"):
        module = ["-m"] if left[0] == "-m" else module
        takes_value = left[0].startswith("--") and "=" not in left[0] and left[0] not in _RUN_FLAGS
        left = left[2 if takes_value else 1 :]
    return [*command[:place], *module, *left] if left else None


def kernel_filter(name: str, others: Sequence[str]) -> KernelFilter:
    """The options that select a kernel among the others that ran."""
    if _MANGLED.fullmatch(name):
        return KernelFilter(["--kernel-name-base", "mangled", "--kernel-name", name], [])
    function = function_name(name)
    namesakes = [other for other in others if other != name and function_name(other) == function]
    if not namesakes:
        return KernelFilter(["--kernel-name", function], [])
    words = _words(name, function)
    # Of each namesake, a word that it lacks; a number only where no name helps.
    lacked = {other: [word for word in words if word not in _words(other, function)] for other in namesakes}
    chosen = {min(found, key=str.isdigit) for found in lacked.values() if found}
    ends = {word: "[^0-9]" if word.isdigit() else _END for word in words if word in chosen}  # a number can have a suffix
    expression = f"(^|{_END}){re.escape(function)}<" + "".join(f"(.*{_END})?{word}{end}" for word, end in ends.items())
    also = [other for other, found in lacked.items() if not found]
    return KernelFilter(["--kernel-name-base", "demangled", "--kernel-name", f"regex:{expression}"], also)


def function_name(name: str) -> str:
    """The name of a demangled kernel's function alone, as `--kernel-name-base function` compares it."""
    bare = _without(_BRACKETS, _without(_PARAMETERS, _plain(name)))
    words = [word for word in re.split(r"[<({[]", bare)[0].split() if word not in ("const", "volatile")]
    return words[-1].split("::")[-1] if words else name


def _plain(name: str) -> str:
    return _OPERATORS.sub("operator", name.replace("(anonymous namespace)", "").replace("<unnamed>", ""))


def _without(expression: re.Pattern[str], text: str) -> str:
    """The text without what matches, innermost first."""
    found = 1
    while found:
        text, found = expression.subn("", text)
    return text


def _words(name: str, function: str) -> list[str]:
    """The words of a function's template arguments that ncu spells alike, each once: no parameters of functions, no casts."""
    plain = _OF_LAMBDA.sub(r"lambda \1 ", _plain(name))
    arguments = _without(_PARAMETERS, plain).rpartition(f"{function}<")[2]
    return [word for word in dict.fromkeys(_WORD.findall(arguments)) if word not in _OTHERWISE]

"""One kernel that takes a large share of a rank's compute, and the command that profiles it with Nsight Compute.

The command profiles one rank in a steady iteration.

Options: https://docs.nvidia.com/nsight-compute/NsightComputeCli/. Launches are skipped by number, not by NVTX range: ranges
belong to a thread, and torch launches the backward pass from another thread than the one that marks iterations.

By default, ncu compares `--kernel-name` with the function's own name, without return type, namespaces, template arguments and
parameters. When several instances of one template ran, it must compare the whole name (`--kernel-name-base demangled`), and it
spells that differently from torch's profiler: `(int)4` for `4`, `<unnamed>` for `(anonymous namespace)`, `T1` for parameter
types, `[lambda(int) (instance 1)]` for `{lambda(int)#1}`. So the expression has only words of the template arguments, in order,
with anything between them: as few as separate the kernel from the others of its name.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import Evidence
from bridge_profiling.findings.types import Confidence, Event, Thresholds
from bridge_profiling.manifest import RankCapture
from bridge_profiling.printable import shell_word
from bridge_profiling.recording import FLAGS, option
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
_RUN = ["-m", "bridge_profiling.easy.start"]

#: Processes that cannot be started from their command, because a parent passed them their work.
_STARTED_BY_A_PARENT = ("multiprocessing.spawn", "multiprocessing.forkserver", "ray/_private/workers/")

_LAUNCHER = "<your launcher: srun or torchrun --no-python>"

#: The option that DeepSpeed's launcher gives each rank.
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")

#: Characters that end a name; spelled out, because ncu's dialect of regular expressions is not documented.
_END = "[^A-Za-z0-9_]"

_CLOSING = {"<": ">", "(": ")", "[": "]", "{": "}"}

#: Words that ncu spells differently or omits, and types that it adds.
_NOISE = frozenset(["lambda", "instance", "operator", "const", "void", "unsigned", "signed"])
_NUMBERS = frozenset(["char", "short", "int", "long", "bool"])

#: The type that ncu writes before a number.
_CAST = re.compile(r"\((?:unsigned |signed )?(?:char|short|int|long|long long)\)(?=-?\d)")

_BOOL = re.compile(r"\(bool\)([01])")
_BOOLS = {"true": "(true|[(]bool[)]1)", "false": "(false|[(]bool[)]0)"}

#: Operators that look like brackets of template arguments.
_OPERATORS = re.compile(r"operator\s*(?:->\*?|<=>|<<=?|>>=?|<=|>=|<|>)")

_WORD = re.compile(r"[A-Za-z_]\w*|\d+")

#: A template with its first argument, or a lambda with the type of its first parameter: `FillFunctor<int`, `lambda(float`. The
#: argument must not be a template itself: ncu writes a function's return type before it.
_PAIR = re.compile(r"([A-Za-z_]\w*<|lambda\()((?:[A-Za-z_]\w*::)*[A-Za-z_]\w*)\b(?!::|\s*<)")

_MANGLED = re.compile(r"_Z\w+")


class NcuCommand(NamedTuple):
    """A command for a shell, and sentences about what to fill in and what else it needs."""

    command: str
    notes: list[str]


class KernelFilter(NamedTuple):
    """Options of ncu that select a kernel, and other kernels of the capture that they also select."""

    options: list[str]
    also: list[str]


class _Word(NamedTuple):
    """A part of the template arguments that torch's profiler and ncu spell alike, and the expression that matches it."""

    begin: int
    end: int
    expression: str


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
    arguments = {other: _arguments(other) for other in (name, *namesakes)}
    spelled = {other: f"{function}<{text}>" for other, text in arguments.items()}
    words = _chosen(function, _words(arguments[name]), [spelled[other] for other in namesakes])
    expression = _expression(function, words)
    also = [other for other in namesakes if re.search(expression, spelled[other])]
    return KernelFilter(["--kernel-name-base", "demangled", "--kernel-name", f"regex:{expression}"], also)


def function_name(name: str) -> str:
    """The name of a demangled kernel's function alone, as `--kernel-name-base function` compares it."""
    bare = _outside_brackets(_plain(name))
    words = [word for word in bare.split() if word not in ("const", "volatile")]
    return words[-1].split("::")[-1] if words else name


def _plain(name: str) -> str:
    return _OPERATORS.sub("operator", name.replace("(anonymous namespace)", "").replace("<unnamed>", ""))


def _outside_brackets(text: str) -> str:
    """The text outside brackets, up to the first bracket that is not closed."""
    kept: list[str] = []
    closing: list[str] = []
    for place, character in enumerate(text):
        if closing and character == closing[-1]:
            closing.pop()
        elif character in _CLOSING:
            if not closing and _CLOSING[character] not in text[place:]:
                break
            closing.append(_CLOSING[character])
        elif not closing:
            kept.append(character)
    return "".join(kept)


def _words(arguments: str) -> list[_Word]:
    """Everything to look for among template arguments, in order."""
    found = []
    for match in _PAIR.finditer(arguments):
        head, bracket = match[1][:-1], match[1][-1]
        if head not in _NOISE - {"lambda"} and match[2] not in _NOISE:
            opening = bracket if bracket == "<" else f"[{bracket}]"
            found.append(_Word(*match.span(), f"{head}{opening}{match[2]}{_END}"))
    for match in _WORD.finditer(arguments):
        word = match[0]
        if word.isdigit():
            # A number can have a suffix, as in 3ul.
            found.append(_Word(*match.span(), f"{word}[^0-9]"))
        elif word not in _NOISE | _NUMBERS:
            found.append(_Word(*match.span(), f"{_BOOLS.get(word, word)}{_END}"))
    return sorted(found, key=lambda word: word[:2])


def _arguments(name: str) -> str:
    """The template arguments of a function, numbers plain, without parameters of functions that are templates themselves."""
    name = _plain(name)
    start = re.search(rf"{re.escape(function_name(name))}\s*<", name)
    if start is None:
        return ""
    kept: list[str] = []
    # Open brackets, and whether their content is left out.
    depth: list[tuple[str, bool]] = [(">", False)]
    before = ""
    for character in name[start.end() :]:
        if character == depth[-1][0]:
            depth.pop()
            if not depth:
                break
        elif character in _CLOSING:
            parameters = character == "(" and before == ">"
            depth.append((_CLOSING[character], depth[-1][1] or parameters))
        if not depth[-1][1]:
            kept.append(character)
        if not character.isspace():
            before = character
    text = _CAST.sub("", _BOOL.sub(lambda found: "true" if found[1] == "1" else "false", "".join(kept)))
    return re.sub(r"\b(\d+)(?:ull|ul|ll|u|l)\b", r"\1", text)


def _chosen(function: str, words: Sequence[_Word], namesakes: Sequence[str]) -> list[_Word]:
    """The fewest words that separate a kernel from its namesakes, as far as words can; numbers only where no word helps."""
    chosen: list[_Word] = []
    left = list(namesakes)
    while left:
        best, remaining = None, left
        for word in sorted(words, key=lambda word: word.expression[0].isdigit()):
            if best is not None and word.expression[0].isdigit() and not best.expression[0].isdigit():
                break
            if any(word.begin < other.end and other.begin < word.end for other in chosen):
                continue
            expression = re.compile(_expression(function, [*chosen, word]))
            still = [name for name in left if expression.search(name)]
            if len(still) < len(remaining):
                best, remaining = word, still
        if best is None:
            break
        chosen.append(best)
        left = remaining
    return chosen


def _expression(function: str, words: Sequence[_Word]) -> str:
    """Matches a function with these words among its template arguments."""
    ordered = sorted(words, key=lambda word: word.begin)
    return f"(^|{_END}){re.escape(function)}<" + "".join(f"(.*{_END})?{word.expression}" for word in ordered)

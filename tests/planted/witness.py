"""Two captures of the same iterations by different profilers, compared: what the device did, how often and with how many bytes.

The second witness is independent: another program, which another reader reads; they have CUPTI in common. Waiting is not
compared, and so no communication's duration: how long a rank waits for others is another matter in every run.
"""

import re
from collections import Counter

#: How far two captures' times of the same kernel may be apart.
COMPUTE_TOLERANCE = 0.05

#: The part of the compute time whose kernels may be further apart: 2% to 4% on two H100s with up to eight trainings each.
#: It was 7% once, when each of 16 launches of a kernel of 0.3 ms took at least 5 ms; all kernels together then took 2.6 times
#: as long.
_FURTHER_APART = 0.15

_KERNELS = ("compute", "communication")

_PARENTHESES = re.compile(r"\([^()]*\)")
_INSTANCE = re.compile(r" \(instance (\d+)\)\]")
_NUMBER = re.compile(r"\b(\d+)(?:u|ul|l|ull|ll)\b")
_TOLD_DIFFERENTLY = re.compile(r"\b(?:const|void)\b|\s")


def kernel(name):
    """What both profilers' demanglers say of a kernel: Kineto's is GNU's, nsys' is EDG's, and they write C++ differently.

    Parameter lists go (one writes types, the other `T1`), and with them casts, `const`, `void` and spaces; numbers lose their
    suffixes. Template arguments stay, so that kernels of one template stay apart.
    """
    text = name.replace("<unnamed>", "{anonymous}").replace("(anonymous namespace)", "{anonymous}")
    text = _INSTANCE.sub(r"#\1}", text).replace("[lambda", "{lambda")
    while (shorter := _PARENTHESES.sub("", text)) != text:
        text = shorter
    text = re.sub(r"\bfalse\b", "0", re.sub(r"\btrue\b", "1", text))
    return _TOLD_DIFFERENTLY.sub("", _NUMBER.sub(r"\1", text))


def differences(kineto, nsys):
    """A sentence for each thing in which two captures of a rank differ; none when they agree.

    Args:
        kineto: tables of one witness.
        nsys: of the other.
    """
    for tables in (kineto, nsys):
        names = {name for _, name in _rows(tables, _KERNELS, "name")}
        if len(set(map(kernel, names))) < len(names):
            yield "kernels: different ones cannot be distinguished by the names of both profilers"
    one, other = _counted(kineto), _counted(nsys)
    for missing in {"kernels", "copies", "memsets", "collectives"} - {what for what, *_ in one}:
        yield f"{missing}: there are none to compare"
    for key in sorted({*one, *other}, key=repr):
        if one[key] != other[key]:
            yield f"{one[key]} in one, {other[key]} in the other of {key}"
    further_apart = _further_apart(_least_ns(kineto), _least_ns(nsys))
    if further_apart > _FURTHER_APART:
        yield f"compute time: {further_apart:.0%} of it in kernels that are more than {COMPUTE_TOLERANCE:.0%} apart"


def _rows(tables, kinds, *columns):
    """Work on the device that iterations launched, by iteration."""
    for row in tables["device_events"].select(["iteration", "kind", *columns]).to_pylist():
        if row["iteration"] is not None and row.pop("kind") in kinds:
            yield tuple(row.values())


def _counted(tables):
    """How often each iteration ran each kernel, memset, collective and kind of copy, and the bytes of copies."""
    found = Counter(("kernels", iteration, kernel(name)) for iteration, name in _rows(tables, _KERNELS, "name"))
    found.update(("memsets", *row) for row in _rows(tables, ("memset",), "bytes"))
    for *where, size in _rows(tables, ("memcpy",), "direction", "from_memory", "to_memory", "bytes"):
        found["copies", *where] += 1
        found["bytes of copies", *where] += size
    rows = tables["collectives"].select(["iteration", "operation"]).to_pylist()
    found.update(("collectives", *row.values()) for row in rows if row["iteration"] is not None)
    return found


def _least_ns(tables):
    """An iteration's compute kernels, each with its time in the iteration of the window in which it took least.

    Trainings of the GPU tests share their GPUs, and the same kernel takes longer beside another training's.
    """
    least = {}
    seen = Counter()
    for iteration, name, start, end in sorted(
        _rows(tables, ("compute",), "name", "start_ns", "end_ns"), key=lambda row: row[2]
    ):
        which = kernel(name), seen[iteration, name]
        seen[iteration, name] += 1
        least[which] = min(least.get(which, end - start), end - start)
    return least


def _further_apart(one, other):
    """The part of the compute time in kernels whose times are further apart than the tolerance."""
    shorter = {which: min(one[which], other[which]) for which in one.keys() & other.keys()}
    apart = [which for which, ns in shorter.items() if max(one[which], other[which]) > (1 + COMPUTE_TOLERANCE) * ns]
    return sum(shorter[which] for which in apart) / max(sum(shorter.values()), 1)

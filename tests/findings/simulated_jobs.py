"""Jobs whose causes are known: hosts launch, load, wait and save, and devices do what was launched."""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace

from bridge_profiling.facts.engines import Outcome, call
from bridge_profiling.findings import RULES, diagnose
from bridge_profiling.findings.rule import About
from tests.facts.ranks_in_hand import span, write_rank

US = 1_000
MS = 1_000_000

#: What a launching call takes a host that is not slow.
LAUNCH_NS = 5 * US

TENSOR = "TENSOR_MODEL_PARALLEL_GROUP"

#: The stream of communication that runs at the same time as compute.
_COMMUNICATION_STREAM = 20


class Here:
    """Does the work on each rank in this process: starting others takes longer than so small a rank."""

    def map(self, function, tasks):
        """Every task's outcome."""
        for number, task in enumerate(tasks):
            yield Outcome(number, *call(function, task))


def found_by(run, *finds, thresholds=None):
    """What some findings find in a run, without those that come before them."""
    rules = [replace(rule, about=~About(0)) for rule in RULES if rule.detect in finds]
    return diagnose(run.grids, thresholds, rules)


class SimulatedJob:
    """Hosts and devices in real time. Each host launches into one stream; what is launched runs in order.

    Args:
        step: what happens in an iteration of that number; with None, what is asked for is in no iteration.
        ranks: how many.
        iterations: how many, from number 10.
        boundary: the iterations that the profiler disturbs.
        pause_ns: what a host does between two launches, besides launching.
    """

    def __init__(self, step, ranks=1, iterations=4, pause_ns=0, boundary=()):
        self.ranks = ranks
        self.all = range(ranks)
        self.pause_ns = pause_ns
        self.host_ns = dict.fromkeys(self.all, 1_000 * MS)
        self.free_ns = dict.fromkeys(self.all, 0)
        self.rows = defaultdict(lambda: defaultdict(list))
        self.iteration = None
        self.calls = 0
        for number in range(10, 10 + iterations) if step else ():
            self.iteration = number
            begins = dict(self.host_ns)
            step(self, number)
            self.wait(self.all)  # as a loop does that logs its loss
            for rank in self.all:
                row = {"iteration": number, "start_ns": begins[rank], "end_ns": self.host_ns[rank]}
                self.rows[rank]["iterations"].append(row | {"boundary": number in boundary})

    def launch(self, ranks, took_ns, operator="aten::mm", *, count=1, name="gemm"):
        """The hosts launch kernels; each device runs them when it is free."""
        for rank in _each(ranks):
            for _ in range(count):
                self._enqueue(rank, "compute", took_ns, operator, name=name)

    def busy(self, ranks=None, *, kernels=40):
        """A micro-batch that keeps the device busy for half a millisecond a kernel, and its host for a hundredth of that."""
        self.launch(self.all if ranks is None else ranks, 500 * US, count=kernels)

    def meet(self, took_ns=100 * US, *, group=TENSOR, operation="all_reduce", size=1 << 23, overlaps=False):
        """All hosts launch a collective. It ends everywhere when the last device has come to it and the data has moved.

        What is launched after it waits for it, unless it overlaps: then it runs on a stream of its own.
        """
        free = dict(self.free_ns)
        if overlaps:  # It begins when it is launched, whatever the other stream does.
            self.free_ns = dict.fromkeys(self.all, 0)
        stream = _COMMUNICATION_STREAM if overlaps else 7
        end = took_ns + max(
            self._enqueue(rank, "communication", 0, f"nccl:{operation}", name="communication", stream=stream)
            for rank in self.all
        )
        for rank in self.all:
            event, collectives = self.rows[rank]["device_events"][-1], self.rows[rank]["collectives"]
            number = len(collectives)
            event |= {"end_ns": end, "collective": number}
            self.free_ns[rank] = end
            collectives.append(
                {"collective": number, "sequence": number, "operation": operation, "group": group, "message_bytes": size}
                | {"group_name": f"{group}-{operation}", "group_ranks": str([*self.all]), "group_size": self.ranks}
                | {name: event[name] for name in ("start_ns", "end_ns", "launch_start_ns", "iteration", "stream")}
            )
        if overlaps:
            self.free_ns = free

    def be_in(self, ranks, name, took_ns, *, category="annotation"):
        """The hosts are in a range, and launch nothing meanwhile."""
        for rank in _each(ranks):
            begin = self.host_ns[rank]
            self.host_ns[rank] += took_ns
            self._host(rank, category, name, begin, self.host_ns[rank])

    @contextmanager
    def within(self, name, category="annotation"):
        """What the hosts do meanwhile is inside a range of theirs."""
        begins = dict(self.host_ns)
        yield
        for rank, begin in begins.items():
            self._host(rank, category, name, begin, self.host_ns[rank])

    def wait(self, ranks, operator=None):
        """The hosts wait for their devices."""
        for rank in _each(ranks):
            still_ns = max(0, self.free_ns[rank] - self.host_ns[rank])
            self.call(rank, "cudaStreamSynchronize", still_ns + 2 * US, operator)

    def call(self, rank, name, took_ns, operator):
        """A runtime call holds the host."""
        begin = self.host_ns[rank]
        self.host_ns[rank] += took_ns
        self._call(rank, name, begin, self.host_ns[rank], operator)

    def copy(self, rank, took_ns, *, memory="pageable", size=1 << 24, out=False, operator="aten::copy_"):
        """A copy to or from the device; of pageable memory it holds the host until it is through."""
        ends = {"from_memory": "device", "to_memory": memory} if out else {"from_memory": memory, "to_memory": "device"}
        where = {"direction": "DtoH" if out else "HtoD", "bytes": size, **ends}
        self._enqueue(rank, "memcpy", took_ns, operator, name="memcpy", **where)
        if memory == "pageable":
            row = self.rows[rank]["device_events"][-1]
            row["launch_end_ns"] = self.host_ns[rank] = row["end_ns"]

    def write(self, folder, ranks=None, **info):
        """Write the captures, of some ranks only if these are named, and give the folder."""
        for rank in self.all if ranks is None else ranks:
            names = ("device_events", "host_events", "collectives", "iterations")
            rows = {name: sorted(self.rows[rank][name], key=lambda row: (row["start_ns"], -row["end_ns"])) for name in names}
            write_rank(folder, rank, rows, clock="unix", **info)
        return folder

    def _enqueue(self, rank, kind, took_ns, operator, **known):
        """The host launches something; when the device begins it."""
        begin = self.host_ns[rank] + self.pause_ns
        self.host_ns[rank] = launched = begin + LAUNCH_NS
        start = max(launched, self.free_ns[rank])
        self.free_ns[rank] = start + took_ns
        number = self._call(rank, "cudaLaunchKernel", begin, launched, operator)
        self.rows[rank]["device_events"].append(
            {"kind": kind, "start_ns": start, "end_ns": start + took_ns, "correlation": self.calls, "operator": number}
            | {"launch_start_ns": begin, "launch_end_ns": launched, "launch_thread": 1, "iteration": self.iteration}
            | known
        )
        return start

    def _call(self, rank, name, begin, end, operator):
        self.calls += 1
        number = None if operator is None else self.calls
        if operator is not None:
            self._host(rank, "operator", operator, begin, end, operator=number)
        self._host(rank, "runtime", name, begin, end, correlation=self.calls, operator=number)
        return number

    def _host(self, rank, category, name, begin, end, **known):
        self.rows[rank]["host_events"].append(span(name, begin, end, category, **known))


def _each(ranks):
    return [ranks] if isinstance(ranks, int) else ranks

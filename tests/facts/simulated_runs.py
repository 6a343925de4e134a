"""Runs of many ranks whose truth is known: ranks compute, meet in collectives and exchange, each on a clock of its own."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter

import pyarrow as pa

from bridge_profiling.facts import matching
from bridge_profiling.run import Run
from tests.facts.ranks_in_hand import table, write_rank

US = 1_000
MS = 1_000_000

#: A moment in the epoch: a double cannot hold nanoseconds of it exactly.
EPOCH_NS = 1_795_178_166_680_430_505


@dataclass
class SimulatedRun:
    """Ranks that work in real time; what a profiler would have recorded of each is kept, in the rank's own clock.

    Args:
        ranks: how many.
        offsets_ns: how much each rank's clock is ahead of real time.
        transfer_ns: what moving data takes.
        communication_stream: where communication runs; on stream 7 what is computed after it waits for it.
        kernels: the proportions of the kernels in which a rank computes; one kernel if it is not named.
    """

    ranks: int
    offsets_ns: Mapping[int, int] = field(default_factory=dict)
    transfer_ns: int = 20 * US
    communication_stream: int = 20
    kernels: dict[int, list[int]] = field(default_factory=dict)
    iteration: int | None = None
    device: dict = field(default_factory=lambda: defaultdict(list))
    operations: dict = field(default_factory=lambda: defaultdict(list))
    iterations: dict = field(default_factory=lambda: defaultdict(list))
    happened: int = 0

    def __post_init__(self):
        self.now_ns = dict.fromkeys(range(self.ranks), EPOCH_NS)

    def compute(self, rank, duration_ns):
        """The rank computes."""
        shares = self.kernels.get(rank, [1])
        for share in shares:
            begin = self.now_ns[rank]
            self.now_ns[rank] += duration_ns * share // sum(shares)
            self.ran(rank, "compute", begin, self.now_ns[rank])

    def meet(self, members, operation="all_reduce", size=1 << 20, group="TP"):
        """A collective: all end it when the last of them has come and the data has moved."""
        end = max(self.now_ns[rank] for rank in members) + self.transfer_ns
        for rank in members:
            self._operation(rank, operation, members, size, group, (self.now_ns[rank], end))
            self.now_ns[rank] = end
        self.happened += 1

    def send(self, source, target, members, *, ready_ns=None):
        """Data goes from one rank to another: the sender goes on at once, the receiver waits from when it is ready."""
        begin = self.now_ns[source] if ready_ns is None else ready_ns
        came = max(begin, self.now_ns[target]) + self.transfer_ns
        self._operation(source, "send", members, 1 << 23, "PIPELINE", (begin, begin + self.transfer_ns), target)
        self._operation(target, "recv", members, 1 << 23, "PIPELINE", (self.now_ns[target], came), source)
        self.now_ns[target] = came
        self.happened += 1

    def exchange(self, one, other):
        """Two ranks send and receive in one kernel each."""
        end = max(self.now_ns[one], self.now_ns[other]) + self.transfer_ns
        for rank, peer in ((one, other), (other, one)):
            self._operation(rank, "send_recv", (one, other), 1 << 23, "PIPELINE", (self.now_ns[rank], end), peer)
            self.now_ns[rank] = end
        self.happened += 1

    def iterate(self, count, step):
        """Iterations, each of which every rank begins when it has ended the one before."""
        for self.iteration in range(10, 10 + count):
            begins = dict(self.now_ns)
            step(self.iteration)
            for rank, begin in begins.items():
                clock = self.offsets_ns.get(rank, 0)
                marks = {"start_ns": begin + clock, "end_ns": self.now_ns[rank] + clock, "boundary": False}
                self.iterations[rank].append({"iteration": self.iteration, **marks})
        self.iteration = None
        return self

    def change_operations(self, ranks=None, **known):
        """Record something else about all operations of some ranks, or of all."""
        for rank in range(self.ranks) if ranks is None else ranks:
            for row in self.operations[rank]:
                row |= known

    def write(self, folder, *, ranks=None, skip={}, marked=True, **info):  # noqa: B006
        """Write the captures as the cache does; returns their folders.

        Args:
            folder: where to.
            ranks: those that are captured.
            skip: operations with which each rank's capture does not begin yet.
            marked: whether iterations are marked.
            info: more of every RankInfo.
        """
        return [
            write_rank(folder, rank, self._recorded(rank, skip, marked), **{"clock": "unix", **info})
            for rank in (range(self.ranks) if ranks is None else ranks)
        ]

    def operations_of(self, *, ranks=None, skip={}, marked=True):  # noqa: B006
        """The fact `operations` about the captures that `write` would write."""
        found = []
        for rank in range(self.ranks) if ranks is None else ranks:
            collectives = table("collectives", self._recorded(rank, skip, marked)["collectives"], rank)
            fact = matching.operations(collectives.select(matching.COLUMNS))
            found.append(fact.add_column(0, "rank", collectives["rank"]))
        return pa.concat_tables(found)

    def _recorded(self, rank, skip, marked):
        unmarked = {} if marked else {"iteration": None}
        operations = self._captured(rank, skip)
        numbers = {row["truth"]: number for number, row in enumerate(operations)}
        begin = operations[0]["start_ns"] if skip.get(rank) and operations else 0
        events = sorted((row for row in self.device[rank] if row["start_ns"] >= begin), key=itemgetter("start_ns"))
        sequence = defaultdict(itertools.count)
        rows = {"iterations": self.iterations[rank] if marked else []}
        rows["collectives"] = [
            row | unmarked | {"collective": numbers[row["truth"]], "sequence": next(sequence[row["group_name"]])}
            for row in operations
        ]
        known_events = [row for row in events if row["truth"] is None or row["truth"] in numbers]
        rows["device_events"] = [row | unmarked | {"collective": numbers.get(row["truth"])} for row in known_events]
        return rows

    def captured(self, folder, **how):
        """The captures, written as by `write`."""
        self.write(folder, **how)
        return Run(folder)

    def truths(self, skip={}):  # noqa: B006
        """Of each operation a rank's capture holds, by its number there, which one it really was."""
        return {rank: [row["truth"] for row in self._captured(rank, skip)] for rank in range(self.ranks)}

    def ran(self, rank, kind, begin, end, truth=None):
        """The rank's device ran something, in real time."""
        clock = self.offsets_ns.get(rank, 0)
        stream = 7 if kind == "compute" else self.communication_stream
        times = {"start_ns": begin + clock, "end_ns": end + clock, "iteration": self.iteration}
        self.device[rank].append({"kind": kind, "name": kind, "stream": stream, "truth": truth, **times})

    def _captured(self, rank, skip):
        return sorted(self.operations[rank], key=itemgetter("start_ns"))[skip.get(rank, 0) :]

    def _operation(self, rank, operation, members, size, group, times, peer=None):
        self.ran(rank, "communication", *times, self.happened)
        known = {name: self.device[rank][-1][name] for name in ("truth", "start_ns", "end_ns", "iteration")}
        known |= {"group": group, "group_name": f"{group}-{members[0]}", "group_ranks": str([*members]).replace(" ", "")}
        known |= {"operation": operation, "group_size": len(members), "peer": peer, "message_bytes": size}
        self.operations[rank].append(known)


def one_forward_one_backward(run, stages, microbatches, forward_ns, backward_ns):
    """The forward and backward passes of an iteration in the 1F1B schedule.

    Args:
        run: whose ranks work.
        stages: the rank of each stage.
        microbatches: how many.
        forward_ns: what a forward pass takes on each stage.
        backward_ns: what a backward pass takes on each stage.
    """
    plans = []
    for stage in range(len(stages)):
        ahead = min(len(stages) - 1 - stage, microbatches)
        forward = [(2 * (number - ahead), "F", number) for number in range(microbatches)]
        plans.append(sorted(forward + [(2 * number + 1, "B", number) for number in range(microbatches)]))
    done = {}
    while any(plans):
        for stage, plan in enumerate(plans):
            while plan:
                _, kind, number = plan[0]
                source = stage - 1 if kind == "F" else stage + 1
                if 0 <= source < len(stages):
                    if (kind, source, number) not in done:
                        break
                    run.send(stages[source], stages[stage], stages, ready_ns=done[kind, source, number])
                run.compute(stages[stage], (forward_ns if kind == "F" else backward_ns)[stage])
                done[kind, stage, number] = run.now_ns[stages[stage]]
                plan.pop(0)

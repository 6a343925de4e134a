"""The cases of gpu_overhead.py: the cost of each profiler to a training, before, inside and after its window."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu_processes import ManyWindows, Place, Worker, own_nsys_worker, plain_worker
from benchmarks.gpu_rounds import SETTLE, Bench, Row, median_ms, take_turns
from benchmarks.paired import changed_ratio, paired_ratio
from bridge_profiling.monitor.sampler import MAX_CPU_SHARE
from bridge_profiling.nsys.command import DIRECTIVES_VARIABLE

TORCH: dict[str, Any] = {"use_pytorch_profiler": True}
SHAPES = TORCH | {"record_shapes": True}
STACKS = TORCH | {"pytorch_profiler_collect_callstack": True}
LIGHT = TORCH | {"pytorch_profiler_device_only": True}
MEMORY_EVENTS = TORCH | {"pytorch_profiler_profile_memory": True}
CHAKRA = TORCH | {"pytorch_profiler_collect_chakra": True}
ALL = SHAPES | STACKS | MEMORY_EVENTS | CHAKRA
HISTORY: dict[str, Any] = {"record_memory_history": True}
NSYS: dict[str, Any] = {"use_nsys_profiler": True}
NSYS_SHAPES = NSYS | {"record_shapes": True}

#: The default, so that a bare block before the hook's first runs with it too.
TEARDOWN: dict[str, str | None] = {"TEARDOWN_CUPTI": "1"}

_PAIRS_A_REQUEST = 100

#: Pairs in a window; the first and the last are not counted.
_PAIRS_A_WINDOW = 22

#: Share of a case's time for pairs within a window, and share of the remainder for turns with a training without nsys;
#: the rest is for comparing blocks.
_SHARE_OF_PAIRS, _SHARE_OF_PAIRS_UNDER_NSYS, _SHARE_OF_TURNS = 0.7, 0.4, 0.7

#: Differences within this range count as none.
_SAME = (0.995, 1.005)

#: Iterations of a window that is compared with its neighbours: torch takes longer to stop than to record.
_TORCH_WINDOW, _NSYS_WINDOW, _HISTORY_WINDOW = 12, 32, 32

#: The window after which a training is watched.
_WINDOW = 5

#: Two trainings are compared in short turns of this many iterations, without the first of each, so that a machine that is
#: faster or slower for a second or two affects both sides of a pair.
_TURN = 4

#: Turns that count as one of `--rounds`, because they are much shorter than the blocks of other cases.
_TURNS_A_ROUND = 20

#: Iterations run at once after a window, none of which counts.
_JUST_AFTER = 25


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        name: the name that selects it.
        seconds: how long it measures if time permits.
        fixed: estimated further seconds, for starting its trainings and for steps that cannot be shortened.
        run: the benchmark.
        cuda: whether it needs a GPU.
        nsys: whether it needs nsys.
    """

    name: str
    seconds: float
    fixed: float
    run: Callable[[Bench], None]
    cuda: bool = False
    nsys: bool = False


def idle(bench: Bench) -> None:
    """The hook outside its window compared with no profiling code, iteration by iteration."""
    with plain_worker(bench.place, bench.sizes) as worker:
        bench.results.facts["about"] = worker.ask("about")
        _pairs(bench, partial(worker.ask, "idle_pairs"), _PAIRS_A_REQUEST, "hook idle / no profiling code", _SAME)


def monitor(bench: Bench) -> None:
    """Two iterations during which the monitor takes a sample, compared with two without: the cost of one sample."""
    with plain_worker(bench.place, bench.sizes) as worker:
        row = _pairs(bench, partial(worker.ask, "sampled_pairs"), _PAIRS_A_REQUEST // 4, "sampled / not", None)
        one = worker.ask("sampled_pairs", swapped=[True] * 5)
    seconds = max(one["computed_s"] / MAX_CPU_SHARE, 1.0)
    row.note = f"two iterations and one sample; a training's come every {seconds:.1f} s"
    bench.results.facts["a sample"] = {"computed_s": one["computed_s"], "every_s": seconds, "unavailable": one["unavailable"]}


def _pairs(
    bench: Bench,
    ask: Callable[..., dict[str, Any]],
    count: int,
    what: str,
    target: tuple[float, float] | None,
) -> Row:
    """Run as many pairs of one training as time permits, in a random order for each, and return their ratio.

    Args:
        bench: the case.
        ask: makes the training run pairs, the numerator first in those that are `swapped`, and returns the nanoseconds of both
            `sides`, the denominator's before the numerator's.
        count: pairs per request.
        what: the two sides.
        target: range that should contain the whole interval.
    """
    draw = random.Random(bench.name)
    sides: dict[str, list[int]] = {}
    bench.begin()
    while bench.another_round():
        answer = ask(swapped=[draw.random() < 0.5 for _ in range(count)])
        for name, durations in answer["sides"].items():
            sides.setdefault(name, []).extend(durations)
    (_, without), (_, with_it) = sides.items()
    milliseconds = {name: median_ms(durations) for name, durations in sides.items()}
    ratio = paired_ratio(with_it, without)
    row = Row(bench.name, what, ratio, len(without), milliseconds, target, interval_counts=target is not None)
    bench.results.rows.append(row)
    return row


def inside(bench: Bench, profiling: dict[str, Any], window: int) -> None:
    """Inside the window: the hook, the same profiler bare, and neither; all in one process."""
    place = Place(bench.place.lane, bench.place.scratch, bench.place.environment | TEARDOWN)
    with plain_worker(place, bench.sizes) as worker:
        bench.results.facts["about"] = worker.ask("about")
        stay_on_one_core(bench, worker)
        with _share_of_time(bench, _SHARE_OF_PAIRS):
            _pairs_in_windows(bench, worker.ask, profiling)
        medians = take_turns(bench, _sides(worker.ask, worker, profiling, window), window)
    _compare(bench, medians, window)


def inside_nsys(bench: Bench, profiling: dict[str, Any], window: int) -> None:
    """The same under nsys, and next to a second process without it."""
    with (
        plain_worker(bench.place, bench.sizes) as outside,
        ManyWindows(bench.place, bench.sizes, profiling, reports=False) as nsys,
    ):
        stay_on_one_core(bench, outside, nsys.worker)
        with _share_of_time(bench, _SHARE_OF_PAIRS_UNDER_NSYS):
            _pairs_in_windows(bench, nsys.window, profiling)
        with _share_of_time(bench, _SHARE_OF_TURNS):
            _turns_in_windows(bench, nsys, outside, profiling, window)
        medians = take_turns(bench, _sides(nsys.window, nsys.worker, profiling, window), window)
    bench.results.facts["nsys"] = nsys.about()
    _compare(bench, medians, window, unprofiled="attached, not collecting")


def stay_on_one_core(bench: Bench, *workers: Worker) -> None:
    """Make these trainings, which take turns, share a core."""
    for worker in workers:
        worker.ask("stay_on", core=max(bench.place.lane.cores))


@contextlib.contextmanager
def _share_of_time(bench: Bench, share: float) -> Iterator[None]:
    """Reserve this share of the case's time for the block, and the rest for later measurements."""
    whole = bench.seconds
    bench.seconds = whole * share
    yield
    bench.seconds = whole - bench.seconds


def _pairs_in_windows(bench: Bench, window_of: Callable[..., dict[str, Any]], profiling: dict[str, Any]) -> None:
    """The hook's overhead in an iteration that is recorded anyway, pair by pair.

    Blocks of the hook and of the bare profiler are seconds apart, during which the speed of a machine changes by more than the
    hook's cost. The blocks show that both give the profiler the same options.
    """
    asked = partial(window_of, "window_pairs", profiling=profiling, settle=SETTLE)
    _pairs(bench, asked, _PAIRS_A_WINDOW, "recorded: with the hook / without", (0.0, 1.02))


def _turns_in_windows(bench: Bench, nsys: ManyWindows, outside: Worker, profiling: dict[str, Any], window: int) -> None:
    """The cost of nsys while it collects: a training in the hook's windows compared with one without nsys, in short turns."""
    draw = random.Random(bench.name)
    sides = {
        "hook": partial(nsys.worker.ask, "run", count=_TURN),
        "without nsys": partial(outside.ask, "plain", settle=0, count=_TURN),
    }
    medians: dict[str, list[float]] = {name: [] for name in sides}
    # The window's first iteration includes its start, and its last is left for the stop.
    turns = (window - 2) // _TURN

    def one_window() -> dict[str, Any]:
        nsys.worker.ask("open", profiling=profiling, window_in=SETTLE, window=window)
        nsys.worker.ask("run", count=SETTLE + 1)
        for _ in range(turns):
            _take_turn(draw, sides, medians)
        nsys.worker.ask("run", count=window - 1 - turns * _TURN)
        return nsys.worker.ask("close")

    bench.begin()
    while bench.another_round():
        nsys.around(one_window)
    target = (0.0, 1.15) if profiling == NSYS else None
    _row_of_turns(bench, "collecting: hook / without nsys", medians, target)


def _take_turn(draw: random.Random, sides: dict[str, Callable[[], dict[str, Any]]], medians: dict[str, list[float]]) -> None:
    """Make each side run a turn, in a random order, and keep its median."""
    for name in draw.sample(list(sides), len(sides)):
        medians[name].append(median_ms(sides[name]()["durations"][1:]))


def _row_of_turns(bench: Bench, what: str, medians: dict[str, list[float]], target: tuple[float, float] | None = None) -> None:
    """The ratio of two sides that took turns, the numerator's medians first."""
    above, below = medians.values()
    milliseconds = {name: statistics.median(turns) for name, turns in medians.items()}
    row = Row(bench.name, what, paired_ratio(above, below), len(above) * (_TURN - 1), milliseconds, target)
    bench.results.rows.append(row)


def _sides(window_of: Callable[..., Any], worker: Worker, profiling: dict[str, Any], window: int) -> dict[str, Any]:
    return {
        "unprofiled": partial(worker.ask, "plain", settle=SETTLE, count=window),
        "bare": partial(window_of, "bare", profiling=profiling, settle=SETTLE, count=window),
        "hook": partial(window_of, "hook", profiling=profiling, settle=SETTLE, count=window),
    }


def _compare(
    bench: Bench,
    medians: dict[str, list[float]],
    window: int,
    *,
    unprofiled: str = "the same process",
) -> None:
    _row(bench, medians, "hook", "bare", window, (0.0, 1.02))
    _row(bench, medians, "hook", "unprofiled", window, None, unprofiled)
    _row(bench, medians, "bare", "unprofiled", window, None, unprofiled)


def _row(
    bench: Bench,
    medians: dict[str, list[float]],
    above: str,
    below: str,
    window: int,
    target: tuple[float, float] | None,
    note: str = "",
) -> None:
    milliseconds = {name: statistics.median(medians[name]) for name in (above, below)}
    ratio = paired_ratio(medians[above], medians[below])
    counted = len(medians[above]) * (window - 2)
    bench.results.rows.append(Row(bench.name, f"{above} / {below}", ratio, counted, milliseconds, target, note=note))


def after(bench: Bench, profiling: dict[str, Any], environment: dict[str, str | None]) -> None:
    """After the window compared with before the hook opened; a second process that is never profiled shows the drift.

    Both stay on one core, so that disturbances affect both alike.
    """
    place = Place(bench.place.lane, bench.place.scratch, bench.place.environment | environment)
    nsys = profiling.get("use_nsys_profiler", False)
    profiled = own_nsys_worker(place, bench.sizes, profiling) if nsys else plain_worker(place, bench.sizes)
    with plain_worker(bench.place, bench.sizes) as control, profiled as worker:
        _after(bench, worker, control, profiling)


def _after(bench: Bench, worker: Worker, control: Worker, profiling: dict[str, Any]) -> None:
    draw = random.Random(bench.name)
    bench.seconds /= 2
    bench.most_rounds *= _TURNS_A_ROUND
    unprofiled = partial(worker.ask, "plain", settle=0, count=_TURN)
    # Answered when both run: their start takes longer than many turns, and does not count.
    stay_on_one_core(bench, control, worker)
    before = _against_control(bench, draw, unprofiled, control)
    worker.ask("open", profiling=profiling, window_in=SETTLE, window=_WINDOW)
    captured = worker.ask("run", count=SETTLE + _WINDOW)["durations"]
    just_after = worker.ask("run", count=_JUST_AFTER)
    background = worker.ask("written", seconds=180)["background_s"]
    after_it = _against_control(bench, draw, partial(worker.ask, "run", count=_TURN), control)
    worker.ask("close")

    usual = statistics.median(before["worker"])
    inside_ms = median_ms(captured[SETTLE + 1 : -1])
    bench.results.raw = {"before": before, "after": after_it}
    bench.results.facts["window"] = {
        "armed_ms": captured[SETTLE - 1] / 1e6,
        "start_s": (captured[SETTLE] / 1e6 - inside_ms) / 1e3,
        "inside_ms": inside_ms,
        "held_at_end_s": (captured[-1] / 1e6 - inside_ms) / 1e3,
        "just_after_ms": [one / 1e6 for one in just_after["durations"]],
        "usual_ms": usual,
        "written_in_background_s": background + sum(just_after["durations"][: just_after["writing"]]) / 1e9,
    }
    ratios = []
    for when, half in (("before", before), ("after", after_it)):
        _row_of_turns(bench, f"{when}, over a control", half)
        ratios.append([mine / theirs for mine, theirs in zip(half["worker"], half["control"], strict=True)])
    milliseconds = {"before": usual, "after": statistics.median(after_it["worker"])}
    counted = min(map(len, ratios)) * (_TURN - 1)
    row = Row(bench.name, "after / before, over a control", changed_ratio(*ratios), counted, milliseconds, (0.98, 1.02))
    bench.results.rows.append(row)


def _against_control(bench: Bench, draw: random.Random, turn: Callable[[], Any], control: Worker) -> dict[str, list[float]]:
    """A training and the control in turns; the median of each turn."""
    sides = {"worker": turn, "control": partial(control.ask, "plain", settle=0, count=_TURN)}
    medians: dict[str, list[float]] = {name: [] for name in sides}
    bench.begin()
    while bench.another_round():
        _take_turn(draw, sides, medians)
    return medians


def _torch(name: str, profiling: dict[str, Any], seconds: float) -> Case:
    return Case(f"inside-{name}", seconds, 30, partial(inside, profiling=profiling, window=_TORCH_WINDOW))


def _nsys(name: str, profiling: dict[str, Any]) -> Case:
    return Case(f"inside-{name}", 90, 45, partial(inside_nsys, profiling=profiling, window=_NSYS_WINDOW), nsys=True)


def _after_case(name: str, profiling: dict[str, Any], environment: dict[str, str | None], **needs: bool) -> Case:
    return Case(f"after-{name}", 32, 40, partial(after, profiling=profiling, environment=environment), **needs)


#: As nsys itself does: CUPTI stays attached when the collection is over.
_ATTACHED: dict[str, str | None] = {DIRECTIVES_VARIABLE: "CuptiFinalizeOnStop=false"}

#: The longest and most important cases first.
OVERHEAD_CASES = (
    _nsys("nsys", NSYS),
    _nsys("nsys-shapes", NSYS_SHAPES),
    Case("idle", 150, 20, idle),
    Case("monitor", 60, 20, monitor),
    _torch("torch-stacks", STACKS, 100),
    _torch("torch", TORCH, 75),
    _torch("torch-shapes", SHAPES, 75),
    Case("inside-torch-light", 75, 30, partial(inside, profiling=LIGHT, window=_TORCH_WINDOW), cuda=True),
    _torch("torch-memory", MEMORY_EVENTS, 75),
    _torch("torch-chakra", CHAKRA, 75),
    _after_case("nsys", NSYS, {}, nsys=True),
    _after_case("nsys-attached", NSYS, _ATTACHED, nsys=True),
    _after_case("torch", TORCH, {"TEARDOWN_CUPTI": None}),
    _after_case("torch-no-teardown", TORCH, {"TEARDOWN_CUPTI": "0"}, cuda=True),
    Case("inside-history", 50, 25, partial(inside, profiling=HISTORY, window=_HISTORY_WINDOW), cuda=True),
    _after_case("history", HISTORY, {}, cuda=True),
)

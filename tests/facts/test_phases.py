"""Ranges by name: what counts as inside, and for which iteration."""

import pytest

from tests.facts.ranks_in_hand import answer, rank, span, values, work

STEPS = [{"iteration": at, "start_ns": at * 1000, "end_ns": at * 1000 + 900, "boundary": False} for at in range(3)]
LOOP, AUTOGRAD = 1, 2


def _launched(at_ns, took_ns, thread=LOOP, kind="compute"):
    return work(kind, at_ns, at_ns + took_ns, launch_start_ns=at_ns, launch_end_ns=at_ns + 1, launch_thread=thread)


def _found(events, launched, *columns, steps=STEPS):
    marks = [span(f"ProfilerStep#{step['iteration']}", step["start_ns"], step["end_ns"]) for step in steps]
    host = sorted([*marks, *events], key=lambda row: row["start_ns"])
    table = answer(rank(host_events=host, device_events=launched, iterations=steps), "phases")
    return {row[0]: row[1:] for row in values(table, "name", *columns)}


def test_work_of_descendants_and_of_autograds_thread_counts_and_that_of_other_threads_does_not():
    events = [
        span("backward", 100, 300),
        span("aten::mm", 110, 150, "operator"),
        span("autograd::engine::evaluate_function: MmBackward0", 160, 200, "operator", thread=AUTOGRAD),
    ]
    launched = [_launched(120, 40_000), _launched(170, 20_000, AUTOGRAD, "communication")]
    launched += [_launched(170, 9_000, thread=3), _launched(300, 7_000)]
    found = _found(events, launched, "kind", "device_ns", "compute_ns", "communication_ns", "kernel_count", steps=STEPS[:1])
    assert found == {"backward": ("phase", 60_000, 40_000, 20_000, 2), "autograd": ("autograd", 20_000, 0, 20_000, 1)}


@pytest.mark.parametrize("at_node", [5, None], ids=["kineto", "nsys"])
def test_the_backward_pass_of_a_range_is_that_of_the_last_operator_with_the_nodes_number(at_node):
    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        span("embedding", 10, 20),
        # Made no node: it only shows the number that the next node gets.
        span("aten::ones", 12, 14, "operator", sequence=5),
        span("layer", 30, 60),
        span("aten::mm", 40, 50, "operator", sequence=5),
        span(node, 100, 130, "operator", thread=AUTOGRAD, sequence=at_node),
        span("MmBackward0", 101, 129, "operator", thread=AUTOGRAD, sequence=5),
        span(node, 140, 150, "operator", thread=AUTOGRAD, sequence=at_node and 99),
    ]
    launched = [_launched(41, 3000), _launched(110, 8000, AUTOGRAD), _launched(145, 500, AUTOGRAD)]
    found = _found(events, launched, "device_ns", "backward_host_ns", "backward_device_ns", steps=STEPS[:1])
    assert found == {"embedding": (0, 0, 0), "layer": (3000, 30, 8000), "autograd": (8500, None, None)}


def test_times_are_means_of_the_iterations_that_count_with_their_lowest_and_highest():
    ranges = [
        *(span("load", 1000 * step + 100, 1000 * step + end) for step, end in enumerate((200, 300, 600))),
        span("save", 1950, 1990),  # between two iterations
        span("load", 2150, 2200),  # inside another
        span("before", -50, -20),
        *(span("nccl:all_reduce", 1000 * step + 700, 1000 * step + 720) for step in (0, 1, 2)),
    ]
    found = _found(ranges, [], "kind", "calls", "present", "host_ns", "host_low_ns", "host_high_ns")
    assert found == {
        "load": ("range", 1, 3, 267, 100, 500),
        "save": ("range", 1 / 3, 1, 13, 0, 40),
        "nccl:all_reduce": ("library", 1, 3, 20, 20, 20),
    }
    assert _found(ranges, [], "longest_iteration", "longest_start_ns", "longest_ns")["load"] == (2, 2100, 500)
    edges = [{**STEPS[0], "boundary": True}, *STEPS[1:], {**STEPS[0], "iteration": 3, "start_ns": 3000, "end_ns": 3900}]
    assert _found(ranges, [], "iterations", "host_low_ns", steps=edges)["load"] == (3, 0)
    assert _found(ranges, [], "iterations", "calls", "host_ns", steps=[])["load"] == (0, 3, 800)

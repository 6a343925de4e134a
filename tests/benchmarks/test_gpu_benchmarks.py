"""The GPU benchmarks: the plain step is the loop's own, verdicts follow the interval, and costs are taken apart."""

import ast
import inspect
import textwrap

import pytest

from benchmarks.gpu_rounds import Row
from benchmarks.gpu_tables import per_iteration, per_unit
from benchmarks.paired import Ratio


def without_ranges(method):
    """A method's code, with the hook's ranges taken off and their blocks left where they stood."""

    class Unwrap(ast.NodeTransformer):
        def visit_With(self, node):
            self.generic_visit(node)
            return node.body if "self.hook.range" in ast.unparse(node.items[0]) else node

    tree = Unwrap().visit(ast.parse(textwrap.dedent(inspect.getsource(method))))
    body = tree.body[0].body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return "\n".join(map(ast.unparse, body))


@pytest.mark.needs("megatron")
@pytest.mark.parametrize("name", ["_step", "_forward_step"])
def test_the_plain_step_is_the_loops_own_without_its_ranges(name):
    from benchmarks.gpu_training import PlainLoop
    from recipes.megatron.train import Loop

    ours, loops = getattr(PlainLoop, name), getattr(Loop, name)
    assert "hook" in inspect.getsource(loops)
    assert "hook" not in inspect.getsource(ours)
    assert without_ranges(ours).replace("train.", "") == without_ranges(loops)


@pytest.mark.parametrize(
    ("low", "high", "whole", "verdict"),
    [
        (0.998, 1.003, True, "met"),
        (0.99, 1.003, True, "not shown: the interval is too wide"),
        (1.006, 1.02, True, "missed"),
        (0.99, 1.003, False, "met, but not by the whole interval"),
    ],
)
def test_a_target_is_met_by_the_whole_interval_or_it_is_said(low, high, whole, verdict):
    row = Row("idle", "hook / none", Ratio((low + high) / 2, low, high, 300), 300, {}, (0.995, 1.005), interval_counts=whole)
    assert row.verdict == verdict


def test_a_captures_cost_is_taken_apart_into_layers_iterations_and_captures():
    names, costs = ("layers", "micro_batches", "recompute", "window"), []
    for layers, micro_batches, recompute in [(2, 2, False), (6, 2, False), (3, 8, False), (6, 2, True)]:
        for window in (3, 8):
            kept = 9000 + window * (500 + 40 * layers * micro_batches) * (2 if recompute else 1)
            case = dict(zip(names, (layers, micro_batches, recompute, window), strict=True))
            costs.append(case | {"option": "torch", "kept_bytes": kept})
    assert per_iteration(costs, "kept_bytes")["torch", 6, 2, False] == pytest.approx((980, 9000))
    assert per_unit(costs, "kept_bytes")["torch"] == pytest.approx((40, 500))

"""The GPU benchmarks: the plain step is the loop's own."""

import ast
import inspect
import textwrap

import pytest


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
    from benchmarks.gpu_megatron import PlainLoop
    from recipes.megatron.train import Loop

    ours, loops = getattr(PlainLoop, name), getattr(Loop, name)
    assert "hook" in inspect.getsource(loops)
    assert "hook" not in inspect.getsource(ours)
    assert without_ranges(ours).replace("train.", "") == without_ranges(loops)

"""No module imports itself through others. Imports inside functions and under TYPE_CHECKING count: a cycle means that a type or
a function is in the wrong module."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_import_cycle():
    graph = grimp.build_graph("bridge_profiling", "recipes", "launch", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100, "the packages were not found"
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))

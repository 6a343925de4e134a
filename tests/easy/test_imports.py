"""What the easy way in loads, and when."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bridge_profiling import easy, monitor


@pytest.mark.parametrize(
    "statement",
    ["import bridge_profiling.easy", "from bridge_profiling.easy import phase, auto_profile", "import bridge_profiling.cli"],
)
def test_torch_is_not_loaded_before_the_script_loads_it(statement: str) -> None:
    command = [sys.executable, "-c", f"{statement}; import sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, timeout=120).returncode == 0


def test_everything_is_found_in_one_place() -> None:
    assert {name: getattr(easy, name).__name__ for name in easy.__all__} == {name: name for name in easy.__all__}
    assert easy.GPUMonitor is monitor.GPUMonitor
    with pytest.raises(AttributeError, match="no attribute 'profile'"):
        easy.profile  # noqa: B018


def test_its_names_are_listed_without_torch() -> None:
    code = "import sys, bridge_profiling.easy as easy; assert {*easy.__all__} <= {*dir(easy)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

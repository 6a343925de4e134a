"""`import bridge_profiling.plugins` works on a login node that has no torch and no megatron."""

import sys

import pytest

from tests.system.jobs import ended_well

#: Sets up a script on a submit host.
SUBMIT = """
import sys
sys.modules |= {"torch": None, "megatron": None}
import bridge_profiling.plugins
assert "nemo_run" not in sys.modules
import nemo_run as run
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin

window = {"profile_step_start": 1, "profile_step_end": 2}
for plugin in (NsysPlugin(**window), PyTorchProfilerPlugin(**window), FaultTolerancePlugin()):
    script = run.Script(path="a.py", entrypoint="python")
    plugin.setup(script, run.LocalExecutor(launcher="torchrun"))
    assert script.args, plugin
"""


@pytest.mark.integration
def test_the_plugins_set_up_a_script_where_torch_and_megatron_are_missing():
    ended_well([sys.executable, "-c", SUBMIT])

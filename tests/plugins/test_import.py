"""`import bridge_profiling.plugins` works on a login node that has no torch and no megatron."""

import sys

import pytest

from tests.system.jobs import ended_well

#: Found on the path or not, importing one of these fails.
REFUSE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""


#: Sets up a script on a submit host.
SUBMIT = """
import sys
import bridge_profiling.plugins
assert not {"torch", "megatron", "nemo_run"} & set(sys.modules)
import nemo_run as run
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin

window = {"profile_step_start": 1, "profile_step_end": 2}
for plugin in (NsysPlugin(**window), PyTorchProfilerPlugin(**window), FaultTolerancePlugin()):
    script = run.Script(path="a.py", entrypoint="python")
    plugin.setup(script, run.LocalExecutor(launcher="torchrun"))
    assert script.args, plugin
assert not {"torch", "megatron"} & set(sys.modules)
"""


@pytest.mark.integration
def test_the_plugins_set_up_a_script_where_torch_and_megatron_are_missing():
    ended_well([sys.executable, "-c", REFUSE.format(refused={"torch", "megatron"}) + SUBMIT])

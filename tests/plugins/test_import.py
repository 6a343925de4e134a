"""`import bridge_profiling.plugins` works on a login node that has no torch and no megatron."""

import subprocess
import sys

import pytest

REFUSE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.integration
def test_the_plugins_set_up_a_script_where_torch_and_megatron_are_missing():
    code = f"""{REFUSE}
import bridge_profiling.plugins
print({{'torch', 'megatron', 'nemo_run'}} & set(sys.modules))
import nemo_run as run
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin

window = {{"profile_step_start": 1, "profile_step_end": 2}}
for plugin in (NsysPlugin(**window), PyTorchProfilerPlugin(**window), FaultTolerancePlugin()):
    script = run.Script(path="a.py", entrypoint="python")
    plugin.setup(script, run.LocalExecutor(launcher="torchrun"))
    assert script.args, plugin
print({{'torch', 'megatron'}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("set()", "set()")

"""Layers under torch.compile: what sets the GPU's random numbers stays out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.system
@pytest.mark.needs("megatron")
def test_nothing_is_compiled_while_torch_holds_the_lock_under_which_a_random_state_is_set():
    script = Path(__file__).with_name("dynamo_takes_up.py")
    # `make test` switches dynamo off for speed.
    kept = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    environment = kept | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "layer" in found["before"]
    assert "layer" in found["after"]
    # What megatron-core hands to torch to be called under its lock.
    assert "cb" in found["before"]
    assert "cb" not in found["after"]

"""The batch scripts that NeMo-Run would submit, and golden files: UPDATE_GOLDEN=1 writes these anew, for `git diff`."""

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nemo_run as run
import pytest


@contextmanager
def written_experiment(home: Path, title: str) -> Iterator[run.Experiment]:
    """An experiment below `home` for the block to fill: NeMo-Run writes it, and nobody submits it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_run.config._NEMORUN_HOME", str(home))
        patch.setattr("sys.stdin", io.StringIO())  # what NeMo-Run starts reads from it
        with run.Experiment(title) as experiment:
            yield experiment
            experiment.dryrun(log=False, delete_exp_dir=False)


def batch_script(home: Path, executor: run.SlurmExecutor, task: run.Script, plugins: Sequence[run.Plugin] = ()) -> Path:
    """The script of a job in an experiment below `home`, which nobody submits."""
    # No script says what is packaged.
    executor.packager = run.Packager()
    with written_experiment(home, "golden") as experiment:
        experiment.add(task, executor=executor, name="train", plugins=list(plugins))
    (written,) = home.rglob("*_sbatch.sh")
    return written


def comparable(script: Path, home: Path) -> str:
    """The text of a batch script without what differs between machines and runs."""
    text = script.read_text().replace(str(home), "/HOME").replace(sys.prefix, "/VENV")
    text = re.sub(r"golden_\d+", "golden_TIME", text)
    return re.sub(r"--rdzv-id \d+", "--rdzv-id RANDOM", text)


def check_golden(golden: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden.name} differs; UPDATE_GOLDEN=1 writes it anew"

"""Real servers and tools for system tests: made once a session, and gone at its end."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from bridge_profiling.common.processes import find_by_variable
from tests.system import debian, jobs, nsys_install, slurm_cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(name="slurm_cluster", scope="session")
def _slurm_cluster():
    """A running Slurm with two nodes, n1 and n2, on this machine; see SlurmCluster. Mark its tests `needs("slurm")`.

    Give `slurm_cluster.environment` to whatever shall use it. Its jobs, servers and files are gone after the session.
    """
    debian.install(slurm_cluster.PROGRAMS)
    with slurm_cluster.started() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def nsys():
    """The path of a real nsys, made of Debian's packages where PATH has none. Mark its tests `needs("nsys")`.

    For a job, put its directory first on PATH: `{"PATH": f"{nsys.parent}:{os.environ['PATH']}"}`. It is kept in `.cache/`.
    """
    return nsys_install.working_nsys(ROOT / ".cache" / "nsys")


@pytest.fixture(scope="session")
def chromium():
    """A real browser without a window. Mark its tests `needs("browser")`."""
    from playwright.sync_api import sync_playwright

    debian.install(debian.BROWSER)
    with sync_playwright() as playwright:
        # Root has no sandbox in a container.
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(name="ray_cluster", scope="module")
def _ray_cluster(request):
    """Ray on this machine, with a real nsys on its PATH where there can be one. Mark its tests `needs("ray")`."""
    import ray

    wanted = jobs.environment(None if nsys_install.why_no_nsys() else request.getfixturevalue("nsys"))
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - wanted.keys():
            patch.delenv(name)
        for name, value in wanted.items():
            patch.setenv(name, value)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        started_in = os.environ["PYTEST_CURRENT_TEST"]
        yield ray
        ray.shutdown()
        # An nsys that Ray kills while it starts leaves its agent.
        for pid in find_by_variable("PYTEST_CURRENT_TEST", started_in):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def committed_checkout(tmp_path_factory):
    """A repository with this working tree as its one commit: NeMo-Run sends a job what is committed, and nothing else."""
    copy = tmp_path_factory.mktemp("checkout") / "bridge_profiling"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".cache", ".runs"))
    author = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    for command in (["init", "--quiet"], ["add", "--all"], [*author, "commit", "--quiet", "--message=the working tree"]):
        subprocess.run(["git", *command], cwd=copy, check=True)
    return copy

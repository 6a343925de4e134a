"""docs/first-hour/your-job.md, command by command, in an environment whose torch must stay byte for byte as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.jobs import ROOT, ended_well

PAGE = ROOT / "docs" / "first-hour" / "your-job.md"
MARKER = "2.9.0a0+marker"

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]


def section(title: str, number: int = 0) -> str:
    """A block of shell commands under a heading of the page."""
    text = PAGE.read_text().split(f"\n### {title}\n")[1].split("\n### ")[0]
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[number]


class Container:
    """A bare virtual environment with its own torch, and a shell in it."""

    def __init__(self, folder: Path) -> None:
        self.shared, self._home = folder / "shared", folder / "image"
        self.shared.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(self._home)], check=True)
        (self._packages,) = (self._home / "lib").glob("python3*/site-packages")
        metadata = f"torch-{MARKER}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {MARKER}\n"
        for name, text in (metadata, ("torch/__init__.py", f"__version__ = {MARKER!r}\n")):
            (self._packages / name).parent.mkdir()
            (self._packages / name).write_text(text)
        self._torch = self._torch_files()

    def _torch_files(self) -> dict[Path, int]:
        files = (path for folder in self._packages.glob("torch*") for path in folder.rglob("*"))
        # Python writes its cache of compiled modules when it likes.
        return {path: path.stat().st_mtime_ns for path in files if path.is_file() and path.suffix != ".pyc"}

    def shell(self, commands: str, *, cwd: Path = ROOT, code: int = 0, **more: str) -> str:
        """Run commands that must end with this exit code and leave torch as it is: what they print, or their error."""
        environment = os.environ | {"PATH": f"{self._home / 'bin'}:{os.environ['PATH']}", "SHARED": str(self.shared), **more}
        for ours in {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"} - more.keys():
            environment.pop(ours, None)
        command = ["bash", "-euo", "pipefail", "-c", commands]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == code, f"{commands}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert self._torch_files() == self._torch
        return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def checkout(committed_checkout):
    """A copy of this checkout with the wheel built in it, as the page says."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended_well(["bash", "-euo", "pipefail", "-c", section("The wheel")], cwd=committed_checkout, env=environment, timeout=600)
    assert len(list((committed_checkout / "dist").glob("bridge_profiling-*.whl"))) == 1
    return committed_checkout


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    """One that no test installs anything into."""
    return Container(tmp_path_factory.mktemp("container"))


#: As far as a marker can be torch: every module of a rank's is imported, and a hook that profiles nothing runs.
RANK = """
import importlib, pkgutil
import bridge_profiling.capture
for module in pkgutil.walk_packages(bridge_profiling.capture.__path__, "bridge_profiling.capture."):
    importlib.import_module(module.name)
from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook
with ProfilingHook(ProfilingConfig(), rank=0, world_size=1) as hook:
    for iteration in range(12):
        with hook.iteration(iteration):
            pass
from importlib.metadata import distributions
print(sorted(found.metadata["Name"] for found in distributions()))
"""


def test_installed_into_the_image_the_torch_stays_a_rank_works_and_the_doctor_after_its_three_packages(tmp_path, checkout):
    container = Container(tmp_path)
    container.shell(section("Install it into the image"), cwd=checkout)
    printed = container.shell(section("Check the result"), cwd=container.shared)
    assert printed.startswith(MARKER)
    assert str(container.shared.parent / "image") in printed
    (container.shared / "rank.py").write_text(RANK)
    printed = container.shell("python rank.py", cwd=container.shared)
    installed = {"bridge-profiling", "pip", "setuptools", "torch"}
    assert set(re.findall(r"'([\w-]+)'", printed.splitlines()[-1])) <= installed, printed
    bare = container.shell("bridge-profiling doctor", cwd=container.shared, code=1)
    assert "Type pip install omegaconf rich typer" in bare
    container.shell(section("Install it into the image", 1))
    assert "output directory:" in container.shell("bridge-profiling doctor --nodes 1", cwd=container.shared)


def test_on_a_mount_the_image_is_untouched(container, checkout):
    before = container.shell("pip freeze")
    container.shell(section("On a mount, without changing the image"), cwd=checkout)
    assert container.shell("pip freeze") == before
    mounted = str(container.shared / "bridge_profiling")
    printed = container.shell(section("Check the result"), cwd=container.shared, PYTHONPATH=mounted)
    assert printed.startswith(MARKER)


@pytest.mark.needs("nemo_run")
def test_with_the_jobs_own_code_nothing_is_installed(container, tmp_path):
    (tmp_path / "code").mkdir()
    commands = f"""
        git init --quiet project
        cd project
        echo "import torch, bridge_profiling.capture; print(torch.__version__)" > train.py
        git add train.py
        git -c user.name=t -c user.email=t@l commit --quiet --message=code
        {sys.executable} -c "from pathlib import Path; from recipes.packaging import with_bridge_profiling
with_bridge_profiling().package(Path.cwd(), '{tmp_path}', 'job')" < /dev/null
        tar -xzf ../job.tar.gz -C ../code
    """
    ended_well(["bash", "-euc", commands], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    # What the job does: it starts in its code directory, with that directory on PYTHONPATH.
    code = tmp_path / "code"
    assert container.shell("python train.py", cwd=code, PYTHONPATH=str(code)).strip() == MARKER


@pytest.mark.needs("nsys")
def test_a_copied_nsys_tree_profiles_in_the_container(container, nsys):
    container.shell(section("nsys"), PATH=f"{nsys.parent}:{os.environ['PATH']}")
    on_path = section("nsys", 1)
    assert "NVIDIA Nsight Systems version" in container.shell(on_path, cwd=container.shared)
    profile = "nsys profile --trace=nvtx --sample=none --cpuctxsw=none --export=sqlite -o $SHARED/report python -c 'pass'"
    container.shell(f"{on_path}\n{profile}", cwd=container.shared)
    assert {path.suffix for path in container.shared.glob("report.*")} == {".nsys-rep", ".sqlite"}

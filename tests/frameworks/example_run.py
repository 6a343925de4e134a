"""An example of docs/examples on two connected CPU ranks, with its profiling and without."""

import json
import sys
from pathlib import Path

from typer.testing import CliRunner

from bridge_profiling.cli import app
from tests.frameworks import with_and_without
from tests.frameworks.captured import Captured
from tests.system.jobs import ended_well, environment

_EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class ExampleRun:
    """What an example has left in `folder`, where both of its trainings ran."""

    def __init__(self, script: str, folder: Path) -> None:
        self.script, self._folder = _EXAMPLES / script, folder
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [with_and_without.__file__, str(self.script), str(folder)]
        ended_well(command, env=environment(CUDA_VISIBLE_DEVICES=""))
        self.captured = Captured(folder / "with" / "profiles", "iter-3-5")

    def losses(self, kind: str, rank: int) -> list[str]:
        """The losses that a rank printed, to the last bit."""
        lines = (self._folder / kind / f"rank-{rank}.out").read_text().splitlines()
        return [line for line in lines if line.startswith(f"rank {rank} loss")]

    def check(self, name: str, phases: list[str]) -> None:
        """What holds for every framework: the window, whole, on each rank; each phase in its place; the same training."""
        assert len(self.script.read_text().splitlines()) <= 30
        for rank in (0, 1):
            manifest = self.captured.manifest(rank)
            assert (manifest["status"], manifest["reason"], manifest["captured"]["iterations"]) == ("complete", None, [3, 4])
            assert manifest["coordinates"]["dp"] == [rank, 2]
            assert (manifest["framework"]["name"], manifest["framework"]["iteration"]) == (name, "optimizer step")
            found = self.captured.phases(rank)
            assert {iteration: found[iteration] for iteration in (3, 4)} == {3: phases, 4: phases}
            assert found.keys() <= {3, 4, None}
            assert self.losses("with", rank)
            assert self.losses("with", rank) == self.losses("without", rank)
        assert not (self._folder / "without" / "profiles").exists()
        analysis = json.loads(CliRunner().invoke(app, ["analyze", str(self.captured.root), "--json"]).stdout)
        assert [[one["iteration"] for one in rank["iterations"]] for rank in analysis["ranks"]] == [[3, 4], [3, 4]]
        assert [rank["coordinates"]["dp"] for rank in analysis["ranks"]] == [[0, 2], [1, 2]]

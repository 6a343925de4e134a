"""A machine made of recorded text: what its files and commands said, and nothing of the machine that runs the tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge_profiling.doctor.checks import Machine, Process, Unavailable
from bridge_profiling.doctor.request import Request, apply_arguments


@dataclass(frozen=True)
class FakeMachine(Machine):
    """Files and targets of links by path, outputs by command, versions by package; whatever was not recorded is not there."""

    environ: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, str] = field(default_factory=dict)
    running: tuple[Process, ...] = ()

    def read(self, path: str) -> str:
        if path not in self.recorded:
            raise Unavailable(f"{path} was not recorded")
        return self.recorded[path]

    link = package_version = read

    def which(self, program: str) -> str | None:
        return next((f"/usr/bin/{program}" for command in self.recorded if command.split()[0] == program), None)

    def run(self, *command: str, seconds: float = 1.0) -> str:
        return self.read(" ".join(command))

    def processes(self) -> list[Process]:
        return list(self.running)


def request_for(*arguments: str, **fields: object) -> Request:
    """A request for a run with these settings; further fields by name."""
    request = Request(**{"name": "run", **fields})
    apply_arguments(request, arguments)
    return request

"""A machine made of recorded text: what its files and commands said, and nothing of the machine that runs the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bridge_profiling.doctor.checks import Machine, Process, Unavailable
from bridge_profiling.doctor.request import Request, apply_arguments

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class RecordedMachine(Machine):
    """Files by path, commands by what is typed; whatever was not recorded is not there."""

    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    running: tuple[Process, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    free: int = 10**15
    packages: Mapping[str, str] = field(default_factory=dict)

    def read(self, path: str) -> str:
        if path not in self.files:
            raise Unavailable(f"{path} was not recorded")
        return self.files[path]

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if any(command.split()[0] == program for command in self.commands) else None

    def run(self, *command: str, seconds: float = 1.0) -> str:
        typed = " ".join(command)
        if typed not in self.commands:
            raise Unavailable(f"{command[0]} is not on this machine's PATH")
        return self.commands[typed]

    def package_version(self, name: str) -> str:
        if name not in self.packages:
            raise Unavailable(f"{name} is not installed")
        return self.packages[name]

    def processes(self) -> list[Process]:
        return list(self.running)

    def link(self, path: str) -> str:
        if path not in self.links:
            raise Unavailable(f"{path} was not recorded")
        return self.links[path]

    def free_bytes(self, directory: Path) -> int:
        return self.free


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """The text of a recording."""
    return lambda name: (RECORDED / name).read_text()


@pytest.fixture
def machine() -> type[RecordedMachine]:
    return RecordedMachine


@pytest.fixture
def request_for() -> Callable[..., Request]:
    """A request for a run with these settings; further fields by name."""

    def make(*arguments: str, **fields: object) -> Request:
        request = Request(**{"name": "run", **fields})
        apply_arguments(request, arguments)
        return request

    return make

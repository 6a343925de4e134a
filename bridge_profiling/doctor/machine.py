"""What the checks may look at on this machine: its files, its tools, its processes. Changes nothing, imports no torch.

Every check takes a Machine, so that a test can hand it the text that another machine was recorded with.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: A driver that is asked for the first time since boot answers after seconds.
_SECONDS = 30.0


class Unavailable(Exception):
    """Something that could not be looked at; the message is the reason."""


@dataclass(frozen=True)
class Process:
    """A running process.

    Attributes:
        pid: its number.
        name: what the kernel calls it: the program's name, cut off at 15 characters.
        arguments: its command line.
    """

    pid: int
    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        environ: the environment a job would start with here.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def read(self, path: str) -> str:
        """The text of a file.

        Raises:
            Unavailable: it cannot be read.
        """
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise Unavailable(f"{path} cannot be read: {error.strerror}") from error

    def which(self, program: str) -> str | None:
        """Where PATH has a program."""
        return shutil.which(program, path=self.environ.get("PATH"))

    def run(self, *command: str, seconds: float = _SECONDS) -> str:
        """What a command prints, standard error after standard output.

        Raises:
            Unavailable: there is no such program, it fails, or it does not end within `seconds`.
        """
        program = self.which(command[0])
        if program is None:
            raise Unavailable(f"{command[0]} is not on this machine's PATH")
        shown = f"`{' '.join(command[:3])}{' …' if len(command) > 3 else ''}`"
        try:
            done = subprocess.run([program, *command[1:]], capture_output=True, text=True, errors="replace", timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{shown} did not end within {seconds:.0f} s") from None
        except OSError as error:
            raise Unavailable(f"{program} does not run: {error.strerror}") from error
        printed = "\n".join(filter(None, (done.stdout.strip("\n"), done.stderr.strip("\n"))))
        if done.returncode:
            said = printed.splitlines()[-1] if printed else "it said nothing"
            raise Unavailable(f"{shown} ended with {done.returncode}: {said}")
        return printed

    def package_version(self, name: str) -> str:
        """The version of a package installed in the Python that runs this.

        Raises:
            Unavailable: it is not installed.
        """
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise Unavailable(f"{name} is not installed") from error

    def processes(self) -> list[Process]:
        """The processes that can be seen from here.

        Raises:
            Unavailable: there is no /proc.
        """
        try:
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except OSError as error:
            raise Unavailable(f"/proc cannot be read: {error.strerror}") from error
        seen = []
        for pid in pids:
            try:
                name, arguments = self.read(f"/proc/{pid}/comm").strip(), self.read(f"/proc/{pid}/cmdline")
            except Unavailable:
                continue  # It ended meanwhile.
            seen.append(Process(pid, name, tuple(arguments.rstrip("\0").split("\0"))))
        return seen

    def link(self, path: str) -> str:
        """What a symbolic link points to.

        Raises:
            Unavailable: it cannot be read.
        """
        try:
            return os.readlink(path)
        except OSError as error:
            raise Unavailable(f"{path} cannot be read: {error.strerror}") from error

    def free_bytes(self, directory: Path) -> int:
        """Bytes that this user may still write there.

        Raises:
            Unavailable: the directory cannot be looked at.
        """
        try:
            return shutil.disk_usage(directory).free
        except OSError as error:
            raise Unavailable(f"{directory} cannot be looked at: {error.strerror}") from error


def parse_settings(text: str, separator: str) -> dict[str, str]:
    """`name: value` or `name=value` lines; comments and other lines are passed over."""
    settings = {}
    for line in text.splitlines():
        name, found, value = line.partition(separator)
        if found and not line.lstrip().startswith("#"):
            settings[name.strip()] = value.strip()
    return settings


def join(words: Sequence[object], limit: int = 8) -> str:
    """A list as one reads it out, cut off after `limit`."""
    shown = ", ".join(map(str, words[:limit]))
    return shown + (f" and {len(words) - limit} more" if len(words) > limit else "")

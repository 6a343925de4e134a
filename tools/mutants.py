"""Changes one operator or constant at a time, and counts how many of these mutants the tests catch.

    python tools/mutants.py [--count 60] [--seed 1] [--jobs 2] [--concern NAME] [--again] [TESTS ...]

Works on copies of the checkout in .cache/mutants, which the tests import instead of the installed package. The unit tests run
once under coverage, which records the tests that execute each line. Then each mutant runs against those, the ones that execute
least first, until one fails; for a line that runs on import, against all that execute its module. In the end, the tests that
failed run without a mutant. Integration tests would catch one more of sixty.

Interrupt it at any time: what is known is kept until the package changes, and the next call goes on. `--again` repeats the
survivors, after the tests have changed. With TESTS, only these files are recorded, and also if they were before.

Prints a table of the concerns and the survivors, and exits with 1 if fewer than 90% were caught.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import multiprocessing.context
import multiprocessing.resource_tracker
import os
import queue
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: What must not be wrong, and the modules of bridge_profiling that decide it.
CONCERNS = {
    "window arithmetic": [
        "settings/profiling.py",
        "settings/window.py",
        "capture/window.py",
        "capture/windows.py",
        "common/slow_iterations.py",
    ],
    "rank selection": ["layout.py", "settings/window.py", "common/launch_env.py"],
    "conflict rules": [f"plugins/{name}.py" for name in ("checks", "executors", "fault_tolerance", "profilers", "task")],
    "manifest status": ["capture/window.py", "capture/profiler.py", "manifest.py"],
    "interval arithmetic": ["facts/intervals.py"],
    "facts": ["facts/*.py"],
    "findings' thresholds": ["findings/*.py"],
    "overrides": ["settings/overrides.py", "settings/yaml_values.py"],
    "quoting": ["nsys/command.py", "nsys/launch.py", "plugins/batch_script.py"],
}

#: Share of mutants to catch.
GOAL = 0.9

#: Seconds for one test; one that takes longer hangs. And bytes that a process may allocate.
_LIMIT_S, _LIMIT_BYTES = 180, 12 << 30

#: So many files of tests are asked before all others.
_FEW = 3

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip

#: Keyword arguments of which no test says anything: looks, and what only happens on another machine.
_KEYWORDS = {"encoding", "errors", "exist_ok", "indent", "missing_ok", "parents", "repr", "slots", "stacklevel", "strict"}


@dataclass(frozen=True)
class Mutant:
    """One change: in `path`, the node number `index` of `ast.walk`."""

    concern: str
    path: str
    index: int
    lines: range
    was: str
    becomes: str

    @property
    def key(self) -> str:
        """Its name among the results."""
        return f"{self.path} node {self.index}"

    def __str__(self) -> str:
        return f"{self.path}:{self.lines.start}: `{self.was}` → `{self.becomes}`"


def mutate(node: ast.AST) -> ast.AST | None:
    """A changed copy of a node, or None for a node that is left alone."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            changed.ops = [_COMPARISONS[type(operator)]()]
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC and not (_text(changed.left) or _text(changed.right)):
            changed.op = _ARITHMETIC[type(operator)]()
        case ast.BoolOp(op=operator):
            changed.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            changed.value = not value
        case ast.Constant(value=int(value) | float(value)):
            # A threshold of 20,001 instead of 20,000 is as good.
            changed.value = value + 1 if value < 10 and isinstance(value, int) else value * 2 or 1.0
        case ast.Call(func=ast.Name(id="min" | "max") as function):
            function.id = "max" if function.id == "min" else "min"
        case _:
            return None
    return changed


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def candidates(concern: str, path: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    skipped = {id(node) for root in _of_no_consequence(tree) for node in ast.walk(root)}
    for index, node in enumerate(ast.walk(tree)):
        changed = None if id(node) in skipped else mutate(node)
        if changed is not None:
            lines = range(node.lineno, node.end_lineno + 1)
            yield Mutant(concern, path, index, lines, ast.unparse(node), ast.unparse(changed))


def _of_no_consequence(tree: ast.Module) -> Iterator[ast.AST]:
    """What no test has to notice: formatted texts, messages, annotations, decorators, and some keyword arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr() | ast.Raise() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield node
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "logging" | "warnings"))):
                yield node
            case ast.FunctionDef(name="__repr__" | "__str__"):
                yield node
            case ast.FunctionDef(returns=returns, decorator_list=decorators):
                yield from [*decorators, *([returns] if returns else [])]
            case ast.arg(annotation=ast.AST() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.ClassDef(decorator_list=decorators, keywords=keywords):
                yield from [*decorators, *keywords]
            case ast.keyword(arg=name) if name in _KEYWORDS:
                yield node
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                yield node


def choose(count: int, seed: int, concerns: list[str]) -> list[Mutant]:
    """As many mutants of each concern, from all of its files."""
    chooser, chosen = random.Random(seed), []
    package = ROOT / "bridge_profiling"
    for position, concern in enumerate(concerns):
        paths = sorted({str(path.relative_to(ROOT)) for pattern in CONCERNS[concern] for path in package.glob(pattern)})
        found = [mutant for path in paths for mutant in candidates(concern, path)]
        share = count // len(concerns) + (position < count % len(concerns))
        chosen += chooser.sample(found, share)
    return chosen


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the mutant in it, and all else as it was, comments included."""
    node = list(ast.walk(ast.parse(source)))[mutant.index]
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    becomes = mutant.becomes if isinstance(node, ast.Constant) else f"({mutant.becomes})"
    return (source.encode()[:start] + becomes.encode() + source.encode()[end:]).decode()


#: Forks of a process that has loaded what takes most tests longer to load than to run.
_FORKS = multiprocessing.get_context("forkserver")
_LOADED = ["pytest", "hypothesis", "torch", "nemo_run", "pyarrow.parquet", "duckdb", "pandas", "typer", "plotly.graph_objects"]


def _pytest(tree: Path, variables: dict[str, str], options: list[str], log: Path) -> None:
    """Ends this process with pytest's exit code."""
    os.setsid()
    os.chdir(tree)
    # A mutant that replaces another one within a second has its time and often its size: compiled, they could be mixed up.
    os.environ |= variables | {"PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    tempfile.tempdir = None
    # That of the process that this one was forked from, which no test may stop.
    multiprocessing.resource_tracker._resource_tracker._fd = None
    sys.path.insert(0, str(tree))
    for path, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, (1, 2))):
        for number in numbers:
            os.dup2(os.open(path, flags), number)
    import pytest

    sys.exit(int(pytest.main(options)))


class Workplace:
    """A copy of the checkout in which one run of tests at a time takes place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / "tree"
        self.process: multiprocessing.context.ForkServerProcess | None = None
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.tree, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        shared = folder / "shared"
        if (ROOT.parent / "shared").is_dir() and not shared.exists():
            shared.symlink_to(ROOT.parent / "shared")

    def run(self, *arguments: str, **variables: str) -> tuple[int, list[str]]:
        """Pytest with this copy's code: its exit code, and the tests that failed."""
        temporary, log = self.folder / "tmp", self.folder / "log"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        variables |= {"PYTHONPATH": str(self.tree), "TMPDIR": str(temporary), "NEMORUN_HOME": str(temporary / "runs")}
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--basetemp", f"{temporary}/pytest"]
        options += ["-m", "not integration and not system and not gpu", "--timeout", str(_LIMIT_S), *arguments]
        self.process = _FORKS.Process(target=_pytest, args=(self.tree, variables, options, log))
        self.process.start()
        resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (_LIMIT_BYTES, _LIMIT_BYTES))
        self.process.join()
        code = self.process.exitcode
        text = log.read_text(encoding="utf-8", errors="replace")
        # A mutant can also keep the tests' own modules from being imported.
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*)|^ImportError while loading (conftest) ", text, re.MULTILINE)
        return code, [line.partition(" - ")[0] or conftest for line, conftest in failed]

    def caught_by(self, mutant: Mutant, record: Record) -> str | None:
        """The first test that fails with the mutant in place."""
        files = [list(tests) for _, tests in itertools.groupby(record.tests(mutant), _file)]
        # Few files first, since loading all of them can take a minute.
        parts = [list(itertools.chain(*part)) for part in (files[:_FEW], files[_FEW:]) if part]
        return next(filter(None, (self._first_to_fail(mutant, record, part) for part in parts)), None)

    def _first_to_fail(self, mutant: Mutant, record: Record, tests: list[str]) -> str | None:
        target, listed = self.tree / mutant.path, self.folder / "tests.txt"
        original = target.read_text(encoding="utf-8")
        listed.write_text("\n".join([*(f"--deselect={test}" for test in record.failing), *tests]))
        target.write_text(mutated(original, mutant), encoding="utf-8")
        try:
            code, failed = self.run("-x", f"@{listed}")
        finally:
            target.write_text(original, encoding="utf-8")
        # A negative one: killed, for want of memory or by itself.
        if code < 0:
            return f"pytest ended by {signal.Signals(-code).name}"
        # 5: none of the tests is a unit test.
        if not failed and code not in (0, 1, 5):
            sys.exit(
                f"error: pytest ends with {code}: see {self.folder / 'log'}; a test that is gone leaves with .cache/mutants"
            )
        return failed[0] if failed else None


class Record:
    """Which tests execute a line, and which fail without a mutant."""

    def __init__(self, folder: Path, workplaces: list[Workplace], only: list[str]) -> None:
        from coverage import CoverageData, CoverageException

        self._folder = folder
        self._make(workplaces, only)
        self.failing = [test for path in folder.glob("*.failing") for test in path.read_text().splitlines()]
        self._data = CoverageData(no_disk=True)
        # Those with another ending are of processes that ended after pytest had combined the others.
        for path in folder.glob("*.coverage*"):
            data = CoverageData(str(path))
            # A process that is killed can leave half a file.
            with contextlib.suppress(CoverageException):
                data.read()
                self._data.update(data)
        self._executed = Counter(
            name
            for path in self._data.measured_files()
            for contexts in self._data.contexts_by_lineno(path).values()
            for name in _tests(contexts)
        )

    def _make(self, workplaces: list[Workplace], only: list[str]) -> None:
        """Run the tests under coverage, unless an earlier call did; with `only`, these files in any case."""
        settings = self._folder / "coveragerc"
        settings.write_text(
            "[run]\nsource = bridge_profiling\nrelative_files = true\nparallel = true\npatch = subprocess, fork, _exit\n"
        )
        coverage = ["--cov", f"--cov-config={settings}", "--cov-report=", "--cov-context=test"]

        def run(place: Workplace, name: str, *arguments: str) -> None:
            data, failing = self._folder / f"{name}.coverage", self._folder / f"{name}.failing"
            failing.write_text("\n".join(place.run(*coverage, *arguments, COVERAGE_FILE=str(data))[1]))

        if only:
            list(in_parallel(lambda place, file: run(place, file.replace("/", "-"), file), only, workplaces))
        elif not (self._folder / "all.failing").exists():
            run(workplaces[0], "all", "-n", str(len(workplaces)), "--dist", "loadfile")

    def tests(self, mutant: Mutant) -> list[str]:
        """Tests and files of tests, those that execute least first."""
        contexts = self._data.contexts_by_lineno(mutant.path)
        found = _tests(context for line in mutant.lines for context in contexts.get(line, ()))
        found = found or _tests(context for of_line in contexts.values() for context in of_line)
        whole = {name for name in found if "::" not in name}
        found = whole | {name for name in found if _file(name) not in whole}
        least: dict[str, int] = {}
        for name in found:
            least[_file(name)] = min(least.get(_file(name), sys.maxsize), self._executed[name])
        return sorted(found, key=lambda name: (least[_file(name)], _file(name), self._executed[name]))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _tests(contexts: Iterable[str]) -> set[str]:
    """Of the contexts `tests/a.py::test[x]|run` the tests; of a fixture, which tests of a file may share, the file."""
    split = [context.rpartition("|") for context in contexts if "::" in context]
    return {_file(name) if phase == "setup" else name.partition("[")[0] for name, _, phase in split}


def in_parallel(function: Callable[[Workplace, Any], Any], tasks: Iterable[Any], workplaces: list[Workplace]) -> Iterator[Any]:
    """Each task in a workplace of its own; yields tasks with results as they come."""
    free: queue.Queue[Workplace] = queue.Queue()
    for place in workplaces:
        free.put(place)

    def work(task: Any) -> tuple[Any, Any]:
        place = free.get()
        try:
            return task, function(place, task)
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(workplaces)) as pool:
        for done in as_completed([pool.submit(work, task) for task in tasks]):
            yield done.result()


def table(mutants: list[Mutant], caught: Callable[[Mutant], bool]) -> str:
    """Markdown: a row for each concern, then the survivors."""
    rows = ["| concern | mutants | caught |", "|---|---|---|"]
    for concern in dict.fromkeys(mutant.concern for mutant in mutants):
        of_concern = [mutant for mutant in mutants if mutant.concern == concern]
        rows.append(f"| {concern} | {len(of_concern)} | {sum(map(caught, of_concern))} |")
    total = sum(map(caught, mutants))
    rows += [f"| all | {len(mutants)} | {total} ({total / len(mutants):.0%}) |", "", "Survivors:", ""]
    return "\n".join(rows + [f"- {mutant}" for mutant in mutants if not caught(mutant)])


def main() -> int:
    """Test the mutants that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--concern", action="append", choices=CONCERNS, help="only these; repeatable")
    parser.add_argument("--again", action="store_true", help="repeat survivors")
    parser.add_argument("tests", nargs="*", help="files of tests to record, instead of all")
    arguments = parser.parse_args()
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((ROOT / "bridge_profiling").rglob("*.py"))))
    folder = ROOT / ".cache" / "mutants" / code.hexdigest()[:12]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _FORKS.set_forkserver_preload(_LOADED)
    workplaces = [Workplace(folder / str(number)) for number in range(arguments.jobs)]
    kept = folder / "results.json"
    # For each mutant, the test that caught it, or None.
    results: dict[str, str | None] = json.loads(kept.read_text()) if kept.exists() else {}
    chosen = choose(arguments.count, arguments.seed, arguments.concern or list(CONCERNS))

    def caught(mutant: Mutant) -> bool:
        return bool(results.get(mutant.key))

    def end(*_: object) -> None:
        for place in workplaces:
            if place.process is not None and place.process.is_alive():
                os.killpg(place.process.pid, signal.SIGKILL)
        # No thread may start the next tests.
        os._exit(130)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    if open_ := [each for each in chosen if not caught(each) and (arguments.again or each.key not in results)]:
        record = Record(folder, workplaces, arguments.tests)
        print(f"tests that fail without a mutant, and are left out: {record.failing}", flush=True)
        for mutant, test in in_parallel(functools.partial(Workplace.caught_by, record=record), open_, workplaces):
            results[mutant.key] = test
            kept.write_text(json.dumps(results, indent=1))
            print(f"{mutant}\n    {f'caught by {test}' if test else 'survived'}", flush=True)
        # A test that fails now and then has caught nothing.
        failed = set(filter(None, results.values()))
        unreliable = workplaces[0].run(*failed)[1] if failed else []
        results = {key: None if test in unreliable else test for key, test in results.items()}
        kept.write_text(json.dumps(results, indent=1))
        print(f"fail without a mutant after all: {unreliable}", flush=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    print(f"\nSeed {arguments.seed}, commit {commit}:\n\n{table(chosen, caught)}")
    return 0 if sum(map(caught, chosen)) >= GOAL * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

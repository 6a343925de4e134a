"""Changes one operator or constant at a time, and counts how many of these mutants the tests catch.

    python tools/mutants.py [--count 60] [--seed 1] [--reuse] [TESTS ...]

Works on a copy of the checkout in .cache/mutants. First it runs the unit and integration tests once under coverage and
records which tests execute each line (`--reuse` keeps the last record). Then each mutant runs against the tests that execute
its line until one fails; for a line that runs on import, against all tests that execute its module. Prints a table of the
concerns and the survivors, and exits with 1 if fewer than 90% were caught. It takes about 40 minutes on two cores.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "mutants"
TREE = FOLDER / "tree"

#: What must not be wrong, and the modules of bridge_profiling that decide it.
CONCERNS = {
    "window arithmetic": ["config.py", "capture/window.py", "slow_iterations.py"],
    "rank selection": ["layout.py", "launch_env.py"],
    "conflict rules": ["plugins/*.py"],
    "manifest status": ["capture/record.py", "capture/profiler.py", "manifest.py"],
    "interval arithmetic": ["analysis/intervals.py"],
    "attribution": ["analysis/attribution/*.py", "analysis/findings/ledger.py"],
    "findings' thresholds": ["analysis/findings/*.py"],
    "overrides": ["overrides.py", "values.py"],
    "quoting": ["nsys/command.py", "nsys/launch.py"],
}

#: Share of mutants to catch.
GOAL = 0.9

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}

#: Seconds for the tests of one mutant; one that takes longer hangs, and is caught.
_LIMIT_S = 400


@dataclass(frozen=True)
class Mutant:
    """One change: in `path`, the node number `index` of `ast.walk`."""

    concern: str
    path: str
    index: int
    lines: range
    was: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lines.start}: {self.was} → {self.becomes}"


def mutate(node: ast.AST) -> ast.AST | None:
    """A changed copy of a node, or None for a node that is left alone."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            changed.ops = [_COMPARISONS[type(operator)]()]
        case ast.BinOp(op=operator, right=right) if type(operator) in _ARITHMETIC and not isinstance(right, ast.JoinedStr):
            changed.op = _ARITHMETIC[type(operator)]()
        case ast.BoolOp(op=operator):
            changed.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            changed.value = not value
        case ast.Constant(value=int(value)):
            changed.value = value + 1
        case ast.Call(func=ast.Name(id="min" | "max") as function):
            function.id = "max" if function.id == "min" else "min"
        case _:
            return None
    return changed


def candidates(concern: str, path: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    skipped = _texts_and_types(tree)
    for index, node in enumerate(ast.walk(tree)):
        changed = None if id(node) in skipped else mutate(node)
        if changed is not None:
            lines = range(node.lineno, node.end_lineno + 1)
            yield Mutant(concern, path, index, lines, ast.unparse(node), ast.unparse(changed))


def _texts_and_types(tree: ast.Module) -> set[int]:
    """Nodes whose change is no change of behaviour: inside of formatted texts, annotations and decorators."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr():
                roots.append(node)
            case ast.FunctionDef(returns=returns, decorator_list=decorators):
                roots += [*decorators, *([returns] if returns else [])]
            case ast.arg(annotation=ast.AST() as annotation) | ast.AnnAssign(annotation=annotation):
                roots.append(annotation)
            case ast.ClassDef(decorator_list=decorators):
                roots += decorators
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == "__all__":
                roots.append(value)
    return {id(node) for root in roots for node in ast.walk(root)}


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


def copy_checkout() -> None:
    """The files that git knows, as they are now, with ../shared next to them if it exists."""
    shutil.rmtree(TREE, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
    shared = FOLDER / "shared"
    if (ROOT.parent / "shared").is_dir() and not shared.exists():
        shared.symlink_to(ROOT.parent / "shared")


def run_tests(*arguments: str, limit: float | None = None) -> int:
    """Pytest in the copy, with the copy's code; returns its exit code, -1 for one that took too long."""
    temporary = FOLDER / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": str(TREE), "TMPDIR": str(temporary), "NEMORUN_HOME": str(temporary / "runs"), "TORCHDYNAMO_DISABLE": "1",
        "COVERAGE_FILE": str(FOLDER / "coverage"),
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(temporary / "pytest"),
        *arguments,
    ]
    with open(FOLDER / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=TREE, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            process.kill()
            process.wait()


def record(tests: list[str]) -> None:
    """Run the tests once, and record which of them execute each line, also in processes that they start."""
    settings = FOLDER / "coveragerc"
    settings.write_text(
        "[run]\nsource = bridge_profiling\npatch = subprocess\nparallel = true\ncontext = ${PYTEST_CURRENT_TEST-}\n"
    )
    code = run_tests(
        "-n", "2", "--dist", "loadfile", "-m", "not system", "--cov", "--cov-context=test",
        f"--cov-config={settings}", "--cov-report=", *tests,
    )  # fmt: skip
    if code:
        sys.exit(f"error: the tests fail without a mutant; see {FOLDER / 'log'}")


class Executions:
    """Which tests execute a line."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(FOLDER / "coverage"))
        self._data.read()

    def tests(self, mutant: Mutant) -> list[str]:
        """Arguments for pytest: tests, or whole files where a fixture shared by a file's tests executes the line."""
        contexts = self._data.contexts_by_lineno(str(TREE / mutant.path))
        found = {context for line in mutant.lines for context in contexts.get(line, ())} - {""}
        if not found:
            found = {context for of_line in contexts.values() for context in of_line} - {""}
        # `|tests/a.py::test[x]|run`, or `tests/a.py::test[x] (call)` of a process that a test started.
        names = set()
        for context in found:
            test = context.replace(" (", "|").lstrip("|").partition("|")[0].partition("[")[0]
            names.add(test.partition("::")[0] if context.endswith("|setup") else test)
        whole = {name for name in names if "::" not in name}
        return sorted(whole | {name for name in names if name.partition("::")[0] not in whole})


def caught(mutant: Mutant, tests: list[str]) -> bool:
    """Whether a test fails with the mutant in place; unit tests are asked first."""
    target = TREE / mutant.path
    original = target.read_text(encoding="utf-8")
    tree = ast.parse(original)
    nodes = list(ast.walk(tree))
    changed = ast.copy_location(mutate(nodes[mutant.index]), nodes[mutant.index])
    tree = _Replace(nodes[mutant.index], changed).visit(tree)
    target.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    listed = FOLDER / "tests.txt"
    listed.write_text("\n".join(tests))
    try:
        for tier in ("not integration and not system", "integration and not system"):
            # 5: no test of this tier executes the line.
            if run_tests("-x", "-m", tier, f"@{listed}", limit=_LIMIT_S) not in (0, 5):
                return True
        return False
    finally:
        target.write_text(original, encoding="utf-8")


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def main() -> int:
    """Test the mutants that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reuse", action="store_true")
    parser.add_argument("--concern", action="append", choices=CONCERNS, help="only these; repeatable")
    parser.add_argument("tests", nargs="*", help="files or folders of tests, instead of all unit and integration tests")
    arguments = parser.parse_args()
    concerns = arguments.concern or list(CONCERNS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    copy_checkout()
    if not arguments.reuse:
        record(arguments.tests)
    executions = Executions()
    results: list[tuple[Mutant, bool]] = []
    for mutant in choose(arguments.count, arguments.seed, concerns):
        tests = executions.tests(mutant)
        results.append((mutant, bool(tests) and caught(mutant, tests)))
        print(f"{'caught  ' if results[-1][1] else 'survived'} {mutant} ({len(tests)} tests or files)", flush=True)
    print("\n| concern | mutants | caught |\n|---|---|---|")
    for concern in concerns:
        of_concern = [ok for mutant, ok in results if mutant.concern == concern]
        print(f"| {concern} | {len(of_concern)} | {sum(of_concern)} |")
    total = sum(ok for _, ok in results)
    print(f"| all | {len(results)} | {total} ({total / len(results):.0%}) |")
    return 0 if total >= GOAL * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

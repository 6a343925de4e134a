"""The NeMo-Run command line over our recipes, executors and plugins, with its traps turned into errors.

    python launch/nemorun_cli.py --yes --factory gpt_tiny run.executor=local_torchrun \\
        run.plugins=pytorch_profiler run.plugins.profile_step_start=4 run.plugins.profile_step_end=6 \\
        config.train.train_iters=8

Behaviour of NeMo-Run 0.11.1 that is changed here:

- without an executor it runs in this process and silently skips the plugins: refused;
- `--dryrun` skips the plugins: here they are applied, and the resulting job is printed;
- a failed job, or an error, still exits with 0: here 1 for a failure and 2 for a usage error;
- it cannot parse `config.…` values of classes with postponed annotations, and does not suggest names: `config.` settings are
  parsed as by `launch/pretrain.py`, with the same errors;
- it removes the text `run.` (`executor.`, `plugins.`) inside values, and cuts a value at its second `=`: refused.

Limits that remain: `run.plugins[0].x=…` works only for a list (`'run.plugins=[nsys,memory]'`) and `run.plugins.x=…` only for
a single plugin; factories take positional arguments only (`nsys(3,5)`).
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import fiddle as fdl
import nemo_run as run
from nemo_run.cli.cli_parser import CLIException, parse_cli_args
from torchx.specs.api import AppState

if __name__ == "__main__":
    # Started by its path, Python looks for modules in launch/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import bridge_profiling.plugins.cli_factories  # noqa: F401  # run.plugins=nsys and the others
import launch.tasks  # noqa: F401  # --factory gpt_tiny and the others
from bridge_profiling import plugins
from bridge_profiling.errors import ProfilingConfigError, print_error, require
from bridge_profiling.overrides import apply_overrides
from launch.pretrain import pretrain
from recipes.catalog import RECIPES, get_recipe
from recipes.executors import check_executor
from recipes.tasks import training_config

USAGE_ERROR, FAILURE = 2, 1

#: Text that NeMo-Run also removes from the value when it strips the prefix of such an argument.
_REMOVED = {"run.executor.": "executor.", "run.plugins.": "plugins.", "run.plugins[": "plugins"}


class ProfilingRunContext(run.cli.RunContext):
    """NeMo-Run's run context, with exit codes and with the traps turned into errors."""

    def cli_execute(self, fn: Any, args: list[str], entrypoint_type: Any = "task") -> None:
        """Run the command; leaves with exit code 2 for a usage error, 1 for a failure."""
        with _exit_codes():
            check_arguments(args)
            super().cli_execute(fn, args, entrypoint_type)

    def parse_args(self, args: list[str], lazy: bool = False) -> list[str]:
        """Parse the `run.…` arguments, and refuse a run that would skip its plugins."""
        try:
            rest = super().parse_args(args, lazy)
        except TypeError as error:  # a field without a default was not given
            raise ProfilingConfigError(str(error).splitlines()[0], instead="Type it as run.plugins.<field>=…") from error
        require(
            self.executor is not None and not self.direct,
            "no executor is given" if self.executor is None else "--direct runs without an executor",
            why="NeMo-Run would train in this process, and silently skip the plugins",
            instead="Type run.executor=local_torchrun (or local, or slurm)",
        )
        check_executor(self.executor)
        return rest

    def parse_executor(self, name: str, *args: str) -> Any:
        """The executor of that name."""
        with _named("executor", name, "local, local_torchrun, or slurm(account,partition)"):
            return super().parse_executor(name, *args)

    def parse_plugin(self, name: str, *args: str) -> Any:
        """The plugin, or the list of plugins, of that name; a plugin's class by its dotted path too."""
        if name.split(".")[-1] in plugins.__all__:  # NeMo-Run would call the class without its required steps
            return parse_cli_args(run.Config(getattr(plugins, name.split(".")[-1])), args)
        with _named("plugins", name, "nsys, pytorch_profiler, memory, fault_tolerance, preemption, or a list"):
            return super().parse_plugin(name, *args)

    def parse_fn(self, fn: Any, args: list[str], **default_kwargs: Any) -> run.Partial:
        """The task that the factory makes, with the `config.…` settings applied."""
        require(self.factory, "no recipe is given", instead=f"Type --factory {' or --factory '.join(RECIPES)}")
        if "." not in self.factory:  # a dotted path is a factory of the user's
            get_recipe(self.factory)
        for arg in args:
            require(
                arg.startswith("config."),
                f"{arg!r} is not a setting of the training",
                why="its argument is `config`",
                instead=f"Type config.{arg}",
            )
        task = super().parse_fn(fn, [], **default_kwargs)
        if args:
            config = fdl.build(task.config)
            apply_overrides(config, [arg.removeprefix("config.") for arg in args])
            task.config = training_config(config)
        return task

    def _execute_task(self, fn: Any, task_args: list[str]) -> None:
        if self.repl or self.to_yaml or self.to_toml or self.to_json:
            super()._execute_task(fn, task_args)
            return
        task = self.parse_fn(fn, task_args)
        if not self.dryrun and not self._should_continue(self.skip_confirmation):
            return
        with run.Experiment(title=self.name, executor=self.executor) as experiment:
            experiment.add(task, name=self.name, plugins=self.plugins, tail_logs=not self.detach)
            if self.dryrun:
                experiment.dryrun()
                return
            experiment.run(detach=self.detach)
        if not self.detach:
            _check_succeeded(experiment)


def check_arguments(args: list[str]) -> None:
    """Refuse arguments that NeMo-Run would silently change.

    Raises:
        ProfilingConfigError: an unknown option, or a `run.…` argument whose value NeMo-Run would cut or shorten.
    """
    for arg in args:
        require(not arg.startswith("-"), f"unknown option {arg}", why="NeMo-Run ignores it", instead="Type --help to list them")
        if not arg.startswith("run."):
            continue
        name, _, value = arg.partition("=")
        # NeMo-Run strips its prefixes with str.replace, wherever they are, and splits at every `=`.
        removed = ["run.", *(prefix for key, prefix in _REMOVED.items() if name.startswith(key))]
        lost = [prefix for prefix in removed if prefix in value]
        require(
            not lost,
            f"{arg!r} cannot be given on the NeMo-Run command line",
            why=f"NeMo-Run would remove {', '.join(map(repr, lost))} from its value",
            instead="Use another value, or set it in Python, in a factory of your own",
        )
        require(
            name not in ("run.executor", "run.plugins") or "=" not in value,
            f"{arg!r} cannot be given on the NeMo-Run command line",
            why="NeMo-Run cuts it at the second '='",
            instead=f"Type {name}={value.partition('(')[0]} and then {name}.<field>=<value>",
        )


@contextlib.contextmanager
def _named(argument: str, name: str, choices: str) -> Iterator[None]:
    try:
        yield
    except CLIException:
        raise
    except ValueError as error:
        raise ProfilingConfigError(f"run.{argument}={name}: {error}", instead=f"Type {choices}") from error


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    # NeMo-Run turns every exception into typer.Exit(1) and then drops that code; SystemExit passes through.
    try:
        yield
    except (ProfilingConfigError, click.UsageError) as error:
        _leave(str(error), USAGE_ERROR)
    except CLIException as error:
        cause: BaseException = error
        while isinstance(cause.__cause__, CLIException):  # the innermost holds the message without repetitions
            cause = cause.__cause__
        _leave(str(cause), USAGE_ERROR)
    except Exception as error:
        _leave(f"{type(error).__name__}: {error}", FAILURE)


def _leave(message: str, code: int) -> None:
    print_error(message)
    sys.exit(code)


def _check_succeeded(experiment: run.Experiment) -> None:
    for name, job in experiment.status(return_dict=True).items():
        if job["status"] != AppState.SUCCEEDED:
            _leave(f"the job {name} ended as {job['status'].name}; its logs are in {job['local_dir']}", FAILURE)


def main() -> None:
    """Run the command line."""
    with _exit_codes():
        run.cli.main(pretrain, run_ctx_cls=ProfilingRunContext)


if __name__ == "__main__":
    main()

"""Entry point of a rank: applies a YAML file and overrides to a recipe, and trains.

    python launch/pretrain.py --recipe gpt_tiny --config run.yaml train.train_iters=30 profiling.profile_ranks=[0,1]
    torchrun --nproc-per-node 2 launch/pretrain.py --recipe gpt_tiny model.tensor_model_parallel_size=2

A `run.Partial` calls `pretrain` directly. Exit codes: 2 for a request that cannot be carried out (one line says what, why,
and what to type instead), 1 for a training that failed. Never submits anything.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__":
    # Started by its path, as torchrun and NeMo-Run do, Python looks for modules in launch/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bridge_profiling.capture.signals import unwind_on
from bridge_profiling.common.errors import ProfilingConfigError, print_error
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.nsys.launch import report_exit_code
from bridge_profiling.settings.overrides import apply_overrides, apply_yaml, unquote

if TYPE_CHECKING:
    from recipes.config import ConfigContainer


def pretrain(config: ConfigContainer) -> None:
    """Train as the config says, in this rank. However the training ends, the captures of a profiler are written.

    Args:
        config: a configuration with overrides applied.

    Raises:
        ProfilingConfigError: the configuration cannot be carried out.
        SystemExit: SIGTERM arrived; the code is 143.
    """
    # Imported late: a wrong option is answered at once, and this module costs a submit host no torch.
    from recipes.megatron.train import pretrain as train

    with _messages_shown(), unwind_on(signal.SIGTERM, replace=True), report_exit_code():
        train(config, may_restart=_starts_the_process())


#: NsysPlugin reads this mark: nsys does not run around all processes of a task that starts this function.
pretrain.starts_nsys_itself = True  # type: ignore[attr-defined]


def _starts_the_process() -> bool:
    """Whether this process runs nothing but `pretrain`: only then may it be started again under nsys."""
    main_module = sys.modules["__main__"]
    started = getattr(main_module, "__spec__", None)
    path = getattr(main_module, "__file__", None)
    ours = path is not None and Path(path).resolve() == Path(__file__).resolve()
    return ours or (started is not None and started.name == "nemo_run.core.runners.fdl_runner")


@contextmanager
def _messages_shown() -> Iterator[None]:
    """Print the hook's messages (a capture starts, ends, was written) among the progress lines, its warnings on stderr."""
    logger = logging.getLogger("bridge_profiling")
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    progress, warnings = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    progress.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings.setLevel(logging.WARNING)
    logger.handlers, logger.propagate = [progress, warnings], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


class _Parser(argparse.ArgumentParser):
    """Reports usage errors as one line that says what to type instead, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise ProfilingConfigError(message, instead="Type --help for the options; settings are typed section.field=value")


def build_config(recipe: str, files: Sequence[str] = (), overrides: Sequence[str] = ()) -> ConfigContainer:
    """The recipe's configuration with YAML files and overrides applied, in this order.

    Raises:
        ProfilingConfigError: no such recipe, or a setting that does not fit it.
    """
    from recipes.catalog import get_recipe

    config = get_recipe(recipe)()
    for file in files:
        apply_yaml(config, file)
    apply_overrides(config, overrides)
    return config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a rank from its command line.

    Args:
        arguments: without the program's name; None takes the process's own.

    Returns:
        2 for a request that cannot be carried out, else 0. Failures propagate, and Python exits with 1.
    """
    parser = _Parser(prog="launch/pretrain.py", description="Train a recipe in this rank.", allow_abbrev=False)
    parser.add_argument("--recipe", default="gpt_tiny", help="name of a recipe (default: %(default)s)")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file over the recipe's values")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings over both; the later wins")
    try:
        options = parser.parse_intermixed_args([unquote(one) for one in (sys.argv[1:] if arguments is None else arguments)])
        pretrain(build_config(options.recipe, options.config, options.overrides))
    except ProfilingConfigError as error:
        # All ranks fail alike, so only one of each machine prints the error.
        if not LaunchEnv.read().local_rank:
            print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Megatron Bridge's own training loop, taken from its published wheel, around a small real model on a CPU.

Bridge cannot be imported without Transformer Engine, so the functions under test are compiled from the wheel's source one by
one: `train` with what decides its course (its callbacks, its built-in profiling, its exits and skips, its signal handler).
What these call beside that (checkpoint files, timers, CUDA graphs, …) is a MagicMock: it has no part in what is tested.
Run as a script, it trains in a process of its own, for what only the end of a process shows.
"""

from __future__ import annotations

import ast
import builtins
import json
import logging
import math
import os
import signal
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from bridge_profiling.integrations.megatron_bridge import ProfilingCallback

_TRAINING = "megatron/bridge/training/"


class Wheel:
    """Source files of a megatron-bridge wheel, and objects made from them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive = zipfile.ZipFile(path)

    def source(self, name: str) -> str:
        return self._archive.read(name).decode()

    def names(self, folder: str) -> list[str]:
        return [name for name in self._archive.namelist() if name.startswith(folder) and name.endswith(".py")]

    def tree(self, name: str) -> ast.Module:
        return ast.parse(self.source(name))

    def module(self, name: str) -> types.ModuleType:
        """A file that stands alone, as a module."""
        module = types.ModuleType(Path(name).stem)
        sys.modules[f"{__name__}.{module.__name__}"] = module
        module.__name__ = f"{__name__}.{module.__name__}"
        exec(compile(self.source(name), name, "exec"), module.__dict__)
        return module

    def definitions(self, name: str, wanted: Iterable[str], **known: Any) -> SimpleNamespace:
        """Some functions and classes of a file; names they use that are not `known` are MagicMocks."""
        nodes = [node for node in self.tree(name).body if getattr(node, "name", None) in set(wanted)]
        missing = set(wanted) - {node.name for node in nodes}
        assert not missing, f"{name} has no {missing}"
        used = {node.id for top in nodes for node in ast.walk(top) if isinstance(node, ast.Name)}
        stand_ins = {one: MagicMock(name=one) for one in used - set(wanted) - known.keys() - set(dir(builtins))}
        future = ast.parse("from __future__ import annotations").body
        namespace = {**stand_ins, **known, "__name__": __name__}
        exec(compile(ast.Module([*future, *nodes], []), name, "exec"), namespace)
        return SimpleNamespace(**{one: namespace[one] for one in wanted})

    def fields(self, name: str, class_name: str) -> set[str]:
        """The annotated fields of a dataclass, those it inherits in the same file included."""
        classes = {node.name: node for node in self.tree(name).body if isinstance(node, ast.ClassDef)}
        node = classes[class_name]
        own = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        return own.union(*(self.fields(name, base) for base in bases))


class BridgeTraining:
    """A training under the wheel's `train`, and what its config holds.

    Args:
        wheel: where the loop comes from.
        first: iterations that are complete already, as after a resume.
        train_iters: iterations of the whole training.
        on_step: called in each step with its iteration; what it returns is `should_exit` of Bridge's rerun machine.
        profiling: fields of Bridge's own ProfilingConfig; None leaves the section out.
        train: fields of Bridge's `train` section.
    """

    def __init__(
        self,
        wheel: Wheel,
        *,
        first: int = 0,
        train_iters: int = 8,
        on_step: Callable[[int], object] = lambda iteration: None,
        profiling: dict[str, Any] | None,
        **train: Any,
    ) -> None:
        self.wheel, self.on_step = wheel, on_step
        self.steps: list[int] = []
        self.losses: list[str] = []
        self.config = _config(wheel, profiling, {"train_iters": train_iters, **train})
        sig_utils = wheel.definitions(
            _TRAINING + "utils/sig_utils.py",
            ["DistributedSignalHandler", "all_gather_item", "get_device"],
            torch=torch,
            signal=signal,
            print_rank_0=print,
            get_world_size_safe=torch.distributed.get_world_size,
        )
        self.state = MagicMock(name="state", cfg=self.config, energy_monitor=None, nvrx_straggler_manager=None)
        self.state.signal_handler = sig_utils.DistributedSignalHandler(self.config.train.exit_signal)
        self.state.train_state = SimpleNamespace(
            step=first, consumed_train_samples=first, skipped_train_samples=0, floating_point_operations_so_far=0, do_valid=True
        )

    def train(self, callbacks: Any) -> None:
        """What `pretrain(config, …, callbacks=callbacks)` does once everything is set up."""
        module = self.wheel.module(_TRAINING + "callbacks.py")
        manager = module.normalize_callbacks(callbacks)
        torch.manual_seed(0)
        self._model = torch.nn.Linear(8, 8)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        loop = self._loop(module)
        loop.train(
            MagicMock(), [self._model], MagicMock(param_groups=[]), MagicMock(), None, None,
            self.state, {}, MagicMock(**{"dp.size.return_value": 1, "pp.size.return_value": 1}), callback_manager=manager,
        )  # fmt: skip

    def _loop(self, callbacks: types.ModuleType) -> SimpleNamespace:
        known = {
            "torch": torch, "sys": sys, "math": math, "time": time,
            "CallbackContext": callbacks.CallbackContext, "should_fire": callbacks.should_fire,
            "get_num_microbatches": lambda: 1, "get_current_global_batch_size": lambda: 1,
            "get_current_running_global_batch_size": lambda: 1, "should_disable_forward_pre_hook": lambda *_: False,
            "check_nvrx_straggler_detection": lambda manager: False, "_dummy_train_step": lambda *_: None,
        }  # fmt: skip
        profiling = self.wheel.definitions(
            _TRAINING + "profiling.py",
            ["should_profile_rank", "handle_profiling_step", "handle_profiling_stop", "initialize_pytorch_profiler",
             "start_nsys_profiler", "stop_nsys_profiler"],
            torch=torch,
        )  # fmt: skip
        evaluation = self.wheel.definitions(
            _TRAINING + "eval.py", ["evaluate_and_print_results"], **known, evaluate=self._evaluate
        )
        return self.wheel.definitions(
            _TRAINING + "train.py",
            ["train", "checkpoint_and_decide_exit", "_should_skip_and_handle_iteration"],
            **known,
            **vars(profiling),
            train_step=self._step,
            evaluate_and_print_results=evaluation.evaluate_and_print_results,
            get_model_config=lambda model: self.config.model,
        )

    def _step(self, *unused: Any) -> tuple:
        iteration = self.state.train_state.step
        self.steps.append(iteration)
        loss = self._model(torch.full((4, 8), float(iteration % 7))).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        should_exit = self.on_step(iteration)
        self._optimizer.step()
        self.losses.append(loss.item().hex())
        return {}, 0, False, bool(should_exit), 0, None, None, None

    def _evaluate(self, *unused: Any, **more: Any) -> tuple:
        with torch.no_grad():
            self._model(torch.ones(4, 8)).tanh()
        return {}, None, False


def _config(wheel: Wheel, profiling: dict[str, Any] | None, train: dict[str, Any]) -> MagicMock:
    """Bridge's ConfigContainer as far as the loop and the callback read it, with the release's own `profiling` section."""
    own = wheel.definitions(_TRAINING + "config.py", ["ProfilingConfig"], dataclass=dataclass, field=field)
    config = MagicMock(name="config")
    config.profiling = None if profiling is None else own.ProfilingConfig(**profiling)
    config.model = SimpleNamespace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        cuda_graph_impl="none",
    )
    config.dist = SimpleNamespace(use_tp_pp_dp_mapping=False, distributed_timeout_seconds_after_init=None)
    defaults = {
        "micro_batch_size": 1,
        "manual_gc": False,
        "decrease_batch_size_if_needed": False,
        "iterations_to_skip": [],
        "eval_interval": None,
        "eval_iters": 1,
        "exit_interval": None,
        "exit_duration_in_mins": None,
        "exit_signal": signal.SIGTERM,
        "exit_signal_handler": False,
        "train_sync_interval": None,
        "check_weight_hash_across_dp_replicas_interval": None,
        "manual_gc_interval": 0,
    }
    config.train = SimpleNamespace(**defaults | train)
    config.logger = SimpleNamespace(
        tensorboard_dir="tensorboard", log_throughput_to_tensorboard=False, log_params_norm=False, log_interval=1
    )
    config.checkpoint.save = None
    return config


def connect(store: Path) -> None:
    """Connect the one rank of this process, or the several of a launcher."""
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    else:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def main(wheel: str, root: str, asked: str) -> None:
    """Train as `asked` (JSON) says, with the callback in a `with` or without, and end as the training does."""
    logging.basicConfig(level=logging.INFO)
    wants = json.loads(asked)
    connect(Path(root) / "store")
    end = wants.pop("end", {})

    def on_step(iteration: int) -> None:
        if iteration == end.get("signal"):
            os.kill(os.getpid(), signal.SIGTERM)
        if iteration == end.get("raise"):
            raise RuntimeError("a step went wrong")

    bare = wants.pop("bare", False)
    training = BridgeTraining(Wheel(Path(wheel)), on_step=on_step, **wants)
    profiling = ProfilingCallback(training.config, output_dir=Path(root) / "profiles")
    with nullcontext() if bare else profiling:
        training.train([profiling])


if __name__ == "__main__":
    main(*sys.argv[1:])

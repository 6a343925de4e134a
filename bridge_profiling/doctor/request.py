"""A run as far as it is known before it is submitted: its profiling settings, and the other settings that checks read.

Reads YAML files and overrides of any ConfigContainer, ours or Megatron Bridge's, and ignores all other settings in them.
Imports no recipe, no nemo_run and no torch.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_profiling.config import FaultToleranceConfig, ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError, require
from bridge_profiling.layout import ParallelLayout, normalize_ranks, select_ranks
from bridge_profiling.overrides import load_yaml, parse_override
from bridge_profiling.values import Given, convert

#: The settings outside `profiling` and `ft` that checks read, by type. Ours and Megatron Bridge's containers have them all.
LOOKUPS: dict[str, Any] = {
    "train.train_iters": int | None,
    "train.start_iteration": int | None,
    "train.micro_batch_size": int | None,
    "train.global_batch_size": int | None,
    "model.num_layers": int | None,
    "model.tensor_model_parallel_size": int,
    "model.pipeline_model_parallel_size": int,
    "model.context_parallel_size": int,
    "model.expert_model_parallel_size": int,
    "model.position_embedding_type": str | None,
    "model.gated_linear_unit": bool,
    "model.qk_layernorm": bool,
    "model.num_moe_experts": int | None,
    "model.recompute_granularity": str | None,
    "model.transformer_impl": str | None,
    "model.torch_compile": bool,
    "model.cuda_graph_impl": str | None,
}

#: Sections of which every field is read, and an unknown one refused.
_WHOLE = {"profiling": ProfilingConfig, "ft": FaultToleranceConfig}

_TYPES = LOOKUPS | {
    f"{section}.{name}": hint for section, owner in _WHOLE.items() for name, hint in typing.get_type_hints(owner).items()
}


@dataclass(kw_only=True)
class Request:
    """A run that somebody is about to start.

    Attributes:
        name: what to call it; empty when only this machine is checked.
        profiling: the run's `profiling` section.
        ft: the run's `ft` section.
        settings: the settings among LOOKUPS that are known and not null.
        world_size: number of ranks, None where it is not known.
        nodes: number of machines, None where it is not known.
        launcher: `torchrun`, `ft`, `none`, or None where it is not known.
        nsys_prefix: the launcher runs the whole job under nsys.
        nsys_options: options of `nsys profile` that the launcher passes.
        nsys_prefix_gpu_metrics: the launcher asks for GPU metrics.
        environment: variables the executor sets for the job.
        output_dir: directory of captures, overriding the settings.
        elsewhere: why the job does not run on this machine; empty where it does.
        srun: command that reaches the job's nodes, as words.
        probe: check from all nodes whether they see the output directory.
    """

    name: str = ""
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    settings: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    nodes: int | None = None
    launcher: str | None = None
    nsys_prefix: bool = False
    nsys_options: tuple[str, ...] = ()
    nsys_prefix_gpu_metrics: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    output_dir: Path | None = None
    elsewhere: str = ""
    srun: tuple[str, ...] = ("srun",)
    probe: bool = False

    def integer(self, key: str) -> int | None:
        """An integer among LOOKUPS; None where it is not known."""
        return self.settings.get(key)

    def parallel_size(self, dimension: str) -> int:
        """`model.<dimension>_parallel_size`, 1 where it is not known."""
        return self.settings.get(f"model.{dimension}_parallel_size", 1)

    @property
    def wants_nsys(self) -> bool:
        """Whether the settings or the launcher ask for nsys."""
        return self.profiling.use_nsys_profiler or self.nsys_prefix

    @property
    def wants_gpu_metrics(self) -> bool:
        """Whether the settings, the launcher or its nsys options ask for GPU metrics."""
        options = any(option.startswith("--gpu-metrics-device") for option in self.nsys_options)
        return self.profiling.nsys_gpu_metrics or self.nsys_prefix_gpu_metrics or options

    def temporary_directory(self, environ: Mapping[str, str]) -> Path:
        """The directory that nsys collects in, for a job that inherits this environment."""
        return Path(self.environment.get("TMPDIR") or environ.get("TMPDIR") or "/tmp")

    def profiled_ranks(self) -> list[int] | None:
        """The ranks to profile; None where they depend on a world size that is not known."""
        ranks = normalize_ranks(self.profiling.profile_ranks)
        if self.world_size is None:
            return ranks if isinstance(ranks, list) else None
        layout = ParallelLayout(
            world_size=self.world_size,
            tp=self.parallel_size("tensor_model"),
            pp=self.parallel_size("pipeline_model"),
            cp=self.parallel_size("context"),
            ep=self.parallel_size("expert_model"),
        )
        return select_ranks(ranks, layout)


def apply_known(request: Request, lookup: Callable[[str], Any]) -> None:
    """Read every known setting into a request; `lookup` returns the value of a key, None if it is not set."""
    for key in _TYPES:
        if (value := lookup(key)) is not None:
            _apply(request, key, Given(value))


def apply_file(request: Request, path: str | Path) -> None:
    """Read the known settings of a YAML file into a request."""
    try:
        for key, value in _flat(load_yaml(path)):
            # Megatron Bridge writes sections that are off as null.
            if "." in key:
                _apply(request, key, Given(value))
    except ProfilingConfigError as error:
        raise ProfilingConfigError(f"{path}: {error.what}", why=error.why, instead=error.instead) from None


def apply_arguments(request: Request, arguments: Iterable[str], *, strict: bool = True) -> None:
    """Read the known settings of overrides into a request; `strict` refuses everything else instead of ignoring it."""
    for argument in arguments:
        override = parse_override(argument)
        require(
            override is not None or not strict,
            f"{argument!r} is not a setting",
            instead="Type section.field=value, for example train.train_iters=10",
        )
        if override is not None and (strict or override.key in _TYPES):
            _apply(request, override.key, Given(override.value, override.text))


def _apply(request: Request, key: str, given: Given) -> None:
    if key not in _TYPES:
        _refuse_misspelled(key)
        return
    value = convert(given, _TYPES[key], key)
    section, _, name = key.partition(".")
    if section in _WHOLE:
        setattr(getattr(request, section), name, value)
    elif value is None:
        request.settings.pop(key, None)
    else:
        request.settings[key] = value


def _refuse_misspelled(key: str) -> None:
    """Raise for what is most likely a misspelled setting: `profiling.profile_step_ends`, `profilng.…`, `train.train_iter`."""
    section = next(iter(difflib.get_close_matches(key.partition(".")[0], _WHOLE, n=1, cutoff=0.8)), "")
    # `train` and `model` have many fields that are not read here; only a name that is nearly one of these is refused.
    nearest = difflib.get_close_matches(key, _TYPES, n=1, cutoff=0.6 if section else 0.9)
    fields = ", ".join(name.partition(".")[2] for name in _TYPES if name.startswith(f"{section}."))
    require(
        not section and not nearest,
        f"{key} does not exist",
        instead=f"Type {nearest[0]}" if nearest else f"Fields of {section}: {fields}",
    )


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

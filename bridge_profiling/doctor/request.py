"""What a user is about to run, as far as it can be known before the queue: the settings that profiling depends on.

Reads YAML files and overrides of any ConfigContainer, ours or Megatron Bridge's; settings that say nothing about
profiling are passed over. Imports no recipe, no nemo_run and no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_profiling.config import FaultToleranceConfig, ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.layout import ParallelLayout, select_ranks
from bridge_profiling.overrides import apply_overrides, load_yaml, parse_override
from bridge_profiling.values import Given, convert

#: A launcher's words on the command line, and what NeMo-Run calls them.
LAUNCHERS = ("torchrun", "ft", "none")


@dataclass(kw_only=True)
class Train:
    """What is read of the `train` section; None is the recipe's value, which is not known here."""

    train_iters: int | None = None
    start_iteration: int = 0
    micro_batch_size: int | None = None
    global_batch_size: int | None = None


@dataclass(kw_only=True)
class Model:
    """What is read of the `model` section."""

    num_layers: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    position_embedding_type: str | None = None
    gated_linear_unit: bool = False
    qk_layernorm: bool = False
    num_moe_experts: int | None = None
    recompute_granularity: str | None = None
    transformer_impl: str | None = None
    torch_compile: bool = False
    cuda_graph_impl: str | None = None


@dataclass(kw_only=True)
class Settings:
    """The sections and fields that checks look at."""

    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    train: Train = field(default_factory=Train)
    model: Model = field(default_factory=Model)


@dataclass(kw_only=True)
class Request:
    """A run that somebody is about to start.

    Attributes:
        name: what to call it; empty when only this machine is asked about.
        settings: of the run.
        world_size: number of ranks, None where that is not known.
        nodes: number of machines, None where that is not known.
        launcher: `torchrun`, `ft`, `none`, or None where that is not known.
        nsys_prefix: the launcher runs the whole job under nsys.
        nsys_options: the options of `nsys profile` it gives it then.
        nsys_prefix_gpu_metrics: it asks for GPU metrics, too.
        environment: variables the executor sets for the job.
        output_dir: where captures go, over what the settings say.
        elsewhere: why the job does not run on this machine; empty where it does.
        srun: how to get onto the job's nodes, as words of a command.
        probe: look from all nodes whether they see the output directory.
    """

    name: str = ""
    settings: Settings = field(default_factory=Settings)
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

    @property
    def profiling(self) -> ProfilingConfig:
        """The `profiling` section."""
        return self.settings.profiling

    @property
    def wants_nsys(self) -> bool:
        """Whether nsys is asked for, by the settings or by the launcher."""
        return self.profiling.use_nsys_profiler or self.nsys_prefix

    @property
    def wants_gpu_metrics(self) -> bool:
        """Whether GPU metrics are asked for, by any of the three ways."""
        asked = self.profiling.nsys_gpu_metrics or self.nsys_prefix_gpu_metrics
        return asked or any(option.startswith("--gpu-metrics-device") for option in self.nsys_options)

    @property
    def fault_tolerant(self) -> bool:
        """Whether the job runs under the fault-tolerance launcher."""
        return self.launcher == "ft" or self.settings.ft.enable_ft_package

    def layout(self) -> ParallelLayout | None:
        """The job's layout; None without a world size.

        Raises:
            ProfilingConfigError: the ranks cannot be laid out by these sizes.
        """
        if self.world_size is None:
            return None
        model = self.settings.model
        return ParallelLayout(
            world_size=self.world_size,
            tp=model.tensor_model_parallel_size,
            pp=model.pipeline_model_parallel_size,
            cp=model.context_parallel_size,
            ep=model.expert_model_parallel_size,
        )

    def profiled_ranks(self) -> int | None:
        """How many ranks are profiled; None where that is not known, or the request is wrong."""
        try:
            if isinstance(self.profiling.profile_ranks, list):
                return len(set(self.profiling.profile_ranks)) or None
            layout = self.layout()
            return None if layout is None else len(select_ranks(self.profiling.profile_ranks, layout))
        except ProfilingConfigError:
            return None


def apply_file(settings: Settings, path: str | Path) -> None:
    """Take what is known from a YAML file of settings.

    Raises:
        ProfilingConfigError: it cannot be read, or one of these settings is wrong in it.
    """
    try:
        apply_mapping(settings, load_yaml(path))
    except ProfilingConfigError as error:
        raise ProfilingConfigError(f"{path}: {error.what}", why=error.why, instead=error.instead) from None


def apply_mapping(settings: Settings, values: Mapping[str, Any], *, strict: bool = True) -> None:
    """Take what is known from nested sections.

    Args:
        settings: changed in place.
        values: sections with their fields.
        strict: refuse an unknown field of a section that is read whole; otherwise it is passed over.

    Raises:
        ProfilingConfigError: a value of the wrong type, an unknown field, or a section whose name is nearly known.
    """
    for key, value in _flat(values, ()):
        section, _, name = key.partition(".")
        hints = _hints(settings, section)
        if not name:
            continue  # A whole section that is null, as Megatron Bridge writes those that are off.
        if name in hints:
            setattr(getattr(settings, section), name, convert(Given(value), hints[name], key))
        elif strict:
            _check_passed_over(settings, key)


def apply_arguments(settings: Settings, arguments: Iterable[str]) -> None:
    """Take what is known from `section.field=value` overrides.

    Raises:
        ProfilingConfigError: as `apply_mapping`, or an argument that is no setting.
    """
    for argument in arguments:
        override = parse_override(argument)
        if override is None:
            raise ProfilingConfigError(
                f"{argument!r} is not a setting", instead="Type section.field=value, for example train.train_iters=10"
            )
        section, _, name = override.key.partition(".")
        if name in _hints(settings, section):
            apply_overrides(settings, [f"{override.key}={override.text}"])
        else:
            _check_passed_over(settings, override.key)


def apply_script_arguments(settings: Settings, arguments: Iterable[str]) -> None:
    """Take what is known from the command line of a script, whatever else stands in it.

    Raises:
        ProfilingConfigError: one of the known settings has a wrong value.
    """
    for argument in arguments:
        override = parse_override(argument)
        if override is not None:
            section, _, name = override.key.partition(".")
            if name in _hints(settings, section):
                apply_overrides(settings, [f"{override.key}={override.text}"])


def _hints(settings: Settings, section: str) -> dict[str, Any]:
    owner = getattr(settings, section, None) if section in _SECTIONS else None
    return typing.get_type_hints(type(owner)) if owner is not None else {}


def _check_passed_over(settings: Settings, key: str) -> None:
    """Refuse what is most likely a misspelt setting: `profiling.profile_step_ends`, `profilng.…`, `train.train_iter`."""
    section, _, name = key.partition(".")
    near = difflib.get_close_matches(section, _SECTIONS, n=1, cutoff=0.8)
    if not near:
        return
    read_whole = near[0] in ("profiling", "ft")
    fields = list(_hints(settings, near[0]))
    # A user's `train` and `model` have fields that mean nothing here; only one that is all but known is refused.
    nearest = difflib.get_close_matches(name, fields, n=1, cutoff=0.6 if read_whole else 0.9)
    if nearest or read_whole:
        raise ProfilingConfigError(
            f"{key} does not exist",
            why=f"there is no such field in {section}" if section == near[0] else f"there is no section {section!r}",
            instead=f"Type {near[0]}.{nearest[0]}" if nearest else f"Fields of {near[0]}: {', '.join(fields)}",
        )


def _flat(values: Mapping[Any, Any], where: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = (*where, str(key))
        if isinstance(value, Mapping):
            yield from _flat(value, path)
        else:
            yield ".".join(path), value


_SECTIONS = tuple(field.name for field in dataclasses.fields(Settings))

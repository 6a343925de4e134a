"""The everyday captures: which trainings, and what is wrong with them. Needs no torch.

Half of the cases are for development; the other half is set aside and looked at when the findings are done. A fixed seed drew
them before there was a capture.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tools.injected_captures.everyday.fifth_table import FIFTH_ROUND
from tools.injected_captures.everyday.fourth_table import FOURTH_ROUND
from tools.injected_captures.everyday.second_table import SECOND_ROUND
from tools.injected_captures.everyday.setting import (
    ATTENTION,
    COLLECTIVES,
    LAYOUT,
    OPTIMIZER,
    PRECISION,
    SYNC,
    UNEVEN,
    Case,
    Group,
    Setting,
)
from tools.injected_captures.everyday.third_table import THIRD_ROUND

_SEED, _SECOND_SEED = 23, 24


_ONE_GPU = (
    Group(
        name="gpt_1",
        setting=Setting(model="transformer", strategy="single", layers=3, width=2048, batch=8, length=1024, log="iteration"),
        recorder="hook",
        record={"record_shapes": True},
        cases=(
            Case(name="gpt_1_fp32", findings=PRECISION, ranks=(0,), change={"precision": "fp32"}),
            Case(name="gpt_1_tf32", findings=PRECISION, ranks=(0,), change={"precision": "tf32"}),
            Case(name="gpt_1_attention", findings=ATTENTION, ranks=(0,), change={"attention": "manual"}),
            Case(name="gpt_1_recompute", findings=("recomputation",), ranks=(0,), change={"recompute": True}),
            Case(name="gpt_1_table", findings=("pageable_copy",), ranks=(0,), plant="HostTable", numbers={"mebibytes": 64}),
        ),
    ),
    Group(
        name="convolution_1",
        setting=Setting(
            model="convolution", strategy="single", layers=5, width=256, batch=64, length=128, clipping="foreach",
            log="iteration",
        ),
        recorder="torch.profiler",
        cases=(
            Case(name="convolution_1_fp32", findings=PRECISION, ranks=(0,), change={"precision": "fp32"}),
            Case(name="convolution_1_nchw", findings=LAYOUT, ranks=(0,), change={"channels_last": False}),
            Case(name="convolution_1_formats", findings=LAYOUT, ranks=(0,), change={"switch_formats": True}),
            Case(
                name="convolution_1_slow_data", findings=("data_loading",), ranks=(0,),
                change={"data_ms": 40, "data_ranks": (0,)},
            ),
            Case(name="convolution_1_masks", findings=SYNC, ranks=(0,), plant="HardExamples"),
            Case(
                name="convolution_1_tiny", findings=("small_kernels",), ranks=(0,), plant="TinyKernels",
                numbers={"pieces": 250},
            ),
        ),
    ),
    Group(
        name="deep_1",
        setting=Setting(
            model="transformer", strategy="single", layers=8, width=512, batch=48, length=512, clipping="foreach"
        ),
        recorder="hook",
        iterations=4,
        cases=(
            Case(
                name="deep_1_small_batch", findings=("host_launch_bound", "small_kernels"), ranks=(0,), change={"batch": 2},
                comparable=False,
            ),
            Case(name="deep_1_clipping", findings=SYNC, ranks=(0,), change={"clipping": "item"}),
            Case(name="deep_1_optimizer", findings=OPTIMIZER, ranks=(0,), change={"optimizer": "loop"}),
            Case(name="deep_1_average", findings=OPTIMIZER, ranks=(0,), plant="MovingAverage"),
            Case(
                name="deep_1_collect", findings=("garbage_collection",), ranks=(0,), plant="GarbageCollection",
                numbers={"every": 1, "objects": 300_000},
            ),
            Case(name="deep_1_cache", findings=("allocator_churn",), ranks=(0,), plant="EmptyCache"),
            Case(
                name="deep_1_leak", findings=("memory_growth",), ranks=(0,), plant="Leak", numbers={"mebibytes": 96},
                record={"profile_memory": True}, comparable=False,
            ),
        ),
    ),
    Group(
        name="compiled_1",
        setting=Setting(
            model="transformer", strategy="single", layers=3, width=1024, batch=32, length=512, compiled=True, log="iteration"
        ),
        recorder="torch.profiler",
        cases=(
            Case(
                name="compiled_1_recompile", findings=("recompilation",), ranks=(0,), plant="PartialBatches",
                numbers={"every": 9},
            ),
            Case(name="compiled_1_tf32", findings=PRECISION, ranks=(0,), change={"precision": "tf32"}),
            Case(
                name="compiled_1_checkpoint", findings=("checkpoint_stall",), ranks=(0,), plant="Checkpoint",
                numbers={"every": 9},
            ),
            Case(name="compiled_1_norms", findings=SYNC, ranks=(0,), plant="WeightNorms"),
        ),
    ),
    Group(
        name="experts_1",
        setting=Setting(model="experts", strategy="single", layers=2, width=1024, batch=32, length=512),
        recorder="torch.profiler",
        record={"record_shapes": True},
        cases=(
            Case(name="experts_1_nonzero", findings=SYNC, ranks=(0,), change={"routing": "nonzero"}),
            Case(name="experts_1_attention", findings=ATTENTION, ranks=(0,), change={"attention": "manual"}),
            Case(name="experts_1_optimizer", findings=OPTIMIZER, ranks=(0,), change={"optimizer": "loop"}),
            Case(name="experts_1_table", findings=("pageable_copy",), ranks=(0,), plant="HostTable", numbers={"mebibytes": 48}),
        ),
    ),
)  # fmt: skip

_TWO_GPUS = (
    Group(
        name="gpt_ddp",
        setting=Setting(model="transformer", strategy="ddp", layers=3, width=1536, batch=8, length=1024, log="iteration"),
        recorder="hook",
        cases=(
            Case(
                name="gpt_ddp_collect", findings=("garbage_collection",), ranks=(1,), plant="GarbageCollection",
                numbers={"every": 3, "objects": 600_000},
            ),
            Case(
                name="gpt_ddp_straggler", findings=("straggler_compute",), ranks=(1,), plant="ExtraCompute",
                numbers={"products": 4, "size": 8192},
            ),
            Case(
                name="gpt_ddp_alternating", findings=("straggler_compute",), ranks=(0, 1), plant="ExtraCompute",
                numbers={"products": 6, "size": 8192, "rotate": True},
            ),
            Case(name="gpt_ddp_busy", findings=("straggler_host",), ranks=(0,), plant="SlowHost", numbers={"ms": 9}),
            Case(
                name="gpt_ddp_slow_data", findings=("data_loading",), ranks=(1,), change={"data_ms": 30, "data_ranks": (1,)}
            ),
            Case(name="gpt_ddp_buckets", findings=COLLECTIVES, ranks=(0, 1), change={"bucket_mb": 0.05}),
            Case(
                name="gpt_ddp_checkpoint", findings=("checkpoint_stall",), ranks=(0,), plant="Checkpoint", numbers={"every": 9}
            ),
            Case(name="gpt_ddp_contended", findings=("contended_device",), ranks=(1,), plant="Contention"),
            Case(
                name="gpt_ddp_equal_lengths", findings=(), ranks=(), plant="Lengths", numbers={"shares": ((0.75,), (0.75,))}
            ),
            Case(
                name="gpt_ddp_lengths", findings=UNEVEN, ranks=(1,), plant="Lengths", numbers={"shares": ((0.5,), (1.0,))},
                over="gpt_ddp_equal_lengths",
            ),
            Case(
                name="gpt_ddp_mixed_lengths", findings=UNEVEN, ranks=(0, 1), plant="Lengths",
                numbers={"shares": ((0.5, 1.0), (1.0, 0.5))}, over="gpt_ddp_equal_lengths",
            ),
        ),
    ),
    Group(
        name="sharded",
        setting=Setting(
            model="transformer", strategy="fully_shard", layers=4, width=1536, batch=8, length=1024, clipping="foreach"
        ),
        recorder="hook",
        record={"record_shapes": True},
        iterations=4,
        cases=(
            Case(name="sharded_modules", findings=COLLECTIVES, ranks=(0, 1), change={"shard_each": "module"}),
            Case(name="sharded_attention", findings=ATTENTION, ranks=(0, 1), change={"attention": "manual"}),
            Case(name="sharded_recompute", findings=("recomputation",), ranks=(0, 1), change={"recompute": True}),
            Case(
                name="sharded_collect", findings=("garbage_collection",), ranks=(0,), plant="GarbageCollection",
                numbers={"every": 3, "objects": 500_000},
            ),
            Case(name="sharded_contended", findings=("contended_device",), ranks=(0,), plant="Contention"),
            Case(name="sharded_tf32", findings=PRECISION, ranks=(0, 1), change={"precision": "tf32"}),
        ),
    ),
    Group(
        name="experts_2",
        setting=Setting(model="experts", strategy="ddp", layers=2, width=1024, batch=24, length=512, log="iteration"),
        recorder="torch.profiler",
        cases=(
            Case(name="experts_2_sizes", findings=SYNC, ranks=(0, 1), change={"routing": "sizes"}),
            Case(
                name="experts_2_uneven", findings=UNEVEN, ranks=(1,), change={"routing": "sizes", "second_half": 0.85},
                over="experts_2_sizes",
            ),
            Case(name="experts_2_contended", findings=("contended_device",), ranks=(1,), plant="Contention"),
            Case(name="experts_2_busy", findings=("straggler_host",), ranks=(0,), plant="SlowHost", numbers={"ms": 8}),
        ),
    ),
    Group(
        name="convolution_2",
        setting=Setting(
            model="convolution", strategy="ddp", layers=4, width=192, batch=96, length=128, clipping="foreach"
        ),
        recorder="torch.profiler",
        cases=(
            Case(
                name="convolution_2_slow_data", findings=("data_loading",), ranks=(0, 1),
                change={"data_ms": 25, "data_ranks": (0, 1)},
            ),
            Case(name="convolution_2_nchw", findings=LAYOUT, ranks=(0, 1), change={"channels_last": False}),
            Case(name="convolution_2_tf32", findings=PRECISION, ranks=(0, 1), change={"precision": "tf32"}),
            Case(name="convolution_2_clipping", findings=SYNC, ranks=(0, 1), change={"clipping": "item"}),
            Case(
                name="convolution_2_straggler", findings=("straggler_compute",), ranks=(0,), plant="ExtraCompute",
                numbers={"products": 6, "size": 6144},
            ),
        ),
    ),
    Group(
        name="accumulating",
        setting=Setting(
            model="transformer", strategy="ddp", layers=2, width=1280, batch=8, length=512, micro_batches=4, log="iteration"
        ),
        recorder="torch.profiler",
        iterations=3,
        cases=(
            Case(
                name="accumulating_sync", findings=("accumulation_sync",), ranks=(0, 1), change={"sync_micro_batches": True}
            ),
            Case(name="accumulating_losses", findings=SYNC, ranks=(0, 1), change={"log": "micro_batch"}),
            Case(
                name="accumulating_sleep", findings=("straggler_host",), ranks=(1,), plant="SlowHost",
                numbers={"ms": 4, "sleep": True},
            ),
        ),
    ),
    Group(
        name="compiled_2",
        setting=Setting(model="transformer", strategy="ddp", layers=3, width=1024, batch=16, length=1024, compiled=True),
        recorder="hook",
        cases=(
            Case(
                name="compiled_2_straggler", findings=("straggler_compute",), ranks=(0,), plant="ExtraCompute",
                numbers={"products": 16, "size": 4096},
            ),
            Case(name="compiled_2_cache", findings=("allocator_churn",), ranks=(0, 1), plant="EmptyCache"),
            Case(
                name="compiled_2_recompile", findings=("recompilation",), ranks=(0, 1), plant="PartialBatches",
                numbers={"every": 9},
            ),
        ),
    ),
)  # fmt: skip

# In the groups above, hosts set the pace of `sharded` and `convolution_2`. In these, GPUs do.
_MORE = (
    Group(
        name="wide_sharded",
        setting=Setting(
            model="transformer", strategy="fully_shard", layers=2, width=3072, batch=4, length=2048, clipping="foreach"
        ),
        recorder="torch.profiler",
        cases=(
            Case(name="wide_sharded_tf32", findings=PRECISION, ranks=(0, 1), change={"precision": "tf32"}),
            Case(name="wide_sharded_attention", findings=ATTENTION, ranks=(0, 1), change={"attention": "manual"}),
            Case(name="wide_sharded_recompute", findings=("recomputation",), ranks=(0, 1), change={"recompute": True}),
            Case(name="wide_sharded_contended", findings=("contended_device",), ranks=(0,), plant="Contention"),
            Case(
                name="wide_sharded_straggler", findings=("straggler_compute",), ranks=(1,), plant="ExtraCompute",
                numbers={"products": 5, "size": 8192},
            ),
        ),
    ),
    Group(
        name="wide_convolution",
        setting=Setting(
            model="convolution", strategy="ddp", layers=4, width=256, batch=192, length=128, log="iteration"
        ),
        recorder="hook",
        cases=(
            Case(name="wide_convolution_nchw", findings=LAYOUT, ranks=(0, 1), change={"channels_last": False}),
            Case(name="wide_convolution_formats", findings=LAYOUT, ranks=(0, 1), change={"switch_formats": True}),
            Case(name="wide_convolution_tf32", findings=PRECISION, ranks=(0, 1), change={"precision": "tf32"}),
            Case(
                name="wide_convolution_straggler", findings=("straggler_compute",), ranks=(0,), plant="ExtraCompute",
                numbers={"products": 5, "size": 8192},
            ),
            Case(name="wide_convolution_contended", findings=("contended_device",), ranks=(1,), plant="Contention"),
        ),
    ),
    Group(
        name="deep_2",
        setting=Setting(model="transformer", strategy="ddp", layers=8, width=512, batch=40, length=512, clipping="foreach"),
        recorder="torch.profiler",
        iterations=4,
        cases=(
            Case(name="deep_2_buckets", findings=COLLECTIVES, ranks=(0, 1), change={"bucket_mb": 0.01}),
            Case(name="deep_2_optimizer", findings=OPTIMIZER, ranks=(0, 1), change={"optimizer": "loop"}),
            Case(name="deep_2_cache", findings=("allocator_churn",), ranks=(0, 1), plant="EmptyCache"),
            Case(
                name="deep_2_collect", findings=("garbage_collection",), ranks=(0,), plant="GarbageCollection",
                numbers={"every": 3, "objects": 400_000},
            ),
        ),
    ),
)  # fmt: skip

#: Groups that were captured together.
ROUNDS: dict[int, tuple[Group, ...]] = {
    1: (*_ONE_GPU, *_TWO_GPUS, *_MORE), 2: SECOND_ROUND, 3: THIRD_ROUND, 4: FOURTH_ROUND, 5: FIFTH_ROUND,
}  # fmt: skip

#: Rounds of which no case is for development, and no baseline.
SET_ASIDE_WHOLE = (3, 4, 5)

#: Every group by its name, in the order they run in; those of one GPU run side by side.
GROUPS: dict[str, Group] = {group.name: group for number in ROUNDS for group in ROUNDS[number]}


def cases() -> Iterator[tuple[Group, Case]]:
    """Every case with its group."""
    for group in GROUPS.values():
        for case in group.cases:
            yield group, case


def _for_development(groups: Iterable[Group], seed: int) -> list[str]:
    names = sorted(case.name for group in groups for case in group.cases if case.findings)
    return random.Random(seed).sample(names, len(names) // 2)


#: Names of the cases that findings are developed with; the other cases with causes are set aside. Baselines are for both.
FOR_DEVELOPMENT = frozenset(
    _for_development((*_ONE_GPU, *_TWO_GPUS), _SEED)
    + _for_development(_MORE, _SEED)
    + _for_development(SECOND_ROUND, _SECOND_SEED)
)


#: Sizes for a CPU; and those of models whose convolutions take long there.
_SMALL = {"width": 64, "batch": 4, "length": 32, "layers": 2}
_SMALLER = {"pair": {"width": 16}, "volume": {"width": 4, "batch": 1, "length": 16}}


def small(group: Group) -> Group:
    """The group in sizes for a CPU: it tries the plumbing, its numbers mean nothing."""
    tiny = {"products": 1, "size": 64, "objects": 1000, "ms": 1, "mebibytes": 1, "pieces": 4, "kept": 1000, "each": 100}
    cases = tuple(
        replace(
            case,
            numbers={name: tiny.get(name, value) for name, value in case.numbers.items()},
            change={name: tiny.get("ms") if name == "data_ms" else value for name, value in case.change.items()},
        )
        for case in group.cases
    )
    sizes = _SMALL | _SMALLER.get(group.setting.model, {})
    return replace(group, cases=cases, setting=replace(group.setting, **sizes))

"""The second round of everyday captures: trainings of other shapes, and other ways to lose time. Needs no torch.

It was written when the first round had been looked at, and its half that is set aside was drawn before there was a capture.
"""

from __future__ import annotations

from tools.injected_captures.everyday.setting import Case, Group, Setting

_SYNC = ("host_sync",)
_PRECISION = ("full_precision_matmul",)
_ATTENTION = ("unfused_attention",)
_OPTIMIZER = ("unfused_optimizer",)
_CHURN = ("allocator_churn",)
_LAYOUT = ("layout_conversion",)
_GARBAGE = ("garbage_collection",)
_COLLECTIVES = ("small_collectives", "exposed_communication", "low_overlap")
_UNEVEN = ("uneven_work", "straggler_compute")
_LAUNCHES = ("host_launch_bound", "small_kernels")

#: Shares of the longest sequence, batch by batch.
_MANY_LENGTHS = (0.45, 0.9, 0.6, 1.0, 0.55, 0.8, 0.7, 0.95, 0.5)

_ONE_GPU = (
    Group(
        name="encoder_1",
        setting=Setting(
            model="encoder", strategy="single", layers=6, width=768, batch=96, length=256, precision="fp16",
            clipping="foreach",
        ),
        recorder="torch.profiler",
        iterations=4,
        cases=(
            Case(name="encoder_1_softmax", findings=_ATTENTION, ranks=(0,), change={"attention": "manual"}),
            Case(
                name="encoder_1_finite", findings=_SYNC, ranks=(0,), plant="FiniteChecks",
                record={"with_stack": True},
            ),
            Case(name="encoder_1_float", findings=_PRECISION, ranks=(0,), change={"precision": "fp32"}),
            Case(name="encoder_1_recompute", findings=("recomputation",), ranks=(0,), change={"recompute": True}),
            Case(name="encoder_1_adam", findings=_OPTIMIZER, ranks=(0,), change={"optimizer": "written"}),
        ),
    ),
    Group(
        name="unet_1",
        setting=Setting(
            model="unet", strategy="single", layers=3, width=64, batch=48, length=192, workers=2, data_ms=20,
            data_ranks=(0,), log="iteration",
        ),
        recorder="hook",
        record={"record_shapes": True},
        iterations=4,
        cases=(
            Case(name="unet_1_pageable", findings=("pageable_copy",), ranks=(0,), change={"pinned": False}),
            Case(
                name="unet_1_no_workers", findings=("data_loading",), ranks=(0,), change={"workers": 0, "decode": True}
            ),
            Case(
                name="unet_1_slow_worker", findings=("data_loading",), ranks=(0,),
                change={"data_ms": 160, "slow_worker": True},
            ),
            Case(name="unet_1_permuted", findings=_LAYOUT, ranks=(0,), change={"permuted": True}),
            Case(name="unet_1_cache", findings=_CHURN, ranks=(0,), plant="MidCache"),
        ),
    ),
    Group(
        name="recommender_1",
        setting=Setting(model="recommender", strategy="single", layers=1, width=512, batch=1024, length=64, micro_batches=2),
        recorder="torch.profiler",
        cases=(
            Case(name="recommender_1_metrics", findings=_SYNC, ranks=(0,), plant="Metrics"),
            Case(name="recommender_1_optimizer", findings=_OPTIMIZER, ranks=(0,), change={"optimizer": "loop"}),
            Case(name="recommender_1_average", findings=_OPTIMIZER, ranks=(0,), plant="NamedAverage"),
            Case(
                name="recommender_1_cells", findings=_LAUNCHES, ranks=(0,), change={"cells": True}
            ),
            Case(
                name="recommender_1_quiet", findings=(), ranks=(), plant="Objects",
                numbers={"kept": 100_000, "each": 60_000, "collect": False},
            ),
            Case(
                name="recommender_1_objects", findings=_GARBAGE, ranks=(0,), plant="Objects",
                numbers={"kept": 100_000, "each": 60_000}, over="recommender_1_quiet", comparable=False,
            ),
        ),
    ),
    Group(
        name="llama_1",
        setting=Setting(
            model="gpt", strategy="single", layers=4, width=1280, batch=8, length=1024, micro_batches=2, clipping="foreach"
        ),
        recorder="hook",
        cases=(
            Case(
                name="llama_1_float_attention", findings=(*_PRECISION, *_ATTENTION), ranks=(0,),
                change={"attention": "float32"},
            ),
            Case(name="llama_1_print", findings=_SYNC, ranks=(0,), plant="Prints"),
            Case(
                name="llama_1_evaluation", findings=("slow_iterations",), ranks=(0,), plant="Evaluation", numbers={"every": 9}
            ),
            Case(
                name="llama_1_save", findings=("checkpoint_stall",), ranks=(0,), plant="SavedOptimizer", numbers={"every": 9}
            ),
            Case(
                name="llama_1_lengths", findings=(), ranks=(), plant="MixedTight",
                numbers={"shares": _MANY_LENGTHS, "slack": 1000.0},
            ),
            Case(
                name="llama_1_tight", findings=_CHURN, ranks=(0,), plant="MixedTight",
                numbers={"shares": _MANY_LENGTHS, "slack": 1.25}, over="llama_1_lengths",
            ),
        ),
    ),
    Group(
        name="compiled_vision",
        setting=Setting(
            model="vision", strategy="single", layers=4, width=1536, batch=40, length=224, compiled=True, workers=2,
            data_ms=15, data_ranks=(0,),
        ),
        recorder="torch.profiler",
        cases=(
            Case(
                name="compiled_vision_breaks", findings=("host_sync", "recompilation"), ranks=(0,),
                change={"read_inside": True},
            ),
            Case(
                name="compiled_vision_number", findings=("recompilation",), ranks=(0,), plant="ChangingNumber",
                numbers={"every": 9},
            ),
            Case(name="compiled_vision_pageable", findings=("pageable_copy",), ranks=(0,), change={"pinned": False}),
            Case(name="compiled_vision_average", findings=_OPTIMIZER, ranks=(0,), plant="NamedAverage"),
        ),
    ),
)  # fmt: skip

_TWO_GPUS = (
    Group(
        name="vision_ddp",
        setting=Setting(
            model="vision", strategy="ddp", layers=8, width=1024, batch=40, length=224, workers=1, clipping="foreach"
        ),
        recorder="hook",
        cases=(
            Case(
                name="vision_ddp_straggler", findings=("straggler_compute",), ranks=(0,), plant="ExtraCompute",
                numbers={"products": 2, "size": 8192},
            ),
            Case(
                name="vision_ddp_turns", findings=("straggler_host",), ranks=(0, 1), plant="TurnsAtHost", numbers={"ms": 30},
            ),
            Case(
                name="vision_ddp_slow_data", findings=("data_loading",), ranks=(1,),
                change={"workers": 0, "decode": True, "data_ms": 24, "data_ranks": (1,)},
            ),
            Case(name="vision_ddp_buckets", findings=_COLLECTIVES, ranks=(0, 1), change={"bucket_mb": 0.2}),
            Case(name="vision_ddp_contended", findings=("contended_device",), ranks=(0,), plant="Contention"),
            Case(name="vision_ddp_unused", findings=(), ranks=(), change={"find_unused": True}),
        ),
    ),
    Group(
        name="llama_sharded",
        setting=Setting(
            model="gpt", strategy="fully_shard", layers=6, width=1536, batch=8, length=1024, micro_batches=2, recompute=True,
            ballast=True, log="iteration",
        ),
        recorder="hook",
        record={"profile_memory": True},
        iterations=3,
        cases=(
            Case(
                name="llama_sharded_sync", findings=("accumulation_sync",), ranks=(0, 1), change={"sync_micro_batches": True}
            ),
            Case(name="llama_sharded_norms", findings=_SYNC, ranks=(0, 1), plant="NormCheck"),
            Case(name="llama_sharded_average", findings=_OPTIMIZER, ranks=(0, 1), plant="NamedAverage"),
            Case(
                name="llama_sharded_busy", findings=("straggler_host",), ranks=(0,), plant="SlowHost",
                numbers={"ms": 6, "sleep": True},
            ),
            Case(
                name="llama_sharded_lengths", findings=_UNEVEN, ranks=(0,), plant="Lengths",
                numbers={"shares": ((1.0,), (0.7,))}, comparable=False,
            ),
            Case(
                name="llama_sharded_save", findings=("checkpoint_stall",), ranks=(0,), plant="SavedOptimizer",
                numbers={"every": 9},
            ),
        ),
    ),
    Group(
        name="hashed_2",
        setting=Setting(model="hashed", strategy="ddp", layers=3, width=1536, batch=16, length=1024, log="iteration"),
        recorder="torch.profiler",
        record={"record_shapes": True},
        cases=(
            Case(name="hashed_2_uneven", findings=_UNEVEN, ranks=(1,), change={"second_half": 0.75}),
            Case(name="hashed_2_sizes", findings=_SYNC, ranks=(0, 1), change={"routing": "sizes"}),
            Case(
                name="hashed_2_straggler", findings=("straggler_compute",), ranks=(0,), plant="ExtraCompute",
                numbers={"products": 3, "size": 8192},
            ),
            Case(name="hashed_2_nonzero", findings=_SYNC, ranks=(0, 1), plant="Nonzero"),
            Case(name="hashed_2_busy", findings=("straggler_host",), ranks=(1,), plant="SlowHost", numbers={"ms": 10}),
        ),
    ),
    Group(
        name="encoder_ddp",
        setting=Setting(
            model="encoder", strategy="ddp", layers=12, width=512, batch=64, length=256, precision="fp16", micro_batches=2,
            clipping="foreach",
        ),
        recorder="torch.profiler",
        iterations=3,
        cases=(
            Case(name="encoder_ddp_sync", findings=("accumulation_sync",), ranks=(0, 1), change={"sync_micro_batches": True}),
            Case(name="encoder_ddp_finite", findings=_SYNC, ranks=(0, 1), plant="FiniteChecks"),
            Case(name="encoder_ddp_adam", findings=_OPTIMIZER, ranks=(0, 1), change={"optimizer": "written"}),
            Case(
                name="encoder_ddp_sleep", findings=("straggler_host",), ranks=(1,), plant="SlowHost",
                numbers={"ms": 2, "sleep": True},
            ),
            Case(name="encoder_ddp_cache", findings=_CHURN, ranks=(0, 1), plant="MidCache"),
        ),
    ),
    Group(
        name="unet_ddp",
        setting=Setting(
            model="unet", strategy="ddp", layers=3, width=48, batch=64, length=160, workers=2, clipping="foreach"
        ),
        recorder="hook",
        cases=(
            Case(
                name="unet_ddp_worker", findings=("data_loading",), ranks=(0,),
                change={"data_ms": 120, "data_ranks": (0,), "slow_worker": True},
            ),
            Case(name="unet_ddp_permuted", findings=_LAYOUT, ranks=(0, 1), change={"permuted": True}),
            Case(name="unet_ddp_float", findings=_PRECISION, ranks=(0, 1), change={"precision": "tf32"}),
            Case(
                name="unet_ddp_objects", findings=_GARBAGE, ranks=(1,), plant="Objects",
                numbers={"kept": 200_000, "each": 120_000}, comparable=False,
            ),
            Case(name="unet_ddp_contended", findings=("contended_device",), ranks=(1,), plant="Contention"),
        ),
    ),
)  # fmt: skip

SECOND_ROUND = (*_ONE_GPU, *_TWO_GPUS)

"""The sixth round of everyday captures: more ways to lose time that people meet, in other trainings. Needs no torch.

It was written without a look at how findings are made, and all of it is set aside.
"""

from __future__ import annotations

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

_DATA = ("data_loading",)

_ONE_GPU = (
    Group(
        name="field_1",
        setting=Setting(
            model="field", strategy="single", layers=7, width=512, batch=10_240, length=96, log="iteration"
        ),
        recorder="hook",
        both_recorders=False,
        iterations=4,
        cases=(
            Case(name="field_1_delayed", findings=(), ranks=(), plant="DelayedLoss", change={"log": "never"}),
            Case(name="field_1_pixels", findings=_DATA, ranks=(0,), plant="RandomPixels", numbers={"pixels": 1_500_000}),
            Case(name="field_1_misses", findings=SYNC, ranks=(0,), change={"read_inside": True}),
            Case(name="field_1_last", findings=PRECISION, ranks=(0,), change={"float_blocks": 1}),
            Case(name="field_1_views", findings=("slow_iterations",), ranks=(0,), plant="Evaluation", numbers={"every": 9}),
        ),
    ),
    Group(
        name="subtitle_1",
        setting=Setting(
            model="translate", strategy="single", layers=3, width=1024, batch=48, length=512, compiled=True,
            clipping="foreach",
        ),
        recorder="torch.profiler",
        both_recorders=False,
        iterations=4,
        cases=(
            Case(name="subtitle_1_pageable", findings=(), ranks=(), change={"pinned": False}),
            Case(
                name="subtitle_1_percentile", findings=SYNC, ranks=(0,), plant="LayerClip", change={"clipping": None}
            ),
            Case(
                name="subtitle_1_curriculum", findings=("recompilation",), ranks=(0,), plant="Curriculum",
                numbers={"every": 9},
            ),
        ),
    ),
    Group(
        name="tagger_1",
        setting=Setting(model="encoder", strategy="single", layers=12, width=1024, batch=64, length=256),
        recorder="torch.profiler",
        both_recorders=False,
        iterations=3,
        cases=(
            Case(name="tagger_1_backward", findings=OPTIMIZER, ranks=(0,), plant="StepInBackward"),
            Case(name="tagger_1_math", findings=(*ATTENTION, *PRECISION), ranks=(0,), plant="MathAttention"),
            Case(name="tagger_1_lists", findings=(*SYNC, "pageable_copy"), ranks=(0,), plant="Lists"),
        ),
    ),
    Group(
        name="restore_1",
        setting=Setting(
            model="unet", strategy="single", layers=3, width=80, batch=64, length=192, workers=2, data_ms=15,
            data_ranks=(0,), log="iteration",
        ),
        recorder="hook",
        both_recorders=False,
        iterations=4,
        cases=(
            Case(name="restore_1_nchw", findings=LAYOUT, ranks=(0,), change={"channels_last": False}),
            Case(name="restore_1_epochs", findings=_DATA, ranks=(0,), plant="Epochs", numbers={"batches": 4}),
            Case(
                name="restore_1_images", findings=("small_kernels", "host_launch_bound"), ranks=(0,), plant="ImageByImage"
            ),
        ),
    ),
)  # fmt: skip

_TWO_GPUS = (
    Group(
        name="preference_2",
        setting=Setting(
            model="preference", strategy="ddp", layers=4, width=1536, batch=8, length=512, micro_batches=4, log="iteration"
        ),
        recorder="hook",
        both_recorders=False,
        iterations=3,
        cases=(
            Case(name="preference_2_metrics", findings=(*SYNC, *COLLECTIVES), ranks=(0, 1), plant="RewardMetrics"),
            Case(
                name="preference_2_each", findings=("accumulation_sync",), ranks=(0, 1), change={"sync_micro_batches": True}
            ),
            Case(
                name="preference_2_even", findings=(), ranks=(), plant="Lengths", numbers={"shares": ((0.8,), (0.8,))}
            ),
            Case(
                name="preference_2_sorted", findings=UNEVEN, ranks=(1,), plant="Lengths",
                numbers={"shares": ((0.6,), (1.0,))}, over="preference_2_even",
            ),
            Case(
                name="preference_2_turns", findings=("garbage_collection",), ranks=(0, 1), plant="TurnsToCollect",
                numbers={"every": 1, "objects": 300_000},
            ),
            Case(name="preference_2_cache", findings=("allocator_churn",), ranks=(0, 1), plant="MicroCache"),
        ),
    ),
    Group(
        name="reader_2",
        setting=Setting(model="encoder", strategy="fully_shard", layers=6, width=2048, batch=64, length=256),
        recorder="torch.profiler",
        both_recorders=False,
        iterations=3,
        cases=(
            Case(name="reader_2_meter", findings=(), ranks=(), plant="Meter"),
            Case(name="reader_2_recompute", findings=("recomputation",), ranks=(0, 1), change={"recompute": True}),
            Case(
                name="reader_2_upload", findings=("straggler_host",), ranks=(1,), plant="Uploader",
                numbers={"busy_ms": 30, "idle_ms": 20},
            ),
            Case(
                name="reader_2_shards", findings=("checkpoint_stall",), ranks=(0, 1), plant="SavedShards",
                numbers={"every": 9},
            ),
        ),
    ),
    Group(
        name="photos_2",
        setting=Setting(model="convolution", strategy="ddp", layers=10, width=192, batch=160, length=128),
        recorder="hook",
        both_recorders=False,
        iterations=3,
        cases=(
            Case(name="photos_2_norms", findings=COLLECTIVES, ranks=(0, 1), plant="SynchronizedNorms"),
            Case(
                name="photos_2_late", findings=_DATA, ranks=(0,), change={"data_ms": 60, "data_ranks": (0,), "decode": True}
            ),
            Case(name="photos_2_preview", findings=("straggler_compute",), ranks=(1,), plant="Preview"),
            Case(name="photos_2_shared", findings=("contended_device",), ranks=(0,), plant="Contention"),
        ),
    ),
)  # fmt: skip

SIXTH_ROUND = (*_ONE_GPU, *_TWO_GPUS)

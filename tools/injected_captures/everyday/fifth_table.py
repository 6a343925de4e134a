"""The fifth round of everyday captures: other models, and causes in forms that the others lack. Needs no torch.

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

_SMALL = ("small_kernels", "host_launch_bound")

_ONE_GPU = (
    Group(
        name="scan_1",
        setting=Setting(
            model="scan", strategy="single", layers=8, width=1024, batch=32, length=1024, clipping="foreach", log="iteration"
        ),
        recorder="hook",
        both_recorders=False,
        iterations=3,
        cases=(
            Case(name="scan_1_delayed", findings=(), ranks=(), plant="DelayedLoss"),
            Case(name="scan_1_chunks", findings=_SMALL, ranks=(0,), change={"scan": "loop"}),
            Case(name="scan_1_memory", findings=PRECISION, ranks=(0,), change={"float_blocks": 1}),
            Case(name="scan_1_packing", findings=("data_loading",), ranks=(0,), plant="Packing", numbers={"ms": 35}),
            Case(
                name="scan_1_collect", findings=("garbage_collection",), ranks=(0,), plant="MidCollect",
                numbers={"objects": 100_000},
            ),
        ),
    ),
    Group(
        name="pair_1",
        setting=Setting(model="pair", strategy="single", layers=2, width=128, batch=64, length=64),
        recorder="torch.profiler",
        both_recorders=False,
        iterations=4,
        cases=(
            Case(name="pair_1_groups", findings=LAYOUT, ranks=(0,), change={"group_norm": True}),
            Case(name="pair_1_judge", findings=PRECISION, ranks=(0,), change={"float_blocks": 1}),
            Case(name="pair_1_histogram", findings=(*SYNC, "host_pause"), ranks=(0,), plant="Histogram"),
            Case(
                name="pair_1_pool", findings=("memory_growth",), ranks=(0,), plant="Pool",
                record={"profile_memory": True}, comparable=False,
            ),
        ),
    ),
    Group(
        name="policy_1",
        setting=Setting(
            model="policy", strategy="single", layers=3, width=2048, batch=16_384, length=16, log="iteration"
        ),
        recorder="torch.profiler",
        both_recorders=False,
        iterations=3,
        cases=(
            Case(name="policy_1_settled", findings=(), ranks=(), plant="LateWait"),
            Case(name="policy_1_resets", findings=SYNC, ranks=(0,), change={"resets": "rows"}),
            Case(name="policy_1_critic", findings=PRECISION, ranks=(0,), change={"float_blocks": 1}),
            Case(name="policy_1_episodes", findings=("host_pause",), ranks=(0,), plant="Episodes", numbers={"ms": 18}),
        ),
    ),
    Group(
        name="adapters_1",
        setting=Setting(
            model="adapters", strategy="single", layers=8, width=2048, batch=16, length=512, clipping="foreach"
        ),
        recorder="hook",
        both_recorders=False,
        iterations=4,
        cases=(
            Case(name="adapters_1_bias", findings=ATTENTION, ranks=(0,), change={"attention": "bias"}),
            Case(
                name="adapters_1_float", findings=PRECISION, ranks=(0,), change={"float_blocks": 1},
                record={"record_shapes": True},
            ),
            Case(name="adapters_1_saving", findings=("recomputation",), ranks=(0,), change={"recompute": True}),
            Case(name="adapters_1_watch", findings=SYNC, ranks=(0,), plant="Watch", record={"with_stack": True}),
        ),
    ),
    Group(
        name="mixer_1",
        setting=Setting(model="mixer", strategy="single", layers=8, width=768, batch=96, length=224, compiled=True),
        recorder="torch.profiler",
        both_recorders=False,
        iterations=6,
        cases=(
            Case(name="mixer_1_lamb", findings=OPTIMIZER, ranks=(0,), change={"optimizer": "lamb"}),
            Case(name="mixer_1_rate", findings=SYNC, ranks=(0,), plant="LossRate"),
            Case(name="mixer_1_augment", findings=("data_loading",), ranks=(0,), plant="Augment", numbers={"ms": 14}),
            Case(
                name="mixer_1_floats", findings=("pageable_copy",), ranks=(0,), plant="FloatImages", change={"pinned": False}
            ),
            Case(
                name="mixer_1_drop", findings=("recompilation",), ranks=(0,), plant="DropRate", numbers={"every": 9}
            ),
        ),
    ),
)  # fmt: skip

_TWO_GPUS = (
    Group(
        name="forecast_2",
        setting=Setting(model="forecast", strategy="ddp", layers=6, width=512, batch=256, length=96),
        recorder="torch.profiler",
        both_recorders=False,
        record={"record_shapes": True},
        iterations=5,
        cases=(
            Case(name="forecast_2_exact", findings=(), ranks=(), change={"exact_norms": True}),
            Case(name="forecast_2_steps", findings=_SMALL, ranks=(0, 1), change={"stepwise": True}),
            Case(name="forecast_2_known", findings=SYNC, ranks=(0, 1), change={"masked_loss": True}),
            Case(
                name="forecast_2_averages", findings=OPTIMIZER, ranks=(0, 1), plant="Averages",
                numbers={"decays": (0.9, 0.99, 0.999, 0.9999)},
            ),
            Case(name="forecast_2_metrics", findings=COLLECTIVES, ranks=(0, 1), plant="HorizonMetrics"),
            Case(name="forecast_2_hooks", findings=("straggler_host",), ranks=(1,), plant="BackwardLog", numbers={"ms": 2}),
        ),
    ),
    Group(
        name="volume_2",
        setting=Setting(model="volume", strategy="ddp", layers=2, width=32, batch=8, length=96, log="iteration"),
        recorder="hook",
        both_recorders=False,
        iterations=4,
        cases=(
            Case(name="volume_2_meeting", findings=(), ranks=(), plant="Barrier"),
            Case(
                name="volume_2_depths", findings=UNEVEN, ranks=(0, 1), plant="Depths",
                numbers={"shares": ((0.67, 1.34), (1.34, 0.67))},
            ),
            Case(name="volume_2_overlap", findings=(*SYNC, "host_pause"), ranks=(0, 1), plant="Overlap"),
            Case(
                name="volume_2_shards", findings=("data_loading",), ranks=(1,), plant="SlowShards", numbers={"ms": 70, "of": 2}
            ),
            Case(name="volume_2_shared", findings=("contended_device",), ranks=(1,), plant="Contention"),
        ),
    ),
    Group(
        name="distilled_2",
        setting=Setting(
            model="distilled", strategy="fully_shard", layers=6, width=1280, batch=12, length=1024, log="iteration"
        ),
        recorder="torch.profiler",
        both_recorders=False,
        iterations=4,
        cases=(
            Case(name="distilled_2_mean", findings=(), ranks=(), plant="MeanLoss"),
            Case(name="distilled_2_answers", findings=PRECISION, ranks=(0, 1), change={"float_blocks": 1}),
            Case(name="distilled_2_activations", findings=SYNC, ranks=(0, 1), plant="Activations"),
            Case(name="distilled_2_turns", findings=("straggler_compute",), ranks=(0, 1), plant="TeacherTurns"),
            Case(name="distilled_2_gradients", findings=COLLECTIVES, ranks=(0, 1), plant="FullGradients"),
            Case(
                name="distilled_2_shards", findings=("checkpoint_stall",), ranks=(0, 1), plant="LocalShards",
                numbers={"every": 9},
            ),
        ),
    ),
    Group(
        name="parallel_2",
        setting=Setting(
            model="parallel", strategy="ddp", layers=3, width=2560, batch=12, length=256, micro_batches=4, clipping="foreach",
            log="iteration",
        ),
        recorder="hook",
        both_recorders=False,
        iterations=3,
        cases=(
            Case(name="parallel_2_hand", findings=COLLECTIVES, ranks=(0, 1), change={"reduce_by_hand": True}),
            Case(name="parallel_2_each", findings=("accumulation_sync",), ranks=(0, 1), change={"sync_micro_batches": True}),
            Case(
                name="parallel_2_scores", findings=ATTENTION, ranks=(0, 1), change={"attention": "scores"},
                record={"record_shapes": True},
            ),
            Case(name="parallel_2_loss", findings=PRECISION, ranks=(0, 1), change={"float_blocks": 1}),
            Case(name="parallel_2_cache", findings=("allocator_churn",), ranks=(0, 1), plant="EarlyCache"),
            Case(name="parallel_2_summary", findings=("straggler_host",), ranks=(0,), plant="Summary", numbers={"ms": 15}),
        ),
    ),
)  # fmt: skip

FIFTH_ROUND = (*_ONE_GPU, *_TWO_GPUS)

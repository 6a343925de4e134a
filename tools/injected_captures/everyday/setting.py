"""What a training of the everyday captures is made of, and what a case is. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# The findings of which one must come first, by what is wrong.
SYNC = ("host_sync",)
PRECISION = ("full_precision_matmul",)
ATTENTION = ("unfused_attention",)
OPTIMIZER = ("unfused_optimizer",)
LAYOUT = ("layout_conversion",)
COLLECTIVES = ("small_collectives", "exposed_communication", "low_overlap")
UNEVEN = ("uneven_work", "straggler_compute")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training. The defaults are what a careful engineer writes; a case changes some of them.

    Args:
        model: `transformer`, `convolution`, or `experts` (a transformer whose feed-forward layers are experts); in the second
            round one of `more_models.py`, in the third one of `third_models.py`, in the fifth one of `fifth_models.py` or of
            `fifth_images.py`.
        strategy: `single` (one GPU), `ddp` or `fully_shard`.
        layers: blocks of the model.
        width: hidden size, or channels.
        batch: sequences or images of a rank in a micro-batch.
        length: tokens of a sequence, or pixels of an image's side.
        micro_batches: micro-batches of an iteration.
        precision: `bf16` by autocast (by a policy with fully_shard), `fp16` with a scaler, `tf32`, or `fp32`.
        attention: `fused`, `manual` for products, mask and softmax written out, or fused in `float32`. In the third
            round `capped` scores, or weights between two sequences `kept`; in the fifth a `bias` by distance, or `scores` by
            themselves. All four are written out.
        optimizer: AdamW `fused`, `foreach`, or `loop` for kernels per parameter; `written` by hand; `lion` and `lamb`,
            by hand as well.
        clipping: gradients' norm is clipped without waiting (`foreach`), with `.item()` per parameter, or not.
        channels_last: convolutions get NHWC tensors.
        switch_formats: a layer in NCHW follows each block of convolutions.
        recompute: blocks repeat their forward pass in the backward pass.
        compiled: blocks are compiled, each for the shapes it gets.
        bucket_mb: size of DDP's buckets.
        find_unused: DDP looks for parameters without a gradient.
        sync_micro_batches: DDP reduces gradients after every micro-batch, not only the last.
        shard_each: fully_shard gathers each `block`, or each `module` that has parameters of its own.
        pinned: batches lie in page-locked memory.
        log: the loss is read every `iteration`, every `micro_batch`, or `never`.
        routing: experts get equal shares by `capacity`, what they are sent by `sizes`, or tokens found by `nonzero`.
        second_half: share of tokens that the second half of the experts gets.
        data_ms: milliseconds that a batch takes to load, on the ranks in `data_ranks`.
        data_ranks: ranks with slow batches.
        decode: batches are computed for that time; else it passes.
        workers: processes that load data; none for the training's own.
        slow_worker: only the first of them needs that time.
        ballast: what else lies on the device leaves little memory free.
        permuted: layers turn images to NHWC and back by copying.
        cells: an LSTM is a loop in Python.
        read_inside: layers ask in an `if` whether a value on the device is infinite.
        float_blocks: the last layers of a model in bf16 that compute in float32. In the fifth round, if it is not 0, a part of
            each layer or of the model that its class names.
        asks_lengths: masks are filled example by example, with lengths that are on the device.
        one_by_one: graphs of a batch are read out one after the other.
        scan: linear attention sums over all chunks in `parallel`, or in a `loop` over many small ones.
        group_norm: convolutions are followed by group norms, which compute in NCHW, in place of batch norms.
        resets: worlds that have ended start anew by a mask (`where`), or by their row numbers (`rows`).
        stepwise: a forecast is made step by step.
        masked_loss: each step's loss picks known values by a boolean mask.
        exact_norms: statistics of inputs in float64, and the last norm in float32.
        reduce_by_hand: gradients are averaged over ranks one by one after the backward pass, in place of DDP.
    """

    model: Literal[
        "transformer", "convolution", "experts", "gpt", "encoder", "vision", "unet", "recommender", "hashed",
        "diffusion", "speech", "graph", "contrast", "translate", "routed",
        "scan", "pair", "policy", "adapters", "mixer", "forecast", "volume", "distilled", "parallel",
    ]  # fmt: skip
    strategy: Literal["single", "ddp", "fully_shard"]
    layers: int
    width: int
    batch: int
    length: int
    micro_batches: int = 1
    precision: Literal["bf16", "fp16", "tf32", "fp32"] = "bf16"
    attention: Literal["fused", "manual", "float32", "capped", "kept", "bias", "scores"] = "fused"
    optimizer: Literal["fused", "foreach", "loop", "written", "lion", "lamb"] = "fused"
    clipping: Literal["foreach", "item"] | None = None
    channels_last: bool = True
    switch_formats: bool = False
    recompute: bool = False
    compiled: bool = False
    bucket_mb: float = 25
    find_unused: bool = False
    sync_micro_batches: bool = False
    shard_each: Literal["block", "module"] = "block"
    pinned: bool = True
    log: Literal["iteration", "micro_batch", "never"] = "never"
    routing: Literal["capacity", "sizes", "nonzero"] = "capacity"
    second_half: float = 0.5
    data_ms: float = 0
    data_ranks: tuple[int, ...] = ()
    decode: bool = False
    workers: int = 0
    slow_worker: bool = False
    ballast: bool = False
    permuted: bool = False
    cells: bool = False
    read_inside: bool = False
    float_blocks: int = 0
    asks_lengths: bool = False
    one_by_one: bool = False
    scan: Literal["parallel", "loop"] = "parallel"
    group_norm: bool = False
    resets: Literal["where", "rows"] = "where"
    stepwise: bool = False
    masked_loss: bool = False
    exact_norms: bool = False
    reduce_by_hand: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return 1 if self.strategy == "single" else 2


Recorder = Literal["hook", "torch.profiler"]

#: Iterations before the window, by recorder. What a plant does in every ninth iteration happens in both windows.
BEFORE: dict[Recorder, int] = {"hook": 20, "torch.profiler": 10}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One capture with a cause.

    Args:
        name: also the folder of its captures.
        findings: ids of findings of which one must come first; none for a case that is a baseline itself.
        ranks: ranks that the finding must name.
        change: fields of the group's Setting that are the cause.
        plant: name of a class of `plants.py` that is the cause.
        numbers: its arguments.
        over: another case, which is the baseline where the cause needs a change of its own; None for the group's baseline.
        record: settings of the recorder besides the group's.
        comparable: the cause costs the difference of both iterations; not if one does less work, or the cause is about memory.
    """

    name: str
    findings: tuple[str, ...]
    ranks: tuple[int, ...]
    change: dict[str, Any] = field(default_factory=dict)
    plant: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    over: str | None = None
    record: dict[str, Any] = field(default_factory=dict)
    comparable: bool = True


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that share a process, a baseline and a recorder.

    Args:
        name: of the group; its baselines' names begin with it.
        setting: the training without a cause.
        recorder: what captures the cases and their baseline.
        record: settings of the recorder: `record_shapes`, `profile_memory`.
        iterations: that are captured.
        both_recorders: the baseline is captured by the other recorder as well.
        cases: with causes.
    """

    name: str
    setting: Setting
    recorder: Recorder
    record: dict[str, Any] = field(default_factory=dict)
    iterations: int = 5
    both_recorders: bool = True
    cases: tuple[Case, ...]

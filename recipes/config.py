"""The sections of a training's configuration: dataclasses, on top of megatron-core's own where it has them.

Building a config checks nothing, so overrides may arrive in any order. `recipes.finalize` checks the whole config and
derives the remaining fields. Every field has an effect: settings that the loop does not support are refused, not ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import FaultToleranceConfig, ProfilingConfig


@dataclass(kw_only=True)
class GPTModelConfig(TransformerConfig):
    """The `model` section: megatron-core's TransformerConfig, and the further arguments of its GPTModel.

    `bf16` and `fp16` select the precision; `params_dtype`, `pipeline_dtype` and the optimizer's are derived from them.
    """

    vocab_size: int = 0
    """Rows of the embedding, padding included."""

    seq_length: int = 0
    """Tokens in a sequence, and the length of learned position embeddings."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Kind of position embeddings."""

    rotary_base: int = 10000
    """Base period of rotary embeddings (`rope` only)."""

    rope_scaling: bool = False
    """Stretch rotary embeddings beyond the 8,192 tokens they were trained on, as Llama 3.1 and later do (`rope` only)."""

    rope_scaling_factor: float = 8.0
    """Stretch factor (`rope_scaling` only)."""

    share_embeddings_and_output_weights: bool = True
    """Use the input embedding as the output layer's weight."""

    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Transformer Engine's layers or megatron-core's own; null uses the first if the job can import them."""

    torch_compile: bool = False
    """Compile each transformer layer's forward and backward with torch.compile."""

    def __post_init__(self) -> None:
        """Do nothing yet: megatron-core checks and derives fields here, and `finalize` calls it after the overrides."""


@dataclass(kw_only=True)
class TrainConfig:
    """The `train` section: length, batches, evaluations, garbage collection and early exits."""

    train_iters: int = 20
    """Iterations of the whole training; the last one is `train_iters - 1`."""

    start_iteration: int = 0
    """First iteration to run, 0-based. Data and learning rate continue from there, but with new weights; a resume from
    `checkpoint.load` sets this field itself."""

    micro_batch_size: int = 2
    """Sequences a rank works on at a time."""

    global_batch_size: int = 8
    """Sequences an iteration consumes over all data-parallel ranks."""

    eval_interval: int | None = None
    """Iterations between two evaluations; null never evaluates."""

    eval_iters: int = 2
    """Global batches in one evaluation."""

    manual_gc: bool = False
    """Disable Python's automatic garbage collection, which would stall one rank and all ranks that wait for it."""

    manual_gc_interval: int = 0
    """With `manual_gc`, iterations between two collections on every rank; 0 collects at the start only."""

    exit_signal_handler: bool = False
    """On `exit_signal`, finish the iteration, save a checkpoint where `checkpoint.save` is set, and end with exit code 0.
    Ranks exchange 8 bytes in each iteration for it. If off, the first SIGTERM ends the training at once with exit code 143."""

    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """The signal of `exit_signal_handler`, on any rank; with --signal=USR1@120, Slurm sends SIGUSR1 120 s before the end."""

    exit_duration_in_mins: float | None = None
    """Minutes after which to stop in the same way, counted from the start of this process; null never does."""


@dataclass(kw_only=True)
class SchedulerConfig:
    """The `scheduler` section: the learning rate over the iterations, up to `optimizer.lr` and down to `optimizer.min_lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the decay after the warm-up."""

    lr_warmup_iters: int = 0
    """Iterations over which the learning rate rises from 0."""

    lr_decay_iters: int | None = None
    """Iteration at which the decay reaches `optimizer.min_lr`; null is `train.train_iters`."""


@dataclass(kw_only=True)
class DatasetConfig:
    """The `dataset` section: Megatron's indexed token files, or mock data generated in memory from a seed."""

    blend: list[str] | None = None
    """Paths of indexed data sets without `.bin` and `.idx`; null is megatron-core's mock data."""

    blend_weights: list[float] | None = None
    """Share of each data set in the samples; null weighs them by their sizes."""

    split: str = "90,10,0"
    """Shares of the documents for training, evaluation and test (indexed data only)."""

    path_to_cache: str | None = None
    """Directory of the sample indices, which global rank 0 builds and every node must see; null is next to the data."""

    random_seed: int = 1234
    """Seed of the order of samples."""

    reset_position_ids: bool = False
    """Restart positions after each end of document."""

    reset_attention_mask: bool = False
    """Restrict attention to a document; each batch then includes a mask."""

    eod_mask_loss: bool = False
    """Exclude end-of-document tokens from the loss."""

    num_workers: int = 0
    """Processes per rank that load its data; 0 loads in the training process."""

    prefetch_factor: int | None = None
    """Microbatches each of these processes loads ahead; null is torch's own, 2."""

    pin_memory: bool = True
    """Load into pinned memory, so that copies to a GPU overlap with its work; no effect without a GPU."""


@dataclass(kw_only=True)
class TokenizerConfig:
    """The `tokenizer` section: only its size, since the data are token ids already."""

    vocab_size: int | None = None
    """Distinct tokens, excluding the end-of-document token; null is `model.vocab_size - 1`."""


@dataclass(kw_only=True)
class LoggerConfig:
    """The `logger` section: progress lines and the file of losses."""

    log_interval: int = 1
    """Iterations between two lines."""

    loss_file: str | None = None
    """File for one JSON line per iteration, with the loss as a hexadecimal float, so that runs compare bit for bit."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """The `checkpoint` section: directories of the training's state, from which a restarted job resumes."""

    save: str | None = None
    """Directory for checkpoints, which every rank must see. Saves at each exit without failure, and at `save_interval`."""

    save_interval: int | None = None
    """Iterations between two checkpoints; null saves at exits only."""

    load: str | None = None
    """Directory whose newest checkpoint to resume from; while it holds none, training starts from scratch."""


@dataclass(kw_only=True)
class RNGConfig:
    """The `rng` section."""

    seed: int = 1234
    """Seed of the weights and of dropout."""


@dataclass(kw_only=True)
class DistributedConfig:
    """The `dist` section: communication between ranks."""

    distributed_timeout_minutes: int = 10
    """Minutes after which a collective that does not finish ends the job."""


@dataclass(kw_only=True)
class MonitorConfig:
    """The `monitor` section: metrics of each rank's GPU, process and iterations during the training. Off by default."""

    jsonl: bool = False
    """Append samples and alerts to `monitor/rank-<rank>.jsonl` in the profiles' output directory."""

    port: int | None = None
    """Serve Prometheus at this port plus the local rank; null serves nothing."""

    bind: str = "127.0.0.1"
    """The address to serve at; 0.0.0.0 for a Prometheus on another machine. It requires no password."""

    interval: float | None = None
    """Seconds between two samples; null is one, or more if a sample would hold Python's global lock for too long."""


@dataclass(kw_only=True)
class ConfigContainer:
    """The whole configuration of a training, one section per concern."""

    model: GPTModelConfig = field(default_factory=GPTModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3))
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    dist: DistributedConfig = field(default_factory=DistributedConfig)
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def layout(self, world_size: int) -> ParallelLayout:
        """The parallel layout of `world_size` ranks.

        Raises:
            ProfilingConfigError: the ranks cannot be divided by these sizes.
        """
        model = self.model
        return ParallelLayout(
            world_size=world_size,
            tp=model.tensor_model_parallel_size,
            pp=model.pipeline_model_parallel_size,
            cp=model.context_parallel_size,
            ep=model.expert_model_parallel_size,
            etp=model.expert_tensor_parallel_size,
        )

    def num_microbatches(self, world_size: int) -> int:
        """Microbatches of a rank in one iteration."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.layout(world_size).dp)

"""Hugging Face's Trainer: torchrun --nproc-per-node 2 hugging_face.py"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from bridge_profiling.frameworks.hugging_face import ProfilingCallback

set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (128, 16))]
arguments = TrainingArguments("checkpoints", max_steps=8, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                              use_cpu=not torch.cuda.is_available(), logging_steps=1, save_steps=6, report_to=[])  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=data)
settings = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5, "profile_ranks": "all"}
with ProfilingCallback(trainer, **settings):
    trainer.train()
print(f"rank {arguments.process_index} loss", [log["loss"] for log in trainer.state.log_history if "loss" in log])

"""What to train: configurations, executors, and the Megatron-Core training loop. Not part of the wheel."""

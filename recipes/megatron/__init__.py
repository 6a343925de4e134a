"""The Megatron-Core training loop, on CPU and GPU. It calls the profiling hook and knows nothing of profilers."""

"""Memory snapshots of PyTorch."""

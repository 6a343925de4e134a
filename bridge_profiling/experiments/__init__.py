"""NeMo-Run experiments on this machine: their jobs, read as data, and their captures, fetched where the job ran elsewhere."""

"""Facts: tables about one capture, and about all ranks of a run, computed from what was read."""

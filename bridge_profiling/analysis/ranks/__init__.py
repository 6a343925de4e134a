"""Questions across ranks: matched operations, clocks, communication, slow ranks, pipelines."""

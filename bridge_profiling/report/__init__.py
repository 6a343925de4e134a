"""What people read: terminal output, pages, merged traces, notebooks and JSON."""

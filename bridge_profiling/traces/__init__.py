"""Reading what captures left: manifests and traces, on a desk that has no torch."""

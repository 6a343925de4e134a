"""Reports of Nsight Systems."""

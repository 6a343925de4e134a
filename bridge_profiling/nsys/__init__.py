"""Nsight Systems: its options, its versions, its command lines, and the supervisor that runs it around a rank."""

"""NeMo-Run's experiments as data: found on this machine, read without what they import, their captures brought here."""

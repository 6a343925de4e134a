"""The settings of a profile: their checks, and how they are read from text, YAML and environment variables. No torch."""

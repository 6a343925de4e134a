"""Captures on demand: what is asked, who decides, and how every rank receives the decision."""

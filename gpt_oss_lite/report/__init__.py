"""Runs made visible: a page, and a live view in the terminal, both from the files that a run writes."""

"""The four stages of the pipeline, each a command of its own."""

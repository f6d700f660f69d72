"""Checkpoints as Hugging Face folders, and stock gpt-oss checkpoints as ours."""

"""Raw text to shards of token ids. Knows nothing of models."""

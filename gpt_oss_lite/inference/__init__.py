"""What a trained model is asked for: text, perplexity, passkeys."""

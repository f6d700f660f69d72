"""The model and its layers, from attention and experts to the whole transformer."""

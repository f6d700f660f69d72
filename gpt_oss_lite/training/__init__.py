"""The loop and what it stands on: data order, loss, optimizer, checkpoints, guards, logs."""

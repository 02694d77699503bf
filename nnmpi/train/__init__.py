"""The train command and its parts: options, loop, metrics, checkpoints."""

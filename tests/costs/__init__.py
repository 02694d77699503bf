"""What a training step costs, counted: see `count` and `ways`."""

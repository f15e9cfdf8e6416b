"""The way of an update from the trainer to its engines."""

"""The trainer: configuration, data, rollouts, rewards, the loop, checkpoints and reports around ``logra_ref``."""

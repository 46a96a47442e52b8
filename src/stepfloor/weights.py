"""Every tensor of a checkpoint."""

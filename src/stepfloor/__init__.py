"""stepfloor: one model, one GPU, and how far each decode step is from the memory-bandwidth floor."""

__version__ = "0.1.0"

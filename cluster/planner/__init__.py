"""What a run needs before it is started: memory, time, and the best split of given GPUs. Pure arithmetic."""

"""Training: the loop, one task, one step, and what they need."""

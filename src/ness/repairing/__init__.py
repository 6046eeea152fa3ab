"""Repair: a fine-tune that has forgotten, mended in closed form from the Grams of old and of new inputs."""

"""A guard as tensors and JSON, and folders that are whole or not there."""

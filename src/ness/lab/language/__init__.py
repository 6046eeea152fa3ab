"""Adapting a pretrained language model to a new domain: what it learns, and what it forgets of everything else."""

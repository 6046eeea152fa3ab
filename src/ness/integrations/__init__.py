"""Bridges to other packages; each imports its partner when it is used."""

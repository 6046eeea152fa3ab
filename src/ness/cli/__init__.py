"""The command line `ness`, a file per command."""

"""The commands of the laboratory, one file each."""

"""The methods, one file each; a module with a METHOD is found by its name."""

"""The networks of the benchmarks, one file each; what a module lists in NETWORKS is found by its name."""

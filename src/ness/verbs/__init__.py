"""What the guard's verbs do: observe, constrain, merge, discard, use, compare."""

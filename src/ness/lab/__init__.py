"""The laboratory: every method and benchmark of the paper on one loop (needs the extra `ness-cl[lab]`)."""

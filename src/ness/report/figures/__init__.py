"""Figures that go into papers, drawn with matplotlib: one file a kind."""

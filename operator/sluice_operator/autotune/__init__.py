"""Autotune: when to search for sliders, the search, and the trial of what it found."""

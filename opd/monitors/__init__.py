"""Monitors: what can go wrong in a run, how the metrics show it, and published remedies. No torch here."""

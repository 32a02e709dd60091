"""Monitors: what can go wrong in a run, how it shows in the metrics, and what is published against it. No torch here."""

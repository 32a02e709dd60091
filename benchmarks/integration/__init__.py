"""The capability-integration benchmark: several specialists, one student. `benchmarks/integrate.py` runs it."""

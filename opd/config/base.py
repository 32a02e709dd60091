"""The old name of `opd.settings`: what the other settings are made of."""

from opd.settings import MANY, SETTINGS, Address, Count, Dtype, Fraction, Positive, Word, changed

__all__ = ["MANY", "SETTINGS", "Address", "Count", "Dtype", "Fraction", "Positive", "Word", "changed"]

"""The training objective: forms of a term, gates, advantages, surrogates, corrections, weights and denominators."""

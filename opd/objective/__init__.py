"""What is minimised: the forms of a term, gates, advantages, surrogates, corrections, weights and denominators."""

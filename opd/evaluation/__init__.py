"""How good is a model: pass@k on held-out prompts."""

from opd.evaluation.passk import Question, Score, evaluate

__all__ = ["Question", "Score", "evaluate"]

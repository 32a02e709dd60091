"""How good is a model: pass@k on held-out prompts."""

from opd.evaluation.passk import Measures, Question, evaluate

__all__ = ["Measures", "Question", "evaluate"]

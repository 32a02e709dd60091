"""On-policy distillation of language models: the student samples, the teachers score every token."""

from opd.run import Run, resume, run

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "resume", "run"]

"""Token ids in, log-probabilities and texts out. Knows models, not tasks and not lm-eval."""

import mlx_eval.models  # noqa: F401  (brings the BLAS in before mlx)

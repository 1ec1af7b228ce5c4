"""What joins models, harness and results into one job."""

import mlx_eval.models  # noqa: F401  (brings the BLAS in before mlx)

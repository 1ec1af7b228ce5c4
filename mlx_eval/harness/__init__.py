"""The side that faces lm-eval: the backend, presets and tasks. The only importer of lm_eval, when used."""

import mlx_eval.models  # noqa: F401  (brings the BLAS in before mlx)

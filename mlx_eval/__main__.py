"""`python -m mlx_eval`."""

from mlx_eval.cli.main import main

raise SystemExit(main())

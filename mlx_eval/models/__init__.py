"""Models in: from a directory, a hub id, a GGUF file or PyTorch to MLX arrays in an mlx-lm model.

On Linux the BLAS has to be in the process before mlx is: importing anything from here sees to it.
"""

from mlx_eval.models.runtime import preload_blas

preload_blas()

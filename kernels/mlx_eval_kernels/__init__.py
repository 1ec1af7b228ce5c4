"""Array functions of the evaluation engine: arrays in, arrays out. Knows mlx and nothing else of ours."""

from mlx_eval_kernels.launch import Backend as Backend
from mlx_eval_kernels.launch import KernelError as KernelError
from mlx_eval_kernels.linear_logprob import AffineHead as AffineHead
from mlx_eval_kernels.linear_logprob import DenseHead as DenseHead
from mlx_eval_kernels.linear_logprob import Head as Head
from mlx_eval_kernels.linear_logprob import linear_logprob as linear_logprob
from mlx_eval_kernels.logprob import NO_TARGET as NO_TARGET
from mlx_eval_kernels.logprob import LogProb as LogProb
from mlx_eval_kernels.logprob import logprob as logprob
from mlx_eval_kernels.prefix_attention import prefix_attention as prefix_attention
from mlx_eval_kernels.prefix_attention import row_attention as row_attention

__all__ = [
    "NO_TARGET",
    "AffineHead",
    "Backend",
    "DenseHead",
    "Head",
    "KernelError",
    "LogProb",
    "linear_logprob",
    "logprob",
    "prefix_attention",
    "row_attention",
]

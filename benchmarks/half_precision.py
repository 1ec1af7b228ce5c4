"""Why float32 is the default type on MLX's CPU device: one layer's product in each type, beside float32.

    python benchmarks/half_precision.py

The product is a linear layer's, activations [T, in] by weights [out, in]: T = 1 is decoding, T = 256 scoring.
The types take turns, so that other work on the machine touches all alike. Prints the median CPU time of float32
and, for each other type, its median as a multiple of that: above one is slower than float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

from mlx_eval.models.runtime import BUILT_IN_BLAS, preload_blas

BLAS = preload_blas() or BUILT_IN_BLAS  # before mlx is imported, or it comes too late

import mlx.core as mx  # noqa: E402
from tabulate import tabulate  # noqa: E402

SHAPES = ((1, 576, 1536), (1, 2048, 2048), (64, 2048, 2048), (256, 576, 1536), (256, 2048, 2048))
"""T, in, out: layers of a model of 135 million parameters and of one of a billion or so."""
SETTLE_SECONDS = 0.02
"""A sample repeats its product until it has lasted this long: one small product is shorter than the clock's noise."""


def products(num_rows: int, num_in: int, num_out: int) -> dict[str, Callable[[], mx.array]]:
    """The same product in each type, by name."""
    x, w = mx.random.normal((num_rows, num_in)), mx.random.normal((num_out, num_in))  # [T, in], [out, in]

    def plain(dtype: mx.Dtype) -> Callable[[], mx.array]:
        left, right = x.astype(dtype), w.astype(dtype)
        mx.eval(left, right)
        return lambda: left @ right.T

    def quantized(dtype: mx.Dtype) -> Callable[[], mx.array]:
        left, packed = x.astype(dtype), mx.quantize(w.astype(dtype), group_size=64, bits=4)
        mx.eval(left, *packed)
        return lambda: mx.quantized_matmul(left, *packed, group_size=64, bits=4)

    return {
        "float32": plain(mx.float32),
        "bfloat16": plain(mx.bfloat16),
        "float16": plain(mx.float16),
        "4 bits in float32": quantized(mx.float32),
        "4 bits in bfloat16": quantized(mx.bfloat16),
    }


def seconds(product: Callable[[], mx.array], count: int) -> float:
    """CPU seconds of one product, the mean of `count`."""
    started = time.process_time()
    for _ in range(count):
        mx.eval(product())
    return (time.process_time() - started) / count


def medians(shape: tuple[int, int, int], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each type's product."""
    asked = products(*shape)
    counts = {}
    for name, product in asked.items():
        seconds(product, 1)  # the first call allocates
        counts[name] = max(1, round(SETTLE_SECONDS / max(seconds(product, 1), 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(repeats):
        for name, product in asked.items():
            found[name].append(seconds(product, counts[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    mx.set_default_device(mx.Device(mx.cpu))
    mx.random.seed(0)
    print(f"CPU device, BLAS: {BLAS}, MLX {version('mlx')}, median of {arguments.repeats}")
    rows = []
    for shape in SHAPES:
        found = medians(shape, arguments.repeats)
        base = found.pop("float32")
        rows.append(
            ["{} x {:,} x {:,}".format(*shape), f"{base * 1e3:.2f} ms"]
            + [f"{t / base:.1f}" for t in found.values()]
        )
        names = list(found)
    print(tabulate(rows, ["T x in x out", "float32", *names], disable_numparse=True))


if __name__ == "__main__":
    main()

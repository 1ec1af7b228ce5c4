"""Say what the GPU of this machine can do for the kernels: `python scripts/probe_metal.py`.

Hosted runners have a paravirtual GPU, which does not promise everything. Prints `name=value` lines: the device,
whether MLX has Metal, and whether a tiny kernel of each feature computes what it should: sums over a SIMD group,
products of matrices that it shares, bfloat16. Each is tried in a process of its own, since a fault of the GPU ends
the process. The status is 1 where Metal is missing or a feature does not work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any, Final

import mlx.core as mx

FEATURES: Final = {
    "simdgroup_sum": "out[thread_position_in_grid.x] = T(metal::simd_sum(float(values[thread_position_in_grid.x])));",
    "simdgroup_matrix": """
        metal::simdgroup_matrix<float, 8, 8> ones = metal::make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        metal::simdgroup_matrix<float, 8, 8> product = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        threadgroup float tile[64];
        metal::simdgroup_multiply_accumulate(product, ones, ones, product);
        metal::simdgroup_store(product, tile, 8);
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = T(4.0f * tile[thread_position_in_grid.x] * float(values[0]));
    """,
    "bfloat16": "out[thread_position_in_grid.x] = T(32.0f) * values[thread_position_in_grid.x];",
}
"""Bodies that make 32 of each of 32 ones."""
THREADS: Final = 32


def works(feature: str) -> bool:
    """Whether the feature's kernel computes in this process what it should."""
    dtype = mx.bfloat16 if feature == "bfloat16" else mx.float32
    kernel: Any = mx.fast.metal_kernel(
        name=f"probe_{feature}", input_names=["values"], output_names=["out"], source=FEATURES[feature]
    )
    (out,) = kernel(
        inputs=[mx.ones(THREADS, dtype)],
        template=[("T", dtype)],
        grid=(THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(THREADS,)],
        output_dtypes=[dtype],
        stream=mx.gpu,
    )
    return bool((out == 32).all())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Say what the GPU of this machine can do for the kernels.")
    parser.add_argument("--only", choices=FEATURES, help="try this one, in this process")
    options = parser.parse_args(arguments)
    if options.only:
        return 0 if works(options.only) else 1
    has_metal = mx.metal.is_available()
    print(f"metal={str(has_metal).lower()}")
    if not has_metal:
        return 1
    for name, value in mx.device_info().items():
        print(f"{name}={value}")
    missing = False
    for feature in FEATURES:
        command = [sys.executable, __file__, f"--only={feature}"]
        is_there = subprocess.run(command, check=False).returncode == 0
        print(f"{feature}={str(is_there).lower()}")
        missing |= not is_there
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

"""What an optimised BLAS is worth to MLX on Linux: one float32 product with it and without.

    python benchmarks/blas.py

Each measurement runs in a process of its own, because the BLAS is chosen when mlx is imported. Prints
the median process CPU time and wall time of each, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time


def measure(size: int, repeats: int) -> dict[str, float]:
    import mlx.core as mx

    left, right = mx.random.normal((size, size)), mx.random.normal((size, size))
    mx.eval(left, right, left @ right)
    wall, cpu = [], []
    for _ in range(repeats):
        started, cpu_started = time.perf_counter(), time.process_time()
        mx.eval(left @ right)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    return {"wall": statistics.median(wall), "cpu": statistics.median(cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("built-in", "preloaded"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        if arguments.only == "preloaded":
            from mlx_eval.models.runtime import preload_blas

            preload_blas()
        print(json.dumps(measure(arguments.size, arguments.repeats)))
        return
    command = [sys.executable, __file__, f"--size={arguments.size}", f"--repeats={arguments.repeats}"]
    found = {
        kind: json.loads(subprocess.check_output([*command, f"--only={kind}"]))
        for kind in ("built-in", "preloaded")
    }
    for kind, times in found.items():
        print(f"{kind:10} wall {times['wall']:8.3f} s   CPU {times['cpu']:8.3f} s")
    print(f"ratio      wall {found['built-in']['wall'] / found['preloaded']['wall']:8.1f}     ", end="")
    print(f"CPU {found['built-in']['cpu'] / found['preloaded']['cpu']:8.1f}")


if __name__ == "__main__":
    main()

"""What the process runs on: the BLAS on Linux, the device, the memory. Knows no model.

MLX's Linux wheel carries the reference BLAS, 20 to 30 times slower than an optimised one. When an
optimised BLAS is loaded with global symbols before mlx is imported, MLX's calls bind to that one
instead. On macOS MLX uses Accelerate and Metal, and nothing here applies.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from dataclasses import dataclass

from mlx_eval.errors import InvalidOptionError

OPENBLAS = "libopenblas.so.0"
BUILT_IN_BLAS = "built into MLX"
BLAS_HINT = (
    "MLX is using its slow built-in BLAS. Install an optimised one to run 20 to 30 times faster: "
    "apt-get install libopenblas0 (Debian, Ubuntu), dnf install openblas (Fedora)"
)


MLX_WAS_FIRST = (
    "MLX is using its slow built-in BLAS, because mlx was imported before mlx_eval: "
    "import mlx_eval.models first to run 20 to 30 times faster"
)


@functools.cache
def preload_blas() -> str | None:
    """Load OpenBLAS into the process, on Linux and before mlx is imported.

    Returns:
        The name of the library that MLX's matrix products will use, `None` for its built-in one.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    try:
        ctypes.CDLL(OPENBLAS, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return OPENBLAS


def blas_problem() -> str | None:
    """What to do about a slow BLAS; None where there is nothing to be done."""
    if device().kind != "cpu" or device().blas != BUILT_IN_BLAS:
        return None
    try:
        ctypes.CDLL(OPENBLAS)
    except OSError:
        return BLAS_HINT
    return MLX_WAS_FIRST


@dataclass(frozen=True, slots=True)
class Device:
    """The machine and the device that MLX computes on."""

    name: str
    """Chip or processor."""
    kind: str
    """`metal` or `cpu`."""
    memory_bytes: int
    os: str
    blas: str
    """Accelerate, libopenblas.so.0 or MLX's built-in one."""

    @property
    def is_metal(self) -> bool:
        """Whether arrays are computed by Metal."""
        return self.kind == "metal"


@functools.cache
def device() -> Device:
    """Describe the device that MLX uses by default in this process."""
    import mlx.core as mx

    is_metal = bool(mx.metal.is_available()) and mx.default_device() == mx.Device(mx.gpu)
    info = mx.device_info() if is_metal else {}
    return Device(
        name=str(info.get("device_name") or _processor_name()),
        kind="metal" if is_metal else "cpu",
        memory_bytes=int(info.get("memory_size") or _physical_memory()),
        os=_os_name(),
        blas=preload_blas() or BUILT_IN_BLAS,
    )


def kernel_backend() -> str:
    """How the kernels run: `metal`, or `reference` in plain MLX.

    Raises:
        InvalidOptionError: the environment asks for what is not there.
    """
    from mlx_eval_kernels.launch import KernelError, chosen_backend

    try:
        return chosen_backend(None)
    except KernelError as error:
        raise InvalidOptionError(str(error)) from error


def _processor_name() -> str:
    """The processor's name, as Linux reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _os_name() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.release()}"

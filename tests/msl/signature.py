"""The text around a kernel's body, as `mx.fast.metal_kernel` of MLX 0.32.4 makes it.

Written anew, from what the exported text shows (`exported.py`); a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
from mlx_eval_kernels.launch import Dispatch

ATTRIBUTES: Final = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
"""What a body may name, and the type; in the order in which MLX adds the parameters."""
CONSTANT_SIZE: Final = 8
"""Inputs of fewer elements lie in the constant address space."""
_ODD_NAMES: Final = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t", "bool": "bool"}


@dataclass(frozen=True, slots=True)
class Generated:
    """A kernel's whole text."""

    function: str
    call: str
    """The function with its template arguments."""
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Which of an input's shape, strides and number of dimensions are parameters after it."""

    shape: bool
    strides: bool
    ndim: bool


def generated(dispatch: Dispatch) -> Generated:
    """The text that MLX compiles for a dispatch."""
    source = dispatch.source
    arguments = ", ".join(_template_argument(value) for _, value in dispatch.template)
    call_suffix = f"<{arguments}>" if arguments else ""
    function = _function_name(dispatch, arguments)
    text = source.header
    if arguments:
        parameters = ", ".join(f"{_template_kind(value)} {name}" for name, value in dispatch.template)
        text += f"template <{parameters}>\n"
    text += f"[[kernel]] void {function}(\n"
    text += ",\n".join(_parameters(dispatch)) + ") {\n" + source.body + "\n}\n"
    call = function + call_suffix
    if arguments:
        text += f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({call}) {call};\n'
    return Generated(function, call, text)


def facts(body: str, name: str, num_dimensions: int) -> Facts:
    """What the body asks about an input. MLX looks for the text, comments included; scalars have none."""
    if num_dimensions == 0:
        return Facts(False, False, False)
    return Facts(f"{name}_shape" in body, f"{name}_strides" in body, f"{name}_ndim" in body)


def dtype_name(dtype: mx.Dtype) -> str:
    """`float32`, `bool` and so on."""
    return str(dtype).removeprefix("mlx.core.").removesuffix("_")


def metal_type(dtype: mx.Dtype) -> str:
    """What the kernel calls it."""
    name = dtype_name(dtype)
    return _ODD_NAMES.get(name, f"{name}_t")


def _template_argument(value: mx.Dtype | int | bool) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value) if isinstance(value, int) else metal_type(value)


def _template_kind(value: mx.Dtype | int | bool) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _function_name(dispatch: Dispatch, arguments: str) -> str:
    name = "custom_kernel_" + dispatch.source.name
    if arguments:
        name += "__" + arguments.replace(", ", "_").replace("-", "_")
    for array in dispatch.inputs:
        small = "c" if array.size < CONSTANT_SIZE else ""
        name += f"_{metal_type(array.dtype)}" + ("s" if array.ndim == 0 else small)
    return name + "".join(f"_{metal_type(dtype)}" for dtype in dispatch.output_dtypes)


def _parameters(dispatch: Dispatch) -> Sequence[str]:
    source = dispatch.source
    buffers = []
    for name, array in zip(source.inputs, dispatch.inputs, strict=True):
        space = "constant" if array.size < CONSTANT_SIZE else "device"
        buffers.append(f"const {space} {metal_type(array.dtype)}{'*' if array.ndim else '&'} {name}")
        asked = facts(source.body, name, array.ndim)
        if asked.shape:
            buffers.append(f"const constant int* {name}_shape")
        if asked.strides:
            buffers.append(f"const constant int64_t* {name}_strides")
        if asked.ndim:
            buffers.append(f"const constant int& {name}_ndim")
    for name, dtype in zip(source.outputs, dispatch.output_dtypes, strict=True):
        buffers.append(f"device {metal_type(dtype)}* {name}")
    parameters = [f"  {buffer} [[buffer({index})]]" for index, buffer in enumerate(buffers)]
    return parameters + [
        f"  {type_} {name} [[{name}]]" for name, type_ in ATTRIBUTES.items() if name in source.body
    ]

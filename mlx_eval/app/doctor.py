"""What the machine has, what is missing, what a model is. Knows devices, packages and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlx_eval.app.evaluate import versions
from mlx_eval.errors import InvalidOptionError
from mlx_eval.models import runtime

GIB = 2**30
OPTIONAL = {"lm-eval": "harness"}
"""Packages that the main job needs, and the extra that brings them."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found."""

    facts: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    """What is wrong and what to do, a line each."""


def examine(model: str | None = None, loading: Mapping[str, Any] | None = None) -> Examination:
    """Look at the machine and, when one is given, at a model.

    Raises:
        ModelError: the model cannot be loaded.
    """
    device = runtime.device()
    facts = [
        ("chip", device.name),
        ("memory", _size(device.memory_bytes)),
        ("system", device.os),
        ("device", "Metal" if device.is_metal else "CPU"),
        ("BLAS", device.blas),
    ]
    problems = []
    try:
        facts.append(("kernels", runtime.kernel_backend()))
    except InvalidOptionError as error:
        problems.append(str(error))
    facts += versions().items()
    if blas := runtime.blas_problem():
        problems.append(blas)
    if device.kind == "cpu" and device.os.startswith("macOS"):
        problems.append("MLX does not use Metal: a native arm64 Python is needed, not one under Rosetta")
    for package, extra in OPTIONAL.items():
        try:
            version(package)
        except PackageNotFoundError:
            problems.append(f"{package} is not installed: pip install 'mlx-eval[{extra}]'")
    if model is not None:
        more, wrong = _examine_model(model, loading or {})
        facts += more
        problems += wrong
    return Examination(tuple(facts), tuple(problems))


def _examine_model(source: str, loading: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[str]]:
    from mlx_eval import config
    from mlx_eval.engine.known import decoding_of, sharing_of
    from mlx_eval.engine.sharing import describe
    from mlx_eval.models.differences import known_differences
    from mlx_eval.models.head import RowHead
    from mlx_eval.models.load import load_model

    loaded = load_model(source, **loading)
    head = RowHead(loaded.model, config.LOGITS_BYTES)
    sharing = sharing_of(loaded, head)
    decoding = decoding_of(loaded, sharing)
    facts = [
        ("model", source),
        ("architecture", str(loaded.config.get("model_type", "unknown"))),
        ("parameters", f"{loaded.num_parameters:,}"),
        (
            "weights",
            f"{_size(loaded.num_bytes)}, {loaded.dtype}, {loaded.quantization or 'not quantised'}",
        ),
        ("window", f"{loaded.max_length:,} tokens"),
        ("chat template", "yes" if loaded.tokenizer.has_chat_template else "no"),
        ("end of sequence", ", ".join(map(str, sorted(loaded.tokenizer.eos_token_ids))) or "none"),
        (
            "head",
            "on scored positions only"
            if head.is_split
            else "on every position: the model could not be split",
        ),
        ("KV", f"{_size(sharing.cache.token_bytes)} a token{_a_row(sharing.cache.row_bytes)}"),
        ("sharing", describe(sharing.way)),
        *(("sharing off", finding) for finding in sharing.findings),
        ("decoding", "rows together" if decoding.together else "one row at a time: rows side by side differ"),
        (
            "drafts",
            "possible (--speculate)" if decoding.drafts else "none: rows cannot forget what they have read",
        ),
        ("fingerprint", loaded.fingerprint()),
        *(("differs", text) for text in known_differences(loaded.config)),
    ]
    wrong = []
    room = runtime.device().memory_bytes
    if loaded.num_bytes > 0.75 * room:
        wrong.append(f"the weights take {loaded.num_bytes / room:.0%} of the memory: try --quantize 4")
    highest = max(loaded.tokenizer.get_vocab().values(), default=0)
    if loaded.vocab_size is not None and highest >= loaded.vocab_size:
        wrong.append(
            f"the tokenizer has ids up to {highest}, and the model has {loaded.vocab_size} rows in its embedding: "
            "use the tokenizer that the model was trained with"
        )
    if not _is_finite(loaded.model):
        wrong.append(f"the model computes NaN: its weights are damaged, or overflow in {loaded.dtype}")
    if not loaded.tokenizer.eos_token_ids:
        wrong.append(
            "the tokenizer names no end-of-sequence token: generation ends at stop texts and limits only"
        )
    return facts, wrong


def _is_finite(model: Any) -> bool:
    """Whether a few tokens give numbers."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    logits = model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model))
    return not bool(mx.any(mx.isnan(logits)).item())


def _a_row(num_bytes: int) -> str:
    return f", {_size(num_bytes)} a row" if num_bytes else ""


def _size(num_bytes: int) -> str:
    """Bytes in KiB, MiB or GiB."""
    for name, unit in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 2**10:.1f} KiB"

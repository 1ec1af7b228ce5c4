"""What the package keeps between runs and may lose at any time: JSON documents in the user's cache folder.

Knows files, not what is in them. A document comes back as it was written or not at all: one that is damaged,
of another key, or that cannot be read is as good as none, and a folder that cannot be written to is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

CACHE_VARIABLE: Final = "MLX_EVAL_CACHE"
"""Environment variable that names another folder."""


def cache_folder() -> Path:
    """The folder that documents are kept in; it need not exist.

    `MLX_EVAL_CACHE` if it is set, else `mlx_eval` in the system's place for caches: `~/Library/Caches` on
    macOS, elsewhere `XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        RuntimeError: the user has no home directory.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx_eval"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification: relative paths are to be ignored
    return (base if base.is_absolute() else Path.home() / ".cache") / "mlx_eval"


def read_cached(name: str, key: str) -> Any | None:
    """The document `name` as it was last written, None when there is none for this key.

    Args:
        name: a file's name.
        key: everything that the document depends on, in one line.
    """
    try:
        header, _, body = (cache_folder() / name).read_bytes().partition(b"\n")
        if json.loads(header) != _header(key, body):
            return None
        return json.loads(body)
    except (OSError, RuntimeError, ValueError):  # RecursionError is a RuntimeError
        return None


def write_cached(name: str, key: str, document: Any) -> None:
    """Keep a document, in the place of an older one of that name.

    Others that read or write at the same time see the old document or the new one.

    Args:
        name: a file's name.
        key: everything that the document depends on, in one line.
        document: what JSON can hold.
    """
    body = json.dumps(document, separators=(",", ":")).encode()
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f"{name}.", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(json.dumps(_header(key, body)).encode() + b"\n" + body)
            os.replace(temporary, folder / name)
        except BaseException:  # Ctrl-C leaves nothing behind either
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, RuntimeError) as error:
        logger.debug("%s is not kept: %s", name, error)


def _header(key: str, body: bytes) -> dict[str, str]:
    return {"key": key, "sha256": hashlib.sha256(body).hexdigest()}

"""Keeps measurements in files, so that a peer is not measured again for every change of ours."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.side_by_side.worker import Measurement

HEADER_BYTES: Final = 2**16
"""Of a weight file, read for its digest beside its size: names and shapes, not the weights themselves."""


def model_digest(directory: Path) -> str:
    """Tells models apart by configuration, tokenizer, and the weight files' sizes and headers."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size}\n".encode() + file.read(HEADER_BYTES))
        elif path.name in {"config.json", "tokenizer.json"}:
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Documents:
    """A folder with one file for each work, backend and key: what the measurement depends on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, work: str, backend: str, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{work}-{backend}-{digest[:8]}.json"

    def write_document(self, work: str, backend: str, key: Mapping[str, Any], found: Any) -> None:
        """Keep what JSON can hold, with what it depends on."""
        content = {"key": dict(key), "measurement": found}
        self._file(work, backend, key).write_text(json.dumps(content, indent=1), encoding="utf-8")

    def read_document(self, work: str, backend: str, key: Mapping[str, Any]) -> Any:
        """What was kept with an equal key; None where nothing was."""
        file = self._file(work, backend, key)
        if not file.is_file():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        return content["measurement"] if content["key"] == dict(key) else None


class Store(Documents):
    """Measurements of scoring."""

    def write(self, work: str, backend: str, key: Mapping[str, Any], found: Measurement) -> None:
        """Keep a measurement with what it depends on."""
        self.write_document(work, backend, key, asdict(found))

    def read(self, work: str, backend: str, key: Mapping[str, Any]) -> Measurement | None:
        """A measurement whose key is equal; None where there is none."""
        found = self.read_document(work, backend, key)
        return None if found is None else Measurement.from_dict(found)

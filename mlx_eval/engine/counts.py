"""What decoding has computed, in numbers. Knows nothing of how."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class DecodeCounts:
    """What decoding has computed."""

    prompt_tokens: int = 0
    """Tokens of all prompts."""
    unique_tokens: int = 0
    """The same where each common beginning counts once among the prompts that are planned together: those whose
    limits are of one power of two; of rows that are begun again, once more."""
    prefill_tokens: int = 0
    """Tokens of prompts that were computed, padding aside; those of rows that were begun again count again."""
    prefill_padding: int = 0
    prefill_forwards: int = 0
    steps: int = 0
    """Forward passes that gave tokens."""
    generated_tokens: int = 0
    """Tokens of answers."""
    discarded_tokens: int = 0
    """Tokens that were computed behind the end of an answer, or for rows that were put back."""
    peak_rows: int = 0
    """The most rows in a step."""
    restarted_rows: int = 0
    """Rows that were begun again, behind their answer so far, because memory ran out."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were the model's own."""

    def as_dict(self) -> dict[str, int]:
        """For run.json."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

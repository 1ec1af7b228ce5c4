"""Task files over local data: multiple choice, rolling, generation, and groups of them."""

from __future__ import annotations

import json
from pathlib import Path

CHOICES = [
    {"question": "the quick", "choices": ["brown", "lazy", "answer"], "answer": 0},
    {"question": "jumps over the", "choices": ["fox", "lazy dog"], "answer": 1},
    {"question": "what is the", "choices": ["answer", "42", "fox", "é😀"], "answer": 0},
]
TEXTS = [{"text": "the quick brown fox. " * 4}, {"text": "é"}]
PROMPTS = [{"question": "the quick", "answer": "x"}, {"question": "Answer:", "answer": "y"}]

CHOICE_TASK = """
task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TEXT_TASK = """
task: tiny_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
"""
WRITE_TASK = """
task: tiny_write
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 5
metric_list:
  - metric: exact_match
"""
GROUP = """
group: tiny_group
task: [tiny_choice, tiny_text]
"""


def write_tasks(folder: Path) -> Path:
    """Write data and task files into `folder`."""
    for name, rows, task in (
        ("choice", CHOICES, CHOICE_TASK),
        ("text", TEXTS, TEXT_TASK),
        ("write", PROMPTS, WRITE_TASK),
    ):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(source + task.lstrip(), encoding="utf-8")
    (folder / "group.yaml").write_text(GROUP.lstrip(), encoding="utf-8")
    return folder

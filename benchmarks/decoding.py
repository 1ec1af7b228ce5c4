"""Decoding alone, this project beside mlx-lm's BatchGenerator, with equal rows.

    python benchmarks/decoding.py --model ./model

1, 8 and 32 prompts of one length, no two of which begin alike, are continued by as many tokens each; none ends one.
The clock runs from the moment at which every row has its first token to that at which every row has its last: the
prompts have been read by then, all together (mlx-lm is told so; by default it would read eight at a time and decode
between). Both are measured in one process, on the same arrays, in turn: a, b, a, b; medians are printed, CPU seconds
(user and system, all threads) and wall time.

The ids of both are compared with each other and with those of transformers, which computes in a process of its own.
Where they differ, the model is asked how near its two best tokens were: below 1e-4 rounding decides. The status is 1
where it does not explain a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tabulate import tabulate

from benchmarks.side_by_side.backends import Seconds
from benchmarks.side_by_side.near_ties import Gap, gap_after
from benchmarks.side_by_side.processes import in_own_process

if TYPE_CHECKING:
    from mlx_eval.engine.decode import Decoder

FIRST_CHARACTER: Final = 0x10000
"""Ids are written as characters from here on, so that a text tells the ids."""
GREEDY_IDS: Final = "benchmarks.side_by_side.greedy_ids"


@dataclass(frozen=True, slots=True)
class Run:
    """One way of decoding, once."""

    seconds: Seconds
    """From every row's first token to every row's last."""
    ids: list[list[int]]
    """Of each row, the first token among them."""


class RowClock:
    """Runs from the moment at which every row has a token."""

    def __init__(self, num_rows: int) -> None:
        self._num_missing = num_rows
        self._wall = self._cpu = 0.0

    def first(self) -> None:
        """A row has its first token."""
        self._num_missing -= 1
        if not self._num_missing:
            self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> Seconds:
        """Every row has its last one."""
        assert not self._num_missing
        return Seconds(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def run_ours(decoder: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
    """Through the engine, whose interface is met here only."""
    from mlx_eval.records import GenerationRequest

    requests = [GenerationRequest(tuple(prompt), num_tokens) for prompt in prompts]
    texts = [""] * len(requests)
    clock = RowClock(len(requests))
    decoder.run(
        requests,
        batch_size=len(requests),
        decode=lambda ids: "".join(chr(FIRST_CHARACTER + one) for one in ids),
        eos_token_ids=frozenset(),
        on_generation=lambda index, generation: texts.__setitem__(index, generation.text),
        on_tokens=lambda count: clock.first() if count > 1 else None,
    )
    return Run(clock.stop(), [[ord(character) - FIRST_CHARACTER for character in text] for text in texts])


def run_peer(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
    """Through what batch_generate is made of."""
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(
        model,
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    rows: dict[int, list[int]] = {
        row: [] for row in generator.insert([list(prompt) for prompt in prompts], [num_tokens] * len(prompts))
    }
    clock = RowClock(len(rows))
    while responses := generator.next_generated():
        for response in responses:
            rows[response.uid].append(response.token)
            if len(rows[response.uid]) == 1:
                clock.first()
        if all(len(ids) == num_tokens for ids in rows.values()):
            break
    seconds = clock.stop()
    mx.synchronize(generator.stream)  # the step that it has sent already is not ours to pay
    generator.close()
    return Run(seconds, list(rows.values()))


def first_differences(
    model: Any, prompts: Sequence[Sequence[int]], ours: Sequence[list[int]], theirs: Sequence[list[int]]
) -> dict[int, Gap]:
    """By row, how near the two best tokens were at the first difference."""
    found = {}
    for row, (prompt, own, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if own != other:
            place = next(place for place, (a, b) in enumerate(zip(own, other, strict=True)) if a != b)
            found[row] = gap_after(model, [*prompt, *own[:place]], other[place])
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """So many rows, both ways."""

    rows: int
    tokens: int
    """Timed, of all rows."""
    ours: Seconds
    """Medians, as for `mlx_lm`."""
    mlx_lm: Seconds
    all_ours: tuple[Seconds, ...]
    all_mlx_lm: tuple[Seconds, ...]
    gaps_to_mlx_lm: dict[int, Gap]
    """By row, where the ids differ."""
    gaps_to_hf: dict[int, Gap] | None
    """None: transformers was not asked."""

    @property
    def num_unexplained(self) -> int:
        """Rows whose ids differ by more than rounding."""
        gaps = [*self.gaps_to_mlx_lm.values(), *(self.gaps_to_hf or {}).values()]
        return sum(not gap.is_near_tie for gap in gaps)


def measure(arguments: argparse.Namespace) -> list[Line]:
    """All row counts."""
    import numpy as np

    from mlx_eval.app.bench import random_prompts
    from mlx_eval.engine.decode import Decoder
    from mlx_eval.models.load import load_model

    loaded = load_model(arguments.model, dtype="float32")
    special = set(loaded.tokenizer.all_special_ids)
    plain = np.array(sorted(set(loaded.tokenizer.get_vocab().values()) - special), np.int32)
    decoder = Decoder(loaded.model)
    lines = []
    for num_rows in arguments.rows:
        prompts = random_prompts(plain, num_rows, arguments.prompt_tokens, seed=0).tolist()
        run_ours(decoder, prompts, 4)  # to warm up, as is the next
        run_peer(loaded.model, prompts, 4)
        ours, peer = [], []
        for _ in range(arguments.repeat):
            ours.append(run_ours(decoder, prompts, arguments.tokens))
            peer.append(run_peer(loaded.model, prompts, arguments.tokens))
        gaps_to_hf = None
        if not arguments.no_hf:
            asked = {"prompts": prompts, "model": arguments.model, "tokens": arguments.tokens}
            rows = in_own_process(GREEDY_IDS, asked, arguments.threads)
            gaps_to_hf = first_differences(loaded.model, prompts, ours[0].ids, rows)
        lines.append(
            Line(
                rows=num_rows,
                tokens=num_rows * (arguments.tokens - 1),
                ours=median([run.seconds for run in ours]),
                mlx_lm=median([run.seconds for run in peer]),
                all_ours=tuple(run.seconds for run in ours),
                all_mlx_lm=tuple(run.seconds for run in peer),
                gaps_to_mlx_lm=first_differences(loaded.model, prompts, ours[0].ids, peer[0].ids),
                gaps_to_hf=gaps_to_hf,
            )
        )
        print(table(lines[-1:]), file=sys.stderr, flush=True)
    return lines


def median(taken: Sequence[Seconds]) -> Seconds:
    """Of wall and CPU seconds, each for itself."""
    return Seconds(statistics.median(one.wall for one in taken), statistics.median(one.cpu for one in taken))


def table(lines: Sequence[Line]) -> str:
    """For people."""
    headers = [
        "rows",
        "tokens",
        "CPU s ours",
        "mlx_lm",
        "mlx_lm / ours",
        "wall s ours",
        "mlx_lm",
        "mlx_lm / ours",
    ]
    headers += ["ms a step ours", "mlx_lm", "rows equal to mlx_lm", "to hf", "near-ties", "others"]
    return tabulate([_row(line) for line in lines], headers, disable_numparse=True, stralign="right")


def _row(line: Line) -> list[Any]:
    num_steps = line.tokens // line.rows
    num_parted = len(line.gaps_to_mlx_lm) + len(line.gaps_to_hf or {})
    return [
        line.rows,
        f"{line.tokens:,}",
        f"{line.ours.cpu:.2f}",
        f"{line.mlx_lm.cpu:.2f}",
        f"{line.mlx_lm.cpu / line.ours.cpu:.3f}",
        f"{line.ours.wall:.2f}",
        f"{line.mlx_lm.wall:.2f}",
        f"{line.mlx_lm.wall / line.ours.wall:.3f}",
        f"{1e3 * line.ours.wall / num_steps:.1f}",
        f"{1e3 * line.mlx_lm.wall / num_steps:.1f}",
        f"{line.rows - len(line.gaps_to_mlx_lm)}",
        "" if line.gaps_to_hf is None else f"{line.rows - len(line.gaps_to_hf)}",
        num_parted - line.num_unexplained,
        line.num_unexplained,
    ]


def gaps_text(lines: Sequence[Line]) -> str:
    """A line for each row that is not ours."""
    return "\n".join(
        f"{line.rows} rows, {peer}, row {row}: gap {gap.gap:.1e}, its token has rank {gap.rank}"
        for line in lines
        for peer, gaps in (("mlx_lm", line.gaps_to_mlx_lm), ("hf", line.gaps_to_hf or {}))
        for row, gap in gaps.items()
    )


def whole_numbers(text: str) -> list[int]:
    """A type for argparse: a comma list of numbers above zero."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them; got {text!r}")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="a model directory that mlx-lm and transformers read")
    add("--rows", type=whole_numbers, default=[1, 8, 32], help="rows at a time (default: 1,8,32)")
    add("--prompt_tokens", type=int, default=64, help="of each prompt (default: %(default)s)")
    add("--tokens", type=int, default=64, help="of each answer, two or more (default: %(default)s)")
    add("--repeat", type=int, default=5, help="take the median of so many runs (default: %(default)s)")
    add("--threads", type=int, default=2, help="(default: %(default)s)")
    add("--no_hf", action="store_true", help="leave transformers out")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    for library in ("OPENBLAS", "OMP"):  # read when they are loaded, with mlx_eval
        os.environ[f"{library}_NUM_THREADS"] = str(arguments.threads)
    lines = measure(arguments)
    from mlx_eval.models.runtime import device

    print(f"{device().name}, {arguments.threads} threads, float32, BLAS {device().blas}")
    print(
        f"prompts of {arguments.prompt_tokens} tokens, {arguments.tokens} new; median of {arguments.repeat}"
    )
    print(table(lines))
    if parted := gaps_text(lines):
        print(f"\nfirst differences from ours\n{parted}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps([asdict(line) for line in lines], indent=1) + "\n", encoding="utf-8"
        )
    if any(line.num_unexplained for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

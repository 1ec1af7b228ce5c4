"""The backends that generate, behind one face: load, continue prompts, say what was computed.

As in `backends.py` each is imported only when asked for, so that a process holds one of them, and on Linux an
optimised BLAS is there before mlx is. Each is called by the method that lm-eval calls, `generate_until`; what a peer
computes is counted at its model's call, and the ids that it generates are read on their way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final, Protocol

from benchmarks.side_by_side.generation_works import GenerationWork

WARM_UP: Final = GenerationWork(
    "warm-up",
    ("The quick brown fox jumps", "One, two, three,"),
    ({"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False},) * 2,
)
"""Generated before the clock starts: threads, allocators and checks of the model are started by then."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a backend continued one prompt with."""

    text: str
    """Cut before the stop, as lm-eval gets it."""
    ids: tuple[int, ...]
    """Of a peer every token that it generated, behind the stop too; of ours the text, encoded again."""


@dataclass(frozen=True, slots=True)
class GenerationCounts:
    """What a backend computed for its answers."""

    prompt_tokens: int
    prefill_tokens: int
    """Tokens of prompts that were computed, the last of each among them, padding aside where the backend tells it."""
    prefill_padding: int | None
    """None: it is among the tokens."""
    prefill_forwards: int
    steps: int
    """Forward passes that gave tokens but for those that read whole prompts."""
    generated_tokens: int
    """Up to the one that ends each answer."""
    discarded_tokens: int
    """Computed behind the end of an answer, for rows that were done or that nobody knew to be done."""
    unique_tokens: int | None = None
    """Tokens of prompts where each common beginning counts once; None of peers, which do not share."""
    peak_rows: int | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class GenerationBackend(Protocol):
    """One way of generating."""

    def generate(self, work: GenerationWork) -> list[str]:
        """Answer all requests; this is what is measured."""

    def results(self, work: GenerationWork, texts: Sequence[str]) -> tuple[list[Answer], GenerationCounts]:
        """The answers of the last call with their ids, and what it computed."""


class Ours:
    """This project."""

    def __init__(self, model: str, batch_size: str, speculate: str) -> None:
        from mlx_eval.harness.lm import MLXEvalLM
        from mlx_eval.models.load import load_model

        self._lm: Any = MLXEvalLM(
            load_model(model, dtype="float32"),
            batch_size=_number(batch_size),
            speculate=_number(speculate),
        )
        self._before: dict[str, int] = {}

    def generate(self, work: GenerationWork) -> list[str]:
        """Through the method that lm-eval calls."""
        counts = self._lm.statistics.decoding
        counts.peak_rows = 0
        self._before = asdict(counts)
        return _ask(self._lm, work, disable_tqdm=True)

    def results(self, work: GenerationWork, texts: Sequence[str]) -> tuple[list[Answer], GenerationCounts]:
        """By the run's own statistics."""
        now = asdict(self._lm.statistics.decoding)
        names = {name: now.get(name, 0) - self._before.get(name, 0) for name in GenerationCounts.__slots__}
        answers = [Answer(text, tuple(self._lm.tok_encode(text, add_special_tokens=False))) for text in texts]
        return answers, GenerationCounts(**names)

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time of each stage since the model was loaded, the warm-up among it."""
        found: dict[str, float] = dict(self._lm.statistics.seconds)
        return found


class MlxLm:
    """`mlx_lm.evaluate`, which generates by `batch_generate`."""

    def __init__(self, model: str, batch_size: str, speculate: str) -> None:
        from mlx_eval.models.runtime import preload_blas

        preload_blas()
        import mlx_lm.evaluate as module

        self._lm = module.MLXLM(model, batch_size=int(batch_size))
        self._counter = CountingModel(self._lm._model)
        self._lm._model = self._counter
        self._ids: list[list[int]] = []
        generate = module.batch_generate

        def with_ids(*arguments: Any, **named: Any) -> Any:
            found = generate(*arguments, **named, return_token_ids=True)
            self._ids = found.token_ids
            return found

        module.batch_generate = with_ids

    def generate(self, work: GenerationWork) -> list[str]:
        """Through the method that lm-eval calls."""
        self._counter.clear()
        return _ask(self._lm, work)

    def results(self, work: GenerationWork, texts: Sequence[str]) -> tuple[list[Answer], GenerationCounts]:
        """Counted at the model's call, where every prompt's last token comes with a step."""
        tokenizer, counted = self._lm.tokenizer, self._counter
        prompts = self._lm._tokenize(work.prompts)
        # it does not give the token that ends a sequence, which it has computed
        rows = [
            ids if len(ids) == options["max_gen_toks"] else [*ids, tokenizer.eos_token_id]
            for ids, options in zip(self._ids, work.options, strict=True)
        ]
        generated = _needed(work, rows, tokenizer.decode, set(tokenizer.eos_token_ids))
        counts = GenerationCounts(
            prompt_tokens=sum(map(len, prompts)),
            prefill_tokens=counted.prefill_tokens + len(prompts),
            prefill_padding=None,
            prefill_forwards=counted.prefill_forwards,
            steps=counted.steps,
            generated_tokens=generated,
            discarded_tokens=counted.step_rows - generated,
        )
        return [Answer(text, tuple(ids)) for text, ids in zip(texts, rows, strict=True)], counts


class HuggingFace:
    """lm-eval's `hf` backend: torch on the CPU."""

    def __init__(self, model: str, batch_size: str, speculate: str) -> None:
        import torch
        from lm_eval.models.huggingface import HFLM

        self._lm: Any = HFLM(pretrained=model, batch_size=int(batch_size), device="cpu", dtype=torch.float32)
        self._counter = CountingModel(None)
        self._lm.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._ids: dict[tuple[int, ...], list[int]] = {}
        self._generate = self._lm._model_generate
        self._lm._model_generate = self._with_ids

    def _count(self, _module: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        ids = arguments[0] if arguments else named["input_ids"]
        self._counter.count(*ids.shape)

    def _with_ids(self, **named: Any) -> Any:
        found = self._generate(**named)
        for prompt, mask, row in zip(named["context"], named["attention_mask"], found, strict=True):
            self._ids[tuple(prompt[mask.bool()].tolist())] = row[len(prompt) :].tolist()
        return found

    def generate(self, work: GenerationWork) -> list[str]:
        """Through the method that lm-eval calls."""
        self._counter.clear()
        self._ids.clear()
        return _ask(self._lm, work, disable_tqdm=True)

    def results(self, work: GenerationWork, texts: Sequence[str]) -> tuple[list[Answer], GenerationCounts]:
        """Counted at the model's call; reading a batch of prompts gives a token for each of them too."""
        tokenizer, counted = self._lm.tokenizer, self._counter
        prompts = [tuple(self._lm.tok_encode(prompt)) for prompt in work.prompts]
        rows = [self._ids[prompt] for prompt in prompts]
        generated = _needed(work, rows, self._lm.tok_decode, {tokenizer.eos_token_id})
        counts = GenerationCounts(
            prompt_tokens=sum(map(len, prompts)),
            prefill_tokens=counted.prefill_tokens,
            prefill_padding=None,
            prefill_forwards=counted.prefill_forwards,
            steps=counted.steps,
            generated_tokens=generated,
            discarded_tokens=counted.step_rows + counted.prefill_rows - generated,
        )
        return [Answer(text, tuple(ids)) for text, ids in zip(texts, rows, strict=True)], counts


class CountingModel:
    """Stands in for an mlx-lm model and tells reading prompts from steps, which have one token a row.

    The rest of a prompt that is read in pieces counts as a step where it is a single token: none here is so long.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.prefill_tokens = self.prefill_rows = self.prefill_forwards = self.steps = self.step_rows = 0

    def count(self, num_rows: int, length: int) -> None:
        """Note a forward pass."""
        if length > 1:
            self.prefill_tokens += num_rows * length
            self.prefill_rows += num_rows
            self.prefill_forwards += 1
        else:
            self.steps += 1
            self.step_rows += num_rows

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """The model's own call."""
        self.count(*inputs.shape)
        return self._model(inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


GENERATION_BACKENDS: Final[dict[str, Callable[[str, str, str], GenerationBackend]]] = {
    "ours": Ours,
    "mlx_lm": MlxLm,
    "hf": HuggingFace,
}
"""By the names of the command line; called with the model, the batch size and whether to speculate."""


def num_needed(
    ids: Sequence[int], decode: Callable[[list[int]], str], stops: Sequence[str], eos_ids: Set[int]
) -> int:
    """How many tokens of an answer there are up to the one that completes it.

    Args:
        ids: what was generated.
        decode: ids to text.
        stops: texts that end the answer.
        eos_ids: ids that do.
    """
    length = next((place + 1 for place, one in enumerate(ids) if one in eos_ids), len(ids))

    def is_complete(count: int) -> bool:
        text = decode(list(ids[:count]))
        return any(stop in text for stop in stops)

    if not is_complete(length):
        return length
    low, high = 0, length  # incomplete, complete
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_complete(middle) else (middle, high)
    return high


def _needed(
    work: GenerationWork, rows: Sequence[Sequence[int]], decode: Callable[[list[int]], str], eos_ids: Set[int]
) -> int:
    """Tokens of all answers up to the ones that complete them."""
    return sum(num_needed(ids, decode, work.stops(index), eos_ids) for index, ids in enumerate(rows))


def _ask(lm: Any, work: GenerationWork, **options: Any) -> list[str]:
    """Call the method that lm-eval would call."""
    requests = [
        SimpleNamespace(args=(prompt, copy.deepcopy(one)))
        for prompt, one in zip(work.prompts, work.options, strict=True)
    ]
    found: list[str] = lm.generate_until(requests, **options)
    return found


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text

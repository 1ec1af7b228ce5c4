"""`MLXEvalLM`, the backend that lm-eval calls: encodes requests, has the engine answer them, restores their order.

Knows lm-eval's contract, the encoder and the engine; computes nothing itself. lm_eval is imported when the
first backend is made: until then `MLXEvalLM` is a plain class, which then gains `TemplateLM` as a base.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from mlx import nn
from mlx_eval_kernels import Head

from mlx_eval import config
from mlx_eval.engine.decode import Decoder
from mlx_eval.engine.kernel_check import check_kernels
from mlx_eval.engine.known import decoding_of, sharing_of
from mlx_eval.engine.score import Scorer
from mlx_eval.engine.sharing import ModelSharing
from mlx_eval.errors import MissingDependencyError, ModelError
from mlx_eval.harness.chat import ChatTemplate
from mlx_eval.harness.encoding import Encoder, fit_request, hf_tokenizer
from mlx_eval.harness.progress import TokenProgress
from mlx_eval.harness.prompts import GenerationLimits, generation_requests
from mlx_eval.harness.statistics import FINGERPRINT, FIRST_BATCH, RunStatistics
from mlx_eval.harness.wrapping import (
    as_loaded,
    check_ids,
    draft_length,
    row_ceiling,
    switch,
    thinking_of,
    whole_number,
    window_length,
)
from mlx_eval.models.head import RowHead
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.output_layer import output_layer
from mlx_eval.records import Generation, GenerationRequest, IntArray, Score, ScoringRequest

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

EncodedPair = tuple[tuple[str, str] | None, Sequence[int] | IntArray, Sequence[int] | IntArray]
"""lm-eval's (texts or None, context ids, continuation ids), the ids as its lists or as arrays."""


class MLXEvalLM:
    """lm-eval's model interface on an MLX model.

    An instance is a `lm_eval.api.model.TemplateLM` and goes wherever lm-eval takes a model. Scores follow
    lm-eval's Hugging Face backend: the same token ids, the same numbers.
    """

    backend = "causal"

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance of the class with lm-eval's base mixed in."""
        backend: Any = cls
        bound: type[Self] = bind(backend)
        return object.__new__(bound)

    def __init__(
        self,
        model: LoadedModel | nn.Module,
        tokenizer: Any = None,
        batch_size: int | str = config.BATCH_SIZE,
        max_length: int | None = None,
        *,
        max_gen_toks: int = config.MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        seed: int = config.SEED,
        low_memory_head: bool = False,
        speculate: int | str = config.SPECULATE,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: from `load_model` or `convert_torch`, or any mlx-lm model together with `tokenizer`.
            tokenizer: a transformers tokenizer or mlx-lm's wrapper of one.
            batch_size: the most rows computed together; "auto": as many as memory allows.
            max_length: context window in tokens; None: the model's own.
            max_gen_toks: tokens generated where a task sets no limit.
            add_bos_token: whether texts get a BOS; None: as the tokenizer does.
            prefix_token_id: what stands for an empty context; None: BOS, else EOS.
            think_end_token: text or id that closes a thinking section; None: the model's own, if it has one.
            enable_thinking: passed to the chat template.
            chat_template_args: further arguments of the chat template.
            seed: for sampled generation where a task names none.
            low_memory_head: score without logits, straight from hidden states and the output layer's weights. Saves
                the memory of a block of logits, not time; logits are not rounded to the model's type.
            speculate: whether greedy answers are drafted from the text before them and verified, several tokens in a
                step: "off", "auto" (where it pays) or the most tokens to draft. The same texts, but for ties that
                rounding decides.
            device: accepted because lm-eval passes one; MLX's default device is used.
            max_batch_size: accepted because lm-eval passes one; `batch_size` is the ceiling.

        Raises:
            ImportError: lm_eval is not installed.
            InvalidOptionError: a value that makes no sense, or that the model does not allow.
            DeviceError: the Metal kernels fail on this machine.
        """
        super().__init__()
        check_kernels()
        loaded = as_loaded(model, tokenizer)
        self.loaded = loaded
        self.tokenizer = hf_tokenizer(loaded.tokenizer)
        self._most_rows = row_ceiling(batch_size)
        self._max_length = window_length(max_length, loaded)
        self.max_gen_toks = whole_number("max_gen_toks", max_gen_toks, 1)
        self.seed = whole_number("seed", seed, 0)
        if prefix_token_id is not None:
            prefix_token_id = whole_number("prefix_token_id", prefix_token_id, 0)
            check_ids([prefix_token_id], loaded)
        self.statistics = RunStatistics()
        self._low_memory_head = switch("low_memory_head", low_memory_head)
        self._speculate = draft_length(speculate)
        if self._low_memory_head:
            self._new_heads()  # raises now rather than at the first batch
        self._scorer: Scorer | None = None
        self._decoder: Decoder | None = None
        self._scored_modules: list[nn.Module] = []
        self._encoder = Encoder(
            loaded.tokenizer, add_bos_token=add_bos_token, prefix_token_id=prefix_token_id
        )
        thinking_args = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._chat = ChatTemplate(loaded.tokenizer, {**(chat_template_args or {}), **thinking_args})
        self._thinking = thinking_of(loaded.tokenizer, think_end_token)

    # ---------------------------------------------------------------- what lm-eval asks about the model

    @property
    def batch_size(self) -> int | str:
        """The most rows computed together; "auto": as many as memory allows."""
        return "auto" if self._most_rows is None else self._most_rows

    @contextmanager
    def in_batches_of(self, batch_size: int | str) -> Iterator[None]:
        """Compute at most that many rows together while the block runs."""
        before = self._most_rows
        self._most_rows = row_ceiling(batch_size)
        try:
            yield
        finally:
            self._most_rows = before

    @property
    def sharing(self) -> ModelSharing | None:
        """How far the model's rows shared prefixes and batches; None as long as nothing was scored."""
        return None if self._scorer is None else self._scorer.sharing

    @property
    def max_length(self) -> int:
        """Context window in tokens."""
        return self._max_length

    @property
    def eot_token_id(self) -> int | None:
        """The end-of-sequence id."""
        eos: int | None = self.tokenizer.eos_token_id
        return eos

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context."""
        return self._encoder.prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name of tokenizer, template and its arguments, for lm-eval's cache of requests."""
        name = str(getattr(self.tokenizer, "name_or_path", "") or self.loaded.source)
        return f"{name.replace('/', '__')}-{self._chat.digest()}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, and from then on the template that is used, when there are several."""
        return self._chat.select(chat_template)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as the model's prompt."""
        return self._chat.apply(chat_history, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results beside the model's name."""
        with self.statistics.timed(FINGERPRINT):
            fingerprint = self.loaded.fingerprint()
        return {
            "model_num_parameters": self.loaded.num_parameters,
            "model_dtype": self.loaded.dtype,
            "model_quantization": self.loaded.quantization,
            "model_fingerprint": fingerprint,
        }

    # ---------------------------------------------------------------- encoding

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None
    ) -> list[int]:
        """Ids of a text; BOS at most once. `left_truncate_len` keeps that many of them, the last."""
        ids: list[int] = self._encoder.encode(string, add_special_tokens).tolist()
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair = self._encoder.pairs([(context, continuation)])[0]
        return pair.context_ids.tolist(), pair.continuation_ids.tolist()

    # ---------------------------------------------------------------- log-likelihood

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each continuation after its context, in nats."""
        texts = [request.args for request in requests]
        with self.statistics.timed("encode"):
            pairs = self._encoder.pairs(texts)
        self.statistics.note(
            "one token spans context and continuation; the continuation was encoded alone",
            sum(pair.joined for pair in pairs),
        )
        encoded: list[EncodedPair] = [
            (text, pair.context_ids, pair.continuation_ids) for text, pair in zip(texts, pairs, strict=True)
        ]
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[EncodedPair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        self.statistics.requests["loglikelihood"] += len(requests)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        scored: list[int] = []
        fitted: list[ScoringRequest] = []
        shorter = partial = 0
        for index, (_texts, context_ids, continuation_ids) in enumerate(requests):
            if not len(continuation_ids):
                self._remember("loglikelihood", requests[index][0], answers[index])
                continue
            one = fit_request(context_ids, continuation_ids, self.max_length)
            shorter += one.context_cut and not one.continuation_cut
            partial += one.continuation_cut
            scored.append(index)
            fitted.append(one.request)
        self.statistics.note("the continuation has no tokens; scored 0", len(requests) - len(scored))
        self.statistics.note(f"longer than {self.max_length} tokens; context truncated on the left", shorter)
        self.statistics.note(
            f"the continuation alone is longer than {self.max_length} tokens; only its last ones were scored",
            partial,
        )

        def answer(place: int, score: Score) -> None:
            index = scored[place]
            answers[index] = (score.logprob, score.is_greedy)
            self._remember("loglikelihood", requests[index][0], answers[index])

        self._score(fitted, answer, "loglikelihood", disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text in nats, every token predicted once."""
        self.statistics.requests["loglikelihood_rolling"] += len(requests)
        with self.statistics.timed("encode"):
            windows = self._encoder.rolling_windows_all(
                [request.args[0] for request in requests], self.max_length
            )
        owners = [index for index, own in enumerate(windows) for _ in own]
        missing = [len(own) for own in windows]
        totals = [0.0] * len(requests)
        self.statistics.note("the text has no tokens; scored 0", missing.count(0))
        for request, own in zip(requests, windows, strict=True):
            if not own:
                self._remember("loglikelihood_rolling", request.args, 0.0)

        def add(place: int, score: Score) -> None:
            index = owners[place]
            totals[index] += score.logprob
            missing[index] -= 1
            if missing[index] == 0:
                self._remember("loglikelihood_rolling", requests[index].args, totals[index])

        self._score([window for own in windows for window in own], add, "loglikelihood_rolling", disable_tqdm)
        return totals

    def count_rolling_tokens(self, text: str) -> int:
        """How many tokens `loglikelihood_rolling` predicts of a text."""
        windows = self._encoder.rolling_windows(text, self.max_length)
        return sum(len(window.continuation_ids) for window in windows)

    def _score(
        self,
        requests: Sequence[ScoringRequest],
        on_score: Callable[[int, Score], None],
        name: str,
        disable_tqdm: bool,
    ) -> None:
        """Have the engine score requests, count what it costs."""
        if not requests:
            return
        check_ids((ids for one in requests for ids in (one.context_ids, one.continuation_ids)), self.loaded)
        statistics = self.statistics
        with statistics.timed("self_test"):
            scorer = self._ready_scorer()
        with statistics.timed("plan"):
            plan = scorer.plan(requests, self._most_rows)
        statistics.count_plan(plan)
        undefined = 0

        def check(index: int, score: Score) -> None:
            nonlocal undefined
            statistics.mark(FIRST_BATCH)
            undefined += math.isnan(score.logprob)
            on_score(index, score)

        with statistics.timed("score"), TokenProgress(name, plan.planned_tokens, disable_tqdm) as progress:
            scorer.run(plan, requests, check, progress.add)
        if undefined == len(requests):
            raise ModelError(
                f"every log-probability of {self.loaded.source} is NaN: its weights are damaged, or overflow in "
                f"{self.loaded.dtype} (try --dtype float32)"
            )
        statistics.note("the log-probability is not a number; the model's weights may be damaged", undefined)

    def _ready_scorer(self) -> Scorer:
        """A scorer of the model as it is now: modules may have been replaced since the last call."""
        model = self.loaded.model
        modules = list(model.modules())
        known = self._scored_modules
        if (
            self._scorer is None
            or len(known) != len(modules)
            or any(one is not other for one, other in zip(known, modules, strict=True))
        ):
            head, layer = self._new_heads()
            self._scorer = Scorer(model, head, sharing_of(self.loaded, head), layer)
            self._decoder = None
            self._scored_modules = modules
        return self._scorer

    def _ready_decoder(self) -> Decoder:
        """The same for decoding."""
        sharing = self._ready_scorer().sharing
        if self._decoder is None:
            self._decoder = Decoder(
                self.loaded.model,
                sharing,
                speculate=self._speculate,
                find_decoding=lambda: decoding_of(self.loaded, sharing),
                counts=self.statistics.decoding,
            )
        return self._decoder

    def _new_heads(self) -> tuple[RowHead, Head | None]:
        """The model's head, and its output layer where it is multiplied without logits."""
        head = RowHead(self.loaded.model, config.LOGITS_BYTES)
        return head, output_layer(self.loaded.model, head) if self._low_memory_head else None

    # ---------------------------------------------------------------- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that the model continues each prompt with, up to the first stop sequence."""
        self.statistics.requests["generate_until"] += len(requests)
        asked = self._generation_requests([request.args for request in requests])
        waiting: dict[GenerationRequest, list[int]] = {}
        for index, request in enumerate(asked):
            waiting.setdefault(request, []).append(index)
        distinct = list(waiting)
        answers = [""] * len(requests)
        unfinished = 0

        def answer(place: int, generation: Generation) -> None:
            nonlocal unfinished
            for index in waiting[distinct[place]]:
                answers[index] = generation.text
                unfinished += generation.unfinished_thinking
                self._remember("generate_until", requests[index].args, generation.text)
            progress.drop(distinct[place].max_tokens - generation.num_tokens)

        check_ids((max(request.prompt_ids) for request in distinct), self.loaded)
        prompt_tokens = sum(len(request.prompt_ids) for request in distinct)
        limit = prompt_tokens + sum(request.max_tokens for request in distinct)
        with self.statistics.timed("self_test"):
            decoder = self._ready_decoder()
            _ = decoder.decoding  # tested now rather than while the clock of generation runs
        with (
            self.statistics.timed("generate"),
            TokenProgress("generate_until", limit, disable_tqdm) as progress,
        ):
            decoder.run(
                distinct,
                batch_size=self._most_rows,
                decode=self._encoder.decode,
                eos_token_ids=frozenset(self.loaded.tokenizer.eos_token_ids),
                on_generation=answer,
                on_tokens=progress.add,
                thinking=self._thinking,
            )
        self.statistics.note(
            "the token limit came inside the thinking section; the answer is empty", unfinished
        )
        return answers

    def _generation_requests(
        self, arguments: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[GenerationRequest]:
        """Prompts with their limits, in the order asked."""
        limits = GenerationLimits(
            max_length=self.max_length,
            max_gen_toks=self.max_gen_toks,
            seed=self.seed,
            eos_text="" if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id]),
            thinking=self._thinking,
        )
        with self.statistics.timed("encode"):
            fitted = generation_requests(arguments, self._encoder, limits)
        self.statistics.note(
            "the prompt and its answer do not fit; prompt truncated on the left", fitted.num_truncated
        )
        self.statistics.note(
            "max_gen_toks is as large as the window; the answer's limit was lowered", fitted.num_shortened
        )
        return fitted.requests

    def _remember(self, kind: str, arguments: Any, answer: Any) -> None:
        """Tell lm-eval's response cache, when there is one; damaged answers are not to be met again."""
        if arguments is not None and not _is_nan(answer):
            self.cache_hook.add_partial(kind, arguments, answer)  # type: ignore[attr-defined]  # from lm_eval's LM

    # ---------------------------------------------------------------- from lm-eval's command line

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> MLXEvalLM:
        """Load a model as `--model_args pretrained=…,dtype=…` names it."""
        from mlx_eval.harness.register import backend_from_arguments

        extra = {key: value for key, value in (additional_config or {}).items() if value is not None}
        return backend_from_arguments(cls, {**arg_dict, **extra})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> MLXEvalLM:
        """Load a model as `--model_args pretrained=…,dtype=…` names it."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)


def _is_nan(answer: Any) -> bool:
    """Whether a log-probability, alone or with its is_greedy, is not a number."""
    number = answer[0] if isinstance(answer, tuple) else answer
    return isinstance(number, float) and math.isnan(number)


@functools.cache
def bind(cls: type) -> type:
    """`cls` with lm-eval's `TemplateLM` as a further base.

    Raises:
        ImportError: lm_eval is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "lm_eval":
            raise
        raise MissingDependencyError("lm-eval", "MLXEvalLM", "harness") from error
    if issubclass(cls, TemplateLM):
        return cls
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls, TemplateLM), exec_body=lambda body: body.update(namespace))

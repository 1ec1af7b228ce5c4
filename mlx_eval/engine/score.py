"""Log-probabilities of many requests with one model: plans, runs, and tries again with less when memory runs out.

Knows token ids and the model; knows nothing of text, tasks or lm-eval.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

import mlx.core as mx
from mlx import nn
from mlx_eval_kernels import Head

from mlx_eval import config
from mlx_eval.engine import budget
from mlx_eval.engine.batches import Limits, ScoringPlan
from mlx_eval.engine.execute import Executor, ModelCallError, OnScore, OnTokens, Tally
from mlx_eval.engine.forest import num_input_tokens
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.engine.sharing import WAYS, ModelSharing, describe, find_sharing
from mlx_eval.errors import OutOfMemoryError
from mlx_eval.models.head import RowHead
from mlx_eval.records import Score, ScoringRequest

logger = logging.getLogger(__name__)

UNDEFINED: Final = Score(math.nan, is_greedy=False)
"""The answer of a model that computes NaN."""


class Scorer:
    """Computes log-probabilities with one model."""

    def __init__(
        self,
        model: nn.Module,
        head: RowHead | None = None,
        sharing: ModelSharing | None = None,
        output_layer: Head | None = None,
    ) -> None:
        """Prepare `model` for scoring.

        Args:
            model: an mlx-lm model.
            head: of the same model; None: it is made.
            sharing: what the model allows, from an earlier self-test; None: it is tested now.
            output_layer: of the same model, for scores without logits; None: `head` makes logits.
        """
        self._model = model
        self._head = RowHead(model, config.LOGITS_BYTES) if head is None else head
        self.sharing = find_sharing(model, self._head) if sharing is None else sharing
        """How far the model's rows may share prefixes and batches."""
        self._output_layer = output_layer

    def plan(self, requests: Sequence[ScoringRequest], batch_size: int | None = None) -> ScoringPlan:
        """Plan the batches that answer `requests`.

        Args:
            requests: in any order.
            batch_size: the most rows computed together; None: as many as memory allows.
        """
        limits = budget.scoring_limits(self.sharing.cache, batch_size)
        return plan_scoring(requests, limits, self.sharing.sharing, self.sharing.cache)

    def run(
        self,
        plan: ScoringPlan,
        requests: Sequence[ScoringRequest],
        on_score: OnScore,
        on_tokens: OnTokens = lambda count: None,
    ) -> None:
        """Compute `plan` over `requests`.

        When memory runs out, what is left is planned again with half of everything. A request whose answer is no
        number is computed once more by itself, since NaN spreads to whatever shares a row with it.

        Args:
            plan: made from the same requests.
            requests: as given to the planner.
            on_score: called once for each request index, as soon as its last batch is done.
            on_tokens: called with the number of tokens just computed, padding aside; those computed again after
                memory ran out count again.

        Raises:
            OutOfMemoryError: there is not enough for one row.
        """
        undefined: list[int] = []

        def note(index: int, score: Score) -> None:
            if math.isnan(score.logprob):
                undefined.append(index)
            else:
                on_score(index, score)

        with budget.wired(self._model):
            self._run(plan, requests, note, on_tokens)
            if undefined:
                self._run_undefined(undefined, requests, plan.limits, on_score)

    def _run_undefined(
        self, undefined: Sequence[int], requests: Sequence[ScoringRequest], limits: Limits, on_score: OnScore
    ) -> None:
        """Compute requests once more, each by itself.

        Where all are undefined and the shortest stays so, the model is damaged, and the others are not tried.
        """
        shortest, *others = sorted(undefined, key=lambda index: num_input_tokens(requests[index]))
        score = self._alone(requests[shortest], limits)
        on_score(shortest, score)
        is_damaged = len(undefined) == len(requests) and math.isnan(score.logprob)
        for index in others:
            on_score(index, UNDEFINED if is_damaged else self._alone(requests[index], limits))

    def _alone(self, request: ScoringRequest, limits: Limits) -> Score:
        """The score of one request that shares nothing."""
        plan = plan_scoring([request], limits, self.sharing.sharing, self.sharing.cache)
        found = [UNDEFINED]
        self._run(plan, [request], found.__setitem__, lambda count: None)
        return found[0]

    def _run(
        self, plan: ScoringPlan, requests: Sequence[ScoringRequest], on_score: OnScore, on_tokens: OnTokens
    ) -> None:
        """Compute a plan; with ever less at once while memory runs out, and more slowly where the model refuses."""
        left = list(range(len(requests)))
        while left:
            asked = [requests[index] for index in left]
            tally = Tally(asked, lambda place, score, left=left: on_score(left[place], score))  # type: ignore[misc]
            limits = plan.limits
            try:
                Executor(
                    self._model,
                    self._head,
                    self.sharing.caches(self._model),
                    plan=plan,
                    requests=asked,
                    tally=tally,
                    on_tokens=on_tokens,
                    output_layer=self._output_layer,
                ).run()
                return
            except ModelCallError as error:
                self._share_less(error)
            except RuntimeError as error:
                limits = _less(limits, error)
            left = [index for place, index in enumerate(left) if tally.missing[place]]
            mx.clear_cache()
            plan = plan_scoring(
                [requests[index] for index in left], limits, self.sharing.sharing, self.sharing.cache
            )

    def _share_less(self, error: ModelCallError) -> None:
        """Take the next way that holds, since the model has refused a batch that the self-test did not foresee."""
        way = self.sharing.way
        if way == WAYS[-1]:
            assert error.__cause__ is not None
            raise error.__cause__
        self.sharing = find_sharing(self._model, self._head, after=way)
        logger.warning(
            "the model refuses a batch (%s): going on with %s", error.__cause__, describe(self.sharing.way)
        )


def _less(limits: Limits, error: RuntimeError) -> Limits:
    """Half of what did not fit.

    Raises:
        RuntimeError: it was something else.
        OutOfMemoryError: there is no less.
    """
    if not budget.is_out_of_memory(error):
        raise error
    less = limits.halved()
    if less == limits:
        raise OutOfMemoryError(
            "memory holds the model, but not one row of these requests beside it: "
            "give a smaller --max_length, or quantise the model (--quantize 4)"
        ) from error
    logger.warning(
        "memory ran out: going on with batches of %d tokens in at most %d rows",
        less.batch_tokens,
        less.max_rows,
    )
    return less

"""A backend that answers nothing: lm-eval makes its requests, and what they would cost is noted.

Knows the backend and the planner. It takes the place of the real one in `LmEvalAdapter`, so that prompts, shots,
templates and limits are those of the run that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mlx_eval.engine import budget
from mlx_eval.engine.batches import ScoringPlan
from mlx_eval.engine.plan import plan_prompts, plan_scoring
from mlx_eval.engine.sharing import ModelSharing
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.harness.wrapping import check_ids
from mlx_eval.records import Score, ScoringRequest

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from mlx_eval.models.loaded import LoadedModel

PLACEHOLDER: Final = Score(-1.0, is_greedy=False)


@dataclass(frozen=True, slots=True)
class PlannedScoring:
    """The scoring requests of one kind."""

    kind: str
    """lm-eval's request type."""
    requests: tuple[ScoringRequest, ...]
    plan: ScoringPlan


@dataclass(frozen=True, slots=True)
class PlannedGeneration:
    """The prompts to be continued."""

    num_requests: int
    prompt_tokens: int
    unique_tokens: int
    """The same where each common beginning counts once."""
    max_tokens: int
    """Of all answers together, if none ends before its limit."""


class PlanningLM(MLXEvalLM):
    """Plans every request and answers with a placeholder."""

    def __init__(
        self, model: LoadedModel, sharing: ModelSharing, *, reserved_bytes: int = 0, **options: Any
    ) -> None:
        """Wrap a model, whose weights are not used.

        Args:
            model: from `load_model` or `load_outline`.
            sharing: what it allows.
            reserved_bytes: memory that its weights will take, where they are not loaded.
            options: as for `MLXEvalLM`.
        """
        super().__init__(model, **options)
        self.scoring: list[PlannedScoring] = []
        self.generation: PlannedGeneration | None = None
        self._sharing = sharing
        self._reserved_bytes = reserved_bytes

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: no results are kept."""
        return {}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Count tokens; the answers are empty."""
        asked = set(self._generation_requests([request.args for request in requests]))
        check_ids((max(request.prompt_ids) for request in asked), self.loaded)
        past = [request.prompt_ids[:-1] for request in asked if len(request.prompt_ids) > 1]
        forest = plan_prompts(past, budget.scoring_limits(self._sharing.cache), self._sharing.sharing)
        self.generation = PlannedGeneration(
            num_requests=len(requests),
            prompt_tokens=sum(len(request.prompt_ids) for request in asked),
            unique_tokens=forest.unique_tokens + len(asked),
            max_tokens=sum(request.max_tokens for request in asked),
        )
        return [""] * len(requests)

    def _score(
        self,
        requests: Sequence[ScoringRequest],
        on_score: Callable[[int, Score], None],
        name: str,
        disable_tqdm: bool,
    ) -> None:
        """Plan; the scores are placeholders."""
        if not requests:
            return
        check_ids((ids for one in requests for ids in (one.context_ids, one.continuation_ids)), self.loaded)
        sharing = self._sharing
        limits = budget.scoring_limits(sharing.cache, self._most_rows, reserved_bytes=self._reserved_bytes)
        plan = plan_scoring(requests, limits, sharing.sharing, sharing.cache)
        self.scoring.append(PlannedScoring(name, tuple(requests), plan))
        for index in range(len(requests)):
            on_score(index, PLACEHOLDER)

    def _remember(self, kind: str, arguments: Any, answer: Any) -> None:
        """No answer is kept."""

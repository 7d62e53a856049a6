"""The prompts of a run, from the user's file or from this package."""

from __future__ import annotations

from eagle3pack.engine.prompts import read_prompts, shipped_prompts
from eagle3pack.errors import UsageError
from eagle3pack.verify.smoke.measure import Question
from eagle3pack.verify.smoke.options import SmokeOptions
from eagle3pack.verify.smoke.protocol import Conversation
from eagle3pack.verify.smoke.report import Dataset


def load_questions(options: SmokeOptions) -> tuple[tuple[Question, ...], Dataset]:
    """Read, select and limit the prompts.

    Raises:
        InputError: the file cannot be read as prompts.
        UsageError: a category that it does not have, or nothing is left.
    """
    prompts = shipped_prompts() if options.prompts is None else read_prompts(options.prompts)
    chosen = prompts.select(limit=options.limit, categories=options.categories)
    if not chosen.prompts:
        raise UsageError("no prompt is left", where="--limit")
    questions = tuple(
        Question(prompt.category, Conversation(prompt.turns, prompt.token_ids)) for prompt in chosen.prompts
    )
    categories = tuple(question.category for question in questions)
    return questions, Dataset(options.dataset_name or chosen.name, chosen.sha256, categories)

"""Completions with what a scorer would say of them."""

from engine.evaluation.results import Judged


def judged(answer, truth, tokens=1, **changes):
    """A completion that gives `answer`, or none."""
    values = {
        "text": "no idea" if answer is None else f"so\n#### {answer}",
        "tokens": tokens,
        "truncated": False,
        "correct": answer == truth,
        "score": float(answer == truth),
        "answer": answer,
        "vote": answer,
        "well_formed": answer is not None,
        "failed": False,
    }
    return Judged(**(values | changes))

"""Let models answer some problems again, and hold an evaluation's recorded verdicts against it.

A manifest only says that its files are those that were digested: whoever can write the store can
write an evaluation. What the models answer is evidence of its own.
"""

import secrets
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from engine.config import RecheckConfig
from engine.console import human_time, say
from engine.errors import LineageError
from engine.evaluation.summary import rows_of_set
from engine.promotion.gate import Evaluated
from engine.promotion.rules import RuleOutcome
from engine.storage.artifacts import local_path, verify
from engine.tracking import Tracker
from engine.tracking.model_versions import ModelVersion, intact_copy

SIGNIFICANCE = 0.01  # how rarely an honest evaluation is refused
ROUNDING_FLOAT32, ROUNDING_BFLOAT16 = 0.001, 0.02
LARGEST_ON_CPU = 2_000_000_000  # parameters of a model that a gate without a GPU decodes


def baseline_model(
    new: Evaluated, tracker: Tracker, champion: ModelVersion | None, scratch: Path
) -> Path:
    """Return the folder of the champion, or of what the new model was compared with; re-hashed."""
    if champion is not None:
        return intact_copy(tracker, champion, scratch)
    start = next((p for p in new.manifest.parents if p.name == "warm_start"), None)
    if start is None:
        raise LineageError(
            f"evaluation {new.manifest.digest[:12]} names no warm_start as parent; evaluate again"
        )
    folder = local_path(start.uri)
    if verify(folder).digest != start.digest:
        raise LineageError(
            f"{start.uri} is not the evaluated {start.kind} {start.digest[:12]}; evaluate again"
        )
    return folder


def draw(sizes: Mapping[str, int], problems: int) -> tuple[int, dict[str, list[int]]]:
    """Draw positions of at most `problems` of each set, by a seed that nobody knows before."""
    seed = secrets.randbelow(1 << 31)
    generator = np.random.default_rng(seed)
    picks = {
        name: sorted(generator.permutation(size)[:problems].tolist())
        for name, size in sizes.items()
    }
    return seed, picks


def explained(verdicts: int, rounding: float) -> int:
    """Return how many of `verdicts` may turn before rounding does not explain it.

    An exact binomial test (Clopper and Pearson, Biometrika 26:404, 1934) of "rounding turns a share
    of at most `rounding` of all verdicts": the smallest k with P(X > k) ≤ SIGNIFICANCE, X binomial.
    """
    from scipy.stats import binom  # takes a second

    return int(binom.isf(SIGNIFICANCE, verdicts, rounding))


def recheck(
    new: Evaluated,
    before: pd.DataFrame | None,
    problems: Mapping[str, pd.DataFrame],
    rules: RecheckConfig,
    tracker: Tracker,
    champion: ModelVersion | None,
    scratch: Path,
) -> tuple[RuleOutcome, dict[str, object]]:
    """Decode a sample of the problems greedily with both models; return the outcome and its record.

    before: the rows of the baseline, which is the champion or what the new model was compared with;
    None: the new model alone answers. problems: RL rows by evaluation set, those that decide.

    A verdict has turned where the recorded one speaks for the new model (right of its own, wrong of
    the baseline's) and the one of now doesn't. More of them than `explained` fail the evaluation,
    and so does one of the same completion, and a model that needs a GPU where there is none.
    """
    import torch  # takes seconds

    from engine.evaluation.scoring import answer_greedily
    from engine.models import parameter_count, text_config

    started, on_gpu = time.perf_counter(), torch.cuda.is_available()
    seed, picks = draw({name: len(rows) for name, rows in problems.items()}, rules.problems)
    drawn = {name: problems[name].iloc[where] for name, where in picks.items()}
    turned = same = verdicts = 0
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        models = [(new.policy, new.rows, True)]  # and the verdict that speaks for the new model
        if before is not None:
            models.append((baseline_model(new, tracker, champion, Path(folder)), before, False))
        largest = max(parameter_count(text_config(model)) for model, *_ in models)
        if not on_gpu and largest > LARGEST_ON_CPU:
            sentence = (
                f"promote.recheck decodes {largest / 1e9:.1f} billion parameters, and this machine "
                "has no GPU; promote on a profile with one, or set promote.recheck.problems=0"
            )
            return RuleOutcome("recheck", False, None, None, sentence), {}
        say(f"promotion: {len(models)} models answer {rules.problems} problems again")
        for model, rows, flattering in models:
            recorded = pd.concat([rows_of_set(rows, name).iloc[picks[name]] for name in picks])
            answers = answer_greedily(
                model, drawn, new.evaluate, max_response_length=new.data.max_response_length,
                max_prompt_length=new.data.max_prompt_length, seed=new.seed,
            )  # fmt: skip
            verdicts += len(answers)
            columns = recorded["greedy_correct"], recorded["greedy_completion"]
            for verdict, text, answer in zip(*columns, answers, strict=True):
                if verdict == flattering and answer.correct != flattering:
                    turned += 1
                    same += text == answer.text
    say(f"promotion: answered again in {human_time(time.perf_counter() - started)}")
    rounding = rules.rounding
    if rounding is None:
        rounding = ROUNDING_BFLOAT16 if on_gpu else ROUNDING_FLOAT32
    most = explained(verdicts, rounding)
    passed = turned <= most and not same
    sentence = (
        f"of {verdicts} verdicts that were checked by decoding again (seed {seed}), {turned} "
        f"differ in the new model's favour, and rounding explains up to {most}"
    )
    if not passed:
        sentence += f"; {same} of the same completion" * bool(same)
        sentence += "; evaluate the model again, on the profile that promotes it"
    record = {"seed": seed, "problems": picks, "verdicts": verdicts, "turned": turned}
    return RuleOutcome("recheck", passed, float(turned), float(most), sentence), record

"""The membership attack of Flemings et al. 2025 (section 5.5, appendix D.1, table 2), on labels.

For public data alone: it shows answers that are not private.

The game is that of `langchain_dpicl.lab.audit.membership` with answers of one token, the first of a label: one record
is a member, the others are not, and the attacker asks each one's query. Its score ``likelihood`` is the probability of
the record's own label, as theirs; it sees the law, of which the guarantee says nothing. ``tokens`` sees the released
label. Every record takes the member's place in turn, in several sets of fresh records.

Known of theirs are the score, the two tasks (AG News, TREC) and 51 records in 5 sets. Their prompt, and how many
demonstrations their mixture has, are not, so AUCs are compared by their size alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import DemonstrationTemplate
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.audit.membership import MembershipResult, run_membership
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.tasks import SEPARATOR, ClassificationTask, Task
from langchain_dpicl.privacy.checks import whole


def run_label_membership(
    model: TransformersLogits,
    task: Task,
    rows: Sequence[Row],
    *,
    sets: int = 5,
    epsilons: Sequence[float] = (1.0, 3.0, 8.0),
    delta: float = 1e-5,
    trials: int | None = None,
    against: int = 50,
    shots: float = 4.0,
    owners: int = 1000,
    plays: int = 10,
) -> list[MembershipResult]:
    """Play the game of `run_membership` with labels, in ``sets`` sets of fresh records, and return their means.

    In a set ``trials`` records take the member's place in turn, by default all ``against + 1``. A plan counts one label
    for each of these. The other parameters are those of `run_membership`, as are the errors; `InvalidParameter` for a
    task without labels.
    """
    if not isinstance(task, ClassificationTask):
        raise InvalidParameter("task", task.name, "a task with labels")
    found = [
        run_membership(
            model,
            [{"input": task.shape.clean(row.input), "output": row.output} for row in rows],
            label_template(task),
            epsilons=epsilons,
            delta=delta,
            trials=against + 1 if trials is None else trials,
            against=against,
            shots=shots,
            owners=owners,
            max_tokens=1,
            plays=plays,
        )
        for _ in range(whole("sets", sets))
    ]
    return [pooled(same) for same in zip(*found, strict=True)]


def label_template(task: ClassificationTask) -> DemonstrationTemplate:
    """Return the layout of a demonstration and of a query, each with the task's instruction before it."""
    query = task.shape.prefix([]) + task.shape.query
    return DemonstrationTemplate(f"{query} {{output}}{SEPARATOR}", query)


def pooled(results: Sequence[MembershipResult]) -> MembershipResult:
    """Return the mean of one attack in several independent sets; its interval has 1.96 standard errors each way."""
    auc = fmean(each.auc for each in results)
    error = math.sqrt(sum(each.error**2 for each in results)) / len(results)
    return replace(
        results[0],
        auc=auc,
        error=error,
        low=max(0.0, auc - 1.96 * error),
        high=min(1.0, auc + 1.96 * error),
        trials=sum(each.trials for each in results),
    )

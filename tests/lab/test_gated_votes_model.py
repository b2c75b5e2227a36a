"""The table of a gated study with a model in process: single examples say what they say in a prompt read whole."""

from __future__ import annotations

import gated_votes
import numpy as np
import pytest
from gated_votes import BatchedReader

from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.lab.evaluation.batches import label_reader
from langchain_dpicl.lab.evaluation.tasks import Shape

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

LABELS = ("Animal", "Plant")
EXAMPLES = [("a fox in the snow", "Animal"), ("an oak", "Plant"), ("three small birds on a long wire", "Animal")]


@pytest.mark.parametrize("instruction", ["", "Thing: a red rose\nKind: Plant\n\nThing: an old horse\nKind: Animal"])
def test_scores_of_single_examples_are_those_of_a_label_pass(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_votes, "_KEPT", 12)  # tokens: so few that examples are forgotten and read again
    shape = Shape(instruction, "Thing: {input}\nKind:")
    model = TransformersLogits("smollm2-135m-instruct", threads=1)
    reader = BatchedReader(model, LABELS, shape)
    whole = label_reader(model, LABELS, shape)
    for query in ("a grey cat", "some moss on a stone"):
        found = np.array([*(reader.scores([each], query)[0] for each in EXAMPLES), reader.scores([None], query)[0]])
        assert found == pytest.approx(whole([*([each] for each in EXAMPLES), []], query), rel=1e-3)
        assert reader.scores([None, *EXAMPLES], query)[1:] == pytest.approx(found[:-1], rel=1e-3)
    assert len(reader._known) == len(EXAMPLES)  # those of the last call are needed, however many

"""A LoRA for samples changes each layer once, whatever the training has put beside the layer."""

from pathlib import Path

import pytest

from library.methods.sample_lora import SampleLora
from tests.methods.test_assistant import STRENGTH, WAYS, assistant, prepared  # noqa: F401 - a fixture

CASES = {"lora": {}, "assistant": {}, **{name: WAYS[name] for name in ("lycoris", "lycoris, bypassing")}}


@pytest.mark.parametrize("way", CASES)
def test_a_lora_for_samples_changes_every_layer(way, assistant):  # noqa: F811
    if "lycoris" in way:
        pytest.importorskip("lycoris")
    adding, merging = assistant("flux")
    path = Path(adding["assistant_lora"].rpartition(":")[0])
    beside = adding if way == "assistant" else {}
    plain, expected = prepared("flux", **CASES[way])[1]()[0], prepared("flux", **CASES[way], **merging)[1]()[0]
    trainable, results = prepared("flux", **CASES[way], **beside)
    if way == "assistant":
        trainable.method.assistant.is_on = False
    with SampleLora({path: STRENGTH}, trainable.family).applied(trainable.components):
        found = results()[0]
    assert float((found - expected).norm() / (expected - plain).norm()) < 1e-3
    assert (results()[0] == plain).all()

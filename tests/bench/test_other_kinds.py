"""Trainings of a word and of LLLite as they are measured: a step learns, and has what such a step has."""

import pytest
import torch

from library.bench import prepared_model, subjects

CPU = torch.device("cpu")


@pytest.mark.parametrize("script", ["sdxl_train_textual_inversion", "sdxl_train_control_net_lllite"])
def test_a_step_is_one_of_its_kind(script):
    subject = subjects.FamilySubject(script, {"learning_rate": 1e-2}, "tiny")
    config = subject.config({})
    with prepared_model.open_prepared(subject, config, CPU, 64) as ready:
        trainable = ready.trainable
        before = [p.detach().clone() for p in trainable.method.parameters()]
        assert float(ready.step()) > 0
        now = trainable.method.parameters()
        assert any(not torch.equal(p, old) for p, old in zip(now, before, strict=True))
        own = {id(p) for p in now}
        assert not [p for p in trainable.components.denoiser.parameters() if p.requires_grad and id(p) not in own]

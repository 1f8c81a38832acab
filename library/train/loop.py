"""The training, read from top to bottom."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from library import data, families, memory, methods
from library.compiler import torch_settings
from library.memory import attention
from library.memory.quantization import fp8_storage
from library.train import autotune, compiling, loss
from library.train.checkpointer import Checkpointer
from library.train.run import Run
from library.train.samples import SampleRunner
from library.train.updates import Updates
from library.train.validation import Validation


def run_training(config: Any, remarks: Sequence[str] = (), notes: Sequence[str] = ()) -> Path:
    """Train what `config` describes and return the file that came of it.

    `remarks` and `notes` go into the run's record; the notes have been said before.
    """
    with torch_settings.settings_kept(), attention.settings_kept(), Run(config) as run:
        run.begin(remarks, notes)
        family = families.of(config)

        # What to learn from. Encoded once, then what encodes it leaves.
        run.phase("reading the data set")
        images = data.scan(config)
        run.phase("loading the model")
        with compiling.getting_ready(run):
            parts = family.load(run.storage, run.compute)
        fp8_storage.store_encoders(parts.encoders, config)
        previews = SampleRunner(family, parts, config, run)
        previews.remember()
        data.encode(images, family, parts, config, run)
        batches = data.batches(images, config, run.seed, run.rank, run.ranks)
        run.plan(batches, data.summary(images))

        # What learns: the whole model, or adapters inside it. Then make it fit and fly.
        method = methods.attach(parts, family, config)
        run.place(parts, method, keep_vae=previews.wanted)
        config = autotune.best_config(batches, family, parts, method, run)
        memory.prepare_encoders(parts.encoders, method.trained_parts, config)
        texts = any(map(method.trained_parts.get, parts.encoders))
        sizes, log = batches.kinds(), run.compile_log
        prepared = memory.prepare(parts.denoiser, family, config, run.device, sizes, texts, log)
        log.attention, log.fallback = prepared.attention, prepared.not_compiled
        if prepared.not_compiled:
            run.warn(f"Not compiled: {prepared.not_compiled}")
        updates = Updates(method, config, run)
        run.distribute(parts, method)
        method.train()
        checkpointer = Checkpointer(run, family, method, updates, batches, images)
        validation = Validation(images, family, parts, method, run)
        checkpointer.resume()
        compiling.ahead(batches, family, parts, method, run)
        previews.at_first()

        for window in run.steps(batches):  # starts where the resumed state stopped
            wrong = run.learn(window, lambda batch: loss.of(batch, family, parts, method, run))
            if wrong is None:  # the step is dropped: somebody wants an end now
                break
            norms = updates.apply(wrong)
            run.log(wrong, norms, updates.rates())

            # Once in a while: measure it, look at it, keep it.
            validation.when_due()
            previews.when_due()
            checkpointer.when_due()

        return checkpointer.final()

"""The training, to be read from top to bottom."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from library import data, families, methods
from library.compiler import gpu_memory, prewarm, torch_settings
from library.compiler.log import CompileLog
from library.config.problems import Message
from library.config.run_config import RunConfig
from library.data import encoding, held_out, text_encoding
from library.data.batch import Batch
from library.data.images import ImageSet
from library.data.loading import Batches, kinds_of
from library.distributed.world import World
from library.families.base import Family, ModelComponents
from library.families.shared import file_identity
from library.imports import without_collecting
from library.memory import attention, placement
from library.memory.prepare import Prepared, prepare_denoiser, prepare_encoders
from library.memory.quantization import fp8_storage
from library.methods import base_weights
from library.train import beside, utilization
from library.train.compiling import autotune, matmul_formats
from library.train.compiling.parallel_compile import ParallelCompiler
from library.train.compiling.precompile import Precompiler
from library.train.compiling.trial_passes import TrialPasses
from library.train.evaluation.early_stop import EarlyStop
from library.train.evaluation.samples import SampleRunner
from library.train.evaluation.validation import ValidationRunner
from library.train.journal import Journal
from library.train.saving import base_files, resume_state
from library.train.saving.checkpointer import Checkpointer
from library.train.step import rng
from library.train.step.clock import Clock
from library.train.step.loss import LossFunction
from library.train.step.lost_seconds import GENERATING, SAVING, VALIDATING
from library.train.step.step_metrics import BatchLoss
from library.train.step.stepper import Stepper
from library.train.step.updates import Updates
from library.train.step_log import StepLog
from library.train.stop_requests import WorkCancelled
from library.train.training import Training

NO_UTILIZATION = "the utilisation of the GPU is not logged ({why})"


def run_training(
    config: RunConfig, remarks: Sequence[Message] = (), notes: Sequence[Message] = (), began: float = 0
) -> Path:
    """Run the training that `config` describes; return the path of the final file.

    `remarks` and `notes` go into the run's record; the notes are already printed. `began` is the start of the process.
    """
    world = World(config)
    seed = rng.seed_everything(config.steps.seed, world.ranks)
    with (
        torch_settings.keep_torch_settings(),
        attention.keep_attention_settings(),
        world,
        file_identity.watching(),
        Journal(config, world, seed, began) as journal,
        CompileLog(journal.on_graph) as compile_log,
        ParallelCompiler(world, journal) as parallel,
    ):
        journal.begin(remarks, notes)
        config = base_files.fetch(config, world, journal.phase)
        family = families.family_for(config)
        # The data set. It is encoded once; networks needed only for that are freed.
        journal.phase(Message("reading the data set"))
        images = data.scan(config)
        parallel.begin(config, kinds_of(images))
        components = open_training_model(family, world, journal)
        samples = SampleRunner(family, components, config, images)
        read_networks(components, family, config, samples.wanted)
        samples.encode_prompts(world, journal)
        encoding.encode_missing_caches(images, family, components, config, world, journal.phase)
        batches = Batches(images, config, seed, world.rank, world.ranks)
        batches.cut_text(*text_encoding.lengths(family, components))
        clock = start_clock(config, batches)
        describe_data(images, batches, clock, journal)

        # The trained weights: the whole model, or adapters inside it.
        read_weights(components, family, config, world, journal)
        method = methods.attach_method(components, family, config)
        world.place(components, method.differs, config.cache, keep_vae=samples.wanted)
        generators = rng.StepGenerators(seed, world.device, world.rank)
        compute_loss = LossFunction(family, components, method, config, world, generators, compile_log)
        fastest = matmul_formats.find_best_format(batches, compute_loss, world, journal)
        compute_loss = replace(compute_loss, config=fastest)
        choices = resume_state.resumed_choices(config)
        config = autotune.find_best_config(batches, compute_loss, clock, world, journal, choices)
        compute_loss = replace(compute_loss, config=config)
        journal.mark("attaching trained weights")

        # Storage, swapping, checkpointing and compilation of the denoiser; then the optimizer.
        prepare_encoders(components.encoders, method.trained_parts, config)
        text_learns, sizes = any(map(method.trained_parts.get, components.encoders)), batches.kinds()
        prepared = prepare_denoiser(components.denoiser, family, config, world.device, sizes, text_learns, compile_log)
        note_preparation(prepared, compile_log, journal)
        updates = Updates(method, config, world, seed, clock.total)
        method.train()
        precompiler = Precompiler(config, world, journal, prepared.plan, clock, choices, parallel)
        step_log = StepLog(config, clock, world, journal, precompiler)
        training = Training(world, journal, clock, batches, compute_loss, updates, step_log, choices, EarlyStop(config))
        with hold_memory(config, world), precompiler, step_log:
            return take_steps(training, precompiler, images, samples)


def open_training_model(family: Family, world: World, journal: Journal) -> ModelComponents:
    """Open the networks; their weights are read when needed."""
    journal.phase(Message("loading the model"))
    with without_collecting():
        components = family.load(world.storage_dtype, world.compute_dtype, deferring=True)
    file_identity.note_files(*components.deferred_files)
    return components


def read_networks(components: ModelComponents, family: Family, config: RunConfig, previews: bool) -> None:
    """Read the VAE and the text encoders if steps or previews use them."""
    base_weights.merge_when_read(components, family, config)
    fp8_storage.store_when_read(components, config)
    # Networks that only encode the data set stay deferred until something turns out not to be cached.
    if previews or not config.cache.latents:
        components.read_vae()
    if previews or not config.cache.text or methods.reads_encoders(config):
        components.read_encoders()


def start_clock(config: RunConfig, batches: Batches) -> Clock:
    """Return the clock of the training, and move `batches` to its start."""
    clock = Clock.of(config, len(batches))
    batches.go_to(clock.epoch, clock.in_epoch * config.steps.gradient_accumulation_steps)
    return clock


def describe_data(images: ImageSet, batches: Batches, clock: Clock, journal: Journal) -> None:
    """Record and log the numbers of images, batches and steps, and what is held out for validation."""
    journal.plan(clock, data.summarise_images(images), batches)
    if summary := held_out.held_out_by_folder(images):
        journal.say(str(summary))


def read_weights(
    components: ModelComponents, family: Family, config: RunConfig, world: World, journal: Journal
) -> None:
    """Read the denoiser's weights to where training needs them, after encoding has freed its networks."""
    journal.phase(Message("loading the model"))
    with prewarm.prewarm_before_steps(config, world.device), without_collecting():
        components.read_denoiser(placement.plan_placement(family, config, world.device))
    file_identity.check_watched_files()  # the files must not have changed since the caches were made from them
    journal.mark("reading the weights")


def note_preparation(prepared: Prepared, compile_log: CompileLog, journal: Journal) -> None:
    """Record the attention kernel of a prepared denoiser, and warn if it is not compiled."""
    compile_log.attention = prepared.attention
    if prepared.not_compiled:
        journal.warn(Message("Not compiled: {why}", why=prepared.not_compiled))
    journal.mark("moving to the device")


def hold_memory(config: RunConfig, world: World) -> AbstractContextManager[None]:
    # A step within the backward pass cannot be repeated with more memory, and whole models have large optimizers.
    by_allocator = bool(config.adapters) and not config.optim.stepped_early
    return gpu_memory.held_to(config.memory.gpu_memory_limit, world.device, by_allocator)


def take_steps(training: Training, precompiler: Precompiler, images: ImageSet, samples: SampleRunner) -> Path:
    """Take all steps; validate, sample and save when due. Return the path of the final file."""
    config, clock, journal = training.config, training.clock, training.journal
    compute_loss, updates = training.compute_loss, training.updates
    checkpointer, validation = Checkpointer(training, images), ValidationRunner(training, images)
    if config.steps.resume:
        resume_state.resume_training(Path(config.steps.resume), training)
    journal.mark("optimizer")
    meter, lost = training.step_log.meter, training.step_log.meter.lost
    samples.use_prepared(compute_loss.family, training.world.device, precompiler.plan)
    precompiler.prepare(TrialPasses(training.batches, compute_loss, training.world.device, meter.pause))
    precompiler.agree_on_recording(compute_loss.components.denoiser)
    journal.mark("compiling and recording")
    samples.at_first(training)
    journal.mark(GENERATING)
    validation.after_resume()
    journal.ready()

    accumulation = config.steps.gradient_accumulation_steps
    stepper = Stepper(training.batches, clock, training.generators, training.world, journal.requests, accumulation)
    for window in stepper:  # the batches of one optimizer step, from where the resumed state stopped
        journal.doing = Message("step {step}", step=clock.step)
        precompiler.switch_when_ready()
        try:
            numbers, losses = train_step(window, stepper, compute_loss, updates, precompiler, journal.has_curves)
        except WorkCancelled:  # stopped between two batches of the step, which is then taken back
            updates.zero_grad()
            stepper.drop_step()
            break
        training.step_log.push(numbers, losses, updates.rates(), stepper.timer.ended())

        # Save first, so that a failure in validation or sampling cannot lose trained weights.
        with lost.during(SAVING):
            checkpointer.when_due()
        with lost.during(VALIDATING):
            validation.when_due()
        with lost.during(GENERATING):
            samples.when_due(training)

    with lost.during(SAVING):
        if stepper.read_error:
            checkpointer.rescue(stepper.read_error)
        file = checkpointer.end()
    beside.attempt(lambda: log_utilization(training), NO_UTILIZATION, training)
    return file


def log_utilization(training: Training) -> None:
    """Log the model FLOPs utilization (MFU) of the steps on a GPU, if enough of them were timed."""
    seconds = training.step_log.meter.speed(training.clock.step).get("s_it")
    if not seconds or training.world.device.type != "cuda" or not training.world.main:
        return
    operations = utilization.step_operations(training.config, training.batches.kinds())
    reached = utilization.utilization(operations, seconds, training.world.device)
    if reached:
        training.journal.note(utilization=reached)
        training.journal.say(utilization.utilization_sentence(reached))


def train_step(  # noqa: PLR0913 - what takes a step, and what it learns from
    window: Sequence[Batch],
    stepper: Stepper,
    compute_loss: LossFunction,
    updates: Updates,
    precompiler: Precompiler,
    watched: bool = False,
) -> tuple[dict[str, Tensor], list[BatchLoss]]:
    """Take one optimizer step over the batches of `window`.

    Returns its numbers (mean loss of all processes, gradient norms) and the loss of each batch with its image files,
    all as 0-dim tensors on the device: nothing here synchronises. `watched` enables numbers that only trackers show. If
    compiling or recording fails, the pass is repeated without.
    """
    world, clock = stepper.world, stepper.clock

    def forward_backward() -> list[BatchLoss]:
        losses = []
        for number, batch in stepper.micro_batches(window, compute_loss.compile_log):
            terms = []
            for term, is_last in compute_loss.parts(batch):
                updates.expect_gradients(last=is_last and number == len(window))
                world.accelerator.backward(term / len(window))  # scaled in fp16
                terms.append(term.detach())
            losses.append((functools.reduce(torch.add, terms), batch.paths))
        return losses

    may_retry = precompiler.plan.active or world.device.type == "cuda"
    rng_before = rng.get_rng_state(world.device) if may_retry else None
    losses: list[BatchLoss] = []
    while not losses:
        try:
            losses = forward_backward()
        except Exception as error:
            if (
                rng_before is None
                or updates.gradients_sent
                or not precompiler.recover(error, compute_loss.components.denoiser)
            ):
                raise
        if rng_before and not losses:  # outside of the handler, whose exception keeps the failed pass' tensors alive
            updates.zero_grad()
            rng.set_rng_state(rng_before, world.device)  # the repeated pass draws the same numbers

    updates.average_gradients()
    loss, requests = stepper.average_loss(torch.stack([loss for loss, _ in losses]).mean())
    numbers = {"loss": loss, **updates.clip(clock.step - 1)}
    if updates.should_step(*numbers.values()):
        numbers |= updates.step(watched)
    numbers |= updates.limit_norms()
    updates.zero_grad()
    updates.average_weights(clock.step)
    return {**numbers, **requests}, losses

"""Caching without training: latents or text encoder outputs of a data set, stored beside its images."""

from library import data, families
from library.config.problems import Message, Report
from library.config.run_config import RunConfig
from library.data import encoding
from library.data.not_finite import NotFiniteError
from library.distributed.world import World
from library.families.shared import file_identity
from library.imports import without_collecting
from library.memory.quantization import fp8_storage
from library.methods import base_weights
from library.train import errors
from library.train.saving import base_files


def make_caches(config: RunConfig, report: Report) -> int:
    """Write the caches that the config enables; return the number of images.

    Each process makes its share; all are done on return. Valid caches are kept, so an interrupted run resumes. Raises
    ConfigError like a training.
    """
    with World(config) as world, file_identity.watching() as model_files:
        report_once = report if world.main else lambda phase, done, total: None  # the other processes are silent
        config = base_files.fetch(config, world, report_once)
        report_once(Message("reading the data set"), 0, 0)
        images = data.scan(config)
        report_once(Message("opening the model"), 0, 0)
        family = families.family_for(config)
        with without_collecting():
            components = family.load(world.storage_dtype, world.compute_dtype, deferring=True)
        model_files.note(components.deferred_files)
        base_weights.merge_when_read(components, family, config)
        fp8_storage.store_when_read(components, config)
        try:
            encoding.encode_missing_caches(images, family, components, config, world, report_once)
        except NotFiniteError as error:
            raise errors.damaged_model(error) from error
        model_files.check()
        return len({image.path for image in (*images.items, *(images.validation.items if images.validation else ()))})

"""`debug_dataset`: print the batches of a training. Loads no model and writes nothing."""

from collections.abc import Iterator

from library import data
from library.config.building import replace_options
from library.config.problems import counted, raise_if_any
from library.config.run_config import RunConfig
from library.data.images import ImageSet, summarise_images
from library.data.loading import Batches


def dataset_lines(config: RunConfig, seed: int) -> Iterator[str]:
    """Yield the data sets, their buckets, and every batch of the first epoch: sizes, final captions, weights.

    Raises ConfigError with every problem of the data.
    """
    config = replace_options(config, cache_info=False)  # cache_info would write files
    checked = data.check_data(config, config.grid)
    raise_if_any(checked.problems)
    images = data.scan(config)
    yield from (f"note: {warning}" for warning in checked.warnings)
    yield from [str(checked.masks)] if checked.masks else []
    yield from _sets(images)
    yield from _batch_lines(Batches(images, config, seed), config)
    if images.validation:
        yield f"used for validation: {len(images.validation)}"
        yield from (f"  {image.path}" for image in images.validation.items)


def _sets(images: ImageSet) -> Iterator[str]:
    counts = summarise_images(images)
    yield (
        f"{counted(counts['images'], 'image')} ({counts['regularisation']} of them regularisation), seen "
        f"{counted(counts['repeats'], 'time')} in {_batches_in(counts['batches_per_epoch'])} per epoch"
    )
    for number, dataset in enumerate(images.datasets):
        width, height = dataset.resolution or (0, 0)
        yield f"data set {number}: {width}x{height}, batches of {dataset.batch_size}"
        for subset in dataset.subsets:
            num_images = sum(image.dataset == number and image.subset is subset for image in images.items)
            source = subset.image_dir or subset.metadata_file
            role = ", regularisation" if subset.is_reg else ""
            yield f"  {source}: {counted(num_images, 'image')}, {counted(subset.num_repeats, 'time')}{role}"
        for row in (row for row in counts["buckets"] if row["dataset"] == number):
            width, height = row["size"]
            yield f"  bucket {width}x{height}: {counted(row['images'], 'image')}, {_batches_in(row['batches'])}"


def _batch_lines(batches: Batches, config: RunConfig) -> Iterator[str]:
    for draw in batches.draws(1):
        parts = list(batches.choices(draw))
        width, height = parts[0].image.fit.bucket
        yield f"batch {draw.index}: {width}x{height}"
        for part in parts:
            image = part.image
            facts = [f"{image.size[0]}x{image.size[1]}", f"scaled to {image.fit.resized[0]}x{image.fit.resized[1]}"]
            facts += ["mirrored"] * part.flip + [f"weight {part.weight:g}"] * (part.weight != 1)
            facts += ["with a mask"] * bool(image.mask_file or image.subset.alpha_mask)
            words = part.encoded if config.cache.text else part.caption
            yield f"  {image.path} ({', '.join(facts)})"
            yield f'    "{words}"'


def _batches_in(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"

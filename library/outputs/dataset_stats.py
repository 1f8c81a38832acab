"""Metadata of a file about its training data: counts, tags, buckets. Folder names only, never paths."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.run_config import RunConfig

SUBSET = (
    *("color_aug", "flip_aug", "random_crop", "shuffle_caption", "keep_tokens", "keep_tokens_separator"),
    *("secondary_separator", "enable_wildcard", "caption_prefix", "caption_suffix", "resize_interpolation"),
)


def dataset_stats(
    images: Any, config: RunConfig, batches_per_epoch: int, epochs: int, total_batch_size: int
) -> JsonObject:
    """Return metadata about the data by ss_ key without the prefix, values not yet text.

    `images` is the result of data.scan, `total_batch_size` counts all processes. With a dataset_config or several sizes
    there is one entry per data set; otherwise the figures of the only one are top-level, as in sd-scripts.
    """
    counts = {is_reg: sum(i.repeats for i in images.items if i.is_reg is is_reg) for is_reg in (False, True)}
    held_back = images.validation.items if images.validation else ()
    out = {
        "num_train_images": counts[False],
        "num_reg_images": counts[True],
        "num_validation_images": sum(i.repeats for i in held_back),
        "num_batches_per_epoch": batches_per_epoch,
        "num_epochs": epochs,
    }
    datasets = [_dataset_facts(images, position) for position in range(len(images.datasets))]
    # A folder of several data sets counts once, as its images have the same captions in each.
    out["tag_frequency"] = {
        folder: tags for facts in reversed(datasets) for folder, tags in facts["tag_frequency"].items()
    }
    if config.data.dataset_config or len(datasets) > 1:
        return out | {"datasets": datasets, "dataset_dirs": _learned_folders(images)}
    return out | _single_dataset_facts(images, datasets[0], total_batch_size)


def tag_frequency(items: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Return {folder name: {tag: number of images with it}}, tags in lower case."""
    counters: dict[str, Counter] = {}
    for image in items:
        tags = [tag.strip().lower() for tag in image.caption.split(",")]
        if any(tags):
            counters.setdefault(_folder(image), Counter()).update(tag for tag in tags if tag)
    return {folder: dict(counter) for folder, counter in counters.items()}


def _single_dataset_facts(images: Any, dataset: JsonMapping, total_batch_size: int) -> JsonObject:
    template = images.datasets[0]
    subset = template.subsets[0] if template.subsets else template.template
    same = ("batch_size_per_device", "resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_info")
    return {
        **{key: dataset[key] for key in same},
        "total_batch_size": total_batch_size,
        "bucket_no_upscale": template.bucket_no_upscale,
        **{
            key: getattr(subset, key)
            for key in ("color_aug", "flip_aug", "random_crop", "shuffle_caption", "keep_tokens")
        },
        "dataset_dirs": _count_by_folder(images.items, False),
        "reg_dataset_dirs": _count_by_folder(images.items, True),
    }


def _dataset_facts(images: Any, position: int) -> JsonObject:
    dataset = images.datasets[position]
    items = [image for image in images.items if image.dataset == position]
    step, bounds = dataset.bucket_reso_steps, (dataset.min_bucket_reso, dataset.max_bucket_reso)
    # Multiples of the step, as buckets have them.
    smallest, largest = (
        (bounds[0] // step * step, -(-bounds[1] // step) * step) if dataset.enable_bucket else (None, None)
    )
    return {
        # As sd-scripts calls data sets of folders, without a metadata file.
        "is_dreambooth": not any(image.subset.metadata_file for image in items),
        "batch_size_per_device": dataset.batch_size,
        "num_train_images": sum(i.repeats for i in items if not i.is_reg),
        "num_reg_images": sum(i.repeats for i in items if i.is_reg),
        "resolution": dataset.resolution and tuple(dataset.resolution),
        "enable_bucket": dataset.enable_bucket,
        "min_bucket_reso": smallest,
        "max_bucket_reso": largest,
        "resize_interpolation": dataset.resize_interpolation,
        "tag_frequency": tag_frequency(items),
        "bucket_info": _bucket_facts(items) if dataset.enable_bucket else None,
        "subsets": [_subset_facts(members) for members in _group_by_subset(items)],
    }


def _group_by_subset(items: list[Any]) -> list[list[Any]]:
    subsets: dict[int, list[Any]] = {}
    for image in items:
        subsets.setdefault(id(image.subset), []).append(image)
    return list(subsets.values())


def _subset_facts(members: list[Any]) -> JsonObject:
    subset = members[0].subset
    out = {"img_count": len(members), "num_repeats": subset.num_repeats}
    out |= {key: getattr(subset, key) for key in SUBSET}
    folder = os.path.basename(os.path.normpath(subset.image_dir)) if subset.image_dir else None
    if subset.metadata_file:
        named = {"image_dir": folder} if folder else {}
        return out | named | {"metadata_file": os.path.basename(subset.metadata_file)}
    return out | {"image_dir": folder, "class_tokens": subset.class_tokens, "is_reg": subset.is_reg}


def _bucket_facts(items: list[Any]) -> JsonObject:
    counts = Counter()
    for image in items:
        counts[image.fit.bucket] += image.repeats
    errors = [abs(i.fit.bucket[0] / i.fit.bucket[1] - i.size[0] / i.size[1]) for i in items]
    rows = {i: {"resolution": list(size), "count": counts[size]} for i, size in enumerate(sorted(counts))}
    return {"buckets": rows, "mean_img_ar_error": sum(errors) / len(errors) if errors else 0.0}


def _learned_folders(images: Any) -> dict[str, dict[str, int]]:
    """Return {folder name: {"n_repeats", "img_count"}} of all data sets, without regularisation images; a repeated name
    becomes "name (2)".
    """
    out: dict[str, dict[str, int]] = {}
    for position in range(len(images.datasets)):
        learned = [image for image in images.items if image.dataset == position and not image.is_reg]
        for members in _group_by_subset(learned):
            folder, number = _folder(members[0]), 2
            name = folder
            while name in out:
                name, number = f"{folder} ({number})", number + 1
            out[name] = {"n_repeats": members[0].subset.num_repeats, "img_count": len(members)}
    return out


def _count_by_folder(items: list[Any], is_reg: bool) -> dict[str, dict[str, int]]:
    """Return {folder name: {"n_repeats", "img_count"}} of regularisation images, or of the others."""
    counters: dict[str, dict[str, int]] = {}
    for image in items:
        if image.is_reg is is_reg:
            entry = counters.setdefault(_folder(image), {"n_repeats": image.subset.num_repeats, "img_count": 0})
            entry["img_count"] += 1
    return counters


def _folder(image: Any) -> str:
    source = image.subset.metadata_file or image.subset.image_dir or os.path.dirname(image.path)
    return os.path.basename(os.path.normpath(source))

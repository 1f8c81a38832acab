"""All problems of the data at once, before anything heavy is loaded. No torch."""

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image as Pillow

from library.config.dataset import decided
from library.config.problems import SURROGATES, Message, Problem, Report, counted, either, option_name, together
from library.config.run_config import RunConfig
from library.config.sections import EmbeddingRun
from library.config.sections.captions import USUAL_VARIANTS
from library.data import augment, finding, mask_check
from library.data.captions import TRIGGER, with_affixes
from library.data.controls import stored_image_size
from library.data.finding import Survey
from library.data.folders import MAX_MESSAGES_PER_KIND, about_images, capped_by_kind, some
from library.data.images import Image, ImageSet, bucket_rules
from library.data.orientation import orientation
from library.data.pixels import check_file, has_transparency, hides_colours
from library.data.threads import spread
from library.files import LONGEST_NAME

MAX_WHOLE_IMAGES = 500  # images that are read as a whole while somebody fills in a form
MUCH_CUT = 0.2  # share of width or height
MOST_DECODED = 100  # images that are decoded to see whether they hide colours
OPAQUE = (".jpg", ".jpeg", ".bmp")  # formats without transparency
CACHE_ENDING = len("_1024x1024_kind.npz")  # least length that the name of a cache adds to the image's


class Check(NamedTuple):
    """Problems that stop a training, and warnings."""

    problems: list[Problem]
    warnings: list[Problem]
    images: ImageSet | None = None  # the images that were found, even if there are problems
    masks: Message | None = None  # how many images have one, and how much of their area counts


def find_data_problems(config: RunConfig, grid: int, report: Report | None = None) -> Iterator[Problem]:
    """What has to be fixed in the data before a training can start; bucket sides are multiples of `grid` pixels."""
    yield from check_data(config, grid, report).problems


def data_warnings(config: RunConfig, grid: int, report: Report | None = None) -> Iterator[Problem]:
    """Likely mistakes in the data: captions that are not found, images that are not used, and so on."""
    yield from check_data(config, grid, report).warnings


def check_data(config: RunConfig, grid: int, report: Report | None = None, quick: bool = False) -> Check:
    """Check all data once: folders, images, captions, buckets, options that exclude each other.

    With `quick` only headers and ends are read of the images of large data sets, as while somebody fills in a form.
    """
    survey = finding.survey_data(config, report)
    images = [*survey.images.items, *(survey.images.validation.items if survey.images.validation else ())]
    stops, notes = [*capped_by_kind(survey.problems)], list(survey.warnings)
    to_disk = config.cache.cache_latents_to_disk
    stops += _damaged(survey, images, config, report, quick)
    for dataset in survey.images.datasets:
        if dataset.resolution:
            reported = {option for stop in stops for option in stop.options}  # such as by the rules of a dataset file
            stops += [problem for problem in bucket_rules(dataset).problems(grid) if problem.option not in reported]
    stops += _without_the_word(config, images)
    copied = list(mask_check.copies(config, survey))
    masks = mask_check.check_masks(config, survey, report)
    stops += [*(problem for is_error, problem in copied if is_error), *masks.problems]
    if to_disk:
        stops += [*_sharing_a_cache(images), *_too_long_for_a_cache(images), *_closed_to_caches(survey, images)]
    others = survey.other_captions
    bare = [] if config.caption_change.sentences else list(_without_captions(images))
    if bare and others:  # one cause, one message: the one with the option to set
        facts = {"why": others[0], "fix": others[0].fix, "topic": "captions", "code": "no_captions"}
        bare, others = [Problem("", "no image has a caption: {why}", **facts)], others[1:]
    notes = [*bare, *others, *notes, *_about_captions(config, survey), *_about_images(images), *_not_utf_8(images)]
    notes += [*_in_vain(config, survey), *_about_options(config, survey)]
    notes += [*(problem for is_error, problem in copied if not is_error), *masks.warnings]
    return Check(stops, notes, survey.images, masks.text)


def _damaged(
    survey: Survey, images: list[Image], config: RunConfig, report: Report | None, quick: bool
) -> Iterator[Problem]:
    """Images, masks, control and reference images that cannot be decoded. Those with valid cached latents are not
    opened."""
    gone: list[str] = []
    opened: set[str] = set()
    to_disk = config.cache.cache_latents_to_disk
    for image in images:
        folder, name = os.path.split(image.path)
        here = survey.files(folder)
        if name not in here.images:
            gone.append(image.path)
        elif not to_disk or here.known_size(name, image.how.turns(image.path)) is None:
            beside = (image.mask_file, *(path for control in image.controls for path in (control.path, control.mask)))
            # Those without an image header were reported when they were found.
            opened |= {image.path, *(path for path in beside if path and 0 not in stored_image_size(survey, path))}
    doubtful, gone = sorted(opened), sorted({*gone})
    if gone and not to_disk:
        yield about_images("{count} gone, only latents are left; set cache_latents_to_disk: {gone}",
            count=counted(len(gone), "image"), gone=some(gone), fix={"cache_latents_to_disk": True})  # fmt: skip
    whole = not quick or len(doubtful) <= MAX_WHOLE_IMAGES
    reasons = spread(partial(check_file, whole=whole), doubtful, report, Message("checking images"))
    bad = [f"{path} ({reason})" for path, reason in zip(doubtful, reasons, strict=True) if reason]
    if bad:
        yield about_images("{count} cannot be decoded; replace or remove: {bad}",
            count=counted(len(bad), "image"), bad=some(bad, MAX_MESSAGES_PER_KIND))  # fmt: skip


def _sharing_a_cache(images: list[Image]) -> Iterator[Problem]:
    """Images that would share a file of latents, such as photo.png and photo.jpg of one size."""
    known: dict[tuple, str] = {}
    pairs = {}
    for image in images:
        other = known.setdefault((os.path.splitext(image.path)[0], image.size), image.path)
        if other != image.path:
            pairs[other, image.path] = f"{other} and {Path(image.path).name}"
    if pairs:
        yield about_images(
            "these would share one cache file; rename one of each: {pairs}", pairs=some(list(pairs.values()))
        )


def _too_long_for_a_cache(images: list[Image]) -> Iterator[Problem]:
    """Names of images that are too long for the names of their caches."""
    stems = {image.path: os.path.splitext(os.path.basename(image.path))[0] for image in images}
    if long := sorted(
        path for path, stem in stems.items() if len(stem.encode("utf-8", "surrogatepass")) > LONGEST_NAME - CACHE_ENDING
    ):
        yield about_images(
            "{count} with a name too long for a cache file beside it; shorten to {most} bytes: {long}",
            count=counted(len(long), "image"), most=LONGEST_NAME - CACHE_ENDING, long=some(long))  # fmt: skip


def _not_utf_8(images: list[Image]) -> Iterator[Problem]:
    """Names that other programs cannot even write down."""
    if odd := sorted({image.path for image in images if SURROGATES.search(image.path)}):
        yield about_images(
            "{count} whose names are not UTF-8: they are trained, but other programs may not find them; rename them: "
            "{names}", count=counted(len(odd), "file"), names=some(odd))  # fmt: skip


def _closed_to_caches(survey: Survey, images: list[Image]) -> Iterator[Problem]:
    """Read-only folders where latents have to be written."""
    places = ((*os.path.split(image.path), image.how.turns(image.path)) for image in images)
    needed = {folder for folder, name, turned in places if survey.files(folder).known_size(name, turned) is None}
    if closed := sorted(folder for folder in needed if os.path.isdir(folder) and not os.access(folder, os.W_OK)):
        yield Problem("cache_latents_to_disk",
            ": {closed} may not be written to: change its rights, or keep latents in memory with cache_latents",
            closed=some(closed), fix={"cache_latents_to_disk": False, "cache_latents": True})  # fmt: skip


def _without_the_word(config: RunConfig, images: list[Image]) -> Iterator[Problem]:
    """That the trained word of an embedding is in no caption. Tokenizers ignore case."""
    if not isinstance(config, EmbeddingRun) or config.caption_change.sentences or not images:
        return
    word = (config.embedding.token_string or "").lower()
    read = (f"{image.subset.caption_prefix} {image.caption} {image.subset.caption_suffix}" for image in images)
    if word and not any(word in words.lower() for words in read):
        yield about_images(
            "{word} is in none of the captions, so nothing would be trained: write it into them, set caption_prefix to "
            "it, or set use_object_template or use_style_template", word=repr(config.embedding.token_string),
            topic="captions", fix={"caption_prefix": config.embedding.token_string})  # fmt: skip


def _without_captions(images: list[Image]) -> Iterator[Problem]:
    """That no image has a caption of its own: training on class tokens of folders is possible, but rarely intended."""
    learned = [image for image in images if not image.is_reg]
    bare = [i for i in learned if not i.caption.strip() or (not i.caption_file and i.caption == i.subset.class_tokens)]
    if not learned or len(bare) < len(learned):
        return
    endings = either(sorted({image.subset.caption_extension for image in learned}))
    words = sorted({image.subset.class_tokens or "" for image in learned})
    named = some([f"'{name}'" for name in words if name])
    instead = Message("all are trained without words")
    if named:
        others = Message(", and the others without words") if "" in words else ""
        instead = Message("each is trained with the words of its folder, {words}{others}", words=named, others=others)
    yield about_images(
        "no image has a caption: none of {count} has a {endings} file with words beside it, "
        "so {instead}; write captions in the Data set tab, or with: kohya caption",
        count=counted(len(learned), "image"), endings=endings, instead=instead, topic="captions",
        code="no_captions")  # fmt: skip


def _about_captions(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Captions with unused lines, in their own files or in a metadata file."""
    if not survey.unread:
        return
    counts = {name: survey.unread[name] for name in sorted(survey.unread)}
    own, lines = {image.caption_file for image in survey.images.items}, sum(counts.values())
    which = some([f"{name}: {count:,}" for name, count in counts.items()])
    advice = Message("write each caption in one line")
    if not config.cache.text:
        advice = Message("set enable_wildcard to use one of the lines at random, or write each caption in one line")
    in_files = own.issuperset(counts)
    yield about_images(
        "{captions} of several lines, of which only the first is trained on and {lines} not ({which}); {advice}",
        captions=counted(len(counts), "caption file" if in_files else "caption"),
        lines=counted(lines, "line"), which=which, advice=advice, topic="captions",
        fix={"enable_wildcard": True} if in_files and not config.cache.text else {})  # fmt: skip


def _about_images(images: list[Image]) -> Iterator[Problem]:
    yield from _turned(images)
    yield from _cropped(images)
    yield from _transparent(images)
    small = sorted({i.path for i in images if i.fit.resized[0] > i.size[0] * 1.5 or i.fit.resized[1] > i.size[1] * 1.5})
    if small:
        yield about_images("{count} enlarged to more than 1.5 times the size, which blurs: {small}",
            count=counted(len(small), "image"), small=some(small))  # fmt: skip
    huge = sorted({i.path for i in images if i.size[0] * i.size[1] > (Pillow.MAX_IMAGE_PIXELS or 2**30)})
    if huge:
        yield about_images("{count} very large and slow to read; scale them down: {huge}",
            count=counted(len(huge), "image"), huge=some(huge))  # fmt: skip


def _turned(images: list[Image]) -> Iterator[Problem]:
    """Images, control and reference images that are not trained as people see them."""
    stored = {i.path for i in images if not i.how.upright}
    stored |= {control.path for i in images for control in i.controls if not control.how.upright}
    if turned := sorted(path for path in stored if orientation(path) != 1):
        yield about_images(
            "{count} turned or mirrored by an EXIF orientation, which is ignored; set exif_rotation to train them as "
            "they are seen: {turned}", count=counted(len(turned), "image"), turned=some(turned),
            fix={"exif_rotation": True})  # fmt: skip


def _cropped(images: list[Image]) -> Iterator[Problem]:
    """Images that lose much of themselves to the crop."""
    at_random = {i.path for i in images if i.subset.random_crop or i.subset.face_crop_aug_range}
    lost = {i.path: max(i.fit.cut) for i in images if max(i.fit.cut) > MUCH_CUT and i.path not in at_random}
    if not lost:
        return
    worst = sorted(lost, key=lambda path: (-lost[path], path))
    names = some([f"{path} ({round(100 * lost[path])} %)" for path in worst])
    yield about_images(
        "{count} cropped by more than {much} % of their width or height: {names}; crop or pad them yourself, or leave "
        "them out", count=counted(len(lost), "image"), much=round(100 * MUCH_CUT), names=names)  # fmt: skip


def _transparent(images: list[Image]) -> Iterator[Problem]:
    """Cut-outs whose hidden colours are trained."""
    shown = {i.path for i in images if not (i.how.ground or i.subset.alpha_mask or i.mask_file)}
    clear = sorted(path for path in shown if not path.lower().endswith(OPAQUE) and has_transparency(path))
    looked_at = clear[:: -(-len(clear) // MOST_DECODED) or 1]
    abouts = [os.stat(path) for path in looked_at]
    hidden = [path for path, about in zip(looked_at, abouts, strict=True)
              if hides_colours(path, about.st_mtime_ns, about.st_size)]  # fmt: skip
    if not hidden:
        return
    count = counted(len(hidden), "image")
    if len(looked_at) < len(clear):
        count = Message("{count} of {looked_at} that were looked at", count=count, looked_at=len(looked_at))
    yield about_images(
        "{count} with transparent areas, where the colors that the file hides are trained; set transparent_background "
        "to a color, or alpha_mask to leave these areas out: {names}", count=count, names=some(hidden),
        fix={"transparent_background": "white"})  # fmt: skip


def _in_vain(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Options that a dataset file overrides, keys that a metadata file overrides, and shares of less than one image."""
    if names := decided(config) if config.data.dataset_config else []:
        why = Message("{file} says it for all images", file=Path(config.data.dataset_config or "").name)
        if len(names) == 1:
            yield Problem(names[0], "has no effect: {why}", why=why)
        else:
            template, also = "{names} have no effect: {why}", " ".join(names)
            yield Problem("", template, also=also, names=together(map(option_name, names)), why=why, topic="images")
    images = survey.images
    if repeated := [place for dataset in images.datasets for place in dataset.repeated]:
        yield about_images(
            "{places} given again in one [[datasets]] table, where only the first subset of a folder counts: put the "
            "others under a [[datasets]] of their own", places=some(repeated))  # fmt: skip
    listed = [subset for dataset in images.datasets for subset in dataset.subsets if subset.metadata_file]
    for name in ("class_tokens", "cache_info") if config.data.dataset_config else ():
        if any(getattr(subset, name) for subset in listed):
            yield Problem(name, "has no effect beside metadata_file, which has captions and sizes")
    yield from _held_nothing(images)


def _held_nothing(images: ImageSet) -> Iterator[Problem]:
    """Data sets that hold no image out although they have a share for it."""
    held = {image.dataset for image in images.validation.items} if images.validation else set()
    count = Counter(image.dataset for image in images.items if not image.is_reg)
    for position, dataset in enumerate(images.datasets):
        share = dataset.validation_split
        if not share or position in held or not count[position]:
            continue
        so = Message("nothing is validated")
        if len(images.datasets) > 1:
            so = Message("data set {number} holds none out", number=position + 1)
        few = "= {share} of {count} is less than one image; {so}"
        one = "= {share} of {count} holds none out, since one is kept for training and copies stay together; {so}"
        template = few if round(share * count[position]) < 1 else one
        yield Problem("validation_split", template, share=share, count=counted(count[position], "image"), so=so)


def _about_masks(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Options that need masks, where there are none."""
    subsets = [subset for dataset in survey.images.datasets for subset in dataset.subsets]
    masked = any(subset.conditioning_data_dir or subset.alpha_mask for subset in subsets)
    if config.data.masked_loss and not masked and not any(image.mask_file for image in survey.images.items):
        yield Problem("masked_loss", "has no effect: no subset has conditioning_data_dir, and alpha_mask is off")
    asked = [image.path for image in survey.images.items if image.subset.alpha_mask]
    # An inpainting model repaints all of an image without transparency.
    if asked and not config.control_images.inpaints and not any(map(has_transparency, asked)):
        yield Problem("alpha_mask", "has no effect: none of the images has a transparent area, or an alpha channel")


def _about_options(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Options that have no effect with this data."""
    images = [image for image in survey.images.items if not image.is_reg]
    subsets = [subset for dataset in survey.images.datasets for subset in dataset.subsets]
    once = config.cache.text and config.cache.cached_caption_variants == 1
    if once and any(subset.enable_wildcard for subset in subsets):
        yield Problem("enable_wildcard",
            "draws one variant of each caption for the whole training: captions are encoded once; set "
            "cached_caption_variants for more", fix={"cached_caption_variants": USUAL_VARIANTS},
            also="cache_text_encoder_outputs cache_text_encoder_outputs_to_disk")  # fmt: skip
    yield from _about_masks(config, survey)
    if config.data.transparent_background and not any(i.how.ground and has_transparency(i.path) for i in images):
        yield Problem(
            "transparent_background",
            "has no effect: none of the images has a transparent area, or an alpha channel",
        )
    if any(subset.face_crop_aug_range for subset in subsets):
        faces = sum(augment.face_of(image.path) is not None for image in survey.images.items)
        if config.cache.latents:
            yield Problem("face_crop_aug_range", "has no effect with cache_latents")
        elif not faces:
            yield Problem(
                "face_crop_aug_range", "has no effect: no file name ends in _<x>_<y>_<width>_<height> of a face"
            )
    if any(dataset.network_multiplier != 1 for dataset in survey.images.datasets):
        yield about_images(
            "network_multiplier in the dataset config has no effect: adapters are trained at their full strength"
        )
    preserved = any((subset.custom_attributes or {}).get("diff_output_preservation") for subset in subsets)
    if preserved and not config.can_be_left_out:
        why = ": diff_output_preservation has no effect: only a LoRA or LLLite can be left out to ask the base model"
        yield Problem("custom_attributes", why)
    phrase = config.metadata.metadata_trigger_phrase
    read = [with_affixes(image.caption, image.subset) for image in images]
    if phrase and images and not any(phrase.lower() in words.lower() for words in read):
        yield Problem("metadata_trigger_phrase",
            ": '{phrase}' is in none of the captions, so it will not trigger what is trained",
            phrase=phrase)  # fmt: skip
    if unfilled := [image.path for image, words in zip(images, read, strict=True) if TRIGGER in words]:
        yield Problem("metadata_trigger_phrase",
            "is not set, but the captions of {count} contain [trigger], which is learned literally; set it to the "
            "word that replaces [trigger]: {paths}",
            count=counted(len(unfilled), "image"), paths=some(unfilled))  # fmt: skip
    sizes = [dataset.batch_size for dataset in survey.images.datasets]
    if few := sum(len(members) < sizes[key[0]] for key, members in survey.images.buckets().items()):
        yield about_images(
            "{buckets} with fewer images than the batch size; their batches are smaller", buckets=counted(few, "bucket")
        )

"""The captions of the images: where they are read, and how they vary by epoch."""

from dataclasses import dataclass

from library.config.reading import parse_extension, separator
from library.config.run_config import RunConfig
from library.config.schema import opt

# Codes of remarks that no image has a caption, and that another extension would read the captions.
NO_CAPTIONS, UNREAD_CAPTIONS = "no_captions", "unread_captions"


@dataclass(frozen=True, kw_only=True, slots=True)
class Captions:
    """The captions of the images, and how they vary by epoch."""

    caption_extension: str = opt(
        ".caption",
        "The extension of caption files: usually .txt; sd-scripts' default is .caption.",
        parse=parse_extension,
    )
    shuffle_caption: bool = opt(
        False,
        "Shuffle a caption's tags each time, so that order does not matter. For tags only.",
        label="Shuffle captions",
    )
    keep_tokens: int = opt(0, "This many leading tags are neither shuffled nor dropped. 1 for a trigger word.", min=0)
    caption_dropout_rate: float = opt(
        0.0,
        "How often an image is trained without caption (0 to 1). 0.05 to 0.1 for styles.",
        label="Caption dropout",
        min=0.0,
        max=1.0,
    )
    caption_dropout_every_n_epochs: int = opt(
        0,
        "Train every Nth epoch without captions. 0: never, which is usual.",
        label="Caption dropout every N epochs",
        min=0,
    )
    caption_tag_dropout_rate: float = opt(
        0.0,
        "How often a tag is left out of a caption (0 to 1). 0.1 helps against overfitting.",
        label="Tag dropout",
        min=0.0,
        max=1.0,
    )
    caption_prefix: str | None = opt(None, "Text in front of every caption, such as the trigger word.")
    caption_suffix: str | None = opt(None, 'Text after every caption, such as ", photo".')
    enable_wildcard: bool = opt(
        False,
        "{a|b} in captions picks one at random; of several lines, one line is picked.",
        label="Wildcards",
    )
    caption_separator: str = opt(
        ",", "What separates the tags of a caption.", label="Tag separator", parse=separator, advanced=True
    )
    keep_tokens_separator: str = opt(
        "", "Tags before this mark (such as |||) are neither shuffled nor dropped.", advanced=True
    )
    secondary_separator: str | None = opt(None, "Tags joined by this are shuffled and dropped as one.", advanced=True)
    token_warmup_min: int = opt(
        1,
        "How many tags a caption has at the start of the tag warm-up.",
        label="Tag warm-up start",
        min=0,
        advanced=True,
    )
    token_warmup_step: float = opt(
        0.0,
        "The step from which all tags are used. Below 1: a share of the training.",
        label="Tag warm-up steps",
        min=0.0,
        advanced=True,
    )


VARIED = ("shuffle_caption", "caption_tag_dropout_rate")  # options that make variants of a caption
USUAL_VARIANTS = 4


def clashes_with_cache(run: RunConfig) -> dict[str, str]:
    """Return options that change captions by step in ways that cannot be encoded once -> a template of the problem."""
    never = {"token_warmup_step": "cannot be used with cache_text_encoder_outputs: switch one of them off"}
    if run.cache.cached_caption_variants > 1:
        return never
    needs = (
        "cannot be used with cache_text_encoder_outputs while each caption has one variant: set "
        "cached_caption_variants above 1, or switch one of them off"
    )
    return dict.fromkeys(VARIED, needs) | never

"""Options of textual inversion: trains vectors of new words; the model stays frozen."""

from collections.abc import Iterator
from dataclasses import dataclass

from library.config.fixes import exclusive
from library.config.problems import Problem
from library.config.run_config import CaptionChange, RunConfig
from library.config.schema import opt
from library.config.sections.learning import Optim

# Words for an image in a caption: those of sd-scripts' object templates, with their frequencies.
OBJECT_SIGHTS = {
    "a photo of": "a/the/my/one/a clean/the clean/a dirty/a cool/the cool/a nice/the nice/a small/the small/the weird/"
    "the large",
    "a cropped photo of": "a/the",
    "a close-up photo of": "a/the",
    "a good photo of": "a/the",
    "a rendition of": "a/the",
    "a dark photo of": "the",
    "a bright photo of": "the",
    "a rendering of": "a",
    "the photo of": "a",
}
STYLE_SIGHTS = (
    *("a painting", "a rendering", "the painting", "a picture", "a rendition"),
    *(f"a {kind} painting" for kind in ("cropped", "cropped", "close-up", "close-up", "clean", "dirty", "dark")),
    *(f"a {kind} painting" for kind in ("cool", "bright", "good", "nice", "small", "weird", "large")),
)
OBJECTS = tuple(f"{sight} {article} {{}}" for sight, words in OBJECT_SIGHTS.items() for article in words.split("/"))
STYLES = tuple(f"{sight} in the style of {{}}" for sight in STYLE_SIGHTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """The words whose vectors are trained."""

    token_string: str | None = opt(
        None, "The new word that stands for your subject in captions and prompts.", label="New word"
    )
    init_word: str | None = opt(
        None, "A known word of similar meaning to start from. Empty: random values.", label="Begin from"
    )
    num_vectors_per_token: int = opt(
        1, "How many vectors the word has. 1 to 8 are usual; more learn more detail.", label="Vectors", min=1, max=75
    )
    weights: str | None = opt(None, "An embedding file to continue from.", label="Continue from", kind="file")
    use_object_template: bool = opt(
        False, "Instead of captions, use ready sentences about an object.", label="Sentences about an object"
    )
    use_style_template: bool = opt(
        False, "Instead of captions, use ready sentences about a style.", label="Sentences about a style"
    )

    @property
    def words(self) -> tuple[str, ...]:
        word = self.token_string or ""
        return (word, *(f"{word}{number}" for number in range(1, self.num_vectors_per_token)))

    @property
    def caption_change(self) -> CaptionChange:
        """Replace the word by all its vectors, and captions by template sentences if enabled."""
        words = " ".join(self.words)
        sentences = OBJECTS if self.use_object_template else STYLES if self.use_style_template else ()
        replaced = self.token_string or "" if len(self.words) > 1 else ""
        return CaptionChange(replaced, words, tuple(sentence.format(words) for sentence in sentences))

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        if not self.token_string:
            yield Problem("token_string", "is not set: write the word to train, such as sks-cat")

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Require one word, and only one kind of sentence."""
        word = self.token_string or ""
        if len(word.split()) > 1 or word != word.strip():
            yield Problem(
                "token_string",
                "must be one word without spaces: write {word}",
                word="-".join(word.split()),
                fix={"token_string": "-".join(word.split())},
            )
        if self.use_object_template and self.use_style_template:
            yield exclusive(run, "use_object_template", "use_style_template")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingOptim(Optim):
    """Like `Optim`, with the usual learning rate of word vectors."""

    learning_rate: float = opt(2e-6, "5e-4 is usual, 1 for Prodigy. Lower it if images are distorted.", min=0.0)

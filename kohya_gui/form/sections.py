"""The sections of the form: their order, titles, and purposes in one sentence each."""

from collections.abc import Iterable

# heading -> (section, title, sentence)
GROUPS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Speed and memory",
        (
            ("compile", "Torch Compile Settings", "Faster steps; compiling at the start takes seconds to minutes."),
            ("memory", "Memory", "Options that lower GPU memory use at the cost of speed."),
            ("precision", "Precision", "Number formats of the training and of the base model."),
            ("cache", "Caching", "Encode images and captions once, before training."),
            ("distributed", "Several GPUs", "Number of processes, and the GPUs that they use."),
        ),
    ),
    (
        "Model and data",
        (
            ("model", "Model", "The base model, its text encoders and VAE."),
            ("data", "Images", "Resolution, buckets, batch size and image augmentation."),
            ("captions", "Captions", "Caption files, tag shuffling and caption dropout."),
        ),
    ),
    (
        "Training",
        (
            ("network", "Adapter", "Type, rank and alpha of the LoRA or other adapter."),
            ("embedding", "New word", "The new word: its starting values, and the sentences that it is trained in."),
            ("control", "Control network", "The small network that learns to follow control images."),
            ("optim", "Optimizer", "Optimizer, learning rate and scheduler."),
            ("steps", "Steps", "Number of steps or epochs, seed and resuming."),
            ("noise", "Noise", "Noise and timestep settings."),
            ("loss", "Loss", "Loss function and loss weighting."),
            ("validation", "Validation", "Images excluded from training, to measure the held-out loss."),
        ),
    ),
    (
        "Output",
        (
            ("save", "Saving", "When files are saved, in which precision, and how many are kept."),
            ("sample", "Sample images", "Sample images that are generated during training."),
            ("metadata", "Metadata", "Metadata that is saved in the file."),
            ("hub", "Hugging Face", "Upload the results to Hugging Face."),
            ("log", "Logs", "TensorBoard, W&amp;B and the console output."),
        ),
    ),
)
# The order of the sections.
POSITIONS = {section: at for at, (section, *_) in enumerate(entry for _, group in GROUPS for entry in group)}


def visibility(families: Iterable[str]) -> str:
    """Return the style rules by which a family's form hides fields that it does not have, or that have no effect there,
    and sections that would unfold to nothing, as all that the family has there is rarely used."""
    rules = []
    for name in families:
        form = f'.settings:has(input[value="{name}"]:checked)'
        its_fields = f'.field:is(.only-{name}, :not([class*="only-"])):is(:not(.advanced), .changed, .led)'
        rules += [
            f'{form} [class*="only-"]:not(.only-{name})',
            f'{form}:not(:has(input[name="advanced"]:checked)) .section:not(:has(.grid > :not(.field), {its_fields}))',
        ]
    return f"<style>{', '.join(rules)} {{ display: none; }}</style>"

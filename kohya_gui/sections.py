"""The sections of the form: their order, what a person calls them, and what each is for in one sentence."""

# heading -> (section, title, sentence)
GROUPS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Speed and memory",
        (
            ("compile", "Torch Compile Settings", "Faster steps after some seconds of compiling at the start."),
            ("memory", "Memory", "What makes a training fit, each at the price of some speed."),
            ("precision", "Precision", "The kind of numbers: fewer bits need less memory."),
            ("cache", "Caching", "Encode images and captions once, before training."),
            ("distributed", "Several GPUs", "How many processes train together, and on which cards."),
        ),
    ),
    (
        "What is learned",
        (
            ("model", "Model", "How the checkpoint is read and asked."),
            ("data", "Images", "Sizes, buckets, batches, and how images vary."),
            ("captions", "Captions", "The words that go with the images, and how they vary."),
        ),
    ),
    (
        "How it is learned",
        (
            ("network", "Adapter", "The kind of adapter, its strength, and where it sits."),
            ("optim", "Optimizer", "The rule of a step, and how the learning rate changes."),
            ("steps", "Steps", "How long it trains, and where it starts."),
            ("noise", "Noise", "What is added to an image before the model has to find it again."),
            ("loss", "Loss", "How wrong an answer counts."),
            ("validation", "Validation", "Images held back, to see whether it still learns."),
        ),
    ),
    (
        "What comes out",
        (
            ("save", "Saving", "When files are written, in which precision, and how many are kept."),
            ("sample", "Sample images", "Images drawn on the way, to see how it goes."),
            ("metadata", "Metadata", "What the file says about itself."),
            ("hub", "Hugging Face", "Upload the result."),
            ("log", "Logs", "TensorBoard, W&amp;B, and what is printed."),
        ),
    ),
)

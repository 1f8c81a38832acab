"""What a training does outside of its steps, where others decide by it."""

from library.config.problems import Text

CACHING_LATENTS = Text("caching latents")
CACHING_CAPTIONS = Text("caching captions")
ENCODING_PROMPTS = Text("encoding the sample prompts")
GENERATING_SAMPLES = Text("generating samples")
VALIDATING = Text("validating")

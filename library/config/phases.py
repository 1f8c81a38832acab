"""Phases of a training outside its steps that other code tests for."""

from library.config.problems import Message

CACHING_LATENTS = Message("caching latents")
CACHING_CAPTIONS = Message("caching captions")
ENCODING_PROMPTS = Message("encoding the sample prompts")
GENERATING_SAMPLES = Message("generating samples")
VALIDATING = Message("validating")

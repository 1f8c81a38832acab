"""The training tabs: forms generated from the options, their messages, and starting a training."""

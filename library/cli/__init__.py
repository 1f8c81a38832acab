"""The command line: `kohya`, the training scripts, and pages generated from the options."""

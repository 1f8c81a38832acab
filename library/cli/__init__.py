"""The command line: `kohya`, the four training scripts, and pages written from the options."""

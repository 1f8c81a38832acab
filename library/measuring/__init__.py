"""Common parts of bench, probe, autotune and check: candidate settings, how a candidate is timed, and its result."""

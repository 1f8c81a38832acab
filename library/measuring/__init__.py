"""What bench, probe, autotune and check share: settings to try, how a try is timed, and what came of it."""

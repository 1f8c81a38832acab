"""When a training compiles, and with which settings: the plan, the worker process, and choices by measured time."""

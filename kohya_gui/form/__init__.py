"""The training tabs: a form made from the options, what is said about it, and how it is started."""

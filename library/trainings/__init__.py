"""What page, shell and HTTP do with trainings: check and queue them, and reopen, resume, compare and remove runs.

Unlike `library.runs`, this package knows configs and families. It loads quickly: no torch.
"""

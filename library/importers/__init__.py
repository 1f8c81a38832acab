"""Convert settings of other trainers to a config of this one, with a report on every key, and export them again."""

from library.importers.adapter_file import with_header
from library.importers.builder import Configs
from library.importers.files import (
    FLAT,
    SUFFIXES,
    dataset,
    differences,
    import_content,
    import_file,
    is_dataset,
    of_others,
    parse,
    refuse_data,
    script_in_name,
)
from library.importers.kohya_export import export
from library.importers.kohya_launch import launch
from library.importers.kohya_ss import tab_title
from library.importers.result import Imported, KeyOutcome

__all__ = [
    "FLAT",
    "SUFFIXES",
    "Configs",
    "KeyOutcome",
    "Imported",
    "dataset",
    "differences",
    "export",
    "is_dataset",
    "launch",
    "import_file",
    "script_in_name",
    "of_others",
    "parse",
    "import_content",
    "refuse_data",
    "tab_title",
    "with_header",
]

"""Convert settings of other trainers to a config of this one, with a report on every key, and export them again."""

from library.importers.adapter_file import with_header
from library.importers.builder import Configs
from library.importers.command_line import is_command
from library.importers.files import (
    FLAT,
    SUFFIXES,
    compare_configs,
    convert_foreign_dataset,
    import_content,
    import_file,
    is_foreign_config,
    is_foreign_dataset,
    parse_file,
    refuse_dataset,
    script_in_name,
)
from library.importers.kohya_export import export
from library.importers.kohya_launch import read_launch_settings
from library.importers.kohya_ss import tab_title
from library.importers.result import Imported, KeyOutcome

"""What every room stands on, and what knows nothing of any of them.

Errors that are told in one line, configs from TOML and ``--set``, the progress bar, files that are
either absent or whole, seeds derived by name, processes told apart, and the doors of packages
(:mod:`shards.base.door`). Nothing here imports a sibling; nothing here waits for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.base.atomic import (
        append_line,
        canonical_json,
        discard_leftovers,
        fsync_path,
        make_folders,
        publish_folder,
        sha256_file,
        whole_lines,
        write_bytes_atomic,
        write_json_atomic,
    )
    from shards.base.configuration import (
        flatten,
        from_mapping,
        merge,
        nested,
        parse_override,
        read_toml,
        resolve,
        to_mapping,
    )
    from shards.base.console import (
        Bar,
        LogFormatOption,
        aligned,
        command_app,
        is_first_process,
        progress_bar,
        run_command,
        stderr,
        use_log_format,
        without_library_bars,
    )
    from shards.base.errors import (
        GdistillError,
        IntegrityError,
        UsageError,
        did_you_mean,
        first_line,
        visible,
    )
    from shards.base.folder_lock import exclusive, is_held, require_writable
    from shards.base.names import path_inside, safe_name
    from shards.base.process_identity import has_ended, this_process
    from shards.base.seeding import derive_seed, generator
    from shards.base.settings_table import Section, settings_app
    from shards.base.version_stamp import code_version

__getattr__, __dir__ = open_door(__name__, __file__)

"""The console command ``speechbrain-rev``.

Each subcommand imports what it needs when it runs, so that ``--help`` is there at once.
"""

from speechbrain_rev.cli.command import main, run_script

__all__ = ["main", "run_script"]

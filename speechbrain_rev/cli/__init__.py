"""The console command ``speechbrain-rev``.

Each subcommand imports what it needs when it runs, so that ``--help`` is there at once.
"""

from speechbrain_rev.cli.command import main, run_script
from speechbrain_rev.cli.spelling import ArgumentParser

__all__ = ["ArgumentParser", "main", "run_script"]

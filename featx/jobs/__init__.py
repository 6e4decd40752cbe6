"""Jobs of the command: one module for each job, which registers its declaration.

In: a checked `Config`, and the same config as the user gave it, in YAML.
Out: the exit code; files in `out`, the result on stdout, messages on stderr.
Names for others: those exported here, and `extract.extract`, `stats.stats`, `export.export_store`
and `report.write_report`, which `featx` exports.
"""

from featx.jobs.base import JOBS, Input, Job, check, config_of_call, run, unread

__all__ = ["JOBS", "Input", "Job", "check", "config_of_call", "run", "unread"]

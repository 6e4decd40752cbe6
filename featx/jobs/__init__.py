"""What the command can do: one module for each job, with `run(config, config_yaml) -> int`.

In: a checked `Config`, and the same config as the user gave it, in YAML.
Out: the exit code; files in `out`, the result on stdout, messages on stderr.
Names for others: `extract.extract`, `stats.stats`, `export.export_store` and `report.write_report`,
which `featx` exports; `__main__` calls `run` of the module that `job` names.
"""

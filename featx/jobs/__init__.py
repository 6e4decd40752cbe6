"""What the command can do: one file a job, each with `run(config, config_yaml) -> exit code`."""

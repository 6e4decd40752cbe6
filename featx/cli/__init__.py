"""The command line: overrides are composed to a config, and layers are printed as a table.

In: the arguments of `python -m featx` and the YAML files of conf/.
Out: the composed config, the help text, and tables as text.
Names for others: `hydra_config` (all of it), `overrides.read_command_line`,
`layer_table.layer_table` and `layer_table.layer_rows`.
"""

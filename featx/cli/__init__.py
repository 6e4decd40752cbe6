"""The command line: composition by Hydra, overrides, tables of layers."""

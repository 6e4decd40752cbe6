"""Reductions: functions from a captured tensor to the stored row, computed on the device.

Each is registered under its name of the option `reduce`, with its options; no module imports torch
before it runs. pca and whiten are bound by `featx.layers.projection`, which has their statistics.
"""

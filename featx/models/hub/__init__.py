"""Checkouts with a hubconf.py: where they lie, and the models that their functions build.

`featx.models.libraries.hub` makes backbones of them.
"""

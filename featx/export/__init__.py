"""A store in other formats: one file a format, each of which says only what its files hold.

selection.py      which rows and layers, and their values in blocks
base.py           Format: what a format has to write; File: one of its files
run.py            the bookkeeping: what was begun, what is there, progress, refusals
source_images.py  where the pictures of a store's rows lie
"""

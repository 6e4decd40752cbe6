"""Models of open_clip: where their weights come from, and their image towers.

`featx.models.libraries.open_clip` puts them together. open_clip itself is imported inside functions
only.
"""

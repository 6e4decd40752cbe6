"""Models of transformers: their folders, their families, their image processors.

`featx.models.libraries.transformers` puts them together. transformers itself is imported inside
functions only.
"""

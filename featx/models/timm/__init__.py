"""Models of timm: their creation, their weights, and the backbones that they become.

`featx.models.libraries.timm` puts them together. timm itself is imported inside functions only.
"""

"""Models of torchvision: their creation, their weights, and their transforms.

`featx.models.libraries.torchvision` puts them together. torchvision itself is imported inside
functions only.
"""

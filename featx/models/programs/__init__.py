"""Programs of torch.export: their archives, and the modules that run them.

`featx.models.libraries.export` makes backbones of them.
"""

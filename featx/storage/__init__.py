"""Files and objects that appear whole or not at all: a disk, or a bucket that speaks S3.

In: a path or an s3:// URL, and bytes. Out: committed files; errors are `OSError`s with an errno.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

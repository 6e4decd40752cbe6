"""Report of a store (job=report) and of predictions (job=predict), each as one HTML file.

In: a checked config, the store that it names, and `probe.json` with its predictions if they exist;
or the predictions of new images.
Out: a page that loads nothing from elsewhere, with thumbnails of images that are read again.
Names for others: those in `__init__.pyi`.
A module computes the content of one section, which a template in page/ renders.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""job=report: a store as one HTML page that loads nothing from elsewhere.

provenance.py          origin: model, data, runs, rows by class
throughput.py          speed of the runs
failures.py            failed rows by reason
thumbnails.py          small images of rows, up to a limit
layer_statistics.py    statistics of each layer over some rows
embedding_maps.py      PCA and t-SNE of each layer
nearest_neighbours.py  nearest rows of a few images
probe_results.py       contents of probe.json
layer_similarity.py    linear CKA between the layers
page.py                renders all of it with page/template.html into one file
run.py                 the job from config to file
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

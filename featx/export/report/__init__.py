"""job=report: a store as one HTML page that loads nothing from elsewhere.

run.py                 the job from config to file
page.py                contents of the page, and its data for the template page/report.html
html.py                rendering of a template into one file
probe_results.py       contents of probe.json
predictions_file.py    contents of probe/predictions.csv
charts.py              confusion matrix, classes with errors, CKA, few-shot curves
failures.py            failed rows by reason
layer_statistics.py    statistics of each layer over some rows
layer_similarity.py    linear CKA between the layers
embedding_plots.py     PCA and t-SNE of each layer
near_duplicates.py     pairs of rows that are almost equal
nearest_neighbours.py  nearest neighbours of a few images
provenance.py          origin: model, data, runs, rows by class
throughput.py          speed of the runs
thumbnails.py          small images of rows, up to a limit
matrices.py            geometry and colours of matrices and lines
redaction.py           removal of absolute paths
prediction_page.py     page of job=predict
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

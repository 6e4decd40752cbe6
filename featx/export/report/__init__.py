"""A store as one HTML page that needs nothing else: job=report.

provenance.py          what the store says of itself: model, data, runs, rows by class
throughput.py          what it says of time
failures.py            failed rows by reason
thumbnails.py          small pictures of rows, within a limit
layer_statistics.py    statistics of each layer over some rows
embedding_maps.py      PCA and t-SNE of each layer
nearest_neighbours.py  nearest rows of a few pictures
probe_results.py       probe.json
representation_similarity.py  linear CKA between the layers
page.py                all of it through page/template.html into one file
run.py                 the job from config to file
"""

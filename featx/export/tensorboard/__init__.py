"""TensorBoard output of a run: events, histograms, graph and embedding projector."""

"""What TensorBoard shows of a run: events, histograms, the projector."""

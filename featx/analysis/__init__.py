"""What features tell: statistics, attributions, probes, predictions, neighbours, similarity."""

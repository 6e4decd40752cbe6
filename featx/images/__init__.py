"""From an image's bytes to batches of pixels: decoded, guarded, ordered."""

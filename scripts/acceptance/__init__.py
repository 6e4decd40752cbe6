"""Steps of scripts/gpu_acceptance."""

"""Moments of a layer over a whole data set: summed, merged, kept, and used to project."""

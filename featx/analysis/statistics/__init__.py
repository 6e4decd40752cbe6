"""Statistics of a layer over a data set: their computation, files, PCA and Fréchet distance."""

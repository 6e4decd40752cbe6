"""Statistics of a layer over a data set: count, mean and scatter, their files, and what follows
from them."""

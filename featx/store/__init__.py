"""The chunked HDF5 store: written once and whole, read by plain h5py."""

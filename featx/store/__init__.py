"""The HDF5 store: written part by part, verified, repaired, packed, read by rows or keys.

In: rows of features with their status and checksums. Out: a folder that plain h5py can read.
Reading needs numpy and h5py only.
Names for others: `reader.FeatureStore` and `reader.open`, `session.StoreSession`,
`part_builder.PartBuilder`, `manifest`, `listing`, `heartbeat`, `layout` (every name of the format).
"""

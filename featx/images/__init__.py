"""From encoded bytes to batches of pixels, in threads that no image can crash or hang.

In: a `Source`, its `Listing`, and `Preprocess`, the preprocessing of the weights.
Out: `Batch` objects, (B, 3, H, W), in the order of the listing, with the failures of their rows.
Names for others: `loader.Loader`, `decode_settings.DecodeSettings`, `preprocess.Preprocess`,
`fault_tolerant_decode.FaultTolerantDecoder`, `crash_journal.CrashList`.
"""

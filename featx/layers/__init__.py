"""One forward pass seen from inside: trace it, select layers, attach hooks, reduce tensors.

In: a `torch.nn.Module` and names of layers. Out: the captured tensors, reduced and cast while the
pass runs; the module is left as it was found.
Names for others: `capture.capture` (`featx.capture`), `tracer.trace`, `selection.select`,
`trace.CapturePoint`, `capture_hooks.CaptureHooks`, `reductions.reduction`, `projection`.
"""

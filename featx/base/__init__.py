"""Helpers that know nothing of features: machine limits, devices, console, processes, text.

In: numbers, texts, paths and tensors. Out: the same; messages go to stderr, results to stdout.
Names for others: every public name of its modules, above all `console.log_message`,
`console.print_result`, `progress.Progress`, `machine.num_cpus`, `devices.choose_device`,
`fingerprint.digest`, `supervisor.supervised` and `thread_pool.ReplaceableThreadPool`.
"""
